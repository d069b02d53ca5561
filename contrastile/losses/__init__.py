"""WHAT is accumulated over the pairs of a row, how it ends, and what the gradient of one pair is."""

from contrastile.losses.decoupled import Decoupled
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax

__all__ = ["Decoupled", "Sigmoid", "Softmax"]
