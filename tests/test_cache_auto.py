"""encode by tokens and with "auto": the same features and gradients, with the planned amount of work."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import Ragged, encode
from contrastile.gradcache import auto, forward, memory
from contrastile.gradcache.memory import AUTO, Releasable, RetainedGraphs, footprint, later_bytes, spare_bytes
from contrastile.offload import default_workspace

B, L, D = 29, 11, 6
LENGTHS = torch.randint(1, L + 1, (B,), generator=torch.Generator().manual_seed(5))


class Words(nn.Module):
    """A text tower on which padding has no influence, and which records the shape of every sub-batch."""

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
    """Compare features and gradients with those of the whole batch; return the shapes that were encoded."""
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
def test_sub_batches_stay_within_the_tokens_and_are_sorted_by_length(
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
    # padding costs nothing but in the first sub-batch
    assert widths[-1] < L
    assert sum(rows * width for rows, width in first) < 0.8 * B * L


def test_a_text_longer_than_the_budget_is_encoded_alone(words: Words, texts: dict[str, Tensor]) -> None:
    assert (1, L) in _compare(words, texts, sub_batch_tokens=3)


def test_tokens_need_a_mask(words: Words) -> None:
    with pytest.raises(
        ValueError,
        match=r"`sub_batch_tokens` must come with inputs that hold an attention_mask of shape \[batch, length\]; got T",
    ):
        encode(words, torch.zeros(3, 4), sub_batch_tokens=8)


def test_a_size_must_be_given(words: Words, texts: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="`sub_batch` must be given, or sub_batch_tokens; got None"):
        encode(words, texts)
    with pytest.raises(ValueError, match="`sub_batch_tokens` must be a whole number of at least 1; got 'auto'"):
        encode(words, texts, sub_batch_tokens="auto")  # type: ignore[arg-type]


def _rows(seen: list[tuple[int, ...]]) -> list[int]:
    return [rows for rows, _ in seen]


def test_with_room_for_all_nothing_is_encoded_twice(words: Words, texts: dict[str, Tensor]) -> None:
    assert _rows(_compare(words, texts, sub_batch=8, retain="auto")) == [8, 8, 8, 5]


@pytest.mark.parametrize(("graphs", "again"), [(0.5, [8, 8, 8, 5]), (1.5, [8, 8, 8, 5]), (3.2, [8, 8]), (5.5, [])])
def test_auto_retains_as_many_graphs_as_fit(
    words: Words, texts: dict[str, Tensor], monkeypatch: Any, graphs: float, again: list[int]
) -> None:
    held = {x.untyped_storage()._cdata for x in (*words.parameters(), *texts.values())}
    with memory.counting() as kept:
        graph = words(**{name: leaf[:8] for name, leaf in texts.items()})
    each = sum(size for storage, size in kept.items() if storage not in held)
    del graph
    monkeypatch.setattr(memory, "spare_bytes", lambda _: int(graphs * each) + 8)
    monkeypatch.setattr(forward, "later_bytes", lambda *_: 0)
    assert _rows(_compare(words, texts, sub_batch=8, retain="auto")) == [8, 8, 8, 5, *again]


class Adapted(nn.Module):
    """Wide frozen layers with small trained ones beside them, a table that all rows share, and how often it ran."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, width, bias=False) for _ in range(3))
        self.register_buffer("table", torch.randn(500, width))
        self.register_buffer("spread", torch.eye(width).to_sparse())
        self.double()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.sparse.mm(self.spread, (base(x) + up(down(x))).tanh().mT).mT * self.table[0]
        return x[:, :5]


