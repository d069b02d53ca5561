"""contrast(q, k, ...): the one function under every loss, and the autograd operation among them.

Stands between the five loss classes of `modules.py`, which only name their options, and the three drawers below: an
exchange says which columns come here, tiles compute blocks, a loss says what is kept of them. Features go in, one
number comes out; the backward hands back their gradients and those of the scale and the bias. No matrix of size b ×
b is held at any moment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from contrastile import _check, comm
from contrastile._check import Sound, wrong
from contrastile._choose import Options, choose_exchange, choose_tiles
from contrastile._operation import traced, untraced
from contrastile._replay import replayed, with_loss
from contrastile._scored import Pair
from contrastile._streamed import away, device_of, streamed
from contrastile._sweep import Call, Gradients, backward, forward, halves, hand_back
from contrastile._types import accumulator
from contrastile.losses.base import PairLoss, Side
from contrastile.losses.softmax import Softmax


@untraced
def contrast(
    q: Any,
    k: Any,
    *,
    scale: Tensor | float | None = None,
    bias: Tensor | float | None = None,
    loss: PairLoss = Softmax(symmetric=True),  # noqa: B008 (a frozen value)
    positives: Tensor | Sound | None = None,
    negatives: Any = None,
    query_labels: Tensor | None = None,
    key_labels: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    weights: Tensor | None = None,
    scorer: nn.Module | None = None,
    **how: Any,
) -> Tensor:
    """The contrastive loss of q [N, D] against k [M, D], without their matrix of similarities.

    Naively, for the default loss,

        x = scale * q @ k.T
        labels = torch.arange(len(q))
        (F.cross_entropy(x, labels) + F.cross_entropy(x.T, labels)) / 2

    up to rounding, in the memory of a tile. Gradients reach q, k, negatives, scale and bias.

    Arguments:
        q, k: features, bf16, fp16, fp32 or fp64, used as given: normalise them first if the method wants that.
        scale, bias: numbers, or tensors of shape [] or [1]; x_ij = scale · ⟨q_i, k_j⟩ + bias.
        loss: `Softmax(...)` or `Sigmoid(...)` of `contrastile.losses`.
        positives: [N] or [N, P] indices into this rank's keys, −1 pads; without it (and without labels) key i is the
            positive of query i. The loss of a row is the mean over its positives of −log p. A row without any
            leaves the mean; if no row has one the mean is NaN, as `F.cross_entropy` has it when every target is
            ignored. On a GPU indices out of range raise in the first 16 calls of a process; later calls do not wait
            for the device, and return NaN for them.
        negatives: [H, D] further keys, negatives of every query.
        query_labels, key_labels: [N], [M] integers; pairs of equal labels are the positives.
        query_ids, key_ids: [N], [M] integers; pairs of equal ids that are not positive do not count at all. With
            `negatives`, key_labels and key_ids may go on over them ([M + H]); else negatives share theirs with
            nobody.
        weights: [N]; the loss is Σ w·loss / Σ w. In a symmetric loss they weigh the keys' direction too. They are
            constants: weights that require a gradient are refused.
        scorer: a module whose `scorer(rows, columns)` are the scores [I, J] of a block, instead of dot products:
            x_ij = scale · Φ(q_i, k_j; Ω) + bias, gradients of its parameters Ω included (Gao et al. 2021, section
            5). Then q, k and negatives are anything nested of tensors whose first axis is the batch, cut into
            blocks and handed over as they are; scale is 1 by default. See `contrastile.scorers`, and docs/scorers.md.

    How it is computed, the same keywords for every loss:
        backend: "dense" holds the matrix, "eager" goes tile by tile in PyTorch, "triton" in fused kernels.
        exchange: "single" is each process for itself; "replicate", "gather" and "ring" are ways to meet the other
            ranks' columns.
        group: the process group that shares the batch; None is the default group.
        gradient: what the data-parallel wrapper does with the ranks' gradients, their "mean" (DDP, FSDP) or "sum".
        label_smoothing: the share of each target that is spread over all keys that count.
        reduction: "mean" or "sum" over the global batch, or "none": this rank's rows, scaled so that their mean is
            "mean".
        workspace: bytes that may be used beside inputs, outputs and accumulators; by default 1/64 of the device's
            memory.
        device: where to compute while features wait in host memory, streamed from there, their gradients returned to
            it; by default where the features are.
    `backend` and `exchange` are "auto" by default, which says once in the log what it took.

    Returns the loss, a scalar (or [N] with reduction="none") in float32, or float64 for float64 features.
    Raises ValueError for anything that does not fit together, naming it, what it must be and what it is; on all ranks
    what one finds wrong, but for exchange="single". Where a rank is lost the others raise `LostRankError`, of
    `contrastile.rollcall`. Features or a scale that are not finite give NaN, in the loss and in the gradients; so
    does a bias, in a loss that it changes.

    >>> import torch.nn.functional as F
    >>> q, k = F.normalize(torch.randn(2, 6, 16), dim=-1)
    >>> contrast(q, k, scale=20.0).shape
    torch.Size([])

    With a learned distance:

    >>> from contrastile.scorers import Bilinear
    >>> contrast(q, k, scorer=Bilinear(16, 16), scale=20.0).shape
    torch.Size([])
    """
    try:
        options = Options.of(how, contrast)
        pair = None if scorer is None else Pair(scorer, q, k, negatives)
        if pair is None:
            keys = len(k) if isinstance(k, Tensor) and k.ndim else 0
            k = _multiplied(q, k, negatives)
        else:
            keys, q, k, scale = pair.keys, pair.rows[0], pair.cols[0], 1.0 if scale is None else scale
        rows, cols, loss = _prepare(
            q, k, keys, scale, bias, loss, options, positives,
            query_labels, key_labels, query_ids, key_ids, weights,
        )  # fmt: skip
        if pair is not None:
            rows, cols = pair.others(rows, cols)
        device = device_of(options.device, q)
        if away(q, device) and (pair is not None or (comm.size(options.group) > 1 and options.exchange != "single")):
            with_what = "several ranks" if pair is None else "a scorer"
            raise wrong("device", f"be left out with {with_what}", repr(str(device)), "Move the features there.")
    except ValueError as error:
        tell_all(error, how.get("group"), how.get("exchange", "auto"))
        raise
    inputs = (q, k, scale, bias) if pair is None else (*pair.rows, *pair.cols, scale, bias, *pair.scorer.parameters[:1])
    differentiated = [torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in inputs]
    said = {"scale": _said(scale), "bias": _said(bias), "weights": _said(weights), "requires_grad": differentiated}
    exchange = choose_exchange(options, loss, rows, cols, said)
    with exchange.in_step():
        dtype = q.dtype if pair is None else pair.scorer.dtype
        scale, bias = (
            None if x is None else comm.whole(_as_tensor(x, device, dtype), options.gradient) for x in (scale, bias)
        )
        assert scale is not None
        read = isinstance(positives, Tensor)
        if rows.positives is not None and read and not torch.compiler.is_compiling():
            kept, scale = _check.kept_in_range(rows.positives, keys, scale)
            rows = replace(rows, positives=kept)
        rows, cols = exchange.shards.place(rows, cols)
        if away(q, device):
            return streamed(q, k, scale, bias, loss, exchange, (rows, cols), weights, options, device)
        if pair is not None:
            return pair.contrasted(scale, bias, loss, exchange, (rows, cols), weights, options)
        if torch.compiler.is_compiling():
            return traced(q, k, keys if read else None, scale, bias, loss, rows, cols, weights, options)
        tiles = choose_tiles(options.backend, loss, rows, cols)
        call = Call(loss, tiles, exchange, rows, cols, weights, options.reduction, options.workspace)
        wants = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, scale, bias))
        operation = _ContrastAtOnce if wants and with_loss(call, q) else _Contrast
        result: Tensor = operation.apply(q, k, scale, bias, call)
        return result


def tell_all(error: ValueError, group: Any, exchange: str) -> None:
    """Raises on all ranks what one finds wrong before they meet: the others must not wait for it."""
    if comm.size(group) > 1 and exchange != "single":
        comm.tally(group, {"error": str(error)}, (0, 0))


def _multiplied(q: Any, k: Any, negatives: Any) -> Tensor:
    """All keys, the negatives behind them, after making sure that they can be multiplied with q."""
    _check.features("q", q)
    _check.features("k", k)
    _check.alike("k", k, "q", q)
    if negatives is None:
        return k
    _check.features("negatives", negatives)
    _check.alike("negatives", negatives, "k", k)
    return torch.cat([k, negatives])


def _prepare(
    q: Tensor,
    k: Tensor,
    keys: int,
    scale: Tensor | float | None,
    bias: Tensor | float | None,
    loss: PairLoss,
    options: Options,
    positives: Tensor | Sound | None,
    query_labels: Tensor | None,
    key_labels: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    weights: Tensor | None,
) -> tuple[Side, Side, PairLoss]:
    """What a rank can check by itself; rows, columns (negatives from `keys` on), the loss as the options want it."""
    if not isinstance(loss, PairLoss):
        got = loss.__name__ if isinstance(loss, type) else type(loss).__name__
        raise wrong("loss", "be a loss as an object", got, "Pass Softmax(...) or Sigmoid(...) of contrastile.losses.")
    if scale is None:
        raise wrong("scale", "be given for a dot product", None, "Pass logit_scale.exp(), say.")
    _check.number("scale", scale, q, options.device)
    if bias is not None:
        _check.number("bias", bias, q, options.device)
    if options.label_smoothing:
        loss = loss.smoothed(options.label_smoothing)
    if len(k) > keys:
        if loss.symmetric:
            raise wrong("negatives", "be left out for a symmetric loss", "both", "Take a one-way loss.")
        key_ids, key_labels = (
            _of_nobody(groups, len(k) - keys) if isinstance(groups, Tensor) and groups.shape == (keys,) else groups
            for groups in (key_ids, key_labels)
        )
    if loss.symmetric:
        _check.same_length("k", k, "q", q)
    rows, cols = _sides(q, k, keys, positives, query_labels, key_labels, query_ids, key_ids, loss)
    if weights is not None:
        _check.vector("weights", weights, "q", q, integer=False)
        _check.constant("weights", weights)
    return rows, cols, loss


class _Contrast(torch.autograd.Function):
    """Forward: one sweep for the statistics. Backward: one sweep for the gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        swept = forward(call, q, k, scale, bias)
        ctx.call = call
        ctx.save_for_backward(q, k, scale, bias, *call.groups, *swept.states, *swept.coefficients)
        return swept.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, scale, bias, *saved = ctx.saved_tensors
        swept = halves(saved[len(ctx.call.groups) :])
        with ctx.call.exchange.in_step():
            return *backward(ctx.call, upstream, q, k, scale, bias, swept, ctx.needs_input_grad[:4]), None


