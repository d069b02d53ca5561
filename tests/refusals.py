"""The sentence of an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refusal(call: Callable[..., object], /, *arguments: Any, **named: Any) -> str:
    """The sentence with which a call is refused."""
    try:
        call(*arguments, **named)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")
