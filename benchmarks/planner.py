"""The planner beside every measured row: peak memory and time, planned over measured.

    python benchmarks/planner.py            the table of docs/planner.md, and the rows outside its bounds
    python benchmarks/planner.py --fit      the rates of a profile, fitted to every second row
    python benchmarks/planner.py --towers   measure the towers' costs again (benchmarks/results/planner_towers.json)

tests/test_planner_accuracy.py reads the same rows and fails where a bound is broken. Every row of the folder is a case
here, or left out for a reason with a name: `left_out`.
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
from contrastile.bench.loss import OURS, float32_products
from contrastile.bench.subjects import SUBJECTS
from contrastile.bench.towers import MODELS, POOL, Pairs, Towers
from contrastile.engine.graph import MOST_BYTES, MOST_ROWS
from contrastile.losses.base import PairLoss
from contrastile.losses.softmax import Softmax
from contrastile.models.compiled import compiled_parts
from contrastile.planner.compiled import as_compiled
from contrastile.planner.loss import LateSize, LossSize
from contrastile.planner.memory import Held, Side, StepMemory
from contrastile.planner.profile import Profile, target
from contrastile.planner.seconds import exchange_seconds, loss_seconds, step_seconds, update_seconds
from contrastile.planner.towers import TowerCost, Work, made_without_memory, measure, shapes_only
from contrastile.train.planned import made_up_tokenizer, update_work
from contrastile.train.recipe import load_recipe
from contrastile.train.run import build_run

CLIP = "clip-vit-l-14"
RESULTS = Path(__file__).parent / "results"
TOWERS = RESULTS / "planner_towers.json"
LOSS_FILES = ("h200_loss", "h200_2_ranks", "h200_4_ranks")
# rows that nothing was fitted to
NEW_LOSSES, MEMORY, TOKENS, OTHER_LOSSES = "h200_planner_loss", "h200_memory", "h200_maxsim", "h200_loss_ratios"
# files whose rows have the plan of their day, and those of a CPU
CARRIED, CPU = ("h200_features", "h200_largest", "late_batches", "h200_late_batches"), ("cpu_loss", "cpu_memory")
# TFLOP/s of the product beside a loss on most H200s; others run at other clocks
USUAL_PRODUCT = 665
STEP_FILES = ("h200_step", "h200_2_step", "h200_4_step", "h200_8_step", "h200_towers")
# behind the name of a model whose towers are compiled
COMPILED = ", compiled"
# losses with positives in any place, by their names in the files, and those of `contrastile bench loss`
LABELLED = {
    "balanced": "siglip_balanced",
    "inside": "supcon_in",
    "clip_labels": "clip_labels",
    "siglip_labels": "siglip_labels",
}
SUB_BATCHES = {"vit-b-16": (128, 256, 512, 1024), "vit-l-14": (192, 384)}
WORKSPACES = {"workspace 192 MiB": 192 * 2**20, "workspace 32 MiB": 32 * 2**20}
# rates that the rows can tell, and those fitted to whole steps
OF_LOSSES, OF_STEPS = ("loss", "pair", "block", "call", "hop"), ("products", "bandwidth", "launch", "dense_pair")

RUN, SHORT = "seconds of a whole run, beside others", "texts shorter than the encoder's limit, with which it is planned"
EAGER = "eager tiles on a GPU, of a loss that has kernels"
# files without a row that the planner could meet, and why
FILES_LEFT_OUT = {
    **dict.fromkeys(
        ("cpu_loss_ways_docstrings", "cpu_loss_ways_glyphs", "cpu_losses_float32", "cpu_losses_float64"), RUN
    ),
    **dict.fromkeys(("h200_2_batches", "h200_losses", "late_docstrings", "late_docstrings_time"), RUN),
    **dict.fromkeys(("h200_retrieval", "h200_updates"), SHORT),
    "h200_doors": "models and loops of other libraries",
    "h200_user_calls": "seconds of whole calls, without their bytes",
    "h200_host_features": "tensors of the bench itself in the peak, and no time of copies in the plan",
}
# Rows that no plan of today's code can meet, with the reason: (file, backend or way, batch, sub-batch) of memory.
# "auto" of commit 75cffff kept fewer graphs than the rule of later rows of the same cases; two sums of a super-tile
# were held at once in the forward until the commit that added this file (later rows of the case are met).
OTHER_CODE = {
    ("h200_step", "retain auto", 1024, "128", "81472923136"): "an earlier rule of retain",
    ("h200_step", "retain auto, streamed", 1024, "256", "70040943104"): "an earlier rule of retain",
    ("h200_step", "retain auto", 8192, "256", "88905820672"): "an earlier rule of retain",
    **{
        ("cpu_loss", "eager", b, None, count): "a tile was still held while the next was computed"
        for b, several in ((4096, ("21274636", "16838672")), (8192, ("25763852", "21082128")))
        for count in several
    },
    ("h200_2_ranks", "triton, one process", 262144, None, "4311745024"): "two sums at once in the forward",
    ("h200_4_ranks", "triton, one process", 262144, None, "4311745024"): "two sums at once in the forward",
}


# losses whose rows are of another code, and what it did
GUIDED, BESIDE = ("gist", "distill"), "the guide's product beside the other"
# kernels that had no copies in the order of labels
UNORDERED = "labels in the order of the rows"
# reasons against the seconds of a row, whose bytes are planned
CAPTURED, HOST = "such calls are captured and replayed today", "bound by a host whose rates were not measured"
DISTURBED = "eleven measurements of the case took 607 to 638 ms"
# cases with so little workspace that the host launches 256 blocks: machines differ in them by 36 to 93 %
HOST_BOUND = "clip triton, workspace 32 MiB 65536 x 512", "clip triton, workspace 32 MiB 65536 x 768"


@dataclass(frozen=True)
class Case:
    """A measured row: its file and label, bytes and seconds measured, what the planner needs.

    other_code, untimed: the reason why its bytes, or its seconds, are not planned.
    """

    file: str
    label: str
    bytes: int | None
    seconds: float | None
    loss: LossSize | None = None
    step: StepMemory | None = None
    precision: str = "highest"
    other_code: str | None = None
    untimed: str | None = None
    # of long steps the rate of a product in the same minute, over the usual one
    clock: float = 1.0
    fitted: bool = False
    # the plan of the day of the row
    planned: int | None = None
    # of an optimizer's step alone
    update: Work | None = None

    @property
    def timed(self) -> bool:
        return self.seconds is not None and self.untimed is None

    @property
    def planned_bytes(self) -> int:
        if self.planned is not None:
            return self.planned
        with float32_products(self.precision):
            return self.step.peak().bytes if self.step is not None else self.loss.peak

    def planned_seconds(self, profile: Profile) -> float:
        if self.update is not None:
            return update_seconds(self.update, profile)
        if self.step is None:
            rates = {"loss": profile.loss * self.clock, "pair": profile.pair / self.clock}
            with float32_products(self.precision):
                own = loss_seconds(self.loss, replace(profile, **rates))
            return own + exchange_seconds(self.loss, profile)
        trained = sum(side.cost.trained for side in self.step.sides)
        # the bench of steps takes no optimizer's step
        return step_seconds(self.step, profile, per_node=8, trained=trained).total


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a file that are cases."""
    return [row for row in read_rows(RESULTS / f"{name}.csv") if left_out(name, row) is None]


