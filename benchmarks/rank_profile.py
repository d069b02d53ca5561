"""Where the time of a loss across ranks goes: host, device, communication, and nothing.

    torchrun --standalone --nproc-per-node 4 benchmarks/rank_profile.py [--sizes 65536 262144] [--waves 1 4]
        [--ctas 8 16] [--first] [--brief] [--seconds 1.5]

One process with the whole batch, then gather and ring, forward and backward in bf16. Every way prints

    ms      of a step that begins with nothing under way, on the slowest rank; and of steps back to back
    cost    (ranks × ms) over one process's: 1 means that communication costs nothing
    host    ms until the Python call of that step returns: what the device could hide, if it had begun
    device  ms by kind of kernel, on the first rank: tiles, products, small ones, communication
    alone   ms in which only communication ran; and idle: ms in which nothing did, in how many gaps, and before the
            first kernel
    GiB     of one rank beside features, returned gradients and workspace
    off     distance of the gradients of the last of some steps back to back from those of one process

and the operations that kept the host longest. A tile kernel is written for as many programs as the device holds at
once; where communication holds some of it, those that find no room wait for the others to end. `--waves k` makes k
times as many, each with a k-th of the work. `--ctas k` adds rings whose transfers hold k multiprocessors at most, and
`--first` one whose transfers find room before other kernels do; both with the first size only. `--brief` looks
at the device with that size only, and not for those. On a CPU (Gloo, `--sizes 512`) there is none to look at.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from contrastile import ClipLoss

WORKSPACE = 2**31
# steps that count, unless they take longer than these seconds
ROUNDS, SECONDS = 8, 1.5
# steps back to back before gradients are looked at
BACK_TO_BACK = 3
HOST_OPERATIONS = 8
STEP = "one step"
# kinds of kernels, by what their names contain
TILES = ("totals", "maxima", "gradient")
PRODUCTS = ("gemm", "nvjet", "cutlass", "splitk")
# the kernels' shapes as they are
SHAPES: dict[int, Any] = {}


@dataclass(frozen=True)
class Place:
    """Where this rank computes, and with whom."""

    device: torch.device
    rank: int
    ranks: int
    # a group of this rank only
    alone: Any

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: float) -> float:
        """The largest of the ranks' numbers, which all of them wait for."""
        number = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return float(number)


def sides(b: int, d: int, place: Place) -> list[Tensor]:
    """The same features on all ranks."""
    generator = torch.Generator(place.device).manual_seed(7)
    drawn = (torch.randn(b, d, device=place.device, generator=generator) for _ in range(2))
    dtype = torch.bfloat16 if place.device.type == "cuda" else torch.float32
    return [F.normalize(x, dim=-1).to(dtype).requires_grad_() for x in drawn]


@dataclass(frozen=True)
class Times:
    """Seconds of a step on the slowest rank: by itself, in a row of them, and until its call returns."""

    step: float
    running: float
    host: float


def timed(step: Callable[[], object], place: Place) -> Times:
    # compiles kernels, and connects
    step()
    place.slowest(0.0)
    begin = time.perf_counter()
    step()
    place.wait()
    once = place.slowest(time.perf_counter() - begin)
    rounds = max(2, min(ROUNDS, int(SECONDS / once)))
    whole, host = [], []
    for _ in range(rounds):
        place.slowest(0.0)
        place.wait()
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
        place.wait()
        whole.append(place.slowest(time.perf_counter() - begin))
    # what is sent ahead of the device needs memory of its own, which the first row finds
    for _ in range(2):
        begin = time.perf_counter()
        for _ in range(rounds):
            step()
        place.wait()
        running = place.slowest(time.perf_counter() - begin) / rounds
    return Times(statistics.median(whole), running, statistics.median(host))


def sides_of(step: Callable[[], Any], times: int = 1) -> list[Tensor]:
    """The gradients of both sides in the last of so many steps back to back."""
    for _ in range(times):
        found = step()
    return list(found[:2])


def off(found: list[Tensor], true: list[Tensor], place: Place) -> float:
    """How far the gradients are from one process's, on the rank where they are farthest."""
    far = [float((x.float() - t.float()).norm() / t.float().norm()) for x, t in zip(found, true, strict=True)]
    return place.slowest(max(far))


def peak(step: Callable[[], object], place: Place, gradients: int) -> float:
    """GiB beside features, gradients and workspace; 0 on a CPU."""
    if place.device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    place.wait()
    return (torch.cuda.max_memory_allocated() - before - gradients - WORKSPACE) / 2**30


def kind(name: str) -> str:
    if "nccl" in name.lower():
        return "communication"
    if any(word in name for word in TILES):
        return "tiles"
    return "products" if any(word in name.lower() for word in PRODUCTS) else "small"


def covered(spans: list[tuple[float, float]]) -> tuple[float, int]:
    """The length of the union of spans, and the number of gaps in it."""
    total, gaps, end = 0.0, -1, float("-inf")
    for begin, stop in sorted(spans):
        gaps += begin > end
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total, max(gaps, 0)


def looked_at(step: Callable[[], object], place: Place) -> list[str]:
    """What a profiler on the first rank sees of one step: lines about the device, then about the host."""
    activities = [ProfilerActivity.CPU]
    if place.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) if place.rank == 0 else nullcontext() as seen:
        place.slowest(0.0)
        place.wait()
        with record_function(STEP):
            step()
        place.wait()
    place.slowest(0.0)
    if seen is None:
        return []
    begin = min(event.time_range.start for event in seen.events() if event.name == STEP)
    kernels = [
        event
        for event in seen.events()
        if event.device_type == DeviceType.CUDA and event.time_range.start > begin and not event.is_user_annotation
    ]
    costs = sorted(seen.key_averages(), key=lambda each: -each.self_cpu_time_total)
    named = [f"{each.key} {each.self_cpu_time_total / 1e3:.2f} ({each.count})" for each in costs[:HOST_OPERATIONS]]
    return [*([_device(kernels, begin)] if kernels else []), f"    host, ms (calls): {', '.join(named)}"]


