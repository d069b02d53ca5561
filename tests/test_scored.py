"""A learned distance equals plain autograd over the whole matrix: value, and gradients of features, Ω, scale, bias."""

from __future__ import annotations

import gc
import math
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from refusals import refusal
from scored import KINDS, PROBLEMS, by_formula, by_tiles, gradients, leaves, numbers, scorer, sides
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from contrastile import contrast, encode
from contrastile.gradcache import memory
from contrastile.gradcache.memory import footprint
from contrastile.losses import Sigmoid, Softmax
from contrastile.scorers import Bilinear, MaxSim, PairMLP
from contrastile.tiles import fitting
from contrastile.tiles.scored import Scored

WORKSPACE = 2**20


def close(x: Tensor, truth: Tensor, size: float = 1.0) -> bool:
    """To 1e-12 of its size; what cancels to rounding noise, to 1e-14 of the size of what cancels."""
    return x.shape == truth.shape and float((x - truth).norm()) <= 1e-12 * float(truth.norm()) + 1e-14 * size


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    """Gradients of one call; those that cancel are sums of numbers as large as the others."""
    size = max([1.0, *(float(truth.norm()) for truth in other if truth is not None)])
    return all(
        (x is None) == (truth is None) and (x is None or close(x, truth, size))
        for x, truth in zip(one, other, strict=True)
    )


