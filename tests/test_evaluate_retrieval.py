"""Recall and the best keys in tiles, against counts and sorts of the whole matrix."""

import pytest
import torch
from counted import Counted
from refusals import refusal

from contrastile.evaluate.retrieval import both_ways, chance, ranks, recall, topk


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    # so that the shapes below divide nothing
    monkeypatch.setattr("contrastile.evaluate.retrieval.ROWS", 7)
    monkeypatch.setattr("contrastile.evaluate.retrieval.COLUMNS", 5)


def oracle(query, key, query_ids, key_ids):
    """One query at a time: its best right key, and the wrong ones that score at least as high."""
    found = []
    for features, identity in zip(query, query_ids, strict=True):
        scored = [
            (float(features @ other), int(right) == int(identity)) for other, right in zip(key, key_ids, strict=True)
        ]
        best = max((score for score, right in scored if right), default=None)
        found.append(len(key) if best is None else sum(score >= best for score, right in scored if not right))
    return found


def ranks_of(query, key, query_ids, key_ids):
    return ranks(query, key, lambda rows, columns: query_ids[rows, None] == key_ids[columns]).tolist()


def whole_numbers(rows):
    return torch.randint(-2, 3, (rows, 3)).float()


def test_scores_of_few_keys_are_computed_once():
    with Counted() as counted:
        ranks_of(torch.randn(14, 3), torch.randn(5, 3), torch.arange(14), torch.arange(5))
    assert counted.multiplications == 14 * 5 * 3


@pytest.mark.parametrize("ids", [1, 3, 10, 100])
def test_recall_equals_a_count_on_the_whole_matrix_with_ties(ids):
    query, key = whole_numbers(16), whole_numbers(23)
    query_ids, key_ids = torch.randint(0, ids, (16,)), torch.randint(0, ids, (23,))
    expected = oracle(query, key, query_ids, key_ids)
    assert ranks_of(query, key, query_ids, key_ids) == expected
    for k, share in recall(query, key, query_ids, key_ids, ks=(1, 2, 5, 23)).items():
        assert share == pytest.approx(sum(rank < k for rank in expected) / 16)


def test_nan_scores_are_not_right():
    features = torch.full((4, 3), float("nan"))
    assert recall(features, torch.eye(4)[:, :3], torch.arange(4), torch.arange(4), ks=(1, 3)) == {1: 0.0, 3: 0.0}
    assert recall(torch.eye(4)[:, :3], features, torch.arange(4), torch.arange(4), ks=(1, 3)) == {1: 0.0, 3: 0.0}


def test_chance_is_the_recall_of_random_features():
    query_ids, key_ids = torch.randint(0, 6, (3000,)), torch.randint(0, 6, (11,))
    found = recall(torch.randn(3000, 11), torch.eye(11), query_ids, key_ids, ks=(1,))
    assert found[1] == pytest.approx(chance(query_ids, key_ids), abs=0.03)


def test_chance_of_one_right_key_is_one_over_keys():
    assert chance(torch.arange(8), torch.arange(8)) == 1 / 8


EYE, IDS = torch.eye(3), torch.arange(3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (torch.ones(3), EYE, IDS, IDS),
            "`query` must be floating-point features of shape [rows, D]; got torch.float32 of shape [3]. "
            "Encode the examples first.",
        ),
        (
            (EYE.numpy(), EYE, IDS, IDS),
            "`query` must be floating-point features of shape [rows, D]; got ndarray. Encode the examples first.",
        ),
        (
            (EYE, EYE, [0, 1, 2], IDS),
            "`query_ids` must be integers, one per row; got list for 3 rows. Give every row its id.",
        ),
        (
            (EYE, EYE.long(), IDS, IDS),
            "`key` must be floating-point features of shape [rows, D]; got torch.int64 of shape [3, 3]. "
            "Encode the examples first.",
        ),
        (
            (EYE, torch.ones(3, 4), IDS, IDS),
            "`key` must have the same feature size as `query`; got 4 and 3. Project one side first.",
        ),
        (
            (EYE, EYE.to("meta"), IDS, IDS),
            "`key` must be on the device of `query`; got meta and cpu. Move one of them.",
        ),
        (
            (EYE, EYE, IDS[:2], IDS),
            "`query_ids` must be integers, one per row; got torch.int64 of shape [2] for 3 rows. "
            "Give every row its id.",
        ),
        (
            (EYE, EYE, IDS, IDS.float()),
            "`key_ids` must be integers, one per row; got torch.float32 of shape [3] for 3 rows. "
            "Give every row its id.",
        ),
        ((EYE[:0], EYE, IDS[:0], IDS), "`query` must not be empty; got no rows. There is nothing to measure."),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, sentence):
    assert refusal(recall, *arguments) == sentence


