"""The base of the loss modules: their options, and their own names for the arguments of `contrast`.

Losses compute with features as given, under autocast in its dtype. The first call warns about a scale that is negative,
or looks like a temperature or a logarithm. Losses of cosines also warn about rows that are not of unit length.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, ClassVar, Literal, Never, TypedDict, overload

import torch
from torch import Tensor, nn

from contrastile._dispatch import Options
from contrastile._errors import invalid, unknown_keyword, with_names
from contrastile._types import Backend, ExchangeName, Gradient, Reduction, accumulator
from contrastile.engine import arguments as checks
from contrastile.engine.plan import prepare, share_error
from contrastile.engine.problem import PLAIN
from contrastile.losses.base import PairLoss

# deviation of a row's length from 1 above which a loss of cosines warns
LENGTH_TOLERANCE = 0.05
# usual scales at the start of a training, whose logarithm is learned, and how close to that a number is one
USUAL_SCALES, LOGARITHM_TOLERANCE = {"1 / 0.07": 1 / 0.07, "10": 10.0}, 4e-3
_gpu_reads = checks.GpuReads()


class How(TypedDict, total=False):
    """The options of every loss, for type checkers and editors."""

    backend: Backend
    exchange: ExchangeName
    group: Any
    gradient: Gradient
    label_smoothing: float
    reduction: Reduction
    workspace: int | None
    device: torch.device | str | None


class Loss(nn.Module):
    """A loss with its options, which the docstring of `contrast` explains. They are checked at construction."""

    # this loss's own name for each argument of `contrast`
    names: ClassVar[dict[str, str]] = {}
    pair_loss: ClassVar[PairLoss]
    # remedies for keywords of other libraries' losses of this kind
    instead: ClassVar[dict[str, str]] = {}
    # rows of another length are a mistake
    unit_rows: ClassVar[bool] = True

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        exchange: ExchangeName = "auto",
        group: Any = None,
        gradient: Gradient = "mean",
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        workspace: int | None = None,
        device: torch.device | str | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__()
        if unknown:
            Options.refuse(unknown, tuple(self._keywords()))
        self.options = Options(backend, exchange, group, gradient, label_smoothing, reduction, workspace, device)
        self.loss = self.pair_loss.smoothed(label_smoothing) if label_smoothing else self.pair_loss
        # options of this loss alone, as passed
        self.own_options: dict[str, object] = {}
        self._unchecked = True

    def _refuse(self, unknown: Mapping[str, Any], missing: str = "") -> Never:
        """Raise, on all ranks, for keywords that `forward` does not have, or else for an argument that is not given."""
        kind, (*takes, _) = type(self).__name__, signature(self.forward).parameters
        if unknown:
            name = next(iter(unknown))
            # `scale` for `logit_scale`, `key_ids` for `ids`
            alike = [f"Did you mean {x}?" for x in takes if x.endswith(f"_{name}") or name.endswith(f"_{x}")]
            own = [f"Pass it to the constructor, {kind}(...)."] if name in self._keywords() else []
            remedy = next(iter(own + alike), self.instead.get(name, ""))
            error = unknown_keyword(unknown, takes, f"arguments of {kind}:", remedy)
        else:
            call = ", ".join(takes[: takes.index(missing) + 1])
            remedy = f"Write {kind}(...)({call}), with * before a tuple of them."
            error = invalid(missing, f"be given in the call of {kind}", "none", remedy)
        share_error(error, self.options.group, self.options.exchange)
        raise error

    def extra_repr(self) -> str:
        defaults, chosen = vars(Options()) | self._keywords(), self.own_options | vars(self.options)
        return ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value != defaults[name])

    @classmethod
    def _keywords(cls) -> dict[str, Any]:
        """The keywords of its constructor, then of the constructors of the classes above it, with their defaults."""
        keywords: dict[str, Any] = {}
        for kind in cls.__mro__:
            for x in signature(kind).parameters.values() if issubclass(kind, Loss) else ():
                if x.kind is x.KEYWORD_ONLY:
                    keywords.setdefault(x.name, x.default)
        return keywords

    def _prepared(self, q: Tensor, k: Tensor, scale: Tensor | float, **others: Any) -> tuple[Any, tuple[Any, ...]]:
        """The operation that computes the loss, and its inputs. Errors have this loss's names of arguments."""
        try:
            return prepare(q, k, scale, self.loss, self.options, **others)
        except ValueError as error:
            raise self._named(error) from None

    def _named(self, error: ValueError) -> ValueError:
        named = with_names(error, self.names)
        # where a graph is traced, an error has no traceback
        return named if torch.compiler.is_compiling() else named.with_traceback(error.__traceback__)

    @contextmanager
    def _shared_errors(self) -> Iterator[None]:
        """Raise an error of this rank on all of them, with this loss's names of arguments."""
        try:
            yield
        except Exception as error:
            # a scorer's own errors are of any kind, and may have a cause
            named = self._named(error) if isinstance(error, ValueError) else error
            share_error(named, self.options.group, self.options.exchange)
            if named is error:
                raise
            raise named from None

    @property
    def _may_warn(self) -> bool:
        """No call was checked yet. False in a graph, which would be compiled anew when this flag changes."""
        return not torch.compiler.is_compiling() and self._unchecked

    def _warn_of_inputs(self, scale: Tensor | float, *sides: Tensor) -> None:
        """Warn, at the first call, about rows not of unit length, or a scale that looks like another number."""
        if any(len(side) == 0 for side in sides) or checks.captured(*sides):
            return
        self._unchecked = False
        # reads are counted by process, because a loss may be made anew in every step
        if not _gpu_reads.allowed(*sides, *[x for x in (scale,) if isinstance(x, Tensor)]):
            return
        # of the first rows
        lengths = [torch.linalg.vector_norm(side.detach()[:64].float(), dim=-1) for side in sides]
        # a length that is not finite is no sign of rows that were not normalised
        unit = not any(bool(((x - 1).abs() > LENGTH_TOLERANCE).any()) for x in lengths)
        if self.unit_rows and not unit:
            columns = [torch.linalg.vector_norm(side.detach(), dim=0, dtype=accumulator(side.dtype)) for side in sides]
            remedy = "Normalise them first, with torch.nn.functional.normalize(x, dim=-1)."
            if all(bool(((x - 1).abs() < LENGTH_TOLERANCE).all()) for x in columns):
                remedy = "Its columns have length 1: normalise along dim=-1, or pass x.T if columns are the examples."
            # Python shows equal warnings of one line once, however many losses are made
            warnings.warn(
                f"{type(self).__name__} got rows of length other than 1; it computes with features as given. {remedy}",
                stacklevel=5,
            )
            return
        # the read of a sharded module's scale would be a collective
        if isinstance(scale, Tensor) and type(scale) not in PLAIN:
            return
        value = float(scale.detach() if isinstance(scale, Tensor) else scale)
        doubt, remedy = _scale_doubt(value, unit=unit)
        if doubt:
            warnings.warn(
                f"{type(self).__name__} got a scale of {value:.4g}, {doubt}; products are multiplied by it. {remedy}",
                stacklevel=5,
            )


