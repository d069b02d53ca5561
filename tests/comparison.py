"""The comparison of results: it needs torch alone, so that the tests of every adapter can import it."""

from __future__ import annotations

from typing import Any

import torch


def same(result: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Assert that nested tensors differ from the expected ones by a share of `tolerance` at most."""
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance / 100)
