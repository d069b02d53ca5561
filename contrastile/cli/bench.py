"""`contrastile bench loss`: time and memory of the losses beside the dense formula and public packages.

The sub-verb `step` is declared in `bench_step.py`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastile.cli import bench_step

if TYPE_CHECKING:
    from contrastile.bench.peers import Case

UNITS = {"": 1, "k": 2**10, "M": 2**20, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
LOSSES = ("clip", "siglip", "infonce")
SECONDS, SECONDS_QUICK = 4.0, 0.5


def add_to(verbs: Any) -> None:
    """Declare the verb, its sub-verb and its arguments."""
    bench = verbs.add_parser("bench", help="time and memory, beside what people run today")
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    parser = kinds.add_parser(
        "loss",
        help="the losses, forward and backward",
        description="Without sizes, features, dtype, losses or workspace: everything that this device is judged by. "
        "Under torchrun, the exchanges between its ranks.",
    )
    parser.add_argument("--csv", metavar="FILE", help="write rows there, behind those that it has; its folder is made")
    parser.add_argument("--sizes", nargs="+", metavar="B", help="rows, such as 64k or 1M")
    parser.add_argument("--features", nargs="+", type=int, metavar="D", help="features per row")
    parser.add_argument("--dtype", help="bf16, fp16, fp32 or fp64")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, metavar="LOSS", help=", ".join(LOSSES))
    parser.add_argument("--workspace", nargs="+", metavar="BYTES", help="contrastile's, such as 2GiB")
    parser.add_argument("--precision", choices=("high", "highest"), help="of float32 products (default: highest)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="public packages too")
    parser.add_argument("--seconds", type=float, help="how long each may be measured (default: 4)")
    parser.add_argument("--once", action="store_true", help="one step of contrastile's alone, for sizes of minutes")
    parser.add_argument("--quick", action="store_true", help="few and small sizes, half a second for each")
    parser.set_defaults(verb=run)
    bench_step.add_to(kinds)


def run(arguments: argparse.Namespace) -> int:
    """Measure, printing each result when it is there; 1 if a result of contrastile's own was wrong or failed."""
    from contextlib import nullcontext

    # a mistake is told before anything heavy is imported
    _words(arguments)
    places(arguments, "csv")

    import torch

    from contrastile.bench.loss import Bench, suite
    from contrastile.bench.measure import Ledger, Machine, busy
    from contrastile.train.provenance import signature

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _run_on_ranks(arguments)
    device = torch.device(device_of(arguments.device))
    cases = _cases(arguments, suite(device, quick=arguments.quick))
    seconds = arguments.seconds or (SECONDS_QUICK if arguments.quick else SECONDS)
    with Ledger(Path(arguments.csv)) if arguments.csv else nullcontext() as ledger:
        print("\n".join(filter(None, (signature(device), busy(device)))))
        bench = Bench(Machine.of(device, seconds), arguments.peers, lambda line: print(line, flush=True), ledger)
        if arguments.once:
            bench.head()
            for case in cases:
                bench.once(case)
        else:
            bench.measure(cases)
    if arguments.csv:
        print(f"rows: {arguments.csv}")
    return 0 if bench.right else 1


def _run_on_ranks(arguments: argparse.Namespace) -> int:
    """The same for several ranks, of which the first one speaks and writes."""
    from contextlib import nullcontext

    import torch

    from contrastile.bench.measure import Ledger, Machine
    from contrastile.bench.ranks import ExchangeRow, RankBench, grouped, suite
    from contrastile.train.provenance import signature
    from contrastile.train.ranks import Ranks

    device = torch.device(device_of(arguments.device))
    cases = _cases(arguments, suite(device, quick=arguments.quick))
    ranks = Ranks.of_environment(device.type)
    seconds = arguments.seconds or (SECONDS_QUICK if arguments.quick else SECONDS)
    first = ranks.rank == 0

    def say(line: str) -> None:
        if first:
            print(line, flush=True)

    with (
        grouped(device),
        Ledger(Path(arguments.csv), ExchangeRow) if arguments.csv and first else nullcontext() as ledger,
    ):
        say(f"{ranks.size} ranks on {signature(device)}")
        bench = RankBench(Machine.of(device, seconds), ranks, arguments.peers, say, ledger)
        bench.measure(cases)
    return 0 if bench.right else 1


