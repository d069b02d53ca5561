"""Triton's interpreter, made quicker: it does the same again at every call of a function, for most of its time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

REPLACED = {"_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype", "_convert_float", "interpreter_builder"}


def quicken() -> None:
    """Spares what comes to nothing, and remembers what is looked up; without effect elsewhere.

    The interpreter replaces the language's own functions when a kernel is called, and again when that calls another
    function, where all are replaced already. It adds whole numbers twice, to see whether they overflow, and then says
    so only where it debugs.
    """
    try:
        from triton.language import core
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
    interpreter._convert_float = _bfloat16(interpreter)
    _remember_shapes(core)


def _bfloat16(interpreter: ModuleType) -> Callable[..., Any]:
    """Casts between float32 and bfloat16 to nearest, as a GPU rounds, in shifts of whole arrays.

    The interpreter cuts digits off, or rounds up without a carry. Its own way is kept for other types, and for arrays
    with subnormal numbers or NaN.
    """
    import numpy as np

    convert, language = interpreter._convert_float, interpreter.tl

    def cast(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        wide = (source, target) == (language.bfloat16, language.float32)
        if not wide and (source, target) != (language.float32, language.bfloat16):
            return convert(x, source, target, rounding)
        bits = x.view(np.uint16 if wide else np.uint32)
        size = bits & (0x7FFF if wide else 0x7FFFFFFF)
        if np.any((size < (0x80 if wide else 0x800000)) & (size > 0) | (size > (0x7F80 if wide else 0x7F800000))):
            return convert(x, source, target, rounding)
        if wide:
            return bits.astype(np.uint32) << 16
        return (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    return cast


def _remember_shapes(core: ModuleType) -> None:
    """Let types and values share what follows from their shape, which Triton makes anew for each of them."""

    @cache
    def of(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        type_ = real.__new__(core.block_type)
        made(type_, core.float32, [*shape])
        return type_.shape, type_.numel, str(type_.shape)

    @cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    real, made = core.block_type, core.block_type.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, name = of(tuple([getattr(size, "value", size) for size in shape]))
        self.name = f"<{name}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 (Triton's name)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


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
