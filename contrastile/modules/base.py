"""The base of the loss modules: their options, and their own names for the arguments of `contrast`.

Losses compute with features as given, under autocast in its dtype. A loss of cosines warns once about rows that are not
of unit length, and about a scale that is negative or looks like a temperature.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, ClassVar, Literal, Never, TypedDict, overload

import torch
from torch import Tensor, nn

from contrastile._dispatch import Options
from contrastile._errors import rename
from contrastile._types import Backend, ExchangeName, Gradient, Reduction
from contrastile.engine import arguments as checks
from contrastile.engine.plan import prepare, share_error
from contrastile.losses.base import PairLoss

# deviation of a row's length from 1 above which a loss of cosines warns
LENGTH_TOLERANCE = 0.05
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
    # the first call checks that rows are of unit length
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
        Options.refuse(unknown)
        self.options = Options(backend, exchange, group, gradient, label_smoothing, reduction, workspace, device)
        self.loss = self.pair_loss.smoothed(label_smoothing) if label_smoothing else self.pair_loss
        self._unseen = self.unit_rows

    def extra_repr(self) -> str:
        fields = ((name, getattr(self.options, name)) for name in Options.__dataclass_fields__)
        default = Options()
        return ", ".join(f"{name}={value!r}" for name, value in fields if value != getattr(default, name))

    def _prepared(self, q: Tensor, k: Tensor, scale: Tensor | float, **others: Any) -> tuple[Any, tuple[Any, ...]]:
        """The operation that computes the loss, and its inputs. Errors have this loss's names of arguments."""
        try:
            return prepare(q, k, scale, self.loss, self.options, **others)
        except ValueError as error:
            rename(error, self.names)
            raise

    @contextmanager
    def _shared_errors(self) -> Iterator[None]:
        """Raise an error of this rank on all of them, with this loss's names of arguments."""
        try:
            yield
        except Exception as error:
            # a scorer's own errors are of any kind
            if isinstance(error, ValueError):
                rename(error, self.names)
            share_error(error, self.options.group, self.options.exchange)
            raise

    def _look(self, scale: Tensor | float, *sides: Tensor) -> None:
        """Warn, at the first call, about rows not of unit length, or a scale that is a temperature or negative."""
        if torch.compiler.is_compiling() or any(len(side) == 0 for side in sides) or checks.captured(*sides):
            return
        self._unseen = False
        # reads are counted by process, because a loss may be made anew in every step
        if not _gpu_reads.allowed(*sides):
            return
        for side in sides:
            lengths = torch.linalg.vector_norm(side.detach()[:64].float(), dim=-1)
            if bool(((lengths - 1).abs() > LENGTH_TOLERANCE).any()):
                # Python shows equal warnings of one line once, however many losses are made
                warnings.warn(
                    f"{type(self).__name__} got rows of length other than 1; it computes with features as given. "
                    "Normalise them first, with torch.nn.functional.normalize(x, dim=-1).",
                    stacklevel=5,
                )
                return
        # a scale of a sharded module is a tensor, whose read would be a collective
        if isinstance(scale, Real) and scale < 1.0 and scale != 0.0:
            why = "as if it were a temperature" if scale > 0.0 else "which drives positives apart"
            warnings.warn(
                f"{type(self).__name__} got a scale of {float(scale):.3g}, {why}; products are multiplied by it. "
                "Pass 1 / temperature.",
                stacklevel=5,
            )


class PairedLoss(Loss):
    """A loss of images and texts that come in pairs."""

    names: ClassVar[dict[str, str]] = {
        "q": "image_features", "k": "text_features", "scale": "logit_scale", "bias": "logit_bias", "query_ids": "ids",
        "key_ids": "ids", "query_labels": "labels", "key_labels": "labels",
    }  # fmt: skip

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: Literal[False] = False,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        *,
        output_dict: Literal[True],
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> dict[str, Tensor]: ...

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of N pairs, over the batch of all ranks.

        Arguments:
            image_features, text_features: [N, D], of one dtype: bf16, fp16, fp32 or fp64; rows of unit length.
            logit_scale, logit_bias: numbers, or tensors of shape [] or [1]; the scale itself, not its logarithm. A bias
                changes nothing in a softmax; its gradient is 0.
            output_dict: return `{"contrastive_loss": loss}`, as open_clip's losses can.
            ids: [N] integers; pairs of equal ids are not negatives of each other.
            labels: [N] integers; all pairs of equal labels are positives, the loss of a row their mean (UniCL, Yang et
                al. 2022).
            weights: [N]; the loss is Σ w·loss / Σ w.
        """
        operation, inputs = self._prepared(
            image_features, text_features, logit_scale, bias=logit_bias, query_ids=ids, key_ids=ids,
            query_labels=labels, key_labels=labels, weights=weights, paired=True,
        )  # fmt: skip
        loss: Tensor = operation(*inputs)
        if self._unseen:
            self._look(logit_scale, image_features, text_features)
        return {"contrastive_loss": loss} if output_dict else loss
