"""A rank's loss as the planner sees it: sizes, and the bytes that exchange and tiles declare for them.

A row is one vector, or those of L tokens: `LateSize` has the bytes and the work of `MaxSim`.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from contrastile._dispatch import EXCHANGES, GATHERED_SHARE, TILES, automatic_exchange
from contrastile._types import accumulator
from contrastile.engine.graph import MOST_BYTES, MOST_ROWS
from contrastile.exchange.base import Exchange, Layout, Traffic
from contrastile.exchange.host import Cut, cut_within, device_bytes, row_bytes
from contrastile.losses.base import PairLoss
from contrastile.losses.softmax import Softmax
from contrastile.offload import default_workspace
from contrastile.scorers import MaxSim
from contrastile.tiles.base import NARROW, ROWS_AT_ONCE, STATISTICS
from contrastile.tiles.eager import MATRICES, MATRICES_BY_INDEX, SIDE_ACCELERATOR, SIDE_CPU, of_dtype

# bytes of fused kernels whatever the size of a block, measured: the scratch memory of their programs
SCRATCH = 450 * 2**10


@dataclass(frozen=True)
class LossSize:
    """The loss of `rows` rows and `keys` columns on each of `ranks` ranks, with `dimensions` features.

    dtype: of the products. given: of the features. memory: bytes of the device, of which "auto" and the default
    workspace are shares. exchange, backend: words of the losses' options. queue: a rank's keys of earlier steps, which
    are columns too. own: columns of each row beside them, such as other rows. guide: the numbers of a row of another
    model, which are multiplied too, and copied where there are own columns. halves: rows have two halves of so many
    features, and numbers of the guide, the second of which meets as many columns as there are rows. directions: such
    losses of a step, in turn.
    """

    rows: int
    keys: int
    ranks: int
    dimensions: int
    memory: int
    exchange: str = "auto"
    backend: str = "auto"
    device: str = "cuda"
    workspace: int | None = None
    dtype: torch.dtype = torch.bfloat16
    given: torch.dtype = torch.bfloat16
    loss: PairLoss = field(default_factory=partial(Softmax, symmetric=True))
    # the features wait in host memory; bytes of the device that other parts hold meanwhile
    host: bool = False
    held: int = 0
    queue: int = 0
    own: int = 0
    guide: int = 0
    halves: bool = False
    directions: int = 1
    # positives are known by indices or labels in every exchange
    listed: bool = False
    # by labels, which every pair compares
    labels: bool = False
    # ranks of a node; None: all of them; and whether copy engines carry what they send each other, as between GPUs
    node: int | None = None
    copies: bool = True

    @property
    def columns(self) -> int:
        """Columns of a rank: its keys, those of the queue, and its rows' own."""
        return self.keys + self.queue + self.own * self.rows

    @property
    def summed(self) -> int:
        """Numbers of the gradient sums: of all rows and columns but a queue's keys in one process, constants."""
        constants = self.queue if self.ranks == 1 and not (self.host or self.own) else 0
        return self.numbers - constants * self.sizes[1]

    @property
    def carried(self) -> int:
        """Numbers of a column that other ranks send, of rows and columns the larger one's."""
        return max(self.sizes)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of a row and of a column."""
        return self.dimensions * (1 + self.halves), self.dimensions

    @property
    def numbers(self) -> int:
        """Numbers of the features of all rows and columns."""
        of_row, of_col = self.sizes
        return self.rows * of_row + self.columns * of_col

    @property
    def vectors(self) -> int:
        """Vectors of a column."""
        return 1

    @cached_property
    def layout(self) -> Layout:
        return Layout(None, 0, (self.rows,) * self.ranks, (self.columns,) * self.ranks, node=self.node or self.ranks)

    @cached_property
    def exchange_name(self) -> str:
        """The exchange by name, which "auto" chooses as the losses do."""
        if self.ranks == 1:
            return "single"
        if self.host:
            return "ring"
        if self.exchange != "auto":
            return self.exchange
        return automatic_exchange(self.layout, self.carried, self.dtype, self.memory // GATHERED_SHARE)

    @cached_property
    def backend_name(self) -> str:
        """The backend; of "auto" fused kernels on a GPU, for every dtype but float64."""
        if self.backend != "auto":
            return self.backend
        return "triton" if self.device == "cuda" and self.dtype != torch.float64 else "eager"

    @property
    def exchange_class(self) -> type[Exchange]:
        return EXCHANGES[self.exchange_name]

    @cached_property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the largest block."""
        return self.exchange_class.blocks(self.layout, self.carried)[-1]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Rows and columns of each block; of features in host memory one of a strip and a shard."""
        if self.host:
            return [(min(self._cuts.strip, self.rows), min(self._cuts.shard, self.columns))]
        return self.exchange_class.blocks(self.layout, self.carried)

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes of the block that takes most."""
        allowed = self._allowed
        try:
            tiles = of_dtype(TILES[self.backend_name](), self.dtype, self._place)
        except ImportError:
            # Triton is not installed here: a strip of 16-bit gradients
            return min(allowed, 2 * self.block[0] * self.block[1])
        by_index = self.exchange_class.by_index or self.listed
        follows = self.ranks == 1 and not self.host and (self.backend_name == "triton" or not self.halves)
        expected = partial(
            tiles.expected_bytes, self.loss, by_index=by_index, labels=self.labels, backward_next=follows
        )

        def bytes_of(N: int, M: int) -> int:
            # blocks of both halves, within the workspace by their columns
            parts = [expected(N, m, self.dimensions, self.dtype, allowed * m // M, self._place) for m in self._split(M)]
            return sum(parts) if self.exponentials else max(parts)

        # halved until they fit, a shorter block may take more
        most = max(bytes_of(*block) for block in self.blocks)
        return most + (SCRATCH if self.backend_name == "triton" else 0)

    def _split(self, M: int) -> list[int]:
        """M columns of a block, or those that meet the first halves of rows, and those that meet the second."""
        second = M * self.rows // self.columns if self.halves else 0
        return [M - second, second] if second else [M]

    @property
    def _allowed(self) -> int:
        """Bytes that a block may take."""
        default = default_workspace(self.memory, alone=self.ranks == 1 and not self.host and self.device == "cuda")
        allowed = default if self.workspace is None else self.workspace
        graph = self.ranks > 1 and self.replayed and self.backend_name == "triton"
        return min(allowed, MOST_BYTES) if graph else allowed

    @cached_property
    def exchange_bytes(self) -> int:
        """Bytes of what other ranks send."""
        if self.host:
            return 0
        return self.exchange_class.expected_bytes(self.layout, self.carried, self.dtype) + self._staged

    @cached_property
    def kept_bytes(self) -> int:
        """Of those, bytes that stay between calls."""
        if self.host or self.device != "cuda" or not self.copies:
            return 0
        return self._staged + self.exchange_class.kept_bytes(self.layout, self.carried, self.dtype)

    @property
    def _staged(self) -> int:
        """Bytes that copy engines read."""
        if self.device != "cuda" or not self.copies:
            return 0
        return self.exchange_class.staged_bytes(self.layout, self.carried, self.dtype)

    @cached_property
    def resident(self) -> tuple[int, int]:
        """Bytes beside both: throughout, and at the end."""
        if self.host:
            return device_bytes(self._cuts, self.rows, self.columns, self.sizes, self.given, self.dtype), 0
        halves = self.rows * (1 + self.halves)
        throughout, end = _resident_bytes(halves, self.columns, self.dimensions, self.dtype, self.given)
        side = SIDE_ACCELERATOR if self.device == "cuda" else SIDE_CPU
        one_sweep = self.loss.pairwise or not self.loss.symmetric or max(self.rows, self.columns) <= side
        if self.ranks == 1 and self.backend_name == "eager" and one_sweep and end == throughout:
            # the gradient is computed in the forward, and the scale's is the sum of a product of this size
            end += min(self.rows, ROWS_AT_ONCE) * self.sizes[0] * self.wide
        # the sums of those before wait for the backward; copies of all columns, where others are behind the keys, too
        copied = self.columns + self.halves * 2 * self.rows
        queued = copied * self.dimensions * self.given.itemsize if self.queue or self.own else 0
        # the copy that a queue hands out
        queued += self.queue * self.dimensions * self.given.itemsize
        queued += (halves + self.columns) * self.guide * self.given.itemsize if self.own else 0
        unsummed = (self.numbers - self.summed) * self.wide
        # the gradient with zeros for constants is a copy, also where it has the dtype of the sums
        copied_sums = unsummed and self.given == accumulator(self.dtype)
        joined = self.columns * self.sizes[1] * self.wide if copied_sums else 0
        throughout, end = throughout - unsummed, end - unsummed + joined
        others = (self.directions - 1) * throughout + self.directions * queued
        return throughout + others, end + others

    @property
    def operands(self) -> int:
        """Bytes of both sides in the dtype of the products, which stay as long as the loss's graph."""
        return 0 if self.host else self.numbers * self.dtype.itemsize

    @property
    def later(self) -> int:
        """Bytes of the accumulators that the backward makes; 0 where the gradients come with the loss.

        They do for a pairwise loss, on a GPU's ranks of few rows, and in one process for a loss of one direction, one
        that keeps its exponentials and one with a teacher.
        """
        keeps = self.exponentials or (self.has_teacher and self.backend_name == "triton")
        early = self.replayed if self.ranks > 1 else not self.loss.symmetric or keeps
        return 0 if early or self.loss.pairwise or self.host else self.summed * self.wide

    @property
    def has_teacher(self) -> bool:
        """A teacher's features are multiplied too."""
        return self.loss.formula is not None and self.loss.formula.guide == "teacher"

    @cached_property
    def exponentials(self) -> bool:
        """The backward has the forward's exponentials: of one process, by fused kernels, where they fit."""
        if self.backend_name != "triton" or self.ranks > 1 or self.host:
            return False
        try:
            from contrastile.tiles.triton.block import Budget
        except ImportError:
            return 2 * self.rows * self.columns <= self._allowed
        given, M = (self.dimensions, self.dtype), self.columns
        return all(
            Budget(self.loss, self._place, self._allowed * m // M).expects_exponentials(
                self.rows, m, *given, labels=self.labels
            )
            for m in self._split(M)
        )

    @cached_property
    def sums_labels(self) -> bool:
        """Positives by label enter as sums of features, so that they take the time of a few passes over features."""
        if self.backend_name != "triton" or not self.labels or self.dtype.itemsize != 2:
            return False
        formula = self.loss.formula
        return formula is not None and formula.linear and not getattr(self.loss, "label_smoothing", 0)

    @property
    def _place(self) -> torch.device:
        """A device whose tensors have no memory stands for a GPU."""
        return torch.device("meta" if self.device == "cuda" else "cpu")

    @cached_property
    def _cuts(self) -> Cut:
        """Strips and shards of features in host memory."""
        free = self.memory - self.held - self._allowed
        of_row, of_col = (row_bytes(numbers, self.given) for numbers in self.sizes)
        return cut_within(self.rows, self.columns, (of_row, of_col), free, self.vectors)

    @property
    def peak(self) -> int:
        """The most bytes beside features, the gradients that are returned included."""
        throughout, end = self.resident
        return max(throughout + self.workspace_bytes + self.exchange_bytes, end + self.kept_bytes)

    @property
    def operations(self) -> float:
        """Operations of a rank in both passes.

        For each pair and feature 8, of a pairwise loss in one sweep and with kept exponentials 6; for each feature of a
        teacher 4, and of a guide, whose mask is kept as bits, 2.
        """
        own = 6 if self.exponentials or (self.loss.pairwise and not self.host) else 8
        every = self.pairs * (own * self.dimensions + (4 if self.has_teacher else 2) * self.guide)
        return every - 2.0 * self.rows * self.directions * (self.numbers - self.summed)

    @property
    def replayed(self) -> bool:
        """A small call is replayed from graphs: of one process, or of a GPU's ranks of few rows."""
        if self.host:
            return False
        if self.ranks > 1:
            fits = self.device == "cuda" and not self.own and self.vectors == 1
            return fits and self.exchange_class("mean", self.layout).replayable(self.carried, self.dtype)
        N, M = self.block
        return min(N, M) <= MOST_ROWS and 2 * N * M <= MOST_BYTES

    @property
    def copied(self) -> int:
        """Bytes that a replay moves beside its graph: features to the graph's memory, and sums from it."""
        narrow = self.exponentials and not self.loss.symmetric and self.columns >= NARROW * self.rows
        of_rows = self.sizes[0] * self.rows
        sums = of_rows * self.wide + (self.summed - of_rows) * (self.dtype.itemsize if narrow else self.wide)
        return self.numbers * (2 * self.given.itemsize + self.dtype.itemsize) + sums

    @property
    def pairs(self) -> float:
        """Pairs that a rank computes."""
        share = 1 if self.exchange_class.pairs_once else self.ranks
        return float(self.rows * share) * self.columns * self.ranks * self.directions

    @property
    def matrices(self) -> float:
        """Matrices that a dense block holds."""
        return MATRICES_BY_INDEX if self.exchange_class.by_index else MATRICES

    @property
    def traffic(self) -> Traffic:
        """The transfers of both passes, from other ranks to this one."""
        return self.exchange_class.traffic(self.layout, self.carried, self.dtype)

    @property
    def wide(self) -> int:
        """Bytes of an accumulator."""
        return accumulator(self.dtype).itemsize


def _resident_bytes(N: int, M: int, D: int, dtype: torch.dtype, given: torch.dtype) -> tuple[int, int]:
    """Bytes of a loss beside its blocks: during their computation, and at the end, when gradients are returned.

    dtype: of the products. given: of the features, which are cast to `dtype`, and their gradients back. A gradient in
    the accumulator's dtype is the accumulator.
    """
    wide = accumulator(dtype)
    casts = (N + M) * D * dtype.itemsize if given != dtype else 0
    throughout = casts + (N + M) * (D * wide.itemsize + STATISTICS * wide.itemsize)
    return throughout, throughout + (0 if given == wide else (N + M) * D * given.itemsize)


@dataclass(frozen=True)
class LateSize(LossSize):
    """The loss of rows and columns with so many `tokens` each, of `dimensions` features.

    masked: tokens behind a mask do not count, as those of a recipe.
    """

    tokens: tuple[int, int] = (1, 1)
    masked: bool = True

    @property
    def sizes(self) -> tuple[int, int]:
        L, T = self.tokens
        return L * self.dimensions, T * self.dimensions

    @property
    def vectors(self) -> int:
        return self.tokens[1]

    @property
    def operands(self) -> int:
        """The kernels' copies are bytes of their own."""
        return 0

    @property
    def at_once(self) -> bool:
        """The gradients come with the loss, from one sweep."""
        return self.backend_name == "triton" and self.ranks == 1 and not self.host and not self.fused[1]

    @property
    def fused(self) -> tuple[int, int, int, int]:
        """Bytes of the kernels and columns of a tile, pairs whose winning tokens are kept, and bytes with those."""
        try:
            from contrastile.tiles.triton.maxsim import block as maxsim
        except ImportError:
            return self._allowed, self.columns, 0, 0
        cast = self.given != self.dtype
        copies = self.dtype.itemsize * (self.masked + cast)
        rows, cols = self.blocks[-1]
        return maxsim.expected_bytes(
            rows, cols, self.tokens, self.dimensions, self._allowed, symmetric=self.loss.symmetric, copies=copies,
            at_once=not self.host and self.ranks == 1,
        )  # fmt: skip

    @property
    def workspace_bytes(self) -> int:
        if self.backend_name == "triton":
            most, _, _, beginning = self.fused
            # `beginning` has the rows' gradients that are there by then, and those of columns are not
            of_row, of_col = self.sizes
            return max(most, beginning - self.columns * of_col * self.given.itemsize - self.rows * of_row * self.wide)
        rows, cols = self.blocks[-1]
        L, T = self.tokens
        tile = MaxSim.tile_bytes(rows, cols, L, T, self.dimensions, self.wide)
        # without what is behind a mask
        tile += self.masked * self.dtype.itemsize * (rows * L + cols * T) * self.dimensions
        if self.device == "cuda":
            # all similarities of a tile, and their gradients
            tile += 2 * self.dtype.itemsize * rows * L * cols * T
        return tile if self.backend_name == "dense" else min(tile, self._allowed)

    @property
    def resident(self) -> tuple[int, int]:
        """Accumulators and statistics; at the end gradients too."""
        if self.host:
            return super().resident
        wide, (of_row, of_col) = self.wide, self.sizes
        stats = (self.rows + self.columns) * STATISTICS * wide
        returned = 0 if self.given.itemsize == wide else self.given.itemsize
        if self.backend_name == "triton" and self.ranks == 1 and not self.at_once:
            # the gradients of the columns are float32 for a strip at a time
            strip = min(self.fused[1], self.columns) * of_col * wide
            of_columns = self.columns * of_col * self.given.itemsize
            throughout = self.rows * of_row * wide + of_columns + stats
            return throughout + strip, throughout + self.rows * of_row * returned
        sums = self.numbers * wide
        return sums + stats, sums + stats + self.numbers * returned

    @property
    def operations(self) -> float:
        """Operations of a sweep over all tokens of a rank's pairs."""
        L, T = self.tokens
        return 2.0 * self.pairs * L * T * self.dimensions
