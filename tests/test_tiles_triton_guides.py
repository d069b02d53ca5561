"""Fused kernels with a guide, as a mask or a teacher: several super-tiles, careful sums, positives of any kind, types.

Interpreted on the CPU; on a GPU, and in bf16 too, with `make test-gpu`. Whole losses are in `test_losses_further.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from torch import Tensor

pytest.importorskip("triton")

from contrastile import GISTLoss, _dispatch, contrast
from contrastile.losses import BalancedSigmoid, Distilled, Guided, SoftmaxInside
from contrastile.losses.base import PairLoss
from contrastile.losses.softmax import Softmax
from contrastile.tiles.triton import budget, launch, sorting
from contrastile.tiles.triton.kernels.arithmetic import CAREFUL
from contrastile.tiles.triton.plan import EXACT, interpreting, products_of

COMPILED = not interpreting()
DEVICE = torch.device("cuda" if COMPILED else "cpu")
pytestmark = [
    pytest.mark.skipif(COMPILED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    *([pytest.mark.gpu] if COMPILED else []),
    # numpy's exponentials warn where a float32 unit returns infinity or 0
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
# rows and columns: several tiles of each, the last ones short
N, M, D, G = (300, 390, 40, 24) if COMPILED else (37, 43, 19, 11)
TEACHER = Distilled(symmetric=True, weight=0.4)


# bytes in which a super-tile is one tile
LITTLE = 2**16 if COMPILED else 2**12


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_dispatch, "LEAST_WORKSPACE", LITTLE)
    with DEVICE if COMPILED else nullcontext():
        yield


@pytest.fixture
def careful_flags(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The careful flag of each block whose backward the kernels compute."""
    flags, careful = list[bool](), launch.careful_gradient

    def spied(pair: Any, block: Any, *others: Any) -> None:
        flags.append(bool(block.constants[int(CAREFUL.value)]))
        careful(pair, block, *others)

    monkeypatch.setattr(launch, "careful_gradient", spied)
    return flags


def _unit(n: int, features: int = D) -> Tensor:
    return F.normalize(torch.randn(n, features), dim=-1)


def _leaves(n: int, m: int, scale: float = 20.0) -> list[Tensor]:
    k = _unit(m)
    return [F.normalize(_unit(n) + k[torch.arange(n) % m], dim=-1), k, torch.tensor(scale)]


def _result(backend: str, dtype: torch.dtype, leaves: list[Tensor], **given: Any) -> list[Tensor]:
    """The loss and its gradients; features of this type, numbers in float32 or float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [x.detach().to(dtype if x.ndim else wide).requires_grad_() for x in leaves]
    loss = contrast(*leaves[:2], scale=leaves[2], backend=backend, **given)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


def _against_eager(
    leaves: list[Tensor], dtype: torch.dtype = torch.float32, steepest: float = 0.0, **given: Any
) -> None:
    """Loss and gradients are at most twice as far from float64 as eager tiles of the same type.

    steepest: the largest scale of student and teacher, where it is large. The tensor cores of a chip truncate their
    running sums: a product is off by 1e-7 of the features' norms, which the scale multiplies, and a probability by as
    much as its logit.
    """
    leaves = [x.to(dtype).float() if x.ndim else x for x in leaves]
    truth = _result("eager", torch.float64, leaves, **given)
    eager, fused = (_result(name, dtype, leaves, **given) for name in ("eager", "triton"))
    least = max(1e-6 * max(1.0, float(leaves[2]) / 20), COMPILED * 1e-7 * steepest)
    for index, (found, plain, true) in enumerate(zip(fused, eager, truth, strict=True)):
        # the strip of gradients has 16 bits where features have them; a single number can be right by luck
        allowed = {torch.float32: least, torch.float16: 3e-4, torch.bfloat16: 3e-3}[dtype] if found.ndim else 20 * least
        if index == 0:
            # the difference of numbers near 1 may be near 0
            assert (found - true).abs() <= max(2 * (plain - true).abs(), allowed * max(1.0, float(true)))
        else:
            assert distance(found, true) <= max(2 * distance(plain, true), allowed), index


def _guide(n: int, m: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Whole numbers, whose similarities are the same in every type; pairs are similar."""
    b = torch.randint(-3, 4, (m, G))
    a = b[torch.arange(n) % m] * (torch.arange(G) % 3 == 0) + torch.randint(-1, 2, (n, G))
    return {"guide_q": a.to(dtype), "guide_k": b.to(dtype)}


