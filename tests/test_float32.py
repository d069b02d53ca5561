"""float32 at matmul precision "highest": no gradient is twice as far from float64 as the plain formula's.

On features whose gradients nearly cancel, with the truncating sums of a Hopper chip's tensor cores emulated. A GPU
computes the same with `make test-gpu`; `python tests/float32_table.py` prints every kind, loss and scale.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from float32_table import DEVICE, errors, ratio
from matrix_units import emulated
from problems import distance

from contrastile import contrast
from contrastile.losses import Softmax
from contrastile.tiles.triton import launch

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


def test_products_of_few_rows_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 100 queries and 640 keys, whose pieces are multiplied in one product for each of three orders."""
    products, add = [], launch._add_product
    monkeypatch.setattr(launch, "_add_product", lambda *given, **how: (products.append(given), add(*given, **how))[1])
    with torch.device(DEVICE):
        q, k = (F.normalize(torch.randn(n, 8), dim=-1).requires_grad_() for n in (100, 640))
    found = []
    for most in (launch.STACKED, 0):
        monkeypatch.setattr(launch, "STACKED", most)
        loss = contrast(q, k, scale=20.0, loss=Softmax(), backend="triton")
        found.append((torch.autograd.grad(loss, (q, k)), len(products)))
        products.clear()
    (joined, few), (apart, many) = found
    # those of the queries' gradient are six in both
    assert (few, many) == (9, 12)
    logits = 20.0 * q.double() @ k.double().T
    truth = torch.autograd.grad(F.cross_entropy(logits, torch.arange(100, device=q.device)), (q, k))
    for one, other, exact in zip(joined, apart, truth, strict=True):
        assert distance(one, exact) <= 2 * distance(other, exact)
