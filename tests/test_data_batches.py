"""The order of the pairs: shuffled, complete, and the same when taken up again."""

import numpy as np
import pytest
import torch
from refusals import refusal

from contrastile.data.base import Batches

ROWS = np.arange(100, 110)


def drawn(sizes, **position):
    batches = Batches(ROWS, **{"seed": 0, **position})
    return [batches.take(size) for size in sizes]


def test_an_epoch_has_every_row_once_in_batches_of_the_sizes_given():
    batches = drawn([2, 7, 1])
    assert [len(batch) for batch in batches] == [2, 7, 1]
    assert all(batch.dtype == torch.int64 for batch in batches)
    assert sorted(torch.cat(batches).tolist()) == ROWS.tolist()


def test_a_batch_reaches_into_the_next_epoch():
    rows = torch.cat(drawn([7, 7, 6])).tolist()
    assert sorted(rows[:10]) == sorted(rows[10:]) == ROWS.tolist()


def test_a_batch_may_be_larger_than_the_set():
    (batch,) = drawn([25])
    assert sorted(np.bincount(batch.numpy() - 100).tolist()) == [2] * 5 + [3] * 5


def test_epochs_and_seeds_give_other_orders():
    first, second = drawn([10, 10])
    assert first.tolist() != second.tolist()
    assert first.tolist() != ROWS.tolist()
    assert torch.cat(drawn([10], seed=1)).tolist() != torch.cat(drawn([10], seed=2)).tolist()


@pytest.mark.parametrize("step", range(8))
def test_a_resumed_run_sees_the_same_pairs(step):
    sizes = [3, 3, 4, 4, 1, 25, 2]
    whole, rest = drawn(sizes), drawn(sizes[step:], examples=sum(sizes[:step]))
    assert all(torch.equal(a, b) for a, b in zip(whole[step:], rest, strict=True))


def test_the_position_is_known():
    batches = Batches(ROWS, seed=0)
    batches.take(3), batches.ahead(9), batches.take(4)
    assert batches.examples == 7


def test_no_rows_are_refused():
    assert refusal(Batches, ROWS[:0], seed=0) == (
        "`rows` must not be empty; got no rows. Give the training split of a pair set."
    )