class _ContrastAtOnce(torch.autograd.Function):
    """The gradients with the loss: in one sweep where a pair's gradient waits for nothing, which saves a quarter of
    the work; and where the batch is small, which saves the host's time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        value, found = replayed(call, q, k, scale, bias, ctx.needs_input_grad[:4])
        ctx.call = call
        ctx.save_for_backward(q, k, scale, bias, *found)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, scale, bias, *found = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:4]
        with ctx.call.exchange.in_step():
            upstream = upstream * ctx.call.exchange.gradient_factor()
            return *hand_back(ctx.call, Gradients(*found), upstream, q, k, scale, bias, wanted), None


def _as_tensor(x: Tensor | float, device: torch.device, dtype: torch.dtype) -> Tensor:
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=accumulator(dtype), device=device)


def _said(x: Tensor | float | None) -> Any:
    """What a rank states of a number: its value, if it has not to be asked of the device."""
    return "a tensor" if isinstance(x, Tensor) else x if x is None else float(x)


def _sides(
    q: Tensor,
    k: Tensor,
    keys: int,
    positives: Tensor | Sound | None,
    query_labels: Tensor | None,
    key_labels: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    loss: PairLoss,
) -> tuple[Side, Side]:
    """Rows and columns with what they carry, positions counted on this rank."""
    for names, given in (
        (("query_labels", "key_labels"), (query_labels, key_labels)),
        (("query_ids", "key_ids"), (query_ids, key_ids)),
    ):
        if (given[0] is None) != (given[1] is None):
            missing, there = (names[0], names[1]) if given[0] is None else (names[1], names[0])
            raise wrong(missing, f"be given where `{there}` is", None, "Pass both, or neither.")
        for name, one, side_name, side in zip(names, given, ("q", "k"), (q, k), strict=True):
            if one is not None:
                _check.vector(name, one, side_name, side, integer=True)
    diagonal, sound = None, isinstance(positives, Sound)
    if isinstance(positives, Sound):
        positives = positives.indices
    if positives is not None:
        if query_labels is not None:
            raise wrong("positives", "be left out where labels are given", "both", "Pass one of the two.")
        if loss.symmetric:
            raise wrong("positives", "be left out for a symmetric loss", "both", "Pass labels, or take a one-way loss.")
        _check.positives(positives, q)
        if not sound and not torch.compiler.is_compiling():
            _check.in_range(positives, keys)
        positives = (positives[:, None] if positives.ndim == 1 else positives).long()
    elif query_labels is None:
        if keys < len(q):
            raise wrong("k", "have at least as many rows as `q`", f"{len(q)} and {keys}", "Or pass `positives`.")
        diagonal = 0
    # as one type: not every backend sends all of them
    query_labels, key_labels, query_ids, key_ids = (
        None if groups is None else groups.long() for groups in (query_labels, key_labels, query_ids, key_ids)
    )
    rows = Side(q.detach(), diagonal=diagonal, positives=positives, labels=query_labels, ids=query_ids)
    return rows, Side(k.detach(), labels=key_labels, ids=key_ids)


def _of_nobody(groups: Tensor, negatives: int) -> Tensor:
    """Ids, or labels, of the keys continued over negatives that share theirs with no query; integers, if they are."""
    if groups.is_floating_point() or groups.is_complex():
        return groups
    nobody = torch.full((negatives,), torch.iinfo(torch.int64).min, device=groups.device)
    return torch.cat([groups.long(), nobody])
