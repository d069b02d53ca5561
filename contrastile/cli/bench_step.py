"""`contrastile bench step`: time and memory of whole steps, in every way to take one."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

SECONDS, SECONDS_QUICK = 20.0, 2.0
LONGEST = 600.0
# what says how the steps of one process are measured
ALONE = ("optimizer", "seconds", "longest", "within")
# what a figure may be
FIGURES = (".svg", ".png", ".pdf")


def add_to(kinds: Any) -> None:
    """Declare the sub-verb and its arguments."""
    parser = kinds.add_parser(
        "step",
        help="whole training steps: towers, loss, gradients",
        description="CLIPs with random weights on made-up pairs: the plain step, accumulation, and gradient caches. "
        "Under torchrun: the four ways to compute the loss across ranks.",
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="vit-b-16, vit-l-14 or tiny")
    parser.add_argument("--sizes", nargs="+", metavar="B", help="pairs per step, such as 8k; of all ranks together")
    parser.add_argument("--sub-batch", type=int, metavar="N", help="pairs encoded at once (default: the model's)")
    parser.add_argument(
        "--ways",
        nargs="+",
        metavar="WAY",
        help="such as plain, retain-0, GradCache; pool-0@64k,256k: there only; under torchrun such as ring-tiles",
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="autocast's; fp32 is without (default: bf16)")
    parser.add_argument("--optimizer", action="store_true", help="AdamW's step too")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="public packages too")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--seconds", type=float, help="how long each way may be measured (default: 20)")
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds a step may take (default: 600)")
    parser.add_argument(
        "--within", type=float, default=math.inf, help="seconds for all: what would take longer is left out"
    )
    parser.add_argument("--csv", metavar="FILE", help="write rows there, behind those that it has; its folder is made")
    parser.add_argument("--figure", metavar="FILE", help="draw the rows of --csv: svg, png or pdf")
    parser.add_argument("--quick", action="store_true", help="one model, one size")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, printing each result when it is there; 1 if a way of ours was wrong or failed."""
    from importlib.util import find_spec

    from contrastile._wrong import wrong
    from contrastile.cli.bench import known_device, places

    known_device(arguments.device)
    if arguments.figure and not arguments.csv:
        raise wrong("figure", "come with csv, whose rows it draws", "none", "Add --csv FILE.")
    if arguments.figure and not arguments.figure.endswith(FIGURES):
        raise wrong("figure", f"end in {', '.join(FIGURES)}", f'"{arguments.figure}"', "Name another file.")
    if arguments.sub_batch is not None and arguments.sub_batch < 1:
        raise wrong(
            "sub_batch", "be a whole number of at least 1", arguments.sub_batch, "Leave it out for the model's."
        )
    for name in ("seconds", "longest", "within"):
        if (got := getattr(arguments, name)) is not None and not got >= 0:
            raise wrong(name, "be at least 0", got, "Leave it out for the default.")
    _batches(arguments)
    across = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if across and (
        idle := [name for name in ALONE if getattr(arguments, name) not in (None, False, math.inf, LONGEST)]
    ):
        raise wrong(idle[0], "be left out under torchrun", getattr(arguments, idle[0]), "Run one process with it.")
    if arguments.figure and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(name="matplotlib")
    places(arguments, "csv", "figure")
    # plain steps fill the memory with tensors of all sizes, and must not fail because of gaps
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    right = _across_ranks(arguments) if across else _alone(arguments)
    if arguments.figure and int(os.environ.get("RANK", "0")) == 0:
        from contrastile.bench.figure import draw

        draw(Path(arguments.csv), Path(arguments.figure))
        print(f"figure: {arguments.figure}")
    return 0 if right else 1


