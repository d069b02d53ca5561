"""contrast(q, k, ...): the function under every loss.

Stands between the loss classes of `modules/`, which only name their options, and `engine/`, which checks the
arguments, plans the call and runs it as one autograd operation. Features go in, one number comes out; the backward
returns their gradients and those of the scale and the bias. No matrix of size b × b exists at any moment.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Never

import torch
from torch import Tensor, nn

from contrastile._dispatch import Options
from contrastile._types import Backend, ExchangeName, Gradient, Reduction
from contrastile.engine import arguments as checks
from contrastile.engine.plan import prepare, share_error
from contrastile.gradcache.inputs import Ragged
from contrastile.losses.base import PairLoss
from contrastile.losses.softmax import Softmax
from contrastile.scorers import MaxSim, padded, tokens, unit_vectors

# the scorer of sides that are normalised already: one object, whose tiles are measured once (`tiles/fitting.py`)
PLAIN_MAXSIM = MaxSim()
PLAIN_MAXSIM.gets_unit_vectors = True


def contrast(
    q: Any,
    k: Any,
    *,
    scale: Tensor | float | None = None,
    bias: Tensor | float | None = None,
    loss: PairLoss = Softmax(symmetric=True),  # noqa: B008 (a frozen value)
    positives: Tensor | None = None,
    negatives: Any = None,
    query_labels: Tensor | None = None,
    key_labels: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    guide_q: Tensor | None = None,
    guide_k: Tensor | None = None,
    weights: Tensor | None = None,
    scorer: nn.Module | None = None,
    backend: Backend = "auto",
    exchange: ExchangeName = "auto",
    group: Any = None,
    gradient: Gradient = "mean",
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    workspace: int | None = None,
    device: torch.device | str | None = None,
    **unknown: Never,
) -> Tensor:
    """The contrastive loss of q [N, D] against k [M, D], without their matrix of similarities.

    Naively, for the default loss,

        x = scale * q @ k.T
        labels = torch.arange(len(q))
        (F.cross_entropy(x, labels) + F.cross_entropy(x.T, labels)) / 2

    up to rounding, in the memory of a tile. Gradients reach q, k, negatives, scale and bias.

    Arguments:
        q, k: features, bf16, fp16, fp32 or fp64, used as given: normalise them first if the method wants that. Under
            autocast products are made in its dtype, as by `torch.matmul`; sums and the loss stay in float32.
        scale, bias: numbers, or tensors of shape [] or [1]; x_ij = scale · ⟨q_i, k_j⟩ + bias.
        loss: `Softmax(...)`, `Sigmoid(...)`, `Decoupled(...)` and others of `contrastile.losses`.
        positives: [N] or [N, P] indices into this rank's keys, −1 pads; without it (and without labels) key i is the
            positive of query i. The loss of a row is the mean over its positives of −log p. A row without any
            leaves the mean; if no row has one, the loss and its gradients are 0. On a GPU indices out of range raise
            in the first 16 calls of a process; later calls do not wait for the device, and return NaN for them.
        negatives: [H, D] further keys, negatives of every query of all ranks; or [N, H, D], H of each query alone
            (not with a scorer).
        query_labels, key_labels: [N], [M] integers; pairs of equal labels are the positives.
        query_ids, key_ids: [N], [M] integers; pairs of equal ids that are not positive do not count at all. With
            `negatives` [H, D], key_labels and key_ids may continue over them ([M + H]); otherwise they have ids and
            labels of their own.
        negative_ids: [N, H] integers for negatives [N, H, D]; a negative with the id of its query is a pad.
        guide_q, guide_k: [N, G], [M, G] features of another model, constants, for losses that compare them too:
            `Guided(...)`. With `negatives`, guide_k continues over them.
        weights: [N]; the loss is Σ w·loss / Σ w, and 0 where all are 0. In a symmetric loss they weigh the keys'
            direction too. Weights that cancel, such as 1 and -1, have no mean: the loss is not finite. They are
            constants: weights that require a gradient are refused.
        scorer: a module whose `scorer(rows, columns)` are the scores [I, J] of a block, instead of dot products:
            x_ij = scale · Φ(q_i, k_j; Ω) + bias, gradients of its parameters Ω included (Gao et al. 2021, section
            5). Then q, k and negatives are tensors whose first axis is the batch, nested in any way; the scorer gets
            blocks of them, nested in the same way. scale is 1 by default. A side `Ragged(values [T, D], lengths)`
            becomes vectors [B, L, D] and mask [B, L]. See `contrastile.scorers`, and docs/scorers.md.

    Options of the computation, the same for every loss:
        backend: "dense" holds the matrix, "eager" goes tile by tile in PyTorch, "triton" in fused kernels.
        exchange: "single" leaves the other ranks out; "replicate", "gather", "ring" and "hierarchical" (a ring between
            nodes, a gather within each) bring the other ranks' columns.
        group: the process group that shares the batch; None is the default group.
        gradient: what the data-parallel wrapper does with the ranks' gradients, their "mean" (DDP, FSDP) or "sum".
        label_smoothing: the share of each target that is spread over all keys that count.
        reduction: "mean" or "sum" over the global batch, or "none": this rank's rows [N], scaled so that the mean
            over all ranks' rows is "mean". Call backward from the mean of a rank's rows: the gradients are then those
            of "mean", also where ranks have unequal numbers of rows.
        workspace: bytes that may be used beside inputs, outputs and accumulators; by default 1/64 of the device's
            memory; on one GPU 1/32, up to 2.25 GiB, if that is more.
        device: device of the computation, and of the scorer's parameters, for features in host memory: they are
            streamed to it, and their gradients back. By default that of the features. Several ranks form a ring
            through host memory.
    `backend` and `exchange` are "auto" by default, and the choice is logged once.

    Returns the loss, a scalar (or [N] with reduction="none") in float32, or float64 for float64 features.
    Raises ValueError for arguments that do not fit together; the sentence has the name of the argument, the rule and
    the value. An error of one rank is raised on all of them, except with exchange="single". If a rank is lost, the
    others raise `LostRankError` of `contrastile.distributed.failure`. Features or a scale that are not finite give NaN,
    in the loss and in the gradients; so does a bias, in a loss that depends on it.

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
        if unknown:
            Options.refuse(unknown, tuple(signature(contrast).parameters)[2:-1])
        options = Options(backend, exchange, group, gradient, label_smoothing, reduction, workspace, device)
        if label_smoothing and isinstance(loss, PairLoss):
            loss = loss.smoothed(label_smoothing)
        if scorer is not None:
            q, k, negatives, scorer = _scorer_sides(q, k, negatives, scorer)
    except ValueError as error:
        share_error(error, group, exchange)
        raise
    operation, inputs = prepare(
        q, k, scale, loss, options, bias=bias, positives=positives, negatives=negatives, query_labels=query_labels,
        key_labels=key_labels, query_ids=query_ids, key_ids=key_ids, negative_ids=negative_ids, weights=weights,
        scorer=scorer, guides=() if guide_q is None and guide_k is None else ((guide_q, guide_k),),
    )  # fmt: skip
    return operation(*inputs)


