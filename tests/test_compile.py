"""Under torch.compile a loss is one node of the graph: nothing breaks it, nothing is unrolled."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import PROBLEMS, distance
from ranks import Pool
from refusals import refusal
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from contrastile import ClipLoss, InfoNCELoss, NTXentLoss, SigLipLoss, contrast, encode
from contrastile._dispatch import TILES
from contrastile.bench.memory import one_rank_of
from contrastile.scorers import PairMLP
from contrastile.tiles.eager import Eager


@pytest.mark.parametrize(
    ("name", "reduction"),
    [*((name, "mean") for name in PROBLEMS), ("clip_ids_weights_smoothing", "none"), ("siglip_ids_weights", "none")],
)
def test_one_node_and_the_same_numbers(name: str, reduction: str) -> None:
    torch._dynamo.reset()
    problem = PROBLEMS[name](40, 55)
    tensors = problem.tensors(torch.float64)
    nodes: list[str] = []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nodes.extend(str(node.target) for node in graph.graph.nodes if "contrastile" in str(node.target))
        return graph

    truth, true_gradients = problem.by_tiles(tensors, reduction=reduction)
    step = torch.compile(
        lambda q, k, **named: contrast(q, k, **problem.tiled, reduction=reduction, **named),
        backend=look,
        fullgraph=True,
    )
    loss = problem._call(step, {}, tensors)
    seeds = torch.linspace(1.0, 1.5, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    gradients = torch.autograd.grad((loss * seeds).sum(), list(tensors.values()))
    assert nodes == ["contrastile.forward.default"]
    assert distance(loss.detach(), truth) <= 1e-12
    for key, gradient in zip(tensors, gradients, strict=True):
        assert distance(gradient, true_gradients[key]) <= 1e-12, key


def test_a_whole_training_step_with_another_batch_size() -> None:
    torch._dynamo.reset()
    tower, loss = nn.Linear(8, 16), ClipLoss()
    scale = torch.tensor(10.0, requires_grad=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return loss(F.normalize(tower(x), dim=-1), F.normalize(tower(y), dim=-1), scale)

    # ahead of time, with its own backward graph, as a real backend would
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (12, 30):
        x, y = torch.randn(2, batch, 8)
        truth = torch.autograd.grad(step(x, y), [tower.weight, scale])
        found = torch.autograd.grad(compiled(x, y), [tower.weight, scale])
        assert all(distance(a, b) <= 1e-6 for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_graph_serves_all_batch_sizes(reduction: str) -> None:
    torch._dynamo.reset()
    counter, loss = CompileCounterWithBackend("aot_eager"), InfoNCELoss(reduction=reduction)

    def step(x: Tensor, y: Tensor, negatives: Tensor) -> Tensor:
        return loss(x, y, 10.0, negatives=negatives).sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for batch in (12, 30, 31, 7):
        x, y, negatives = (torch.randn(n, 8, requires_grad=True) for n in (batch, batch, batch + 5))
        truth = torch.autograd.grad(step(x, y, negatives), [x, y, negatives])
        found = torch.autograd.grad(compiled(x, y, negatives), [x, y, negatives])
        assert all(distance(a, b) <= 1e-6 for a, b in zip(found, truth, strict=True))
    assert counter.frame_count == 1


def test_one_graph_serves_listed_positives_of_all_batch_sizes() -> None:
    torch._dynamo.reset()
    counter, loss = CompileCounterWithBackend("eager"), InfoNCELoss()
    compiled = torch.compile(
        lambda q, k, p: loss(q, k, 2.0, positives=p), backend=counter, fullgraph=True, dynamic=True
    )
    for batch in (6, 9, 5):
        q, k = torch.randn(batch, 4), torch.randn(2 * batch, 4)
        positives = torch.arange(batch) * 2
        assert distance(compiled(q, k, positives), loss(q, k, 2.0, positives=positives)) <= 1e-6
    assert counter.frame_count == 1


def test_one_graph_serves_all_scales_and_biases() -> None:
    """A schedule passes other numbers in each step."""
    torch._dynamo.reset()
    counter, loss = CompileCounterWithBackend("aot_eager"), SigLipLoss()
    q, k = (F.normalize(torch.randn(6, 4), dim=-1).requires_grad_() for _ in "qk")
    compiled = torch.compile(lambda *x: loss(*x), backend=counter, fullgraph=True, dynamic=True)
    for scale, bias in ((1.5, -1.0), (2.25, -2.0), (4.5, -3.5)):
        found, truth = (torch.autograd.grad(way(q, k, scale, bias), [q, k]) for way in (compiled, loss))
        assert all(distance(a, b) <= 1e-6 for a, b in zip(found, truth, strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("loss", [ClipLoss(), InfoNCELoss(), NTXentLoss()], ids=repr)
def test_a_call_outside_of_the_graph_compiles_nothing_anew(loss: nn.Module) -> None:
    """Such as one of a validation between two epochs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda q, k: loss(q, k, 2.0), backend=counter, fullgraph=True)
    q, k = (F.normalize(torch.randn(6, 4), dim=-1) for _ in "qk")
    compiled(q, k)
    loss(q, k, 2.0)
    compiled(q, k)
    assert counter.frame_count == 1


