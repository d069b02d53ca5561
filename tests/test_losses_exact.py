"""Every loss equals the plain formula: value and all gradients, in every dtype, on shapes that divide nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from problems import PROBLEMS, Problem, distance, no_worse_than_twice
from torch import Tensor

from contrastile import contrast
from contrastile.engine import plan
from contrastile.losses import Softmax
from contrastile.tiles import bfloat, eager

# in float64 this cuts tiles of 161 rows, so that the larger shapes have several, and uneven ones
WORKSPACE = 2**20
SHAPES = [(252, 507), (123, 1), (1, 123), (1, 1), (7, 5)]


def _solvable(name: str, N: int, M: int) -> Problem:
    if (name in ("clip_labels", "sup_con") and N < 7) or (name.startswith("dcl") and min(N, M) < 5):
        pytest.skip("a batch without any positive, or without any negative, has no loss")
    return PROBLEMS[name](N, M)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_float64_equals_the_dense_formula(name: str, shape: tuple[int, int], reduction: str) -> None:
    problem = _solvable(name, *shape)
    tensors = problem.tensors(torch.float64)
    truth, true_gradients = problem.by_formula(tensors, reduction=reduction)
    loss, gradients = problem.by_tiles(tensors, reduction=reduction, workspace=WORKSPACE)
    assert loss.shape == truth.shape
    assert (loss - truth).abs().max() <= 1e-12 * truth.abs().max().clamp(min=1)
    for key, gradient in gradients.items():
        if shape == (252, 507):
            assert distance(gradient, true_gradients[key]) <= 1e-12, key
        # where there is nothing to compare with, both are rounding noise about 0
        assert (gradient - true_gradients[key]).abs().max() <= 1e-12 * max(1.0, true_gradients[key].abs().max()), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [20.0, 100.0])
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_further_from_float64_than_twice_the_dense_formula(name: str, scale: float, dtype: torch.dtype) -> None:
    problem = PROBLEMS[name](252, 507)
    no_worse_than_twice(problem, problem.tensors(dtype, scale=scale), workspace=WORKSPACE)


@pytest.fixture(params=[False, True], ids=["float32 products", "bf16 products"])
def with_bf16_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tiles of CPUs with and without instructions for bf16, whichever this one is."""
    monkeypatch.setattr(bfloat, "fast_bf16", request.param)
    monkeypatch.setattr(plan, "_plans", {})
    return bool(request.param)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("name", PROBLEMS)
def test_bf16_is_no_further_from_float64_than_twice_the_dense_formula(
    name: str, scale: float, with_bf16_products: bool
) -> None:
    problem = PROBLEMS[name](252, 507)
    tensors = problem.tensors(torch.bfloat16, scale=scale)
    for workspace in (None, WORKSPACE):
        no_worse_than_twice(problem, tensors, workspace=workspace)


@pytest.mark.parametrize("name", ["clip", "info_nce"])
def test_gradients_within_a_narrow_cone_keep_their_digits_in_bf16(name: str, with_bf16_products: bool) -> None:
    """Sums of pairs' gradients nearly cancel there, and those of their rounding do not."""
    problem = PROBLEMS[name](600, 600)
    tensors = problem.tensors(torch.float64)
    for key in ("q", "k"):
        cone = F.normalize(1 + 0.05 * torch.randn(600, 64), dim=-1)
        tensors[key] = cone.bfloat16().requires_grad_()
    exact = {key: x.detach().double().requires_grad_() for key, x in tensors.items()}
    _, truth = problem.by_formula(exact)
    for workspace in (None, WORKSPACE):
        _, gradients = problem.by_tiles(tensors, workspace=workspace)
        assert max(distance(gradients[key], truth[key]) for key in ("q", "k")) <= 5e-3


@pytest.mark.parametrize("scale", [0.0, 1e-39, -3.0])
def test_any_scale_is_taken_in_bf16(scale: float, with_bf16_products: bool) -> None:
    q, k = (F.normalize(x, dim=-1).bfloat16().requires_grad_() for x in torch.randn(2, 300, 16))
    number = torch.tensor(scale, requires_grad=True)
    contrast(q, k, scale=number, workspace=WORKSPACE).backward()
    assert number.grad is not None
    assert number.grad.isfinite()


