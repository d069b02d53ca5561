"""The treatment of a tile of products by the kernels: one frozen value per type of loss.

Read by `plan.py` (how much a tile writes), `launch.py` (which branch a kernel compiles) and `backend.py` (which passes
a loss takes). A chapter of its own because a new loss begins here: it needs one more `Epilogue`, and a branch on its
code in the kernels whose formula differs. The softmax's positive pairs have formulas of their own in `finish`
(reductions.py), `positive_gradients` and `careful_gradient` (backward.py), which refuse to compile for other codes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

from contrastile.losses.base import PairLoss
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax, SoftmaxStats
from contrastile.tiles.triton import forward


@dataclass(frozen=True)
class Epilogue:
    """The kernels' computation of one type of loss, with one loss's label smoothing."""

    # value of the kernels' constexpr EPILOGUE
    code: int
    # fields of the loss that the kernels and this value take into account; a loss with any other is declined
    fields: frozenset[str]
    # statistics kept per row
    stats: int
    # a pair's gradient depends on no statistic, and statistics are plain sums: one sweep can give loss and gradients
    pairwise: bool
    # careful kernels exist: they compute positives by label, and all pairs where the fast sums cannot be trusted
    careful: bool
    # the tiles sum up Σ g · ⟨q, k⟩, the scale's gradient, beside the strip; else Σ g, the bias's
    scale_gradient: bool
    # `finish` and `coefficients` compute the loss from the statistics
    fused_finish: bool
    label_smoothing: float = 0.0

    @cached_property
    def smooth(self) -> bool:
        return self.label_smoothing > 0

    @cached_property
    def channels(self) -> int:
        """Numbers that `totals` writes per tile and row: the sum; with smoothing, of the logits and the pairs too."""
        return 3 if self.smooth else 1

    @cached_property
    def careful_channels(self) -> int:
        """Numbers that `maxima` writes per tile and row: maximum and sum; with smoothing, two more as above."""
        return 4 if self.smooth else 2

    @cached_property
    def flags(self) -> dict[str, Any]:
        """The kernels' constexpr arguments."""
        return {"EPILOGUE": self.code, "SMOOTH": self.smooth}


# numbers that `maxima` writes per tile and row with positives by label: all of a softmax's statistics
LABEL_CHANNELS = len(SoftmaxStats._fields)

_COMMON = {"symmetric", "exclude_self", "uses_bias", "pairwise"}
SOFTMAX = Epilogue(
    code=forward.SOFTMAX.value,
    fields=frozenset(_COMMON | {"label_smoothing"}),
    stats=len(SoftmaxStats._fields),
    pairwise=False,
    careful=True,
    scale_gradient=True,
    fused_finish=True,
)
# softplus cannot overflow, so nothing needs care; Σ g does not cancel, and its kernel has no registers left for more
SIGMOID = Epilogue(
    code=forward.SIGMOID.value,
    fields=frozenset(_COMMON),
    stats=1,
    pairwise=True,
    careful=False,
    scale_gradient=False,
    fused_finish=False,
)
EPILOGUES: dict[type[PairLoss], Epilogue] = {Softmax: SOFTMAX, Sigmoid: SIGMOID}


@cache
def epilogue_for(loss: PairLoss) -> Epilogue:
    return replace(EPILOGUES[type(loss)], label_smoothing=getattr(loss, "label_smoothing", 0.0))


def unknown_part(loss: PairLoss) -> str | None:
    """The loss, or the first of its fields, that no kernel knows; None if all are known."""
    name = type(loss).__name__
    if type(loss) not in EPILOGUES:
        return name
    known = EPILOGUES[type(loss)].fields
    return next((f"{name}.{field.name}" for field in fields(loss) if field.name not in known), None)  # type: ignore[arg-type]
