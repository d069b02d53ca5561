"""The fused kernels: every option, odd shapes, poisoned memory, and hostile features.

Interpreted on the CPU; on a GPU, and in bf16 too, with `make test-gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import PROBLEMS, distance
from torch import Tensor

pytest.importorskip("triton")

from contrastile import contrast
from contrastile._types import Reduction
from contrastile.losses.base import Finished, Side
from contrastile.losses.dense import dense_softmax
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.tiles import triton_device
from contrastile.tiles import triton_launch as launch
from contrastile.tiles import triton_operands as operands
from contrastile.tiles.eager import Eager
from contrastile.tiles.triton import Triton
from contrastile.tiles.triton_device import SHAPE_INTERPRETED, interpreting, shape_for
from contrastile.tiles.triton_kernels import FLAG, SHIFT, UNROLLED
from contrastile.tiles.triton_launch import Merge
from contrastile.tiles.triton_operands import Masks, Pair

COMPILED = not interpreting()
DEVICE = torch.device("cuda" if COMPILED else "cpu")
pytestmark = [
    pytest.mark.skipif(COMPILED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    *([pytest.mark.gpu] if COMPILED else []),
    # numpy's casts and exponentials warn where a float32 unit returns infinity or 0
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SYMMETRIC = Softmax(symmetric=True)
SHAPE = shape_for(DEVICE) if torch.cuda.is_available() or not COMPILED else SHAPE_INTERPRETED
# three rows of tiles, the last one short
N, D = 2 * SHAPE.rows + 6, 40
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if COMPILED else [])]


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with DEVICE:
        yield


def _tiles(scale: float = 20.0, loss: Softmax = SYMMETRIC, workspace: int = 2**30) -> Triton:
    return Triton(loss, torch.tensor(scale), None, workspace)


def _unit(n: int, dtype: torch.dtype = torch.float16, features: int = D) -> Tensor:
    return F.normalize(torch.randn(n, features), dim=-1).to(dtype)


def _finished(tiles: Triton | Eager, rows: Side, cols: Side) -> tuple[Finished, Finished]:
    row_stats, col_stats = tiles.stats(rows, cols)
    assert col_stats is not None
    return tiles.loss.finish(row_stats), tiles.loss.finish(col_stats)


def _gradients(tiles: Triton | Eager, rows: Side, cols: Side) -> tuple[Tensor, Tensor]:
    """u and v of the mean of both directions' losses."""
    of_rows, of_cols = _finished(tiles, rows, cols)
    rows = replace(rows, state=of_rows.state, coefficient=of_rows.counts / (2 * len(rows)))
    cols = replace(cols, state=of_cols.state, coefficient=of_cols.counts / (2 * len(cols)))
    u, v = (torch.zeros(side.features.shape, dtype=tiles.scale.dtype) for side in (rows, cols))
    tiles.grads(rows, cols, u, v)
    return u, v


def _alike(x: Tensor, y: Tensor) -> bool:
    """Equal, but that a compiler may sum up features of other strides in another order."""
    return distance(x, y) <= 1e-6 if COMPILED else torch.equal(x, y)


def _exact(tiles: Triton, rows: Side, cols: Side) -> tuple[Eager, Side, Side]:
    """The same in float64, by plain PyTorch."""
    wide = (replace(side, features=side.features.double()) for side in (rows, cols))
    return Eager(tiles.loss, tiles.scale.double(), None, 2**30), *wide


