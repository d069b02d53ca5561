"""A batch that is one sub-batch and retains its graph: plain autograd, with the checks of `encode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparison import same
from torch import Tensor, nn

from contrastile import Ragged, encode

B, L, D = 5, 4, 3


class Encoder(nn.Module):
    """A text encoder with dropout, and one parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.project, self.unused = nn.Embedding(9, D), nn.Linear(D, D), nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.double()

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return F.dropout(self.project(self.words(input_ids)), 0.3) * attention_mask[..., None]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        states = self.states(input_ids, attention_mask)
        return states.mean(1), self.scale, None, input_ids[:, 0]

    def packed(self, input_ids: Tensor, attention_mask: Tensor) -> Ragged:
        return Ragged.of(self.states(input_ids, attention_mask), attention_mask)


def inputs() -> dict[str, Tensor]:
    mask = torch.arange(L) < torch.tensor([4, 2, 3, 1, 4])[:, None]
    return {"input_ids": torch.randint(1, 9, (B, L)) * mask, "attention_mask": mask.long()}


def result(encoder: nn.Module, value: Callable[[], Any]) -> list[Any]:
    """Features, and the gradients of a function of them."""
    torch.manual_seed(3)
    leaves = value()
    leaves = [leaves.values, *leaves.lengths] if isinstance(leaves, Ragged) else list(leaves)
    total = sum((x.sin() * x).sum() for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
    gradients = torch.autograd.grad(total, list(encoder.parameters()), allow_unused=True)
    return [*(x.detach() if isinstance(x, Tensor) else x for x in leaves), *gradients]


WAYS: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "rows": lambda encoder, x: encode(encoder, x, sub_batch=B, retain=1),
    "more room than rows": lambda encoder, x: encode(encoder, x, sub_batch=9, retain=4),
    "a part": lambda encoder, x: encode(encoder, parts=[x], retain=1),
    "a part as a list": lambda encoder, x: encode(encoder, parts=iter([x]), retain=2),
}


@pytest.mark.parametrize("method", ["forward", "packed"])
@pytest.mark.parametrize("way", WAYS)
def test_features_and_gradients_are_those_of_the_encoder(way: str, method: str) -> None:
    encoder, x = Encoder(), inputs()
    plain = result(encoder, lambda: getattr(encoder, method)(**x))
    same(result(encoder, lambda: WAYS[way](getattr(encoder, method), x)), plain)


def test_sorted_texts_and_inputs_that_want_a_gradient() -> None:
    tower, mask = nn.Linear(D, D).double(), inputs()["attention_mask"]
    vectors = torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)

    def pooled(vectors: Tensor, attention_mask: Tensor) -> Tensor:
        return (tower(vectors).cos() * attention_mask[..., None]).sum(1)

    weights, found = torch.randn(B, D, dtype=torch.float64), []
    given = {"vectors": vectors, "attention_mask": mask}
    for features in (pooled(**given), encode(pooled, given, sub_batch=None, sub_batch_tokens=99, retain=1)):
        found.append(
            (features.detach(), torch.autograd.grad((weights * features).sum(), [vectors, *tower.parameters()]))
        )
    same(*found)


def test_features_may_be_written_over_and_differentiated_twice() -> None:
    encoder, x = nn.Sequential(nn.Linear(D, D), nn.Sigmoid()), torch.randn(B, D)
    truth = torch.autograd.grad((2 * encoder(x)).square().sum(), list(encoder.parameters()))
    features = encode(encoder, x, sub_batch=B, retain=1)
    # a sigmoid's backward reads its result
    features.mul_(2)
    first = torch.autograd.grad(features.square().sum(), list(encoder.parameters()), create_graph=True)
    same([g.detach() for g in first], list(truth), 1e-5)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), next(encoder.parameters()))
    assert second[0].abs().sum() > 0


class Faulty(nn.Module):
    """Does what the encoder of a gradient cache must not do."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.linear, self.fault = nn.Linear(D, D), fault
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        if self.fault in ("count", "input"):
            (self.count if self.fault == "count" else x).add_(1)
        features = self.linear(x)
        return None if self.fault == "nothing" else features[:3] if self.fault == "fewer" else features


REFUSED = {
    "must treat examples one by one; got BatchNorm1d in training mode": nn.BatchNorm1d(D),
    "must treat examples one by one; got Faulty, which changes a buffer": Faulty("count"),
    "must be left as it is by the encoder; got one of shape": Faulty("input"),
    "must return features; got nothing": Faulty("nothing"),
    "must return tensors whose first axis is the sub-batch of 5": Faulty("fewer"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals(sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        encode(REFUSED[sentence], torch.randn(B, D), sub_batch=B, retain=1)
