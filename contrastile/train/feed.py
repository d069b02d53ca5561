"""What a run is made from, and what each of its steps eats: pixels, tokens and ids.

Between `data/batches.py`, which says which rows, and the encoders. Titles are tokenised once for the run; pictures are
bent anew every time. Everything stays in host memory, and `encode` brings it to the device sub-batch by sub-batch; but
pictures that are few enough lie on a GPU for the whole run, and are bent there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from contrastile.data.augment import Lots, bend, draw, prepare
from contrastile.data.collection import Stream
from contrastile.data.crop import Crop
from contrastile.data.pairs import PairSet, open_pairs
from contrastile.models.openclip import clip_tokenizer
from contrastile.models.text import Tokenizer, load_tokenizer, train_tokenizer
from contrastile.offload import free_memory
from contrastile.train.checkpoint import choose_device
from contrastile.train.config import Recipe
from contrastile.train.log import progress
from contrastile.train.model_settings import TokenizerSettings

if TYPE_CHECKING:
    from contrastile.train.precomputed import Precomputed

Tokens = dict[str, Tensor]

# pictures bent, and lots drawn, at once
SLICE = 512
# on a GPU at once, where the pictures lie if they are at most this share of what is free
SLICE_ON_DEVICE, SHARE_OF_DEVICE = 8192, 1 / 64
# titles of a collection that a tokenizer is trained on
MOST_TITLES = 1_000_000


@dataclass(frozen=True)
class Materials:
    """The pairs of a recipe, a tokenizer for their titles, every title tokenised, and on which device pictures lie.

    features: what a locked tower makes of the pictures, by row, or of a collection by row of its stream.
    """

    pairs: PairSet
    tokenizer: Tokenizer
    tokens: Tokens
    home: torch.device | None = None
    features: Precomputed | None = None


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
        copies=data.copies,
        seed=recipe.seed,
        progress=progress,
    )
    if tokenizer is None:
        tokenizer = _tokenizer(_titles(pairs), recipe.model.tokenizer)
    return Materials(pairs, tokenizer, tokenizer.tokenise(pairs.titles), _home(pairs, choose_device(recipe.device)))


def _home(pairs: PairSet, device: torch.device) -> torch.device | None:
    """The GPU, where all pictures that are trained on are few enough for it."""
    if device.type != "cuda" or pairs.stream is not None:
        return None
    return device if pairs.images.nbytes <= SHARE_OF_DEVICE * free_memory(device)[0] else None


def _titles(pairs: PairSet) -> list[str]:
    """The titles to train a tokenizer on: all to train on, or a million of a collection, evenly spread over it."""
    if pairs.stream is None:
        return [pairs.titles[row] for row in pairs.splits["train"]]
    return pairs.stream.some_titles(MOST_TITLES)


def _tokenizer(titles: list[str], settings: TokenizerSettings) -> Tokenizer:
    if settings.folder is not None:
        return load_tokenizer(Path(settings.folder), length=settings.length)
    if settings.kind == "open_clip":
        return clip_tokenizer(settings.length)
    return train_tokenizer(titles, kind=settings.kind, size=settings.size, length=settings.length)


@dataclass(frozen=True)
class Batch:
    """pixels `[b, C, S, S]`, tokens with `[b, L]` int64 each, ids `[b]` int64: what this rank has of a batch.

    Pixels are float32 in [0, 1], or of a collection the bytes themselves: floats are made of them on the device. Or
    they are what the tower made of them once, `[b, F]`.

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

    @property
    def floats(self) -> dict[str, Tensor]:
        """What may hold no numbers, for the guard."""
        return {"the pixels of the batch": self.pixels}

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


@dataclass(frozen=True)
class Texts:
    """Tokens and ids of a collection's titles; `at` says where those of a row are."""

    at: dict[int, int]
    ids: Tensor
    tokens: Tokens


