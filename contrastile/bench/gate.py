"""Distances of a loss and its gradients from float64, and the limits above which a result has no speed.

Stands under `loss.py`. A `Gate` compares whole results on fewer rows. A `Sample` compares results at a case's own size,
with all the weight on a few rows and columns, for which the truth is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.bench import subjects as sub
from contrastile.bench.peers import Case, Loss
from contrastile.losses.reference import (
    dense_clip,
    dense_decoupled,
    dense_distilled,
    dense_sigmoid,
    dense_softmax,
    mises_fisher_weights,
)
from contrastile.modules import ClipLoss, DCLLoss, DistillClipLoss, GISTLoss, InfoNCELoss, SigLipLoss

SCALE = 100.0
# of dclw, of hardness, and of a teacher
SIGMA, HARDNESS, TEACHER_SCALE, TEACHER_WEIGHT = 0.5, sub.HARDNESS, 50.0, 0.5
# every so many features of a key's guide are those of its query's
SHARED = 8
# rows on which whole results are compared with float64
GATE_ROWS = {"cuda": 10048}
GATE_ROWS_ELSEWHERE = 1000
# relative distances from float64 that rounding explains, before the gradient's last cast
LOSS_TOLERANCE, SCALAR_TOLERANCE = 1e-6, 1e-4
GRADIENT_TOLERANCE = {("bfloat16", None): 1e-3, ("float16", None): 3e-4, ("float32", "high"): 1e-4}
# the limit for other types, and for all: this many times the distance of the dense formula in the same type
DENSE_FACTOR = 2.0
# a few roundings of float32, by which the dense formula may be exact by luck where rows are few
ROUNDINGS = 2.0**-20
# elements that are compared at once: a float64 copy of a large gradient may not fit; rows that are drawn at once
CHUNK, DRAWN = 2**27, 2**16
# rows and columns that have all the weight at a case's own size
SAMPLE_ROWS = 32


@dataclass(frozen=True)
class Subject:
    """A loss: its reference, contrastile's module, and the operations per b^2 d that it needs.

    A softmax needs its logits twice, before and after the normaliser is known, and two products for the gradients; a
    sigmoid needs its logits once. sampled: the reference for weights on a few rows and, if symmetric, their columns.
    summed: how many times the loss is the sum that is rounded.
    """

    reference: Loss
    sampled: Callable[..., Tensor]
    module: Callable[..., torch.nn.Module]
    operations: int
    bias: float | None = None
    summed: float = 1.0


def _some_rows(loss: Loss, some: Tensor, q: Tensor, k: Tensor, *scalars: Tensor) -> Tensor:
    """The mean loss of a few rows over all columns."""
    positive = some[:, None] == torch.arange(len(k), device=k.device)
    return loss(q[some], k, *scalars, positive=positive)


def _some_clip(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return (_some_rows(dense_softmax, some, q, k, scale) + _some_rows(dense_softmax, some, k, q, scale)) / 2


def _some_dclw(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Both directions of a few rows; their weights depend on all."""
    weighted = partial(dense_decoupled, of_positives=mises_fisher_weights(q, k, SIGMA)[some])
    return (_some_rows(weighted, some, q, k, scale) + _some_rows(weighted, some, k, q, scale)) / 2


