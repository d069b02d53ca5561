"""A budget of tokens with every kind of mask: only positions that the encoder ignores are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import distance
from torch import Tensor, nn

from contrastile import encode

B, L, D = 13, 9, 6
LENGTHS = torch.randint(1, L + 1, (B,), generator=torch.Generator().manual_seed(3))


class Attention(nn.Module):
    """Attention with a large negative number at masked positions: a row without any token attends to all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(20, D), nn.Embedding(L, D)
        self.asks, self.answers = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.seen: list[tuple[int, ...]] = []
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        self.seen.append(tuple(input_ids.shape))
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        scores = self.asks(x) @ self.answers(x).mT
        x = scores.masked_fill(attention_mask[:, None] == 0, -1e30).softmax(-1) @ x
        at = ((attention_mask != 0) * torch.arange(x.shape[1])).amax(1)
        return {"first": x[:, 0], "last": x[torch.arange(len(x)), at], "tokens": x * (attention_mask != 0)[..., None]}


def _right() -> Tensor:
    return torch.arange(L) < LENGTHS[:, None]


def _some_without() -> Tensor:
    mask = _right()
    mask[[0, 5, B - 1]] = False
    return mask


MASKS: dict[str, Callable[[], Tensor]] = {
    "padding on the right": lambda: _right().long(),
    "bool": _right,
    "floating": lambda: _right().double(),
    "other numbers": lambda: _right().long() * 7,
    "padding on the left": lambda: _right().flip(1).long(),
    "holes": lambda: (torch.rand(B, L, generator=torch.Generator().manual_seed(4)) < 0.4).long(),
    "one token each": lambda: (torch.arange(L) < 1).expand(B, L).long(),
    "some without tokens": lambda: _some_without().long(),
    "all without tokens": lambda: torch.zeros(B, L, dtype=torch.long),
}


@pytest.mark.parametrize(("tokens", "how"), [(1, {}), (18, {"sub_batch": 4}), (40, {"retain": 2}), (10**6, {})])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_gives_the_features_of_the_whole_batch(name: str, tokens: int, how: dict[str, Any]) -> None:
    attention = Attention()
    texts = {"input_ids": torch.arange(B * L).view(B, L) % 20, "attention_mask": MASKS[name]()}
    weights = torch.linspace(1, 2, B, dtype=torch.float64)

    def value(found: dict[str, Tensor]) -> Tensor:
        return sum(((x.sin() * 2).flatten(1).sum(1) * weights).sum() for x in found.values())

    whole = attention(**texts)
    truth = torch.autograd.grad(value(whole), list(attention.parameters()))
    attention.seen.clear()
    parts = encode(attention, texts, sub_batch_tokens=tokens, **how)
    assert all(rows == 1 or rows * width <= tokens for rows, width in attention.seen)
    assert all(distance(parts[part].detach(), x.detach()) <= 1e-13 for part, x in whole.items())
    found = torch.autograd.grad(value(parts), list(attention.parameters()))
    assert all(distance(ours, theirs) <= 1e-12 for ours, theirs in zip(found, truth, strict=True))


def test_a_mask_that_is_added_to_scores_is_refused() -> None:
    """In such a mask 0 stands for text, and with padding on the left the text would be trimmed away."""
    added = torch.where(_right().flip(1), 0.0, -torch.inf)
    sentence = (
        r"^`attention_mask` must be 0 at padding and more at tokens; got numbers below 0\. Pass the tokenizer's mask, "
        r"and let the encoder make of it what it adds to its scores\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        encode(Attention(), {"input_ids": torch.zeros(B, L), "attention_mask": added}, sub_batch_tokens=8)


def test_inputs_without_rows_or_positions_are_encoded() -> None:
    attention = Attention()
    for shape in ((0, L), (0, 0), (3, 0)):
        texts = {"input_ids": torch.zeros(shape, dtype=torch.long), "attention_mask": torch.ones(shape)}
        tokens = encode(lambda input_ids, **_: attention.words(input_ids), texts, sub_batch_tokens=8)
        assert tokens.shape == (*shape, D)


class _Deaf(list[Any]):
    """A list that stays empty."""

    def append(self, _: Any) -> None:
        pass


def test_a_compiled_encoder_sees_few_lengths_and_the_rest_of_a_batch_as_written() -> None:
    torch._dynamo.reset()
    attention, shapes = Attention(), list[tuple[int, ...]]()
    texts = {"input_ids": torch.arange(B * L).view(B, L) % 20, "attention_mask": _right().long()}

    def look(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        shapes.append(next(tuple(x.shape) for x in inputs if x.dtype == torch.long))
        return graph

    def gradients() -> tuple[Tensor, ...]:
        features = encode(attention, texts, sub_batch=4, sub_batch_tokens=36)
        return torch.autograd.grad(features["last"].sin().sum(), list(attention.parameters()), allow_unused=True)

    truth = gradients()
    written = set(attention.seen)
    # a list that grows would be another one to the compiler at each call
    attention.seen = _Deaf()
    attention.compile(backend=look, dynamic=False)
    found = gradients()
    assert len(written) > 3
    # 13 texts in fours: the last one is computed as it is written
    assert sorted(shapes) == [(4, 8), (4, 9)]
    assert all(a is b is None or distance(a, b) <= 1e-12 for a, b in zip(found, truth, strict=True))
    torch._dynamo.reset()
