"""A Trainer of transformers that trains with the gradient cache, and the mixin that makes one of any subclass.

    from contrastile.integrations.transformers import ContrastileTrainer, TextPairs

    trainer = ContrastileTrainer(
        model=model, args=args, train_dataset=pairs, data_collator=TextPairs(tokenizer), sub_batch=64
    )
    trainer.train()

The batch of a step is `per_device_train_batch_size` on all ranks; `sub_batch` is what the model sees at once. Gradient
accumulation remains the Trainer's: it adds no negatives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import InfoNCELoss
from contrastile._errors import invalid
from contrastile._torch import uncompiled
from contrastile._types import accumulator
from contrastile.gradcache.ddp_fsdp import unwrap
from contrastile.gradcache.introspect import of_its_module
from contrastile.integrations.sides import Retain, check_counts, encode_sides, loss_of_sides

# an encoder of one side: the name of a method of the model, or a function that gets the model and one side's inputs
Encoder = str | Callable[..., Tensor]


@of_its_module
def mean_pooled(model: nn.Module, /, **inputs: Any) -> Tensor:
    """Unit rows [B, D], float32 at least: the mean of the last hidden states over the tokens of the attention mask.

    Rows of unit length in 16 bits would change the gradient by some percent.
    """
    states: Tensor = model(**inputs).last_hidden_state
    dtype, mask = accumulator(states.dtype), inputs.get("attention_mask")
    if mask is None:
        return F.normalize(states.mean(1, dtype=dtype), dim=-1)
    weights = (mask != 0)[..., None].to(states.dtype)
    return F.normalize((states * weights).sum(1, dtype=dtype) / weights.sum(1, dtype=dtype).clamp(min=1), dim=-1)


def method_encoder(model: nn.Module, method: str) -> tuple[nn.Module, str | Callable[..., Tensor]]:
    """A method of the model as an encoder: what it returns, or the `pooler_output` of that.

    The features of transformers' `get_image_features` are such an output since version 5. The result of `forward`,
    or of a compiled method, is taken as it is.
    """
    # refuses a name of no method
    unwrap((model, method))
    if method == "forward" or uncompiled(getattr(model, method)) is not None:
        # a call of the model, with its hooks; or compiled, which `encode` has to see
        return model, method

    @of_its_module
    def features(module: nn.Module, /, *inputs: Any, **named: Any) -> Any:
        # of a module that FSDP2 shards, the method that gathers its parameters
        out = unwrap((module, method))[0](*inputs, **named)
        return getattr(out, "pooler_output", out)

    # a size "auto" is remembered by this name
    features.__qualname__ = method
    return model, features


class TextPairs:
    """A collator for columns of texts: each side's tokenizer output, padded, under the name of its column.

    Raises ValueError for examples without such a column, and for others than texts.
    """

    def __init__(self, tokenizer: Any, sides: Sequence[str] = ("query", "key"), **how: Any) -> None:
        self.tokenizer, self.sides = tokenizer, tuple(sides)
        self.how = {"padding": True, "truncation": True, "return_tensors": "pt", **how}

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Tensor]]:
        missing = [side for side in self.sides if side not in examples[0]]
        if missing:
            got = f"{', '.join(missing)}, of examples with {', '.join(examples[0])}"
            remedy = "Pass the same sides=(...) to TextPairs and to the trainer."
            raise invalid("sides", "name columns of the data", got, remedy)
        for side, text in ((side, row[side]) for row in examples for side in self.sides):
            # a tokenizer would join the texts of a list
            if not isinstance(text, str):
                remedy = "Give each text a column of its own."
                raise invalid(side, "be a text in every row", type(text).__name__, remedy)
        return {side: dict(self.tokenizer([row[side] for row in examples], **self.how)) for side in self.sides}


class ContrastileMixin:
    """Put before a Trainer's class: `class MyTrainer(ContrastileMixin, Trainer)`.

    Arguments, beside the Trainer's:
        sub_batch: examples of a side that the model encodes at once, or "auto".
        sub_batch_tokens: tokens that it encodes at once, padding included, of sides with an `attention_mask`; with
            `sub_batch=None` this is the only limit. Texts of like length share a sub-batch, without common padding.
        sides: the columns of queries, keys, and further columns of hard negatives. A side's inputs are the mapping or
            the tensor of this name in a batch, or all entries named `<side>_...`, without this prefix.
        encoders: for all sides one, or one for each: the name of a method of the model, such as "get_image_features",
            or a function `f(model, **inputs)`. Either returns features [B, D]; of a method's output its `pooler_output`
            is taken, if it has one. The losses take features as they are: CLIP's are not of unit length. The default is
            `mean_pooled`.
        loss: called as `loss(queries, keys, scale)`, with a bias behind the scale if there is one; by default InfoNCE,
            whose keys may be more than the queries.
        scale, bias: numbers, or functions of the model, as `lambda model: model.logit_scale.exp()`.
        retain: as for `encode`; of the last side one sub-batch retains its graph in any case, while memory lasts.

    The loss is the mean over the batch of all ranks. Mixed precision, DistributedDataParallel, FSDP2, DeepSpeed's ZeRO
    stages 1 and 2, gradient accumulation, evaluation and resuming are the Trainer's own. `predict` returns the features
    of each side, in the order of `sides`. Raises ValueError for several GPUs in one process, for ZeRO stage 3, and for
    options of the Trainer that a loss of two sides would not follow: `compute_loss_func`, `compute_metrics`,
    `label_smoothing_factor`.
    """

    # the loss is a mean over the batch: the Trainer divides it by the steps that it accumulates
    loss_is_scaled_for_ga: ClassVar[bool | None] = False

    if TYPE_CHECKING:
        args: Any
        compute_loss_func: Any
        compute_metrics: Any
        accelerator: Any
        model: Any

    def __init__(
        self,
        *positional: Any,
        sub_batch: int | Literal["auto"] | None,
        sub_batch_tokens: int | None = None,
        sides: Sequence[str] = ("query", "key"),
        encoders: Encoder | Sequence[Encoder] = mean_pooled,
        loss: Callable[..., Tensor] | None = None,
        scale: float | Callable[[Any], Tensor] = 20.0,
        bias: float | Callable[[Any], Tensor] | None = None,
        retain: Retain = 0,
        **named: Any,
    ) -> None:
        if isinstance(sides, str) or len(sides) < 2:
            raise invalid("sides", "name two columns or more", sides, 'Pass ("query", "key").')
        if isinstance(loss, type) or (loss is not None and not callable(loss)):
            name = getattr(loss, "__name__", "InfoNCELoss")
            raise invalid("loss", "be a loss as an object", getattr(loss, "__name__", loss), f"Pass {name}().")
        for name, number in (("scale", scale), ("bias", bias)):
            if isinstance(number, Tensor) and number.requires_grad:
                # the optimizer has the parameters of the model
                remedy = f"Make it the model's, and pass {name}=lambda model: ..."
                raise invalid(name, "be a number, or a function of the model", f"a {type(number).__name__}", remedy)
        is_list = isinstance(encoders, (list, tuple))
        self.encoders: list[Encoder] = list(encoders) if is_list else [encoders] * len(sides)  # type: ignore[arg-type,list-item]
        if len(self.encoders) != len(sides):
            raise invalid("encoders", f"be one, or one for each of {len(sides)} sides", len(self.encoders), "Add some.")
        check_counts(sub_batch, sub_batch_tokens, retain)
        self.sub_batch, self.sub_batch_tokens = sub_batch, sub_batch_tokens
        self.sides, self.scale, self.bias, self.retain = tuple(sides), scale, bias, retain
        self.contrastive_loss = InfoNCELoss() if loss is None else loss
        super().__init__(*positional, **named)
        for encoder in self.encoders:
            if not callable(getattr(self.model, encoder, None) if isinstance(encoder, str) else encoder):
                rule = "be functions, or names of the model's methods"
                raise invalid("encoders", rule, repr(encoder), "Check the name.")
        # the columns of both sides are no arguments of the model's forward
        self.args.remove_unused_columns = False
        smoothing = self.args.label_smoothing_factor
        for name, value, unset, remedy in (
            ("compute_loss_func", self.compute_loss_func, None, "Pass loss=..., called as loss(queries, keys, scale)."),
            ("compute_metrics", self.compute_metrics, None, "Evaluate features with contrastile.evaluate."),
            ("label_smoothing_factor", smoothing, 0, "Pass loss=InfoNCELoss(label_smoothing=...)."),
        ):
            # the Trainer would leave it out without a word
            if value != unset:
                raise invalid(name, f"be {unset}", getattr(value, "__name__", value), remedy)
        if self.args.n_gpu > 1:
            raise invalid("n_gpu", "be 1", self.args.n_gpu, "Launch one process for each GPU, with torchrun.")
        refuse_zero_3(getattr(self.accelerator.state, "deepspeed_plugin", None))
        if self.args.gradient_accumulation_steps > 1:
            warnings.warn(
                "gradient_accumulation_steps adds no negatives: each step's loss sees its own batch. Raise "
                "per_device_train_batch_size instead; sub_batch bounds the memory.",
                stacklevel=2,
            )

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch; with `return_outputs` also the features by side."""
        del num_items_in_batch
        batch = [self.inputs_of(inputs, side) for side in self.sides]
        self._refuse_unnamed(inputs, batch)
        # accelerate puts autocast on the model's forward alone, which methods and the loss would miss
        with self.accelerator.autocast():
            features = encode_sides(
                [method_encoder(model, x) if isinstance(x, str) else (model, x) for x in self.encoders],
                batch, self.sub_batch, self.sub_batch_tokens, self.retain,
            )  # fmt: skip
            # else accelerate would take the wrapper out of a compiled model for good
            bare = self.accelerator.unwrap_model(model, keep_torch_compile=False)
            numbers = [x(bare) if callable(x) else x for x in (self.scale, self.bias)]
            loss = loss_of_sides(self.contrastive_loss, features, *numbers)
        return (loss, dict(zip(self.sides, features, strict=True))) if return_outputs else loss

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> Any:
        """The batch on the device."""
        if not inputs:
            got, remedy = "nothing, as the default one does of texts", "Pass data_collator=TextPairs(tokenizer)."
            raise invalid("data_collator", "return the inputs of each side", got, remedy)
        return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def inputs_of(self, inputs: Mapping[str, Any], side: str) -> Any:
        """The inputs of a side's encoder."""
        if side in inputs:
            return inputs[side]
        # of "key" and "key_2" the second has "key_2_..."
        longer = tuple(f"{other}_" for other in self.sides if other.startswith(f"{side}_"))
        names = [name for name in inputs if name.startswith(f"{side}_") and not f"{name}_".startswith(longer)]
        prefixed = {name.removeprefix(f"{side}_"): inputs[name] for name in names}
        if not prefixed:
            remedy = "Name the columns in `sides`, or let the collator return them."
            raise invalid("inputs", f"hold {side} or {side}_...", sorted(inputs), remedy)
        return prefixed

    def _refuse_unnamed(self, inputs: Mapping[str, Any], batch: Sequence[Any]) -> None:
        """Raise for what looks like a further side: a mapping, `X_<entry of a side>`, features or pixels of one."""
        entries = {name for x in batch if isinstance(x, Mapping) for name in x}
        shapes = {x.shape[1:] for x in batch if isinstance(x, Tensor) and x.ndim > 1}
        # "key_2_..." is no "2_..." of "key"
        named = {f"{side}_{name}" for side in self.sides for name in entries if name.isidentifier()}
        for name, x in inputs.items():
            alike = isinstance(x, Tensor) and x.is_floating_point() and x.shape[1:] in shapes
            if name in named.union(self.sides):
                continue
            if isinstance(x, Mapping) or alike or name.endswith(tuple(f"_{entry}" for entry in entries)):
                got = f"{', '.join(self.sides)} with {name} in the batch"
                remedy = "Pass sides=(...) to the trainer too, or leave it out of the batch."
                raise invalid("sides", "name every side of a batch", got, remedy)

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, None]:
        """The loss of a batch in evaluation, and the features of each side unless the loss alone is wanted."""
        del ignore_keys
        with torch.no_grad():
            loss, features = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        return loss.detach(), None if prediction_loss_only else tuple(x.detach() for x in features.values()), None


def refuse_zero_3(plugin: Any) -> None:
    """Raise for a DeepSpeed plugin of accelerate whose engine keeps parameters in parts."""
    if plugin is not None and plugin.zero_stage > 2:
        remedy = "Shard with FSDP2 (fsdp_version 2)."
        raise invalid("deepspeed", "be of ZeRO stage 0, 1 or 2", f"stage {plugin.zero_stage}", remedy)


def __getattr__(name: str) -> Any:
    if name != "ContrastileTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import Trainer

    described = {"__doc__": ContrastileMixin.__doc__, "__module__": __name__}
    globals()[name] = type(name, (ContrastileMixin, Trainer), described)
    return globals()[name]