def _pair(q: Tensor, k: Tensor) -> tuple[Side, Side]:
    return Side(q, diagonal=0), Side(k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_is_no_further_from_float64_than_twice_the_dense_formula(name: str, dtype: torch.dtype) -> None:
    problem = PROBLEMS[name](45, 70)
    tensors = problem.tensors(dtype)
    exact = {key: x.detach().double().requires_grad_() for key, x in tensors.items()}
    truth, true_gradients = problem.by_formula(exact)
    dense, dense_gradients = problem.by_formula(tensors)
    loss, gradients = problem.by_tiles(tensors, backend="triton")
    assert distance(loss, truth) <= max(2 * distance(dense, truth), 1e-6)
    for key, gradient in gradients.items():
        # a single number can be right by luck in the dense formula
        least = 1e-6 if gradient.ndim else 1e-4
        allowed = max(2 * distance(dense_gradients[key], true_gradients[key]), least)
        assert distance(gradient, true_gradients[key]) <= allowed, key


@pytest.mark.parametrize("how", [{}, {"label_smoothing": 0.1}, {"exclude_self": True}], ids=str)
@pytest.mark.parametrize("listed", [UNROLLED.value, UNROLLED.value + 1, 11])
def test_any_number_of_positives_by_index(listed: int, how: dict[str, Any]) -> None:
    n, m = N, N + SHAPE.cols
    # once more than there are, in places that come again, and with pads; one row with none
    positives = torch.randint(-1, m, (n, listed)).masked_fill(torch.arange(n)[:, None] == 3, -1)
    ids = {"query_ids": torch.arange(n) % 7, "key_ids": torch.arange(m) % 9}
    leaves = [_unit(rows, torch.float32).requires_grad_() for rows in (n, m)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found, truth = (
        contrast(*sides, scale=20.0, loss=Softmax(**how), positives=positives, backend=backend, **ids)
        for sides, backend in ((leaves, "triton"), (wide, "eager"))
    )
    assert distance(found.detach(), truth.detach()) <= 1e-6
    gradients = torch.autograd.grad(found, leaves), torch.autograd.grad(truth, wide)
    assert all(distance(x, y) <= 1e-5 for x, y in zip(*gradients, strict=True))


def test_long_lists_of_positives_take_one_kernel() -> None:
    pair = Pair(*(operands.operand(_unit(n), 1, SHAPE) for n in (8, 50)), Masks(places=torch.zeros(8, 30).long()))
    longer = replace(pair, masks=Masks(places=torch.zeros(8, 31).long()))
    compiled, looped = "PLACES", "places"
    assert pair.arguments[compiled] == longer.arguments[compiled] == UNROLLED.value + 1
    assert (pair.arguments[looped], longer.arguments[looped]) == (30, 31)
    assert not pair.flat


@pytest.mark.parametrize(("precision", "error"), [("highest", 1e-6), ("high", 1e-4)])
def test_float32_follows_the_precision_of_matrix_products(precision: str, error: float) -> None:
    torch.set_float32_matmul_precision(precision)
    try:
        tiles, (rows, cols) = _tiles(), _pair(_unit(N, torch.float32), _unit(N, torch.float32))
        found, truth = _gradients(tiles, rows, cols), _gradients(*_exact(tiles, rows, cols))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert error / 1000 < max(distance(x, y) for x, y in zip(found, truth, strict=True)) <= error


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_fp16_gradients_before_the_final_cast(scale: float) -> None:
    tiles, (rows, cols) = _tiles(scale), _pair(_unit(N), _unit(N))
    for found, truth in zip(_gradients(tiles, rows, cols), _gradients(*_exact(tiles, rows, cols)), strict=True):
        assert distance(found, truth) <= 3e-4


@pytest.mark.parametrize("features", [1, 7, 33, 100])
def test_any_number_of_features(features: int) -> None:
    tiles = _tiles(5.0)
    rows, cols = _pair(_unit(33, features=features), _unit(33, features=features))
    for found, truth in zip(_gradients(tiles, rows, cols), _gradients(*_exact(tiles, rows, cols)), strict=True):
        assert distance(found, truth) <= 3e-4


def test_any_strides() -> None:
    q, k = _unit(N), _unit(N)
    straight = _gradients(_tiles(), *_pair(q, k))
    apart = torch.full((N, 2 * D), torch.nan, dtype=q.dtype)
    apart[:, ::2] = q
    strided = _gradients(_tiles(), *_pair(apart[:, ::2], k.T.contiguous().T))
    assert all(_alike(x, y) for x, y in zip(strided, straight, strict=True))


@pytest.mark.parametrize("loss", [SYMMETRIC, Softmax(symmetric=True, label_smoothing=0.1)], ids=["plain", "smooth"])
def test_the_workspace_changes_nothing(loss: Softmax) -> None:
    n = 5 * SHAPE.rows - 10
    rows, cols = _pair(_unit(n), _unit(n))
    # two tiles by two, and copies of their features
    little = 2 * (2 * SHAPE.rows) * (2 * SHAPE.cols) + 2 * 4 * SHAPE.rows * operands.padded(D, SHAPE)
    wide, narrow = (_tiles(loss=loss, workspace=workspace) for workspace in (2**30, little))
    assert narrow.workspace_bytes(n, n, D, torch.float16) <= little < wide.workspace_bytes(n, n, D, torch.float16)
    for one, other in zip(_gradients(narrow, rows, cols), _gradients(wide, rows, cols), strict=True):
        assert distance(one, other) <= 1e-6


def test_the_same_bits_every_time() -> None:
    rows, cols = _pair(_unit(N), _unit(N))
    first = _gradients(_tiles(), rows, cols)
    for _ in range(100 if COMPILED else 1):
        again = _gradients(_tiles(), rows, cols)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_features_whose_columns_are_dense(reduction: Reduction) -> None:
    q, k = (_unit(SHAPE.rows + 6, torch.float32).requires_grad_() for _ in range(2))
    across = [x.detach().T.contiguous().T.requires_grad_() for x in (q, k)]
    losses = [contrast(*pair, scale=20.0, backend="triton", reduction=reduction) for pair in ((q, k), across)]
    assert _alike(*(loss.detach() for loss in losses))
    straight, found = (
        torch.autograd.grad(loss.sum(), pair) for loss, pair in zip(losses, ((q, k), across), strict=True)
    )
    assert all(_alike(x, y) for x, y in zip(found, straight, strict=True))


def test_shards_of_columns_merge_into_the_whole() -> None:
    tiles, (rows, cols) = _tiles(), _pair(_unit(N), _unit(N))
    shards = [cols.narrow(0, 41), cols.narrow(41, N)]
    (one, left), (other, right) = (tiles.stats(rows, shard) for shard in shards)
    assert left is not None
    assert right is not None
    whole, whole_cols = tiles.stats(rows, cols)
    assert whole_cols is not None
    merged = tiles.loss.finish(tiles.loss.merge(one, other))
    assert distance(merged.loss, tiles.loss.finish(whole).loss) <= 1e-6
    met = tiles.loss.finish(torch.cat([left, right], dim=1))
    assert distance(met.loss, tiles.loss.finish(whole_cols).loss) <= 1e-6


def test_a_shard_that_has_travelled() -> None:
    tiles, (rows, cols) = _tiles(), _pair(_unit(N), _unit(N))
    of_rows, of_cols = _finished(tiles, rows, cols)
    rows = replace(rows, state=of_rows.state, coefficient=of_rows.counts)
    straight = replace(cols, state=of_cols.state, coefficient=of_cols.counts)
    travelled = replace(straight, state=of_cols.state.T.contiguous().T)
    u, again = torch.zeros(N, D), torch.zeros(N, D)
    tiles.grads(rows, straight, u, None)
    tiles.grads(rows, travelled, again, None)
    assert torch.equal(u, again)


def _collapsed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q[:1].expand_as(q).clone(), q[:1].expand_as(k).clone()


def _opposed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q[:1].expand_as(q).clone(), -q[:1].expand_as(k).clone()


def _duplicated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.roll(1, 0), torch.cat([q[: len(q) // 2], q[: len(q) - len(q) // 2]])


def _one_far_out(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    q, k = q.clone(), k.clone()
    q[3] *= 30
    k[5] *= 30
    return q, k


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("hostile", [_collapsed, _opposed, _duplicated, _one_far_out])
def test_hostile_features(hostile: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], scale: float) -> None:
    tiles, (rows, cols) = _tiles(scale), _pair(*hostile(_unit(N), _unit(N)))
    exact = _exact(tiles, rows, cols)
    for found, truth in zip(_finished(tiles, rows, cols), _finished(*exact), strict=True):
        # logits of this size are rounded to scale · 2⁻²⁴, and more where norms are large
        assert distance(found.loss, truth.loss) <= 1e-6 * max(1.0, scale)
    for found, truth in zip(_gradients(tiles, rows, cols), _gradients(*exact), strict=True):
        # where all pulls cancel, compare with what one pair pulls
        assert (found - truth).norm() <= 1e-3 * max(1.0, scale / 100) * max(truth.norm(), N**-0.5)


def test_the_flag_goes_up_where_the_fast_sums_would_be_lost() -> None:
    q, k = _opposed(_unit(N), _unit(N))
    for scale, expected in ((1000.0, 1), (20.0, 0)):
        numbers = _fast_totals(q, k, torch.tensor(scale))
        assert numbers[int(FLAG.value)] == expected
        assert numbers[int(SHIFT.value)] >= 0


def _fast_totals(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    numbers = launch.numbers(q, k, scale, None, sigmoid=False)
    row_part = torch.empty(1, operands.tiles_of(len(k), SHAPE.cols), len(q))
    launch.totals(_as_pair(q, k), numbers, row_part, None, smooth=False, sigmoid=False)
    stats = SYMMETRIC.init(len(q), dtype=torch.float32, device=q.device)
    launch.merge_sums(Merge(row_part, stats, first=True, last=True), None, numbers, sigmoid=False)
    return numbers


def _as_pair(q: Tensor, k: Tensor, masks: Masks = Masks()) -> Pair:  # noqa: B008 (a frozen value)
    return Pair(*(operands.operand(x, 1, SHAPE) for x in (q, k)), masks)


def _numbers(factor: float, shift: float) -> Tensor:
    """Those of a softmax whose flag is down."""
    return torch.tensor([factor, shift, 1.0, 0.0, factor, 0.0, 0.0])


@pytest.mark.parametrize("masks", [Masks(), Masks(diagonal=3), Masks(itself=-5), Masks(diagonal=0, itself=7)], ids=repr)
def test_integers_are_summed_exactly(masks: Masks) -> None:
    q, k = (torch.randint(-1, 2, (n, D)).half() for n in (N, 45))
    # factor 1, no shift: every term is a power of two, every sum a number of at most 24 bits
    numbers = _numbers(1.0, 6.0)
    row_part, col_part = torch.empty(1, operands.tiles_of(45, SHAPE.cols), N), torch.empty(1, 3, 45)
    launch.totals(_as_pair(q, k, masks), numbers, row_part, col_part, smooth=False, sigmoid=False)
    exact = torch.exp2(q.double() @ k.double().T - 6)
    for offset in (masks.diagonal, masks.itself):
        if offset is not None:
            exact.diagonal(offset).zero_()
    kept = exact * (exact >= 2.0**-20) * (exact <= 2.0**3)
    assert (kept == exact).float().mean() > 0.5
    assert (
        torch.equal(row_part.sum((0, 1)).double(), exact.sum(1)) or distance(row_part.sum((0, 1)), exact.sum(1)) < 1e-7
    )
    assert (
        torch.equal(col_part.sum((0, 1)).double(), exact.sum(0)) or distance(col_part.sum((0, 1)), exact.sum(0)) < 1e-7
    )


def test_a_strip_of_integers_is_written_exactly() -> None:
    q, k = (F.one_hot(torch.randint(D, (n,)), D).half() for n in (N, 45))
    a, b = (torch.randint(1, 9, (n,)).float() for n in (N, 45))
    pair = _as_pair(q, k, Masks(diagonal=2))
    out = operands.strip(pair.q, pair.k)
    out.fill_(torch.nan)
    sums, sides = launch.no_sums(out.device), [(a, a), (b, b)]
    for _ in range(2):
        launch.gradient(pair, _numbers(3.0, 1.0), sides, out, sums, smooth=False, sigmoid=False, row_part=None)
    exact = torch.exp2(3 * q.float() @ k.float().T - 1) * (a[:, None] + b[None, :])
    exact.diagonal(2).zero_()
    (written,) = operands.pieces(out, pair.q, pair.k)
    assert torch.equal(written.float(), exact)
    # what two sweeps come to, in a sum of products of integers
    assert sums.sum() == 2 * (exact * (q.float() @ k.float().T)).sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [20.0, 100.0])
def test_the_scales_gradient_does_not_go_through_the_16_bit_strip(scale: float, dtype: torch.dtype) -> None:
    k = _unit(N, torch.float32)
    q = F.normalize(0.6 * k + 0.8 * _unit(N, torch.float32), dim=-1).to(dtype).requires_grad_()
    k = k.to(dtype).requires_grad_()
    leaf = torch.tensor(scale, requires_grad=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k, leaf)]
    (true,) = torch.autograd.grad(dense_softmax(*wide, symmetric=True), wide[2])
    loss = contrast(q, k, scale=leaf, backend="triton")
    dq, found = torch.autograd.grad(loss, (q, leaf), retain_graph=True)
    assert distance(found, true) <= 2e-5
    # and it is the same where nothing else is wanted
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], found)
    # the two parts of it cancel: read off the gradient of q it would be further away, at some lengths of a digit
    if dtype == torch.bfloat16 or (dtype == torch.float16 and scale == 100):
        assert distance((dq.double() * q.detach()).sum() / scale, true) > 2e-5


def test_a_sigmoids_sums() -> None:
    q, k = _unit(N).requires_grad_(), _unit(45).requires_grad_()
    numbers = [torch.tensor(x, requires_grad=True) for x in (30.0, -3.0)]
    loss = contrast(
        q, k, scale=numbers[0], bias=numbers[1], loss=Sigmoid(), backend="triton", positives=torch.arange(N) % 45
    )
    wide = [x.detach().double().requires_grad_() for x in (q, k, *numbers)]
    exact = contrast(
        wide[0], wide[1], scale=wide[2], bias=wide[3], loss=Sigmoid(), backend="eager", positives=torch.arange(N) % 45
    )
    for found, true in zip(torch.autograd.grad(loss, numbers), torch.autograd.grad(exact, wide[2:]), strict=True):
        assert distance(found, true) <= 1e-5


@pytest.mark.parametrize("gap", [0.1, 0.2])
def test_confident_models_keep_their_digits(gap: float) -> None:
    k = F.one_hot(torch.arange(32), 64).half()
    q = (k + gap * F.one_hot(torch.arange(32, 64), 64)).half()
    tiles, (rows, cols) = _tiles(25.0), _pair(q, k)
    exact = _exact(tiles, rows, cols)
    found, truth = _finished(tiles, rows, cols)[0].loss, _finished(*exact)[0].loss
    assert truth.max() < 1e-8
    assert distance(found, truth) <= 1e-4
    for found, truth in zip(_gradients(tiles, rows, cols), _gradients(*exact), strict=True):
        assert distance(found, truth) <= 1e-2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_features_that_are_not_finite_give_nan(value: float) -> None:
    q, k = _unit(N), _unit(N)
    k[60, 3] = value
    assert contrast(q, k, scale=10.0, backend="triton").isnan()


def test_what_is_not_asked_for_is_not_computed() -> None:
    tiles, (rows, cols) = _tiles(), _pair(_unit(N), _unit(N))
    of_rows, of_cols = _finished(tiles, rows, cols)
    rows = replace(rows, state=of_rows.state, coefficient=of_rows.counts)
    cols = replace(cols, state=of_cols.state, coefficient=of_cols.counts)
    both, alone = (torch.zeros(N, D), torch.zeros(N, D)), torch.zeros(N, D)
    tiles.grads(rows, cols, *both)
    tiles.grads(rows, cols, None, alone)
    assert torch.equal(alone, both[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_sigmoid_in_one_sweep_equals_two(dtype: torch.dtype) -> None:
    tiles = Triton(Sigmoid(), torch.tensor(10.0), torch.tensor(-4.0), 60_000)
    rows, cols = _pair(_unit(N, dtype), _unit(N, dtype))
    rows = replace(rows, state=torch.empty(0, N), coefficient=torch.rand(N))
    once, twice = ((torch.zeros(N, D), torch.zeros(N, D)) for _ in range(2))
    stats, total = tiles.stats_and_grads(rows, cols, *once)
    assert distance(stats, tiles.stats(rows, cols)[0]) <= 1e-6
    assert torch.equal(total, tiles.grads(rows, cols, *twice))
    assert all(torch.equal(one, two) for one, two in zip(once, twice, strict=True))


@pytest.mark.parametrize("name", ["clip_ids_weights_smoothing", "sup_con", "siglip"])
def test_chips_without_a_copy_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[name](45, 70)
    tensors = problem.tensors(torch.float32)
    loss, gradients = problem.by_tiles(tensors, backend="triton")
    if COMPILED:
        monkeypatch.setattr(triton_device, "SHAPES", {80: replace(SHAPE, tma=False)})
    else:
        monkeypatch.setattr(triton_device, "SHAPE_INTERPRETED", replace(SHAPE, tma=False))
    again, gradients_again = problem.by_tiles(tensors, backend="triton")
    assert torch.equal(loss, again)
    assert all(torch.equal(gradient, gradients_again[key]) for key, gradient in gradients.items())


def test_gradients_are_added_to_what_is_there() -> None:
    tiles, (rows, cols) = _tiles(), _pair(_unit(N), _unit(N))
    of_rows, of_cols = _finished(tiles, rows, cols)
    rows = replace(rows, state=of_rows.state, coefficient=of_rows.counts / N)
    cols = replace(cols, state=of_cols.state, coefficient=of_cols.counts / N)
    fresh, added = torch.zeros(N, D), torch.ones(N, D)
    tiles.grads(rows, cols, fresh, None)
    tiles.grads(rows, cols, added, None)
    assert (added - 1 - fresh).abs().max() <= 1e-6


def test_no_rows_and_no_columns() -> None:
    tiles = _tiles()
    empty = Side(torch.empty(0, D, dtype=torch.float16), diagonal=0)
    stats, col_stats = tiles.stats(empty, Side(_unit(5)))
    assert stats.shape == (8, 0)
    assert col_stats is not None
    assert torch.equal(col_stats, tiles.init(Side(_unit(5))))


def test_symmetric_smoothing_equals_the_dense_formula_over_many_super_tiles() -> None:
    q, k = _unit(90, torch.float32), _unit(90, torch.float32)
    loss = contrast(q, k, scale=20.0, label_smoothing=0.1, backend="triton", workspace=2**20)
    truth = dense_softmax(q.double(), k.double(), 20.0, symmetric=True, label_smoothing=0.1)
    assert distance(loss, truth) <= 1e-6


def test_float64_is_declined_with_its_reason() -> None:
    rows, cols = _pair(_unit(5, torch.float64), _unit(5, torch.float64))
    assert Triton.declines(SYMMETRIC, rows, cols) == "no kernel for torch.float64"


@pytest.mark.skipif(COMPILED, reason="needs tensors on the CPU")
def test_the_cpu_is_declined_where_kernels_are_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contrastile.tiles.triton.interpreting", lambda: False)
    rows, cols = _pair(_unit(5), _unit(5))
    assert Triton.declines(SYMMETRIC, rows, cols) == "the features are on cpu, not on an NVIDIA device"


def test_another_loss_is_declined() -> None:
    class Mine(Softmax):
        pass

    rows, cols = _pair(_unit(5), _unit(5))
    assert Triton.declines(Mine(), rows, cols) == "no kernel for Mine"


def test_groups_are_counted_in_32_bits() -> None:
    ids = torch.tensor([2**40, -7, 2**40 + 2**32, 5, -7])
    counted = operands.counted(Side(_unit(3), ids=ids[:3]), Side(_unit(2), ids=ids[3:]))
    both = torch.cat([side["ids"] for side in counted])
    assert both.dtype == torch.int32
    assert both.tolist() == [2, 0, 3, 1, 0]
