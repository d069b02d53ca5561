"""The arguments of a call, and the problem that they make: two shards, a loss, a scale and a bias, all checked.

First step of a call. `Arguments` holds them as passed. `check` refuses arguments that do not go together; the checks
of single tensors are in `arguments.py`. `Problem` is the result, ready to be planned. Later calls of a signature check
values only, such as positives in range.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from contrastile._dispatch import Options
from contrastile._errors import invalid
from contrastile._torch import pytree
from contrastile._types import accumulator
from contrastile.distributed import collectives
from contrastile.distributed.failure import weakly
from contrastile.engine import arguments as checks
from contrastile.exchange.base import Exchange
from contrastile.gradcache.modes import joined
from contrastile.losses.base import PairLoss, Shard, changed
from contrastile.losses.queue import NOBODY
from contrastile.tiles.scored import Form, Scorer

# types of tensors that are whole on every rank
PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class Arguments:
    """The arguments of `contrast`, as passed."""

    q: Any
    k: Any
    scale: Tensor | float | None
    # with the options' label smoothing
    loss: PairLoss
    options: Options
    bias: Tensor | float | None = None
    positives: Tensor | None = None
    negatives: Any = None
    query_labels: Tensor | None = None
    key_labels: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    weights: Tensor | None = None
    scorer: nn.Module | None = None
    # words of the scorer whose scores are the features
    scored_by: str | None = None
    # pairs of further features of queries and keys, constants, such as a teacher's
    guides: tuple[tuple[Tensor, Tensor], ...] = ()
    # factor of the guides' product
    guide_scale: Tensor | float | None = None
    # [N, P] weight of each positive
    targets: Tensor | None = None
    # every query has one key and every key one query, whatever the loss
    paired: bool = False
    # positives are in range by construction
    positives_in_range: bool = False
    # [N, H] ids of negatives [N, H, D]
    negative_ids: Tensor | None = None
    # number of each query's first negatives that are positives
    own_positives: int = 0
    # queries are columns too; keys are rows too, as second halves of rows that meet the last N columns (`halves.py`)
    among: tuple[bool, bool] = (False, False)
    # `key_ids` has the least number for negatives that have no id
    unnamed: bool = False

    def signature(self) -> Hashable:
        """The facts that checks and plan depend on: calls of equal signature differ in the values of tensors alone."""
        tensors = (
            self.q, self.k, self.scale, self.bias, self.positives, self.negatives, self.query_labels, self.key_labels,
            self.query_ids, self.key_ids, self.weights, self.targets, self.negative_ids,
            self.guide_scale, self.scorer, *[x for pair in self.guides for x in pair],
        )  # fmt: skip
        kinds = [
            x if x is None
            else (type(x), x.shape, x.dtype, x.device, x.layout, x.requires_grad) if isinstance(x, Tensor)
            else tuple(map(_kind, x)) if isinstance(x, (tuple, list))
            else type(x)
            for x in tensors
        ]  # fmt: skip
        group = self.options.group
        words = {**vars(self.options), "group": group and weakly(group)}.values()
        return (
            *words, self.loss, self.paired, self.positives_in_range, self.own_positives, self.among, self.cast(),
            # one tensor of labels for both sides is sorted once
            torch.is_grad_enabled(), self.query_labels is self.key_labels, *kinds,
        )  # fmt: skip

    @property
    def own(self) -> Tensor | None:
        """The negatives [N, H, D] where each query has its own."""
        one_each = self.scorer is None and isinstance(self.negatives, Tensor) and self.negatives.ndim == 3
        return self.negatives if one_each else None

    @property
    def ids(self) -> tuple[Tensor | None, Tensor | None]:
        """The ids of queries and of keys; none if the queries' ids serve their own negatives alone."""
        own_alone = self.negative_ids is not None and self.key_ids is None
        return (None, None) if own_alone else (self.query_ids, self.key_ids)

    @property
    def on_diagonal(self) -> bool:
        """Key i belongs to query i."""
        return self.positives is None and self.query_labels is None and not self.own_positives

    def cast(self) -> torch.dtype | None:
        """The dtype of products under autocast on the device of the computation; None where autocast is off."""
        device = self.options.device
        if device is None:
            q = self.q if self.scorer is None else next(iter(leaves_of(self.q)), None)
            return autocast_type(q.device) if isinstance(q, Tensor) else None
        return autocast_type(torch.device(device))

    def check(self) -> None:
        """Raise ValueError for arguments that do not go together. A scorer's inputs are checked by its probe."""
        q, k, loss, scored = self.q, self.k, self.loss, self.scorer is not None
        # those of two halves are made of checked ones
        if not (scored or self.among[1]):
            checks.features("q", q)
            checks.features("k", k)
            checks.alike("k", k, "q", q, self.cast())
            if q.is_meta and self.options.device is None:
                raise invalid("q", "have values", "a tensor on meta", "Move the model to a device that computes.")
            if self.negatives is not None:
                checks.features("negatives", self.negatives, own=True)
                checks.alike("negatives", self.negatives, "k", k, self.cast())
            checks.guides(self.guides, q, k, self.negatives)
        checks.own_negatives(self.own, self.negative_ids, self.query_ids, q, self.options.device)
        checks.pair_loss(loss, len(self.guides), self.targets, self.negatives, scored=scored)
        if self.bias is not None and not loss.takes_bias:
            rule = f"be left out for the loss {type(loss).__name__}"
            raise invalid("bias", rule, "one", "Its weights of positives keep a bias from cancelling.")
        if self.scale is None and not scored:
            raise invalid("scale", "be given for a dot product", None, "Pass logit_scale.exp(), say.")


