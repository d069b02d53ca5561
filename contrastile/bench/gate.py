"""Whether a result is right, before it has a speed: distances to float64, whole where that is possible, sampled where
it takes too long.

Stands under `loss.py` and `ranks.py`. A `Gate` compares everything on a smaller case. A `Sample` compares a case at its
own size, with all the weight on a few rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.bench.peers import Case, Loss
from contrastile.losses.dense import dense_clip, dense_sigmoid, dense_softmax
from contrastile.modules import ClipLoss, InfoNCELoss, SigLipLoss

SCALE = 100.0
# rows on which results are compared with float64
GATE_ROWS = {"cuda": 10048}
GATE_ROWS_ELSEWHERE = 1000
# relative distances to float64 that are rounding, before the gradient's last cast
LOSS_TOLERANCE, SCALAR_TOLERANCE = 1e-6, 1e-4
GRADIENT_TOLERANCE = {("bfloat16", None): 1e-3, ("float16", None): 3e-4, ("float32", "high"): 1e-4}
# and where none is given, and everywhere, this many times the dense formula's in the same dtype
DENSE_FACTOR = 2.0
# a few roundings of float32, which the dense formula may be spared by luck where rows are few
ROUNDINGS = 2.0**-20
# numbers compared at once
AT_ONCE = 2**27
# rows, and columns, that have all the weight at a case's own size
SAMPLE_ROWS = 32


@dataclass(frozen=True)
class Subject:
    """A loss: what is true, what is ours, and the operations per b² · d that it cannot do without.

    A softmax needs its logits twice, before and after the normaliser is known, and two products for the gradients;
    a sigmoid could do with its logits once.
    """

    truth: Loss
    # the same where only some rows, and in a symmetric loss their columns, have a weight
    truth_of_some: Callable[..., Tensor]
    ours: Callable[..., torch.nn.Module]
    operations: int
    bias: float | None = None


def _some_rows(loss: Loss, some: Tensor, q: Tensor, k: Tensor, *scalars: Tensor) -> Tensor:
    """The mean of a few rows' losses over all columns."""
    positive = some[:, None] == torch.arange(len(k), device=k.device)
    return loss(q[some], k, *scalars, positive=positive)


