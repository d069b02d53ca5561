"""What one rank makes of a call by itself: everything that the user said, checked, as two sides and their numbers.

Stands between `_contrast.py`, which takes the user's words, and the ways of computing: each of them begins with a
`Task`, in which all is settled but who computes the tiles. The sentences of single tensors are `_check.py`'s; those
about how arguments go together are here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from contrastile import _check, comm
from contrastile._check import Sound, wrong
from contrastile._choose import Options
from contrastile._sweep import Call, MakeTiles
from contrastile._types import accumulator
from contrastile.exchange.base import Exchange
from contrastile.losses.base import PairLoss, Side
from contrastile.offload import numbered
from contrastile.tiles.scored import Scorer


@dataclass(frozen=True)
class Inputs:
    """What is compared: a tensor on either side, or with a scorer all those that it reads."""

    rows: tuple[Tensor, ...]
    # the negatives behind the keys
    cols: tuple[Tensor, ...]
    # how many of the columns are keys
    keys: int
    scorer: Scorer | None = None

    @classmethod
    def of(cls, q: Any, k: Any, negatives: Any) -> Inputs:
        """Features that can be multiplied with each other."""
        _check.features("q", q)
        _check.features("k", k)
        _check.alike("k", k, "q", q)
        if negatives is None:
            return cls((q,), (k,), len(k))
        _check.features("negatives", negatives)
        _check.alike("negatives", negatives, "k", k)
        return cls((q,), (torch.cat([k, negatives]),), len(k))

    @property
    def q(self) -> Tensor:
        return self.rows[0]

    @property
    def k(self) -> Tensor:
        return self.cols[0]

    @property
    def negatives(self) -> int:
        return len(self.k) - self.keys

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype if self.scorer is None else self.scorer.dtype


@dataclass(frozen=True)
class Pairing:
    """Which pairs are positive, which do not count, and what each query weighs, as the user says it."""

    positives: Tensor | Sound | None
    query_labels: Tensor | None
    key_labels: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    weights: Tensor | None

    def sides(self, inputs: Inputs, loss: PairLoss) -> tuple[Side, Side]:
        """Rows and columns with what they carry, positions counted on this rank."""
        if inputs.negatives and loss.symmetric:
            raise wrong("negatives", "be left out for a symmetric loss", "both", "Take a one-way loss.")
        if loss.symmetric:
            _check.same_length("k", inputs.k, "q", inputs.q, " Further keys go with loss=Softmax().")
        row_labels, col_labels = _groups("labels", self.query_labels, self.key_labels, inputs)
        row_ids, col_ids = _groups("ids", self.query_ids, self.key_ids, inputs)
        diagonal, positives = self._positives(inputs, loss)
        if self.weights is not None:
            _check.vector("weights", self.weights, "q", inputs.q, integer=False)
            _check.constant("weights", self.weights)
        (q, *more_q), (k, *more_k) = ([x.detach() for x in side] for side in (inputs.rows, inputs.cols))
        return (
            Side(q, diagonal=diagonal, positives=positives, labels=row_labels, ids=row_ids, others=tuple(more_q)),
            Side(k, labels=col_labels, ids=col_ids, others=tuple(more_k)),
        )

    def _positives(self, inputs: Inputs, loss: PairLoss) -> tuple[int | None, Tensor | None]:
        """The first row's positive where key i belongs to query i, or all rows' [N, P]; neither where labels tell."""
        if self.positives is None:
            if self.query_labels is not None:
                return None, None
            if inputs.keys < len(inputs.q):
                got = f"{len(inputs.q)} and {inputs.keys}"
                raise wrong("k", "have at least as many rows as `q`", got, "Or pass `positives`.")
            return 0, None
        if self.query_labels is not None:
            raise wrong("positives", "be left out where labels are given", "both", "Pass one of the two.")
        if loss.symmetric:
            raise wrong("positives", "be left out for a symmetric loss", "both", "Pass labels, or take a one-way loss.")
        indices, sound = self.positives, False
        if isinstance(indices, Sound):
            indices, sound = indices.indices, True
        _check.positives(indices, inputs.q)
        if not sound and not torch.compiler.is_compiling():
            _check.in_range(indices, inputs.keys)
        return None, (indices[:, None] if indices.ndim == 1 else indices).long()


def _groups(
    what: str, of_queries: Tensor | None, of_keys: Tensor | None, inputs: Inputs
) -> tuple[Tensor | None, Tensor | None]:
    """Labels, or ids, of rows and columns, as one type: not every backend sends all of them."""
    of_rows, of_cols = f"query_{what}", f"key_{what}"
    if of_queries is None and of_keys is None:
        return None, None
    if of_queries is None:
        raise wrong(of_rows, f"be given where `{of_cols}` is", None, "Pass both, or neither.")
    if of_keys is None:
        raise wrong(of_cols, f"be given where `{of_rows}` is", None, "Pass both, or neither.")
    if inputs.negatives and isinstance(of_keys, Tensor) and of_keys.shape == (inputs.keys,):
        of_keys = _of_nobody(of_keys, inputs.negatives)
    _check.vector(of_rows, of_queries, "q", inputs.q, integer=True)
    _check.vector(of_cols, of_keys, "k", inputs.k, integer=True)
    return of_queries.long(), of_keys.long()


def _of_nobody(groups: Tensor, negatives: int) -> Tensor:
    """Ids, or labels, of the keys continued over negatives that share theirs with no query; integers, if they are."""
    if groups.is_floating_point() or groups.is_complex():
        return groups
    nobody = torch.full((negatives,), torch.iinfo(torch.int64).min, device=groups.device)
    return torch.cat([groups.long(), nobody])


@dataclass(frozen=True)
class Task:
    """A call that is checked, and settled but for who computes its tiles."""

    inputs: Inputs
    scale: Tensor
    bias: Tensor | None
    loss: PairLoss
    rows: Side
    cols: Side
    weights: Tensor | None
    options: Options
    # where to compute
    device: torch.device
    # what positives may index; None where they are known to
    indexed: int | None
    # what all ranks must have in common, beside what their sides and options show
    said: dict[str, Any]

    @classmethod
    def of(cls, inputs: Inputs, pairing: Pairing, scale: Any, bias: Any, loss: PairLoss, options: Options) -> Task:
        """Everything that a rank can check by itself; the loss as the options want it."""
        if not isinstance(loss, PairLoss):
            got = loss.__name__ if isinstance(loss, type) else type(loss).__name__
            remedy = "Pass Softmax(...) or Sigmoid(...) of contrastile.losses."
            raise wrong("loss", "be a loss as an object", got, remedy)
        if scale is None and inputs.scorer is None:
            raise wrong("scale", "be given for a dot product", None, "Pass logit_scale.exp(), say.")
        scale = 1.0 if scale is None else scale
        _check.number("scale", scale, inputs.q, options.device)
        if bias is not None:
            _check.number("bias", bias, inputs.q, options.device)
        if options.label_smoothing:
            loss = loss.smoothed(options.label_smoothing)
        rows, cols = pairing.sides(inputs, loss)
        device = _device(inputs, options)
        indexed = inputs.keys if isinstance(pairing.positives, Tensor) else None
        said = {
            "scale": _said(scale),
            "bias": _said(bias),
            "weights": _said(pairing.weights),
            "requires_grad": _differentiated(inputs, scale, bias),
            "key dtype": str(inputs.k.dtype),
            "scorer": None if inputs.scorer is None else f"scores of {inputs.dtype}",
        }
        scale = _as_tensor(scale, device, inputs.dtype)
        bias = None if bias is None else _as_tensor(bias, device, inputs.dtype)
        return cls(inputs, scale, bias, loss, rows, cols, pairing.weights, options, device, indexed, said)

    def placed(self, exchange: Exchange) -> Task:
        """The same among all ranks: sharded numbers whole, positives in range, positions counted over all of them."""
        gradient = self.options.gradient
        scale, rows = comm.whole(self.scale, gradient), self.rows
        bias = None if self.bias is None else comm.whole(self.bias, gradient)
        if rows.positives is not None and self.indexed is not None and not torch.compiler.is_compiling():
            kept, scale = _check.kept_in_range(rows.positives, self.indexed, scale)
            rows = replace(rows, positives=kept)
        rows, cols = exchange.shards.place(rows, self.cols)
        return replace(self, scale=scale, bias=bias, rows=rows, cols=cols)

    def call(self, tiles: MakeTiles, exchange: Exchange) -> Call:
        """What the sweeps are handed."""
        options = self.options
        return Call(
            self.loss, tiles, exchange, self.rows, self.cols, self.weights, options.reduction, options.workspace
        )


def _device(inputs: Inputs, options: Options) -> torch.device:
    """Where to compute: where the features are, or where they are streamed to from host memory."""
    here = inputs.q.device
    if options.device is None:
        return here
    device = numbered(_check.present_device(options.device, "where the features are"))
    if device == here:
        return device
    if here.type != "cpu":
        got = f"{device}, and features on {here}"
        raise wrong("device", "be where the features are, unless those are in host memory", got, "Leave it out.")
    several = comm.size(options.group) > 1 and options.exchange != "single"
    if several or inputs.scorer is not None:
        with_what = "several ranks" if inputs.scorer is None else "a scorer"
        raise wrong("device", f"be left out with {with_what}", repr(str(device)), "Move the features there.")
    return device


def _as_tensor(x: Tensor | float, device: torch.device, dtype: torch.dtype) -> Tensor:
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=accumulator(dtype), device=device)


def _said(x: Tensor | float | None) -> Any:
    """What a rank states of a number: its value, if it has not to be asked of the device."""
    return "a tensor" if isinstance(x, Tensor) else x if x is None else float(x)


def _differentiated(inputs: Inputs, scale: Any, bias: Any) -> list[bool]:
    """What gets a gradient, for which ranks work together: one of a scorer's parameters stands for all."""
    parameters = () if inputs.scorer is None else inputs.scorer.parameters[:1]
    every = (*inputs.rows, *inputs.cols, scale, bias, *parameters)
    return [torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in every]
