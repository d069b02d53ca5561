"""Scores of a teacher, such as a reranker's, for listed keys of each query: soft targets over the list alone.

For row i with logits x_ip = scale · ⟨q_i, k_ip⟩ and scores s_ip of its P keys,

    divergence    Σ_p t_ip (log t_ip − log softmax(x_i)_p) with t_i = softmax(s_i)     (ColBERTv2, RocketQAv2)
    margins       mean_{p > 0} ((x_i0 − x_ip) − (s_i0 − s_ip))²                        (Hofstätter et al. 2020)

A row's list is in one tile, so that its loss is its only statistic. No other key is compared.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.losses.base import Finished, PairLoss, Shard, Tile


@dataclass(frozen=True)
class _Scores(PairLoss):
    """The base of both: statistics are a row's loss and whether it has one."""

    state_rows: ClassVar[int] = 0
    reads_targets: ClassVar[bool] = True
    unsmoothed = "a distillation of scores", "Soften the scores instead."

    symmetric: bool = False
    exclude_self: bool = False
    uses_bias: bool = False
    pairwise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("symmetric", "exclude_self"):
            if getattr(self, name):
                raise invalid(name, "be False for a loss of listed keys", True, "Leave it out.")

    def init(self, n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(2, n, dtype=dtype, device=device)

    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        if not tile.own:
            return (self.init(len(tile.x), dtype=tile.x.dtype, device=tile.x.device),)
        loss, counts = self._losses(tile)
        return (torch.stack([loss.where(counts, torch.zeros_like(loss)), counts.to(loss.dtype)]),)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def finish(self, stats: Tensor) -> Finished:
        loss, counts = stats
        return Finished(loss, counts, stats[:0])

    def pair_grad(self, tile: Tile, rows: Shard, _cols: Shard) -> Tensor:
        assert rows.coefficient is not None
        if not tile.own:
            return torch.zeros_like(tile.x)
        _, counts = self._losses(tile)
        return self._gradient(tile) * rows.coefficient[:, None] * counts[:, None]

    def _losses(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The losses [I] of a list's rows, and the mask of those that have one."""
        raise NotImplementedError

    def _gradient(self, tile: Tile) -> Tensor:
        """∂loss/∂x [I, P] of the rows that have a loss, 0 at pairs that do not count."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScoreDivergence(_Scores):
    """The divergence of a row's probabilities from those of the scores (ColBERTv2, Santhanam et al. 2022).

    Naively `F.kl_div(x.log_softmax(1), scores.log_softmax(1), log_target=True, reduction="batchmean")`, with logits x
    and scores [N, P]. A list of one key has a loss of 0. `ScoreDistillLoss` gives it its lists.

    >>> from contrastile import ScoreDistillLoss
    >>> ScoreDistillLoss(kind="kl").loss == ScoreDivergence()
    True
    """

    def _losses(self, tile: Tile) -> tuple[Tensor, Tensor]:
        log_p, log_t, listed = _log_probabilities(tile)
        # a score of −∞ has no share, and no term; NaN stays
        terms = (log_t.exp() * (log_t - log_p)).where(listed & (log_t != -torch.inf), torch.zeros_like(log_p))
        return terms.sum(1), listed.any(1)

    def _gradient(self, tile: Tile) -> Tensor:
        log_p, log_t, listed = _log_probabilities(tile)
        return (log_p.exp() - log_t.exp()).where(listed, torch.zeros_like(log_p))


@dataclass(frozen=True)
class ScoreMargins(_Scores):
    """The squared errors of the first key's margins over the others (MarginMSE, Hofstätter et al. 2020).

    Naively `F.mse_loss(x[:, :1] - x[:, 1:], scores[:, :1] - scores[:, 1:])`, with logits x and scores [N, P], where all
    lists are equally long. `ScoreDistillLoss` gives it its lists.

    >>> from contrastile import ScoreDistillLoss
    >>> ScoreDistillLoss(kind="margin_mse").loss == ScoreMargins()
    True
    """

    def _losses(self, tile: Tile) -> tuple[Tensor, Tensor]:
        error, number = _margin_errors(tile)
        return error.square().sum(1) / number.clamp(min=1), number > 0

    def _gradient(self, tile: Tile) -> Tensor:
        error, number = _margin_errors(tile)
        share = error * 2 / number.clamp(min=1)[:, None]
        return torch.cat([share.sum(1, keepdim=True), -share[:, 1:]], 1)


def _log_probabilities(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """The list's log-probabilities by logits and by scores [I, P], and the mask of the keys that count."""
    assert tile.target is not None
    listed = _counted(tile)
    # a row without any key has no loss, and no NaN either
    some = listed.any(1, keepdim=True)
    both = (x.where(listed, x.new_full((), -torch.inf)).where(some, x.new_zeros(())) for x in (tile.x, tile.target))
    log_p, log_t = (x.log_softmax(1) for x in both)
    return log_p, log_t, listed


def _margin_errors(tile: Tile) -> tuple[Tensor, Tensor]:
    """(x_0 − x_p) − (s_0 − s_p) [I, P], 0 for p = 0 and where either key does not count; and how many do [I]."""
    assert tile.target is not None
    counted = _counted(tile)
    counted = counted & counted[:, :1]
    counted[:, 0] = False
    error = (tile.x[:, :1] - tile.x) - (tile.target[:, :1] - tile.target)
    return error.where(counted, torch.zeros_like(error)), counted.sum(1)


def _counted(tile: Tile) -> Tensor:
    return ~tile.excluded if isinstance(tile.excluded, Tensor) else torch.ones_like(tile.x, dtype=torch.bool)