@pytest.mark.parametrize("as_function", [False, True])
def test_frozen_weights_do_not_count_as_graph(as_function: bool, monkeypatch: Any) -> None:
    """Graphs refer to frozen weights and buffers, which are in memory once for all graphs."""
    torch.manual_seed(3)
    adapted, x = Adapted(), torch.randn(16, 64, dtype=torch.float64)
    encoder = (lambda rows: adapted(rows)) if as_function else adapted
    with memory.counting() as kept:
        graph = encoder(x[:4])
    everything = sum(kept.values())
    activations = sum(size for size in kept.values() if size <= 4 * 64 * 8)
    del graph
    # one graph with all that it refers to does not fit, four without do
    assert 6 * activations < everything
    monkeypatch.setattr(memory, "spare_bytes", lambda _: 6 * activations)
    monkeypatch.setattr(forward, "later_bytes", lambda *_: 0)
    adapted.runs = 0
    encode(encoder, x, sub_batch=4, retain="auto").sum().backward()
    # one more shows what is reached
    assert adapted.runs == 4 + 1


class Overwriting(nn.Module):
    """A layer that writes over what the backward of its relu needs, behind a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positive = self.trained(self.frozen(x)).relu()
        return positive.add_(1.0).square()


@pytest.mark.parametrize("retain", [0, 1, "auto"])
@pytest.mark.parametrize("sub_batch", [3, 6])
def test_a_graph_that_the_encoder_writes_over_is_an_error_as_in_plain_autograd(retain: Any, sub_batch: int) -> None:
    """The first graph of "auto", and those behind a frozen trunk, are measured by hooks."""
    encoder, x = Overwriting(), torch.randn(6, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        encoder(x).sum().backward()
    features = encode(encoder, x, sub_batch=sub_batch, retain=retain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        features.sum().backward()


def test_a_frozen_weight_that_changes_before_the_backward_of_its_graph_is_an_error() -> None:
    encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    features = encode(encoder, torch.randn(6, 4), sub_batch=6, retain="auto")
    with torch.no_grad():
        encoder[1].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        features.sum().backward()


class _Alive(torch.autograd.Function):
    """An operation that counts the living graphs of its kind when it builds another one."""

    tokens: list[weakref.ref[_Token]] = []  # noqa: RUF012
    found: list[int] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = _Token()
        _Alive.found.append(sum(token() is not None for token in _Alive.tokens))
        _Alive.tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("kind", ["attention in eval mode", "retained", "frozen part"])
def test_a_graph_that_is_not_kept_is_gone_before_the_next_sub_batch(kind: str) -> None:
    """In a first pass that builds and drops graphs, in one that only measures them, and in the second pass."""
    attention = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).train(kind != "attention in eval mode")
    if kind == "frozen part":
        # in the middle of the graph, which is too large to be kept
        attention.self_attn.requires_grad_(False)
    _Alive.tokens, _Alive.found = [], []
    features = encode(
        _Owned(attention, lambda x: attention(_Alive.apply(attention.norm1(x)).repeat(1, 9, 1)).mean(1)),
        {"x": torch.randn(15, 2, 6)}, sub_batch=4, retain=1 if kind == "retained" else 0,
    )  # fmt: skip
    features.sum().backward()
    assert set(_Alive.found) == {0}


@pytest.mark.parametrize("retain", ["auto", 0])
@pytest.mark.parametrize("fits", [0, 1, 3])
def test_graphs_behind_a_frozen_trunk_give_way(retain: Any, fits: int, caplog: Any) -> None:
    """They were kept without being asked for; if not even the first fits, trying ends."""
    torch.manual_seed(3)
    trunk, project = nn.Linear(6, 40).requires_grad_(False).double(), nn.Linear(40, 5).double()
    alive: list[Any] = []
    tries = 0

    def tight(x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal tries
        tries += 1
        assert tries < 30
        middle = trunk(x).tanh() * 1
        if torch.is_grad_enabled() and not backward and len(x) > 2:
            alive[:] = [node for node in alive if node() is not None]
            if len(alive) == fits:
                raise torch.OutOfMemoryError
            alive.append(weakref.ref(middle))
        # a graph is kept with its outputs
        return project(middle), middle

    x, backward = torch.randn(15, 6, dtype=torch.float64), True
    truth = torch.autograd.grad(tight(x)[0].sin().sum(), list(project.parameters()))
    backward = False
    features, _ = encode(tight, x, sub_batch=4, retain=retain)
    backward = True
    found = torch.autograd.grad(features.sin().sum(), list(project.parameters()))
    for ours, theirs in zip(found, truth, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    assert caplog.messages[-1] == f"encode: out of memory; {fits} of 4 sub-batches keep their graph"


def test_out_of_memory_frees_the_oldest_graphs_and_keeps_the_gradient(texts: dict[str, Tensor], caplog: Any) -> None:
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


class Backward(torch.autograd.Function):
    """An operation that runs out of memory in its next `left` backwards."""

    left = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Backward.left > 0:
            Backward.left -= 1
            raise torch.OutOfMemoryError
        return gradient


@pytest.mark.parametrize(("fails", "retain"), [(1, AUTO), (2, AUTO), (4, AUTO), (2, Releasable(4))])
def test_graphs_that_cannot_be_back_propagated_are_encoded_again(
    texts: dict[str, Tensor], caplog: Any, fails: int, retain: Any
) -> None:
    torch.manual_seed(3)
    words = Words(dropout=0.4).double()

    def tight(**inputs: Tensor) -> Any:
        return {name: Backward.apply(x) if x.requires_grad else x for name, x in words(**inputs).items()}

    torch.manual_seed(4)
    truth = _gradients(words, encode(words, texts, sub_batch=8))
    torch.manual_seed(4)
    features = encode(_Owned(words, tight), texts, sub_batch=8, retain=retain)
    words.seen.clear()
    Backward.left = fails
    found = _gradients(words, features)
    for ours, theirs in zip(found, truth, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    # the last sub-batch is the first to be back-propagated
    assert _rows(words.seen) == [8, 8, 8, 5][4 - fails :]
    assert caplog.text.count("encode: out of memory") == fails


def test_a_given_number_of_graphs_is_kept_or_the_step_fails(texts: dict[str, Tensor]) -> None:
    words = Words().double()

    def tight(**inputs: Tensor) -> Any:
        return {name: Backward.apply(x) if x.requires_grad else x for name, x in words(**inputs).items()}

    features = encode(_Owned(words, tight), texts, sub_batch=8, retain=4)
    Backward.left = 1
    with pytest.raises(torch.OutOfMemoryError):
        _gradients(words, features)


@pytest.mark.parametrize("when", ["first pass", "backward"])
def test_graphs_of_another_tower_give_way(texts: dict[str, Tensor], caplog: Any, when: str) -> None:
    """The second tower has no room, in its first pass or in its backward, until two of the first one's graphs go."""
    torch.manual_seed(3)
    first, second = Words().double(), Words().double()
    failures = 2

    def tight(**inputs: Tensor) -> Any:
        nonlocal failures
        if failures > 0 and (when == "first pass" or torch.is_grad_enabled()):
            failures -= 1
            raise torch.OutOfMemoryError
        return second(**inputs)

    def value(one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
        return (one["mean"] * other["mean"]).sum(1).cos().sum()

    both = [*first.parameters(), *second.parameters()]
    truth = torch.autograd.grad(value(first(**texts), second(**texts)), both)
    first.seen.clear()
    one = encode(first, texts, sub_batch=8, retain="auto")
    found = torch.autograd.grad(value(one, encode(_Owned(second, tight), texts, sub_batch=8)), both)
    for ours, theirs in zip(found, truth, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    assert _rows(first.seen) == [8, 8, 8, 5, 8, 8]
    assert "1 of 4 sub-batches keep" not in caplog.text
    assert "2 of 4 sub-batches keep their graph" in caplog.text


GIB = 2**30


def test_on_an_accelerator_all_graphs_that_fit_are_kept(monkeypatch: Any) -> None:
    """Two towers of 8 graphs, 108 GiB in all, on a device of 139.8 GiB with 137 free."""
    device, used = torch.device("cuda", 0), 0.0
    monkeypatch.setattr(memory, "free_memory", lambda _: (int((137 - used) * GIB), int(139.8 * GIB)))
    monkeypatch.setattr(memory, "allocated", lambda _: int(used * GIB))

    def kept(each: float, count: int) -> int:
        nonlocal used

        def graph() -> Any:
            nonlocal used
            used += each
            return [], []

        choice = RetainedGraphs("auto", count, device)
        choice.measured(0, graph, 1, lambda _: GIB)
        used += each * (count - choice.first - 1)
        return count - choice.first

    assert [kept(10.7, 8), kept(2.8, 8)] == [8, 8]
    # much larger batches: next to all of the memory, but for the margin, the workspace, and room beside
    used = 0.0
    assert 0 < kept(10.7, 500) < 500
    assert 0 < kept(2.8, 500) < 500
    assert 0.8 * 137 < used < (1 - memory.MARGIN) * 139.8 - 2.8
    # one graph that takes nearly all of it
    used = 0.0
    assert [kept(85.6, 1), kept(22.4, 1)] == [1, 1]


def test_weights_gathered_for_all_sub_batches_are_no_part_of_a_graph(monkeypatch: Any) -> None:
    """Graphs of 10 bytes beside weights of 400, on a device of 1,000 bytes."""
    weights = used = 0
    monkeypatch.setattr(memory, "free_memory", lambda _: (1000 - used, 1000))
    monkeypatch.setattr(memory, "allocated", lambda _: used)

    def graph() -> Any:
        nonlocal weights, used
        weights, used = 400, 410
        return [], []

    choice = RetainedGraphs("auto", 99, torch.device("cuda", 0))
    choice.measured(0, graph, 1, lambda _: 0, lambda: weights)
    # of 1,000 without weights, margin, workspace and one graph more
    assert 99 - choice.first == (1000 - 400 - 60 - 31 - 10) // 10


def test_spare_bytes_leave_a_margin(monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: (100_000, 128_000))
    assert spare_bytes(torch.device("cuda")) == 100_000 - 0.06 * 128_000 - 4_000
    # a loss takes 1/64 of a large memory
    assert [default_workspace(gib * 2**30) / 2**30 for gib in (32, 64, 80, 160, 192)] == [1, 2, 2.25, 2.5, 3]
    # others want a CPU's memory too
    assert spare_bytes(torch.device("cpu")) == spare_bytes(None) == int(0.6 * (100_000 - 12_800))
    monkeypatch.setattr(memory, "free_memory", lambda _: (1_000, 128_000))
    assert spare_bytes(torch.device("cuda")) == spare_bytes(None) == 0


def test_later_bytes_count_sums_features_and_gradients() -> None:
    half, whole = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(7))
    # running sum, a backward's own, and, where that is another type, what is handed over
    assert later_bytes([half], 0, (), 1) == 10 * (4 + 2 + 2)
    assert later_bytes([whole], 0, (), 1) == 7 * (4 + 4)
    assert later_bytes([], 11, (), 1) == 11
    # features, their gradient and the loss's accumulator, for the whole batch
    assert later_bytes([], 0, [torch.zeros(4, 5, requires_grad=True), torch.zeros(4), None], 2.5) == 50 * 3 * 4
    assert later_bytes([], 0, [torch.zeros(4, 5, dtype=torch.bfloat16, requires_grad=True)], 1) == 20 * (2 + 2 + 4)
    # vectors of tokens have normalised copies too
    tokens = torch.zeros(2, 2, 5, dtype=torch.bfloat16, requires_grad=True)
    assert later_bytes([], 0, [tokens], 1) == 20 * (2 + 2 + 4 + 4 * memory.TOKEN_TENSORS)


def test_packed_vectors_of_tokens_reserve_as_much_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, known, reserved = nn.Linear(4, 6), forward.later_bytes, list[int]()
    monkeypatch.setattr(forward, "later_bytes", lambda *given: reserved.append(known(*given)) or reserved[-1])

    def packed(x: Tensor) -> dict[str, Any]:
        return {"tokens": Ragged(layer(x).flatten(0, 1), [3] * len(x))}

    for encoder in (layer, packed):
        encode(encoder, torch.randn(5, 3, 4), sub_batch=2, retain="auto")
    assert reserved[0] == reserved[1] > 5 * 3 * 6 * 4 * memory.TOKEN_TENSORS


@pytest.mark.parametrize(("later", "left"), [(9, 89), (100, 79), (400, 49), (5000, 0)])
def test_a_later_call_releases_graphs_where_its_features_have_no_room(monkeypatch: Any, later: int, left: int) -> None:
    """Graphs of 10 bytes on a device of 1,000; 890 are taken, and 19 free beside margin and workspace."""
    used, device = 0, torch.device("cuda", 0)
    monkeypatch.setattr(memory, "_calls", weakref.WeakValueDictionary())
    monkeypatch.setattr(memory, "free_memory", lambda _: (1000 - used, 1000))
    monkeypatch.setattr(memory, "allocated", lambda _: used)

    def graph() -> Any:
        nonlocal used
        used += 10
        return [], []

    first, second = (RetainedGraphs("auto", 99, device, releasable=True) for _ in range(2))
    first[0] = first.measured(0, graph, 1, lambda _: 0)
    first.update(dict.fromkeys(range(first.first, 99), first[0]))
    del first[0]
    used = 10 * len(first)
    second.measured(0, graph, 1, lambda _: later)
    assert (len(first), 99 - second.first) == (left, 0)


def test_sub_batches_whose_graph_a_later_call_released_are_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    towers, x = [nn.Sequential(nn.Linear(8, 64), nn.Dropout(), nn.Linear(64, 4)) for _ in "ab"], torch.randn(32, 8)
    monkeypatch.setattr(memory, "_calls", weakref.WeakValueDictionary())

    def gradients(retain: Any, *spare: int) -> list[Tensor]:
        """The gradients of both towers, with so many bytes to spare at the first sub-batch of each."""
        left = iter(spare)
        monkeypatch.setattr(memory, "spare_bytes", lambda _: next(left))
        torch.manual_seed(0)
        first, second = (encode(tower, x, sub_batch=4, retain=retain) for tower in towers)
        counts.append([len(graphs) for _, graphs in sorted(memory._calls.items())])
        return list(torch.autograd.grad((first * second).sum(), [p for tower in towers for p in tower.parameters()]))

    counts: list[list[int]] = []
    truth = gradients(0)
    for spare in (10**9, 100):
        assert all(map(torch.allclose, gradients("auto", 10**9, spare), truth))
    (kept, _), (fewer, none) = counts[1:]
    assert (kept, none) == (8, 0)
    assert 0 < fewer < 8


def test_graphs_behind_a_frozen_trunk_stay_where_a_later_call_has_no_room(monkeypatch: Any) -> None:
    """They free little memory, and the trunk would run again."""
    device, graph = torch.device("cuda", 0), ([torch.zeros(1)], list[Any]())
    monkeypatch.setattr(memory, "_calls", weakref.WeakValueDictionary())
    monkeypatch.setattr(memory, "free_memory", lambda _: (10_000, 10_000))
    monkeypatch.setattr(memory, "allocated", lambda _: 0)
    trunk, first, second = (
        RetainedGraphs("auto", 9, device, frugal=frugal, releasable=True) for frugal in (True, False, False)
    )
    for graphs in (trunk, first):
        graphs.measured(0, lambda: graph, 1, lambda _: 0)
        graphs.update(dict.fromkeys(range(9), graph))
    second.measured(0, lambda: graph, 1, lambda _: 2**20)
    assert (len(trunk), len(first), 9 - second.first) == (9, 0, 0)


class _Owned(nn.Module):
    def __init__(self, inner: nn.Module, how: Any) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, **inputs: Tensor) -> Any:
        return self.how(**inputs)


