"""Batches of a retriever's steps: queries, the passages sampled for them, and their marks.

The passages of a step are distinct: one that two queries share is encoded once, and is a negative of neither.
"""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contrastile.train.config.losses import RetrieverScores
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.run import TextMaterials, Tokens, TokenStore


@dataclass(frozen=True, slots=True)
class SampledQuery:
    """A query of a step with the passages that were sampled for it, as rows of the text set."""

    query: int
    positives: tuple[int, ...]
    negatives: tuple[int, ...]


@dataclass(frozen=True)
class TextBatch:
    """One rank's share of a batch of `whole` queries.

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
    whole: int
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
        # encoders are compiled for each length: tokens are then padded to few
        self._rounded = recipe.train.compile is True
        # "own": each query's negatives are its own alone; "scores": the scored passages of each query are listed too
        own = "own" if getattr(recipe.loss, "own_negatives", False) else ""
        self._lists = "scores" if isinstance(recipe.loss, RetrieverScores) else own

    def sample(self, rows: Tensor, step: int) -> list[SampledQuery]:
        """The queries at `rows` with sampled passages; copies of a passage are replaced by its first row."""
        generator = np.random.default_rng((self._seed, step))

        def choose(passages: Sequence[int], count: int) -> tuple[int, ...]:
            if len(passages) > count:
                passages = [passages[index] for index in generator.permutation(len(passages))[:count]]
            return tuple(self._materials.same[list(passages)].tolist())

        queries = ((row, self._materials.texts.queries[row]) for row in rows.tolist())
        positives, negatives = self._data.positives, self._data.negatives
        return [
            SampledQuery(row, choose(query.positives, positives), choose(query.negatives, negatives))
            for row, query in queries
        ]

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
        own = self._lists == "own"
        negatives = [() if own else one.negatives for one in sampled]
        drawn = {row for one, wrong in zip(sampled, negatives, strict=True) for row in (*one.positives, *wrong)}
        # for each query the drawn passages that are listed as right, whichever query they were drawn for
        listed = [dict.fromkeys(same[list(queries[one.query].positives)].tolist()) for one in sampled]
        positives = [[row for row in rows if row in drawn] for rows in listed]
        ranks = assign_ranks(positives, size)
        # a passage is on the rank of those for which it is right, else on that of the first one that drew it
        owners = {row: owner for rows, owner in reversed([*zip(negatives, ranks, strict=True)]) for row in rows}
        owners |= {row: owner for rows, owner in zip(positives, ranks, strict=True) for row in rows}
        # longest first: sub-batches then have texts of similar lengths, and the first one needs the most memory
        local = [index for index, owner in enumerate(ranks) if owner == rank]
        local.sort(key=lambda index: -int(materials.queries.lengths[sampled[index].query]))
        lists = [self._listed(sampled[index], listed[index]) for index in local] if self._lists else []
        shared = {row for row, owner in owners.items() if owner == rank}
        # a passage of a list is encoded on every rank that lists it
        keys = torch.tensor(sorted(shared.union(*lists)), dtype=torch.int64)
        keys = keys[materials.passages.lengths[keys].argsort(descending=True, stable=True)]
        places = {row: place for place, row in enumerate(keys.tolist())}
        of_all = [place for row, place in places.items() if row in shared]
        columns = {int(keys[place]): column for column, place in enumerate(of_all)}
        # the width of the positives is the same on every rank
        padded = np.full((len(local), max(map(len, positives), default=1)), -1)
        for row, index in enumerate(local):
            padded[row, : len(positives[index])] = [columns[passage] for passage in positives[index]]
        rows = torch.tensor([sampled[index].query for index in local], dtype=torch.int64)
        # the passage that is no negative of a query: its own text where that is a passage, else its positive
        itself = [(sampled[index].positives[0], queries[sampled[index].query].itself) for index in local]
        ids = [positive if own_text is None else int(same[own_text]) for positive, own_text in itself]
        teacher = None if self._teacher is None else (self._teacher[0].rows(rows), self._teacher[1].rows(keys))
        return TextBatch(
            queries=materials.queries.rows(rows, rounded=self._rounded),
            passages=materials.passages.rows(keys, rounded=self._rounded),
            positives=torch.from_numpy(padded),
            query_ids=torch.tensor(ids, dtype=torch.int64),
            key_ids=keys,
            whole=len(sampled),
            teacher_tokens=teacher,
            **(self._list_tensors(lists, places, of_all) if self._lists else {}),
        )

    def _listed(self, one: SampledQuery, positives: Container[int]) -> dict[int, float]:
        """The passages of a query's list with their scores: its own negatives, of 0, or its scored passages.

        Scored passages begin with a right one; without one the list is empty.
        """
        if self._lists == "own":
            return dict.fromkeys((row for row in one.negatives if row not in positives), 0.0)
        same, scores = self._materials.same, dict(self._materials.texts.queries[one.query].scores)
        scored = {int(same[row]): score for row, score in scores.items()}
        if not any(row in scored for row in one.positives):
            return {}
        return {row: scored[row] for row in (*one.positives, *one.negatives) if row in scored}

    def _list_tensors(
        self, lists: Sequence[dict[int, float]], places: dict[int, int], shared: list[int]
    ) -> dict[str, Tensor]:
        """The lists as indices of this rank's passages, all of one width, and the indices of the keys of all."""
        scored = self._lists == "scores"
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
