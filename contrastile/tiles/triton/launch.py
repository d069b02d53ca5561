"""Launches: one function per kernel, which takes tensors and launches it, and the vendor's matrix products of a strip.

Between `plan.py`, whose values are the kernels' arguments, and `backend.py`, which knows the order of the passes. No
function waits for the device.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile._types import Reduction
from contrastile.losses.base import Shard, Total
from contrastile.losses.decoupled import mises_fisher_exponents
from contrastile.tiles.triton import plan
from contrastile.tiles.triton.block import Block
from contrastile.tiles.triton.kernels import backward, forward, guides, reductions
from contrastile.tiles.triton.kernels import careful as careful_kernels
from contrastile.tiles.triton.kernels import finish as endings
from contrastile.tiles.triton.kernels.arithmetic import EXACT, ROUNDED, TEACHERS
from contrastile.tiles.triton.plan import PIECES, Epilogue, Masks, Operand, Pair, shape_for, tiles_of
from contrastile.tiles.triton.start import run as run

# rows of one program in kernels along one dimension
BLOCK = 128
# rows of one program that merges the sums of tiles, and tiles added at once: few rows are shared by more programs
FEW = 4096
MERGED, MERGED_FEW = (128, 16), (16, 128)
# rows of one program that reads features, `BLOCK` features at a time; those of one that splits them, and its warps
ROWS, SPLIT_ROWS, SPLIT_WARPS = 16, 8, 8
# a logit in powers of 2 that norms allow, above which the shift is estimated from some pairs; those pairs, and their
# features that are read at once
FAR, PAIRS, COLS = 160.0, 512, 16
# partial norms that are read at once
NORMS = 4096
# constants of a block; rows that `finish` writes before the state
CONSTANTS, STATE = TEACHERS.value, endings.STATE.value
# products of fp16 have more bits than those of bf16, and lose more to truncation
TRUNCATION_FLOAT16 = 1.25
# terms of an inner sum where float32's full precision is requested: the tensor cores truncate sums of terms of
# different sizes by 2⁻³⁰ a term, and those of like terms not at all; half of it is made up for
INNER, MADE_UP = 512, 0.5
# most rows of features in three pieces whose products with a gradient are joined
STACKED = 1024
# each direction's vectors [V, n]: see `direction_weights`
Weights = list[Tensor]
# terms of a sum, and the share of it that the tensor cores have lost
Term = tuple[Tensor, float]


def on(device: torch.device) -> AbstractContextManager[None]:
    """A context in which launches go to this device."""
    other = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if other else nullcontext()


def operand(x: Tensor, order: Tensor | None = None) -> Operand:
    """x [n, D] itself where the kernels can read it, else a copy in pieces; order: of these rows."""
    if order is None and plan.is_readable(x):
        return Operand(x, x.shape[1], 1)
    n, D = x.shape if order is None else (len(order), x.shape[1])
    parts, width = PIECES[x.dtype](), plan.padded(D, shape_for(x.device))
    dtype = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    data = torch.empty(n, parts * width, dtype=dtype, device=x.device)
    run(
        reductions.split_features, (tiles_of(n, SPLIT_ROWS),), x_ptr=x, out_ptr=data, n=n, D=D, width=width,
        order_ptr=x if order is None else order, row_stride=x.stride(0), feature_stride=x.stride(1), PARTS=parts,
        ORDERED=order is not None, ROWS=SPLIT_ROWS, BLOCK=BLOCK, warps=SPLIT_WARPS,
    )  # fmt: skip
    return Operand(data, width, parts)


def operands(side: Shard, order: Tensor | None = None) -> list[Operand]:
    """The features of a side, and behind them those of its guide; order: of these rows."""
    return [operand(x, order) for x in (side.features, *side.guides)]


def features(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Features of any strides, as the kernels along one dimension read them."""
    return {
        "q_ptr": q, "k_ptr": k, "D": q.shape[1], "q_row_stride": q.stride(0), "q_stride": q.stride(1),
        "k_row_stride": k.stride(0), "k_stride": k.stride(1), "ROWS": ROWS, "BLOCK": BLOCK,
    }  # fmt: skip


