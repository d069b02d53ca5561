"""The sides of a batch, such as images and texts, through the gradient cache; shared by the adapters."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Literal

from torch import Tensor

from contrastile import encode
from contrastile._errors import invalid
from contrastile.gradcache.encode import check_sizes, checked_count
from contrastile.gradcache.memory import AUTO, Releasable
from contrastile.gradcache.modes import joined
from contrastile.modules.base import Loss

Retain = int | Literal["auto"]


def retain_of_sides(retain: Retain, sides: int, sub_batch: int | Literal["auto"] | None = None) -> list[Retain]:
    """`retain` of each side's call of `encode`, in the order of the calls.

    The backward begins with the last sub-batch of the last side. To retain its graph spares a forward, and takes memory
    during the loss only, which has to find room beside it; where `encode` runs out of memory it is released. A size
    "auto" fills the memory: no more graphs are retained.
    """
    last: Retain = Releasable(1) if retain == 0 and sub_batch != "auto" else retain
    return [*[retain] * (sides - 1), last]


def check_counts(sub_batch: Any, sub_batch_tokens: Any, retain: Any) -> None:
    """Raise ValueError for sizes that `encode` would refuse in the first step."""
    check_sizes((), None, sub_batch, sub_batch_tokens)
    checked_count("sub_batch", sub_batch, 1)
    checked_count("sub_batch_tokens", sub_batch_tokens, 1, (None,))
    checked_count("retain", retain, 0, (AUTO,))


def encode_sides(
    encoders: Sequence[Any], inputs: Sequence[Any], sub_batch: int | Literal["auto"] | None,
    sub_batch_tokens: int | None, retain: Retain,
) -> list[Tensor]:  # fmt: skip
    """Features [N, D] of each side. sub_batch_tokens: limits the sides with an `attention_mask`."""
    features, retains = [], retain_of_sides(retain, len(encoders), sub_batch)
    for encoder, batch, of_side in zip(encoders, inputs, retains, strict=True):
        tokens = sub_batch_tokens if isinstance(batch, Mapping) and "attention_mask" in batch else None
        if sub_batch is None and tokens is None and sub_batch_tokens is not None:
            remedy = 'Say how many of its examples are encoded at once, or "auto".'
            raise invalid("sub_batch", "be given for a side without an `attention_mask`", None, remedy)
        features.append(encode(encoder, batch, sub_batch=sub_batch, sub_batch_tokens=tokens, retain=of_side))
    return features


def loss_of_sides(loss: Callable[..., Tensor], features: Sequence[Tensor], scale: Any, bias: Any = None) -> Tensor:
    """loss(queries, keys, scale): the first side's features, and those of all others, one behind the other.

    bias: follows the scale, if there is one. Keys behind the right ones are hard negatives, in a side of their own or
    not. Raises ValueError for fewer keys in the second side than queries, for a bias that the loss does not take, and
    for a loss that needs more arguments or returns no number.
    """
    if isinstance(loss, Loss):
        _refuse_other_calls(loss)
    for output in features:
        if isinstance(output, Mapping):
            remedy = "Return one tensor of it, such as its pooler_output, normalised."
            raise invalid("encoders", "return features [B, D]", f"a {type(output).__name__}", remedy)
    query, *keys = features
    if len(keys[0]) < len(query):
        remedy = "Let the data have a pair in every row."
        raise invalid("sides", "have a key for each query", f"{len(query)} and {len(keys[0])} rows", remedy)
    if bias is not None and isinstance(loss, Loss) and "logit_bias" not in signature(loss.forward).parameters:
        remedy = "A bias is added to the logits of SigLipLoss."
        raise invalid("bias", f"be left out with {type(loss).__name__}", "one", remedy)
    return loss(query, joined(keys) if len(keys) > 1 else keys[0], scale, *(() if bias is None else (bias,)))


def _refuse_other_calls(loss: Loss) -> None:
    """Raise for a loss of further arguments than two sides and a scale, and for one of every row."""
    takes = [x for x in signature(loss.forward).parameters.values() if x.kind is not x.VAR_KEYWORD]
    needs = [x.name for x in takes[2:] if x.default is x.empty and not x.name.endswith("scale")]
    if needs or takes[1].name == "labels":
        got = f"{type(loss).__name__}, which needs {', '.join(needs or ['labels'])}"
        remedy = "Call it in a compute_loss of your own (Trainer), or in a training_step (Lightning)."
        raise invalid("loss", "take two sides and a scale alone", got, remedy)
    if loss.options.reduction == "none":
        remedy = "Leave it out, for the mean."
        raise invalid("loss", "return a number to train on", "one of every row, by reduction='none'", remedy)