def places(arguments: argparse.Namespace, *names: str) -> None:
    """Where results go is there, before there are any; of several ranks the first one writes them."""
    from contrastile.train.folder import make_way

    if int(os.environ.get("RANK", "0")) == 0:
        for name in names:
            if path := getattr(arguments, name):
                make_way(name, path)


def device_of(name: str) -> str:
    """ "cpu" or "cuda"; "auto" is the better one that is there."""
    import torch

    if known_device(name) == "cuda" and not torch.cuda.is_available():
        raise _unseen()
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def known_device(name: str) -> str:
    """A device as the bench names it; torch says later whether it is there, where that takes torch to know."""
    from contrastile._wrong import one_of
    from contrastile.train.settings import for_cpus_alone

    one_of("device", name, ("auto", "cpu", "cuda"), "Leave it out for the default.")
    if name == "cuda" and for_cpus_alone():
        raise _unseen()
    return name


def _unseen() -> ValueError:
    from contrastile._wrong import wrong

    return wrong("device", "be one that torch sees", "cuda", "Install torch for CUDA, or take cpu.")


def _words(arguments: argparse.Namespace) -> None:
    """Raises ValueError where a word that needs no torch to be read is none."""
    from contrastile._wrong import wrong

    known_device(arguments.device)
    if arguments.seconds is not None and arguments.seconds <= 0:
        raise wrong("seconds", "be above 0", arguments.seconds, "Leave it out for the default.")
    if min(arguments.features or (1,)) < 1:
        raise wrong("features", "be at least 1", min(arguments.features), "Such as 512.")
    for name in ("sizes", "workspace"):
        for text in getattr(arguments, name) or ():
            number(name, text)
    if arguments.dtype is not None:
        _dtype(arguments.dtype)


def _cases(arguments: argparse.Namespace, standard: list[Case]) -> list[Case]:
    """The device's own list, or everything that was named, crossed with the defaults of what was not."""
    from contrastile.bench.peers import Case

    asked = (
        arguments.sizes,
        arguments.features,
        arguments.dtype,
        arguments.losses,
        arguments.workspace,
        arguments.precision,
    )
    if asked == (None,) * len(asked):
        return standard
    sizes = [number("sizes", size) for size in arguments.sizes or ()]
    workspaces = tuple(number("workspace", size) for size in arguments.workspace or ())
    return [
        Case(loss, b, d, _dtype(arguments.dtype or standard[0].dtype), workspaces or standard[0].workspaces, precision)
        for loss in arguments.losses or ["clip"]
        for b in sizes or sorted({case.b for case in standard if case.loss == loss})
        for d in arguments.features or sorted({case.d for case in standard if case.loss == loss})
        for precision in [arguments.precision or "highest"]
    ]


def number(name: str, text: str) -> int:
    """A size as people write it.

    >>> number("sizes", "64k"), number("workspace", "2GiB")
    (65536, 2147483648)
    """
    from contrastile._wrong import wrong

    digits = text.rstrip("kMGKiB")
    unit = text[len(digits) :]
    if not digits.isdecimal() or int(digits) == 0 or unit not in UNITS:
        raise wrong(
            name, "be whole numbers above 0, perhaps with a unit", repr(text), "Such as 4096, 64k, 1M, 192MiB or 2GiB."
        )
    return int(digits) * UNITS[unit]


def _dtype(name: str) -> str:
    from contrastile._wrong import one_of

    one_of("dtype", name, (*DTYPES, *DTYPES.values()), "bf16 is what most training uses.")
    return DTYPES.get(name, name)