def test_recall_at_zero_and_chance_of_no_queries_are_refused():
    sentence = "`ks` must be a list of numbers of at least 1; got {}. Recall at 1, 5 and 10 is usual: ks=[1, 5, 10]."
    assert refusal(recall, EYE, EYE, IDS, IDS, ks=[0]) == sentence.format([0])
    assert refusal(recall, EYE, EYE, IDS, IDS, ks=5) == sentence.format(5)
    assert refusal(recall, EYE, EYE, IDS, IDS, ks=["1"]) == sentence.format(["1"])
    assert refusal(recall, EYE, EYE, IDS, IDS, ks=[float("nan")]) == sentence.format(["nan"]).replace("'", "")
    assert "got <generator" in refusal(recall, EYE, EYE, IDS, IDS, ks=(k for k in (1, 5)))
    assert refusal(chance, IDS, IDS[:0]) == "`key_ids` must not be empty; got no rows. There is nothing to measure."
    assert refusal(chance, IDS[:0], IDS) == (
        "`query_ids` must not be empty; got no queries. There is nothing to measure."
    )


def test_a_query_without_a_right_key_is_not_answered():
    key = torch.eye(3)
    assert recall(key[:2], key, torch.tensor([0, 9]), torch.arange(3), ks=[1, 3, 10]) == {1: 0.5, 3: 0.5, 10: 0.5}
    assert both_ways(key, key[:1], torch.tensor([0]), ks=[5])["image_to_text_R@5"] == pytest.approx(1 / 3)


def best_of_all(query, key, k):
    ordered = (query.float() @ key.float().T).sort(dim=1, descending=True, stable=True)
    return ordered.values[:, :k], ordered.indices[:, :k]


@pytest.mark.parametrize("k", [1, 3, 6, 23])
def test_topk_equals_a_sort_of_the_whole_matrix(k):
    query, key = torch.randn(16, 4), torch.randn(23, 4)
    values, indices = topk(query, key, k)
    expected = best_of_all(query, key, k)
    assert torch.equal(indices, expected[1])
    torch.testing.assert_close(values, expected[0])


@pytest.mark.parametrize("k", [1, 4, 12])
def test_among_equal_scores_the_lower_index_comes_first(k):
    query = torch.randint(-1, 2, (30, 3)).float()
    key = torch.randint(-1, 2, (23, 3)).float()
    assert torch.equal(topk(query, key, k)[1], best_of_all(query, key, k)[1])


def test_nan_scores_come_last():
    key = -torch.ones(6, 3)
    key[0] = float("nan")
    assert topk(torch.ones(1, 3), key, 6)[1].tolist() == [[1, 2, 3, 4, 5, 0]]


def test_half_precision_features_are_compared_in_float32():
    query, key = torch.randn(9, 4).bfloat16(), torch.randn(23, 4).bfloat16()
    assert torch.equal(topk(query, key, 5)[1], best_of_all(query, key, 5)[1])


def test_no_queries_give_empty_results():
    values, indices = topk(torch.randn(0, 4), torch.randn(23, 4), 2)
    assert values.shape == indices.shape == (0, 2)


@pytest.mark.parametrize("k", [0, 24])
def test_a_k_outside_the_number_of_keys_is_refused(k):
    assert refusal(topk, torch.randn(2, 4), torch.randn(23, 4), k) == (
        f"`k` must be between 1 and the 23 keys; got {k}. Ask for fewer, or give more keys."
    )
