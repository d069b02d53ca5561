"""BM25: its words, its order against the formula, and negatives that are no answers."""

import math
import os

import numpy as np
import pytest

from contrastile.data.texts import BM25, Passage, Query, TextSet, with_mined_negatives, words

TEXTS = ["the cat sat on the mat", "a dog sat", "cats and dogs", "the mat of the dog", "nothing here"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("snake_case_name", ["snake", "case", "name"]),
        ("getHTTPResponse2", ["get", "http", "response", "2"]),
        ("Größe naïve", ["größe", "naïve"]),
        ("__init__(self, **kw)", ["init", "self", "kw"]),
        ("日本語 text", ["日本語", "text"]),
        ("", []),
    ],
)
def test_words_of_code_and_of_language(text, expected):
    assert words(text) == expected


def formula(query, passage, k1=1.5, b=0.75):
    """Lucene's BM25: Σ idf · tf / (tf + k1 · (1 − b + b · length / mean length))."""
    documents = [words(text) for text in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    total = 0.0
    for word in words(query):
        having = sum(word in document for document in documents)
        times = documents[passage].count(word)
        idf = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
        total += idf * times / (times + k1 * (1 - b + b * len(documents[passage]) / mean))
    return total


def test_scores_are_the_formulas():
    scores, rows = BM25([Passage(str(n), text) for n, text in enumerate(TEXTS)]).search(["cat on the mat", "dog"], 5)
    for query, best, found in zip(["cat on the mat", "dog"], scores, rows, strict=True):
        np.testing.assert_allclose(best, [formula(query, row) for row in found], rtol=1e-5)
        assert sorted(found) == [0, 1, 2, 3, 4]
        assert (np.diff(best) <= 0).all()


def test_unknown_words_score_nothing():
    scores, rows = BM25([Passage(str(n), text) for n, text in enumerate(TEXTS)]).search(["zzz", ""], 2)
    assert scores.tolist() == [[0, 0], [0, 0]]
    assert rows.shape == (2, 2)


def test_titles_count():
    _, rows = BM25([Passage("0", "body"), Passage("1", "body", title="zebra")]).search(["zebra"], 1)
    assert rows.tolist() == [[1]]


def test_negatives_are_no_positives_no_twins_and_hold_no_answer():
    passages = [
        Passage("0", "zebra stripes black"),
        Passage("1", "zebra stripes black", title="twin"),
        Passage("2", "zebra stripes are forty"),
        Passage("3", "zebra"),
        Passage("4", "horse"),
        Passage("5", "zebra stripes unseen"),
    ]
    queries = [
        Query("a", "zebra stripes", positives=(0,), answers=("Forty", "", " ")),
        Query("b", "zebra stripes", positives=(0,), negatives=(4,)),
        Query("c", "stripes unseen", positives=(5,)),
    ]
    splits = {"train": np.array([0, 1]), "held_out": np.array([2])}
    mined = with_mined_negatives(TextSet(passages, queries, splits), 2)
    assert mined.queries[0].negatives == (3, 4)
    assert mined.queries[1:] == queries[1:]


@pytest.mark.parametrize("chosen", [None, "true"])
def test_jax_takes_no_memory_of_a_gpu_beforehand(monkeypatch, chosen):
    """bm25s calls jax where it is installed, which takes three quarters of a GPU's memory unless told otherwise."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setenv(name, chosen or "")
    if chosen is None:
        monkeypatch.delenv(name)
    BM25([Passage(str(row), text) for row, text in enumerate(TEXTS)])
    assert os.environ[name] == (chosen or "false")
