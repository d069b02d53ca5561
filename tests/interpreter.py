"""Triton's interpreter, made quicker: it does the same again at every call of a function, for most of its time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

REPLACED = {
    "_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype", "_convert_float", "interpreter_builder",
    "interpreter_semantic",
}  # fmt: skip


def quicken() -> None:
    """Spares what comes to nothing, and remembers what is looked up; without effect elsewhere.

    The interpreter replaces the language's own functions when a kernel is called, and again when that calls another
    function, where all are replaced already. It adds whole numbers twice, to see whether they overflow, and then says
    so only where it debugs.
    """
    try:
        from triton.language import core, semantic
        from triton.runtime import interpreter
    except ImportError:
        return
    if not vars(interpreter).keys() >= REPLACED:
        return
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    interpreter._patch_builtin, interpreter._get_np_dtype = _patch(interpreter), _numpy_type(interpreter)
    interpreter._patch_attr = _patch_attribute(interpreter)
    interpreter._patch_lang = _patch_once(interpreter)
    interpreter.InterpreterBuilder.create_fma = _fused(interpreter)
    interpreter._convert_float = _bfloat16(interpreter)
    _remember_shapes(core)
    _pass_equal_types(core, semantic.TritonSemantic)


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
    def of(shape: tuple[int, ...]) -> tuple[Any, int, str, tuple[Any, Any]]:
        type_ = real.__new__(core.block_type)
        made(type_, core.float32, [*shape])
        return type_.shape, type_.numel, str(type_.shape), constants(shape)

    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    real, made, scalar = core.block_type, core.block_type.__init__, constants(())

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty, self.sizes = element_ty, tuple([getattr(size, "value", size) for size in shape])
        self.shape, self.numel, name, self.constants = of(self.sizes)
        self.name = f"<{name}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 (Triton's name)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = getattr(type, "constants", scalar)

    @cache
    def of_element(number: int, shape: tuple[int, ...]) -> Any:
        return core.block_type(elements[number], shape)

    def with_element_ty(self: Any, element: Any) -> Any:
        if id(element) in elements:
            return of_element(id(element), self.sizes)
        return core.block_type(element, self.shape)

    # types that outlive every kernel, by their number: Triton's hash of a type is that of its name
    elements = {id(kind): kind for kind in vars(core).values() if type(kind) is core.dtype}
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.block_type.with_element_ty = with_element_ty


def _pass_equal_types(core: ModuleType, semantic: Any) -> None:
    """Let operands pass at once whose types or shapes are the same object, or numbers that take the tensor's type.

    Their types are otherwise compared by name, and their shapes size by size, at every operation.
    """
    check, cast, broadcast = semantic.binary_op_type_checking_impl, semantic.cast, semantic.broadcast_impl_value
    unwrap, tensor = core._unwrap_if_constexpr, core.tensor
    # types by their number, because Triton's hash of a type is that of its name; bits of whole numbers, 0 of others
    bits = {id(core.int32): 31, id(core.int64): 63, id(core.float32): 0, id(core.float64): 0}

    def joins(number: Any, kind: Any) -> bool:
        """True for a number that becomes one of a tensor's type; other rules are Triton's own."""
        if (size := bits.get(id(kind))) is None:
            return False
        return type(number) is int and -(2**size) <= number < 2**size if size else type(number) in (int, float)

    def checked(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> Any:
        # the third rule, true where it is not given: types are made one
        if named:
            return check(self, lhs, rhs, *rules, **named)
        if type(lhs) is type(rhs) is tensor:
            if lhs.dtype is rhs.dtype and id(lhs.dtype) in bits:
                return self.broadcast_impl_value(lhs, rhs)
        elif all(rules[2:3]) and type(lhs) is tensor and joins(rhs, lhs.dtype):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        elif all(rules[2:3]) and type(rhs) is tensor and joins(lhs, rhs.dtype):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, *rules)

    def converted(self: Any, value: Any, kind: Any, fp_downcast_rounding: Any = None) -> Any:
        return value if value.dtype is kind else cast(self, value, kind, fp_downcast_rounding)

    def joined(self: Any, lhs: Any, rhs: Any) -> Any:
        # tensors of one shape share it
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def unwrapped(value: Any) -> Any:
        return value if type(value) is tensor else unwrap(value)

    semantic.binary_op_type_checking_impl, semantic.cast, semantic.broadcast_impl_value = checked, converted, joined
    core._unwrap_if_constexpr = unwrapped


def _fused(interpreter: ModuleType) -> Callable[..., Any]:
    """x · y + z rounded once, as a device does it; the interpreter rounds twice."""

    def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    return fused


def _patch_attribute(interpreter: ModuleType) -> Callable[..., None]:
    """One call between a kernel and a function of the language, where the interpreter has three."""
    semantic = interpreter.interpreter_semantic

    def patch(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*arguments, **named)

        scope.set_attr(owner, name, call)

    return patch


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
