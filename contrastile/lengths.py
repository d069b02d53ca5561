"""Where a batch is cut into sub-batches: after so many examples, or after so many tokens of padded text.

Beside `cache.py`, which encodes what is cut here. With a budget of tokens, texts of like length travel together and
leave their padding behind: the last positions of a sub-batch that none of its texts uses are never computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._check import wrong
from contrastile.offload import Bounds

# the name under which tokenizers say which tokens are text
MASK = "attention_mask"


@dataclass(frozen=True)
class Cut:
    """The sub-batches of a batch, in the order in which they are encoded."""

    bounds: list[Bounds]
    # [B] the example at each place, where they are sorted
    order: Tensor | None = None
    # positions that each sub-batch computes, of the `length` that the inputs have
    widths: Sequence[int] = ()
    length: int = 0

    def extended(self, count: int) -> Cut:
        """With empty sub-batches at the end, until there are `count`."""
        more = count - len(self.bounds)
        end = self.bounds[-1][1]
        widths = [*self.widths, *[self.length] * more] if self.widths else self.widths
        return replace(self, bounds=[*self.bounds, *[(end, end)] * more], widths=widths)

    def sort(self, leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Inputs, in the order of encoding."""
        return [leaf if leaf is None or self.order is None else leaf[self.order.to(leaf.device)] for leaf in leaves]

    def unsort(self, features: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Features, in the batch's own order."""
        if self.order is None:
            return list(features)
        place = self.order.argsort()
        return [x if x is None or x.ndim == 0 else x.index_select(0, place.to(x.device)) for x in features]

    def trim(self, index: int, rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The inputs of a sub-batch without the positions that none of its texts uses."""
        if not self.widths or self.widths[index] == self.length:
            return list(rows)
        width = self.widths[index]
        return [
            row[:, :width] if row is not None and row.ndim > 1 and row.shape[1] == self.length else row for row in rows
        ]

    def pad(self, index: int, out: Any, tail: torch.Size | None) -> Any:
        """An output of the trimmed width, with zeros up to `tail`, the shape of the first sub-batch's rows."""
        if not self.widths or tail is None or not isinstance(out, Tensor) or out.ndim < 2:
            return out
        if out.shape[1] != self.widths[index] or len(tail) == 0 or tail[0] != self.length:
            return out
        return F.pad(out, [0, 0] * (out.ndim - 2) + [0, self.length - out.shape[1]])


def cut(batch: int, sub_batch: int) -> Cut:
    """Every `sub_batch` examples."""
    return Cut([(start, min(start + sub_batch, batch)) for start in range(0, batch, sub_batch)] or [(0, 0)])


def cut_by_tokens(inputs: Any, tokens: int, sub_batch: int | None) -> Cut:
    """Longest texts first; as many together as `tokens` allow at the width of the longest of them."""
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise wrong(
            "sub_batch_tokens",
            f"come with inputs that hold an {MASK} of shape [batch, length]",
            type(inputs).__name__ if mask is None else f"shape {list(mask.shape)}",
            "Pass a tokenizer's whole output, or cut by examples with sub_batch.",
        )
    batch, length = mask.shape
    if batch == 0 or length == 0:
        return cut(batch, 1)
    if bool((mask < 0).any()):
        remedy = "Pass the tokenizer's mask, and let the encoder make of it what it adds to its scores."
        raise wrong(MASK, "be 0 at padding and more at tokens", "numbers below 0", remedy)
    # to the last token in use, so that padding on the left stays where it is
    lengths = ((mask != 0) * torch.arange(1, length + 1, device=mask.device)).amax(1).cpu()
    # where no position is masked from the others, all of them have a say: none may be left out
    lengths[lengths == 0] = length
    order = lengths.argsort(descending=True, stable=True)
    wide = lengths[order].tolist()
    # the first sub-batch keeps its padding: it shows which outputs have an axis of tokens
    wide[0] = length
    bounds, widths = [], []
    start = 0
    while start < batch:
        fit = max(1, tokens // wide[start])
        stop = min(batch, start + (fit if sub_batch is None else min(fit, sub_batch)))
        bounds.append((start, stop))
        widths.append(wide[start])
        start = stop
    return Cut(bounds, order, widths, length)
