"""One function per launch: tensors in, a kernel of `triton_{kernels,gradients,vectors,listed}.py` out.

Used by `triton.py`, which knows the loss and walks over super-tiles. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile.tiles import triton_gradients as gradients
from contrastile.tiles import triton_kernels as kernels
from contrastile.tiles import triton_listed as listed
from contrastile.tiles import triton_vectors as vectors
from contrastile.tiles.triton_device import Shape, run, shape_for
from contrastile.tiles.triton_operands import Operand, Pair, most_programs, tiles_of

# rows of one program, and tiles added at once, in the kernels along one dimension
BLOCK, TILES = 128, 16
# rows of one program that reads features, `BLOCK` features at a time
ROWS = 16
# numbers of a call
NUMBERS = 7
# products of fp16 have more bits, and lose more than those of bf16
CUT_FLOAT16 = 1.25


def _features(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Features of any strides, as the kernels along one dimension read them."""
    return {
        "q_ptr": q,
        "k_ptr": k,
        "D": q.shape[1],
        "q_row_stride": q.stride(0),
        "q_stride": q.stride(1),
        "k_row_stride": k.stride(0),
        "k_stride": k.stride(1),
    }


def numbers(
    q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, *, sigmoid: bool, careful: bool = False
) -> Tensor:
    """The numbers of x = scale · ⟨q, k⟩ + bias, as `triton_kernels.py` counts them; for a softmax with its shift.

    careful: the flag is up from the start.
    """
    N, M = len(q), len(k)
    q_blocks, k_blocks = tiles_of(N, ROWS), tiles_of(M, ROWS)
    blocks = q_blocks + k_blocks
    largest = torch.empty(2, blocks, dtype=torch.float32, device=q.device)
    run(
        vectors.norms, (blocks,), out_ptr=largest, N=N, M=M, q_blocks=q_blocks, blocks=blocks, **_features(q, k),
        ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    out = torch.empty(NUMBERS, dtype=torch.float32, device=q.device)
    run(
        vectors.numbers, (1,), norms_ptr=largest, scale_ptr=scale, bias_ptr=scale if bias is None else bias,
        out_ptr=out, q_blocks=q_blocks, blocks=blocks, cut=cut(q), careful=int(careful), BIASED=bias is not None,
        SIGMOID=sigmoid, BLOCK=1024,
    )  # fmt: skip
    return out


def cut(q: Tensor) -> float:
    """The share of a product that the matrix units lose, in the mean."""
    return shape_for(q.device).cut * q.shape[1] * (CUT_FLOAT16 if q.dtype == torch.float16 else 1.0)


def totals(
    pair: Pair,
    numbers: Tensor,
    row_part: Tensor,
    col_part: Tensor | None,
    *,
    smooth: bool,
    sigmoid: bool,
) -> None:
    """Fills row_part [channels, col tiles, N] and col_part [channels, row tiles, M] with the tiles' sums."""
    run(
        kernels.totals,
        pair.programs,
        numbers_ptr=numbers,
        row_part_ptr=row_part,
        col_part_ptr=numbers if col_part is None else col_part,
        COLUMNS=col_part is not None,
        SMOOTH=smooth,
        SIGMOID=sigmoid,
        FLATTEN=pair.flat,
        **pair.arguments,
    )


def maxima(
    pair: Pair,
    numbers: Tensor,
    row_part: Tensor,
    col_part: Tensor | None,
    *,
    smooth: bool,
) -> None:
    """The careful form: [2 or 8, tiles, n] of tops and totals, and with labels all statistics, if the flag is up."""
    run(
        kernels.maxima,
        pair.programs,
        numbers_ptr=numbers,
        row_part_ptr=row_part,
        col_part_ptr=numbers if col_part is None else col_part,
        COLUMNS=col_part is not None,
        SMOOTH=smooth,
        **pair.arguments,
    )


@dataclass(frozen=True)
class Merge:
    """One side's part [channels, tiles, n] and the statistics [K, n] it is merged into."""

    part: Tensor
    stats: Tensor
    # replace what the statistics hold
    first: bool
    # nothing more will come: low sums raise the flag
    last: bool

    def arguments(self, side: str, across: str, n: str) -> dict[str, Any]:
        _, tiles, size = self.part.shape
        return {
            f"{side}_part_ptr": self.part,
            f"{side}_stats_ptr": self.stats,
            f"{side}_stride": self.stats.stride(0),
            f"{across}_tiles": tiles,
            f"{side}_first": int(self.first),
            n: size,
        }


def _merging(rows: Merge, cols: Merge | None) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and arguments: a program for each block of rows, and of columns."""
    other = cols or rows
    blocks = tiles_of(max(rows.part.shape[2], other.part.shape[2]), BLOCK)
    sides = rows.arguments("row", "col", "N") | other.arguments("col", "row", "M")
    return (blocks, 1 if cols is None else 2), sides | {"BLOCK": BLOCK, "TILES": TILES}


def merge_sums(rows: Merge, cols: Merge | None, numbers: Tensor, *, sigmoid: bool) -> None:
    """Adds the tiles' sums to the statistics of both sides, in a fixed order."""
    grid, given = _merging(rows, cols)
    last = {"row_last": int(rows.last), "col_last": int((cols or rows).last)}
    channels = rows.part.shape[0]
    run(vectors.merge_sums, (*grid, channels), numbers_ptr=numbers, SIGMOID=sigmoid, **last, **given)


def merge_maxima(rows: Merge, cols: Merge | None, numbers: Tensor, *, labels: bool) -> None:
    """The careful form of it, if the flag is up."""
    grid, given = _merging(rows, cols)
    run(vectors.merge_maxima, grid, numbers_ptr=numbers, LABELS=labels, **given)


def merge_parts(stats: Tensor, parts: Tensor, *, sigmoid: bool) -> None:
    """Merges parts [P, K, n] of statistics into those [K, n] of the same rows, one after the other."""
    P, _, n = parts.shape
    if sigmoid:
        stats.add_(parts[0] if P == 1 else parts.sum(0))
    elif n:
        part_stride, row_stride, col_stride = parts.stride()
        run(
            vectors.merge_parts, (tiles_of(n, BLOCK), 2), stats_ptr=stats, stats_row_stride=stats.stride(0),
            stats_stride=stats.stride(1), part_ptr=parts, part_stride=part_stride, part_row_stride=row_stride,
            part_col_stride=col_stride, parts=P, n=n, BLOCK=BLOCK,
        )  # fmt: skip


def prepare(sides: list[tuple[Tensor, Tensor]], numbers: Tensor, smoothing: float) -> list[tuple[Tensor, Tensor]]:
    """Each side's vectors for `gradient`, times the unit; raises the flag where the careful form is needed."""
    lengths = [len(coefficient) for _, coefficient in sides]
    (N, M), n = ((*lengths, 0)[:2]), sum(lengths)
    (row_state, row_coefficient), (col_state, col_coefficient) = sides[0], sides[-1]
    out = numbers.new_empty(2 if smoothing else 1, n)
    run(
        vectors.prepare, (tiles_of(max(lengths), BLOCK), len(sides)), row_state_ptr=row_state,
        row_state_stride=row_state.stride(0), row_coefficient_ptr=row_coefficient, N=N, col_state_ptr=col_state,
        col_state_stride=col_state.stride(0), col_coefficient_ptr=col_coefficient, M=M, numbers_ptr=numbers,
        out_ptr=out, smoothing=smoothing, SMOOTH=bool(smoothing), BLOCK=BLOCK,
    )  # fmt: skip
    # what is not smoothed is not spread
    weights = out[0].split(lengths)
    spreads = out[-1].split(lengths) if smoothing else weights
    return list(zip(weights, spreads, strict=True))


def no_sums(device: torch.device) -> Tensor:
    """Room for what each program of a gradient kernel adds up for itself."""
    return torch.zeros(most_programs(device), shape_for(device).rows, device=device)


def _strip(out: Tensor, sums: Tensor, q: Operand, shape: Shape) -> dict[str, Any]:
    """The strip as the kernels write it, and where they leave their sums."""
    return {
        "out_mem": TensorDescriptor.from_tensor(out, [shape.rows, shape.cols // 2]) if shape.tma else out,
        "sums_ptr": sums,
        "out_stride": out.stride(0),
        "part_stride": out.shape[0] // q.parts,
        "PARTS": q.parts,
    }


def gradient(
    pair: Pair,
    numbers: Tensor,
    vectors_of: list[tuple[Tensor, Tensor]],
    out: Tensor,
    sums: Tensor,
    *,
    smooth: bool,
    sigmoid: bool,
    row_part: Tensor | None,
) -> None:
    """Writes the gradient of the pairs that count into the strip `out`, and adds Σ g · ⟨q, k⟩ to `sums`.

    A sigmoid's adds Σ g instead, and writes what `totals` would into `row_part`.
    """
    shape = shape_for(numbers.device)
    (a, c), (b, d) = vectors_of[0], vectors_of[-1]
    run(
        gradients.gradient,
        pair.programs,
        numbers_ptr=numbers,
        row_a_ptr=a,
        row_c_ptr=c,
        col_b_ptr=b,
        col_d_ptr=d,
        row_part_ptr=numbers if row_part is None else row_part,
        COLUMNS=len(vectors_of) == 2,
        SMOOTH=smooth,
        SIGMOID=sigmoid,
        LOSS=row_part is not None,
        FLATTEN=pair.flat,
        **_strip(out, sums, pair.q, shape),
        **pair.arguments,
    )


def careful_gradient(
    pair: Pair,
    numbers: Tensor,
    sides: list[tuple[Tensor, Tensor]],
    out: Tensor,
    sums: Tensor,
    *,
    smoothing: float,
) -> None:
    """The careful form for a softmax, from states [S, n] and coefficients [n], if the flag is up."""
    shape = shape_for(numbers.device)
    (row_state, row_coefficient), (col_state, col_coefficient) = sides[0], sides[-1]
    run(
        gradients.careful_gradient,
        pair.programs,
        numbers_ptr=numbers,
        row_state_ptr=row_state,
        row_coefficient_ptr=row_coefficient,
        col_state_ptr=col_state,
        col_coefficient_ptr=col_coefficient,
        row_state_stride=row_state.stride(0),
        col_state_stride=col_state.stride(0),
        smoothing=smoothing,
        COLUMNS=len(sides) == 2,
        **_strip(out, sums, pair.q, shape),
        **pair.arguments,
    )


@dataclass(frozen=True)
class Listed:
    """Positives known by their position: columns [N, P] of the block, −1 pads, or the diagonal's first column."""

    columns: Tensor | None
    diagonal: int | None
    # a row's pair with this column (of the first row, and so on) does not count
    itself: int | None
    rows: int

    @property
    def per_row(self) -> int:
        return 1 if self.columns is None else self.columns.shape[1]

    def arguments(self, q: Tensor, k: Tensor, numbers: Tensor) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and arguments: a program for some rows."""
        given = _features(q, k) | {
            "numbers_ptr": numbers,
            "columns_ptr": numbers if self.columns is None else self.columns,
            "N": self.rows,
            "M": len(k),
            "diagonal": self.diagonal or 0,
            "itself": self.itself or 0,
            "per_row": self.per_row,
            "DIAGONAL": self.columns is None,
            "SELF": self.itself is not None,
            "ROWS": ROWS,
            "BLOCK": BLOCK,
        }
        return (tiles_of(self.rows, ROWS),), given


def listed_totals(
    q: Tensor,
    k: Tensor,
    pairs: Listed,
    numbers: Tensor,
    row_stats: Tensor,
    col_stats: Tensor | None,
    *,
    smooth: bool,
    sigmoid: bool,
) -> None:
    """Puts the listed positives into the statistics, beside what the other pairs said."""
    grid, given = pairs.arguments(q, k, numbers)
    other = row_stats if col_stats is None else col_stats
    run(
        listed.listed_totals, grid, row_stats_ptr=row_stats, row_stats_stride=row_stats.stride(0), col_stats_ptr=other,
        col_stats_stride=other.stride(0), COLUMNS=col_stats is not None, SMOOTH=smooth, SIGMOID=sigmoid, **given,
    )  # fmt: skip


def listed_gradient(
    q: Tensor,
    k: Tensor,
    pairs: Listed,
    numbers: Tensor,
    sides: list[tuple[Tensor, Tensor]],
    u: Tensor | None,
    v: Tensor | None,
    *,
    smoothing: float,
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    """Their gradient [N, P], and its products with ⟨q, k⟩; adds what it gives to u and, on the diagonal, to v."""
    grid, given = pairs.arguments(q, k, numbers)
    (row_state, row_coefficient), (col_state, col_coefficient) = sides[0], sides[-1]
    g_NP, inner_NP = torch.empty(2, pairs.rows, pairs.per_row, dtype=torch.float32, device=q.device)
    run(
        listed.listed_gradient, grid, row_state_ptr=row_state, row_state_stride=row_state.stride(0),
        row_coefficient_ptr=row_coefficient, col_state_ptr=col_state, col_state_stride=col_state.stride(0),
        col_coefficient_ptr=col_coefficient, u_ptr=g_NP if u is None else u, u_stride=0 if u is None else u.stride(0),
        v_ptr=g_NP if v is None else v, v_stride=0 if v is None else v.stride(0), g_ptr=g_NP, inner_ptr=inner_NP,
        smoothing=smoothing, COLUMNS=len(sides) == 2, SIGMOID=sigmoid, U=u is not None,
        V=v is not None and pairs.columns is None, **given,
    )  # fmt: skip
    return g_NP, inner_NP


def add_pairs(total: Tensor, x: Tensor, starts: Tensor, sources: Tensor, values: Tensor) -> None:
    """total[r] += Σ values[s] · x[sources[s]] over s = starts[r] ... starts[r + 1] − 1, in that order."""
    n, D = total.shape
    block = min(1024, triton.next_power_of_2(D))
    run(
        listed.add_pairs, (n, tiles_of(D, block)), out_ptr=total, out_stride=total.stride(0), x_ptr=x,
        row_stride=x.stride(0), feature_stride=x.stride(1), starts_ptr=starts, sources_ptr=sources, values_ptr=values,
        D=D, BLOCK=block,
    )  # fmt: skip
