"""The rows of benchmarks/results as the planner sees them, each a case or left out for a reason with a name.

`planner.py` beside it compares plans with the cases, and fits rates to some. A file belongs to a kind by its name, a
row to a chip by its column: new files of known names, and rows of further chips with a profile, are cases too.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from contrastile.bench.harness import MOST_PRODUCT_SECONDS, read_rows
from contrastile.bench.loss import OURS, float32_products
from contrastile.bench.subjects import SUBJECTS
from contrastile.bench.towers import MODELS, POOL
from contrastile.losses.base import PairLoss
from contrastile.losses.softmax import Softmax
from contrastile.planner.loss import LateSize, LossSize
from contrastile.planner.memory import Held, Side, StepMemory
from contrastile.planner.profile import Profile, target
from contrastile.planner.seconds import exchange_seconds, loss_seconds, step_seconds, update_seconds
from contrastile.planner.towers import TowerCost, Work, made_on_meta
from contrastile.train.planned import made_up_tokenizer, update_work
from contrastile.train.recipe import load_any_recipe
from contrastile.train.run import Run

CLIP = "clip-vit-l-14"
RESULTS = Path(__file__).parent / "results"
TOWERS = RESULTS / "planner_towers.json"
# chips with a profile
CHIPS = ("H200", "H100")
# losses whose 32,768 rows gave the time of their pairs
OF_PAIRS = ("gist", "gist_relative", "siglip_labels", "siglip_balanced")
# behind the name of a model whose towers are compiled, and of a way whose inputs are indices
COMPILED, POOLED = ", compiled", ", from a pool"
# losses of `contrastile bench loss` with positives by label; with negatives or keys of each row alone
LABELLED = ("clip_labels", "clip_two_labels", "siglip_labels", "siglip_balanced", "supcon", "supcon_in")
OF_ROWS = ("own", "hardness_own", "own_alone", "kl", "margin_mse")
WORKSPACES = {"workspace 192 MiB": 192 * 2**20, "workspace 32 MiB": 32 * 2**20}
EXCHANGES = ("replicate", "gather", "ring", "hierarchical")

RUN, SHORT = "seconds of a whole run, beside others", "texts shorter than the encoder's limit, with which it is planned"
EAGER = "eager tiles on a GPU, of a loss that has kernels"
OWN_KEYS = "keys of each row alone, of which two rates were taken"
BENCHED = "losses whose rows are those of the bench"
LIBRARIES = "models and loops of other libraries"
HELD = "tensors of the bench itself in the peak, and no time of copies in the plan"
# files without a row that the planner could meet, by their names behind the chip, and why
FILES_LEFT_OUT = {
    **{f"cpu_loss{name}": RUN for name in ("_ways_docstrings", "_ways_glyphs", "es_float32", "es_float64")},
    **dict.fromkeys(("2_batches", "losses", "late_docstrings", "late_docstrings_time"), RUN),
    **dict.fromkeys(("retrieval", "updates"), SHORT), "doors": LIBRARIES,
    **dict.fromkeys(("host_features", "2_host_features"), HELD),
}  # fmt: skip
# rows whose bytes no plan of today's code can meet, by their file and peak; later rows of these cases are met
OTHER_CODE = {
    ("h200_2_ranks", "4311745024"): "two sums at once in the forward",
    ("h200_memory", "1295335424"): "more than 512 MiB of tiles in a call of few rows",
    ("h200_maxsim", "160.0"): "sums twice at the end",
    ("h200_maxsim", "33.1"): "sums twice at the end",
}
# reasons against the seconds of a row, whose bytes are planned
HOST = "bound by a host whose rates were not measured"
# the name of a loss of token vectors across ranks
SHARED = re.compile(r"(\d+) ranks, (\w+)")
# one machine took twice as long as another: with so little workspace the host launches 256 blocks; a small call
HOST_BOUND = (
    "clip triton, workspace 32 MiB 65536 x 512 bfloat16 on 1",
    "siglip triton 4096 x 768 bfloat16 on 1",
)
# rows up to which a loss takes the host's time: 0.27 to 0.55 ms beside an H200, 0.37 to 0.63 beside an H100
LEAST_ROWS = 4096
# the same in pairs times features, 4,096² of 1,024 and 8,192² of 256
LEAST_PRODUCTS = 2**34
# seconds of a rank alone, and of a hop, below which they are those of the host, which fills the buffers of receives:
# 5 to 8 ms for a gather, 0.5 to 1 ms for a hop
LEAST_ALONE, LEAST_HOP = 0.01, 1e-3


@dataclass(frozen=True)
class Case:
    """A measured row: its file, chip and label, bytes and seconds measured, what the planner needs.

    other_code, untimed: the reason why its bytes, or its seconds, are not planned.
    """

    file: str
    chip: str
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
    # a rank whose others are not there
    alone: bool = False

    @property
    def timed(self) -> bool:
        return self.seconds is not None and self.untimed is None

    @property
    def planned_bytes(self) -> int:
        if self.planned is not None:
            return self.planned
        with float32_products(self.precision):
            return self.step.peak().bytes if self.step is not None else self.loss.peak

    def planned_seconds(self, profile: Profile | None = None) -> float:
        """By the profile of the row's chip, or another; all ranks are on one host."""
        profile = profile or profile_of(self.chip)
        profile = replace(profile, network=profile.link)
        if self.update is not None:
            return update_seconds(self.update, profile)
        if self.step is None:
            rates = {"loss": profile.loss * self.clock, "pair": profile.pair / self.clock}
            with float32_products(self.precision):
                own = loss_seconds(self.loss, replace(profile, **rates))
            return own + (0.0 if self.alone else exchange_seconds(self.loss, profile))
        trained = sum(side.cost.trained for side in self.step.sides)
        # the bench of steps takes no optimizer's step
        return step_seconds(self.step, profile, per_node=self.step.loss.ranks, trained=trained).total


