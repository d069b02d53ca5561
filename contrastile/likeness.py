"""Whether the second pass gave the features of the first: what no random state explains is noticed, and said.

Beside `cache.py`, between acts 1 and 3. An encoder that counts its calls, has a cache of its own or reads data that
change computes something else when it runs again, and the gradient is not that of the features which the loss saw. Of
every row of features four numbers are kept, its products with random signs: distances between them are those between
the rows (Achlioptas 2003), so neither the features need to stay, nor does it matter what is written over them. In a
step on a GPU nobody waits for the answer; the next call of `encode` finds it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from contrastile._check import FEATURES, wrong
from contrastile._types import accumulator
from contrastile.offload import host_room

# products of a row that are kept
PRODUCTS = 4
# what float32 is on an accelerator, where matrices may be multiplied as TF32
EPS_TF32 = 2.0**-10

# answers that are on their way from a GPU: the number, when it has arrived, and the sentence
_awaited: deque[tuple[Tensor, torch.cuda.Event, str]] = deque()


def tolerance(dtypes: Iterable[torch.dtype], *, accelerated: bool) -> float:
    """The relative distance of features that are still the same: half the root of the coarsest type's precision.

    That is 7e-9 in float64, 2e-4 in float32, 0.016 in float16 and 0.044 in bfloat16. Sums in another order, as kernels
    take them that are not deterministic, moved the features of 48 transformer layers by 6e-16, 3e-7, 0.0008 and 0.004;
    dropout of 0.1 drawn anew, or one layer of 24 left out, by 0.2 to 0.5.
    """
    known = [dtype for dtype in dtypes if dtype in FEATURES]
    eps = [EPS_TF32 if accelerated and dtype == torch.float32 else torch.finfo(dtype).eps for dtype in known]
    return float(0.5 * max(eps) ** 0.5)


class Sketches:
    """Four numbers of every row of features, by sub-batch and output."""

    def __init__(self) -> None:
        self.kept: list[list[Tensor | None]] = []
        self._signs: dict[Any, Tensor] = {}

    def keep(self, outputs: Sequence[Tensor | None]) -> None:
        """Of the next sub-batch."""
        self.kept.append([self.of(out) if _has_digits(out) else None for out in outputs])

    @torch.no_grad()
    def of(self, out: Any) -> Tensor:
        """[rows, 4]; with further axes, a row is what the last one holds."""
        rows = out.detach()
        rows = rows[:, None] if rows.ndim == 1 else rows.reshape(-1, rows.shape[-1]) if rows.ndim > 2 else rows
        signs = self._of_width(rows.shape[1], rows.dtype, rows.device)
        if not torch.is_autocast_enabled(rows.device.type):
            return rows @ signs
        # in the features' own digits
        with torch.autocast(rows.device.type, enabled=False):
            return rows @ signs

    def _of_width(self, width: int, *kind: Any) -> Tensor:
        if (width, *kind) not in self._signs:
            dtype, device = kind
            generator = torch.Generator("cpu").manual_seed(width)
            coins = torch.randint(2, (PRODUCTS, width), generator=generator, dtype=dtype, device="cpu")
            # products are of the features' size, so that float16 holds them
            signs = coins.mul_(2).sub_(1).mul_(max(1, width) ** -0.5)
            self._signs[width, *kind] = signs.to(device, non_blocking=True).T
        return self._signs[width, *kind]


class Likeness:
    """The second pass beside the first. `dtypes`: those that the encoder computes with, beside its outputs'."""

    def __init__(self, first: Sketches, dtypes: Iterable[torch.dtype]) -> None:
        self.first, self.dtypes = first, list(dtypes)
        # by output: of every sub-batch the length of the difference, and its rows
        self.gaps: dict[int, list[tuple[Tensor, int]]] = {}

    def look(self, index: int, outputs: Sequence[Any], upstream: Sequence[Tensor | None]) -> None:
        """Compares those of a sub-batch's outputs that have a gradient."""
        for place, (out, before, gradient) in enumerate(zip(outputs, self.first.kept[index], upstream, strict=True)):
            if before is None or gradient is None or not out.requires_grad or out.numel() == 0:
                continue
            now = self.first.of(out)
            if now.shape == before.shape:
                gap = torch.linalg.vector_norm(now - before, dtype=accumulator(out.dtype))
                self.gaps.setdefault(place, []).append((gap, len(before)))

    def tell(self, name: str) -> None:
        """Says it once if a sub-batch's features are others; on a GPU, when that is known."""
        found = [self._excess(place, gaps) for place, gaps in self.gaps.items()]
        if not found:
            return
        device = found[0].device
        worst = torch.stack([each.to(device) for each in found]).nan_to_num(0.0).max()
        # the same words every time: Python tells them once
        rule = "give the same features in both passes"
        got = f"{name}, which gave others in the second, so that the gradient is not that of the first"
        remedy = (
            "Draw random numbers from torch's, Python's or NumPy's generators, keep nothing from call to call, and "
            "change nothing before the backward."
        )
        sentence = str(wrong("encoder", rule, got, remedy))
        if device.type != "cuda":
            _say(worst, sentence)
            return
        there = host_room((), worst.dtype)
        there.copy_(worst, non_blocking=True)
        _awaited.append((there, torch.cuda.current_stream(device).record_event(), sentence))

    def _excess(self, place: int, gaps: Sequence[tuple[Tensor, int]]) -> Tensor:
        """The largest difference of a sub-batch, in what all features' size allows."""
        parts = [each for sketches in self.first.kept if (each := sketches[place]) is not None]
        rows = torch.cat(parts)
        size = torch.linalg.vector_norm(rows, dtype=accumulator(rows.dtype)) / len(rows) ** 0.5
        allowed = tolerance([rows.dtype, *self.dtypes], accelerated=rows.device.type != "cpu")
        scaled = torch._foreach_mul([gap for gap, _ in gaps], [n**-0.5 for _, n in gaps])
        return torch.stack(scaled).max() / (allowed * size)


def _has_digits(out: Any) -> bool:
    """Whether these are rows of numbers that lie here; what is spread over ranks is not multiplied for this."""
    plain = type(out) in (Tensor, nn.Parameter) and out.layout == torch.strided and out.device.type != "meta"
    return plain and out.dtype in FEATURES and out.ndim > 0


def hear() -> None:
    """Says what has arrived from steps before."""
    while _awaited and _awaited[0][1].query():
        worst, _, sentence = _awaited.popleft()
        _say(worst, sentence)


def _say(worst: Tensor, sentence: str) -> None:
    if float(worst) > 1:
        warnings.warn(sentence, stacklevel=2)
