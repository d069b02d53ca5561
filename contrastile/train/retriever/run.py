"""A retriever in memory and on disk, its texts as tokens, and the batches of its steps.

`job.py` builds a `RetrieverRun`, the loop trains and saves its model, and `contrastile.load` returns it; folders have
the format of `train/run.py`. Texts are tokenised once per run and stored without padding. `data/batches.py` orders the
queries. The passages of a step are distinct: one that two queries share is encoded once, and is a negative of neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Indices, silent
from contrastile.data.registry import open_texts
from contrastile.data.texts import Passage, TextSet, text_digest
from contrastile.gradcache.batching import rounded_length
from contrastile.gradcache.encode import encode
from contrastile.models.base import evaluating
from contrastile.models.compiled import compile_tower
from contrastile.models.text import Tokenizer, load_tokenizer, train_tokenizer
from contrastile.models.towers import Retriever, build_retriever
from contrastile.train.folder import RECIPE, finished_run
from contrastile.train.loaded import LoadedRun
from contrastile.train.log import progress
from contrastile.train.recipe import load_retriever_recipe
from contrastile.train.retriever.config import RetrieverRecipe, TextDataSettings
from contrastile.train.run import autocast, checked_list, checked_towers, choose_device, load_weights, settled

Side = Literal["query", "passage"]
Tokens = dict[str, Tensor]

# texts per call of the tokenizer, and texts encoded between two updates of the progress bar
TOKENISED_AT_ONCE, CHUNK = 1024, 4096


class TokenStore:
    """Tokenised texts, each truncated to `length` tokens, concatenated without padding."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer, length: int) -> None:
        stream, self._pad = iter(texts), tokenizer.pad
        ids, lengths = [torch.empty(0, dtype=torch.int32)], [torch.empty(0, dtype=torch.int64)]
        while chunk := list(islice(stream, TOKENISED_AT_ONCE)):
            tokens = tokenizer.tokenise(chunk, length)
            mask = tokens["attention_mask"].bool()
            ids.append(tokens["input_ids"][mask].int())
            lengths.append(mask.sum(dim=1))
        self._ids, self.lengths = torch.cat(ids), torch.cat(lengths)
        self._starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    def __len__(self) -> int:
        return len(self.lengths)

    def to_bytes(self) -> bytes:
        """All tokens and their offsets, for a checksum."""
        return self._ids.numpy().tobytes() + self._starts.numpy().tobytes()

    def rows(self, rows: Tensor, *, rounded: bool = False) -> Tokens:
        """`input_ids` and `attention_mask` of these texts, int64 `[n, longest]`, padded on the right.

        `rounded`: the longest length is rounded up, at most to that of all texts.
        """
        lengths = self.lengths[rows]
        longest = max(int(lengths.max()), 1) if len(rows) else 1
        positions = torch.arange(
            rounded_length(longest, max(int(self.lengths.max()), 1)) if rounded and len(rows) else longest
        )
        mask = positions < lengths[:, None]
        offsets = (self._starts[rows][:, None] + positions).masked_fill(~mask, 0)
        ids = self._ids[offsets].long() if len(self._ids) else torch.zeros_like(offsets)
        return {"input_ids": ids.masked_fill(~mask, self._pad), "attention_mask": mask.long()}


def passage_text(passage: Passage, data: TextDataSettings) -> str:
    """A passage as its encoder reads it."""
    title = passage.title + data.title_separator if passage.title else ""
    return data.passage_prefix + title + passage.text


def passage_tokens(passages: Sequence[Passage], tokenizer: Tokenizer, recipe: RetrieverRecipe) -> TokenStore:
    """Tokens of passages as their encoder reads them."""
    texts = (passage_text(passage, recipe.data) for passage in passages)
    return TokenStore(texts, tokenizer, recipe.model.tokenizer.length)


