"""`contrastile bench loss`, `step` and `memory`: time and memory of losses and steps, beside public packages."""

import argparse
import math
import os
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from contrastile._errors import invalid, one_of, whole_number
from contrastile.cli.options import DEFAULT, add_device, at_least, needs, number
from contrastile.train.folder import make_way

if TYPE_CHECKING:
    from contrastile.bench.peers import Case
    from contrastile.bench.ways import Way

Plan = dict[int, list[str]]
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
LOSSES = (
    *("clip", "siglip", "infonce", "dcl", "dclw", "hardness", "gist", "gist_relative", "gist_pairs", "distill", "own"),
    *("own_alone", "hardness_own", "queue", "clip_labels", "clip_two_labels", "siglip_labels", "siglip_balanced"),
    *("ntxent", "supcon", "supcon_in", "kl", "margin_mse"),
)
# seconds per measurement of a loss, and of a way to take a step; the same with --quick
SECONDS, QUICK_SECONDS = {"loss": 4.0, "step": 20.0}, {"loss": 0.5, "step": 2.0}
LONGEST = 600.0
HOST_LIMIT = "16GiB"
# options of `bench step` for one process only, and their defaults
ONE_PROCESS = {"optimizer": False, "seconds": None, "longest": LONGEST, "within": math.inf}
FIGURES = (".svg", ".png", ".pdf")
# ranks and features of `bench memory`, and its pairs of all ranks on a GPU and on a CPU
WORLDS, FEATURES = [8, 32, 128], 768
MEMORY_SIZES, SMALL_MEMORY_SIZES = [2**exponent for exponent in range(15, 23)], [2**12, 2**13, 2**14]

SUMMARY = "time and memory, beside other implementations"
EXAMPLE = "contrastile bench loss --quick"


def add_to(bench: argparse.ArgumentParser) -> None:
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    loss = kinds.add_parser(
        "loss",
        help="the losses, forward and backward",
        description="Without sizes, features, dtype, losses or workspace: everything that this device is judged by. "
        "Under torchrun, the exchanges between its ranks.",
    )
    add = loss.add_argument
    add("--sizes", nargs="+", metavar="B", help="rows, such as 64k or 1M")
    add("--features", nargs="+", type=int, metavar="D", help="features per row")
    add("--dtype", help="bf16, fp16, fp32 or fp64")
    add("--losses", nargs="+", choices=LOSSES, metavar="LOSS", help=", ".join(LOSSES))
    add("--workspace", nargs="+", metavar="BYTES", help="contrastile's, such as 2GiB")
    add("--precision", choices=("high", "highest"), help="of float32 products (default: highest)")
    add("--once", action="store_true", help="one step of contrastile alone, for sizes that take minutes")
    add("--host", action="store_true", help="features in host memory, beside resident ones")
    add("--limit", metavar="BYTES", help="with --host: the device's memory that may be allocated (default: 16GiB)")
    add("--profile", action="store_true", help="under torchrun: split the time of a step into its parts")
    add("--seconds", type=float, help="how long each may be measured (default: 4)")
    add("--quick", action="store_true", help="few and small sizes, half a second for each")
    loss.set_defaults(verb=run_loss)
    step = kinds.add_parser(
        "step",
        help="whole training steps: towers, loss, gradients",
        description="CLIPs with random weights on made-up pairs: the plain step, accumulation, and gradient caches. "
        "Under torchrun: four ways to compute the loss across ranks; --ways names more, and DDP and FSDP2.",
    )
    add = step.add_argument
    ways = "such as plain, retain-0, GradCache; pool-0@64k,256k: there only; under torchrun such as ring-tiles, ddp"
    add("--models", nargs="+", metavar="NAME", help="vit-b-16, vit-l-14 or tiny")
    add("--sizes", nargs="+", metavar="B", help="pairs per step, such as 8k; of all ranks together")
    add("--sub-batch", type=int, metavar="N", help="pairs encoded at once (default: the model's)")
    add("--ways", nargs="+", metavar="WAY", help=ways)
    add("--compile", action="store_true", help="each way with compiled towers too, as compiled-plain is")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="autocast's; fp32 is without (default: bf16)")
    add("--optimizer", action="store_true", help="AdamW's step too")
    add("--within", type=float, default=math.inf, help="seconds for all: rows that would take longer are left out")
    add("--seconds", type=float, help="how long each way may be measured (default: 20)")
    add("--quick", action="store_true", help="one model, one size")
    step.set_defaults(verb=run_step)
    memory = kinds.add_parser(
        "memory",
        help="a loss on one rank of many, measured on one device",
        description="The papers' memory tables: one rank of ranks that are not there. Times lack communication.",
    )
    add = memory.add_argument
    add("--ranks", nargs="+", type=int, metavar="W", help="numbers of ranks (default: 8 32 128)")
    add("--sizes", nargs="+", metavar="B", help="pairs of all ranks, such as 32k or 4M")
    add("--features", type=int, default=FEATURES, metavar="D", help="features per row (default: 768)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="of the features (default: bf16; fp32 on a CPU)")
    add("--ways", nargs="+", metavar="WORD", default=[""], help="only ways whose names have a WORD, such as ring")
    memory.set_defaults(verb=run_memory)
    for parser in (step, memory):
        parser.add_argument("--longest", type=float, default=LONGEST, help="seconds a step may take (default: 600)")
        parser.add_argument("--figure", metavar="FILE", help="draw the rows of --csv: svg, png or pdf")
    csv = "write rows there, behind those that it has; its folder is made"
    for parser in (loss, step, memory):
        parser.add_argument("--csv", type=Path, metavar="FILE", help=csv)
        add_device(parser)
        parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="public packages too")


