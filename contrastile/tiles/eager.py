"""A block in plain PyTorch: one loop over tiles, on any device, in any dtype.

The reference for every faster backend, and the fallback where those decline. The forward computes the statistics of
rows and columns (2·N·M·D operations). The backward computes each tile again and multiplies its gradient with both sides
(6·N·M·D). Together they take 8·b²·d operations, with one tile of the matrix in memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._torch import backward_is_repeatable
from contrastile._types import Reduction, accumulator
from contrastile.losses.base import Direct, PairLoss, Shard, Tile, Total, changed, fill, mark, target, with_states
from contrastile.losses.guided import Guided
from contrastile.losses.labelled import direct_by_labels, few_labels
from contrastile.losses.softmax import Softmax
from contrastile.tiles.base import ForwardResult, InFlight, Sum, Tiles, Weigh, bounds_of, nonfinite_flag, reduced

# tiles of 1,024² float32 stay in a core's cache; on an accelerator 8,192² fill its multiprocessors
SIDE_CPU = 1024
SIDE_ACCELERATOR = 8192
# tiles held at once: logits, exponentials, gradient, a temporary, masks
TILES_HELD = 5
# the same on a CPU, which knows the logits' range: logits and gradient; and what is added to them by a guide (a product
# and a mask), by label smoothing (a tile and a mask), and by listed positives (a mask)
TILES_HELD_CPU, GUIDED_CPU, SMOOTHED_CPU, LISTED_CPU = 2, 1.25, 1.25, 0.25
# float32 matrices of a dense block at the peak, with positives on a diagonal and by index, whose masks are matrices
MATRICES, MATRICES_BY_INDEX = 3.0, 7.25
# most and fewest rows of a strip over all columns on a CPU; with fewer, two sweeps over tiles are as fast
STRIP_CPU, LEAST_STRIP = 512, 32
# most rows of a symmetric block that is one tile on a CPU, whose two sweeps would compute every product twice
WHOLE_CPU = 2048


@dataclass
class Eager(Tiles):
    """Tiles of plain PyTorch operations."""

    # the logits are products of features: also, where all of them are finite, so are the features
    writes_fresh_strip: ClassVar[bool] = True

    # of a block that is one tile on a CPU, from its forward to its backward: the direct loss or the tile, and the
    # context of its products, which the backward would compute again
    kept: tuple[Direct | Tile, Any] | None = field(default=None, init=False, repr=False)

    def forward(self, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        stats: list[Tensor | None] = [None, None]
        keeps = self.writes_fresh_strip and (self.backward_later or (self.backward_next and rows.own is not None))
        on_cpu, pairs = self.scale.device.type == "cpu", len(rows) * len(cols)
        if keeps and on_cpu and pairs and self.loss.rowwise and self._height(len(rows), len(cols)) == len(rows):
            x, context = self._logits(rows, cols, self._room(pairs), with_graph=True)
            tile = self._tile(x, rows, cols, context, by_label=rows.own is None and rows.labels is not None)
            direct = self._direct(tile, whole=True) if rows.own is None else None
            self.kept = direct or tile, context
            # losses in the place of statistics: of one block nothing is merged, and `finish` reads the direct loss
            of_tile = (
                self._stats(tile, rows, cols, keep=True) if direct is None else [end.loss for end in direct.results]
            )
            stats[: len(of_tile)] = of_tile
        else:
            self._sweep(rows, cols, stats, None, None, None)
        # a block without pairs has no tile
        row_stats = self.init(rows) if stats[0] is None else stats[0]
        return row_stats, self.init(cols) if self.loss.symmetric and stats[1] is None else stats[1]

    def finish(
        self, stats: Sequence[Tensor], weights: Tensor | None, reduction: Reduction, total: Total,
        nonfinite: Callable[[], Tensor],
    ) -> ForwardResult:  # fmt: skip
        if self.kept is None or isinstance(self.kept[0], Tile):
            return super().finish(stats, weights, reduction, total, nonfinite)
        return reduced(self.kept[0].results, weights, reduction, total, nonfinite())

    def backward(self, rows: Shard, cols: Shard, u: Sum, v: Sum | InFlight, row_stats: Tensor | None = None) -> Tensor:
        assert not isinstance(v, InFlight)
        sums = self.no_pairs()
        if self.kept is None:
            self._sweep(rows, cols, None if row_stats is None else [row_stats, None], u, v, sums)
            return sums
        (made, context), again = self.kept, self.backward_later and backward_is_repeatable()
        if not again:
            self.kept = None
        elif context is not None:
            context = context.clone()
        if again and isinstance(made, Tile):
            made = made._replace(x=made.x.clone())
        self._propagate_made(made, context, rows, cols, u, v, sums, keep=again)
        return sums

    def strip(self, rows: Shard, cols: Shard, wanted: bool) -> int:
        height = self._height(len(rows), len(cols)) if self.loss.rowwise else 0
        joins = rows.own is None or (height == len(rows) and self._joins(rows.own) and not rows.own_positives)
        # without a gradient tiles make no more products than strips, and stay in a core's cache
        return height if joins and (wanted or height * len(cols) <= SIDE_CPU**2) else 0

    @property
    def _held(self) -> int:
        """Tiles that are held at once, with those of guides and of products."""
        return TILES_HELD + 2 * self.loss.guides + self.loss.reads_products

    def _height(self, N: int, M: int) -> int:
        """Rows of a strip over all M columns; 0 where two sweeps over tiles take their place."""
        side, symmetric, on_cpu = self._side(), self.loss.symmetric, self.scale.device.type == "cpu"
        fit = self.workspace // (self._held * self.scale.dtype.itemsize * max(M, 1))
        if max(N, M) <= (max(side, WHOLE_CPU) if symmetric and on_cpu else side):
            # a dense matrix beyond the workspace takes two sweeps, which hold it once
            return N if M and fit >= N else 0
        height = min(N, fit, STRIP_CPU if on_cpu else side)
        # of a symmetric loss, columns have their statistics after the last row
        return height if height >= min(N, LEAST_STRIP) and not symmetric else 0

    def strips(
        self, rows: Shard, cols: Shard, u: Sum, v: Sum, weigh: Weigh, *, mean: bool, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        height, sums = self.strip(rows, cols, wanted), self.no_pairs()
        room = self._room(height * len(cols))
        for along, strip in self._tiles(rows, height):
            x, context = self._logits(strip, cols, room, with_graph=wanted)
            tile = self._tile(x, strip, cols, context, by_label=strip.labels is not None and strip.own is None)
            if strip.own is not None:
                # alone: a strip with own columns has all rows
                tile = self._with_own(tile, strip, cols)
                room = x = tile.x
            u_I, direct = None if u is None else u[along], self._direct(tile, whole=self.fresh)
            if mean and direct is not None and direct.every:
                # with one number for all coefficients: small batches take a fifth longer with those of each row
                share = 1 / (len(direct.results) * len(rows))
                if wanted:
                    self._add(direct.pair_grad(share, False), context, strip, cols, u_I, v, sums)
                return sums, torch.stack([end.loss for end in direct.results]).sum().mul_(share)
            stats = self._stats(tile, strip, cols, keep=wanted) if direct is None else ()
            states, coefficients = weigh(stats, direct.results if direct else (), along)
            if wanted:
                sides = with_states(strip, cols, states, coefficients)
                self._propagate_made(direct or tile, context, *sides, u_I, v, sums)
            # free the memory for the next strip
            del x, context, tile, direct
        return sums, None

    def _sweep(
        self, rows: Shard, cols: Shard, stats: list[Tensor | None] | None, u: Sum, v: Sum, sums: Tensor | None
    ) -> None:
        """Visit every tile once: merge its statistics into `stats`, and add its gradient to u, v and sums.

        stats: of rows and of columns, made for the first tile where they are None. With None as `stats`, or as `sums`,
        that half is not computed.
        """
        side, shards = self._side(), (rows, cols)
        with self._repeatable():
            room = self._room(min(rows.features.shape[0], side) * min(cols.features.shape[0], side))
            for along_i, row_tile in self._tiles(rows, side):
                for along_j, col_tile in self._tiles(cols, side):
                    x, context = self._logits(row_tile, col_tile, room, with_graph=sums is not None)
                    tile = self._tile(x, row_tile, col_tile, context)
                    if stats is not None:
                        for index, tile_stats in enumerate(self._stats(tile, row_tile, col_tile)):
                            self._merge_tile(stats, index, tile_stats, (along_i, along_j)[index], shards[index])
                    if sums is not None:
                        u_I, v_J = None if u is None else u[along_i], None if v is None else v[along_j]
                        self._propagate(tile, context, row_tile, col_tile, u_I, v_J, sums)
                    # free the memory for the next tile
                    del x, context, tile

    def _stats(self, tile: Tile, _rows: Shard, _cols: Shard, *, keep: bool = False) -> Sequence[Tensor]:
        """The statistics of a tile's rows and, if symmetric, of its columns; uses the tile up unless `keep`."""
        return self.loss.absorb(tile._replace(x=tile.x.clone()) if keep else tile)

    def _merge_tile(
        self, stats: list[Tensor | None], index: int, tile_stats: Tensor, along: slice, shard: Shard
    ) -> None:
        """Merge a tile's statistics [K, n] into those of its shard. A tile as long as the shard has the shard's."""
        whole = stats[index]
        if whole is None and tile_stats.shape[1] == shard.features.shape[0]:
            stats[index] = tile_stats
            return
        if whole is None:
            whole = stats[index] = self.init(shard)
        self.merge(whole[:, along], tile_stats[None])

    def _logits(self, rows: Shard, cols: Shard, room: Tensor, *, with_graph: bool) -> tuple[Tensor, Any]:
        """scale · ⟨q_i, k_j⟩ [I, J], and a context for `_products` and `_propagate`; with_graph: the latter follows."""
        del with_graph
        q, k = rows.features, cols.features.T
        n, m = q.shape[0], k.shape[1]
        out = room[: n * m].view(n, m)
        if _narrow_on_accelerator(q):
            torch.mm(q, k, out_dtype=torch.float32, out=out)
        else:
            torch.mm(q.to(out.dtype), k.to(out.dtype), out=out)
        # scaled after the product: scaled features would be rounded once more
        return (out * self.scale, out) if self.loss.reads_products else (out.mul_(self.scale), None)

    def _products(self, context: Any) -> Tensor:
        """⟨q_i, k_j⟩ [I, J]."""
        return context

    def _propagate(self, tile: Tile, context: Any, rows: Shard, cols: Shard, u_I: Sum, v_J: Sum, sums: Tensor) -> None:
        """Add a tile's gradient to the accumulators and to the sums."""
        self._add(self.loss.pair_grad(tile, rows, cols), context, rows, cols, u_I, v_J, sums)

    def _direct(self, tile: Tile, *, whole: bool) -> Direct | None:
        """The direct loss of a tile that has all columns of its rows; `whole`: and all rows."""
        if tile.bounds is None:
            return None
        if whole and all(map(math.isfinite, tile.bounds)):
            self.flag = self.scale.new_zeros(())
        return self.loss.direct(tile) if tile.labels is None else direct_by_labels(self.loss, tile)

    def _propagate_made(
        self, made: Direct | Tile, context: Any, rows: Shard, cols: Shard, u_I: Sum, v_J: Sum, sums: Tensor,
        *, keep: bool = False,
    ) -> None:  # fmt: skip
        """`_propagate`, with the gradient of a direct loss where there is one."""
        if isinstance(made, Tile):
            self._propagate(made, context, rows, cols, u_I, v_J, sums)
        else:
            coefficients = [side.coefficient for side in (rows, cols) if side.coefficient is not None]
            self._add(made.pair_grad(torch.stack(coefficients), keep), context, rows, cols, u_I, v_J, sums)

    def _add(self, g_IJ: Tensor, _context: Any, rows: Shard, cols: Shard, u_I: Sum, v_J: Sum, sums: Tensor) -> None:
        """Add g · k to u, gᵀ · q to v, and the sum of g to the sums where a bias needs it."""
        g_IJ, of_own = g_IJ[:, : len(cols)], g_IJ[:, len(cols) :]
        if self.bias is not None:
            sums += g_IJ.sum()
        if u_I is not None:
            add_product(u_I, g_IJ, cols.features, fresh=self.fresh)
            if of_own.numel():
                assert rows.own is not None
                self.own_columns.add(of_own, rows.own, u_I)
        if of_own.numel():
            # not a view, which would keep the whole strip
            self.own_gradients = of_own.clone()
        if v_J is not None and len(v_J):
            add_product(v_J, g_IJ.T[: len(v_J)], rows.features, fresh=self.fresh)

    def _repeatable(self) -> AbstractContextManager[object]:
        """A context in which a tile is computed the same every time."""
        return nullcontext()

    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        rows, cols = self._largest_tile(N, M)
        return accumulator(dtype).itemsize * (self._held * rows * cols + 2 * (rows + cols) * D)

    def _largest_tile(self, N: int, M: int) -> tuple[int, int]:
        """Rows and columns of a strip over all columns, or of a tile."""
        height, side = self._height(N, M), self._side()
        return (height, M) if height else (min(N, side), min(M, side))

    @classmethod
    def expected_bytes(
        cls, loss: PairLoss, N: int, M: int, D: int, dtype: torch.dtype, workspace: int, device: torch.device,
        *, by_index: bool = False, labels: bool = False, ids: bool = False, backward_next: bool = False,
    ) -> int:  # fmt: skip
        del ids
        tiles = cls(loss, torch.empty((), device=device), None, workspace)
        teacher = loss.formula is not None and loss.formula.guide == "teacher"
        # a pairwise loss, and blocks of several ranks or of halves, are swept over in tiles
        in_tiles = loss.pairwise or not backward_next
        if device.type != "cpu" or labels or teacher:
            return tiles.workspace_bytes(N, M, D, dtype)
        side, wide = tiles._side(), accumulator(dtype)
        rows, cols = (min(N, side), min(M, side)) if in_tiles else tiles._largest_tile(N, M)
        smoothed = bool(getattr(loss, "label_smoothing", 0.0))
        # the gradient of one direction takes the place of the logits
        in_place = type(loss) is Softmax or (type(loss) is Guided and not (by_index or smoothed))
        in_place &= not loss.symmetric
        held = TILES_HELD_CPU - in_place + GUIDED_CPU * loss.guides + loss.reads_products + LISTED_CPU * by_index
        # smoothing reads the logits after their exponentials; logits far apart have these for rows and for columns
        held += 0 if in_place else SMOOTHED_CPU if smoothed else loss.symmetric
        # with four numbers of each row and column
        return int(wide.itemsize * (held * rows * cols + 4 * (rows + cols)) + cls._copied(rows, cols, D, dtype))

    @classmethod
    def _copied(cls, I: int, J: int, D: int, dtype: torch.dtype) -> int:  # noqa: E741
        """Bytes of a tile's operands in another dtype: features of one side at a time, on a CPU."""
        return max(I, J) * D * accumulator(dtype).itemsize if dtype != accumulator(dtype) else 0

    def _tile(self, x: Tensor, rows: Shard, cols: Shard, context: Any, *, by_label: bool = False) -> Tile:
        """The tile of the logits x, to which the bias is added in place; by_label: few labels have a direct loss."""
        if self.bias is not None:
            x += self.bias
        bounds, loss = bounds_of(x), self.loss
        labels = few_labels(loss, rows, cols, bounds) if by_label and type(loss) is Softmax else None
        marked = rows if labels is None else changed(rows, labels=None)
        positive, excluded = mark(marked, cols, exclude_self=loss.exclude_self)
        if excluded is not None:
            fill(x, excluded, -torch.inf)
        products, numbers = self._products(context) if loss.reads_products else None, (rows.numbers, cols.numbers)
        tile = Tile(x, positive, excluded, bounds, numbers=numbers, products=products, labels=labels)
        if not rows.guides and rows.targets is None:
            return tile
        guides = [a.to(x.dtype) @ b.to(x.dtype).T for a, b in zip(rows.guides, cols.guides, strict=True)]
        return tile._replace(guides=tuple(guides), target=target(rows, cols))

    def _joins(self, own: Tensor) -> bool:
        """Return whether these own columns are part of a strip that has all rows: copies must fit the workspace."""
        wide = self.scale.dtype
        fit = own.dtype == wide or own.numel() * wide.itemsize <= self.workspace
        known = type(self) is Eager and type(self.loss) is Softmax and own.device.type == "cpu"
        return known and fit and own.shape[1] > 0

    def _with_own(self, tile: Tile, rows: Shard, cols: Shard) -> Tile:
        """The tile [I, J + H] with the logits of own columns behind those of all."""
        assert rows.own is not None
        assert tile.bounds is not None
        x = tile.x.new_empty(rows.own.shape[:2])
        self.own_columns.products(rows.features, rows.own, x, torch.zeros_like(self.scale))
        every = [*tile.bounds, *map(float, torch.aminmax(x.mul_(self.scale)))]
        bounds = min(every), max(every)
        if not all(map(math.isfinite, every)):
            # excluded columns count too
            self.flag = nonfinite_flag(self.scale, rows.features, cols.features, rows.own)
            bounds = -math.inf, math.inf
        marks, positive, excluded = rows.own_excluded, tile.positive, tile.excluded
        if marks is not None:
            fill(x, marks, -torch.inf)
            of_all = fill(torch.zeros_like(tile.x, dtype=torch.bool), excluded, True)
            excluded = torch.cat([of_all, marks], 1)
        elif isinstance(excluded, Tensor):
            excluded = F.pad(excluded, (0, x.shape[1]))
        if isinstance(positive, Tensor):
            positive = F.pad(positive, (0, x.shape[1]))
        return tile._replace(x=torch.cat([tile.x, x], 1), positive=positive, excluded=excluded, bounds=bounds)

    def _room(self, pairs: int) -> Tensor:
        """Memory for the logits of any tile, allocated once: an allocation costs as much as a small product."""
        return self.scale.new_empty(pairs)

    def _tiles(self, shard: Shard, step: int) -> Iterator[tuple[slice, Shard]]:
        n = shard.features.shape[0]
        if n <= step:
            return iter([(slice(0, n), shard)] if n else [])
        bounds = [(start, min(start + step, n)) for start in range(0, n, step)]
        return iter([(slice(*each), shard.narrow(*each)) for each in bounds])

    def _side(self) -> int:
        """Rows, and columns, of a tile: the fastest size that fits the workspace."""
        most = SIDE_CPU if self.scale.device.type == "cpu" else SIDE_ACCELERATOR
        fit = int((self.workspace / (self._held * self.scale.dtype.itemsize)) ** 0.5)
        return max(16, min(most, fit))