def _gradients(words: Words, features: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(_value(features), list(words.parameters())))


def test_an_auto_sub_batch_is_measured_once(words: Words, texts: dict[str, Tensor], monkeypatch: Any) -> None:
    each = memory.bytes_per_example(lambda n: words(**{name: leaf[:n] for name, leaf in texts.items()}), 8)
    monkeypatch.setattr(auto, "spare_bytes", lambda _: int(7.5 * each * auto.BACKWARD))
    monkeypatch.setattr(auto, "later_bytes", lambda *_: 0)
    before = torch.get_rng_state()
    # two trials of what an example needs come first
    assert _rows(_compare(words, texts, sub_batch="auto"))[:7] == [8, 4, 7, 7, 7, 7, 1]
    assert torch.equal(torch.get_rng_state(), before)
    assert _rows(_compare(words, texts, sub_batch="auto"))[:5] == [7, 7, 7, 7, 1]


def test_a_batch_that_fits_whole_does_not_decide_for_a_larger_one(words: Words, texts: dict[str, Tensor]) -> None:
    few = {name: leaf[:10] for name, leaf in texts.items()}
    assert _seen(words, lambda: encode(words, few, sub_batch="auto")) == [8, 4, 10]
    assert _seen(words, lambda: encode(words, texts, sub_batch="auto")) == [8, 4, B]
    assert _seen(words, lambda: encode(words, few, sub_batch="auto")) == [10]


