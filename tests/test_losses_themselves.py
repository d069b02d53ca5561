"""Losses of examples among themselves, whose pairs with themselves do not count, and ranks without keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Pool
from refusals import refusal
from torch import Tensor

from contrastile import contrast
from contrastile.losses.base import PairLoss
from contrastile.losses.decoupled import Decoupled
from contrastile.losses.guided import Guided
from contrastile.losses.sigmoid import BalancedSigmoid, Sigmoid
from contrastile.losses.softmax import Softmax

# examples of each rank, and negatives that it brings: a rank without examples, and one without negatives
SHARES = [(4, 2), (0, 3), (5, 0)]
LOSSES = [Softmax(exclude_self=True), Decoupled(exclude_self=True), BalancedSigmoid(exclude_self=True)]


def _unit(n: int, seed: int, D: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, D, generator=generator, dtype=torch.float64), dim=-1)


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    N, H = (sum(each) for each in zip(*SHARES, strict=True))
    return _unit(N, 0), _unit(H, 1), torch.arange(N) % 3


def _on_a_rank(rank: int, group: Any, loss: PairLoss, exchange: Any) -> tuple[Tensor, Tensor, Tensor] | str:
    (n, h), (first, first_negative) = SHARES[rank], (sum(each) for each in zip((0, 0), *SHARES[:rank], strict=True))
    x, negatives, labels = _batch()
    x = x[first : first + n].requires_grad_()
    negatives = negatives[first_negative : first_negative + h].requires_grad_()
    labels = labels[first : first + n]
    given: Any = {"query_labels": labels, "key_labels": labels, "negatives": negatives}
    how: Any = {"loss": loss, "exchange": exchange, "group": group, "gradient": "sum", "scale": 4.0}
    if exchange == "replicate":
        return refusal(contrast, x, x, **given, **how)
    value = contrast(x, x, **given, **how)
    return value.detach(), *torch.autograd.grad(value, (x, negatives))


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("exchange", ["gather", "ring", "hierarchical"])
def test_an_example_leaves_its_own_pair_out_beside_the_negatives_of_other_ranks(
    pool: Pool, loss: PairLoss, exchange: str
) -> None:
    x, negatives, labels = _batch()
    leaves = x.requires_grad_(), negatives.requires_grad_()
    value = contrast(x, x, scale=4.0, loss=loss, negatives=negatives, query_labels=labels, key_labels=labels)
    gradients = torch.autograd.grad(value, leaves)
    found = pool.run(_on_a_rank, len(SHARES), loss, exchange)
    for each, *_ in found:
        torch.testing.assert_close(each, value.detach(), rtol=1e-12, atol=0)
    for whole, parts in zip(gradients, list(zip(*found, strict=True))[1:], strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-11, atol=1e-14)


def test_ranks_that_compute_all_pairs_refuse_further_keys(pool: Pool) -> None:
    sentence = (
        "`exchange` must meet the ranks' columns in turn for a loss of examples among themselves with further keys; "
        "got 'replicate'. Take gather or ring."
    )
    assert pool.run(_on_a_rank, len(SHARES), LOSSES[0], "replicate") == [sentence] * len(SHARES)


@pytest.mark.parametrize("one", [True, False], ids=["one tensor", "two"])
def test_an_example_is_not_among_its_own_balanced_positives(one: bool) -> None:
    x, labels = _unit(7, 2).requires_grad_(), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    # the last example has another label as a key
    keys = labels if one else torch.tensor([0, 0, 0, 1, 1, 2, 1])
    itself = torch.eye(7, dtype=torch.bool)
    positive = (labels[:, None] == keys) & ~itself
    logits = 5.0 * x @ x.T - 1.0
    counts = positive.sum(1, keepdim=True), positive.sum(0)
    v = sum(1 / n.clamp(min=1).double() for n in counts) / 2
    terms = F.softplus(torch.where(positive, -logits, logits)) * torch.where(positive, v, 1.0)
    plain = terms.masked_fill(itself, 0.0).sum() / 7
    loss = BalancedSigmoid(exclude_self=True)
    found = contrast(x, x, scale=5.0, bias=-1.0, loss=loss, query_labels=labels, key_labels=keys)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (found, plain)), rtol=1e-11, atol=1e-14)


def test_an_example_is_no_positive_that_a_guide_compares_with() -> None:
    x, guide = _unit(6, 3), _unit(6, 4, 3)
    others = torch.arange(6).roll(1)
    given: Any = {"scale": 5.0, "loss": Guided(exclude_self=True), "guide_q": guide, "guide_k": -guide}
    # with itself an example has the least similarity of all
    found = contrast(x, x, positives=torch.stack([torch.arange(6), others], 1), **given)
    assert torch.equal(found, contrast(x, x, positives=others, **given))
    assert not torch.equal(found, contrast(x, x, positives=others, **given | {"guide_k": guide}))


def test_positives_must_be_given_among_examples() -> None:
    sentence = (
        "`positives` must be given for the loss Sigmoid of examples among themselves; got None. Key i is query i "
        "itself, and no positive. Or pass labels."
    )
    assert refusal(contrast, _unit(4, 0), _unit(4, 1), scale=1.0, loss=Sigmoid(exclude_self=True)) == sentence


def test_each_example_must_be_among_the_keys() -> None:
    sentence = (
        "`k` must have a row for each of `q`, which is the same example; got 3 and 4. Leave out `exclude_self` of the "
        "loss Softmax."
    )
    q, k, loss = _unit(4, 0), _unit(3, 1), Softmax(exclude_self=True)
    negatives, positives = _unit(2, 2), torch.zeros(4, dtype=torch.int64)
    assert refusal(contrast, q, k, scale=1.0, loss=loss, positives=positives, negatives=negatives) == sentence


def _without_keys(rank: int, group: Any) -> tuple[Tensor, Tensor]:
    q, guide = (x.chunk(2)[rank].clone().requires_grad_() for x in (_unit(6, 0), _unit(6, 1)))
    k = (_unit(4, 2) if rank == 0 else _unit(0, 2)).requires_grad_()
    positives = torch.tensor([1, 0, 3]) if rank == 0 else torch.full((3,), -1)
    guide = guide.detach()
    value = contrast(
        q, k, scale=5.0, loss=Guided(), positives=positives, guide_q=guide, guide_k=k.detach(), group=group
    )
    return value.detach(), torch.autograd.grad(value, q)[0]


def test_a_rank_without_keys_has_a_guide(pool: Pool) -> None:
    """Its queries have no positive, and no loss."""
    first = _unit(6, 0).chunk(2)[0], _unit(6, 1).chunk(2)[0], _unit(4, 2)
    alone = contrast(
        first[0], first[2], scale=5.0, loss=Guided(), positives=torch.tensor([1, 0, 3]), guide_q=first[1],
        guide_k=first[2],
    )  # fmt: skip
    found = pool.run(_without_keys, 2)
    for value, _ in found:
        torch.testing.assert_close(value, alone, rtol=1e-12, atol=0)
    assert not found[1][1].any()
