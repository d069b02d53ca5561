"""contrast(q, k, ...): the one function under every loss, and the autograd operation among them.

Stands between the five loss classes of `modules.py`, which only name their options, and the three drawers below: an
exchange says which columns come here, tiles compute blocks, a loss says what is kept of them. Features go in, one
number comes out; the backward hands back their gradients and those of the scale and the bias. No matrix of size b ×
b is held at any moment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from contrastile import agreement, comm
from contrastile._check import Sound
from contrastile._choose import Options, choose_exchange, choose_tiles
from contrastile._operation import traced, untraced
from contrastile._replay import replayed, with_loss
from contrastile._scored import scored, scored_inputs
from contrastile._streamed import away, streamed
from contrastile._sweep import Call, Gradients, backward, forward, halves, hand_back
from contrastile._task import Inputs, Pairing, Task
from contrastile.exchange.base import Exchange
from contrastile.losses.base import PairLoss
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
        inputs = Inputs.of(q, k, negatives) if scorer is None else scored_inputs(scorer, q, k, negatives)
        pairing = Pairing(positives, query_labels, key_labels, query_ids, key_ids, weights)
        task = Task.of(inputs, pairing, scale, bias, loss, options)
    except Exception as error:
        # a scorer's own are of any kind
        tell_all(error, how.get("group"), how.get("exchange", "auto"))
        raise
    exchange = choose_exchange(options, task.loss, task.rows, task.cols, task.said)
    with exchange.in_step():
        return _computed(task.placed(exchange), exchange)


def tell_all(error: Exception, group: Any, exchange: str) -> None:
    """Raises on all ranks what one finds wrong before they meet: the others must not wait for it."""
    if comm.size(group) > 1 and exchange != "single":
        known = isinstance(error, ValueError)
        sentence = str(error) if known else f"{type(error).__name__}: {error}"
        try:
            agreement.tally(group, {"error": sentence}, (0, 0))
        except ValueError:
            # what is no sentence of ours stays here what it is
            if known:
                raise


def _computed(task: Task, exchange: Exchange) -> Tensor:
    """The loss, by the one operation that this task is for."""
    inputs = task.inputs
    if away(inputs.q, task.device):
        return streamed(task, exchange)
    if inputs.scorer is not None:
        return scored(task, inputs.scorer, exchange)
    if torch.compiler.is_compiling():
        return traced(task)
    call = task.call(choose_tiles(task.options.backend, task.loss, task.rows, task.cols), exchange)
    given = (inputs.q, inputs.k, task.scale, task.bias)
    wants = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    operation = _ContrastAtOnce if wants and with_loss(call, inputs.q) else _Contrast
    result: Tensor = operation.apply(*given, call)
    return result


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
