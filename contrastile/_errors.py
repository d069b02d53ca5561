"""The one form of every error that a user is asked to mend.

The lowest ground of the house: it needs nothing, not even torch, so that the command line can refuse a word before
torch is loaded. `engine/arguments.py`, the checks on tensors, hands it on to whoever has torch anyway.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# what a disk says that has no room
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def invalid(name: str, rule: str, got: object, remedy: str) -> ValueError:
    """The house's error: what must hold, what was got, what to do.

    >>> str(invalid("sub_batch", "be at least 1", 0, "Pass the number of examples that fit at once."))
    '`sub_batch` must be at least 1; got 0. Pass the number of examples that fit at once.'
    """
    return ValueError(f"`{name}` must {rule}; got {got}. {remedy}")


def one_of(name: str, value: object, known: tuple[str, ...], remedy: str) -> None:
    """A value is one of the words known."""
    if value not in known:
        raise invalid(name, f"be one of {', '.join(known)}", repr(value), remedy)


def whole_number(name: str, value: Any, least: int, remedy: str, *, rule: str = "", most: int | None = None) -> int:
    """A count as an int, whichever library it comes from: what `operator.index` takes, but for what is true or false.

    `rule` says how it must be, where that is not only "a whole number of at least `least`".
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    # torch's truth values have an index too
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if found is None or truth or found < least or (most is not None and found > most):
        got = repr(value) if found is None or truth else found
        raise invalid(name, rule or f"be a whole number of at least {least}", got, remedy)
    return found


@contextmanager
def written_to(place: object) -> Iterator[None]:
    """Says which place had no room: an error of a file that is open does not name it."""
    try:
        yield
    except OSError as error:
        # numpy has words of its own, and no number
        if error.errno not in FULL and " requested and " not in str(error):
            raise
        told = OSError(f"{place} could not be written ({error.strerror or error}); free the disk and begin again")
        told.errno = error.errno
        raise told from error
