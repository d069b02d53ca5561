"""Samples of pictures and names: held-out pictures with their nearest names, and names with their nearest pictures.

Made from the features that `evaluation.py` has encoded, shown by `page.py`. Samples are plain JSON: a gallery has
`title`, `sentence`, `by_picture` (pictures are the queries) and `finds`; each of these a `query`, its `truth`, and
`answers`, the best first, with `shown`, `truth` and `right`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from contrastile.data.base import Images, Indices
from contrastile.data.pairs import PairSet
from contrastile.evaluate.retrieval import topk
from contrastile.train.evaluation import PARTS, HeldOut, Names, Part
from contrastile.train.report.page import Samples

# queries shown of each held-out part, and answers shown to each query
PICTURES, NAMES, ANSWERS = 9, 6, 5
# the largest width of a picture in the page, in pixels, so that the file stays small
THUMBNAIL = 96
READS = "The right name in bold; below it the five nearest of all {:,} names, the best first. Right ones are marked."
FINDS = "Each name with the five nearest of {:,} pictures, the best first. Right ones are marked."


@dataclass(frozen=True)
class _Side:
    """Queries or keys: features, ids, and functions that give a member's appearance on the page and its name."""

    features: Tensor
    ids: Tensor
    shown: Callable[[int], str]
    truth: Callable[[int], str]


def picture_samples(pairs: PairSet, held_out: HeldOut) -> list[dict[str, Any]]:
    """Galleries in both directions for each held-out part. The queries are random, the same every time."""
    lot = np.random.default_rng(0)
    all_names = _names(held_out.classes)
    galleries: Samples = []
    for part in held_out.parts:
        label = PARTS.get(part.name, part.name)
        pictures, names = _pictures(pairs, part), _names(part.names)
        galleries.append(
            {
                "title": f"What it reads: {label}",
                "sentence": READS.format(len(held_out.classes.texts)),
                "by_picture": True,
                "finds": _finds(pictures, all_names, lot.permutation(len(part.rows))[:PICTURES]),
            }
        )
        galleries.append(
            {
                "title": f"What it finds: {label}",
                "sentence": FINDS.format(len(part.rows)),
                "by_picture": False,
                "finds": _finds(names, pictures, lot.permutation(len(part.names.texts))[:NAMES]),
            }
        )
    return galleries


def _names(names: Names) -> _Side:
    return _Side(names.features, names.ids, names.texts.__getitem__, names.texts.__getitem__)


def _pictures(pairs: PairSet, part: Part) -> _Side:
    return _Side(
        part.features,
        part.ids,
        shown=lambda index: picture_address(pairs.images[part.rows[index]]),
        truth=lambda index: pairs.captions[part.rows[index]],
    )


def _finds(queries: _Side, keys: _Side, chosen: Indices) -> Samples:
    """The nearest keys of the `chosen` queries."""
    _, best = topk(queries.features[chosen], keys.features, min(ANSWERS, len(keys.ids)))
    finds = []
    for query, nearest in zip(chosen.tolist(), best.tolist(), strict=True):
        right = (keys.ids[nearest] == queries.ids[query]).tolist()
        answers = [
            {"shown": keys.shown(key), "truth": keys.truth(key), "right": is_right}
            for key, is_right in zip(nearest, right, strict=True)
        ]
        finds.append({"query": queries.shown(query), "truth": queries.truth(query), "answers": answers})
    return finds


def picture_address(picture: Images) -> str:
    """A picture `[C, S, S]` uint8 as a data URL of a small PNG."""
    from PIL import Image

    image = Image.fromarray(picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0))
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