def test_an_auto_sub_batch_without_gradients_is_measured_once(
    words: Words, texts: dict[str, Tensor], monkeypatch: Any
) -> None:
    """Without a graph, the tensors that live at the same time show the bytes of an example."""
    for_one = {name: leaf[:1] for name, leaf in texts.items()}
    room = 20 * footprint(lambda: words(**for_one))
    monkeypatch.setattr(auto, "spare_bytes", lambda _: room)
    with torch.no_grad():
        first = _seen(words, lambda: encode(words, texts, sub_batch="auto"))
        again = _seen(words, lambda: encode(words, texts, sub_batch="auto"))
    assert first == [8, 4, *again]
    assert 1 < again[0] < 20


def _seen(words: Words, run: Any) -> list[int]:
    """The number of examples of every sub-batch that run() encodes."""
    words.seen.clear()
    run()
    return _rows(words.seen)


def test_a_size_without_a_graph_does_not_decide_for_one_with_it(monkeypatch: Any) -> None:
    """A frozen encoder of learned inputs, evaluated first and trained later."""
    frozen, x = nn.Linear(4, 3).requires_grad_(False), torch.randn(B, 4)
    rooms = iter([10**9, 0])
    monkeypatch.setattr(auto, "spare_bytes", lambda _: next(rooms))
    passes: list[int] = []
    frozen.register_forward_hook(lambda _, rows, __: passes.append(len(rows[0])))
    with torch.no_grad():
        encode(frozen, x, sub_batch="auto")
    assert passes[-1] == B
    encode(frozen, x.requires_grad_(), sub_batch="auto")
    assert passes[-1] == 1
    # both are known by now
    with torch.no_grad():
        encode(frozen, x, sub_batch="auto")
    assert passes[-1] == B