def _some_clip(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return (_some_rows(dense_softmax, some, q, k, scale) + _some_rows(dense_softmax, some, k, q, scale)) / 2


SUBJECTS = {
    "clip": Subject(dense_clip, _some_clip, ClipLoss, 8),
    "siglip": Subject(dense_sigmoid, partial(_some_rows, dense_sigmoid), SigLipLoss, 6, bias=-10.0),
    "infonce": Subject(dense_softmax, partial(_some_rows, dense_softmax), InfoNCELoss, 8),
}


def problem(case: Case, device: torch.device) -> list[Tensor]:
    """Random unit features of both sides, the scale and, if the loss has one, the bias."""
    generator = torch.Generator(device).manual_seed(case.b + case.d)
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    q, k = (
        F.normalize(torch.randn(case.b, case.d, generator=generator, dtype=wide, device=device), dim=-1)
        for _ in range(2)
    )
    bias = SUBJECTS[case.loss].bias
    scalars = [torch.tensor(number, dtype=wide, device=device) for number in (SCALE, bias) if number is not None]
    narrow = getattr(torch, case.dtype)
    return [x.requires_grad_() for x in (q.to(narrow), k.to(narrow), *scalars)]


def step(loss: Loss, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Forward and backward: the loss, and the gradients of all leaves."""
    value = loss(*leaves)
    return (value.detach(), *torch.autograd.grad(value, leaves))


@dataclass(frozen=True)
class Distance:
    """How far a result is from float64, relatively: the loss, the worse of the features' gradients, the scalars'."""

    loss: float
    gradient: float
    scalar: float

    def worst(self, other: Distance) -> Distance:
        return Distance(*(_worst(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def gate_rows(device: torch.device) -> int:
    """Rows on which whole results are compared with float64."""
    return GATE_ROWS.get(device.type, GATE_ROWS_ELSEWHERE)


class Gate:
    """A case made small, its true result, and what the dense formula makes of it in the case's dtype."""

    def __init__(self, case: Case, device: torch.device) -> None:
        small = Case(case.loss, min(case.b, gate_rows(device)), case.d, case.dtype)
        truth = SUBJECTS[case.loss].truth
        self.leaves = problem(small, device)
        self.true = step(truth, [leaf.detach().double().requires_grad_() for leaf in self.leaves])
        narrow = self.leaves[0].dtype
        self.cast = max(_relative(gradient.to(narrow), gradient) for gradient in self.true[1:3])
        self.dense = self.distance(truth).gradient
        precision = case.precision if case.dtype == "float32" else None
        self.tolerance = GRADIENT_TOLERANCE.get((case.dtype, precision), math.inf)

    def distance(self, found: Loss | tuple[Tensor, ...]) -> Distance:
        """Of a loss, or of what `step` made of one."""
        found = found if isinstance(found, tuple) else step(found, self.leaves)
        value, *gradients = (_relative(x, true) for x, true in zip(found, self.true, strict=True))
        # a NaN must not hide behind a number
        return Distance(value, _worst(gradients[:2]), _worst(gradients[2:]))

    def red(self, distance: Distance, cast: float | None = None) -> str | None:
        """What is further from float64 than rounding explains; None if nothing is. cast: of other gradients."""
        by_cast = self.tolerance + (self.cast if cast is None else cast)
        for what, found, allowed in (
            ("the loss", distance.loss, LOSS_TOLERANCE),
            ("a gradient", distance.gradient, min(by_cast, max(ROUNDINGS, DENSE_FACTOR * self.dense))),
            ("the scale's or the bias's gradient", distance.scalar, SCALAR_TOLERANCE),
        ):
            if not found <= allowed:
                return f"{what} is {found:.1e} from float64, and {allowed:.1e} is allowed: no speed for a wrong result"
        return None


class Sample:
    """A case at its own size, where the whole truth would take too long: a few rows and columns have all the weight.

    The same kernels sweep over all pairs; the truth needs these rows and columns only, and gives every gradient.
    """

    def __init__(self, loss: str, leaves: list[Tensor]) -> None:
        self.leaves, self.loss = leaves, loss
        b, device = len(leaves[0]), leaves[0].device
        self.some = torch.linspace(0, b - 1, min(SAMPLE_ROWS, b), dtype=torch.float64, device=device).long()
        self.weights = torch.zeros(b, device=device)
        self.weights[self.some] = 1.0

    def found(self, loss: Loss) -> tuple[Tensor, ...]:
        """What a loss that takes weights makes of it."""
        return step(partial(loss, weights=self.weights), self.leaves)

    def distance(self, found: tuple[Tensor, ...]) -> tuple[Distance, float]:
        """Of what was found, and how far the last cast alone takes the gradients."""
        wide = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        true = step(partial(SUBJECTS[self.loss].truth_of_some, self.some), wide)
        value, *gradients = (_relative(x, y) for x, y in zip(found, true, strict=True))
        cast = max(_relative(gradient.to(self.leaves[0].dtype), gradient) for gradient in true[1:3])
        return Distance(value, _worst(gradients[:2]), _worst(gradients[2:])), cast


def _relative(x: Tensor, true: Tensor) -> float:
    """‖x − true‖ / ‖true‖, some numbers at a time: a copy in float64 of a large gradient may find no room."""
    parts = zip(x.reshape(-1).split(AT_ONCE), true.reshape(-1).split(AT_ONCE), strict=True)
    norms = [[float((a.double() - b).norm()), float(b.norm())] for a, b in parts]
    off, whole = torch.tensor(norms, dtype=torch.float64).norm(dim=0)
    return float(off / whole)


def _worst(distances: Iterable[float]) -> float:
    return float(torch.tensor(list(distances)).max())
