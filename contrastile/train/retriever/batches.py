"""The data of a retriever's run as tokens, and the batches of its steps.

Stands between `data/batches.py`, which orders the queries, and the encoders. Texts are tokenised once per run and
stored without padding. The passages of a step are distinct: a passage that two queries share is encoded once, and is a
negative of neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Indices
from contrastile.data.registry import open_texts
from contrastile.data.texts import Passage, TextSet, text_digest
from contrastile.models.text import Tokenizer, load_tokenizer, train_tokenizer
from contrastile.train.log import progress
from contrastile.train.retriever.config import RetrieverRecipe, TextDataSettings

Tokens = dict[str, Tensor]

# texts per call of the tokenizer
TOKENISED_AT_ONCE = 1024


class TokenStore:
    """Tokenised texts, concatenated without padding."""

    def __init__(self, ids: Tensor, starts: Tensor, pad: int) -> None:
        self._ids, self._starts, self._pad = ids, starts, pad
        self.lengths = starts.diff()

    @staticmethod
    def from_texts(texts: Iterable[str], tokenizer: Tokenizer, length: int) -> TokenStore:
        """Tokenise `texts`, each truncated to `length` tokens."""
        stream = iter(texts)
        ids, lengths = [torch.empty(0, dtype=torch.int32)], [torch.zeros(1, dtype=torch.int64)]
        while chunk := list(islice(stream, TOKENISED_AT_ONCE)):
            tokens = tokenizer.tokenise(chunk, length)
            mask = tokens["attention_mask"].bool()
            ids.append(tokens["input_ids"][mask].int())
            lengths.append(mask.sum(dim=1))
        return TokenStore(torch.cat(ids), torch.cat(lengths).cumsum(0), tokenizer.pad)

    def __len__(self) -> int:
        return len(self.lengths)

    def to_bytes(self) -> bytes:
        """All tokens and their offsets, for a checksum."""
        return self._ids.numpy().tobytes() + self._starts.numpy().tobytes()

    def rows(self, rows: Tensor) -> Tokens:
        """`input_ids` and `attention_mask` of these texts, int64 `[n, longest]`, padded on the right."""
        lengths = self.lengths[rows]
        positions = torch.arange(max(int(lengths.max()), 1) if len(rows) else 1)
        mask = positions < lengths[:, None]
        offsets = (self._starts[rows][:, None] + positions).masked_fill(~mask, 0)
        ids = self._ids[offsets].long() if len(self._ids) else torch.zeros_like(offsets)
        return {"input_ids": ids.masked_fill(~mask, self._pad), "attention_mask": mask.long()}


@dataclass(frozen=True)
class TextMaterials:
    """The texts of a recipe, their tokenizer, and the tokens of all queries and passages.

    same: for each passage the first row with the same title and text.
    """

    texts: TextSet
    tokenizer: Tokenizer
    queries: TokenStore
    passages: TokenStore
    same: Indices

    def fingerprint(self) -> str:
        """SHA-256 of all that training depends on: texts, splits, negatives and tokens."""
        digest = sha256(self.texts.digest().encode())
        for store in (self.queries, self.passages):
            digest.update(store.to_bytes())
        return digest.hexdigest()


def open_text_materials(recipe: RetrieverRecipe, tokenizer: Tokenizer | None = None) -> TextMaterials:
    """Read and tokenise the texts of a recipe; without a `tokenizer`, load the recipe's or train one on the texts."""
    data, settings = recipe.data, recipe.model.tokenizer
    texts = open_run_texts(recipe)
    if tokenizer is None and settings.folder is not None:
        tokenizer = load_tokenizer(Path(settings.folder), length=settings.length)
    if tokenizer is None:
        corpus = training_texts(texts, data)
        tokenizer = train_tokenizer(corpus, kind=settings.kind, size=settings.size, length=settings.length)
    queries = (query_text(query.text, data) for query in texts.queries)
    first_rows: dict[bytes, int] = {}
    same = [first_rows.setdefault(text_digest(passage), row) for row, passage in enumerate(texts.passages)]
    return TextMaterials(
        texts,
        tokenizer,
        queries=TokenStore.from_texts(queries, tokenizer, settings.query_length),
        passages=passage_tokens(texts.passages, tokenizer, recipe),
        same=np.array(same, dtype=np.int64),
    )


