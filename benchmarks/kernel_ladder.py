"""How fast each kernel of `tiles/triton` runs by itself, in the shapes it could have, beside the chip's own products.

The script behind docs/kernels.md. Needs a CUDA device:

    python benchmarks/kernel_ladder.py [--csv FILE] [--rows 65536] [--features 512 768 1024]

Times are medians, with the 8192 × 8192 × 8192 bf16 product of the same moment beside them, since a chip under load
slows down.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import ClipLoss, SigLipLoss
from contrastile.tiles import triton_device as device
from contrastile.tiles import triton_launch as launch
from contrastile.tiles import triton_operands as operands
from contrastile.tiles.triton_device import Shape
from contrastile.tiles.triton_operands import Masks, Pair

SQUARE = 8192
SHAPES = {
    "128 x 128, 4 warps, 3 stages, 2 programs": Shape(),
    "the same without one loop over all": Shape(flatten=False),
    "128 x 128, 8 warps": Shape(warps=8),
    "128 x 128, 6 stages, 1 program": Shape(stages=6, programs=1),
    "128 x 256, 8 warps, 3 stages, 1 program": Shape(cols=256, warps=8, programs=1),
    "256 x 128, 8 warps, 3 stages, 1 program": Shape(rows=256, warps=8, programs=1),
    "128 x 128 x 32, 6 stages": Shape(depth=32, stages=6),
}
STRIPS = (4224, 8192, 16384)
SCALE = 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="write the lines here too")
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--features", type=int, nargs="+", default=[512, 768, 1024])
    given = parser.parse_args()
    lines = []
    print(f"{'what':48s} {'d':>5s} {'ms':>9s} {'TFLOP/s':>8s} {'product':>8s} {'ratio':>6s}")
    for what, d, operations, call in _candidates(given.rows, given.features):
        ms, product = _timed(call)
        rate = operations / ms / 1e9
        lines.append((what, given.rows, d, round(ms, 4), round(rate, 1), round(product, 1), round(rate / product, 3)))
        print(f"{what:48s} {d:5d} {ms:9.3f} {rate:8.1f} {product:8.1f} {rate / product:6.3f}", flush=True)
    if given.csv:
        with given.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("what", "b", "d", "ms", "tflops", "product_tflops", "ratio"), *lines])


Candidate = tuple[str, int, float, Callable[[], object]]


def _candidates(b: int, features: list[int]) -> Iterator[Candidate]:
    """What is timed: a name, its feature size, its operations, and a call."""
    for d in features:
        q, k = _features(b, d)
        yield from _kernels(q, k)
        yield from _products(q, k)
        yield from _losses(q, k)


def _features(n: int, d: int) -> tuple[Tensor, Tensor]:
    q, k = (F.normalize(torch.randn(n, d, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    return q, k


def _kernels(q: Tensor, k: Tensor) -> Iterator[Candidate]:
    """The two kernels of the shape of a matrix product, in every shape that compiles."""
    (b, d), known = q.shape, dict(device.SHAPES)
    rows = min(b, SQUARE)
    numbers = launch.numbers(q, k, torch.tensor(SCALE, device="cuda"), None, sigmoid=False)
    weights = torch.full((b,), 2.0**-16, device="cuda")
    for name, shape in SHAPES.items():
        device.SHAPES.update(dict.fromkeys(known, shape))
        pair = Pair(*(operands.operand(x, 1, shape) for x in (q[:rows], k)), Masks(diagonal=0))
        row_part = torch.empty(1, operands.tiles_of(b, shape.cols), rows, device="cuda")
        col_part = torch.empty(1, operands.tiles_of(rows, shape.rows), b, device="cuda")
        strip, sums = operands.strip(pair.q, pair.k), launch.no_sums(q.device)

        def totals(pair: Pair = pair, parts: tuple[Tensor, Tensor] = (row_part, col_part)) -> None:
            launch.totals(pair, numbers, *parts, smooth=False, sigmoid=False)

        def gradient(pair: Pair = pair, strip: Tensor = strip, sums: Tensor = sums) -> None:
            vectors = [(weights, weights), (weights, weights)]
            launch.gradient(pair, numbers, vectors, strip, sums, smooth=False, sigmoid=False, row_part=None)

        for kind, call in (("sums", totals), ("gradient", gradient)):
            if _runs(call):
                yield f"{kind}: {name}", d, 2.0 * rows * b * d, call
    device.SHAPES.update(known)


def _runs(call: Callable[[], None]) -> bool:
    """Whether the chip has the registers and the shared memory for it."""
    try:
        call()
    except Exception as error:
        print(f"    {type(error).__name__}: {str(error)[:90]}")
        return False
    torch.cuda.synchronize()
    return True


def _products(q: Tensor, k: Tensor) -> Iterator[Candidate]:
    """The products that add a strip times the features to the accumulators."""
    b, d = q.shape
    u, v = torch.zeros(b, d, device="cuda"), torch.zeros(b, d, device="cuda")
    for height in (height for height in STRIPS if height <= b):
        g = torch.rand(height, b, device="cuda").bfloat16()
        operations = 2.0 * height * b * d
        yield f"strip of {height}: rows' gradient", d, operations, lambda g=g: _add(u[: len(g)], g, k)
        yield f"strip of {height}: columns' gradient", d, operations, lambda g=g: _add(v, g.T, q[: len(g)])


def _add(total: Tensor, g: Tensor, x: Tensor) -> None:
    torch.addmm(total, g, x, out_dtype=torch.float32, out=total)


def _losses(q: Tensor, k: Tensor) -> Iterator[Candidate]:
    """Whole losses, forward and backward, 8·b²·d operations."""
    b, d = q.shape
    scale, bias = (torch.tensor(x, device="cuda", requires_grad=True) for x in (SCALE, -10.0))
    for workspace in (2**31, 192 * 2**20):
        for name, loss, more in (("clip", ClipLoss, ()), ("siglip", SigLipLoss, (bias,))):
            value = loss(workspace=workspace, backend="triton")

            def step(value: Callable[..., Tensor] = value, more: tuple[Tensor, ...] = more) -> None:
                value(q.requires_grad_(), k.requires_grad_(), scale, *more).backward()
                q.grad = k.grad = None

            yield f"{name}, workspace {workspace >> 20} MiB", d, 8.0 * b * b * d, step
    q.requires_grad_(False)
    k.requires_grad_(False)


def _timed(call: Callable[[], object], repeats: int = 7) -> tuple[float, float]:
    """Median milliseconds of a call, and TFLOP/s of the square product between its runs, after warming up."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda").bfloat16() for _ in range(2))
    started = time.perf_counter()
    while time.perf_counter() - started < 0.5:
        call()
        torch.mm(a, b)
        torch.cuda.synchronize()
    times = [(_once(call), _once(lambda: torch.mm(a, b))) for _ in range(repeats)]
    ms, product = (statistics.median(column) for column in zip(*times, strict=True))
    return ms, 2.0 * SQUARE**3 / product / 1e9


def _once(call: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    elapsed: float = start.elapsed_time(stop)
    return elapsed


if __name__ == "__main__":
    main()