# rows of every scorer; their mean and sum, which know no scorer, of one
@pytest.mark.parametrize(
    ("kind", "reduction"), [*((kind, "none") for kind in KINDS), *(("bilinear", how) for how in ("mean", "sum"))]
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_loss_and_scorer_equals_plain_autograd(name: str, kind: str, reduction: str, tiles: list[int]) -> None:
    problem = PROBLEMS[name](43, 71)
    module, (rows, cols), named = scorer(kind, problem.same), sides(kind, problem), numbers(problem)
    groups = (leaves(rows, cols), module.parameters(), named.values())
    truth = by_formula(problem, module, rows, cols, named, reduction=reduction)
    loss = by_tiles(problem, module, rows, cols, named, reduction=reduction)
    assert loss.shape == truth.shape
    assert close(loss.detach(), truth.detach())
    wanted = [list(group) for group in groups]
    assert same(gradients(loss, *wanted), gradients(truth, *wanted))
    assert min(tiles) < problem.N


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles of 16: a small problem has several, and uneven ones; the sides that were in use."""
    used: list[int] = []

    def side(self: Scored) -> int:
        used.append(min(16, self.side))
        return used[-1]

    monkeypatch.setattr(Scored, "_side", side)
    return used


@pytest.mark.parametrize("backend", ["dense", "eager"])
def test_backends_and_the_size_of_tiles_change_nothing(backend: str) -> None:
    problem = PROBLEMS["clip_ids_weights_smoothing"](300, 300)
    module, (rows, cols), named = scorer("mlp", False), sides("mlp", problem), numbers(problem)
    groups = [leaves(rows, cols), list(module.parameters()), list(named.values())]
    one = by_tiles(problem, module, rows, cols, named, workspace=2**30)
    other = by_tiles(problem, module, rows, cols, named, workspace=WORKSPACE, backend=backend)
    assert close(other.detach(), one.detach())
    assert same(gradients(other, *groups), gradients(one, *groups))


def test_further_negatives_are_nested_as_keys_are() -> None:
    problem = PROBLEMS["info_nce"](9, 20)
    module, (rows, cols), named = scorer("projected", False), sides("projected", problem), numbers(problem)
    keys, negatives = (
        pytree.tree_map(lambda x, at=at: None if x is None else x[at], cols) for at in (slice(12), slice(12, None))
    )
    groups = [leaves(rows, cols), list(module.parameters()), list(named.values())]
    loss = contrast(rows, keys, negatives=negatives, scorer=module, loss=Softmax(), **named)
    truth = by_formula(problem, module, rows, cols, named)
    assert close(loss.detach(), truth.detach())
    assert same(gradients(loss, *groups), gradients(truth, *groups))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_negatives_may_have_another_number_of_tokens(masked: bool, normalize: bool) -> None:
    torch.manual_seed(0)
    q, k, more = (torch.randn(*shape, 4, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (3, 5), (6, 7)))
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    scorer = MaxSim(normalize=normalize)
    found = contrast(q, (k, mask) if masked else k, negatives=more, scorer=scorer, scale=2.0, loss=Softmax())
    scores = torch.cat([scorer(q, (k, mask) if masked else k), scorer(q, more)], dim=1)
    wanted = F.cross_entropy(2.0 * scores, torch.arange(3))
    torch.testing.assert_close(found, wanted)
    for a, b in zip(*(torch.autograd.grad(x, [q, k, more]) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_scale_is_1_unless_it_is_given() -> None:
    q = torch.randn(5, 4)
    module = Bilinear(4, 4)
    assert contrast(q, q, scorer=module).equal(contrast(q, q, scorer=module, scale=1.0))


@pytest.mark.parametrize("wanted", ["rows", "cols", "scorer", "scale", "nothing"])
def test_only_what_is_asked_for_gets_a_gradient(wanted: str) -> None:
    problem = PROBLEMS["clip"](12, 12)
    module, (rows, cols), named = scorer("projected", False), sides("projected", problem), numbers(problem)
    asked = {
        "rows": leaves(rows, None),
        "cols": leaves(cols, None),
        "scorer": [p for name, p in module.named_parameters() if "unused" not in name],
        "scale": [named["scale"]],
        "nothing": [],
    }[wanted]
    every = [*leaves(rows, cols), *module.parameters(), *named.values()]
    truth = gradients(by_formula(problem, module, rows, cols, named), asked) if asked else []
    for x in every:
        x.requires_grad_(any(x is one for one in asked))
    loss = by_tiles(problem, module, rows, cols, named)
    assert loss.requires_grad == bool(asked)
    assert same(gradients(loss, asked) if asked else [], truth)


@pytest.mark.parametrize("loss", [Softmax(symmetric=True), Sigmoid()], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_grad_mode_there_is_a_loss_and_nothing_more(kind: str, loss: Any) -> None:
    """As in a validation: what wants gradients otherwise gets none."""
    problem = PROBLEMS["clip"](9, 9)
    module, (rows, cols) = scorer(kind, False), sides(kind, problem)
    truth = contrast(rows, cols, scorer=module, loss=loss, bias=-1.0)
    assert truth.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = contrast(rows, cols, scorer=module, loss=loss, bias=-1.0)
        assert not found.requires_grad
        assert distance(found, truth.detach()) <= 1e-15
    # a cross-encoder on raw inputs, fresh: nothing was measured before
    module, raw = scorer("bilinear", True), torch.ones(4, 6, dtype=torch.float64)
    with torch.no_grad():
        assert contrast(raw, raw, scorer=module).item() == pytest.approx(math.log(4))


def test_a_parameter_that_no_pair_reaches_has_no_gradient() -> None:
    problem = PROBLEMS["clip"](12, 12)
    module, (rows, cols), named = scorer("projected", False), sides("projected", problem), numbers(problem)
    by_tiles(problem, module, rows, cols, named).backward()
    assert module.unused.weight.grad is None
    assert module.project.weight.grad is not None
    # nor where none of them is reached
    idle = Held(nn.Linear(2, 2), lambda _, rows, cols: rows @ cols.T)
    q = torch.randn(6, 4, requires_grad=True)
    contrast(q, q, scorer=idle).backward()
    assert idle.held.weight.grad is None


@pytest.mark.unpoisoned
@pytest.mark.parametrize("kind", ["bilinear", "mlp", "maxsim"])
def test_no_more_than_the_workspace_is_held(kind: str) -> None:
    """Beside features, gradients and statistics, all of them small here; the matrix alone would take 2 MiB."""
    problem = PROBLEMS["clip"](512, 512)
    module, (rows, cols), named = scorer(kind, False), sides(kind, problem), numbers(problem)
    of_batch = 2 * sum(x.nbytes for x in leaves(rows, cols)) + 512 * 2 * 40 * 8
    assert WORKSPACE + of_batch < 512 * 512 * 8

    def step() -> None:
        by_tiles(problem, module, rows, cols, named, workspace=WORKSPACE).backward()

    step()
    assert footprint(step) <= WORKSPACE + of_batch


def test_a_footprint_leaves_nothing_with_tensors_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters live on through thousands of them."""
    made, parameter = list[Any](), nn.Parameter(torch.ones(8))

    class Allocations(memory._Allocations):
        def __init__(self) -> None:
            super().__init__()
            made.append(ref(self))

    monkeypatch.setattr(memory, "_Allocations", Allocations)
    assert footprint(lambda: parameter * 2) == 32
    gc.collect()
    assert [each() for each in made] == [None]


def test_sides_of_few_kinds_of_inputs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts have thousands of pairs of lengths."""
    monkeypatch.setattr(fitting, "MOST_MEASURED", 3)
    for length in range(1, 10):
        contrast(torch.randn(2, length, 4), torch.randn(2, 3, 4), scorer=MaxSim())
        assert 1 <= len(fitting._measured[MaxSim]) <= 3


def test_each_hook_fires_once_with_the_whole_gradient(tiles: list[int]) -> None:
    problem = PROBLEMS["clip"](40, 40)
    module, (rows, cols), named = scorer("mlp", False), sides("mlp", problem), numbers(problem)
    seen: list[Tensor] = []
    module.output.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    by_tiles(problem, module, rows, cols, named).backward()
    assert len(tiles) > 1
    assert len(seen) == 1
    assert seen[0].equal(module.output.weight.grad)


def test_the_two_caches_are_linked(tiles: list[int]) -> None:
    """Towers behind `encode`, a learned distance before it: as if all had been computed at once."""
    towers = [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double() for _ in range(2)]
    module = scorer("bilinear", True)
    module.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    images, texts = (torch.randn(30, 5, dtype=torch.float64) for _ in range(2))
    parameters = [p for part in (*towers, module) for p in part.parameters()]
    features = [encode(tower, x, sub_batch=7) for tower, x in zip(towers, (images, texts), strict=True)]
    loss = contrast(*features, scorer=module, scale=3.0)
    problem = PROBLEMS["clip"](30, 30)
    truth = by_formula(problem, module, towers[0](images), towers[1](texts), {"scale": 3.0})
    assert close(loss.detach(), truth.detach())
    assert same(gradients(loss, parameters), gradients(truth, parameters))


class CrossEncoder(nn.Module):
    """Early interaction: reads both texts at once, f(s) = s, and there is no tower."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.read = nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 1))

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        both = (self.embed(rows).mean(1)[:, None], self.embed(columns).sum(1)[None])
        return self.read(torch.cat(torch.broadcast_tensors(*both), dim=-1)).squeeze(-1)


def test_early_interaction_is_a_scorer_of_raw_inputs(tiles: list[int]) -> None:
    module = CrossEncoder().double()
    queries, documents = torch.randint(11, (20, 4)), torch.randint(11, (33, 7))
    problem = PROBLEMS["info_nce"](20, 33)
    loss = contrast(queries, documents, scorer=module, loss=Softmax())
    truth = by_formula(problem, module, queries, documents, {"scale": 1.0})
    assert loss.dtype == torch.float64
    assert close(loss.detach(), truth.detach())
    assert same(gradients(loss, module.parameters()), gradients(truth, module.parameters()))


def _with_dropout(q: Tensor, k: Tensor, module: nn.Module) -> Tensor:
    torch.manual_seed(5)
    return contrast(q, k, scorer=module, scale=2.0)


def test_dropout_is_replayed(tiles: list[int]) -> None:
    """The gradient is that of the loss with the very same numbers dropped, as finite differences see it."""
    module = PairMLP(3, 3, hidden=4, dropout=0.4).double()
    q, k = (torch.randn(10, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def loss(q: Tensor, k: Tensor, *_: Tensor) -> Tensor:
        return _with_dropout(q, k, module)

    assert torch.autograd.gradcheck(loss, (q, k, *module.parameters()))
    assert len(tiles) > 1
    assert not _with_dropout(q, k, module.eval()).equal(_with_dropout(q, k, module.train()))


def test_dropout_draws_anew_in_each_call_and_leaves_random_numbers_alone_otherwise() -> None:
    q = torch.randn(18, 3)
    module = PairMLP(3, 3, hidden=4, dropout=0.4)
    torch.manual_seed(1)
    one, other = (contrast(q, q, scorer=module).detach() for _ in range(2))
    assert not one.equal(other)
    module.eval()
    before = torch.get_rng_state()
    contrast(q.requires_grad_(), q, scorer=module).backward()
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_parameters_are_summed_in_float32(parameters: torch.dtype) -> None:
    """1024 tiles; a bf16 sum would stop growing after some."""
    module = PairMLP(4, 4, hidden=8)
    exact = PairMLP(4, 4, hidden=8).double()
    module.to(torch.bfloat16)
    exact.load_state_dict(module.state_dict())
    module.to(parameters)
    q, k = (torch.randn(512, 4).bfloat16().to(parameters) for _ in range(2))
    contrast(q, k, scorer=module, loss=Softmax(), workspace=2**20).backward()
    contrast(q.double(), k.double(), scorer=exact, loss=Softmax()).backward()
    dense = PairMLP(4, 4, hidden=8).to(parameters)
    dense.load_state_dict(module.state_dict())
    torch.nn.functional.cross_entropy(dense(q, k), torch.arange(512)).backward()
    for x, plain, truth in zip(module.parameters(), dense.parameters(), exact.parameters(), strict=True):
        if truth is not exact.output.bias:
            assert x.grad.dtype == parameters
            # where the plain sum is right by luck, a few roundings of the 1024 float32 sums
            slack = 4 * torch.finfo(torch.float32).eps
            assert distance(x.grad, truth.grad) <= max(2 * distance(plain.grad, truth.grad), slack)


def test_autocast_reaches_the_scorer_in_both_passes() -> None:
    module = PairMLP(4, 4, hidden=8)
    seen: list[torch.dtype] = []
    module.output.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    q = torch.randn(6, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = contrast(q, q.detach(), scorer=module)
    loss.backward()
    assert loss.dtype == torch.float32
    assert set(seen) == {torch.bfloat16}
    assert len(seen) > 2


class Widened(Bilinear):
    """Scores that autocast makes in 16 bits, in float32."""

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        return super().forward(rows, columns).float()


@pytest.mark.parametrize("kind", [Bilinear, Widened])
def test_float16_gradients_are_scaled_before_they_pass_the_scorer(kind: type[Bilinear]) -> None:
    """A pair's gradient of 1e-7 is there with a GradScaler's factor, and gone without."""
    module, factor = kind(4, 4), 2.0**12
    q, k = torch.randn(16, 4), torch.randn(24, 4, requires_grad=True)

    def negatives(amp: bool) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=amp):
            loss = contrast(q, k, scorer=module, scale=1.0, bias=-13.0, loss=Sigmoid())
        (of_keys,) = torch.autograd.grad(loss * factor, k)
        return of_keys[16:] / factor

    assert distance(negatives(True), negatives(False)) < 2e-2


@pytest.mark.parametrize("change", ["normalize", "hook", "forward"])
def test_a_scorer_that_changes_after_a_call_changes_no_other(change: str) -> None:
    q, k = torch.randn(2, 4, 3, 2).double()
    first = MaxSim()
    before = contrast(q, k, scorer=first)
    if change == "normalize":
        first.normalize = True
    elif change == "hook":
        first.register_forward_hook(lambda *given: given[-1] * 2)
    else:
        first.forward = lambda rows, columns: 2 * MaxSim.forward(first, rows, columns)  # type: ignore[method-assign]
    assert contrast(q, k, scorer=first) != before
    assert contrast(q, k, scorer=MaxSim()) == before
    assert contrast(q, k, scorer=first) != before


def test_scores_that_are_not_numbers_make_a_loss_that_is_none() -> None:
    q = torch.randn(6, 4)
    q[2, 1] = torch.nan
    assert contrast(q, torch.randn(6, 4), scorer=Bilinear(4, 4)).isnan()


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_must_not_change_before_backward(frozen: bool) -> None:
    """Nor those that are frozen: the scores computed again would be others."""
    module = Bilinear(4, 4).requires_grad_(not frozen)
    loss = contrast(torch.randn(6, 4, requires_grad=True), torch.randn(6, 4), scorer=module)
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Whitened(nn.Module):
    """Dot products of features that are divided by running sizes, a buffer which something else updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("updates", torch.tensor(0))

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        return (rows / self.sizes) @ columns.T


def test_a_buffer_must_not_change_before_backward() -> None:
    """The scores computed again would be others; a count of updates changes none."""
    module, q, k = Whitened(), torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    first, second = (contrast(q, k, scorer=module) for _ in range(2))
    module.updates += 1
    first.backward()
    module.sizes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_a_score_of_minus_infinity_adds_nothing_to_the_gradient_of_the_scale() -> None:
    q, k, scale = torch.randn(4, 3), torch.randn(5, 3), torch.tensor(2.0, requires_grad=True)
    mask = torch.tensor([0.0, 0.0, 0.0, 0.0, -math.inf])
    masked = Odd(lambda rows, columns: rows @ columns[0].T + columns[1])
    found, true = (
        torch.autograd.grad(contrast(q, keys, scorer=scorer, loss=Softmax(), scale=scale), scale)[0]
        for keys, scorer in (((k, mask), masked), (k[:4], Bilinear(3, 3)))
    )
    torch.testing.assert_close(found, true)


def test_a_column_without_tokens_scores_0_and_padding_says_nothing() -> None:
    q, k = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    some, none = torch.tensor([[True, True, False]] * 2), torch.tensor([[True, False, True, False, False], [False] * 5])
    scores = MaxSim()((q, some), (k, none))
    naive = [max(float(q[i, at] @ k[0, m]) for m in (0, 2)) for i in range(2) for at in (0, 1)]
    expected = torch.tensor([[naive[0] + naive[1], 0.0], [naive[2] + naive[3], 0.0]])
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("loss", [Softmax(symmetric=True), Sigmoid()], ids=["softmax", "sigmoid"])
def test_both_passes_are_in_the_modes_of_the_call(tiles: list[int], loss: Any) -> None:
    """Whoever evaluates in between, or goes on training, changes nothing: not what is dropped, nor that it is."""
    module = PairMLP(3, 3, hidden=4, dropout=0.5).double()
    q = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)

    def gradient(training: bool, changed: bool) -> Tensor:
        module.train(training)
        torch.manual_seed(1)
        value = contrast(q, q.detach(), scorer=module, loss=loss, bias=-1.0)
        module.train(training != changed)
        (found,) = torch.autograd.grad(value, q)
        assert module.dropout.training == (training != changed)
        return found

    assert gradient(True, changed=True).equal(gradient(True, changed=False))
    assert gradient(False, changed=True).equal(gradient(False, changed=False))
    assert not gradient(False, changed=False).equal(gradient(True, changed=False))


def test_what_was_frozen_after_the_forward_gets_no_gradient(tiles: list[int]) -> None:
    """As in plain autograd; what was not, gets its own."""
    module = PairMLP(3, 3, hidden=4).double()
    q = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    loss, truth = (contrast(q, q.detach(), scorer=module) for _ in range(2))
    truth.backward()
    expected = [q.grad, *(p.grad for p in module.parameters())]
    for x in (q, *module.parameters()):
        x.grad = None
    module.rows.requires_grad_(False)
    loss.backward()
    assert module.rows.weight.grad is None
    kept = [(q, expected[0]), (module.columns.weight, expected[3]), (module.output.weight, expected[4])]
    assert all(x.grad.equal(true) for x, true in kept)
    loss = contrast(q, q.detach(), scorer=module.requires_grad_(True))
    module.requires_grad_(False)
    q.grad = None
    loss.backward()
    assert q.grad.equal(expected[0])


def test_weights_that_parametrizations_make_are_made_for_each_tile(tiles: list[int]) -> None:
    """`parametrize.cached()` would keep those of the first one, with a graph that is gone."""
    module = nn.utils.parametrizations.weight_norm(nn.Bilinear(3, 3, 1, bias=False).double())
    q, k = (torch.randn(20, 3, dtype=torch.float64) for _ in range(2))
    scorer = Held(module, lambda held, rows, cols: rows @ held.weight[0] @ cols.T)
    truth = gradients(contrast(q, k, scorer=scorer), module.parameters())
    with nn.utils.parametrize.cached():
        assert same(gradients(contrast(q, k, scorer=scorer), module.parameters()), truth)


@pytest.mark.parametrize("how", [{}, {"loss": Sigmoid(), "bias": -1.0}], ids=["softmax", "sigmoid"])
def test_an_embedding_with_sparse_gradients(tiles: list[int], how: dict[str, Any]) -> None:
    """A table of early interaction; its gradient is summed up densely."""
    rows, cols = torch.randint(11, (20, 4)), torch.randint(11, (20, 7))
    found = []
    for sparse in (True, False):
        torch.manual_seed(2)
        table = nn.Embedding(11, 6, sparse=sparse).double()
        scorer = Held(table, lambda held, rows, cols: held(rows).mean(1) @ held(cols).mean(1).T)
        contrast(rows, cols, scorer=scorer, **how).backward()
        found.append(table.weight.grad)
    assert close(*found)


def test_the_shape_of_every_tile_is_looked_at(tiles: list[int]) -> None:
    """A `squeeze` is right until a tile has one row, or one column, only."""
    module = nn.Linear(4, 1)
    scorer = Held(module, lambda held, rows, cols: held(rows[:, None] * cols).squeeze())
    sentence = r"`scorer` must return a tensor \[16, 1\] for 16 rows and 1 columns; got shape \[16\]. One score"
    assert contrast(_x(16), _x(16), scorer=scorer).isfinite()
    for loss in (Softmax(), Sigmoid()):
        with pytest.raises(ValueError, match=sentence):
            contrast(_x(17), _x(17), scorer=scorer, loss=loss)


def test_a_tokenizers_attention_mask_serves_as_it_is() -> None:
    q, k = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    asking, answering = torch.tensor([[1, 1, 0]] * 2), torch.tensor([[1, 0, 1, 0, 0], [0] * 5])
    numbers = contrast((q, asking), (k, answering), scorer=MaxSim())
    assert numbers == contrast((q, asking.bool()), (k, answering.bool()), scorer=MaxSim())
    assert numbers != contrast(q, k, scorer=MaxSim())


class Odd(nn.Module):
    """Returns what it is told to."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def forward(self, rows: Tensor, columns: Tensor) -> Any:
        return self.out(rows, columns)


class Held(nn.Module):
    """Returns what it is told to make of a module."""

    def __init__(self, held: nn.Module, out: Any) -> None:
        super().__init__()
        self.held, self.out = held, out

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.out(self.held, rows, columns)


class Made(Bilinear):
    """Its weight is made by the first call, and kept."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.made = self.weight.exp()

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        return rows @ self.made @ columns.T


stranger = torch.ones(2, 2, requires_grad=True)


class Counting(Bilinear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        self.count += 1
        return super().forward(rows, columns)


class Averaging(Bilinear):
    """Another tensor in the buffer's place, which counts no changes."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        self.mean = self.mean.lerp(rows.detach().mean(0), 0.1)
        return super().forward(rows - self.mean, columns)


def _x(n: int = 5) -> Tensor:
    return torch.ones(n, 4)


SENTENCES = {
    "`scorer` must be a module; got builtin_function_or_method. Derive it from torch.nn.Module.":
        lambda: contrast(_x(), _x(), scorer=torch.mm),
    "`scorer` must return a tensor [2, 3] for 2 rows and 3 columns; got shape [2]. One score for each pair.":
        lambda: contrast(_x(), _x(), scorer=Odd(lambda rows, _: rows.sum(1))),
    "`scorer` must return a tensor [1, 2] for 1 rows and 2 columns; got shape [2, 1]. One score for each pair.":
        lambda: contrast(_x(2), _x(2), scorer=Odd(lambda rows, cols: cols @ rows.T)),
    "`scorer` must have real parameters; got torch.complex64. Hold what torch.view_as_real makes of them.":
        lambda: contrast(_x(), _x(), scorer=nn.Linear(4, 4, dtype=torch.complex64)),
    "`q` must be real where it wants a gradient; got torch.complex64. Pass it by torch.view_as_real.":
        lambda: contrast(
            _x().to(torch.complex64).requires_grad_(), _x(), scorer=Odd(lambda rows, cols: rows.real @ cols.T),
        ),
    "`scorer` must compute in each call all that it differentiates; got a part of the graph that was made before. "
    "Compute that inside too, or pass it as a feature, a row for each example.":
        lambda: contrast(_x(), _x(), scorer=Made()).backward(),
    "`scorer` must return floating point; got torch.int64. Convert it with .float().":
        lambda: contrast(_x(), _x(), scorer=Odd(lambda rows, cols: (rows @ cols.T).long())),
    "`scorer` must own every parameter that it uses; got one of shape [2, 2] elsewhere. Register what holds them as a "
    "submodule, or pass the tensor with the features.":
        lambda: contrast(_x(), _x(), scorer=Odd(lambda rows, cols: rows @ cols.T + stranger.sum())),
    "`scorer` must treat examples one by one; got BatchNorm1d in training mode, whose statistics over a sub-batch are "
    "not those of the batch. Put it in eval mode, or take GroupNorm or LayerNorm.":
        lambda: contrast(_x(), _x(), scorer=Normed()),
    "`scorer` must treat pairs one by one; got Counting, which changes a buffer when it runs. Put it in eval mode.":
        lambda: contrast(_x(), _x(), scorer=Counting()),
    "`scorer` must treat pairs one by one; got Averaging, which changes a buffer when it runs. Put it in eval mode.":
        lambda: contrast(_x(), _x(), scorer=Averaging()),
    "`k` must be left as it is by the scorer; got one of shape [3, 4] that it writes over. Clone it there, or work "
    "out of place.": lambda: contrast(_x(), _x(), scorer=Odd(lambda rows, cols: rows @ cols.mul_(2).T)),
    "`q` must have rows of 5 features, as the scorer reads them; got shape [2, 4]. Project one side first.":
        lambda: contrast(_x(), _x(), scorer=Bilinear(5, 4)),
    "`k` must have rows of 6 features, as the scorer reads them; got shape [3, 4]. Project one side first.":
        lambda: contrast(_x(), _x(), scorer=PairMLP(4, 6, hidden=2)),
    "`q` must have the dtype of the scorer's weights; got torch.bfloat16 and torch.float32. Convert one of them first, "
    "or call under autocast.": lambda: contrast(_x().bfloat16(), _x().bfloat16(), scorer=PairMLP(4, 4, hidden=2)),
    "`q` must have one vector for each example; got shape [2, 2, 4]. MaxSim scores token vectors.":
        lambda: contrast(torch.ones(5, 2, 4), torch.ones(5, 2, 4), scorer=Bilinear(4, 4)),
    "`k` must have rows of 4 features, as the scorer reads them; got shape [5, 2, 3]. Project one side first.":
        lambda: contrast(torch.ones(5, 2, 4), torch.ones(5, 2, 3), scorer=MaxSim()),
    "`q` must be made of tensors whose first axis is the batch; got str. Keep the rest in `scorer`.":
        lambda: contrast({"tokens": _x(), "name": "query"}, _x(), scorer=Bilinear(4, 4)),
    "`k` must be made of tensors whose first axis is the batch; got a tensor without axes. Keep the rest in `scorer`.":
        lambda: contrast(_x(), torch.ones(()), scorer=Bilinear(4, 4)),
    "`k` must contain a tensor; got none. Pass what the scorer reads of each example.":
        lambda: contrast(_x(), [None], scorer=Bilinear(4, 4)),
    "`k` must have the same first axis, the batch; got [3, 5]. Check each tensor's shape.":
        lambda: contrast(_x(), (_x(), _x(3)), scorer=Bilinear(4, 4)),
    "`q` must be on one device; got cpu, meta. Move all tensors to it.":
        lambda: contrast((_x(), _x().to("meta")), _x(), scorer=Bilinear(4, 4)),
    "`k` must be on the device of `q`; got meta and cpu. Move one side first.":
        lambda: contrast(_x(), _x().to("meta"), scorer=Bilinear(4, 4)),
    "`negatives` must be nested and shaped as `k`; got [[2, 3]]. Pad both alike.":
        lambda: contrast(_x(), _x(), negatives=torch.ones(2, 3), scorer=Bilinear(4, 4), loss=Softmax()),
    "`negatives` must be nested and shaped as `k`; got [[2, 4]]. Nest both alike.":
        lambda: contrast(_x(), (_x(),), negatives=torch.ones(2, 4), scorer=Bilinear(4, 4), loss=Softmax()),
    "`negatives` must be shared by all queries with a scorer; got shapes [[5, 3, 2, 4]]. Flatten them to [N * H, "
    "...], negatives of every query, or leave `scorer` out.":
        lambda: contrast(
            *[torch.ones(5, 2, 4)] * 2, negatives=torch.ones(5, 3, 2, 4), scorer=MaxSim(normalize=True), loss=Softmax(),
        ),
    "`negative_ids` must go with `negatives` of three dimensions [queries, H, features]; got others. Continue "
    "`key_ids` over shared negatives.":
        lambda: contrast(
            _x(), _x(), negatives=_x(), negative_ids=torch.ones(5, 1), scorer=Bilinear(4, 4), loss=Softmax(),
        ),
    "`negatives` must have the dtypes of `k`, and lie beside it; got torch.float32 on cpu and torch.float64 on cpu. "
    "Convert one side first.":
        lambda: contrast(_x(), _x(), negatives=_x().double(), scorer=Bilinear(4, 4), loss=Softmax()),
    "`negatives` must have the dtypes of `k`, and lie beside it; got torch.float32 on cpu and torch.float32 on meta. "
    "Convert one side first.":
        lambda: contrast(_x(), _x(), negatives=_x().to("meta"), scorer=Bilinear(4, 4), loss=Softmax()),
    "`backend` must be auto, eager or dense with a scorer; got 'triton'. A scorer brings its own kernels.":
        lambda: contrast(_x(), _x(), scorer=Bilinear(4, 4), backend="triton"),
    "`scale` must be given for a dot product; got None. Pass logit_scale.exp(), say.": lambda: contrast(_x(), _x()),
    "`k` must have as many rows as `q`; got 3 and 5. Pass one row for each: row i of one belongs to row i of the "
    "other. Further keys go with loss=Softmax().": lambda: contrast(_x(), _x(3), scorer=Bilinear(4, 4)),
    "`normalize` must be True or False; got 8. Pass one of these, without quotes.": lambda: MaxSim(8),
    "`q` must be token vectors [B, L, D], alone or with a bool mask [B, L]; got shape [5, 4]. Check the encoder.":
        lambda: contrast(_x(), _x(), scorer=MaxSim()),
    "`k` must be token vectors [B, L, D], alone or with a bool mask [B, L]; got shape [5, 2, 4] and a mask [5, 2], "
    "torch.float32. Pass attention_mask.bool(), say.":
        lambda: contrast(torch.ones(5, 2, 4), (torch.ones(5, 2, 4), torch.ones(5, 2)), scorer=MaxSim()),
    "`q` must be floating point; got torch.int64. Convert it with .float().":
        lambda: contrast(torch.ones(5, 2, 4).long(), torch.randn(5, 2, 4), scorer=MaxSim()),
    "`k` must have the dtype of `q`; got torch.float64 and torch.float32. Convert one of them first, or "
    "call under autocast.":
        lambda: contrast(torch.randn(5, 2, 4), torch.randn(5, 2, 4).double(), scorer=MaxSim()),
    "`q` must be made of tensors with one shape for all rows; got a nested tensor. Pass Ragged(x.values(), "
    "x.offsets().diff()), or padding and a mask.":
        lambda: contrast(
            torch.nested.as_nested_tensor([torch.randn(n, 4) for n in (2, 3)], layout=torch.jagged),
            torch.randn(2, 5, 4), scorer=MaxSim(),
        ),
    "`q` must be token vectors [B, L, D], alone or with a bool mask [B, L]; got dict. Check the encoder.":
        lambda: contrast({"tokens": torch.ones(5, 2, 4), "mask": torch.ones(5, 2).bool()}, _x(), scorer=MaxSim()),
    "`q` must be token vectors [B, L, D], alone or with a bool mask [B, L]; got tuple. Check the encoder.":
        lambda: contrast((torch.ones(5, 2, 4), torch.ones(5, 2).bool(), _x()), _x(), scorer=MaxSim()),
    "`scorer` must be a module; got the class MaxSim. Make one: MaxSim(...).":
        lambda: contrast(_x(), _x(), scorer=MaxSim),
}  # fmt: skip


class Normed(Bilinear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        return super().forward(self.norm(rows), columns)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_error_has_its_sentence(sentence: str) -> None:
    assert refusal(SENTENCES[sentence]) == sentence


def test_an_error_of_a_trial_says_how_the_scorer_was_called() -> None:
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        contrast(_x(), _x(), scorer=nn.CosineSimilarity())
    note = "The scorer failed in a trial with 2 rows and 3 other columns, which must return scores [2, 3]."
    assert caught.value.__notes__ == [note]