def open_run_texts(recipe: RetrieverRecipe) -> TextSet:
    """Read the texts that a recipe names; raises ValueError where they have no training queries."""
    data = recipe.data
    texts = open_texts(
        data.source,
        cache=Path(data.cache).expanduser(),
        corpus=data.corpus,
        test=data.test,
        packages=data.packages,
        held_out=data.held_out,
        mined=data.mined,
        bad_rows=data.bad_rows,
        progress=progress,
    )
    if len(texts.splits["train"]) == 0:
        got = ", ".join(name for name, rows in texts.splits.items() if len(rows)) or "none"
        remedy = "A BEIR folder has them in qrels/train.tsv."
        raise invalid("data.source", f'have questions to train on ("{data.source}")', f"{got} alone", remedy)
    return texts


def training_texts(texts: TextSet, data: TextDataSettings) -> Iterator[str]:
    """The training queries and their passages, which a tokenizer may be trained on; nothing that is held out."""
    train = [texts.queries[row] for row in texts.splits["train"].tolist()]
    passages = dict.fromkeys(row for query in train for row in (*query.positives, *query.negatives))
    yield from (query_text(query.text, data) for query in train)
    yield from (passage_text(texts.passages[row], data) for row in passages)


def query_text(text: str, data: TextDataSettings) -> str:
    """A query as its encoder reads it."""
    return data.query_prefix + text


def passage_text(passage: Passage, data: TextDataSettings) -> str:
    """A passage as its encoder reads it."""
    title = passage.title + data.title_separator if passage.title else ""
    return data.passage_prefix + title + passage.text


def passage_tokens(passages: Sequence[Passage], tokenizer: Tokenizer, recipe: RetrieverRecipe) -> TokenStore:
    """Tokens of passages as their encoder reads them."""
    texts = (passage_text(passage, recipe.data) for passage in passages)
    return TokenStore.from_texts(texts, tokenizer, recipe.model.tokenizer.length)


@dataclass(frozen=True, slots=True)
class SampledQuery:
    """A query of a step with the passages that were sampled for it, as rows of the text set."""

    query: int
    positives: tuple[int, ...]
    negatives: tuple[int, ...]


@dataclass(frozen=True)
class TextBatch:
    """One rank's share of a batch of `whole` queries.

    queries, passages: tokens, `[b, L]` and `[keys, L]`. positives `[b, P]`: indices of each query's passages, padded
    with −1. query_ids `[b]`, key_ids `[keys]`: a query is no negative of the passage with its id.
    """

    queries: Tokens
    passages: Tokens
    positives: Tensor
    query_ids: Tensor
    key_ids: Tensor
    whole: int

    def __len__(self) -> int:
        return len(self.positives)

    @property
    def floats(self) -> dict[str, Tensor]:
        """No inputs: tokens are integers and always finite."""
        return {}


