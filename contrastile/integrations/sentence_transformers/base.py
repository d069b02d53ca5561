"""The base of the losses: a column's embeddings by the gradient cache, and the calls that MatryoshkaLoss decorates.

AdaptiveLayerLoss patches the model and calls its loss once for each layer, with decorators that are there during its
forward only, where replays would miss them. So the first call embeds a column once for all layers, each an output of
one `encode`, and the further calls take the layer that their decorator names (`Layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from contrastile import encode
from contrastile._errors import invalid, number, truth_value, whole_number
from contrastile._types import accumulator
from contrastile.engine.plan import share_error
from contrastile.gradcache.encode import checked_count
from contrastile.gradcache.introspect import of_its_module
from contrastile.gradcache.memory import AUTO
from contrastile.integrations.sides import Retain, retain_of_sides

LIBRARY = "sentence_transformers"
# words of a constructor that the model card leaves out
NOT_SHOWN = ("model", "show_progress_bar", "retain")
# entries of a batch that are no rows, whatever their shape
WHOLE = ("prompt_length",)
# entries of a batch that say how many images or videos, one behind the other, each text has
COUNTS = ("num_images_per_sample", "num_videos_per_sample")

CITATION = """
@misc{gao2021scaling,
    title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
    author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan},
    year={2021},
    eprint={2101.06983},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""


