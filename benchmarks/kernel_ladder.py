"""How fast each kernel of `tiles/triton` runs by itself, in the shapes it could have, beside the chip's own products.

The script behind docs/kernels.md. Needs a CUDA device:

    python benchmarks/kernel_ladder.py [--csv FILE] [--rows 65536] [--features 512 768 1024]

Times are medians, with the 8192 × 8192 × 8192 bf16 product of the same moment beside them, since a chip under load
slows down. `contrastile bench loss` measures whole losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.bench.harness import COLUMNS, Table, script
from contrastile.losses.softmax import Softmax
from contrastile.tiles.triton import launch, plan
from contrastile.tiles.triton.plan import Masks, Pair, Shape, epilogue_for

SHAPES = {
    "128 x 128, 4 warps, 3 stages, 2 programs": Shape(),
    "the same without one loop over all": Shape(flatten=False),
    "128 x 128, 8 warps": Shape(warps=8),
    "128 x 128, 6 stages, 1 program": Shape(stages=6, programs=1),
    "128 x 256, 8 warps, 3 stages, 1 program": Shape(cols=256, warps=8, programs=1),
    "256 x 128, 8 warps, 3 stages, 1 program": Shape(rows=256, warps=8, programs=1),
    "128 x 128 x 32, 6 stages": Shape(depth=32, stages=6),
}
# rows of a super-tile, and of the strips
ROWS, STRIPS = 8192, (4224, 8192, 16384)
SCALE = 100.0
EPILOGUE = epilogue_for(Softmax(symmetric=True))
# seconds per call
SECONDS = 0.2
TABLE = Table(
    *(("what", "kernel", "48"), ("d", "d", ">5"), ("ms", "ms", ">9.3f"), ("tflops", "TFLOP/s", ">8.1f")),
    *(("product_tflops", "product", ">8.1f"), ("ratio", "ratio", ">6.3f")),
)
# name, operations and call
Candidate = tuple[str, float, Callable[[], object]]


def main() -> None:
    words = {"--rows": {"type": int, "default": 65536}}
    words["--features"] = {"type": int, "nargs": "+", "default": [512, 768, 1024]}
    with script(__doc__, COLUMNS["kernels"], seconds=SECONDS, options=words) as (options, machine, report):
        report.say(TABLE.header())
        for d in options.features:
            q, k = (F.normalize(torch.randn(options.rows, d, device="cuda"), dim=-1).bfloat16() for _ in range(2))
            for name, operations, call in chain(kernels(q, k), accumulations(q, k)):
                timing = machine.race({name: call})[name]
                rate, product = operations / timing.ms / 1e9, timing.product_rate / 1e12
                row = {"what": name, "b": options.rows, "d": d, "ms": round(timing.ms, 4)}
                row |= {"ratio": round(rate / product, 3), "tflops": round(rate, 1)}
                row |= {"product_tflops": round(product, 1)}
                report.result(TABLE.line(row), row)


def kernels(q: Tensor, k: Tensor) -> Iterator[Candidate]:
    """Yield the two kernels of the shape of a matrix product, in every shape that compiles."""
    (b, d), default = q.shape, dict(plan.SHAPES)
    rows = min(b, ROWS)
    constants = launch.block_constants(q, k, torch.tensor(SCALE, device="cuda"), None, EPILOGUE)
    weights = torch.full((b,), 2.0**-16, device="cuda")
    for name, shape in SHAPES.items():
        plan.SHAPES.update(dict.fromkeys(default, shape))
        pair = Pair(*(launch.operand(x, 1, shape) for x in (q[:rows], k)), Masks(diagonal=0))
        row_part = torch.empty(1, plan.tiles_of(b, shape.cols), rows, device="cuda")
        col_part = torch.empty(1, plan.tiles_of(rows, shape.rows), b, device="cuda")
        strip, sums = pair.new_strip(), launch.new_sums(q.device)

        def totals(pair: Pair = pair, parts: tuple[Tensor, Tensor] = (row_part, col_part)) -> None:
            launch.sums(pair, constants, parts, EPILOGUE)

        def gradient(pair: Pair = pair, strip: Tensor = strip, sums: Tensor = sums) -> None:
            launch.gradient(pair, constants, [weights[None]] * 2, strip, sums, EPILOGUE)

        for kind, call in (("sums", totals), ("gradient", gradient)):
            try:
                call()
                torch.cuda.synchronize()
            except Exception as error:
                # too many registers, or too much shared memory
                print(f"    {type(error).__name__}: {str(error)[:90]}")
            else:
                yield f"{kind}: {name}", 2.0 * rows * b * d, call
    plan.SHAPES.update(default)


def accumulations(q: Tensor, k: Tensor) -> Iterator[Candidate]:
    """Yield the products that add a strip times the features to the accumulators."""
    b, d = q.shape
    u, v = torch.zeros(b, d, device="cuda"), torch.zeros(b, d, device="cuda")
    for height in (height for height in STRIPS if height <= b):
        g = torch.rand(height, b, device="cuda").bfloat16()
        operations = 2.0 * height * b * d
        yield f"strip of {height}: rows' gradient", operations, lambda g=g: add(u[: len(g)], g, k)
        yield f"strip of {height}: columns' gradient", operations, lambda g=g: add(v, g.T, q[: len(g)])


def add(total: Tensor, g: Tensor, x: Tensor) -> None:
    torch.addmm(total, g, x, out_dtype=torch.float32, out=total)


if __name__ == "__main__":
    main()
