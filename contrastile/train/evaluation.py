"""Evaluation of towers: recall in both directions on every held-out part, zero-shot by prompts, handwritten digits.

Run after the steps, and on samples (`probe`) between them. The arithmetic is that of `evaluate/`, which never holds the
whole score matrix; this file selects queries and keys. Other data are evaluated by `transfer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastile.data.base import Images, Indices
from contrastile.data.glyphs import DIGIT_NAMES, handwritten_digits
from contrastile.data.pairs import PairSet
from contrastile.evaluate.retrieval import chance, class_features, recall
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
class Names:
    """Distinct texts with features `[m, D]` and ids `[m]`."""

    texts: list[str]
    features: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Part:
    """An encoded held-out part: rows of the pair set, features and ids of their pictures, and their names."""

    name: str
    rows: Indices
    features: Tensor
    ids: Tensor
    names: Names


@dataclass(frozen=True)
class HeldOut:
    """The features of an evaluation: the held-out parts, and prompted names of the whole pair set as classes."""

    parts: list[Part]
    classes: Names


def encode_held_out(run: Run, pairs: PairSet) -> HeldOut:
    """Encode the held-out pictures and every name."""
    parts = []
    with evaluating(run.model):
        for name, rows in held_out(pairs).items():
            features = encode_pictures(run, pairs.images, rows, f"encoding {PARTS.get(name, name)}")
            names = encode_names(run, pairs, rows)
            parts.append(Part(name, rows, features, ids_of(run, pairs, rows), names))
        first = first_rows(pairs, np.arange(len(pairs)))
        texts = [pairs.captions[row] for row in first]
        prompted = class_features(texts, encode=run.encode_text, prompts=run.recipe.evaluate.prompts)
    return HeldOut(parts, Names(texts, prompted, ids_of(run, pairs, first)))


def evaluate(run: Run, encoded: HeldOut) -> list[Row]:
    """Every test as a row: name, queries, choices, recall at `KS`, chance; a `headline` leads the report."""
    rows = []
    classes = encoded.classes.features, encoded.classes.ids
    for part in encoded.parts:
        label = PARTS.get(part.name, part.name)
        pictures, names = (part.features, part.ids), (part.names.features, part.names.ids)
        rows.append(_compare(f"{label}, picture → name", pictures, names, headline=True))
        rows.append(_compare(f"{label}, name → picture", names, pictures))
    for part in encoded.parts:
        label = PARTS.get(part.name, part.name)
        rows.append(_compare(f"{label}, zero-shot among all names", (part.features, part.ids), classes))
    glyphs = run.recipe.data.source == "glyphs"
    return [*rows, digits(run)] if glyphs and run.recipe.evaluate.digits else rows


def digits(run: Run) -> Row:
    """Zero-shot recognition of scanned handwritten digits by their names, unlike anything in the training data."""
    data = run.recipe.data
    pictures, labels = handwritten_digits(image_size=data.image_size, channels=data.channels)
    with evaluating(run.model):
        features = encode_pictures(run, pictures, np.arange(len(pictures)), "encoding handwritten digits")
        names = class_features(DIGIT_NAMES, encode=run.encode_text, prompts=run.recipe.evaluate.prompts)
    ids = torch.from_numpy(labels).to(run.device), torch.arange(len(DIGIT_NAMES), device=run.device)
    return _compare("handwritten digits, zero-shot", (features, ids[0]), (names, ids[1]), headline=True)


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


def _compare(test: str, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], *, headline: bool = False) -> Row:
    """The row of one test: features and ids of queries and keys."""
    counts = len(queries[0]), len(keys[0])
    shares = recall(queries[0], keys[0], queries[1], keys[1], ks=ranks_below(counts[1]))
    guessed = chance(queries[1], keys[1], ks=(1,))[1]
    return result_row(test, counts, {str(k): share for k, share in shares.items()}, guessed, headline=headline)


def ranks_below(choices: int) -> tuple[int, ...]:
    """Those of `KS` at which recall is not trivially 1, and always 1."""
    return tuple(k for k in KS if k == 1 or k < choices)


def result_row(
    test: str, counts: tuple[int, int], shares: dict[str, float], guessed: float | None, *, headline: bool
) -> Row:
    """A test's row in evaluation.json; counts: queries and choices."""
    queries, choices = counts
    return {
        "test": test,
        "queries": queries,
        "choices": choices,
        "recall": shares,
        "chance": guessed,
        "headline": headline,
    }


def held_out(pairs: PairSet) -> dict[str, Indices]:
    """Every split of the pair set but the training's, if it has pairs."""
    return {name: rows for name, rows in pairs.splits.items() if name != "train" and len(rows)}


def first_rows(pairs: PairSet, rows: Indices) -> Indices:
    """The first of `rows` for each distinct title."""
    _, first = np.unique([pairs.captions[row] for row in rows], return_index=True)
    return rows[np.sort(first)]


def encode_names(run: Run, pairs: PairSet, rows: Indices) -> Names:
    """Encode each distinct title of `rows`."""
    first = first_rows(pairs, rows)
    texts = [pairs.captions[row] for row in first]
    return Names(texts, run.encode_text(texts), ids_of(run, pairs, first))


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
