"""Gradients of the fused kernels in float32 beside those of the plain formula, on hard features, as a table.

python tests/float32_table.py [KIND ...] [LOSS ...]           the interpreter's own rounding, or that of a CUDA device
python tests/float32_table.py --chip [KIND ...] [LOSS ...]    with a Hopper chip's tensor cores emulated

Each line: for every gradient the distance to float64, relative to the gradient and then in roundings (2⁻²⁴) of the
terms that it is a sum of, first of the kernels, then of the plain formula; and the ratio that `test_float32.py` bounds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.nn.functional as F
from matrix_units import emulated
from problems import PROBLEMS, Problem, seeded
from torch import Tensor

# relative rounding error of a float32 number, and how many of a result any formula is expected to make
EPS, LUCK = 2.0**-24, 4
SCALES = (1.0, 10.0, 100.0, 1000.0)
# rows, and more columns than rows where a loss takes them; features
N, M, D = 120, 127, 512
DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


def _noise(n: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(n, D, generator=seeded(seed), dtype=torch.float64), dim=-1)


def random(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return _noise(n, seed), _noise(n, seed + 1000)


def matched(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Confident pairs, as training makes them."""
    k = _noise(n, seed)
    return k + 0.7 * _noise(n, seed + 1000), k


def collapsed(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """All rows nearly equal."""
    one = _noise(1, seed + 2000)
    return one + 1e-3 * _noise(n, seed), one + 1e-3 * _noise(n, seed + 1000)


def gathered(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """All rows within a narrow cone."""
    one = _noise(1, seed + 2000)
    return one + 0.1 * _noise(n, seed), one + 0.1 * _noise(n, seed + 1000)


def duplicated(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Every row four times, each its own key."""
    k = _noise(-(-n // 4), seed).repeat(4, 1)[:n]
    return k, k


def opposed(n: int, seed: int) -> tuple[Tensor, Tensor]:
    k = _noise(n, seed)
    return -k, k


def alternating(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """One row with either sign."""
    one = _noise(1, seed) * (1 - 2 * (torch.arange(n) % 2))[:, None]
    return one, one.roll(1, 0)


KINDS: dict[str, Callable[[int, int], tuple[Tensor, Tensor]]] = {
    make.__name__: make for make in (random, matched, gathered, collapsed, duplicated, opposed, alternating)
}


def leaves(problem: Problem, kind: str, scale: float, seed: int) -> dict[str, Tensor]:
    q, k = (F.normalize(x, dim=-1).float() for x in KINDS[kind](max(problem.N, problem.M), seed))
    out = {"q": q[: problem.N]} | ({} if problem.same else {"k": k[: problem.M]})
    out["scale"] = torch.tensor(scale)
    if problem.bias:
        out["bias"] = torch.tensor(-min(scale, 10.0))
    return {name: x.requires_grad_() for name, x in out.items()}


def terms(problem: Problem, exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums of the magnitudes of the terms that each gradient is a sum of."""
    q, scale = exact["q"].detach(), exact["scale"].detach()
    k = exact.get("k", exact["q"]).detach()
    products = q @ k.T
    alone = {"q": products.requires_grad_(), "k": torch.eye(len(k), dtype=q.dtype)}
    alone |= {name: exact[name].detach() for name in ("scale", "bias") if name in exact}
    loss = problem._call(problem.formula, problem.dense, alone)
    g = torch.autograd.grad(loss, products)[0].abs() / scale
    of_q, of_k = scale * (g @ k.abs()), scale * (g.T @ q.abs())
    sums = {"scale": (g * products.detach().abs()).sum(), "bias": g.sum()}
    return sums | ({"q": of_q, "k": of_k} if "k" in exact else {"q": of_q + of_k})


def errors(name: str, kind: str, scale: float, backend: str = "triton", seeds: int = 2) -> dict[str, list[float]]:
    """Norms of each gradient's error by a backend, of that by the plain formula, of the gradient, and of its terms.

    Over all seeds, because a single number can be right by luck.
    """
    sums: dict[str, Tensor] = {}
    for seed in range(seeds):
        problem = PROBLEMS[name](N, M)
        given = leaves(problem, kind, scale, seed)
        exact = {key: x.detach().double().requires_grad_() for key, x in given.items()}
        (_, truth), (_, plain) = problem.by_formula(exact), problem.by_formula(given)
        _, found = problem.by_tiles(given, backend=backend)
        sizes = terms(problem, exact)
        for key, true in truth.items():
            differences = found[key].double() - true, plain[key].double() - true, true, sizes[key]
            squares = torch.stack([x.square().sum() for x in differences])
            sums[key] = sums.get(key, torch.zeros(4, dtype=torch.float64)) + squares
    return {key: x.sqrt().tolist() for key, x in sums.items()}


def ratio(key: str, found: float, plain: float, true: float, size: float) -> float:
    """The error beside the plain formula's, or that of rounding alone: a few of the result, one of its terms.

    Of a single number, in which the errors of many pairs average out, a quarter.
    """
    return found / max(plain, EPS * max(LUCK * true, size if key in ("q", "k") else size / 4))


def main() -> None:
    from interpreter import quicken

    quicken()
    torch.set_num_threads(1)
    kinds = [x for x in sys.argv[1:] if x in KINDS] or list(KINDS)
    names = [x for x in sys.argv[1:] if x in PROBLEMS] or list(PROBLEMS)
    with emulated() if "--chip" in sys.argv else nullcontext(), torch.device(DEVICE):
        for kind, name, scale in product(kinds, names, SCALES):
            line = [f"{kind:11} {name:27} {scale:6.0f}"]
            for key, (found, plain, true, size) in errors(name, kind, scale).items():
                relative = " ".join(f"{x / (true or 1):.1e} {x / (size or 1) / EPS:6.2f}" for x in (found, plain))
                line.append(f"{key} {relative} {ratio(key, found, plain, true, size):6.2f}")
            print("  ".join(line), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