def feature_norms(q: Tensor, k: Tensor) -> Tensor:
    """[2, blocks] numbers: the largest squared norm of each block of rows, those of q first, and Σ x · 0 of each."""
    q_blocks = tiles_of(len(q), ROWS)
    out = torch.empty(2, q_blocks + tiles_of(len(k), ROWS), dtype=torch.float32, device=q.device)
    run(
        reductions.norms, (out.shape[1],), out_ptr=out, N=len(q), M=len(k), q_blocks=q_blocks, blocks=out.shape[1],
        **features(q, k),
    )  # fmt: skip
    return out


def block_constants(
    q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, epilogue: Epilogue, *, keys: int = 0, least: float = 0.0,
    norms: Tensor | None = None, labels: bool = False,
) -> Tensor:  # fmt: skip
    """The constants of x = scale · ⟨q, k⟩ + bias, as `kernels/arithmetic.py` numbers them.

    keys, least: see the kernel; `least` serves a sum of products that is computed from that of t. norms: those of
    `feature_norms`, if known. labels: positives are exponentials too, whose sums no flag watches, so that the shift is
    that of the norms whatever the logits are; so it is in float32, where a logit in the hundreds is rounded less by the
    careful kernels.
    """
    norms = feature_norms(q, k) if norms is None else norms
    out = torch.empty(CONSTANTS, dtype=torch.float32, device=q.device)
    run(
        reductions.block_constants, (1,), norms_ptr=norms, scale_ptr=scale, bias_ptr=scale if bias is None else bias,
        out_ptr=out, q_blocks=tiles_of(len(q), ROWS), blocks=norms.shape[1], truncation=truncation(q), keys=keys,
        least=least, hardness=epilogue.hardness, BIASED=bias is not None, N=len(q), M=len(k), PAIRS=PAIRS,
        COLS=COLS, far=FAR if q.element_size() == 2 and not labels else math.inf, **epilogue.flags,
        **features(q, k) | {"BLOCK": NORMS},
    )  # fmt: skip
    return out


def inner_product(x: Tensor, total: Tensor) -> Tensor:
    """Σ ⟨x_i, total_i⟩ of the rows of x [n, D] and of their sums in float32."""
    out = torch.empty(tiles_of(len(x), ROWS), dtype=torch.float32, device=x.device)
    if len(x):
        run(reductions.inner_sums, (len(out),), out_ptr=out, N=len(x), **features(x, total))
    return out.sum()


def is_exact(dtype: torch.dtype) -> bool:
    """True for float32 features whose products keep all digits: torch's matmul precision is "highest"."""
    return PIECES[dtype]() == plan.EXACT


def truncation(q: Tensor) -> float:
    """The mean share of a product ⟨q, k⟩ that the tensor cores lose; none of three pieces, whose sums are exact."""
    if is_exact(q.dtype):
        return 0.0
    return shape_for(q.device).truncation * q.shape[1] * (TRUNCATION_FLOAT16 if q.dtype == torch.float16 else 1.0)


def excluded_bits(pair: Pair, constants: Tensor, *, mask: bool, careful: bool) -> None:
    """Write the bits of the pairs of equal ids, and with `mask` of those that the guide excludes.

    careful: where the flag is set.
    """
    assert pair.bits is not None
    given: dict[str, Any] = {"constants_ptr": constants, "careful": int(careful)}
    if pair.masks.ids is not None:
        run(guides.id_bits, (math.prod(pair.bits.shape[:2]),), **given, **pair.arguments)
    if mask:
        guide = pair.of_guide
        run(forward.mask_bits, guide.programs, FLATTEN=guide.flattened, **given, **guide.arguments)


