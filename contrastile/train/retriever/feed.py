"""What a retriever's run is made from, and what each of its steps eats: tokens of queries and of passages.

Between `data/batches.py`, which says which queries, and the encoders. Texts are tokenised once for the run and kept
without padding. A step's passages are all different: what two queries share is encoded once, and is no negative of
either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastile._check import wrong
from contrastile.data.pairs import Indices
from contrastile.data.texts import Passage, TextSet, open_texts, text_digest
from contrastile.models.text import Tokenizer, load_tokenizer, train_tokenizer
from contrastile.train.log import progress
from contrastile.train.retriever.config import RetrieverRecipe, TextDataSettings

Tokens = dict[str, Tensor]

# texts tokenised at once
SLICE = 1024


class TokenStore:
    """Texts as tokens, one behind the other without padding."""

    def __init__(self, ids: Tensor, starts: Tensor, pad: int) -> None:
        self._ids, self._starts, self._pad = ids, starts, pad
        self.lengths = starts.diff()

    @staticmethod
    def of(texts: Iterable[str], tokenizer: Tokenizer, length: int) -> TokenStore:
        """`texts`, each cut at `length` tokens."""
        waiting = iter(texts)
        ids, lengths = [torch.empty(0, dtype=torch.int32)], [torch.zeros(1, dtype=torch.int64)]
        while some := list(islice(waiting, SLICE)):
            tokens = tokenizer.tokenise(some, length)
            mask = tokens["attention_mask"].bool()
            ids.append(tokens["input_ids"][mask].int())
            lengths.append(mask.sum(dim=1))
        return TokenStore(torch.cat(ids), torch.cat(lengths).cumsum(0), tokenizer.pad)

    def __len__(self) -> int:
        return len(self.lengths)

    def stir(self, digest: Any) -> None:
        """All tokens into a hash."""
        digest.update(self._ids.numpy().tobytes() + self._starts.numpy().tobytes())

    def rows(self, rows: Tensor) -> Tokens:
        """`input_ids` and `attention_mask` of these texts, int64 `[n, longest]`, padded behind."""
        lengths = self.lengths[rows]
        places = torch.arange(max(int(lengths.max()), 1)) if len(rows) else torch.arange(1)
        mask = places < lengths[:, None]
        within = (self._starts[rows][:, None] + places).masked_fill(~mask, 0)
        ids = self._ids[within].long() if len(self._ids) else torch.zeros_like(within)
        return {"input_ids": ids.masked_fill(~mask, self._pad), "attention_mask": mask.long()}


@dataclass(frozen=True)
class TextMaterials:
    """The texts of a recipe, a tokenizer for them, and every text tokenised.

    same: for each passage the first one that says the same.
    """

    texts: TextSet
    tokenizer: Tokenizer
    queries: TokenStore
    passages: TokenStore
    same: Indices


def open_text_materials(recipe: RetrieverRecipe, tokenizer: Tokenizer | None = None) -> TextMaterials:
    """Everything that a retriever's run is made from; a tokenizer is trained on the run's texts where none is given."""
    data, settings = recipe.data, recipe.model.tokenizer
    texts = open_run_texts(recipe)
    asked = (query_text(query.text, data) for query in texts.queries)
    if tokenizer is None and settings.folder is not None:
        tokenizer = load_tokenizer(Path(settings.folder), length=settings.length)
    if tokenizer is None:
        tokenizer = train_tokenizer(
            training_texts(texts, data), kind=settings.kind, size=settings.size, length=settings.length
        )
    return TextMaterials(
        texts,
        tokenizer,
        queries=TokenStore.of(asked, tokenizer, settings.query_length),
        passages=passage_tokens(texts.passages, tokenizer, recipe),
        same=first_of_each(texts.passages),
    )


def open_run_texts(recipe: RetrieverRecipe) -> TextSet:
    """The texts that a recipe names."""
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
        raise wrong("data.source", f'have questions to train on ("{data.source}")', f"{got} alone", remedy)
    return texts


def training_texts(texts: TextSet, data: TextDataSettings) -> Iterator[str]:
    """What a tokenizer may see: the training queries and their passages, not those held out."""
    train = [texts.queries[row] for row in texts.splits["train"].tolist()]
    shown = dict.fromkeys(row for query in train for row in (*query.positives, *query.negatives))
    yield from (query_text(query.text, data) for query in train)
    yield from (passage_text(texts.passages[row], data) for row in shown)


def query_text(text: str, data: TextDataSettings) -> str:
    """A query as its encoder reads it."""
    return data.query_prefix + text


def passage_text(passage: Passage, data: TextDataSettings) -> str:
    """A passage as its encoder reads it."""
    title = passage.title + data.title_separator if passage.title else ""
    return data.passage_prefix + title + passage.text


def passage_tokens(passages: Sequence[Passage], tokenizer: Tokenizer, recipe: RetrieverRecipe) -> TokenStore:
    """Passages as their encoder reads them."""
    return TokenStore.of((passage_text(one, recipe.data) for one in passages), tokenizer, recipe.model.tokenizer.length)


def first_of_each(passages: Sequence[Passage]) -> Indices:
    """For each passage the row of the first one with the same title and text."""
    seen: dict[bytes, int] = {}
    return np.array(
        [seen.setdefault(text_digest(passage), row) for row, passage in enumerate(passages)], dtype=np.int64
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A query of a step, with the passages that were drawn for it."""

    query: int
    positives: tuple[int, ...]
    negatives: tuple[int, ...]


