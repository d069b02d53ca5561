"""Guard against steps whose loss or gradient is not finite: they are skipped and counted; three in a row end the run.

Beside `loop.py`, whose `step` leaves the weights as they are in that case.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from contrastile.train.sharded import AllRanksError, local

logger = logging.getLogger("contrastile")

# skipped steps in a row that end the run
MOST_IN_A_ROW = 3


class NonFiniteGuard:
    """Counts of skipped steps: all of them, and those in a row up to the present step."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """Both counts."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both counts."""
        vars(self).update(state_dict)

    def passes(
        self,
        step: int,
        value: float,
        norm: float,
        model: nn.Module,
        inputs: Iterable[Mapping[str, Tensor]],
        *,
        counted: bool = True,
    ) -> bool:
        """True where loss and norm are finite; otherwise log the step, and end the run at the third in a row.

        inputs: named floating-point inputs of each part of the batch. A gradient beyond the range of fp16 is not
        `counted` in the row, because the scaler lowers its factor for the next step.

        Raises FloatingPointError with the step and the tensor.
        """
        if math.isfinite(value + norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += counted
        sentence = f"step {step} is skipped: a loss of {value} with a gradient of norm {norm}, first seen in "
        sentence += _first_nonfinite(model, inputs)
        if self.in_a_row >= MOST_IN_A_ROW:
            raise AllRanksError(
                f"the loss must stay a finite number; {sentence}, and the {MOST_IN_A_ROW - 1} steps before it too. "
                "Lower optim.learning_rate or raise optim.warmup; the weights from before these steps are kept."
            )
        if counted:
            logger.warning("%s; its examples are passed over", sentence)
        return False


def _first_nonfinite(model: nn.Module, inputs: Iterable[Mapping[str, Tensor]]) -> str:
    """The name of the first non-finite tensor among inputs, weights and gradients.

    A rank looks at its own shards only, without a collective: ranks may stop at different tensors.
    """
    for name, tensor in (item for part in inputs for item in part.items()):
        if not tensor.isfinite().all():
            return name
    for name, parameter in model.named_parameters():
        if not local(parameter).isfinite().all():
            return f"the weights {name}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not local(parameter.grad).isfinite().all():
            return f"the gradient of {name}"
    return "the loss or the norm alone"
