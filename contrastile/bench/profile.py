"""The time of one step across ranks by its use: host, kinds of kernels, communication alone, and idle.

Stands on `loss.py`; called by `contrastile bench loss --profile` under torchrun, after the times. Looks at one step
that begins with an idle device, on the first rank, through torch's profiler.
"""

from contextlib import nullcontext

from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from contrastile.bench.gate import problem
from contrastile.bench.harness import Machine, Step
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
# name, and begin and end in microseconds
Kernel = tuple[str, float, float]


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
        for line in _step_lines(bench.machine, step):
            bench.report.say(f"    {line}")


def _step_lines(machine: Machine, step: Step) -> list[str]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.device.type == "cuda" else [])]
    first = machine.world.rank == 0
    with torch_profile(activities=activities, acc_events=True) if first else nullcontext() as profiled:
        machine.world.slowest(0.0)
        machine.wait()
        with record_function(STEP):
            step()
        machine.wait()
    machine.world.slowest(0.0)
    if profiled is None:
        return []
    events = profiled.events()
    (call,) = (event.time_range for event in events if event.name == STEP)
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and event.time_range.start > call.start and not event.is_user_annotation
    ]
    costs = sorted(profiled.key_averages(), key=lambda cost: -cost.self_cpu_time_total)
    named = [f"{cost.key} {cost.self_cpu_time_total / 1e3:.2f} ({cost.count})" for cost in costs[:HOST_OPERATIONS]]
    host = f"host, ms until the call returns: {(call.end - call.start) / 1e3:.2f}; operations (calls): "
    return [*([device_line(kernels, call.start)] if kernels else []), host + ", ".join(named)]


def device_line(kernels: list[Kernel], begin: float) -> str:
    """Return the device's milliseconds by kind of kernel."""
    kinds: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        names = (kind for kind, parts in KINDS.items() if any(part in kernel[0].lower() for part in parts))
        kinds.setdefault(next(names, "small"), []).append(kernel)
    totals = [f"{kind} {sum(e - s for _, s, e in x) / 1e3:.2f} ({len(x)})" for kind, x in sorted(kinds.items())]
    busy, gaps = covered(kernels)
    working, _ = covered([kernel for kind, group in kinds.items() if kind != "communication" for kernel in group])
    first, last = min(start for _, start, _ in kernels), max(end for *_, end in kernels)
    idle = f"alone {(busy - working) / 1e3:.2f}, idle {(last - first - busy) / 1e3:.2f} in {gaps} gaps"
    return f"device, ms (kernels): {', '.join(totals)}; {idle}, before the first {(first - begin) / 1e3:.2f}"


def covered(kernels: list[Kernel]) -> tuple[float, int]:
    """Return the microseconds in which a kernel runs, and the number of gaps between them."""
    total, gaps, end = 0.0, -1, float("-inf")
    for begin, stop in sorted(times for _, *times in kernels):
        gaps += begin > end
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total, max(gaps, 0)
