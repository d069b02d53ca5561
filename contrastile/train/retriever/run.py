"""A retriever in memory and on disk: encoders and tokenizer, saved together and loaded exactly.

`job.py` builds a `RetrieverRun`, the loop trains and saves its model, and `contrastile.load` returns it. Folders have
the format of `train/run.py`: safetensors and text files, with a checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.pairs import silent
from contrastile.data.texts import Passage
from contrastile.gradcache.encode import encode
from contrastile.models.base import evaluating
from contrastile.models.retriever import Retriever, build_retriever
from contrastile.models.text import Tokenizer, load_tokenizer
from contrastile.train.folder import RECIPE, finished_run
from contrastile.train.loaded import LoadedRun
from contrastile.train.log import progress
from contrastile.train.recipe import load_retriever_recipe
from contrastile.train.retriever.batches import Tokens, TokenStore, passage_tokens
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.run import autocast, checked_list, checked_towers, choose_device, load_weights

Side = Literal["query", "passage"]

# texts encoded between two updates of the progress bar
CHUNK = 4096


@dataclass(frozen=True)
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
    return RetrieverRun(recipe, model.to(device), tokenizer, device)


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
