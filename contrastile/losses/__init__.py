"""Losses: the statistics of a row over its pairs, the loss made of them, and the gradient of one pair."""

from contrastile.losses.decoupled import Decoupled, DecoupledWeighted
from contrastile.losses.distilled import Distilled
from contrastile.losses.guided import Guided
from contrastile.losses.hardness import Hardness
from contrastile.losses.scores import ScoreDivergence, ScoreMargins
from contrastile.losses.sigmoid import BalancedSigmoid, Sigmoid
from contrastile.losses.softmax import Softmax, SoftmaxInside

__all__ = [
    "BalancedSigmoid", "Decoupled", "DecoupledWeighted", "Distilled", "Guided", "Hardness", "ScoreDivergence",
    "ScoreMargins", "Sigmoid", "Softmax", "SoftmaxInside",
]  # fmt: skip
