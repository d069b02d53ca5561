"""Pictures of a folder as the passages of an index, for a run of pictures and texts.

Beside `index.py`, which writes and opens the index: a picture is a passage without words, whose id is its path in the
folder. `search.py` then finds pictures by a text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.loader import read_chunks
from contrastile.data.sources import PICTURES
from contrastile.data.texts import Passage
from contrastile.train.log import progress
from contrastile.train.run import Run

# pictures that are read and encoded at once
CHUNK = 256


def picture_passages(folder: str | None) -> tuple[list[Passage], str]:
    """The pictures below `folder`, in the order of their paths, and a name that changes with any of the files."""
    if folder is None or not os.path.isdir(folder):
        got = "none" if folder is None else f'"{folder}"'
        raise invalid("corpus", "be a folder of pictures, for this run", got, "Name it behind the run.")
    root = Path(folder).resolve()
    paths = sorted(path for path in root.rglob("*") if path.name.lower().endswith(PICTURES) and path.is_file())
    if not paths:
        raise invalid("corpus", f"have pictures ({', '.join(PICTURES)})", f'"{folder}", without any', "Check its path.")
    states = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]
    return [Passage(str(path.relative_to(root)), "", "", str(path)) for path in paths], f"{root} {digest}"


def picture_features(run: Run, passages: Sequence[Passage], title: str) -> Tensor:
    """Features `[n, D]` of the pictures; raises ValueError for one that cannot be read."""
    data, features = run.recipe.data, []
    shape, paths = (data.channels, data.image_size, data.image_size), [passage.source for passage in passages]
    with progress(len(paths), title, "pictures") as bar:
        for rows, pictures, reasons in read_chunks(paths, shape, chunk=CHUNK, apart=False):
            for row, reason in zip(rows, reasons, strict=True):
                if reason is not None:
                    raise invalid("corpus", "have pictures that can be read", f"{reason}: {paths[row]}", "Remove it.")
            # the next pictures are decoded into the same memory
            features.append(run.encode_image(pictures.clone()))
            bar.update(len(rows))
    return torch.cat(features)