def _alone(arguments: argparse.Namespace) -> bool:
    from contextlib import nullcontext
    from itertools import chain

    import torch

    from contrastile._wrong import wrong
    from contrastile.bench.measure import Ledger, busy
    from contrastile.bench.step import JUDGED, WAYS, StepBench, StepRow, standard, usual
    from contrastile.cli.bench import device_of
    from contrastile.train.provenance import signature

    device = torch.device(device_of(arguments.device))
    models, batches = standard(device, quick=arguments.quick)
    models, batches = _models(arguments) or models, _batches(arguments) or batches
    plan = _plan(arguments, batches, WAYS)
    if not arguments.peers and (peers := [name for name in chain(*plan.values()) if WAYS[name].impl not in JUDGED]):
        raise wrong("peers", "be measured where one is named", f"--no-peers and {peers[0]}", "Leave out the one.")
    # nothing is named: all, or all but theirs
    plan = plan or {
        batch: [name for name in usual(batch) if arguments.peers or WAYS[name].impl in JUDGED] for batch in batches
    }
    seconds = arguments.seconds if arguments.seconds is not None else (SECONDS_QUICK if arguments.quick else SECONDS)
    with Ledger(Path(arguments.csv), StepRow) if arguments.csv else nullcontext() as ledger:
        print("\n".join(filter(None, (signature(device, "transformers"), busy(device)))))
        bench = StepBench(
            device,
            _dtype(arguments, device),
            _say,
            seconds,
            arguments.longest,
            arguments.within,
            arguments.optimizer,
            ledger,
        )
        for model in models:
            bench.measure(model, plan, arguments.sub_batch)
    if arguments.csv:
        print(f"rows: {arguments.csv}")
    return bench.right


def _across_ranks(arguments: argparse.Namespace) -> bool:
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist

    from contrastile._wrong import wrong
    from contrastile.bench.measure import Ledger
    from contrastile.bench.step import standard
    from contrastile.bench.step_ranks import LOSSES, RankRow, join, measure
    from contrastile.cli.bench import device_of

    # what is wrong is said before ranks wait for each other
    kind, W = device_of(arguments.device), int(os.environ["WORLD_SIZE"])
    models, batches = standard(torch.device(kind), quick=arguments.quick)
    models = _models(arguments) or models
    batches = _batches(arguments) or [batch // W * W for batch in batches]
    plan = _plan(arguments, batches, LOSSES) or {batch: list(LOSSES) for batch in batches}
    if uneven := [batch for batch in plan if batch % W]:
        raise wrong("sizes", f"be multiples of the {W} ranks", uneven[0], "Each rank takes as many pairs.")
    device = join(kind)
    try:
        first = dist.get_rank() == 0
        with Ledger(Path(arguments.csv), RankRow) if arguments.csv and first else nullcontext() as ledger:
            say, dtype = _say if first else lambda _: None, _dtype(arguments, device)
            right = [measure(model, plan, device, dtype, say, ledger, arguments.sub_batch) for model in models]
        return all(right)
    finally:
        dist.destroy_process_group()


def _say(line: str) -> None:
    print(line, flush=True)


def _models(arguments: argparse.Namespace) -> list[str]:
    from contrastile._wrong import one_of
    from contrastile.bench.towers import MODELS

    for name in arguments.models or ():
        one_of("models", name, tuple(MODELS), "The tiny one suits a CPU.")
    return arguments.models or []


def _plan(arguments: argparse.Namespace, batches: list[int], known: Iterable[str]) -> dict[int, list[str]]:
    """The ways named for each size; a way with sizes of its own is measured there only."""
    from contrastile._wrong import one_of
    from contrastile.cli.bench import number

    plan: dict[int, list[str]] = {}
    for word in arguments.ways or ():
        name, at, sizes = word.partition("@")
        one_of("ways", name, tuple(known), "Leave it out for all.")
        for batch in [number("ways", size) for size in sizes.split(",")] if at else batches:
            plan.setdefault(batch, []).append(name)
    return plan


def _batches(arguments: argparse.Namespace) -> list[int]:
    from contrastile.cli.bench import number

    return [number("sizes", size) for size in arguments.sizes or ()]


def _dtype(arguments: argparse.Namespace, device: torch.device) -> torch.dtype:
    import torch

    from contrastile.cli.bench import DTYPES

    name = arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")
    return getattr(torch, DTYPES[name])
