"""`contrastile plan RECIPE`: the memory and the time of a run on machines that need not be there."""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from contrastile._errors import invalid, renamed
from contrastile.cli.options import OVERRIDES, RECIPE, number
from contrastile.train.log import quantity, size

if TYPE_CHECKING:
    from contrastile.planner.plan import Plan

# units of a number of pairs, for the help
UNITS = " (k: times 1,024; M: times 1,048,576)"
PAIRS = "Such as 4096, 64k or 1M pairs."
# characters of a bar that shows a part's share of the memory
WIDTH = 40

SUMMARY = "the batch that fits, and the time of a run, on any machines"
EXAMPLE = "contrastile plan clip-vit-l-14 --gpus 8xH100-80GB --batch 32k"


def add_to(parser: argparse.ArgumentParser) -> None:
    text = "Adds up what every part of a step declares. Needs neither the machines nor the data, and makes no weights."
    parser.description = text
    add = parser.add_argument
    add("recipe", nargs="?", help=RECIPE)
    add("overrides", **OVERRIDES, help="as for train")
    add("--gpus", metavar="WORD", help="such as H200, 8xH100-80GB, 32x8xH100-80GB (default: this machine)")
    one_batch = parser.add_mutually_exclusive_group()
    batch = f"pairs of all ranks, such as 64k{UNITS}; default: the recipe's largest"
    one_batch.add_argument("--batch", metavar="B", help=batch)
    one_batch.add_argument("--largest", action="store_true", help="the largest batch that fits")
    hours = f"the run's time; for epochs with the PAIRS to train on, such as 280000000, or 280M{UNITS}"
    add("--hours", nargs="?", const="", metavar="PAIRS", help=hours)
    add("--calibrate", action="store_true", help="measure this machine for 20 seconds, and keep its profile")
    add("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 where the step does not fit."""
    if arguments.recipe is None and not arguments.calibrate:
        raise invalid("recipe", "be named", "none", "Such as glyphs.")
    batch = None if arguments.batch is None else number("--batch", arguments.batch, PAIRS)
    pairs = number("--hours", arguments.hours, PAIRS) if arguments.hours else None
    if arguments.calibrate:
        from contrastile.planner.calibrate import calibrate

        print(f"profile: {calibrate()}")
    if arguments.recipe is None:
        return 0

    from contrastile.train.recipe import load_any_recipe

    # mistakes in it and in the machines are found before torch is loaded
    recipe = load_any_recipe(arguments.recipe, arguments.overrides, files=False, effects=True)
    if arguments.gpus is not None:
        from contrastile.planner.profile import target

        target(arguments.gpus)

    from contrastile.train.plan import plan

    with renamed(pairs="--hours"):
        planned = plan(recipe, gpus=arguments.gpus, batch=batch, pairs=pairs)
    if arguments.largest:
        planned = planned.at_largest()
    if arguments.hours is not None and planned.run_seconds is None:
        rule, got = "come with a chip with a profile", arguments.gpus or planned.target.word
        remedy = "Measure such a machine: contrastile plan --calibrate, there."
        if planned.target.profile is not None:
            rule, got = "come with a run of known length", "none"
            remedy = "Give the pairs to train on, such as --hours 280M."
            if planned.examples:
                rule, got = f"come with a batch of at most the run's {planned.examples:,} pairs", f"{planned.batch:,}"
                remedy = f"Such as --batch {min(4096, planned.examples)}."
        raise invalid("--hours", rule, got, remedy)
    print(json.dumps(planned.values(), indent=1) if arguments.json else "\n".join(lines(planned, pairs)))
    return 0 if planned.fits else 1


def lines(plan: "Plan", pairs: int | None = None) -> Iterator[str]:
    """The plan as lines of text. pairs: the size of the training split, if given."""
    step, target = plan.step, plan.target
    rows = f"{step.loss.rows:,} on each of {target.ranks} ranks" if target.ranks > 1 else "on one rank"
    parts = f", in {plan.parts} parts" if plan.parts > 1 else ""
    yield f"{plan.name} on {target.word}: {quantity(plan.batch, 'pairs')} a step, {rows}{parts}"
    for side, retained in zip(step.sides, step.retained_graphs(), strict=True):
        graphs = f"{retained:,} of {side.count:,} graphs kept, {size(side.cost.graph)} each"
        yield f"  {side.cost.name}: sub-batches of {side.cost.sub_batch:,}, {graphs}"
    products = str(step.loss.dtype).removeprefix("torch.")
    yield f"  loss: exchange {step.loss.exchange_name}, backend {step.loss.backend_name}, products in {products}"
    yield f"\npeak of a rank: {size(plan.peak.bytes)}, {plan.peak.name}"
    for name, count in sorted(plan.peak.parts.items(), key=lambda part: -part[1]):
        yield f"  {name:12} {size(count):>10}  {'█' * round(WIDTH * count / plan.peak.bytes)}".rstrip()
    verdict = "fits" if plan.peak.bytes <= plan.allowed else "DOES NOT FIT"
    shared = f", which {plan.sharing} ranks share" if plan.sharing > 1 else ""
    yield f"  {verdict}: a rank may take {size(plan.allowed)} of {size(target.memory)}{shared}"
    others = "beside libraries and the data's own"
    if target.host is None:
        yield f"  host memory of a node: must have {size(plan.host)}, {others}"
    else:
        peak = "" if target.device != "cpu" else " beside the peaks" if plan.sharing > 1 else " beside the peak"
        verdict = "fits" if plan.fits_host else "DOES NOT FIT"
        yield f"  host memory: {verdict}: {size(plan.host)}{peak}, of {size(target.host)}, {others}"
    largest = plan.largest()
    most = "no limit" if largest else "none, not a pair for each rank fits"
    if 0 < largest < plan.most:
        most = f"{largest:,}, with {size(plan.at(largest).host)} of host memory on a node"
    whole_run = f"; the run has {plan.examples:,} pairs" if 0 < plan.examples < largest else ""
    yield f"  largest batch, without kept graphs: {most}{whole_run}"
    seconds = plan.seconds
    if seconds is None:
        yield "  no times: this chip has no profile (--calibrate makes one of this machine)"
    else:
        names = ("towers", "loss", "communication", "optimizer")
        parts = ", ".join(f"{name} {_seconds(getattr(seconds, name))}" for name in names)
        data = f"; data {_seconds(seconds.data)} meanwhile" if seconds.data else ""
        which = "step of the largest batch" if len(plan.stages) > 1 else "step"
        yield f"\n{which}: {_seconds(seconds.total)}, most of it {seconds.bottleneck}"
        yield f"  {parts}{data}"
        if plan.run_seconds is not None:
            count = sum(steps for _, steps in plan.stages)
            of_pairs = "" if pairs is None else f", with {pairs:,} pairs to train on"
            yield f"  run: {_seconds(plan.run_seconds)} for {count:,} steps{of_pairs}"
    yield "\nother choices, all else equal:"
    choices = list(plan.choices())
    width = max(len(choice.name) for choice in choices)
    heads = ("peak", "fits", "on the host", "step", "largest batch", "on the host")
    yield f"  {'':{width}}" + "".join(f"  {head:>13}" for head in heads)
    for choice in choices:
        time = "" if choice.seconds is None else _seconds(choice.seconds)
        cells = [size(choice.peak), "yes" if choice.fits else "no", size(choice.host), time]
        if 0 < choice.largest < plan.most:
            cells += [f"{choice.largest:,}", size(choice.largest_host)]
        else:
            cells += ["no limit" if choice.largest else "none", ""]
        yield (f"  {choice.name:{width}}" + "".join(f"  {cell:>13}" for cell in cells)).rstrip()


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    for most, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < most:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 3600:,.1f} hours"
