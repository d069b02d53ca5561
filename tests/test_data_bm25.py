"""BM25: its words, its order against the formula, and negatives that are no answers."""

import math
import sys
from types import ModuleType

import numpy as np
import pytest

from contrastile.data.bm25 import BM25, with_mined_negatives, words
from contrastile.data.texts import Passage, Query, TextSet

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


def test_words_that_nobody_knows_score_nothing():
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
        Query("a", "zebra stripes", positives=(0,), answers=("Forty",)),
        Query("b", "zebra stripes", positives=(0,), negatives=(4,)),
        Query("c", "stripes unseen", positives=(5,)),
    ]
    splits = {"train": np.array([0, 1]), "held_out": np.array([2])}
    mined = with_mined_negatives(TextSet(passages, queries, splits), 2)
    assert mined.queries[0].negatives == (3, 4)
    assert mined.queries[1:] == queries[1:]


@pytest.mark.parametrize("imported", [False, True, None])
def test_jax_is_left_alone(monkeypatch, tmp_path, imported):
    """With its first call it takes three quarters of a GPU's memory."""
    calls = []
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    (tmp_path / "jax" / "lax.py").write_text("import sys\ndef top_k(*_):\n    sys.modules['asked'].append(1)\n")
    monkeypatch.setitem(sys.modules, "asked", calls)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("bm25s", "jax")]:
        monkeypatch.delitem(sys.modules, name)
    if imported is not False:
        # nothing: whoever wants to block a module says so
        monkeypatch.setitem(sys.modules, "jax", ModuleType("jax") if imported else None)
    before = {name: module for name, module in sys.modules.items() if name == "jax"}
    passages = [Passage(str(row), text) for row, text in enumerate(TEXTS)]
    _, rows = BM25(passages).search(["a dog sat"], 1)
    assert rows[0, 0] == 1
    assert not calls
    assert {name: module for name, module in sys.modules.items() if name == "jax"} == before
