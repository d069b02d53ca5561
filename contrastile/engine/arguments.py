"""Checks on the tensors that a user passes to the losses, in the sentence form of `_errors.py`.

Used by `problem.py` and `modules/`. A check reads shapes, dtypes and devices. Two checks read values: positives in
range, and rows of unit length. On a GPU they do so in the first `MOST_READS` calls of a process only (`GpuReads`).
"""

import itertools
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from contrastile._dispatch import Options
from contrastile._errors import invalid
from contrastile._torch import pytree
from contrastile._types import FEATURES, shape_or_type
from contrastile.distributed import collectives
from contrastile.exchange import host
from contrastile.losses.base import Gathers, PairLoss, Shard, changed, count_equal
from contrastile.losses.hardness import OWN, Hardness
from contrastile.losses.queue import NOBODY
from contrastile.offload import present_device, with_index
from contrastile.tiles.base import Tiles, nonfinite_flag

# calls of a process that read values of one kind on a GPU: a read waits for the device, which a step must not
MOST_READS = 16


class GpuReads:
    """A count of this process's reads of one kind of values on a GPU."""

    def __init__(self) -> None:
        self._taken = itertools.count()

    def allowed(self, *tensors: Tensor) -> bool:
        """Return whether these tensors may be read: always on the host, `MOST_READS` times on a GPU."""
        return not any(on_gpu(x) for x in tensors) or next(self._taken) < MOST_READS


def on_gpu(x: Tensor) -> bool:
    """Return whether a read of x makes the host wait for a device."""
    return x.is_cuda


def captured(*tensors: Tensor) -> bool:
    """Return whether operations on these tensors are being captured in a CUDA graph, where nothing can be read."""
    return any(on_gpu(x) for x in tensors) and torch.cuda.is_current_stream_capturing()


def features(name: str, x: Tensor, *, own: bool = False) -> None:
    """Check that x is [rows, features] of a supported floating dtype; `own`: or [rows, H, features]."""
    if not isinstance(x, Tensor):
        raise invalid(name, "be a tensor", type(x).__name__, _instead_of(x))
    sharded = hasattr(x, "device_mesh")
    if sharded or x.layout != torch.strided:
        got = "a DTensor" if sharded else x.layout
        raise invalid(name, "be a dense tensor of this process", got, "Pass its to_local(), or its to_dense().")
    if x.ndim != 2 and not (own and x.ndim == 3):
        rule = "have two dimensions [rows, features]" + ", or three [queries, H, features]" * own
        remedy = "Flatten the others first, or compare token vectors by contrast(..., scorer=MaxSim())."
        raise invalid(name, rule, f"shape {list(x.shape)}", remedy if x.ndim > 2 else "Pass a batch.")
    if not x.is_floating_point():
        raise invalid(name, "be floating point", x.dtype, "Convert it with .float().")
    if x.dtype not in FEATURES:
        raise invalid(name, "be bf16, fp16, fp32 or fp64", x.dtype, "Convert it with .float().")
    if x.shape[-1] == 0:
        raise invalid(name, "have at least one feature", f"shape {list(x.shape)}", "Check the encoder's output.")


def _instead_of(x: object) -> str:
    """The remedy for features that are no tensor."""
    if type(x).__name__ in ("Ragged", "KeyQueue"):
        return "Call contrast(..., scorer=MaxSim())." if type(x).__name__ == "Ragged" else "Pass its keys."
    if isinstance(x, (list, tuple)) and any(isinstance(part, Tensor) for part in x):
        # torch.as_tensor takes lists of numbers only
        return "Pass one of its tensors, or join them with torch.stack or torch.cat."
    if isinstance(x, (list, tuple)) or hasattr(x, "__array__"):
        return "Convert it with torch.as_tensor."
    return "Pass the tensor of features."


def alike(name: str, x: Tensor, other_name: str, other: Tensor, cast: torch.dtype | None = None) -> None:
    """Check that x and other have one feature size, dtype and device.

    cast: the dtype to which autocast casts operands, whatever their own is; it leaves float64 as it is.
    """
    if x.shape[-1] != other.shape[-1]:
        rule, got = f"have the same feature size as `{other_name}`", f"{x.shape[-1]} and {other.shape[-1]}"
        raise invalid(name, rule, got, "Project one side first.")
    if x.dtype != other.dtype and (cast is None or torch.float64 in (x.dtype, other.dtype)):
        rule, got = f"have the dtype of `{other_name}`", f"{x.dtype} and {other.dtype}"
        raise invalid(name, rule, got, "Convert one side first.")
    same_device(name, x, other_name, other)


