"""Time losses as people call them, beside the plain formula and the same compiled: autocast, options, rectangles.

Forward and backward, in interleaved rounds: the median and the least milliseconds of a step, many steps in a row.
"host" is the time until a step's launches are queued. Run on an idle GPU:

    python benchmarks/user_calls.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import ClipLoss, InfoNCELoss, SigLipLoss
from contrastile.bench.harness import Machine, Step
from contrastile.bench.peers import FORMULAS, Loss


def features(*sizes: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Unit features on the GPU that want gradients."""
    return [F.normalize(torch.randn(size, device="cuda"), dim=-1).to(dtype).requires_grad_() for size in sizes]


def step(loss: Loss, leaves: list[Tensor], *, autocast: bool = True) -> Step:
    """A forward and backward pass under bf16 autocast, as a training loop runs it."""

    def run() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            value = loss(*leaves)
        torch.autograd.grad(value, leaves)

    return run


def calls() -> Iterator[tuple[str, dict[str, Step]]]:
    """Each problem's name, and the steps that are timed together."""
    clip, one_way = FORMULAS["clip"], FORMULAS["infonce"]
    scale = torch.tensor(100.0, device="cuda", requires_grad=True)

    def beside(ours: Loss, plain: Loss, leaves: list[Tensor], **more: Step) -> dict[str, Step]:
        ways = {"plain": step(plain, leaves), "compiled": step(torch.compile(plain, dynamic=False), leaves)}
        return {"contrastile": step(ours, leaves), **more, **ways}

    for b, d in ((1024, 512), (4096, 512), (8192, 768), (16384, 768), (32768, 768)):
        wide, narrow = features((b, d), (b, d), dtype=torch.float32), features((b, d), (b, d))
        cast = {"contrastile, bf16 features": step(ClipLoss(), [*narrow, scale], autocast=False)}
        yield f"clip {b} x {d}, float32 features under autocast", beside(ClipLoss(), clip, [*wide, scale], **cast)
    for b in (1024, 4096):
        leaves = [*features((b, 512), (b, 512)), scale]
        ids, weights = torch.randint(b // 3, (b,), device="cuda"), torch.rand(b, device="cuda")
        options = {"none": {}, "weights": {"weights": weights}, "ids": {"ids": ids}}
        steps = {f"contrastile, {name}": step(partial(ClipLoss(), **given), leaves) for name, given in options.items()}
        steps["contrastile, smoothing"] = step(ClipLoss(label_smoothing=0.1), leaves)
        yield f"clip {b} x 512, options", {**steps, "plain": step(clip, leaves)}
    for n, m, d in ((1024, 4096, 512), (1024, 65536, 768), (4096, 32768, 768), (2048, 131072, 512)):
        leaves = [*features((n, d), (m, d)), scale]
        steps = beside(InfoNCELoss(), one_way, leaves)
        at = torch.randperm(m, device="cuda")[:n]
        steps["contrastile, positives"] = step(partial(InfoNCELoss(), positives=at), leaves)
        yield f"infonce {n} x {m} x {d}", steps
    sigmoids = ((SigLipLoss(), {"logit_bias": -10.0}), (FORMULAS["siglip"], {"bias": -10.0}))
    for b in (1024, 4096, 8192):
        leaves = [*features((b, 768), (b, 768)), scale]
        yield f"siglip {b} x 768", beside(*(partial(loss, **bias) for loss, bias in sigmoids), leaves)


def host_ms(run: Step, rounds: int = 9, steps: int = 5) -> float:
    """Median milliseconds until the launches of a step are queued, on a device that is idle before."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        times.append((time.perf_counter() - start) / steps * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each may be measured (default: 1)")
    parser.add_argument("--only", default="", help="the calls whose names hold this word")
    options = parser.parse_args()
    machine = Machine.of(torch.device("cuda"), options.seconds)
    machine.load()
    for name, steps in calls():
        if options.only not in name:
            continue
        print(name)
        for impl, timing in machine.race(steps).items():
            host = host_ms(steps[impl])
            print(f"  {impl:28} {timing.ms:8.3f} ms, least {timing.least_ms:8.3f}, host {host:8.3f}", flush=True)


if __name__ == "__main__":
    main()
