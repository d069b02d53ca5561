"""The menagerie: every kind of contrastive problem, with its answer by the plain formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.functional import contrast
from contrastile.losses.decoupled import Decoupled
from contrastile.losses.reference import dense_decoupled, dense_sigmoid, dense_softmax
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax

# a single number can be right by luck: no plain result is expected to be better than this
LUCK = 1e-6


def seeded(seed: int) -> torch.Generator:
    """A generator on the device that tests are run on."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@dataclass
class Problem:
    """One loss on given shapes: what `contrast` is told, and what the plain formula is told."""

    N: int
    M: int
    tiled: dict[str, Any]
    dense: dict[str, Any]
    formula: Callable[..., Tensor] = dense_softmax
    bias: bool = False
    same: bool = False
    features: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype, D: int = 19, scale: float = 20.0, seed: int = 0) -> dict[str, Tensor]:
        """Correlated pairs of unit features, a scale and, where there is one, a bias; leaves that want gradients."""
        generator = seeded(seed)
        k = torch.randn(self.M, D, generator=generator, dtype=torch.float64)
        q = torch.randn(self.N, D, generator=generator, dtype=torch.float64)
        q = q + 2 * k[torch.arange(self.N) % self.M] if self.M else q
        out = {"q": F.normalize(q, dim=-1)}
        if not self.same:
            out["k"] = F.normalize(k, dim=-1)
        out["scale"] = torch.tensor(scale, dtype=torch.float64)
        if self.bias:
            out["bias"] = torch.tensor(-3.0, dtype=torch.float64)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return {
            name: x.to(dtype if name in ("q", "k") else wide).requires_grad_() for name, x in out.items()
        }  # fmt: skip

    def _call(self, function: Callable[..., Tensor], options: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
        q, k = tensors["q"], tensors.get("k", tensors["q"])
        named = {name: tensors[name] for name in ("scale", "bias") if name in tensors}
        return function(q, k, **named, **options)

    def by_tiles(self, tensors: dict[str, Tensor], **how: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return with_gradients(self._call(contrast, self.tiled | how, tensors), tensors)

    def by_formula(self, tensors: dict[str, Tensor], **how: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return with_gradients(self._call(self.formula, self.dense | how, tensors), tensors)


def with_gradients(loss: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    seeds = torch.linspace(1.0, 1.5, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    gradients = torch.autograd.grad((loss * seeds).sum(), list(tensors.values()))
    return loss.detach(), dict(zip(tensors, gradients, strict=True))


def assert_same(call: Callable[[], Tensor], truth: Tensor, leaves: list[Tensor]) -> None:
    """Assert that a loss in float64, with gradients twice and without, is the truth."""
    found = call()
    assert distance(found.detach(), truth.detach()) <= 1e-12
    with torch.no_grad():
        assert distance(call(), truth) <= 1e-12
    upstream = torch.rand_like(truth)
    gradients = [torch.autograd.grad((x * upstream).sum(), leaves, retain_graph=True) for x in (found, found, truth)]
    for one, again, exact in zip(*gradients, strict=True):
        assert torch.equal(one, again)
        assert distance(one, exact) <= 1e-12


def distance(x: Tensor, truth: Tensor) -> float:
    """‖x − truth‖ / ‖truth‖."""
    difference = (x.double() - truth.double()).norm()
    return float(difference / truth.double().norm().clamp(min=1e-300))


def no_worse_than_twice(
    problem: Any, tensors: dict[str, Tensor], least: tuple[float, float] = (0.0, LUCK), **how: Any
) -> None:
    """Assert that loss and gradients are at most twice as far from float64 as the plain formula's in the same types.

    least: the distances that a gradient of features, and one of a number, may have in any case.
    """
    exact = {key: x.detach().double().requires_grad_() for key, x in tensors.items()}
    truth, true_gradients = problem.by_formula(exact)
    plain, plain_gradients = problem.by_formula(tensors)
    loss, gradients = problem.by_tiles(tensors, **how)
    assert loss.dtype == torch.float32
    assert distance(loss, truth) <= max(2 * distance(plain, truth), LUCK)
    for key, gradient in gradients.items():
        assert gradient.dtype == tensors[key].dtype
        allowed = max(2 * distance(plain_gradients[key], true_gradients[key]), least[gradient.ndim == 0])
        assert distance(gradient, true_gradients[key]) <= allowed, key


def _ids(n: int, groups: int, seed: int) -> Tensor:
    return torch.randint(groups, (n,), generator=seeded(seed))


def _same(a: Tensor, b: Tensor) -> Tensor:
    return a[:, None] == b[None, :]


def clip(N: int, _: int) -> Problem:
    return Problem(N, N, {}, {"symmetric": True})


def clip_ids_weights_smoothing(N: int, _: int) -> Problem:
    ids, weights = _ids(N, max(2, N // 3), 1), torch.rand(N, generator=seeded(2)).double() + 0.1
    diagonal = torch.eye(N, dtype=torch.bool)
    return Problem(
        N,
        N,
        {"query_ids": ids, "key_ids": ids, "weights": weights, "label_smoothing": 0.1},
        {"symmetric": True, "excluded": _same(ids, ids) & ~diagonal, "weights": weights, "label_smoothing": 0.1},
    )


def clip_labels(N: int, _: int) -> Problem:
    rows, cols = _ids(N, max(2, N // 4), 3), _ids(N, max(2, N // 4), 4)
    return Problem(N, N, {"query_labels": rows, "key_labels": cols}, {"symmetric": True, "positive": _same(rows, cols)})


def info_nce(N: int, M: int) -> Problem:
    return Problem(N, max(N, M), {"loss": Softmax()}, {})


def info_nce_positives(N: int, M: int) -> Problem:
    positives = torch.randint(-1, M, (N, 3), generator=seeded(5))
    # a key listed twice counts once
    marks = torch.zeros(N, M + 1, dtype=torch.bool).scatter_(1, positives.where(positives >= 0, torch.tensor(M)), True)
    return Problem(N, M, {"loss": Softmax(), "positives": positives}, {"positive": marks[:, :M]})


def info_nce_everything(N: int, M: int) -> Problem:
    positives = torch.randint(0, M, (N,), generator=seeded(6))
    marks = F.one_hot(positives, M).bool()
    rows, cols = _ids(N, max(2, N // 2), 7), _ids(M, max(2, N // 2), 8)
    weights = torch.rand(N, generator=seeded(9)).double() + 0.1
    return Problem(
        N,
        M,
        {
            "loss": Softmax(),
            "positives": positives,
            "query_ids": rows,
            "key_ids": cols,
            "weights": weights,
            "label_smoothing": 0.2,
        },
        {"positive": marks, "excluded": _same(rows, cols) & ~marks, "weights": weights, "label_smoothing": 0.2},
    )


def dcl(N: int, _: int) -> Problem:
    ids, weights = _ids(N, max(4, N // 3), 13), torch.rand(N, generator=seeded(14)).double() + 0.1
    excluded = _same(ids, ids) & ~torch.eye(N, dtype=torch.bool)
    return Problem(
        N,
        N,
        {"loss": Decoupled(symmetric=True), "query_ids": ids, "key_ids": ids, "weights": weights},
        {"symmetric": True, "excluded": excluded, "weights": weights},
        dense_decoupled,
    )


def dcl_positives(N: int, M: int) -> Problem:
    problem = info_nce_positives(N, M)
    problem.tiled["loss"], problem.formula = Decoupled(), dense_decoupled
    return problem


def sup_con(N: int, _: int) -> Problem:
    labels = _ids(N, max(2, N // 3), 10)
    itself = torch.eye(N, dtype=torch.bool)
    return Problem(
        N,
        N,
        {"loss": Softmax(exclude_self=True), "query_labels": labels, "key_labels": labels},
        {"positive": _same(labels, labels) & ~itself, "excluded": itself},
        same=True,
    )


def nt_xent(N: int, _: int) -> Problem:
    N = 2 * ((N + 1) // 2)
    other = torch.arange(N).roll(N // 2)
    return Problem(
        N,
        N,
        {"loss": Softmax(exclude_self=True), "positives": other},
        {"positive": F.one_hot(other, N).bool(), "excluded": torch.eye(N, dtype=torch.bool)},
        same=True,
    )


def siglip(N: int, _: int) -> Problem:
    return Problem(N, N, {"loss": Sigmoid()}, {}, dense_sigmoid, bias=True)


def siglip_ids_weights(N: int, _: int) -> Problem:
    ids, weights = (_ids(N, max(2, N // 3), 11), torch.rand(N, generator=seeded(12)).double() + 0.1)
    excluded = _same(ids, ids) & ~torch.eye(N, dtype=torch.bool)
    return Problem(
        N,
        N,
        {"loss": Sigmoid(), "query_ids": ids, "key_ids": ids, "weights": weights},
        {"excluded": excluded, "weights": weights},
        dense_sigmoid,
        bias=True,
    )


PROBLEMS = {
    make.__name__: make
    for make in (
        clip,
        clip_ids_weights_smoothing,
        clip_labels,
        info_nce,
        info_nce_positives,
        info_nce_everything,
        dcl,
        dcl_positives,
        sup_con,
        nt_xent,
        siglip,
        siglip_ids_weights,
    )
}


# arguments of which each rank has its part: by rows, and by keys
ROW_OPTIONS = ("positives", "query_ids", "query_labels", "weights")
COLUMN_OPTIONS = ("key_ids", "key_labels")


def joined_options(problems: list[Problem]) -> dict[str, Any]:
    """What `contrast` is told about the batch of all ranks, whose problems these are."""
    options, offset = dict(problems[0].tiled), 0
    parts: dict[str, list[Tensor]] = {key: [] for key in options if key in ROW_OPTIONS + COLUMN_OPTIONS}
    for problem in problems:
        for key, listed in parts.items():
            value = problem.tiled[key]
            listed.append(torch.where(value >= 0, value + offset, -1) if key == "positives" else value)
        offset += problem.M
    return options | {key: torch.cat(listed) for key, listed in parts.items()}


def problems_of(name: str, shares: list[tuple[int, int]]) -> list[Problem]:
    """Each rank's own problem, of so many rows and keys; ids and labels meet across ranks."""
    problems = [PROBLEMS[name](N, M) for N, M in shares]
    for problem in problems:
        if name == "info_nce":
            problem.tiled["positives"] = torch.arange(problem.N)
    return problems
