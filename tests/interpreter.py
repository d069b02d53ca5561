"""Triton's interpreter, made quicker: it does the same again at every call of a function, for most of its time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

REPLACED = {"_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype", "interpreter_builder"}


def quicken() -> None:
    """Spares what comes to nothing, and remembers what is looked up; without effect elsewhere.

    The interpreter replaces the language's own functions when a kernel is called, and again when that calls another
    function, where all are replaced already. It adds whole numbers twice, to see whether they overflow, and then says
    so only where it debugs.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not vars(interpreter).keys() >= REPLACED:
        return
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    interpreter._patch_builtin, interpreter._get_np_dtype = _patch(interpreter), _numpy_type(interpreter)
    interpreter._patch_lang = _patch_once(interpreter)
    interpreter.InterpreterBuilder.create_fma = _fused(interpreter)


def _fused(interpreter: ModuleType) -> Callable[..., Any]:
    """x · y + z rounded once, as a device does it; the interpreter rounds twice."""

    def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    return fused


def _patch(interpreter: ModuleType) -> Callable[..., None]:
    @cache
    def builtins(package: ModuleType | type) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]

    def patch(package: ModuleType | type, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    return patch


def _patch_once(interpreter: ModuleType) -> Callable[[Any], Any]:
    """Until a kernel has ended nothing is replaced again, but for a function that has other modules of the language."""
    real, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    done: set[int] = set()

    @cache
    def of(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if any(value is one for one in language))

    def patch(function: Any) -> Any:
        modules = of(function)
        if modules and modules <= done:
            return None
        scope = real(function)
        if not done:
            restore = scope.restore
            # the kernel's own scope is the one that is put back
            scope.restore = lambda: (done.clear(), restore())
        done.update(modules)
        return scope

    return patch


def _numpy_type(interpreter: ModuleType) -> Callable[[Any], Any]:
    search, found = interpreter._get_np_dtype, {}

    def numpy_type(kind: Any) -> Any:
        # blocks of a type cannot be hashed, their names can
        if kind.name not in found:
            found[kind.name] = search(kind)
        return found[kind.name]

    return numpy_type
