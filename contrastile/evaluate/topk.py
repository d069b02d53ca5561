"""The best keys of each query, exactly: the results of a search, and the examples of a report.

On the tiles of `scores`, beside `retrieval`, which only counts ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastile._errors import whole_number
from contrastile.evaluate.scores import check_features, row_tiles, score_tiles


@torch.no_grad()
def topk(query: Tensor, key: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` best keys of each query by dot product: scores float32 and indices int64, both `[N, k]`, best first.

    The first `k` of `(query @ key.T).sort(descending=True, stable=True)`: among equal scores the key with the lower
    index comes first. NaN scores come last.

    query `[N, D]`, key `[M, D]`, floating point. Raises ValueError for features that do not fit and for `k` over M.

    >>> topk(torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), k=2)[1]
    tensor([[1, 2],
            [0, 1]])
    """
    check_features(query, key)
    rule = f"be between 1 and the {len(key)} keys"
    k = whole_number("k", k, 1, "Ask for fewer, or give more keys.", rule=rule, most=len(key))
    values = query.new_empty((len(query), k), dtype=torch.float32)
    indices = torch.empty((len(query), k), dtype=torch.int64, device=query.device)
    for rows, tile in row_tiles(query):
        best = tile.new_empty((len(tile), 0))
        best_keys = indices.new_empty((len(tile), 0))
        for columns, scores in score_tiles(tile, key):
            keys = torch.arange(columns.start, columns.stop, device=query.device).expand(len(tile), -1)
            candidates = torch.cat([best, scores.nan_to_num(nan=float("-inf"), posinf=None, neginf=None)], dim=1)
            order = candidates.sort(dim=1, descending=True, stable=True).indices[:, :k]
            best, best_keys = candidates.gather(1, order), torch.cat([best_keys, keys], dim=1).gather(1, order)
        values[rows], indices[rows] = best, best_keys
    return values, indices
