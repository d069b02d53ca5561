"""The operands that the kernels read and write, and the options of the kernels: decided without a launch.

Below `block.py`, `budget.py`, which cuts a block into super-tiles, and `launch.py`, which hands these values to
kernels. From small to large: the shape of a tile on each chip, and the work on it that a loss needs; operands, masks
and the strip of a super-tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile.losses.base import Formula, PairLoss
from contrastile.losses.distilled import TeacherStats
from contrastile.losses.softmax import SoftmaxState, SoftmaxStats
from contrastile.tiles.triton.kernels.masks import BY_LABEL, UNROLLED

# address and rows of a tensor descriptor are multiples of so many bytes
ALIGNMENT = 16
# programs of an interpreted kernel
PROGRAMS_INTERPRETED = 3
# 16-bit pieces of a float32 number, by the precision of torch's float32 products; EXACT of them hold all digits
EXACT = 3
PIECES_FLOAT32 = {"bf16": 1, "tf32": 2, "ieee": EXACT, "none": EXACT}
# bytes of the sums of parts above which each part takes longer than its launch
MOST_PARTS = 2**24
# 16-bit pieces of each dtype that has kernels
PIECES: dict[torch.dtype, Callable[[], int]] = {
    **dict.fromkeys((torch.bfloat16, torch.float16), lambda: 1),
    torch.float32: lambda: PIECES_FLOAT32[torch.backends.cuda.matmul.fp32_precision],
}
# compute capability of the oldest chip whose tensor cores take bf16
LEAST_CAPABILITY = 8, 0


def refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why no kernel takes features of this dtype on this device; None if kernels do."""
    if dtype not in PIECES:
        return f"no kernel for {dtype}"
    if interpreting():
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the features are on {device.type}, not on an NVIDIA device"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "the device is older than compute capability 8.0"
    return None


@dataclass(frozen=True)
class Shape:
    """Tiles on a chip: rows × cols pairs, `depth` features at a time."""

    rows: int = 128
    cols: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 3
    # programs per multiprocessor: the epilogue of one overlaps the products of the other
    programs: int = 2
    # tiles and features are one loop, so that the next tile's loads overlap the epilogue
    flatten: bool = True
    # TMA moves tiles to shared memory
    tma: bool = True
    # relative error of a product per feature: the tensor cores truncate their running sums. 0 where not measured
    truncation: float = 0.0


# by compute capability; shared memory limits the stages (99 KiB per block on 8.6, 8.9 and 12.0)
SHAPES = {
    80: Shape(warps=8, stages=4, programs=1, flatten=False, tma=False),
    86: Shape(warps=8, programs=1, flatten=False, tma=False),
    89: Shape(warps=8, programs=1, flatten=False, tma=False),
    90: Shape(truncation=2.0**-30),
    100: Shape(flatten=False),
    120: Shape(warps=8, depth=32, programs=1, flatten=False),
}
SHAPE_INTERPRETED = Shape(rows=32, cols=32, depth=32)  # small, so that tests have several tiles


@cache
def interpreting() -> bool:
    """True if Triton runs kernels on the CPU, one program after the other; fixed when kernels are first imported."""
    return bool(triton.knobs.runtime.interpret)


@cache
def _shape_of_chip(device: torch.device) -> Shape:
    # a planner's device stands for the chip of most measurements
    major, minor = (9, 0) if device.type == "meta" else torch.cuda.get_device_capability(device)
    return SHAPES[max(known for known in SHAPES if known <= 10 * major + minor)]


def shape_for(device: torch.device) -> Shape:
    """The shape of tiles on this device: that of the newest known chip that is not newer."""
    # a planner's device stands for a chip
    if interpreting() and device.type != "meta":
        return SHAPE_INTERPRETED
    return _shape_of_chip(device)


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "meta":
        # those of the chip of most measurements, as `_shape_of_chip`
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def most_programs(device: torch.device, reserved: int = 0) -> int:
    """Programs of the tile kernels that the device runs at once, with `reserved` multiprocessors left to others."""
    if interpreting():
        return max(1, PROGRAMS_INTERPRETED - reserved)
    return shape_for(device).programs * max(1, multiprocessors(device) - reserved)