@dataclass
class Dense(Eager):
    """One tile of the size of the block, whatever the workspace: the b × b matrix of CLIP's own training code.

    The baseline of the papers' tables. With the exchanges `replicate`, `gather` and `ring` it holds b², b²/n and b²/n²
    elements.
    """

    def _side(self) -> int:
        return 2**62

    @classmethod
    def expected_bytes(
        cls, loss: PairLoss, N: int, M: int, D: int, dtype: torch.dtype, workspace: int, device: torch.device,
        *, by_index: bool = False, labels: bool = False, ids: bool = False, backward_next: bool = False,
    ) -> int:  # fmt: skip
        del workspace, ids, backward_next
        matrices, copied = MATRICES_BY_INDEX if by_index else MATRICES, 0
        if device.type == "cpu":
            copied = cls._copied(N, M, D, dtype)
            if not (by_index and labels):
                # as of a tile, exponentials of both directions where logits are far apart
                matrices = TILES_HELD_CPU + loss.symmetric + LISTED_CPU * by_index
        return int(matrices * N * M * accumulator(dtype).itemsize + copied)


def add_product(total: Tensor, g: Tensor, features: Tensor, *, fresh: bool) -> None:
    """total += g @ features, in the accumulator's dtype; `fresh`: total = g @ features."""
    keep = 0 if fresh else 1
    if not _narrow_on_accelerator(features):
        total.addmm_(g, features.to(total.dtype), beta=keep)
    elif features.dtype == torch.float16:
        narrow, unit = _in_range(g)
        product = torch.mm(narrow, features, out_dtype=torch.float32)
        _ = torch.div(product, unit, out=total) if fresh else total.addcdiv_(product, unit)
    else:
        torch.addmm(total, g.to(features.dtype), features, beta=keep, out_dtype=torch.float32, out=total)


def _in_range(g: Tensor) -> tuple[Tensor, Tensor]:
    """g times a power of two as fp16, and that power: in a mean over many pairs most of g is below fp16's range."""
    most = torch.linalg.vector_norm(g, ord=torch.inf)
    # below 2^15, the end of fp16's range; 126 is the largest power that float32 can invert
    power = (14 - torch.log2(most).ceil()).clamp(max=126)
    unit = torch.where(most == 0, 1.0, torch.exp2(power))
    return torch.mul(g, unit, out=torch.empty_like(g, dtype=torch.float16)), unit


def _narrow_on_accelerator(features: Tensor) -> bool:
    """16-bit operands on a CUDA device: its tensor cores accumulate in float32 and return it."""
    return features.is_cuda and features.dtype in (torch.float16, torch.bfloat16)
