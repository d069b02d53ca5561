"""float32 at matmul precision "highest": no gradient is twice as far from float64 as the plain formula's.

On features whose gradients nearly cancel, with the truncating sums of a Hopper chip's tensor cores emulated. A GPU
computes the same with `make test-gpu`; `python tests/float32_table.py` prints every kind, loss and scale.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")

from float32_table import DEVICE, errors, ratio
from matrix_units import emulated

COMPILED = DEVICE == "cuda"
pytestmark = [
    pytest.mark.skipif(COMPILED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    *([pytest.mark.gpu] if COMPILED else []),
    # numpy's casts and exponentials warn where a float32 unit returns infinity or 0
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CASES = [
    ("gathered", "clip", 10.0),
    ("collapsed", "siglip", 10.0),
    ("duplicated", "info_nce_positives", 1000.0),
    ("duplicated", "clip_ids_weights_smoothing", 1000.0),
]


@pytest.mark.parametrize(("kind", "name", "scale"), CASES, ids=str)
def test_no_gradient_is_twice_as_far_from_float64_as_the_plain_formula(kind: str, name: str, scale: float) -> None:
    with nullcontext() if COMPILED else emulated(), torch.device(DEVICE):
        norms = errors(name, kind, scale, seeds=2 if COMPILED else 1)
    ratios = {key: ratio(key, *each) for key, each in norms.items()}
    assert max(ratios.values()) <= 2, ratios