def _teacher(n: int, m: int, dtype: torch.dtype = torch.float32, scale: float = 15.0) -> dict[str, Tensor]:
    b = _unit(m, G)
    a = F.normalize(_unit(n, G) + b[torch.arange(n) % m], dim=-1)
    return {"guide_q": (scale * a).to(dtype), "guide_k": b.to(dtype)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if COMPILED else [torch.float16], ids=str)
def test_types_of_student_and_guide_are_their_own(dtype: torch.dtype) -> None:
    _against_eager(_leaves(N, N), torch.float16, loss=TEACHER, **_teacher(N, N, dtype))
    _against_eager(_leaves(N, M), torch.float16, loss=Guided(), **_guide(N, M, torch.float32))


def test_a_guide_of_several_super_tiles_with_ids_and_listed_positives() -> None:
    ids = {"query_ids": torch.arange(N) % 7, "key_ids": torch.arange(M) % 9}
    positives = torch.randint(-1, M, (N, 2)).masked_fill(torch.arange(N)[:, None] == 3, -1)
    loss = Guided(label_smoothing=0.1, margin=1.0)
    _against_eager(_leaves(N, M), loss=loss, positives=positives, workspace=LITTLE, **ids, **_guide(N, M))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_guide_that_excludes_every_negative(dtype: torch.dtype, careful_flags: list[bool]) -> None:
    """Of a row, whose sum is 0: the fast kernels know that it has no pair."""
    guide = _guide(N, N)
    guide["guide_q"][5] = 0
    _against_eager(_leaves(N, N), dtype, loss=Guided(margin=1.0), **guide)
    _against_eager(_leaves(N, N), dtype, loss=Guided(margin=1.0), workspace=LITTLE, **guide)
    assert careful_flags
    assert not any(careful_flags)


def test_a_block_without_negatives_beside_one_of_far_logits() -> None:
    """The guide excludes all pairs of keys, whose block would have its top far above the logits of the other."""
    query, key = (40 * _unit(N)).requires_grad_(), (40 * _unit(N)).requires_grad_()
    guide_key = F.one_hot(torch.zeros(N, dtype=torch.int64), 2).float()
    guides = {"guide_query": guide_key * 0.5, "guide_key": guide_key}
    results = []
    for backend in ("eager", "triton"):
        loss = GISTLoss(contrast_positives=True, backend=backend)(query, key, 1.0, **guides)
        results.append([loss.detach(), *torch.autograd.grad(loss, (query, key))])
    for fused, plain in zip(*results[::-1], strict=True):
        assert distance(fused, plain) <= 1e-4


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("side", ["guide_q", "guide_k"])
def test_a_guide_that_is_not_finite_makes_the_loss_nan(side: str, reduction: str) -> None:
    guide, leaves = _guide(N, N), _leaves(N, N)
    guide[side][3, 2] = torch.inf
    loss, *gradients = _result("triton", torch.float32, leaves, loss=Guided(), reduction=reduction, **guide)
    assert loss.isnan().all()
    assert all(x.isnan().any() for x in gradients)


