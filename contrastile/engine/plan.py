"""The plan of a call: arguments are checked once and planned once, then run as one autograd operation.

Stands between `functional.py` and `operation.py`. Plans are cached by signature (shapes, dtypes, options, loss): a step
like the last one repeats neither checks nor choices. Calls of several ranks choose their exchange each time, because
the ranks agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile._dispatch import Options, agreed_layout, choose_exchange, choose_fused, choose_tiles, workspace_on
from contrastile._errors import invalid
from contrastile._types import accumulator
from contrastile.distributed import collectives, consistency
from contrastile.engine.compiled import traceable, traced
from contrastile.engine.graph import replayed, small
from contrastile.engine.operation import AtOnce, Call, MakeTiles, Operation, Plan, with_gradients
from contrastile.engine.problem import PLAIN, Arguments, Problem, as_tensor, cast_features, indices
from contrastile.exchange import host
from contrastile.exchange.base import Exchange, Layout
from contrastile.losses.base import PairLoss, Shard, changed
from contrastile.tiles.fitting import fitting_side
from contrastile.tiles.scored import Scored

# cached plans; all are dropped when more signatures than that have been seen
MOST_PLANS = 256
# types of a scale and a bias that are whole on every rank
NUMBERS = (*PLAIN, float, int, type(None))
# tensors of a shard in a call that can be refilled
PARTS = ("features", "positives", "labels", "ids")
# labels of a call that can be refilled: name in a shard, argument of the queries, argument of the keys
LABELS = (("labels", "query_labels", "key_labels"), ("ids", "query_ids", "key_ids"))
# side of a tile for backend="dense", which holds the whole block
WHOLE = 2**62

# each plan with a template of its calls, where calls of one signature differ in their tensors alone
_plans: dict[Hashable, tuple[Plan, Call | None]] = {}


def prepare(q: Any, k: Any, scale: Any, loss: PairLoss, options: Options, **others: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the operation that computes the loss of these arguments (named as in `Arguments`), and its inputs.

    Under torch.compile a call becomes one operation of the graph, if it can be traced; else the graph breaks there.
    """
    arguments = Arguments(q, k, scale, loss, options, **others)
    if torch.compiler.is_compiling():
        if traceable(arguments):
            return traced(arguments)
        return torch.compiler.disable(_eagerly), (q, k, scale, loss, options, others)
    alone = not (dist.is_available() and dist.is_initialized())
    signature: Hashable = None if arguments.scorer is not None else (alone, arguments.signature())
    plan, template = _plans.get(signature, (None, None))
    if template is not None and type(scale) in NUMBERS and type(arguments.bias) in NUMBERS:
        return Operation.apply, _refilled(template, arguments)
    # a scorer of padded token vectors: other ranks may have longer texts
    ragged = not alone and hasattr(arguments.scorer, "pad_tokens") and options.exchange != "single"
    try:
        arguments = _with_masks(arguments) if ragged else arguments
        problem = Problem.of(arguments, checked=plan is not None, alone=alone)
    except Exception as error:
        # a scorer's own errors are of any kind
        share_error(error, options.group, options.exchange)
        raise
    tokens = (_tokens(problem.rows), _tokens(problem.cols)) if ragged else None
    if waits_on_host(problem.rows.features, problem.device):
        return _streamed(problem, tokens)
    exchange = plan.exchange if plan is not None and alone else None
    if exchange is None:
        rows, cols = problem.rows, problem.cols
        exchange = choose_exchange(options, problem.loss, rows, cols, problem.statement, tokens)
    if len(exchange.layout.rows) == 1 and plan is not None:
        problem = problem.placed(exchange)
    else:
        with exchange.in_step():
            problem = _padded(problem, exchange.layout.tokens).placed(exchange)
            if plan is None:
                plan = _planned(problem, exchange)
        if signature is not None:
            if len(_plans) >= MOST_PLANS:
                _plans.clear()
            _plans[signature] = plan, _template(problem, plan, exchange) if alone and arguments.refillable() else None
    return Operation.apply, (_call(problem, plan, exchange), problem.scale, problem.bias, *problem.inputs)


