"""A step whose loss or gradient is no number: it never reaches the weights, is counted and told, and cannot go on.

Beside `loop.py`: `step` leaves the weights alone when this happens, and the guard decides whether the run may go on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from contrastile.train.sharded import FoundByAllError, mine

if TYPE_CHECKING:
    from contrastile.train.job import Share

logger = logging.getLogger("contrastile")

# so many skipped steps in a row are no accident
MOST_IN_A_ROW = 3


class Guard:
    """How many steps were skipped, in all and in a row up to now."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """Both counts."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from there."""
        vars(self).update(state_dict)

    def passes(
        self, step: int, value: float, norm: float, model: nn.Module, parts: Sequence[Share], *, counted: bool = True
    ) -> bool:
        """Whether loss and norm are numbers; otherwise the step is told, and the third in a row stops the run.

        A gradient beyond what fp16 can say is not `counted` in the row: the scaler lowers its factor, and it goes on.

        Raises FloatingPointError with the step and the tensor.
        """
        if math.isfinite(value + norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += counted
        happened = f"step {step} is skipped: a loss of {value} with a gradient of norm {norm}, first seen in "
        happened += culprit(model, parts)
        if self.in_a_row >= MOST_IN_A_ROW:
            raise FoundByAllError(
                f"the loss must stay a finite number; {happened}, and the {MOST_IN_A_ROW - 1} steps before it too. "
                "Lower optim.learning_rate or raise optim.warmup; the weights from before these steps are kept."
            )
        if counted:
            logger.warning("%s; its examples are passed over", happened)
        return False


def culprit(model: nn.Module, parts: Sequence[Share]) -> str:
    """The first tensor of a step that holds what is no finite number: of the inputs, the weights, the gradients.

    Of what is in shards this rank looks at its own: ranks that find something sooner ask nobody.
    """
    for name, tensor in (pair for part in parts for pair in part.floats.items()):
        if not tensor.isfinite().all():
            return name
    for name, parameter in model.named_parameters():
        if not mine(parameter).isfinite().all():
            return f"the weights {name}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not mine(parameter.grad).isfinite().all():
            return f"the gradient of {name}"
    return "the loss or the norm alone"
