"""The plan of a call: arguments are checked once and planned once, then run as one autograd operation.

Stands between `functional.py` and `operation.py`. Plans are cached by signature (shapes, dtypes, options, loss): a step
like the last one repeats neither checks nor choices. Calls of several ranks choose their exchange each time, because
the ranks agree on it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile._dispatch import Options, agreed_layout, choose_exchange, choose_fused, choose_tiles, workspace_on
from contrastile._errors import invalid, renamed
from contrastile._torch import forward_ad_runs, func_transform, jit_traces
from contrastile._types import accumulator
from contrastile.distributed import collectives, consistency
from contrastile.distributed.failure import weakly
from contrastile.engine import arguments as checks
from contrastile.engine.compiled import constant_negatives, traceable, traced
from contrastile.engine.graph import MOST_GRAPH_BYTES, graph_for, replayable, shared_length, small
from contrastile.engine.operation import Call, MakeTiles, Operation, Plan
from contrastile.engine.problem import PLAIN, Arguments, Problem, as_tensor, cast_features, guides, indices, leaves_of
from contrastile.engine.small import Replayed, small_operation
from contrastile.exchange import host
from contrastile.exchange.base import Exchange, Layout, Single
from contrastile.gradcache.modes import joined, recording_error, uncompiled
from contrastile.losses.base import PairLoss, Shard, changed
from contrastile.scorers import MaxSim
from contrastile.tiles.fitting import fitting_side
from contrastile.tiles.halves import Span, halves_of
from contrastile.tiles.scored import Scored

# cached plans; all are dropped when more signatures than that have been seen
MOST_PLANS = 256
# types of a scale and a bias that are whole on every rank
NUMBERS = (*PLAIN, float, int, type(None))
# tensors of a shard that each call fills into a template anew
REFILLED = ("features", "positives", "labels", "ids", "numbers", "own", "targets", "own_excluded")
# labels among them: name in a shard, argument of the queries, argument of the keys
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
        if forward_ad_runs():
            # the operation of a graph would have tangents of 0
            raise _refusal("forward-mode differentiation")
        if traceable(arguments):
            return traced(arguments)
        return uncompiled("contrast", _outside_graph), (q, k, scale, loss, options, others)
    if func_transform() is not None:
        raise _refusal("torch.func's transforms")
    if jit_traces():
        raise recording_error("contrast", "torch.jit.trace")
    # there is no process group
    alone = not (dist.is_available() and dist.is_initialized())
    # other scorers have a state, and other ranks' texts other lengths
    cacheable = arguments.scorer is None or (alone and getattr(arguments.scorer, "stateless", False))
    # a reference to a group that has ended equals no other
    world = None if alone else weakly(dist.group.WORLD)
    signature: Hashable = (world, arguments.signature()) if cacheable else None
    plan, template = _plans.get(signature, (None, None))
    key = signature
    if plan is None and cacheable and (rounded := _rounded_signature(arguments)) is not None:
        # small calls of texts whose lengths round to the same replay one graph
        key = world, rounded
        plan, template = _plans.get(key, (None, None))
        if plan is not None and len(_plans) < MOST_PLANS:
            _plans[signature] = plan, template
    if plan is None or template is None or type(scale) not in NUMBERS or type(arguments.bias) not in NUMBERS:
        return _new_call(arguments, plan, signature, key, alone=alone)
    graph = graph_for(template) if plan.replayed and plan.of_rows is None else None
    if graph is not None:
        # constant keys are copied from where they are
        apart = (arguments.negatives,) if template.constant_cols else ()
        leaves = (q, k) if apart else _leaves(template, arguments)
        of_graph = _graph_inputs(template, arguments, (*leaves, *apart))
        if not plan.wants:
            # an autograd function takes as long as the replay
            return graph.loss, (of_graph,)
        return Replayed.apply, (graph, of_graph, scale, arguments.bias, *leaves)
    inputs = _refilled(template, arguments)
    return small_operation(*inputs) if plan.replayed else (Operation.apply, inputs)


def _new_call(
    arguments: Arguments, plan: Plan | None, signature: Hashable, key: Hashable, *, alone: bool
) -> tuple[Any, tuple[Any, ...]]:
    """The operation and inputs of a call that fills no template: of a new signature, a sharded scale, or several ranks.

    plan: the cached one, if the signature is known. signature, key: the signature, and the same with rounded lengths of
    texts; None where nothing is cached. alone: there is no process group.
    """
    options = arguments.options
    if key is not None and isinstance(arguments.scorer, MaxSim):
        # a plan outlives the user's module, which may change
        arguments = replace(arguments, scorer=arguments.scorer.alike())
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
        exchange = choose_exchange(options, problem.loss, rows, cols, problem.statement, tokens, problem.unnamed)
    several = len(exchange.layout.rows) > 1
    if several and key is not None:
        # all ranks make the same plan, from the rows of all; "auto" may take two exchanges for one signature
        key = signature, type(exchange), exchange.layout.rows, exchange.layout.cols
        plan, _ = _plans.get(key, (None, None))
    constant_cols = 0 if several else constant_negatives(arguments)
    if plan is not None and not several:
        problem = problem.placed(exchange)
    else:
        with exchange.in_step():
            problem = _padded(problem, exchange.layout.tokens).placed(exchange)
            plan = plan or _planned(problem, exchange)
        if key is not None:
            if len(_plans) >= MOST_PLANS:
                _plans.clear()
            # a later call fills its tensors into the template
            fits = alone and _refillable(arguments)
            template = changed(_template(problem, plan, exchange), constant_cols=constant_cols) if fits else None
            # of several ranks the signature tells that the checks have passed; lengths are rounded for a replay
            for each in {key if plan.replayed else signature} if alone else {signature, key}:
                _plans[each] = plan, template
    call = changed(_call(problem, plan, exchange), constant_cols=constant_cols)
    inputs: tuple[Any, ...] = call, problem.scale, problem.bias, *problem.inputs
    return small_operation(*inputs) if plan.replayed else (Operation.apply, inputs)


def _refusal(differentiation: str) -> ValueError:
    rule = f"be called outside of {differentiation}"
    return invalid("contrast", rule, "a call inside", "Call backward, or torch.autograd.grad.")


def _refillable(arguments: Arguments) -> bool:
    """Return whether later calls can be filled into a template.

    Shared negatives then stand behind the keys of a dot product, and so do their labels and ids.
    """
    if arguments.options.device is not None:
        return False
    if arguments.negatives is None or arguments.own is not None:
        return True
    if arguments.scorer is not None:
        return False
    groups = [x for x in (arguments.key_labels, arguments.key_ids) if x is not None]
    return all(len(x) > len(arguments.k) for x in groups)


def _leaves(call: Call, arguments: Arguments) -> tuple[Tensor, ...]:
    """The inputs of the operation: features, or vectors and masks behind them."""
    q, k = arguments.q, arguments.k
    if call.scorer is not None:
        return *leaves_of(q), *leaves_of(k)
    if arguments.own is not None:
        return q, k, arguments.own
    return q, k if arguments.negatives is None else joined([k, arguments.negatives])


def _rounded_signature(arguments: Arguments) -> Hashable | None:
    """The signature of token vectors [B, L, D] with masks, where each L is rounded up; None for other arguments."""
    if arguments.scorer is None or not any(len(leaves_of(side)) > 1 for side in (arguments.q, arguments.k)):
        return None
    facts: list[Hashable] = []
    for side in (arguments.q, arguments.k):
        leaves = leaves_of(side)
        if not all(isinstance(x, Tensor) and x.ndim > 1 and x.shape[:2] == leaves[0].shape[:2] for x in leaves):
            return None
        if leaves[0].shape[1] == 0:
            return None
        lengths = [x.shape[1] if len(leaves) == 1 else shared_length(x.shape[1]) for x in leaves]
        facts += [
            (type(side), type(x), len(x), length, *x.shape[2:], x.dtype, x.device, x.requires_grad)
            for x, length in zip(leaves, lengths, strict=True)
        ]
    return arguments.cast(), replace(arguments, q=None, k=None).signature(), *facts


def _with_masks(arguments: Arguments) -> Arguments:
    """The arguments with a mask beside every side's token vectors: other ranks may have padding."""
    scorer: Any = arguments.scorer
    sides: dict[str, Any] = {}
    for name in ("q", "k", "negatives"):
        side = getattr(arguments, name)
        # errors name `q`, whichever side is padded
        with renamed(q=name):
            sides[name] = None if side is None else scorer.pad_tokens(side)
    return replace(arguments, **sides)


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


