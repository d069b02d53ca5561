"""The host operations and kernel launches of one call across ranks, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from counted import Counted
from ranks import Pool

from contrastile import ClipLoss

# upper bounds on the operations of a call: with two ranks, and for each further one; on launches per further rank
FIRST, EACH = 145, 32
LAUNCHES_EACH = 14


def _counts(rank: int, group: Any, exchange: str) -> tuple[Counter[str], int]:
    """Operations and launches of one call, forward and backward; kernels are counted instead of run."""
    from contrastile.tiles.triton import launch

    launches: list[None] = []
    places = [(launch, "run"), (launch, "_add_product")]
    functions = [getattr(module, name) for module, name in places]
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
        return counted.ran, len(launches)
    finally:
        for (module, name), function in zip(places, functions, strict=True):
            setattr(module, name, function)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_a_hop_takes_few_host_operations_and_launches(pool: Pool, exchange: str) -> None:
    pytest.importorskip("triton")
    counts = {W: pool.run(_counts, W, exchange)[1] for W in (2, 4)}
    (two, first), (four, second) = counts[2], counts[4]
    assert two.total() <= FIRST
    assert four.total() - two.total() <= 2 * EACH
    assert second - first <= 2 * LAUNCHES_EACH
    # nothing is read from the device but what the ranks tell each other
    assert not [name for name in four if "_local_scalar_dense" in name or "nonzero" in name]
