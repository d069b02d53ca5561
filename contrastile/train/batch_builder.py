"""Data bundle and batch builder: from the rows that `Batches` samples to pixels, tokens and ids.

Captions are tokenised once; images are augmented anew every time, in host memory, or on a GPU where they take little.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Indices, check_bad
from contrastile.data.files import cached_folder
from contrastile.data.images import augment, draw_parameters, prepare
from contrastile.data.pairs import PairSet, Stream
from contrastile.data.registry import open_pairs
from contrastile.gradcache.encode import encode
from contrastile.models.text import Tokenizer, train_tokenizer
from contrastile.offload import free_memory
from contrastile.train.config import Recipe
from contrastile.train.log import progress
from contrastile.train.run import Run, choose_device, ready_tokenizer

Tokens = dict[str, Tensor]

# images that are augmented at once, and whose random numbers are drawn at once
SLICE = 512
# images augmented at once on a GPU; the images of a run stay on it if they take at most this share of its free memory
SLICE_ON_DEVICE, SHARE_OF_DEVICE = 8192, 1 / 64
# captions of a collection that train a tokenizer
MOST_CAPTIONS = 1_000_000
# precomputed features: images of one part, and those that are read and encoded at once
PART, CHUNK = 16_384, 512
FEATURES, SKIPPED = "features.npy", "skipped.json"


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
    """The pairs of a recipe, a tokenizer for their captions, and every caption's tokens.

    home: the device on which images stay, None for host memory. features: a frozen tower's output for every image,
    by row, or of a collection by row of its stream.
    """

    pairs: PairSet
    tokenizer: Tokenizer
    tokens: Tokens
    home: torch.device | None = None
    features: FeatureTable | None = None

    @property
    def rows(self) -> Indices:
        """The pairs to train on."""
        return self.pairs.splits["train"]


def open_data_bundle(recipe: Recipe, tokenizer: Tokenizer | None = None) -> DataBundle:
    """Open the data of a recipe; without a `tokenizer`, train one on the captions of the training split."""
    data = recipe.data
    settings = data.model_dump(include={"image_size", "channels", "held_out", "weights", "copies"})
    cache, most_bad = Path(data.cache).expanduser(), data.max_bad_fraction
    pairs = open_pairs(data.source, **settings, cache=cache, most_bad=most_bad, seed=recipe.seed, progress=progress)
    named, device = recipe.model.tokenizer, choose_device(recipe.device)
    if pairs.stream is not None:
        # decoding in other processes keeps this one free for its GPU
        pairs.stream.processes, pairs.stream.timeout = device.type == "cuda", recipe.train.timeout
    tokenizer = tokenizer or ready_tokenizer(named)
    if tokenizer is None:
        train, stream = pairs.splits["train"], pairs.stream
        # a collection has too many captions
        captions = [pairs.captions[row] for row in train] if stream is None else stream.sample_captions(MOST_CAPTIONS)
        tokenizer = train_tokenizer(captions, kind=named.kind, size=named.size, length=named.length)
    return DataBundle(pairs, tokenizer, tokenizer.tokenise(pairs.captions), _home(pairs, device))


def _home(pairs: PairSet, device: torch.device) -> torch.device | None:
    """The GPU, if the images take little of its memory."""
    if device.type != "cuda" or pairs.stream is not None:
        return None
    return device if pairs.images.nbytes <= SHARE_OF_DEVICE * free_memory(device)[0] else None


def with_cached_features(run: Run, bundle: DataBundle) -> DataBundle:
    """The bundle with a frozen image tower's output for every image, computed once, on disk (LiT, arXiv:2111.07991).

    For recipes with `model.precompute`: a step then encodes no image, only the projection runs. Pairs whose image
    cannot be read are left out. Features are made in parts, each whole or not at all; an interrupted run, other ranks
    and other runs go on with the parts that exist.
    """
    if not run.recipe.model.precompute:
        return bundle
    pairs = bundle.pairs
    folders = _make_parts(run, pairs)
    skipped = Counter[str]()
    for folder in folders:
        skipped.update(json.loads((folder / SKIPPED).read_text(encoding="utf-8")))
    table = FeatureTable([np.load(folder / FEATURES, mmap_mode="r", allow_pickle=False) for folder in folders], PART)
    good = np.concatenate([~np.isnan(part[:, 0]) for part in table.parts])
    check_bad(skipped, len(good), run.recipe.data.max_bad_fraction)
    rows = pairs.splits["train"]
    splits = {**pairs.splits, "train": rows[good[rows if pairs.stream is None else rows - len(pairs)]]}
    pairs = replace(pairs, splits=splits, skipped=dict(skipped + Counter(pairs.skipped)))
    return replace(bundle, pairs=pairs, home=None, features=table)


def _make_parts(run: Run, pairs: PairSet) -> list[Path]:
    """Make the parts that the cache lacks; the folders of all parts in order."""
    cache, digest = Path(run.recipe.data.cache).expanduser(), _digest(run, pairs)
    count = len(pairs.images) if pairs.stream is None else len(pairs.stream)
    parts = list(enumerate(range(start, min(start + PART, count)) for start in range(0, count, PART)))
    # ranks start at different parts, and take from the cache the parts that others have made
    first = len(parts) * int(os.environ.get("RANK", "0")) // int(os.environ.get("WORLD_SIZE", "1"))
    folders: dict[int, Path] = {}
    with progress(count, "encoding the images once", "images") as bar:
        for number, rows in (*parts[first:], *parts[:first]):
            key, make = {"of": digest, "part": number}, partial(_write, run, pairs, rows)
            folders[number] = cached_folder(cache, "features", key, files=(FEATURES, SKIPPED), make=make)
            bar.update(len(rows))
    if pairs.stream is not None:
        pairs.stream.close()
    return [folders[number] for number in range(len(parts))]


def _digest(run: Run, pairs: PairSet) -> str:
    """A digest of everything that changes the features: the tower's weights and settings, the precision, the images."""
    digest = hashlib.sha256()
    tower: Any = run.model.image.tower
    for name, weight in tower.state_dict().items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    settings = run.model.settings
    key = [settings["image"], settings["both"], run.recipe.train.precision]
    digest.update(json.dumps(key, sort_keys=True, default=str).encode())
    if pairs.stream is None:
        digest.update(str(pairs.images.shape).encode())
        digest.update(np.ascontiguousarray(pairs.images).data)
    else:
        digest.update(pairs.stream.fingerprint.encode())
    return digest.hexdigest()


