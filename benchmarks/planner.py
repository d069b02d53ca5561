"""The planner beside every measured row: peak memory and time, planned over measured.

    python benchmarks/planner.py            the table of docs/planner.md, and the rows outside its bounds
    python benchmarks/planner.py --fit      the rates of a profile, fitted to every second row
    python benchmarks/planner.py --towers   measure the towers' costs again (benchmarks/results/planner_towers.json)

tests/test_planner_accuracy.py reads the same rows and fails where a bound is broken.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from contrastile.bench.harness import MOST_PRODUCT_SECONDS, read_rows
from contrastile.bench.loss import float32_products
from contrastile.bench.towers import MODELS, POOL, Pairs, Towers
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.models.compiled import compiled_parts
from contrastile.planner.compiled import as_compiled
from contrastile.planner.late import LateSize
from contrastile.planner.loss import LossSize
from contrastile.planner.memory import Held, Side, StepMemory
from contrastile.planner.profile import Profile, target
from contrastile.planner.seconds import exchange_seconds, loss_seconds, step_seconds
from contrastile.planner.towers import TowerCost, measure, shapes_only

RESULTS = Path(__file__).parent / "results"
TOWERS = RESULTS / "planner_towers.json"
LOSS_FILES = ("h200_loss", "h200_2_ranks", "h200_4_ranks")
# rows that nothing was fitted to
NEW_LOSSES, MEMORY, TOKENS = "h200_planner_loss", "h200_memory", "h200_maxsim"
# TFLOP/s of the product beside a loss on most H200s; others run at other clocks
USUAL_PRODUCT = 665
STEP_FILES = ("h200_step", "h200_2_step", "h200_4_step", "h200_8_step", "h200_towers")
# behind the name of a model whose towers are compiled
COMPILED = ", compiled"
LOSSES = {"clip": Softmax(symmetric=True), "siglip": Sigmoid()}
SUB_BATCHES = {"vit-b-16": (128, 256, 512, 1024), "vit-l-14": (192, 384)}
WORKSPACES = {"workspace 192 MiB": 192 * 2**20, "workspace 32 MiB": 32 * 2**20}
# rates that the rows can tell, and those fitted to whole steps
OF_LOSSES, OF_STEPS = ("loss", "pair", "block", "call", "hop"), ("products", "bandwidth", "launch", "dense_pair")

# Rows that no plan of today's code can meet, with the reason: (file, backend or way, batch, sub-batch) of memory.
# "auto" of commit 75cffff kept fewer graphs than the rule of later rows of the same cases; two sums of a super-tile
# were held at once in the forward until the commit that added this file (later rows of the case are met).
OTHER_CODE = {
    ("h200_step", "retain auto", 1024, "128", "81472923136"): "an earlier rule of retain",
    ("h200_step", "retain auto, streamed", 1024, "256", "70040943104"): "an earlier rule of retain",
    ("h200_step", "retain auto", 8192, "256", "88905820672"): "an earlier rule of retain",
    ("h200_2_ranks", "triton, one process", 262144, None, "4311745024"): "two sums at once in the forward",
    ("h200_4_ranks", "triton, one process", 262144, None, "4311745024"): "two sums at once in the forward",
}


@dataclass(frozen=True)
class Case:
    """A measured row: its file and label, bytes and seconds measured, what the planner needs, a reason if left out."""

    file: str
    label: str
    bytes: int | None
    seconds: float | None
    loss: LossSize | None = None
    step: StepMemory | None = None
    precision: str = "highest"
    other_code: str | None = None
    # of long steps the rate of a product in the same minute, over the usual one
    clock: float = 1.0
    fitted: bool = False

    @property
    def planned_bytes(self) -> int:
        with float32_products(self.precision):
            return self.step.peak().bytes if self.step is not None else self.loss.peak

    def planned_seconds(self, profile: Profile) -> float:
        if self.step is None:
            rates = {"loss": profile.loss * self.clock, "pair": profile.pair / self.clock}
            with float32_products(self.precision):
                own = loss_seconds(self.loss, replace(profile, **rates))
            return own + exchange_seconds(self.loss, profile, profile.link)
        trained = sum(side.cost.trained for side in self.step.sides)
        seconds = step_seconds(self.step, profile, per_node=8, trained=trained)
        # the bench of steps takes no optimizer's step
        return seconds.total - seconds.optimizer


def rows(name: str) -> list[dict[str, str]]:
    return read_rows(RESULTS / f"{name}.csv")


def loss_cases(memory: int) -> Iterator[Case]:
    count = 0
    for name in (*LOSS_FILES, NEW_LOSSES):
        for row in rows(name):
            if row["impl"] != "contrastile":
                continue
            count += 1
            world, b, backend = int(row["world"]), int(row["b"]), row["backend"]
            exchange = next((way for way in ("gather", "ring") if way in backend), "single")
            workspace = next((size for mark, size in WORKSPACES.items() if mark in backend), 2 * 2**30)
            dtype = getattr(torch, row["dtype"])
            size = LossSize(
                b // world, b // world, world, int(row["d"]), memory, exchange, "triton", "cuda", workspace, dtype,
                dtype, LOSSES[row["loss"]],
            )  # fmt: skip
            label = f"{row['loss']} {backend} {b} x {row['d']} {row['dtype']} on {world}"
            precision = "high" if "precision high" in backend else "highest"
            reason = OTHER_CODE.get((name, backend, b, None, row["peak_bytes"]))
            seconds = float(row["ms"]) / 1e3
            clock = float(row["effective_tflops"]) / float(row["ratio"]) / USUAL_PRODUCT
            # beside a shorter step the product runs in bursts, at another clock
            clock = clock if seconds > MOST_PRODUCT_SECONDS else 1.0
            fitted = name != NEW_LOSSES and count % 2 == 1
            yield Case(name, label, int(row["peak_bytes"]), seconds, size, None, precision, reason, clock, fitted)


def rank_cases(memory: int) -> Iterator[Case]:
    """One rank's loss in a world that is not there: bytes alone, because the times lack communication."""
    for row in rows(MEMORY):
        if row["impl"] == "contrastile" and row["peak_bytes"]:
            world, b = int(row["world"]), int(row["b"])
            exchange, backend = row["way"].split(", ")
            size = LossSize(b // world, b // world, world, int(row["d"]), memory, exchange, backend)
            label = f"{row['way']} {b} x {row['d']} on {world}"
            yield Case(MEMORY, label, int(row["peak_bytes"]), None, size)


def step_cases(memory: int) -> Iterator[Case]:
    costs, number = tower_costs(), 0
    for name in STEP_FILES:
        for row in rows(name):
            world, way = int(row["world"]), row["way"].removesuffix(COMPILED)
            model = row["model"] + COMPILED * (compiled := way != row["way"])
            plain = row["impl"] == "plain" and way == "whole batch"
            # the towers of texts alone have other inputs than pairs
            if not row["ms"] or model.startswith("bert") or not (plain or row["impl"] in ("contrastile", "by hand")):
                continue
            b = int(row["batch"]) // world
            size = min(int(row["sub_batch"] or b), b)
            sides = [Side(cost, b, _inputs(row, b, size, cost)) for cost in costs[model, size]]
            count = sides[0].count
            words = {"all": count, "half": count // 2, "auto": "auto"}
            retain: Any = count if plain else words.get(row.get("retain", "0"), 0)
            exchange, backend = way.split(", ") if world > 1 else ("single", "triton")
            weights, trained = (sum(getattr(side.cost, key) for side in sides) for key in ("weights", "trained"))
            loss = LossSize(b, b, world, sides[0].cost.dimensions, memory, exchange, backend)
            step = StepMemory(sides, loss, Held(weights=weights, step=trained if world > 1 else 0), retain)
            label = f"{model} {row['impl']}, {way}, {row['batch']} by {row['sub_batch']} on {world}"
            # plain steps and those by hand hold other tensors: their times alone are planned
            measured = int(row["peak_bytes"]) if row["impl"] == "contrastile" or compiled else None
            reason = OTHER_CODE.get((name, way, int(row["batch"]), row["sub_batch"], row["peak_bytes"]))
            # nothing was fitted to the rows of h200_towers
            number += name != "h200_towers"
            seconds, fitted = float(row["ms"]) / 1e3, number % 2 == 1 and name != "h200_towers"
            yield Case(name, label, measured, seconds, None, step, other_code=reason, fitted=fitted)


def token_cases(memory: int) -> Iterator[Case]:
    """Whole losses of token vectors with gradients; the constants of their seconds are from the rows of 1,024²."""
    for row in rows(TOKENS):
        if row["what"] != "loss + grads" or not row["impl"].startswith(("contrastile", "one way")):
            continue
        names = ("queries", "documents", "query_tokens", "document_tokens", "d")
        N, M, L, T, D = (int(row[name]) for name in names)
        backend = "eager" if "eager" in row["impl"] else "triton"
        loss = Softmax(symmetric="one way" not in row["impl"])
        size = LateSize(N, M, 1, D, memory, "single", backend, loss=loss, tokens=(L, T), masked=False)
        label = f"{'symmetric' if loss.symmetric else 'one way'}, {backend}, {N} x {M} of {L} x {T} tokens"
        peak, seconds = int(float(row["peak_mib"]) * 2**20), float(row["ms"]) / 1e3
        if backend == "triton":
            yield Case(TOKENS, label, peak, seconds, size, fitted=N == 1024)


def _inputs(row: dict[str, str], b: int, size: int, cost: TowerCost) -> int:
    """Bytes of a side's inputs on the device: the batch, two sub-batches, or a pool and indices into it."""
    inputs = row.get("inputs", "device")
    if inputs == "pool":
        return min(POOL, 16 * MODELS[row["model"]].sub_batch) * cost.inputs + 8 * b
    return {"device": b, "host": 2 * size}[inputs] * cost.inputs


def tower_costs() -> dict[tuple[str, int], list[TowerCost]]:
    """The committed costs of both towers, by model and sub-batch."""
    costs: dict[tuple[str, int], list[TowerCost]] = {}
    for entry in json.loads(TOWERS.read_text()):
        model = entry.pop("model")
        costs.setdefault((model, entry["sub_batch"]), []).append(TowerCost.from_dict(entry))
    return costs


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
        return [math.log(case.planned_seconds(changed(x)) / case.seconds) for case in cases]

    start = np.log([getattr(profile, name) for name in names])
    return changed(least_squares(errors, start, loss="soft_l1", f_scale=0.05).x)


def unsteady(cases: Iterable[Case]) -> set[str]:
    """The cases of which two measurements differ by more than a plan within 10 % of both could."""
    seconds: dict[str, list[float]] = {}
    for case in cases:
        seconds.setdefault(case.label, []).append(case.seconds or 1.0)
    return {label for label, several in seconds.items() if max(several) > 1.1 / 0.9 * min(several)}


KINDS = {"losses": loss_cases, "ranks": rank_cases, "steps": step_cases, "tokens": token_cases}


def main() -> None:
    if "--towers" in sys.argv:
        entries = [entry for model, sizes in SUB_BATCHES.items() for entry in measured_towers(model, sizes)]
        for model, size in (("vit-b-16", 512), ("vit-l-14", 192)):
            entries += measured_towers(model, (size,), compiled=True)
        TOWERS.write_text(json.dumps(entries, indent=1) + "\n")
        return
    profile = target("H200").profile
    cases = {kind: list(make(profile.memory)) for kind, make in KINDS.items()}
    if "--fit" in sys.argv:
        # rows with the least workspace are those of the host
        steady = [case for case in cases["losses"] if case.fitted and "32 MiB" not in case.label]
        steps = [case for case in cases["steps"] if case.fitted]
        profile = fit(steps, OF_STEPS, fit(steady, OF_LOSSES, profile))
        for name in (*OF_LOSSES, *OF_STEPS):
            print(f"{name} = {getattr(profile, name):.3g}")
        return
    heads = ("", "rows", "bytes within 5 %", "10 %", "rows not fitted to", "seconds within 10 %", "20 %", "unsteady")
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    outside = []
    for kind, several in cases.items():
        memory = [case.planned_bytes / case.bytes - 1 for case in several if case.bytes and not case.other_code]
        apart = unsteady(several) if kind in ("losses", "tokens") else set()
        new = [case for case in several if case.seconds and not case.fitted]
        times = [case.planned_seconds(profile) / case.seconds - 1 for case in new if case.label not in apart]
        cells = [kind, len(memory), *(sum(abs(x) <= most for x in memory) for most in (0.05, 0.1)), len(times)]
        cells += [*(sum(abs(x) <= most for x in times) for most in (0.1, 0.2)), len(new) - len(times)]
        print("|", " | ".join(map(str, cells)), "|")
        for case in several:
            far = case.planned_seconds(profile) / case.seconds - 1 if case.seconds else 0.0
            fitted = ", a row of the fit" if case.fitted else ""
            if case.bytes and abs(more := case.planned_bytes / case.bytes - 1) > 0.05:
                outside.append(f"bytes {more:+.1%}: {case.file}: {case.label}; {case.other_code or 'not explained'}")
            if abs(far) > 0.1:
                outside.append(f"seconds {far:+.1%}: {case.file}: {case.label}{fitted}")
    print("\n".join(["", *outside]))


if __name__ == "__main__":
    main()
