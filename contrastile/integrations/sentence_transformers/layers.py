"""Cached losses inside AdaptiveLayerLoss, which patches the model and calls its loss once for each layer.

Its decorators are there during its forward only, where replays would miss them. So the first call embeds a column once
for all layers, each an output of one `encode`, and the further calls take the layer that their decorator names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from contrastile._errors import invalid

LIBRARY = "sentence_transformers"


@dataclass(frozen=True)
class Layers:
    """The decorators of AdaptiveLayerLoss on a model.

    of_transformer: caches a sub-batch's layers, and names the one that is wanted. of_model: collects the embeddings.
    """

    of_transformer: Any
    of_model: Any

    @classmethod
    def of(cls, model: Any) -> Layers | None:
        """The decorators on a model; None where there are none. Raises ValueError for those of other losses."""
        model = unwrapped(model)
        forward = vars(model).get("forward")
        if not _decorates(forward):
            return None
        of_transformer = vars(model[0]).get("forward") if hasattr(forward, "embeddings") else None
        outer = forward if of_transformer is None else forward.fn
        if _decorates(outer):
            got = f"{type(outer).__module__.rpartition('.')[2]}, which changes the model for its forward alone"
            remedy = "Put the loss without a cache in it, or MatryoshkaLoss inside AdaptiveLayerLoss."
            raise invalid("loss", "be called by a trainer, MatryoshkaLoss or AdaptiveLayerLoss", got, remedy)
        return cls(of_transformer, forward)

    def chosen(self, embed: Callable[[], tuple[Any, Any]]) -> tuple[list[Tensor], Any]:
        """Embeddings of each column by the layer that is wanted; `embed` returns those of all layers, and the rest."""
        index = self.of_transformer.layer_idx
        if index is None:
            self.of_transformer.by_layer = embed()
            self.of_transformer.num_layers = len(self.of_transformer.by_layer[0][0])
        columns, others = self.of_transformer.by_layer
        embeddings = [column[-1 if index is None else index] for column in columns]
        self.of_model.embeddings += embeddings
        return embeddings, others

    def embeddings(self, model: Any, features: dict[str, Any]) -> tuple[Tensor, ...]:
        """Embeddings of some rows by each layer, the last one's at the end."""
        transformer = unwrapped(model)[0]
        decorator = type(self.of_transformer)(transformer, self.of_transformer.original_forward)
        with _forward(transformer, decorator):
            last: Tensor = self.of_model.fn(features)["sentence_embedding"]
            layers = []
            for index in range(decorator.num_layers - 1):
                decorator.set_layer_idx(index)
                layers.append(self.of_model.fn(features)["sentence_embedding"])
        return *layers, last


def unwrapped(model: Any) -> Any:
    """The model inside wrappers of torch.compile and of DistributedDataParallel."""
    while (inner := getattr(model, "_orig_mod", getattr(model, "module", None))) is not None:
        model = inner
    return model


def _decorates(forward: Any) -> bool:
    """Return whether this is a decorator of the library's losses."""
    return type(forward).__module__.startswith(LIBRARY)


@contextmanager
def _forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward for a while."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
