"""The truth: the losses as their papers write them, with the whole matrix and plain autograd.

No other code of the library computes with these functions. Tests compare every backend with them in float64, and
benchmarks time them as the plain formula of today's training code.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._types import Reduction


def dense_softmax(
    q: Tensor, k: Tensor, scale: Tensor | float, *, positive: Tensor | None = None, excluded: Tensor | None = None,
    symmetric: bool = False, weights: Tensor | None = None, label_smoothing: float = 0.0, hardness: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """InfoNCE of q [N, D] against k [M, D]: cross-entropy of softmax(scale · q kᵀ) at the positives.

    positive, excluded: [N, M] bool; by default the diagonal, and nothing. A row's loss is the mean over its
    positives of −log p; rows without one leave the mean. hardness: β · ⟨q, k⟩ is added to negatives' logits as a
    constant, the weight exp(β · ⟨q, k⟩). Symmetric adds the transposed problem and halves the sum;
    then weights [N] serve both directions. A scalar, or [N] with reduction="none", in the dtype of the features.

    >>> q = F.normalize(torch.randn(4, 8), dim=-1)
    >>> dense_softmax(q, q, 10.0, symmetric=True) > 0
    tensor(True)
    """
    row_losses = partial(_cross_entropy, label_smoothing=label_smoothing)
    return _over_rows(row_losses, q, k, scale, positive, excluded, symmetric, weights, reduction, hardness)


def dense_decoupled(
    q: Tensor, k: Tensor, scale: Tensor | float, *, positive: Tensor | None = None, excluded: Tensor | None = None,
    symmetric: bool = False, weights: Tensor | None = None, of_positives: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """The decoupled loss: log Σ exp x over the negatives − mean x over the positives (Yeh et al. 2022, equation 6).

    Arguments as in `dense_softmax`; rows without a negative leave the mean too. of_positives: [N] weights of the
    rows' positives, of both directions, such as `mises_fisher_weights`.

    >>> q = F.normalize(torch.randn(4, 8), dim=-1)
    >>> dense_decoupled(q, q, 10.0, symmetric=True) < dense_softmax(q, q, 10.0, symmetric=True)
    tensor(True)
    """
    row_losses = partial(_decoupled, of_positives=of_positives)
    return _over_rows(row_losses, q, k, scale, positive, excluded, symmetric, weights, reduction)


def dense_distilled(
    q: Tensor, k: Tensor, scale: Tensor | float, teacher: Tensor, weight: float, *, positive: Tensor | None = None
) -> Tensor:
    """(1 − weight) · InfoNCE + weight · KL(softmax(teacher) ‖ softmax(scale · q kᵀ)), with teacher logits [N, M].

    >>> q = F.normalize(torch.randn(4, 8), dim=-1)
    >>> float(dense_distilled(q, q, 10.0, 10.0 * q @ q.T, 1.0)) < 1e-6
    True
    """
    log_p, log_t = (scale * (q @ k.T)).log_softmax(1), teacher.log_softmax(1)
    soft = (log_t.exp() * (log_t - log_p)).sum(1).mean()
    return (1 - weight) * dense_softmax(q, k, scale, positive=positive) + weight * soft


def mises_fisher_weights(q: Tensor, k: Tensor, sigma: float) -> Tensor:
    """2 − N · softmax(⟨q_i, k_i⟩ / σ) of N pairs, constants (Yeh et al. 2022, equation 7).

    >>> q = F.normalize(torch.randn(4, 8), dim=-1)
    >>> bool((mises_fisher_weights(q, q, 0.5) - 1).abs().max() < 1e-5)
    True
    """
    return 2 - len(q) * torch.softmax((q * k).sum(1).detach() / sigma, 0)


def dense_clip(q: Tensor, k: Tensor, scale: Tensor | float) -> Tensor:
    """CLIP's loss in its five lines (Radford et al. 2021, figure 3), as most training code has them; for benchmarks."""
    logits = scale * q @ k.T
    labels = torch.arange(len(q), device=q.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def dense_sigmoid(
    q: Tensor, k: Tensor, scale: Tensor | float, bias: Tensor | float | None = None, *,
    positive: Tensor | None = None, excluded: Tensor | None = None, weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """SigLIP's loss: Σ_ij −log σ(z_ij (scale · ⟨q_i, k_j⟩ + bias)) / N with z = ±1 (Zhai et al. 2023, algorithm 1).

    positive, excluded, weights: as in `dense_softmax`; pairs that are excluded leave the sum, and the divisor stays.

    >>> q = F.normalize(torch.randn(4, 8), dim=-1)
    >>> dense_sigmoid(q, q, 10.0, -10.0) > 0
    tensor(True)
    """
    if positive is None:
        positive = torch.eye(len(q), len(k), dtype=torch.bool, device=q.device)
    x = scale * (q @ k.T)
    if bias is not None:
        x = x + bias
    pairs = -F.logsigmoid(torch.where(positive, x, -x))
    if excluded is not None:
        pairs = pairs.masked_fill(excluded, 0.0)
    rows = pairs.sum(1)
    w = torch.ones_like(rows) if weights is None else weights
    return _reduce(rows * w, w.sum(), reduction)


def _over_rows(
    row_losses: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor,
    scale: Tensor | float, positive: Tensor | None, excluded: Tensor | None, symmetric: bool, weights: Tensor | None,
    reduction: Reduction, hardness: float = 0.0,
) -> Tensor:  # fmt: skip
    """The reduced losses of the rows, or the mean of theirs and of the columns' where symmetric.

    row_losses: from logits, positives and excluded pairs [N, M] to the loss of each row, and the mask of rows with one.
    """
    if positive is None:
        positive = torch.eye(len(q), len(k), dtype=torch.bool, device=q.device)
    if excluded is None:
        excluded = torch.zeros_like(positive)
    products = q @ k.T
    x = scale * products
    if hardness:
        x = x + hardness * products.detach() * ~positive
    x = x.masked_fill(excluded, -torch.inf)
    directions = [(x, positive, excluded), (x.T, positive.T, excluded.T)][: 1 + symmetric]
    reduced = []
    for direction in directions:
        loss, counts = row_losses(*direction)
        counted = counts * (torch.ones_like(loss) if weights is None else weights)
        reduced.append(_reduce(torch.where(counts, loss, 0.0) * counted, counted.sum(), reduction))
    return torch.stack(reduced).mean(0)


def _cross_entropy(x: Tensor, positive: Tensor, excluded: Tensor, *, label_smoothing: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(x, dim=1)
    count = positive.sum(1)
    loss = -log_p.masked_fill(~positive, 0.0).sum(1) / count.clamp(min=1)
    if label_smoothing:
        smooth = -log_p.masked_fill(excluded, 0.0).sum(1) / (~excluded).sum(1)
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    return loss, count > 0


def _decoupled(x: Tensor, positive: Tensor, excluded: Tensor, *, of_positives: Tensor | None) -> tuple[Tensor, Tensor]:
    count, negative = positive.sum(1), ~(positive | excluded)
    # a sum over no key has no gradient, and autograd would make it NaN
    counts = (count > 0) & negative.any(1)
    among = x.masked_fill(~negative & counts[:, None], -torch.inf).masked_fill(~counts[:, None], 0.0)
    mean = x.masked_fill(~positive, 0.0).sum(1) / count.clamp(min=1)
    return among.logsumexp(1) - (mean if of_positives is None else of_positives * mean), counts


def _reduce(weighted: Tensor, weight_sum: Tensor, reduction: Reduction) -> Tensor:
    # no row has a loss: 0, with gradients of 0
    weight_sum = weight_sum.masked_fill(weighted.detach().eq(0).all() & (weight_sum == 0), 1.0)
    if reduction == "mean":
        return weighted.sum() / weight_sum
    if reduction == "sum":
        return weighted.sum()
    return weighted * (len(weighted) / weight_sum)
