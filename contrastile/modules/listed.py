"""Lists of keys, one for each query, and their scores by a learned distance; part of `ScoreDistillLoss`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contrastile._errors import invalid
from contrastile._torch import pytree
from contrastile._types import accumulator, shape_or_type
from contrastile.engine import arguments as checks
from contrastile.gradcache.introspect import refusing_batch_norm, refusing_state
from contrastile.gradcache.modes import in_modes
from contrastile.tiles.scored import check_module


def check_lists(lists: Tensor, query: Tensor, keys: int) -> None:
    """Check that lists [N, P] index this number of keys."""
    checks.positives(lists, query)
    if lists.ndim != 2:
        raise invalid("lists", "have two dimensions [N, P]", f"shape {list(lists.shape)}", "List several keys.")
    checks.in_range(lists, keys)


def listed_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], and of 16-bit numbers on a CPU with gradients that are summed in float32, as a GPU does."""
    narrow = x.is_floating_point() and x.device.type == "cpu" and x.dtype.itemsize == 2
    return x.float()[index].to(x.dtype) if narrow else x[index]


def _parts(side: Any, cut: Callable[[Tensor], Sequence[Tensor]], N: int) -> list[Any]:
    """The side of each query: its part of every tensor, and all else whole."""
    leaves, structure = pytree.tree_flatten(side)
    cuts = [cut(x) if isinstance(x, Tensor) else [x] * N for x in leaves]
    return [pytree.tree_unflatten(list(parts), structure) for parts in zip(*cuts, strict=True)]


def listed_scores(scorer: nn.Module, query: Any, key: Any, lists: Tensor | None) -> Tensor:
    """The scores [N, P] of each query and the keys of its list, in float32 or better, with the graph of one list."""
    leaves = {name: [x for x in pytree.tree_leaves(side) if isinstance(x, Tensor)] for name, side in
              (("query", query), ("key", key))}  # fmt: skip
    for name, tensors in leaves.items():
        if not tensors or any(x.ndim < (1 if name == "query" or lists is not None else 2) for x in tensors):
            rule = "be made of tensors [N, ...]" if name == "query" else "be made of tensors [N, P, ...], or [M, ...]"
            raise invalid(name, rule, [list(x.shape) for x in tensors] or "none", "As the scorer reads them.")
        if len(sizes := {len(x) for x in tensors}) > 1:
            # rows of the longer ones would be left out
            raise invalid(name, "have the same first axis", sorted(sizes), "Check each tensor's shape.")
        for x in tensors:
            checks.same_device(name, x, "query", leaves["query"][0])
    N, (first, *_) = len(leaves["query"][0]), leaves["key"]
    if lists is not None:
        check_lists(lists, leaves["query"][0], len(first))
    elif len(first) != N:
        raise invalid("key", "have a list for each `query`", f"{len(first)} and {N}", "Or pass `lists`.")
    if lists is not None and N and not len(first):
        raise invalid("key", "have a row or more for `lists`", f"shape {list(first.shape)}", "Pass the listed keys.")
    function = callable(scorer) and not isinstance(scorer, (nn.Module, type))
    if not function:
        check_module(scorer)
    P, modules = (first if lists is None else lists).shape[1], [] if function else list(scorer.modules())
    parameters, buffers = ([], []) if function else (list(scorer.parameters()), list(scorer.buffers()))
    training = [one.training for one in modules]
    constants = [x for x in (*parameters, *buffers) if not x.is_inference()]
    versions = [x._version for x in constants]

    def score(one: Any, keys: Any) -> Tensor:
        # again in the backward, as in the forward
        if [x._version for x in constants] != versions:
            rule, remedy = "keep its parameters and buffers until the backward", "Call backward before they change."
            raise invalid("scorer", rule, "changed ones", remedy)
        with in_modes(modules, training):
            scores: Tensor = scorer(one, keys)
        return scores

    def scored(i: int) -> Tensor:
        scores: Any = checkpoint(score, queries[i], keys_of[i], use_reentrant=False)
        if not isinstance(scores, Tensor) or scores.shape != (1, P):
            rule = f"return a tensor {[1, P]} for a query and the {P} keys of its list"
            raise invalid("scorer", rule, shape_or_type(scores), "One score for each pair.")
        if not scores.is_floating_point():
            raise invalid("scorer", "return floating point", scores.dtype, "Convert it with .float().")
        return scores[0]

    if not N:
        # with the graph and the dtype of other ranks, because a wrapper waits for the gradients of all parameters
        floats = [x for side in leaves.values() for x in side if x.is_floating_point()]
        graph = (*floats, *parameters)
        zero = sum([x.sum().to(accumulator(x.dtype)) * 0 for x in graph], first.new_zeros(()).float())
        return zero.expand(0, P)
    # cut at once: the gradient of each part alone would be as long as the whole
    if lists is not None:
        index = lists.long().clamp(min=0)
        key = pytree.tree_map(lambda x: listed_rows(x, index) if isinstance(x, Tensor) else x, key)
    queries, keys_of = _parts(query, lambda x: x.split(1), N), _parts(key, Tensor.unbind, N)
    with refusing_batch_norm(modules, "scorer"), refusing_state(modules, "scorer", "pairs"):
        stacked = torch.stack([scored(i) for i in range(N)])
    return stacked.to(accumulator(stacked.dtype))
