"""How large super-tiles may be.

Ground of `triton_block.py`: what each pass over one takes beside inputs and accumulators, held against the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from contrastile.losses.base import PairLoss
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.tiles import triton_operands as operands
from contrastile.tiles.triton_device import shape_for
from contrastile.tiles.triton_operands import tiles_of

# 16-bit pieces of a float32 number, by the precision of torch's float32 products
PIECES_FLOAT32 = {"bf16": 1, "tf32": 2, "ieee": 3, "none": 3}
# the same of each type that has kernels
PIECES: dict[torch.dtype, Callable[[], int]] = {
    torch.bfloat16: lambda: 1,
    torch.float16: lambda: 1,
    torch.float32: lambda: PIECES_FLOAT32[torch.backends.cuda.matmul.fp32_precision],
}
# numbers per tile and row: the sum; with smoothing; top and total; all statistics, with positives by label
CHANNELS, CHANNELS_SMOOTH, CHANNELS_CAREFUL, CHANNELS_LABELS = 1, 3, 2, 8
# bytes of a super-tile of height × width of D features in a dtype; D is 0 where they need not be copied
Cost = Callable[[int, int, int, torch.dtype], int]


@dataclass(frozen=True)
class Budget:
    """The costs of a super-tile, and its sides."""

    loss: PairLoss
    device: torch.device
    # bytes
    workspace: int

    def forward(self, height: int, width: int, D: int, dtype: torch.dtype) -> int:
        """The tiles' numbers, and the operands' pieces."""
        smooth = isinstance(self.loss, Softmax) and self.loss.label_smoothing
        channels = CHANNELS_SMOOTH if smooth else CHANNELS_CAREFUL
        return self._partial(height, width, channels) + self._operands(height, width, D, dtype)

    def labels(self, height: int, width: int, D: int, dtype: torch.dtype) -> int:
        """The same for positives by label."""
        return self._partial(height, width, CHANNELS_LABELS) + self._operands(height, width, D, dtype)

    def backward(self, height: int, width: int, D: int, dtype: torch.dtype) -> int:
        """The strip, and the operands' pieces."""
        strip = operands.strip_bytes(height, width, PIECES[dtype](), self.device)
        # a sigmoid's sums of the loss
        sums = self._partial(height, width, CHANNELS) if isinstance(self.loss, Sigmoid) else 0
        return strip + sums + self._operands(height, width, D, dtype)

    def cut(self, N: int, M: int, D: int, dtype: torch.dtype, cost: Cost) -> tuple[int, int]:
        """Rows and columns of a super-tile: the longer side halved until it fits the workspace."""
        shape = shape_for(self.device)
        height, width = N, M
        while cost(height, width, D, dtype) > self.workspace and max(height, width) > shape.rows:
            if height >= width:
                height = _halved(height, shape.rows)
            else:
                width = _halved(width, shape.cols)
        return height, width

    def most(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        """The bytes of the dearest pass over a block; whether features are copied depends on their strides."""
        passes = [(cost, copied) for cost in (self.forward, self.labels, self.backward) for copied in (0, D)]
        return max(cost(*self.cut(N, M, copied, dtype, cost), copied, dtype) for cost, copied in passes)

    def _partial(self, height: int, width: int, channels: int) -> int:
        shape = shape_for(self.device)
        numbers = tiles_of(width, shape.cols) * height + self.loss.symmetric * tiles_of(height, shape.rows) * width
        return 4 * channels * numbers

    def _operands(self, height: int, width: int, D: int, dtype: torch.dtype) -> int:
        """Copies of the features."""
        return operands.operand_bytes(height + width, D, PIECES[dtype](), self.device)


def _halved(n: int, step: int) -> int:
    """Half of n, in whole steps."""
    return -(-n // (2 * step)) * step