def _device(kernels: list[Any], begin: float) -> str:
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    kinds = [kind(event.name) for event in kernels]
    busy, gaps = covered(spans)
    working, _ = covered([at for at, of in zip(spans, kinds, strict=True) if of != "communication"])
    first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
    each = {of: sum(stop - start for (start, stop), at in zip(spans, kinds, strict=True) if at == of) for of in kinds}
    parts = ", ".join(f"{of} {each[of] / 1e3:.2f} ({kinds.count(of)})" for of in sorted(each))
    idle = f"alone {(busy - working) / 1e3:.2f}, idle {(last - first - busy) / 1e3:.2f} in {gaps} gaps"
    idle += f", before the first {(first - begin) / 1e3:.2f}"
    return f"    device, ms (kernels): {parts}; {idle}"


# a way's name, its waves, its step, and what the step differentiates
Way = tuple[str, int, Callable[[], Any], list[Tensor]]


def ways(place: Place, b: int, d: int, waves: list[int], others: dict[str, Any]) -> tuple[Way, list[Way]]:
    """One process's step, and the ranks' together: through gather and ring, or rings of other groups."""
    whole = sides(b, d, place)
    mine = [x.detach().tensor_split(place.ranks)[place.rank].clone().requires_grad_() for x in whole]
    scale = torch.tensor(100.0, device=place.device, requires_grad=True)

    def way(name: str, k: int, exchange: str, group: Any, leaves: list[Tensor]) -> Way:
        loss = ClipLoss(exchange=exchange, workspace=WORKSPACE, group=group)
        return name, k, lambda: torch.autograd.grad(loss(*leaves, scale), [*leaves, scale]), leaves

    one = way("one process", 1, "single", place.alone, whole)
    if others:
        return one, [way(name, 1, "ring", group, mine) for name, group in others.items()]
    names = {(name, k): f"{name}{f', {k} waves' if k > 1 else ''}" for name in ("gather", "ring") for k in waves}
    return one, [way(called, k, name, None, mine) for (name, k), called in names.items()]


def report(
    place: Place,
    sizes: list[int],
    d: int,
    waves: list[int],
    say: Callable[[str], None],
    others: Callable[[], dict[str, Any]] | None = None,
    *,
    brief: bool = False,
) -> None:
    """All of it, for every size; then rings of other groups, made then, with the first one.

    brief: devices are looked at with the first size only, and not for those.
    """
    ones: dict[int, Times] = {}
    plan: list[tuple[int, Callable[[], dict[str, Any]]]] = [(b, dict) for b in sizes]
    for b, make in plan + ([(sizes[0], others)] if others else []):
        groups = make()
        one, together = ways(place, b, d, waves, groups)
        # what a wrapper's mean makes of the gradients of all ranks is that of one process
        true = [x.tensor_split(place.ranks)[place.rank] * place.ranks for x in sides_of(one[2])]
        for name, k, step, leaves in together if groups else [one, *together]:
            if place.device.type == "cuda":
                with_waves(k)
            times = timed(step, place)
            ones.setdefault(b, times)
            ranks = 1 if name == one[0] else place.ranks
            gib = peak(step, place, sum(x.nbytes for x in leaves))
            far = 0.0 if ranks == 1 else off(sides_of(step, BACK_TO_BACK), true, place)
            seen = [] if brief and (b != sizes[0] or groups) else looked_at(step, place)
            say(
                f"{b:>7} x {d}  {name:16} {times.step * 1e3:9.2f} ms, cost {ranks * times.step / ones[b].step:.3f}, "
                f"running {times.running * 1e3:9.2f} ms, cost {ranks * times.running / ones[b].running:.3f}, "
                f"host {times.host * 1e3:7.2f} ms, {gib:.2f} GiB, off {far:.0e}"
            )
            for line in seen:
                say(line)


def with_waves(waves: int) -> None:
    """Kernels of that many times the programs that the device holds."""
    from contrastile.tiles import triton_device

    if not SHAPES:
        SHAPES.update(triton_device.SHAPES)
    triton_device.SHAPES.update({chip: replace(each, programs=each.programs * waves) for chip, each in SHAPES.items()})


def limited(ctas: list[int], *, first: bool) -> dict[str, Any]:
    """Groups of all ranks: some whose transfers hold so many multiprocessors at most, one whose transfers go first."""
    groups = {}
    for k in [*ctas, *([0] if first else [])]:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=k == 0)
        if k:
            options.config.max_ctas = k
        groups[f"ring, {k} ctas" if k else "ring, first"] = dist.new_group(pg_options=options)
    return groups


def main() -> None:
    global SECONDS
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--sizes", type=int, nargs="+", default=[65536, 262144] if on_gpu else [512])
    parser.add_argument("--features", type=int, default=768 if on_gpu else 64)
    parser.add_argument("--waves", type=int, nargs="+", default=[1])
    parser.add_argument("--ctas", type=int, nargs="+", default=[])
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    asked = parser.parse_args()
    SECONDS = asked.seconds
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([each]) for each in range(ranks)][rank]

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    place = Place(device, rank, ranks, alone)
    others = partial(limited, asked.ctas, first=asked.first) if asked.ctas or asked.first else None
    report(place, asked.sizes, asked.features, asked.waves, say, others, brief=asked.brief)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
