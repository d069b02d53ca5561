"""The losses across ranks, on the GPUs of one machine.

    torchrun --nproc-per-node 2 benchmarks/ranks.py [--sizes 65536 262144] [--features 768] [--csv FILE]

First every exchange is compared with one process on a small batch in float32; then each is timed, forward and
backward, on bf16 features, between runs of the same loss on one GPU. `share` is one GPU's time over (time × ranks):
1 means that communication costs nothing. Memory is the allocator's peak beside features and returned gradients.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contrastile import ClipLoss

EXCHANGES = ("gather", "ring", "replicate")
ROUNDS = 5


def features(b: int, d: int, dtype: torch.dtype, seed: int) -> Tensor:
    """The same on every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return F.normalize(torch.randn(b, d, device="cuda", generator=generator), dim=-1).to(dtype)


def step(loss: ClipLoss, q: Tensor, k: Tensor, scale: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [x.detach().requires_grad_() for x in (q, k, scale)]
    value = loss(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves)


def own(x: Tensor, rank: int, W: int) -> Tensor:
    return x.chunk(W)[rank].contiguous()


def check(rank: int, W: int) -> None:
    """Loss, features' and scale's gradients of every exchange against one process; raises where they differ."""
    q, k = (features(W * 500, 96, torch.float32, seed) for seed in (1, 2))
    scale = torch.tensor(20.0, device="cuda")
    truth, (true_q, true_k, true_scale) = step(ClipLoss(exchange="single"), q, k, scale)
    for exchange in EXCHANGES:
        loss = ClipLoss(exchange=exchange)
        value, (grad_q, grad_k, grad_scale) = step(loss, own(q, rank, W), own(k, rank, W), scale)
        dist.all_reduce(grad_scale)
        pairs = (
            (value, truth),
            (grad_q / W, own(true_q, rank, W)),
            (grad_k / W, own(true_k, rank, W)),
            (grad_scale / W, true_scale),
        )
        worst = max(float((x - t).norm() / t.norm()) for x, t in pairs)
        if not worst < 1e-5:
            raise SystemExit(f"{exchange} on {W} ranks: {worst:.1e} from one process; no speed on a wrong result")
        if rank == 0:
            print(f"{exchange:9} on {W} ranks: {worst:.0e} from one process", flush=True)


def milliseconds(loss: ClipLoss, q: Tensor, k: Tensor, scale: Tensor) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    step(loss, q, k, scale)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def extra_bytes(loss: ClipLoss, q: Tensor, k: Tensor, scale: Tensor) -> int:
    """Beside features and returned gradients, workspace included."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, gradients = step(loss, q, k, scale)
    return torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--workspace", type=int, default=2**31)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rank, W = dist.get_rank(), dist.get_world_size()
    check(rank, W)
    rows = []
    scale = torch.tensor(100.0, device="cuda")
    for b in options.sizes:
        q, k = (features(b, options.features, torch.bfloat16, seed) for seed in (1, 2))
        mine = own(q, rank, W), own(k, rank, W)
        losses = {name: ClipLoss(exchange=name, workspace=options.workspace) for name in ("single", *EXCHANGES[:2])}
        taken: dict[str, list[float]] = {name: [] for name in losses}
        for _ in range(ROUNDS + 1):
            for name, loss in losses.items():
                taken[name].append(milliseconds(loss, *((q, k) if name == "single" else mine), scale))
        # the first round compiles and connects
        ms = {name: statistics.median(each[1:]) for name, each in taken.items()}
        for name in EXCHANGES[:2]:
            share = ms["single"] / (W * ms[name])
            peak = extra_bytes(losses[name], *mine, scale)
            if rank == 0:
                took = f"{ms[name]:8.1f} ms, one GPU {ms['single']:8.1f} ms, share {share:.3f}"
                print(f"b {b:7} d {options.features} W {W} {name:7} {took}, {peak / 2**30:.2f} GiB beside", flush=True)
            rows.append(
                {
                    "impl": "contrastile",
                    "loss": "clip",
                    "backend": f"triton, {name}",
                    "b": b,
                    "d": options.features,
                    "dtype": "bfloat16",
                    "world": W,
                    "ms": round(ms[name], 2),
                    "effective_tflops": round(8 * b * b * options.features / ms[name] / 1e9 / W, 1),
                    "ratio": round(share, 4),
                    "peak_bytes": peak,
                    "chip": torch.cuda.get_device_name(),
                    "versions": f"torch {torch.__version__}",
                    "date": date.today().isoformat(),
                    "commit": os.environ.get("COMMIT", ""),
                }
            )
    if options.csv and rank == 0:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