def test_a_workspace_breaks_no_graph() -> None:
    torch._dynamo.reset()
    q, k = torch.randn(2, 9, 4)
    compiled = torch.compile(lambda q, k: contrast(q, k, scale=1.0, workspace=2**20), backend="eager", fullgraph=True)
    assert compiled(q, k) == contrast(q, k, scale=1.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("backend", "early"), [("eager", 0), ("eager", 0b1101), ("triton", 0)])
def test_operations_are_registered_as_they_behave(backend: str, early: int) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    dtype = torch.float64 if backend == "eager" else torch.float32
    q, k = (x.to(dtype).requires_grad_() for x in torch.randn(2, 9, 4))
    arguments = (
        q,
        k,
        torch.tensor(2.0),
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        "Softmax symmetric=True label_smoothing=0.1",
        f"one {backend} mean mean",
        [0, 0, early, 9, 0],
    )
    torch.library.opcheck(torch.ops.contrastile.forward.default, arguments)


@pytest.mark.parametrize("wanted", [0b1101, 0b1100, 0b0101, 0b1001])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_gradients_that_come_with_the_loss_are_registered_as_they_behave(dtype: torch.dtype, wanted: int) -> None:
    q, k = (x.to(dtype) for x in torch.randn(2, 9, 4))
    settings = "Softmax symmetric=True", "one eager mean mean", [0, 0, wanted, 9, 0]
    tensors = q, k, torch.tensor(2.0), *[None] * 6
    value, *gradients = torch.ops.contrastile.forward(*tensors, None, *settings)
    several = [bool(wanted >> at & 1) for at in range(4)]
    arguments = value, *tensors, gradients, *settings, several
    for operation, given in (("forward", (*tensors, None, *settings)), ("backward", arguments)):
        operation = getattr(torch.ops.contrastile, operation).default
        torch.library.opcheck(operation, given, test_utils="test_faketensor")


def test_a_compiled_loss_inside_a_checkpoint_has_its_gradients() -> None:
    torch._dynamo.reset()
    q, k = (F.normalize(torch.randn(6, 4), dim=-1).requires_grad_() for _ in "qk")
    step = torch.compile(lambda q, k: ClipLoss()(q, k, 2.0), backend="eager")
    found = torch.autograd.grad(checkpoint(step, q, k, use_reentrant=False), [q, k])
    truth = torch.autograd.grad(ClipLoss()(q, k, 2.0), [q, k])
    assert all(distance(*pair) <= 1e-6 for pair in zip(found, truth, strict=True))


@pytest.mark.parametrize("name", ["Softmax", "Decoupled", "Sigmoid"])
@pytest.mark.parametrize(("backend", "early"), [("eager", 0), ("eager", 0b1111), ("triton", 0)])
def test_gradients_have_memory_of_their_own(backend: str, early: int, name: str) -> None:
    """Compiled code reads them from the start of their memory, and refuses one in the middle of something."""
    if backend == "triton":
        pytest.importorskip("triton")
    q, k = torch.randn(2, 9, 4)
    settings = f"{name} symmetric={name != 'Sigmoid'}", f"one {backend} mean mean", [0, 0, early, 9, 0]
    tensors = q, k, torch.tensor(2.0), torch.tensor(-1.0), *[None] * 5
    _, *swept = torch.ops.contrastile.forward(*tensors, None, *settings)
    gradients = torch.ops.contrastile.backward(torch.tensor(1.0), *tensors, swept, *settings, [True] * 4)
    assert all(x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes for x in gradients)