@dataclass(frozen=True, repr=False)
class RetrieverRun(LoadedRun):
    """The encoders of a run with their recipe and tokenizer.

    `encode_query` and `encode_passage` return rows to be compared by dot product, of length 1 where the recipe says
    `normalise`.
    """

    recipe: RetrieverRecipe
    model: Retriever
    tokenizer: Tokenizer
    device: torch.device

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the run's encoders."""
        return autocast(self.device, self.recipe.train.precision)

    def sub_batch(self, side: Side, tokens: Tokens) -> dict[str, Any]:
        """The sub-batch arguments of `encode` for these texts."""
        return self.recipe.train.sub_batch.words(side, tokens["input_ids"].shape[1])

    def encode_query(self, texts: Sequence[str], *, dimensions: int | None = None) -> Tensor:
        """Features `[n, D]`, float32, of questions; the first `dimensions` features where that is given."""
        prefixed = (self.recipe.data.query_prefix + text for text in checked_list("texts", texts, "text", str))
        store = TokenStore(prefixed, self.tokenizer, self.recipe.model.tokenizer.query_length)
        return self.encode_tokens("query", store, dimensions=dimensions)

    def encode_passage(self, passages: Sequence[Passage | str], *, dimensions: int | None = None) -> Tensor:
        """Features `[n, D]`, float32, of passages or of plain texts."""
        checked = checked_list("passages", passages, "passage", Passage, str)
        given = [passage if isinstance(passage, Passage) else Passage("", passage) for passage in checked]
        return self.encode_tokens("passage", passage_tokens(given, self.tokenizer, self.recipe), dimensions=dimensions)

    @torch.no_grad()
    def encode_tokens(
        self, side: Side, store: TokenStore, *, dimensions: int | None = None, title: str | None = None
    ) -> Tensor:
        """Features of all texts of a store, without dropout, longest first; with a progress bar called `title`."""
        if len(store) == 0:
            return torch.empty(0, dimensions or 0, device=self.device)
        encoder = getattr(self.model, f"encode_{side}")
        order = store.lengths.argsort(descending=True, stable=True)
        parts = []
        with evaluating(self.model), (progress if title else silent)(len(store), title or "", "texts") as bar:
            for rows in order.split(CHUNK):
                tokens = store.rows(rows)
                with self.autocast():
                    features = encode(encoder, tokens, **self.sub_batch(side, tokens))
                parts.append(self.model.comparable(features, dimensions))
                bar.update(len(rows))
        return torch.cat(parts)[order.argsort().to(self.device)]


def build_retriever_run(recipe: RetrieverRecipe, tokenizer: Tokenizer) -> RetrieverRun:
    """The untrained run of a recipe, initialised from its seed."""
    recipe = settled(recipe)
    torch.manual_seed(recipe.seed)
    device = choose_device(recipe.device)
    settings = {
        **recipe.model.model_dump(exclude={"tokenizer", "dimensions"}, exclude_none=True),
        **recipe.loss.model_dump(include={"scale", "learn_scale"}),
    }
    model = build_retriever(settings, tokenizer=tokenizer)
    # the feature size of some encoders is known only once they are built
    if (most := max(recipe.model.dimensions, default=0)) > model.features:
        raise invalid("model.dimensions", f"be at most the {model.features} features there are", most, "Leave it out.")
    model = model.to(device)
    for encoder in model.encoders.values() if recipe.train.compile else ():
        compile_tower(encoder)
    return RetrieverRun(recipe, model, tokenizer, device)


def load_retriever(run: str | Path, *, device: str = "auto") -> RetrieverRun:
    """The encoders and tokenizer of a finished run, ready to encode; needs none of the run's data.

    Raises ValueError where the folder is no retriever's run, or its weights do not match their checksum.
    """
    folder = finished_run(run)
    recipe = load_retriever_recipe(folder / RECIPE, files=False)
    tokenizer = load_tokenizer(folder.path, length=recipe.model.tokenizer.length)
    model = build_retriever(checked_towers(folder), tokenizer=tokenizer)
    load_weights(model, folder)
    return RetrieverRun(recipe, model.to(choose_device(device)).eval(), tokenizer, choose_device(device))


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