@dataclass(frozen=True)
class TextBatch:
    """queries, passages: tokens, `[b, L]` and `[keys, L]`. positives `[b, P]`: their keys, −1 pads; ids of both.

    It is what one rank has of a batch with `whole` queries.
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
        """Tokens are always numbers."""
        return {}


class TextFeed:
    """Draws passages for queries, by lots that `seed` and the step's number decide, and makes batches of them."""

    def __init__(self, materials: TextMaterials, data: TextDataSettings, *, seed: int) -> None:
        self._materials, self._data, self._seed = materials, data, seed

    def draw(self, rows: Tensor, step: int) -> list[Drawn]:
        """The queries at `rows` with their passages, each of those by the first row that says the same."""
        lots = np.random.default_rng((self._seed, step))
        drawn = []
        for row in rows.tolist():
            query = self._materials.texts.queries[row]
            positives = self._some(lots, query.positives, self._data.positives)
            drawn.append(Drawn(row, positives, self._some(lots, query.negatives, self._data.negatives)))
        return drawn

    def _some(self, lots: np.random.Generator, rows: Sequence[int], count: int) -> tuple[int, ...]:
        if len(rows) > count:
            rows = [rows[place] for place in lots.permutation(len(rows))[:count]]
        return tuple(int(self._materials.same[row]) for row in rows)

    def batch(self, drawn: Sequence[Drawn], rank: int = 0, size: int = 1) -> TextBatch:
        """These queries and every passage among them once; a passage that is known to be right is a positive.

        Of several ranks each has some of the queries and some of the passages: no passage is on two of them, and each
        query is where all that is right for it is. So all ranks together compare exactly what one process would.
        """
        made = self._materials
        right = self._known(drawn)
        home = homes(right, size)
        owner: dict[int, int] = {}
        for passages, at in zip(right, home, strict=True):
            owner |= dict.fromkeys(passages, at)
        for one, at in zip(drawn, home, strict=True):
            for row in one.negatives:
                owner.setdefault(row, at)
        # the longest first: sub-batches are then of like lengths, and too little memory shows at once
        mine = [place for place, at in enumerate(home) if at == rank]
        mine.sort(key=lambda place: -int(made.queries.lengths[drawn[place].query]))
        keys = torch.tensor(sorted(row for row, at in owner.items() if at == rank), dtype=torch.int64)
        keys = keys[made.passages.lengths[keys].argsort(descending=True, stable=True)]
        number = {row: place for place, row in enumerate(keys.tolist())}
        places = [[number[row] for row in right[place]] for place in mine]
        # as wide on every rank
        widest = max(map(len, right), default=1)
        padded = [[*some, *[-1] * (widest - len(some))] for some in places]
        return TextBatch(
            queries=made.queries.rows(torch.tensor([drawn[place].query for place in mine], dtype=torch.int64)),
            passages=made.passages.rows(keys),
            positives=torch.tensor(padded, dtype=torch.int64).view(len(mine), widest),
            query_ids=torch.tensor([self._apart(drawn[place]) for place in mine], dtype=torch.int64),
            key_ids=keys,
            whole=len(drawn),
        )

    def _known(self, drawn: Sequence[Drawn]) -> list[list[int]]:
        """For each query, which passages of the batch are right, whoever brought them."""
        there = {row for one in drawn for row in (*one.positives, *one.negatives)}
        known = []
        for one in drawn:
            rows = self._materials.texts.queries[one.query].positives
            known.append([row for row in dict.fromkeys(int(self._materials.same[row]) for row in rows) if row in there])
        return known

    def _apart(self, one: Drawn) -> int:
        """The passage that is no negative of a query, though nobody calls it right: the query itself, if it is one."""
        itself = self._materials.texts.queries[one.query].itself
        return one.positives[0] if itself is None else int(self._materials.same[itself])

    def parts(self, drawn: Sequence[Drawn], count: int, rank: int = 0, size: int = 1) -> list[TextBatch]:
        """At most `count` nearly equal batches, each with its own negatives only; one rank's share of each."""
        cuts = torch.arange(len(drawn)).tensor_split(min(count, len(drawn)))
        return [self.batch([drawn[place] for place in cut.tolist()], rank, size) for cut in cuts]


def homes(right: Sequence[Sequence[int]], size: int) -> list[int]:
    """The rank of each query: those that share a right passage stay together, and all ranks get nearly as many.

    >>> homes([[7], [8], [9, 7], [5]], size=2)
    [0, 1, 0, 1]
    """
    if size == 1:
        return [0] * len(right)
    leader = list(range(len(right)))

    def led(query: int) -> int:
        while leader[query] != query:
            leader[query] = leader[leader[query]]
            query = leader[query]
        return query

    first: dict[int, int] = {}
    for query, passages in enumerate(right):
        for row in passages:
            one, other = led(query), led(first.setdefault(row, query))
            leader[max(one, other)] = min(one, other)
    groups = Counter(led(query) for query in range(len(right)))
    load = [0] * size
    at: dict[int, int] = {}
    for group, count in groups.items():
        at[group] = load.index(min(load))
        load[at[group]] += count
    return [at[led(query)] for query in range(len(right))]


def fingerprint(materials: TextMaterials) -> str:
    """What a retriever learns from, in one number: texts, splits and negatives, and the tokens of all of them."""
    digest = sha256(materials.texts.digest().encode())
    for store in (materials.queries, materials.passages):
        store.stir(digest)
    return digest.hexdigest()