def sums(
    pair: Pair, constants: Tensor, parts: Sequence[Tensor], epilogue: Epilogue, strip: Tensor | None = None, *,
    rounded: bool = False, careful: bool = False,
) -> None:  # fmt: skip
    """Write the tiles' sums to the parts: [channels, col tiles, N] and, if symmetric, [channels, row tiles, M].

    strip: also write the exponentials into it; rounded: sums are those of the strip. careful: maxima and sums instead,
    where the flag is set.
    """
    kernel = careful_kernels.maxima if careful else forward.totals
    written = {"out_mem": constants, "out_stride": 0} if strip is None else _strip(strip, constants, pair)
    keep = 0 if strip is None else (ROUNDED if rounded else EXACT).value
    run(
        kernel, pair.programs, constants_ptr=constants, row_part_ptr=parts[0], col_part_ptr=parts[-1],
        COLUMNS=len(parts) == 2, KEEP=keep, FLATTEN=pair.flattened, fusion=not careful, **written,
        **epilogue.flags, **pair.arguments,
    )  # fmt: skip


def merge_sums(
    parts: Sequence[Tensor], stats: Sequence[Tensor], constants: Tensor, epilogue: Epilogue,
    first: Sequence[bool] = (True, True), last: Sequence[bool] = (True, True), *, careful: bool = False,
) -> None:  # fmt: skip
    """Merge the tiles' sums [channels, tiles, n] into the statistics [K, n] of each side, in a fixed order.

    first: replace the statistics so far. last: low sums set the careful flag. careful: merge maxima and sums, where
    the flag is set. Of a teacher two channels lack its gap.
    """
    (channels, col_tiles, N), (_, row_tiles, M), col = parts[0].shape, parts[-1].shape, len(parts) - 1
    rows, tiles = MERGED_FEW if max(N, M) <= FEW else MERGED
    kernel = reductions.merge_maxima if careful else reductions.merge_sums
    run(
        kernel, (tiles_of(max(N, M), rows), len(parts)), constants_ptr=constants, row_stride=stats[0].stride(0),
        col_stride=stats[col].stride(0), N=N, M=M, row_tiles=row_tiles, col_tiles=col_tiles, row_first=int(first[0]),
        col_first=int(first[col]), row_last=int(last[0]), col_last=int(last[col]),
        row_part_ptr=parts[0], col_part_ptr=parts[-1], row_stats_ptr=stats[0], col_stats_ptr=stats[col], BLOCK=rows,
        TILES=tiles, LATER=epilogue.has_teacher and channels < epilogue.channels, **epilogue.flags,
    )  # fmt: skip


def merge_parts(stats: Tensor, parts: Tensor, epilogue: Epilogue) -> None:
    """Merge parts [P, K, n] of statistics, in order, into those [K, n] of the same rows; 4 are those of positives."""
    P, K, n = parts.shape
    if not epilogue.exponential:
        stats.add_(parts[0] if P == 1 else parts.sum(0))
    elif n:
        part_stride, row_stride, col_stride = parts.stride()
        run(
            reductions.merge_parts, (tiles_of(n, BLOCK), 2 if K > 4 else 1), stats_ptr=stats, parts=P, n=n, BLOCK=BLOCK,
            stats_row_stride=stats.stride(0), stats_stride=stats.stride(1), part_ptr=parts, part_stride=part_stride,
            part_row_stride=row_stride, part_col_stride=col_stride,
        )  # fmt: skip


def directions(block: Block) -> dict[str, Any]:
    """Constants, states and coefficients of a block in the backward."""
    (row_state, row_coefficient), (col_state, col_coefficient) = block.directions[0], block.directions[-1]
    return {
        "row_state_ptr": row_state, "row_state_stride": row_state.stride(0), "row_coefficient_ptr": row_coefficient,
        "col_state_ptr": col_state, "col_state_stride": col_state.stride(0), "col_coefficient_ptr": col_coefficient,
        "constants_ptr": block.constants, "COLUMNS": block.loss.symmetric, "smoothing": block.epilogue.label_smoothing,
        **block.epilogue.flags,
    }  # fmt: skip