def _scale_doubt(value: float, *, unit: bool) -> tuple[str, str]:
    """The reason to doubt that a number is a scale, and the remedy; both empty where it may be one.

    unit: rows have unit length. Products of others may have small scales, such as 1 / √D.
    """
    if value < 0.0:
        return "which drives positives apart", "Pass 1 / temperature."
    if unit and 0.0 < value < 1.0:
        return "as if it were a temperature", "Pass 1 / temperature."
    logarithms = [name for name, x in USUAL_SCALES.items() if abs(value - math.log(x)) < LOGARITHM_TOLERANCE]
    return (f"the logarithm of {logarithms[0]}", "Pass logit_scale.exp().") if logarithms else ("", "")


class PairedLoss(Loss):
    """A loss of images and texts that come in pairs."""

    names: ClassVar[dict[str, str]] = {
        "q": "image_features", "k": "text_features", "scale": "logit_scale", "bias": "logit_bias", "query_ids": "ids",
        "key_ids": "ids", "query_labels": "labels", "key_labels": "labels",
    }  # fmt: skip

    @overload
    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None, output_dict: Literal[False] = False, *, ids: Tensor | None = None,
        labels: Tensor | None = None, weights: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None, *, output_dict: Literal[True], ids: Tensor | None = None,
        labels: Tensor | None = None, weights: Tensor | None = None,
    ) -> dict[str, Tensor]: ...  # fmt: skip

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float | None = None,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        **unknown: Never,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of N pairs, over the batch of all ranks.

        Arguments:
            image_features, text_features: [N, D], of one dtype: bf16, fp16, fp32 or fp64; rows of unit length.
            logit_scale, logit_bias: numbers, or tensors of shape [] or [1]; the scale itself, not its logarithm. A bias
                changes nothing in a softmax, where its gradient is 0. `SigLipLoss` takes 0 without one, and each of a
                row's N - 1 negatives begins with a loss near log 2; the paper's is learned and begins at -10.
            output_dict: return `{"contrastive_loss": loss}`, as open_clip's losses can.
            ids: [N] integers; pairs of equal ids are not negatives of each other.
            labels: [N] integers; all pairs of equal labels are positives. A softmax takes the mean of a row's
                positives (UniCL, Yang et al. 2022), `SigLipLoss` the sum of all pairs.
            weights: [N]; the loss is Σ w·loss / Σ w.
        """
        if unknown or logit_scale is None:
            self._refuse(unknown, "logit_scale")
        operation, inputs = self._prepared(
            image_features, text_features, logit_scale, bias=logit_bias, query_ids=ids, key_ids=ids,
            query_labels=labels, key_labels=labels, weights=weights, paired=True,
        )  # fmt: skip
        loss: Tensor = operation(*inputs)
        if self._may_warn:
            self._warn_of_inputs(logit_scale, image_features, text_features)
        return {"contrastive_loss": loss} if output_dict else loss