def test_gradients_of_float16_have_room_before_the_factor_of_a_scaler() -> None:
    torch._dynamo.reset()
    q, k = (F.normalize(torch.randn(512, 8), dim=-1).half().requires_grad_() for _ in "qk")
    step = torch.compile(lambda q, k: contrast(q, k, scale=0.002), backend="aot_eager", fullgraph=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    found = torch.autograd.grad(2.0**16 * step(q, k), [q, k])
    truth = torch.autograd.grad(2.0**16 * contrast(*wide, scale=0.002), wide)
    # without the factor most of them would be multiples of the smallest number of float16, 6e-8
    assert truth[0].abs().max() < 2.0**16 * 4e-6
    assert all(distance(x.double(), y) <= 4e-4 for x, y in zip(found, truth, strict=True))


# torch loads its own decompositions
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_forward_mode_differentiation_of_a_graph_is_refused() -> None:
    """Its tangents would be 0."""
    torch._dynamo.reset()
    q, k = torch.randn(2, 6, 4)
    step = torch.compile(lambda q, k: torch.func.jvp(lambda q: contrast(q, k, scale=1.0), (q,), (q,)), backend="eager")
    with pytest.raises(ValueError, match="`contrast` must be called outside of"):
        step(q, k)


def _encoded(q: Tensor) -> Tensor:
    return encode(torch.sin, q, sub_batch=2)


def _with_own_negatives(q: Tensor) -> Tensor:
    loss: Tensor = InfoNCELoss()(q, q, 2.0, negatives=q[:, None])
    return loss


@pytest.mark.parametrize(("name", "call"), [("encode", _encoded), ("contrast", _with_own_negatives)])
# tracing is deprecated, and in use
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_breaks_a_graph_is_refused_by_export_and_trace(name: str, call: Any) -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            result: Tensor = call(q)
            return result

    with pytest.raises(ValueError, match=f"`{name}` must be called outside of torch.export"):
        torch.export.export(Model(), (torch.randn(6, 4),))
    # the sizes of sub-batches and tiles would be those of this call
    with pytest.raises(ValueError, match=f"`{name}` must be called outside of torch.jit.trace"):
        torch.jit.trace(Model(), (torch.randn(6, 4),))


def test_a_backward_that_torch_compiles_with_other_modules_is_left_alone() -> None:
    """The hook that notes wrappers is traced where torch makes a module while it traces."""
    torch._dynamo.reset()
    x = torch.randn(4, requires_grad=True)

    def step(x: Tensor) -> None:
        x.sin().sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(x)
    assert x.grad is not None
    assert distance(x.grad, x.detach().cos()) <= 1e-6


def test_positives_out_of_range_are_found_when_the_graph_runs() -> None:
    torch._dynamo.reset()
    from contrastile.losses.softmax import Softmax

    step = torch.compile(
        lambda q, k, p: contrast(q, k, scale=1.0, loss=Softmax(), positives=p), backend="eager", fullgraph=True
    )
    with pytest.raises(ValueError, match="`positives` must index this rank's 3 keys, or be -1; got 7"):
        step(torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 1, 7]))
    step = torch.compile(
        lambda q, k, p, n: contrast(q, k, scale=1.0, loss=Softmax(), positives=p, negatives=n),
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises(ValueError, match="`positives` must index this rank's 3 keys, or be -1; got 4"):
        step(torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 1, 4]), torch.randn(2, 4))


@pytest.mark.parametrize(("rows", "sentence"), [
    ((8, 5), "`text_features` must have as many rows as `image_features`; got 5 and 8."),
    ((0, 0), "`image_features` must have at least one row over all ranks; got 0."),
])  # fmt: skip
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_mistake_is_said_while_a_graph_is_traced(rows: tuple[int, int], sentence: str, fullgraph: bool) -> None:
    torch._dynamo.reset()
    sides = [torch.randn(n, 4) for n in rows]
    compiled = torch.compile(lambda a, b: ClipLoss()(a, b, 10.0), backend="eager", fullgraph=fullgraph)
    # with `fullgraph` torch has the sentence within its own error
    with pytest.raises(Exception if fullgraph else ValueError, match=re.escape(sentence)):
        compiled(*sides)


