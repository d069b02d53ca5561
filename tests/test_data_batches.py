"""The order of the pairs: shuffled, complete, and the same when taken up again."""

from itertools import islice

import numpy as np
import pytest
import torch
from refusals import refusal

from contrastile.data.base import Batches

ROWS = np.arange(100, 110)


def drawn(sizes, **position):
    return list(Batches(ROWS, sizes=sizes, **{"seed": 0, **position}))


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
    whole, rest = drawn(sizes), drawn(sizes, step=step)
    assert len(rest) == len(sizes) - step
    assert all(torch.equal(a, b) for a, b in zip(whole[step:], rest, strict=True))


def test_the_position_is_known():
    batches = Batches(ROWS, sizes=[3, 4, 5], seed=0)
    list(islice(batches, 2))
    assert (batches.step, batches.examples) == (2, 7)


def test_sizes_may_be_decided_on_the_way():
    sizes: list[int] = []
    batches = Batches(ROWS, sizes=sizes, seed=0)
    sizes.append(4)
    first = next(batches)
    sizes.append(6)
    assert torch.equal(torch.cat([first, next(batches)]), torch.cat(drawn([4, 6])))


def test_no_rows_are_refused():
    assert refusal(Batches, ROWS[:0], sizes=[1], seed=0) == (
        "`rows` must not be empty; got no rows. Give the training split of a pair set."
    )


@pytest.mark.parametrize("step", [-1, 3])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError) as caught:
        Batches(ROWS, sizes=[1, 1], seed=0, step=step)
    sentence = f"`step` must be between 0 and the 2 steps of the run; got {step}. Start again from step 0."
    assert str(caught.value) == sentence