@dataclass(frozen=True)
class Problem:
    """A checked call: its inputs, its two shards with positions counted on this rank, scale and bias."""

    loss: PairLoss
    options: Options
    # inputs of the autograd operation: leaves of the rows, leaves of the columns, parameters of the scorer
    inputs: tuple[Tensor, ...]
    scale: Tensor
    bias: Tensor | None
    rows: Shard
    cols: Shard
    weights: Tensor | None
    device: torch.device
    # the dtype in which tiles compute
    dtype: torch.dtype
    # number of keys that positives must be below; None where they are in range by construction
    positives_below: int | None
    scorer: Scorer | None
    # facts that all ranks must have in common, beside what shards and options show
    statement: dict[str, Any]
    # the numbers that the loss takes from guides and labels are computed before the call, if there are any
    numbers_before_call: bool
    # labels and ids: True where negatives of this rank have none
    unnamed: tuple[bool, bool] = (False, False)

    @classmethod
    def of(cls, arguments: Arguments, *, checked: bool, alone: bool) -> Problem:
        """The problem of these arguments.

        checked: a call of the same signature passed the checks. alone: there is no process group.
        """
        if not checked:
            arguments.check()
        scorer, options = arguments.scorer, arguments.options
        sides = _Sides.plain(arguments) if scorer is None else _Sides.scored(arguments, scorer)
        if not checked:
            sides.check(arguments)
        q, loss, bias = sides.rows[0], arguments.loss, arguments.bias
        scale = 1.0 if arguments.scale is None else arguments.scale
        # autocast leaves float64 as it is
        autocast = None if q.dtype == torch.float64 else arguments.cast()
        dtype = (autocast or q.dtype) if sides.scorer is None else sides.scorer.dtype
        device = checks.computing_device(q.device, options)
        # features in host memory are cast on the device
        cast = dtype if sides.scorer is None and device == q.device else None
        rows, cols = sides.shards(arguments, cast)
        parameters = () if sides.scorer is None else sides.scorer.parameters
        own = () if arguments.own is None else (arguments.own,)
        statement: dict[str, Any] = {}
        if not alone:
            inputs: dict[str, tuple[Any, ...]] = {"q": sides.rows, "k": sides.cols, "scorer": parameters[:1]}
            inputs |= {"negatives": own, "scale": (scale,), "bias": (bias,)}
            pairs = [(name, x) for name, tensors in inputs.items() for x in tensors if torch.is_grad_enabled()]
            statement = {
                "scale": _stated(scale), "bias": _stated(bias), "weights": _stated(arguments.weights),
                "requires_grad": [name for name, x in pairs if getattr(x, "requires_grad", False)],
                "key dtype": str(cols.features.dtype), "device of the loss": device.type,
                "scorer": arguments.scored_by if sides.scorer is None else sides.scorer.stated,
                "guides": [f"{a.shape[1]} features of {a.dtype}" for a, _ in arguments.guides],
                "guide_scale": _stated(arguments.guide_scale),
                "contrast_anchors": arguments.among[0], "contrast_positives": arguments.among[1],
            }  # fmt: skip
        in_range = arguments.positives is None or arguments.positives_in_range
        # one process computes the numbers of guides and labels in the call, where a graph replays that
        numbers_before_call = not alone or device != q.device or not (arguments.guides or loss.counts_positives)
        return cls(
            loss, options, inputs=(*sides.rows, *sides.cols, *parameters, *own), scale=as_tensor(scale, device, dtype),
            bias=None if bias is None else as_tensor(bias, device, dtype), rows=rows, cols=cols,
            weights=arguments.weights, device=device, dtype=dtype, positives_below=None if in_range else sides.keys,
            scorer=sides.scorer, statement=statement, numbers_before_call=numbers_before_call,
            unnamed=(False, False) if alone else sides.unnamed(arguments),
        )  # fmt: skip

    def input_dtypes(self) -> tuple[torch.dtype, ...] | None:
        """The dtypes of the features as passed, where autocast has cast those of the shards; else None."""
        if self.scorer is not None:
            return None
        types = tuple([x.dtype for x in self.inputs])
        return None if all(dtype == self.rows.features.dtype for dtype in types) else types

    def placed(self, exchange: Exchange) -> Problem:
        """The problem among all ranks: sharded numbers whole, positives in range, positions counted over all ranks."""
        scale, bias, rows, cols = self.scale, self.bias, self.rows, self.cols
        if type(scale) not in PLAIN:
            scale = collectives.unsharded(scale, self.options.gradient)
        if bias is not None and type(bias) not in PLAIN:
            bias = collectives.unsharded(bias, self.options.gradient)
        positives_below, several = self.positives_below, len(exchange.layout.rows) > 1
        if rows.positives is not None and positives_below is not None and several:
            # before positions are counted over all ranks
            positives, scale = checks.mask_out_of_range(rows.positives, positives_below, scale)
            rows, positives_below = replace(rows, positives=positives), None
        for name, here, anywhere in zip(("labels", "ids"), self.unnamed, exchange.layout.unnamed, strict=True):
            if anywhere and not here:
                # as on the ranks that have such negatives
                rows, cols = (changed(side, **{name: checks.above_least(getattr(side, name))}) for side in (rows, cols))
        if self.numbers_before_call:
            rows, cols, scale = checks.with_loss_numbers(self.loss, rows, cols, scale, exchange.layout.gathers())
        if several:
            rows, cols = exchange.layout.place(rows, cols)
        elif rows is self.rows and scale is self.scale and bias is self.bias:
            return self
        return changed(self, scale=scale, bias=bias, rows=rows, cols=cols, positives_below=positives_below)