def test_the_bits_of_a_mask_are_those_of_the_forward_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One super-tile of the forward has the bits of several of the backward."""
    masks, gradients = (_counted(monkeypatch, launch, name) for name in ("excluded_bits", "gradient"))
    # between the bytes of both passes: 2 more bytes for each number of a strip than of its bits
    workspace = 2**21 if COMPILED else 36_000
    _against_eager(_leaves(N, M), loss=Guided(), workspace=workspace, **_guide(N, M))
    assert len(masks) == 1
    assert len(gradients) > 1 or COMPILED


def _counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    """The calls of a function."""
    calls, function = [], getattr(module, name)

    def spied(*arguments: Any, **words: Any) -> Any:
        calls.append(name)
        return function(*arguments, **words)

    monkeypatch.setattr(module, name, spied)
    return calls


def test_a_teacher_of_features_in_bf16() -> None:
    ids = torch.arange(N) % 30
    leaves = [x.bfloat16().float() if x.ndim else x for x in _leaves(N, N)]
    given = {"loss": TEACHER, "query_ids": ids, "key_ids": ids, "workspace": LITTLE, **_teacher(N, N)}
    truth = _result("eager", torch.float64, leaves, **given)
    found = _result("triton", torch.bfloat16, leaves, **given)
    # the interpreter truncates what a chip rounds
    for x, true, allowed in zip(found, truth, (1e-5, 1e-2, 1e-2, 1e-3), strict=True):
        assert distance(x, true) <= allowed


@pytest.mark.parametrize("scale", [20.0, 1000.0])
@pytest.mark.parametrize("labels", [False, True])
def test_a_teachers_exponentials_are_kept(labels: bool, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, for the backward behind; at a scale of 1000 the careful kernels run."""
    monkeypatch.setattr(budget, "LEAST_FEATURES", 1)
    monkeypatch.setattr(budget, "LEAST_DISTILLED", 1)
    kept, fill = list[bool](), launch.gradient

    def spied(*given: Any, **options: Any) -> None:
        kept.append(options["kept"])
        fill(*given, **options)

    monkeypatch.setattr(launch, "gradient", spied)
    leaves = [x.bfloat16().float() if x.ndim else x for x in _leaves(N, N, scale)]
    given: dict[str, Any] = {"loss": TEACHER, "weights": torch.rand(N), **_teacher(N, N, torch.bfloat16, scale)}
    if scale > 100:
        given["guide_q"] = -given["guide_q"].abs()
    given |= {f"{side}_ids": torch.arange(N) % 30 for side in ("query", "key")}
    if labels:
        given |= {f"{side}_labels": torch.randint(15, (N,)) for side in ("query", "key")}
    truth = _result("eager", torch.float64, leaves, **given)
    found = _result("triton", torch.bfloat16, leaves, **given)
    assert kept == [True]
    # the interpreter truncates what a chip rounds
    for x, true, allowed in zip(found, truth, (2e-4, 1e-2, 1e-2, 2e-3), strict=True):
        assert distance(x, true) <= allowed


def test_a_scale_of_zero_is_masked_too() -> None:
    _against_eager(_leaves(N, N, 0.0), loss=Guided(), **_guide(N, N))


def test_a_teacher_of_several_super_tiles_with_ids() -> None:
    ids = torch.arange(N) % 60
    weights = torch.rand(N)
    _against_eager(
        _leaves(N, N), loss=TEACHER, query_ids=ids, key_ids=ids, weights=weights, workspace=LITTLE, **_teacher(N, N)
    )