def direction_weights(block: Block, lifts: Sequence[Tensor] = (), *lack: Tensor) -> Weights:
    """Each direction's vectors for `gradient`, times the unit; sets the flag where the careful form is needed.

    lifts, lack: of a teacher's gap, what the forward has written and memory for its part [n], see `guided.py`.
    """
    lengths = [len(coefficient) for _, coefficient in block.directions]
    (N, M), whole = ((*lengths, 0)[:2]), [tiles_of(n, BLOCK) * BLOCK for n in lengths]
    epilogue, by_label = block.epilogue, block.order is not None
    out = block.constants.new_empty((2 if epilogue.smooth or epilogue.has_teacher else 1) + 2 * by_label, sum(whole))
    lifts = lifts or [out]
    run(
        backward.direction_weights, (tiles_of(max(lengths), BLOCK), len(lengths)), N=N, M=M, out_ptr=out, BLOCK=BLOCK,
        row_lift_ptr=lifts[0], col_lift_ptr=lifts[-1], lack_ptr=lack[0] if lack else out, LATER=len(lack) > 0,
        LABELS=by_label, step=out.stride(0), **directions(block),
    )  # fmt: skip
    return [x[:, :n] for x, n in zip(out.split(whole, 1), lengths, strict=True)]


def new_sums(device: torch.device, rows: int = 0) -> Tensor:
    """Zeros, to which each program of a gradient kernel adds its own sums; behind them one for each of these rows."""
    return torch.zeros(sums_of_programs(device) + rows, device=device)


def sums_of_programs(device: torch.device) -> int:
    return plan.most_programs(device) * shape_for(device).rows