@pytest.mark.parametrize("N", [252, 1300])
@pytest.mark.parametrize("name", ["clip", "info_nce", "siglip"])
def test_the_gradient_of_the_scale_is_summed_in_float32_whatever_the_products(
    name: str, N: int, with_bf16_products: bool
) -> None:
    problem = PROBLEMS[name](N, N)
    tensors = problem.tensors(torch.bfloat16, D=100)
    exact = {key: x.detach().double().requires_grad_() for key, x in tensors.items()}
    _, truth = problem.by_formula(exact)
    for workspace in (None, WORKSPACE):
        _, gradients = problem.by_tiles(tensors, workspace=workspace)
        # logits of 17 bits at scale 20; rounded like the features', this gradient is 1e-3 off
        assert distance(gradients["scale"], truth["scale"]) <= 1e-4


def test_float32_at_scale_20_is_good_to_a_millionth() -> None:
    problem = PROBLEMS["clip"](507, 507)
    tensors = problem.tensors(torch.float32)
    exact = {key: x.detach().double().requires_grad_() for key, x in tensors.items()}
    truth, true_gradients = problem.by_formula(exact)
    loss, gradients = problem.by_tiles(tensors)
    assert distance(loss, truth) <= 1e-6
    for key, gradient in gradients.items():
        assert distance(gradient, true_gradients[key]) <= 1e-6, key


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradcheck(name: str) -> None:
    problem = PROBLEMS[name](9, 11)
    tensors = problem.tensors(torch.float64, D=4, scale=3.0)

    def loss(*values: Tensor) -> Tensor:
        return problem._call(contrast, problem.tiled, dict(zip(tensors, values, strict=True)))

    assert torch.autograd.gradcheck(loss, tuple(tensors.values()))