def _outside_graph(q: Any, k: Any, scale: Any, loss: PairLoss, options: Options, others: dict[str, Any]) -> Tensor:
    """The loss of a call that torch.compile cannot trace."""
    operation, inputs = prepare(q, k, scale, loss, options, **others)
    return operation(*inputs)


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
        input_dtypes=problem.input_dtypes(), positives_below=problem.positives_below,
        has_numbers=problem.numbers_before_call,
    )  # fmt: skip


def _template(problem: Problem, plan: Plan, exchange: Exchange) -> Call:
    """The call with tensors without rows, in memory of their own: a cached call must not keep the user's alive."""
    shards = (problem.rows, problem.cols)
    rows, cols = (
        changed(
            x,
            **{name: _no_rows(getattr(x, name)) for name in REFILLED},
            guides=tuple(map(_no_rows, x.guides)),
            others=tuple(map(_no_rows, x.others)),
        )
        for x in shards
    )
    return _call(replace(problem, rows=rows, cols=cols, weights=_no_rows(problem.weights)), plan, exchange)


def _no_rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.new_empty((0, *x.shape[1:]))


def _refilled(call: Call, arguments: Arguments) -> tuple[Any, ...]:
    """The inputs of the operation: a template with the tensors of these arguments, in its dtypes."""
    row_fields, col_fields = _labels(call, arguments)
    inputs = _leaves(call, arguments)
    if call.scorer is None:
        dtype = call.rows.features.dtype
        row_fields["features"], col_fields["features"] = cast_features(inputs[0], inputs[1], dtype)
        if arguments.own is not None:
            row_fields["own"] = arguments.own.detach().to(dtype)
    else:
        sides = leaves_of(arguments.q), leaves_of(arguments.k)
        for fields, (features, *masks) in zip((row_fields, col_fields), sides, strict=True):
            fields |= {"features": features.detach(), "others": tuple(masks)}
    rows, cols = changed(call.rows, **row_fields), changed(call.cols, **col_fields)
    scale, bias = 1.0 if arguments.scale is None else arguments.scale, arguments.bias
    if not isinstance(scale, Tensor):
        scale = as_tensor(scale, call.device, call.plan.wide)
    if bias is not None and not isinstance(bias, Tensor):
        bias = as_tensor(bias, call.device, call.plan.wide)
    return changed(call, rows=rows, cols=cols, weights=arguments.weights), scale, bias, *inputs


