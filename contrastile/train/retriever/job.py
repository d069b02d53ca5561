"""The task of retrievers: their data, loss, probe and report; and tests on other texts.

A step encodes the queries and all passages of the batch once, and compares every query with every passage.
"""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Indices
from contrastile.data.text_files import open_beir, open_questions
from contrastile.data.texts import TextSet
from contrastile.gradcache.memory import bytes_per_example
from contrastile.models.late import LateRetriever
from contrastile.models.text import load_tokenizer
from contrastile.scorers import MaxSim
from contrastile.train.config.losses import RetrieverScores
from contrastile.train.folder import RunFolder
from contrastile.train.log import progress
from contrastile.train.objective import QueryObjective, Teacher, open_teacher
from contrastile.train.ranks import Ranks
from contrastile.train.retriever.batches import TextBatch, TextBatchBuilder
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.evaluation import WORDING, FirstStage, Searchable, evaluate_and_report, probe
from contrastile.train.retriever.run import (
    RetrieverRun,
    Side,
    TextMaterials,
    TokenStore,
    build_retriever_run,
    load_retriever,
    open_text_materials,
    passage_tokens,
    text_stores,
)
from contrastile.train.run import choose_device
from contrastile.train.state import TrainResult
from contrastile.train.task import Task


class RetrieverJob(Task[TextBatch]):
    """The job of a retriever's recipe."""

    unit = "queries"
    wording = WORDING
    run: RetrieverRun

    def __init__(self, run: RetrieverRun, materials: TextMaterials, teacher: Teacher | None = None) -> None:
        recipe = run.recipe
        words: dict[str, Any] = {"scorer": MaxSim() if recipe.model.kind == "late" else None}
        words["device"] = run.device if recipe.train.features == "host" else None
        super().__init__(run, QueryObjective(recipe.loss, features=run.model.features, **words), teacher)
        self.materials = materials
        stores = None if teacher is None else text_stores(materials.texts, teacher.run.recipe, teacher.run.tokenizer)
        self.builder = TextBatchBuilder(materials, recipe, stores)

    @classmethod
    def open(cls, recipe: RetrieverRecipe, begun: RunFolder | None = None) -> Self:
        # first: a device that is not there costs nothing, and the loss checks its keys
        choose_device(recipe.device)
        QueryObjective(recipe.loss)
        teacher = open_teacher(recipe)
        length = recipe.model.tokenizer.length
        tokenizer = load_tokenizer(begun.path, length=length) if begun is not None else None
        materials = open_text_materials(recipe, tokenizer)
        if find_spec("regex") is None and any(query.answers for query in materials.texts.queries):
            # refused here, because the evaluation needs it only after the training
            remedy = 'Run: pip install "contrastile[search]"'
            raise invalid("evaluate.match", "have the package regex to look for answers", "none", remedy)
        check_scores(recipe, materials.texts)
        return cls(build_retriever_run(recipe, materials.tokenizer), materials, teacher=teacher)

    @classmethod
    def of_run(cls, folder: RunFolder, *, device: str = "auto") -> Self:
        run = load_retriever(folder.path, device=device)
        return cls(run, open_text_materials(run.recipe, run.tokenizer))

    @property
    def rows(self) -> Indices:
        return self.materials.texts.splits["train"]

    @property
    def data(self) -> str:
        digest = sha256(self.materials.texts.digest().encode())
        for store in (self.materials.queries, self.materials.passages):
            digest.update(store.to_bytes())
        if isinstance(self.run.recipe.loss, RetrieverScores):
            digest.update(self.materials.texts.scores_digest().encode())
        return digest.hexdigest()

    def parts(self, rows: Tensor, step: int, ranks: Ranks) -> list[TextBatch]:
        """This rank's shares; every rank samples the passages of the whole batch with the same seed."""
        sampled = self.builder.sample(rows, step)
        return self.builder.parts(sampled, self.run.recipe.train.accumulate, ranks.rank, ranks.size)

    def loss(self, part: TextBatch) -> Tensor:
        """The mean over all features and each of the recipe's `dimensions`."""
        run, model, settings = self.run, self.run.model, self.run.recipe.train
        sizes, streamed = (None, *run.recipe.model.dimensions), settings.features == "host"
        # features on the way to host memory are made comparable on the device
        words: dict[str, Any] = {"retain": settings.retain, "features": settings.features}
        words["compared"] = sizes if streamed else ()
        inputs: dict[str, Any] = part.inputs(torch.device("cpu") if streamed else run.device)
        if self.teacher is not None and part.teacher_tokens is not None:
            inputs["guides"] = self.teacher.texts(*part.teacher_tokens)
        with run.autocast():
            queries = run.encoded("query", part.queries, **words)
            passages = run.encoded("passage", part.passages, **words)
            if isinstance(model, LateRetriever) and not streamed:
                # vectors that do not count would cost as much as others
                passages = model.compact(passages, **part.passages)
            losses, queued = [], len(self.objective.queues) > 0
            for index, size in enumerate(sizes):
                if queued:
                    keys, ids = self.objective.queued("passage")
                    inputs["queue"] = model.comparable(keys, size), ids
                # the loss makes its products in autocast's type
                both: Any = (queries, passages)
                sides = [side[index] if streamed else model.comparable(side, size) for side in both]
                losses.append(self._loss(*sides, model.logit_scale.exp(), **inputs))
            if queued:
                of_all = inputs.get("shared", slice(None))
                self.objective.keep(inputs["key_ids"][of_all], passage=passages[of_all].float())
        return torch.stack(losses).mean()

    def probe(self) -> dict[str, dict[str, float]]:
        return probe(self.run, self.materials)

    def report(self, folder: RunFolder, index: Searchable | None = None, first_stage: FirstStage | None = None) -> str:
        """Search the run's passages or `index`, which may be more than fit into memory.

        first_stage: the candidates that a late retriever scores.
        """
        passages = self.materials.passages if index is None else index
        return evaluate_and_report(folder, self.run, self.materials.texts, passages, first_stage)

    @property
    def skipped(self) -> Mapping[str, int]:
        return self.materials.texts.skipped

    def activations(self) -> tuple[int, int]:
        """Measured on texts of median length; a query comes with its passages."""
        run, materials, sub_batch = self.run, self.materials, self.run.recipe.train.sub_batch

        def measured(side: Side, store: TokenStore) -> int:
            median, encoder = store.lengths.argsort()[len(store) // 2], getattr(run.model, f"encode_{side}")

            def forward(count: int) -> object:
                return encoder(**{name: ids.to(run.device) for name, ids in store.rows(median.expand(count)).items()})

            return bytes_per_example(forward, sub_batch.at_once(side, max(int(store.lengths[median]), 1)))

        passages = run.recipe.data.positives + run.recipe.data.negatives
        total = measured("query", materials.queries) + measured("passage", materials.passages) * passages
        return total, sub_batch.at_once("query", run.recipe.model.tokenizer.query_length)

    def metadata(self, result: TrainResult) -> dict[str, Any]:
        return {**super().metadata(result), "texts_sha256": self.materials.texts.digest()}

    def metadata_so_far(self, result: TrainResult) -> dict[str, Any]:
        own = {"unit": self.unit, "passages": len(self.materials.texts.passages)}
        return {**super().metadata_so_far(result), **own}


def check_scores(recipe: RetrieverRecipe, texts: TextSet) -> None:
    """Raise ValueError where the loss needs scores, and the texts have none."""
    if isinstance(recipe.loss, RetrieverScores) and not any(query.scores for query in texts.queries):
        rule, source = f'have scores of its passages for loss.kind = "{recipe.loss.kind}"', recipe.data.source
        raise invalid("data.source", rule, f'none in "{source}"', "Write pos_scores and neg_scores there.")


def evaluate_texts(
    folder: RunFolder,
    source: str | Path,
    *,
    corpus: str | Path | None = None,
    index: Searchable | None = None,
    first_stage: FirstStage | None = None,
    split: str | None = None,
    name: str | None = None,
    bad_rows: float | None = None,
    device: str = "auto",
) -> str:
    """Measure a finished retriever on the texts of `source`, add the rows to its results, and return their table.

    The texts are those of a file, or of a folder in BEIR's format: its part `split`, or all but the one for training.
    They are encoded with the run's prefixes and lengths. corpus: further passages beside a file of questions. index: an
    index to search instead of the passages of `source`. first_stage: the candidates of a late retriever. Run files and
    rows are named after `name`, by default the source's name, and the part: scifact-test. bad_rows: the share of
    unusable rows allowed, by default the recipe's.
    """
    run, source = load_retriever(folder.path, device=device), Path(source)
    options: dict[str, Any] = {"allowed_by": "--bad-rows", "progress": progress}
    options["bad_rows"] = run.recipe.data.bad_rows if bad_rows is None else bad_rows
    if not source.is_dir():
        texts = open_questions(source, corpus=None if corpus is None else Path(corpus), **options)
    elif corpus is not None:
        raise invalid("--corpus", f'be left out with the folder "{source}"', f'"{corpus}"', "It has its own passages.")
    else:
        texts = open_beir(source, **options)
    available = [part for part, rows in texts.splits.items() if len(rows)]
    chosen = [part for part in available if part != "train"] if split is None else [split]
    if not chosen or chosen[0] not in available:
        got = "none" if split is None else f'"{split}"'
        rule = f'be one of the parts of "{source}" with questions ({", ".join(available) or "none"})'
        raise invalid("--split", rule, got, "Name one of them.")
    if index is None and not texts.passages:
        remedy = "Name a --corpus or an --index."
        raise invalid("--texts", "come with passages to look among", f'"{source}" alone', remedy)
    prefix = name or source.name.partition(".")[0]
    parts = {f"{prefix}-{part}": texts.splits[part] for part in chosen}
    texts = replace(texts, splits={"train": np.array([], dtype=np.int64), **parts})
    passages = passage_tokens(texts.passages, run.tokenizer, run.recipe) if index is None else index
    return evaluate_and_report(folder, run, texts, passages, first_stage, beside=True)
