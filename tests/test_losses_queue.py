"""A queue of keys is a ring buffer, the same on every rank, and survives a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from further import unit
from problems import distance
from ranks import Pool
from refusals import refusal, unlike
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from contrastile import InfoNCELoss, KeyQueue
from contrastile.distributed.failure import state_of
from contrastile.losses.queue import NOBODY

SIZE, D = 7, 5
# keys that each rank pushes in a step, uneven, and one without any
SHARES = {1: [5], 3: [2, 0, 3]}


def _pushed(step: int) -> tuple[Tensor, Tensor]:
    return unit(5, D, seed=step), torch.arange(5) + 10 * step


def _after(steps: int) -> tuple[Tensor, Tensor]:
    """The last keys and their ids, oldest first."""
    pushed = [_pushed(step) for step in range(steps)]
    return tuple(torch.cat(each)[-SIZE:] for each in zip(*pushed, strict=True))  # type: ignore[return-value]


def _on_a_rank(rank: int, group: Any, steps: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    W = 1 if group is None else torch.distributed.get_world_size(group)
    queue = KeyQueue(SIZE, D, group=group, dtype=torch.float64)
    for step in range(steps):
        queue.push(*(x.split(SHARES[W])[rank] for x in _pushed(step)))
    query, ids = unit(5, D, seed=99).split(SHARES[W])[rank], torch.arange(23, 28).split(SHARES[W])[rank]
    key_ids = torch.cat([ids, queue.ids])
    loss = InfoNCELoss(group=group)(query, query, 5.0, negatives=queue.keys, query_ids=ids, key_ids=key_ids)
    return loss, queue.keys, queue.ids, queue.state_dict()


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("W", [1, 3])
def test_the_last_keys_of_all_ranks_are_held_once(pool: Pool, W: int, steps: int) -> None:
    answers = pool.run(_on_a_rank, W, steps) if W > 1 else [_on_a_rank(0, None, steps)]
    keys, ids = _after(steps) if steps else (torch.zeros(0, D).double(), torch.zeros(0).long())
    held = torch.cat([answer[2] for answer in answers])
    assert torch.equal(held.sort().values, ids.sort().values)
    assert torch.equal(torch.cat([answer[1] for answer in answers])[held.argsort()], keys[ids.argsort()])
    # every rank saves the same state
    for *_, state in answers:
        assert all(torch.equal(x, answers[0][3][name]) for name, x in state.items())
    query, own = unit(5, D, seed=99), torch.arange(23, 28)
    x = 5.0 * query @ torch.cat([query, keys]).T
    excluded = (own[:, None] == torch.cat([own, ids])) & ~torch.eye(5, 5 + len(ids), dtype=torch.bool)
    truth = torch.nn.functional.cross_entropy(x.masked_fill(excluded, -torch.inf), torch.arange(5))
    assert all(distance(loss, truth) <= 1e-12 for loss, *_ in answers)


def _sent_by_pushes(rank: int, group: Any) -> list[int]:
    queue, key, sent = KeyQueue(8, D, group=group), torch.ones(2, D), []
    for ids in (None, torch.tensor([rank, 7])):
        before = state_of(group).operations
        queue.push(key, ids)
        sent.append(state_of(group).operations - before)
    assert queue._ids.tolist() == [NOBODY] * 4 + [0, 7, 1, 7]
    return sent


def test_a_push_without_ids_sends_keys_alone(pool: Pool) -> None:
    """Beside the ranks' agreement."""
    # the first call of a group meets the ranks
    pool.run(_sent_by_pushes, 2)
    assert pool.run(_sent_by_pushes, 2) == [[2, 3]] * 2


def test_a_queue_goes_on_where_its_checkpoint_ends() -> None:
    first, second = KeyQueue(SIZE, D), KeyQueue(SIZE, D)
    assert repr(first) == f"KeyQueue({SIZE}, features={D})"
    for step in range(2):
        first.push(_pushed(step)[0])
    second.load_state_dict(first.state_dict())
    for queue in (first, second):
        queue.push(_pushed(2)[0])
    assert torch.equal(first.keys, second.keys)
    assert torch.equal(first.ids, second.ids)


def test_a_push_after_the_loss_changes_no_gradient() -> None:
    queue, (query, _) = KeyQueue(5, D, dtype=torch.float64), _pushed(0)
    queue.push(query)
    gradients = []
    for pushes in (False, True):
        leaf = query.clone().requires_grad_()
        loss = InfoNCELoss()(leaf, query, 5.0, negatives=queue.keys)
        if pushes:
            queue.push(_pushed(1)[0].requires_grad_())
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    assert torch.equal(*gradients)
    assert not queue.keys.requires_grad


