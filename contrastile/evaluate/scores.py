"""Scores of queries and keys in tiles, so that the whole score matrix is never in memory.

Below `retrieval`, `topk` and `zeroshot`, which get features as `encode` returns them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from contrastile._errors import invalid

# a tile of 1024 × 4096 scores has 16 MiB in float32, and twice that where it is computed in float64
ROWS, COLUMNS = 1024, 4096


def check_features(query: Tensor, key: Tensor) -> None:
    """Raise ValueError unless both are floating-point `[rows, D]` with the same D and on the same device."""
    for name, features in (("query", query), ("key", key)):
        if features.ndim != 2 or not features.is_floating_point():
            got = f"{features.dtype} of shape {list(features.shape)}"
            raise invalid(name, "be floating-point features of shape [rows, D]", got, "Encode the examples first.")
    if query.shape[1] != key.shape[1]:
        got = f"{query.shape[1]} and {key.shape[1]}"
        raise invalid("key", "have the same feature size as `query`", got, "Project one side first.")
    if query.device != key.device:
        raise invalid("key", "be on the device of `query`", f"{query.device} and {key.device}", "Move one of them.")


def row_tiles(query: Tensor, dtype: torch.dtype = torch.float32) -> Iterator[tuple[slice, Tensor]]:
    """Tiles of queries in `dtype`, with their slice of rows."""
    for start in range(0, len(query), ROWS):
        rows = slice(start, min(start + ROWS, len(query)))
        yield rows, query[rows].to(dtype)


def score_tiles(tile: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Dot products of a tile of queries with all keys in float32, tile by tile, with the slice of keys.

    Products are computed in the dtype of `tile`, then rounded: in float64, equal keys have equal scores in every tile.
    The same inputs give the same bits at every sweep.
    """
    for start in range(0, len(key), COLUMNS):
        columns = slice(start, min(start + COLUMNS, len(key)))
        yield columns, (tile @ key[columns].to(tile.dtype).T).float()
