"""What a run is made from, and what each of its steps eats: pixels, tokens and ids.

Between `data/batches.py`, which says which rows, and the encoders. Titles are tokenised once for the run; pictures are
bent anew every time. Everything stays in host memory: `encode` brings it to the device sub-batch by sub-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from contrastile.data.augment import augment, prepare
from contrastile.data.pairs import PairSet, open_pairs
from contrastile.models.text import Tokenizer, load_tokenizer, train_tokenizer
from contrastile.train.config import Recipe, TokenizerSettings
from contrastile.train.log import progress

Tokens = dict[str, Tensor]

# pictures bent at once
SLICE = 512


@dataclass(frozen=True)
class Materials:
    """The pairs of a recipe, a tokenizer for their titles, and every title tokenised."""

    pairs: PairSet
    tokenizer: Tokenizer
    tokens: Tokens


def open_materials(recipe: Recipe, tokenizer: Tokenizer | None = None) -> Materials:
    """Everything that a recipe's run is made from; a tokenizer is trained on the run's titles where none is given."""
    data = recipe.data
    pairs = open_pairs(
        data.source,
        image_size=data.image_size,
        channels=data.channels,
        held_out=data.held_out,
        cache=Path(data.cache).expanduser(),
        progress=progress,
    )
    if tokenizer is None:
        tokenizer = _tokenizer([pairs.titles[row] for row in pairs.splits["train"]], recipe.model.tokenizer)
    return Materials(pairs, tokenizer, tokenizer.tokenise(pairs.titles))


def _tokenizer(titles: list[str], settings: TokenizerSettings) -> Tokenizer:
    if settings.folder is not None:
        return load_tokenizer(Path(settings.folder), length=settings.length)
    return train_tokenizer(titles, kind=settings.kind, size=settings.size, length=settings.length)


@dataclass(frozen=True)
class Batch:
    """pixels `[b, C, S, S]` float32, tokens with `[b, L]` int64 each, ids `[b]` int64."""

    pixels: Tensor
    tokens: Tokens
    ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def parts(self, count: int) -> Iterator[Batch]:
        """The batch cut into at most `count` nearly equal parts."""
        count = min(count, len(self))
        pixels, ids = self.pixels.tensor_split(count), self.ids.tensor_split(count)
        tokens = {name: whole.tensor_split(count) for name, whole in self.tokens.items()}
        for place in range(count):
            yield Batch(pixels[place], {name: cut[place] for name, cut in tokens.items()}, ids[place])


class Feed:
    """Batches by rows; where `bend` is set, pictures are augmented by lots drawn from `seed`."""

    def __init__(self, materials: Materials, *, bend: bool, seed: int) -> None:
        self._images, self._tokens, self._bend = materials.pairs.images, materials.tokens, bend
        self._ids = torch.from_numpy(materials.pairs.ids)
        self._generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Tensor]:
        """Where the lots of augmentation stand."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Draw what would have been drawn next."""
        self._generator.set_state(state_dict["generator"])

    def batch(self, rows: Tensor) -> Batch:
        """The pairs at `rows`."""
        images = torch.from_numpy(self._images[rows.numpy()])
        # slice by slice: bending needs several times the memory of what is bent
        pixels = torch.cat([self._pixels(some) for some in images.split(SLICE)])
        return Batch(pixels, {name: ids[rows] for name, ids in self._tokens.items()}, self._ids[rows])

    def _pixels(self, images: Tensor) -> Tensor:
        return augment(images, self._generator) if self._bend else prepare(images)
