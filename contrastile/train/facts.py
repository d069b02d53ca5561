"""What is worth knowing about a run when it is over: how long, on what, with how much memory.

`loop.py` fills a `Trained` while it goes; `facts` turns it into the run folder's run.json, which the report reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from torch import nn

from contrastile.data.pairs import PairSet
from contrastile.retention import bytes_per_example
from contrastile.train.checkpoint import Run
from contrastile.train.config import AnyRecipe
from contrastile.train.feed import Materials
from contrastile.train.folder import FACTS, RunFolder
from contrastile.train.guard import Guard
from contrastile.train.memory import dense_need
from contrastile.train.provenance import chip, versions
from contrastile.train.state import Course


@dataclass
class Trained:
    """How far the steps came, and what they took: memory is one rank's.

    `finished`: all of them are done; `stopped_by`: the signal that ended them early.
    """

    examples: int = 0
    steps: int = 0
    seconds: float = 0.0
    largest_batch: int = 0
    base_bytes: int = 0
    peak_bytes: int = 0
    ranks: int = 1
    skipped_steps: int = 0
    finished: bool = False
    stopped_by: int | None = None

    def note(self, course: Course, guard: Guard) -> None:
        """Be as far as the course."""
        self.examples, self.steps, self.seconds = sum(course.sizes), len(course.sizes), course.seconds
        self.largest_batch, self.peak_bytes = max(course.sizes, default=0), course.peak_bytes
        self.skipped_steps = guard.skipped


def finished(folder: RunFolder) -> Trained | None:
    """What `facts` kept of a run that is through; None of one that is not."""
    if not (folder / FACTS).is_file():
        return None
    kept = folder.read_json(FACTS)
    return Trained(**{name: kept[name] for name in asdict(Trained())}) if kept.get("finished") else None


def facts(run: Run, materials: Materials, trained: Trained) -> dict[str, Any]:
    """All that the report says beside curves and results; plain values, to be written as JSON."""
    recipe = run.recipe
    largest = max(trained.largest_batch, 1)
    kept = kept_at_once(recipe.train.retain, recipe.train.sub_batch.image, largest)
    need = dense_need(activations_per_pair(run, materials), largest, kept)
    return {**facts_so_far(run, materials, trained), "memory": asdict(need)}


def facts_so_far(run: Run, materials: Materials, trained: Trained) -> dict[str, Any]:
    """The same but for what the dense way would need, which takes the towers to find out."""
    return {
        **run_facts(run.recipe, run.model, run.device, trained),
        "pairs": len(materials.pairs.splits["train"]),
        "skipped": skipped(materials.pairs),
        "loss": run.recipe.loss.kind,
        "batch": [batch for _, batch in run.recipe.train.batch],
    }


def kept_at_once(retain: int | Literal["auto"], sub_batch: int, batch: int) -> int:
    """Examples whose activations a step keeps. "auto" is taken to keep all, so that no report claims too much."""
    return batch if retain == "auto" else sub_batch * max(retain, 1)


def run_facts(recipe: AnyRecipe, model: nn.Module, device: torch.device, trained: Trained) -> dict[str, Any]:
    """What every run has to say of itself."""
    return {
        "name": recipe.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": chip(device),
        **asdict(trained),
        "versions": versions(),
        "ended": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def skipped(pairs: PairSet) -> dict[str, int]:
    """What of the data gave no pair, by reason: when they were opened, and while they were read."""
    later = pairs.stream.skipped if pairs.stream is not None else {}
    return dict(Counter(pairs.skipped) + Counter(later))


def activations_per_pair(run: Run, materials: Materials) -> int:
    """The bytes that autograd keeps for one pair, in both towers, measured on sub-batches of the run's own data."""
    sub_batch, data = run.recipe.train.sub_batch, run.recipe.data
    row = torch.zeros(1, dtype=torch.int64)

    def image(count: int) -> object:
        pixels = torch.zeros(count, data.channels, data.image_size, data.image_size, device=run.device)
        return run.model.encode_image(pixels)

    def text(count: int) -> object:
        tokens = {name: ids[row.expand(count)].to(run.device) for name, ids in materials.tokens.items()}
        return run.model.encode_text(**tokens)

    # an empty picture is no part of the statistics that a tower keeps of what it sees
    kept = [(buffer, buffer.clone()) for buffer in run.model.buffers()]
    with run.autocast():
        texts = sub_batch.texts_at_once(run.recipe.model.tokenizer.length)
        found = bytes_per_example(image, sub_batch.image) + bytes_per_example(text, texts)
    for buffer, value in kept:
        buffer.copy_(value)
    return found
