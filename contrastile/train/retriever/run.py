"""A retriever in memory and on disk: its encoders and tokenizer; saved whole, loaded exactly.

`job.py` builds a `RetrieverRun`, the loop trains its model and saves it; `contrastile.load` gives it back to anyone.
Folders are those of `train/checkpoint.py`: safetensors and text, with a checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from contrastile._check import wrong
from contrastile.cache import encode
from contrastile.data.pairs import silent
from contrastile.data.texts import Passage
from contrastile.models.base import evaluating
from contrastile.models.retriever import Retriever, build_retriever
from contrastile.models.text import Tokenizer, load_tokenizer
from contrastile.train.checkpoint import autocast, checked_towers, choose_device, listed, load_weights
from contrastile.train.folder import RECIPE, finished_run
from contrastile.train.log import progress
from contrastile.train.recipe import load_retriever_recipe
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.feed import Tokens, TokenStore, passage_tokens, query_text

# texts encoded between two moves of the bar
STRETCH = 4096


@dataclass(frozen=True)
class RetrieverRun:
    """The encoders of a run with what they need to read texts.

    `encode_query` and `encode_passage` give rows to be multiplied: unit rows where the recipe says `normalise`.
    """

    recipe: RetrieverRecipe
    model: Retriever
    tokenizer: Tokenizer
    device: torch.device

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that the run's encoders train with."""
        return autocast(self.device, self.recipe.train.precision)

    def cut(self, side: Literal["query", "passage"], tokens: Tokens) -> dict[str, Any]:
        """How `encode` cuts these texts into sub-batches."""
        return self.recipe.train.sub_batch.words(side, tokens["input_ids"].shape[1])

    def encode_query(self, texts: Sequence[str], *, dimensions: int | None = None) -> Tensor:
        """Features `[n, D]`, float32, of questions; their first `dimensions` only where that is given."""
        asked = (query_text(text, self.recipe.data) for text in listed("texts", texts, "text", str))
        store = TokenStore.of(asked, self.tokenizer, self.recipe.model.tokenizer.query_length)
        return self.encode_tokens("query", store, dimensions=dimensions)

    def encode_passage(self, passages: Sequence[Passage | str], *, dimensions: int | None = None) -> Tensor:
        """Features `[n, D]`, float32, of passages or of plain texts."""
        several = listed("passages", passages, "passage", Passage, str)
        given = [passage if isinstance(passage, Passage) else Passage("", passage) for passage in several]
        return self.encode_tokens("passage", passage_tokens(given, self.tokenizer, self.recipe), dimensions=dimensions)

    @torch.no_grad()
    def encode_tokens(
        self,
        side: Literal["query", "passage"],
        store: TokenStore,
        *,
        dimensions: int | None = None,
        what: str | None = None,
    ) -> Tensor:
        """Features of all texts of a store, without dropout, the longest first; with a bar where `what` names it."""
        encoder = getattr(self.model, f"encode_{side}")
        order = store.lengths.argsort(descending=True, stable=True)
        shown = progress if what else silent
        parts = [torch.empty(0, dimensions or 0, device=self.device)] if len(store) == 0 else []
        with evaluating(self.model), shown(len(store), what or "", "texts") as bar:
            for rows in order.split(STRETCH) if len(store) else ():
                tokens = store.rows(rows)
                with self.autocast():
                    features = encode(encoder, tokens, **self.cut(side, tokens))
                parts.append(self.model.comparable(features, dimensions))
                bar.update(len(rows))
        return torch.cat(parts)[order.argsort().to(self.device)]


def build_retriever_run(recipe: RetrieverRecipe, tokenizer: Tokenizer) -> RetrieverRun:
    """The untrained run of a recipe: its encoders at the numbers that its seed draws."""
    torch.manual_seed(recipe.seed)
    device = choose_device(recipe.device)
    model = build_retriever(encoder_settings(recipe), tokenizer=tokenizer)
    # not every width is known before there are encoders
    if (most := max(recipe.model.dimensions, default=0)) > model.features:
        raise wrong("model.dimensions", f"be at most the {model.features} features there are", most, "Leave it out.")
    return RetrieverRun(recipe, model.to(device), tokenizer, device)


def encoder_settings(recipe: RetrieverRecipe) -> dict[str, Any]:
    """What `build_retriever` reads of a recipe."""
    return {
        **recipe.model.model_dump(exclude={"tokenizer", "dimensions"}, exclude_none=True),
        **recipe.loss.model_dump(include={"scale", "learn_scale"}),
    }


def load_retriever(run: str | Path, *, device: str = "auto") -> RetrieverRun:
    """The encoders and tokenizer of a finished retriever's run, ready to encode; nothing of the data is needed.

    Raises ValueError where the folder is no such run, or its weights are not the bytes that the run wrote.
    """
    folder = finished_run(run)
    recipe = load_retriever_recipe(folder / RECIPE, files=False)
    tokenizer = load_tokenizer(folder.path, length=recipe.model.tokenizer.length)
    model = build_retriever(checked_towers(folder), tokenizer=tokenizer)
    load_weights(model, folder)
    return RetrieverRun(recipe, model.to(choose_device(device)).eval(), tokenizer, choose_device(device))
