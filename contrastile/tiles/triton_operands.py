"""What the kernels read and write of a super-tile: features, masks, and the strip of its gradient.

Stands between `triton_block.py`, which cuts the block, and `triton_launch.py`, which hands these to the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile.losses.base import Side
from contrastile.tiles import triton_vectors as vectors
from contrastile.tiles.triton_device import ALIGNMENT, Shape, interpreting, multiprocessors, run, shape_for
from contrastile.tiles.triton_kernels import UNROLLED

# rows, and features, of one program of `split`
ROWS, BLOCK = 16, 128
# row tiles that are worked on together
GROUP = 16
# programs of an interpreted kernel
PROGRAMS_INTERPRETED = 3
# ids and labels by name, of rows and of columns
Counted = tuple[dict[str, Tensor], dict[str, Tensor]]


def tiles_of(n: int, side: int) -> int:
    """How many pieces of `side` cover n; Triton's own cdiv takes longer than some kernels."""
    return -(-n // side)


@dataclass(frozen=True)
class Operand:
    """Features as the kernels read them: 16-bit (or interpreted), `parts` pieces of `width` side by side.

    Products p of two operands take piece `left[p]` of the one and `right[p]` of the other; the pieces of a number
    shrink by 2⁻⁸ each, so a product is worth its place if its indices add up to less than the number of pieces.
    """

    data: Tensor
    width: int
    parts: int

    def __len__(self) -> int:
        return self.data.shape[0]

    def piece(self, part: int, features: int) -> Tensor:
        if self.parts == 1 and features == self.width:
            return self.data
        return self.data[:, part * self.width : part * self.width + features]

    def memory(self, rows: int, shape: Shape) -> Tensor | TensorDescriptor:
        """As a kernel of this shape reads it, `rows` at a time."""
        return TensorDescriptor.from_tensor(self.data, [rows, shape.depth]) if shape.tma else self.data


def products(parts: int) -> list[tuple[int, int]]:
    """The pairs of pieces whose products are needed, the smallest first: they are added up before the sum is large."""
    return [(left, order - left) for order in reversed(range(parts)) for left in range(order + 1)]


def coded(pieces: list[int]) -> int:
    """Two bits for each."""
    return sum(piece << (2 * place) for place, piece in enumerate(pieces))


def readable(x: Tensor) -> bool:
    """Whether the kernels can read x as it is."""
    size = x.element_size()
    aligned = x.stride(1) == 1 and x.stride(0) * size % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0
    return size == 2 and aligned and x.stride(0) >= x.shape[1]


def operand(x: Tensor, parts: int, shape: Shape) -> Operand:
    """x [n, D] as it is where a kernel can read that, else a copy of parts."""
    if readable(x):
        return Operand(x, x.shape[1], 1)
    n, D = x.shape
    width = padded(D, shape)
    dtype = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    data = torch.empty(n, parts * width, dtype=dtype, device=x.device)
    grid = (tiles_of(n, ROWS), tiles_of(width, BLOCK))
    run(
        vectors.split, grid, x_ptr=x, out_ptr=data, n=n, D=D, row_stride=x.stride(0), feature_stride=x.stride(1),
        width=width, PARTS=parts, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    return Operand(data, width, parts)


def padded(features: int, shape: Shape) -> int:
    """The width of a piece: whole steps of the kernels' loop."""
    return tiles_of(features, shape.depth) * shape.depth


@dataclass(frozen=True)
class Masks:
    """Which pairs of a super-tile leave its sums, and which are positive by label.

    diagonal, itself: row i leaves out column i + diagonal, and column i + itself.
    places: [N, P] columns that leave each row, counted so that the super-tile's first is `places_start`.
    ids: pairs of equal ids leave. labels: pairs of equal labels are positive; both (of rows, of columns).
    """

    diagonal: int | None = None
    itself: int | None = None
    places: Tensor | None = None
    places_start: int = 0
    ids: tuple[Tensor, Tensor] | None = None
    labels: tuple[Tensor, Tensor] | None = None

    def arguments(self, unused: Tensor) -> dict[str, Any]:
        row_ids, col_ids = self.ids or (unused, unused)
        row_labels, col_labels = self.labels or (unused, unused)
        return {
            "diagonal": self.diagonal or 0,
            "itself": self.itself or 0,
            "places_ptr": unused if self.places is None else self.places,
            "places": 0 if self.places is None else self.places.shape[1],
            "places_stride": 0 if self.places is None else self.places.stride(0),
            "places_start": self.places_start,
            "row_ids_ptr": row_ids,
            "col_ids_ptr": col_ids,
            "row_labels_ptr": row_labels,
            "col_labels_ptr": col_labels,
            "DIAGONAL": self.diagonal is not None,
            "SELF": self.itself is not None,
            "PLACES": 0 if self.places is None else min(self.places.shape[1], UNROLLED.value + 1),
            "IDS": self.ids is not None,
            "LABELS": self.labels is not None,
        }


@dataclass(frozen=True)
class Pair:
    """What all kernels of the shape of a matrix product are told of a super-tile."""

    q: Operand
    k: Operand
    masks: Masks
    # multiprocessors that are left to others
    spared: int = 0

    @cached_property
    def arguments(self) -> dict[str, Any]:
        q, k = self.q, self.k
        shape, pairs = shape_for(q.data.device), products(q.parts)
        return self.masks.arguments(q.data) | {
            "q_mem": q.memory(shape.rows, shape),
            "k_mem": k.memory(shape.cols, shape),
            "q_stride": q.data.stride(0),
            "k_stride": k.data.stride(0),
            "N": len(q),
            "M": len(k),
            "D": q.width,
            "BM": shape.rows,
            "BN": shape.cols,
            "BK": shape.depth,
            "GROUP": GROUP,
            "LEFT": coded([left for left, _ in pairs]),
            "RIGHT": coded([right for _, right in pairs]),
            "PRODUCTS": len(pairs),
            "TMA": shape.tma,
            "UPCAST": interpreting(),
            "warps": shape.warps,
            "stages": shape.stages,
        }

    @property
    def flat(self) -> bool:
        """Whether features and tiles are one loop: only where nothing else loops inside."""
        places = self.masks.places
        return shape_for(self.q.data.device).flatten and (places is None or places.shape[1] <= UNROLLED.value)

    @cached_property
    def programs(self) -> tuple[int]:
        """As many as fit the device at once: each takes one tile after the other."""
        device = self.q.data.device
        shape = shape_for(device)
        tiles = tiles_of(len(self.q), shape.rows) * tiles_of(len(self.k), shape.cols)
        return (min(most_programs(device, self.spared), tiles),)


def most_programs(device: torch.device, spared: int = 0) -> int:
    """How many programs of the shape of a matrix product the device can run at once, on all multiprocessors but few."""
    if interpreting():
        return max(1, PROGRAMS_INTERPRETED - spared)
    return shape_for(device).programs * max(1, multiprocessors(device) - spared)


def _strip_shape(N: int, M: int, parts: int, shape: Shape) -> tuple[int, int]:
    """Whole tiles, so that what a tile writes below its part's last row meets no other part."""
    return parts * tiles_of(N, shape.rows) * shape.rows, tiles_of(M, shape.cols) * shape.cols


def strip(q: Operand, k: Operand) -> Tensor:
    """Room for the gradient of a super-tile of q and k."""
    rows, cols = _strip_shape(len(q), len(k), q.parts, shape_for(q.data.device))
    return q.data.new_empty(rows, cols)


def strip_bytes(N: int, M: int, parts: int, device: torch.device) -> int:
    rows, cols = _strip_shape(N, M, parts, shape_for(device))
    return 2 * rows * cols


def pieces(out: Tensor, q: Operand, k: Operand) -> list[Tensor]:
    """The strip's parts, as matrices [N, M]."""
    if q.parts == 1 and out.shape == (len(q), len(k)):
        return [out]
    return [part[: len(q), : len(k)] for part in out.chunk(q.parts)]


def operand_bytes(n: int, D: int, parts: int, device: torch.device) -> int:
    """What `operand` may take for n rows."""
    return 2 * n * parts * padded(D, shape_for(device))


def groups(rows: Tensor | None, cols: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if rows is None or cols is None else (rows, cols)


def laid_out(side: Side, counted: dict[str, Tensor]) -> Side:
    """All but the features as the kernels read it: the last axis dense. A shard that has travelled is not."""
    travelled = ("positives", "state", "coefficient")
    given = {name: getattr(side, name) for name in travelled}
    dense = {name: x.contiguous() for name, x in given.items() if x is not None and x.numel() and x.stride(-1) != 1}
    read: dict[str, Any] = dense | counted
    return replace(side, **read) if read else side


def counted(rows: Side, cols: Side) -> Counted:
    """Ids and labels of both sides counted from 0, in 32 bits: a tile's must fit its registers."""
    of_rows: dict[str, Tensor] = {}
    of_cols: dict[str, Tensor] = {}
    for name in ("ids", "labels"):
        both = groups(getattr(rows, name), getattr(cols, name))
        if both is not None:
            values, places = torch.cat(both).sort()
            first = torch.zeros_like(values, dtype=torch.int32)
            first[1:] = values[1:] != values[:-1]
            numbers = torch.empty_like(first).scatter_(0, places, first.cumsum(0, dtype=torch.int32))
            of_rows[name], of_cols[name] = numbers.split([len(rows), len(cols)])
    return of_rows, of_cols
