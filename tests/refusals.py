"""The sentence of an error."""

from collections.abc import Callable
from typing import Any


def refusal(call: Callable[..., object], /, *arguments: Any, **named: Any) -> str:
    """The sentence with which a call is refused."""
    try:
        call(*arguments, **named)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def unlike(name: str, one: object, other: object, ranks: tuple[int, int] = (0, 1)) -> str:
    """The sentence for ranks of which two differ."""
    return (
        f"`{name}` must be the same on all ranks; got {one!r} on rank {ranks[0]} and {other!r} on rank {ranks[1]}. "
        "Build the loss and its inputs alike everywhere."
    )
