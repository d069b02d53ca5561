"""Scores of queries and keys in tiles: the ground that all of evaluation stands on.

After the towers: features come in as `encode` gives them, and the whole score matrix is never held.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from contrastile._check import wrong

# a tile of 1024 × 4096 scores is 16 MiB in float32, and twice that where it is computed in float64
ROWS, COLUMNS = 1024, 4096


def check_features(query: Tensor, key: Tensor) -> None:
    """Raises ValueError unless both are `[rows, D]` floating point with the same D and on the same device."""
    for name, features in (("query", query), ("key", key)):
        if features.ndim != 2 or not features.is_floating_point():
            got = f"{features.dtype} of shape {list(features.shape)}"
            raise wrong(name, "be floating-point features of shape [rows, D]", got, "Encode the examples first.")
    if query.shape[1] != key.shape[1]:
        got = f"{query.shape[1]} and {key.shape[1]}"
        raise wrong("key", "have the same feature size as `query`", got, "Project one side first.")
    if query.device != key.device:
        raise wrong("key", "be on the device of `query`", f"{query.device} and {key.device}", "Move one of them.")


def row_tiles(query: Tensor, dtype: torch.dtype = torch.float32) -> Iterator[tuple[slice, Tensor]]:
    """The queries in `dtype`, tile by tile, with their place."""
    for start in range(0, len(query), ROWS):
        place = slice(start, min(start + ROWS, len(query)))
        yield place, query[place].to(dtype)


def score_tiles(rows: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Dot products in float32 of a tile of queries with all keys, tile by tile, with the keys' place.

    They are computed in the type of `rows`, then rounded: of float64 rows equal keys have equal scores anywhere.
    The same rows and keys give the same bits at every sweep.
    """
    for start in range(0, len(key), COLUMNS):
        place = slice(start, min(start + COLUMNS, len(key)))
        yield place, (rows @ key[place].to(rows.dtype).T).float()
