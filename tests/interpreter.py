"""Triton's interpreter, made quicker: it asks the same again at every call of a function, for half of its time."""

from __future__ import annotations

import inspect
from functools import cache
from types import ModuleType
from typing import Any


def quicken() -> None:
    """Remembers which names of the language are replaced, and NumPy's names of types; without effect elsewhere.

    The interpreter replaces the language's own functions when a kernel is called, and again when that calls another
    function, where all are replaced already. Only the search for them is spared.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not {"_patch_builtin", "_patch_attr", "_get_np_dtype"} <= vars(interpreter).keys():
        return

    @cache
    def builtins(package: ModuleType | type) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]

    def patch(package: ModuleType | type, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    search, found = interpreter._get_np_dtype, {}

    def numpy_type(kind: Any) -> Any:
        # blocks of a type cannot be hashed, their names can
        if kind.name not in found:
            found[kind.name] = search(kind)
        return found[kind.name]

    interpreter._patch_builtin, interpreter._get_np_dtype = patch, numpy_type