def _write(run: Run, pairs: PairSet, rows: range, folder: Path) -> None:
    """Write the features of `rows`, NaN for unreadable images, and the reasons for these."""
    skipped, chunks = Counter[str](), []
    ranges = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    for chunk, following in zip_longest(ranges, ranges[1:]):
        if pairs.stream is None:
            pictures = torch.from_numpy(np.array(pairs.images[chunk.start : chunk.stop]))
            bad = np.zeros(len(pictures), bool)
        else:
            pictures, reasons = pairs.stream.read_whole(chunk, following or ())
            skipped.update(reason for reason in reasons if reason is not None)
            bad = np.array([reason is not None for reason in reasons])
        features = _encode(run, pictures)
        # non-finite features of good images would pass for unreadable ones
        if (lost := (~np.isfinite(features[~bad])).any(1).sum()) > 0:
            got, remedy = f"others for {lost:,} of {len(pictures):,} images", "Check its weights and train.precision."
            raise invalid("model.image", "give finite features", got, remedy)
        features[bad] = np.nan
        chunks.append(features)
    np.save(folder / FEATURES, np.concatenate(chunks))
    (folder / SKIPPED).write_text(json.dumps(skipped), encoding="utf-8")


@torch.no_grad()
def _encode(run: Run, pictures: Tensor) -> npt.NDArray[np.floating]:
    """The tower's output for uint8 images, in evaluation mode, as a frozen tower is in a step too."""
    tower: Any = run.model.image.tower
    pixels = prepare(pictures).to(run.model.logit_scale.dtype)
    with run.autocast():
        features = encode(tower.eval(), pixels, sub_batch=run.recipe.train.sub_batch.image)
    # NumPy has no bfloat16
    return (features.float() if features.dtype == torch.bfloat16 else features).cpu().numpy()


@dataclass(frozen=True)
class Batch:
    """pixels `[b, C, S, S]`, tokens with `[b, L]` int64 each, ids `[b]` int64: one rank's share of a batch.

    pixels: float32 in [0, 1]; uint8 for a collection, converted on the device; or precomputed features `[b, F]`.
    positions: the positions of these pairs in the batch of all ranks, whose size is the range's end.
    """

    pixels: Tensor
    tokens: Tokens
    ids: Tensor
    positions: range

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def global_size(self) -> int:
        return self.positions.stop

    @property
    def floats(self) -> dict[str, Tensor]:
        return {"the pixels of the batch": self.pixels}

    def parts(self, count: int) -> Iterator[Self]:
        """Split the batch of all ranks into at most `count` nearly equal parts; this rank's share of each."""
        positions, count = self.positions, min(count, self.global_size)
        size, longer = divmod(self.global_size, count)
        for part in range(count):
            # the first parts are one pair longer where the division leaves a remainder
            low, high = (size * end + min(end, longer) for end in (part, part + 1))
            own = slice(*(len(range(positions.start, end, positions.step)) for end in (low, high)))
            within = range(positions.start + own.start * positions.step - low, high - low, positions.step)
            tokens = {name: ids[own] for name, ids in self.tokens.items()}
            yield type(self)(self.pixels[own], tokens, self.ids[own], within)


# captions of some rows of a collection: the index of each row's caption, the ids and the tokens of the captions
_Texts = tuple[dict[int, int], Tensor, Tokens]


