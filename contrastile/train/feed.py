"""What a run is made from, and what each of its steps eats: pixels, tokens and ids.

Between `data/batches.py`, which says which rows, and the encoders. Titles are tokenised once for the run; pictures are
bent anew every time. Everything stays in host memory: `encode` brings it to the device sub-batch by sub-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from contrastile.data.augment import Lots, bend, draw, prepare
from contrastile.data.pairs import PairSet, open_pairs
from contrastile.models.text import Tokenizer, load_tokenizer, train_tokenizer
from contrastile.train.config import Recipe, TokenizerSettings
from contrastile.train.log import progress

Tokens = dict[str, Tensor]

# pictures bent, and lots drawn, at once
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
    """pixels `[b, C, S, S]` float32, tokens with `[b, L]` int64 each, ids `[b]` int64: what this rank has of a batch.

    places: where these pairs stand in the batch of all ranks, whose size is where the range ends; None: they are all.
    """

    pixels: Tensor
    tokens: Tokens
    ids: Tensor
    places: range | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def whole(self) -> int:
        """The pairs of all ranks."""
        return len(self) if self.places is None else self.places.stop

    def parts(self, count: int) -> Iterator[Batch]:
        """The batch of all ranks cut into at most `count` nearly equal parts: this rank's share of each."""
        places = range(len(self)) if self.places is None else self.places
        count = min(count, self.whole)
        for part in range(count):
            # the first parts are one longer where it does not come out even
            low, high = (self.whole // count * end + min(end, self.whole % count) for end in (part, part + 1))
            here = slice(*(len(range(places.start, end, places.step)) for end in (low, high)))
            within = range(places.start + here.start * places.step - low, high - low, places.step)
            tokens = {name: ids[here] for name, ids in self.tokens.items()}
            yield Batch(self.pixels[here], tokens, self.ids[here], within)


class Feed:
    """Batches by rows; where `bend` is set, pictures are augmented by lots drawn from `seed`."""

    def __init__(self, materials: Materials, *, bend: bool, seed: int) -> None:
        self._images, self._tokens, self._bend = materials.pairs.images, materials.tokens, bend
        self._ids = torch.from_numpy(materials.pairs.ids)
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, rows: Tensor, share: slice = slice(None)) -> Batch:
        """The pairs at `rows`, or a share of them, whose pictures are bent as they would be in the whole."""
        lots = self._lots(len(rows)) if self._bend else None
        places = range(*share.indices(len(rows)))
        rows = rows[share]
        images = torch.from_numpy(self._images[rows.numpy()])
        # slice by slice: bending needs several times the memory of what is bent
        slices = [slice(start, start + SLICE) for start in range(0, max(len(rows), 1), SLICE)]
        pixels = torch.cat([_pixels(images[some], None if lots is None else lots[share][some]) for some in slices])
        return Batch(pixels, {name: ids[rows] for name, ids in self._tokens.items()}, self._ids[rows], places)

    def _lots(self, count: int) -> Lots:
        """Those of all ranks: who has which pictures must not change what happens to them."""
        drawn = [draw(min(SLICE, count - start), self._generator) for start in range(0, count, SLICE)]
        return Lots(torch.cat([some.matrices for some in drawn]), torch.cat([some.blur for some in drawn]))


def _pixels(images: Tensor, lots: Lots | None) -> Tensor:
    return prepare(images) if lots is None or not len(images) else bend(images, lots)
