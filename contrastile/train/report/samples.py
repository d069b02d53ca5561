"""Samples of pictures and names: held-out pictures with their nearest names, and names with their nearest pictures.

Made from the features that `evaluation.py` has encoded, shown by `page.py`. Samples are plain JSON: a gallery has
`title`, `sentence`, `by_picture` (pictures are the queries) and `finds`; each of these a `query`, its `truth`, and
`answers`, the best first, with `shown`, `truth` and `right`.
"""

from __future__ import annotations

import base64
import io

import numpy as np

from contrastile.data.base import Images, Indices
from contrastile.data.pairs import PairSet
from contrastile.evaluate.retrieval import topk
from contrastile.train.evaluation import PARTS, Encoded, HeldOut
from contrastile.train.report.page import Samples

# queries shown of each held-out part, and answers shown to each query
PICTURES, NAMES, ANSWERS = 9, 6, 5
# the largest width of a picture in the page, in pixels, so that the file stays small
THUMBNAIL = 96
READS = "The right name in bold; below it the five nearest of all {:,} names, the best first. Right ones are marked."
FINDS = "Each name with the five nearest of {:,} pictures, the best first. Right ones are marked."


def picture_samples(pairs: PairSet, held_out: HeldOut) -> Samples:
    """Galleries in both directions for each held-out part. The queries are random, the same every time."""
    generator = np.random.default_rng(0)
    classes, galleries = held_out.classes, []
    for name, (pictures, names) in held_out.parts.items():
        sides = {
            True: (pictures, classes, PICTURES, "What it reads", READS.format(len(classes.rows))),
            False: (names, pictures, NAMES, "What it finds", FINDS.format(len(pictures.rows))),
        }
        for by_picture, (queries, keys, count, title, sentence) in sides.items():
            chosen = generator.permutation(len(queries.rows))[:count]
            finds = _finds(pairs, queries, keys, chosen, by_picture=by_picture)
            title = f"{title}: {PARTS.get(name, name)}"
            galleries.append({"title": title, "sentence": sentence, "by_picture": by_picture, "finds": finds})
    return galleries


def _finds(pairs: PairSet, queries: Encoded, keys: Encoded, chosen: Indices, *, by_picture: bool) -> Samples:
    """The nearest keys of the `chosen` queries. One side is shown as a picture, the other as a name."""

    def shown(row: int, *, as_picture: bool) -> str:
        return picture_address(pairs.images[row]) if as_picture else pairs.captions[row]

    _, best = topk(queries.features[chosen], keys.features, min(ANSWERS, len(keys.ids)))
    finds = []
    for index, nearest in zip(chosen.tolist(), best.tolist(), strict=True):
        right = (keys.ids[nearest] == queries.ids[index]).tolist()
        answers = [
            {"shown": shown(row, as_picture=not by_picture), "truth": pairs.captions[row], "right": is_right}
            for row, is_right in zip(keys.rows[nearest], right, strict=True)
        ]
        row = queries.rows[index]
        find = {"query": shown(row, as_picture=by_picture), "truth": pairs.captions[row], "answers": answers}
        finds.append(find)
    return finds


def picture_address(picture: Images) -> str:
    """A picture `[C, S, S]` uint8 as a data URL of a small PNG."""
    from PIL import Image

    image = Image.fromarray(picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0))
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
