"""Retrieval by features: the best keys of each query, and recall, the share of queries with a right one among them.

Scores are computed in tiles, so that the whole score matrix is never in memory. Zero-shot classification is retrieval
among classes, each of which is represented by the features of its names in prompts.

**Ties** count against the model: a wrong key with exactly the score of the best right one ranks before it. So a
collapsed model, all of whose features are equal, has a recall of 0 and not of 1. Recall rounds dot products in float64
to float32: keys with equal features, such as equal captions of two images, have equal scores.
"""

from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._errors import invalid, whole_number

# a tile of 1024 × 4096 scores has 16 MiB in float32, and twice that where it is computed in float64
ROWS, COLUMNS = 1024, 4096
# scores float32 and rows int64 of keys for each query, both [N, k]
Matches = tuple[Tensor, Tensor]
# marks the right keys of a tile: slices of queries and keys to booleans [rows, columns]
Right = Callable[[slice, slice], Tensor]


def check_features(query: Tensor, key: Tensor) -> None:
    """Raise ValueError unless both are floating-point `[rows, D]` with the same D and on the same device."""
    for name, features in (("query", query), ("key", key)):
        if not isinstance(features, Tensor) or features.ndim != 2 or not features.is_floating_point():
            got = _described(features)
            raise invalid(name, "be floating-point features of shape [rows, D]", got, "Encode the examples first.")
    if query.shape[1] != key.shape[1]:
        got = f"{key.shape[1]} and {query.shape[1]}"
        raise invalid("key", "have the same feature size as `query`", got, "Project one side first.")
    if query.device != key.device:
        raise invalid("key", "be on the device of `query`", f"{key.device} and {query.device}", "Move one of them.")


