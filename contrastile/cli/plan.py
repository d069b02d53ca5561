"""`contrastile plan RECIPE`: the memory and the time of a run on machines that need not be there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from contrastile._errors import invalid
from contrastile.cli.options import DEFAULT, OVERRIDES, RECIPE, number
from contrastile.train.log import clock, size

if TYPE_CHECKING:
    from contrastile.planner.plan import Plan

# characters of a bar that shows a part's share of the memory
WIDTH = 40

SUMMARY = "the batch that fits, and the time of a run, on any machines"
EXAMPLE = "contrastile plan clip-vit-l-14 --gpus 8xH100-80GB --largest"


def add_to(parser: argparse.ArgumentParser) -> None:
    text = "Adds up what every part of a step declares. Needs neither the machines nor the data, and makes no weights."
    parser.description = text
    add = parser.add_argument
    add("recipe", nargs="?", help=RECIPE)
    add("overrides", **OVERRIDES, help="as for train")
    add("--gpus", metavar="WORD", help="such as H200, 8xH100-80GB, 32x8xH100-80GB (default: this machine)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--batch", metavar="B", help="pairs of all ranks, such as 64k (default: the recipe's largest)")
    size.add_argument("--largest", action="store_true", help="the largest batch that fits")
    add("--hours", nargs="?", const="", metavar="PAIRS", help="the run's time; PAIRS to train on, for epochs")
    add("--calibrate", action="store_true", help="measure this machine for 20 seconds, and keep its profile")
    add("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 where the step does not fit."""
    if arguments.recipe is None and not arguments.calibrate:
        raise invalid("recipe", "be named", "none", "Such as recipes/glyphs.toml.")
    batch = number("--batch", arguments.batch) if arguments.batch else None
    pairs = number("--hours", arguments.hours) if arguments.hours else None
    if arguments.calibrate:
        from contrastile.planner.calibrate import calibrate

        print(f"profile: {calibrate()}")
    if arguments.recipe is None:
        return 0

    from contrastile.train.plan import plan

    planned = plan(arguments.recipe, *arguments.overrides, gpus=arguments.gpus, batch=batch, pairs=pairs)
    if arguments.largest:
        planned = planned.at_largest()
    if arguments.hours is not None and planned.run_seconds is None:
        rule, remedy = "come with a run of known length and a chip with a profile", DEFAULT
        if planned.target.profile is not None:
            remedy = "Give the pairs to train on, such as --hours 280M."
        raise invalid("--hours", rule, arguments.gpus or planned.target.word, remedy)
    print(json.dumps(planned.values(), indent=1) if arguments.json else "\n".join(lines(planned)))
    return 0 if planned.fits else 1


def lines(plan: Plan) -> Iterator[str]:
    step, target = plan.step, plan.target
    rows = f"{step.loss.rows:,} on each of {target.ranks} ranks"
    yield f"{plan.name} on {target.word}: {plan.batch:,} pairs a step, {rows}" + (
        f", in {plan.parts} parts" if plan.parts > 1 else ""
    )
    for side, kept in zip(step.sides, step.graphs(), strict=True):
        graphs = f"{kept:,} of {side.count:,} graphs kept, {size(side.cost.graph)} each"
        yield f"  {side.cost.name}: sub-batches of {side.cost.sub_batch:,}, {graphs}"
    yield f"  loss: exchange {step.loss.exchange_name}, backend {step.loss.backend_name}"
    yield f"\npeak of a rank: {size(plan.peak.bytes)}, {plan.peak.name}"
    for name, count in sorted(plan.peak.parts.items(), key=lambda part: -part[1]):
        yield f"  {name:12} {size(count):>10}  {'█' * round(WIDTH * count / plan.peak.bytes)}"
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield f"  {verdict}: a rank may take {size(plan.allowed)} of {size(target.memory)}"
    yield f"  host memory of a node: {size(plan.host)}, beside libraries and the data's own"
    yield f"  largest batch, without kept graphs: {_pairs(plan, plan.largest())}"
    seconds = plan.seconds
    if seconds is None:
        yield "  no times: this chip has no profile (--calibrate makes one of this machine)"
    else:
        names = ("towers", "loss", "communication", "optimizer")
        parts = ", ".join(f"{name} {_seconds(getattr(seconds, name))}" for name in names)
        data = f"; data {_seconds(seconds.data)} meanwhile" if seconds.data else ""
        yield f"\nstep: {_seconds(seconds.total)}, most of it {seconds.bottleneck}"
        yield f"  {parts}{data}"
        if plan.run_seconds is not None:
            count = sum(steps for _, steps in plan.stages)
            yield f"  run: {clock(plan.run_seconds)} for {count:,} steps"
    yield "\nother choices, all else equal:"
    width = max(len(choice.name) for choice in plan.choices())
    yield f"  {'':{width}}  {'peak':>10}  {'step':>9}  {'largest batch':>15}"
    for choice in plan.choices():
        time = "" if choice.seconds is None else _seconds(choice.seconds)
        yield f"  {choice.name:{width}}  {size(choice.peak):>10}  {time:>9}  {_pairs(plan, choice.largest):>15}"


def _pairs(plan: Plan, count: int) -> str:
    """The largest batch as text, or "no limit" where the search has ended."""
    return f"{count:,}" if count < plan.most else "no limit"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
