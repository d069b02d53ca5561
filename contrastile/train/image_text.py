"""Towers of pictures and texts, as a job of `loop.py`: what they learn from, their loss, what they are worth.

A step encodes both sides, each sub-batch by sub-batch, and compares every picture with every text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor

from contrastile._check import wrong
from contrastile.cache import encode
from contrastile.data.collection import Stream
from contrastile.data.pairs import Indices
from contrastile.models.text import load_tokenizer
from contrastile.models.towers import DualEncoder
from contrastile.modules import ClipLoss, SigLipLoss
from contrastile.train.checkpoint import Run, build_run, choose_device, fingerprint, load
from contrastile.train.config import Recipe
from contrastile.train.described import describe_models
from contrastile.train.elsewhere import Test, measure_all, measures, named, open_test
from contrastile.train.evaluation import Row, encode_held_out, evaluate, probe
from contrastile.train.facts import Trained, facts, facts_so_far
from contrastile.train.feed import Batch, Feed, Materials, open_materials
from contrastile.train.folder import EVALUATION, RunFolder
from contrastile.train.galleries import galleries
from contrastile.train.job import Measure
from contrastile.train.precomputed import precomputed
from contrastile.train.ranks import Ranks
from contrastile.train.report import IMAGE_TEXT, table_text, write_report
from contrastile.train.state import Parts
from contrastile.train.stopwatch import Stopwatch

Loss = Callable[..., Tensor]
LOSSES: dict[str, type[ClipLoss | SigLipLoss]] = {"clip": ClipLoss, "siglip": SigLipLoss}


class ImageText:
    """The job of a recipe of pictures and texts."""

    unit = "pairs"
    wording = IMAGE_TEXT

    def __init__(self, run: Run, materials: Materials, tests: Sequence[Test] = ()) -> None:
        recipe = run.recipe
        self.run, self.materials, self._tests = run, materials, tests
        # of the tests measured whole their rows, by place
        self._found: dict[int, list[Row]] = {}
        apart = run.device.type == "cuda"
        self.feed = Feed(materials, bend=recipe.data.augment, seed=recipe.seed, apart=apart)
        self.state: Parts = {"feed": self.feed}
        self._loss: Loss = LOSSES[recipe.loss.kind](**recipe.loss.words())

    @classmethod
    def open(cls, recipe: Recipe, begun: RunFolder | None = None) -> Self:
        """The job that a recipe describes; a tokenizer is trained where none has `begun`."""
        # first: a device that is not there, a model that does not fit, or a mistake in the tests' files, costs nothing
        choose_device(recipe.device)
        describe_models(recipe)
        tests = [open_test(test) for test in named(recipe.evaluate)]
        materials = open_materials(recipe, load_tokenizer(begun.path) if begun is not None else None)
        run = build_run(recipe, materials.tokenizer)
        return cls(run, precomputed(run, materials), tests)

    @classmethod
    def of_run(cls, folder: RunFolder, *, device: str = "auto", index: Path | None = None) -> Self:
        """That of a finished run."""
        if index is not None:
            raise wrong("--index", "be left out for pictures and texts", index, "It belongs to a retriever.")
        run = load(folder.path, device=device)
        return cls(run, open_materials(run.recipe, run.tokenizer))

    @property
    def rows(self) -> Indices:
        """The pairs to train on."""
        return self.materials.pairs.splits["train"]

    @property
    def stream(self) -> Stream | None:
        """What reads the pairs of a collection."""
        return self.materials.pairs.stream

    @property
    def data(self) -> str:
        """The fingerprint of pairs and tokens."""
        return fingerprint(self.materials.pairs, self.materials.tokens)

    def parts(self, rows: Tensor, step: int, ranks: Ranks) -> list[Batch]:  # noqa: ARG002
        """What is drawn for a batch comes from the feed's own lots, in the order of the steps."""
        return list(self.feed.batch(rows, ranks.share).parts(self.run.recipe.train.accumulate))

    def expect(self, rows: Tensor, ranks: Ranks) -> None:
        """Pictures of a collection are read while a step computes."""
        self.feed.expect(rows, ranks.share)

    def close(self) -> None:
        """Nothing is read any more."""
        self.feed.close()

    def loss(self, part: Batch) -> Tensor:
        """The recipe's loss of a part of any size."""
        return batch_loss(self.run, self._loss, part)

    def timed(self, watch: Stopwatch[Any]) -> None:
        """Mark where the loss begins and ends."""
        self._loss = watch.around(self._loss)

    def probe(self) -> dict[str, dict[str, float]]:
        """Recall from picture to name."""
        return probe(self.run, self.materials.pairs)

    def tests(self, *, whole: bool = False) -> list[Measure]:
        """On pictures from elsewhere; what is found of all of them the report takes."""
        return measures(self.run, self._tests, self._found if whole else None)

    def facts(self, trained: Trained) -> dict[str, Any]:
        """What run.json says."""
        return facts(self.run, self.materials, trained)

    def facts_so_far(self, trained: Trained) -> dict[str, Any]:
        """The same but for what the dense way would need."""
        return facts_so_far(self.run, self.materials, trained)

    def report(self, folder: RunFolder) -> str:
        """Measure everything, write evaluation.json and report.html; the table of results as text."""
        seen = encode_held_out(self.run, self.materials.pairs)
        results = [*evaluate(self.run, seen), *measure_all(self.run, folder, self._found)]
        folder.write_json(EVALUATION, results)
        write_report(folder, galleries(self.materials.pairs, seen))
        return table_text(results)

    def take(self, model: DualEncoder) -> None:
        """This is the model now."""
        self.run = replace(self.run, model=model)

    def trained_in(self, folder: RunFolder) -> Self:
        """The same with the weights that a folder keeps."""
        model = load(folder.path, device=self.run.recipe.device).model
        return type(self)(replace(self.run, model=model), self.materials, self._tests)


def batch_loss(run: Run, loss: Loss, batch: Batch) -> Tensor:
    """The loss of a batch of any size; activations are kept of the retained sub-batches, or of one at a time."""
    model, settings = run.model, run.recipe.train
    size = settings.sub_batch
    with run.autocast():
        # with a sub-batch retained, a batch that fits into one is encoded once, in the plain way
        image = encode(model.encode_image, batch.pixels, sub_batch=size.image, retain=settings.retain)
        text = encode(model.encode_text, batch.tokens, **size.of_texts(), retain=settings.retain)
    image, text = (F.normalize(side.to(model.logit_scale.dtype), dim=-1) for side in (image, text))
    return loss(image, text, model.logit_scale.exp(), model.logit_bias, ids=batch.ids.to(run.device))
