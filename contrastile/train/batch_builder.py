"""Data bundle and batch builder: from the rows that `data/batches.py` samples to pixels, tokens and ids.

Titles are tokenised once for the run; pictures are augmented anew every time. Batches stay in host memory, and `encode`
copies them to the device sub-batch by sub-batch; but a data set that takes little of a GPU's memory stays there for the
whole run and is augmented there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contrastile.data.augment import AugmentParameters, augment, draw_parameters, prepare
from contrastile.data.crop import Crop
from contrastile.data.pairs import Indices, PairSet
from contrastile.data.registry import open_pairs
from contrastile.data.stream import Stream
from contrastile.models.openclip import clip_tokenizer
from contrastile.models.text import Tokenizer, load_tokenizer, train_tokenizer
from contrastile.offload import free_memory
from contrastile.train.config import Recipe
from contrastile.train.config.image_text import TokenizerSettings
from contrastile.train.log import progress
from contrastile.train.run import choose_device

Tokens = dict[str, Tensor]

# pictures that are augmented at once, and whose random numbers are drawn at once
SLICE = 512
# the same on a GPU; pictures stay there if they take at most this share of its free memory
SLICE_ON_DEVICE, SHARE_OF_DEVICE = 8192, 1 / 64
# titles of a collection that train a tokenizer
MOST_TITLES = 1_000_000


@dataclass(frozen=True)
class FeatureTable:
    """Precomputed features by row, in memory-mapped parts of `size` rows."""

    parts: list[npt.NDArray[np.floating]]
    size: int

    def __getitem__(self, rows: Indices) -> Tensor:
        """The features of `rows`: `[b, F]`."""
        features = np.empty((len(rows), self.parts[0].shape[1]), self.parts[0].dtype)
        for part in np.unique(rows // self.size):
            mask = rows // self.size == part
            features[mask] = self.parts[part][rows[mask] % self.size]
        return torch.from_numpy(features)


@dataclass(frozen=True)
class DataBundle:
    """The pairs of a recipe, a tokenizer for their titles, and every title's tokens.

    home: the device on which pictures stay, None for host memory. features: a frozen tower's output for every picture,
    by row, or of a collection by row of its stream.
    """

    pairs: PairSet
    tokenizer: Tokenizer
    tokens: Tokens
    home: torch.device | None = None
    features: FeatureTable | None = None


def open_data_bundle(recipe: Recipe, tokenizer: Tokenizer | None = None) -> DataBundle:
    """Open the data of a recipe; without a `tokenizer`, train one on the titles of the training split."""
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
    tokenizer = tokenizer or _build_tokenizer(pairs, recipe.model.tokenizer)
    return DataBundle(pairs, tokenizer, tokenizer.tokenise(pairs.captions), _home(pairs, choose_device(recipe.device)))


def _home(pairs: PairSet, device: torch.device) -> torch.device | None:
    """The GPU, if the pictures take little of its memory."""
    if device.type != "cuda" or pairs.stream is not None:
        return None
    return device if pairs.images.nbytes <= SHARE_OF_DEVICE * free_memory(device)[0] else None


def _build_tokenizer(pairs: PairSet, settings: TokenizerSettings) -> Tokenizer:
    """The tokenizer of the settings, trained on all titles, or on a million spread over a collection."""
    if settings.folder is not None:
        return load_tokenizer(Path(settings.folder), length=settings.length)
    if settings.kind == "open_clip":
        return clip_tokenizer(settings.length)
    if pairs.stream is None:
        titles = [pairs.captions[row] for row in pairs.splits["train"]]
    else:
        titles = pairs.stream.sample_captions(MOST_TITLES)
    return train_tokenizer(titles, kind=settings.kind, size=settings.size, length=settings.length)


@dataclass(frozen=True)
class Batch:
    """pixels `[b, C, S, S]`, tokens with `[b, L]` int64 each, ids `[b]` int64: one rank's share of a batch.

    Pixels are float32 in [0, 1]; those of a collection uint8, converted on the device; precomputed features are
    `[b, F]`. places: the positions of these pairs in the batch of all ranks, whose size is the range's end; None: all.
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
        """The inputs that may be non-finite."""
        return {"the pixels of the batch": self.pixels}

    def parts(self, count: int) -> Iterator[Batch]:
        """Split the batch of all ranks into at most `count` nearly equal parts; this rank's share of each."""
        places = range(len(self)) if self.places is None else self.places
        count = min(count, self.whole)
        for part in range(count):
            # the first parts are one pair longer where the division leaves a remainder
            low, high = (self.whole // count * end + min(end, self.whole % count) for end in (part, part + 1))
            own = slice(*(len(range(places.start, end, places.step)) for end in (low, high)))
            within = range(places.start + own.start * places.step - low, high - low, places.step)
            tokens = {name: ids[own] for name, ids in self.tokens.items()}
            yield Batch(self.pixels[own], tokens, self.ids[own], within)


@dataclass(frozen=True)
class _Texts:
    """Tokens and ids of some titles of a collection; `index`: the position of a row's title among them."""

    index: dict[int, int]
    ids: Tensor
    tokens: Tokens


class BatchBuilder:
    """Batches by rows. With `augment`, pictures are augmented by random numbers drawn from `seed`.

    apart: decode a collection's pictures in other processes, which keeps this one free for its GPU.
    """

    def __init__(self, bundle: DataBundle, *, augment: bool, seed: int, apart: bool = False) -> None:
        self._bundle, self._augment, self._stream = bundle, augment, bundle.pairs.stream
        if self._stream is not None:
            self._stream.apart = apart
        images, home = bundle.pairs.images, bundle.home
        self._images_on_device = None if home is None else torch.from_numpy(np.array(images)).to(home)
        self._ids = torch.from_numpy(bundle.pairs.ids)
        self._generator = torch.Generator().manual_seed(seed)
        bent = self._stream is not None and self._stream.augmented
        self._crop = Crop(seed) if augment and not bent else None
        self._served = 0
        # a thread that reads the texts of a collection's next batch while the present step computes
        self._reader: ThreadPoolExecutor | None = None
        self._texts: Future[_Texts] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the augmentation's random numbers, and the counts of skipped pairs."""
        stream = self._stream
        skipped = {} if stream is None else {"skipped": dict(stream.skipped), "seen": stream.seen}
        return {"generator": self._generator.get_state(), "served": self._served, **skipped}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore both."""
        self._generator.set_state(state_dict["generator"])
        self._served = state_dict["served"]
        if self._stream is not None:
            self._stream.skipped, self._stream.seen = Counter(state_dict["skipped"]), state_dict["seen"]

    def expect(self, rows: Tensor, share: slice = slice(None)) -> None:
        """Prefetch the first rows of the next batch, or this rank's share of them."""
        if self._stream is not None:
            own, examples = self._stream_rows(rows, share)
            if self._bundle.features is None:
                self._stream.expect(own, examples, self._crop)
            self._reader = self._reader or ThreadPoolExecutor(1, "tokenising")
            self._texts = self._reader.submit(self._read_texts, self._stream, own)

    def close(self) -> None:
        """Stop prefetching."""
        if self._stream is not None:
            self._stream.close()
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
            self._reader = self._texts = None

    def batch(self, rows: Tensor, share: slice = slice(None)) -> Batch:
        """The pairs at `rows`, or a share of them, augmented as they would be in the whole batch."""
        places = range(*share.indices(len(rows)))
        if self._stream is not None:
            return self._streamed(self._stream, rows, share, places)
        lots = self._lots(len(rows)) if self._augment else None
        rows = rows[share]
        texts = {name: ids[rows] for name, ids in self._bundle.tokens.items()}, self._ids[rows], places
        if self._bundle.features is not None:
            return Batch(self._bundle.features[rows.numpy()], *texts)
        if self._images_on_device is None:
            images, count = torch.from_numpy(self._bundle.pairs.images[rows.numpy()]), SLICE
        else:
            images, count = self._images_on_device[rows.to(self._images_on_device.device)], SLICE_ON_DEVICE
        # in slices, because augmentation needs several times the memory of its pictures
        slices = [slice(start, start + count) for start in range(0, max(len(rows), 1), count)]
        pixels = torch.cat([_pixels(images[some], None if lots is None else lots[share][some]) for some in slices])
        return Batch(pixels, *texts)

    def _streamed(self, stream: Stream, rows: Tensor, share: slice, places: range) -> Batch:
        own, examples = self._stream_rows(rows, share)
        if self._bundle.features is None:
            pixels, chosen = stream.read(own, examples, self._crop)
        else:
            pixels, chosen = self._bundle.features[np.array(own, np.int64)], own
        self._served += len(rows)
        texts = self._texts.result() if self._texts is not None else None
        if texts is None or not texts.index.keys() >= set(chosen):
            texts = self._read_texts(stream, chosen)
        at = torch.tensor([texts.index[row] for row in chosen], dtype=torch.int64)
        return Batch(pixels, {name: tokens[at] for name, tokens in texts.tokens.items()}, texts.ids[at], places)

    def _stream_rows(self, rows: Tensor, share: slice) -> tuple[list[int], range]:
        """The rows of the stream, and their numbers among the run's examples, which seed their crops."""
        examples = range(self._served, self._served + len(rows))
        return (rows[share] - len(self._bundle.pairs)).tolist(), examples[share]

    def _read_texts(self, stream: Stream, rows: list[int]) -> _Texts:
        """Titles of rows, each row once. A share without pairs gets the tokens of one empty text, for their shape."""
        index = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        titles = stream.captions(index)
        ids = torch.tensor(stream.identities(titles), dtype=torch.int64)
        return _Texts(index, ids, self._bundle.tokenizer.tokenise(titles or [""]))

    def _lots(self, count: int) -> AugmentParameters:
        """The random numbers of all ranks: neither the number of ranks nor the device may change an augmentation."""
        drawn = [draw_parameters(min(SLICE, count - start), self._generator) for start in range(0, count, SLICE)]
        return AugmentParameters(torch.cat([some.matrices for some in drawn]), torch.cat([some.blur for some in drawn]))


def _pixels(images: Tensor, lots: AugmentParameters | None) -> Tensor:
    return prepare(images) if lots is None or not len(images) else augment(images, lots.to(images.device))
