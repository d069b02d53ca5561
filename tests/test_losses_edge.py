"""Inputs at the edge: collapsed, opposed and zero features, huge scales, confident models, NaN, one example."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from torch import Tensor

import contrastile
from contrastile import (
    ClipLoss,
    DCLLoss,
    DistillClipLoss,
    GISTLoss,
    InfoNCELoss,
    NTXentLoss,
    Ragged,
    ScoreDistillLoss,
    SigLipLoss,
    SupConLoss,
    contrast,
)  # fmt: skip
from contrastile.engine import arguments as checks
from contrastile.losses.base import PairLoss, Tile
from contrastile.losses.reference import dense_sigmoid, dense_softmax
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.modules import base
from contrastile.scorers import Bilinear, MaxSim, PairMLP
from contrastile.train.memory import Weighed

N, D = 203, 24


def _random() -> tuple[Tensor, Tensor]:
    return tuple(F.normalize(torch.randn(2, N, D, dtype=torch.float64), dim=-1))


def _identical() -> tuple[Tensor, Tensor]:
    one = F.normalize(torch.randn(1, D, dtype=torch.float64), dim=-1).expand(N, D)
    return one, one


def _opposed() -> tuple[Tensor, Tensor]:
    q, _ = _random()
    return q, -q


def _zero() -> tuple[Tensor, Tensor]:
    q, k = _random()
    return q.clone().index_fill_(0, torch.tensor([0, 7]), 0.0), k.clone().index_fill_(0, torch.tensor([7, 9]), 0.0)


def _one_row_apart() -> tuple[Tensor, Tensor]:
    # every logit of row 0 lies far under the others': with one maximum for all rows it would vanish
    q, _ = _identical()
    return torch.cat([-q[:1], q[1:]]), q


EXTREMES = {make.__name__: make for make in (_random, _identical, _opposed, _zero, _one_row_apart)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0, 1000.0])
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_features(name: str, scale: float, dtype: torch.dtype) -> None:
    q, k = (x.to(dtype).double() for x in EXTREMES[name]())
    exact = [x.clone().requires_grad_() for x in (q, k)]
    truth = dense_softmax(*exact, scale, symmetric=True)
    true_gradients = torch.autograd.grad(truth, exact)
    here = [x.to(dtype).requires_grad_() for x in (q, k)]
    loss = contrast(*here, scale=scale, workspace=2**20)
    gradients = torch.autograd.grad(loss, here)
    naive = [x.detach().requires_grad_() for x in here]
    naive_gradients = torch.autograd.grad(dense_softmax(*naive, scale, symmetric=True), naive)
    eps = torch.finfo(dtype).eps
    assert torch.isfinite(loss)
    assert (loss - truth).abs() <= 4 * eps * max(1.0, scale, abs(truth))
    for gradient, naive_gradient, true_gradient in zip(gradients, naive_gradients, true_gradients, strict=True):
        error = (gradient - true_gradient).abs().max()
        assert error <= max(2 * (naive_gradient - true_gradient).abs().max(), 64 * eps * max(1.0, scale) ** 2 / N)


@pytest.mark.parametrize("bias", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_features_of_the_sigmoid_loss(name: str, bias: float) -> None:
    q, k = (x.float() for x in EXTREMES[name]())
    truth = dense_sigmoid(q.double(), k.double(), 100.0, bias)
    assert distance(contrast(q, k, scale=100.0, bias=bias, loss=Sigmoid()), truth) <= 1e-6


@pytest.mark.parametrize("exponent", [1e-2, 1e-5, 1e-8])
def test_a_confident_model_keeps_its_digits(exponent: float) -> None:
    """At a loss of 1e-8, `lse − x` in float32 has no digit left; ours has five."""
    eye = torch.eye(64)
    scale = float(-torch.tensor(exponent).double().log() + torch.tensor(63.0).log())
    exact = [eye.double().requires_grad_() for _ in range(2)]
    truth = dense_softmax(*exact, scale, symmetric=True)
    true_gradients = torch.autograd.grad(truth, exact)
    truth = truth.detach()
    here = [eye.clone().requires_grad_() for _ in range(2)]
    loss = contrast(*here, scale=scale)
    gradients = torch.autograd.grad(loss, here)
    assert loss > 0
    assert distance(loss.detach(), truth) <= 1e-5
    assert all(distance(g, t) <= 1e-5 for g, t in zip(gradients, true_gradients, strict=True))


@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_the_loss_is_never_negative(scale: float) -> None:
    q = F.normalize(torch.randn(300, 32), dim=-1)
    rows = contrast(q, q, scale=scale, reduction="none", workspace=2**20)
    assert (rows >= 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("loss", [Softmax(symmetric=True), Softmax(), Sigmoid()], ids=str)
def test_a_bad_number_is_never_hidden(loss: object, side: str, bad: float) -> None:
    features = {"q": torch.randn(40, 8), "k": torch.randn(40, 8)}
    features[side][17, 3] = bad
    leaves = {key: x.requires_grad_() for key, x in features.items()}
    value = contrast(**leaves, scale=1.0, loss=loss)
    value.backward()
    assert value.isnan()
    assert all(x.grad.isnan().any() for x in leaves.values())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("N", [1, 40])
@pytest.mark.parametrize("backend", ["dense", "eager", "triton"])
def test_a_bad_bias_is_never_hidden(backend: str, N: int, reduction: str, bad: float) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    numbers = torch.tensor(5.0, requires_grad=True), torch.tensor(bad, requires_grad=True)
    leaves = *F.normalize(torch.randn(2, N, 8), dim=-1).unbind(), *numbers
    # a single pair with an infinite bias has no other than positive logits
    value = SigLipLoss(backend=backend, reduction=reduction)(*[x.requires_grad_() for x in leaves])
    value.sum().backward()
    assert value.isnan().all()
    assert all(x.grad.isnan().all() for x in leaves)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["dense", "eager", "triton"])
def test_a_query_to_which_no_key_counts_takes_no_part(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    dtype = torch.float32 if backend == "triton" else torch.float64
    q, k = (x.to(dtype).requires_grad_() for x in torch.randn(2, 4, 8))
    ids = {"query_ids": torch.tensor([0, 7, 1, 2]), "key_ids": torch.full((4,), 7)}
    positives = torch.tensor([0, -1, 2, 3])
    loss = InfoNCELoss(backend=backend)(q, k, 1.0, positives=positives, **ids)
    truth = F.cross_entropy(q[positives >= 0] @ k.T, positives[positives >= 0])
    assert distance(loss.detach(), truth.detach()) <= 1e-6
    gradients, exact = (torch.autograd.grad(value, (q, k)) for value in (loss, truth))
    assert all(distance(g, e) <= 1e-5 for g, e in zip(gradients, exact, strict=True))
    # an example that is alone is compared with nothing
    alone = F.normalize(torch.randn(1, 8, dtype=dtype), dim=-1).requires_grad_()
    value = SupConLoss(backend=backend, reduction="sum")(alone, torch.tensor([3]), 1.0)
    assert value == 0
    assert (torch.autograd.grad(value, alone)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_ids_of_any_integers_leave_negatives_to_nobody(dtype: torch.dtype) -> None:
    q, k, negatives = torch.randn(5, 8), torch.randn(5, 8), torch.randn(3, 8)
    ids = torch.tensor([0, 1, 1, 0, 1])
    wide, narrow = (
        contrast(q, k, scale=2.0, loss=Softmax(), negatives=negatives, query_ids=given, key_ids=given)
        for given in (ids, ids.to(dtype))
    )
    assert wide == narrow


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_positions_and_ids_of_own_negatives_may_be_unsigned(dtype: torch.dtype) -> None:
    q, k, own = torch.randn(5, 8), torch.randn(5, 8), torch.randn(5, 2, 8)
    positions, ids = torch.tensor([4, 0, 1, 3, 1]), torch.tensor([0, 1, 1, 0, 255])
    of_own = torch.tensor([[0, 1], [2, 3], [1, 1], [255, 4], [255, 0]])
    wide, narrow = (
        [
            InfoNCELoss()(q, k, 1.0, positives=p, negatives=own, query_ids=each, negative_ids=others),
            InfoNCELoss(in_batch=False)(q, k, 1.0, negatives=own, query_ids=each, negative_ids=others),
            GISTLoss(contrast_positives=True)(q, k, 1.0, guide_query=q, guide_key=k, positives=p),
            ScoreDistillLoss()(q, k, own[..., 0], lists=p[:, None].expand(5, 2)),
        ]
        for p, each, others in ((positions, ids, of_own), (positions.to(dtype), ids.to(dtype), of_own))
    )
    assert wide == narrow


@pytest.mark.parametrize("kind", ["labels", "ids"])
def test_the_least_of_all_labels_is_no_negatives(kind: str) -> None:
    q, k, negatives = torch.randn(5, 8), torch.randn(5, 8), torch.randn(3, 8)
    losses = []
    for smallest in (-1, torch.iinfo(torch.int64).min):
        given = torch.tensor([0, smallest, smallest, 0, 1])
        same = {f"query_{kind}": given, f"key_{kind}": given}
        losses.append(contrast(q, k, scale=2.0, loss=Softmax(), negatives=negatives, **same))
    assert losses[0] == losses[1]


def test_the_least_of_all_ids_is_no_negatives_where_keys_are_compared_with_keys() -> None:
    q, k, negatives = torch.randn(3, 5, 8)
    losses = []
    for smallest in (-1, torch.iinfo(torch.int64).min):
        ids = torch.tensor([0, smallest, smallest, 0, 1])
        # a margin that leaves all negatives to the ids
        loss = GISTLoss(margin=-1e3, contrast_anchors=True, contrast_positives=True)
        guides = {"guide_query": q, "guide_key": k, "guide_negatives": negatives}
        losses.append(loss(q, k, 2.0, negatives=negatives, query_ids=ids, key_ids=ids, **guides))
    assert losses[0] == losses[1]


def test_labels_that_are_all_different_are_told() -> None:
    labels = torch.arange(5)
    features = F.normalize(torch.randn(5, 8), dim=-1)
    with pytest.warns(UserWarning, match=r"all different: no example has a positive, and the loss is 0"):
        assert SupConLoss()(features, labels, 1.0) == 0
    # a loss of 0 for another reason, and NaN, have no such warning
    assert SupConLoss()(features[:2], labels[:2] * 0, 1.0) == 0
    assert SupConLoss()(features * torch.nan, labels, 1.0).isnan()


def test_open_clips_call_returns_its_dictionary() -> None:
    a, b = F.normalize(torch.randn(2, 4, 16), dim=-1)
    assert ClipLoss()(a, b, torch.tensor([5.0]), output_dict=True)["contrastive_loss"] == ClipLoss()(a, b, 5.0)


def test_a_bias_changes_nothing_in_a_softmax_and_gets_a_zero() -> None:
    a, b = F.normalize(torch.randn(2, 4, 16), dim=-1)
    bias = torch.tensor([3.0], requires_grad=True)
    loss = ClipLoss()(a.requires_grad_(), b, 5.0, bias)
    loss.backward()
    assert loss == ClipLoss()(a, b, 5.0)
    assert (bias.grad == 0).all()


# a call of each loss of cosines
OF_COSINES = {
    "ClipLoss": lambda loss, a, b: loss(a, b, 1.0),
    "SigLipLoss": lambda loss, a, b: loss(a, b, 1.0, -1.0),
    "NTXentLoss": lambda loss, a, b: loss(a, b, 1.0),
    "SupConLoss": lambda loss, a, b: loss(torch.stack([a, b], dim=1), torch.arange(len(a)) // 2, 1.0),
}


@pytest.mark.parametrize("name", OF_COSINES)
def test_rows_that_are_not_of_unit_length_are_said_once(name: str) -> None:
    loss, call, long = getattr(contrastile, name)(), OF_COSINES[name], torch.randn(2, 4, 8)
    with pytest.warns(UserWarning, match="rows of length") as told:
        call(loss, *long)
    assert [(str(one.message), one.filename) for one in told] == [
        (f"{name} got rows of length other than 1; it computes with features as given. Normalise them first, with "
         "torch.nn.functional.normalize(x, dim=-1).", __file__)
    ]  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call(loss, *long)
        call(type(loss)(), *F.normalize(long, dim=-1))
        InfoNCELoss()(*long, 1.0)
    assert not said


def test_columns_of_unit_length_are_said_to_be_no_rows() -> None:
    a, b = F.normalize(torch.randn(2, 16, 4), dim=-1)
    remedy = r"Its columns have length 1: normalise along dim=-1, or pass x\.T if columns are the examples\.$"
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.warns(UserWarning, match=remedy):
            ClipLoss()(a.T.to(dtype), b.T.to(dtype), 2.0)


def test_a_temperature_in_the_place_of_the_scale_is_said_once() -> None:
    loss, (a, b) = NTXentLoss(), F.normalize(torch.randn(2, 4, 8), dim=-1)
    with pytest.warns(UserWarning, match="scale") as told:
        loss(a, b, 0.07)
    assert [(str(one.message), one.filename) for one in told] == [
        ("NTXentLoss got a scale of 0.07, as if it were a temperature; products are multiplied by it. Pass "
         "1 / temperature.", __file__)
    ]  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss(a, b, 0.07)
        NTXentLoss()(a, b, 1 / 0.07)
        InfoNCELoss()(2 * a, b, 0.07)
        # values without a meaning as one, such as none at all
        NTXentLoss()(a, b, 0.0)
    assert not said


def test_keys_in_groups_are_said_once_where_the_first_ones_are_taken() -> None:
    q = F.normalize(torch.randn(40, 8), dim=-1)
    groups = F.normalize(torch.stack([q + 0.1 * torch.randn(40, 8), *torch.randn(2, 40, 8)], 1), dim=-1)
    loss, flat, behind = InfoNCELoss(), groups.flatten(0, 1), groups.transpose(0, 1).flatten(0, 1)
    with pytest.warns(UserWarning, match="groups") as told:
        loss(q, flat, 5.0)
    assert [(str(one.message), one.filename) for one in told] == [
        ("InfoNCELoss takes key i for that of query i, and got keys that look like groups of 3, one for each query "
         "with its positive first. If they are, pass positives=torch.arange(0, 120, 3).", __file__)
    ]  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss(q, flat, 5.0)
        InfoNCELoss()(q, flat, 5.0, positives=torch.arange(0, 120, 3))
        InfoNCELoss()(q, behind, 5.0)
        InfoNCELoss()(q, F.normalize(torch.randn(120, 8), dim=-1), 5.0)
        InfoNCELoss()(q, q[:1].expand(120, 8), 5.0)
        InfoNCELoss()(q, flat[:-1], 5.0)
    assert not said


def test_a_logarithm_in_the_place_of_the_scale_is_said() -> None:
    a, b = F.normalize(torch.randn(2, 4, 8), dim=-1)
    sentence = (
        r"^InfoNCELoss got a scale of 2\.659, the logarithm of 1 / 0\.07; products are multiplied by it\. "
        r"Pass logit_scale\.exp\(\)\.$"
    )
    with pytest.warns(UserWarning, match=sentence):
        InfoNCELoss()(a, b, torch.nn.Parameter(torch.tensor(math.log(1 / 0.07))))
    with pytest.warns(UserWarning, match="a temperature"):
        InfoNCELoss()(a, b, torch.tensor(0.05))


@pytest.mark.parametrize("words", [
    "InfoNCELoss(in_batch=False)", "InfoNCELoss(hardness_mode='all_negatives', hardness_strength=5.0)",
    "GISTLoss(margin=0.1, contrast_positives=True, exchange='ring')", "DCLLoss(sigma=0.5)", "SupConLoss(form='in')",
    "SigLipLoss(balanced=True)", "DistillClipLoss(weight=0.9)", "ScoreDistillLoss(kind='margin_mse')", "ClipLoss()",
])  # fmt: skip
def test_a_loss_is_written_as_it_was_made(words: str) -> None:
    made = eval(words, {name: getattr(contrastile, name) for name in contrastile.__all__})
    assert repr(made) == words


def test_a_loss_of_a_users_own_class_is_written_with_the_options_that_differ() -> None:
    class Balanced(contrastile.SigLipLoss):
        def __init__(self, **how: Any) -> None:
            super().__init__(balanced=True, **how)

    assert repr(Balanced(exchange="ring")) == "Balanced(balanced=True, exchange='ring')"


def test_a_scale_is_looked_at_where_a_query_meets_its_own_key_alone() -> None:
    a, b = F.normalize(torch.randn(2, 4, 8), dim=-1)
    with pytest.warns(UserWarning, match="a temperature"):
        InfoNCELoss(in_batch=False)(a, b, 0.05, negatives=b[:, None])


def test_an_error_of_a_scorer_keeps_its_traceback() -> None:
    class Failing(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            raise ValueError("nothing to compare") from KeyError("cause")

    with pytest.raises(ValueError, match="nothing to compare") as raised:
        contrastile.ScoreDistillLoss()(torch.randn(2, 4), torch.randn(2, 3, 4), torch.randn(2, 3), scorer=Failing())
    assert raised.traceback[-1].name == "forward"
    assert "nothing to compare" in str(raised.traceback[-1].statement)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("of_ids", [True, False])
def test_a_row_without_negatives_whose_positive_lies_far_below_other_logits(of_ids: bool) -> None:
    sides = torch.eye(4)
    query, key = sides[:2].clone().requires_grad_(), torch.stack([-sides[0], sides[1]]).requires_grad_()
    guides = {"guide_query": sides[:2], "guide_key": torch.stack([0.1 * sides[0], 0.6 * sides[0] + 0.8 * sides[1]])}
    ids = dict.fromkeys(("query_ids", "key_ids"), torch.zeros(2, dtype=torch.int64))
    loss = InfoNCELoss()(query, key, 100.0, **ids) if of_ids else GISTLoss()(query, key, 100.0, **guides)
    assert float(loss.detach()) < 1e-30
    for gradient in torch.autograd.grad(loss, (query, key)):
        assert gradient.abs().max() < 1e-30


def test_a_negative_scale_is_said() -> None:
    with pytest.warns(UserWarning, match=r"^ClipLoss got a scale of -10, which drives positives apart; products are "):
        contrastile.ClipLoss()(*F.normalize(torch.randn(2, 4, 8), dim=-1), -10.0)


@pytest.mark.parametrize("name", OF_COSINES)
def test_lengths_on_a_gpu_are_read_in_few_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's tensors are taken for a GPU's, in a process that has read none yet."""
    looked, rows = [], F.normalize(torch.randn(2, 4, 8), dim=-1)
    monkeypatch.setattr(checks, "on_gpu", lambda x: True)
    monkeypatch.setattr(checks, "captured", lambda *x: False)
    monkeypatch.setattr(base, "_gpu_reads", checks.GpuReads())
    lengths = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *x, **how: looked.append(0) or lengths(*x, **how))
    kept = getattr(contrastile, name)()
    for _ in range(3):
        OF_COSINES[name](kept, *rows)
    sides = len(looked)
    assert sides in (1, 2)
    for _ in range(checks.MOST_READS + 2):
        OF_COSINES[name](type(kept)(), *rows)
    assert len(looked) == sides * checks.MOST_READS


