"""How far the fused kernels are from float64 on this chip, and what its matrix units cut off.

The script behind the numbers of docs/kernels.md and docs/numerics.md. Needs a CUDA device with a copy engine:

    python benchmarks/kernel_accuracy.py

First, products of a tile against float64: the share they lose, of all pairs and of those above three deviations, which
matter to a loss. Per feature, this is `Shape.truncation` in tiles/triton/plan.py. Then whole losses, for pairs of some
cosine, beside the dense formula in the same type; `read off` is the scale's gradient from that of the features, which
has gone through 16 bits and long sums. Last 64k rows, against float64 a few thousand rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from contrastile import ClipLoss, SigLipLoss
from contrastile.losses.reference import dense_clip, dense_sigmoid
from contrastile.tiles.triton.forward import products
from contrastile.tiles.triton.launch import operand
from contrastile.tiles.triton.plan import coded, piece_products, shape_for

ROWS, SCALE, BIAS = 8192, 100.0, -10.0
# rows of the large problems, and of them at once in float64
MANY, AT_ONCE = 65536, 4096
# 16-bit pieces of a number
PIECES = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 3}
LOSSES = {"clip": (ClipLoss, dense_clip, ()), "siglip": (SigLipLoss, dense_sigmoid, (BIAS,))}


def main() -> None:
    print(f"{'products':10} {'d':>5} {'lost':>10} {'of the upper':>12} {'per feature':>12}")
    for dtype, d in [(torch.bfloat16, 2**e) for e in range(6, 13)] + [(torch.float16, 512), (torch.float32, 512)]:
        lost, upper = _cut(*_features(2048, d, 0.0, dtype))
        print(f"{str(dtype)[6:]:10} {d:5} {lost:10.2e} {upper:12.2e} {f'2^{math.log2(upper / d):.2f}':>12}", flush=True)
    print(f"{'loss':7} {'dtype':9} {'d':>5} {'cosine':>6} {'value':>9}   loss, gradients, scale, read off | dense")
    for loss, dtype, d, cosine in _cases():
        value, ours, dense = _distances(loss, dtype, d, cosine)
        found = " ".join(f"{x:.1e}" for x in (*ours[:2], *ours[3:]))
        beside = " ".join(f"{x:.1e}" for x in (*dense[:2], dense[3]))
        print(f"{loss:7} {str(dtype)[6:]:9} {d:5} {cosine:6} {value:9.2e}   {found} | {beside}", flush=True)
    print(f"{'loss':7} {'rows':>9} {'d':>5} {'cosine':>6} {'value':>9}   loss, scale, bias, read off")
    for loss, cosine in (("clip", 0.2), ("clip", 0.3), ("siglip", 0.0), ("siglip", 0.2)):
        value, found = _many(loss, MANY, 512, cosine)
        print(f"{loss:7} {MANY:9} {512:5} {cosine:6} {value:9.2e}   {' '.join(f'{x:.1e}' for x in found)}", flush=True)


def _cases() -> Iterator[tuple[str, torch.dtype, int, float]]:
    for d in (512, 768, 1024):
        for cosine in (0.0, 0.2, 0.3, 0.4):
            yield "clip", torch.bfloat16, d, cosine
        yield "siglip", torch.bfloat16, d, 0.0
        yield "siglip", torch.bfloat16, d, 0.2
    for dtype in (torch.float16, torch.float32):
        for cosine in (0.2, 0.3):
            yield "clip", dtype, 512, cosine


def _features(n: int, d: int, cosine: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unit features whose pairs have about this cosine."""
    torch.manual_seed(d)
    q, k = (F.normalize(torch.randn(n, d, device="cuda"), dim=-1) for _ in range(2))
    q = F.normalize(cosine * k + (1 - cosine**2) ** 0.5 * q, dim=-1)
    return q.to(dtype), k.to(dtype)


@triton.jit
def _store(q_mem, k_mem, out_ptr, n, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr,
           RIGHT: tl.constexpr, PRODUCTS: tl.constexpr):  # fmt: skip
    i, j = tl.program_id(0), tl.program_id(1)
    acc = products(q_mem, k_mem, 0, 0, i, j, n, n, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, True, False)
    rows, cols = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    tl.store(out_ptr + rows[:, None] * n + cols[None, :], acc)


