"""Under autocast, products in its type: nearer to float64 than the formula there, gradients in the features' own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from problems import PROBLEMS, Problem, distance
from ranks import Pool
from torch import Tensor, nn

from contrastile import ClipLoss, GISTLoss, InfoNCELoss, NTXentLoss, SigLipLoss, contrast, encode
from contrastile.engine import plan
from contrastile.exchange import host


def _autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


def _check(problem: Problem, by_tiles: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> None:
    """Loss and gradients are no further from float64 than those of the formula under autocast, over several seeds."""
    ours, plain = defaultdict[str, float](float), defaultdict[str, float](float)
    for seed in range(6):
        tensors = problem.tensors(torch.float32, seed=seed)
        truth = problem.by_formula({name: x.detach().double().requires_grad_() for name, x in tensors.items()})
        with _autocast():
            answers = by_tiles(tensors), problem.by_formula(tensors)
        assert {answers[0][0].dtype, *[x.dtype for x in answers[0][1].values()]} == {torch.float32}
        for worst, (loss, gradients) in zip((ours, plain), answers, strict=True):
            worst["loss"] = max(worst["loss"], distance(loss, truth[0]))
            for name, gradient in gradients.items():
                worst[name] = max(worst[name], distance(gradient, truth[1][name]))
    # products of float32 would be nearer
    assert ours["q"] > 1e-4
    for name, error in ours.items():
        assert error <= plain[name], name


@pytest.mark.parametrize("backend", ["eager", "dense"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_further_from_float64_than_the_formula(name: str, backend: str) -> None:
    problem = PROBLEMS[name](70, 75)
    _check(problem, lambda tensors: problem.by_tiles(tensors, backend=backend))


def test_features_streamed_from_the_host_are_cast_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "waits_on_host", lambda features, device: True)
    monkeypatch.setattr(host, "cut", lambda *_: host.Cut(13, 29))
    problem = PROBLEMS["clip"](70, 70)
    _check(problem, problem.by_tiles)


@pytest.mark.parametrize("loss", [ClipLoss(), SigLipLoss()], ids=["clip", "siglip"])
def test_a_compiled_loss_is_cast_too(loss: nn.Module) -> None:
    q, k = (F.normalize(torch.randn(30, 16), dim=-1).requires_grad_() for _ in "qk")
    step = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with _autocast():
        compiled, eager = step(q, k, 10.0, -1.0), loss(q, k, 10.0, -1.0)
    torch.testing.assert_close(compiled, eager)
    ours, theirs = (torch.autograd.grad(value, (q, k)) for value in (compiled, eager))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


def _on_ranks(rank: int, group: object, W: int, exchange: str) -> None:
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(W * 9, 16), dim=-1) for _ in "qk")
    mine = slice(9 * rank, 9 * rank + 9)
    whole = [x.clone().requires_grad_() for x in (q, k)]
    own = [x[mine].clone().requires_grad_() for x in (q, k)]
    with _autocast():
        one = contrast(*whole, scale=10.0, exchange="single")
        several = contrast(*own, scale=10.0, exchange=exchange, group=group, gradient="sum")
    torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(several, own), torch.autograd.grad(one, whole), strict=True):
        assert a.dtype == torch.float32
        # pairs' gradients are rounded to bf16 on a CPU that multiplies in it
        assert distance(a, b[mine]) <= 2**-7


@pytest.mark.parametrize("exchange", ["replicate", "gather", "ring"])
def test_three_ranks_compute_the_loss_of_one(exchange: str, pool: Pool) -> None:
    pool.check(_on_ranks, 3, 3, exchange)


def _guided_on_ranks(rank: int, group: object, W: int, exchange: str) -> None:
    torch.manual_seed(7)
    every = F.normalize(torch.randn(4, W * 20, 16), dim=-1)
    q, k, a, b = every[:, 20 * rank : 20 * rank + 20]
    with _autocast():
        value = GISTLoss(margin=0.1, exchange=exchange, group=group)(q, k, 10.0, guide_query=a, guide_key=b)
    q, k = every[:2].bfloat16()
    expected = GISTLoss(margin=0.1, exchange="single")(q, k, 10.0, guide_query=every[2], guide_key=every[3])
    # a threshold in bf16 would exclude other pairs
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exchange", ["replicate", "gather", "ring"])
def test_ranks_compare_similarities_of_a_guide_as_one_process_does(exchange: str, pool: Pool) -> None:
    pool.check(_guided_on_ranks, 3, 3, exchange)


def test_calls_of_equal_shapes_inside_and_outside_do_not_share_a_plan() -> None:
    loss, (q, k) = ClipLoss(), (F.normalize(torch.randn(40, 16), dim=-1) for _ in "qk")
    outside = loss(q, k, 20.0)
    with _autocast():
        inside = loss(q, k, 20.0)
        with torch.autocast("cpu", enabled=False):
            torch.testing.assert_close(loss(q, k, 20.0), outside, rtol=0, atol=0)
    torch.testing.assert_close(inside, loss(q.bfloat16(), k.bfloat16(), 20.0), rtol=0, atol=0)
    assert not torch.equal(inside, outside)
    torch.testing.assert_close(loss(q, k, 20.0), outside, rtol=0, atol=0)


def test_sides_of_two_types_get_gradients_of_their_own() -> None:
    q, k = (F.normalize(torch.randn(20, 16), dim=-1) for _ in "qk")
    q, k = q.requires_grad_(), k.bfloat16().requires_grad_()
    with pytest.raises(ValueError, match="must have the dtype of"):
        ClipLoss()(q, k, 10.0)
    with _autocast():
        of_q, of_k = torch.autograd.grad(ClipLoss()(q, k, 10.0), (q, k))
        with pytest.raises(ValueError, match="must have the dtype of"):
            ClipLoss()(q.double(), k, 10.0)
    assert (of_q.dtype, of_k.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name", ["views", "own keys"])
def test_sides_of_two_types_may_be_joined_into_one(name: str) -> None:
    """Losses that concatenate what autocast casts: the same loss as of sides that were cast before."""

    def loss(a: Tensor, b: Tensor) -> Tensor:
        if name == "views":
            return NTXentLoss()(a, b, 10.0)
        return InfoNCELoss(in_batch=False)(a, a, 10.0, negatives=b[:, None])

    a, b = (x.requires_grad_() for x in F.normalize(torch.randn(2, 5, 8), dim=-1))
    narrow = b.detach().bfloat16().requires_grad_()
    with _autocast():
        value, expected = loss(a, narrow), loss(a, b)
    (gradient,), (truth,) = torch.autograd.grad(value, narrow), torch.autograd.grad(expected, b)
    assert gradient.dtype == torch.bfloat16
    assert value.item() == expected.item()
    assert distance(gradient, truth.double()) <= 1e-2


JOINING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "views": lambda a, b: NTXentLoss()(a, b, 10.0),
    "negatives": lambda a, b: InfoNCELoss()(a, a, 10.0, negatives=b),
    "own negatives": lambda a, b: InfoNCELoss(in_batch=False)(a, a, 10.0, negatives=b[:, None]),
    "guide": lambda a, b: GISTLoss(contrast_positives=True)(
        a, b, 10.0, guide_query=a.detach(), guide_key=b.detach(), negatives=b, guide_negatives=b.detach()
    ),
    "parts": lambda a, b: encode(lambda x: (x, x[0, 0] * 0), parts=[a, b])[0].float().sin().sum(),
    "no rows": lambda a, b: ClipLoss()(a, b, 10.0) + encode(lambda x: x, a[:0], sub_batch=2).sum(),
}


@pytest.mark.parametrize("name", JOINING)
def test_float16_sides_are_joined_where_autocast_is_to_bfloat16(name: str) -> None:
    """torch.cat refuses them there."""
    a, b = (x.half().requires_grad_() for x in F.normalize(torch.randn(2, 5, 8), dim=-1))
    with _autocast():
        value, expected = JOINING[name](a, b), JOINING[name](a.float(), b.float())
    assert value.item() == expected.item()
    for gradient, truth in zip(*(torch.autograd.grad(x, (a, b)) for x in (value, expected)), strict=True):
        assert gradient.dtype == torch.float16
        assert distance(gradient, truth.double()) <= 2**-8


def test_float64_is_left_as_it_is() -> None:
    q, k = (F.normalize(torch.randn(20, 16, dtype=torch.float64), dim=-1) for _ in "qk")
    with _autocast():
        torch.testing.assert_close(
            ClipLoss()(q, k, 10.0),
            F.cross_entropy(10 * q @ k.T, torch.arange(20)) / 2 + F.cross_entropy(10 * k @ q.T, torch.arange(20)) / 2,
            rtol=1e-12,
            atol=0,
        )
