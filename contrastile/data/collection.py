"""Source: a collection too large to be decoded beforehand. Images are decoded when a batch needs them.

Stands between the index (`index.py`), the `Stream` that reads by it, and the registry. The held-out pairs are few and
lie decoded in the cache; the training pairs are read by their row in the index. So `batches.py` alone decides the
order, on any number of ranks and workers, and a run resumes in the middle of an epoch at no cost.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from io import BytesIO

import numpy as np
import numpy.typing as npt

from contrastile._errors import invalid
from contrastile.data.base import Indices, ProgressFactory, joined_ids
from contrastile.data.images import decode
from contrastile.data.index import Index, open_index
from contrastile.data.pairs import ImageWriter, Labels, PairOptions, PairSet, cached_pairs
from contrastile.data.shards import manifest_state, state
from contrastile.data.skipped import Skipped, check_bad, counted
from contrastile.data.sources import read_source
from contrastile.data.stream import Stream

FORMAT = 1
# the most pairs that are held out, whatever the share: they are decoded beforehand and compared with each other
MOST_HELD_OUT = 10_000

# remedies for a source that gives too few pairs
NO_PAIRS = "Name a folder with pictures below it, or shards of pairs, as shards/{000..099}.tar."
ONE_CAPTION = "One is to be held out. In a folder a picture's title is the .txt beside it, or its folder's name."


def open_collection(source: str, options: PairOptions) -> PairSet:
    """The pairs of a collection: held-out pairs as rows of the set, training pairs in its stream.

    A pair of source `i` comes `weights[i]` times an epoch; once without weights. Training rows are numbered from the
    number of held-out pairs on. Pairs that share a caption share an id and lie on the same side of the split.
    """
    sources, weights = read_source(source), options.weights
    if weights and len(weights) != len(sources):
        raise invalid("weights", f"be one for each of the {len(sources)} sources", len(weights), "Or leave them out.")
    digest = hashlib.sha256(json.dumps([FORMAT, *map(state, sources)]).encode()).hexdigest()
    manifests = [line for one in sources for line in manifest_state(one)]
    name = hashlib.sha256(json.dumps([digest, manifests]).encode()).hexdigest() if manifests else digest
    cache = options.cache
    index = open_index(cache / f"index-{name[:16]}", sources, cache / "unpacked", options.progress)
    check_bad(index.skipped, len(index) + sum(index.skipped.values()), options.most_bad)
    if len(np.unique(index.fractions)) < 2:
        unread = f" and skipped {counted(index.skipped)}" if index.skipped else ""
        got = f'{len(index)} pairs in "{source}"{unread}'
        remedy = ONE_CAPTION if len(index) else NO_PAIRS
        raise invalid("source", "hold at least two pairs that differ in their titles", got, remedy)
    held_out = _held_out(index, options.held_out)
    settings = {"format": FORMAT, "index": digest, "held_out": options.held_out, "channels": options.channels}
    make = partial(_decode_held_out, index, np.flatnonzero(held_out), options.progress)
    pairs = cached_pairs(cache, "held-out", settings, shape=options.shape, make=make)
    check_bad(pairs.skipped, int(held_out.sum()), options.most_bad, of=len(index))
    source_of_pair = np.repeat(np.arange(len(sources)), index.parts)
    times = np.asarray(weights or [1] * len(sources))[source_of_pair] * ~held_out
    rows = np.repeat(np.arange(len(index)), times)
    stream = Stream(index, rows, shape=options.shape, most_bad=options.most_bad, digest=digest)
    skipped = Counter(index.skipped) + Counter(pairs.skipped)
    training = np.arange(len(pairs), len(pairs) + len(stream))
    return replace(pairs, splits={**pairs.splits, "train": training}, skipped=dict(skipped), stream=stream)


def _decode_held_out(index: Index, rows: Indices, progress: ProgressFactory, writer: ImageWriter) -> Labels:
    captions, skipped = [], Counter[str]()
    with progress(len(rows), "reading the held-out pictures", "pictures") as bar:
        for row in rows.tolist():
            try:
                writer.add(decode(BytesIO(index.origin(row, 0).read()), writer.shape))
                captions.append(index.caption(row))
            except Skipped as reason:
                skipped[str(reason)] += 1
            bar.update(1)
    return captions, joined_ids(captions), {"held_out": np.arange(len(captions))}, dict(skipped)


def _held_out(index: Index, share: float) -> npt.NDArray[np.bool_]:
    """Pairs with the smallest hash fractions: the share, at most `MOST_HELD_OUT`, and never none or all of them."""
    distinct = np.unique(index.fractions)
    most = np.sort(index.fractions)[min(MOST_HELD_OUT, len(index) - 1)]
    bound = min(max(min(share, most), distinct[1]), distinct[-1])
    return index.fractions < bound