def run_loss(arguments: argparse.Namespace) -> int:
    """Measure losses; return 1 if a result of contrastile was wrong or failed."""
    if arguments.seconds is not None and not arguments.seconds > 0:
        raise invalid("seconds", "be above 0", arguments.seconds, DEFAULT)
    at_least("features", min(arguments.features or (1,)), reason="Such as 512.")
    if arguments.limit and not arguments.host:
        raise invalid("limit", "come with host, which it limits", "no --host", "Add --host.")
    ranks = _world_size()
    if arguments.host and arguments.once:
        raise invalid("host", "come without once", "--once", "Leave one of them out.")
    one_of("dtype", arguments.dtype or "bf16", (*DTYPES, *DTYPES.values()), "bf16 is what most training uses.")
    limit = number("limit", arguments.limit or HOST_LIMIT)
    _check(arguments)

    import torch

    from contrastile.bench.harness import COLUMNS, Machine, reporting
    from contrastile.bench.loss import LossBench, profile, suite

    kind = _device(arguments.device, has_cuda=torch.cuda.is_available())
    if arguments.profile and ranks == 1:
        raise invalid("profile", "come under torchrun", "one process", "Start several ranks, or leave it out.")
    cases = _cases(arguments, suite(torch.device(kind), quick=arguments.quick, ranks=ranks, host=arguments.host))
    columns = "host" if arguments.host else "losses" if ranks == 1 else "exchanges"
    with reporting(arguments.csv, COLUMNS[columns], kind) as (device, report):
        bench = LossBench(Machine.of(device, _seconds(arguments, "loss"), report.world), arguments.peers, report)
        if arguments.host:
            bench.host(cases, limit)
        else:
            (bench.once if arguments.once else bench.measure)(cases)
        if arguments.profile:
            for case in cases:
                profile(bench, case)
    return 0 if report.passed else 1


