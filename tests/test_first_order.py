"""Second derivatives: an error with a sentence, whichever way a loss or `encode` computes; never a constant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from contrastile import ClipLoss, InfoNCELoss, NTXentLoss, SigLipLoss, SupConLoss, contrast, encode
from contrastile.losses import Sigmoid
from contrastile.scorers import Bilinear, MaxSim

Loss = Callable[[Tensor, Tensor], Tensor]
LABELS = torch.tensor([0, 0, 1, 1, 2])
REFUSED = "`contrast` must be differentiated only once; got a derivative of its gradient. Compute a penalty"
LOSSES: dict[str, Loss] = {
    "clip": lambda q, k: ClipLoss()(q, k, 5.0),
    "clip dense": lambda q, k: ClipLoss(backend="dense")(q, k, 5.0),
    "clip triton": lambda q, k: ClipLoss(backend="triton")(q, k, 5.0),
    "siglip": lambda q, k: SigLipLoss()(q, k, 5.0, -1.0),
    "siglip rows": lambda q, k: SigLipLoss(reduction="none")(q, k, 5.0, -1.0).mean(),
    "infonce": lambda q, k: InfoNCELoss()(q, k, 5.0),
    "supcon": lambda q, k: SupConLoss()(torch.stack([q, k], 1), LABELS, 5.0),
    "ntxent": lambda q, k: NTXentLoss()(q, k, 5.0),
    "scorer": lambda q, k: contrast(q, k, scorer=Bilinear(8, 8)),
    "scorer at once": lambda q, k: contrast(q, k, scorer=Bilinear(8, 8), loss=Sigmoid()),
    "compiled": torch.compile(lambda q, k: ClipLoss()(q, k, 5.0), backend="eager"),
}


def _rows() -> list[Tensor]:
    return [x.requires_grad_() for x in F.normalize(torch.randn(2, 5, 8), dim=-1)]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_penalty_on_a_gradient_is_refused(loss: Loss) -> None:
    q, k = _rows()
    value = loss(q, k)
    (once,) = torch.autograd.grad(value, q, retain_graph=True)
    (gradient,) = torch.autograd.grad(value, q, create_graph=True)
    assert torch.equal(gradient, once)
    penalised = value + 10 * gradient.square().sum()
    # of either side: the other's derivative of this gradient is no constant either
    for x in (q, k):
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.autograd.grad(penalised, x, retain_graph=True)


def test_products_with_the_hessian_are_refused() -> None:
    q, k = (x.detach() for x in _rows())
    for derivative in (lambda loss: hvp(loss, q, k), lambda loss: hessian(loss, q)):
        with pytest.raises(RuntimeError, match=REFUSED):
            derivative(lambda x: contrast(x, k, scale=5.0))


def test_features_in_host_memory_have_no_second_derivative_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own memory is taken for another device's."""
    monkeypatch.setattr("contrastile.engine.plan._plans", {})
    monkeypatch.setattr("contrastile.engine.plan.waits_on_host", lambda features, device: True)
    q, k = _rows()
    (gradient,) = torch.autograd.grad(contrast(q, k, scale=5.0), q, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        gradient.sum().backward()


@pytest.mark.parametrize("behind", [True, False], ids=["loss", "formula"])
def test_encode_has_no_second_derivative(behind: bool) -> None:
    tower, x = nn.Linear(4, 8), torch.randn(5, 4)
    features = encode(tower, x, sub_batch=2)
    value = contrast(features, torch.randn(5, 8), scale=5.0) if behind else features.square().sum()
    (gradient,) = torch.autograd.grad(value, tower.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="`encode` must be differentiated only once; got a derivative of its"):
        torch.autograd.grad(value + gradient.square().sum(), tower.bias)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_graph_of_the_gradient_that_nobody_differentiates_is_fine() -> None:
    """As an optimizer that asks for it has it, also behind a checkpoint."""
    q, k = _rows()
    value = checkpoint(lambda q, k: contrast(2 * q, k, scale=5.0), q, k, use_reentrant=False)
    value.backward(create_graph=True)
    graphless = [x.grad.detach().clone() for x in (q, k)]
    nn.utils.clip_grad_norm_([q, k], 1e-3)
    for x in (q, k):
        x.grad.zero_()
        x.grad = None
    contrast(2 * q, k, scale=5.0).backward()
    assert all(torch.equal(x.grad, before) for x, before in zip((q, k), graphless, strict=True))


# torch loads its own decompositions
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_transforms_and_tangents_are_refused() -> None:
    tower, x = nn.Linear(4, 8), torch.randn(2, 5, 4)
    sentence = (
        "`encode` must run outside of torch.func and of forward-mode differentiation; got a call inside. Call "
        "backward, or torch.autograd.grad."
    )
    assert refusal(lambda: vmap(lambda rows: encode(tower, rows, sub_batch=2))(x)) == sentence
    with forward_ad.dual_level():
        rows = forward_ad.make_dual(x[0], x[1])
        assert refusal(encode, tower, rows, sub_batch=2) == sentence
    assert refusal(lambda: grad(lambda q: contrast(q, x[1], scale=5.0))(x[0])) == (
        "`contrast` must be called outside of torch.func's transforms; got a call inside. Call backward, or "
        "torch.autograd.grad."
    )
    # scores alone are like any other function
    tokens = torch.randn(2, 3, 4, 8)
    own, plain = (
        grad(lambda q, scores=scores: scores(q, tokens[1]).sum())(tokens[0])
        for scores in (MaxSim(), lambda q, k: (q[:, None, :, None] * k[:, None]).sum(-1).amax(-1).sum(-1))
    )
    torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("name", ["encode", "contrast"])
def test_many_gradients_at_once_are_refused(name: str) -> None:
    tower, x, (q, k) = nn.Linear(4, 8), torch.randn(5, 4), _rows()
    out = encode(tower, x, sub_batch=2) if name == "encode" else contrast(q, k, scale=5.0, reduction="none")
    at, upstream = tower.weight if name == "encode" else q, torch.randn(3, *out.shape)
    sentence = (
        f"`{name}` must be differentiated outside of torch.func; got a backward inside, as of is_grads_batched=True. "
        "Call torch.autograd.grad for one gradient at a time."
    )
    assert refusal(torch.autograd.grad, out, at, upstream, retain_graph=True, is_grads_batched=True) == sentence
    assert refusal(vmap(lambda each: torch.autograd.grad(out, at, each, retain_graph=True)), upstream) == sentence
