"""What a locked image tower makes of every picture, computed once and kept in the cache (LiT, arXiv:2111.07991).

Between `feed.py`'s materials and its batches, for recipes with `model.precompute`: no picture is read or encoded in a
step, only the projection is. Parts of a few thousand pictures are made one by one, whole or not at all, so an
interrupted run goes on with the next one; ranks, and runs side by side, share them out by whose turn it is to begin.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from contrastile._check import wrong
from contrastile.cache import encode
from contrastile.data.augment import prepare
from contrastile.data.cache import cached_folder
from contrastile.data.pairs import Indices, PairSet
from contrastile.data.skipped import check_bad
from contrastile.train.checkpoint import Run
from contrastile.train.feed import Materials
from contrastile.train.log import progress

# pictures of one part, and those that are read and encoded at once
PART, STRETCH = 16_384, 512
FEATURES, SKIPPED = "features.npy", "skipped.json"


@dataclass(frozen=True)
class Precomputed:
    """Features by row, in parts of `size`, each on the disk until it is asked for."""

    parts: list[npt.NDArray[np.floating]]
    size: int

    def __getitem__(self, rows: Indices) -> Tensor:
        """Those of `rows`: `[b, F]`."""
        found = np.empty((len(rows), self.parts[0].shape[1]), self.parts[0].dtype)
        for part in np.unique(rows // self.size):
            here = rows // self.size == part
            found[here] = self.parts[part][rows[here] % self.size]
        return torch.from_numpy(found)


class Part(NamedTuple):
    """Some pictures that are encoded together, and are kept so."""

    number: int
    rows: range


def precomputed(run: Run, materials: Materials) -> Materials:
    """The same with features of all pictures that are trained on, and without the pairs whose picture has none.

    Raises ValueError where more than `data.max_bad_fraction` have none.
    """
    if not run.recipe.model.precompute:
        return materials
    pairs = materials.pairs
    folders = _made(run, pairs)
    skipped = Counter[str]()
    for folder in folders:
        skipped.update(json.loads((folder / SKIPPED).read_text(encoding="utf-8")))
    kept = Precomputed([np.load(one / FEATURES, mmap_mode="r", allow_pickle=False) for one in folders], PART)
    good = np.concatenate([~np.isnan(part[:, 0]) for part in kept.parts])
    check_bad(skipped, len(good), run.recipe.data.max_bad_fraction)
    rows = pairs.splits["train"]
    splits = {**pairs.splits, "train": rows[good[rows if pairs.stream is None else rows - len(pairs)]]}
    pairs = replace(pairs, splits=splits, skipped=dict(skipped + Counter(pairs.skipped)))
    return replace(materials, pairs=pairs, home=None, features=kept)


def _made(run: Run, pairs: PairSet) -> list[Path]:
    """The folders of all parts, in their order."""
    cache, digest = Path(run.recipe.data.cache).expanduser(), _digest(run, pairs)
    count = len(pairs.images) if pairs.stream is None else len(pairs.stream)
    parts = [Part(at // PART, range(at, min(at + PART, count))) for at in range(0, count, PART)]
    # each rank begins elsewhere, and finds made what others were faster with
    first = len(parts) * int(os.environ.get("RANK", "0")) // int(os.environ.get("WORLD_SIZE", "1"))
    folders: dict[int, Path] = {}
    with progress(count, "encoding the pictures once", "pictures") as bar:
        for part in (*parts[first:], *parts[:first]):
            told, make = {"of": digest, "part": part.number}, partial(_write, run, pairs, part.rows)
            folders[part.number] = cached_folder(cache, "features", told, files=(FEATURES, SKIPPED), make=make)
            bar.update(len(part.rows))
    if pairs.stream is not None:
        pairs.stream.close()
    return [folders[number] for number in range(len(parts))]


def _tower(run: Run) -> nn.Module:
    """What is locked."""
    tower = run.model.image.tower
    assert isinstance(tower, nn.Module)
    return tower


def _digest(run: Run, pairs: PairSet) -> str:
    """What decides about the features: the tower's weights, its settings, the precision, and the pictures."""
    digest = hashlib.sha256()
    for name, weight in _tower(run).state_dict().items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    settings = run.model.settings
    told = [settings["image"], settings["both"], run.recipe.train.precision]
    digest.update(json.dumps(told, sort_keys=True, default=str).encode())
    if pairs.stream is None:
        digest.update(str(pairs.images.shape).encode())
        digest.update(np.ascontiguousarray(pairs.images).data)
    else:
        digest.update(pairs.stream.fingerprint.encode())
    return digest.hexdigest()


def _write(run: Run, pairs: PairSet, rows: range, folder: Path) -> None:
    skipped, found = Counter[str](), []
    if pairs.stream is not None:
        pairs.stream.apart = run.device.type == "cuda"
    stretches = [rows[start : start + STRETCH] for start in range(0, len(rows), STRETCH)]
    for stretch, following in zip_longest(stretches, stretches[1:]):
        if pairs.stream is None:
            pictures = torch.from_numpy(np.array(pairs.images[stretch.start : stretch.stop]))
            bad = np.zeros(len(pictures), bool)
        else:
            pictures, reasons = pairs.stream.look(stretch, following or ())
            skipped.update(reason for reason in reasons if reason is not None)
            bad = np.array([reason is not None for reason in reasons])
        features = _encoded(run, pictures)
        # else they would pass for pictures that cannot be read
        if (lost := (~np.isfinite(features[~bad])).any(1).sum()) > 0:
            got, remedy = f"others for {lost:,} of {len(pictures):,} pictures", "Check its weights and train.precision."
            raise wrong("model.image", "give finite features", got, remedy)
        features[bad] = np.nan
        found.append(features)
    np.save(folder / FEATURES, np.concatenate(found))
    (folder / SKIPPED).write_text(json.dumps(skipped), encoding="utf-8")


@torch.no_grad()
def _encoded(run: Run, pictures: Tensor) -> npt.NDArray[np.floating]:
    """What the tower makes of bytes, as it would in a step: locked, it is as in use there too."""
    tower, pixels = _tower(run).eval(), prepare(pictures).to(run.model.logit_scale.dtype)
    with run.autocast():
        features = encode(tower, pixels, sub_batch=run.recipe.train.sub_batch.image)
    # NumPy has no bfloat16
    return (features.float() if features.dtype == torch.bfloat16 else features).cpu().numpy()