SENTENCES: dict[str, Callable[[], Any]] = {
    "`size` must be a whole number of at least 1; got 0. Pass the number of keys to keep.": lambda: KeyQueue(0, D),
    "`features` must be a whole number of at least 1; got 0. Pass the size of a key.": lambda: KeyQueue(4, 0),
    "`key` must be a tensor [n, 5]; got shape [3, 4]. Pass the features of the keys.":
        lambda: KeyQueue(4, D).push(torch.ones(3, 4)),
    "`key` must be on the device of the queue; got meta and cpu. Move the queue with .to(device).":
        lambda: KeyQueue(4, D).push(torch.ones(3, D, device="meta")),
    "`key` must have at most 4 rows over all ranks, the size of the queue; got 5. Make the queue larger.":
        lambda: KeyQueue(4, D).push(torch.ones(5, D)),
    "`ids` must be integers of shape [3], one for each key; got shape [2], torch.int64. Or leave them out.":
        lambda: KeyQueue(4, D).push(torch.ones(3, D), torch.arange(2)),
    "`ids` must be integers of shape [1], one for each key; got list. Or leave them out.":
        lambda: KeyQueue(4, D).push(torch.ones(1, D), [7]),
    "`ids` must be integers of shape [1], one for each key; got shape [1], torch.complex64. Or leave them out.":
        lambda: KeyQueue(4, D).push(torch.ones(1, D), torch.ones(1, dtype=torch.complex64)),
    "`ids` must be integers of shape [1], one for each key; got shape [1], torch.bool. Or leave them out.":
        lambda: KeyQueue(4, D).push(torch.ones(1, D), torch.ones(1, dtype=torch.bool)),
    "`key` must be floating point; got torch.int64. Convert it with .float().":
        lambda: KeyQueue(4, D).push(torch.ones(1, D).long()),
    "`dtype` must be floating point; got torch.int64. Keys are features.": lambda: KeyQueue(4, D, dtype=torch.int64),
}  # fmt: skip


def test_pushes_compile_nothing_anew() -> None:
    torch._dynamo.reset()
    counter, loss = CompileCounterWithBackend("eager"), InfoNCELoss()
    queues = [KeyQueue(12, features=4) for _ in range(2)]

    def step(queue: KeyQueue, q: Tensor, k: Tensor) -> Tensor:
        value = loss(q, k, 2.0, negatives=queue.keys)
        queue.push(k)
        return value

    compiled = torch.compile(step, backend=counter)
    for _ in range(6):
        sides = torch.randn(2, 3, 4)
        assert distance(*(way(queue, *sides) for way, queue in zip((compiled, step), queues, strict=True))) <= 1e-6
    assert torch.equal(*(queue.keys for queue in queues))
    # the first for the queue without keys
    assert counter.frame_count == 2


def test_a_queue_fits_into_memory() -> None:
    with pytest.raises(
        ValueError, match=r"^`size` must make keys that fit into the .* GiB of this machine; got 1099511"
    ):
        KeyQueue(2**40, 768)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_sentence(sentence: str) -> None:
    assert refusal(SENTENCES[sentence]) == sentence


def _wrong(rank: int, group: Any) -> str:
    return refusal(KeyQueue(4, D, group=group).push, torch.ones(1, D + (rank == 1)))


def test_a_wrong_key_of_one_rank_is_an_error_on_all(pool: Pool) -> None:
    sentence = "`key` must be a tensor [n, 5]; got shape [1, 6]. Pass the features of the keys."
    assert all(sentence in answer for answer in pool.run(_wrong, 2))


def _alike(rank: int, group: Any, kind: str) -> str:
    dtype = torch.float64 if kind == "dtype" and rank == 1 else torch.float32
    queue, saved = KeyQueue(4, D, group=group, dtype=dtype), KeyQueue(4, D, group=group)
    saved.push(torch.ones(2, D))
    if kind == "keys" and rank == 1:
        queue.load_state_dict(saved.state_dict())
    return refusal(queue.push, torch.ones(1, D))


@pytest.mark.parametrize(
    "sentence",
    [unlike("dtype of the queue", "torch.float32", "torch.float64"), unlike("keys pushed before", 0, 4)],
)
def test_queues_that_differ_are_an_error_on_all_ranks(pool: Pool, sentence: str) -> None:
    assert pool.run(_alike, 2, sentence.split("`")[1].split()[0]) == [sentence] * 2


def _copied(rank: int, group: Any) -> list[Any]:
    held = torch.nn.ModuleList([InfoNCELoss(group=group), KeyQueue(4, D, group=group)])
    loss, queue = copied = deepcopy(held)
    key = unit(2, D, seed=rank).float()
    queue.push(key)
    assert len(held[1]) == 0
    # the copy of the copy holds its keys, and both meet the other rank
    return [copied[1].group is loss.options.group is group, loss(key, key, 5.0, negatives=deepcopy(queue).keys)]


def test_losses_and_queues_of_a_group_can_be_copied(pool: Pool) -> None:
    (shared, first), (also_shared, second) = pool.run(_copied, 2)
    assert shared
    assert also_shared
    assert first == second
    truth = torch.cat([unit(2, D, seed=rank) for rank in range(2)])
    x = 5.0 * truth @ torch.cat([truth, truth]).T
    assert distance(first, torch.nn.functional.cross_entropy(x, torch.arange(4))) <= 1e-6
