"""Distances of a loss and its gradients from float64, and the limits above which a result has no speed.

Stands under `loss.py`. A `Gate` compares whole results on fewer rows. A `Sample` compares results at a case's own size,
with all the weight on a few rows and columns, for which the truth is cheap.
"""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._torch import fast_bf16
from contrastile.bench.peers import Case, Loss
from contrastile.bench.subjects import SUBJECTS

# the scale at the end of CLIP's training: exponentials of both directions lie far apart
SCALE = 100.0
# rows on which whole results are compared with float64
GATE_ROWS = {"cuda": 10048, "cpu": 1000}
# relative distances from float64 that rounding explains, before the gradient's last cast
LOSS_TOLERANCE, SCALAR_TOLERANCE = 1e-6, 1e-4
GRADIENT_TOLERANCE = {("bfloat16", None): 1e-3, ("float16", None): 3e-4, ("float32", "high"): 1e-4}
# the same of bf16 on a CPU with instructions for it, whose products are rounded to bf16
CPU_TOLERANCE = 2e-3
# the limit for other dtypes, and for all: this many times the distance of the plain formula in the same dtype
DENSE_FACTOR = 2.0
# a few roundings of float32, by which the plain formula may be exact by luck where rows are few
ROUNDINGS = 2.0**-20
# elements that are compared at once: a float64 copy of a large gradient may not fit; rows that are drawn at once
CHUNK, DRAWN = 2**27, 2**16
# rows and columns that have all the weight at a case's own size
SAMPLE_ROWS = 32


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
    def between(cls, results: Iterable[Tensor], true: Iterable[Tensor]) -> Self:
        value, *gradients = (_relative(x, y) for x, y in zip(results, true, strict=True))
        return cls(value, worst(gradients[:2]), worst(gradients[2:]))

    def worst(self, other: Self) -> Self:
        return type(self)(*(worst(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def double(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def _true_step(loss: Loss, leaves: list[Tensor]) -> tuple[tuple[Tensor, ...], float]:
    """The step in float64, and the distance of its gradients after a cast to the features' dtype."""
    true = step(loss, double(leaves))
    return true, max(_relative(gradient.to(leaves[0].dtype), gradient) for gradient in true[1:3])


class Gate:
    """A case on few rows: its true result, and the distance of the plain formula in the case's dtype."""

    def __init__(self, case: Case, device: torch.device) -> None:
        small = Case(case.loss, min(case.b, GATE_ROWS[device.type]), case.d, case.dtype)
        reference = SUBJECTS[case.loss].reference
        self.loss_tolerance = LOSS_TOLERANCE * SUBJECTS[case.loss].summed
        self.leaves = problem(small, device)
        self.true, self.cast = _true_step(reference, self.leaves)
        self.dense = self.distance(step(reference, self.leaves)).gradient
        precision = case.precision if case.dtype == "float32" else None
        tolerance = GRADIENT_TOLERANCE.get((case.dtype, precision), math.inf)
        if case.dtype == "bfloat16" and device.type == "cpu" and fast_bf16:
            tolerance = CPU_TOLERANCE
        self.tolerance = tolerance * SUBJECTS[case.loss].rounded

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
    # the loss of one row is exactly 0
    return float(difference / whole) if whole or difference else 0.0


def worst(distances: Iterable[float]) -> float:
    """The largest; NaN where one is NaN, which Python's max may hide."""
    return float(torch.tensor(list(distances)).max())