def _described(x: Tensor) -> str:
    """The dtype and shape of a tensor; the type of anything else, which an untyped script may pass."""
    return f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _row_tiles(query: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Tiles of queries in `dtype`, with their slice of rows."""
    for start in range(0, len(query), ROWS):
        rows = slice(start, min(start + ROWS, len(query)))
        yield rows, query[rows].to(dtype)


def _score_tiles(tile: Tensor, key: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Dot products of a tile of queries with all keys in float32, tile by tile, with the slice of keys.

    Products are computed in the dtype of `tile`, then rounded: in float64, equal keys have equal scores in every tile.
    """
    for start in range(0, len(key), COLUMNS):
        columns = slice(start, min(start + COLUMNS, len(key)))
        yield columns, (tile @ key[columns].to(tile.dtype).T).float()


@torch.no_grad()
def topk(query: Tensor, key: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` best keys of each query by dot product: scores float32 and indices int64, both `[N, k]`, best first.

    The first `k` of `(query @ key.T).sort(descending=True, stable=True)`, NaN last; query `[N, D]`, key `[M, D]`.

    >>> topk(torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), k=2)[1]
    tensor([[1, 2],
            [0, 1]])
    """
    check_features(query, key)
    rule = f"be between 1 and the {len(key)} keys"
    k = whole_number("k", k, 1, "Ask for fewer, or give more keys.", rule=rule, most=len(key))
    values, indices = no_matches(query, k)
    for rows, tile in _row_tiles(query, torch.float32):
        best = no_matches(tile)
        for columns, scores in _score_tiles(tile, key):
            keys = torch.arange(columns.start, columns.stop, device=query.device).expand(len(tile), -1)
            best = best_of(best, (scores, keys), k)
        values[rows], indices[rows] = best
    return values, indices


def no_matches(query: Tensor, k: int = 0) -> Matches:
    """Scores and rows `[N, k]` without values."""
    rows = torch.empty((len(query), k), dtype=torch.int64, device=query.device)
    return query.new_empty((len(query), k), dtype=torch.float32), rows


def best_of(first: Matches, second: Matches, k: int) -> Matches:
    """The `k` best of both for each query, best first, NaN last; of equal scores those that come first."""
    scores, rows = (torch.cat(both, dim=1) for both in zip(first, second, strict=True))
    # NaN below the largest negative number, which takes the place of an infinite one
    order = scores.nan_to_num(nan=float("-inf")).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores.gather(1, order), rows.gather(1, order)


def recall(
    query: Tensor, key: Tensor, query_ids: Tensor, key_ids: Tensor, *, ks: Sequence[int] = (1, 5, 10)
) -> dict[int, float]:
    """For each k, the share of queries that have a key of equal id among their first k by dot product.

    query `[N, D]`, key `[M, D]`: floating point. query_ids `[N]`, key_ids `[M]`: integers.

    >>> features = torch.eye(3)
    >>> recall(features, features.roll(1, dims=0), torch.arange(3), torch.tensor([2, 0, 0]), ks=[1])
    {1: 0.6666666666666666}
    """
    check_features(query, key)
    for name, features, ids in (("query", query, query_ids), ("key", key, key_ids)):
        if not isinstance(ids, Tensor) or ids.shape != features.shape[:1] or ids.is_floating_point():
            got = f"{_described(ids)} for {len(features)} rows"
            raise invalid(f"{name}_ids", "be integers, one per row", got, "Give every row its id.")
    _check_not_empty(query=query, key=key)
    return recall_where(query, key, lambda rows, columns: query_ids[rows, None] == key_ids[columns], ks=ks)


def recall_where(
    query: Tensor, key: Tensor, right: Right, *, aside: Right | None = None, ks: Sequence[int]
) -> dict[int, float]:
    """`recall` with right keys marked by `right`; keys marked by `aside` are left out of a query's ranking."""
    return _shares(ranks(query, key, right, aside), len(key), ks)


@torch.no_grad()
def ranks(query: Tensor, key: Tensor, right: Right, aside: Right | None = None) -> Tensor:
    """The number of wrong keys that score at least as high as the best right one, int64 `[N]`; M where none is right.

    NaN scores count as high on wrong keys and as low on right ones. `right`, `aside`: as of `recall_where`.
    """
    result = torch.empty(len(query), dtype=torch.int64, device=query.device)
    for rows, tile in _row_tiles(query, torch.float64):
        # two passes over the keys; the scores of a few are computed once
        few = [*_score_tiles(tile, key)] if len(key) <= COLUMNS else None
        best = torch.full((len(tile), 1), float("-inf"), device=query.device)
        any_right = torch.zeros((len(tile), 1), dtype=torch.bool, device=query.device)
        for columns, scores in few or _score_tiles(tile, key):
            hits = right(rows, columns)
            any_right |= hits.any(dim=1, keepdim=True)
            scores = scores.masked_fill(~hits | scores.isnan(), float("-inf"))
            best = torch.maximum(best, scores.amax(dim=1, keepdim=True))
        rank = torch.zeros((len(tile), 1), dtype=torch.int64, device=query.device)
        for columns, scores in few or _score_tiles(tile, key):
            # not `scores >= best`, which is false for NaN
            ahead = ~right(rows, columns) & ~(scores < best)
            if aside is not None:
                ahead &= ~aside(rows, columns)
            rank += ahead.sum(dim=1, keepdim=True)
        result[rows] = rank.masked_fill(~any_right, len(key)).squeeze(1)
    return result


def both_ways(
    image: Tensor, text: Tensor, owner: Tensor, caption: Tensor | None = None, *, ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Retrieval of images and captions, several to each other, under the names of open_clip's measures.

    image `[N, D]`, text `[M, D]`; owner `[P]`, caption `[P]`: rows of an image and of a caption that belong together.
    Without `caption`, owner `[M]` is the one image of each caption. `image_to_text_R@k`: the share of images with any
    of their captions among the first k. `..._mean_rank`, `..._median_rank`: the rank of the first right key, from 1.

    >>> both_ways(torch.eye(2), torch.eye(2)[[0, 1, 0]], torch.tensor([0, 1, 1]), ks=[1])["text_to_image_R@1"]
    0.6666666666666666
    """
    check_features(image, text)
    _check_not_empty(image=image, text=text)
    if caption is not None and not (_is_integers(caption) and caption.ndim == 1):
        rule, remedy = "be integers, one per pair", "Give every pair the row of its caption."
        raise invalid("caption", rule, _described(caption), remedy)
    caption = torch.arange(len(text), device=text.device) if caption is None else caption
    if not _is_integers(owner) or owner.shape != caption.shape:
        got = f"{_described(owner)} for {len(caption)}"
        raise invalid("owner", "be integers, one per caption", got, "Give every caption the row of its image.")
    # bytes would be a mask
    owner, caption = owner.long(), caption.long()
    for name, rows, features in (("owner", owner, image), ("caption", caption, text)):
        if ((rows < 0) | (rows >= len(features))).any():
            got = f"{rows.min().item()} to {rows.max().item()}"
            raise invalid(name, f"be rows of the {len(features)} features", got, "Pass places, not ids.")
    measures: dict[str, float] = {}
    ways = {"image_to_text": (image, text, owner, caption), "text_to_image": (text, image, caption, owner)}
    for way, (query, key, query_rows, key_rows) in ways.items():
        rank = ranks(query, key, _right_pairs(query_rows, key_rows))
        measures[f"{way}_mean_rank"] = rank.double().mean().item() + 1
        middle = rank.sort().values[[(len(rank) - 1) // 2, len(rank) // 2]]
        measures[f"{way}_median_rank"] = middle.sum().item() // 2 + 1.0
        measures |= {f"{way}_R@{k}": share for k, share in _shares(rank, len(key), ks).items()}
    return measures


def _is_integers(x: Any) -> bool:
    whole = isinstance(x, Tensor) and x.dtype != torch.bool
    return whole and not (x.is_floating_point() or x.is_complex())


def _right_pairs(query_rows: Tensor, key_rows: Tensor) -> Right:
    """Marks the pairs (`query_rows[p]`, `key_rows[p]`), both `[P]`, as right."""

    def right(rows: slice, columns: slice) -> Tensor:
        tile = query_rows.new_zeros((rows.stop - rows.start, columns.stop - columns.start), dtype=torch.bool)
        row, column = query_rows - rows.start, key_rows - columns.start
        inside = (row >= 0) & (row < tile.shape[0]) & (column >= 0) & (column < tile.shape[1])
        tile[row[inside], column[inside]] = True
        return tile

    return right


def chance(query_ids: Tensor, key_ids: Tensor) -> float:
    """The recall at 1 of a random order, where equal ids are right.

    >>> chance(torch.tensor([0, 1]), torch.tensor([0, 1, 2, 2]))
    0.25
    """
    _check_not_empty(key_ids=key_ids)
    ids, inverse = torch.cat([query_ids, key_ids]).unique(return_inverse=True)
    query_inverse, key_inverse = inverse.split([len(query_ids), len(key_ids)])
    return chance_among(key_inverse.bincount(minlength=len(ids))[query_inverse], len(key_ids))


def chance_among(right: Tensor, total: int) -> float:
    """The recall at 1 of a random order: the mean over queries of the share of the `total` keys that are `right`."""
    if len(right) == 0:
        raise invalid("query_ids", "not be empty", "no queries", "There is nothing to measure.")
    return right.double().mean().item() / total


@torch.no_grad()
def class_features(
    names: Sequence[str | Sequence[str]], *, encode: Callable[[list[str]], Tensor], prompts: Sequence[str] = ("{}",)
) -> Tensor:
    """Unit features `[classes, D]` of class names: the normalised mean over prompts and names of unit features.

    `encode(texts)` returns `[len(texts), D]`; each prompt has one `{}` for the name, of which a class may have several.
    """
    if not prompts or any(prompt.count("{}") != 1 for prompt in prompts):
        remedy = 'For example "a photo of {}".'
        raise invalid("prompts", "have one {} each, the place of the name", list(prompts), remedy)
    if isinstance(names, str):
        raise invalid("names", "be a list of names", repr(names), "Its letters would be classes.")
    synonyms = [(name,) if isinstance(name, str) else name for name in names]
    if not synonyms or not all(synonyms):
        raise invalid("names", "not be empty", "no names", "Give every class its name.")
    owner = torch.tensor([row for row, group in enumerate(synonyms) for _ in group])
    sums: list[Tensor] = []
    for prompt in prompts:
        texts = [prompt.replace("{}", name) for group in synonyms for name in group]
        features = encode(texts)
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(texts):
            rule = f"return features of shape [{len(texts)}, D], of as many texts"
            raise invalid("encode", rule, _described(features), "Return one row for each text.")
        unit = F.normalize(features.float(), dim=-1)
        zeros = unit.new_zeros(len(synonyms), unit.shape[1])
        sums.append(zeros.index_add_(0, owner.to(unit.device), unit))
    return F.normalize(torch.stack(sums).sum(dim=0), dim=-1)


def classified(image: Tensor, classes: Tensor, labels: Tensor, right: Tensor) -> dict[str, float]:
    """Accuracies `top1`, `top5` of images, and `mean-per-class-recall`, the mean of top 1 over labels with images.

    image `[n, D]`, classes `[C, D]`; labels `[n]`: the label of each image; right `[L, C]`, booleans: the right classes
    of each label. Of five classes or fewer there is no `top5`.
    """
    check_features(image, classes)
    if len(image) == 0:
        raise invalid("image", "not be empty", "no images", "There is nothing to measure.")
    _check_not_empty(classes=classes)
    if not _is_integers(labels) or labels.shape != image.shape[:1]:
        got = f"{_described(labels)} for {len(image)} images"
        raise invalid("labels", "be integers, one per image", got, "Give every image the row of its label in `right`.")
    if not isinstance(right, Tensor) or right.dtype != torch.bool or right.shape[1:] != (len(classes),):
        rule = f"be booleans of shape [labels, {len(classes)}], of the classes"
        raise invalid("right", rule, _described(right), "Mark the right classes of each label.")
    labels = labels.long()
    if ((labels < 0) | (labels >= len(right))).any():
        got = f"{labels.min().item()} to {labels.max().item()}"
        raise invalid("labels", f"be rows of `right`, which has {len(right)}", got, "Pass places, not names.")
    rank = ranks(image, classes, lambda rows, columns: right[labels[rows], columns])
    accuracies = {f"top{k}": (rank < k).double().mean().item() for k in (1, 5) if k == 1 or k < len(classes)}
    images = torch.bincount(labels, minlength=len(right)).double()
    hits = torch.bincount(labels, weights=(rank < 1).double(), minlength=len(right))
    present = images > 0
    return {**accuracies, "mean-per-class-recall": (hits[present] / images[present]).mean().item()}


def _shares(rank: Tensor, keys: int, ks: Sequence[int]) -> dict[int, float]:
    """The share of ranks below each k; the rank of a query without right keys is the number of keys."""
    several = hasattr(ks, "__len__") and not isinstance(ks, str)
    if not several or not len(ks) or any(not isinstance(k, Real) or not k >= 1 for k in ks):
        got, remedy = list(ks) if several else ks, "Recall at 1, 5 and 10 is usual: ks=[1, 5, 10]."
        raise invalid("ks", "be a list of numbers of at least 1", got, remedy)
    return {k: (rank < min(k, keys)).double().mean().item() for k in ks}


def _check_not_empty(**features: Tensor) -> None:
    for name, rows in features.items():
        if len(rows) == 0:
            raise invalid(name, "not be empty", "no rows", "There is nothing to measure.")
