"""A rank's loss as the planner sees it: sizes, and the bytes that exchange and tiles declare for them.

A row is one vector, or those of L tokens: `LateSize` has the bytes and the work of `MaxSim`.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from contrastile._dispatch import EXCHANGES, GATHERED_SHARE, TILES, automatic_exchange
from contrastile._types import accumulator
from contrastile.engine.graph import MOST_GRAPH_BYTES, MOST_GRAPH_ROWS
from contrastile.exchange.base import Exchange, Layout, Traffic
from contrastile.exchange.host import Cut, cut_within, device_bytes, row_bytes
from contrastile.losses.base import PairLoss
from contrastile.losses.guided import MARKS
from contrastile.losses.softmax import Softmax
from contrastile.offload import default_workspace
from contrastile.scorers import MaxSim
from contrastile.tiles.base import NARROW, ROWS_AT_ONCE, STATISTICS, OwnColumns
from contrastile.tiles.bfloat import of_dtype
from contrastile.tiles.eager import MATRICES, MATRICES_BY_INDEX, SIDE_ACCELERATOR, SIDE_CPU

# bytes of fused kernels whatever the size of a block, measured: the scratch memory of their programs
SCRATCH = 450 * 2**10


@dataclass(frozen=True)
class LossSize:
    """The loss of `rows` rows and `keys` columns on each of `ranks` ranks, with `dimensions` features.

    dtype: of the products. feature_dtype: of the features. memory: bytes of the device, of which "auto" and the default
    workspace are shares. exchange, backend: words of the losses' options. queue: a rank's keys of earlier steps, which
    are columns too. own_columns: further columns of each row, such as other rows. listed: vectors that each row meets
    alone, beside the columns. guide: features of a row of another model, which are multiplied too, and copied where
    there are own columns. halves: a row has two vectors, and two of the guide; the second ones meet as many columns as
    there are rows. directions: losses of these sizes in a step, one after the other.
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
    feature_dtype: torch.dtype = torch.bfloat16
    loss: PairLoss = field(default_factory=partial(Softmax, symmetric=True))
    # the features wait in host memory; bytes of the device that other parts hold meanwhile
    host: bool = False
    held: int = 0
    queue: int = 0
    own_columns: int = 0
    listed: int = 0
    guide: int = 0
    halves: bool = False
    directions: int = 1
    # positives are indices or labels in every exchange, not the diagonal; labels, which every pair compares; pairs of
    # equal ids are left out
    indexed: bool = False
    labels: bool = False
    ids: bool = False
    # ranks of a node, None: all; copy engines carry what they send each other, as between GPUs; GPUs have fused kernels
    node: int | None = None
    copies: bool = True
    kernels: bool = True

    @property
    def columns(self) -> int:
        """Columns of a rank: its keys, those of the queue, and its rows' own."""
        return self.keys + self.queue + self.own_columns * self.rows

    @property
    def summed(self) -> int:
        """Numbers of the gradient sums: of rows and columns, without a queue's keys where these are constants."""
        constants = self.queue if self.ranks == 1 and not (self.host or self.own_columns) else 0
        return self.numbers - constants * self.sizes[1]

    @property
    def carried(self) -> int:
        """Numbers of a vector that ranks exchange: a row's or a column's, the larger."""
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
        return automatic_exchange(self.layout, self.carried, self.dtype, self.memory // GATHERED_SHARE, self._copied)

    @cached_property
    def backend_name(self) -> str:
        """The backend; of "auto" fused kernels on a GPU that has them, for every dtype but float64."""
        automatic = "triton" if self.device == "cuda" and self.kernels and self.dtype != torch.float64 else "eager"
        name = automatic if self.backend == "auto" else self.backend
        # a loss of lists alone has no kernels of its own, but token vectors have theirs whatever the loss
        eager = self.loss.formula is None and self.vectors == 1
        return "eager" if name == "triton" and eager else name

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
        if not self.columns:
            # PyTorch copies strips of the lists, before their gradients are there
            listed = self.listed * self.rows * self.dimensions
            copies = 0 if self.backend_name == "triton" else OwnColumns.copies * self.wide * listed
            return max(0, min(allowed, copies) - listed * self.feature_dtype.itemsize)
        try:
            tiles = of_dtype(TILES[self.backend_name](), self.dtype, self._torch_device)
        except ImportError:
            # Triton is not installed here: a strip of 16-bit gradients
            return min(allowed, 2 * self.block[0] * self.block[1])
        by_index = self.exchange_class.by_index or self.indexed
        backward_next = self.ranks == 1 and not self.host and (self.backend_name == "triton" or not self.halves)
        expected = partial(
            tiles.expected_bytes, self.loss, by_index=by_index, labels=self.labels, ids=self.ids,
            backward_next=backward_next,
        )  # fmt: skip

        def bytes_of(N: int, M: int) -> int:
            # each half's block has a share of the workspace by its columns
            shares = [(m, allowed * m // M) for m in self._split(M)]
            parts = [expected(N, m, self.dimensions, self.dtype, share, self._torch_device) for m, share in shares]
            return sum(parts) if self.exponentials else max(parts)

        # not of the largest block alone: tiles are halved until they fit, so that a shorter block may take more
        return max(bytes_of(*block) for block in self.blocks) + (SCRATCH if self.backend_name == "triton" else 0)

    def _split(self, M: int) -> list[int]:
        """M columns of a block: all, or with `halves` those that meet the first vectors of rows, and the second."""
        second = M * self.rows // self.columns if self.halves else 0
        return [M - second, second] if second else [M]

    @property
    def _allowed(self) -> int:
        """Bytes that a block may take."""
        default = default_workspace(self.memory, alone=self.ranks == 1 and not self.host and self.device == "cuda")
        allowed = default if self.workspace is None else self.workspace
        limited = self.ranks > 1 or (self.vectors == 1 and self.dtype == torch.float32)
        graph = limited and self.replayed and self.backend_name == "triton"
        return min(allowed, MOST_GRAPH_BYTES) if graph else allowed

    @cached_property
    def exchange_bytes(self) -> int:
        """Bytes of what other ranks send."""
        if self.host:
            return 0
        return self.exchange_class.expected_bytes(self.layout, self.carried, self.dtype) + self._staged

    @cached_property
    def kept_bytes(self) -> int:
        """Of those, bytes that stay between calls."""
        if self.host or not self._copied():
            return 0
        return self._staged + self.exchange_class.kept_bytes(self.layout, self.carried, self.dtype)

    @property
    def _staged(self) -> int:
        """Bytes that copy engines read."""
        return self.exchange_class.staged_bytes(self.layout, self.carried, self.dtype) if self._copied() else 0

    def _copied(self) -> bool:
        """Return whether copy engines carry transfers within a node."""
        return self.device == "cuda" and self.copies

    @cached_property
    def resident(self) -> tuple[int, int]:
        """Bytes beside workspace and exchange: while blocks are computed, and when gradients are returned."""
        if self.host:
            return device_bytes(self._cuts, self.rows, self.columns, self.sizes, self.feature_dtype, self.dtype), 0
        row_vectors = self.rows * (1 + self.halves)
        vectors = row_vectors + self.columns
        # features are cast to the dtype of the products, and gradients back, unless these are the accumulators
        casts = vectors * self.dimensions * self.dtype.itemsize if self.feature_dtype != self.dtype else 0
        throughout = casts + vectors * (self.dimensions + STATISTICS) * self.wide
        cast_back = self.feature_dtype != accumulator(self.dtype)
        end = throughout + cast_back * vectors * self.dimensions * self.feature_dtype.itemsize
        side = SIDE_ACCELERATOR if self.device == "cuda" else SIDE_CPU
        one_sweep = self.loss.pairwise or not self.loss.symmetric or max(self.rows, self.columns) <= side
        if self.ranks == 1 and self.backend_name == "eager" and one_sweep and end == throughout:
            # the gradient is computed in the forward, and the scale's is the sum of a product of this size
            end += min(self.rows, ROWS_AT_ONCE) * self.sizes[0] * self.wide
        # copies of all columns, where keys are joined with others, of the keys that a queue hands out, of the guide's
        joined = self.columns + self.halves * 2 * self.rows if self.queue or self.own_columns else 0
        copied = (joined + self.queue) * self.dimensions
        copied += (row_vectors + self.columns) * (self.guide + MARKS) if self.guide and self.own_columns else 0
        copies = copied * self.feature_dtype.itemsize
        unsummed = (self.numbers - self.summed) * self.wide
        # the gradient with zeros for constants is a copy, also where it has the dtype of the sums
        if unsummed and self.feature_dtype == accumulator(self.dtype):
            end += self.columns * self.sizes[1] * self.wide
        throughout, end = throughout - unsummed, end - unsummed
        # the sums and copies of the directions before wait for the backward
        others = (self.directions - 1) * throughout + self.directions * copies
        return throughout + others, end + others

    @property
    def operands(self) -> int:
        """Bytes of both sides in the dtype of the products, which stay as long as the loss's graph."""
        return 0 if self.host else (self.numbers + self.listed * self.rows * self.dimensions) * self.dtype.itemsize

    @property
    def backward_sums(self) -> int:
        """Bytes of the accumulators that the backward makes; 0 where the gradients come with the loss.

        They do for a pairwise loss, on a GPU's ranks of few rows, and in one process for a loss of one direction, one
        that keeps its exponentials and one with a teacher.
        """
        if self.ranks > 1:
            early = self.replayed
        else:
            teacher = self.has_teacher and self.backend_name == "triton"
            early = not self.loss.symmetric or self.exponentials or teacher
        return 0 if early or self.loss.pairwise or self.host else self.summed * self.wide

    @property
    def has_teacher(self) -> bool:
        """A teacher's features are multiplied too."""
        return self.loss.formula is not None and self.loss.formula.guide == "teacher"

    @cached_property
    def exponentials(self) -> bool:
        """The backward has the forward's exponentials: of one process, by fused kernels, where they fit."""
        if self.backend_name != "triton" or self.ranks > 1 or self.host or not self.columns:
            return False
        try:
            from contrastile.tiles.triton.budget import Budget
        except ImportError:
            return 2 * self.rows * self.columns <= self._allowed
        M = self.columns
        return all(
            Budget(self.loss, self._torch_device, self._allowed * m // M).expects_exponentials(
                self.rows, m, self.dimensions, self.dtype, labels=self.labels, ids=self.ids
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
    def _torch_device(self) -> torch.device:
        """A device whose tensors have no memory stands for a GPU."""
        return torch.device("meta" if self.device == "cuda" else "cpu")

    @cached_property
    def _cuts(self) -> Cut:
        """Strips and shards of features in host memory."""
        free = self.memory - self.held - self._allowed
        of_row, of_col = (row_bytes(numbers, self.feature_dtype) for numbers in self.sizes)
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
        teacher 4, and 2 of one whose exponentials are kept, or of a guide, whose mask is kept as bits.
        """
        of_feature = 8 - 2 * ((self.exponentials and not self.has_teacher) or (self.loss.pairwise and not self.host))
        of_guide = 4 if self.has_teacher and not self.exponentials else 2
        total = self.pairs * (of_feature * self.dimensions + of_guide * self.guide)
        # constants have no gradient
        return total - 2.0 * self.rows * self.directions * (self.numbers - self.summed)

    @property
    def replayed(self) -> bool:
        """A small call is replayed from graphs: of one process, or of a GPU's ranks of few rows."""
        if self.host:
            return False
        if self.ranks > 1:
            fits = self.device == "cuda" and not self.own_columns and self.vectors == 1
            return fits and self.exchange_class("mean", self.layout).replayable(self.carried, self.dtype)
        N, M = self.block
        return min(N, M) <= MOST_GRAPH_ROWS and 2 * N * M <= MOST_GRAPH_BYTES

    @property
    def replay_copies(self) -> int:
        """Bytes that a replay moves beside its graph: features to the graph's memory, and sums from it."""
        narrow = self.exponentials and not self.loss.symmetric and self.columns >= NARROW * self.rows
        of_rows = self.sizes[0] * self.rows
        sums = of_rows * self.wide + (self.summed - of_rows) * (self.dtype.itemsize if narrow else self.wide)
        return self.numbers * (2 * self.feature_dtype.itemsize + self.dtype.itemsize) + sums

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
        """Bytes of a number of an accumulator."""
        return accumulator(self.dtype).itemsize


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
        """Bytes of the kernels, columns of a tile, pairs whose winning tokens are kept, and bytes with those.

        Columns are 0 where the gradients come with the loss. Without Triton, one tile has the workspace.
        """
        try:
            from contrastile.tiles.triton.maxsim import block as maxsim
        except ImportError:
            return self._allowed, self.columns, 0, 0
        cast = self.feature_dtype != self.dtype
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
            of_row, of_col = self.sizes
            # by then the rows' gradients, which `beginning` has, are there, and those of columns are not
            resident = self.columns * of_col * self.feature_dtype.itemsize + self.rows * of_row * self.wide
            return max(most, beginning - resident)
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
        returned = 0 if self.feature_dtype.itemsize == wide else self.feature_dtype.itemsize
        if self.backend_name == "triton" and self.ranks == 1 and not self.at_once:
            # the gradients of the columns are float32 for a strip at a time
            _, tile_columns, _, _ = self.fused
            strip = min(tile_columns, self.columns) * of_col * wide
            of_columns = self.columns * of_col * self.feature_dtype.itemsize
            throughout = self.rows * of_row * wide + of_columns + stats
            return throughout + strip, throughout + self.rows * of_row * returned
        sums = self.numbers * wide
        return sums + stats, sums + stats + self.numbers * returned

    @property
    def operations(self) -> float:
        """Operations of a sweep over all tokens of a rank's pairs."""
        L, T = self.tokens
        return 2.0 * self.pairs * L * T * self.dimensions
