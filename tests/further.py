"""Losses with inputs of their own beside queries and keys, each with its plain formula; `test_losses_further.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from problems import _with_gradients as gradients
from torch import Tensor, nn

from contrastile import InfoNCELoss, contrast
from contrastile.losses import Hardness

N, H, D = 45, 3, 19
# of a formula, [N]: the losses of its rows, and which of them count
RowLosses = tuple[Tensor, Tensor]


@dataclass
class Case:
    """A module called with these tensors by name, and the plain formula of its rows' losses in each direction."""

    module: Callable[..., nn.Module]
    formula: Callable[..., list[RowLosses]]
    # features and numbers, in float64
    leaves: dict[str, Tensor]
    constants: dict[str, Any] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype, scale: float | None = None) -> dict[str, Tensor]:
        """The leaves, features in this type and numbers in float32 or float64."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        given = self.leaves if scale is None else self.leaves | {"scale": torch.tensor(scale, dtype=torch.float64)}
        return {name: x.to(dtype if x.ndim else wide).requires_grad_() for name, x in given.items()}

    def by_tiles(self, tensors: dict[str, Tensor], **how: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return gradients(self.module(**how)(**tensors, **self.constants), tensors)

    def by_formula(self, tensors: dict[str, Tensor], reduction: str = "mean") -> tuple[Tensor, dict[str, Tensor]]:
        """The rows' losses reduced as the library does; of a case with weights by them."""
        constants = dict(self.constants)
        weights = constants.pop("weights", torch.ones(N, dtype=torch.float64))
        values = []
        for losses, counts in self.formula(**tensors, **constants):
            mass = weights.to(losses.dtype) * counts
            total = torch.where(counts, losses, 0.0) * mass
            by_row = total * (len(total) / mass.sum())
            values.append({"mean": by_row.mean(), "sum": total.sum(), "none": by_row}[reduction])
        return gradients(torch.stack(values).mean(0), tensors)

    def of_rank(self, rank: int, shares: list[int]) -> Case:
        """The part of a rank that has so many of the rows; every tensor but numbers has rows."""
        return Case(
            self.module, self.formula, *({name: _part(x, rank, shares) for name, x in group.items()}
            for group in (self.leaves, self.constants)),
        )  # fmt: skip


def _part(x: Any, rank: int, shares: list[int]) -> Any:
    if isinstance(x, tuple):
        return tuple(_part(each, rank, shares) for each in x)
    return x.split(shares)[rank] if isinstance(x, Tensor) and x.ndim else x


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _unit(*shape: int, seed: int, near: Tensor | None = None) -> Tensor:
    x = torch.randn(*shape, generator=_generator(seed), dtype=torch.float64)
    return F.normalize(x if near is None else x + 2 * near, dim=-1)


def _whole(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator(seed))


def _leaves(**more: Tensor) -> dict[str, Tensor]:
    query = _unit(N, D, seed=0)
    scale = torch.tensor(20.0, dtype=torch.float64)
    return {"query": query, "key": _unit(N, D, seed=1, near=query), "scale": scale, **more}


def _cross_entropy(x: Tensor, target: Tensor) -> list[RowLosses]:
    return [(F.cross_entropy(x, target, reduction="none"), torch.ones(len(x), dtype=torch.bool))]


def _own_products(query: Tensor, negatives: Tensor) -> Tensor:
    return (negatives @ query[..., None])[..., 0]


def own_negatives() -> Case:
    """Each query has negatives of its own beside all keys; equal ids do not count."""
    ids = _whole(12, N, seed=3)
    weights = torch.rand(N, generator=_generator(4), dtype=torch.float64) + 0.1

    def formula(
        query: Tensor, key: Tensor, scale: Tensor, negatives: Tensor, query_ids: Tensor, key_ids: Tensor,
        negative_ids: Tensor,
    ) -> list[RowLosses]:  # fmt: skip
        x = scale * torch.cat([query @ key.T, _own_products(query, negatives)], dim=1)
        same = (query_ids[:, None] == key_ids) & ~torch.eye(N, dtype=torch.bool)
        excluded = torch.cat([same, query_ids[:, None] == negative_ids], dim=1)
        return _cross_entropy(x.masked_fill(excluded, -torch.inf), torch.arange(N))

    return Case(
        InfoNCELoss,
        formula,
        _leaves(negatives=_unit(N, H, D, seed=2)),
        {"query_ids": ids, "key_ids": ids, "negative_ids": _whole(12, N, H, seed=5), "weights": weights},
    )


