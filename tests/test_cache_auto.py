"""encode cut by tokens, and where it decides for itself: same features, same gradients, the planned amount of work."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import encode, retention

B, L, D = 29, 11, 6
LENGTHS = torch.randint(1, L + 1, (B,), generator=torch.Generator().manual_seed(5))


class Words(nn.Module):
    """Padding has no influence; notes the shape of every sub-batch that it sees."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(50, D)
        self.mix = nn.Linear(D, D)
        self.dropout = dropout
        self.seen: list[tuple[int, ...]] = []
        self.room: int | None = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        self.seen.append(tuple(input_ids.shape))
        x = F.dropout(self.mix(self.words(input_ids)).tanh(), self.dropout) * attention_mask[..., None]
        return {"mean": x.sum(1) / attention_mask.sum(1, keepdim=True), "tokens": x, "mask": attention_mask.bool()}


@pytest.fixture
def words() -> Words:
    torch.manual_seed(3)
    return Words().double()


@pytest.fixture
def texts() -> dict[str, Tensor]:
    mask = (torch.arange(L) < LENGTHS[:, None]).long()
    return {
        "input_ids": torch.randint(0, 50, (B, L), generator=torch.Generator().manual_seed(6)),
        "attention_mask": mask,
    }


def _value(features: dict[str, Tensor]) -> Tensor:
    weights = torch.arange(1.0, B + 1, dtype=torch.float64)
    return (features["mean"].sum(1).sin() * weights).sum() + (features["tokens"].cos().sum((1, 2)) * weights).sum()


