"""The program that torchrun starts for `test_gpu_ranks.py`: one rank of a check, on its own GPU where there is one.

torchrun --nproc-per-node 2 tests/on_ranks.py losses     (or `quick`: fewer kernels to compile; or `shared`: all ranks
on one GPU, which read each other's memory as those of a node do)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from contrastile import ClipLoss, InfoNCELoss, NTXentLoss, SigLipLoss
from contrastile.cli.main import main
from contrastile.distributed import collectives, neighbours
from contrastile.train import loop
from contrastile.train.ranks import Ranks

# the last one is a ring of features in host memory
EXCHANGES = ("gather", "ring", "replicate", "host")
LOSSES: dict[str, tuple[type, tuple[float, ...]]] = {
    "clip": (ClipLoss, (20.0,)),
    "siglip": (SigLipLoss, (10.0, -5.0)),
    "info_nce": (InfoNCELoss, (20.0,)),
    "nt_xent": (NTXentLoss, (5.0,)),
}
QUICK = ("clip", "siglip")
D = 256
# a gradient may be as far from float64 as the plain formula's in the same dtype, times this, and what sums leave
FACTOR, FLOOR = 2.0, 1e-6


def _sizes(W: int) -> list[int]:
    """Rows of each rank: uneven, and from three ranks on one without any."""
    rows = 700 if torch.cuda.is_available() else 40
    return [0 if W > 2 and rank == 1 else rows + 128 * rank for rank in range(W)]


def _leaves(name: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = sum(_sizes(dist.get_world_size()))
    sides = [F.normalize(torch.randn(rows, D, generator=generator), dim=-1).to(device, dtype) for _ in range(2)]
    scalars = [torch.tensor(number, device=device) for number in LOSSES[name][1]]
    return [x.requires_grad_() for x in (*sides, *scalars)]


def _step(loss: Any, leaves: list[Tensor], ids: Tensor | None) -> list[Tensor]:
    value = loss(*leaves) if ids is None else loss(*leaves, ids=ids)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def _distances(found: list[Tensor], true: list[Tensor]) -> list[float]:
    return [float((x.double() - t).norm() / t.norm()) for x, t in zip(found, true, strict=True)]


def losses(device: torch.device, *, quick: bool = False) -> None:
    """Every loss, exchange and dtype against one process with the whole batch in float64.

    quick: one softmax and one sigmoid, in one dtype.
    """
    rank, W = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(W)][rank]
    sizes = _sizes(W)
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    for name in QUICK if quick else LOSSES:
        make = LOSSES[name][0]
        for dtype in dtypes[-1:] if quick else dtypes:
            whole = _leaves(name, dtype, device)
            ids = torch.arange(len(whole[0]), device=device) // 2 if name in ("clip", "siglip") else None
            dense = make(backend="dense", group=alone)
            wide = [leaf.detach().double().requires_grad_() for leaf in whole]
            true = _step(dense, wide, ids)
            allowed = [FACTOR * far + FLOOR for far in _distances(_step(dense, whole, ids), true)]
            mine = [leaf.detach().split(sizes)[rank].clone().requires_grad_() for leaf in whole[:2]]
            own_ids = None if ids is None else ids.split(sizes)[rank]
            for exchange in EXCHANGES:
                how: dict[str, Any] = {"exchange": exchange}
                if exchange == "host":
                    mine, how = [x.detach().cpu().requires_grad_() for x in mine], {"device": device}
                    own_ids = None if own_ids is None else own_ids.cpu()
                # the third call is captured, and replayed by the fourth
                for _ in range(4 if exchange in ("gather", "ring") and device.type == "cuda" else 1):
                    value, dq, dk, *scalars = _step(make(**how), [*mine, *whole[2:]], own_ids)
                rows = [collectives.gather_rows(x.to(device).double(), sizes, None) / W for x in (dq, dk)]
                found = [value, *rows, *(collectives.total(x, None) / W for x in scalars)]
                far = _distances(found, true)
                # the scalars' gradients are sums with cancellation, which the plain formula may hit by chance
                bounds = [max(1e-5, allowed[0]), *allowed[1:3], *(max(1e-3, bound) for bound in allowed[3:])]
                if not all(x <= bound for x, bound in zip(far, bounds, strict=True)):
                    raise SystemExit(f"{name}, {exchange}, {dtype}: {far} from float64, and {bounds} is allowed")
        if rank == 0:
            sys.stdout.write(f"{name}: right\n")


def share_memory() -> None:
    """Let ranks that share a GPU copy from each other, through what CUDA shows of a process's memory to others."""

    def made(group: Any, size: int, device: torch.device) -> neighbours.Neighbours:
        memory = torch.zeros(2 * size + neighbours.ALIGNMENT, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        rank, handles = group.rank(), [None] * group.size()
        dist.all_gather_object(handles, reduce_tensor(memory), group=group)
        memories = [memory if each == rank else open_(*words) for each, (open_, words) in enumerate(handles)]
        dist.barrier(group)
        return neighbours.Neighbours(memories, rank, size)

    neighbours._reachable, neighbours._made = (lambda *_: True), made


def killed(words: list[str]) -> int:
    """A training run whose second rank dies in its third step."""
    real, calls = loop.step, []

    def step(*arguments: Any) -> Any:
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return real(*arguments)

    loop.step = step
    return main(words)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "killed":
        sys.exit(killed(rest))
    if what == "main":
        sys.exit(main(rest))
    # a packet by way of the GPUs has several parts
    collectives.STAGED = 2**17
    torch.set_num_threads(1)
    shared = what == "shared"
    if not shared:
        Ranks.of_environment("auto")
    on_gpu = torch.cuda.is_available()
    over_nccl = on_gpu and not shared
    here = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if over_nccl else "gloo", timeout=timedelta(minutes=2), device_id=here if over_nccl else None
    )
    if shared:
        share_memory()
    losses(here, quick=what != "losses")
    dist.destroy_process_group()