class Feed:
    """Batches by rows; where `bend` is set, pictures are augmented by lots drawn from `seed`.

    `apart`: a collection's pictures are decoded by other processes, so that this one is free to keep a GPU busy.
    """

    def __init__(self, materials: Materials, *, bend: bool, seed: int, apart: bool = False) -> None:
        self._materials, self._bend = materials, bend
        if materials.pairs.stream is not None:
            materials.pairs.stream.apart = apart
        self._images, self._tokens, home = materials.pairs.images, materials.tokens, materials.home
        self._there = None if home is None else torch.from_numpy(np.array(self._images)).to(home)
        self._ids = torch.from_numpy(materials.pairs.ids)
        self._generator = torch.Generator().manual_seed(seed)
        bent = materials.pairs.stream is not None and materials.pairs.stream.bent
        self._crop = Crop(seed) if bend and not bent else None
        self._served = 0
        # the texts of the next batch of a collection, made while the present step computes
        self._beside: ThreadPoolExecutor | None = None
        self._texts: Future[Texts] | None = None

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

    def expect(self, rows: Tensor, share: slice = slice(None)) -> None:
        """Begin to read the pairs that the next batch, or this rank's share of it, will begin with."""
        if (stream := self._materials.pairs.stream) is not None:
            mine, places = self._places(rows, share)
            if self._materials.features is None:
                stream.expect(mine, places, self._crop)
            self._beside = self._beside or ThreadPoolExecutor(1, "tokenising")
            self._texts = self._beside.submit(self._read_texts, stream, mine)

    def close(self) -> None:
        """No batch is wanted any more."""
        if (stream := self._materials.pairs.stream) is not None:
            stream.close()
        if self._beside is not None:
            self._beside.shutdown(cancel_futures=True)
            self._beside = self._texts = None

    def _places(self, rows: Tensor, share: slice) -> tuple[list[int], range]:
        """The rows of a stream, and which examples of the run they are, from which their crops are drawn."""
        places = range(self._served, self._served + len(rows))
        return (rows[share] - len(self._materials.pairs)).tolist(), places[share]

    def _streamed(self, stream: Stream, rows: Tensor, share: slice, places: range) -> Batch:
        mine, examples = self._places(rows, share)
        if self._materials.features is None:
            pictures, chosen = stream.read(mine, examples, self._crop)
        else:
            pictures, chosen = self._materials.features[np.array(mine, np.int64)], mine
        self._served += len(rows)
        texts = self._texts.result() if self._texts is not None else None
        if texts is None or not texts.at.keys() >= set(chosen):
            texts = self._read_texts(stream, chosen)
        at = torch.tensor([texts.at[row] for row in chosen], dtype=torch.int64)
        return Batch(pictures, {name: of_titles[at] for name, of_titles in texts.tokens.items()}, texts.ids[at], places)

    def _read_texts(self, stream: Stream, rows: list[int]) -> Texts:
        """Titles by their rows, each row once; a share without pairs has tokens too, of no text."""
        at = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        titles = stream.titles(at)
        ids = torch.tensor(stream.identities(titles), dtype=torch.int64)
        return Texts(at, ids, self._materials.tokenizer.tokenise(titles or [""]))

    def batch(self, rows: Tensor, share: slice = slice(None)) -> Batch:
        """The pairs at `rows`, or a share of them, whose pictures are bent as they would be in the whole."""
        places = range(*share.indices(len(rows)))
        if (stream := self._materials.pairs.stream) is not None:
            return self._streamed(stream, rows, share, places)
        lots = self._lots(len(rows)) if self._bend else None
        rows = rows[share]
        texts = {name: ids[rows] for name, ids in self._tokens.items()}, self._ids[rows], places
        if self._materials.features is not None:
            return Batch(self._materials.features[rows.numpy()], *texts)
        if self._there is None:
            images, count = torch.from_numpy(self._images[rows.numpy()]), SLICE
        else:
            images, count = self._there[rows.to(self._there.device)], SLICE_ON_DEVICE
        # slice by slice: bending needs several times the memory of what is bent
        slices = [slice(start, start + count) for start in range(0, max(len(rows), 1), count)]
        pixels = torch.cat([_pixels(images[some], None if lots is None else lots[share][some]) for some in slices])
        return Batch(pixels, *texts)

    def _lots(self, count: int) -> Lots:
        """Those of all ranks: who has which pictures, and on which device, must not change what happens to them."""
        drawn = [draw(min(SLICE, count - start), self._generator) for start in range(0, count, SLICE)]
        return Lots(torch.cat([some.matrices for some in drawn]), torch.cat([some.blur for some in drawn]))


def _pixels(images: Tensor, lots: Lots | None) -> Tensor:
    return prepare(images) if lots is None or not len(images) else bend(images, lots.to(images.device))