def _compare(words: Words, texts: dict[str, Tensor], **how: Any) -> list[tuple[int, ...]]:
    """Features and gradients against the whole batch at once; the shapes that were encoded."""
    whole = words(**texts)
    expected = torch.autograd.grad(_value(whole), list(words.parameters()))
    words.seen.clear()
    parts = encode(words, texts, **how)
    for name, value in whole.items():
        assert parts[name].shape == value.shape
        assert torch.equal(parts[name], value) if name == "mask" else torch.allclose(parts[name], value, rtol=1e-13)
    found = torch.autograd.grad(_value(parts), list(words.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    return words.seen


@pytest.mark.parametrize("how", [{}, {"retain": 2}, {"sub_batch": 3}, {"retain": "auto"}], ids=str)
def test_tokens_are_a_limit_and_texts_travel_by_length(
    words: Words, texts: dict[str, Tensor], how: dict[str, Any]
) -> None:
    seen = _compare(words, texts, sub_batch_tokens=40, **how)
    assert all(rows * width <= 40 and rows <= how.get("sub_batch", B) for rows, width in seen)
    first = seen[
        : len(seen) if how.get("retain") == "auto" else next(i for i in range(1, B) if sum(r for r, _ in seen[:i]) == B)
    ]
    assert sum(rows for rows, _ in first) == B
    widths = [width for _, width in first]
    assert widths == sorted(widths, reverse=True)
    # what the padding costs: nothing but in the first sub-batch
    assert widths[-1] < L
    assert sum(rows * width for rows, width in first) < 0.8 * B * L


def test_a_text_longer_than_the_budget_travels_alone(words: Words, texts: dict[str, Tensor]) -> None:
    assert (1, L) in _compare(words, texts, sub_batch_tokens=3)


def test_tokens_need_a_mask(words: Words) -> None:
    with pytest.raises(
        ValueError,
        match=r"`sub_batch_tokens` must come with inputs that hold an attention_mask of shape \[batch, length\]; got T",
    ):
        encode(words, torch.zeros(3, 4), sub_batch_tokens=8)


def test_something_must_be_said_about_the_size(words: Words, texts: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="`sub_batch` must be given, or sub_batch_tokens; got None"):
        encode(words, texts)
    with pytest.raises(ValueError, match="`sub_batch_tokens` must be a whole number of at least 1; got 'auto'"):
        encode(words, texts, sub_batch_tokens="auto")  # type: ignore[arg-type]


def _rows(seen: list[tuple[int, ...]]) -> list[int]:
    return [rows for rows, _ in seen]


def test_with_room_for_all_nothing_is_encoded_twice(words: Words, texts: dict[str, Tensor]) -> None:
    assert _rows(_compare(words, texts, sub_batch=8, retain="auto")) == [8, 8, 8, 5]


@pytest.mark.parametrize(("graphs", "again"), [(0.5, [8, 8, 8, 5]), (1.5, [8, 8, 8, 5]), (3.2, [8, 8]), (5.5, [])])
def test_auto_retains_what_fits(
    words: Words, texts: dict[str, Tensor], monkeypatch: Any, graphs: float, again: list[int]
) -> None:
    held = {x.untyped_storage().data_ptr() for x in (*words.parameters(), *texts.values())}
    with retention.counting() as kept:
        graph = words(**{name: leaf[:8] for name, leaf in texts.items()})
    each = sum(size for address, size in kept.items() if address not in held)
    del graph
    monkeypatch.setattr(retention, "spare_bytes", lambda _: int(graphs * each / retention.SHARE) + 8)
    assert _rows(_compare(words, texts, sub_batch=8, retain="auto")) == [8, 8, 8, 5, *again]


def test_out_of_memory_gives_the_oldest_graphs_up_and_loses_nothing(texts: dict[str, Tensor], caplog: Any) -> None:
    torch.manual_seed(3)
    words = Words(dropout=0.4).double()
    alive: list[Any] = []

    def tight(**inputs: Tensor) -> Any:
        # the third graph does not fit, until one of the first two is gone
        out = words(**inputs)
        if torch.is_grad_enabled() and out["mean"].requires_grad:
            alive[:] = [node for node in alive if node() is not None]
            if len(alive) == 2:
                raise torch.OutOfMemoryError
            alive.append(weakref.ref(out["tokens"]))
        return out

    torch.manual_seed(4)
    kept = _gradients(words, encode(words, texts, sub_batch=8))
    after = torch.get_rng_state()
    torch.manual_seed(4)
    features = encode(_Owned(words, tight), texts, sub_batch=8, retain="auto")
    found = _gradients(words, features)
    assert torch.equal(torch.get_rng_state(), after)
    for ours, theirs in zip(found, kept, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    assert "encode: out of memory; 2 of 4 sub-batches keep their graph" in caplog.text


class _Owned(nn.Module):
    def __init__(self, inner: nn.Module, how: Any) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, **inputs: Tensor) -> Any:
        return self.how(**inputs)


def _gradients(words: Words, features: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(_value(features), list(words.parameters())))


def test_auto_sub_batch_is_what_fits_and_is_found_once(
    words: Words, texts: dict[str, Tensor], monkeypatch: Any
) -> None:
    each = retention.bytes_per_example(lambda n: words(**{name: leaf[:n] for name, leaf in texts.items()}), 8)
    monkeypatch.setattr(retention, "spare_bytes", lambda _: int(7.5 * each * retention.BACKWARD / retention.SHARE))
    before = torch.get_rng_state()
    # two trials of what an example needs come first
    assert _rows(_compare(words, texts, sub_batch="auto"))[:7] == [8, 4, 7, 7, 7, 7, 1]
    assert torch.equal(torch.get_rng_state(), before)
    assert _rows(_compare(words, texts, sub_batch="auto"))[:5] == [7, 7, 7, 7, 1]


def test_weighing_a_graph_does_not_keep_it(words: Words, texts: dict[str, Tensor], monkeypatch: Any) -> None:
    """What is saved is often its own node's output: holding it as it comes would hold the graph in a cycle."""
    tokens: list[weakref.ref[_Token]] = []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = _Token()
            tokens.append(weakref.ref(ctx.token))
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    monkeypatch.setattr(retention, "spare_bytes", lambda device: 0)
    features = encode(lambda ids: Marked.apply(words.words(ids)).exp(), texts["input_ids"], sub_batch=8, retain="auto")
    assert len(tokens) > 0
    assert features.requires_grad
    assert not any(token() for token in tokens)


class _Token:
    pass
