"""An encoder whose features of an example depend on the other examples is warned of in its first call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import encode

pytestmark = pytest.mark.mixing

B, D_IN, D, SUB = 23, 6, 4, 4
SENTENCE = (
    r"^`encoder` must treat examples one by one; got {}, whose features of an example depend on the rest of its "
    r"batch\. Look for means over the batch, or for attention along its axis \(batch_first=False\)\.$"
)


class Tower(nn.Module):
    """A linear layer, and an operation on its rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.runs = kind, 0, list[int]()
        self.linear, self.dropout, self.generator = (
            nn.Linear(D_IN, D),
            nn.Dropout(0.3),
            torch.Generator().manual_seed(1),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.runs.append(len(x))
        rows = self.linear(x)
        match self.kind:
            case "centred":
                return rows - rows.mean(0)
            case "normalised":
                return F.batch_norm(rows, None, None, training=True)
            case "attention along the batch":
                return F.scaled_dot_product_attention(rows, rows, rows)
            case "the wrong axis":
                # as many features as examples in a sub-batch
                return rows.mean(0)
            case "sums of examples before":
                return rows.cumsum(0)
            case "in eval mode":
                return rows if self.training else rows - rows.mean(0)
            case "dropout":
                return self.dropout(rows)
            case "centred, with dropout":
                return self.dropout(rows - rows.mean(0))
            case "its own generator":
                return rows * torch.rand(rows.shape, generator=self.generator).to(rows.dtype)
            case "counter":
                return rows * (1 + 0.1 * (self.calls % 7))
            case "no numbers":
                return rows * float("nan")
            case _:
                return rows


def _x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, D_IN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "centred",
        "normalised",
        "attention along the batch",
        "the wrong axis",
        "centred, with dropout",
        "sums of examples before",
    ],
)
def test_mixed_examples_are_warned_of_once(kind: str, dtype: torch.dtype) -> None:
    tower = Tower(kind).to(dtype)
    x = _x(dtype)[: 5 * SUB]
    with pytest.warns(UserWarning, match=SENTENCE.format("Tower")):
        encode(tower, x, sub_batch=SUB)
    encode(tower, x, sub_batch=SUB).sum().backward()


def test_functions_without_a_module_are_checked_too() -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(0)

    with torch.no_grad(), pytest.warns(UserWarning, match=SENTENCE.format(".*centred")):
        encode(centred, _x(), sub_batch=SUB)


def test_each_mode_is_checked() -> None:
    tower = Tower("in eval mode")
    encode(tower, _x(), sub_batch=SUB)
    with torch.no_grad(), pytest.warns(UserWarning, match=SENTENCE.format("Tower")):
        encode(tower.eval(), _x(), sub_batch=SUB)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["", "dropout", "its own generator", "no numbers"])
def test_examples_one_by_one_give_no_warning(kind: str, dtype: torch.dtype) -> None:
    encode(Tower(kind).to(dtype), _x(dtype), sub_batch=SUB).sum().backward()


def test_a_state_from_call_to_call_is_not_taken_for_mixing() -> None:
    features = encode(Tower("counter"), _x(), sub_batch=SUB)
    with pytest.warns(UserWarning, match="must give the same features in both passes"):
        features.sum().backward()


def test_transformers_and_texts_of_many_lengths_give_no_warning() -> None:
    class Trimming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            # to the longest text of its sub-batch, so that the shapes of the tokens differ
            length = int(attention_mask.sum(1).max())
            mask = attention_mask[:, :length].bool()
            return self.layer(self.embed(input_ids[:, :length]), src_key_padding_mask=~mask)[:, 0]

    lengths = torch.arange(B)[:, None] % 5 + 2
    mask = (torch.arange(7) < lengths).long()
    texts = {"input_ids": torch.arange(B * 7).view(B, 7) % 9, "attention_mask": mask}
    for size in ({"sub_batch": SUB}, {"sub_batch_tokens": 4 * 7}):
        encode(Trimming(), texts, **size).sum().backward()


def test_the_check_changes_no_random_number_and_no_gradient() -> None:
    tower = Tower("dropout")

    def step() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(2)
        tower.zero_grad()
        features = encode(tower, _x(), sub_batch=SUB)
        features.square().sum().backward()
        return features, tower.linear.weight.grad.clone(), torch.rand(3)

    for first, second in zip(step(), step(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("how", [{"sub_batch": 1}, {"sub_batch": B}, {"parts": [1, 2]}], ids=str)
def test_what_cannot_be_mixed_is_not_run_again(how: dict[str, Any]) -> None:
    tower = Tower("")
    if "parts" in how:
        encode(tower, parts=[_x()[:5], _x()[5:]])
    else:
        encode(tower, _x(), **how)
    assert sum(tower.runs) == B


def test_one_sub_batch_more_runs_in_the_first_call_only() -> None:
    tower = Tower("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for runs in (B + SUB, B):
            tower.runs.clear()
            encode(tower, _x(), sub_batch=SUB)
            assert sum(tower.runs) == runs
