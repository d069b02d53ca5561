"""The size of a learned distance's tiles, measured: rows and columns whose scores and graph fit the workspace.

Beside `scored.py`, for scorers of which only a trial shows how much memory their graph takes.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from contrastile._types import accumulator
from contrastile.gradcache.memory import footprint
from contrastile.gradcache.modes import back_propagated, without_hooks
from contrastile.gradcache.rng import RandomState
from contrastile.losses.base import Shard
from contrastile.tiles.eager import SIDE_ACCELERATOR, SIDE_CPU, TILES_HELD
from contrastile.tiles.scored import Scorer, trial_rows

# side of the first tile that is measured
FIRST_SIDE = 4
# measured sides of tiles, by module (by class where it has no state) and by inputs of one kind; all of a module are
# dropped when there are this many
MOST_MEASURED = 4096
_measured: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()


def fitting_side(scorer: Scorer, rows: Shard, cols: Shard, sizes: tuple[int, int], workspace: int) -> int:
    """Rows, and columns, of a tile whose scores, graph and gradients fit the workspace.

    Tiles of growing size are run, and their bytes are counted, once for inputs of one shape.
    sizes: the most rows, and columns, of any rank; this one may have fewer, or none.
    """
    shapes = [(x.shape[1:], x.dtype) for side in (rows, cols) for x in side.leaves]
    setting = (scorer.rows.wanted, scorer.cols.wanted, len(scorer.parameters), scorer.dtype, scorer.module.training)
    key = (str(shapes), sizes, workspace, *setting)
    # any two stateless modules are the same
    of: Any = type(scorer.module) if getattr(scorer.module, "stateless", False) else scorer.module
    known = _measured.setdefault(of, {})
    if key not in known:
        if len(known) >= MOST_MEASURED:
            known.clear()
        known[key] = _measure(scorer, rows, cols, sizes, workspace)
    return known[key]


def _measure(scorer: Scorer, rows: Shard, cols: Shard, sizes: tuple[int, int], workspace: int) -> int:
    """`fitting_side`, by tiles each of whose sides follows from the one before, until it is within a factor of 2."""
    most = min(max(sizes), SIDE_CPU if scorer.device.type == "cpu" else SIDE_ACCELERATOR)
    before, side = RandomState.capture(scorer.device), FIRST_SIDE
    try:
        while True:
            N, M = (max(1, min(side, n)) for n in sizes)
            # a side twice as long takes at most four times as much
            factor = (workspace / max(1, _bytes(scorer, rows, cols, N, M))) ** 0.5
            fitting = max(1, min(most, int(side * factor)))
            if side / 2 < fitting < 2 * side or fitting == side:
                return fitting
            side = fitting
    finally:
        before.restore()


def _bytes(scorer: Scorer, rows: Shard, cols: Shard, N: int, M: int) -> int:
    """Bytes of a tile of N × M, whose rows are repeated where there are fewer, without the gradients of Ω."""
    row_tile, col_tile = (
        each.with_leaves([x[torch.arange(n, device=x.device) % len(x)].to(scorer.device) for x in each.leaves])
        if len(each)
        else trial_rows(each.leaves, n, scorer.device)
        for each, n in ((rows, N), (cols, M))
    )

    def run() -> None:
        if not scorer.wanted:
            with torch.no_grad():
                scorer(row_tile, col_tile)
            return
        scores, leaves = scorer.with_graph(row_tile, col_tile)
        if scores.requires_grad:
            with without_hooks(scorer.parameters):
                back_propagated([scores], [*leaves, *scorer.parameters], [torch.ones_like(scores)], "scorer")

    outputs = sum(parameter.nbytes for parameter in scorer.parameters)
    held = TILES_HELD * torch.empty((), dtype=accumulator(scorer.dtype)).element_size()
    return max(0, footprint(run) - outputs) + held * len(row_tile) * len(col_tile)
