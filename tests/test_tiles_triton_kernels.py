"""The fused kernels: every option, odd shapes, poisoned memory, and hostile features.

Interpreted on the CPU; on a GPU, and in bf16 too, with `make test-gpu`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, make_dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import PROBLEMS, distance, no_worse_than_twice
from torch import Tensor

pytest.importorskip("triton")

from contrastile import _dispatch, contrast
from contrastile._types import Reduction
from contrastile.losses.base import Finished, Formula, PairLoss, Shard
from contrastile.losses.decoupled import Decoupled, DecoupledWeighted
from contrastile.losses.distilled import Distilled
from contrastile.losses.hardness import Hardness
from contrastile.losses.reference import dense_decoupled, dense_softmax
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax, SoftmaxInside, SoftmaxStats
from contrastile.tiles.eager import Eager
from contrastile.tiles.triton import block, budget, label_sums, launch, plan, positions, sorting
from contrastile.tiles.triton.backend import Triton
from contrastile.tiles.triton.kernels.arithmetic import CAREFUL, SHIFT
from contrastile.tiles.triton.kernels.masks import UNROLLED
from contrastile.tiles.triton.own import FusedOwnColumns
from contrastile.tiles.triton.plan import SHAPE_INTERPRETED, Masks, Pair, epilogue_for, interpreting, shape_for

COMPILED = not interpreting()
DEVICE = torch.device("cuda" if COMPILED else "cpu")
pytestmark = [
    pytest.mark.skipif(COMPILED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    *([pytest.mark.gpu] if COMPILED else []),
    # numpy's casts and exponentials warn where a float32 unit returns infinity or 0
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SYMMETRIC = Softmax(symmetric=True)
EPILOGUE = epilogue_for(SYMMETRIC)
SHAPE = shape_for(DEVICE) if torch.cuda.is_available() or not COMPILED else SHAPE_INTERPRETED
# rows of tiles, the last one short: three; two where every tile takes long
N, D = (2 if COMPILED else 1) * SHAPE.rows + 6, 40
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if COMPILED else [])]


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with DEVICE if COMPILED else nullcontext():
        yield


def _tiles(scale: float = 20.0, loss: Softmax = SYMMETRIC, workspace: int = 2**30) -> Triton:
    return Triton(loss, torch.tensor(scale), None, workspace)


def _unit(n: int, dtype: torch.dtype = torch.float16, features: int = D) -> Tensor:
    return F.normalize(torch.randn(n, features), dim=-1).to(dtype)


def _finished(tiles: Triton | Eager, rows: Shard, cols: Shard) -> tuple[Finished, Finished]:
    row_stats, col_stats = tiles.forward(rows, cols)
    assert col_stats is not None
    return tiles.loss.finish(row_stats), tiles.loss.finish(col_stats)


def _with_states(tiles: Triton | Eager, rows: Shard, cols: Shard, divisor: float = 1) -> list[Shard]:
    """Both sides with what the backward reads, for the sum of both directions' losses over the divisor."""
    finished = zip((rows, cols), _finished(tiles, rows, cols), strict=True)
    return [replace(side, state=end.state, coefficient=end.counts / divisor) for side, end in finished]


def _gradients(tiles: Triton | Eager, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor]:
    """u and v of the mean of both directions' losses."""
    rows, cols = _with_states(tiles, rows, cols, 2 * len(rows))
    u, v = (torch.zeros(side.features.shape, dtype=tiles.scale.dtype) for side in (rows, cols))
    tiles.backward(rows, cols, u, v)
    return u, v


def _alike(x: Tensor, y: Tensor) -> bool:
    """Equal, but that a compiler may sum up features of other strides in another order."""
    return distance(x, y) <= 1e-6 if COMPILED else torch.equal(x, y)


def _exact(tiles: Triton, rows: Shard, cols: Shard) -> tuple[Eager, Shard, Shard]:
    """The same in float64, by plain PyTorch."""
    wide = (replace(side, features=side.features.double()) for side in (rows, cols))
    return Eager(tiles.loss, tiles.scale.double(), None, 2**30), *wide


def _pair(q: Tensor, k: Tensor) -> tuple[Shard, Shard]:
    return Shard(q, diagonal=0), Shard(k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_is_no_further_from_float64_than_twice_the_dense_formula(name: str, dtype: torch.dtype) -> None:
    problem = PROBLEMS[name](45, 70)
    no_worse_than_twice(problem, problem.tensors(dtype), least=(1e-6, 1e-4), backend="triton")


@pytest.fixture
def _few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "LEAST_FEATURES", 1)


def _followed(tiles: Triton | Eager, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor, Tensor]:
    """u, v and the scale's gradient of the mean loss of each direction, the backward right behind the forward."""
    sides = []
    for side, stats in zip((rows, cols), tiles.forward(rows, cols), strict=True):
        end = None if stats is None else tiles.loss.finish(stats)
        sides.append(side if end is None else replace(side, state=end.state, coefficient=end.counts / len(side)))
    u, v = tiles.accumulators(*sides, (True, False, True, True))
    assert u is not None
    assert v is not None
    return u, v, tiles.pair_sums(tiles.backward(*sides, u, v), *sides, u, v, True)[1]


@pytest.mark.parametrize(
    ("n", "scale", "loss"),
    [(45, 20.0, Softmax()), (45, 3000.0, Softmax()), (14, 20.0, Decoupled())]
    + [(45, scale, SYMMETRIC) for scale in (20.0, 3000.0)]
    # at a scale of −2 the weights cancel the logits of negatives
    + [(14, scale, Hardness(symmetric=True, hardness_strength=2.0)) for scale in (20.0, -2.0)]
    + [(14, 20.0, Decoupled(symmetric=True))],
    ids=str,
)
@pytest.mark.usefixtures("_few_features")
def test_exponentials_are_kept_for_a_backward_that_follows(n: int, scale: float, loss: PairLoss) -> None:
    """At a scale of 3000 the careful kernels run; few rows have sums of columns in 16 bits."""
    features = _unit(n, torch.bfloat16), _unit(70, torch.bfloat16)
    if loss.symmetric:
        rows, cols = _pair(*features)
    else:
        rows, cols = Shard(features[0], positives=torch.randint(-1, 70, (n, 3))), Shard(features[1])
    tiles = Triton(loss, torch.tensor(scale), None, 2**30)
    tiles.backward_next = tiles.fresh = True
    for found, true in zip(_followed(tiles, rows, cols), _followed(*_exact(tiles, rows, cols)), strict=True):
        # strips, weighed rows and sums in 16 bits, which the interpreter truncates where a chip rounds
        least = 1e-4 if loss.symmetric else 1e-6
        assert distance(found, true) <= (1e-2 if found.ndim else least * max(1.0, scale / 20))
    assert tiles.exponentials is None