@dataclass(frozen=True)
class _Sides:
    """The tensors of rows and of columns: one feature matrix each, or all inputs of a scorer."""

    rows: tuple[Tensor, ...]
    # negatives follow the keys
    cols: tuple[Tensor, ...]
    # number of columns that are keys
    keys: int
    scorer: Scorer | None = None

    @classmethod
    def plain(cls, arguments: Arguments) -> _Sides:
        q, k, negatives = arguments.q, arguments.k, arguments.negatives
        shared = negatives is not None and arguments.own is None
        return cls((q,), (joined([k, negatives]) if shared else k,), len(k))

    @classmethod
    def scored(cls, arguments: Arguments, module: nn.Module) -> _Sides:
        """The tensors of both sides, and the module that compares them."""
        k, negatives = arguments.k, arguments.negatives
        row_form, rows = Form.of("q", arguments.q)
        col_form, cols = Form.of("k", k)
        keys = len(cols[0])
        if negatives is not None:
            form, more = Form.of("negatives", negatives)
            if form.spec != col_form.spec or [x.shape[1:] for x in more] != [x.shape[1:] for x in cols]:
                remedy = "Pad both alike." if form.spec == col_form.spec else "Nest both alike."
                raise invalid("negatives", "be nested and shaped as `k`", [list(x.shape) for x in more], remedy)
            for key, negative in zip(cols, more, strict=True):
                if (key.dtype, key.device) != (negative.dtype, negative.device):
                    got = f"{key.dtype} on {key.device} and {negative.dtype} on {negative.device}"
                    rule = "have the dtypes of `k`, and lie beside it"
                    raise invalid("negatives", rule, got, "Convert one side first.")
            all_keys = pytree.tree_map(lambda a, b: None if a is None or b is None else joined([a, b]), k, negatives)
            col_form, cols = Form.of("k", all_keys)
        checks.same_device("k", cols[0], "q", rows[0])
        device = checks.computing_device(rows[0].device, arguments.options)
        return cls(tuple(rows), tuple(cols), keys, Scorer.of(module, (row_form, rows), (col_form, cols), device))

    def check(self, arguments: Arguments) -> None:
        """Raise ValueError for numbers, labels, positives or weights that do not fit the two sides."""
        q, k, loss, device = self.rows[0], self.cols[0], arguments.loss, arguments.options.device
        if arguments.scale is not None:
            checks.number("scale", arguments.scale, q, device)
        if self.scorer is not None:
            checks.guides(arguments.guides, q, k, None)
        if arguments.bias is not None:
            checks.number("bias", arguments.bias, q, device)
        if loss.symmetric and (len(k) > self.keys or arguments.own is not None):
            raise invalid("negatives", "be left out for a symmetric loss", "both", "Pass loss=Softmax(), say.")
        if loss.exclude_self and self.keys < len(q):
            rule, got = "have a row for each of `q`, which is the same example", f"{self.keys} and {len(q)}"
            raise invalid("k", rule, got, f"Leave out `exclude_self` of the loss {type(loss).__name__}.")
        if loss.exclude_self and arguments.on_diagonal:
            rule = f"be given for the loss {type(loss).__name__} of examples among themselves"
            raise invalid("positives", rule, None, "Key i is query i itself, and no positive. Or pass labels.")
        if loss.symmetric or arguments.paired:
            checks.same_length("k", k, "q", q, "" if arguments.paired else " Further keys go with loss=Softmax().")
        self._check_groups("labels", arguments.query_labels, arguments.key_labels)
        self._check_groups("ids", *arguments.ids)
        if arguments.positives is not None:
            if arguments.query_labels is not None:
                raise invalid("positives", "be left out where labels are given", "both", "Pass one of the two.")
            if loss.symmetric:
                remedy = "Pass labels, or take a one-way loss."
                raise invalid("positives", "be left out for a symmetric loss", "both", remedy)
            checks.positives(arguments.positives, q)
        elif arguments.on_diagonal and self.keys < len(q):
            raise invalid("k", "have at least as many rows as `q`", f"{self.keys} and {len(q)}", "Or pass `positives`.")
        if arguments.weights is not None:
            checks.vector("weights", arguments.weights, "q", q, integer=False)
            checks.constant("weights", arguments.weights)

    def _check_groups(self, name: str, of_queries: Tensor | None, of_keys: Tensor | None) -> None:
        """Check labels, or ids, of both sides; those of the keys may go on over the negatives."""
        row_name, col_name, k = f"query_{name}", f"key_{name}", self.cols[0]
        if of_queries is None and of_keys is None:
            return
        if of_queries is None or of_keys is None:
            missing, given = (row_name, col_name) if of_queries is None else (col_name, row_name)
            raise invalid(missing, f"be given where `{given}` is", None, "Pass both, or neither.")
        checks.vector(row_name, of_queries, "q", self.rows[0], integer=True)
        keys_alone = len(k) > self.keys and isinstance(of_keys, Tensor) and of_keys.shape == (self.keys,)
        checks.vector(col_name, of_keys, "k", k[: self.keys] if keys_alone else k, integer=True)

    def shards(self, arguments: Arguments, cast: torch.dtype | None) -> tuple[Shard, Shard]:
        """Rows and columns with their positives, labels and ids, and with features of the dtype `cast`."""
        groups = (arguments.query_labels, arguments.key_labels), arguments.ids
        labels, ids = (self._groups(*each) for each in groups)
        positives = None if arguments.positives is None else indices(arguments, self.keys)
        (q, *more_q), (k, *more_k) = [x.detach() for x in self.rows], [x.detach() for x in self.cols]
        if cast is not None:
            q, k = cast_features(q, k, cast)
        of_rows, of_cols = guides(arguments, q)
        rows = Shard(
            q, diagonal=0 if arguments.on_diagonal else None, positives=positives, labels=labels[0], ids=ids[0],
            others=tuple(more_q), targets=arguments.targets, **of_rows, **_own(arguments, cast),
        )  # fmt: skip
        cols = Shard(k, labels=labels[1], ids=ids[1], others=tuple(more_k), **of_cols)
        return rows, cols

    def unnamed(self, arguments: Arguments) -> tuple[bool, bool]:
        """Return for labels and for ids whether some negatives have none."""
        labels, ids = (x is not None and len(x) < len(self.cols[0]) for x in (arguments.key_labels, arguments.ids[1]))
        return labels, ids or arguments.unnamed

    def _groups(self, of_q: Tensor | None, of_k: Tensor | None) -> tuple[Tensor | None, ...]:
        """Labels or ids in int64 of rows [N], and of columns [M]; `of_k` may leave out those of the negatives."""
        if of_q is None or of_k is None:
            return None, None
        of_rows = of_q.long()
        if missing := len(self.cols[0]) - len(of_k):
            # negatives share the least number, which no query has: on all ranks it becomes the next in the others
            of_negatives = torch.full((missing,), NOBODY, device=of_k.device)
            return checks.above_least(of_rows), torch.cat([checks.above_least(of_k), of_negatives])
        return of_rows, of_rows if of_k is of_q else of_k.long()


