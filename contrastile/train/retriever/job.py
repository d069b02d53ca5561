"""The task of retrievers: their batches, loss, probe and report; and tests on other texts.

A step encodes the queries and all passages of the batch once, and compares every query with every passage. The
passages of a step are distinct: one that two queries share is encoded once, and is a negative of neither.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import extra, invalid
from contrastile.data.text_files import open_beir, open_questions
from contrastile.gradcache.memory import bytes_per_example
from contrastile.models.towers import LateRetriever
from contrastile.scorers import MaxSim
from contrastile.train.config.losses import RetrieverScores
from contrastile.train.folder import RunFolder
from contrastile.train.load import load
from contrastile.train.log import progress
from contrastile.train.objective import QueryObjective, Teacher
from contrastile.train.ranks import Ranks
from contrastile.train.retriever import evaluation
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.evaluation import FirstStage, Searchable, evaluate_and_report
from contrastile.train.retriever.run import (
    RetrieverRun,
    Side,
    TextMaterials,
    Tokens,
    TokenStore,
    open_text_materials,
    passage_tokens,
    text_stores,
)
from contrastile.train.state import TrainResult
from contrastile.train.task import Task


@dataclass(frozen=True, slots=True)
class SampledQuery:
    """A query of a step with the passages that were sampled for it, as rows of the text set."""

    query: int
    positives: tuple[int, ...]
    negatives: tuple[int, ...]


@dataclass(frozen=True)
class TextBatch:
    """One rank's share of a batch; `global_size`: the queries of the batch.

    queries, passages: tokens, `[b, L]` and `[n, L]`. positives `[b, P]`: indices of each query's passages among the
    keys, padded with −1. query_ids `[b]`, key_ids `[n]`: a query is no negative of the passage with its id. shared
    `[keys]`: the passages that are keys of all queries; None: all. lists, scores `[b, H]`: passages of each query,
    padded with −1, and their scores. teacher_tokens: those of queries and passages, for another model.
    """

    queries: Tokens
    passages: Tokens
    positives: Tensor
    query_ids: Tensor
    key_ids: Tensor
    global_size: int
    shared: Tensor | None = None
    lists: Tensor | None = None
    scores: Tensor | None = None
    teacher_tokens: tuple[Tokens, Tokens] | None = None

    def __len__(self) -> int:
        return len(self.positives)

    @property
    def floats(self) -> dict[str, Tensor]:
        """The inputs that may be non-finite: tokens are integers."""
        return {} if self.scores is None else {"the scores of the batch": self.scores}

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs of the loss beside features, on the device."""
        names = ("positives", "query_ids", "key_ids", "shared", "lists", "scores")
        return {name: x.to(device) for name in names if (x := getattr(self, name)) is not None}


