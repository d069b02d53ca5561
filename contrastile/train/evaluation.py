"""Evaluation of towers: recall in both directions on every held-out part, zero-shot by prompts, handwritten digits.

`evaluate/` has the arithmetic; this file selects queries and keys. `transfer.py` evaluates on other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastile.data.digits import DIGIT_NAMES, handwritten_digits
from contrastile.data.pairs import Images, Indices, PairSet
from contrastile.evaluate.retrieval import chance, recall
from contrastile.evaluate.zeroshot import class_features
from contrastile.models.base import evaluating
from contrastile.train.log import progress
from contrastile.train.run import Run

Row = dict[str, Any]

KS = (1, 5, 10)
# pictures that are read and encoded at once
CHUNK = 2048
# the names of the held-out parts in tables
PARTS = {"faces": "held-out faces", "names": "held-out names", "held_out": "held-out pairs"}


@dataclass(frozen=True)
class Encoded:
    """Pictures or names of a pair set: their rows, features `[n, D]` and ids `[n]`. Of equal names the first row."""

    rows: Indices
    features: Tensor
    ids: Tensor


@dataclass(frozen=True)
class HeldOut:
    """Pictures and names of each held-out part, and the prompted names of the whole pair set as classes."""

    parts: dict[str, tuple[Encoded, Encoded]]
    classes: Encoded


def encode_held_out(run: Run, pairs: PairSet) -> HeldOut:
    """Encode the held-out pictures and every name."""
    parts = {}
    with evaluating(run.model):
        for name, rows in held_out(pairs).items():
            features = encode_pictures(run, pairs.images, rows, f"encoding {PARTS.get(name, name)}")
            parts[name] = Encoded(rows, features, ids_of(run, pairs, rows)), encode_names(run, pairs, rows)
        classes = encode_names(run, pairs, np.arange(len(pairs)), prompts=run.recipe.evaluate.prompts)
    return HeldOut(parts, classes)


def evaluate(run: Run, encoded: HeldOut) -> list[Row]:
    """Every test as a row: name, queries, choices, recall at `KS`, chance; a `headline` leads the report."""
    rows = []
    labelled = [(PARTS.get(name, name), *sides) for name, sides in encoded.parts.items()]
    for label, pictures, names in labelled:
        rows.append(_compare(f"{label}, picture → name", pictures, names, headline=True))
        rows.append(_compare(f"{label}, name → picture", names, pictures))
    rows += [_compare(f"{label}, zero-shot among all names", part, encoded.classes) for label, part, _ in labelled]
    glyphs = run.recipe.data.source == "glyphs"
    return [*rows, digits(run)] if glyphs and run.recipe.evaluate.digits else rows


def digits(run: Run) -> Row:
    """Zero-shot recognition of scanned handwritten digits by their names, unlike anything in the training data."""
    data = run.recipe.data
    pictures, labels = handwritten_digits(image_size=data.image_size, channels=data.channels)
    with evaluating(run.model):
        features = encode_pictures(run, pictures, np.arange(len(pictures)), "encoding handwritten digits")
        names = class_features(DIGIT_NAMES, encode=run.encode_text, prompts=run.recipe.evaluate.prompts)
    images = Encoded(np.arange(len(pictures)), features, torch.from_numpy(labels).to(run.device))
    classes = Encoded(np.arange(len(names)), names, torch.arange(len(names), device=run.device))
    return _compare("handwritten digits, zero-shot", images, classes, headline=True)


def probe(run: Run, pairs: PairSet) -> dict[str, dict[str, float]]:
    """Recall at 1 and 5 from picture to name, of a sample of each held-out part among all of its names."""
    recalls = {}
    with evaluating(run.model):
        for name, rows in held_out(pairs).items():
            sample = np.random.default_rng(0).permutation(rows)[: run.recipe.evaluate.probe]
            pictures = run.encode_image(torch.from_numpy(pairs.images[sample]))
            names = encode_names(run, pairs, rows)
            shares = recall(pictures, names.features, ids_of(run, pairs, sample), names.ids, ks=(1, 5))
            recalls[name] = {str(k): share for k, share in shares.items()}
    return recalls


def _compare(test: str, queries: Encoded, keys: Encoded, *, headline: bool = False) -> Row:
    """The row of one test."""
    counts = len(queries.ids), len(keys.ids)
    shares = recall(queries.features, keys.features, queries.ids, keys.ids, ks=ranks_below(counts[1]))
    guessed = chance(queries.ids, keys.ids, ks=(1,))[1]
    return result_row(test, counts, {str(k): share for k, share in shares.items()}, guessed, headline=headline)


def ranks_below(choices: int) -> tuple[int, ...]:
    """Those of `KS` at which recall is not trivially 1, and always 1."""
    return tuple(k for k in KS if k == 1 or k < choices)


def result_row(
    test: str, counts: tuple[int, int], shares: dict[str, float], guessed: float | None, *, headline: bool, **more: Any
) -> Row:
    """A test's row in evaluation.json; counts: queries and choices."""
    sizes = dict(zip(("queries", "choices"), counts, strict=True))
    return {"test": test, **sizes, "recall": shares, "chance": guessed, "headline": headline, **more}


def held_out(pairs: PairSet) -> dict[str, Indices]:
    """Every split of the pair set but the training's, if it has pairs."""
    return {name: rows for name, rows in pairs.splits.items() if name != "train" and len(rows)}


def encode_names(run: Run, pairs: PairSet, rows: Indices, prompts: Sequence[str] | None = None) -> Encoded:
    """Encode each distinct title of `rows`, alone or in `prompts`."""
    _, first = np.unique([pairs.captions[row] for row in rows], return_index=True)
    rows = rows[np.sort(first)]
    titles = [pairs.captions[row] for row in rows]
    encode = run.encode_text
    features = encode(titles) if prompts is None else class_features(titles, encode=encode, prompts=prompts)
    return Encoded(rows, features, ids_of(run, pairs, rows))


def encode_pictures(run: Run, images: Images, rows: Indices, label: str) -> Tensor:
    """Features of `images[rows]`, read in chunks, with a bar."""
    features = []
    with progress(len(rows), label, "pictures") as bar:
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            features.append(run.encode_image(torch.from_numpy(images[part])))
            bar.update(len(part))
    return torch.cat(features)


def ids_of(run: Run, pairs: PairSet, rows: Indices) -> Tensor:
    """The ids of `rows`, on the device of the features."""
    return torch.from_numpy(pairs.ids[rows]).to(run.device)