def left_out(name: str, row: dict[str, str]) -> str | None:
    """The reason why a row of a file is no case; None for one that is."""
    if name in FILES_LEFT_OUT:
        return FILES_LEFT_OUT[name]
    impl, plan = row.get("impl", OURS), row.get("planned_bytes") or row.get("planned_mib")
    ours = (OURS, "one way") if name == TOKENS else OURS
    if name in STEP_FILES:
        plain = impl == "plain" and row["way"].removesuffix(COMPILED) == "whole batch"
        ours = impl if plain else (OURS, "by hand")
    reasons = {
        "another implementation": name not in CARRIED and not impl.startswith(ours),
        "no plan beside it": name in CARRIED and not plan,
        "out of memory, or too long": "" in (row.get("ms"), row.get("peak_bytes")) or row.get("outcome") == "fails",
        SHORT: row.get("model", "").startswith("bert"),
        "no gradients": name == TOKENS and row["what"] != "loss + grads",
        EAGER: name in (OTHER_LOSSES, TOKENS) and "eager" in impl + row.get("backend", ""),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def loss_of(name: str, d: int) -> dict[str, Any]:
    """A loss of `contrastile bench loss` as the planner's sizes have it."""
    loss = SUBJECTS[LABELLED.get(name, name)].module()
    while not isinstance(loss, PairLoss):
        loss = loss.loss
    listed = name in LABELLED
    return {"loss": loss, "listed": listed, "labels": listed, "guide": d if loss.guides else 0}


def loss_cases(memory: int) -> Iterator[Case]:
    count = 0
    for name in (*LOSS_FILES, NEW_LOSSES):
        for row in rows(name):
            count += 1
            world, b, backend = int(row["world"]), int(row["b"]), row["backend"]
            exchange = next((way for way in ("gather", "ring") if way in backend), "single")
            workspace = next((size for mark, size in WORKSPACES.items() if mark in backend), 2 * 2**30)
            dtype = getattr(torch, row["dtype"])
            size = LossSize(
                b // world, b // world, world, int(row["d"]), memory, exchange, "triton", "cuda", workspace, dtype,
                dtype, **loss_of(row["loss"], int(row["d"])),
            )  # fmt: skip
            label = f"{row['loss']} {backend} {b} x {row['d']} {row['dtype']} on {world}"
            precision = "high" if "precision high" in backend else "highest"
            reason = OTHER_CODE.get((name, backend, b, None, row["peak_bytes"]))
            seconds = float(row["ms"]) / 1e3
            captured = CAPTURED if world == 1 and b <= MOST_ROWS and 2 * b * b <= MOST_BYTES else None
            untimed = HOST if label.startswith(HOST_BOUND) else captured
            clock = float(row["effective_tflops"]) / float(row["ratio"]) / USUAL_PRODUCT
            # beside a shorter step the product runs in bursts, at another clock
            clock = clock if seconds > MOST_PRODUCT_SECONDS else 1.0
            fitted = name != NEW_LOSSES and count % 2 == 1
            peak = int(row["peak_bytes"])
            yield Case(name, label, peak, seconds, size, None, precision, reason, untimed, clock, fitted)


def rank_cases(memory: int) -> Iterator[Case]:
    """One rank's loss in a world that is not there: bytes alone, because the times lack communication."""
    for row in rows(MEMORY):
        world, b = int(row["world"]), int(row["b"])
        exchange, backend = row["way"].split(", ")
        size = LossSize(b // world, b // world, world, int(row["d"]), memory, exchange, backend)
        yield Case(MEMORY, f"{row['way']} {b} x {row['d']} on {world}", int(row["peak_bytes"]), None, size)


def other_losses(memory: int) -> Iterator[Case]:
    """Losses beside `ClipLoss` and `SigLipLoss` in fused kernels: bytes alone, kernels have become faster since."""
    for row in rows(OTHER_LOSSES):
        loss, b, d = row["loss"], int(row["b"]), int(row["d"])
        size = LossSize(b, b, 1, d, memory, "single", "triton", workspace=2 * 2**30, **loss_of(loss, d))
        label, peak = f"{loss} {b} x {row['d']}", int(row["peak_bytes"])
        # with a guide, calls of fewer rows take as much as then
        reason = UNORDERED if size.labels else BESIDE if loss in GUIDED and b > MOST_ROWS else None
        yield Case(OTHER_LOSSES, label, peak, None, size, other_code=reason)


def cpu_cases(memory: int) -> Iterator[Case]:
    """Losses of a CPU, alone and of one rank: bytes alone, because a CPU has no profile."""
    for name in CPU:
        for row in rows(name):
            world, b, (exchange, backend) = int(row["world"]), int(row["b"]), ("single", row.get("backend"))
            if name == "cpu_memory":
                exchange, backend = row["way"].split(", ")
            size = LossSize(
                b // world, b // world, world, int(row["d"]), memory, exchange, str(backend), "cpu",
                dtype=torch.float32, given=torch.float32, **loss_of(row.get("loss", "clip"), int(row["d"])),
            )  # fmt: skip
            label = f"{row.get('loss', 'clip')} {exchange}, {backend} {b} x {row['d']} on {world} CPUs"
            reason = OTHER_CODE.get((name, str(backend), b, None, row["peak_bytes"]))
            yield Case(name, label, int(row["peak_bytes"]), None, size, other_code=reason)


# the optimizers of h200_features.csv, and those whose rows were used for the constants of their kernels
OPTIMIZERS = {
    "Adafactor of the recipe": ([], True),
    "Adafactor without momentum": (["optim.betas=[0.0, 0.95]"], False),
    "AdamW": (["optim={kind='adamw'}"], True),
}


def updates() -> dict[str, Work]:
    """The work of optimizers on the weights of the paper's recipe, without clipping."""
    recipe = load_recipe(CLIP, files=False).model_copy(update={"device": "meta"})
    with made_without_memory():
        model = build_run(recipe, made_up_tokenizer(recipe.model.tokenizer)).model
    return {
        name: update_work(model, load_recipe(CLIP, words, files=False).optim, clipped=False)
        for name, (words, _) in OPTIMIZERS.items()
    }


def carried_cases(_: int) -> Iterator[Case]:
    """Steps whose rows have the plan of their day: of recipes, at the largest batch of a card, of late interaction."""
    works = updates()
    for name in CARRIED:
        for row in rows(name):
            scale, columns = (
                (2**20, ("peak_mib", "planned_mib")) if "peak_mib" in row else (1, ("peak_bytes", "planned_bytes"))
            )
            measured, planned = (int(scale * float(row[column])) for column in columns)
            words = (row[key] for key in ("what", "impl", "way", "model", "world", "batch", "b") if key in row)
            seconds, update, fitted = None, None, False
            if row.get("what") == "optimizer":
                way = row["way"].partition(",")[0]
                seconds, update, fitted = float(row["ms"]) / 1e3, works[way], OPTIMIZERS[way][1]
            yield Case(name, ", ".join(words), measured, seconds, planned=planned, update=update, fitted=fitted)


def step_cases(memory: int) -> Iterator[Case]:
    costs, number = tower_costs(), 0
    for name in STEP_FILES:
        for row in rows(name):
            world, way = int(row["world"]), row["way"].removesuffix(COMPILED)
            model = row["model"] + COMPILED * (compiled := way != row["way"])
            plain = row["impl"] == "plain" and way == "whole batch"
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
            untimed = DISTURBED if plain and row["ms"] == "920.45" else None
            yield Case(name, label, measured, seconds, None, step, other_code=reason, untimed=untimed, fitted=fitted)


def token_cases(memory: int) -> Iterator[Case]:
    """Whole losses of token vectors with gradients; the constants of their seconds are from the rows of 1,024²."""
    for row in rows(TOKENS):
        names = ("queries", "documents", "query_tokens", "document_tokens", "d")
        N, M, L, T, D = (int(row[name]) for name in names)
        loss = Softmax(symmetric="one way" not in row["impl"])
        size = LateSize(N, M, 1, D, memory, "single", "triton", loss=loss, tokens=(L, T), masked=False)
        label = f"{'symmetric' if loss.symmetric else 'one way'}, {N} x {M} of {L} x {T} tokens"
        peak, seconds = int(float(row["peak_mib"]) * 2**20), float(row["ms"]) / 1e3
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
        if case.seconds and case.untimed not in (CAPTURED, DISTURBED):
            seconds.setdefault(case.label, []).append(case.seconds)
    return {label for label, several in seconds.items() if max(several) > 1.1 / 0.9 * min(several)}


KINDS = {
    "losses": loss_cases, "other losses": other_losses, "ranks": rank_cases, "steps": step_cases, "tokens": token_cases,
    "carried": carried_cases, "cpu": cpu_cases,
}  # fmt: skip


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
        steady, steps = (
            [case for case in cases[kind] if case.fitted and case.timed and "32 MiB" not in case.label]
            for kind in ("losses", "steps")
        )
        profile = fit(steps, OF_STEPS, fit(steady, OF_LOSSES, profile))
        for name in (*OF_LOSSES, *OF_STEPS):
            print(f"{name} = {getattr(profile, name):.3g}")
        return
    heads = ["", "bytes of rows", "within 5 %", "10 %", "seconds of rows", "within 10 %", "20 %"]
    heads += ["not fitted to", "within 10 %"]
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    outside = []
    for kind, several in cases.items():
        memory = [case.planned_bytes / case.bytes - 1 for case in several if case.bytes and not case.other_code]
        times = [(case.planned_seconds(profile) / case.seconds - 1, case.fitted) for case in several if case.timed]
        new = [x for x, fitted in times if not fitted]
        cells = [kind, len(memory), *(sum(abs(x) <= most for x in memory) for most in (0.05, 0.1)), len(times)]
        cells += [*(sum(abs(x) <= most for x, _ in times) for most in (0.1, 0.2)), len(new)]
        print("|", " | ".join(map(str, [*cells, sum(abs(x) <= 0.1 for x in new)])), "|")
        for case in several:
            far = case.planned_seconds(profile) / case.seconds - 1 if case.seconds else 0.0
            fitted = ", a row of the fit" if case.fitted else ""
            if case.bytes and abs(more := case.planned_bytes / case.bytes - 1) > 0.05:
                outside.append(f"bytes {more:+.1%}: {case.file}: {case.label}; {case.other_code or 'not explained'}")
            if abs(far) > 0.1:
                outside.append(
                    f"seconds {far:+.1%}: {case.file}: {case.label}{fitted}; {case.untimed or 'not explained'}"
                )
    print("\n".join(["", *outside]))


if __name__ == "__main__":
    main()