@pytest.mark.parametrize("loss", [SoftmaxInside(exclude_self=True), SoftmaxInside(symmetric=True)], ids=str)
@pytest.mark.parametrize(("scale", "many"), [(20.0, 0), (20.0, 2**20), (3000.0, 0)])
@pytest.mark.usefixtures("_few_features")
def test_exponentials_are_kept_with_labels(
    loss: PairLoss, scale: float, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positives in tiles of both sizes; some rows have no positive."""
    monkeypatch.setattr(sorting, "MANY", many)
    monkeypatch.setattr(sorting, "LONG", 12)
    labels = torch.randint(0, 9, (70,)) + torch.arange(70) // 60 * torch.arange(70)
    rows, cols = (
        Shard(_unit(70, torch.bfloat16), labels=labels),
        Shard(_unit(70, torch.bfloat16), labels=labels.flip(0)),
    )
    tiles = Triton(loss, torch.tensor(scale), None, 2**30)
    tiles.backward_next = tiles.fresh = True
    for found, true in zip(_followed(tiles, rows, cols), _followed(*_exact(tiles, rows, cols)), strict=True):
        least = 1e-4 if loss.symmetric else 1e-5
        assert distance(found, true) <= (1e-2 if found.ndim else least * max(1.0, scale / 20)), (
            found.ndim,
            distance(found, true),
        )
    assert tiles.exponentials is None


@pytest.mark.parametrize("loss", [SoftmaxInside(), SoftmaxInside(symmetric=True)], ids=str)
@pytest.mark.usefixtures("_few_features")
def test_sums_in_the_order_of_labels_exist_for_one_side_at_a_time(
    loss: PairLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where exponentials are kept, and where they are not."""
    made: list[weakref.ref[Tensor]] = []
    in_order = sorting.in_order

    @contextmanager
    def recorded(total: Tensor, order: Tensor | None, **given: Any) -> Iterator[Tensor]:
        with in_order(total, order, **given) as part:
            assert all(one() is None for one in made)
            made.append(weakref.ref(part))
            yield part

    monkeypatch.setattr(sorting, "in_order", recorded)
    rows, cols = (Shard(_unit(70, torch.bfloat16), labels=torch.arange(70) % 9) for _ in range(2))
    for kept in (True, False):
        tiles = Triton(loss, torch.tensor(20.0), None, 2**30)
        tiles.backward_next = tiles.fresh = kept
        _followed(tiles, rows, cols)
    assert len(made) == 4


# each loss in two of three ways: at once, with few features at a time, by the careful kernels
@pytest.mark.parametrize(
    ("loss", "scale", "workspace"),
    [
        (SYMMETRIC, 20.0, 2**30), (SYMMETRIC, 3000.0, 2**30), (Softmax(), 20.0, 2**17), (Softmax(), 3000.0, 2**30),
        (Softmax(exclude_self=True), 20.0, 2**30), (Softmax(exclude_self=True), 20.0, 2**17),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("_few_features")
def test_positives_by_label_are_sums_of_features(
    loss: Softmax, scale: float, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs over several chunks, of one row, and without a positive; sums of few features at a time in little memory."""
    # the longest run has more chunks than are added at once
    monkeypatch.setattr(label_sums, "CHUNK", 16)
    monkeypatch.setattr(label_sums, "TILES", 2)
    features = [_unit(n, torch.bfloat16, 140) for n in (75, 75 if loss.exclude_self else 110)]
    # the first is half of all rows, and each of the last is alone or on one side
    of_rows, of_cols = ((torch.arange(n) * 2 // n) * torch.arange(n) for n in map(len, features))
    of_rows = of_cols if loss.exclude_self else torch.where(of_rows == 60, of_rows - 1, of_rows)
    order = torch.randperm(75)
    rows = Shard(features[0], labels=of_rows[order], ids=None if workspace < 2**30 else torch.arange(75) % 13)
    cols = rows if loss.exclude_self else Shard(features[1], labels=of_cols)
    if rows.ids is not None and cols is not rows:
        # of which some are those of positives
        cols = replace(cols, ids=torch.arange(110) % 17)
    tiles = Triton(loss, torch.tensor(scale), None, workspace)
    assert tiles._budget.sums_labels(rows, cols)
    tiles.backward_next = tiles.fresh = True
    exact = _exact(tiles, rows, cols)
    for of_side in zip(tiles.forward(rows, cols), exact[0].forward(*exact[1:]), strict=True):
        losses = [loss.finish(stats).loss for stats in of_side if stats is not None]
        assert not losses or distance(*losses) <= 1e-6
    found, true = _followed(tiles, rows, cols), _followed(*exact)
    least = 1e-4 if loss.symmetric else 1e-5
    for x, y in zip(found, true, strict=True):
        assert distance(x, y) <= (1e-2 if x.ndim else least * max(1.0, scale / 20))


@pytest.mark.parametrize("loss", [SYMMETRIC, Softmax()], ids=str)
def test_a_single_positive_by_label_keeps_all_digits(loss: Softmax) -> None:
    """Of a confident model the difference of a log-sum-exp and a mean, or of sums of 16 bits, would be 0."""
    q = torch.eye(14, 80)
    q, labels = torch.cat([q, q[:3]]), torch.arange(17) % 14
    values, grads = [], []
    for name, dtype in (("triton", torch.bfloat16), ("eager", torch.float64)):
        sides = [q.to(dtype).requires_grad_() for _ in range(2)]
        given: dict[str, Any] = {"query_labels": labels, "key_labels": labels, "weights": (labels > 2).double()}
        values.append(contrast(*sides, scale=30.0, loss=loss, backend=name, **given))
        grads.append(torch.autograd.grad(values[-1], sides))
    assert 0 < values[1] < 1e-10
    assert distance(*(value.detach() for value in values)) <= 1e-5
    assert all(distance(*pair) <= 1e-2 for pair in zip(*grads, strict=True))


def test_sums_by_label_stay_within_the_workspace() -> None:
    """With less, or in float32, a block has the order of its labels; a teacher has sums in any case."""
    labels = torch.arange(70) % 3
    for dtype, workspace, loss, summed in (
        (torch.float16, 2**20, SYMMETRIC, True),
        (torch.float16, 2**15, SYMMETRIC, False),
        (torch.float32, 2**20, SYMMETRIC, False),
        (torch.float32, 2**15, Distilled(), True),
        (torch.float16, 2**20, SoftmaxInside(), False),
        (torch.float16, 2**20, Softmax(label_smoothing=0.1), False),
    ):
        sides = [Shard(_unit(70, dtype), labels=labels, ids=labels) for _ in range(2)]
        assert _tiles(loss=loss, workspace=workspace)._budget.sums_labels(*sides) == summed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("symmetric", "kind"), [(True, "diagonal"), (True, "labels"), (False, "listed"), (True, "ids"), (False, "ids")]
)
def test_label_smoothing_is_sums_of_features(
    symmetric: bool, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with one positive, several and none, with weights, in one super-tile and in several."""
    monkeypatch.setattr(budget, "LEAST_SMOOTHED", 0)
    loss, labels = Softmax(symmetric=symmetric, label_smoothing=0.2), torch.arange(70) ** 2 % 19
    weights, given = torch.rand(70), dict[str, Any]()
    if kind == "labels":
        given = {"query_labels": labels, "key_labels": labels.roll(3).where(labels > 1, 50)}
    if kind == "ids":
        # pairs have equal ids, or not; few keys count in some rows
        ids = torch.cat([labels // 5, torch.arange(63) % 4])
        given = {"query_ids": labels // 5, "key_ids": ids[: 70 if symmetric else 133].roll(3)}
    if kind == "listed":
        given["positives"] = torch.stack([labels, labels.where(labels > 5, -1).roll(2)], 1).where(
            labels[:, None] > 0, -1
        )
    features = [_unit(n, dtype, 24) for n in (70, 70 if symmetric else 133)]
    for workspace in (2**30, 2**20):
        found = []
        for backend, narrow, wide in (("triton", dtype, torch.float32), ("eager", torch.float64, torch.float64)):
            q, k, scale = leaves = [x.to(narrow) for x in features] + [torch.tensor(20.0, dtype=wide)]
            options: dict[str, Any] = {"backend": backend, "workspace": workspace, "weights": weights.to(wide)}
            value = contrast(
                q.requires_grad_(), k.requires_grad_(), scale=scale.requires_grad_(), loss=loss, **given, **options
            )
            found.append((value.detach(), *torch.autograd.grad(value, leaves)))
        bounds = (1e-6, 1e-2, 1e-2, 1e-5)
        assert all(distance(x, y) <= bound for x, y, bound in zip(*found, bounds, strict=True))


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_summed_label_smoothing_of_a_block_of_further_columns(
    symmetric: bool, ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank's rows meet the columns of all ranks, in one block or in several, in either order of their sizes."""
    monkeypatch.setattr(budget, "LEAST_SMOOTHED", 0)
    for N, M in ((33, 110), (110, 33)):
        rows, cols = _pair(*(_unit(n, torch.bfloat16) for n in (N, M)))
        if ids:
            rows, cols = (replace(side, ids=torch.arange(len(side)) % 13) for side in (rows, cols))
        tiles = _tiles(loss=Softmax(symmetric=symmetric, label_smoothing=0.2))
        tiles.backward_next = tiles.fresh = True
        assert tiles._budget.sums_smoothing(rows, cols)
        found, true = _followed(tiles, rows, cols), _followed(*_exact(tiles, rows, cols))
        assert all(distance(x, y) <= (1e-2 if x.ndim else 1e-5) for x, y in zip(found, true, strict=True))


@pytest.mark.usefixtures("_few_features")
def test_exponentials_are_kept_where_they_fit() -> None:
    rows, cols = _pair(_unit(14, torch.bfloat16), _unit(300, torch.bfloat16))
    for loss, workspace, backward_next, kept in (
        (Softmax(), 2**30, True, True),
        (Softmax(), 2**10, True, False),
        (Softmax(), 2**30, False, False),
        (SYMMETRIC, 2**30, True, True),
        (SYMMETRIC, 2**10, True, False),
        (Softmax(label_smoothing=0.1), 2**30, True, False),
    ):
        tiles = Triton(loss, torch.tensor(20.0), None, workspace)
        tiles.backward_next = backward_next
        tiles.forward(rows, cols)
        assert (tiles.exponentials is not None) == kept


@pytest.mark.parametrize("features", [D, D + 4])
def test_weighed_rows_beside_kept_exponentials_fit_the_workspace(features: int) -> None:
    """They are as wide as the copies of features that kernels cannot read."""
    rows, cols = _pair(_unit(300, torch.bfloat16, features), _unit(70, torch.bfloat16, features))
    workspace = 2**12
    while not budget.Budget(Softmax(), rows.features.device, workspace).keeps_exponentials(rows, cols):
        workspace += 64
    tiles = Triton(Softmax(), torch.tensor(20.0), None, workspace)
    tiles.backward_next = True
    tiles.forward(rows, cols)
    kept = tiles.exponentials
    assert kept is not None
    q, k = kept.pair.q, kept.pair.k
    copies = [side.data for side in (q, k)] if features > D else []
    assert sum(x.nbytes for x in (kept.strip, kept.parts, *copies)) + 2 * len(q) * q.width <= workspace


@pytest.mark.usefixtures("_few_features")
def test_a_call_that_keeps_exponentials_has_its_gradients_with_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is free before the backward. A loss alone keeps none."""
    sweeps: list[bool] = []
    backward = Triton.backward
    monkeypatch.setattr(Triton, "backward", lambda tiles, *how: (sweeps.append(tiles.fresh), backward(tiles, *how))[1])
    q, k = (_unit(40, torch.bfloat16).requires_grad_() for _ in range(2))
    options: dict[str, Any] = {"scale": 20.0, "loss": SYMMETRIC, "backend": "triton"}
    with torch.no_grad():
        contrast(q, k, **options)
    assert not sweeps
    value = contrast(q, k, **options)
    assert sweeps == [True]
    first, second = (torch.autograd.grad(value * times, (q, k), retain_graph=True) for times in (1.0, 4.0))
    assert all(torch.equal(4 * x, y) for x, y in zip(first, second, strict=True))
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    truth = torch.autograd.grad(dense_softmax(*wide, torch.tensor(20.0).double(), symmetric=True), wide)
    assert all(distance(x, y) <= 2e-2 for x, y in zip(first, truth, strict=True))


def test_weights_of_a_small_sigma_do_not_overflow() -> None:
    """exp(s / σ) is beyond float64."""
    q = _unit(14, torch.float32)
    sides = [x.requires_grad_() for x in (q.clone(), F.normalize(q + 0.01 * _unit(14, torch.float32), dim=-1))]
    loss = DecoupledWeighted(symmetric=True, sigma=0.001)
    exact = [x.double() for x in sides]
    values = [contrast(*x, scale=10.0, loss=loss, backend=b) for x, b in ((sides, "triton"), (exact, "eager"))]
    assert distance(*(value.detach() for value in values)) <= 1e-6
    assert all(distance(*pair) <= 1e-4 for pair in zip(*(torch.autograd.grad(x, sides) for x in values), strict=True))


def test_weights_of_labels_do_not_overflow_a_strip_of_fp16() -> None:
    """A row whose positive equals it has a weight far below 0."""
    q, k = _unit(128, features=16), _unit(128, features=16)
    k[3] = q[3]
    sides, labels = [q.requires_grad_(), k.requires_grad_()], torch.arange(128)
    more: dict[str, Any] = {"loss": DecoupledWeighted(symmetric=True), "query_labels": labels, "key_labels": labels}
    found, truth = (contrast(*sides, scale=10.0, backend=backend, **more) for backend in ("triton", "eager"))
    pairs = zip(*(torch.autograd.grad(x, sides) for x in (found, truth)), strict=True)
    assert all(distance(*pair) <= 2e-3 for pair in pairs)


@pytest.mark.parametrize("norms", [(2.0**11, 2.0**11, 2.0**-16), (2.0**-11, 2.0**26, 2.0**-6)], ids=str)
def test_kept_exponentials_times_large_features_do_not_overflow(norms: tuple[float, float, float]) -> None:
    """The weight of a row, which would make their sums small, is known later."""
    *lengths, scale = norms
    rows, cols = _pair(*(torch.full((n, 8), x, dtype=torch.bfloat16) for n, x in zip((8, 40), lengths, strict=True)))
    tiles = Triton(Softmax(), torch.tensor(scale), None, 2**30)
    tiles.backward_next = tiles.fresh = True
    assert all(torch.isfinite(x).all() for x in _followed(tiles, rows, cols))


@pytest.mark.parametrize(
    ("listed", "loss", "workspace"),
    [
        (UNROLLED.value, Softmax(), 2**30),
        (UNROLLED.value, Softmax(), 2**14),
        (UNROLLED.value + 1, Decoupled(exclude_self=True), 2**14),
        (11, Softmax(label_smoothing=0.1, exclude_self=True), 2**30),
    ],
    ids=str,
)
def test_any_number_of_positives_by_index_is_exact(
    listed: int, loss: PairLoss, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # less has several super-tiles
    monkeypatch.setattr(_dispatch, "LEAST_WORKSPACE", 1)
    n, m = N, N + SHAPE.cols
    # once more than there are, in places that come again, and with pads; one row with none
    positives = torch.randint(-1, m, (n, listed)).masked_fill(torch.arange(n)[:, None] == 3, -1)
    ids = {"query_ids": torch.arange(n) % 7, "key_ids": torch.arange(m) % 9}
    leaves = [_unit(rows, torch.float32).requires_grad_() for rows in (n, m)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    given: Any = {"scale": 20.0, "loss": loss, "positives": positives, "workspace": workspace, **ids}
    found, truth = (contrast(*sides, backend=kind, **given) for sides, kind in ((leaves, "triton"), (wide, "eager")))
    assert distance(found.detach(), truth.detach()) <= 1e-6
    gradients = torch.autograd.grad(found, leaves), torch.autograd.grad(truth, wide)
    assert all(distance(x, y) <= 1e-5 for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize(("M", "listed"), [(9, 3), (400, 1)])
def test_listed_positives_are_added_in_their_order_with_or_without_a_sort(
    M: int, listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, g, q, v = (
        torch.randint(-1, M, (20, listed)),
        torch.randn(20, listed),
        torch.randn(20, 33),
        torch.zeros(M, 33),
    )
    monkeypatch.setattr(positions, "SCAN", 16)
    positions.add_columns(v, q, columns, g)
    monkeypatch.setattr(positions, "SCANNED", 0)
    ordered = torch.zeros_like(v)
    positions.add_columns(ordered, q, columns, g)
    assert torch.equal(v, ordered)
    terms = g.double()[:, :, None] * q.double()[:, None]
    truth = torch.zeros(M + 1, 33).double().index_add_(0, columns.flatten() % (M + 1), terms.flatten(0, 1))[:M]
    assert distance(v, truth) <= 1e-6


def test_long_lists_of_positives_take_one_kernel() -> None:
    pair = Pair(*(launch.operand(_unit(n)) for n in (8, 50)), Masks(positives=torch.zeros(8, 30).long()))
    longer = replace(pair, masks=Masks(positives=torch.zeros(8, 31).long()))
    compiled, looped = "POSITIVES", "positives"
    assert pair.arguments[compiled] == longer.arguments[compiled] == UNROLLED.value + 1
    assert (pair.arguments[looped], longer.arguments[looped]) == (30, 31)
    assert not pair.flattened


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
def test_fp16_gradients_are_exact_before_the_final_cast(scale: float) -> None:
    tiles, (rows, cols) = _tiles(scale), _pair(_unit(N), _unit(N))
    for found, truth in zip(_gradients(tiles, rows, cols), _gradients(*_exact(tiles, rows, cols)), strict=True):
        assert distance(found, truth) <= 3e-4


@pytest.mark.parametrize("features", [1, 7, 33, 100])
def test_any_number_of_features_is_exact(features: int) -> None:
    tiles = _tiles(5.0)
    rows, cols = _pair(_unit(33, features=features), _unit(33, features=features))
    for found, truth in zip(_gradients(tiles, rows, cols), _gradients(*_exact(tiles, rows, cols)), strict=True):
        assert distance(found, truth) <= 3e-4


def test_strided_features_give_the_same_gradients() -> None:
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
    little = 2 * (2 * SHAPE.rows) * (2 * SHAPE.cols) + 2 * 4 * SHAPE.rows * plan.padded(D, SHAPE)
    wide, narrow = (_tiles(loss=loss, workspace=workspace) for workspace in (2**30, little))
    assert narrow.workspace_bytes(n, n, D, torch.float16) <= little < wide.workspace_bytes(n, n, D, torch.float16)
    for one, other in zip(_gradients(narrow, rows, cols), _gradients(wide, rows, cols), strict=True):
        assert distance(one, other) <= 1e-6


def test_the_sums_of_a_super_tile_are_freed_before_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them at once would take twice the workspace."""
    rows, cols = _pair(_unit(4 * SHAPE.rows), _unit(4 * SHAPE.rows))
    made: list[weakref.ref[Tensor]] = []
    new_parts = block.Block.new_parts

    def recorded(of_block: block.Block, *arguments: Any) -> list[Tensor]:
        assert all(part() is None for part in made)
        parts = new_parts(of_block, *arguments)
        made.extend(map(weakref.ref, parts))
        return parts

    monkeypatch.setattr(block.Block, "new_parts", recorded)
    for module, name in ((launch, "sums"), (launch, "merge_sums"), (positions, "add_totals")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    _tiles(workspace=2**12).forward(rows, cols)
    assert len(made) > 4


@pytest.mark.parametrize("labels", [False, True])
def test_copied_features_of_a_super_tile_are_freed_before_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, labels: bool
) -> None:
    """A row of super-tiles has one copy of its rows, and one of the columns of one super-tile."""
    n = 4 * SHAPE.rows
    rows, cols = _pair(_unit(n, torch.float32), _unit(n, torch.float32))
    if labels:
        rows, cols = (replace(side, diagonal=None, labels=torch.arange(n) % 7) for side in (rows, cols))
    copies: list[weakref.ref[Tensor]] = []
    known = launch.operand

    def copied(x: Tensor, order: Tensor | None = None) -> plan.Operand:
        assert sum(one() is not None for one in copies) <= 1
        copies.append(weakref.ref((operand := known(x, order)).data))
        return operand

    tiles = _tiles(loss=Decoupled(symmetric=True), workspace=2**12)
    sides = _with_states(tiles, rows, cols)
    monkeypatch.setattr(launch, "operand", copied)
    tiles.forward(rows, cols)
    tiles.backward(*sides, torch.zeros(n, D), torch.zeros(n, D))
    assert len(copies) > 4


def test_every_run_gives_the_same_bits() -> None:
    rows, cols = _pair(_unit(N), _unit(N))
    first = _gradients(_tiles(), rows, cols)
    for _ in range(100 if COMPILED else 1):
        again = _gradients(_tiles(), rows, cols)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_shards_of_columns_merge_into_the_whole() -> None:
    tiles, (rows, cols) = _tiles(), _pair(_unit(N), _unit(N))
    shards = [cols.narrow(0, 21), cols.narrow(21, N)]
    (one, left), (other, right) = (tiles.forward(rows, shard) for shard in shards)
    assert left is not None
    assert right is not None
    whole, whole_cols = tiles.forward(rows, cols)
    assert whole_cols is not None
    merged = tiles.loss.finish(tiles.loss.merge(one, other))
    assert distance(merged.loss, tiles.loss.finish(whole).loss) <= 1e-6
    met = tiles.loss.finish(torch.cat([left, right], dim=1))
    assert distance(met.loss, tiles.loss.finish(whole_cols).loss) <= 1e-6


def test_a_shard_whose_state_is_transposed_gives_the_same_bits() -> None:
    tiles = _tiles()
    rows, cols = _with_states(tiles, *_pair(_unit(N), _unit(N)))
    assert cols.state is not None
    transposed = replace(cols, state=cols.state.T.contiguous().T)
    u, again = torch.zeros(N, D), torch.zeros(N, D)
    tiles.backward(rows, cols, u, None)
    tiles.backward(rows, transposed, again, None)
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
def test_hostile_features_are_as_exact_as_float32_allows(
    hostile: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], scale: float
) -> None:
    tiles, (rows, cols) = _tiles(scale), _pair(*hostile(_unit(N), _unit(N)))
    exact = _exact(tiles, rows, cols)
    for found, truth in zip(_finished(tiles, rows, cols), _finished(*exact), strict=True):
        # logits of this size are rounded to scale · 2⁻²⁴, and more where norms are large
        assert distance(found.loss, truth.loss) <= 1e-6 * max(1.0, scale)
    for found, truth in zip(_gradients(tiles, rows, cols), _gradients(*exact), strict=True):
        # where all pulls cancel, compare with what one pair pulls
        assert (found - truth).norm() <= 1e-3 * max(1.0, scale / 100) * max(truth.norm(), N**-0.5)


def test_the_careful_flag_is_set_where_fast_sums_would_be_lost() -> None:
    q, k = _opposed(_unit(N), _unit(N))
    for scale, expected in ((1000.0, 1), (20.0, 0)):
        constants = _fast_totals(q, k, torch.tensor(scale))
        assert constants[int(CAREFUL.value)] == expected
        assert constants[int(SHIFT.value)] >= 0


@pytest.mark.parametrize("size", [D, 8 * D])
def test_long_features_of_all_directions_need_no_careful_kernels(size: int) -> None:
    """Logits deviate by 24, norms allow many times that, and the largest ones of rows lie up to 80 apart."""
    q, k = ((24 * size**0.5) ** 0.5 * _unit(4 * N, features=size) for _ in range(2))
    assert _fast_totals(q, k, torch.tensor(1.0))[int(CAREFUL.value)] == 0


@pytest.mark.parametrize(("times", "expected"), [(1.0, 0), (4.0, 1), (-4.0, 1)], ids=["alike", "far", "opposite"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_features_need_careful_kernels_only_where_logits_lie_far_apart(
    dtype: torch.dtype, times: float, expected: int
) -> None:
    """Norms allow logits of 900, those of most pairs are near 135; times: of those of one row."""
    half = (D - 1) // 2
    q, k = (0.004 * torch.randn(N, D) for _ in range(2))
    # of products a part along one feature, 900 · 0.16, and none along the others
    for side, first in ((q, 1), (k, 1 + half)):
        side[:, 0] += 0.4
        side[:, first : first + half] += 0.9 * _unit(N, torch.float32, half)
        side *= 30
    q[5] *= times
    q, k = q.to(dtype), k.to(dtype)
    constants = _fast_totals(q, k, torch.tensor(1.0))
    assert constants[int(CAREFUL.value)] == expected
    for symmetric in (False, True):
        tiles, rows = _tiles(1.0, Softmax(symmetric=symmetric)), Shard(q, diagonal=0)
        exact, *wide = _exact(tiles, rows, Shard(k))
        for found, true in zip(_followed(tiles, rows, Shard(k)), _followed(exact, *wide), strict=True):
            assert distance(found, true) <= (2e-2 if dtype == torch.bfloat16 else 4e-3)


def test_equal_products_of_long_features_have_a_finite_shift() -> None:
    """The mean of equal numbers may be rounded above all of them."""
    for _ in range(20):
        q, k = (x.half() for x in _collapsed(30 * _unit(N), _unit(N)))
        shift = launch.block_constants(q, k, torch.tensor(1.0), None, EPILOGUE)[int(SHIFT.value)]
        assert 1100 < shift < 1300


def _fast_totals(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    constants = launch.block_constants(q, k, scale, None, EPILOGUE)
    row_part = torch.empty(1, plan.tiles_of(len(k), SHAPE.cols), len(q))
    launch.sums(_as_pair(q, k), constants, [row_part], EPILOGUE)
    stats = SYMMETRIC.init(len(q), dtype=torch.float32, device=q.device)
    launch.merge_sums([row_part], [stats], constants, EPILOGUE)
    return constants


def _as_pair(q: Tensor, k: Tensor, masks: Masks = Masks()) -> Pair:  # noqa: B008 (a frozen value)
    return Pair(*(launch.operand(x) for x in (q, k)), masks)


def _constants(factor: float, shift: float) -> Tensor:
    """Those of a softmax whose careful flag is not set."""
    return torch.tensor([factor, shift, 1.0, 0.0, factor, 0.0, 0.0, 0.0, torch.inf])


@pytest.mark.parametrize(
    "masks", [Masks(), Masks(diagonal=3), Masks(self_diagonal=-5), Masks(diagonal=0, self_diagonal=7)], ids=repr
)
def test_integers_are_summed_exactly(masks: Masks) -> None:
    q, k = (torch.randint(-1, 2, (n, D)).half() for n in (N, 45))
    # factor 1, no shift: every term is a power of two, every sum a number of at most 24 bits
    row_part = torch.empty(1, plan.tiles_of(45, SHAPE.cols), N)
    col_part = torch.empty(1, plan.tiles_of(N, SHAPE.rows), 45)
    launch.sums(_as_pair(q, k, masks), _constants(1.0, 6.0), [row_part, col_part], EPILOGUE)
    exact = torch.exp2(q.double() @ k.double().T - 6)
    for offset in (masks.diagonal, masks.self_diagonal):
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
    strip = pair.new_strip().fill_(torch.nan)
    # zeros behind the weights, up to whole tiles
    weights = [F.pad(x, (0, launch.BLOCK))[None, : len(x)] for x in (a, b)]
    sums = launch.new_sums(strip.device)
    for _ in range(2):
        launch.gradient(pair, _constants(3.0, 1.0), weights, strip, sums, EPILOGUE)
    exact = torch.exp2(3 * q.float() @ k.float().T - 1) * (a[:, None] + b[None, :])
    exact.diagonal(2).zero_()
    (written,) = pair.strip_pieces(strip)
    assert torch.equal(written.float(), exact)
    # the result of two sweeps, in a sum of products of integers
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


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.07])
def test_a_scale_near_0_has_its_gradient(scale: float) -> None:
    """Kept exponentials give it times the scale."""
    sides = _unit(20, torch.float32, 320), _unit(20, torch.float32, 320)
    q, k = (F.normalize(x, dim=-1).bfloat16().requires_grad_() for x in (sides[0], 0.6 * sides[0] + 0.8 * sides[1]))
    leaf = torch.tensor(scale, requires_grad=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k, leaf)]
    (true,) = torch.autograd.grad(dense_softmax(*wide, symmetric=True), wide[2])
    (found,) = torch.autograd.grad(contrast(q, k, scale=leaf, backend="triton"), leaf)
    assert distance(found, true) <= 3e-4


def test_the_gradients_of_a_sigmoids_scale_and_bias_are_exact() -> None:
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
    k[N - 10, 3] = value
    assert contrast(q, k, scale=10.0, backend="triton").isnan()


def test_the_columns_gradient_alone_has_the_same_bits() -> None:
    tiles = _tiles()
    rows, cols = _with_states(tiles, *_pair(_unit(N), _unit(N)))
    both, alone = (torch.zeros(N, D), torch.zeros(N, D)), torch.zeros(N, D)
    tiles.backward(rows, cols, *both)
    tiles.backward(rows, cols, None, alone)
    assert torch.equal(alone, both[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_sigmoid_in_one_sweep_equals_two(dtype: torch.dtype) -> None:
    tiles = Triton(Sigmoid(), torch.tensor(10.0), torch.tensor(-4.0), 60_000)
    rows, cols = _pair(_unit(N, dtype), _unit(N, dtype))
    rows = replace(rows, state=torch.empty(0, N), coefficient=torch.rand(N))
    once, twice = ((torch.zeros(N, D), torch.zeros(N, D)) for _ in range(2))
    stats = tiles.init(rows)
    total = tiles.backward(rows, cols, *once, stats)
    assert distance(stats, tiles.forward(rows, cols)[0]) <= 1e-6
    assert torch.equal(total, tiles.backward(rows, cols, *twice))
    assert all(torch.equal(one, two) for one, two in zip(once, twice, strict=True))


@pytest.mark.parametrize("name", ["clip_ids_weights_smoothing", "sup_con", "siglip"])
def test_chips_without_a_copy_engine_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[name](45, 70)
    tensors = problem.tensors(torch.float32)
    loss, gradients = problem.by_tiles(tensors, backend="triton")
    if COMPILED:
        monkeypatch.setattr(plan, "SHAPES", {80: replace(SHAPE, tma=False)})
    else:
        monkeypatch.setattr(plan, "SHAPE_INTERPRETED", replace(SHAPE, tma=False))
    again, gradients_again = problem.by_tiles(tensors, backend="triton")
    assert torch.equal(loss, again)
    assert all(torch.equal(gradient, gradients_again[key]) for key, gradient in gradients.items())


def test_gradients_are_added_to_the_accumulators() -> None:
    tiles = _tiles()
    rows, cols = _with_states(tiles, *_pair(_unit(N), _unit(N)), divisor=N)
    fresh, added = torch.zeros(N, D), torch.ones(N, D)
    tiles.backward(rows, cols, fresh, None)
    tiles.backward(rows, cols, added, None)
    assert (added - 1 - fresh).abs().max() <= 1e-6


def test_no_rows_give_empty_statistics() -> None:
    tiles = _tiles()
    empty = Shard(torch.empty(0, D, dtype=torch.float16), diagonal=0)
    stats, col_stats = tiles.forward(empty, Shard(_unit(5)))
    assert stats.shape == (8, 0)
    assert col_stats is not None
    assert torch.equal(col_stats, tiles.init(Shard(_unit(5))))


@pytest.mark.parametrize("labels", [False, True])
def test_smoothing_equals_the_dense_formula_where_the_careful_kernels_run(labels: bool) -> None:
    """Positives by label, or logits of which the fast sums would lose some; over several super-tiles."""
    n = 2 * SHAPE.cols + 5
    q, k = (_unit(n, torch.float32) for _ in range(2))
    groups = torch.arange(n) % 5
    given = {"query_labels": groups, "key_labels": groups} if labels else {}
    positive = groups[:, None] == groups if labels else None
    loss = contrast(q, k, scale=1000.0, label_smoothing=0.1, backend="triton", workspace=2**20, **given)
    wide = (q.double(), k.double(), 1000.0)
    truth = dense_softmax(*wide, positive=positive, symmetric=True, label_smoothing=0.1)
    assert distance(loss, truth) <= 1e-6


def _with_gradients(backend: str, dtype: torch.dtype, leaves: list[Tensor], **given: Any) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    loss = contrast(*leaves[:2], scale=leaves[2], backend=backend, **given)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


def _against_float64(q: Tensor, k: Tensor, scale: float, **given: Any) -> None:
    """The fused loss and its gradients are at most twice as far from float64 as eager tiles in the same dtype."""
    leaves = [q, k, torch.tensor(scale)]
    truth = _with_gradients("eager", torch.float64, leaves, **given)
    eager, fused = (_with_gradients(name, torch.float32, leaves, **given) for name in ("eager", "triton"))
    for index, (found, plain, true) in enumerate(zip(fused, eager, truth, strict=True)):
        # logits of this size are rounded to scale · 2⁻²⁴; a single number can be right by luck
        least = 1e-6 * max(1.0, scale / 10) * (10 if index == 3 else 1)
        assert distance(found, true) <= max(2 * distance(plain, true), least), index


@pytest.mark.parametrize(
    ("loss", "scale", "reduction"),
    [
        *((loss, 1000.0, "mean") for loss in (Decoupled(), Decoupled(symmetric=True), Decoupled(exclude_self=True))),
        (Decoupled(), 20.0, "mean"),
        (Decoupled(symmetric=True), 20.0, "none"),
    ],
    ids=str,
)
def test_decoupled_positives_by_label_are_exact(loss: Decoupled, scale: float, reduction: Reduction) -> None:
    n, m = N, N if loss.exclude_self or loss.symmetric else N + SHAPE.cols
    labels = {"query_labels": torch.arange(n) % 7, "key_labels": torch.arange(m) % 9}
    labels |= {"query_ids": torch.arange(n) % 5, "key_ids": torch.arange(m) % 4}
    _against_float64(_unit(n), _unit(m), scale=scale, loss=loss, reduction=reduction, workspace=2**20, **labels)


@pytest.mark.parametrize("scale", [20.0, -50.0])
@pytest.mark.parametrize("loss", [Hardness(hardness_strength=30.0), Hardness(symmetric=True, hardness_strength=5.0)])
def test_positives_by_label_have_no_hardness_weights(loss: Hardness, scale: float) -> None:
    labels = {"query_labels": torch.arange(N) % 7, "key_labels": torch.arange(N) % 9}
    _against_float64(_unit(N), _unit(N), scale=scale, loss=loss, **labels)


@pytest.mark.parametrize("loss", [Softmax(), Softmax(symmetric=True, label_smoothing=0.1)], ids=str)
def test_the_loss_of_each_row_is_weighed(loss: Softmax) -> None:
    labels = {"query_labels": torch.arange(N) % 7, "key_labels": torch.arange(N) % 6}
    _against_float64(_unit(N), _unit(N), 20.0, loss=loss, reduction="none", weights=torch.rand(N), **labels)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_row_whose_only_keys_are_positives_has_no_decoupled_loss(symmetric: bool) -> None:
    """All other keys of some rows have their ids; and, on another step, of all rows."""
    q, k, loss = _unit(N), _unit(N), Decoupled(symmetric=symmetric)
    ids = {"query_ids": torch.arange(N) // (N - 1), "key_ids": torch.zeros(N, dtype=torch.int64)}
    ids["key_ids"][:3] = 5
    ids["query_ids"][:2] = 5
    _against_float64(q, k, scale=20.0, loss=loss, **ids)
    nobody = {name: torch.zeros(N, dtype=torch.int64) for name in ids}
    lone = contrast(q.requires_grad_(), k, scale=20.0, loss=loss, backend="triton", **nobody)
    assert lone == 0
    assert contrast(q, k, scale=20.0, loss=loss, backend="eager", **nobody) == 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (1, 77), (33, 2)])
def test_decoupled_losses_of_few_rows_or_keys(shape: tuple[int, int]) -> None:
    n, m = shape
    how = {"scale": 10.0, "loss": Decoupled(), "positives": torch.arange(n) % m}
    q, k = _unit(n, torch.float32).requires_grad_(), _unit(m, torch.float32)
    found, truth = contrast(q, k, backend="triton", **how), contrast(q.double(), k.double(), backend="eager", **how)
    gradients = [torch.autograd.grad(loss, q)[0] for loss in (found, truth)]
    assert distance(found.detach(), truth.detach()) <= 1e-6
    assert distance(*gradients) <= 1e-6
    assert m > 1 or found == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [20.0, 100.0, 1000.0])
def test_a_decoupled_loss_is_no_further_from_float64_than_twice_its_formula(scale: float, dtype: torch.dtype) -> None:
    k = _unit(N, torch.float32)
    q = F.normalize(0.6 * k + 0.8 * _unit(N, torch.float32), dim=-1)
    leaves = [q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), torch.tensor(scale, requires_grad=True)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth, formula = (dense_decoupled(*given, symmetric=True) for given in (wide, leaves))
    loss = contrast(*leaves[:2], scale=leaves[2], loss=Decoupled(symmetric=True), backend="triton")
    assert distance(loss.detach(), truth.detach()) <= max(2 * distance(formula.detach(), truth.detach()), 1e-6)
    gradients = [
        torch.autograd.grad(value, given) for value, given in ((loss, leaves), (truth, wide), (formula, leaves))
    ]
    for found, true, dense in zip(*gradients, strict=True):
        # a single number can be right by luck
        assert distance(found, true) <= max(2 * distance(dense, true), 1e-6 if found.ndim else 1e-4)


def test_decoupled_logits_beyond_float32_are_not_dropped() -> None:
    q, k = torch.eye(5), torch.eye(5)
    q[0], k[1] = 1e20, 1e20
    for name in ("triton", "eager"):
        assert not contrast(q, k, scale=10.0, loss=Decoupled(), backend=name).isfinite()


@dataclass(frozen=True)
class Heavier(Softmax):
    """A softmax whose negatives count several times; its own `finish` says so."""

    formula = Formula("exponential", finish_fields=frozenset({"times"}))
    times: float = 2.0

    def finish(self, stats: Tensor) -> Finished:
        named = SoftmaxStats(*stats)
        done = super().finish(torch.stack(named._replace(total=named.total * self.times)))
        # the inverse belongs to the negatives: a positive reads another row of the state
        done.state[1] *= self.times
        return done


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_loss_with_a_finish_of_its_own_is_fused(symmetric: bool) -> None:
    q, k = _unit(N), _unit(N)
    loss = Heavier(symmetric=symmetric)
    _against_float64(q, k, scale=20.0, loss=loss)
    # copies of the negatives do the same
    x = 20.0 * q.double() @ k.double().T
    heavier = x + torch.log(torch.tensor(2.0)) * (1 - torch.eye(N))
    directions = [heavier, heavier.T][: 1 + symmetric]
    truth = sum(F.cross_entropy(each, torch.arange(N)) for each in directions) / len(directions)
    found = contrast(q.float(), k.float(), scale=20.0, loss=loss, backend="triton")
    assert distance(found, truth) <= 1e-6


def test_float64_is_declined_with_its_reason() -> None:
    rows, cols = _pair(_unit(5, torch.float64), _unit(5, torch.float64))
    assert Triton.declines(SYMMETRIC, rows, cols) == "no kernel for torch.float64"


@pytest.mark.skipif(COMPILED, reason="needs tensors on the CPU")
def test_the_cpu_is_declined_where_kernels_are_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "interpreting", lambda: False)
    rows, cols = _pair(_unit(5), _unit(5))
    assert Triton.declines(SYMMETRIC, rows, cols) == "the features are on cpu, not on an NVIDIA device"


def test_another_loss_is_declined_by_its_name() -> None:
    class Mine(Softmax):
        pass

    rows, cols = _pair(_unit(5), _unit(5))
    assert Triton.declines(Mine(), rows, cols) == "no kernel for Mine"


@pytest.mark.parametrize("loss", [Softmax, Decoupled, Sigmoid])
def test_a_field_that_no_kernel_knows_is_declined_by_its_name(loss: type[PairLoss]) -> None:
    rows, cols = _pair(_unit(5), _unit(5))
    assert Triton.declines(loss(), rows, cols) is None
    formula = {"formula": loss.formula}
    wider = make_dataclass("Wider", [("margin", float, 0.0)], bases=(loss,), frozen=True, namespace=formula)
    assert Triton.declines(wider(), rows, cols) == "no kernel for Wider.margin"


@pytest.mark.parametrize("field", ["uses_bias", "pairwise"])
def test_exponentials_with_a_bias_or_without_statistics_are_declined(field: str) -> None:
    rows, cols = _pair(_unit(5), _unit(5))
    assert Triton.declines(replace(SYMMETRIC, **{field: True}), rows, cols) == f"no kernel for Softmax.{field}"


@pytest.mark.parametrize("labels", [False, True])
def test_ids_and_labels_are_compared_in_64_bits(labels: bool) -> None:
    """Those of neighbours differ in the upper half of their bits alone; every third label is that of another id."""
    numbers = torch.arange(40) % 8 * 2**32 + 2**40
    given = {"query_ids": numbers, "key_ids": numbers}
    if labels:
        of_labels = numbers.roll(1).where(torch.arange(40) % 3 == 0, numbers)
        given |= {"query_labels": of_labels, "key_labels": of_labels}
    leaves, results = [x.requires_grad_() for x in (_unit(40), _unit(40))], []
    for name in ("eager", "triton"):
        loss = contrast(*leaves, scale=20.0, loss=SYMMETRIC, backend=name, **given)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=0.02, atol=1e-3)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("strides", [(128, 2**30 + 64, 1), (8, 1, 2**30 + 64)], ids=["columns", "features"])
def test_columns_of_a_row_may_be_further_apart_than_32_bits(strides: tuple[int, int, int]) -> None:
    """Views of lists that begin with another axis, in memory of which a few bytes are used."""
    memory, N, H, D = torch.empty(2**32 + 4096, dtype=torch.int8), 2, 3, 3
    q, own = torch.randint(-9, 9, (N, D)), torch.randint(-9, 9, (N, H, D))
    given = memory.as_strided((N, H, D), strides, 2**31).copy_(own)
    products, u, g = torch.empty(N, H), torch.zeros(N, D), torch.randn(N, H)
    FusedOwnColumns.products(q.float(), given, products, torch.zeros(()))
    FusedOwnColumns.add(g, given, u)
    assert torch.equal(products, (q[:, None] * own).sum(2).float())
    torch.testing.assert_close(u, torch.einsum("nh,nhd->nd", g, own.float()))
    given = memory.as_strided((N, D), strides[:1] + strides[2:], 2**31).copy_(q)
    out = torch.empty(N, H, D)
    FusedOwnColumns.gradient(g, given, torch.tensor(2.0), out)
    torch.testing.assert_close(out, 2 * g[..., None] * q[:, None].float())
