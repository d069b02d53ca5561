"""The cost of an encoder: its operations are run on tensors without values, whose bytes and arithmetic are counted.

Lowest file of the planner. The numbers are those of a real run: the same operations in the same order, on tensors of
the same shapes. Weights are neither made nor read.

Compiled layers cost what the graphs do that torch.compile would make of them. AOTAutograd traces a layer forward and
backward, without a compiler, and chooses the tensors that the backward reads. Operations that are no products are
fused: they move the bytes of products and of the graph's own inputs and outputs, and their results in between none.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from contrastile._errors import logger
from contrastile._torch import DispatchMode, partitioned, pytree, replace_calls, uncompile, without_values
from contrastile.gradcache.introspect import FrozenReads
from contrastile.gradcache.memory import as_written, footprint, graph_bytes

# results that take no kernel
FREE = {f"aten::{name}" for name in ("detach", "alias", "empty", "empty_like", "_unsafe_view", "lift_fresh")}
# operations of attention of L queries and M keys of size d: two products forward, five backward
ATTENTION, ATTENTION_BACKWARD = 4, 10
# two thirds of the calls on tensors without values ask for their device; not passed on, they take a quarter less time
DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class Work:
    """Arithmetic of a call.

    products, attention: operations of matrix products, and of those inside attention. moved: bytes that all other
    kernels read and write. kernels: their number, which the host launches.
    """

    products: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def times(self, factor: float) -> Self:
        """The work of `factor` such calls."""
        return type(self)(*(factor * number for number in vars(self).values()))


@dataclass(frozen=True)
class TowerCost:
    """Bytes and work of an encoder for a sub-batch of `sub_batch` examples.

    weights, trained: bytes of all parameters and buffers, and of the trained parameters. graph: bytes that a kept graph
    adds. forward: peak of a pass without a graph. replay: peak of a pass forward and backward, new gradients included.
    features: bytes of the features of one example; dimensions: their number. inputs: bytes of an example. reads_frozen:
    the encoder reads a parameter that is not trained.
    """

    name: str
    sub_batch: int
    weights: int
    trained: int
    graph: int
    forward: int
    replay: int
    features: int
    dimensions: int
    inputs: int
    forward_work: Work
    replay_work: Work
    reads_frozen: bool = False

    def of(self, size: int) -> Self:
        """The cost of sub-batches of `size`: all bytes but those of the weights' 16-bit copies grow with them."""
        if size == self.sub_batch:
            return self
        share, copies = size / self.sub_batch, min(self.trained // 2, max(0, self.replay - self.graph))
        forward, replay = (
            replace(work.times(share), kernels=work.kernels) for work in (self.forward_work, self.replay_work)
        )
        return replace(
            self, sub_batch=size, graph=int(share * self.graph), forward=int(share * self.forward),
            replay=int(share * (self.replay - copies)) + copies, forward_work=forward, replay_work=replay,
        )  # fmt: skip


class Counted(DispatchMode):
    """Add up the work of every operation."""

    # the counter that runs; None where an operation is counted otherwise
    running: ClassVar["Counted | None"] = None

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    @classmethod
    @contextmanager
    def instead(cls, work: Work) -> Iterator[None]:
        """Count this work instead of that of the operations within."""
        counter, cls.running = cls.running, None
        if counter is not None:
            counter.work += work
        try:
            yield
        finally:
            cls.running = counter

    def __enter__(self) -> Self:
        Counted.running = self
        return super().__enter__()

    def __exit__(self, *failure: object) -> None:
        Counted.running = None
        super().__exit__(*failure)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        if Counted.running is self and not is_free(func):
            self.work += work_of(func, args, kwargs or {}, out)
        return out


def is_free(func: Any) -> bool:
    """The operation takes no kernel."""
    name = func._schema.name
    return bool(func.is_view or name in FREE or name.startswith("prim::"))


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """The work of an operation; that of products has no bytes."""
    inputs, outputs = ([x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), out))
    if "scaled_dot_product" in func._schema.name:
        backward = "backward" in func._schema.name
        # the backward's first tensor is the gradient of the output
        q, k = inputs[backward : backward + 2]
        products = ATTENTION_BACKWARD if backward else ATTENTION
        return Work(attention=products * prod(q.shape) * k.shape[-2], kernels=1)
    if func._overloadpacket in flop_registry:
        return Work(products=flop_registry[func._overloadpacket](*args, **kwargs, out_val=out), kernels=1)
    # an operation in place on many tensors returns none of them
    written = outputs or (args[0] if isinstance(args[0], list | tuple) else [])
    return Work(moved=sum(x.nbytes for x in (*inputs, *written)), kernels=1)


