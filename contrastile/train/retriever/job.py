"""Retrievers, as a job of `train/loop.py`: what they learn from, their loss, what they are worth.

A step encodes the queries and every passage of the batch once, each side sub-batch by sub-batch, and compares all with
all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from contrastile._check import wrong
from contrastile.cache import encode
from contrastile.data.pairs import Indices
from contrastile.models.retriever import Retriever
from contrastile.models.text import load_tokenizer
from contrastile.modules import InfoNCELoss
from contrastile.retention import bytes_per_example
from contrastile.train.checkpoint import choose_device
from contrastile.train.described import describe_models
from contrastile.train.facts import Trained, kept_at_once, run_facts
from contrastile.train.folder import RunFolder
from contrastile.train.job import Measure
from contrastile.train.memory import dense_need
from contrastile.train.ranks import Ranks
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.evaluation import Searchable, probe
from contrastile.train.retriever.feed import TextBatch, TextFeed, TextMaterials, fingerprint, open_text_materials
from contrastile.train.retriever.report import WORDING, evaluate_and_report
from contrastile.train.retriever.run import RetrieverRun, build_retriever_run, load_retriever
from contrastile.train.retriever.search import index_of
from contrastile.train.state import Parts
from contrastile.train.stopwatch import Stopwatch


class Retrieval:
    """The job of a retriever's recipe; what is found at its end is looked for in `index`, else in the run's texts."""

    unit = "queries"
    wording = WORDING
    # texts are at hand
    stream = None

    def __init__(self, run: RetrieverRun, materials: TextMaterials, index: Searchable | None = None) -> None:
        recipe = run.recipe
        self.run, self.materials = run, materials
        self.feed = TextFeed(materials, recipe.data, seed=recipe.seed)
        # what is drawn in a step depends on its number alone
        self.state: Parts = {}
        self._loss: Callable[..., Tensor] = InfoNCELoss(**recipe.loss.words())
        self._index = index

    @classmethod
    def open(cls, recipe: RetrieverRecipe, begun: RunFolder | None = None) -> Self:
        """The job that a recipe describes; a tokenizer is trained where none has `begun`."""
        # first: a device that is not there, or a model that does not fit, costs nothing
        choose_device(recipe.device)
        describe_models(recipe)
        length = recipe.model.tokenizer.length
        tokenizer = load_tokenizer(begun.path, length=length) if begun is not None else None
        materials = open_text_materials(recipe, tokenizer)
        if find_spec("regex") is None and any(query.answers for query in materials.texts.queries):
            # after the training it would be late
            remedy = 'Run: pip install "contrastile[search]"'
            raise wrong("evaluate.match", "have the package regex to look for answers", "none", remedy)
        return cls(build_retriever_run(recipe, materials.tokenizer), materials)

    @classmethod
    def of_run(cls, folder: RunFolder, *, device: str = "auto", index: Path | None = None) -> Self:
        """That of a finished run; `index`: look among its passages, which may be more than fit into memory."""
        opened = None if index is None else index_of(folder, index)
        run = load_retriever(folder.path, device=device)
        return cls(run, open_text_materials(run.recipe, run.tokenizer), opened)

    @property
    def rows(self) -> Indices:
        """The queries to train on."""
        return self.materials.texts.splits["train"]

    @property
    def data(self) -> str:
        """The fingerprint of texts and tokens."""
        return fingerprint(self.materials)

    def parts(self, rows: Tensor, step: int, ranks: Ranks) -> list[TextBatch]:
        """All ranks draw the passages of the whole batch alike, and take their shares."""
        drawn = self.feed.draw(rows, step)
        return self.feed.parts(drawn, self.run.recipe.train.accumulate, ranks.rank, ranks.size)

    def expect(self, rows: Tensor, ranks: Ranks) -> None:
        """Nothing has to be read."""

    def close(self) -> None:
        """Nothing was open."""

    def loss(self, part: TextBatch) -> Tensor:
        """From queries to passages."""
        return retriever_loss(self.run, self._loss, part)

    def timed(self, watch: Stopwatch[Any]) -> None:
        """Mark where the loss begins and ends."""
        self._loss = watch.around(self._loss)

    def probe(self) -> dict[str, dict[str, float]]:
        """Recall among the right passages of a sample."""
        return probe(self.run, self.materials)

    def report(self, folder: RunFolder) -> str:
        """Measure everything, write evaluation.json, run files and report.html; the table of results as text."""
        passages = self.materials.passages if self._index is None else self._index
        return evaluate_and_report(folder, self.run, self.materials.texts, passages)

    def take(self, model: Retriever) -> None:
        """This is the model now."""
        self.run = replace(self.run, model=model)

    def trained_in(self, folder: RunFolder) -> Self:
        """The same with the weights that a folder keeps."""
        model = load_retriever(folder.path, device=self.run.recipe.device).model
        return type(self)(replace(self.run, model=model), self.materials, self._index)

    def tests(self, *, whole: bool = False) -> list[Measure]:  # noqa: ARG002
        """There are none."""
        return []

    def facts(self, trained: Trained) -> dict[str, Any]:
        """What run.json says."""
        recipe, texts = self.run.recipe, self.materials.texts
        largest = max(trained.largest_batch, 1)
        at_once = recipe.train.sub_batch.at_once("query", recipe.model.tokenizer.query_length)
        kept = kept_at_once(recipe.train.retain, at_once, largest)
        return {
            **self.facts_so_far(trained),
            "texts_sha256": texts.digest(),
            "memory": asdict(dense_need(activations_per_query(self.run, self.materials), largest, kept)),
        }

    def facts_so_far(self, trained: Trained) -> dict[str, Any]:
        """The same but for what takes long to find out."""
        texts = self.materials.texts
        return {
            **run_facts(self.run.recipe, self.run.model, self.run.device, trained),
            "pairs": len(texts.splits["train"]),
            "unit": self.unit,
            "passages": len(texts.passages),
            "skipped": texts.skipped,
            "loss": "infonce",
            "batch": [batch for _, batch in self.run.recipe.train.batch],
        }


def retriever_loss(run: RetrieverRun, loss: Callable[..., Tensor], batch: TextBatch) -> Tensor:
    """The loss of a batch of any size: from queries to all its passages, averaged over the recipe's dimensions."""
    model, settings = run.model, run.recipe.train
    with run.autocast():
        queries = encode(model.encode_query, batch.queries, **run.cut("query", batch.queries), retain=settings.retain)
        keys = batch.passages
        passages = encode(model.encode_passage, keys, **run.cut("passage", keys), retain=settings.retain)
    ids = {name: getattr(batch, name).to(run.device) for name in ("positives", "query_ids", "key_ids")}
    cuts = (None, *run.recipe.model.dimensions)
    losses = [
        loss(model.comparable(queries, cut), model.comparable(passages, cut), model.logit_scale.exp(), **ids)
        for cut in cuts
    ]
    return torch.stack(losses).mean()


def activations_per_query(run: RetrieverRun, materials: TextMaterials) -> int:
    """The bytes that autograd keeps for one query and its passages, measured on texts of middling length."""
    data, sub_batch = run.recipe.data, run.recipe.train.sub_batch

    def of(side: Literal["query", "passage"]) -> int:
        store = materials.queries if side == "query" else materials.passages
        middle = store.lengths.argsort()[len(store) // 2]
        encoder = getattr(run.model, f"encode_{side}")

        def forward(count: int) -> object:
            tokens = {name: ids.to(run.device) for name, ids in store.rows(middle.expand(count)).items()}
            return encoder(**tokens)

        return bytes_per_example(forward, sub_batch.at_once(side, max(int(store.lengths[middle]), 1)))

    with run.autocast():
        return of("query") + of("passage") * (data.positives + data.negatives)
