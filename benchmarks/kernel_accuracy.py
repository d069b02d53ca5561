"""Distances of the fused kernels from float64 on this chip, and the part that its tensor cores cut off.

The script behind the numbers of docs/kernels.md and docs/numerics.md. Needs a CUDA device with TMA:

    python benchmarks/kernel_accuracy.py

First, products of a tile against float64: the share they lose, of all pairs and of those above three deviations, which
matter to a loss. Per feature, this is `Shape.truncation` in tiles/triton/plan.py. Then whole losses, for pairs of some
cosine, beside the plain formula in the same dtype. `contrastile bench loss` compares a few rows of larger problems.
"""

import math
from itertools import product

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from contrastile.bench.gate import SCALE, Distance, double, step
from contrastile.bench.subjects import SUBJECTS
from contrastile.tiles.triton.kernels.forward import products
from contrastile.tiles.triton.launch import operand
from contrastile.tiles.triton.plan import products_of, shape_for

ROWS = 8192
PRODUCTS = [(torch.bfloat16, 2**e) for e in range(6, 13)] + [(torch.float16, 512), (torch.float32, 512)]
CASES = [
    *product(("clip",), (torch.bfloat16,), (512, 768, 1024), (0.0, 0.2, 0.3, 0.4)),
    *product(("siglip",), (torch.bfloat16,), (512, 768, 1024), (0.0, 0.2)),
    *product(("clip",), (torch.float16, torch.float32), (512,), (0.2, 0.3)),
]


def features(n: int, d: int, cosine: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return unit features whose pairs have about this cosine."""
    torch.manual_seed(d)
    q, k = (F.normalize(torch.randn(n, d, device="cuda"), dim=-1) for _ in range(2))
    q = F.normalize(cosine * k + (1 - cosine**2) ** 0.5 * q, dim=-1)
    return q.to(dtype), k.to(dtype)


@triton.jit
def _store(q_mem, k_mem, out_ptr, n, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr,
           RIGHT: tl.constexpr, PRODUCTS: tl.constexpr):  # fmt: skip
    i, j = tl.program_id(0), tl.program_id(1)
    acc = products(q_mem, k_mem, 0, 0, i, j, n, n, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, True)
    rows, cols = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    tl.store(out_ptr + rows[:, None] * n + cols[None, :], acc)


def truncation(q: Tensor, k: Tensor) -> tuple[float, float]:
    """Return the share that the products lose, by least squares: of all pairs, and of those above three deviations."""
    n, shape = len(q), shape_for(q.device)
    a, b = (operand(x) for x in (q, k))
    multiplied = products_of(a.parts)
    out = torch.empty(n, n, device="cuda")
    _store[n // shape.rows, n // shape.cols](
        a.memory(shape.rows, shape), b.memory(shape.cols, shape), out, n, a.width, shape.rows, shape.cols, shape.depth,
        multiplied["LEFT"], multiplied["RIGHT"], multiplied["PRODUCTS"], num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    true = q.double() @ k.double().T
    missing, upper = (true - out) * true, true.abs() > 3 * true.std()
    return float(missing.sum() / true.square().sum()), float(missing[upper].sum() / true[upper].square().sum())


def main() -> None:
    print(f"{'products':10} {'d':>5} {'lost':>10} {'of the upper':>12} {'per feature':>12}")
    for dtype, d in PRODUCTS:
        lost, upper = truncation(*features(2048, d, 0.0, dtype))
        print(f"{str(dtype)[6:]:10} {d:5} {lost:10.2e} {upper:12.2e} {f'2^{math.log2(upper / d):.2f}':>12}", flush=True)
    print(f"{'loss':7} {'dtype':9} {'d':>5} {'cosine':>6} {'value':>9}   loss, gradients, scale | dense")
    for loss, dtype, d, cosine in CASES:
        subject = SUBJECTS[loss]
        scalars = [torch.tensor(x, device="cuda") for x in (SCALE, subject.bias) if x is not None]
        leaves = [x.requires_grad_() for x in (*features(ROWS, d, cosine, dtype), *scalars)]
        true = step(subject.reference, double(leaves))
        ways = (subject.module(backend="triton"), subject.reference)
        ours, dense = (Distance.between(step(way, leaves), true) for way in ways)
        distances = " | ".join(f"{x.loss:.1e} {x.gradient:.1e} {x.scalar:.1e}" for x in (ours, dense))
        print(f"{loss:7} {str(dtype)[6:]:9} {d:5} {cosine:6} {float(true[0]):9.2e}   {distances}", flush=True)


if __name__ == "__main__":
    main()
