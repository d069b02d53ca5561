"""Batching: a batch is split into sub-batches of a number of examples, or of tokens of padded text.

Used by `encode.py`. With a budget of tokens, texts of similar length are encoded together, without common padding. A
rank with fewer sub-batches than others runs empty ones. They encode a row or two, whose features are dropped, because
few encoders accept an empty batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._errors import invalid
from contrastile.gradcache.modes import joined
from contrastile.offload import Bounds

# name under which tokenizers return the mask of tokens
MASK = "attention_mask"
# rows in place of an empty batch: two, which tell an output of a row for each example from a single number
STAND_INS = 2


@dataclass(frozen=True)
class SubBatches:
    """The sub-batches of a batch, in the order in which they are encoded."""

    bounds: list[Bounds]
    # [B] index of the example at each position, where texts are sorted by length
    order: Tensor | None = None
    # positions to which each sub-batch is trimmed, of the `length` of the inputs
    widths: Sequence[int] = ()
    length: int = 0
    # first of the sub-batches with fewer examples than they may hold; None: there is none
    short: int | None = None

    def is_short(self, index: int) -> bool:
        """Return whether a sub-batch holds fewer examples than it may: the rest of the batch, or an empty one."""
        return self.short is not None and index >= self.short

    def extended(self, count: int) -> SubBatches:
        """`count` sub-batches, with empty ones at the end."""
        more, end = count - len(self.bounds), self.bounds[-1][1]
        widths = [*self.widths, *list(self.widths[-1:]) * more]
        short = len(self.bounds) if self.short is None else self.short
        return replace(self, bounds=[*self.bounds, *[(end, end)] * more], widths=widths, short=short)

    @cached_property
    def encoded(self) -> list[Bounds]:
        """The rows that each sub-batch runs on. An empty one runs on the last row before it, or on the stand-ins."""
        return [
            (start, stop) if start < stop else (stop - 1, stop) if stop else (0, STAND_INS)
            for start, stop in self.bounds
        ]

    def sort(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Inputs in the order of encoding."""
        return [leaf if self.order is None else leaf[self.order.to(leaf.device)] for leaf in leaves]

    def unsort(self, features: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Features in the batch's own order."""
        if self.order is None:
            return list(features)
        position = self.order.argsort()
        # a number that all examples share has no rows
        return [
            x if x is None or x.shape[:1] != position.shape else x.index_select(0, position.to(x.device))
            for x in features
        ]

    def unsort_packed(self, values: Tensor, lengths: list[int]) -> tuple[Tensor, list[int]]:
        """Packed values, and the lengths of their examples, in the batch's own order."""
        if self.order is None:
            return values, lengths
        position, before = self.order.argsort(), torch.tensor(lengths, dtype=torch.int64, device="cpu")
        starts, after = (before.cumsum(0) - before)[position], before[position]
        index = (starts - (after.cumsum(0) - after)).repeat_interleave(after) + torch.arange(len(values), device="cpu")
        return values.index_select(0, index.to(values.device)), after.tolist()

    def trim(self, index: int, rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The inputs of a sub-batch without the positions that none of its texts uses."""
        if not self.widths or self.widths[index] == self.length:
            return list(rows)
        width = self.widths[index]
        return [
            row[:, :width] if row is not None and row.ndim > 1 and row.shape[1] == self.length else row for row in rows
        ]

    def pad(self, index: int, out: Any, row_shape: torch.Size | None) -> Any:
        """An output of the trimmed width, padded with zeros to the shape of the first sub-batch's rows."""
        if not self.widths or row_shape is None or not isinstance(out, Tensor) or out.ndim < 2:
            return out
        if out.shape[1] != self.widths[index] or len(row_shape) == 0 or row_shape[0] != self.length:
            return out
        return F.pad(out, [0, 0] * (out.ndim - 2) + [0, self.length - out.shape[1]])


def split(batch: int, sub_batch: int) -> SubBatches:
    """Sub-batches of `sub_batch` examples; the last one may be shorter."""
    bounds = [(start, min(start + sub_batch, batch)) for start in range(0, batch, sub_batch)] or [(0, 0)]
    return SubBatches(bounds, short=batch // sub_batch if batch % sub_batch and batch > sub_batch else None)


def rounded_length(length: int, most: int) -> int:
    """The length rounded up to 8, 16, 24, 32, 48, 64, 96, 128 and so on, a power of two or one and a half; or `most`.

    >>> [rounded_length(length, most=77) for length in (1, 9, 25, 33, 65)]
    [8, 16, 32, 48, 77]
    """
    power = max(8, 1 << max(0, length - 1).bit_length())
    between = 3 * power // 4
    return min(most, between if power > 16 and length <= between else power)


def split_by_tokens(inputs: Any, tokens: int, sub_batch: int | None, *, rounded: bool = False) -> SubBatches:
    """Sub-batches of texts, longest first: as many together as `tokens` allow, padded to the longest of them.

    rounded: round widths up to few lengths, for each of which a compiled encoder is compiled.
    """
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        rule = f"come with inputs that hold an {MASK} of shape [batch, length]"
        got = type(inputs).__name__ if mask is None else f"shape {list(mask.shape)}"
        remedy = "Pass a tokenizer's whole output, or cut by examples with sub_batch."
        raise invalid("sub_batch_tokens", rule, got, remedy)
    batch, length = mask.shape
    if batch == 0 or length == 0:
        return split(batch, 1)
    if bool((mask < 0).any()):
        remedy = "Pass the tokenizer's mask, and let the encoder make of it what it adds to its scores."
        raise invalid(MASK, "be 0 at padding and more at tokens", "numbers below 0", remedy)
    # up to the last token, so that padding on the left stays in place
    lengths = ((mask != 0) * torch.arange(1, length + 1, device=mask.device)).amax(1).cpu()
    # a text without any token keeps all positions, because attention then sees all of them
    lengths[lengths == 0] = length
    order = lengths.argsort(descending=True, stable=True)
    padded = [rounded_length(each, length) if rounded else each for each in lengths[order].tolist()]
    # the first sub-batch keeps its padding: it shows which outputs have an axis of tokens
    padded[0] = length
    bounds, widths = list[Bounds](), list[int]()
    while (start := bounds[-1][1] if bounds else 0) < batch:
        fit = max(1, tokens // padded[start])
        fit = min(fit, sub_batch or fit)
        bounds.append((start, min(batch, start + fit)))
        widths.append(padded[start])
    # the last sub-batch may hold fewer texts than would fit
    (start, stop), last = bounds[-1], len(bounds) - 1
    return SubBatches(bounds, order, widths, length, short=last if stop - start < fit else None)


def stand_ins(leaves: Sequence[Tensor], inputs: Any) -> list[Tensor]:
    """The inputs of an empty batch with stand-in rows: numbers from −1 to 1, index 0, and 1 in the mask.

    Their features are dropped, so their gradient is 0 times a derivative, which must be finite. A row of zeros, which
    an encoder may divide by its norm, or of padding alone could make it NaN.
    """
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None

    def extended(leaf: Tensor) -> Tensor:
        rows = leaf.new_full((STAND_INS, *leaf.shape[1:]), leaf is mask)
        if leaf is not mask and rows.is_floating_point():
            # an even count of evenly spaced numbers from -1 to 1 does not contain 0
            rows = torch.linspace(-1, 1, rows.numel()).view(rows.shape).to(rows)
        return joined([leaf, rows])

    return [extended(leaf) for leaf in leaves]
