"""Every kernel compiles ahead of time, without a chip, and fits its shared memory; `make test-kernels`: on every chip.

Compiled in a process of its own: in this one kernels are interpreted. Run as a program, this file compiles the
kernels for each capability that it reads, and prints what each takes. Machine code is made by `make test-kernels`, and
here of kernels with instructions of their own: bytes of shared memory and layouts are known before.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton")

from contrastile.tiles.triton.plan import SHAPES

# bytes of shared memory that one program may have, by compute capability
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# bytes of it that a multiprocessor reserves for each program
RESERVED = 1_024
KERNELS = "contrastile.tiles.triton.kernels"
# sizes in which files of kernels are launched
SIZES = {name: {"BM": 64, "BN": 64} for name in ("labels", "order")}
SIZES |= {"label_sums": {"CHUNK": 32, "BLOCK": 64}, "own": {"COLS": 8, "BLOCK": 512}}
TILE_KERNELS = ("totals", "maxima", "gradient", "careful_gradient")
# six products of three pieces
SIX = {"LEFT": 0b10_01_00_01_00_00, "RIGHT": 0b00_01_10_00_01_00, "PRODUCTS": 6, "PARTS": 3, "LISTED": True}
# every option of the small kernels
EVERYTHING = {"U": True, "V": True, "WEIGHTS": True, "SMOOTH": True, "BIASED": True, "SIDES": 2}
EVERYTHING |= {"MEAN": True, "TIMES": True, "GUIDE": 2, "SELF": True, "ADD": True, "ORDERED": True, "STEPS": 14}
EVERYTHING |= {"MEASURED": 1, "CHUNK": 128, "SLOTS": 64, "STORED": True, "TALL": 128, "LONG": 1024, "LATER": True}
EVERYTHING |= {"LABELS": True, "PLAIN": 2, "WEIGHED": 2, "PIECES": 3, "KINDS": 2, "MERGE": True}
EVERYTHING |= {"IDS": True, "GRADIENT": True, "EXCLUDED": True, "EACH": True}
# strides and sizes that are multiples of 16 where features are
ALIGNED = ("D", "G", "entries", *(f"{name}_stride" for name in ("q", "k", "guide_q", "guide_k", "out", "bits")))
# arguments of several tensors
TUPLES = {"sources": ("*fp32", "*i32", "*i1"), "targets": ("*bf16", "*i64", "*i1"), "lengths": ("i32",) * 3}
TUPLES |= {"totals": ("*fp32", "*fp32"), "outs": ("*bf16", "*fp32"), "number_outs": ("*fp32", "*bf16")}
# GUIDE of a teacher
TEACHER = 2
# kernels that take most of the time: several programs of them share a multiprocessor
BUSY = ("totals plain", "gradient plain", "totals sigmoid", "gradient sigmoid")
STORED = ("totals kept", "gradient kept")
# the same where they are compiled
GUIDED = ("totals teacher", "gradient teacher", "gradient kept teacher", "totals mask", "gradient mask")
# every kernel and option on every chip, for `make test-kernels`
EVERY = "CONTRASTILE_EVERY_KERNEL" in os.environ
# capabilities compiled for: the oldest, the main one and the newest have all ways to load a tile
CHIPS = tuple(SHARED) if EVERY else (80, 90, 120)
# capabilities for which the kernels without products are compiled, which are the same code on all
COMPLETE = (80, 90) if EVERY else (80,)
# capabilities for which kernels with a guide are compiled
GUIDED_ON = (80, 90, 100) if EVERY else (90,)
# capabilities for which the busy kernels alone are compiled; shapes and instructions of 89 are those of 86
BUSY_ON = (89,) if EVERY else (120,)
# kernels with instructions written out, of which machine code is made in any case
INSTRUCTIONS = ("gradient plain", "sweep")
# kernels of late interaction without those of masks
LATE_KERNELS = ("sweep", "query_gradients", "list_entries", "document_gradients")
# the tiling of a chip with wide products, and a small one of the same code on others
LATE = {"BM": 128, "BN": 64, "BD": 128, "SLOT": 32, "GROUP": 32, "REGISTERS": True}
LATE_SMALL = {"BM": 64, "BN": 64, "BD": 32, "SLOT": 8, "GROUP": 32}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], dict[str, int]]]:
    """Bytes of shared memory that each kernel takes on a capability.

    Triton keeps what it compiles, by a hash of the kernel, its options and the compiler: the next run of the suite
    compiles the kernels that changed since.
    """
    folder, here = tmp_path_factory.mktemp("compiled"), Path(__file__)
    kept = here.parents[1] / "build" / f"kernels-{zlib.crc32(here.read_bytes()):08x}{'-every' * EVERY}"
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(kept)}
    with (folder / "err").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
            text=True,
        )  # fmt: skip

    def compiled_for(capability: int) -> dict[str, int]:
        assert process.stdin is not None
        assert process.stdout is not None
        print(capability, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, (folder / "err").read_text()[-2000:]
        taken: dict[str, int] = json.loads(answer)
        return taken

    with process:
        yield compiled_for


@pytest.mark.unpoisoned
@pytest.mark.parametrize("capability", CHIPS)
def test_every_kernel_compiles_and_fits(capability: int, compiled: Callable[[int], dict[str, int]]) -> None:
    taken = compiled(capability)
    names = {name.split()[0] for name in taken}
    if capability in COMPLETE:
        # gradients of late interaction are the same code on every chip
        known = {kernel.fn.__name__ for kernel in _kernels()}
        assert known - names <= ({*LATE_KERNELS} - {"sweep"} if capability == 80 else set())
    assert names >= ({"totals", "gradient"} if capability in BUSY_ON else {*TILE_KERNELS})
    assert names >= {*LATE_KERNELS} or capability != 90
    assert max(taken.values()) <= SHARED[capability]
    for name in (*BUSY, *(name for name in (*GUIDED, *STORED) if name in taken)):
        assert SHAPES[capability].programs * (taken[name] + RESERVED) <= SHARED[capability] + RESERVED


def _type(name: str, shape: Any, constants: dict[str, Any]) -> str | tuple[str, ...]:
    """Triton's name for the type of an argument."""
    if name in TUPLES:
        return TUPLES[name]
    rows, cols = (shape.rows, shape.depth), (shape.cols, shape.depth)
    of_tokens = (constants.get("BN"), constants["BD"]) if "BD" in constants else cols
    descriptors = {"q_mem": rows, "k_mem": of_tokens, "out_mem": (shape.rows, shape.cols // 2)}
    if constants.get("GUIDE") == TEACHER:
        descriptors |= {"guide_q_mem": rows, "guide_k_mem": cols}
    if name.endswith("_mem") and name not in descriptors:
        return "*bf16"
    if name in descriptors:
        return f"tensordesc<bf16[{descriptors[name][0]},{descriptors[name][1]}]>" if shape.tma else "*bf16"
    if name in ("q_ptr", "k_ptr", "x_ptr", "strip_ptr"):
        return "*bf16"
    if name.endswith("mask_ptr"):
        return "*u8"
    if name == "best_ptr":
        return "*u8"
    of_texts = ("tokens_ptr", "lengths_ptr", "list_ptr", "bounds_ptr", "begins_ptr", "order_ptr")
    by_label = constants.get("POSITIVES") == -1 and name == "positives_ptr"
    by_label |= name.endswith("spans_ptr") or (name in ("row_out_ptr", "col_out_ptr") and "STEPS" in constants)
    if name.endswith(("bits_ptr", *of_texts)) or by_label:
        return "*i32"
    if name == "strip_ptr":
        return "*bf16"
    indices = (
        "ids_ptr",
        "labels_ptr",
        "sorted_ptr",
        "chunks_ptr",
        "within_ptr",
        "others_ptr",
        "places_ptr",
        "positives_ptr",
        "starts_ptr",
        "targets_ptr",
        "stops_ptr",
        "sources_ptr",
        "columns_ptr",
        "address_ptr",
        "singles_ptr",
    )
    if name.endswith(indices):
        return "*i64"
    if name in ("factor_ptr", "highest_ptr", "kernels_ptr"):
        return "*fp64"
    numbers = ("smoothing", "truncation", "hardness", "least", "far", "x_lost", "y_lost")
    return "*fp32" if name.endswith("_ptr") else "fp32" if name in numbers else "i32"


def _kernels() -> list[Any]:
    """Every function that is launched: those that say what they are not specialized for."""
    from contrastile.tiles.triton.kernels import backward, careful, finish, forward, guides, reductions
    from contrastile.tiles.triton.kernels import exponentials as exponential_kernels
    from contrastile.tiles.triton.kernels import label_sums as label_sum_kernels
    from contrastile.tiles.triton.kernels import labels as label_kernels
    from contrastile.tiles.triton.kernels import maxsim as maxsim_kernels
    from contrastile.tiles.triton.kernels import order as order_kernels
    from contrastile.tiles.triton.kernels import own as own_kernels
    from contrastile.tiles.triton.kernels import positions as position_kernels
    from contrastile.tiles.triton.kernels import replay as replay_kernels
    from contrastile.tiles.triton.kernels import scores as score_kernels
    from contrastile.tiles.triton.kernels import smoothing as smoothing_kernels

    modules = (
        forward, backward, careful, guides, exponential_kernels, label_kernels, label_sum_kernels, order_kernels,
        replay_kernels, position_kernels, reductions, finish, maxsim_kernels, score_kernels, own_kernels,
        smoothing_kernels,
    )  # fmt: skip
    return [
        function
        for module in modules
        for name, function in vars(module).items()
        if getattr(function, "fn", None) is not None
        and function.fn.__module__ == module.__name__
        and "@triton.jit(do_not_specialize" in inspect.getsource(function.fn)
    ]


def _variants(capability: int) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """The kernels, and the options that each is compiled with.

    Every kernel and every option comes on one chip at least; EVERY: all options on one, all tile kernels on every one.
    """
    from contrastile.tiles.triton.kernels.masks import UNROLLED

    plain = {"DIAGONAL": True, "COLUMNS": True, "PRODUCTS": 1, "PARTS": 1}
    sigmoid = {"SOFTPLUS": True, "COLUMNS": False, "LOSS": True}
    teacher = {"GUIDE": TEACHER, "GUIDE_PRODUCTS": 1, "FLATTEN": False}
    by_label = {"DIAGONAL": False, "POSITIVES": -1}
    several = {"DIAGONAL": False, "POSITIVES": UNROLLED.value + 1, "FLATTEN": False, "BITS": True, "SMOOTH": True}
    kernels = _kernels()
    assert {f"{KERNELS}.{name}" for name in SIZES} <= {kernel.fn.__module__ for kernel in kernels}
    for kernel in kernels:
        name = kernel.fn.__name__
        if name in LATE_KERNELS:
            if capability == 90 or (capability in (80, 100) and name == "sweep"):
                yield kernel, name, _late(name, capability)
            continue
        if kernel.fn.__module__ in (f"{KERNELS}.scores", f"{KERNELS}.maxsim"):
            if capability in COMPLETE:
                masks = {"SELF": True, "IDS": True, "LABELS": True, "ROWS_MASKED": True, "SMOOTH": True}
                sizes = {"SIDE": 16, "STEP": 128, "BM": 64, "BN": 64, "ROWS": 64, "SLOT": 16, "CHUNK": 1024}
                yield kernel, name, plain | masks | sizes
            continue
        if name not in TILE_KERNELS:
            if capability in COMPLETE or (name, capability) == ("mask_bits", 90):
                side = SIZES.get(kernel.fn.__module__.removeprefix(f"{KERNELS}."), {})
                yield kernel, name, plain | EVERYTHING | side | {"CHANNELS": 7, "LAST": True}
                if EVERY and name.startswith("label_"):
                    yield kernel, f"{name} tall", plain | {"COLUMNS": True, "TALL": 128, "LONG": 1024}
                if name == "finish":
                    further = {"DECOUPLED": True, "MISES_FISHER": True, "WEIGHTS": True}
                    yield kernel, f"{name} decoupled", plain | further
                if "PRODUCTS" in kernel.arg_names:
                    yield kernel, f"{name} six products", plain | EVERYTHING | SIX
            continue
        busy = f"{name} plain" in BUSY
        if not busy and capability in BUSY_ON:
            continue
        if EVERY and busy and capability == 90:
            yield kernel, f"{name} labels of both sides", plain | by_label
            yield kernel, f"{name} labels, sigmoid", plain | sigmoid | by_label
        # elsewhere these come with labels, or with six products
        if busy or EVERY or (name, capability) == ("maxima", 90):
            yield kernel, f"{name} plain", plain
        if busy:
            yield kernel, f"{name} sigmoid", plain | sigmoid
        if busy and capability == 90:
            yield kernel, f"{name} kept", plain | {"LOSS": True, "COLUMNS": name == "totals", "KEEP": 1}
        if capability in GUIDED_ON and (EVERY or busy):
            # with the loss's gap, as in a call with gradients
            yield kernel, f"{name} teacher", plain | teacher | {"LOSS": True}
            if name == "gradient":
                kept = {"LOSS": True, "KEPT": True, "DIAGONAL": False}
                yield kernel, f"{name} kept teacher", plain | teacher | kept
            if EVERY:
                yield kernel, f"{name} teacher, six products", plain | SIX | teacher
                yield kernel, f"{name} teacher of ranks", plain | teacher
                yield kernel, f"{name} mask", plain | {"GUIDE": 1, "BITS": True, "COLUMNS": False}
        if capability == 90 and (EVERY or name != "maxima"):
            yield kernel, f"{name} six products, bits, smooth, several positives", plain | SIX | several
            if EVERY and name == "gradient":
                yield kernel, f"{name} six products, sigmoid", plain | SIX | sigmoid
        if capability == (90 if EVERY else 80):
            if busy:
                yield kernel, f"{name} one positive", plain | {"DIAGONAL": False, "POSITIVES": 1, "FLATTEN": True}
            else:
                yield kernel, f"{name} labels", plain | by_label | {"SELF": True, "COLUMNS": False}


def _late(name: str, capability: int) -> dict[str, Any]:
    """Everything at once: masks, winning tokens, padded features."""
    tiling = LATE if capability == 90 else LATE_SMALL
    # sixteen entries for each of 128 threads
    of_documents = {"BN": 16, "ROWS": 2048} if name in ("list_entries", "document_gradients") else {}
    masks = {"ROWS_MASKED": True, "COLS_MASKED": True, "PADDED": 32, "NONE": 255}
    return tiling | of_documents | masks | {"BEST": True, "FLATTEN": True, "STAGES": 1, "WHOLE": False}


@contextmanager
def _until_llvm() -> Iterator[None]:
    """Compilation that ends before LLVM optimizes and ptxas assembles, which take most of its time."""
    from triton.backends.nvidia.compiler import CUDABackend, llvm

    real = CUDABackend.add_stages

    def add_stages(backend: Any, stages: dict[str, Any], *others: Any) -> None:
        real(backend, stages, *others)
        # the last stages also name the kernel
        stages |= {"ptx": lambda _, metadata: metadata.update(name="none") or "", "cubin": lambda *_: b""}

    # nor is the library of a device's functions read for each kernel
    unlinked = patch.object(llvm, "link_extern_libs", lambda *_: None)
    with patch.object(CUDABackend, "add_stages", add_stages), patch.dict(os.environ, DISABLE_LLVM_OPT="1"), unlinked:
        yield


def _shared(kernel: Any, name: str, chosen: dict[str, Any], capability: int) -> int:
    """Bytes of shared memory that a kernel takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    shape = SHAPES[capability]
    fixed = {
        "BM": shape.rows,
        "BN": shape.cols,
        "BK": shape.depth,
        "FLATTEN": shape.flatten,
        "TMA": shape.tma,
    }
    fixed |= {"BLOCK": 128, "TILES": 16, "ROWS": 16, "COLS": 128, "STEPS": 4, "SCAN": 1024, "PAIRS": 32}
    names = kernel.arg_names
    constants = {parameter.name: 0 for parameter in kernel.params if parameter.is_constexpr}
    constants |= {name: value for name, value in (fixed | chosen).items() if name in constants}
    signature = {name: "constexpr" if name in constants else _type(name, shape, constants) for name in names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if str(signature[name]).startswith("*") or name in ALIGNED
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": shape.warps if "BK" in constants else 4, "num_stages": shape.stages}
    with nullcontext() if EVERY or (name in INSTRUCTIONS and capability == 90) else _until_llvm():
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    unordered = _unordered(compiled.asm["ttgir"])
    assert not unordered, f"{kernel.fn.__name__} stores {unordered} while other warps may still read"
    shared: int = compiled.metadata.shared
    return shared


def _unordered(code: str) -> str | None:
    """The first store, to be done by one warp, after a load that several warps repeat, without a barrier between.

    Triton repeats loads of fewer numbers than threads in every layout that needs them. A kernel that updates such
    numbers in place must wait for all warps before it stores.
    """
    # by the line of a load: its layout, and lines with several; and the line that a pointer is read at
    layouts, repeated, read_at = dict[str, str](), set[str](), dict[str, str]()
    for line in code.splitlines():
        operation = re.search(r"tt\.(load|store) (%\w+).*tensor<(.*)> loc\((\S+)\)", line)
        if "barrier" in line:
            repeated.clear()
            layouts.clear()
        elif operation is not None and operation[1] == "load":
            _, pointer, layout, at = operation.groups()
            read_at[pointer] = at
            if layouts.setdefault(at, layout) != layout:
                repeated.add(at)
        elif operation is not None and read_at.get(operation[2]) in repeated:
            return operation[0]
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        asked = int(line)
        all_taken = {name: _shared(kernel, name, chosen, asked) for kernel, name, chosen in _variants(asked)}
        print(json.dumps(all_taken), flush=True)  # noqa: T201
