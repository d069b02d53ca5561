"""The training job of retrievers for `train/loop.py`: their data, loss, probe and report.

A step encodes the queries and all passages of the batch once, each side sub-batch by sub-batch, and compares every
query with every passage.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Self

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Indices
from contrastile.gradcache.encode import encode
from contrastile.gradcache.memory import bytes_per_example
from contrastile.models.text import load_tokenizer
from contrastile.modules import InfoNCELoss
from contrastile.train.folder import RunFolder
from contrastile.train.memory import dense_need
from contrastile.train.metadata import TrainResult, base_metadata, examples_retained
from contrastile.train.ranks import Ranks
from contrastile.train.report.questions import WORDING, evaluate_and_report
from contrastile.train.retriever.batches import TextBatch, TextBatchBuilder, TextMaterials, open_text_materials
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.evaluation import Searchable, probe
from contrastile.train.retriever.run import RetrieverRun, Side, build_retriever_run, load_retriever
from contrastile.train.run import choose_device
from contrastile.train.task import Task


class RetrieverJob(Task[TextBatch]):
    """The job of a retriever's recipe. The report searches `index` where that is given, else the run's passages."""

    unit = "queries"
    wording = WORDING
    run: RetrieverRun

    def __init__(self, run: RetrieverRun, materials: TextMaterials, index: Searchable | None = None) -> None:
        recipe = run.recipe
        super().__init__(run, InfoNCELoss(**recipe.loss.words()))
        self.materials = materials
        self.builder = TextBatchBuilder(materials, recipe.data, seed=recipe.seed)
        self._index = index

    @classmethod
    def open(cls, recipe: RetrieverRecipe, begun: RunFolder | None = None) -> Self:
        """The job that a recipe describes; a tokenizer is trained where none has `begun`."""
        # first: a device that is not there costs nothing
        choose_device(recipe.device)
        length = recipe.model.tokenizer.length
        tokenizer = load_tokenizer(begun.path, length=length) if begun is not None else None
        materials = open_text_materials(recipe, tokenizer)
        if find_spec("regex") is None and any(query.answers for query in materials.texts.queries):
            # refused here, because the evaluation needs it only after the training
            remedy = 'Run: pip install "contrastile[search]"'
            raise invalid("evaluate.match", "have the package regex to look for answers", "none", remedy)
        return cls(build_retriever_run(recipe, materials.tokenizer), materials)

    @classmethod
    def of_run(cls, folder: RunFolder, *, device: str = "auto", index: Searchable | None = None) -> Self:
        """The job of a finished run; `index`: passages to search, which may be more than fit into memory."""
        run = load_retriever(folder.path, device=device)
        return cls(run, open_text_materials(run.recipe, run.tokenizer), index)

    @property
    def rows(self) -> Indices:
        """Rows of the training queries."""
        return self.materials.texts.splits["train"]

    @property
    def data(self) -> str:
        """The fingerprint of texts and tokens."""
        return self.materials.fingerprint()

    def parts(self, rows: Tensor, step: int, ranks: Ranks) -> list[TextBatch]:
        """This rank's shares; every rank samples the passages of the whole batch with the same seed."""
        sampled = self.builder.sample(rows, step)
        return self.builder.parts(sampled, self.run.recipe.train.accumulate, ranks.rank, ranks.size)

    def loss(self, part: TextBatch) -> Tensor:
        """The loss from queries to passages."""
        return retriever_loss(self.run, self._loss, part)

    def probe(self) -> dict[str, dict[str, float]]:
        """Recall on a sample of the held-out queries."""
        return probe(self.run, self.materials)

    def report(self, folder: RunFolder) -> str:
        """Measure everything, write evaluation.json, run files and report.html; return the table of results."""
        passages = self.materials.passages if self._index is None else self._index
        return evaluate_and_report(folder, self.run, self.materials.texts, passages)

    def metadata(self, trained: TrainResult) -> dict[str, Any]:
        """The contents of run.json."""
        recipe, texts = self.run.recipe, self.materials.texts
        largest = max(trained.largest_batch, 1)
        at_once = recipe.train.sub_batch.at_once("query", recipe.model.tokenizer.query_length)
        kept = examples_retained(recipe.train.retain, at_once, largest)
        return {
            **self.metadata_so_far(trained),
            "texts_sha256": texts.digest(),
            "memory": dense_need(activations_per_query(self.run, self.materials), largest, kept),
        }

    def metadata_so_far(self, trained: TrainResult) -> dict[str, Any]:
        """The contents of run.json without those that take seconds to compute."""
        texts = self.materials.texts
        return {
            **base_metadata(self.run, trained),
            "pairs": len(texts.splits["train"]),
            "unit": self.unit,
            "passages": len(texts.passages),
            "skipped": texts.skipped,
            "loss": "infonce",
            "batch": [batch for _, batch in self.run.recipe.train.batch],
        }


def retriever_loss(run: RetrieverRun, loss: Callable[..., Tensor], batch: TextBatch) -> Tensor:
    """The loss of a batch of any size, the mean over all features and each of the recipe's `dimensions`."""
    model = run.model

    def features(side: Side) -> Tensor:
        tokens = batch.queries if side == "query" else batch.passages
        encoder, retain = getattr(model, f"encode_{side}"), run.recipe.train.retain
        return encode(encoder, tokens, **run.sub_batch(side, tokens), retain=retain)

    with run.autocast():
        queries, passages = features("query"), features("passage")
        ids = {name: getattr(batch, name).to(run.device) for name in ("positives", "query_ids", "key_ids")}
        # the loss makes its products in autocast's type
        losses = [
            loss(model.comparable(queries, size), model.comparable(passages, size), model.logit_scale.exp(), **ids)
            for size in (None, *run.recipe.model.dimensions)
        ]
    return torch.stack(losses).mean()


def activations_per_query(run: RetrieverRun, materials: TextMaterials) -> int:
    """The bytes that autograd saves for one query and its passages, measured on texts of median length."""
    data, sub_batch = run.recipe.data, run.recipe.train.sub_batch

    def activations(side: Side) -> int:
        store = materials.queries if side == "query" else materials.passages
        median = store.lengths.argsort()[len(store) // 2]
        encoder = getattr(run.model, f"encode_{side}")

        def forward(count: int) -> object:
            tokens = {name: ids.to(run.device) for name, ids in store.rows(median.expand(count)).items()}
            return encoder(**tokens)

        return bytes_per_example(forward, sub_batch.at_once(side, max(int(store.lengths[median]), 1)))

    with run.autocast():
        return activations("query") + activations("passage") * (data.positives + data.negatives)
