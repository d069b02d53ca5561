"""The planner beside every measured row: peak memory and time, planned over measured.

    python benchmarks/planner.py              the table of docs/planner.md, and the rows outside its bounds
    python benchmarks/planner.py --fit H100   the rates of a chip's profile, fitted to every second of its rows
    python benchmarks/planner.py --towers     measure the towers' costs again (benchmarks/results/planner_towers.json)

`planner_rows.py` makes cases of the rows. tests/test_planner_accuracy.py reads the same and fails where a bound is
broken.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from planner_rows import CHIPS, COMPILED, KINDS, TOWERS, Case, cases, profile_of

from contrastile.bench.towers import Pairs, Towers
from contrastile.experiments.results import markdown
from contrastile.models.base import compiled_parts
from contrastile.planner.profile import Profile
from contrastile.planner.towers import as_compiled, measure, shapes_only

SUB_BATCHES = {"vit-b-16": (128, 256, 512, 1024), "vit-l-14": (192, 384)}
# the rates that rows of a kind can tell
RATES = {
    "losses": ("loss", "pair", "block", "call", "hop"),
    "ranks": ("dense_pair",),
    "steps": ("products", "bandwidth", "launch"),
}
# kinds of rows as docs/planner.md calls them
TITLES = {
    "losses": "`ClipLoss` and `SigLipLoss`, one to four H200s, one H100",
    "calls": "users' calls: `ClipLoss`, `InfoNCELoss` and `SigLipLoss` under autocast and in float32, `ClipLoss` of "
    "few rows on two and four GPUs",
    "other losses": "each loss beside `ClipLoss`, 8k and 32k rows, one H200",
    "ranks": "losses of one rank of 8 to 128",
    "steps": "steps of ViT-B/16 and ViT-L/14, one to eight H200s, one H100, compiled ones too, under DDP and FSDP2",
    "tokens": "losses of token vectors with gradients, 64² to 16,384² pairs, one and four H200s, one H100",
    "carried": "updates of late interaction, LiT, optimizers, steps at the largest batch of a card",
    "cpu": "losses of a CPU, alone and one rank of 8 and 32",
}
# the weight of a rate's distance from the profile's present one: what no row tells stays
PRIOR = 0.1


def measured_towers(model: str, sub_batches: tuple[int, ...], *, compiled: bool = False) -> Iterator[dict[str, Any]]:
    """The costs of a model's towers, as they are committed."""
    with shapes_only():
        towers = Towers(model, torch.device("cpu"))
        pairs, context = Pairs(towers, most=1), partial(torch.autocast, "cpu", dtype=torch.bfloat16)
        sides = (("image", towers.image, pairs.images), ("text", towers.text, pairs.texts))
        for size, (name, tower, pool) in product(sub_batches, sides):

            def inputs(n: int, pool: torch.Tensor = pool) -> list[torch.Tensor]:
                return [pool.new_empty((n, *pool.shape[1:]))]

            def features(n: int, tower: Any = tower, inputs: Any = inputs) -> torch.Tensor:
                with context():
                    return tower(*inputs(n))

            with as_compiled(compiled_parts(tower) if compiled else (), features, size):
                cost = measure(name, tower, inputs, tower, size, context, builds_graph=compiled)
            yield {"model": model + COMPILED * compiled, **asdict(cost)}


def fit(cases: list[Case], names: tuple[str, ...], profile: Profile) -> Profile:
    """The profile with these rates fitted to the cases, in relative terms and little moved by outliers."""
    import numpy as np
    from scipy.optimize import least_squares

    def changed(x: Any) -> Profile:
        rates = dict(zip(names, map(float, np.exp(x)), strict=True))
        if "products" in rates:
            rates["attention"] = rates["products"] / 2
        return replace(profile, **rates)

    def errors(x: Any) -> list[float]:
        far = [math.log(case.planned_seconds(changed(x)) / case.seconds) for case in cases]
        return [*far, *(PRIOR * (x - start))]

    start = np.log([getattr(profile, name) for name in names])
    return changed(least_squares(errors, start, loss="soft_l1", f_scale=0.05).x)


def fitted(chip: str, every: dict[str, list[Case]]) -> Profile:
    """The profile of a chip fitted to its rows of the fit."""
    profile = profile_of(chip)
    for kind, names in RATES.items():
        of_fit = [case for case in every[kind] if case.chip == chip and case.fitted and case.timed]
        # rows with the least workspace are those of the host
        told = [case for case in of_fit if "32 MiB" not in case.label]
        profile = fit(told, names, profile)
    return profile


def main() -> None:
    if "--towers" in sys.argv:
        entries = [entry for model, sizes in SUB_BATCHES.items() for entry in measured_towers(model, sizes)]
        for model, sizes in SUB_BATCHES.items():
            entries += measured_towers(model, sizes[-2:], compiled=True)
        TOWERS.write_text(json.dumps(entries, indent=1) + "\n")
        return
    every = {kind: list(cases(kind)) for kind in KINDS}
    if "--fit" in sys.argv:
        chip = next((word for word in sys.argv if word in CHIPS), CHIPS[0])
        profile = fitted(chip, every)
        for name in (name for names in RATES.values() for name in names):
            print(f"{name} = {getattr(profile, name):.3g}")
        return
    print(accuracy(every))
    outside = []
    for case in (case for several in every.values() for case in several):
        if case.bytes and abs(more := case.planned_bytes / case.bytes - 1) > 0.05:
            outside.append(f"bytes {more:+.1%}: {case.file}: {case.label}; {case.other_code or 'not explained'}")
        if case.seconds and abs(far := case.planned_seconds() / case.seconds - 1) > 0.1:
            of_fit, reason = ", a row of the fit" if case.fitted else "", case.untimed or "not explained"
            outside.append(f"seconds {far:+.1%}: {case.file}: {case.label}{of_fit}; {reason}")
    print("\n".join(["", *outside]))


def accuracy(every: dict[str, list[Case]]) -> str:
    """The table of docs/planner.md: of each kind, the rows whose plans are near."""
    heads = ["", "rows with bytes", "within 5 %", "within 10 %", "rows with seconds", "within 10 %", "within 20 %"]
    table = []
    for kind, several in every.items():
        memory = [case.planned_bytes / case.bytes - 1 for case in several if case.bytes and not case.other_code]
        times = [(case.planned_seconds() / case.seconds - 1, case.fitted) for case in several if case.timed]
        new = [x for x, fitted in times if not fitted]
        cells = [len(memory), *(sum(abs(x) <= most for x in memory) for most in (0.05, 0.1)), len(times)]
        cells += [*(sum(abs(x) <= most for x, _ in times) for most in (0.1, 0.2)), len(new)]
        table.append([TITLES[kind], *cells, sum(abs(x) <= 0.1 for x in new)])
    return markdown([*heads, "not fitted to", "within 10 %"], table)


if __name__ == "__main__":
    main()
