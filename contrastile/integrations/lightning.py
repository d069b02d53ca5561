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

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from contrastile import InfoNCELoss
from contrastile._errors import invalid
from contrastile.integrations.sides import Retain, encode_sides, loss_of_sides


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
        loss: called as `loss(queries, keys, scale)`; by default InfoNCE.

    A batch is a list or tuple of the sides' inputs, or a mapping, whose values are taken in its order.
    """

    encoders: Sequence[str] | str = "forward"
    sub_batch: int | Literal["auto"] | None = 64
    sub_batch_tokens: int | None = None
    retain: Retain = 0
    loss: Callable[..., Tensor] = InfoNCELoss()

    if TYPE_CHECKING:
        log: Any

    def scale(self) -> Tensor | float:
        """The factor of the scores; 20 by default. A number as an attribute takes its place."""
        return 20.0

    def contrastive_loss(self, batch: Any) -> Tensor:
        """The loss of a batch, over all ranks."""
        sides = list(batch.values() if isinstance(batch, Mapping) else batch)
        names = [self.encoders] * len(sides) if isinstance(self.encoders, str) else list(self.encoders)
        if not 2 <= len(names) == len(sides):
            remedy = "Let the data loader return the inputs of each encoder."
            raise invalid("batch", f"have two sides or more, one for each of {len(names)} encoders", len(sides), remedy)
        if isinstance(self.loss, type) or not callable(self.loss):
            name = getattr(self.loss, "__name__", "InfoNCELoss")
            got = getattr(self.loss, "__name__", self.loss)
            raise invalid("loss", "be a loss as an object", got, f"Write loss = {name}().")
        paths = [name.rpartition(".") for name in names]
        encoders = [(attrgetter(path)(self) if path else self, method) for path, _, method in paths]
        features = encode_sides(encoders, sides, self.sub_batch, self.sub_batch_tokens, self.retain)
        # a subclass may have a number in the place of the method
        scale: Any = self.scale
        scale = scale() if callable(scale) else scale
        return loss_of_sides(self.loss, features, scale)

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
        # the same number on all ranks
        self.log("val_loss", loss, prog_bar=True)
        return loss