class TextBatchBuilder:
    """Samples passages for queries, seeded by the recipe and the step's number alone, and builds batches of them.

    teacher: the tokens of all queries and passages for another model.
    """

    def __init__(
        self, materials: TextMaterials, recipe: RetrieverRecipe, teacher: tuple[TokenStore, TokenStore] | None = None
    ) -> None:
        self._materials, self._data, self._seed, self._teacher = materials, recipe.data, recipe.seed, teacher
        # compiled encoders are compiled anew for each length, so texts are padded to a few lengths
        self._rounded = recipe.train.compile is True
        # "own": lists of negatives that only their own query meets; "scores": lists of each query's scored passages
        own = getattr(recipe.loss, "own_negatives", False)
        self._list_kind = "scores" if isinstance(recipe.loss, RetrieverScores) else "own" if own else ""

    def sample(self, rows: Tensor, step: int) -> list[SampledQuery]:
        """The queries at `rows` with sampled passages; copies of a passage are replaced by its first row."""
        generator = np.random.default_rng((self._seed, step))

        def choose(passages: Sequence[int], count: int) -> tuple[int, ...]:
            if len(passages) > count:
                passages = [passages[index] for index in generator.permutation(len(passages))[:count]]
            return tuple(self._materials.same[list(passages)].tolist())

        queries, data = self._materials.texts.queries, self._data
        drawn = ((row, queries[row].positives, queries[row].negatives) for row in rows.tolist())
        return [SampledQuery(row, choose(p, data.positives), choose(n, data.negatives)) for row, p, n in drawn]

    def parts(self, sampled: Sequence[SampledQuery], count: int, rank: int = 0, size: int = 1) -> list[TextBatch]:
        """One rank's share of at most `count` nearly equal batches, each with its own negatives only."""
        splits = np.array_split(np.arange(len(sampled)), min(count, len(sampled)))
        return [self.batch([sampled[index] for index in split], rank, size) for split in splits]

    def batch(self, sampled: Sequence[SampledQuery], rank: int = 0, size: int = 1) -> TextBatch:
        """One rank's share of these queries and their passages, each passage once.

        No passage is on two ranks, and each query is on the rank that has all of its positives, so that all ranks
        together compute the comparisons of one process. A passage sampled as a negative that is listed as right for a
        query is a positive of it.
        """
        materials, queries, same = self._materials, self._materials.texts.queries, self._materials.same
        negatives = [() if self._list_kind == "own" else sample.negatives for sample in sampled]
        drawn = {row for sample in sampled for row in sample.positives}.union(*negatives)
        # for each query the drawn passages that are listed as right, whichever query they were drawn for
        right = [dict.fromkeys(same[list(queries[sample.query].positives)].tolist()) for sample in sampled]
        positives = [[row for row in rows if row in drawn] for rows in right]
        ranks = assign_ranks(positives, size)
        # a passage is on the rank of those for which it is right, else on that of the first one that drew it
        owners = {row: owner for rows, owner in reversed([*zip(negatives, ranks, strict=True)]) for row in rows}
        owners |= {row: owner for rows, owner in zip(positives, ranks, strict=True) for row in rows}
        # longest first: sub-batches then have texts of similar lengths, and the first one needs the most memory
        local = [index for index, owner in enumerate(ranks) if owner == rank]
        local.sort(key=lambda index: -int(materials.queries.lengths[sampled[index].query]))
        lists = [self._listed(sampled[index], right[index]) for index in local] if self._list_kind else []
        shared = {row for row, owner in owners.items() if owner == rank}
        # a passage of a list is encoded on every rank that lists it
        keys = torch.tensor(sorted(shared.union(*lists)), dtype=torch.int64)
        keys = keys[materials.passages.lengths[keys].argsort(descending=True, stable=True)]
        places = {row: place for place, row in enumerate(keys.tolist())}
        shared_places = [place for row, place in places.items() if row in shared]
        columns = {int(keys[place]): column for column, place in enumerate(shared_places)}
        # the width of the positives is the same on every rank
        padded = np.full((len(local), max(map(len, positives), default=1)), -1)
        for row, index in enumerate(local):
            padded[row, : len(positives[index])] = [columns[passage] for passage in positives[index]]
        rows = torch.tensor([sampled[index].query for index in local], dtype=torch.int64)
        # the passage that is no negative of a query: its own text where that is a passage, else its positive
        candidates = [(sampled[index].positives[0], queries[sampled[index].query].itself) for index in local]
        ids = [positive if itself is None else int(same[itself]) for positive, itself in candidates]
        teacher = None if self._teacher is None else (self._teacher[0].rows(rows), self._teacher[1].rows(keys))
        return TextBatch(
            queries=materials.queries.rows(rows, rounded=self._rounded),
            passages=materials.passages.rows(keys, rounded=self._rounded),
            positives=torch.from_numpy(padded), query_ids=torch.tensor(ids, dtype=torch.int64), key_ids=keys,
            global_size=len(sampled), teacher_tokens=teacher,
            **(self._list_tensors(lists, places, shared_places) if self._list_kind else {}),
        )  # fmt: skip

    def _listed(self, sample: SampledQuery, positives: Container[int]) -> dict[int, float]:
        """The passages of a query's list with their scores: its own negatives, each with 0, or its scored passages.

        Scored passages begin with a positive; the list is empty where no positive has a score.
        """
        if self._list_kind == "own":
            return dict.fromkeys((row for row in sample.negatives if row not in positives), 0.0)
        same, scores = self._materials.same, dict(self._materials.texts.queries[sample.query].scores)
        scored = {int(same[row]): score for row, score in scores.items()}
        if not any(row in scored for row in sample.positives):
            return {}
        return {row: scored[row] for row in (*sample.positives, *sample.negatives) if row in scored}

    def _list_tensors(
        self, lists: Sequence[dict[int, float]], places: dict[int, int], shared: list[int]
    ) -> dict[str, Tensor]:
        """The lists as indices of this rank's passages, all of one width, and the indices of the shared keys."""
        scored = self._list_kind == "scores"
        width = self._data.negatives + (self._data.positives if scored else 0)
        indices, scores = np.full((len(lists), width), -1), np.zeros((len(lists), width), np.float32)
        for row, listed in enumerate(lists):
            indices[row, : len(listed)] = [places[passage] for passage in listed]
            scores[row, : len(listed)] = [*listed.values()]
        tensors = {"shared": torch.tensor(shared, dtype=torch.int64), "lists": torch.from_numpy(indices)}
        return tensors | ({"scores": torch.from_numpy(scores)} if scored else {})