def _scorer_sides(q: Any, k: Any, negatives: Any, scorer: nn.Module) -> tuple[Any, Any, Any, nn.Module]:
    """The sides of a scorer, with packed texts padded, and the scorer; `MaxSim` gets vectors normalised once."""
    if isinstance(scorer, MaxSim) and scorer.normalize and scorer.unmodified:
        # tiles would normalise a row again for each column
        q, k, negatives, scorer = *map(_normalized, (q, k, negatives)), PLAIN_MAXSIM
    # keys and negatives are one side, of texts of one length
    longest = max([1, *(n for side in (k, negatives) if isinstance(side, Ragged) for n in side.lengths)])
    q = padded_texts(q, 1) if isinstance(q, Ragged) else q
    k, negatives = (padded_texts(x, longest) if isinstance(x, Ragged) else x for x in (k, negatives))
    checks.shared_by_queries(negatives, k)
    if negatives is not None and hasattr(scorer, "pad_tokens"):
        k, negatives = _padded_alike(k, negatives, scorer)
    return q, k, negatives, scorer


def _normalized(side: Any) -> Any:
    """A side of `MaxSim` with vectors of length 1, nested as before; any other as it is, for a later error."""
    if isinstance(side, Ragged) and side.values.is_floating_point():
        return Ragged(unit_vectors(side.values.movedim(side.axis, 0)), side.lengths)
    try:
        vectors, mask = tokens("q", side)
    except ValueError:
        return side
    if not vectors.is_floating_point() or (mask is not None and mask.device != vectors.device):
        return side
    vectors = unit_vectors(vectors, mask)
    return (vectors, side[1]) if isinstance(side, (tuple, list)) else vectors


def _padded_alike(k: Any, negatives: Any, scorer: Any) -> tuple[Any, Any]:
    """Keys and negatives that are token vectors, padded to the longer of both, behind masks; any others as they are.

    scorer: has `MaxSim.pad_tokens`.
    """
    try:
        sides = [tokens("k", k), tokens("negatives", negatives)]
    except ValueError:
        # a later check raises the same
        return k, negatives
    lengths, masked = ({vectors.shape[1] for vectors, _ in sides}, {mask is not None for _, mask in sides})
    if len(lengths) == len(masked) == 1:
        return k, negatives
    return scorer.pad_tokens(k, max(lengths)), scorer.pad_tokens(negatives, max(lengths))


def padded_texts(texts: Ragged, least: int = 0) -> tuple[Tensor, Tensor]:
    """Packed vectors as `[B, L, D]` with their mask `[B, L]`; L is the longest text's number of tokens, or `least`."""
    lengths = torch.tensor(texts.lengths, dtype=torch.int64, device="cpu").to(texts.values.device, non_blocking=True)
    return padded(texts.values.movedim(texts.axis, 0), lengths, max((least, *texts.lengths)))
