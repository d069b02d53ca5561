"""What a model is worth: recall both ways on every held-out part, zero-shot by prompts, handwritten digits.

After the steps, and in small (`probe`) between them. The arithmetic is `evaluate/`'s; here is decided what is compared
with what. The whole score matrix is never held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastile.data.digits import DIGIT_NAMES, handwritten_digits
from contrastile.data.pairs import Indices, PairSet, Pictures
from contrastile.evaluate.retrieval import chance, recall
from contrastile.evaluate.zeroshot import class_features
from contrastile.models.base import evaluating
from contrastile.train.checkpoint import Run
from contrastile.train.log import progress

Row = dict[str, Any]

KS = (1, 5, 10)
# pictures read and encoded between two moves of the bar
STRETCH = 2048
# how the held-out parts are called in tables
PARTS = {"faces": "held-out faces", "names": "held-out names", "held_out": "held-out pairs"}


@dataclass(frozen=True)
class Names:
    """Texts with their features `[m, D]` and their ids `[m]`; each text once."""

    texts: list[str]
    features: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Part:
    """A held-out part, encoded: its pictures by row of the pair set, and its names."""

    name: str
    rows: Indices
    features: Tensor
    ids: Tensor
    names: Names


@dataclass(frozen=True)
class Seen:
    """Everything that an evaluation encodes: the held-out parts, and all names of the pair set by the prompts."""

    parts: list[Part]
    classes: Names


def encode_held_out(run: Run, pairs: PairSet) -> Seen:
    """Encode the held-out pictures and every name, under one bar."""
    parts = []
    with evaluating(run.model):
        for name, rows in held_out(pairs).items():
            features = encode_pictures(run, pairs.images, rows, f"encoding {PARTS.get(name, name)}")
            names = encode_names(run, pairs, rows)
            parts.append(Part(name, rows, features, ids_of(run, pairs, rows), names))
        first = first_rows(pairs, np.arange(len(pairs)))
        texts = [pairs.titles[row] for row in first]
        prompted = class_features(texts, encode=run.encode_text, prompts=run.recipe.evaluate.prompts)
    return Seen(parts, Names(texts, prompted, ids_of(run, pairs, first)))


def evaluate(run: Run, seen: Seen) -> list[Row]:
    """Every test as a row: its name, queries, choices, recall at `KS`, chance; a `headline` leads the report."""
    rows = []
    for part in seen.parts:
        called = PARTS.get(part.name, part.name)
        pictures, names = (part.features, part.ids), (part.names.features, part.names.ids)
        rows.append(_row(f"{called}, picture → name", pictures, names, headline=True))
        rows.append(_row(f"{called}, name → picture", names, pictures))
    for part in seen.parts:
        pictures, names = (part.features, part.ids), (seen.classes.features, seen.classes.ids)
        rows.append(_row(f"{PARTS.get(part.name, part.name)}, zero-shot among all names", pictures, names))
    glyphs = run.recipe.data.source == "glyphs"
    return [*rows, digits(run)] if glyphs and run.recipe.evaluate.digits else rows


def digits(run: Run) -> Row:
    """Zero-shot recognition of handwritten digits by their names: real scans, unlike anything trained on."""
    data = run.recipe.data
    pictures, labels = handwritten_digits(image_size=data.image_size, channels=data.channels)
    with evaluating(run.model):
        features = encode_pictures(run, pictures, np.arange(len(pictures)), "encoding handwritten digits")
        names = class_features(DIGIT_NAMES, encode=run.encode_text, prompts=run.recipe.evaluate.prompts)
    ids = torch.from_numpy(labels).to(run.device), torch.arange(len(DIGIT_NAMES), device=run.device)
    return _row("handwritten digits, zero-shot", (features, ids[0]), (names, ids[1]), headline=True)


def probe(run: Run, pairs: PairSet) -> dict[str, dict[str, float]]:
    """Recall at 1 and 5 from picture to name, of a sample of each held-out part among all of its names."""
    recalls = {}
    with evaluating(run.model):
        for name, rows in held_out(pairs).items():
            sample = np.random.default_rng(0).permutation(rows)[: run.recipe.evaluate.probe]
            pictures = run.encode_image(torch.from_numpy(pairs.images[sample]))
            names = encode_names(run, pairs, rows)
            found = recall(pictures, names.features, ids_of(run, pairs, sample), names.ids, ks=(1, 5))
            recalls[name] = {str(k): share for k, share in found.items()}
    return recalls


def _row(test: str, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], *, headline: bool = False) -> Row:
    """One test: features and ids of the queries and of what they choose from."""
    found = recall(queries[0], keys[0], queries[1], keys[1], ks=tuple(k for k in KS if k == 1 or k < len(keys[0])))
    return {
        "test": test,
        "queries": len(queries[0]),
        "choices": len(keys[0]),
        "recall": {str(k): share for k, share in found.items()},
        "chance": chance(queries[1], keys[1], ks=(1,))[1],
        "headline": headline,
    }


def held_out(pairs: PairSet) -> dict[str, Indices]:
    """Every part of the pair set but the training's, where it has pairs."""
    return {name: rows for name, rows in pairs.splits.items() if name != "train" and len(rows)}


def first_rows(pairs: PairSet, rows: Indices) -> Indices:
    """The first of `rows` for each title, so that every title is there once."""
    _, first = np.unique([pairs.titles[row] for row in rows], return_index=True)
    return rows[np.sort(first)]


def encode_names(run: Run, pairs: PairSet, rows: Indices) -> Names:
    """Each title of `rows` once, encoded."""
    first = first_rows(pairs, rows)
    texts = [pairs.titles[row] for row in first]
    return Names(texts, run.encode_text(texts), ids_of(run, pairs, first))


def encode_pictures(run: Run, images: Pictures, rows: Indices, what: str) -> Tensor:
    """Features of `images[rows]`, read stretch by stretch, with a bar."""
    features = []
    with progress(len(rows), what, "pictures") as bar:
        for start in range(0, len(rows), STRETCH):
            part = rows[start : start + STRETCH]
            features.append(run.encode_image(torch.from_numpy(images[part])))
            bar.update(len(part))
    return torch.cat(features)


def ids_of(run: Run, pairs: PairSet, rows: Indices) -> Tensor:
    """The ids of `rows`, where the features are."""
    return torch.from_numpy(pairs.ids[rows]).to(run.device)