def _with_masks(arguments: Arguments) -> Arguments:
    """The arguments with a mask beside every side's token vectors: other ranks may have padding."""
    scorer: Any = arguments.scorer
    negatives = None if arguments.negatives is None else scorer.pad_tokens(arguments.negatives)
    return replace(arguments, q=scorer.pad_tokens(arguments.q), k=scorer.pad_tokens(arguments.k), negatives=negatives)


def _tokens(shard: Shard) -> int:
    """Tokens of each row; 0 on a rank without rows."""
    return shard.features.shape[1] if len(shard) else 0


def _padded(problem: Problem, tokens: tuple[int, int] | None) -> Problem:
    """The problem with rows and columns padded to these numbers of tokens; the padding is masked."""
    if tokens is None or problem.scorer is None:
        return problem
    # vectors and mask of each side, then the scorer's parameters
    q, q_mask, k, k_mask, *others = problem.inputs
    scorer: Any = problem.scorer.module
    of_rows, of_cols = scorer.pad_tokens((q, q_mask), tokens[0]), scorer.pad_tokens((k, k_mask), tokens[1])
    rows, cols = (
        shard.with_leaves([x.detach() for x in leaves])
        for shard, leaves in ((problem.rows, of_rows), (problem.cols, of_cols))
    )
    return replace(problem, inputs=(*of_rows, *of_cols, *others), rows=rows, cols=cols)


def _eagerly(q: Any, k: Any, scale: Any, loss: PairLoss, options: Options, others: dict[str, Any]) -> Tensor:
    """The loss of a call that torch.compile cannot trace."""
    operation, inputs = prepare(q, k, scale, loss, options, **others)
    value: Tensor = operation(*inputs)
    return value


def share_error(error: Exception, group: Any, exchange: str) -> None:
    """Raise this rank's error on all ranks, which would wait for it in the exchange."""
    if exchange == "single" or collectives.size(group) == 1:
        return
    known = isinstance(error, ValueError)
    sentence = str(error) if known else f"{type(error).__name__}: {error}"
    try:
        consistency.tally(group, {"error": sentence}, (0, 0, 0, 0))
    except ValueError:
        # the rank of an error of another kind raises that one
        if known:
            raise


def waits_on_host(features: Tensor, device: torch.device) -> bool:
    """Return whether the features are in host memory and computed with on another device."""
    return features.device != device


def _call(problem: Problem, plan: Plan, exchange: Exchange) -> Call:
    return Call(
        plan, exchange, problem.loss, problem.rows, problem.cols, weights=problem.weights,
        reduction=problem.options.reduction, device=problem.device, scorer=problem.scorer,
        input_dtypes=problem.input_dtypes(), indexed=problem.indexed,
    )  # fmt: skip


def _template(problem: Problem, plan: Plan, exchange: Exchange) -> Call:
    """The call with tensors without rows, in memory of their own: a cached call must not keep the user's alive."""
    shards = (problem.rows, problem.cols)
    rows, cols = (changed(x, **{name: _no_rows(getattr(x, name)) for name in PARTS}) for x in shards)
    return _call(replace(problem, rows=rows, cols=cols, weights=_no_rows(problem.weights)), plan, exchange)


def _no_rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.new_empty((0, *x.shape[1:]))


def _refilled(call: Call, arguments: Arguments) -> tuple[Any, ...]:
    """The inputs of the operation: a template with the tensors of these arguments, in its types."""
    q, k = arguments.q, arguments.k
    of_rows, of_cols = cast_features(q, k, call.rows.features.dtype)
    rows, cols = {"features": of_rows}, {"features": of_cols}
    for name, of_queries, of_keys in LABELS:
        if getattr(call.rows, name) is not None:
            rows[name], cols[name] = getattr(arguments, of_queries).long(), getattr(arguments, of_keys).long()
    if call.rows.positives is not None:
        rows["positives"] = indices(arguments, len(k))
    call = changed(call, rows=changed(call.rows, **rows), cols=changed(call.cols, **cols), weights=arguments.weights)
    scale, bias = (
        x if x is None or isinstance(x, Tensor) else as_tensor(x, call.device, q.dtype)
        for x in (arguments.scale, arguments.bias)
    )
    return call, scale, bias, q, k


