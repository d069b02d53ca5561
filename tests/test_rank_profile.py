"""What a call across ranks costs the host, counted; and the benchmark that shows it in milliseconds."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RANKS, Pool
from torch.utils._python_dispatch import TorchDispatchMode

from contrastile import ClipLoss

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
# operations of a call beyond which it was changed for the worse: with two ranks, and for each further one
FIRST, EACH = 155, 36
LAUNCHES_EACH = 13


class Counted(TorchDispatchMode):
    """The operations that are dispatched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[function.name()] += 1
        return function(*args, **(kwargs or {}))


def _counts(rank: int, group: Any, exchange: str) -> tuple[Counter[str], int]:
    """Operations and launches of one call, forward and backward; kernels are counted instead of run."""
    from contrastile.tiles import triton_conclude, triton_launch, triton_operands, triton_products

    launches: list[None] = []
    places = [(module, "run") for module in (triton_conclude, triton_launch, triton_operands)]
    places.append((triton_products, "_add_product"))
    kept = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, lambda *_, **__: launches.append(None))
        loss = ClipLoss(exchange=exchange, group=group, backend="triton", workspace=2**30)
        q, k = (torch.full((128, 64), 0.125, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        scale = torch.tensor(10.0, requires_grad=True)
        # the first call looks at the rows' lengths
        loss(q, k, scale)
        launches.clear()
        with Counted() as counted:
            loss(q, k, scale).backward()
        return counted.seen, len(launches)
    finally:
        for (module, name), function in zip(places, kept, strict=True):
            setattr(module, name, function)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_a_hop_takes_few_operations_of_the_host(pool: Pool, exchange: str) -> None:
    pytest.importorskip("triton")
    found = {W: pool.run(_counts, W, exchange)[1] for W in (2, 4)}
    (two, first), (four, second) = found[2], found[4]
    assert two.total() <= FIRST
    assert four.total() - two.total() <= 2 * EACH
    assert second - first <= 2 * LAUNCHES_EACH
    # nothing is read from the device but what the ranks tell each other
    assert not [name for name in four if "_local_scalar_dense" in name or "nonzero" in name]


def _script(name: str = "rank_profile") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _reported(rank: int, group: Any, brief: bool) -> list[str]:
    script, lines = _script(), []
    script.SECONDS = 0.0
    alone = [dist.new_group([each]) for each in range(RANKS)][rank]
    place = script.Place(torch.device("cpu"), rank, RANKS, alone)
    script.report(place, [60, 64], 16, [1], lines.append, lambda: {"ring, another": group}, brief=brief)
    return lines


@pytest.mark.unpoisoned
def test_the_profile_runs_over_gloo(pool: Pool) -> None:
    lines = pool.run(_reported, RANKS, False)[0]
    ways = [line[14:30].strip() for line in lines[::2]]
    three = ["one process", "gather", "ring"]
    # other groups' rings come last, with the first size
    assert ways == [*three, *three, "ring, another"]
    assert all(float(line.split(" off ")[1]) < 1e-5 for line in lines[::2])
    assert all(float(line.split(" off ")[1]) > 0 for line in lines[::2] if "one process" not in line)
    assert all(line.count(" cost ") == 2 and " host " in line for line in lines[::2])
    assert all("_Contrast" in line for line in lines[1::2])
    # as the script that compares two copies reads them
    rows = [_script("ranks_compared").ROW.match(line) for line in lines[::2]]
    sizes = ["60"] * 3 + ["64"] * 3 + ["60"]
    assert [row and (row[1], row[2].strip()) for row in rows] == list(zip(sizes, ways, strict=True))


@pytest.mark.unpoisoned
def test_a_brief_profile_looks_at_three_ways(pool: Pool) -> None:
    lines = pool.run(_reported, RANKS, True)[0]
    assert [line.split()[0] for line in lines] == ["60", "host,"] * 3 + ["64"] * 3 + ["60"]


def test_the_devices_time_is_told_apart() -> None:
    def kernel(name: str, begin: float, end: float) -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=begin * 1e3, end=end * 1e3))

    kernels = [
        kernel("ncclDevKernel_SendRecv", 1.0, 4.0),
        kernel("totals", 2.0, 3.0),
        kernel("nvjet_tst_128x256", 5.0, 7.0),
        kernel("vectorized_elementwise_kernel", 7.0, 7.5),
    ]
    assert _script()._device(kernels, 500.0) == (
        "    device, ms (kernels): communication 3.00 (1), products 2.00 (1), small 0.50 (1), tiles 1.00 (1); "
        "alone 2.00, idle 1.00 in 1 gaps, before the first 0.50"
    )