def same_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.device != other.device:
        rule, got = f"be on the device of `{other_name}`", f"{x.device} and {other.device}"
        raise invalid(name, rule, got, "Move one side first.")


def guides(pairs: Sequence[tuple[Tensor, Tensor]], q: Tensor, k: Tensor, negatives: Tensor | None) -> None:
    """Check pairs of further features of queries and keys, such as a teacher's: constants of one size."""
    keys = len(k) + (0 if negatives is None else len(negatives))
    for guide_q, guide_k in pairs:
        sides = (("guide_q", guide_q, "q", q, len(q)), ("guide_k", guide_k, "k", k, keys))
        for name, x, other_name, other, _ in sides:
            features(name, x)
            same_device(name, x, other_name, other)
            constant(name, x)
        if negatives is not None and negatives.ndim == 3:
            rule, got = "be shared by all queries with a guide", f"shape {list(negatives.shape)}"
            raise invalid("negatives", rule, got, "Pass them as [H, features].")
        alike("guide_k", guide_k, "guide_q", guide_q)
        for name, x, other_name, _, n in sides:
            if len(x) != n:
                continued = name == "guide_k" and negatives is not None
                remedy = f"Pass one row for each{', and for each of the `negatives`' if continued else ''}."
                raise invalid(name, f"have as many rows as `{other_name}`", f"{len(x)} and {n}", remedy)


def pair_loss(loss: PairLoss, guides: int, targets: Tensor | None, negatives: Any, *, scored: bool) -> None:
    """Check that the loss is one of pairs, and that its guides, targets and negatives are given.

    guides: number of pairs of further features. scored: a scorer compares the sides.
    """
    if not isinstance(loss, PairLoss):
        got = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
        remedy = "Pass Softmax(...) or Sigmoid(...), say. A module such as ClipLoss is called itself."
        raise invalid("loss", "be a loss of contrastile.losses, as an object", got, remedy)
    if loss.guides != guides:
        name, rule = type(loss).__name__, "be given for" if loss.guides else "be left out for"
        got = "both" if guides else None
        raise invalid("guide_q", f"{rule} the loss {name}", got, "Further features go with a loss that reads them.")
    if loss.reads_targets and targets is None:
        raise invalid("loss", "be one of pairs", type(loss).__name__, "ScoreDistillLoss gives it its lists.")
    if isinstance(loss, Hardness) and loss.hardness_mode == OWN:
        option = f'hardness_mode="{OWN}"'
        if scored:
            # negatives of three dimensions are vectors of tokens then
            remedy = "Take another mode: with a scorer all queries share the negatives."
            raise invalid("scorer", f"be left out with {option}", "one", remedy)
        has_own(negatives, option)


def has_own(negatives: Any, option: str) -> None:
    """Check that the negatives are each query's own, as this option of the loss needs them."""
    if not isinstance(negatives, Tensor) or negatives.ndim != 3:
        rule = f"be [N, H, D], each query's own, with {option}"
        got = None if negatives is None else shape_or_type(negatives)
        raise invalid("negatives", rule, got, "List them.")


def own_excluded(ids: Tensor | None, query_ids: Tensor | None) -> Tensor | None:
    """The mask [N, H] of each query's own negatives that have its id."""
    # torch compares no unsigned types with others
    return None if ids is None or query_ids is None else ids.long() == query_ids.long()[:, None]


def own_negatives(
    own: Tensor | None, ids: Tensor | None, query_ids: Tensor | None, q: Tensor, device: torch.device | str | None
) -> None:
    """Check negatives [N, H, D] of each query alone, and their ids [N, H]."""
    if own is None:
        if ids is not None:
            rule = "go with `negatives` of three dimensions [queries, H, features]"
            raise invalid("negative_ids", rule, "others", "Continue `key_ids` over shared negatives.")
        return
    if len(own) != len(q):
        rule = f"have a list for each of the {len(q)} queries where they have three dimensions"
        got, remedy = f"shape {list(own.shape)}", "List each query's own, or pass shared ones as [H, features]."
        raise invalid("negatives", rule, got, remedy)
    if device is not None and torch.device(device).type != q.device.type:
        got = f"shape {list(own.shape)}"
        raise invalid("negatives", "be shared by all queries with features in host memory", got, "Leave `device` out.")
    if ids is None:
        return
    if query_ids is None:
        raise invalid("query_ids", "be given where `negative_ids` is", None, "Pass both, or neither.")
    vector("query_ids", query_ids, "q", q, integer=True)
    if not isinstance(ids, Tensor) or ids.shape != own.shape[:2] or ids.is_floating_point() or ids.is_complex():
        got = f"shape {list(ids.shape)}, {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        rule = f"be integers of shape {list(own.shape[:2])}, one for each of the negatives"
        raise invalid("negative_ids", rule, got, "A negative with the id of its query does not count.")
    same_device("negative_ids", ids, "query_ids", query_ids)
    if ids.dtype == torch.bool:
        # as ids, its truth values would be those of queries 0 and 1
        remedy = "Of a mask of pads make ids: torch.where(pads, query_ids[:, None], -1)."
        raise invalid("negative_ids", "be integers", ids.dtype, remedy)


