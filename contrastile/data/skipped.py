"""Examples of a source that cannot be used: the reasons, their counts, and the share that is too much.

Stands on the ground, below everything that reads images or texts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from contrastile._errors import invalid
from contrastile.data.base import Progress, Silence

logger = logging.getLogger("contrastile")

# a share of bad pairs is taken of at least so many, because one bad pair among the first ten says little
SMALLEST_SAMPLE = 1000


class Skipped(Exception):  # noqa: N818 - no failure: the example is passed over
    """The reason why an example is passed over."""


def counted(skipped: Mapping[str, int]) -> str:
    """Reasons with their counts, in alphabetical order.

    >>> counted({"missing picture": 2, "broken picture": 1})
    'broken picture: 1, missing picture: 2'
    """
    return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(skipped.items()))


def check_bad(skipped: Mapping[str, int], seen: int, most_bad: float, *, of: int | None = None) -> None:
    """Raise ValueError where more than the share `most_bad` of the pairs `seen` could not be used.

    Where the pairs seen are a part of `of` pairs, the share is taken of at least `SMALLEST_SAMPLE`.
    """
    seen = seen if of is None else max(seen, min(of, SMALLEST_SAMPLE))
    if (bad := sum(skipped.values())) > most_bad * seen:
        got = f"{bad:,} of {seen:,} ({counted(skipped)})"
        raise invalid(
            "source", f"have at most {most_bad:.1%} bad pairs", got, "Mend it, or raise data.max_bad_fraction."
        )


class SkipCounter:
    """Rows of text files: their number, and the skipped ones by reason; `bar` moves by the bytes read."""

    def __init__(self, bar: Progress | None = None) -> None:
        self.bar: Progress = bar or Silence()
        self.rows = 0
        self.skipped: Counter[str] = Counter()
        self._first = ""

    def skip(self, reason: str, path: Path, line: int) -> None:
        """Count one row as skipped."""
        self._first = self._first or f"{path}:{line}"
        self.skipped[reason] += 1

    def close(self, source: Path, limit: float, *, allowed_by: str = "data.bad_rows") -> dict[str, int]:
        """Log and return the counts; raise ValueError where they are more than the share `limit` of all rows.

        `allowed_by` names the setting that allows more.
        """
        count, reasons = self.skipped.total(), counted(self.skipped)
        if count > limit * self.rows:
            got = f"{count:,} of {self.rows:,} ({reasons}), the first at {self._first}"
            rule = f"have at most {limit:.1%} of rows that cannot be used"
            raise invalid("source", rule, got, f"Mend them, or raise {allowed_by}.")
        if count:
            message = "%s: %d of %d rows are skipped (%s), the first at %s"
            logger.warning(message, source, count, self.rows, reasons, self._first)
        return dict(self.skipped)