def assign_ranks(positives: Sequence[Sequence[int]], size: int) -> list[int]:
    """The rank of each query: queries that share a positive get the same one, and all ranks nearly as many queries.

    >>> assign_ranks([[7], [8], [9, 7], [5]], size=2)
    [0, 1, 0, 1]
    """
    if size == 1 or not positives:
        return [0] * len(positives)
    from scipy.sparse import coo_array  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

    # a graph of queries and passages, whose connected components are the groups that stay together
    queries = [query for query, passages in enumerate(positives) for _ in passages]
    _, passages = np.unique([row for rows in positives for row in rows], return_inverse=True)
    nodes = len(positives) + len(queries)
    graph = coo_array((np.ones(len(queries)), (queries, len(positives) + passages)), shape=(nodes, nodes))
    groups = connected_components(graph, directed=False)[1][: len(positives)].tolist()
    load = [0] * size
    ranks: dict[int, int] = {}
    for group, count in Counter(groups).items():
        ranks[group] = load.index(min(load))
        load[ranks[group]] += count
    return [ranks[group] for group in groups]


class RetrieverJob(Task[TextBatch]):
    unit = "queries"
    wording = evaluation.WORDING
    open_data = staticmethod(open_text_materials)
    run: RetrieverRun

    def __init__(self, run: RetrieverRun, materials: TextMaterials, teacher: Teacher | None = None) -> None:
        recipe = run.recipe
        words: dict[str, Any] = {"scorer": MaxSim() if recipe.model.kind == "late" else None}
        words["device"] = run.device if recipe.train.features == "host" else None
        super().__init__(run, QueryObjective(recipe.loss, features=run.model.features, **words), teacher)
        self.materials, self.rows = materials, materials.rows
        stores = None if teacher is None else text_stores(materials.texts, teacher.run.recipe, teacher.run.tokenizer)
        self.builder = TextBatchBuilder(materials, recipe, stores)

    @classmethod
    def untrained(cls, recipe: RetrieverRecipe, data: TextMaterials, teacher: Teacher | None = None) -> Self:
        queries, source = data.texts.queries, recipe.data.source
        if find_spec("regex") is None and any(query.answers for query in queries):
            # refused before the training, because the evaluation after it needs the package
            remedy = f"Run: pip install {extra('search')}"
            raise invalid("evaluate.match", "have the package regex to look for answers", "none", remedy)
        if isinstance(recipe.loss, RetrieverScores) and not any(query.scores for query in queries):
            rule = f'have scores of its passages for loss.kind = "{recipe.loss.kind}"'
            raise invalid("data.source", rule, f'none in "{source}"', "Write pos_scores and neg_scores there.")
        return cls(RetrieverRun.untrained(recipe, data.tokenizer), data, teacher)

    @property
    def data_digest(self) -> str:
        digest = sha256(self.materials.texts.digest().encode())
        for store in (self.materials.queries, self.materials.passages):
            digest.update(store.to_bytes())
        if isinstance(self.run.recipe.loss, RetrieverScores):
            digest.update(self.materials.texts.scores_digest().encode())
        return digest.hexdigest()

    @property
    def test_digest(self) -> str:
        return self.materials.texts.digest()

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
                # vectors that are not compared would cost as much as the others
                passages = model.compact(passages, **part.passages)
            losses, queued = [], len(self.objective.queues) > 0
            for index, size in enumerate(sizes):
                if queued:
                    keys, ids = self.objective.queued("passage")
                    inputs["queue"] = model.comparable(keys, size), ids
                # the loss makes its products in autocast's dtype
                encoded: Any = (queries, passages)
                sides = [side[index] if streamed else model.comparable(side, size) for side in encoded]
                losses.append(self._loss(*sides, model.logit_scale.exp(), **inputs))
            if queued:
                shared = inputs.get("shared", slice(None))
                self.objective.keep(inputs["key_ids"][shared], passage=passages[shared].float())
        return torch.stack(losses).mean()

    def probe(self) -> dict[str, dict[str, float]]:
        return evaluation.probe(self.run, self.materials)

    def measures(self) -> dict[str, float]:
        rankings = evaluation.rank_all(self.run, self.materials.texts, self.materials.passages)
        return evaluation.ranking_measures(self.run.recipe, self.materials.texts, rankings)

    def report(self, folder: RunFolder, index: Searchable | None = None, first_stage: FirstStage | None = None) -> str:
        """Search the run's passages, or an `index`, whose passages need not fit into memory."""
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

        passages = run.recipe.data.positives + run.recipe.data.hard_negatives
        total = measured("query", materials.queries) + measured("passage", materials.passages) * passages
        return total, sub_batch.at_once("query", run.recipe.model.tokenizer.query_length)

    def metadata(self, result: TrainResult) -> dict[str, Any]:
        return {**super().metadata(result), "texts_sha256": self.test_digest}

    def metadata_so_far(self, result: TrainResult) -> dict[str, Any]:
        passages = len(self.materials.texts.passages)
        return {**super().metadata_so_far(result), "unit": self.unit, "passages": passages}


