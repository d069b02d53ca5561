"""The time of one step across ranks by its use: host, kinds of kernels, communication alone, and idle.

Stands on `loss.py`; called by `contrastile bench loss --profile` under torchrun, after the times. Looks at one step
that begins with an idle device, on the first rank, through torch's profiler.
"""

from __future__ import annotations

from contextlib import nullcontext

from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from contrastile.bench.gate import problem
from contrastile.bench.harness import Step
from contrastile.bench.loss import LossBench, step_of
from contrastile.bench.peers import Case

STEP = "one step"
HOST_OPERATIONS = 8
# kinds of kernels by parts of their names, the first that fits; all others are small
KINDS = {
    "communication": ("nccl",),
    "tiles": ("totals", "maxima", "gradient"),
    "products": ("gemm", "nvjet", "cutlass", "splitk"),
}


def profile(bench: LossBench, case: Case) -> None:
    """Say where a step's time goes, for one process with the whole batch and for every exchange."""
    leaves = problem(case, bench.machine.device)
    leaves_of = {bench.machine.world.size: bench.shard(leaves), 1: leaves}
    for one in bench.entries(case, peers=False):
        if one.declines(case, bench.machine) is not None:
            continue
        step = step_of(case, one, leaves_of[one.world])
        # compiles kernels, connects
        step()
        bench.report.say(f"{one.label}, {case}")
        for line in _step_lines(bench, step):
            bench.report.say(f"    {line}")


def _step_lines(bench: LossBench, step: Step) -> list[str]:
    machine, world = bench.machine, bench.machine.world
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.device.type == "cuda" else [])]
    with torch_profile(activities=activities, acc_events=True) if world.rank == 0 else nullcontext() as seen:
        world.slowest(0.0)
        machine.wait()
        with record_function(STEP):
            step()
        machine.wait()
    world.slowest(0.0)
    if seen is None:
        return []
    (call,) = (event.time_range for event in seen.events() if event.name == STEP)
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type.name == "CUDA" and event.time_range.start > call.start and not event.is_user_annotation
    ]
    costs = sorted(seen.key_averages(), key=lambda each: -each.self_cpu_time_total)
    named = [f"{each.key} {each.self_cpu_time_total / 1e3:.2f} ({each.count})" for each in costs[:HOST_OPERATIONS]]
    host = f"host, ms until the call returns: {(call.end - call.start) / 1e3:.2f}; operations (calls): "
    return [*([device_line(kernels, call.start)] if kernels else []), host + ", ".join(named)]


def device_line(kernels: list[tuple[str, float, float]], begin: float) -> str:
    """Return the device's milliseconds by kind of kernel; kernels are (name, start, end) in microseconds."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for name, start, end in kernels:
        spans.setdefault(kind_of(name), []).append((start, end))
    all_spans = [span for several in spans.values() for span in several]
    busy, gaps = covered(all_spans)
    working, _ = covered([span for kind, several in spans.items() if kind != "communication" for span in several])
    first, last = min(start for start, _ in all_spans), max(end for _, end in all_spans)
    kinds = [f"{kind} {sum(e - s for s, e in spans[kind]) / 1e3:.2f} ({len(spans[kind])})" for kind in sorted(spans)]
    idle = f"alone {(busy - working) / 1e3:.2f}, idle {(last - first - busy) / 1e3:.2f} in {gaps} gaps"
    return f"device, ms (kernels): {', '.join(kinds)}; {idle}, before the first {(first - begin) / 1e3:.2f}"


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), "small")


def covered(spans: list[tuple[float, float]]) -> tuple[float, int]:
    """Return the length of the union of spans, and the number of gaps in it."""
    total, gaps, end = 0.0, -1, float("-inf")
    for begin, stop in sorted(spans):
        gaps += begin > end
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total, max(gaps, 0)