def test_each_method_and_each_set_of_trained_parameters_has_its_own_size(monkeypatch: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.image, self.text = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
            self.seen: list[int] = []

        def encode_image(self, x: Tensor) -> Tensor:
            self.seen.append(len(x))
            return self.image(self.trunk(x).tanh())

        def encode_text(self, x: Tensor) -> Tensor:
            self.seen.append(len(x))
            return self.text(self.trunk(x).tanh())

    two, x = Two(), torch.randn(B, D)
    two.trunk.requires_grad_(False)
    monkeypatch.setattr(auto, "largest_fitting", lambda *_: next(sizes))

    def encoded(encoder: Any) -> int:
        two.seen.clear()
        encode(encoder, x, sub_batch="auto")
        return max(two.seen)

    sizes = iter([9, 4, 6])
    for _ in range(2):
        assert encoded((two, "encode_image")) == 9
        assert encoded(two.encode_text) == 4
    assert encoded(partial(two.encode_image)) == 9
    two.trunk.requires_grad_()
    assert encoded((two, "encode_image")) == 6
    # functions that are made anew, but written once
    sizes = iter([3, 5])
    for _ in range(2):
        assert encoded(lambda rows: two.encode_image(rows)) == 3
        assert encoded(lambda rows: two.encode_text(rows)) == 5


@pytest.mark.parametrize(
    ("room", "first"),
    # where the trials run out of memory, where the step does, and where one example is all that fits
    [(3, [8, 4, 2, 1, 2]), (12, [8, 4, 29, 14, 7, 7]), (1, [8, 4, 2, 1, 1])],
)
def test_out_of_memory_halves_an_auto_sub_batch_for_good(
    texts: dict[str, Tensor], room: int, first: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    words = Words(dropout=0.3).double()
    encoder = _Owned(words, _Roomy(words, room))

    def gradients(**how: Any) -> list[Tensor]:
        torch.manual_seed(4)
        return _gradients(words, encode(encoder, texts, **how))

    with caplog.at_level("WARNING", logger="contrastile"):
        found = gradients(sub_batch="auto")
    sizes = [len(shape) for shape in encoder.how.asked]
    assert sizes[: len(first)] == first
    assert len(caplog.records) == sum(size > room for size in sizes)
    assert "out of memory" in caplog.text
    at_last = first[-1]
    for one, other in zip(found, gradients(sub_batch=at_last), strict=True):
        assert torch.equal(one, other)
    encoder.how.asked.clear()
    gradients(sub_batch="auto")
    assert max(len(shape) for shape in encoder.how.asked) == at_last


class _Roomy:
    """`words` with room for a number of texts; `asked` are the texts of each call."""

    def __init__(self, words: Words, room: int) -> None:
        self.words, self.room = words, room
        self.asked: list[Tensor] = []

    def __call__(self, **inputs: Tensor) -> Any:
        self.asked.append(inputs["input_ids"])
        if len(inputs["input_ids"]) > self.room:
            raise torch.OutOfMemoryError("no room")
        return self.words(**inputs)


def test_trials_of_a_size_call_no_parameter_hook(words: Words, texts: dict[str, Tensor], monkeypatch: Any) -> None:
    """Hooks get the gradient of the step, once."""
    monkeypatch.setattr(auto, "tries", lambda _: True)
    heard: list[Tensor] = []
    words.mix.weight.register_hook(heard.append)
    features = encode(words, texts, sub_batch="auto")
    assert not heard
    truth = _gradients(words, features)[1]
    assert len(heard) == 1
    assert torch.equal(heard[0], truth)


def test_a_given_size_is_used_or_the_step_fails(words: Words, texts: dict[str, Tensor]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        encode(_Owned(words, _Roomy(words, 3)), texts, sub_batch=4)


def test_a_rank_that_knows_the_size_searches_again_with_one_that_does_not() -> None:
    """Ranks may have seen other texts before; where encoding is a collective, one alone would wait for ever."""
    known, searched = {}, []
    # the other rank's answers in turn: minus its size, or 0 for unknown
    said: list[int] = []

    def size() -> int:
        most = lambda number: max(number, said.pop(0))  # noqa: E731
        return auto.agreed_size(known, "some", 40, lambda: searched.append(8) or 8, most)

    said += [0, -6]
    assert size() == 6
    assert len(searched) == 1
    # both know: the smaller
    said += [-7]
    assert size() == 7
    assert len(searched) == 1
    # the other one does not
    said += [0, -9]
    assert size() == 8
    assert len(searched) == 2
    # the other one has few examples, all of which it encodes at once
    said += [-auto.UNLIMITED]
    assert size() == 8
    assert not said


def test_a_rank_with_few_examples_accepts_any_size() -> None:
    said: list[int] = []
    assert auto.agreed_size({}, "some", 3, lambda: 3, lambda number: said.append(number) or number) == 3
    assert said == [0, -auto.UNLIMITED]


def test_measuring_a_graph_does_not_keep_it(words: Words, texts: dict[str, Tensor], monkeypatch: Any) -> None:
    """A saved tensor is often its own node's output: a reference to it would hold the graph in a cycle."""
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

    monkeypatch.setattr(memory, "spare_bytes", lambda device: 0)
    features = encode(lambda ids: Marked.apply(words.words(ids)).exp(), texts["input_ids"], sub_batch=8, retain="auto")
    assert len(tokens) > 0
    assert features.requires_grad
    assert not any(token() for token in tokens)


class _Token:
    pass
