"""The best keys of each query, against a plain stable sort of the whole matrix."""

import pytest
import torch

from contrastile.evaluate.top import top


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    # so that the shapes below divide nothing
    monkeypatch.setattr("contrastile.evaluate.scores.ROWS", 7)
    monkeypatch.setattr("contrastile.evaluate.scores.COLUMNS", 5)


def oracle(query, key, k):
    ordered = (query.float() @ key.float().T).sort(dim=1, descending=True, stable=True)
    return ordered.values[:, :k], ordered.indices[:, :k]


@pytest.mark.parametrize("k", [1, 3, 6, 23])
def test_as_a_sort_of_the_whole_matrix(k):
    query, key = torch.randn(16, 4), torch.randn(23, 4)
    values, indices = top(query, key, k)
    expected = oracle(query, key, k)
    assert torch.equal(indices, expected[1])
    torch.testing.assert_close(values, expected[0])


@pytest.mark.parametrize("k", [1, 4, 12])
def test_among_equal_scores_the_lower_index_comes_first(k):
    query = torch.randint(-1, 2, (30, 3)).float()
    key = torch.randint(-1, 2, (23, 3)).float()
    assert torch.equal(top(query, key, k)[1], oracle(query, key, k)[1])


def test_scores_that_are_no_numbers_come_last():
    key = -torch.ones(6, 3)
    key[0] = float("nan")
    assert top(torch.ones(1, 3), key, 6)[1].tolist() == [[1, 2, 3, 4, 5, 0]]


def test_half_precision_features_are_compared_in_float32():
    query, key = torch.randn(9, 4).bfloat16(), torch.randn(23, 4).bfloat16()
    assert torch.equal(top(query, key, 5)[1], oracle(query, key, 5)[1])


def test_no_queries_give_no_answers():
    values, indices = top(torch.randn(0, 4), torch.randn(23, 4), 2)
    assert values.shape == indices.shape == (0, 2)


@pytest.mark.parametrize("k", [0, 24])
def test_more_answers_than_keys_are_refused(k):
    with pytest.raises(ValueError) as caught:
        top(torch.randn(2, 4), torch.randn(23, 4), k)
    assert str(caught.value) == f"`k` must be between 1 and the 23 keys; got {k}. Ask for fewer, or give more keys."
