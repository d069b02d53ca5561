"""Feature cache: a frozen image tower's output for every picture, computed once, on disk (LiT, arXiv:2111.07991).

For recipes with `model.precompute`: a step then reads and encodes no picture, only the projection runs. Features are
made in parts, each whole or not at all; an interrupted run, other ranks and other runs go on with the parts that exist.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.augment import prepare
from contrastile.data.cache import cached_folder
from contrastile.data.pairs import PairSet
from contrastile.data.skipped import check_bad
from contrastile.gradcache.encode import encode
from contrastile.train.batch_builder import DataBundle, FeatureTable
from contrastile.train.log import progress
from contrastile.train.run import Run

# pictures of one part, and those that are read and encoded at once
PART, CHUNK = 16_384, 512
FEATURES, SKIPPED = "features.npy", "skipped.json"


def with_cached_features(run: Run, bundle: DataBundle) -> DataBundle:
    """The bundle with features of all training pictures, without the pairs whose picture cannot be read.

    Raises ValueError where that leaves out more than `data.max_bad_fraction`.
    """
    if not run.recipe.model.precompute:
        return bundle
    pairs = bundle.pairs
    folders = _make_parts(run, pairs)
    skipped = Counter[str]()
    for folder in folders:
        skipped.update(json.loads((folder / SKIPPED).read_text(encoding="utf-8")))
    table = FeatureTable([np.load(one / FEATURES, mmap_mode="r", allow_pickle=False) for one in folders], PART)
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
    with progress(count, "encoding the pictures once", "pictures") as bar:
        for number, rows in (*parts[first:], *parts[:first]):
            key, make = {"of": digest, "part": number}, partial(_write, run, pairs, rows)
            folders[number] = cached_folder(cache, "features", key, files=(FEATURES, SKIPPED), make=make)
            bar.update(len(rows))
    if pairs.stream is not None:
        pairs.stream.close()
    return [folders[number] for number in range(len(parts))]


def _digest(run: Run, pairs: PairSet) -> str:
    """A digest of all that features depend on: the tower's weights and settings, the precision, the pictures."""
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
    """Write the features of `rows`, NaN for unreadable pictures, and the reasons for these."""
    skipped, chunks = Counter[str](), []
    if pairs.stream is not None:
        pairs.stream.apart = run.device.type == "cuda"
    ranges = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    for chunk, following in zip_longest(ranges, ranges[1:]):
        if pairs.stream is None:
            pictures = torch.from_numpy(np.array(pairs.images[chunk.start : chunk.stop]))
            bad = np.zeros(len(pictures), bool)
        else:
            pictures, reasons = pairs.stream.look(chunk, following or ())
            skipped.update(reason for reason in reasons if reason is not None)
            bad = np.array([reason is not None for reason in reasons])
        features = _encode(run, pictures)
        # non-finite features of good pictures would pass for unreadable ones
        if (lost := (~np.isfinite(features[~bad])).any(1).sum()) > 0:
            got, remedy = f"others for {lost:,} of {len(pictures):,} pictures", "Check its weights and train.precision."
            raise invalid("model.image", "give finite features", got, remedy)
        features[bad] = np.nan
        chunks.append(features)
    np.save(folder / FEATURES, np.concatenate(chunks))
    (folder / SKIPPED).write_text(json.dumps(skipped), encoding="utf-8")


@torch.no_grad()
def _encode(run: Run, pictures: Tensor) -> npt.NDArray[np.floating]:
    """The tower's output for uint8 pictures, in evaluation mode, as a frozen tower is in a step too."""
    tower: Any = run.model.image.tower
    pixels = prepare(pictures).to(run.model.logit_scale.dtype)
    with run.autocast():
        features = encode(tower.eval(), pixels, sub_batch=run.recipe.train.sub_batch.image)
    # NumPy has no bfloat16
    return (features.float() if features.dtype == torch.bfloat16 else features).cpu().numpy()
