"""A count may come from Python, NumPy or torch; what is true or false is no count, wherever one is asked for."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusal
from torch import Tensor, nn

from contrastile import ClipLoss, contrast, encode
from contrastile._dispatch import Options
from contrastile._errors import whole_number
from contrastile.evaluate.retrieval import topk
from contrastile.models.text import train_tokenizer
from contrastile.models.towers import Retriever


class Count:
    """Something that counts, of a library that nobody knows."""

    def __index__(self) -> int:
        return 4


FOUR = [4, np.int64(4), np.uint8(4), np.array(4), torch.tensor(4), torch.tensor(4, dtype=torch.int32), Count()]
NO_COUNTS = [True, np.True_, torch.tensor(True), 4.0, np.float32(4), torch.tensor(4.0), "4", [4], object()]


def named(value):
    """The same in every process: an object's own words may have its address."""
    return f"{type(value).__name__} {value}" if type(value).__repr__ is not object.__repr__ else type(value).__name__


@pytest.mark.parametrize("four", FOUR, ids=named)
def test_a_count_is_an_int_afterwards(four: Any) -> None:
    assert type(whole_number("n", four, 1, "Count.")) is int
    assert whole_number("n", four, 4, "Count.", most=4) == 4


@pytest.mark.parametrize("value", NO_COUNTS, ids=named)
def test_what_is_no_count_is_refused_as_it_is(value: Any) -> None:
    assert (
        refusal(whole_number, "n", value, 1, "Count.")
        == f"`n` must be a whole number of at least 1; got {value!r}. Count."
    )


def test_bounds_are_told_in_plain_numbers() -> None:
    with pytest.raises(ValueError, match=r"^`n` must be a whole number of at least 5; got 4\. Count\.$"):
        whole_number("n", np.int64(4), 5, "Count.")
    with pytest.raises(ValueError, match=r"^`n` must be few; got 4\. Count\.$"):
        whole_number("n", torch.tensor(4), 1, "Count.", rule="be few", most=3)


def _x() -> Tensor:
    return torch.randn(11, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("four", FOUR, ids=named)
def test_encode_takes_any(four: Any) -> None:
    seen: list[int] = []
    tower = nn.Linear(3, 2)
    tower.register_forward_hook(lambda _module, inputs, _out: seen.append(len(inputs[0])))
    encode(tower, _x(), sub_batch=four, retain=four).sum().backward()
    assert seen == [4, 4, 3]
    inputs = {"input": _x(), "attention_mask": torch.ones(11, 2)}
    seen.clear()
    encode(lambda input, attention_mask: tower(input), inputs, sub_batch_tokens=four)  # noqa: A006
    # two rows to look at it first
    assert seen == [2, 2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("value", NO_COUNTS, ids=named)
@pytest.mark.parametrize("name", ["sub_batch", "sub_batch_tokens", "retain"])
def test_encode_refuses_what_is_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^`{name}` must be a whole number of at least [01]; got "):
        encode(nn.Linear(3, 2), _x(), **{"sub_batch": 4, name: value})


@pytest.mark.parametrize("many", [2**21, np.int64(2**21), torch.tensor(2**21), 2.0**21], ids=named)
def test_a_workspace_takes_any(many: Any) -> None:
    assert type(Options(workspace=many).workspace) is int
    q = torch.nn.functional.normalize(torch.randn(5, 4), dim=-1)
    assert ClipLoss(workspace=many)(q, q, 2.0) == ClipLoss()(q, q, 2.0)


@pytest.mark.parametrize("value", [True, "1 GiB", 2**20 - 1, np.int64(5), float("inf"), float("nan")], ids=named)
def test_a_workspace_refuses_what_is_none(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^`workspace` must be a whole number of bytes, 1048576 at least; got .*\. Leave"
    ):
        Options(workspace=value)


@pytest.mark.parametrize("two", [2, np.int64(2), np.float32(2), np.float64(2), Fraction(2)], ids=named)
def test_a_scale_may_be_any_number_that_is_real(two: Any) -> None:
    q = torch.randn(5, 4)
    assert contrast(q, q, scale=two, bias=two) == contrast(q, q, scale=2.0, bias=2.0)
    assert contrast(q, q, scale=2.0, label_smoothing=np.float32(0.25)) == contrast(
        q, q, scale=2.0, label_smoothing=0.25
    )


def test_others_take_any_too() -> None:
    eye = torch.eye(3)
    assert torch.equal(topk(eye, eye, np.int64(2))[1], topk(eye, eye, 2)[1])
    with pytest.raises(ValueError, match=r"`k` must be between 1 and the 3 keys; got 2\.5\. Ask"):
        topk(eye, eye, 2.5)  # type: ignore[arg-type]
    tokenizer = train_tokenizer(["a b c"], size=np.int64(5), length=torch.tensor(4))
    assert type(tokenizer.length) is int
    retriever = Retriever.__new__(Retriever)
    nn.Module.__init__(retriever)
    retriever.normalise = False
    assert retriever.comparable(eye, np.int64(2)).shape == (3, 2)
    with pytest.raises(ValueError, match=r"`dimensions` must be between 1 and the 3 features; got True\. The"):
        retriever.comparable(eye, True)