def own_negatives_only() -> Case:
    """Each query meets its own key and its own negatives alone."""

    def formula(query: Tensor, key: Tensor, scale: Tensor, negatives: Tensor) -> list[RowLosses]:
        x = torch.cat([(query * key).sum(1, keepdim=True), _own_products(query, negatives)], dim=1)
        return _cross_entropy(scale * x, torch.zeros(N, dtype=torch.int64))

    def module(**how: Any) -> nn.Module:
        return InfoNCELoss(in_batch=False, **how)

    return Case(module, formula, _leaves(negatives=_unit(N, H, D, seed=2)))


def _hardness(mode: str, beta: float = 5.0, label_smoothing: float = 0.0) -> Case:
    """Negatives of all keys, or of each query alone, have the weight exp(5 · similarity), a constant."""

    def formula(query: Tensor, key: Tensor, scale: Tensor, negatives: Tensor) -> list[RowLosses]:
        products = torch.cat([query @ key.T, _own_products(query, negatives)], dim=1)
        weighed = torch.ones_like(products)
        weighed[:, :N].fill_diagonal_(0.0)
        if mode == "in_batch_negatives":
            weighed[:, N:] = 0.0
        if mode == "hard_negatives":
            weighed[:, :N] = 0.0
        x = scale * products + beta * products.detach() * weighed
        losses = F.cross_entropy(x, torch.arange(N), reduction="none", label_smoothing=label_smoothing)
        return [(losses, torch.ones(N, dtype=torch.bool))]

    def module(**how: Any) -> nn.Module:
        smoothing = {"label_smoothing": label_smoothing} if label_smoothing else {}
        return InfoNCELoss(hardness_mode=mode, hardness_strength=beta, **smoothing, **how)  # type: ignore[arg-type]

    return Case(module, formula, _leaves(negatives=_unit(N, H, D, seed=2)))


def hardness_in_batch() -> Case:
    return _hardness("in_batch_negatives")


def hardness_own() -> Case:
    return _hardness("hard_negatives", label_smoothing=0.1)


def hardness_all() -> Case:
    return _hardness("all_negatives", label_smoothing=0.1)


class _Contrast(nn.Module):
    """`contrast` as a module."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, query: Tensor, key: Tensor, scale: Tensor, **others: Any) -> Tensor:
        return contrast(query, key, scale=scale, **self.how, **others)


def hardness_symmetric_positives() -> Case:
    """Both directions, with positives by label."""

    def formula(query: Tensor, key: Tensor, scale: Tensor, query_labels: Tensor, key_labels: Tensor) -> list[RowLosses]:
        products, positive = query @ key.T, query_labels[:, None] == key_labels
        x = scale * products + 3.0 * products.detach() * ~positive
        return [
            (-(log_p * mask).sum(1) / mask.sum(1), mask.any(1))
            for log_p, mask in ((x.log_softmax(1), positive), (x.T.log_softmax(1), positive.T))
        ]

    def module(**how: Any) -> nn.Module:
        return _Contrast(loss=Hardness(symmetric=True, hardness_strength=3.0), **how)

    labels = torch.arange(N) // 2
    return Case(module, formula, _leaves(), {"query_labels": labels, "key_labels": labels})


CASES = {
    make.__name__: make
    for make in (
        own_negatives, own_negatives_only, hardness_in_batch, hardness_own, hardness_all, hardness_symmetric_positives
    )
}  # fmt: skip