@cache
def profile_of(chip: str) -> Profile:
    profile = target(chip).profile
    assert profile is not None
    return profile


def rows(kind: str) -> Iterator[dict[str, str]]:
    """The rows that are cases of a kind, with their file, and the chip by its short name (empty for a CPU).

    Shorter names of files come first, so that rows are counted in the same order when files are added.
    """
    pattern, _ = KINDS[kind]
    names = [path.stem for path in RESULTS.glob("*.csv") if re.fullmatch(pattern, path.stem)]
    for name in sorted(names, key=lambda name: (len(name), name)):
        for row in read_rows(RESULTS / f"{name}.csv"):
            if left_out(name, row) is None:
                yield row | {"file": name, "chip": next((chip for chip in CHIPS if chip in row["chip"]), "")}


def cases(kind: str) -> Iterator[Case]:
    """The cases of a kind; of those with an equal `half` every second one is of the fit."""
    counts = Counter[str]()
    for row in rows(kind):
        peak, ms = row.get("peak_bytes"), row.get("ms")
        words = {"bytes": int(peak) if peak else None, "seconds": float(ms) / 1e3 if ms else None}
        words |= {"other_code": OTHER_CODE.get((row["file"], peak or row.get("peak_mib"))), **KINDS[kind][1](row)}
        if half := words.pop("half", ""):
            counts[half] += 1
            words["fitted"] = counts[half] % 2 == 1
        yield Case(row["file"], row["chip"], **words)


