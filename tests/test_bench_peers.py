"""The peers: called as they document it, left out by name where they cannot run."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from contrastile.bench import peers
from contrastile.bench.gate import problem, step
from contrastile.bench.harness import Machine, not_installed
from contrastile.bench.peers import DENSE, PEERS, Case, Contestant
from contrastile.bench.subjects import SUBJECTS
from contrastile.losses.reference import dense_clip, dense_sigmoid

CPU = Machine(torch.device("cpu"))
CASE = Case("clip", 24, 8, "float32")


def peer(name, backend=None):
    return next(one for one in PEERS if one.name == name and backend in (None, one.backend))


def leaves(loss="clip", dtype="float32"):
    return problem(Case(loss, 24, 8, dtype), torch.device("cpu"))


def close(results, truths):
    for result, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-4, atol=1e-6)


def one_way(embeddings, classes, targets, **options):
    assert options in ({}, {"filter_eps": None})
    return F.cross_entropy(embeddings @ classes.T, targets)


@pytest.mark.parametrize(
    ("name", "backend", "module", "function", "stand_in"),
    [
        ("cut-cross-entropy", "default", "cut_cross_entropy", "linear_cross_entropy", one_way),
        ("cut-cross-entropy", "exact", "cut_cross_entropy", "linear_cross_entropy", one_way),
        ("inf-cl", None, "inf_cl", "cal_inf_loss", lambda q, k: one_way(q, k, torch.arange(len(q)))),
    ],
)
def test_a_one_way_peer_called_twice_is_the_symmetric_loss(name, backend, module, function, stand_in, monkeypatch):
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: stand_in}))
    close(step(peer(name, backend).losses["clip"], leaves()), step(dense_clip, leaves()))


def test_the_exact_way_leaves_no_gradient_out(monkeypatch):
    seen = []
    stand_in = SimpleNamespace(linear_cross_entropy=lambda e, c, t, **options: seen.append(options) or (e @ c.T).sum())
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", stand_in)
    for backend in ("default", "exact"):
        peer("cut-cross-entropy", backend).losses["infonce"](*leaves())
    assert seen == [{}, {"filter_eps": None}]


def test_the_sigmoid_peer_gets_the_logarithm_of_the_scale(monkeypatch):
    def stand_in(q, k, log_scale, bias):
        return dense_sigmoid(q, k, log_scale.exp(), bias)

    monkeypatch.setitem(sys.modules, "siglip_kernel", SimpleNamespace(fused_siglip_loss=stand_in))
    close(step(peer("siglip-kernel").losses["siglip"], leaves("siglip")), step(dense_sigmoid, leaves("siglip")))


def test_the_peer_of_the_balanced_sigmoid_is_its_formula(monkeypatch):
    def stand_in(q, k, log_scale, bias, labels, others, num_groups):
        assert int(max(labels.max(), others.max())) < num_groups
        positive, x = (labels[:, None] == others).to(q.dtype), log_scale.exp() * q @ k.T + bias
        weights = torch.where(positive > 0, (1 / positive.sum(1, keepdim=True) + 1 / positive.sum(0)) / 2, 1.0)
        return (weights * F.binary_cross_entropy_with_logits(x, positive, reduction="none")).mean()

    monkeypatch.setitem(sys.modules, "siglip_kernel", SimpleNamespace(fused_siglip_plus_loss=stand_in))
    loss = "siglip_balanced"
    close(step(peer("siglip-kernel").losses[loss], leaves(loss)), step(SUBJECTS[loss].reference, leaves(loss)))


@pytest.mark.parametrize("loss", ["clip", "infonce"])
@pytest.mark.skipif(not peers.OF_TORCH, reason="this torch has no linear_cross_entropy")
def test_torchs_own_is_called_right(loss):
    close(step(peer("linear_cross_entropy").losses[loss], leaves()), step(peers.FORMULAS[loss], leaves()))


def test_each_direction_with_a_product_of_its_own_is_the_same_loss():
    (two,) = (one for one in DENSE if one.backend == "two products")
    close(step(peers.TWO_PRODUCTS, leaves()), step(dense_clip, leaves()))
    assert two.losses["clip"](*leaves(dtype="bfloat16")).dtype == torch.float32
    assert DENSE.index(two) > 0, "what multiples are of stays the first"


def test_a_formula_is_compiled_once_for_each_shape(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda loss, dynamic: compiled.append(loss) or loss)
    (one,) = (one for one in DENSE if one.backend == "compiled")
    q, k, scale = leaves()
    for rows in (4, 4, 3):
        close(step(one.losses["clip"], (q[:rows], k[:rows], scale)), step(dense_clip, (q[:rows], k[:rows], scale)))
    assert compiled == [dense_clip] * 2


def test_logits_in_float32_are_the_same_loss():
    (wide,) = (one for one in DENSE if one.backend == "float32 logits")
    loss, (q, k, scale) = wide.losses["clip"], leaves(dtype="bfloat16")
    close(step(loss, leaves()), step(dense_clip, leaves()))
    assert loss(q, k, scale.float()).dtype == torch.float32


@pytest.mark.parametrize(("loss", "formula"), [("clip", dense_clip), ("siglip", dense_sigmoid)])
def test_open_clip_on_one_process(loss, formula, monkeypatch):
    # its package does not hand out both
    monkeypatch.setitem(sys.modules, "open_clip", SimpleNamespace(ClipLoss=lambda: dense_clip))
    monkeypatch.setitem(sys.modules, "open_clip.loss", SimpleNamespace(SigLipLoss=lambda: dense_sigmoid))
    value = peer("open_clip", "one process").losses[loss](*leaves(loss, "bfloat16"))
    assert torch.allclose(value.float(), formula(*(x.float() for x in leaves(loss, "bfloat16"))), rtol=2e-2)


def test_under_autocast_the_cross_entropy_is_in_float32():
    q, k, scale = leaves(dtype="bfloat16")
    assert DENSE[0].losses["clip"](q, k, scale).dtype == torch.float32
    assert DENSE[1].losses["clip"](q, k, scale).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"module": "surely_not_installed", "only_on": "cuda"}, "is not installed"),
        ({"only_on": "cuda"}, "needs a cuda device"),
        ({"most_rows": 23}, "left out above 23 rows, where it is slow"),
        ({"most_rows": 24}, None),
        ({"pair_bytes": 2**60}, "needs about 618,475,290,624 GiB at 24 rows, and "),
        ({}, None),
    ],
)
def test_who_cannot_run_says_why(settings, reason):
    declined = Contestant("somebody", "a way", {}, **settings).declines(CASE, CPU)
    assert declined == reason or declined.startswith(reason)


def test_a_package_that_is_not_there_is_not_installed():
    assert not_installed("surely_not_installed") == "is not installed"
    assert not_installed("torch") is None


def test_nobody_is_entered_for_a_loss_or_a_dtype_it_has_not():
    assert not peer("siglip-kernel").offers(CASE)
    assert not peer("cut-cross-entropy").offers(CASE)
    assert peer("inf-cl").offers(CASE)
