"""The one form of every error that a user is asked to mend.

The lowest ground of the house: it needs nothing, not even torch, so that the command line can refuse a word before
torch is loaded. `_check.py`, the checks on tensors, hands it on to whoever has torch anyway.
"""

from __future__ import annotations


def wrong(name: str, rule: str, got: object, remedy: str) -> ValueError:
    """The house's error: what must hold, what was got, what to do.

    >>> str(wrong("sub_batch", "be at least 1", 0, "Pass the number of examples that fit at once."))
    '`sub_batch` must be at least 1; got 0. Pass the number of examples that fit at once.'
    """
    return ValueError(f"`{name}` must {rule}; got {got}. {remedy}")


def one_of(name: str, value: object, known: tuple[str, ...], remedy: str) -> None:
    """A value is one of the words known."""
    if value not in known:
        raise wrong(name, f"be one of {', '.join(known)}", repr(value), remedy)
