"""The lines of metrics.jsonl as a page needs them: numbers of the steps in columns, and measurements as they are.

A run of 300,000 steps has 300,000 lines; as dictionaries they would fill 700 MB, as columns of numbers 30.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("contrastile")

Column = npt.NDArray[np.float64]
Curve = tuple[list[float], list[float]]

# values of a step that the page draws
VALUES = ("examples", "batch", "planned", "loss", "scale", "learning_rate", "seconds")


class StepColumns:
    """Columns of the steps of a run by name; `shares`: columns of the parts of a step's time, where these are known.

    others: the lines of measurements.
    """

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        columns = {name: array("d") for name in VALUES}
        shares: dict[str, array[float]] = {}
        # rows of the steps with shares, which earlier versions did not write
        timed = array("q")
        self.others: list[dict[str, Any]] = []
        incomplete = 0
        for line in lines:
            kind = line.get("kind")
            if kind in ("probe", "test"):
                self.others.append(line)
            elif kind == "step":
                try:
                    numbers = [float(line[name]) for name in VALUES]
                except (KeyError, TypeError, ValueError):
                    incomplete += 1
                    continue
                for column, number in zip(columns.values(), numbers, strict=True):
                    column.append(number)
                if parts := line.get("shares"):
                    for part in parts.keys() - shares.keys():
                        shares[part] = array("d", [0.0]) * len(timed)
                    for part, column in shares.items():
                        column.append(parts.get(part, 0.0))
                    timed.append(len(columns["examples"]) - 1)
        if incomplete:
            logger.warning("%d steps of the metrics lack values and are left out", incomplete)
        self.columns: dict[str, Column] = {name: np.array(column) for name, column in columns.items()}
        self.shares: dict[str, Column] = {part: np.array(shares[part]) for part in sorted(shares)}
        self.timed = np.array(timed, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.columns["examples"])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    @property
    def full(self) -> int:
        """The number of steps without a short last one, whose loss has fewer negatives."""
        short = len(self) > 1 and self["batch"][-1] < self["planned"][-1]
        return len(self) - short

    @property
    def stages(self) -> list[tuple[float, str]]:
        """The begin of each batch size, and its name; a short last step is no stage."""
        firsts = _firsts(self["planned"])
        begins = (self["examples"] - self["batch"])[firsts].tolist()
        return [(begin, f"batch {size:,.0f}") for begin, size in zip(begins, self["planned"][firsts], strict=True)]

    def averaged(self, values: Column, rows: Any = slice(None), points: int = 200) -> Curve:
        """`values` of the steps `rows` over examples seen: means of `points` equal intervals at most.

        A gap stands where the batch size changes.
        """
        seen, planned = self["examples"][rows], self["planned"][rows]
        firsts = _firsts(planned, np.floor(seen / (seen[-1] / points)))
        counts = np.diff([*firsts, len(seen)])
        means = [np.add.reduceat(column, firsts) / counts for column in (seen, values)]
        curve: Curve = ([], [])
        before = planned[0]
        for size, *point in zip(planned[firsts], *means, strict=True):
            if size != before:
                curve[0].append(curve[0][-1])
                curve[1].append(math.nan)
            before = size
            for axis, value in zip(curve, point, strict=True):
                axis.append(float(value))
        return curve


def _firsts(*columns: Column) -> npt.NDArray[np.int64]:
    """The rows at which a value of any column differs from the row before, the first row included."""
    changes = np.zeros(len(columns[0]), dtype=bool)
    changes[:1] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)