def test_the_way_of_computing_tiles_is_not_chosen_while_a_graph_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking a device, or Triton, breaks a graph; the operation asks when it runs."""
    torch._dynamo.reset()
    asked: list[bool] = []

    def eager() -> type[Eager]:
        asked.append(torch.compiler.is_compiling())
        return Eager

    monkeypatch.setitem(TILES, "eager", eager)
    q, k = torch.randn(2, 9, 4)
    compiled = torch.compile(lambda q, k: contrast(q, k, scale=1.0), backend="eager", fullgraph=True)
    assert compiled(q, k) == contrast(q, k, scale=1.0)
    assert asked
    assert not any(asked)


def _scored(module: nn.Module, call: Any, *, seed: int = 5) -> list[Tensor]:
    """The loss of 150 pairs in several tiles, and the gradients of q, k and the module's parameters."""
    torch.manual_seed(0)
    leaves = [x.requires_grad_() for x in torch.randn(2, 150, 8, dtype=torch.float64)]
    torch.manual_seed(seed)
    value = call(*leaves)
    return [value.detach(), *torch.autograd.grad(value, [*leaves, *module.parameters()])]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_compiled_scorer_stays_compiled(way: str, dropout: float) -> None:
    """Looking at it, and measuring it, must not make it run as written ever after."""
    torch._dynamo.reset()
    module = PairMLP(8, 8, 16, dropout).double()
    truth = _scored(module, lambda q, k: contrast(q, k, scorer=module, workspace=2**20))
    ran: list[bool] = []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        def run(*inputs: Any) -> Any:
            ran.append(torch.is_grad_enabled())
            return graph(*inputs)

        return run

    if way == "wrapped":
        compiled = torch.compile(module, backend=look)
    else:
        module.compile(backend=look)
        compiled = module
    counts = []
    for _ in range(2):
        found = _scored(module, lambda q, k: contrast(q, k, scorer=compiled, workspace=2**20))
        assert all(distance(x, true) <= 1e-12 for x, true in zip(found, truth, strict=True))
        counts.append(len(ran))
    assert counts[0] > 8
    assert counts[1] == 2 * counts[0]
    # code compiled without a graph may draw other random numbers
    assert all(ran)


# needed by torch.compile of a tensor that is not a leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_scorer_inside_a_compiled_step_breaks_the_graph_and_nothing_else() -> None:
    torch._dynamo.reset()
    module = PairMLP(8, 8, 16, dropout=0.3).double()

    def step(q: Tensor, k: Tensor) -> Tensor:
        return 3 * contrast(q.sin(), k.cos(), scorer=module, scale=2.0, workspace=2**20)

    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    found = _scored(module, torch.compile(step, backend=look))
    assert all(distance(x, true) <= 1e-12 for x, true in zip(found, _scored(module, step), strict=True))
    # before the loss, and behind it
    inside = [[node.name for node in graph.graph.nodes if node.op.startswith("call")] for graph in graphs]
    assert inside == [["sin", "cos"], ["mul"]]


@pytest.mark.filterwarnings("ignore:.*rows of length")
def test_a_graph_of_one_process_is_compiled_anew_where_ranks_have_met() -> None:
    """As after a first call before `init_process_group`: the graph has the loss of one process."""
    torch._dynamo.reset()
    q, k = torch.randn(2, 4, 8, dtype=torch.float64)
    loss = ClipLoss(exchange="gather")

    def step(q: Tensor, k: Tensor) -> Tensor:
        return loss(q, k, 2.0)

    compiled = torch.compile(step, backend="eager")
    for world in (1, 2, 1):
        with one_rank_of(world) if world > 1 else nullcontext():
            assert compiled(q, k).item() == pytest.approx(step(q, k).item(), rel=1e-12)


def test_a_graph_of_a_group_of_one_is_refused_in_a_larger_group() -> None:
    torch._dynamo.reset()
    q, k = torch.randn(2, 4, 8, dtype=torch.float64)
    compiled, alone = (torch.compile(ClipLoss(**how), backend="eager") for how in ({}, {"exchange": "single"}))
    with one_rank_of(1):
        value = compiled(q, k, 2.0)
        assert alone(q, k, 2.0) == value
    with one_rank_of(2):
        sentence = "`group` must be that for which the loss was compiled; got one of 2 ranks, after one of 1. "
        assert refusal(compiled, q, k, 2.0) == sentence + "Call torch.compiler.reset() after it is made."
        assert alone(q, k, 2.0) == value


def _in_a_graph(rank: int, group: Any, exchange: str) -> tuple[list[list[str]], float]:
    """Compile a step around a loss of all ranks; returns the graphs' properties and the error of its gradients."""
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in torch.randn(2, 4 + rank, 8, dtype=torch.float64)]
    loss = ClipLoss(exchange=exchange, group=group)

    def step(q: Tensor, k: Tensor) -> Tensor:
        return 3 * loss(q.sin(), k.cos(), 2.0)

    inside: list[list[str]] = []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        inside.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    # in here: a rank has the filters of the test that started it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute|.*rows of length")
        found, truth = (torch.autograd.grad(way(*leaves), leaves) for way in (torch.compile(step, backend=look), step))
    return inside, max(distance(a, b) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("exchange", ["replicate", "ring"])
def test_several_ranks_inside_a_compiled_step_break_the_graph_and_nothing_else(pool: Pool, exchange: str) -> None:
    for inside, far in pool.run(_in_a_graph, 2, exchange):
        assert [each for each in inside if each] == [["sin", "cos"], ["mul"]]
        assert far <= 1e-12