def tiles_of(n: int, side: int) -> int:
    """Number of tiles of `side` that cover n; Triton's own cdiv takes longer than some kernels."""
    return -(-n // side)


def padded(features: int, shape: Shape) -> int:
    """Features of a piece: whole steps of the kernels' loop."""
    return tiles_of(features, shape.depth) * shape.depth


def piece_products(parts: int) -> list[tuple[int, int]]:
    """The pairs of pieces that are multiplied, the smallest products first: they are added before the sum is large.

    Each piece of a number is 2⁻⁸ of the piece before, so only pairs whose indices add up to less than `parts` matter.
    """
    return [(left, order - left) for order in reversed(range(parts)) for left in range(order + 1)]


def parts_bytes(strip: int, parts: int) -> int:
    """Bytes for sums over several parts of an inner dimension, beside the bytes of a strip: `launch._add_product`."""
    return min(strip // 8, MOST_PARTS) if parts == EXACT else 0


@cache
def products_of(parts: int, prefix: str = "") -> dict[str, Any]:
    """The kernels' arguments LEFT and RIGHT, the indices of multiplied pieces in two bits each, and their number."""
    pairs = piece_products(parts)
    left, right = (sum(piece << 2 * at for at, piece in enumerate(side)) for side in zip(*pairs, strict=True))
    return {f"{prefix}LEFT": left, f"{prefix}RIGHT": right, f"{prefix}PRODUCTS": len(pairs)}


def is_readable(x: Tensor) -> bool:
    """True if the kernels can read x without a copy."""
    size = x.element_size()
    aligned = x.stride(1) == 1 and x.stride(0) * size % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0
    return size == 2 and aligned and x.stride(0) >= x.shape[1]


# uses of a guide's product, as `kernels/arithmetic.py` numbers them
GUIDES = {None: 0, "mask": 1, "teacher": 2}
# fields of a loss that the kernels compute; of exponentials also the label smoothing and the weights of negatives
FIELDS = frozenset({"symmetric", "exclude_self", "uses_bias", "pairwise"})
OF_EXPONENTIALS = frozenset({"label_smoothing", "hardness_strength", "hardness_mode"})


@dataclass(frozen=True)
class Epilogue:
    """The work on a tile of products: the formula that a loss declares, and its numbers.

    label_smoothing: the share of the targets that is spread, evenly or by a teacher. hardness: β of the negatives.
    sigma: σ of the weights of positives. sums_smoothing: label smoothing enters as sums of features (`smoothing.py`).
    """

    formula: Formula
    label_smoothing: float = 0.0
    hardness: float = 0.0
    sigma: float = 0.0
    sums_smoothing: bool = False

    @cached_property
    def exponential(self) -> bool:
        """A pair's term is an exponential, with a careful form and the scale's gradient summed from the tiles.

        A softplus cannot overflow, so it needs no care; its Σ g does not cancel, and its kernel has no registers left.
        """
        return self.formula.pairs == "exponential"

    @cached_property
    def has_teacher(self) -> bool:
        return self.formula.guide == "teacher"

    @cached_property
    def has_mask(self) -> bool:
        return self.formula.guide == "mask"

    @cached_property
    def smooth(self) -> bool:
        return self.label_smoothing > 0 and not (self.has_teacher or self.sums_smoothing)

    @cached_property
    def student(self) -> Epilogue:
        """The work on a tile without the teacher."""
        return replace(self, formula=replace(self.formula, guide=None), label_smoothing=0.0)

    @cached_property
    def factorizes(self) -> bool:
        """A pair's gradient is its exponential times numbers of its row and its column: without soft targets."""
        return self.exponential and not (self.smooth or self.has_teacher)

    @cached_property
    def sums_labels(self) -> bool:
        """Positives by label may enter as sums of features: see `label_sums.py`."""
        return self.has_teacher or (self.factorizes and self.formula.linear and not self.hardness)

    @cached_property
    def stats(self) -> int:
        """Statistics per row."""
        soft = len(TeacherStats._fields) if self.has_teacher else 0
        return len(SoftmaxStats._fields) + soft if self.exponential else 1

    @cached_property
    def state(self) -> int:
        """Numbers of each row for the backward."""
        return len(SoftmaxState._fields) + 2 * self.has_teacher

    @cached_property
    def channels(self) -> int:
        """Numbers that `totals` writes per tile and row.

        The sum; with smoothing, also those of the logits and the pairs; with a teacher, the teacher's sum and gap.
        """
        return 3 if self.smooth or self.has_teacher else 1

    @cached_property
    def careful_channels(self) -> int:
        """Numbers that `maxima` writes per tile and row: maximum and sum; with smoothing 2 more, of a teacher 3."""
        return 5 if self.has_teacher else 4 if self.smooth else 2

    @cached_property
    def flags(self) -> dict[str, int]:
        decoupled = self.formula.denominator == "negatives"
        return {
            "SOFTPLUS": not self.exponential, "DECOUPLED": decoupled, "SMOOTH": self.smooth,
            "GUIDE": GUIDES[self.formula.guide], "INSIDE": self.formula.inside, "WEIGHED": self.formula.weighed,
            "MISES_FISHER": self.formula.mises_fisher,
        }  # fmt: skip


@lru_cache(1024)
def epilogue_for(loss: PairLoss, sums_smoothing: bool = False) -> Epilogue:
    assert loss.formula is not None
    spread = getattr(loss, "soft_share" if loss.formula.guide == "teacher" else "label_smoothing", 0.0)
    numbers = getattr(loss, "block_hardness", 0.0), getattr(loss, "sigma", 0.0)
    return Epilogue(loss.formula, spread, *numbers, sums_smoothing)


def unknown_part(loss: PairLoss) -> str | None:
    """The loss, or the first of its fields, that no kernel computes; None if all are known."""
    name = type(loss).__name__
    if loss.formula is None:
        return name
    known = FIELDS | loss.formula.finish_fields
    if loss.formula.pairs == "exponential":
        # a bias is not added to the logits, and gradients wait for the statistics
        unfit = {name for name in ("uses_bias", "pairwise") if getattr(loss, name)}
        known = (known | OF_EXPONENTIALS) - unfit
    return next((f"{name}.{field.name}" for field in fields(loss) if field.name not in known), None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Operand:
    """Features [n, parts · width] in 16 bits (float32 pieces where interpreted), the pieces side by side."""

    data: Tensor
    width: int
    parts: int

    def __len__(self) -> int:
        return self.data.shape[0]

    def piece(self, index: int, features: int) -> Tensor:
        if self.parts == 1 and features == self.width:
            return self.data
        return self.data[:, index * self.width : index * self.width + features]

    def memory(self, rows: int, shape: Shape) -> Tensor | TensorDescriptor:
        """The argument of a kernel that reads `rows` rows at a time."""
        return TensorDescriptor.from_tensor(self.data, [rows, shape.depth]) if shape.tma else self.data


@dataclass(frozen=True)
class Masks:
    """Pairs of a super-tile that are excluded from its sums, and pairs that are positive by label.

    diagonal, self_diagonal: row i excludes column i + diagonal, and column i + self_diagonal.
    positives: [N, P] columns that each row excludes, counted so that the super-tile's first is `positives_start`.
    ids: pairs of equal ids are excluded, but not from the positives by label.
    labels: pairs of equal labels are positive. Both as (of rows, of columns).
    spans: [5, N] numbers in place of `positives`, which say the same of labels in rising order, see `kernels/masks.py`.
    """

    diagonal: int | None = None
    self_diagonal: int | None = None
    positives: Tensor | None = None
    positives_start: int = 0
    ids: tuple[Tensor, Tensor] | None = None
    labels: tuple[Tensor, Tensor] | None = None
    spans: Tensor | None = None

    @property
    def per_row(self) -> int:
        return 0 if self.positives is None else self.positives.shape[1]

    def arguments(self, unused: Tensor) -> dict[str, Any]:
        (row_ids, col_ids), (row_labels, col_labels) = (pair or (unused, unused) for pair in (self.ids, self.labels))
        positives = self.positives if self.spans is None else self.spans
        number = min(self.per_row, UNROLLED.value + 1) if self.spans is None else BY_LABEL.value
        return {
            "diagonal": self.diagonal or 0, "self_diagonal": self.self_diagonal or 0, "positives": self.per_row,
            "positives_ptr": unused if positives is None else positives,
            "positives_stride": 0 if positives is None else positives.stride(0),
            "positives_start": self.positives_start, "row_ids_ptr": row_ids, "col_ids_ptr": col_ids,
            "row_labels_ptr": row_labels, "col_labels_ptr": col_labels, "DIAGONAL": self.diagonal is not None,
            "SELF": self.self_diagonal is not None, "POSITIVES": number,
            "IDS": self.ids is not None, "LABELS": self.labels is not None,
        }  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Operands and masks of a super-tile: the arguments that all tile kernels share."""

    q: Operand
    k: Operand
    masks: Masks
    # multiprocessors left to others
    reserved: int = 0
    # further features of rows and columns, and `Shard.numbers` of both
    guide: tuple[Operand, Operand] | None = None
    numbers: tuple[Tensor | None, Tensor | None] = (None, None)
    # the guide is a teacher
    has_teacher: bool = False
    # bits of pairs that a guide or their ids exclude [row tiles, col tiles, 4 · rows of a tile]: `kernels/guides.py`
    bits: Tensor | None = None
    # products of the positives known by position [N, P], which the tiles of features in pieces write
    listed: Tensor | None = None

    @cached_property
    def shape(self) -> Shape:
        return shape_for(self.q.data.device)

    @cached_property
    def of_guide(self) -> Pair:
        """The guide's features in the place of the others."""
        assert self.guide is not None
        return replace(self, q=self.guide[0], k=self.guide[1], guide=None, has_teacher=False, listed=None)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        q, k, shape = self.q, self.k, self.shape
        return self.masks.arguments(q.data) | products_of(q.parts) | self._guide_arguments | {
            "q_mem": q.memory(shape.rows, shape), "k_mem": k.memory(shape.cols, shape), "q_stride": q.data.stride(0),
            "k_stride": k.data.stride(0), "N": len(q), "M": len(k), "D": q.width, "BM": shape.rows, "BN": shape.cols,
            "BK": shape.depth, "TMA": shape.tma, "warps": shape.warps, "stages": shape.stages,
            "bits_ptr": q.data if self.bits is None else self.bits,
            "bits_stride": 0 if self.bits is None else self.bits.stride(0), "BITS": self.bits is not None,
            "scratch_ptr": self._scratch, "listed_ptr": q.data if self.listed is None else self.listed,
            "LISTED": self.listed is not None,
        }  # fmt: skip

    @property
    def of_rows(self) -> list[Operand]:
        return [self.q] if self.guide is None else [self.q, self.guide[0]]

    @property
    def of_cols(self) -> list[Operand]:
        return [self.k] if self.guide is None else [self.k, self.guide[1]]

    @property
    def _guide_arguments(self) -> dict[str, Any]:
        shape, (of_rows, of_cols) = self.shape, self.numbers
        unused, (a, b) = self.q.data, self.guide or (self.q, self.k)
        # no descriptor where the kernel does not read it: making one takes the host as long as a launch
        memory = (a.memory(shape.rows, shape), b.memory(shape.cols, shape)) if self.has_teacher else (unused, unused)
        return {
            "guide_q_mem": memory[0], "guide_k_mem": memory[1], "guide_q_stride": a.data.stride(0),
            "guide_k_stride": b.data.stride(0), "G": a.width,
            "row_numbers_ptr": unused if of_rows is None else of_rows,
            "col_numbers_ptr": unused if of_cols is None else of_cols,
        } | products_of(a.parts, "GUIDE_")  # fmt: skip

    @property
    def _scratch(self) -> Tensor:
        """Memory in which each program keeps a tile of a teacher's products, [programs, rows · cols]."""
        if not self.has_teacher:
            return self.q.data
        size = scratch_shape(len(self.q), len(self.k), self.q.data.device, self.reserved)
        return self.q.data.new_empty(size, dtype=torch.float32)

    @property
    def flattened(self) -> bool:
        """True if features and tiles are one loop: only where no loop over positives, or a guide's, is inside."""
        return self.shape.flatten and self.masks.per_row <= UNROLLED.value and not self.has_teacher

    @cached_property
    def programs(self) -> tuple[int]:
        """The grid: as many programs as the device runs at once, each of which computes one tile after the other."""
        return (programs_of(len(self.q), len(self.k), self.q.data.device, self.reserved),)

    def new_strip(self) -> Tensor:
        """Memory for the gradient: the pieces below each other, in whole tiles."""
        return self.q.data.new_empty(strip_shape(len(self.q), len(self.k), self.q.parts, self.shape))

    def strip_pieces(self, strip: Tensor) -> list[Tensor]:
        """The strip's pieces, as matrices [N, M]."""
        N, M = len(self.q), len(self.k)
        if self.q.parts == 1 and strip.shape == (N, M):
            return [strip]
        return [piece[:N, :M] for piece in strip.chunk(self.q.parts)]


def programs_of(N: int, M: int, device: torch.device, reserved: int = 0) -> int:
    """Programs of the tile kernels of N rows and M columns."""
    shape = shape_for(device)
    return min(most_programs(device, reserved), tiles_of(N, shape.rows) * tiles_of(M, shape.cols))


def scratch_shape(N: int, M: int, device: torch.device, reserved: int = 0) -> tuple[int, int]:
    """Numbers of a tile for each program."""
    shape = shape_for(device)
    return programs_of(N, M, device, reserved), shape.rows * shape.cols


def bits_shape(N: int, M: int, shape: Shape) -> tuple[int, int, int]:
    """Words of the bits of a mask: four for each row of a tile."""
    return tiles_of(N, shape.rows), tiles_of(M, shape.cols), 4 * shape.rows


def strip_shape(N: int, M: int, parts: int, shape: Shape) -> tuple[int, int]:
    """Whole tiles, so that a tile written beyond its piece's last row meets no other piece."""
    return parts * tiles_of(N, shape.rows) * shape.rows, tiles_of(M, shape.cols) * shape.cols