@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("labels", [False, True])
def test_means_of_large_logits_that_are_nearly_equal_keep_their_digits(
    labels: bool, smoothing: float, size: float
) -> None:
    """The statistics of logits as they are: no product's rounding hides theirs."""
    x = size + 1e-2 * torch.randn(24, 96)
    # a part of the columns hardly counts
    x[:, 40:50] -= 0.9 * size
    positive = torch.arange(24)[:, None] % 3 == torch.arange(96) % 3 if labels else torch.eye(24, 96, dtype=torch.bool)
    log_p = x.double().log_softmax(1)
    of_positives = (log_p * positive).sum(1) / positive.sum(1)
    truth = -((1 - smoothing) * of_positives + smoothing * log_p.mean(1))
    loss = Softmax(label_smoothing=smoothing)
    stats = loss.init(24, dtype=x.dtype, device=x.device)
    for start in range(0, 96, 32):
        marks = positive[:, start : start + 32]
        (part,) = loss.absorb(Tile(x[:, start : start + 32].clone(), marks if marks.any() else None, None, None))
        stats = loss.merge(stats, part)
    torch.testing.assert_close(loss.finish(stats).loss.double(), truth, rtol=3e-7, atol=0)


@pytest.mark.parametrize("given", ["ids", "labels"])
@pytest.mark.parametrize("scorer", [None, Bilinear(8, 8)], ids=["products", "scorer"])
def test_groups_that_change_before_the_backward_are_noticed(scorer: Bilinear | None, given: str) -> None:
    """A buffer that the next batch's ids are written to would give another loss's gradient."""
    q, k = (x.requires_grad_() for x in torch.randn(2, 5, 8))
    groups = torch.tensor([0, 0, 1, 2, 2])
    loss = contrast(q, k, scale=1.0, scorer=scorer, **{f"query_{given}": groups, f"key_{given}": groups})
    groups.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


