"""A retriever in memory and on disk, and its texts as tokens, made once per run and stored without padding."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid, logger
from contrastile.data.base import Indices, silent
from contrastile.data.registry import open_texts
from contrastile.data.texts import Passage, TextSet, text_digest
from contrastile.evaluate.late import joined
from contrastile.functional import padded_texts
from contrastile.gradcache.batching import rounded_length
from contrastile.gradcache.encode import encode
from contrastile.gradcache.inputs import Ragged
from contrastile.models.base import evaluating
from contrastile.models.text import Tokenizer, train_tokenizer
from contrastile.models.towers import Retriever, build_late, build_retriever, marker, special_tokens
from contrastile.train.log import progress
from contrastile.train.retriever.config import RetrieverRecipe, TextDataSettings
from contrastile.train.run import LoadedRun, checked_list, ready_tokenizer

Side = Literal["query", "passage"]
Tokens = dict[str, Tensor]

# texts per call of the tokenizer, and texts encoded between two updates of the progress bar
TOKENISED_AT_ONCE, CHUNK = 1024, 4096


class TokenStore:
    """Tokenised texts, each truncated to `length` tokens, concatenated without padding.

    marker: a token that each text begins with, or has second where the tokenizer begins every text with one of its own.
    It counts among the `length` tokens.
    """

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer, length: int, marker: int | None = None) -> None:
        stream, self._pad = iter(texts), tokenizer.pad
        ids, lengths = [torch.empty(0, dtype=torch.int32)], [torch.empty(0, dtype=torch.int64)]
        mark = None if marker is None else torch.tensor([marker], dtype=torch.int32)
        behind = 0 if marker is None else _begins(tokenizer)
        while chunk := list(islice(stream, TOKENISED_AT_ONCE)):
            tokens = tokenizer.tokenise(chunk, length if mark is None else max(1, length - 1))
            mask = tokens["attention_mask"].bool()
            some, counts = tokens["input_ids"][mask].int(), mask.sum(dim=1)
            if mark is not None:
                marked = [torch.cat([text[:behind], mark, text[behind:]]) for text in some.split(counts.tolist())]
                some, counts = torch.cat(marked), counts + 1
            ids.append(some)
            lengths.append(counts)
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
        if rounded and len(rows):
            longest = rounded_length(longest, max(int(self.lengths.max()), 1))
        positions = torch.arange(longest)
        mask = positions < lengths[:, None]
        offsets = (self._starts[rows][:, None] + positions).masked_fill(~mask, 0)
        ids = self._ids[offsets].long() if len(self._ids) else torch.zeros_like(offsets)
        return {"input_ids": ids.masked_fill(~mask, self._pad), "attention_mask": mask.long()}


def _begins(tokenizer: Tokenizer) -> int:
    """The number of tokens, 1 or 0, with which a tokenizer begins every text, such as [CLS]."""
    tokens = tokenizer.tokenise(["a", "1"])
    first, other = (ids[mask.bool()] for ids, mask in zip(tokens["input_ids"], tokens["attention_mask"], strict=True))
    return int(len(first) > 1 and len(other) > 1 and int(first[0]) == int(other[0]))


def passage_text(passage: Passage, data: TextDataSettings) -> str:
    """A passage as its encoder reads it."""
    title = passage.title + data.title_separator if passage.title else ""
    return data.passage_prefix + title + passage.text


def passage_tokens(passages: Sequence[Passage], tokenizer: Tokenizer, recipe: RetrieverRecipe) -> TokenStore:
    """Tokens of passages as their encoder reads them."""
    texts = (passage_text(passage, recipe.data) for passage in passages)
    return TokenStore(texts, tokenizer, recipe.model.tokenizer.length, _marker(tokenizer, recipe, "passage"))


def query_tokens(queries: Iterable[str], tokenizer: Tokenizer, recipe: RetrieverRecipe) -> TokenStore:
    texts = (recipe.data.query_prefix + query for query in queries)
    return TokenStore(texts, tokenizer, recipe.model.tokenizer.query_length, _marker(tokenizer, recipe, "query"))


def _marker(tokenizer: Tokenizer, recipe: RetrieverRecipe, side: Side) -> int | None:
    return marker(tokenizer, recipe.model, side) if recipe.model.kind == "late" else None


class RetrieverRun(LoadedRun):
    """The encoders of a run with their recipe and tokenizer.

    `encode_query` and `encode_passage` return rows to be compared by dot product, of length 1 where the recipe says
    `normalise`. Those of a late retriever return vectors `[n, L, D]` and a mask `[n, L]`, as
    `contrastile.scorers.MaxSim` takes them.
    """

    recipe: RetrieverRecipe
    model: Retriever

    @classmethod
    def model_of(cls, recipe: RetrieverRecipe, tokenizer: Tokenizer) -> Retriever:
        settings = recipe.model.settings() | recipe.loss.model_dump(include={"scale", "learn_scale"})
        model = cls.build(settings, recipe, tokenizer)
        # the feature size of some encoders is known only once they are built
        if (most := max(recipe.model.dimensions, default=0)) > model.features:
            rule = f"be at most the {model.features} features there are"
            raise invalid("model.dimensions", rule, most, "Leave it out.")
        return model

    @classmethod
    def build(cls, settings: dict[str, Any], recipe: RetrieverRecipe, tokenizer: Tokenizer) -> Retriever:
        return (build_late if recipe.model.kind == "late" else build_retriever)(settings, tokenizer=tokenizer)

    def encoded(self, side: Side, tokens: Tokens, *, compared: Sequence[int | None] = (), **words: Any) -> Any:
        """The encoder's features of these texts, sub-batch by sub-batch; `words`: further ones of `encode`.

        compared: sizes, for each of which the encoder then returns features as they are compared.
        """
        words |= self.recipe.train.sub_batch.words(side, tokens["input_ids"].shape[1])
        encoder = getattr(self.model, f"encode_{side}")
        return encode(partial(self.model.encode_compared, side, compared) if compared else encoder, tokens, **words)

    def encode_query(self, texts: Sequence[str], *, dimensions: int | None = None) -> Any:
        """Features `[n, D]`, float32, of questions; the first `dimensions` features where that is given."""
        store = query_tokens(checked_list("texts", texts, "text", str), self.tokenizer, self.recipe)
        return _padded(self.encode_tokens("query", store, dimensions=dimensions))

    def encode_passage(self, passages: Sequence[Passage | str], *, dimensions: int | None = None) -> Any:
        """Features `[n, D]`, float32, of passages or of plain texts."""
        checked = checked_list("passages", passages, "passage", Passage, str)
        given = [passage if isinstance(passage, Passage) else Passage("", passage) for passage in checked]
        tokens = passage_tokens(given, self.tokenizer, self.recipe)
        return _padded(self.encode_tokens("passage", tokens, dimensions=dimensions))

    @torch.no_grad()
    def encode_tokens(
        self, side: Side, store: TokenStore, *, dimensions: int | None = None, title: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Any:  # fmt: skip
        """Features of all texts of a store, without dropout, longest first; with a progress bar called `title`.

        A tensor `[n, D]`; for a late retriever a `Ragged` with the vectors `[T, D]` of all tokens that are compared.
        """
        late = self.recipe.model.kind == "late"
        if late and len(store) == 0:
            return Ragged(torch.empty(0, dimensions or self.model.features, device=self.device), [])
        order = store.lengths.argsort(descending=True, stable=True)
        parts: list[Any] = []
        with evaluating(self.model), (progress if title else silent)(len(store), title or "", "texts") as bar:
            for rows in order.split(CHUNK):
                tokens = store.rows(rows)
                with self.autocast():
                    encoded = self.encoded(side, tokens)
                features = self.model.comparable(encoded, dimensions)
                parts.append(Ragged.of(features[0].to(dtype), features[1]) if late else features.to(dtype))
                bar.update(len(rows))
        if late:
            return joined(parts, order.argsort())
        return torch.cat(parts)[order.argsort().to(self.device)]


def _padded(features: Tensor | Ragged) -> Any:
    return padded_texts(features) if isinstance(features, Ragged) else features


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

    @property
    def rows(self) -> Indices:
        """The queries to train on."""
        return self.texts.splits["train"]


def open_text_materials(recipe: RetrieverRecipe, tokenizer: Tokenizer | None = None) -> TextMaterials:
    """Read and tokenise the texts of a recipe; without a `tokenizer`, load the recipe's or train one on the texts."""
    data, settings = recipe.data, recipe.model.tokenizer
    texts = open_run_texts(recipe)
    if not any(len(rows) for name, rows in texts.splits.items() if name != "train"):
        message = "%s: no questions are held out, so there is nothing to measure the run on; "
        message += "those of a BEIR folder are in files of qrels other than train.tsv, with grades above 0"
        logger.warning(message, data.source)
    tokenizer = tokenizer or ready_tokenizer(settings)
    if tokenizer is None:
        corpus = training_texts(texts, data)
        sizes: dict[str, Any] = settings.model_dump(include={"kind", "size", "length"})
        special = special_tokens(recipe.model) if recipe.model.kind == "late" else ()
        tokenizer = train_tokenizer(corpus, special=special, **sizes)
    queries, passages = text_stores(texts, recipe, tokenizer)
    first_rows: dict[bytes, int] = {}
    same = [first_rows.setdefault(text_digest(passage), row) for row, passage in enumerate(texts.passages)]
    return TextMaterials(texts, tokenizer, queries, passages, np.array(same, dtype=np.int64))


