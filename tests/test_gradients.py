"""The gradient convention: W ranks, whatever wraps their model, have the gradients of one process with all examples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from gradient_table import (
    BIASED,
    EXCHANGES,
    FURTHER,
    LOSSES,
    MICRO_BATCHES,
    PLAIN,
    WAYS,
    WRAPPERS,
    Row,
    every,
    measure,
    summary,
)
from ranks import Pool


@pytest.mark.parametrize(
    ("W", "wrapper", "exchanges", "ways", "losses"),
    [
        *((W, "plain", EXCHANGES, [(True, MICRO_BATCHES)], PLAIN) for W in (1, 2, 3, 4)),
        # the other losses with every exchange, behind `encode`: test_losses_further.py
        *((W, "plain", ["ring"], [(True, MICRO_BATCHES)], FURTHER) for W in (1, 2, 3, 4)),
        # a wrapper meets features, whatever loss and exchange made their gradients
        *((W, wrapper, ["gather"], [(True, MICRO_BATCHES)], PLAIN) for wrapper in WRAPPERS[1:] for W in (1, 3)),
        *((2, wrapper, ["gather"], WAYS, PLAIN) for wrapper in WRAPPERS),
    ],
)
def test_every_gradient_is_that_of_one_process(
    pool: Pool, W: int, wrapper: str, exchanges: Sequence[str], ways: Sequence[tuple[bool, int]], losses: Sequence[str]
) -> None:
    rows = list(measure(pool, [W], [wrapper], exchanges, ways, tuple(losses)))
    assert len(rows) == W * len(losses) * len(exchanges) * len(ways)
    for row in rows:
        assert set(row.parts) == {"towers", "scale"} | ({"bias"} if row.loss in BIASED else set())
        for ratio, cosine in row.parts.values():
            assert abs(ratio - 1) <= 1e-12, row
            assert abs(cosine - 1) <= 1e-12, row


def test_the_table_shows_the_worst() -> None:
    good = {"towers": (1.0, 1.0), "scale": (1.0, 1.0), "bias": (1.0, 1.0)}
    rows = [
        Row(loss, exchange, 2, w, False, False, good) for loss in LOSSES for exchange in EXCHANGES for w in WRAPPERS
    ]
    rows.append(Row("ClipLoss", "ring", 3, "DDP", True, False, {"towers": (1 / 3, 0.975), "scale": (3.0, 1.0)}))
    line = next(line for line in summary(rows).splitlines() if line.startswith("| ClipLoss | ring"))
    ok = "1.000, 1.000000"
    assert line == f"| ClipLoss | ring | {ok} | {ok} | 0.333, 0.975000 | 3.000, 1.000000 | {ok} | {ok} |"
    assert (
        every(rows)
        .splitlines()[-1]
        .endswith("| ring | 3 | DDP | True | False | 0.333, 0.975000 | 3.000, 1.000000 |  |")
    )
