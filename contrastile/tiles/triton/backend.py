"""A block in fused kernels: products, exponentials and sums in one sweep over the tiles, no tile written to memory.

Stands beside `eager.py`, for CUDA devices: the same statistics and gradients, near the speed of the matrix products
alone. Two acts, each a loop over super-tiles as large as the workspace allows:

    forward     `totals` sums up rows and columns in one sweep, 2·N·M·D operations; `maxima` runs where sums are too low
    backward    `gradient` computes each super-tile again and writes its gradient as a 16-bit strip; the vendor's matrix
                product adds the strip times the features to float32 accumulators, 6·N·M·D operations

Positives known by position (the diagonal, or indices) are computed in float32 by the loss's own formulas, of float32
features from the tiles' products, and never enter the strip. Positives by label are sums of features
(`label_sums.py`) or tiles (`sorting.py`). float32 features are split into two or three bf16 pieces, by torch's float32
matmul precision: three or six products of the same kernels.

A guide's features are a second pair of operands (`guided.py`).

`budget.py` cuts the block, `plan.py` derives the kernels' options from the loss, `launch.py` launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._types import Reduction
from contrastile.losses.base import PairLoss, Shard, Total
from contrastile.tiles.base import ForwardResult, InFlight, Tiles
from contrastile.tiles.triton import exponentials, label_sums, launch, plan, positions, smoothing, sorting
from contrastile.tiles.triton.block import (
    Block,
    Order,
    Positives,
    Runs,
    SuperTile,
    along,
    by_label,
    narrow,
    readable_side,
)
from contrastile.tiles.triton.budget import Budget
from contrastile.tiles.triton.exponentials import Exponentials
from contrastile.tiles.triton.guided import Gap, Guidance, separate_sums, with_guide
from contrastile.tiles.triton.kernels.arithmetic import NONFINITE, UNIT
from contrastile.tiles.triton.launch import CONSTANTS, Term, Weights, on
from contrastile.tiles.triton.own import FusedOwnColumns, OwnTiles
from contrastile.tiles.triton.plan import Epilogue, Pair

# a strip in fp16 holds gradients up to 2 to this power
UNIT_POWER = 14
# first row, number of rows, first column, number of columns of a block
Position = tuple[int, int, int, int]


@dataclass
class Triton(Tiles):
    """Super-tiles of fused kernels."""

    capturable: ClassVar[bool] = True
    writes_fresh: ClassVar[bool] = True
    accepts_in_flight: ClassVar[bool] = True
    checks_guides: ClassVar[bool] = True
    own_columns = FusedOwnColumns
    own_fallback = OwnTiles
    # of each block of this call, by the forward for the backward: constants; order of labels; positives
    constants: dict[Position, Tensor] = field(default_factory=dict, compare=False, repr=False)
    orders: dict[Position, Order | Runs] = field(default_factory=dict, compare=False, repr=False)
    positives: dict[tuple[int, ...], Positives | None] = field(default_factory=dict, compare=False, repr=False)
    # latest super-tile of the present block: the next pass reuses its operands, since it is often the only one
    super_tile: SuperTile | None = field(default=None, init=False, compare=False, repr=False)
    # exponentials of the block, which the forward has written for the backward
    exponentials: Exponentials | None = field(default=None, init=False, compare=False, repr=False)
    guidance: Guidance = field(default_factory=Guidance, init=False, compare=False, repr=False)
    # multiprocessors left to transfers between devices
    reserved: int = 0

    @classmethod
    def declines(cls, loss: PairLoss, rows: Shard, cols: Shard) -> str | None:
        del cols
        unknown = plan.unknown_part(loss)
        if unknown is not None:
            return f"no kernel for {unknown}"
        reasons = (plan.refusal(x.dtype, rows.features.device) for x in (rows.features, *rows.guides))
        return next(filter(None, reasons), None)

    def forward(self, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        sides = (rows, cols)[: 1 + self.loss.symmetric]
        if not len(rows) or not len(cols):
            stats = [self.init(side) for side in sides]
        else:
            stats = [self._new_stats(side) for side in sides]
            with on(self.scale.device):
                block = self._block(rows, cols)
                if block.order is None:
                    self._stats(block, stats)
                else:
                    ordered = [torch.empty_like(side) for side in stats]
                    self._stats(block, ordered)
                    sorting.given_order(ordered, block.order, stats)
        return stats[0], stats[1] if self.loss.symmetric else None

    def backward(
        self, rows: Shard, cols: Shard, u: Tensor | None, v: Tensor | InFlight | None, row_stats: Tensor | None = None
    ) -> Tensor:
        if not len(rows) or not len(cols):
            for x in (u, v):
                if self.fresh and isinstance(x, Tensor):
                    x.zero_()
            return self.no_pairs()
        with on(self.scale.device):
            block = self._block(rows, cols)
            if block.order is None or row_stats is None:
                total = self._grads(block, u, v, row_stats)
            else:
                ordered = torch.zeros_like(row_stats)
                total = self._grads(block, u, v, ordered)
                row_stats.index_add_(1, block.order.rows, ordered)
            if row_stats is not None:
                self._positive_stats(block, [row_stats])
            return total

    def merge(self, stats: Tensor, parts: Tensor) -> None:
        if self._epilogue.has_teacher:
            super().merge(stats, parts)
            return
        with on(self.scale.device):
            launch.merge_parts(stats, parts, self._epilogue)

    def guide_numbers(self, rows: Shard, cols: Shard) -> Tensor | None:
        return self.loss.guide_numbers(rows, cols, positions.listed_products)

    def count_equal(self, labels: Tensor, others: Tensor) -> Tensor:
        if max(len(labels), len(others)) > sorting.MOST_CHUNKED:
            return super().count_equal(labels, others)
        with on(self.scale.device):
            return sorting.count_equal(labels, others)

    def finish(
        self, stats: Sequence[Tensor], weights: Tensor | None, reduction: Reduction, total: Total,
        nonfinite: Callable[[], Tensor],
    ) -> ForwardResult:  # fmt: skip
        # the first block has this rank's own columns: together, the ranks check all features
        constants = next(iter(self.constants.values()), None)
        fused = self._epilogue.formula.denominator is not None
        # of features streamed from the host the constants are those of one block, and the flag of all
        fused = fused and (self.flag is None or self.noted)
        if constants is None and self.noted:
            # rows that meet their own columns alone
            constants = self.scale.new_zeros(CONSTANTS)
        if not fused or constants is None:
            return self.guidance.noted(super().finish(stats, weights, reduction, total, nonfinite))
        if self.flag is not None:
            constants[NONFINITE.value] += self.flag
        weights = None if weights is None else weights.to(torch.float32).contiguous()
        # views of other statistics do not have the layout that the kernel reads
        stats = [side.contiguous() for side in stats]
        with on(self.scale.device):
            given = stats, weights, (constants, self.scale), total, self._epilogue
            return self.guidance.noted(ForwardResult(*launch.finish(*given, reduction)))

    def nonfinite(self, rows: Shard, cols: Shard) -> Tensor:
        if self._epilogue.formula.guide is not None and self.constants:
            # a teacher's constants lie behind the block's
            of_guide = next(iter(self.constants.values()))[CONSTANTS * self._epilogue.has_teacher + NONFINITE.value]
            return super().nonfinite(rows, cols) + of_guide
        if self.flag is not None or self.norms is None:
            return super().nonfinite(rows, cols)
        # the norms of a replay include sums of features times 0
        return self.norms[1].sum() + self.scale * 0

    def nonfinite_after(self, rows: Shard, cols: Shard) -> Tensor:
        constants = next(iter(self.constants.values()), None)
        return self.nonfinite(rows, cols) if constants is None else constants[NONFINITE.value]

    def inner_product(self, x: Tensor, total: Tensor) -> Tensor:
        with on(self.scale.device):
            return launch.inner_product(x, total)

    def scaled(self, total: Tensor, dtype: torch.dtype, upstream: Tensor | None, *, keep: bool) -> Tensor:
        with on(self.scale.device):
            return launch.scaled(total, self.scale, upstream, dtype, keep=keep)

    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        return self._budget.most_bytes(N, M, D, dtype)

    @classmethod
    def expected_bytes(
        cls, loss: PairLoss, N: int, M: int, D: int, dtype: torch.dtype, workspace: int, device: torch.device,
        *, by_index: bool = False, labels: bool = False, ids: bool = False, backward_next: bool = False,
    ) -> int:  # fmt: skip
        del by_index
        budget = Budget(loss, device, workspace)
        return budget.expected_bytes(N, M, D, dtype, backward_next=backward_next, labels=labels, ids=ids)

    def reserve(self, multiprocessors: int) -> None:
        """Leave so many multiprocessors to transfers: a program that finds none free waits for the shares of others."""
        self.reserved = multiprocessors

    def keeps(self, rows: Shard, cols: Shard) -> bool:
        return self._epilogue.has_teacher or self._budget.keeps_exponentials(rows, cols)

    def accumulators(self, rows: Shard, cols: Shard, wanted: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        kept = None if self.orders or self._epilogue.smooth else self.exponentials
        if kept is None or not kept.narrow or self.grad_dtypes not in (None, (torch.bfloat16, torch.bfloat16)):
            return super().accumulators(rows, cols, wanted)
        u, _ = super().accumulators(rows, cols, (*wanted[:3], False))
        k = cols.features
        return u, k.new_empty(len(k) - self.constant_cols, k.shape[1]) if wanted[3] else None

    @property
    def sums_products(self) -> bool:
        return self._epilogue.exponential

    @cached_property
    def _epilogue(self) -> Epilogue:
        return plan.epilogue_for(self.loss)

    @cached_property
    def _budget(self) -> Budget:
        return Budget(self.loss, self.scale.device, self.workspace)

    def _new_stats(self, side: Shard) -> Tensor:
        """Memory for statistics, all of which the first merge writes."""
        return self.scale.new_empty(self._epilogue.stats, len(side))

    def _prepare(self, rows: Shard, cols: Shard, position: Position) -> None:
        """Compute the constants of a block, and the order of its labels, for all of its passes."""
        may_keep = self.backward_next and self._budget.can_keep(rows, cols) and not self._epilogue.has_teacher
        labels, by_sums = by_label(rows), self._budget.sums_labels(rows, cols)
        # gradients of positives, divided by the factor of their row, add up to twice the sum of exponentials
        most = 4 if labels and not by_sums else 1
        keys = most * len(cols) if may_keep and not self.loss.symmetric else 0
        least = exponentials.LEAST if may_keep and self.loss.symmetric and self.keeps(rows, cols) else 0.0
        numbers = rows.features, cols.features, self.scale, self.bias, self._epilogue
        constants = launch.block_constants(*numbers, keys=keys, least=least, norms=self.norms, labels=labels)
        self.constants[position] = with_guide(constants, rows, cols, self._epilogue, first=not self.constants)
        if labels:
            ordered = sorting.ordered(rows, cols, exclude_self=self.loss.exclude_self)
            runs = label_sums.runs(ordered, one_way=not self.loss.symmetric) if by_sums else None
            self.orders[position] = runs or ordered

    def _block(self, rows: Shard, cols: Shard) -> Block:
        position = rows.start, len(rows), cols.start, len(cols)
        if position not in self.constants:
            self._prepare(rows, cols, position)
        summed = self._budget.sums_smoothing(rows, cols)
        rows, cols = readable_side(rows), readable_side(cols)
        order, runs = self.orders.get(position), None
        if isinstance(order, Runs):
            rows, order, runs = replace(rows, positives=order.columns(cols.start)), None, order
        elif order is not None:
            rows, cols = sorting.ordered_sides(rows, cols, order)
        return Block(rows, cols, self.constants[position], self.loss, order, runs, summed)

    def _super_tiles(self, block: Block, held: int | None, *, careful: bool = False) -> Iterator[SuperTile]:
        """The block's super-tiles with their operands, which neighbours and the next pass share."""
        sizes = self._budget.super_tiles(block.rows, block.cols, held)
        return (self._super_tile(block, along_i, along_j, careful=careful) for along_i, along_j in sizes)

    def _super_tile(self, block: Block, i: slice, j: slice, *, careful: bool) -> SuperTile:
        """The super-tile of these rows and columns; nothing else may hold the one before, whose memory it takes."""
        tile = self.super_tile
        if tile is not None and tile.along == (i, j) and tile.whole is block:
            return tile
        order = None if block.order is None else block.order.narrow(i, j)
        same_rows, same_cols = (tile is not None and tile.along[side] == at for side, at in enumerate((i, j)))
        rows = tile.block.rows if tile and same_rows and tile.whole is block else narrow(block.rows, i)
        part = replace(block, rows=rows, cols=narrow(block.cols, j), order=order, runs=None)
        of_rows = tile.pair.of_rows if tile and same_rows else None
        of_cols = tile.pair.of_cols if tile and same_cols else None
        # freed before other operands are copied, which may fill the workspace
        tile = self.super_tile = None
        of_rows = of_rows or launch.operands(*((rows, None) if order is None else (block.rows, order.rows)))
        of_cols = of_cols or launch.operands(*((part.cols, None) if order is None else (block.cols, order.cols)))
        guide = (of_rows[1], of_cols[1]) if len(of_rows) > 1 else None
        numbers = rows.numbers, part.cols.numbers
        products = None if (positives := self._positives(block)) is None else positives.products
        listed = None if products is None else along(products, i, 0)
        given = part.masks, self.reserved, guide, numbers, self._epilogue.has_teacher
        pair = Pair(of_rows[0], of_cols[0], *given, listed=listed)
        pair = self.guidance.masked(pair, block, (i, j), careful=careful)
        first, last = (j.start == 0, i.start == 0), (j.stop == len(block.cols), i.stop == len(block.rows))
        self.super_tile = SuperTile((i, j), block, part, pair, first, last)
        return self.super_tile

    def _stats(self, block: Block, stats: list[Tensor]) -> None:
        """Write the statistics of all pairs: by fast kernels, then by careful ones, which run where a flag is set."""
        epilogue, constants = block.epilogue, block.constants
        passes = [(False, epilogue.channels), (True, epilogue.careful_channels)][: 1 + epilogue.exponential]
        later = self.backward_next and epilogue.has_teacher
        keeps = self.backward_next and self._budget.keeps_exponentials(block.rows, block.cols)
        strip: Tensor | None = None
        for careful, channels in passes:
            for tile in self._super_tiles(block, None, careful=careful):
                if later and not careful:
                    strip = tile.pair.new_strip() if keeps else None
                    parts = separate_sums(tile, strip)
                elif keeps and not careful:
                    self.exponentials, parts = exponentials.written(tile.pair, block)
                    strip = self.exponentials.strip
                else:
                    # where the careful flag is set, the exponentials are not read
                    memory = None if strip is None else strip.view(torch.float32).flatten()
                    parts = tile.block.new_parts(channels, memory)
                    launch.sums(tile.pair, constants, parts, epilogue, careful=careful)
                launch.merge_sums(parts, tile.of(stats), constants, epilogue, tile.first, tile.last, careful=careful)
                if block.order is not None and not careful:
                    sorting.label_totals(tile.pair, tile.block, tile.of(stats), tile.first)
                # freed before the next super-tile's sums and operands are allocated, which may fill the workspace
                del parts, tile
        if latest := self.super_tile:
            whole = all((*latest.first, *latest.last))
            of_teacher = (Gap(stats), strip) if later else ()
            self.guidance = Guidance(block.position, latest.pair.bits if whole else None, *of_teacher)
        if not self.backward_next:
            self.super_tile = None
        self._positive_stats(block, stats)

    def _positives(self, block: Block) -> Positives | None:
        """The positives known by position, as those of the forward."""
        if block.position not in self.positives:
            positives = block.positives() if block.runs is None else block.runs.listed
            if positives is not None and positions.as_tiles(block.rows.features.dtype, self._epilogue):
                products = block.constants.new_empty(len(block.rows), positives.per_row)
                positives = replace(positives, products=products)
            self.positives[block.position] = positives
        return self.positives[block.position]

    def _positive_stats(self, block: Block, stats: list[Tensor]) -> None:
        """Write the positives known by position into the statistics."""
        if (positives := self._positives(block)) is not None:
            positions.add_totals(block, positives, stats)
        if block.runs is not None or block.sums_smoothing:
            room = self._budget.room_for_sums(block.rows, block.cols, self.exponentials, self.guidance.strip)
            if block.runs is not None:
                label_sums.add_totals(block, stats, room)
            if block.sums_smoothing:
                smoothing.add_totals(block, stats, room)

    def _grads(self, block: Block, u: Tensor | None, v: Tensor | InFlight | None, row_stats: Tensor | None) -> Tensor:
        """Add all pairs' gradient to u and v, and with `row_stats` their loss to the statistics.

        Returns Σ_ij g_ij; or, of a softmax, 0 (its exact value) and Σ_ij g_ij · ⟨q_i, k_j⟩, summed from the tiles. The
        accumulators are too inexact for the latter: they have passed 16 bits and truncating tensor cores,
        and attraction and repulsion often cancel to a few percent.
        """
        (shares, block), positives = smoothing.without_shares(block), self._positives(block)
        if block.rows.features.dtype == torch.float16:
            # exponentials, whose rows have factors, are kept in bf16 alone
            terms, factors = [self._scaled_strips(block, u, None if v is None else _received(v), row_stats)], None
        else:
            terms, factors = self._strips(block, u, v, row_stats, releases=positives is None and not shares)
        self.super_tile = None
        if positives is not None:
            given = block, positives, u, None if v is None else _received(v)
            terms.append(positions.add_gradients(*given, factors))
            if block.runs is not None:
                label_sums.add_gradients(block, *given[2:4], terms[-1][0], self._budget.workspace)
        sums = launch.add_up(terms)
        if shares:
            smoothing.add_gradients(block, shares, u, None if v is None else _received(v), sums, self._budget.workspace)
        return sums if self.sums_products else sums[1]

    def _scaled_strips(self, block: Block, u: Tensor | None, v: Tensor | None, row_stats: Tensor | None) -> Term:
        """`_strips` of fp16, whose range is small: accumulators are kept in a unit of the block's own."""
        # the power of two that brings the largest possible gradient of a pair just under fp16's range
        largest = block.largest_gradient(weighed=self._epilogue.formula.mises_fisher)
        power = UNIT_POWER - torch.log2(largest).ceil()
        unit = torch.where(largest == 0, 1.0, torch.exp2(power))
        block.constants[int(UNIT.value)] = unit
        accumulators = [x for x in (u, v) if x is not None]
        for x in accumulators if not self.fresh else []:
            x.mul_(unit)
        ((numbers, lost),), _ = self._strips(block, u, v, row_stats, releases=False)
        inverse = 1 / unit
        for x in (*accumulators, numbers):
            x.mul_(inverse)
        return numbers, lost

    def _strips(
        self, block: Block, u: Tensor | None, v: Tensor | InFlight | None, row_stats: Tensor | None, *, releases: bool
    ) -> tuple[list[Term], Tensor | None]:
        """Add the gradient of all pairs but the positives, one strip at a time.

        Returns the sums of the tiles, and the factors that the kernel of the positives multiplies u by.
        A v that may leave early is added to first. Any other is added to last, because it may still be in flight and
        because the columns must stay until they have been read. It leaves then if this addition `releases` it.
        """
        weights = self._weights(block)
        if self.exponentials is not None:
            given = u, None if v is None else _received(v), self._positives(block) is not None
            numbers, factors = self.exponentials.add(block, weights, *given)
            self.exponentials, self.guidance = None, Guidance()
            return [(x, launch.truncation(block.rows.features)) for x in numbers], factors
        sums = launch.new_sums(self.scale.device, 0 if block.order is None else sorting.SHARED * len(block.rows))
        strip = self.guidance.strip
        lost = launch.truncation(block.rows.features) if self.sums_products else 0.0
        early = isinstance(v, InFlight) and v.early
        for tile in self._super_tiles(block, self.guidance.held(block)):
            if strip is None:
                # the first super-tile is the largest
                strip = tile.pair.new_strip()
            self._fill(tile, weights, strip, sums, row_stats)
            first_of_row, first_of_col = (self.fresh and first for first in tile.first)
            if u is not None and not early:
                sorting.add_strip(u, tile, 0, strip, fresh=first_of_row)
            if v is not None:
                sorting.add_strip(_received(v), tile, 1, strip, fresh=first_of_col)
            if all(tile.last) and isinstance(v, InFlight):
                if releases:
                    v.release()
                # this small kernel lets the transfer start before the next product takes the whole device
                sums = sums.sum(dtype=torch.float64)
            if u is not None and early:
                sorting.add_strip(u, tile, 0, strip, fresh=first_of_row)
            del tile
        self.guidance.complete(block.constants)
        self.guidance = Guidance()
        return [(sums, lost)], None

    def _weights(self, block: Block) -> Weights:
        if self.loss.pairwise:
            ((_, coefficient),) = block.directions
            return [(coefficient * block.constants[int(UNIT.value)])[None]]
        return launch.direction_weights(block, *self.guidance.weighed)

    def _fill(self, tile: SuperTile, weights: Weights, strip: Tensor, sums: Tensor, row_stats: Tensor | None) -> None:
        """Write the super-tile's gradient into the strip, and with `row_stats` merge its loss into them."""
        epilogue, constants = tile.block.epilogue, tile.block.constants
        vectors = [along(x, at) for x, at in zip(weights, tile.along, strict=False)]
        parts = [] if row_stats is None else tile.block.new_parts(epilogue.channels)
        launch.gradient(tile.pair, constants, vectors, strip, sums, epilogue, *parts, **self.guidance.of_teacher)
        stats = None if row_stats is None else tile.of([row_stats])
        if stats is not None:
            # not first: add to the statistics so far
            launch.merge_sums(parts, stats, constants, epilogue, (False, False), tile.last)
        if epilogue.exponential:
            launch.careful_gradient(tile.pair, tile.block, strip, sums)
        if tile.block.order is not None:
            of_rows = sums[launch.sums_of_programs(self.scale.device) :].view(sorting.SHARED, -1)
            of_rows = along(of_rows, tile.along[0])
            sorting.label_gradients(tile.pair, tile.block, strip, of_rows, vectors, stats)


def _received(v: Tensor | InFlight) -> Tensor:
    return v.value() if isinstance(v, InFlight) else v