def text_stores(texts: TextSet, recipe: RetrieverRecipe, tokenizer: Tokenizer) -> tuple[TokenStore, TokenStore]:
    """The tokens of all queries and of all passages, as the encoders of a recipe read them."""
    queries = query_tokens((query.text for query in texts.queries), tokenizer, recipe)
    return queries, passage_tokens(texts.passages, tokenizer, recipe)


def open_run_texts(recipe: RetrieverRecipe) -> TextSet:
    """Read the texts that a recipe names; raises ValueError where they have no training queries."""
    data = recipe.data
    options = data.model_dump(include={"corpus", "test", "packages", "held_out", "mined", "bad_rows"})
    texts = open_texts(data.source, cache=Path(data.cache).expanduser(), progress=progress, **options)
    if len(texts.splits["train"]) == 0:
        held_out = ", ".join(name for name, rows in texts.splits.items() if len(rows))
        got = f"{held_out} alone" if held_out else "none with a judgement above 0"
        remedy = "A BEIR folder has them in qrels/train.tsv."
        if data.test is not None:
            remedy = "Those of data.test are held out: leave some for training."
        raise invalid("data.source", f'have questions to train on ("{data.source}")', got, remedy)
    return texts


def training_texts(texts: TextSet, data: TextDataSettings) -> Iterator[str]:
    """The training queries and their passages, to train a tokenizer on; held-out queries are not among them."""
    train = [texts.queries[row] for row in texts.splits["train"].tolist()]
    passages = dict.fromkeys(row for query in train for row in (*query.positives, *query.negatives))
    yield from (data.query_prefix + query.text for query in train)
    yield from (passage_text(texts.passages[row], data) for row in passages)
