"""Losses for the trainers of sentence-transformers (tested with 6.2, written for 5 too), with their words.

    from contrastile.integrations.sentence_transformers import CachedRankingLoss

    loss = CachedRankingLoss(model, mini_batch_size=64)
    trainer = SentenceTransformerTrainer(model=model, train_dataset=train_dataset, loss=loss)

Each column of a batch goes through `encode`, in sub-batches of `mini_batch_size`, and the embeddings to `contrast`,
which holds no matrix of scores. Gradients reach autograd once per parameter and step, so DistributedDataParallel,
gradient accumulation and mixed precision work as for a loss without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from contrastile import contrast, encode
from contrastile._errors import invalid, one_of
from contrastile.losses import Softmax

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
# entries of a batch that are no rows, whatever their shape
WHOLE = ("prompt_length",)
# names of the similarities of sentence_transformers.util that are dot products, of unit rows or of rows as they are
COSINE, DOT = ("cos_sim", "pytorch_cos_sim"), ("dot_score",)

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


class CachedRankingLoss(nn.Module):
    """`MultipleNegativesRankingLoss` with gradient cache and tiled scores, for batches of any size.

    Naively, with unit rows anchor [N, D] and keys [M, D], the positives first,

        loss = F.cross_entropy(scale * anchor @ keys.T, torch.arange(N))

    Columns are (anchor, positive), or (anchor, positive, negative_1, ..., negative_n).

    Arguments (the words of `CachedMultipleNegativesRankingLoss`):
        model: the SentenceTransformer; the trainer replaces it by its data-parallel wrapper.
        scale: factor of the scores, 1 / temperature.
        similarity_fct: `util.cos_sim` (the default) or `util.dot_score`.
        mini_batch_size: texts that the model sees at once; texts of like length are put together, without the padding
            that they share.
        mini_batch_num_tokens: tokens that the model sees at once, padding included, in place of `mini_batch_size`.
        gather_across_devices: whether the documents of all ranks are negatives. The value is then the loss of the
            global batch, the same on all ranks.
        directions: "query_to_doc", with any of "query_to_query" and "doc_to_query"; "doc_to_doc" beside "doc_to_query".
        partition_mode: "joint", one softmax over all directions; or "per_direction", their mean, for "query_to_doc"
            and "doc_to_query".
        show_progress_bar: only False.
        hardness_mode, hardness_strength: only without effect.
        retain: sub-batches of each column whose graph is kept from the first pass, as for `encode`; "auto": as many as
            memory allows.

    Raises ValueError for words that it does not know how to honour. Works inside `MatryoshkaLoss`; refuses
    `AdaptiveLayerLoss`, which changes the model only during the forward, so that replays would not see it.
    """

    # MatryoshkaLoss decorates `calculate_loss` of such a loss; it patches the model of others, which replays miss
    uses_gradient_cache: ClassVar[bool] = True
    citation: ClassVar[str] = CITATION

    def __init__(
        self,
        model: Any,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] | None = None,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        retain: int | Literal["auto"] = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.scale, self.mini_batch_size, self.retain = scale, mini_batch_size, retain
        self.mini_batch_num_tokens, self.gather_across_devices = mini_batch_num_tokens, gather_across_devices
        if not scale > 0:
            raise invalid("scale", "be above 0", scale, "Pass 1 / temperature.")
        self.similarity_fct = similarity_fct
        _ = self.normalises
        self.directions, self.partition_mode = _directions(directions, partition_mode), partition_mode
        if show_progress_bar:
            raise invalid("show_progress_bar", "be False", True, "Leave it out: the trainer shows its own.")
        if hardness_mode is not None and hardness_strength:
            remedy = "Leave it out, or take MultipleNegativesRankingLoss."
            raise invalid("hardness_mode", "be None", repr(hardness_mode), remedy)

    @property
    def normalises(self) -> bool:
        """True where embeddings are divided by their length. Raises ValueError for another similarity."""
        name = self._similarity_name
        if name not in (*COSINE, *DOT):
            remedy = "Pass one of these, or take MultipleNegativesRankingLoss."
            raise invalid("similarity_fct", "be util.cos_sim or util.dot_score", name, remedy)
        return name in COSINE

    @property
    def _similarity_name(self) -> str:
        given = self.similarity_fct
        return COSINE[0] if given is None else getattr(given, "__name__", type(given).__name__)

    @property
    def temperature(self) -> float:
        """1 / scale."""
        return 1.0 / self.scale

    def forward(self, sentence_features: Iterable[Mapping[str, Any]], labels: Tensor | None = None) -> Tensor:
        _refuse_patched(self.model)
        embeddings = [self._embed(features) for features in sentence_features]
        if "calculate_loss" not in vars(self):
            return self.compute_loss_from_embeddings(embeddings, labels)
        if not torch.is_grad_enabled():
            return self.calculate_loss([[x] for x in embeddings], labels)
        # a decorator of calculate_loss reads the gradients of its embeddings
        leaves = [x.detach().requires_grad_() for x in embeddings]
        loss = self.calculate_loss([[x] for x in leaves], labels, with_backward=True)
        value: Tensor = _Differentiated.apply(loss.detach(), [leaf.grad for leaf in leaves], *embeddings)
        return value

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of embeddings that come in parts, back-propagated to them at once if wanted."""
        loss = self.compute_loss_from_embeddings([torch.cat(parts) for parts in reps], labels)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of the columns' embeddings, each [N, D]; `labels` are not used."""
        del labels
        if len(embeddings) < 2:
            remedy = "Give the dataset a column of anchors and one of positives."
            raise invalid("sentence_features", "have two columns or more", len(embeddings), remedy)
        if self.normalises:
            embeddings = [F.normalize(x, dim=-1) for x in embeddings]
        queries, positives, documents = embeddings[0], embeddings[1], torch.cat(list(embeddings[1:]))
        if self.partition_mode == "per_direction" and len(self.directions) == 2:
            if len(embeddings) == 2:
                return self._contrast(queries, positives, loss=Softmax(symmetric=True))
            return (self._contrast(queries, documents) + self._contrast(positives, queries)) / 2
        if self.directions == ("query_to_doc",):
            return self._contrast(queries, documents)
        own, columns = self._ids(queries), len(embeddings) - 1
        nobody = torch.full_like(own, -1)
        forth = [(documents, nobody.repeat(columns)), (queries, own)][: 1 + ("query_to_query" in self.directions)]
        back = [(queries, nobody), (documents, own.repeat(columns))][: 1 + ("doc_to_doc" in self.directions)]
        loss = self._of_rows(queries, own, forth)
        if "doc_to_query" in self.directions:
            # log Σ exp over the keys of both, less the positive's score, which is in each
            loss = torch.logaddexp(loss, self._of_rows(positives, own, back))
        return loss.mean()

    def get_config_dict(self) -> dict[str, Any]:
        """The options, for the model card."""
        return {
            "scale": self.scale,
            "similarity_fct": self._similarity_name,
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
        }

    def _contrast(self, rows: Tensor, keys: Tensor, loss: Softmax = Softmax(), **others: Any) -> Tensor:  # noqa: B008
        exchange: Literal["auto", "single"] = "auto" if self.gather_across_devices else "single"
        return contrast(rows, keys, scale=self.scale, loss=loss, exchange=exchange, **others)

    def _of_rows(self, rows: Tensor, ids: Tensor, keys: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Loss of each row among keys with their ids; those of its own id do not count, but for its positive."""
        both = (torch.cat(tensors) for tensors in zip(*keys, strict=True))
        return self._contrast(rows, next(both), query_ids=ids, key_ids=next(both), reduction="none")

    def _ids(self, queries: Tensor) -> Tensor:
        """A number of each query that no rank shares."""
        gathers = self.gather_across_devices and dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if gathers else 0
        return torch.arange(len(queries), device=queries.device) + (rank << 32)

    def _embed(self, features: Mapping[str, Any]) -> Tensor:
        """Embeddings [N, D] of a column, by the gradient cache."""
        if "offsets" in features and "attention_mask" not in features:
            remedy = "Take MultipleNegativesRankingLoss: such a model keeps next to nothing for the backward."
            raise invalid("model", "take texts one by one", "a StaticEmbedding", remedy)
        rows = {name: x for name, x in features.items() if isinstance(x, Tensor) and name not in WHOLE}
        whole = {name: x for name, x in features.items() if name not in rows}

        def embedding(model: nn.Module, /, **rows: Tensor) -> Tensor:
            output: Tensor = model({**whole, **rows})["sentence_embedding"]
            return output

        if (parts := self._parts(rows)) is not None:
            packed: Tensor = encode((self.model, embedding), parts=parts, retain=self.retain)
            return packed
        tokens, mask = self.mini_batch_num_tokens, rows.get("attention_mask")
        if tokens is None and mask is not None and mask.ndim == 2 and mask.numel():
            # no further limit: it puts texts of like length together, and trims them
            tokens = self.mini_batch_size * mask.shape[1]
        size = self.mini_batch_size if self.mini_batch_num_tokens is None else None
        embeddings: Tensor = encode(
            (self.model, embedding), rows, sub_batch=size, sub_batch_tokens=tokens, retain=self.retain
        )
        return embeddings

    def _parts(self, rows: dict[str, Tensor]) -> list[dict[str, Any]] | None:
        """Sub-batches of packed inputs (flattened texts, images of many sizes), as the library cuts them itself."""
        if len({len(x) for x in rows.values()}) < 2 and "cu_seq_lens_q" not in rows:
            return None
        try:
            from sentence_transformers.base.losses.gradcache import _create_minibatch, _minibatch_ranges
        except ImportError as error:
            remedy = "Take sentence-transformers of version 6.2."
            raise invalid("sentence_features", "be rows of the batch", "packed inputs", remedy) from error
        bounds = _minibatch_ranges(rows, self.mini_batch_size, self.mini_batch_num_tokens)
        return [_create_minibatch(rows, *each) for each in bounds]


class CachedSymmetricLoss(CachedRankingLoss):
    """`CachedRankingLoss` of both directions, as CLIP: their mean; `CachedMultipleNegativesSymmetricRankingLoss`.

    Naively, with unit rows, for pairs,

        x, diagonal = scale * anchor @ positive.T, torch.arange(N)
        loss = (F.cross_entropy(x, diagonal) + F.cross_entropy(x.T, diagonal)) / 2
    """

    def __init__(
        self,
        model: Any,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] | None = None,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        *,
        retain: int | Literal["auto"] = 0,
    ) -> None:
        super().__init__(
            model, scale, similarity_fct, mini_batch_size, mini_batch_num_tokens, gather_across_devices,
            ("query_to_doc", "doc_to_query"), "per_direction", show_progress_bar, retain=retain,
        )  # fmt: skip


def _directions(directions: Sequence[str], partition_mode: str) -> tuple[str, ...]:
    """The directions, checked together with the mode."""
    one_of("partition_mode", partition_mode, ("joint", "per_direction"), "Both are means over the anchors.")
    named = (directions,) if isinstance(directions, str) else tuple(directions)
    for each in named:
        one_of("directions", each, DIRECTIONS, "Pass a tuple of these.")
    if "query_to_doc" not in named:
        raise invalid("directions", 'hold "query_to_doc", which has the positives', named, "Add it.")
    if "doc_to_doc" in named and "doc_to_query" not in named:
        raise invalid("directions", 'hold "doc_to_query" where they hold "doc_to_doc"', named, "Add it.")
    if partition_mode == "per_direction" and set(named) - {"query_to_doc", "doc_to_query"}:
        rule = 'be "query_to_doc" and "doc_to_query" with partition_mode="per_direction"'
        raise invalid("directions", rule, named, 'Pass partition_mode="joint".')
    return named


def _refuse_patched(model: Any) -> None:
    """Raise where a loss around this one has changed the model for the time of its forward."""
    while (inner := getattr(model, "_orig_mod", getattr(model, "module", None))) is not None:
        model = inner
    forward = vars(model).get("forward")
    if type(forward).__module__.startswith("sentence_transformers"):
        got = f"{type(forward).__module__.rpartition('.')[2]}, which changes the model for its forward alone"
        remedy = "Put MultipleNegativesRankingLoss in it, which has no second pass."
        raise invalid("loss", "be called by a trainer, or by MatryoshkaLoss", got, remedy)


class _Differentiated(torch.autograd.Function):
    """A number whose gradients with respect to the embeddings are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *embeddings: Tensor) -> Tensor:
        del embeddings
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(upstream * gradient for gradient in ctx.saved_tensors)
