"""`contrastile bench loss` and `bench step`: time and memory of losses and of whole steps, beside public packages."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from contrastile.bench.peers import Case

UNITS = {"": 1, "k": 2**10, "M": 2**20, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
LOSSES = ("clip", "siglip", "infonce")
# seconds per measurement: of a loss, of a way to take a step; and both with --quick
SECONDS, QUICK_SECONDS = {"loss": 4.0, "step": 20.0}, {"loss": 0.5, "step": 2.0}
LONGEST = 600.0
# options of `bench step` for one process only
ONE_PROCESS = ("optimizer", "seconds", "longest", "within")
FIGURES = (".svg", ".png", ".pdf")


def add_to(verbs: Any) -> None:
    """Declare the verb, its sub-verbs and their arguments."""
    bench = verbs.add_parser("bench", help="time and memory, beside what people run today")
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    loss = kinds.add_parser(
        "loss",
        help="the losses, forward and backward",
        description="Without sizes, features, dtype, losses or workspace: everything that this device is judged by. "
        "Under torchrun, the exchanges between its ranks.",
    )
    loss.add_argument("--sizes", nargs="+", metavar="B", help="rows, such as 64k or 1M")
    loss.add_argument("--features", nargs="+", type=int, metavar="D", help="features per row")
    loss.add_argument("--dtype", help="bf16, fp16, fp32 or fp64")
    loss.add_argument("--losses", nargs="+", choices=LOSSES, metavar="LOSS", help=", ".join(LOSSES))
    loss.add_argument("--workspace", nargs="+", metavar="BYTES", help="contrastile's, such as 2GiB")
    loss.add_argument("--precision", choices=("high", "highest"), help="of float32 products (default: highest)")
    loss.add_argument("--once", action="store_true", help="one step of contrastile's alone, for sizes of minutes")
    loss.add_argument("--profile", action="store_true", help="under torchrun: also where the time of a step goes")
    loss.add_argument("--seconds", type=float, help="how long each may be measured (default: 4)")
    loss.add_argument("--quick", action="store_true", help="few and small sizes, half a second for each")
    loss.set_defaults(verb=run_loss)
    step = kinds.add_parser(
        "step",
        help="whole training steps: towers, loss, gradients",
        description="CLIPs with random weights on made-up pairs: the plain step, accumulation, and gradient caches. "
        "Under torchrun: the four ways to compute the loss across ranks.",
    )
    step.add_argument("--models", nargs="+", metavar="NAME", help="vit-b-16, vit-l-14 or tiny")
    step.add_argument("--sizes", nargs="+", metavar="B", help="pairs per step, such as 8k; of all ranks together")
    step.add_argument("--sub-batch", type=int, metavar="N", help="pairs encoded at once (default: the model's)")
    step.add_argument(
        "--ways",
        nargs="+",
        metavar="WAY",
        help="such as plain, retain-0, GradCache; pool-0@64k,256k: there only; under torchrun such as ring-tiles",
    )
    step.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="autocast's; fp32 is without (default: bf16)")
    step.add_argument("--optimizer", action="store_true", help="AdamW's step too")
    step.add_argument("--longest", type=float, default=LONGEST, help="seconds a step may take (default: 600)")
    step.add_argument(
        "--within", type=float, default=math.inf, help="seconds for all: what would take longer is left out"
    )
    step.add_argument("--figure", metavar="FILE", help="draw the rows of --csv: svg, png or pdf")
    step.add_argument("--seconds", type=float, help="how long each way may be measured (default: 20)")
    step.add_argument("--quick", action="store_true", help="one model, one size")
    step.set_defaults(verb=run_step)
    for parser in (loss, step):
        parser.add_argument(
            "--csv", metavar="FILE", help="write rows there, behind those that it has; its folder is made"
        )
        parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
        parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="public packages too")


def run_loss(arguments: argparse.Namespace) -> int:
    """Measure losses; return 1 if a result of contrastile was wrong or failed."""
    # mistakes are reported before anything heavy is imported
    _check_loss_words(arguments)
    _check_paths(arguments, "csv")

    import torch

    from contrastile.bench.harness import EXCHANGE_COLUMNS, LOSS_COLUMNS, Machine, Report, joined
    from contrastile.bench.loss import LossBench, suite

    kind, across = device_of(arguments.device), _world_size() > 1
    if arguments.profile and not across:
        from contrastile._errors import invalid

        raise invalid("profile", "come under torchrun", "one process", "Start several ranks, or leave it out.")
    cases = _cases(arguments, suite(torch.device(kind), quick=arguments.quick, ranks=_world_size()))
    columns = EXCHANGE_COLUMNS if across else LOSS_COLUMNS
    with joined(kind) as (device, world), _ledger(arguments, columns) as ledger:
        _say_machine(device)
        report = Report(_say, ledger, world)
        bench = LossBench(Machine.of(device, _seconds(arguments, "loss"), world), arguments.peers, report)
        if arguments.once:
            bench.head()
            for case in cases:
                bench.once(case)
        else:
            bench.measure(cases)
        if arguments.profile:
            from contrastile.bench.profile import profile

            for case in cases:
                profile(bench, case)
    if arguments.csv:
        _say(f"rows: {arguments.csv}")
    return 0 if report.passed else 1


def run_step(arguments: argparse.Namespace) -> int:
    """Measure steps; return 1 if a way of contrastile was wrong or failed."""
    _check_step_words(arguments)
    _check_paths(arguments, "csv", "figure")
    # plain steps fill the memory with tensors of all sizes, and must not fail because of gaps
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    import torch

    from contrastile._errors import invalid
    from contrastile.bench.harness import RANK_STEP_COLUMNS, STEP_COLUMNS, Report, joined
    from contrastile.bench.step import RANK_SECONDS, WAYS, StepBench, standard, usual
    from contrastile.bench.ways import rank_ways

    kind, size = device_of(arguments.device), _world_size()
    models, batches = standard(torch.device(kind), quick=arguments.quick)
    models = _models(arguments) or models
    batches = _batches(arguments) or [batch // size * size for batch in batches]
    ways = WAYS if size == 1 else rank_ways(torch.device(kind))
    plan = _plan(arguments, batches, ways)
    peers = [name for names in plan.values() for name in names if not ways[name].judged]
    if peers and not arguments.peers:
        raise invalid("peers", "be measured where one is named", f"--no-peers and {peers[0]}", "Leave out the one.")
    for batch in () if plan else batches:
        names = [*ways] if size > 1 else usual(batch)
        plan[batch] = [name for name in names if arguments.peers or ways[name].judged]
    if uneven := [batch for batch in plan if batch % size]:
        raise invalid("sizes", f"be multiples of the {size} ranks", uneven[0], "Each rank takes as many pairs.")
    dtype = getattr(torch, DTYPES[arguments.dtype or ("bf16" if kind == "cuda" else "fp32")])
    columns = STEP_COLUMNS if size == 1 else RANK_STEP_COLUMNS
    with joined(kind) as (device, world), _ledger(arguments, columns) as ledger:
        _say_machine(device, "transformers")
        bench = StepBench(
            device,
            dtype,
            Report(_say, ledger, world),
            ways,
            world,
            seconds=_seconds(arguments, "step") if size == 1 else RANK_SECONDS,
            longest=arguments.longest if size == 1 else math.inf,
            within=arguments.within,
            optimizer=arguments.optimizer,
        )
        for model in models:
            bench.measure(model, plan, arguments.sub_batch)
    if arguments.csv:
        _say(f"rows: {arguments.csv}")
    if arguments.figure and _is_first():
        from contrastile.bench.figure import draw

        draw(Path(arguments.csv), Path(arguments.figure))
        _say(f"figure: {arguments.figure}")
    return 0 if bench.report.passed else 1


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _say(line: str) -> None:
    """Print on the first rank."""
    if _is_first():
        print(line, flush=True)


def _say_machine(device: torch.device, *packages: str) -> None:
    from contrastile.bench.harness import busy
    from contrastile.train.provenance import signature

    ranks = f"{_world_size()} ranks on " if _world_size() > 1 else ""
    _say("\n".join(filter(None, (ranks + signature(device, *packages), busy(device)))))


def _ledger(arguments: argparse.Namespace, columns: tuple[str, ...]) -> Any:
    from contrastile.bench.harness import Ledger

    return Ledger(Path(arguments.csv), columns) if arguments.csv and _is_first() else nullcontext()


def _seconds(arguments: argparse.Namespace, kind: str) -> float:
    given: float | None = arguments.seconds
    return given if given is not None else (QUICK_SECONDS if arguments.quick else SECONDS)[kind]


def _check_paths(arguments: argparse.Namespace, *names: str) -> None:
    """Make the folders of results before anything is measured; of several ranks the first writes."""
    from contrastile.train.folder import make_way

    for name in names if _is_first() else ():
        if path := getattr(arguments, name):
            make_way(name, path)


def device_of(name: str) -> str:
    """Return "cpu" or "cuda"; "auto" is the GPU where there is one."""
    import torch

    if _known_device(name) == "cuda" and not torch.cuda.is_available():
        raise _no_cuda()
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _known_device(name: str) -> str:
    """Refuse an unknown device, as far as that is possible without torch."""
    from contrastile._errors import one_of
    from contrastile.train.config.base import torch_is_cpu_only

    one_of("device", name, ("auto", "cpu", "cuda"), "Leave it out for the default.")
    if name == "cuda" and torch_is_cpu_only():
        raise _no_cuda()
    return name


def _no_cuda() -> ValueError:
    from contrastile._errors import invalid

    return invalid("device", "be one that torch sees", "cuda", "Install torch for CUDA, or take cpu.")


def _check_loss_words(arguments: argparse.Namespace) -> None:
    from contrastile._errors import invalid

    _known_device(arguments.device)
    if arguments.seconds is not None and arguments.seconds <= 0:
        raise invalid("seconds", "be above 0", arguments.seconds, "Leave it out for the default.")
    if min(arguments.features or (1,)) < 1:
        raise invalid("features", "be at least 1", min(arguments.features), "Such as 512.")
    for name in ("sizes", "workspace"):
        for text in getattr(arguments, name) or ():
            number(name, text)
    if arguments.dtype is not None:
        _dtype(arguments.dtype)


def _check_step_words(arguments: argparse.Namespace) -> None:
    from importlib.util import find_spec

    from contrastile._errors import invalid

    _known_device(arguments.device)
    if arguments.figure and not arguments.csv:
        raise invalid("figure", "come with csv, whose rows it draws", "none", "Add --csv FILE.")
    if arguments.figure and not arguments.figure.endswith(FIGURES):
        raise invalid("figure", f"end in {', '.join(FIGURES)}", f'"{arguments.figure}"', "Name another file.")
    if arguments.sub_batch is not None and arguments.sub_batch < 1:
        remedy = "Leave it out for the model's."
        raise invalid("sub_batch", "be a whole number of at least 1", arguments.sub_batch, remedy)
    for name in ("seconds", "longest", "within"):
        if (got := getattr(arguments, name)) is not None and not got >= 0:
            raise invalid(name, "be at least 0", got, "Leave it out for the default.")
    _batches(arguments)
    given = [name for name in ONE_PROCESS if getattr(arguments, name) not in (None, False, math.inf, LONGEST)]
    if _world_size() > 1 and given:
        raise invalid(given[0], "be left out under torchrun", getattr(arguments, given[0]), "Run one process with it.")
    if arguments.figure and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(name="matplotlib")


def _cases(arguments: argparse.Namespace, standard: list[Case]) -> list[Case]:
    """The device's own list, or everything that was named, crossed with the defaults of what was not."""
    from contrastile.bench.peers import Case

    names = ("sizes", "features", "dtype", "losses", "workspace", "precision")
    if all(getattr(arguments, name) is None for name in names):
        return standard
    sizes = [number("sizes", size) for size in arguments.sizes or ()]
    workspaces = tuple(number("workspace", size) for size in arguments.workspace or ()) or standard[0].workspaces
    dtype, precision = _dtype(arguments.dtype or standard[0].dtype), arguments.precision or "highest"
    return [
        Case(loss, b, d, dtype, workspaces, precision)
        for loss in arguments.losses or ["clip"]
        for b in sizes or sorted({case.b for case in standard if case.loss == loss})
        for d in arguments.features or sorted({case.d for case in standard if case.loss == loss})
    ]