TAUGHT: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "teacher": lambda q, k, given, one: DistillClipLoss(reduction="none")(q, k, 1.0, given, k.detach(), one),
    "scale of a teacher": lambda q, k, given, one: DistillClipLoss(reduction="none")(q, k, 1.0, k.detach(), one, given),
    "guide": lambda q, k, given, one: GISTLoss(reduction="none")(q, k, 1.0, guide_query=one, guide_key=given),
    "scores": lambda q, k, given, _: ScoreDistillLoss()(q, k[:, None].expand(5, 8, 8), given),
}


def _taught(name: str) -> tuple[Tensor, Tensor]:
    """A tensor that a teacher or a guide made, and another one."""
    alone = name == "scale of a teacher"
    given, one = torch.tensor(2.0) if alone else torch.randn(5, 8), torch.randn(5, 8)
    return given, torch.tensor(2.0) if name == "teacher" else one


@pytest.mark.filterwarnings("ignore:.*rows of length")
@pytest.mark.parametrize("name", TAUGHT)
def test_what_a_teacher_made_is_not_changed_before_the_backward(name: str) -> None:
    """A buffer of the next batch's features or scores would give another loss's gradient."""
    q, k = (x.requires_grad_() for x in torch.randn(2, 5, 8))
    given, one = _taught(name)
    loss = TAUGHT[name](q, k, given, one).mean()
    given.mul_(-3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*rows of length")
@pytest.mark.parametrize("name", TAUGHT)
def test_what_a_teacher_made_in_inference_mode_is_taken(name: str) -> None:
    q, k = (x.requires_grad_() for x in torch.randn(2, 5, 8))
    with torch.inference_mode():
        given, one = _taught(name)
    loss = TAUGHT[name](q, k, given, one).mean()
    assert torch.equal(loss, TAUGHT[name](q, k, given.clone(), one.clone()).mean())
    loss.backward()
    assert q.grad is not None


def test_a_pair_that_does_not_count_has_a_gradient_of_nan_too() -> None:
    """With label smoothing too, whose share such a pair has not."""
    q, k = (x.requires_grad_() for x in torch.randn(2, 3, 8))
    with torch.no_grad():
        q[0, 0] = -torch.inf
    ids, positives = {"query_ids": torch.zeros(3).long(), "key_ids": torch.tensor([1, 2, 0])}, torch.tensor([1, 1, 0])
    loss = contrast(q, k, scale=1.0, loss=Softmax(label_smoothing=0.1), positives=positives, **ids)
    assert all(x.isnan().all() for x in (loss, *torch.autograd.grad(loss, (q, k))))


def test_ids_of_inference_mode_are_taken() -> None:
    q, k = (x.requires_grad_() for x in torch.randn(2, 3, 8))
    with torch.inference_mode():
        ids = torch.tensor([0, 0, 1])
    contrast(q, k, scale=1.0, query_ids=ids, key_ids=ids).backward()
    assert q.grad is not None


def test_weights_are_constants() -> None:
    q, weights = torch.randn(3, 8), torch.ones(3, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(contrast(q, q, scale=1.0, weights=weights), contrast(q, q, scale=1.0))


def test_the_same_bits_every_time() -> None:
    q, k = (x.requires_grad_() for x in torch.randn(2, 300, 16))
    runs = [torch.autograd.grad(contrast(q, k, scale=3.0, workspace=2**20), [q, k]) for _ in range(3)]
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("loss", [Softmax(), Softmax(symmetric=True), Softmax(label_smoothing=0.1), Sigmoid()])
def test_a_loss_without_gradients_has_the_value_of_one_with_them(loss: PairLoss, dtype: torch.dtype) -> None:
    """A softmax's bits, in one strip and in several, with the positives on a diagonal and elsewhere."""
    q, k = (x.to(dtype) for x in torch.randn(2, 300, 16))
    for reduction in ("mean", "sum"):
        for workspace in (None, 2**20):
            for positives in (None,) if loss.symmetric else (None, torch.arange(300) // 2):
                call = partial(
                    contrast, k=k, scale=3.0, loss=loss, reduction=reduction, workspace=workspace, positives=positives
                )
                with torch.no_grad():
                    alone = call(q)
                with_them = call(q.clone().requires_grad_()).detach()
                torch.testing.assert_close(alone, with_them, rtol=1e-6 * loss.pairwise, atol=0)


def test_a_loss_of_many_pairs_without_gradients_holds_one_tile() -> None:
    """A strip over all keys is larger than a core's cache, and takes longer than tiles."""
    q, k = torch.randn(2, 8192, 4)
    loss = InfoNCELoss(backend="eager")
    with torch.no_grad():
        loss(q, k, 0.1)
        with Weighed(torch.device("cpu")) as weighed:
            loss(q, k, 0.1)
    assert weighed.bytes < 1.5 * 4 * 1024**2


def test_the_sigmoid_losss_backward_can_be_repeated_and_scaled() -> None:
    """Its gradients come with the loss; they must survive a first backward."""
    a, b = (x.requires_grad_() for x in F.normalize(torch.randn(2, 40, 8), dim=-1))
    loss = SigLipLoss()(a, b, 10.0, -10.0)
    once = torch.autograd.grad(loss, [a, b], retain_graph=True)
    twice = torch.autograd.grad(2 * loss, [a, b])
    assert all(distance(y, 2 * x) <= 1e-6 for x, y in zip(once, twice, strict=True))


@pytest.mark.parametrize(("workspace", "matrices"), [(2**20, 1.3), (2**28, 1.3)])
def test_a_dense_matrix_beyond_the_workspace_is_held_once(workspace: int, matrices: float) -> None:
    q, k = (F.normalize(torch.randn(1500, 16), dim=-1).requires_grad_() for _ in "qk")
    loss = InfoNCELoss(backend="dense", workspace=workspace)
    with Weighed(torch.device("cpu")) as weighed:
        loss(q, k, 20.0).backward()
    assert matrices - 0.4 <= weighed.bytes / (4 * 1500**2) <= matrices


def test_losses_do_not_depend_on_the_default_device() -> None:
    """As after torch.set_default_device("cuda"), with features on the CPU."""
    q, k = (F.normalize(torch.randn(40, 4), dim=-1).requires_grad_() for _ in "qk")
    tokens, positives = torch.randn(7, 2, 4, requires_grad=True), torch.randint(40, (40,))
    packed, mlp = Ragged(tokens.flatten(0, 1), [2] * 7), PairMLP(4, 4, hidden=4, dropout=0.3)
    with torch.device("meta"):
        losses = [
            ClipLoss()(q, k, 10.0), SigLipLoss()(q, k, 10.0, -10.0), DCLLoss()(q, k, 10.0), NTXentLoss()(q, k, 10.0),
            InfoNCELoss()(q, k, 10.0, positives=positives), contrast(tokens, tokens, scorer=MaxSim()),
            contrast(packed, tokens, scorer=MaxSim()), contrast(q, k, scorer=mlp),
        ]  # fmt: skip
        sum(losses).backward()
    assert all(loss.device.type == "cpu" for loss in losses)