@pytest.mark.parametrize("factor", [1.0, 1e-32])
def test_small_gradients_of_pairs_in_fp16(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose products take two fp16 operands: of a mean over many rows most lie below its least number."""
    real = torch.mm
    monkeypatch.setattr(eager, "_narrow_on_accelerator", lambda _: True)
    monkeypatch.setattr(torch, "mm", lambda a, b, *, out_dtype: real(a.to(out_dtype), b.to(out_dtype)))
    n = 1500
    k = F.normalize(torch.randn(n, 32), dim=-1).half()
    g = factor * (torch.softmax(k.float() @ k.float().T, 1) - torch.eye(n)) / (2 * n)
    total = torch.full((n, 32), torch.nan)
    for fresh in (True, False):
        eager.add_product(total, g, k, fresh=fresh)
    assert distance(total, 2 * g.double() @ k.double()) <= 5e-4


def test_what_is_not_finite_in_fp16_stays_so() -> None:
    narrow, unit = eager._in_range(torch.tensor([[1.0, torch.nan]]))
    assert (narrow / unit).isnan().any()
    narrow, unit = eager._in_range(torch.zeros(2, 2))
    assert (narrow / unit == 0).all()


@pytest.mark.parametrize(("name", "scale"), [("clip", 20.0), ("clip", 100.0), ("info_nce", 100.0)])
def test_bf16_products_are_not_rounded_to_bf16_before_the_loss(
    name: str, scale: float, with_bf16_products: bool
) -> None:
    problem = PROBLEMS[name](252, 252)
    tensors = problem.tensors(torch.bfloat16, scale=scale)
    truth, _ = problem.by_formula({key: x.detach().double().requires_grad_() for key, x in tensors.items()})
    dense, _ = problem.by_formula(tensors)
    for workspace in (None, WORKSPACE):
        loss, _ = problem.by_tiles(tensors, workspace=workspace)
        assert distance(loss, truth) <= distance(dense, truth) / 100


@pytest.mark.parametrize("backend", ["dense", "eager"])
@pytest.mark.parametrize(("name", "scale"), [
    ("clip_ids_weights_smoothing", 20.0), ("clip", 20.0), ("info_nce", 1000.0), ("siglip", 20.0),
])  # fmt: skip
def test_the_size_of_tiles_changes_nothing(name: str, scale: float, backend: str) -> None:
    problem = PROBLEMS[name](300, 300)
    tensors = problem.tensors(torch.float64, scale=scale)
    one, one_gradients = problem.by_tiles(tensors, workspace=2**30)
    other, other_gradients = problem.by_tiles(tensors, workspace=2**20, backend=backend)
    assert distance(other, one) <= 1e-13
    assert all(distance(other_gradients[key], one_gradients[key]) <= 1e-13 for key in tensors)


@pytest.mark.parametrize("N", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [-5.0, 20.0, 300.0])
@pytest.mark.parametrize("listed", [False, True], ids=["symmetric", "listed"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_of_one_tile_are_exact_and_their_backward_runs_again(
    reduction: str, listed: bool, scale: float, dtype: torch.dtype, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bfloat, "fast_bf16", True)
    monkeypatch.setattr(plan, "_plans", {})
    positive, weights = torch.eye(N, dtype=torch.bool).roll(1, 1), torch.rand(N) * (torch.arange(N) % 3 != 1)
    how = {"weights": weights, "label_smoothing": 0.1, "reduction": reduction}
    tiled = {"loss": Softmax(), "positives": positive.int().argmax(1)} if listed else {}
    dense = {"positive": positive} if listed else {"symmetric": True}
    problem = Problem(N, N, tiled | how, dense | how | {"weights": weights.to(dtype)})
    tensors = problem.tensors(dtype, scale=scale)
    if dtype == torch.float64:
        (loss, gradients), (truth, true_gradients) = problem.by_tiles(tensors), problem.by_formula(tensors)
        assert (loss - truth).abs().max() <= 1e-12 * truth.abs().max().clamp(min=1)
        for key, gradient in gradients.items():
            assert (gradient - true_gradients[key]).abs().max() <= 1e-12 * abs(scale), key
    elif dtype == torch.float32:
        no_worse_than_twice(problem, tensors, (1e-6, 1e-5))
    loss, inputs = problem._call(contrast, problem.tiled, tensors), list(tensors.values())
    upstream = torch.randn_like(loss) * (torch.arange(loss.numel()).view(loss.shape) % 4 != 2)
    once = torch.autograd.grad(loss, inputs, upstream, retain_graph=True)
    assert all(map(torch.equal, once, torch.autograd.grad(loss, inputs, upstream)))


def test_strips_behind_which_a_row_has_no_positive() -> None:
    """Strips are computed at once where each row has one positive; the last row, of another strip, has none."""
    q, k = (F.normalize(x, dim=-1).requires_grad_() for x in torch.randn(2, 600, 16, dtype=torch.float64))
    positives = torch.arange(600).roll(1)
    positives[-1] = -1
    truth = F.cross_entropy(5.0 * q @ k.T, positives, ignore_index=-1)
    loss = contrast(q, k, scale=5.0, loss=Softmax(), positives=positives, workspace=WORKSPACE)
    assert abs(loss - truth) <= 1e-12
    pairs = zip(torch.autograd.grad(loss, [q, k]), torch.autograd.grad(truth, [q, k]), strict=True)
    assert all(distance(a, b) <= 1e-12 for a, b in pairs)


def test_strides_do_not_matter() -> None:
    problem = PROBLEMS["clip"](130, 130)
    tensors = problem.tensors(torch.float64)
    wide = {
        key: torch.stack([x.detach(), torch.full_like(x, torch.nan)], dim=-1)[..., 0].requires_grad_()
        for key, x in tensors.items()
        if key in ("q", "k")
    }
    wide["k"] = wide["k"].detach().T.contiguous().T.requires_grad_()
    assert not wide["q"].is_contiguous()
    assert not wide["k"].is_contiguous()
    loss, gradients = problem.by_tiles(tensors)
    strided, strided_gradients = problem.by_tiles({**tensors, **wide})
    assert distance(strided, loss) <= 1e-14
    assert all(distance(strided_gradients[key], gradients[key]) <= 1e-13 for key in tensors)


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("scale",), ("k", "scale"), ("bias",)], ids=str)
def test_only_what_is_asked_for_gets_a_gradient(wanted: tuple[str, ...]) -> None:
    problem = PROBLEMS["siglip"](60, 60)
    every = problem.tensors(torch.float64)
    truth = problem.by_formula(every)[1]
    some = {key: x.detach().requires_grad_(key in wanted) for key, x in every.items()}
    loss = problem._call(contrast, problem.tiled, some)
    loss.backward()
    for key, x in some.items():
        if key in wanted:
            assert distance(x.grad, truth[key]) <= 1e-12
        else:
            assert x.grad is None