def open_text_materials(recipe: RetrieverRecipe, tokenizer: Tokenizer | None = None) -> TextMaterials:
    """Read and tokenise the texts of a recipe; without a `tokenizer`, load the recipe's or train one on the texts."""
    data, settings = recipe.data, recipe.model.tokenizer
    texts = open_run_texts(recipe)
    if tokenizer is None and settings.folder is not None:
        tokenizer = load_tokenizer(Path(settings.folder), length=settings.length)
    if tokenizer is None:
        corpus = training_texts(texts, data)
        tokenizer = train_tokenizer(corpus, kind=settings.kind, size=settings.size, length=settings.length)
    queries = TokenStore((data.query_prefix + query.text for query in texts.queries), tokenizer, settings.query_length)
    first_rows: dict[bytes, int] = {}
    same = [first_rows.setdefault(text_digest(passage), row) for row, passage in enumerate(texts.passages)]
    passages = passage_tokens(texts.passages, tokenizer, recipe)
    return TextMaterials(texts, tokenizer, queries, passages, np.array(same, dtype=np.int64))


def open_run_texts(recipe: RetrieverRecipe) -> TextSet:
    """Read the texts that a recipe names; raises ValueError where they have no training queries."""
    data = recipe.data
    options = data.model_dump(include={"corpus", "test", "packages", "held_out", "mined", "bad_rows"})
    texts = open_texts(data.source, cache=Path(data.cache).expanduser(), progress=progress, **options)
    if len(texts.splits["train"]) == 0:
        got = ", ".join(name for name, rows in texts.splits.items() if len(rows)) or "none"
        remedy = "A BEIR folder has them in qrels/train.tsv."
        raise invalid("data.source", f'have questions to train on ("{data.source}")', f"{got} alone", remedy)
    return texts


def training_texts(texts: TextSet, data: TextDataSettings) -> Iterator[str]:
    """The training queries and their passages, which a tokenizer may be trained on; nothing that is held out."""
    train = [texts.queries[row] for row in texts.splits["train"].tolist()]
    passages = dict.fromkeys(row for query in train for row in (*query.positives, *query.negatives))
    yield from (data.query_prefix + query.text for query in train)
    yield from (passage_text(texts.passages[row], data) for row in passages)


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
    """Samples passages for queries, seeded by `seed` and the step's number alone, and builds batches of them.

    `rounded`: tokens are padded to few lengths, for encoders that are compiled for each.
    """

    def __init__(self, materials: TextMaterials, data: TextDataSettings, *, seed: int, rounded: bool = False) -> None:
        self._materials, self._data, self._seed, self._rounded = materials, data, seed, rounded

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
        drawn = {row for one in sampled for row in (*one.positives, *one.negatives)}
        # for each query the drawn passages that are listed as right, whichever query they were drawn for
        listed = [dict.fromkeys(same[list(queries[one.query].positives)].tolist()) for one in sampled]
        positives = [[row for row in rows if row in drawn] for rows in listed]
        ranks = assign_ranks(positives, size)
        # a passage is on the rank of those for which it is right, else on that of the first one that drew it
        owners = {row: owner for one, owner in reversed([*zip(sampled, ranks, strict=True)]) for row in one.negatives}
        owners |= {row: owner for rows, owner in zip(positives, ranks, strict=True) for row in rows}
        # longest first: sub-batches then have texts of similar lengths, and the first one needs the most memory
        local = [index for index, owner in enumerate(ranks) if owner == rank]
        local.sort(key=lambda index: -int(materials.queries.lengths[sampled[index].query]))
        keys = torch.tensor(sorted(row for row, owner in owners.items() if owner == rank), dtype=torch.int64)
        keys = keys[materials.passages.lengths[keys].argsort(descending=True, stable=True)]
        columns = {row: column for column, row in enumerate(keys.tolist())}
        # the width of the positives is the same on every rank
        padded = np.full((len(local), max(map(len, positives), default=1)), -1)
        for row, index in enumerate(local):
            padded[row, : len(positives[index])] = [columns[passage] for passage in positives[index]]
        rows = torch.tensor([sampled[index].query for index in local], dtype=torch.int64)
        # the passage that is no negative of a query: its own text where that is a passage, else its positive
        own = [(sampled[index].positives[0], queries[sampled[index].query].itself) for index in local]
        ids = [positive if itself is None else int(same[itself]) for positive, itself in own]
        return TextBatch(
            queries=materials.queries.rows(rows, rounded=self._rounded),
            passages=materials.passages.rows(keys, rounded=self._rounded),
            positives=torch.from_numpy(padded),
            query_ids=torch.tensor(ids, dtype=torch.int64),
            key_ids=keys,
            whole=len(sampled),
        )


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
