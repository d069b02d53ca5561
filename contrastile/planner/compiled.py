"""The cost of compiled layers: the graphs that torch.compile would make of them, traced without values or a compiler.

Beside `towers.py`, which measures a tower whose layers are replaced here. AOTAutograd traces a layer forward and
backward, and chooses the tensors that the backward reads, as it does for the compiler. Operations that are no products
are fused: they move the bytes of products and of the graph's own inputs and outputs, and their results in between none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from contrastile._torch import partitioned, pytree, replace_calls, uncompile
from contrastile.planner.towers import Counted, Work, is_free, work_of

logger = logging.getLogger("contrastile")


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
