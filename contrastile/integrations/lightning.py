"""A mixin for LightningModules: `training_step` and `validation_step` with the gradient cache.

    class Clip(ContrastileMixin, LightningModule):
        encoders = ("encode_image", "encode_text")
        sub_batch = 64
        loss = ClipLoss()

        def scale(self):
            return self.logit_scale.exp()

        def encode_image(self, pixels): ...
        def encode_text(self, tokens): ...
        def configure_optimizers(self): ...

Lightning runs `training_step` inside the forward of DistributedDataParallel and inside the precision plugin's autocast,
where `encode` reduces each gradient once. With `ModelParallelStrategy`, `configure_model` shards the towers and then
the LightningModule by `fully_shard`, or a module that holds all parameters, whose methods the encoders then name:
`encoders = ("model.encode_image", "model.encode_text")`. `FSDPStrategy`, which is FSDP1, is refused by `encode`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from contrastile import InfoNCELoss
from contrastile._errors import invalid
from contrastile.integrations.sides import Retain, check_counts, encode_sides, loss_of_sides

# attributes that `encode` takes
COUNTS = ("sub_batch", "sub_batch_tokens", "retain")
DEFAULTS = {
    "encoders": "forward", "sub_batch": 64, "sub_batch_tokens": None, "retain": 0, "loss": InfoNCELoss(), "scale": 20.0,
    "logit_bias": None,
}  # fmt: skip


class ContrastileMixin:
    """Put before LightningModule. A subclass sets or overrides:

    Attributes:
        encoders: names of the methods that encode the sides of a batch, in its order: unit rows [B, D] each. The first
            side's are the queries, all others' the keys, hard negatives last. One name stands for all sides. A name
            such as "model.encode_image" is a method of a module inside.
        sub_batch: examples of a side that are encoded at once, or "auto".
        sub_batch_tokens: tokens that are encoded at once, padding included, of sides with an `attention_mask`; with
            `sub_batch = None` this is the only limit. Texts of like length share a sub-batch, without common padding.
        retain: as for `encode`; of the last side one sub-batch retains its graph in any case, while memory lasts.
        loss: called as `loss(queries, keys, scale)`, and with `logit_bias` behind the scale if there is one; by default
            InfoNCE.
        logit_bias: the bias of `SigLipLoss`, a parameter, a number or a method of this name.
        scale: the factor of the scores, a parameter, a number or a method of this name; 20 by default.

    Each is an attribute of the class, of a class that it derives from, or one that `__init__` sets; a module of
    `__init__` comes before an attribute of the class. Where none is set the mixin has its default, and no attribute.
    A batch is a list or tuple of the sides' inputs, or a mapping, whose values are taken in its order. A fit starts
    with ValueError for wrong sizes, encoders and losses.
    """

    if TYPE_CHECKING:
        # annotated alone: as attributes they would hide those of the classes behind, and modules that `__init__` sets
        encoders: Sequence[str] | str
        sub_batch: int | Literal["auto"] | None
        sub_batch_tokens: int | None
        retain: Retain
        loss: Callable[..., Tensor]
        log: Any

    def _setting(self, name: str) -> Any:
        """An attribute of this name, or its default."""
        # a loss is a module, which Python would look up behind an attribute of the class
        set_here = getattr(self, "_modules", {}).get(name)
        if set_here is not None:
            return set_here
        # the error of a property is no missing attribute
        given = hasattr(type(self), name) or hasattr(self, name)
        return getattr(self, name) if given else DEFAULTS[name]

    def on_fit_start(self) -> None:
        """Refuse wrong sizes, encoders and losses before the first batch is loaded."""
        super().on_fit_start()  # type: ignore[misc]
        check_counts(*map(self._setting, COUNTS))
        self._methods(2)
        self._check_loss()

    def contrastive_loss(self, batch: Any) -> Tensor:
        """The loss of a batch, over all ranks."""
        if not isinstance(batch, (Mapping, list, tuple)):
            # the rows of a tensor would be sides
            remedy = "Let the data loader return (queries, keys)."
            raise invalid("batch", "be a list, a tuple or a mapping of sides", type(batch).__name__, remedy)
        sides = list(batch.values() if isinstance(batch, Mapping) else batch)
        encoders = self._methods(len(sides))
        if not 2 <= len(encoders) == len(sides):
            remedy = "Let the data loader return the inputs of each encoder."
            rule = f"have two sides or more, one for each of {len(encoders)} encoders"
            raise invalid("batch", rule, len(sides), remedy)
        self._check_loss()
        features = encode_sides(encoders, sides, *map(self._setting, COUNTS))
        numbers = [self._setting(name) for name in ("scale", "logit_bias")]
        return loss_of_sides(self._setting("loss"), features, *[x() if callable(x) else x for x in numbers])

    def _methods(self, sides: int) -> list[tuple[Any, str]]:
        """The module and the method of each encoder, where one name stands for this many sides."""
        methods, encoders = [], self._setting("encoders")
        for name in [encoders] * sides if isinstance(encoders, str) else encoders:
            path, _, method = str(name).rpartition(".")
            module: Any = self
            for inside in path.split(".") if path else ():
                module = getattr(module, inside, None)
            if not callable(getattr(module, method, None)):
                remedy = 'Write "encode_image", or "model.encode_image" for one of a module inside.'
                raise invalid("encoders", "be names of methods", repr(name), remedy)
            methods.append((module, method))
        return methods

    def _check_loss(self) -> None:
        loss = self._setting("loss")
        if isinstance(loss, type) or not callable(loss):
            name, got = getattr(loss, "__name__", "InfoNCELoss"), getattr(loss, "__name__", loss)
            raise invalid("loss", "be a loss as an object", got, f"Write loss = {name}().")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log the loss as `train_loss` and return it."""
        del batch_idx
        loss = self.contrastive_loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log the loss as `val_loss` and return it."""
        del batch_idx
        loss = self.contrastive_loss(batch)
        # the mean over ranks; of a loss that covers them it is the same number, and Lightning would warn without it
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        return loss