def _some_dcl(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return (_some_rows(dense_decoupled, some, q, k, scale) + _some_rows(dense_decoupled, some, k, q, scale)) / 2


def _dense_dclw(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return dense_decoupled(q, k, scale, symmetric=True, of_positives=mises_fisher_weights(q, k, SIGMA))


class _With(torch.nn.Module):
    """A loss with further inputs, which are made of the features at the first call with them."""

    def __init__(
        self, loss: Callable[..., torch.nn.Module], further: Callable[..., dict[str, Any]], **how: Any
    ) -> None:
        super().__init__()
        self.loss, self.further = loss(**how), further
        self._of: tuple[Tensor, ...] = ()
        self._made: dict[str, Any] = {}

    def forward(self, q: Tensor, k: Tensor, *numbers: Tensor, **others: Any) -> Tensor:
        if not self._of or self._of[0] is not q or self._of[1] is not k:
            self._of, self._made = (q, k), self.further(q, k)
        value: Tensor = self.loss(q, k, *numbers, **self._made, **others)
        return value


def _guide(x: Tensor) -> Tensor:
    """Features of a guide: −1, 0 and 1, whose similarities are exact in every type.

    Zero up to a power of two near half of a feature's size: a product with the size would be rounded across another
    bound in 16 bits, and not in float64.
    """
    bound = 2.0 ** round(math.log2(0.5 / x.shape[1] ** 0.5))
    return x.detach().sign() * (x.detach().abs() > bound)


def _guide_key(q: Tensor, k: Tensor) -> Tensor:
    """Features by which most keys are less similar to a query than its own."""
    return torch.where(torch.arange(k.shape[1], device=k.device) % SHARED == 0, _guide(q), _guide(k))


def _teachers(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Features of a teacher, which are exact in every type: those of the student, of one side in another order."""
    return q.detach(), k.detach().roll(1, 1)


def _some_gist(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    guide = _guide(q)[some].float() @ _guide_key(q, k).float().T
    positive = some[:, None] == torch.arange(len(k), device=k.device)
    false = (guide > guide.masked_fill(~positive, torch.inf).amin(1, keepdim=True)) & ~positive
    return dense_softmax(q[some], k, scale, positive=positive, excluded=false)


def _dense_distill(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    image, text = _teachers(q, k)
    teacher = TEACHER_SCALE * image @ text.T
    ways = ((q, k, teacher), (k, q, teacher.T))
    return sum(dense_distilled(a, b, scale, t, TEACHER_WEIGHT) for a, b, t in ways) / 2  # type: ignore[return-value]


def _some_distill(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    losses = []
    image, text = _teachers(q, k)
    for a, b, of_a, of_b in ((q, k, image, text), (k, q, text, image)):
        teacher = TEACHER_SCALE * of_a[some] @ of_b.T
        positive = some[:, None] == torch.arange(len(b), device=b.device)
        losses.append(dense_distilled(a[some], b, scale, teacher, TEACHER_WEIGHT, positive=positive))
    return (losses[0] + losses[1]) / 2


def _some_own(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    x = torch.cat([q[some] @ k.T, (sub.own(k)[some] @ q[some][..., None])[..., 0]], 1)
    return F.cross_entropy(scale * x, some)


def _further_gist(q: Tensor, k: Tensor) -> dict[str, Any]:
    return {"guide_query": _guide(q), "guide_key": _guide_key(q, k)}


def _further_distill(q: Tensor, k: Tensor) -> dict[str, Any]:
    image, text = _teachers(q, k)
    return {"dist_image_features": image, "dist_text_features": text, "dist_logit_scale": TEACHER_SCALE}


def _further_own(q: Tensor, k: Tensor) -> dict[str, Any]:
    del q
    return {"negatives": sub.own(k)}


def _labelled(
    rows: Callable[..., Tensor], module: Callable[..., torch.nn.Module], operations: int, bias: float | None = None
) -> Subject:
    """Positives by label."""
    labelled = partial(_With, module, lambda q, _: {"labels": sub.labels_of(q)})
    return Subject(sub.over_all(rows), rows, labelled, operations, bias)


def _views(form: str) -> Subject:
    """A matrix of twice the rows and columns."""
    rows = partial(sub.some_views, form)
    return Subject(sub.over_all(rows), rows, partial(sub.Views, form), 32)


def _scored(kind: str) -> Subject:
    """Lists, whose products are not those of b² pairs: no rate."""
    rows = partial(sub.some_scores, kind)
    return Subject(sub.over_all(rows), rows, partial(sub.Listed, kind), 0)


_distill = partial(DistillClipLoss, weight=TEACHER_WEIGHT)
_dense_hardness = partial(dense_softmax, hardness=HARDNESS)
_hardness = partial(InfoNCELoss, hardness_mode="all_negatives", hardness_strength=HARDNESS)
SUBJECTS = {
    "clip": Subject(dense_clip, _some_clip, ClipLoss, 8),
    "siglip": Subject(dense_sigmoid, partial(_some_rows, dense_sigmoid), SigLipLoss, 6, bias=-10.0),
    "infonce": Subject(dense_softmax, partial(_some_rows, dense_softmax), InfoNCELoss, 8),
    "dcl": Subject(partial(dense_decoupled, symmetric=True), _some_dcl, DCLLoss, 8),
    "dclw": Subject(_dense_dclw, _some_dclw, partial(DCLLoss, sigma=SIGMA), 8),
    "gist": Subject(sub.over_all(_some_gist), _some_gist, partial(_With, GISTLoss, _further_gist), 12),
    "distill": Subject(_dense_distill, _some_distill, partial(_With, _distill, _further_distill), 12),
    "own": Subject(sub.over_all(_some_own), _some_own, partial(_With, InfoNCELoss, _further_own), 8),
    "hardness_own": Subject(
        sub.over_all(sub.some_hardness_own), sub.some_hardness_own, partial(_With, sub.hardness_own, _further_own), 8
    ),
    "queue": Subject(sub.over_all(sub.some_queue), sub.some_queue, partial(_With, InfoNCELoss, sub.queued), 16),
    "clip_labels": _labelled(sub.some_clip_labels, ClipLoss, 8),
    "siglip_labels": _labelled(sub.some_siglip_labels, SigLipLoss, 6, -10.0),
    # a tile's sum has every positive at full weight, before the share that balance takes is subtracted
    "siglip_balanced": replace(
        _labelled(sub.some_siglip_balanced, partial(SigLipLoss, balanced=True), 6, -10.0), summed=sub.OF_A_LABEL
    ),
    **{name: _views(form) for name, form in (("supcon", "out"), ("supcon_in", "in"))},
    **{kind: _scored(kind) for kind in ("kl", "margin_mse")},
    "hardness": Subject(_dense_hardness, partial(_some_rows, _dense_hardness), _hardness, 8),
}


def problem(case: Case, device: torch.device, *, on_host: bool = False) -> list[Tensor]:
    """Return leaves: random unit features of both sides [b, d], the scale and, if the loss has one, the bias.

    on_host: the features are in host memory, pinned where the device is a GPU, and drawn on the device.
    """
    generator = torch.Generator(device).manual_seed(case.b + case.d)
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    place = {"device": "cpu", "pin_memory": device.type == "cuda"} if on_host else {"device": device}
    q, k = (torch.empty(case.b, case.d, dtype=getattr(torch, case.dtype), **place) for _ in range(2))
    for rows in (*q.split(DRAWN), *k.split(DRAWN)):
        drawn = torch.randn(rows.shape, generator=generator, dtype=wide, device=device)
        rows.copy_(F.normalize(drawn, dim=-1))
    scalars = [x for x in (SCALE, SUBJECTS[case.loss].bias) if x is not None]
    leaves = [q, k, *(torch.tensor(x, dtype=wide, device=device) for x in scalars)]
    return [leaf.requires_grad_() for leaf in leaves]


def placed(leaves: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return the same leaves with the features on a device."""
    return [*(side.detach().to(device).requires_grad_() for side in leaves[:2]), *leaves[2:]]


def step(loss: Loss, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Run forward and backward; return the loss and the gradients of all leaves."""
    value = loss(*leaves)
    return (value.detach(), *torch.autograd.grad(value, leaves))


@dataclass(frozen=True)
class Distance:
    """Relative distances from float64: of the loss, the worse features' gradient, the worse scalar's gradient."""

    loss: float
    gradient: float
    scalar: float

    @classmethod
    def between(cls, results: Iterable[Tensor], true: Iterable[Tensor]) -> Distance:
        value, *gradients = (_relative(x, y) for x, y in zip(results, true, strict=True))
        return cls(value, _worst(gradients[:2]), _worst(gradients[2:]))

    def worst(self, other: Distance) -> Distance:
        return Distance(*(_worst(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def gate_rows(device: torch.device) -> int:
    """Return the rows on which whole results are compared with float64."""
    return GATE_ROWS.get(device.type, GATE_ROWS_ELSEWHERE)


def double(leaves: list[Tensor]) -> list[Tensor]:
    """Return the same leaves in float64."""
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def _true_step(loss: Loss, leaves: list[Tensor]) -> tuple[tuple[Tensor, ...], float]:
    """The step in float64, and the distance of its gradients after a cast to the features' type."""
    true = step(loss, double(leaves))
    return true, max(_relative(gradient.to(leaves[0].dtype), gradient) for gradient in true[1:3])


class Gate:
    """A case on few rows: its true result, and the distance of the dense formula in the case's type."""

    def __init__(self, case: Case, device: torch.device) -> None:
        small = Case(case.loss, min(case.b, gate_rows(device)), case.d, case.dtype)
        reference = SUBJECTS[case.loss].reference
        self.loss_tolerance = LOSS_TOLERANCE * SUBJECTS[case.loss].summed
        self.leaves = problem(small, device)
        self.true, self.cast = _true_step(reference, self.leaves)
        self.dense = self.distance(step(reference, self.leaves)).gradient
        precision = case.precision if case.dtype == "float32" else None
        self.tolerance = GRADIENT_TOLERANCE.get((case.dtype, precision), math.inf)

    def distance(self, results: Loss | tuple[Tensor, ...]) -> Distance:
        """Return the distance of the results of `step`, or of a loss on these leaves."""
        return Distance.between(results if isinstance(results, tuple) else step(results, self.leaves), self.true)

    def red(self, distance: Distance, cast: float | None = None) -> str | None:
        """Return a sentence on a distance that rounding does not explain; None if there is none.

        cast: the distance of a cast alone, for gradients at another size.
        """
        by_cast = self.tolerance + (self.cast if cast is None else cast)
        for name, size, limit in (
            ("the loss", distance.loss, self.loss_tolerance),
            ("a gradient", distance.gradient, min(by_cast, max(ROUNDINGS, DENSE_FACTOR * self.dense))),
            ("the scale's or the bias's gradient", distance.scalar, SCALAR_TOLERANCE),
        ):
            if not size <= limit:
                return f"{name} is {size:.1e} from float64, and {limit:.1e} is allowed: no speed for a wrong result"
        return None


class Sample:
    """A case at its own size with all the weight on a few rows and columns.

    The kernels sweep over all pairs as always; the truth needs these rows and columns only, and gives every gradient.
    """

    def __init__(self, loss: str, leaves: list[Tensor]) -> None:
        self.leaves, self.loss = leaves, loss
        b, device = len(leaves[0]), leaves[0].device
        self.rows = torch.linspace(0, b - 1, min(SAMPLE_ROWS, b), dtype=torch.float64, device=device).long()
        self.weights = torch.zeros(b, device=device)
        self.weights[self.rows] = 1.0

    def step(self, loss: Loss) -> tuple[Tensor, ...]:
        """Run `step` of a loss that takes weights."""
        return step(partial(loss, weights=self.weights), self.leaves)

    def distance(self, results: tuple[Tensor, ...]) -> tuple[Distance, float]:
        """Return the distance of results, and that of the last cast of the gradients alone."""
        true, cast = _true_step(partial(SUBJECTS[self.loss].sampled, self.rows), self.leaves)
        return Distance.between(results, true), cast


def _relative(x: Tensor, true: Tensor) -> float:
    """‖x − true‖ / ‖true‖, a chunk at a time."""
    chunks = zip(x.reshape(-1).split(CHUNK), true.reshape(-1).split(CHUNK), strict=True)
    norms = [[float((a.to(b) - b).norm()), float(b.norm())] for a, b in chunks]
    difference, whole = torch.tensor(norms, dtype=torch.float64).norm(dim=0)
    return float(difference / whole)


def _worst(distances: Iterable[float]) -> float:
    """The largest; NaN where one is NaN, which Python's max may hide."""
    return float(torch.tensor(list(distances)).max())