def _planned(problem: Problem, exchange: Exchange) -> Plan:
    """The choices for calls of this signature."""
    loss, options, scorer = problem.loss, problem.options, problem.scorer
    workspace = workspace_on(problem.device, options.workspace)
    every = (problem.scale, problem.bias, *problem.inputs)
    wants = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in every)
    pairwise = loss.pairwise and options.reduction != "none"
    # columns that belong to one row each are computed after the exchange
    own = problem.rows.own is not None
    at_once: AtOnce | None = with_gradients if wants and pairwise and not own else None
    tiles = _tiles(problem, exchange, workspace)
    alone = len(exchange.layout.rows) == 1 and options.reduction != "none" and not own
    number = torch.ones((), dtype=accumulator(problem.dtype), device=problem.device)
    if wants and alone and tiles(loss, number, None, workspace).strip(problem.rows, problem.cols):
        at_once = with_gradients
    if scorer is None and wants and not own and small(problem.rows, problem.cols, options.reduction, exchange, tiles):
        at_once = replayed
    if isinstance(tiles, partial) and tiles.func is Scored and problem.dtype == torch.float16:
        # float16 underflows in the module unless the upstream gradient, a GradScaler's factor, goes through it
        at_once = None
    return Plan(exchange, tiles, workspace, accumulator(problem.dtype), at_once)


def _tiles(problem: Problem, exchange: Exchange, workspace: int) -> MakeTiles:
    """Tiles of the dot product, or of a learned distance."""
    scorer, backend, rows, cols = problem.scorer, problem.options.backend, problem.rows, problem.cols
    if waits_on_host(rows.features, problem.device):
        # the kind of features on the device
        dtype = problem.dtype if scorer is None else None
        rows, cols = (
            side.with_leaves([x[:0].to(problem.device, dtype or x.dtype) for x in side.leaves]) for side in (rows, cols)
        )
    if scorer is None:
        return choose_tiles(backend, problem.loss, rows, cols)
    fused = choose_fused(backend, scorer, rows, cols)
    if fused is not None:
        return partial(fused, scorer=scorer, side=fused.fitting_side(rows, cols, workspace))
    if scorer.seed is not None and not exchange.once:
        remedy = "Take gather or ring, or put the scorer in eval mode."
        raise invalid("exchange", "compute each pair once if the scorer draws random numbers", "replicate", remedy)
    side = WHOLE if backend == "dense" else fitting_side(scorer, problem.rows, problem.cols, workspace)
    return partial(Scored, scorer=scorer, side=side)


def _streamed(problem: Problem, tokens: tuple[int, int] | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call of features in host memory, whose strips are as long as the memory that is free now allows.

    tokens: those of a row and of a column on this rank, where they may differ.
    """
    device, options, rows, cols = problem.device, problem.options, problem.rows, problem.cols
    workspace = workspace_on(device, options.workspace)
    layout, carrier = Layout(None, 0, (len(rows),), (len(cols),)), None
    if collectives.size(options.group) > 1 and options.exchange != "single":
        layout = agreed_layout(options, problem.loss, rows, cols, problem.statement, tokens)
        carrier = consistency.carrier_on_host(options.group)
    problem = _padded(problem, layout.tokens)
    cuts = host.cut(problem.rows, problem.cols, device, workspace)
    exchange = host.Host(
        options.gradient, layout, device, problem.dtype if problem.scorer is None else None, cuts, carrier
    )
    with exchange.in_step():
        rows, cols = (host.without_features_on(shard, device) for shard in (problem.rows, problem.cols))
        problem = replace(problem, rows=rows, cols=cols).placed(exchange)
        tiles = _tiles(problem, exchange, workspace)
        weights = None if problem.weights is None else problem.weights.to(device)
    plan = Plan(None, tiles, workspace, accumulator(problem.dtype), None)
    problem = replace(problem, weights=weights)
    return Operation.apply, (_call(problem, plan, exchange), problem.scale, problem.bias, *problem.inputs)
