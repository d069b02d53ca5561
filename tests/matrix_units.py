"""A Hopper chip's tensor cores in Triton's interpreter, and a device's order of sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from contrastile.tiles.triton import launch, plan

# terms added at a time; bits of float64 that a sum of 24 bits lacks
TERMS, LOWEST = 16, (1 << 29) - 1


@contextmanager
def emulated() -> Iterator[None]:
    """Products of kernels, and of strips, as `truncated_product` computes them.

    The interpreter rounds every product to nearest, and adds along an axis one by one: it shows none of the errors of a
    chip, and one that no chip has.
    """
    from triton.runtime import interpreter

    def dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        acc = truncated_product(a.data, b.data, d.data.astype(np.float64))
        return interpreter.TensorHandle(acc.astype(np.float32), d.dtype.scalar)

    def add_at_once(total: Tensor, g: Tensor, x: Tensor, keep: float, times: float = 1.0) -> None:
        acc = truncated_product(g.double().numpy(), x.double().numpy(), np.zeros(total.shape))
        product = torch.from_numpy(acc).to(total.dtype) * times
        total.copy_(product + total if keep else product)

    def pairwise(self: Any, given: Any) -> Any:
        x = np.moveaxis(given.handle.data, self.axis or 0, 0) if self.axis is not None else given.handle.data.ravel()
        while len(x) > 1:
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        total = np.expand_dims(x[0], self.axis) if self.keep_dims and self.axis is not None else x[0]
        return self.to_tensor(total, given.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        patch.setattr(interpreter.ReduceOps, "sum", pairwise)
        patch.setattr(launch, "add_at_once", add_at_once)
        # few programs and steps: each costs the interpreter more than its arithmetic
        shape = replace(plan.SHAPE_INTERPRETED, rows=128, cols=128, depth=128, truncation=plan.SHAPES[90].truncation)
        patch.setattr(plan, "SHAPE_INTERPRETED", shape)
        yield


def truncated_product(a: Any, b: Any, acc: Any) -> Any:
    """acc + a @ b, 16 terms at a time, each sum truncated to 24 bits (docs/numerics.md)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    for start in range(0, a.shape[-1], TERMS):
        acc = acc + a[..., start : start + TERMS] @ b[..., start : start + TERMS, :]
        acc = (acc.view(np.int64) & ~LOWEST).view(np.float64)
    return acc