def shared_by_queries(negatives: Any, k: Any) -> None:
    """Check that the negatives of a scorer are nested tensors like those of k, and no lists of each query's own."""
    more, keys = ([x for x in pytree.tree_leaves(side) if isinstance(x, Tensor)] for side in (negatives, k))
    if more and keys and more[0].ndim == keys[0].ndim + 1:
        rule, got = "be shared by all queries with a scorer", [list(x.shape) for x in more]
        remedy = "Flatten them to [N * H, ...], negatives of every query, or leave `scorer` out."
        raise invalid("negatives", rule, f"shapes {got}", remedy)


def same_length(name: str, x: Tensor, other_name: str, other: Tensor, otherwise: str = "") -> None:
    """Check that x has as many rows as other; `otherwise`: a further remedy."""
    if len(x) != len(other):
        remedy = f"Pass one row for each: row i of one belongs to row i of the other.{otherwise}"
        raise invalid(name, f"have as many rows as `{other_name}`", f"{len(x)} and {len(other)}", remedy)


def vector(name: str, x: Tensor, rows_name: str, rows: Tensor, *, integer: bool) -> None:
    """Check that x is [n], one entry for each of the rows, on their device."""
    if not isinstance(x, Tensor) or x.shape != rows.shape[:1]:
        rule = f"be a tensor of shape [{len(rows)}], one entry for each row of `{rows_name}`"
        raise invalid(name, rule, shape_or_type(x), _as_vector(name, x, len(rows)))
    # labels may be of two kinds, ids are of many
    if integer and (x.is_floating_point() or x.is_complex() or (x.dtype == torch.bool and "ids" in name)):
        raise invalid(name, "be integers", x.dtype, "Number the groups first, with torch.unique for example.")
    if x.is_complex():
        raise invalid(name, "be real numbers", x.dtype, "Convert it with .float().")
    same_device(name, x, rows_name, rows)


def _as_vector(name: str, x: object, rows: int) -> str:
    """The remedy for a vector of another shape or type."""
    if isinstance(x, (list, tuple)) and any(isinstance(entry, str) for entry in x):
        return "Pass a number for each word, the same one on all ranks."
    if not isinstance(x, Tensor):
        return "Convert it with torch.as_tensor."
    if name == "labels" and x.ndim == 1 and 0 < len(x) < rows and rows % len(x) == 0:
        return f"Pass labels.repeat({rows // len(x)}) where views are concatenated."
    # in quotes, so that a loss puts its own name for the argument there
    if x.shape == (rows, 1):
        return f"Pass `{name}`[:, 0]."
    if "labels" in name and x.ndim == 2 and len(x) == rows:
        return f"Pass `{name}`.argmax(dim=1) if its rows are one-hot."
    return f"Pass the entries of these {rows} rows, in their order."


def constant(name: str, x: Tensor) -> None:
    """Check that x, for which no gradient is computed, requires none."""
    if x.requires_grad and torch.is_grad_enabled():
        raise invalid(name, "not require a gradient", "some that do", "Detach them: they are taken as constants.")


def positives(x: Tensor, q: Tensor) -> None:
    """Check that x is [N] or [N, P] integers: indices into the keys, −1 pads."""
    if not isinstance(x, Tensor) or x.ndim not in (1, 2) or len(x) != len(q):
        rule = f"be a tensor of shape [{len(q)}] or [{len(q)}, P]"
        remedy = "List each query's keys." if isinstance(x, Tensor) else "Convert it with torch.as_tensor."
        raise invalid("positives", rule, shape_or_type(x), remedy)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        mask = x.dtype == torch.bool and x.ndim == 2
        remedy = _of_mask(x) if mask else "Pass indices of keys, -1 where there is none."
        raise invalid("positives", "be integers", x.dtype, remedy)
    same_device("positives", x, "q", q)


def _of_mask(mask: Tensor) -> str:
    """The remedy for a mask [N, M] in place of indices."""
    device = "" if mask.device.type == "cpu" else ", device=mask.device"
    return f"Of a mask make indices: torch.where(mask != 0, torch.arange({mask.shape[1]}{device}), -1)."