def measure(
    name: str, encoder: Callable[..., Tensor], inputs: Callable[[int], Any], module: nn.Module, sub_batch: int,
    autocast: Callable[[], AbstractContextManager[Any]], *, builds_graph: bool = False,
) -> TowerCost:  # fmt: skip
    """The cost of `encoder(*inputs(n))` for n = `sub_batch` examples; within `shapes_only`, like the module's making.

    builds_graph: the first pass builds each graph and drops it, as that of compiled towers.

    >>> with shapes_only():
    ...     layer = nn.Linear(1000, 1000, bias=False)
    ...     cost = measure("layer", layer, lambda n: [torch.empty(n, 1000)], layer, 8, torch.enable_grad)
    >>> cost.weights, cost.graph, cost.forward_work.products
    (4000000, 32000, 16000000.0)
    """
    weights = [*module.parameters(), *module.buffers()]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    works: dict[bool, Work] = {}
    shape: list[Tensor] = []

    def run(n: int, grad: bool) -> list[Tensor]:
        with autocast(), torch.set_grad_enabled(grad or builds_graph):
            return [encoder(*inputs(n))]

    def counted(grad: bool) -> None:
        with Counted() as counter:
            outs = run(sub_batch, grad)
            if grad:
                torch.autograd.grad(outs, trained, [torch.empty_like(out) for out in outs], allow_unused=True)
        works[grad] = counter.work
        shape[:] = [out.detach() for out in outs]

    def graph(n: int) -> int:
        with as_written():
            return graph_bytes(lambda: run(n, grad=True))

    with FrozenReads() as reads:
        forward = footprint(lambda: counted(grad=False))
    replay, retained = forward, 0
    if trained:
        replay = footprint(lambda: counted(grad=True))
        half = max(1, sub_batch // 2)
        # weights, and their copies in another dtype, do not grow with the examples
        whole = graph(sub_batch)
        retained = whole if sub_batch == 1 else (whole - graph(half)) * sub_batch // (sub_batch - half)
    (features,) = shape
    return TowerCost(
        name, sub_batch, sum(x.nbytes for x in weights), sum(x.nbytes for x in trained), retained, forward, replay,
        features.nbytes // sub_batch, features[0].numel(), sum(x.nbytes for x in inputs(1)),
        works[False], works.get(True, works[False]), reads.any,
    )  # fmt: skip


class _Undecided(DispatchMode):
    """Answer every yes-or-no question about values with no: that a mask hides nothing, for one."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return False
        return func(*args, **(kwargs or {}))


class _FusedDropout(TorchFunctionMode):
    """Dropout as a GPU's kernels compute it: a mask of one byte a number, and none of attention's probabilities.

    A CPU, whose tensors the counted ones pass for, keeps the probabilities of attention with dropout in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            # query, key, value, mask, probability
            args, kwargs = args[:4] + (0.0,) * (len(args) > 4) + args[5:], {**kwargs}
            kwargs.pop("dropout_p", None)
        elif func is F.dropout and kwargs["training"] and kwargs["p"]:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        return func(*args, **kwargs)


@contextmanager
def shapes_only(device: str = "cuda") -> Iterator[None]:
    """Run modules without memory, as on a `device`; torch's random numbers outside go on as if nothing had happened."""
    fused = _FusedDropout() if device == "cuda" else nullcontext()
    with torch.random.fork_rng(devices=[]), without_values(), _Undecided(), fused:
        yield


@contextmanager
def made_on_meta() -> Iterator[None]:
    """Make modules whose weights have shapes alone, on torch's device "meta"."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _Undecided():
        yield


def without_memory(module: nn.Module) -> None:
    """Give a module that was made so weights that pass for those of a CPU; within `shapes_only`."""
    # by identity: weights may be shared
    new: dict[int, Tensor] = {}
    for owner in module.modules():
        for name, x in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if id(x) not in new:
                empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
                new[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
            setattr(owner, name, new[id(x)])


@contextmanager
def as_compiled(layers: Sequence[nn.Module], tower: Callable[[int], Tensor], size: int) -> Iterator[None]:
    """Within, calls of these layers in grad mode cost what compiled ones do.

    tower: called with a number of examples; `measure` needs it for `size` and for half of it. Layers that cannot be
    traced cost what they do as written.
    """
    graphs: dict[str, Callable[..., Any]] = {}
    for layer in layers:
        replace_calls(layer, _Graph(layer, graphs))
    try:
        with torch.enable_grad():
            for n in {size, max(1, size // 2)} if layers else ():
                tower(n)
    except Exception as error:
        logger.warning("compiled towers are planned as written ones: %s: %s", type(error).__name__, error)
        for layer in layers:
            uncompile(layer)
    try:
        yield
    finally:
        for layer in layers:
            uncompile(layer)


class _Written(nn.Module):
    """A layer whose call is its own forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.forward(*args, **kwargs)


class _Graph:
    """Stand-in for a layer's calls: its traced graph, which layers of a kind share."""

    def __init__(self, layer: nn.Module, graphs: dict[str, Callable[..., Any]]) -> None:
        self.written, self.graphs = _Written(layer), graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weights = {**dict(self.written.named_parameters()), **dict(self.written.named_buffers())}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        shapes = [(x.shape, x.dtype, x.requires_grad) for x in (*weights.values(), *tensors)]
        layer = self.written.layer
        key = str((type(layer), layer.training, torch.is_autocast_enabled("cpu"), shapes, constants, spec))
        if key not in self.graphs:
            is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

            def function(weights: dict[str, Tensor], tensors: Sequence[Tensor]) -> Any:
                following = iter(tensors)
                inputs = [next(following) if here else leaf for here, leaf in zip(is_tensor, constants, strict=True)]
                args, kwargs = pytree.tree_unflatten(inputs, spec)
                return torch.func.functional_call(self.written, weights, args, kwargs)

            self.graphs[key] = partitioned(function, _Kernels)
        return self.graphs[key](weights, tensors)


class _Kernels:
    """A traced graph as a compiler runs it: products, and a fused kernel for each tensor that is written between them.

    A kernel reads every tensor between its own and those that were written before. Called with a list of inputs, which
    it empties, it makes tensors with the shapes of those that exist at the same time.
    """

    def __init__(self, graph: Any) -> None:
        self.nodes, self.work = list(graph.graph.nodes), Work()
        # tensors that are products or written, and the inputs; the nodes after which each is needed no more
        self.made, self.last = set[Any](), dict[Any, Any]()
        # the tensor of a view; inputs of fused operations; inputs of products, of the output, and then of kernels
        base, fused, uses = dict[Any, Any](), dict[Any, set[Any]](), dict[Any, set[Any]]()
        for node in self.nodes:
            inputs = {base.get(x, x) for x in node.all_input_nodes}
            if node.op == "output":
                uses[node] = inputs
            elif node.op == "call_function" and (not hasattr(node.target, "_schema") or is_free(node.target)):
                # a part of a tuple, or a view
                base[node] = base.get(node.args[0], node.args[0])
            elif node.op == "call_function":
                args, words = pytree.tree_map(lambda x: getattr(x, "meta", {}).get("val", x), (node.args, node.kwargs))
                work = work_of(node.target, args, words, node.meta["val"])
                if work.moved:
                    fused[node] = inputs
                else:
                    self.work, uses[node] = self.work + work, inputs
                    self.made.add(node)
        written, moved = set[Any]().union(*uses.values()) & fused.keys(), 0
        self.made |= written
        for node in written:
            uses[node], waiting = set[Any](), [node]
            while waiting:
                for x in fused[waiting.pop()] - uses[node]:
                    uses[node].add(x)
                    if x in fused and x not in written:
                        waiting.append(x)
            uses[node] = {x for x in uses[node] if x not in fused or x in written}
            moved += sum(map(_bytes, (node, *uses[node])))
        self.work += Work(moved=moved, kernels=len(written))
        for node in self.nodes:
            self.last |= dict.fromkeys(uses.get(node, ()), node)

    def __call__(self, inputs: list[Any]) -> Any:
        places = [node for node in self.nodes if node.op == "placeholder"]
        present = dict(zip(places, inputs, strict=True))
        inputs.clear()

        def value(node: Any) -> Any:
            if node in present:
                return present[node]
            args, words = torch.fx.map_arg((node.args, node.kwargs), value)
            return node.target(*args, **words)

        with Counted.instead(self.work):
            # the last node is the output
            for node in self.nodes[:-1]:
                if node in self.made:
                    present[node] = pytree.tree_map_only(Tensor, _empty, node.meta["val"])
                for x in [x for x in present if self.last.get(x) is node]:
                    del present[x]
            return torch.fx.map_arg(self.nodes[-1].args[0], value)


def _bytes(node: Any) -> int:
    return sum(x.nbytes for x in pytree.tree_leaves(node.meta["val"]) if isinstance(x, Tensor))


def _empty(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
