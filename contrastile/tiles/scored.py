"""A block of learned distances: the scores of a module instead of dot products (Gao et al. 2021, section 5).

Beside `eager.py`, whose loop over tiles it inherits. With s_ij = Φ(f_i, g_j; Ω) and x_ij = scale · s_ij + bias, the
forward computes each tile of scores without a graph, and the loss takes its statistics. The backward computes the tile
again with a graph; the loss gives w_ij = ∂L/∂x_ij, and back-propagating w through the tile adds to ∂L/∂Ω (equation 11),
u_i (12) and v_j (13). The paper holds all b² distances and gradients; here one tile is held.

The rows of a side are nested tensors. Their gradients are accumulated as one matrix [n, all numbers of a row], which an
exchange carries as it carries that of a dot product. The sums over all pairs are one vector: Σ w, Σ w·s, then ∂L/∂Ω.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contrastile._errors import invalid
from contrastile._torch import pytree, without_parametrization_cache
from contrastile._types import shape_or_type
from contrastile.gradcache import introspect
from contrastile.gradcache.memory import as_written
from contrastile.gradcache.modes import Autocast, back_propagated, in_modes, without_hooks
from contrastile.gradcache.rng import RandomState, begin_random, own_generators
from contrastile.losses.base import Shard, Tile
from contrastile.scorers import MaxSim
from contrastile.tiles.base import Accumulated, InFlight, Sum, SumRow, as_given
from contrastile.tiles.eager import Eager

# rows and columns of a module's trial
PROBE = 2, 3


@dataclass(frozen=True)
class Form:
    """The nesting of one side's tensors, and which of them require a gradient."""

    spec: Any
    # for each leaf whether it is a tensor; the others are None
    is_tensor: tuple[bool, ...]
    # for each tensor whether it requires a gradient
    wanted: tuple[bool, ...]

    @classmethod
    def of(cls, name: str, tree: Any) -> tuple[Form, list[Tensor]]:
        """The form and the tensors of a user's features; each tensor's first axis is the batch."""
        leaves, spec = pytree.tree_flatten(tree)
        tensors = [leaf for leaf in leaves if leaf is not None]
        for x in tensors:
            if not isinstance(x, Tensor) or x.ndim == 0:
                got = "a tensor without axes" if isinstance(x, Tensor) else type(x).__name__
                rule = "be made of tensors whose first axis is the batch"
                raise invalid(name, rule, got, "Keep the rest in `scorer`.")
            if x.is_nested:
                remedy = "Pass Ragged(x.values(), x.offsets().diff()), or padding and a mask."
                raise invalid(name, "be made of tensors with one shape for all rows", "a nested tensor", remedy)
        if not tensors:
            raise invalid(name, "contain a tensor", "none", "Pass what the scorer reads of each example.")
        if len({len(x) for x in tensors}) > 1:
            sizes = sorted({len(x) for x in tensors})
            raise invalid(name, "have the same first axis, the batch", sizes, "Check each tensor's shape.")
        if len({x.device for x in tensors}) > 1:
            devices = ", ".join(sorted({str(x.device) for x in tensors}))
            raise invalid(name, "be on one device", devices, "Move all tensors to it.")
        wanted = tuple(x.requires_grad and torch.is_grad_enabled() for x in tensors)
        for x, want in zip(tensors, wanted, strict=True):
            if want and x.is_complex():
                raise invalid(name, "be real where it wants a gradient", x.dtype, "Pass it by torch.view_as_real.")
        return cls(spec, tuple(leaf is not None for leaf in leaves), wanted), tensors

    def nested(self, tensors: Sequence[Tensor]) -> Any:
        """The tensors in their nesting."""
        following = iter(tensors)
        return pytree.tree_unflatten([next(following) if each else None for each in self.is_tensor], self.spec)

    def differentiable(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that want a gradient."""
        return [x for x, want in zip(tensors, self.wanted, strict=True) if want]

    def widths(self, tensors: Sequence[Tensor]) -> list[int]:
        """Elements per row of each that wants a gradient."""
        return [math.prod(x.shape[1:]) for x in self.differentiable(tensors)]

    def sum_row(self, tensors: Sequence[Tensor]) -> SumRow | None:
        """The row of an accumulator for all tensors that want a gradient, in a dtype that holds their values."""
        types = [x.dtype for x in self.differentiable(tensors)]
        return SumRow(sum(self.widths(tensors)), reduce(torch.promote_types, types)) if types else None


@dataclass(frozen=True)
class Scorer:
    """A module that scores the tiles of one call, with all that its replay needs."""

    module: nn.Module
    # the module and its submodules, and the training mode of each
    modules: Sequence[nn.Module]
    training: Sequence[bool]
    rows: Form
    cols: Form
    # Ω: the parameters that require a gradient
    parameters: tuple[Tensor, ...]
    dtype: torch.dtype
    device: torch.device
    autocast: Autocast
    # seed of its random numbers; None if it draws none
    seed: int | None
    # scores without a graph may differ in bits from those with one; the forward then computes them with one too
    graph_changes_bits: bool
    # names of the process's generators (Python's, NumPy's) that it draws from
    process: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, module: nn.Module, rows: tuple[Form, list[Tensor]], cols: tuple[Form, list[Tensor]], device: torch.device
    ) -> Scorer:
        """Inspect the module by a trial on a few pairs on the device. Random states are restored."""
        check_module(module)
        parameters = tuple(p for p in module.parameters() if p.requires_grad) if torch.is_grad_enabled() else ()
        for p in parameters:
            if p.is_complex():
                raise invalid("scorer", "have real parameters", p.dtype, "Hold what torch.view_as_real makes of them.")
        if rows[1][0].device != device:
            for x in [*module.parameters(), *module.buffers()]:
                if x.device != device:
                    raise invalid("scorer", f"be on {device}, which computes its scores", x.device, "Move it there.")
        modules = list(module.modules())
        training = [one.training for one in modules]
        changes_bits = introspect.graph_may_change_bits(module, modules)
        # the trial finds dtype and random numbers
        draft = cls(
            module, modules, training, rows[0], cols[0], parameters, torch.float32, device, Autocast.current(device),
            seed=None, graph_changes_bits=changes_bits,
        )  # fmt: skip
        if isinstance(module, MaxSim) and module.plain:
            # its dtype follows from the inputs; a trial takes a millisecond
            (q, _), (k, _) = module.checked(rows[0].nested(rows[1]), cols[0].nested(cols[1]))
            return replace(draft, dtype=(q.flatten(0, 1)[:0].to(device) @ k.flatten(0, 1)[:0].to(device).T).dtype)
        # rows and columns differ in number, which shows a module that exchanges them
        probe = (1, 2) if len(cols[1][0]) == 2 else PROBE
        trial = [trial_rows(tensors, n, device) for (_, tensors), n in zip((rows, cols), probe, strict=True)]
        generators = own_generators(modules)
        before = RandomState.capture(device, own=generators)
        try:
            with (
                as_written(),
                introspect.refusing_batch_norm(modules, "scorer"),
                introspect.refusing_state(modules, "scorer", "pairs"),
                introspect.refusing_changes(trial[0].leaves, "q", "scorer"),
                introspect.refusing_changes(trial[1].leaves, "k", "scorer"),
            ):
                scores, leaves = draft.with_graph(*trial)
            after = RandomState.capture(device, own=generators, last=before)
        except (RuntimeError, IndexError) as error:
            called = f"a trial with {probe[0]} rows and {probe[1]} other columns"
            error.add_note(f"The scorer failed in {called}, which must return scores {list(probe)}.")
            raise
        finally:
            before.restore()
        if after.drew_own(before):
            rule, got = "draw from torch's, Python's or NumPy's own generators", "one that is an attribute of a module"
            raise invalid("scorer", rule, got, "A tile begins them anew each time it is computed.")
        draft._check(scores, leaves)
        seed = None if before.same(after) else int(torch.randint(2**62, (), device="cpu"))
        return replace(draft, dtype=scores.dtype, seed=seed, process=tuple(before.drawn(after).process))

    def _check(self, scores: Tensor, leaves: Sequence[Tensor]) -> None:
        if not scores.is_floating_point():
            raise invalid("scorer", "return floating point", scores.dtype, "Convert it with .float().")
        # frozen parameters included
        known = {id(x) for x in [*leaves, *self.module.parameters()]}
        for leaf in introspect.graph_leaves([scores]):
            if id(leaf) not in known:
                got = f"one of shape {list(leaf.shape)} elsewhere"
                remedy = "Register what holds them as a submodule, or pass the tensor with the features."
                raise invalid("scorer", "own every parameter that it uses", got, remedy)

    @property
    def stated(self) -> str:
        """The words that ranks compare, with the dtype of the scores."""
        return f"scores of {self.dtype}, {in_words(self.module)}"

    @property
    def frozen(self) -> list[Tensor]:
        """The module's constants, on which scores depend: parameters that require no gradient, and floating buffers."""
        buffers = [x for x in self.module.buffers() if x.is_floating_point()]
        return [x for x in (*self.module.parameters(), *buffers) if not x.requires_grad and not x.is_inference()]

    @property
    def wanted(self) -> bool:
        """An input or a parameter requires a gradient."""
        return any((*self.rows.wanted, *self.cols.wanted, len(self.parameters)))

    def __call__(self, rows: Shard, cols: Shard) -> Tensor:
        """The scores [I, J] of a tile; their graph follows torch's grad mode."""
        with self.autocast.restored(), without_parametrization_cache():
            scores: Any = self.module(self.rows.nested(rows.leaves), self.cols.nested(cols.leaves))
        # checked for every tile: a `squeeze` in the module drops an axis of tiles with one row only
        expected = [len(rows), len(cols)]
        if not isinstance(scores, Tensor) or list(scores.shape) != expected:
            rule = f"return a tensor {expected} for {expected[0]} rows and {expected[1]} columns"
            raise invalid("scorer", rule, shape_or_type(scores), "One score for each pair.")
        return scores

    def with_graph(self, rows: Shard, cols: Shard) -> tuple[Tensor, list[Tensor]]:
        """The scores with their graph, and its leaves that want a gradient: of the rows, then of the columns."""
        sides = [
            side.with_leaves(
                [x.detach().requires_grad_(want) for x, want in zip(side.leaves, form.wanted, strict=True)]
            )
            for side, form in ((rows, self.rows), (cols, self.cols))
        ]
        with torch.enable_grad():
            scores = self(*sides)
        return scores, [*self.rows.differentiable(sides[0].leaves), *self.cols.differentiable(sides[1].leaves)]


def in_words(module: Any) -> str:
    """The words that ranks compare: class of a module, or of a function; its modes where they may matter."""
    unit = isinstance(module, MaxSim) and (module.normalize or module.gets_unit_vectors)
    mattering = isinstance(module, nn.Module) and not getattr(module, "unmodified", False)
    training = [one.training for one in module.modules()] if mattering else []
    modes = f", {sum(training)} of {len(training)} modules in training" if mattering else ""
    return f"{type(module).__name__}{', normalize=True' if unit else ''}{modes}"


def trial_rows(tensors: Sequence[Tensor], n: int, device: torch.device) -> Shard:
    """Copies of the first n rows for a trial, which may write over them; zeros on a rank without rows."""
    some = [x.detach()[:n] if len(x) else x.new_zeros((n, *x.shape[1:])) for x in tensors]
    first, *others = [x.to(device, copy=True) for x in some]
    return Shard(first, others=tuple(others))


def check_module(module: Any) -> None:
    """Raise ValueError for what is no module, or holds one that communicates among ranks."""
    if not isinstance(module, nn.Module):
        is_class = isinstance(module, type) and issubclass(module, nn.Module)
        got = f"the class {module.__name__}" if is_class else type(module).__name__
        remedy = f"Make one: {module.__name__}(...)." if is_class else "Derive it from torch.nn.Module."
        raise invalid("scorer", "be a module", got, remedy)
    wrapped = next(filter(_is_wrapped, module.modules()), None)
    if wrapped is not None:
        remedy = "Wrap the model that holds the scorer and calls `contrast` in its forward."
        raise invalid("scorer", "be a module of its own", type(wrapped).__name__, remedy)


def _is_wrapped(module: nn.Module) -> bool:
    """Return whether the module communicates among ranks in every forward: a data-parallel wrapper, or of FSDP."""
    marks = ("_get_fsdp_state", "_fsdp_wrapped_module")
    return isinstance(module, DistributedDataParallel) or any(hasattr(module, mark) for mark in marks)


@dataclass
class Scored(Eager):
    """Tiles of a module's scores. A tile has its graph only while its gradient is computed."""

    scorer: Scorer = field(kw_only=True)
    # rows, and columns, of a tile
    side: int = field(kw_only=True)
    # indices of the parameters that a gradient has reached
    reached: set[int] = field(default_factory=set, kw_only=True)
    # a tile has been computed: this rank has pairs
    computed: bool = field(default=False, kw_only=True)

    writes_fresh_strip: ClassVar[bool] = False

    def backward(self, rows: Shard, cols: Shard, u: Sum, v: Sum | InFlight, row_stats: Tensor | None = None) -> Tensor:
        with without_hooks(self.scorer.parameters):
            return super().backward(rows, cols, u, v, row_stats)

    def nonfinite(self, _rows: Shard, _cols: Shard) -> Tensor:
        # features are of any kind; one that is not finite shows in the scores
        return self.scale * 0

    def strip(self, _rows: Shard, _cols: Shard, _wanted: bool) -> int:
        # scores with their graph take more memory than tiles of products
        return 0

    def no_pairs(self) -> Tensor:
        return self.scale.new_zeros(2 + sum(parameter.numel() for parameter in self.scorer.parameters))

    @property
    def sums_products(self) -> bool:
        return True

    def sum_rows(self, rows: Shard, cols: Shard, _wanted: Sequence[bool]) -> tuple[SumRow | None, SumRow | None]:
        """The rows of u and of v: the numbers of all leaves that want a gradient."""
        return self.scorer.rows.sum_row(rows.leaves), self.scorer.cols.sum_row(cols.leaves)

    def accumulators(self, rows: Shard, cols: Shard, wanted: Sequence[bool]) -> tuple[Sum, Sum]:
        u, v = (
            None if row is None else self.scale.new_zeros(len(shard), row.numbers)
            for shard, row in zip((rows, cols), self.sum_rows(rows, cols, wanted), strict=True)
        )
        return u, v

    def gradients(
        self, accumulated: Accumulated, rows: Shard, cols: Shard, wanted: Sequence[bool],
        numbers: tuple[Tensor, Tensor | None], upstream: Tensor | None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of scale, bias, the leaves of both sides and the module's parameters Ω, in their own dtypes."""
        scale, bias = numbers
        u, v, sums, _ = accumulated
        if upstream is not None and (any(wanted[:2]) or self.scorer.parameters):
            sums = sums * upstream
        of_bias = None
        if bias is not None and wanted[1]:
            of_bias = as_given(sums[0] if self.loss.uses_bias else torch.zeros_like(sums[0]), bias)
        return [
            as_given(sums[1], scale) if wanted[0] else None,
            of_bias,
            *self._split(u, self.scorer.rows, rows.leaves, upstream),
            *self._split(v, self.scorer.cols, cols.leaves, upstream),
            *self._of_parameters(sums[2:] * self.scale),
        ]

    def _split(
        self, total: Tensor | None, form: Form, leaves: Sequence[Tensor], upstream: Tensor | None
    ) -> list[Tensor | None]:
        """The gradient of each leaf: its columns of the side's accumulator, scaled unless `sums_are_gradients`."""
        parts = iter(() if total is None else total.split(form.widths(leaves), dim=1))

        def gradient(part: Tensor, leaf: Tensor) -> Tensor:
            if not self.sums_are_gradients:
                # with an upstream gradient, a second backward may read the sums again
                part = self.scaled(part, leaf.dtype, upstream, keep=upstream is not None)
            return part.to(leaf.dtype).reshape(leaf.shape)

        return [gradient(next(parts), leaf) if want else None for leaf, want in zip(leaves, form.wanted, strict=True)]

    def _of_parameters(self, sums: Tensor) -> list[Tensor | None]:
        """The gradients of Ω; None for a parameter that no pair of this rank reaches, as in plain autograd."""
        parameters, no_pairs = self.scorer.parameters, not self.computed
        parts = sums.split([parameter.numel() for parameter in parameters])
        return [
            part.to(parameter.dtype).reshape(parameter.shape) if index in self.reached or no_pairs else None
            for index, (part, parameter) in enumerate(zip(parts, parameters, strict=True))
        ]

    def _logits(self, rows: Shard, cols: Shard, _room: Tensor, *, with_graph: bool) -> tuple[Tensor, Any]:
        """scale · Φ [I, J], and behind it the scores with their graph and its leaves."""
        self.computed = True
        if self.scorer.seed is not None:
            # by the tile's position, so that every computation of it draws the same
            words = f"{self.scorer.seed} {rows.start} {cols.start}".encode()
            seed = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest())
            begin_random(self.scorer.device, seed, self.scorer.process)
        if with_graph or (self.scorer.graph_changes_bits and self.scorer.wanted):
            scores, leaves = self.scorer.with_graph(rows, cols)
        else:
            with torch.no_grad():
                scores, leaves = self.scorer(rows, cols), []
        return scores.detach().to(self.scale.dtype) * self.scale, (scores, leaves)

    def _products(self, context: Any) -> Tensor:
        return context[0].detach().to(self.scale.dtype)

    def _propagate(self, tile: Tile, context: Any, rows: Shard, cols: Shard, u_I: Sum, v_J: Sum, sums: Tensor) -> None:
        """Back-propagate g through a tile's graph, into the accumulators of its leaves and into the sums."""
        (scores, leaves), g_IJ = context, self.loss.pair_grad(tile, rows, cols)
        sums[0] += g_IJ.sum()
        # a score of −∞ has no gradient
        sums[1] += (g_IJ * scores.detach()).masked_fill_(g_IJ == 0, 0.0).sum()
        if not scores.requires_grad:
            return
        # a parameter that was frozen after the forward gets no gradient, as in plain autograd
        wanted = {index: p for index, p in enumerate(self.scorer.parameters) if p.requires_grad}
        if not leaves and not wanted:
            return
        gradients = back_propagated([scores], [*leaves, *wanted.values()], [g_IJ.to(scores.dtype)], "scorer")
        for total, gradient in zip(self._by_leaf(rows, cols, u_I, v_J), gradients, strict=False):
            if gradient is not None:
                total += gradient.flatten(1) if gradient.ndim > 1 else gradient[:, None]
        parts = sums[2:].split([parameter.numel() for parameter in self.scorer.parameters])
        for index, gradient in zip(wanted, gradients[len(leaves) :], strict=True):
            if gradient is not None:
                self.reached.add(index)
                # an embedding's gradient may be sparse
                parts[index].add_(gradient.to_dense().flatten())

    def _by_leaf(self, rows: Shard, cols: Shard, u: Sum, v: Sum) -> list[Tensor]:
        """The columns of u and v that belong to each leaf."""
        forms = ((self.scorer.rows, rows, u), (self.scorer.cols, cols, v))
        return [
            part
            for form, shard, whole in forms
            if whole is not None
            for part in whole.split(form.widths(shard.leaves), dim=1)
        ]

    def _room(self, _pairs: int) -> Tensor:
        # the scores bring their own memory
        return self.scale.new_empty(0)

    def _side(self) -> int:
        return self.side

    def workspace_bytes(self, _N: int, _M: int, _D: int, _dtype: torch.dtype) -> int:
        return self.workspace

    @contextmanager
    def _repeatable(self) -> Iterator[None]:
        """The modes of the call, and a restored state of the caller's random numbers afterwards."""
        with in_modes(self.scorer.modules, self.scorer.training):
            if self.scorer.seed is None:
                yield
                return
            before = RandomState.capture(self.scorer.device, process=self.scorer.process)
            try:
                yield
            finally:
                before.restore()