class TextBatchBuilder:
    """Samples passages for queries, seeded by `seed` and the step's number alone, and builds batches of them."""

    def __init__(self, materials: TextMaterials, data: TextDataSettings, *, seed: int) -> None:
        self._materials, self._data, self._seed = materials, data, seed

    def sample(self, rows: Tensor, step: int) -> list[SampledQuery]:
        """The queries at `rows` with sampled passages; copies of a passage are replaced by its first row."""
        generator = np.random.default_rng((self._seed, step))

        def choose(passages: Sequence[int], count: int) -> tuple[int, ...]:
            if len(passages) > count:
                passages = [passages[index] for index in generator.permutation(len(passages))[:count]]
            return tuple(int(self._materials.same[row]) for row in passages)

        sampled = []
        for row in rows.tolist():
            query = self._materials.texts.queries[row]
            positives = choose(query.positives, self._data.positives)
            sampled.append(SampledQuery(row, positives, choose(query.negatives, self._data.negatives)))
        return sampled

    def batch(self, sampled: Sequence[SampledQuery], rank: int = 0, size: int = 1) -> TextBatch:
        """One rank's share of these queries and their passages, each passage once.

        No passage is on two ranks, and each query is on the rank that has all of its positives, so that all ranks
        together compute the comparisons of one process. A passage sampled as a negative that is listed as right for a
        query is a positive of it.
        """
        tokens, positives = self._materials, self._positives_of(sampled)
        query_ranks = assign_ranks(positives, size)
        passage_ranks: dict[int, int] = {}
        for rows, owner in zip(positives, query_ranks, strict=True):
            passage_ranks |= dict.fromkeys(rows, owner)
        for one, owner in zip(sampled, query_ranks, strict=True):
            for row in one.negatives:
                passage_ranks.setdefault(row, owner)
        # longest first: sub-batches then have texts of similar lengths, and the first one needs the most memory
        local = [index for index, owner in enumerate(query_ranks) if owner == rank]
        local.sort(key=lambda index: -int(tokens.queries.lengths[sampled[index].query]))
        keys = torch.tensor(sorted(row for row, owner in passage_ranks.items() if owner == rank), dtype=torch.int64)
        keys = keys[tokens.passages.lengths[keys].argsort(descending=True, stable=True)]
        key_indices = {row: index for index, row in enumerate(keys.tolist())}
        # the width of `positives` is the same on every rank
        width = max(map(len, positives), default=1)
        padded = [[key_indices[row] for row in positives[index]] for index in local]
        padded = [[*indices, *[-1] * (width - len(indices))] for indices in padded]
        return TextBatch(
            queries=tokens.queries.rows(torch.tensor([sampled[index].query for index in local], dtype=torch.int64)),
            passages=tokens.passages.rows(keys),
            positives=torch.tensor(padded, dtype=torch.int64).view(len(local), width),
            query_ids=torch.tensor([self._query_id(sampled[index]) for index in local], dtype=torch.int64),
            key_ids=keys,
            whole=len(sampled),
        )

    def _positives_of(self, sampled: Sequence[SampledQuery]) -> list[list[int]]:
        """For each query, the passages of the batch that are listed as right, whichever query they were sampled for."""
        batch = {row for one in sampled for row in (*one.positives, *one.negatives)}
        queries, same = self._materials.texts.queries, self._materials.same
        listed = (dict.fromkeys(int(same[row]) for row in queries[one.query].positives) for one in sampled)
        return [[row for row in rows if row in batch] for rows in listed]

    def _query_id(self, one: SampledQuery) -> int:
        """The passage that is no negative of a query: its own text where that is a passage, else its positive."""
        itself = self._materials.texts.queries[one.query].itself
        return one.positives[0] if itself is None else int(self._materials.same[itself])

    def parts(self, sampled: Sequence[SampledQuery], count: int, rank: int = 0, size: int = 1) -> list[TextBatch]:
        """One rank's share of at most `count` nearly equal batches, each with its own negatives only."""
        splits = torch.arange(len(sampled)).tensor_split(min(count, len(sampled)))
        return [self.batch([sampled[index] for index in split.tolist()], rank, size) for split in splits]


def assign_ranks(positives: Sequence[Sequence[int]], size: int) -> list[int]:
    """The rank of each query: queries that share a positive get the same one, and all ranks nearly as many queries.

    >>> assign_ranks([[7], [8], [9, 7], [5]], size=2)
    [0, 1, 0, 1]
    """
    if size == 1:
        return [0] * len(positives)
    # a union-find forest; the root of a group is its first query
    parent = list(range(len(positives)))

    def root(query: int) -> int:
        while parent[query] != query:
            parent[query] = parent[parent[query]]
            query = parent[query]
        return query

    first_query: dict[int, int] = {}
    for query, passages in enumerate(positives):
        for row in passages:
            one, other = root(query), root(first_query.setdefault(row, query))
            parent[max(one, other)] = min(one, other)
    load = [0] * size
    ranks: dict[int, int] = {}
    for group, count in Counter(map(root, range(len(positives)))).items():
        ranks[group] = load.index(min(load))
        load[ranks[group]] += count
    return [ranks[root(query)] for query in range(len(positives))]