class CachedLoss(nn.Module):
    """A loss of columns of texts, which are embedded by the gradient cache."""

    # MatryoshkaLoss decorates `calculate_loss` of such a loss; it patches the model of others, which replays miss
    uses_gradient_cache: ClassVar[bool] = True
    citation: ClassVar[str] = CITATION
    # the class without a cache that errors recommend
    uncached: ClassVar[str]
    # whether the model gives a vector for each token
    of_tokens: ClassVar[bool] = False

    def __init__(
        self, model: Any, scale: float, mini_batch_size: int, mini_batch_num_tokens: int | None,
        gather_across_devices: bool, show_progress_bar: bool, retain: Retain,
    ) -> None:  # fmt: skip
        super().__init__()
        check_model("model", model, of_tokens=self.of_tokens)
        if hasattr(model, "predict") and not hasattr(model, "encode"):
            # a CrossEncoder scores a pair of texts together
            remedy = "Take a loss of sentence_transformers.cross_encoder.losses."
            raise invalid("model", "embed each text by itself", f"a {type(model).__name__}", remedy)
        number("scale", scale, lambda x: x > 0, "be above 0", "Pass 1 / temperature, which is not learned.")
        retain = checked_count("retain", retain, 0, (AUTO,))
        truth_value("gather_across_devices", gather_across_devices)
        whole_number("mini_batch_size", mini_batch_size, 1, "Count the texts that the model sees at once.")
        if mini_batch_num_tokens is not None:
            whole_number("mini_batch_num_tokens", mini_batch_num_tokens, 1, "Count the tokens that it sees at once.")
        self.model, self.scale = model, scale
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens
        self.gather_across_devices, self.retain = gather_across_devices, retain
        if show_progress_bar:
            raise invalid("show_progress_bar", "be False", True, "Leave it out: the trainer shows its own.")

    def get_config_dict(self) -> dict[str, Any]:
        """The words of the constructor, for the model card."""
        # a loss derived from another has the words of that one
        kind = next(each for each in type(self).__mro__ if CachedLoss in each.__bases__)
        words = [name for name in signature(kind).parameters if name not in NOT_SHOWN]
        return {name: getattr(self, "similarity" if name == "similarity_fct" else name) for name in words}

    @property
    def both_ways(self) -> bool:
        """True where an anchor meets other anchors, or a positive searches too: each positive needs an anchor then."""
        return False

    @property
    def exchange(self) -> Literal["auto", "single"]:
        """The exchange of `contrast`: between all ranks, or none."""
        return "auto" if self.gather_across_devices else "single"

    def forward(self, sentence_features: Iterable[Mapping[str, Any]], labels: Tensor | None = None) -> Tensor:
        columns = list(sentence_features)
        if len(columns) < 2:
            remedy = "Give the dataset a column of anchors and one of positives."
            raise invalid("sentence_features", "have two columns or more", len(columns), remedy)
        if isinstance(self.model, nn.DataParallel):
            # a replay would draw other random numbers on all GPUs but the first
            remedy = "Launch one process for each GPU, with torchrun."
            raise invalid("model", "be on one GPU in each process", "a DataParallel", remedy)
        layers = Layers.of(self.model)
        embed = partial(self._embed_columns, columns, labels)
        embeddings, others = embed() if layers is None else layers.chosen(embed)
        anchors, positives = map(len, embeddings[:2])
        if positives < anchors or (positives > anchors and self.both_ways):
            got, rule = f"{positives} for {anchors}", "have a positive for each anchor"
            if positives > anchors:
                got, rule = f"{anchors} for {positives}", "have an anchor for each positive"
            error = invalid("sentence_features", rule, got, "Let the dataset have a pair in every row.")
            # other ranks are about to compare their arguments with this one's
            share_error(error, None, self.exchange)
            raise error
        if "calculate_loss" not in vars(self):
            return self.compute_loss_from_embeddings(embeddings, others)
        if not torch.is_grad_enabled():
            return self.calculate_loss([[x] for x in embeddings], others)
        # a decorator of calculate_loss reads the gradients of its embeddings, which 16 bits would not hold unscaled
        leaves = [widened(x.detach()).requires_grad_() for x in embeddings]
        loss = self.calculate_loss([[x] for x in leaves], others, with_backward=True)
        return _Differentiated.apply(loss.detach(), [leaf.grad for leaf in leaves], *embeddings)

    def calculate_loss(self, reps: list[list[Tensor]], others: Any = None, *, with_backward: bool = False) -> Tensor:
        """The loss of embeddings that come in parts, back-propagated to them at once if wanted."""
        loss = self.compute_loss_from_embeddings([torch.cat(parts) for parts in reps], others)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], others: Any = None) -> Tensor:
        """The loss of the columns' embeddings, and of what else `_embed_columns` returns."""
        raise NotImplementedError

    def _embed_columns(self, columns: Sequence[Mapping[str, Any]], labels: Tensor | None) -> tuple[list[Tensor], Any]:
        """Embeddings [N, ...] of each column, and what else the loss needs."""
        return self._embed_each(columns), labels

    def _embed_each(self, columns: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Outputs of the model for each column."""
        retained = retain_of_sides(self.retain, len(columns))
        return [self._embed(column, self.model, retain) for column, retain in zip(columns, retained, strict=True)]

    @staticmethod
    def _output(model: Any, features: dict[str, Any], _width: int) -> Any:
        """Embeddings of some rows; `_width`: positions of the column's longest text, 0 where there are no texts."""
        return model(features)["sentence_embedding"]

    def _embed(self, features: Mapping[str, Any], model: Any, retain: Retain = 0) -> Any:
        """Outputs of a whole column, by the gradient cache; a tuple of all layers' inside AdaptiveLayerLoss."""
        if "offsets" in features and "attention_mask" not in features:
            remedy = f"Take {self.uncached}: such a model keeps next to nothing for the backward."
            raise invalid("model", "take texts one by one", "a StaticEmbedding", remedy)
        rows = {name: x for name, x in features.items() if isinstance(x, Tensor) and name not in WHOLE}
        whole = {name: x for name, x in features.items() if name not in rows}
        width, layers = _width(rows), Layers.of(model)

        @of_its_module
        def embedding(model: nn.Module, /, **rows: Tensor) -> Any:
            if layers is not None:
                return layers.embeddings(model, {**whole, **rows})
            return self._output(model, {**whole, **rows}, width)

        if (parts := self._parts(rows)) is not None:
            return encode((model, embedding), parts=parts, retain=retain)
        size: int | None = self.mini_batch_size
        tokens, mask = self.mini_batch_num_tokens, rows.get("attention_mask")
        if tokens is not None:
            size = None
        elif mask is not None and mask.ndim == 2 and width and len(mask) > self.mini_batch_size:
            # no further limit: it puts texts of like length together, and trims them
            tokens = self.mini_batch_size * width
        if tokens is not None and width and ("query_expansion_positions" in rows or _reads_padding(model)):
            # positions that the mask leaves out, and the score or the model does not: no row is trimmed
            size = size or max(1, tokens // width)
            tokens = None
        return encode((model, embedding), rows, sub_batch=size, sub_batch_tokens=tokens, retain=retain)

    def _parts(self, rows: dict[str, Tensor]) -> list[dict[str, Any]] | None:
        """Sub-batches of packed inputs (flattened texts, images of many sizes), as the library cuts them itself."""
        # as many images as texts may be two of one text and none of another
        one_each = all(bool((rows[name] == 1).all()) for name in COUNTS if name in rows)
        if len({len(x) for x in rows.values()}) < 2 and "cu_seq_lens_q" not in rows and one_each:
            return None
        try:
            from sentence_transformers.base.losses.gradcache import _create_minibatch, _minibatch_ranges
        except ImportError as error:
            remedy = "Take sentence-transformers of version 6.2."
            raise invalid("sentence_features", "be rows of the batch", "packed inputs", remedy) from error
        bounds = _minibatch_ranges(rows, self.mini_batch_size, self.mini_batch_num_tokens)
        return [_create_minibatch(rows, *each) for each in bounds]


def widened(x: Tensor) -> Tensor:
    """Embeddings in float32 at least: unit rows in 16 bits would miss up to 5 % of the gradient at a scale of 100."""
    return x.to(accumulator(x.dtype))


def check_model(name: str, model: Any, *, of_tokens: bool = False) -> None:
    """Raise ValueError for anything but a module of the library, such as the name of a model, and for other vectors.

    of_tokens: whether the model has to give a vector for each token, and not one for a text.
    """
    kinds = {each.__name__ for each in type(unwrapped(model)).__mro__}
    if not isinstance(model, nn.Module) or "PreTrainedModel" in kinds:
        got = f"a {type(model).__name__}" if isinstance(model, nn.Module) else repr(model)[:80]
        raise invalid(name, "be a model of sentence-transformers", got, "Load it: SentenceTransformer(name).")
    for kind in kinds & {"MultiVectorEncoder", "SentenceTransformer", "SparseEncoder"}:
        if (kind == "MultiVectorEncoder") != of_tokens:
            rule, remedy = "give one vector for a text", "Take CachedMultiVectorLoss, or a SentenceTransformer."
            if of_tokens:
                rule, remedy = "give a vector for each token", "Take CachedRankingLoss, or a MultiVectorEncoder."
            raise invalid(name, rule, f"a {kind}", remedy)


def name_of(similarity_fct: Any, default: str) -> str:
    """The name of a similarity, with its module where that is another library's; `default` for None."""
    if similarity_fct is None:
        return default
    if not callable(similarity_fct):
        # a name, or sentence-transformers' SimilarityFunction
        return repr(similarity_fct)
    name, module = getattr(similarity_fct, "__name__", type(similarity_fct).__name__), similarity_fct.__module__
    return name if module.startswith(LIBRARY) else f"{module}.{name}"


def _width(rows: Mapping[str, Tensor]) -> int:
    """The number of positions of the longest text; 0 where there are no texts."""
    if "cu_seq_lens_q" in rows:
        return int(rows["cu_seq_lens_q"].diff().max())
    texts = [rows[name] for name in ("attention_mask", "input_ids") if name in rows]
    return texts[0].shape[1] if texts and texts[0].ndim > 1 else 0


def _reads_padding(model: nn.Module) -> bool:
    """Return whether the number of padding positions may change the embeddings of a text."""
    return any(isinstance(module, (nn.Conv1d, nn.RNNBase)) for module in model.modules())


class _Differentiated(torch.autograd.Function):
    """A number whose gradients with respect to the embeddings are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_embeddings: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(upstream * gradient for gradient in ctx.saved_tensors)


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