def _labels(call: Call, arguments: Arguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a template's rows, and of its columns, that hold labels and guides: those of these arguments."""
    rows: dict[str, Any] = {}
    cols: dict[str, Any] = {}
    if call.rows.positives is not None:
        rows["positives"] = indices(arguments, len(arguments.k if call.scorer is None else leaves_of(arguments.k)[0]))
    for name, of_queries, of_keys in LABELS:
        if getattr(call.rows, name) is not None:
            queries, keys = getattr(arguments, of_queries), getattr(arguments, of_keys)
            rows[name] = queries.long()
            # one tensor for both sides stays one
            cols[name] = rows[name] if keys is queries else keys.long()
    if arguments.guides:
        q = arguments.q if call.scorer is None else leaves_of(arguments.q)[0]
        of_rows, of_cols = guides(arguments, q)
        # a graph reads the numbers first
        rows |= {"numbers": of_rows["numbers"], "guides": of_rows["guides"]}
        cols |= of_cols
    if arguments.targets is not None:
        rows["targets"] = arguments.targets
    if call.rows.own_excluded is not None:
        rows["own_excluded"] = checks.own_excluded(arguments.negative_ids, arguments.query_ids)
    return rows, cols


def _graph_inputs(call: Call, arguments: Arguments, inputs: Sequence[Tensor]) -> list[Tensor | float]:
    """The tensors of these arguments, `inputs` first, in the order in which a graph reads those of a template."""
    rows, cols = _labels(call, arguments)
    scale = 1.0 if arguments.scale is None else arguments.scale
    of_rows, of_cols = rows.pop("guides", ()), cols.pop("guides", ())
    several = (*inputs, scale, arguments.bias, *rows.values(), *of_rows, *cols.values(), *of_cols, arguments.weights)
    return [x for x in several if x is not None]


def _planned(problem: Problem, exchange: Exchange) -> Plan:
    """The choices for calls of this signature."""
    loss, options, own = problem.loss, problem.options, problem.rows.own is not None
    several, reduced = len(exchange.layout) > 1, options.reduction != "none"
    workspace = workspace_on(problem.device, options.workspace, alone=not several)
    inputs = (problem.scale, problem.bias, *problem.inputs)
    wants = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    tiles = _tiles(problem, exchange, workspace)
    # one sweep of a pairwise loss gives gradients too; columns that one row meets alone are computed after the exchange
    sweep = wants and reduced and loss.pairwise and not own
    strips = keeps = False
    if reduced and not several:
        number = torch.ones((), dtype=accumulator(problem.dtype), device=problem.device)
        example = tiles(loss, number, None, workspace)
        # one product of each strip gives loss and gradient, or the loss of few pairs alone
        strips = bool(example.strip(problem.rows, problem.cols, wants))
        # the forward keeps values for a backward that follows at once
        keeps = wants and example.keeps(problem.rows, problem.cols) and not (own and loss.pairwise)
    # float16 underflows in a scorer unless the upstream gradient, a GradScaler's factor, goes through it
    underflows = False
    if problem.scorer is not None and isinstance(tiles, partial) and tiles.func is Scored:
        # also behind scores of float32
        types = {*problem.scorer.autocast.dtypes, *[x.dtype for x in problem.inputs], problem.dtype}
        underflows = torch.float16 in types
    may_replay = replayable(problem, exchange)
    replayed = may_replay and small(problem, exchange, tiles)
    # where one rank replays loss and gradients, the others compute both too
    at_once = ((sweep or strips or keeps) and not underflows) or (wants and (may_replay if several else replayed))
    if replayed and (several or (problem.scorer is None and problem.dtype == torch.float32)):
        # a graph keeps its memory between calls; a strip of float32 has three pieces
        workspace = min(workspace, MOST_GRAPH_BYTES)
    # a cached plan must not keep a process group alive
    cached = None if several or exchange.layout.group is not None else exchange
    plan = Plan(cached, tiles, workspace, accumulator(problem.dtype), at_once, wants, replayed)
    # losses of rows are computed first, and their gradients in the backward, by this plan
    return plan if reduced or not at_once else replace(plan, at_once=False, of_rows=plan)


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
        tiles = choose_tiles(backend, problem.loss, rows, cols)
        if rows.features.shape[1] == cols.features.shape[1]:
            return tiles
        return partial(halves_of(tiles), spans=_spans(exchange.layout))
    fused = choose_fused(backend, scorer, rows, cols)
    if fused is not None:
        return partial(fused, scorer=scorer, side=fused.fitting_side(rows, cols, workspace))
    if scorer.seed is not None and not exchange.pairs_once:
        remedy = "Take gather or ring, or put the scorer in eval mode."
        raise invalid("exchange", "compute each pair once if the scorer draws random numbers", "replicate", remedy)
    if backend == "dense":
        return partial(Scored, scorer=scorer, side=WHOLE)
    sizes = max(exchange.layout.rows), max(exchange.layout.cols)
    side = fitting_side(scorer, problem.rows, problem.cols, sizes, workspace)
    return partial(Scored, scorer=scorer, side=side)


def _spans(layout: Layout) -> tuple[Span, ...]:
    """The halves of rows that each rank's columns meet: the last columns, one for each of its rows, the second half."""
    spans: list[Span] = []
    for rank, (rows, cols) in enumerate(zip(layout.rows, layout.cols, strict=True)):
        start, stop = layout.start(rank), layout.start(rank) + cols
        spans += [Span(0, start, stop - rows), Span(1, stop - rows, stop)]
    return tuple(spans)


def _streamed(problem: Problem, tokens: tuple[int, int] | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call of features in host memory, whose strips are as long as the memory that is free now allows.

    tokens: those of a row and of a column on this rank, where they may differ.
    """
    device, options, rows, cols = problem.device, problem.options, problem.rows, problem.cols
    workspace = workspace_on(device, options.workspace)
    layout, carrier = Layout(None, 0, (len(rows),), (len(cols),)), None
    if collectives.size(options.group) > 1 and options.exchange != "single":
        layout = agreed_layout(options, problem.loss, rows, cols, problem.statement, tokens, problem.unnamed)
        carrier = consistency.carrier_on_host(options.group, device)
    dtype = problem.dtype if problem.scorer is None else None
    with Single(options.gradient, layout).in_step():
        problem = _padded(problem, layout.tokens)
        cuts = host.cut(problem.rows, problem.cols, device, workspace)
        exchange = host.Host(options.gradient, layout, device, dtype, cuts, carrier)
        rows, cols = (host.without_features_on(shard, device) for shard in (problem.rows, problem.cols))
        problem = replace(problem, rows=rows, cols=cols).placed(exchange)
        tiles = _tiles(problem, exchange, workspace)
        weights = None if problem.weights is None else problem.weights.to(device)
    plan = Plan(None, tiles, workspace, accumulator(problem.dtype), at_once=False)
    problem = replace(problem, weights=weights)
    return Operation.apply, (_call(problem, plan, exchange), problem.scale, problem.bias, *problem.inputs)
