"""Recall: how often a right answer is among the first k, counted in tiles.

After the towers, beside `zeroshot`. A key is a right answer to a query when their ids are equal, so a query may have
several; it is found as soon as one of them is among the first k.

**Ties** count against the model: a wrong key that scores exactly as high as the best right one stands before it. So a
collapsed model, all of whose features are equal, has a recall of 0 and not of 1. Scores are dot products in float64,
rounded to float32: those of keys with equal features, such as two pictures' captions in the same words, are equal.
trec_eval, which compares scores as float32 too, counts the same where wrong keys of equal scores are named so that
they come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from contrastile._check import wrong
from contrastile.evaluate.scores import check_features, row_tiles, score_tiles


def recall(
    query: Tensor, key: Tensor, query_ids: Tensor, key_ids: Tensor, *, ks: Sequence[int] = (1, 5, 10)
) -> dict[int, float]:
    """The share of queries with a right answer among their first k keys by dot product, for each k.

    query `[N, D]`, key `[M, D]`: floating point. query_ids `[N]`, key_ids `[M]`: integers. A query without any right
    key counts as not found, equal scores as the top of this file says. Raises ValueError for shapes that do not fit,
    for no queries or keys, and for a k below 1.

    >>> features = torch.eye(3)
    >>> recall(features, features.roll(1, dims=0), torch.arange(3), torch.tensor([2, 0, 0]), ks=[1])
    {1: 0.6666666666666666}
    """
    found = ranks(query, key, query_ids, key_ids)
    return {k: _share(found, k, key) for k in _checked(ks)}


def _share(found: Tensor, k: int, key: Tensor) -> float:
    """Of `ranks` those among the first `k`; that of a query without a right key is the number of keys."""
    return (found < min(k, len(key))).double().mean().item()


def ranks(query: Tensor, key: Tensor, query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """How many wrong keys score at least as high as the best right one: int64 `[N]`, 0 is best; M where none is right.

    Not-a-number scores count as if they were high on wrong keys and low on right ones. Takes and raises what `recall`
    does, but for the ks.

    >>> ranks(torch.eye(2), torch.eye(2), torch.tensor([0, 1]), torch.tensor([0, 0]))
    tensor([0, 2])
    """
    check_features(query, key)
    _check_ids(query, query_ids, "query")
    _check_ids(key, key_ids, "key")
    return ranks_where(query, key, lambda rows, columns: query_ids[rows, None] == key_ids[columns])


# which keys of a tile are right for which of its queries: [rows, columns], booleans
Right = Callable[[slice, slice], Tensor]


def recall_where(
    query: Tensor, key: Tensor, right: Right, *, aside: Right | None = None, ks: Sequence[int]
) -> dict[int, float]:
    """`recall` where `right` says of each tile what is right, and `aside` which other keys are no answer at all.

    >>> everything, own = torch.ones(2, 2, dtype=torch.bool), torch.eye(2, dtype=torch.bool)
    >>> found = {"right": lambda rows, columns: (everything ^ own)[rows, columns], "ks": [1]}
    >>> recall_where(torch.eye(2), torch.eye(2), **found)
    {1: 0.0}
    >>> recall_where(torch.eye(2), torch.eye(2), **found, aside=lambda rows, columns: own[rows, columns])
    {1: 1.0}
    """
    found = ranks_where(query, key, right, aside)
    return {k: _share(found, k, key) for k in _checked(ks)}


@torch.no_grad()
def ranks_where(query: Tensor, key: Tensor, right: Right, aside: Right | None = None) -> Tensor:
    """`ranks` where `right` says of each tile what is right; those that `aside` says stand before nothing."""
    found = torch.empty(len(query), dtype=torch.int64, device=query.device)
    for place, rows in row_tiles(query, torch.float64):
        best = torch.full((len(rows), 1), float("-inf"), device=query.device)
        any_right = torch.zeros((len(rows), 1), dtype=torch.bool, device=query.device)
        for columns, scores in score_tiles(rows, key):
            hits = right(place, columns)
            any_right |= hits.any(dim=1, keepdim=True)
            scores = scores.masked_fill(~hits | scores.isnan(), float("-inf"))
            best = torch.maximum(best, scores.amax(dim=1, keepdim=True))
        ahead = torch.zeros((len(rows), 1), dtype=torch.int64, device=query.device)
        for columns, scores in score_tiles(rows, key):
            before = ~right(place, columns) & ~(scores < best)
            if aside is not None:
                before &= ~aside(place, columns)
            ahead += before.sum(dim=1, keepdim=True)
        found[place] = ahead.masked_fill(~any_right, len(key)).squeeze(1)
    return found


def both_ways(image: Tensor, text: Tensor, owner: Tensor, *, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Retrieval of pictures and captions, several to a picture, by the names that open_clip gives its measures.

    image `[N, D]`, text `[M, D]`, owner `[M]`: the row of the picture that a caption belongs to. `image_to_text_R@k`:
    the share of pictures with any of their captions among the first k; `text_to_image_R@k`: the share of captions whose
    picture is. `..._mean_rank`, `..._median_rank`: the place of the first right answer, from 1; the median's floor.
    Raises ValueError as `recall` does.

    >>> both_ways(torch.eye(2), torch.eye(2)[[0, 1, 0]], torch.tensor([0, 1, 1]), ks=[1])["text_to_image_R@1"]
    0.6666666666666666
    """
    images = torch.arange(len(image), device=image.device)
    measured: dict[str, float] = {}
    ways = {"image_to_text": (image, text, images, owner), "text_to_image": (text, image, owner, images)}
    for way, sides in ways.items():
        found = ranks(*sides)
        measured[f"{way}_mean_rank"] = found.double().mean().item() + 1
        middle = found.sort().values[[(len(found) - 1) // 2, len(found) // 2]]
        measured[f"{way}_median_rank"] = middle.sum().item() // 2 + 1.0
        measured |= {f"{way}_R@{k}": _share(found, k, sides[1]) for k in _checked(ks)}
    return measured


def chance(query_ids: Tensor, key_ids: Tensor, *, ks: Sequence[int] = (1, 5, 10)) -> dict[int, float]:
    """The recall of an order drawn at random: the mean over queries of 1 − C(M − r, k) / C(M, k), r right keys of M.

    Raises ValueError for no queries, and for a k below 1.

    >>> chance(torch.tensor([0, 1]), torch.tensor([0, 1, 2, 2]), ks=[1, 4])
    {1: 0.25, 4: 1.0}
    """
    if len(query_ids) == 0:
        raise wrong("query_ids", "not be empty", "no queries", "There is nothing to measure.")
    keys, counts = key_ids.unique(return_counts=True)
    of_key = dict(zip(keys.tolist(), counts.tolist(), strict=True))
    queries, times = query_ids.unique(return_counts=True)
    total = len(key_ids)
    result = {}
    for k in _checked(ks):
        drawn = min(k, total)
        hits = [
            1 - math.comb(total - of_key.get(query, 0), drawn) / math.comb(total, drawn) for query in queries.tolist()
        ]
        result[k] = sum(hit * time for hit, time in zip(hits, times.tolist(), strict=True)) / len(query_ids)
    return result


def _checked(ks: Sequence[int]) -> Sequence[int]:
    if not ks or any(k < 1 for k in ks):
        raise wrong("ks", "be numbers of at least 1", list(ks), "Recall at 1, 5 and 10 is usual.")
    return ks


def _check_ids(features: Tensor, ids: Tensor, name: str) -> None:
    if ids.shape != features.shape[:1] or ids.is_floating_point():
        got = f"{ids.dtype} of shape {list(ids.shape)} for {len(features)} rows"
        raise wrong(f"{name}_ids", "be integers, one per row", got, "Give every row its id.")
    if len(ids) == 0:
        raise wrong(name, "not be empty", "no rows", "There is nothing to measure.")