def _cut(q: Tensor, k: Tensor) -> tuple[float, float]:
    """The share that the products lose, by least squares: of all pairs, and of those above three deviations."""
    n, shape = len(q), shape_for(q.device)
    a, b = (operand(x, PIECES[x.dtype], shape) for x in (q, k))
    left, right = zip(*piece_products(a.parts), strict=True)
    out = torch.empty(n, n, device="cuda")
    _store[n // shape.rows, n // shape.cols](
        a.memory(shape.rows, shape), b.memory(shape.cols, shape), out, n, a.width, shape.rows, shape.cols, shape.depth,
        coded(list(left)), coded(list(right)), len(left), num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    true = q.double() @ k.double().T
    missing, upper = (true - out) * true, true.abs() > 3 * true.std()
    return float(missing.sum() / true.square().sum()), float(missing[upper].sum() / true[upper].square().sum())


def _distances(loss: str, dtype: torch.dtype, d: int, cosine: float) -> tuple[float, list[float], list[float]]:
    module, formula, bias = LOSSES[loss]
    numbers = [torch.tensor(x, device="cuda") for x in (SCALE, *bias)]
    leaves = [x.requires_grad_() for x in (*_features(ROWS, d, cosine, dtype), *numbers)]
    true = _step(formula, [x.detach().double().requires_grad_() for x in leaves])
    found, dense = (_step(way, leaves) for way in (module(backend="triton"), formula))
    ours = [_relative(x, y) for x, y in zip(found[:4], true[:4], strict=True)]
    read_off = (found[1] * leaves[0].detach()).sum() / SCALE
    return (
        float(true[0]),
        [*ours, _relative(read_off, true[3])],
        [_relative(x, y) for x, y in zip(dense, true, strict=True)],
    )


def _relative(x: Tensor, true: Tensor) -> float:
    return float((x - true).norm() / true.norm())


@torch.no_grad()
def _many(loss: str, n: int, d: int, cosine: float) -> tuple[float, list[float]]:
    """The loss, and its distances: of itself, of the scale's and the bias's gradient, of the former read off."""
    module, _, bias = LOSSES[loss]
    numbers = [torch.tensor(x, device="cuda") for x in (SCALE, *bias)]
    leaves = [x.requires_grad_() for x in (*_features(n, d, cosine, torch.bfloat16), *numbers)]
    with torch.enable_grad():
        found = _step(module(backend="triton"), leaves)
    q, k = (x.detach().double() for x in leaves[:2])
    true = _true_softmax(q, k) if loss == "clip" else _true_sigmoid(q, k, *bias)
    numbers_found = [found[0], *found[3:], (found[1] * q).sum() / SCALE]
    return float(true[0]), [_relative(x, y) for x, y in zip(numbers_found, [*true, true[1]], strict=True)]


def _true_softmax(q: Tensor, k: Tensor) -> list[Tensor]:
    """In float64: the loss, and its derivative by the scale, Σ p · ⟨q, k⟩ less the positives' part."""
    own = (q * k).sum(1)
    value, of_scale = SCALE * -own.mean(), -own.mean()
    for a, b in ((q, k), (k, q)):
        for part in a.split(AT_ONCE):
            x = part @ b.T
            lse = (SCALE * x).logsumexp(1)
            of_scale += ((SCALE * x - lse[:, None]).exp_() * x).sum() / (2 * len(q))
            value += lse.sum() / (2 * len(q))
    return [value, of_scale]


def _true_sigmoid(q: Tensor, k: Tensor, bias: float) -> list[Tensor]:
    """In float64: the loss, and its derivatives by the scale and the bias."""
    own = (q * k).sum(1)
    value, of_scale, of_bias = -(SCALE * own + bias).mean(), -own.mean(), -torch.ones_like(own).mean()
    for part in q.split(AT_ONCE):
        x = part @ k.T
        g = (SCALE * x + bias).sigmoid_() / len(q)
        of_scale, of_bias = of_scale + (g * x).sum(), of_bias + g.sum()
        value = value + F.softplus(SCALE * x + bias).sum() / len(q)
    return [value, of_scale, of_bias]


def _step(loss, leaves: list[Tensor]) -> list[Tensor]:
    value = loss(*leaves)
    return [x.double() for x in (value.detach(), *torch.autograd.grad(value, leaves))]


if __name__ == "__main__":
    main()
