"""What of a source could not be used: the reasons, their counts, and how many of them are too many.

Under whatever reads pictures: `table.py`, `collection.py`, and the tests on pictures from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from contrastile._check import wrong

# below so many pairs seen, a few bad ones of many say nothing
FEW = 1000


class Skipped(Exception):  # noqa: N818 - not a failure: the pair is passed over
    """Why something gives no pair."""


def counted(skipped: Mapping[str, int]) -> str:
    """Reasons and their counts.

    >>> counted({"missing picture": 2, "broken picture": 1})
    'broken picture: 1, missing picture: 2'
    """
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(skipped.items()))


def check_bad(skipped: Mapping[str, int], seen: int, most_bad: float, *, of: int | None = None) -> None:
    """Raises ValueError where more than the share `most_bad` of the pairs `seen` could not be used.

    Where they are the first, or some, `of` many, the share is that of `FEW` at least.
    """
    seen = seen if of is None else max(seen, min(of, FEW))
    if (bad := sum(skipped.values())) > most_bad * seen:
        got = f"{bad:,} of {seen:,} ({counted(skipped)})"
        raise wrong("source", f"have at most {most_bad:.1%} bad pairs", got, "Mend it, or raise data.max_bad_fraction.")
