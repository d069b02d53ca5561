"""Names for types, and the legend of the letters in names of tensors and in shapes.

    N   rows on this rank (queries, images)         I   rows of a tile
    M   columns in hand (keys, texts)               J   columns of a tile
    D   features                                    P   positives listed per row
    W   ranks                                       K   statistics kept per row, S   numbers kept for the backward

`scale` multiplies a dot product; a `tile` is a block of the b × b matrix; a `shard` is what a rank owns; a `sub_batch`
is what an encoder sees at once. `u` and `v` are the gradient sums of rows and of columns, `wide` is the dtype of such
sums, `own` columns are those that one row meets alone, and `wanted` tells which inputs get a gradient.
"""

from typing import Literal

import torch

Backend = Literal["auto", "dense", "eager", "triton"]
ExchangeName = Literal["auto", "single", "replicate", "gather", "ring", "hierarchical"]
Gradient = Literal["mean", "sum"]
Reduction = Literal["mean", "sum", "none"]
# vectors [n, L, D] of tokens, and a bool mask [n, L] of those that are compared
TokenFeatures = tuple[torch.Tensor, torch.Tensor]
# the types of features
FEATURES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def shape_or_type(x: object) -> str:
    """The shape of a tensor, or the type of anything else, for an error."""
    return f"shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of accumulated products and of statistics: float64 for float64, else float32; complex for complex."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32