class BatchBuilder:
    """Batches by rows. With `augment`, images are augmented by random numbers drawn from `seed`.

    tokenise: makes the tokens of a collection's captions, by default as the bundle's tokenizer does.
    """

    def __init__(self, bundle: DataBundle, *, augment: bool, seed: int, tokenise: Any = None) -> None:
        self._tokenise = tokenise or bundle.tokenizer.tokenise
        self._bundle, self._augment, self._stream = bundle, augment, bundle.pairs.stream
        images, home = bundle.pairs.images, bundle.home
        self._images_on_device = None if home is None else torch.from_numpy(np.array(images)).to(home)
        self._ids = torch.from_numpy(bundle.pairs.ids)
        self._generator = torch.Generator().manual_seed(seed)
        augmented = self._stream is not None and self._stream.augmented
        self._crop_seed = seed if augment and not augmented else None
        self._served = 0
        # a thread that reads the texts of a collection's next batch while the present step computes
        self._reader: ThreadPoolExecutor | None = None
        self._texts: Future[_Texts] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the augmentation's random numbers, and the counts of skipped pairs."""
        stream = self._stream
        counts = {} if stream is None else stream.counts
        return {"generator": self._generator.get_state(), "served": self._served, **counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._generator.set_state(state_dict["generator"])
        self._served = state_dict["served"]
        if self._stream is not None:
            skipped = state_dict["skipped"]
            # checkpoints of earlier versions count every reading alone
            self._stream.set_counts(skipped, state_dict.get("lost", skipped), state_dict["seen"])

    def prefetch(self, rows: Tensor, share: slice = slice(None)) -> None:
        if self._stream is not None:
            own, examples = self._stream_rows(rows, share)
            if self._bundle.features is None:
                self._stream.prefetch(own, examples, self._crop_seed)
            self._reader = self._reader or ThreadPoolExecutor(1, "tokenising")
            self._texts = self._reader.submit(self._read_texts, self._stream, own)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
            self._reader = self._texts = None

    def batch(self, rows: Tensor, share: slice = slice(None)) -> Batch:
        """The pairs at `rows`, or a share of them, augmented as they would be in the whole batch."""
        positions = range(*share.indices(len(rows)))
        if self._stream is not None:
            return self._streamed(self._stream, rows, share, positions)
        drawn = None
        if self._augment:
            # drawn for all ranks, because neither the number of ranks nor the device may change an augmentation
            sizes = (min(SLICE, len(rows) - start) for start in range(0, len(rows), SLICE))
            drawn = torch.cat([draw_parameters(size, self._generator) for size in sizes])[share]
        rows = rows[share]
        texts = {name: ids[rows] for name, ids in self._bundle.tokens.items()}, self._ids[rows], positions
        if self._bundle.features is not None:
            return Batch(self._bundle.features[rows.numpy()], *texts)
        if self._images_on_device is None:
            images, count = torch.from_numpy(self._bundle.pairs.images[rows.numpy()]), SLICE
        else:
            images, count = self._images_on_device[rows.to(self._images_on_device.device)], SLICE_ON_DEVICE
        # in slices, because augmentation needs several times the memory of its images
        pixels = []
        for start in range(0, max(len(rows), 1), count):
            part = images[start : start + count]
            if drawn is None or not len(part):
                pixels.append(prepare(part))
            else:
                pixels.append(augment(part, drawn[start : start + count].to(part.device)))
        return Batch(torch.cat(pixels), *texts)

    def _streamed(self, stream: Stream, rows: Tensor, share: slice, positions: range) -> Batch:
        own, examples = self._stream_rows(rows, share)
        if self._bundle.features is None:
            pixels, chosen = stream.read(own, examples, self._crop_seed)
        else:
            pixels, chosen = self._bundle.features[np.array(own, np.int64)], own
        self._served += len(rows)
        texts = self._texts.result() if self._texts is not None else None
        # rows in place of a share without a readable image were not prefetched
        if texts is None or not texts[0].keys() >= set(chosen):
            texts = self._read_texts(stream, chosen)
        index, ids, tokens = texts
        caption = torch.tensor([index[row] for row in chosen], dtype=torch.int64)
        return Batch(pixels, {name: x[caption] for name, x in tokens.items()}, ids[caption], positions)

    def _stream_rows(self, rows: Tensor, share: slice) -> tuple[list[int], range]:
        """The rows of the stream, and their numbers among the run's examples, which seed their crops."""
        examples = range(self._served, self._served + len(rows))
        return (rows[share] - len(self._bundle.pairs)).tolist(), examples[share]

    def _read_texts(self, stream: Stream, rows: list[int]) -> _Texts:
        """The captions of `rows`, each row once. Without rows, one empty text gives the tokens their shape."""
        index = {row: position for position, row in enumerate(dict.fromkeys(rows))}
        captions = stream.captions(index)
        ids = torch.tensor([stream.library.identity(caption) for caption in captions], dtype=torch.int64)
        return index, ids, self._tokenise(captions or [""])