def evaluate_texts(
    folder: RunFolder, source: str | Path, *, corpus: str | Path | None = None, index: Searchable | None = None,
    first_stage: FirstStage | None = None, split: str | None = None, name: str | None = None,
    bad_rows: float | None = None, device: str = "auto",
) -> str:  # fmt: skip
    """Measure a finished retriever on the texts of `source`, add the rows to its results, and return their table.

    The texts are those of a file, or of a folder in BEIR's format: its part `split`, or all but the one for training.
    They are encoded with the run's prefixes and lengths. corpus: further passages beside a file of questions. index: an
    index to search instead of the passages of `source`. first_stage: the candidates of a late retriever. Run files and
    rows are named after `name`, by default the source's name, and the part: scifact-test. bad_rows: the share of
    unusable rows allowed, by default the recipe's.
    """
    run: Any = load(folder.path, device=device)
    source = Path(source)
    options: dict[str, Any] = {"allowed_by": "--bad-rows", "progress": progress}
    options["bad_rows"] = run.recipe.data.bad_rows if bad_rows is None else bad_rows
    if not source.is_dir():
        texts = open_questions(source, corpus=None if corpus is None else Path(corpus), **options)
    elif corpus is not None:
        raise invalid("--corpus", f'be left out with the folder "{source}"', f'"{corpus}"', "It has its own passages.")
    else:
        texts = open_beir(source, **options)
    available = [part for part, rows in texts.splits.items() if len(rows)]
    if not available:
        remedy = "Judgements have columns of a query, a passage and a grade above 0, between tabs."
        raise invalid("--texts", "have a question with a right passage", f'"{source}" without one', remedy)
    chosen = [part for part in available if part != "train"] if split is None else [split]
    if not chosen or chosen[0] not in available:
        got = "none" if split is None else f'"{split}"'
        rule = f'be one of the parts of "{source}" with questions ({", ".join(available)})'
        raise invalid("--split", rule, got, "Name one of them.")
    if index is None and not texts.passages:
        remedy = "Name a --corpus or an --index."
        raise invalid("--texts", "come with passages to look among", f'"{source}" alone', remedy)
    prefix = name or source.name.partition(".")[0]
    parts = {f"{prefix}-{part}": texts.splits[part] for part in chosen}
    texts = replace(texts, splits={"train": np.array([], dtype=np.int64), **parts})
    passages = passage_tokens(texts.passages, run.tokenizer, run.recipe) if index is None else index
    return evaluate_and_report(folder, run, texts, passages, first_stage, beside=True)
