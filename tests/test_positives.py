"""Positives by index: reads of them, and the result of one out of range that the host does not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from contrastile import GISTLoss, InfoNCELoss, NTXentLoss, SupConLoss
from contrastile.engine import arguments as checks
from contrastile.engine.arguments import MOST_READS
from contrastile.modules import views

OUT_OF_RANGE = "`positives` must index this rank's 7 keys, or be -1; got 7"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's tensors are taken for a GPU's, in a process that has read none yet."""
    monkeypatch.setattr(checks, "on_gpu", lambda x: True)
    monkeypatch.setattr(checks, "captured", lambda *x: False)
    monkeypatch.setattr(checks, "_gpu_reads", checks.GpuReads())


class _Read(TorchDispatchMode):
    """Counts the whole numbers that the host reads of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and not args[0].is_floating_point():
            # truth values are asked for only where it costs nothing: the eager tiles on a CPU
            self.count += args[0].dtype != torch.bool
        return function(*args, **kwargs or {})


def _reads(call: Callable[[], object]) -> int:
    with _Read() as read:
        call()
    return read.count


def _leaves(n: int = 5) -> list[Tensor]:
    return [torch.randn(n, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True), torch.tensor([2.0])]


def test_a_loss_that_makes_its_positives_reads_none() -> None:
    a, b = F.normalize(torch.randn(2, 6, 4), dim=-1)
    assert _reads(lambda: NTXentLoss()(a, b, 2.0)) == 0
    # so that a count of 0 says something
    q, k, scale = _leaves()
    assert _reads(lambda: InfoNCELoss()(q, k, scale, positives=torch.arange(5))) == 2


def test_a_compiled_loss_that_makes_its_positives_reads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    looked: list[int] = []
    monkeypatch.setattr(checks, "in_range", lambda positives, keys: looked.append(keys))
    loss = torch.compile(lambda a, b: NTXentLoss()(a, b, 2.0), backend="eager", fullgraph=True)
    listed = torch.compile(lambda q, k, p: InfoNCELoss()(q, k, 2.0, positives=p), backend="eager", fullgraph=True)
    a, b = F.normalize(torch.randn(2, 6, 4), dim=-1)
    assert torch.equal(loss(a, b), NTXentLoss()(a, b, 2.0))
    assert looked == []
    listed(a, b, torch.arange(6))
    assert looked == [6]


@pytest.mark.usefixtures("on_gpu")
def test_positives_on_a_gpu_are_read_in_few_calls() -> None:
    q, k, scale = _leaves()
    positives = torch.tensor([[0, -1], [6, 2], [3, 3], [-1, -1], [5, 1]])

    def call() -> Tensor:
        return InfoNCELoss()(q, k, scale, positives=positives)

    first = call()
    assert [_reads(call) for _ in range(MOST_READS)] == [2] * (MOST_READS - 1) + [0]
    assert torch.equal(call(), first)


@pytest.mark.usefixtures("on_gpu")
def test_losses_made_in_every_step_wait_for_a_gpu_in_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Tensor] = []
    monkeypatch.setattr(views, "_gpu_reads", checks.GpuReads())
    monkeypatch.setattr(views, "_warn_without_positives", lambda loss, _: looked.append(loss))
    x, labels = F.normalize(torch.randn(6, 4), dim=-1), torch.arange(6) // 2
    for _ in range(MOST_READS + 2):
        SupConLoss()(x, labels, 2.0)
    assert len(looked) == MOST_READS


@pytest.mark.usefixtures("on_gpu")
# of the interpreter, whose logarithms are NumPy's
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["eager", "dense", "triton"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("index", [7, -2, 2**40])
def test_unread_positives_out_of_range_make_the_loss_and_all_gradients_nan(
    backend: str, reduction: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(checks, "MOST_READS", 1)
    loss, (q, k, scale) = InfoNCELoss(backend=backend, reduction=reduction), _leaves()
    scale.requires_grad_()
    positives = torch.tensor([0, 1, 2, 3, 7])
    with pytest.raises(ValueError, match=OUT_OF_RANGE):
        loss(q, k, scale, positives=positives)
    value = loss(q, k, scale, positives=torch.tensor([0, 1, index, 3, 4]))
    assert value.isnan().all()
    assert all(x.isnan().all() for x in torch.autograd.grad(value.sum(), (q, k, scale)))


@pytest.mark.usefixtures("on_gpu")
def test_an_unread_positive_beyond_the_keys_is_no_other_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, and their own keys once more, are columns behind the keys."""
    monkeypatch.setattr(checks, "MOST_READS", 0)
    q, k, scale = _leaves()
    guides: Any = {"guide_query": torch.randn(5, 3), "guide_key": torch.randn(7, 3)}
    for both in ({"contrast_anchors": True}, {"contrast_positives": True}):
        value = GISTLoss(**both)(q, k, scale, positives=torch.tensor([0, 1, 7, 3, 4]), **guides)
        assert value.isnan()
        assert torch.autograd.grad(value, q)[0].isnan().all()


def test_lists_of_the_first_two_keys_are_taken_with_a_warning() -> None:
    q, k = torch.randn(2, 4), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="of 0 and 1 alone are taken as indices of keys"):
        value = InfoNCELoss()(q, k, 2.0, positives=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    assert torch.equal(value, InfoNCELoss()(q, k, 2.0, positives=torch.tensor([[0, 1], [1, -1]])))


@pytest.mark.usefixtures("on_gpu")
def test_the_only_row_with_an_unread_positive_out_of_range_is_nan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_READS", 0)
    q, k, scale = _leaves(1)
    for reduction in ("mean", "sum", "none"):
        assert InfoNCELoss(reduction=reduction)(q, k, scale, positives=torch.tensor([7])).isnan().all()


@pytest.mark.usefixtures("on_gpu")
def test_a_compiled_loss_keeps_the_same_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(checks, "MOST_READS", 1)
    step = torch.compile(
        lambda q, k, scale, positives: InfoNCELoss()(q, k, scale, positives=positives), backend="aot_eager"
    )
    q, k, scale = _leaves()
    right, wrong = torch.arange(5), torch.tensor([0, 1, 2, 3, 7])
    with pytest.raises(ValueError, match=OUT_OF_RANGE):
        step(q, k, scale, wrong)
    assert torch.equal(step(q, k, scale, right), InfoNCELoss()(q, k, scale, positives=right))
    value = step(q, k, scale, wrong)
    assert value.isnan()
    assert all(x.isnan().all() for x in torch.autograd.grad(value, (q, k)))