def test_a_teacher_of_tiles_of_which_one_has_equal_ids() -> None:
    n = 4 * N
    leaves, teacher, ids = _leaves(n, n), _teacher(n, n), torch.arange(n)
    # the same example twice
    for x in (*leaves[:2], ids):
        x.detach()[n // 2] = x.detach()[5]
    given = {"loss": TEACHER, "query_ids": ids, "key_ids": ids, **teacher}
    _against_eager(leaves, **given)
    with torch.no_grad():
        alone, fused = (contrast(*leaves[:2], scale=leaves[2], backend=name, **given) for name in ("eager", "triton"))
    torch.testing.assert_close(fused, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("scale", "teacher"), [(20.0, 1000.0), (1000.0, 1000.0)])
def test_a_teacher_where_the_careful_kernels_run(scale: float, teacher: float) -> None:
    """Most logits are far below the largest possible ones, of the teacher or of the student too."""
    q, k, _ = _leaves(N, N)
    apart = [F.normalize(side - 0.5, dim=-1) for side in (q.abs(), -k.abs())]
    guides = _teacher(N, N, scale=teacher)
    guides["guide_q"] = -guides["guide_q"].abs()
    guides["guide_k"] = guides["guide_k"].abs()
    loss = Distilled(weight=0.4)
    _against_eager([*apart, torch.tensor(scale)], loss=loss, workspace=LITTLE, steepest=max(scale, teacher), **guides)


@pytest.mark.parametrize("scale", [20.0, 1000.0])
def test_the_loss_of_a_teacher_alone_is_that_beside_its_gradients(scale: float) -> None:
    """Without gradients both products of a tile are summed together, with them the backward completes the loss."""
    ids = torch.arange(N) % 30
    leaves = _leaves(N, N, scale)
    teacher = _teacher(N, N, scale=scale)
    # far below the largest logits possible: the careful kernels
    teacher["guide_q"] = -teacher["guide_q"].abs() if scale > 100 else teacher["guide_q"]
    given = {"loss": TEACHER, "query_ids": ids, "key_ids": ids, "weights": torch.rand(N), **teacher}
    alone = contrast(*leaves[:2], scale=leaves[2], backend="triton", **given)
    for workspace in (LITTLE, None):
        torch.testing.assert_close(_result("triton", torch.float32, leaves, workspace=workspace, **given)[0], alone)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("side", ["guide_q", "guide_k"])
def test_a_teacher_that_is_not_finite_makes_loss_and_gradients_nan(side: str, reduction: str) -> None:
    """A loss of one direction: in both, sums over rows and over columns carry NaN to all of them in any case."""
    teacher, loss = _teacher(N, N), Distilled(weight=0.4)
    teacher[side][3, 2] = -torch.inf
    results = _result("triton", torch.float32, _leaves(N, N), loss=loss, reduction=reduction, **teacher)
    assert all(x.isnan().all() for x in results)
    with torch.no_grad():
        q, k, scale = _leaves(N, N)
        assert contrast(q, k, scale=scale, loss=loss, reduction=reduction, backend="triton", **teacher).isnan().all()


def test_a_teacher_of_listed_positives() -> None:
    positives = torch.randint(-1, M, (N, 2)).masked_fill(torch.arange(N)[:, None] == 3, -1)
    # a key listed twice counts once
    positives[:, 1] = positives[:, 1].masked_fill(positives[:, 1] == positives[:, 0], -1)
    _against_eager(_leaves(N, M), loss=Distilled(weight=0.4), positives=positives, **_teacher(N, M))


@pytest.mark.parametrize("loss", [TEACHER, Distilled(weight=0.4), Distilled(weight=1.0)])
@pytest.mark.parametrize("number", [2, 15, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_teacher_of_positives_by_label(loss: Distilled, number: int, dtype: torch.dtype) -> None:
    """Rows with many positives, with one, and with none; pairs of equal ids and labels, and of equal ids alone."""
    groups: dict[str, Any] = {f"{side}_labels": torch.randint(number, (N,)) for side in ("query", "key")}
    if number != 15:
        groups |= {f"{side}_ids": torch.randint(20, (N,)) for side in ("query", "key")}
    workspace = LITTLE if number == 2 else None
    _against_eager(
        _leaves(N, N), dtype, loss=loss, weights=torch.rand(N), workspace=workspace, **groups, **_teacher(N, N)
    )


def test_a_teachers_loss_keeps_its_digits_where_positives_are_close() -> None:
    """Of float32 features: log-sum-exp and mean are near 100, with the rounding error of the tiles' factor in both."""
    labels, same = torch.arange(N) % 3, torch.eye(3, D)[torch.arange(N) % 3]
    given = {"query_labels": labels, "key_labels": labels, "guide_q": 50 * same, "guide_k": same, "loss": TEACHER}
    found, true = (
        contrast(same.to(dtype), same.to(dtype), scale=99.9, backend=backend, **given)
        for backend, dtype in (("triton", torch.float32), ("eager", torch.float64))
    )
    assert (found - true).abs() <= 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (1, 2)])
def test_few_rows_have_a_teacher(shape: tuple[int, int]) -> None:
    n, m = shape
    loss = Distilled(weight=0.4)
    _against_eager(_leaves(n, m), loss=loss, **_teacher(n, m))


@pytest.mark.parametrize(
    ("loss", "scale"),
    [
        (BalancedSigmoid(), 20.0),
        (SoftmaxInside(symmetric=True), 20.0),
        (Softmax(symmetric=True), 20.0),
        # positives far under the largest logit possible
        (Softmax(symmetric=True), 1000.0),
    ],
    ids=repr,
)
def test_positives_by_label(loss: PairLoss, scale: float, careful_flags: list[bool]) -> None:
    labels = torch.arange(N) % 23
    given = {"query_labels": labels, "key_labels": labels.flip(0)}
    _against_eager(_leaves(N, N, scale), loss=loss, workspace=LITTLE, **given)
    # the fast kernels compute them where they can
    assert set(careful_flags) == ({scale > 100} if isinstance(loss, Softmax) else set())


@pytest.mark.parametrize(
    ("loss", "workspace"),
    [
        (BalancedSigmoid(), LITTLE),
        (Softmax(exclude_self=True), LITTLE),
        (Softmax(symmetric=True, label_smoothing=0.1), LITTLE),
        (Softmax(symmetric=True, label_smoothing=0.1), 2**24),
        (SoftmaxInside(exclude_self=True), LITTLE),
    ],
    ids=repr,
)
def test_rows_with_many_positives_and_rows_with_few(
    loss: PairLoss, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tall tiles, several to a row tile and shared by programs, compute some rows, and small ones the others."""
    monkeypatch.setattr(sorting, "MANY", 2)
    monkeypatch.setattr(sorting, "LONG", 24)
    # in order: a tile of equal labels alone, one with others too, one without
    rows = torch.arange(2 * N)
    labels = torch.where(rows % 3 < 2, -1, rows)
    given = {"query_labels": labels, "key_labels": labels}
    multiplied = dict(products_of(EXACT))
    _against_eager(_leaves(2 * N, 2 * N), loss=loss, workspace=workspace, **given)
    # positives of columns exchange the pieces of both sides, for themselves alone
    assert products_of(EXACT) == multiplied


@pytest.mark.parametrize(
    ("loss", "counted"),
    [(Softmax(exclude_self=True, label_smoothing=0.1), 0), (Softmax(symmetric=True, exclude_self=True), 2**14)],
    ids=["sorted", "counted"],
)
def test_an_example_with_two_labels_is_not_compared_with_itself(
    loss: PairLoss, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels of some rows alone, and of some columns alone; more labels than are sorted by counting."""
    monkeypatch.setattr(sorting, "MOST_CHUNKED", counted)
    groups = {f"{side}_{name}": torch.randint(-5, 12, (N,)) for side in ("query", "key") for name in ("labels", "ids")}
    _against_eager(_leaves(N, N), torch.float16, loss=loss, workspace=LITTLE, **groups)


@pytest.mark.parametrize("number", [0, 2**14], ids=["sorted", "counted"])
def test_the_order_of_labels(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "MOST_CHUNKED", number)
    rows, cols = (torch.randint(-(2**40), 2**40, (n,))[torch.randint(0, n // 3, (n,))] for n in (N, M + 200))
    for labels, found in zip((rows, cols), sorting._sorted(rows, cols), strict=True):
        values, order = labels.sort(stable=True)
        assert torch.equal(torch.stack(found), torch.stack([values, order, order.argsort()]))
    assert torch.equal(sorting.count_equal(cols, rows), (cols[:, None] == rows).sum(1, dtype=torch.int32))


def test_the_mean_inside_of_listed_positives() -> None:
    _against_eager(_leaves(N, M), loss=SoftmaxInside(), positives=torch.randint(-1, M, (N, 3)))