def _kind(x: Any) -> Any:
    """The facts of a leaf that do not change with the values of a tensor."""
    return (type(x), x.shape, x.dtype, x.device, x.layout, x.requires_grad) if isinstance(x, Tensor) else type(x)


def leaves_of(side: Any) -> list[Any]:
    """Features alone, or vectors and mask."""
    return [x for x in side if x is not None] if isinstance(side, (tuple, list)) else [side]


def indices(arguments: Arguments, keys: int) -> Tensor:
    """The positives as int64 [N, P], their values checked where they may be read."""
    positives = arguments.positives
    assert positives is not None
    if not arguments.positives_in_range and not torch.compiler.is_compiling():
        checks.in_range(positives, keys)
    return (positives[:, None] if positives.ndim == 1 else positives).long()


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts the operands of products on this device; None where it is off."""
    kind = device.type
    # other devices may have no autocast
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else None


def cast_features(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both sides in the dtype of products; one tensor as both sides is cast once."""
    of_rows = q.detach() if q.dtype == dtype else q.detach().to(dtype)
    if q is k:
        return of_rows, of_rows
    return of_rows, k.detach() if k.dtype == dtype else k.detach().to(dtype)


def guides(arguments: Arguments, q: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of both shards: the guides' features as constants, and the factor of their product for each row [N].

    No dtype is wider than the sums of features of q's dtype.
    """
    if not arguments.guides:
        return {}, {}
    wide, scale = accumulator(q.dtype), arguments.guide_scale
    pairs = [
        [x.detach().to(wide) if x.dtype == torch.float64 else x.detach() for x in pair] for pair in arguments.guides
    ]
    of_rows, of_cols = zip(*pairs, strict=True)
    if scale is not None:
        scale = as_tensor(scale, q.device, q.dtype).detach().to(wide).reshape(()).expand(len(q))
    return {"guides": of_rows, "numbers": scale}, {"guides": of_cols}


def _own(arguments: Arguments, cast: torch.dtype | None) -> dict[str, Any]:
    """Fields of the rows' shard for negatives of each query alone."""
    own = arguments.own
    if own is None:
        return {}
    own = own.detach() if cast is None else own.detach().to(cast)
    excluded = checks.own_excluded(arguments.negative_ids, arguments.query_ids)
    return {"own": own, "own_excluded": excluded, "own_positives": arguments.own_positives}


def as_tensor(x: Tensor | float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number as a tensor of the accumulator's dtype; in a graph a product, as `full` would make it a constant."""
    if isinstance(x, Tensor):
        return x
    kind: Any = {"dtype": accumulator(dtype), "device": device}
    return torch.ones((), **kind) * float(x) if torch.compiler.is_compiling() else torch.full((), float(x), **kind)


def _stated(x: Tensor | float | None) -> Any:
    """A number as ranks compare it: its value, or "a tensor", whose value is on the device."""
    return "a tensor" if isinstance(x, Tensor) else x if x is None else float(x)