def run_step(arguments: argparse.Namespace) -> int:
    """Measure steps; return 1 if a way of contrastile was wrong or failed."""
    if arguments.sub_batch is not None:
        whole_number("sub_batch", arguments.sub_batch, 1, "Leave it out for the model's.")
    for name in ("seconds", "longest", "within"):
        at_least(name, getattr(arguments, name), 0)
    ranks, given = _world_size(), [name for name, default in ONE_PROCESS.items() if getattr(arguments, name) != default]
    if ranks > 1 and given:
        raise invalid(given[0], "be left out under torchrun", getattr(arguments, given[0]), "Run one process with it.")
    _check(arguments)
    needs("transformers")
    # plain steps fill the memory with tensors of all sizes, and must not fail because of gaps
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    import torch

    from contrastile.bench.harness import COLUMNS, Machine, reporting
    from contrastile.bench.step import RANK_SECONDS, StepBench, standard
    from contrastile.bench.towers import MODELS
    from contrastile.bench.ways import WAYS, rank_ways, with_compiled_towers

    kind = _device(arguments.device, has_cuda=torch.cuda.is_available())
    models, batches = standard(torch.device(kind), quick=arguments.quick)
    for name in arguments.models or ():
        one_of("models", name, tuple(MODELS), "The tiny one suits a CPU.")
    batches = arguments.sizes or [batch // ranks * ranks for batch in batches]
    ways = WAYS if ranks == 1 else rank_ways(torch.device(kind), _rank(), ranks)
    ways = {**ways, **with_compiled_towers(ways)}
    plan = _plan(arguments, batches, ways, ranks)
    dtype = getattr(torch, DTYPES[arguments.dtype or ("bf16" if kind == "cuda" else "fp32")])
    seconds = _seconds(arguments, "step") if ranks == 1 else RANK_SECONDS
    columns = COLUMNS["steps" if ranks == 1 else "rank steps"]
    with reporting(arguments.csv, columns, kind, "transformers") as (device, report):
        machine, longest = Machine(device, seconds, world=report.world), arguments.longest if ranks == 1 else math.inf
        limits = {"longest": longest, "within": arguments.within, "optimizer": arguments.optimizer}
        bench = StepBench(machine, dtype, report, ways, **limits)
        for model in arguments.models or models:
            bench.measure(model, plan, arguments.sub_batch)
    return _drawn(arguments, passed=report.passed)


def run_memory(arguments: argparse.Namespace) -> int:
    """Measure the memory of a rank; return 1 if a way of contrastile failed."""
    if _world_size() > 1:
        raise invalid("memory", "run in one process, which is a rank of any world", "torchrun", "Start it alone.")
    worlds = arguments.ranks or WORLDS
    at_least("ranks", min(worlds), 2)
    at_least("features", arguments.features)
    at_least("longest", arguments.longest, 0)
    _check(arguments)
    for b, world in product(arguments.sizes or (), worlds):
        _check_shares([b], world, "has")

    import torch

    from contrastile.bench.harness import COLUMNS, Machine, reporting
    from contrastile.bench.memory import TABLE, MemoryBench, check_words

    kind = _device(arguments.device, has_cuda=torch.cuda.is_available())
    check_words(arguments.ways, torch.device(kind), worlds[0])
    sizes = arguments.sizes or (MEMORY_SIZES if kind == "cuda" else SMALL_MEMORY_SIZES)
    dtype = getattr(torch, DTYPES[arguments.dtype or ("bf16" if kind == "cuda" else "fp32")])
    with reporting(arguments.csv, COLUMNS["memory"], kind) as (device, report):
        words = {"peers": arguments.peers, "longest": arguments.longest, "words": arguments.ways}
        bench = MemoryBench(Machine(device), report, **words)
        report.say("one rank of a world, forward and backward; peak: beside the features; ms: without communication")
        report.begin(TABLE)
        for world in worlds:
            bench.measure(world, sizes, arguments.features, dtype)
    return _drawn(arguments, passed=report.passed)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what is wrong on any machine before torch is imported; sizes become numbers, folders of results are made.

    A figure must be one that can be drawn. The first rank makes the folders, because it writes the results.
    """
    from contrastile.train.config.base import torch_is_cpu_only

    _device(arguments.device, has_cuda=not torch_is_cpu_only())
    for name in ("sizes", "workspace"):
        if texts := getattr(arguments, name, None):
            setattr(arguments, name, [number(name, text) for text in texts])
    figure = getattr(arguments, "figure", None)
    if figure and not arguments.csv:
        raise invalid("figure", "come with csv, whose rows it draws", "none", "Add --csv FILE.")
    if figure and not figure.endswith(FIGURES):
        raise invalid("figure", f"end in {', '.join(FIGURES)}", f'"{figure}"', "Name another file.")
    if figure:
        needs("matplotlib")
    for name, path in (("csv", arguments.csv), ("figure", figure)):
        if path and _rank() == 0:
            make_way(name, path)


def _check_shares(sizes: Iterable[int], ranks: int, verb: str) -> None:
    if uneven := [size for size in sizes if size % ranks]:
        raise invalid("sizes", f"be multiples of the {ranks} ranks", uneven[0], f"Each rank {verb} as many pairs.")


def _device(name: str, *, has_cuda: bool) -> str:
    """Return "cpu" or "cuda"; "auto" is the GPU where there is one."""
    one_of("device", name, ("auto", "cpu", "cuda"), DEFAULT)
    if name == "cuda" and not has_cuda:
        raise invalid("device", "be one that torch sees", "cuda", "Install torch for CUDA, or take cpu.")
    return ("cuda" if has_cuda else "cpu") if name == "auto" else name


def _drawn(arguments: argparse.Namespace, *, passed: bool) -> int:
    """Draw the figure on the first rank, if one is named, and return the exit code."""
    if arguments.figure and _rank() == 0:
        from contrastile.bench.figure import draw, draw_memory

        (draw_memory if arguments.verb is run_memory else draw)(arguments.csv, Path(arguments.figure))
        print(f"figure: {arguments.figure}")
    return 0 if passed else 1


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _seconds(arguments: argparse.Namespace, kind: str) -> float:
    given: float | None = arguments.seconds
    return given if given is not None else (QUICK_SECONDS if arguments.quick else SECONDS)[kind]


def _cases(arguments: argparse.Namespace, standard: "list[Case]") -> "list[Case]":
    """The device's own list, or the options that were given, crossed with the defaults of the others."""
    from contrastile.bench.peers import Case

    names = ("sizes", "features", "dtype", "losses", "workspace", "precision")
    if all(getattr(arguments, name) is None for name in names):
        return standard
    workspaces = tuple(arguments.workspace or standard[0].workspaces)
    dtype = DTYPES.get(arguments.dtype, arguments.dtype or standard[0].dtype)
    return [
        Case(loss, b, d, dtype, workspaces, arguments.precision or "highest")
        for loss in arguments.losses or ["clip"]
        for b in arguments.sizes or sorted({case.b for case in standard if case.loss == loss})
        for d in arguments.features or sorted({case.d for case in standard if case.loss == loss})
    ]


def _plan(arguments: argparse.Namespace, batches: list[int], known: "Mapping[str, Way]", ranks: int) -> Plan:
    """The ways that are measured at each size; a way with sizes of its own is measured there only."""
    import torch

    from contrastile.bench.step import usual
    from contrastile.bench.ways import COMPILED, STANDARD, rank_ways

    plan: Plan = {}
    across = rank_ways(torch.device("cpu"), 0, 1)
    for word in arguments.ways or ():
        name, at, sizes = word.partition("@")
        if ranks == 1 and name not in known and name in across:
            raise invalid("ways", f"come under torchrun for {name}", "one process", "Start several ranks.")
        uncompiled = tuple(way for way in known if not way.startswith(COMPILED))
        one_of("ways", name.removeprefix(COMPILED), uncompiled, "Leave it out for all.")
        for batch in [number("ways", size) for size in sizes.split(",")] if at else batches:
            plan.setdefault(batch, []).append(name)
    peers = [name for names in plan.values() for name in names if not known[name].judged]
    if peers and not arguments.peers:
        raise invalid("peers", "be measured where one is named", f"--no-peers and {peers[0]}", "Leave out the one.")
    for batch in () if plan else batches:
        names = STANDARD if ranks > 1 else usual(batch)
        plan[batch] = [name for name in names if arguments.peers or known[name].judged]
    for names in plan.values() if arguments.compile else ():
        names += [COMPILED + name for name in names if not known[name].compiled]
    _check_shares(plan, ranks, "takes")
    return plan
