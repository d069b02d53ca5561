"""Distillation: a teacher's similarities are soft targets, mixed with the hard ones (Hinton et al. 2015).

As open_clip's DistillClipLoss, TinyCLIP and MobileCLIP have it for pairs of images and texts. For row i with the
teacher's logits t_ij = ⟨a_i, b_j⟩, q_i = softmax(t_i), p_i = softmax(x_i) and w the weight,

    loss_i = (1 − w) (−mean_{p ∈ P(i)} log p_ip) + w Σ_j q_ij (log q_ij − log p_ij) ,
    ∂loss_i / ∂x_ij = p_ij − (1 − w) [j ∈ P(i)] / |P(i)| − w q_ij ,

over the keys that count. The teacher's logits are a second product of each tile; no matrix of them is held. Sums of
logits are kept relative to the largest of a row, as the exponentials are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from contrastile._errors import number
from contrastile.losses.base import Diagonal, Finished, Formula, Shard, Tile, changed
from contrastile.losses.softmax import Softmax, SoftmaxState, SoftmaxStats, finite

HARD = len(SoftmaxStats._fields)
# rows of the softmax's state; the teacher's follow: its top, and 1 / its sum of exponentials
STATE = len(SoftmaxState._fields)


class TeacherStats(NamedTuple):
    """Per row, of the teacher: top, Σ exp(t − top); of both Σ exp(t − top) ((t − top) − (x − x_top)).

    Tops are any numbers near the largest logits.
    """

    top: Tensor
    total: Tensor
    gap: Tensor
    x_top: Tensor


@dataclass(frozen=True)
class Distilled(Softmax):
    """The softmax loss mixed with the divergence of its probabilities from a teacher's (Hinton et al. 2015).

    Naively, with logits x [N, M], a diagonal of positives and the teacher's logits `t = guide_q @ guide_k.T`, of which
    guide_q [N, G] or guide_k [M, G] has the scale,

        hard = F.cross_entropy(x, labels)
        soft = F.kl_div(x.log_softmax(1), t.log_softmax(1), log_target=True, reduction="batchmean")
        (1 - weight) * hard + weight * soft

    weight: of the soft loss, from 0 to 1.

    >>> from contrastile import contrast
    >>> q, k, a, b = torch.nn.functional.normalize(torch.randn(4, 6, 16), dim=-1)
    >>> contrast(q, k, scale=10.0, loss=Distilled(symmetric=True), guide_q=100 * a, guide_k=b).shape
    torch.Size([])
    """

    formula = Formula("exponential", denominator="all", finish_fields=frozenset({"weight"}), guide="teacher")
    unsmoothed = "distillation", "The teacher's targets are soft already."
    guides: ClassVar[int] = 1
    state_rows: ClassVar[int] = STATE + 2

    weight: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "0.5 weighs teacher and labels alike."
        number("weight", self.weight, lambda weight: 0.0 <= weight <= 1.0, "be from 0 to 1", remedy)

    @property
    def soft_share(self) -> float:
        """The share of the targets that is the teacher's."""
        return self.weight

    def init(self, n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        teacher = torch.zeros(len(TeacherStats._fields), n, dtype=dtype, device=device)
        named = TeacherStats(*teacher)
        named.top.fill_(-torch.inf)
        named.x_top.fill_(-torch.inf)
        return torch.cat([super().init(n, dtype=dtype, device=device), teacher])

    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        teacher = _teacher(tile)
        dims = (1, 0) if self.symmetric else (1,)
        soft = [_soft_stats(tile.x, teacher, dim) for dim in dims]
        # by the softmax itself: the parent's `absorb` would make its statistics with the teacher's rows
        hard = Softmax(symmetric=self.symmetric, exclude_self=self.exclude_self).absorb(tile)
        return tuple([torch.cat(both) for both in zip(hard, soft, strict=True)])

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        sides = [TeacherStats(*stats[HARD:]) for stats in (a, b)]
        highest, x_highest = torch.maximum(sides[0].top, sides[1].top), torch.maximum(sides[0].x_top, sides[1].x_top)
        top, x_top = finite(highest), finite(x_highest)
        total, gap = torch.zeros_like(top), torch.zeros_like(top)
        for side in sides:
            share = (side.top - top).exp()
            total = total + side.total * share
            lift = (finite(side.top) - top) - (finite(side.x_top) - x_top)
            gap = gap + (side.gap + side.total * lift) * share
        teacher = TeacherStats(highest, total, gap, x_highest)
        return torch.cat([super().merge(a[:HARD], b[:HARD]), torch.stack(teacher)])

    def finish(self, stats: Tensor) -> Finished:
        loss, counts, state = super().finish(stats[:HARD])
        named, teacher = SoftmaxState(*state), TeacherStats(*stats[HARD:])
        inverse = 1 / teacher.total.masked_fill(teacher.total == 0, 1.0)
        # the teacher's mean of t − x, and from both to logarithms of probabilities
        above = (named.top - finite(teacher.x_top)) - named.inverse.log()
        soft = above + (teacher.gap * inverse + inverse.log())
        mixed = (1 - self.weight) * loss + self.weight * soft
        whole = torch.cat([state, torch.stack([finite(teacher.top), inverse])])
        return Finished(torch.where(counts > 0, mixed, torch.zeros_like(mixed)), counts, whole)

    def pair_grad(self, tile: Tile, rows: Shard, cols: Shard) -> Tensor:
        teacher, positive = _teacher(tile), tile.positive
        sides = [(rows, (slice(None), None)), (cols, (None, slice(None)))][: 1 + self.symmetric]
        hard = [changed(side, state=side.state[:STATE]) if side.state is not None else side for side in (rows, cols)]
        grad = super().pair_grad(tile, *hard)
        for at, (side, index) in enumerate(sides):
            assert side.state is not None
            assert side.coefficient is not None
            top, inverse = side.state[STATE:]
            coefficient = side.coefficient * self.weight
            # from 1 / |P| to (1 − w) / |P|; then the teacher's probability is subtracted
            target = SoftmaxState(*side.state[:STATE]).positive_share * coefficient
            if isinstance(positive, Diagonal):
                positive.of(grad).add_(target[positive.along(grad)[at]])
            elif positive is not None:
                grad += positive * target[index]
            grad -= (teacher - top[index]).exp_().mul_((inverse * coefficient)[index])
        return grad


def _teacher(tile: Tile) -> Tensor:
    """The teacher's logits, −∞ where a pair does not count."""
    (product,), (scale, _) = tile.guides, tile.numbers
    teacher = product if scale is None else product * scale[:, None]
    return teacher.masked_fill(tile.x == -torch.inf, -torch.inf)


def _soft_stats(x: Tensor, teacher: Tensor, dim: int) -> Tensor:
    """`TeacherStats` [4, n] of the rows of a tile, or of its columns."""
    top, x_top = teacher.amax(dim), x.amax(dim)
    below = teacher - finite(top).unsqueeze(dim)
    share = below.exp()
    gap = (below - (x - finite(x_top).unsqueeze(dim))).masked_fill_(x == -torch.inf, 0.0)
    return torch.stack([top, share.sum(dim), (share * gap).sum(dim), x_top])