def _strip(strip: Tensor, sums: Tensor, pair: Pair) -> dict[str, Any]:
    """The memory of a gradient, as the kernels write it, and of each program's sums."""
    shape, parts = pair.shape, pair.q.parts
    memory = TensorDescriptor.from_tensor(strip, [shape.rows, shape.cols // 2]) if shape.tma else strip
    return {
        "out_mem": memory, "out_stride": strip.stride(0), "part_stride": strip.shape[0] // parts, "PARTS": parts,
        "sums_ptr": sums,
    }  # fmt: skip


def gradient(
    pair: Pair, constants: Tensor, weights: Weights, strip: Tensor, sums: Tensor, epilogue: Epilogue,
    row_part: Tensor | None = None, *, kept: bool = False,
) -> None:  # fmt: skip
    """Write the gradient of the valid pairs into the strip, and add Σ g · ⟨q, k⟩, or Σ g, to `sums`.

    weights: the vectors of each direction, in memory with zeros behind them up to whole blocks. row_part: also write
    the sums of `totals`, for a pairwise loss; add what a teacher's loss lacks to a number of each program; of another
    exponential, write the exponentials into the strip instead, and their sums. kept: the strip holds a teacher's
    exponentials.
    """
    if kept:
        # these are 0 where a pair does not count
        pair = replace(pair, guide=None, has_teacher=False, masks=Masks(), bits=None)
    run(
        backward.gradient, pair.programs, constants_ptr=constants, row_a_ptr=weights[0], col_b_ptr=weights[-1],
        vectors_step=weights[0].stride(0), row_part_ptr=constants if row_part is None else row_part,
        COLUMNS=len(weights) == 2, LOSS=row_part is not None, KEPT=kept,
        # one loop over tiles and features would spill: 2.1 times as long as `ClipLoss`, and 1.7 without
        FLATTEN=pair.flattened and not kept, **epilogue.flags, **_strip(strip, sums, pair), **pair.arguments,
    )  # fmt: skip


def careful_gradient(pair: Pair, block: Block, strip: Tensor, sums: Tensor) -> None:
    """The careful form, where the flag is set.

    Without fusion a logit is rounded as it was for the maximum. Logits of 1,000 would differ by 3e-5.
    """
    given = directions(block) | _strip(strip, sums, pair)
    run(careful_kernels.careful_gradient, pair.programs, fusion=False, **given, **pair.arguments)


def finish(
    stats: Sequence[Tensor], weights: Tensor | None, numbers: tuple[Tensor, Tensor], total: Total, epilogue: Epilogue,
    reduction: Reduction,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """The loss [], or [N], and each direction's state [S, n] and ∂loss/∂(each row's loss) [n], from statistics [K, n].

    numbers: the constants of a block, and the scale. total: sums a small tensor over all ranks.
    """
    constants, scale = numbers
    lengths = [side.shape[1] for side in stats]
    (N, M), sides, n = ((*lengths, 0)[:2]), len(stats), sum(lengths)
    blocks = tiles_of(max(lengths), BLOCK)
    out, sums = constants.new_empty(STATE + epilogue.state, n), constants.new_empty(2 * sides + 2, blocks)
    given: dict[str, Any] = {
        "row_stats_ptr": stats[0], "row_stats_stride": stats[0].stride(0), "N": N, "col_stats_ptr": stats[-1],
        "col_stats_stride": stats[-1].stride(0), "M": M, "blocks": blocks, "BLOCK": BLOCK,
    }  # fmt: skip
    factor = highest = kernels = constants
    if epilogue.formula.mises_fisher:
        width = scale.double() * epilogue.sigma
        factor, highest = width.reciprocal(), mises_fisher_exponents(stats, width, total)[1]
        kernels = torch.empty(2 * sides, blocks, dtype=torch.float64, device=scale.device)
        run(
            endings.mises_fisher_sums, (blocks, sides), factor_ptr=factor, highest_ptr=highest, out_ptr=kernels, **given
        )
        kernels = total(kernels.sum(1))
    run(
        endings.finish, (blocks, sides), constants_ptr=constants, factor_ptr=factor, highest_ptr=highest,
        kernels_ptr=kernels, out_ptr=out, weights_ptr=constants if weights is None else weights, sums_ptr=sums,
        smoothing=epilogue.label_smoothing, WEIGHTS=weights is not None, **epilogue.flags, **given,
    )  # fmt: skip
    each = reduction == "none"
    value, coefficients = constants.new_empty(N if each else ()), constants.new_empty(n)
    # at least one program: a rank without rows has a value too
    run(
        endings.coefficients, (max(tiles_of(n, BLOCK), 1),), rows_ptr=out, totals_ptr=total(sums.sum(1)),
        out_ptr=coefficients, value_ptr=value, N=N, n=n, MEAN=reduction != "sum", EACH=each, SIDES=sides, BLOCK=BLOCK,
    )  # fmt: skip
    return value, list(out[STATE:].split(lengths, 1)), list(coefficients.split(lengths))


def add_up(terms: Sequence[Term]) -> Tensor:
    """0, and the sum of one or two terms in float64; as `Tiles.backward` returns the sums of a softmax."""
    (x, x_lost), (y, y_lost) = terms[0], terms[-1]
    out = torch.empty(2, dtype=torch.float32, device=x.device)
    run(
        endings.add_up, (1,), x_ptr=x, n=x.numel(), x_lost=x_lost, y_ptr=y, m=y.numel() if len(terms) == 2 else 0,
        y_lost=y_lost, out_ptr=out, BLOCK=NORMS, warps=16,
    )  # fmt: skip
    return out


def scaled(total: Tensor, scale: Tensor, times: Tensor | None, dtype: torch.dtype, *, keep: bool) -> Tensor:
    """total · scale (· times) in this dtype; overwrites `total` unless `keep`."""
    out = total if dtype == total.dtype and not keep else torch.empty(total.shape, dtype=dtype, device=total.device)
    n, D = total.shape
    if not total.numel():
        return out
    run(
        backward.scaled, (tiles_of(n, ROWS),), total_ptr=total, out_ptr=out, scale_ptr=scale,
        times_ptr=scale if times is None else times, n=n, D=D, total_stride=total.stride(0), out_stride=out.stride(0),
        TIMES=times is not None, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def add_rows(u: Tensor, pair: Pair, strip: Tensor, *, fresh: bool) -> None:
    """u += g @ k of a super-tile whose gradient g is in the strip; `fresh`: u = g @ k."""
    g, room = pair.strip_pieces(strip), plan.parts_bytes(strip.nbytes, pair.q.parts)
    for of_g, of_k, inner in _strip_products(pair):
        _add_product(u, g[of_g], pair.k.piece(of_k, u.shape[1]), inner, room, fresh=fresh)
        fresh = False


def add_cols(v: Tensor, pair: Pair, strip: Tensor, *, fresh: bool) -> None:
    """v += gᵀ @ q of as many columns as v has rows; `fresh`: v = gᵀ @ q.

    Products of few rows take as long as v is read and written. Of three pieces those of one order are one product then,
    of pieces below each other.
    """
    g, room = pair.strip_pieces(strip), plan.parts_bytes(strip.nbytes, pair.q.parts)
    parts = pair.q.parts
    # those of whole tiles: the gradient of rows that are not there is 0
    n = tiles_of(len(pair.q), pair.shape.rows) * pair.shape.rows
    if n <= STACKED and len(strip) == parts * n and parts * n * v.shape[1] * strip.itemsize <= room:
        q = pair.q.data.unflatten(1, (parts, -1)).movedim(1, 0).flip(0)
        q = pad(q, (0, v.shape[1] - pair.q.width, 0, n - len(pair.q))).flatten(0, 1)
        for order in reversed(range(parts)):
            rows = (order + 1) * n
            _add_product(v, strip[:rows, : len(v)].T, q[-rows:], None if order else INNER, room - q.nbytes, fresh=fresh)
            fresh = False
        return
    for of_g, of_q, inner in _strip_products(pair):
        _add_product(v, g[of_g].T[: len(v)], pair.q.piece(of_q, v.shape[1]), inner, room, fresh=fresh)
        fresh = False


def _strip_products(pair: Pair) -> list[tuple[int, int, int | None]]:
    """Pieces of the gradient and of the features that are multiplied, and terms of an inner sum."""
    parts = pair.q.parts
    # of three pieces, the product of the largest must be as exact as the last are small
    return [(g, x, INNER if parts == plan.EXACT and g == x == 0 else None) for g, x in plan.piece_products(parts)]


def _add_product(total: Tensor, g: Tensor, x: Tensor, inner: int | None, room: int, *, fresh: bool) -> None:
    """total += g @ x in float32, from 16-bit operands, with at most `inner` terms at once; fresh: no values yet.

    room: bytes for the sums of several such parts, which one launch computes. A part of few rows takes less time than
    its launch.
    """
    n, lost = (len(x), 0.0) if inner is None else (inner, MADE_UP * plan.shape_for(x.device).truncation)
    start, most = 0, room // max(total.nbytes, 1)
    while start < len(x):
        keep = 0.0 if fresh and start == 0 else 1.0
        parts = min(most, (len(x) - start) // n)
        stop = min(start + max(parts, 1) * n, len(x))
        of_g, terms = g[:, start:stop], x[start:stop]
        if parts > 1:
            sums = total.new_empty(parts, *total.shape)
            of_parts = of_g.unflatten(1, (parts, n)).transpose(0, 1), terms.unflatten(0, (parts, n))
            add_at_once(sums, *of_parts, 0.0, 1 + lost * n)
            if keep:
                total.add_(sums.sum(0))
            else:
                torch.sum(sums, 0, out=total)
        else:
            add_at_once(total, of_g, terms, keep, 1 + lost * len(terms))
        start = stop


def add_at_once(total: Tensor, g: Tensor, x: Tensor, keep: float, times: float = 1.0) -> None:
    """total = keep · total + times · g @ x, also of batches; with `keep` 0 the values of total are not read."""
    add = torch.addmm if total.ndim == 2 else torch.baddbmm
    if total.is_cuda:
        add(total, g, x, alpha=times, beta=keep, out_dtype=torch.float32, out=total)
    else:
        add(total, g.float(), x.float(), alpha=times, beta=keep, out=total)