def left_out(name: str, row: dict[str, str]) -> str | None:
    """The reason why a row of a file is no case; None for one that is."""
    if reason := FILES_LEFT_OUT.get(re.sub(r"^h\d+_", "", name)):
        return reason
    kind = next((kind for kind, (names, _) in KINDS.items() if re.fullmatch(names, name)), None)
    impl, plan = row.get("impl", OURS), row.get("planned_bytes") or row.get("planned_mib")
    ours: Any = OURS
    if kind == "tokens":
        ours = impl if SHARED.match(impl) else (OURS, "one way")
    if kind == "steps":
        plain = impl == "plain" and row["way"].removesuffix(COMPILED) == "whole batch"
        ours = impl if plain else (OURS, "by hand")
    reasons = {
        "another implementation": kind != "carried" and not impl.startswith(ours),
        "no plan beside it": kind == "carried" and not plan,
        "out of memory, or too long": "" in (row.get("ms"), row.get("peak_bytes")) or row.get("outcome") == "fails",
        SHORT: row.get("model", "").startswith("bert"),
        "no gradients": kind == "tokens" and row["what"] != "loss + grads",
        OWN_KEYS: row.get("loss") in OF_ROWS or row.get("call", "").startswith(("negatives", "alone", "scores")),
        BENCHED: row.get("call", "").startswith(
            ("gist", "ntxent", "supcon", "queue", "rows", "validation", "teacher")
        ),
        EAGER: kind in ("other losses", "tokens") and "eager" in impl + row.get("backend", ""),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def size_of(row: dict[str, str], **more: Any) -> LossSize:
    """A row's loss, of which every rank has as many pairs; a CPU has the memory of an H200."""
    words = (row.get("backend") or row["way"]).split(", ")
    exchange = next((word for word in words if word in EXCHANGES), "single")
    backend = next((word for word in words if word in ("dense", "eager")), "triton")
    world, b, d, dtype = int(row["world"]), int(row["b"]), int(row["d"]), getattr(torch, row["dtype"])
    # of two levels, two nodes are measured on one host
    more |= {"dtype": dtype, "feature_dtype": dtype, "node": world // 2 if exchange == "hierarchical" else None}
    more |= loss_of(row.get("loss", "clip"), d)
    memory = profile_of(row["chip"] or CHIPS[0]).memory
    return LossSize(b // world, b // world, world, d, memory, exchange, backend, copies=_copies(row), **more)


def _copies(row: dict[str, str]) -> bool:
    """Copy engines carried what ranks sent; in rows of earlier days NCCL did."""
    return row.get("date", "") > "2026-11-28"


def loss_of(name: str, d: int) -> dict[str, Any]:
    """A loss of `contrastile bench loss` as the planner's sizes have it."""
    loss = SUBJECTS[name].module()
    while not isinstance(loss, PairLoss):
        loss = loss.loss
    listed = name in LABELLED
    return {"loss": loss, "indexed": listed, "labels": listed, "guide": d if loss.guides else 0}


@cache
def usual_product(chip: str) -> float:
    """The rate of the product beside long losses on most of the chips; others run at other clocks."""
    of_chip = (row for row in rows("losses") if row["chip"] == chip)
    return median([_product(row) for row in of_chip if float(row["ms"]) > MOST_PRODUCT_SECONDS * 1e3] or [1.0])


def _product(row: dict[str, str]) -> float:
    """TFLOP/s of the product beside a row."""
    return float(row["effective_tflops"]) / float(row["ratio"])


def of_loss(row: dict[str, str]) -> dict[str, Any]:
    backend, chip = row["backend"], row["chip"]
    size = size_of(row, workspace=next((bytes_ for mark, bytes_ in WORKSPACES.items() if mark in backend), 2 * 2**30))
    label = f"{row['loss']} {backend} {row['b']} x {row['d']} {row['dtype']} on {row['world']}"
    # beside a shorter step the product runs in bursts, at another clock
    clock = _product(row) / usual_product(chip) if float(row["ms"]) / 1e3 > MOST_PRODUCT_SECONDS else 1.0
    busy = label in HOST_BOUND or int(row["b"]) <= LEAST_ROWS or (chip == "H100" and "32 MiB" in label)
    return {
        "label": label, "loss": size, "clock": clock, "untimed": HOST if busy else None,
        "precision": "high" if "precision high" in backend else "highest",
        "half": f"{chip}, {size.exchange}",
    }  # fmt: skip


def of_call(row: dict[str, str]) -> dict[str, Any]:
    """A whole call of users, forward and backward, under autocast in all but some of float32: seconds alone."""
    call, _, more = row["call"].removesuffix(" on each rank").partition(",")
    kind, *numbers = call.replace(" x", "").split()
    several, chip = re.match(r"h\d+_(\d+)_", row["file"]), row["chip"]
    exchange = "ring" if "ring" in row["impl"] else "gather" if several else "single"
    N, *others, d = map(int, numbers)
    given = torch.float32 if "float32" in more and "bf16" not in row["impl"] else torch.bfloat16
    products = torch.float32 if "without autocast" in more else torch.bfloat16
    labels, M, W = kind == "labels", others[0] if others else N, int(several[1]) if several else 1
    name = "clip_labels" if labels and "," in row["impl"] else "clip" if labels else kind
    which = loss_of(name, d) | ({"indexed": True} if "positives" in row["impl"] else {})
    size = LossSize(
        N, M, W, d, profile_of(chip).memory, exchange, "triton", dtype=products, feature_dtype=given,
        copies=_copies(row), **which,
    )  # fmt: skip
    reason = HOST if W == 1 and N * M * d <= LEAST_PRODUCTS else None
    # the host's time of ranks was taken from these
    return {"label": f"{row['call']}: {row['impl']}", "loss": size, "untimed": reason, "fitted": several is not None}


def of_rank(row: dict[str, str]) -> dict[str, Any]:
    """One rank's loss in a world that is not there: its arithmetic, without communication."""
    size = size_of(row)
    # a ring's blocks are launched one by one
    least = max(LEAST_ALONE, LEAST_HOP * size.traffic.hops) if size.exchange == "ring" else LEAST_ALONE
    busy = loss_seconds(size, profile_of(row["chip"])) > least
    return {
        "label": f"{row['way']} {row['b']} x {row['d']} on {row['world']}", "loss": size, "alone": True,
        "untimed": None if busy else HOST, "half": "dense" if size.backend == "dense" and busy else "",
    }  # fmt: skip


def of_other_loss(row: dict[str, str]) -> dict[str, Any]:
    """A loss beside `ClipLoss` and `SigLipLoss` in fused kernels."""
    size, name, b, d = size_of(row, workspace=2 * 2**30), row["loss"], int(row["b"]), int(row["d"])
    views = {"rows": 2 * b, "keys": 2 * b, "indexed": True}
    others: dict[str, dict[str, Any]] = {
        "queue": {"queue": b}, "ntxent": views, "supcon": views, "supcon_in": views,
        # pairs of queries, and pairs of keys
        "gist_pairs": {"own_columns": 2, "halves": True, "guide": d, "indexed": True},
    }  # fmt: skip
    size = replace(size, **others.get(name, {}))
    words = {"label": f"{name} {b} x {d}", "loss": size, "fitted": b == 2**15 and name in OF_PAIRS}
    # its graph is that of the loss before it in the call
    return {**words, **({"bytes": None} if name == "clip_two_labels" and size.replayed else {})}


def of_cpu(row: dict[str, str]) -> dict[str, Any]:
    """A loss of a CPU, alone or of one rank: bytes alone, because a CPU has no profile."""
    size = size_of(row, device="cpu")
    ways = f"{size.exchange}, {size.backend}"
    label = f"{row.get('loss', 'clip')} {ways} {row['b']} x {row['d']} on {row['world']} CPUs"
    return {"label": label, "loss": size, "seconds": None}


# the optimizers of h200_features.csv
OPTIMIZERS = {
    "Adafactor of the recipe": [],
    "Adafactor without momentum": ["optim.betas=[0.0, 0.95]"],
    "AdamW": ["optim={kind='adamw'}"],
}


@cache
def updates() -> dict[str, Work]:
    """The work of optimizers on the weights of the paper's recipe, without clipping."""
    recipe = load_any_recipe(CLIP, files=False).model_copy(update={"device": "meta"})
    with made_on_meta():
        model = Run.untrained(recipe, made_up_tokenizer(recipe.model.tokenizer)).model
    settings = {name: load_any_recipe(CLIP, words, files=False).optim for name, words in OPTIMIZERS.items()}
    return {name: update_work(model, optim, clipped=False) for name, optim in settings.items()}


def of_plan(row: dict[str, str]) -> dict[str, Any]:
    """A step whose row has the plan of its day: of a recipe, at the largest batch of a card, of late interaction."""
    unit, scale = ("mib", 2**20) if "peak_mib" in row else ("bytes", 1)
    peak, planned = (int(scale * float(row[f"{part}_{unit}"])) for part in ("peak", "planned"))
    label = ", ".join(row[key] for key in ("what", "impl", "way", "model", "world", "batch", "b") if key in row)
    words = {"label": label, "bytes": peak, "planned": planned}
    if row.get("what") != "optimizer":
        return {**words, "seconds": None}
    way = row["way"].partition(",")[0]
    # the constants of the optimizers' kernels are from the other rows
    return {**words, "update": updates()[way], "fitted": way != "Adafactor without momentum"}


def of_step(row: dict[str, str]) -> dict[str, Any]:
    world, way, chip = int(row["world"]), row["way"].removesuffix(COMPILED).removesuffix(POOLED), row["chip"]
    compiled, plain = row["way"].endswith(COMPILED), row["impl"] == "plain" and way == "whole batch"
    b = int(row["batch"]) // world
    size = min(int(row["sub_batch"] or b), b)
    costs = tower_costs()[row["model"] + COMPILED * compiled, size]
    sides = [Side(cost, b, _inputs(row, b, size, cost)) for cost in costs]
    count = sides[0].count
    words = {"all": count, "half": count // 2, "auto": "auto"}
    retain: Any = count if plain else words.get(row.get("retain", "0"), 0)
    *wrapper, exchange, backend = way.split(", ") if world > 1 else ("single", "triton")
    weights, trained = (sum(getattr(side.cost, key) for side in sides) for key in ("weights", "trained"))
    memory, copies = profile_of(chip).memory, _copies(row)
    loss = LossSize(b, b, world, sides[0].cost.dimensions, memory, exchange, backend, copies=copies)
    # buckets of torch's wrapper stay; without one a buffer of all gradients is there for a moment
    held = Held(weights=weights, step=trained if world > 1 else 0)
    if wrapper:
        # FSDP2 gathers weights once in a step
        held = Held(weights=weights // world + weights if "FSDP2" in wrapper else weights + trained)
    return {
        "label": f"{row['model']} {row['impl']}, {row['way']}, {row['batch']} by {row['sub_batch']} on {world}",
        "step": StepMemory(sides, loss, held, retain),
        # nothing is fitted to compiled towers
        "half": "" if compiled else chip,
        # plain steps and those by hand hold other tensors: their times alone are planned
        **({} if row["impl"] == OURS or compiled else {"bytes": None}),
    }


def of_tokens(row: dict[str, str]) -> dict[str, Any]:
    """A whole loss of token vectors with gradients; the constants of its seconds are from the rows of 1,024²."""
    N, M, L, T, D = (int(row[key]) for key in ("queries", "documents", "query_tokens", "document_tokens", "d"))
    loss, memory = Softmax(symmetric="one way" not in row["impl"]), profile_of(row["chip"]).memory
    shared = SHARED.match(row["impl"])
    W, exchange = (int(shared[1]), shared[2]) if shared else (1, "single")
    more: Any = {"tokens": (L, T), "masked": False}
    size = LateSize(N // W, M // W, W, D, memory, exchange, "triton", loss=loss, **more)
    label = f"{'symmetric' if loss.symmetric else 'one way'}, {N} x {M} of {L} x {T} tokens on {W}"
    return {"label": label, "loss": size, "bytes": int(float(row["peak_mib"]) * 2**20), "fitted": N == 1024}


def _inputs(row: dict[str, str], b: int, size: int, cost: TowerCost) -> int:
    """Bytes of a side's inputs on the device: the batch, two sub-batches, or a pool and indices into it."""
    inputs = "pool" if row["way"].endswith(POOLED) else row.get("inputs", "device")
    if inputs == "pool":
        return min(POOL, 16 * MODELS[row["model"]].sub_batch) * cost.inputs + 8 * b
    return {"device": b, "host": 2 * size}[inputs] * cost.inputs


@cache
def tower_costs() -> dict[tuple[str, int], list[TowerCost]]:
    """The committed costs of both towers, by model and sub-batch."""
    costs: dict[tuple[str, int], list[TowerCost]] = {}
    for entry in json.loads(TOWERS.read_text()):
        model = entry.pop("model")
        works = {name: Work(**entry.pop(name)) for name in ("forward_work", "replay_work")}
        costs.setdefault((model, entry["sub_batch"]), []).append(TowerCost(**entry, **works))
    return costs


# by kind: the names of its files, and what the planner needs of a row
KINDS: dict[str, tuple[str, Callable[[dict[str, str]], dict[str, Any]]]] = {
    "losses": (r"h\d+_(loss|\d+_ranks)", of_loss),
    "calls": (r"h\d+_(\d+_)?user_calls", of_call),
    "other losses": (r"h\d+_loss_ratios", of_other_loss),
    "ranks": (r"h\d+_memory", of_rank),
    "steps": (r"h\d+_((\d+_)?step|towers)", of_step),
    "tokens": (r"h\d+_(\d+_)?maxsim", of_tokens),
    "carried": (r"h\d+_(features|largest)|(h\d+_)?late_batches", of_plan),
    "cpu": (r"cpu_(loss|memory)", of_cpu),
}
