"""Losses: the statistics of a row over its pairs, the loss made of them, and the gradient of one pair."""

from contrastile.losses.balanced import BalancedSigmoid
from contrastile.losses.decoupled import Decoupled, DecoupledWeighted
from contrastile.losses.distilled import Distilled
from contrastile.losses.guided import Guided
from contrastile.losses.hardness import Hardness
from contrastile.losses.inside import SoftmaxInside
from contrastile.losses.scores import ScoreDivergence, ScoreMargins
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax

__all__ = [
    "BalancedSigmoid", "Decoupled", "DecoupledWeighted", "Distilled", "Guided", "Hardness", "ScoreDivergence",
    "ScoreMargins", "Sigmoid", "Softmax", "SoftmaxInside",
]  # fmt: skip
