"""What the model sees: held-out pictures with the names it finds, and names with the pictures it finds.

Made from what `evaluation.py` has encoded, shown by `report.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from contrastile.data.pairs import Indices, PairSet
from contrastile.evaluate.top import top
from contrastile.train.evaluation import PARTS, Names, Part, Seen
from contrastile.train.report import Answer, Find, Gallery, picture_address

# queries shown of each held-out part, and answers shown to each query
PICTURES, NAMES, ANSWERS = 9, 6, 5
READS = "In bold what it is; below the five nearest of all {:,} names, the best first. Right ones are marked."
FINDS = "For each name the five nearest of {:,} pictures, the best first. Right ones are marked."


@dataclass(frozen=True)
class Side:
    """What may be asked for or found: features, ids, how the report shows a member and what it says it is."""

    features: Tensor
    ids: Tensor
    shown: Callable[[int], str]
    truth: Callable[[int], str]


def galleries(pairs: PairSet, seen: Seen) -> list[Gallery]:
    """Both directions for each held-out part; the queries are drawn by lot, the same every time."""
    lot = np.random.default_rng(0)
    everything = _names(seen.classes)
    made = []
    for part in seen.parts:
        called = PARTS.get(part.name, part.name)
        pictures, names = _pictures(pairs, part), _names(part.names)
        made.append(
            Gallery(
                title=f"What it reads: {called}",
                sentence=READS.format(len(seen.classes.texts)),
                by_picture=True,
                finds=_finds(pictures, everything, lot.permutation(len(part.rows))[:PICTURES]),
            )
        )
        made.append(
            Gallery(
                title=f"What it finds: {called}",
                sentence=FINDS.format(len(part.rows)),
                by_picture=False,
                finds=_finds(names, pictures, lot.permutation(len(part.names.texts))[:NAMES]),
            )
        )
    return made


def _names(names: Names) -> Side:
    return Side(names.features, names.ids, names.texts.__getitem__, names.texts.__getitem__)


def _pictures(pairs: PairSet, part: Part) -> Side:
    return Side(
        part.features,
        part.ids,
        shown=lambda place: picture_address(pairs.images[part.rows[place]]),
        truth=lambda place: pairs.titles[part.rows[place]],
    )


def _finds(queries: Side, keys: Side, asked: Indices) -> list[Find]:
    """The best answers of `keys` to the members `asked` of `queries`."""
    _, best = top(queries.features[asked], keys.features, min(ANSWERS, len(keys.ids)))
    finds = []
    for query, found in zip(asked.tolist(), best.tolist(), strict=True):
        right = (keys.ids[found] == queries.ids[query]).tolist()
        answers = [Answer(keys.shown(key), keys.truth(key), hit) for key, hit in zip(found, right, strict=True)]
        finds.append(Find(queries.shown(query), queries.truth(query), answers))
    return finds