def number(name: str, text: str) -> int:
    """Return a size written with a unit.

    >>> number("sizes", "64k"), number("workspace", "2GiB")
    (65536, 2147483648)
    """
    from contrastile._errors import invalid

    digits = text.rstrip("kMGKiB")
    unit = text[len(digits) :]
    if not digits.isdecimal() or int(digits) == 0 or unit not in UNITS:
        remedy = "Such as 4096, 64k, 1M, 192MiB or 2GiB."
        raise invalid(name, "be whole numbers above 0, perhaps with a unit", repr(text), remedy)
    return int(digits) * UNITS[unit]


def _dtype(name: str) -> str:
    from contrastile._errors import one_of

    one_of("dtype", name, (*DTYPES, *DTYPES.values()), "bf16 is what most training uses.")
    return DTYPES.get(name, name)


def _models(arguments: argparse.Namespace) -> list[str]:
    from contrastile._errors import one_of
    from contrastile.bench.towers import MODELS

    for name in arguments.models or ():
        one_of("models", name, tuple(MODELS), "The tiny one suits a CPU.")
    return arguments.models or []


def _plan(arguments: argparse.Namespace, batches: list[int], known: Iterable[str]) -> dict[int, list[str]]:
    """The ways named for each size; a way with sizes of its own is measured there only."""
    from contrastile._errors import one_of

    plan: dict[int, list[str]] = {}
    for word in arguments.ways or ():
        name, at, sizes = word.partition("@")
        one_of("ways", name, tuple(known), "Leave it out for all.")
        for batch in [number("ways", size) for size in sizes.split(",")] if at else batches:
            plan.setdefault(batch, []).append(name)
    return plan


def _batches(arguments: argparse.Namespace) -> list[int]:
    return [number("sizes", size) for size in arguments.sizes or ()]