_gpu_reads = GpuReads()


def in_range(positives: Tensor, keys: int) -> None:
    """Check that all positives index a key or are −1, where they may be read; else `mask_out_of_range` does."""
    if positives.numel() == 0 or captured(positives) or not _gpu_reads.allowed(positives):
        return
    least, most = (int(bound) for bound in torch.aminmax(positives.long()))
    if least < -1 or most >= keys:
        index = most if most >= keys else least
        rule = f"index this rank's {keys} keys, or be -1"
        raise invalid("positives", rule, index, "Count from this rank's first key.")
    if positives.ndim == 2 and positives.shape[1] >= keys > 2 and least >= 0 and most <= 1:
        # as indices, its rows would name keys 0 and 1 many times; a list may name key 1 so, as its last one
        if positives.element_size() == 1 or bool(((positives == 0).sum(1) > 1).any()):
            got = f"a mask of shape {list(positives.shape)}"
            raise invalid("positives", "be indices of keys", got, _of_mask(positives))
        warnings.warn(f"Positives of 0 and 1 alone are taken as indices of keys. {_of_mask(positives)}", stacklevel=2)


def mask_out_of_range(positives: Tensor, keys: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Positives and scale of a GPU, with −1 in place of each positive out of range, and a scale of NaN if there is one.

    The host reads nothing. The loss and all gradients of all ranks become NaN.
    """
    if not on_gpu(positives):
        return positives, scale
    outside = (positives < -1) | (positives >= keys)
    nothing = torch.zeros_like(scale)
    return positives.masked_fill(outside, -1), scale + nothing.masked_fill(outside.any().to(scale.device), torch.nan)


def with_loss_numbers(
    loss: PairLoss, rows: Shard, cols: Shard, scale: Tensor, gathers: Gathers, tiles: Tiles | None = None
) -> tuple[Shard, Shard, Tensor]:
    """Both shards with the numbers that the loss takes from guides and labels, and the scale.

    The scale is NaN where a guide is not finite, which would change a mask silently. Positions are counted on this
    rank. gathers: see `PairLoss.counted`. tiles: those that compute the call, which may have kernels for these numbers.
    """
    if rows.guides:
        numbers = loss.guide_numbers(rows, cols, None) if tiles is None else tiles.guide_numbers(rows, cols)
        rows = changed(rows, numbers=numbers)
        # tiles that check guides do so in a block with pairs
        if tiles is None or not tiles.checks_guides or not len(rows) or not len(cols):
            read = (*rows.guides, *cols.guides, *([] if numbers is None else [numbers]))
            scale = scale + nonfinite_flag(torch.zeros_like(scale), *read)
    if loss.counts_positives:
        rows, cols = loss.counted(rows, cols, gathers, count_equal if tiles is None else tiles.count_equal)
    return rows, cols, scale


def computing_device(features: torch.device, options: Options) -> torch.device:
    """The device of the computation: that of the features, or another to which host memory is streamed."""
    if options.device is None:
        return features
    device = with_index(present_device(options.device, "where the features are"))
    if device == features:
        return device
    if features.type != "cpu":
        got = f"{device}, and features on {features}"
        raise invalid("device", "be where the features are, unless those are in host memory", got, "Leave it out.")
    host.check_exchange(options.exchange, collectives.size(options.group))
    return device


def above_least(x: Tensor) -> Tensor:
    """Labels or ids in int64, where the least number, that of negatives without one, becomes the next."""
    return x.long().clamp(min=NOBODY + 1)


def number(name: str, x: Tensor | float, q: Tensor, device: torch.device | str | None = None) -> None:
    """Check that x is a number, or a floating tensor of shape [] or [1] on the device of q or of the computation."""
    if isinstance(x, bool) or not isinstance(x, (int, float, Tensor, Real)):
        rule = "be a number or a tensor of shape [] or [1]"
        remedy = "Convert it with float()." if name.endswith("bias") else "Pass logit_scale.exp(), say."
        raise invalid(name, rule, type(x).__name__, remedy)
    if not isinstance(x, Tensor):
        return
    if x.shape not in (torch.Size([]), torch.Size([1])):
        raise invalid(name, "be a tensor of shape [] or [1]", f"shape {list(x.shape)}", "One number serves all pairs.")
    if not x.is_floating_point():
        raise invalid(name, "be floating point", x.dtype, "Convert it with .float().")
    if x.device != q.device and (device is None or x.device.type != torch.device(device).type):
        raise invalid(name, "be on the device of `q`", f"{x.device} and {q.device}", "Move one side first.")
