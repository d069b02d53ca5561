"""Triton's interpreter, made quicker: it does the same again at every call of a function, for most of its time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from itertools import permutations, product
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
    so only where it debugs. Features are split 64 rows at a time, because a program takes as long for 8.
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
    interpreter._patch_attr = _patch_attribute(interpreter)
    interpreter._patch_lang = _patch_once(interpreter)
    interpreter.InterpretedFunction.run = _launch(interpreter)
    interpreter.InterpreterBuilder.create_fma = _fused(interpreter)
    interpreter._convert_float = _bfloat16(interpreter)
    _lighten(interpreter)
    _pass_equal_types(interpreter, _remember_shapes(interpreter.tl.core))
    from contrastile.tiles.triton import launch

    launch.SPLIT_ROWS = 64


def _bfloat16(interpreter: ModuleType) -> Callable[..., Any]:
    """Casts between float32 and bfloat16 to nearest, as a GPU rounds, in shifts of whole arrays.

    The interpreter cuts digits off, or rounds up without a carry. Its own way is kept for other types, and for arrays
    with NaN that lose bits.
    """
    import numpy as np

    convert, language = interpreter._convert_float, interpreter.tl

    def cast(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source is language.bfloat16 and target is language.float32:
            return x.view(np.uint16).astype(np.uint32) << 16
        if source is not language.float32 or target is not language.bfloat16:
            return convert(x, source, target, rounding)
        bits = x.view(np.uint32)
        if ((bits & 0x7FFFFFFF) > 0x7F800000).any():
            return convert(x, source, target, rounding)
        return (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    return cast


def _lighten(interpreter: ModuleType) -> None:
    """Make values without a comparison of their type with the array's, which an operation on two of one type keeps."""
    import numpy as np

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    general = builder.binary_op

    def made(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def binary(self: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> Any:
        data = operation(lhs.data, rhs.data)
        return handle(data, lhs.dtype) if data.itemsize <= lhs.data.itemsize else general(self, lhs, rhs, operation)

    def stretched(_: Any, x: Any, sizes: Any) -> Any:
        data = np.empty(sizes, x.data.dtype)
        data[...] = x.data
        return handle(data, x.dtype.scalar)

    def splat(_: Any, kind: Any, x: Any) -> Any:
        data = np.empty(kind.shape, x.data.dtype)
        data[...] = x.data
        return handle(data, x.dtype.scalar)

    def expanded(_: Any, x: Any, axis: int) -> Any:
        shape = x.data.shape
        return handle(x.data.reshape(*shape[:axis], 1, *shape[axis:]), x.dtype.scalar)

    handle.__init__, builder.binary_op = made, binary
    builder.create_splat, builder.create_expand_dims, builder.create_broadcast = splat, expanded, stretched


def _remember_shapes(core: ModuleType) -> Callable[[Any, tuple[int, ...]], Any]:
    """Let types and values share what follows from their shape, which Triton makes anew for each of them.

    Returns a function from an element and sizes to the type of such a block.
    """

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

    def typed(element: Any, sizes: tuple[int, ...]) -> Any:
        return of_element(id(element), sizes) if id(element) in elements else core.block_type(element, sizes)

    # types that outlive every kernel, by their number: Triton's hash of a type is that of its name
    elements = {id(kind): kind for kind in vars(core).values() if type(kind) is core.dtype}
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.block_type.with_element_ty, core.dtype.sizes = lambda self, element: typed(element, self.sizes), ()
    return typed


def _pass_equal_types(interpreter: ModuleType, typed: Callable[[Any, tuple[int, ...]], Any]) -> None:
    """Let operands pass at once whose types or shapes are the same object, or numbers that take the tensor's type.

    Their types are otherwise compared by name, and their shapes size by size, at every operation.
    """
    import numpy as np

    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    check, cast, broadcast = semantic.binary_op_type_checking_impl, semantic.cast, semantic.broadcast_impl_value
    unwrap, tensor, expand, constexpr = core._unwrap_if_constexpr, core.tensor, semantic.expand_dims, core.constexpr
    handle = interpreter.TensorHandle
    # types by their number, because Triton's hash of a type is that of its name; bits of whole numbers, 0 of others
    bits = {id(core.int32): 31, id(core.int64): 63, id(core.float32): 0, id(core.float64): 0}
    kinds = {id(kind): kind for kind in (core.int32, core.int64, core.float32, core.float64)}
    # casts in one step, without a rule of their own
    direct = {*product((*bits, id(core.int1)), bits)} | {
        pair for kind in (core.float16, core.bfloat16) for pair in permutations((id(kind), id(core.float32)))
    }
    closed = {*bits, id(core.int1), id(core.float16), id(core.bfloat16)}
    plain = {tensor, int, float, bool, str, type(None), core.dtype}

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
            # a fourth rule is that of a quotient, which 16 bits do not keep
            if lhs.dtype is rhs.dtype and id(lhs.dtype) in (bits if rules[3:] else closed):
                return joined(self, lhs, rhs)
            # an address and whole numbers
            if rules[:1] == (True,) and type(lhs.dtype) is core.pointer_type and bits.get(id(rhs.dtype)):
                return joined(self, lhs, rhs)
        elif all(rules[2:3]) and type(lhs) is tensor and joins(rhs, lhs.dtype):
            return lhs, number(self, str(rhs), rhs, lhs.type)
        elif all(rules[2:3]) and type(rhs) is tensor and joins(lhs, rhs.dtype):
            return number(self, str(lhs), lhs, rhs.type), rhs
        return check(self, lhs, rhs, *rules)

    def converted(self: Any, value: Any, kind: Any, fp_downcast_rounding: Any = None) -> Any:
        if value.dtype is kind:
            return value
        if (id(value.dtype), id(kind)) not in direct or fp_downcast_rounding is not None:
            return cast(self, value, kind, fp_downcast_rounding)
        return tensor(
            self.builder.cast_impl(value.handle, kind), typed(kind, value.type.sizes) if value.type.sizes else kind
        )

    @cache
    def common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
        if not left or not right:
            return left or right
        fits = len(left) == len(right) and all(1 in pair or len({*pair}) == 1 for pair in zip(left, right, strict=True))
        return tuple(map(max, left, right)) if fits else None

    def stretched(self: Any, x: Any, sizes: tuple[int, ...]) -> Any:
        if x.type.sizes == sizes:
            return x
        kind = typed(x.dtype, sizes)
        if not x.type.sizes:
            return tensor(self.builder.create_splat(kind, x.handle), kind)
        return tensor(self.builder.create_broadcast(x.handle, sizes), kind)

    def joined(self: Any, lhs: Any, rhs: Any) -> Any:
        # tensors of one shape share it
        if lhs.shape is rhs.shape:
            return lhs, rhs
        sizes = common(lhs.type.sizes, rhs.type.sizes)
        if sizes is None:
            return broadcast(self, lhs, rhs)
        return stretched(self, lhs, sizes), stretched(self, rhs, sizes)

    def number(self: Any, name: str, value: Any, kind: Any) -> Any:
        return remembered(self, name, value, id(kind.scalar), kind.sizes)

    @lru_cache(maxsize=512)
    def remembered(self: Any, _: str, value: Any, element: int, sizes: tuple[int, ...]) -> Any:
        # the name tells 0.0 from -0.0
        return stretched(self, self.scalar_constant(value, kinds[element]), sizes)

    def expanded(self: Any, x: Any, axis: int) -> Any:
        sizes = x.type.sizes
        if not sizes or axis < 0:
            return expand(self, x, axis)
        kind = typed(x.dtype, (*sizes[:axis], 1, *sizes[axis:]))
        return tensor(self.builder.create_expand_dims(x.handle, axis), kind)

    def arithmetic(name: str, operation: Callable[..., Any]) -> None:
        """Numbers of one type are computed with at once, when their shapes are one."""
        general = getattr(semantic, name)

        def compute(self: Any, lhs: Any, rhs: Any, sanitize_overflow: Any) -> Any:
            if type(lhs) is type(rhs) is tensor and lhs.dtype is rhs.dtype and id(lhs.dtype) in bits:
                lhs, rhs = joined(self, lhs, rhs)
            elif type(lhs) is tensor and joins(rhs, lhs.dtype):
                rhs = number(self, str(rhs), rhs, lhs.type)
            elif type(rhs) is tensor and joins(lhs, rhs.dtype):
                lhs = number(self, str(lhs), lhs, rhs.type)
            else:
                return general(self, lhs, rhs, sanitize_overflow)
            return tensor(handle(operation(lhs.handle.data, rhs.handle.data), lhs.dtype), lhs.type)

        setattr(semantic, name, compute)

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is constexpr else unwrap(value)

    semantic.binary_op_type_checking_impl, semantic.cast, semantic.broadcast_impl_value = checked, converted, joined
    semantic.expand_dims, core._unwrap_if_constexpr = expanded, unwrapped
    for name, operation in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        arithmetic(name, operation)


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
    """The language's functions stay replaced: nothing is compiled in this process, and no other code calls them."""
    real, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    done: set[int] = set()

    @cache
    def of(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if any(value is one for one in language))

    def patch(function: Any) -> Any:
        modules = of(function)
        if not (modules and modules <= done):
            real(function)
            done.update(modules)
        return interpreter._LangPatchScope()

    return patch


def _launch(interpreter: ModuleType) -> Callable[..., None]:
    """Run a kernel on arguments in host memory as they are; the interpreter copies all of their memory onto itself."""
    real, convert = interpreter.InterpretedFunction.run, interpreter._implicit_cvt
    builder = interpreter.interpreter_builder

    @cache
    def known(function: Any, names: tuple[str, ...]) -> tuple[Any, frozenset[str]]:
        return function, frozenset(interpreter.GridExecutor(function, names, None).constexprs)

    def run(self: Any, *positional: Any, grid: Any, warmup: bool, **given: Any) -> None:
        names = tuple(self.arg_names)
        if positional or warmup or self.pre_run_hooks or callable(grid) or names != tuple(given):
            real(self, *positional, grid=grid, warmup=warmup, **given)
            return
        function, constants = known(self.rewrite(), names)
        interpreter._patch_lang(function)
        arguments = {name: value if name in constants else convert(value) for name, value in given.items()}
        builder.set_grid_dim(*(*grid, 1, 1)[:3])
        try:
            for place in product(*map(range, (*grid, 1, 1)[:3])):
                builder.set_grid_idx(*place)
                function(**arguments)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    return run


def _numpy_type(interpreter: ModuleType) -> Callable[[Any], Any]:
    search, found = interpreter._get_np_dtype, {}

    def numpy_type(kind: Any) -> Any:
        # blocks of a type cannot be hashed, their names can
        if kind.name not in found:
            found[kind.name] = search(kind)
        return found[kind.name]

    return numpy_type
