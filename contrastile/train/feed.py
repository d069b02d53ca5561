"""What a run is made from, and what each of its steps eats: pixels, tokens and ids.

Between `data/batches.py`, which says which rows, and the encoders. Titles are tokenised once for the run; pictures are
bent anew every time. Everything stays in host memory: `encode` brings it to the device sub-batch by sub-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contrastile.data.augment import augment, prepare
from contrastile.data.collection import Stream
from contrastile.data.crop import Crop
from contrastile.data.pairs import PairSet, lot, open_pairs
from contrastile.models.text import Tokenizer, load_tokenizer, train_tokenizer
from contrastile.train.config import Recipe, TokenizerSettings
from contrastile.train.log import progress

Tokens = dict[str, Tensor]

# pictures bent at once
SLICE = 512
# titles of a collection that a tokenizer is trained on, and pictures that are decoded while a step computes
MOST_TITLES, MOST_AHEAD = 1_000_000, 4096


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
        weights=data.weights,
        most_bad=data.max_bad_fraction,
        progress=progress,
    )
    if tokenizer is None:
        tokenizer = _tokenizer(_titles(pairs), recipe.model.tokenizer)
    return Materials(pairs, tokenizer, tokenizer.tokenise(pairs.titles))


def _titles(pairs: PairSet) -> list[str]:
    """The titles to train a tokenizer on: all to train on, or a million of a collection, evenly spread over it."""
    if pairs.stream is None:
        return [pairs.titles[row] for row in pairs.splits["train"]]
    return pairs.stream.titles(range(0, len(pairs.stream), -(-len(pairs.stream) // MOST_TITLES)))


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
        self._materials, self._bend = materials, bend
        self._images, self._tokens = materials.pairs.images, materials.tokens
        self._ids = torch.from_numpy(materials.pairs.ids)
        self._generator = torch.Generator().manual_seed(seed)
        self._crop = Crop(seed) if bend else None
        self._served = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the lots of augmentation stand, and what was skipped."""
        stream = self._materials.pairs.stream
        skipped = {} if stream is None else {"skipped": dict(stream.skipped), "seen": stream.seen}
        return {"generator": self._generator.get_state(), "served": self._served, **skipped}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Draw what would have been drawn next, count on."""
        self._generator.set_state(state_dict["generator"])
        self._served = state_dict["served"]
        if (stream := self._materials.pairs.stream) is not None:
            stream.skipped, stream.seen = Counter(state_dict["skipped"]), state_dict["seen"]

    def expect(self, rows: Tensor) -> None:
        """Begin to read the pairs that the next batch will begin with."""
        if (stream := self._materials.pairs.stream) is not None:
            stream.expect(*self._places(rows[:MOST_AHEAD]), self._crop)

    def _places(self, rows: Tensor) -> tuple[list[int], range]:
        """The rows of a stream, and which examples of the run they are, from which their crops are drawn."""
        return (rows - len(self._materials.pairs)).tolist(), range(self._served, self._served + len(rows))

    def _streamed(self, stream: Stream, rows: Tensor) -> Batch:
        images, titles = stream.read(*self._places(rows), self._crop)
        self._served += len(rows)
        ids = torch.tensor([int(lot(title) * 2**53) for title in titles], dtype=torch.int64)
        return Batch(prepare(torch.from_numpy(images)), self._materials.tokenizer.tokenise(titles), ids)

    def batch(self, rows: Tensor) -> Batch:
        """The pairs at `rows`."""
        if (stream := self._materials.pairs.stream) is not None:
            return self._streamed(stream, rows)
        images = torch.from_numpy(self._images[rows.numpy()])
        # slice by slice: bending needs several times the memory of what is bent
        pixels = torch.cat([self._pixels(some) for some in images.split(SLICE)])
        return Batch(pixels, {name: ids[rows] for name, ids in self._tokens.items()}, self._ids[rows])

    def _pixels(self, images: Tensor) -> Tensor:
        return augment(images, self._generator) if self._bend else prepare(images)
