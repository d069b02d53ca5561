"""The ranking losses: each anchor finds its positive among the documents of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contrastile import contrast
from contrastile._dispatch import Options
from contrastile._errors import invalid, one_of
from contrastile.engine.plan import prepare
from contrastile.integrations.sentence_transformers.base import CachedLoss, name_of, widened
from contrastile.losses import Hardness, Softmax

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
# names of the similarities of sentence_transformers.util that are dot products, of unit rows or of rows as they are
COSINE, DOT = ("cos_sim", "pytorch_cos_sim"), ("dot_score",)


class CachedRankingLoss(CachedLoss):
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
            global batch, the same on all ranks; of several joint directions it is the mean over this rank's anchors,
            and the gradients are those of the global batch.
        directions: "query_to_doc", with any of "query_to_query", "doc_to_query" and "doc_to_doc".
        partition_mode: "joint", one softmax over all directions; or "per_direction", their mean, for "query_to_doc"
            and "doc_to_query".
        show_progress_bar: only False.
        hardness_mode, hardness_strength: the scores of these negatives of "query_to_doc" grow by hardness_strength
            times the similarity, as a constant: documents of other anchors ("in_batch_negatives"), the anchor's own
            negatives ("hard_negatives"), or both ("all_negatives").
        retain: sub-batches of each column whose graph is kept from the first pass, as for `encode`; "auto": as many as
            memory allows. The last one of the last column is kept in any case: it is back-propagated first, so it takes
            memory during the loss alone.

    Raises ValueError for words that it does not know how to honour. Works inside `MatryoshkaLoss`, and inside
    `AdaptiveLayerLoss` too, which warns that it would not.
    """

    uncached = "MultipleNegativesRankingLoss"

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
        super().__init__(
            model, scale, mini_batch_size, mini_batch_num_tokens, gather_across_devices, show_progress_bar, retain
        )
        self.similarity_fct = similarity_fct
        self.directions, self.partition_mode = _directions(directions, partition_mode), partition_mode
        self.hardness_mode, self.hardness_strength = hardness_mode, hardness_strength
        similarity, _ = self.similarity, self.softmax
        if scale < 1.0 and similarity in COSINE:
            warnings.warn(
                f"{type(self).__name__} got a scale of {scale:.4g}, as if it were a temperature; cosines are "
                "multiplied by it. Pass 1 / temperature.",
                # a loss derived from this one calls it
                stacklevel=2 + (type(self) is not CachedRankingLoss),
            )

    @property
    def similarity(self) -> str:
        """Name of the similarity. Raises ValueError for another one than the two."""
        name = name_of(self.similarity_fct, COSINE[0])
        if name not in (*COSINE, *DOT):
            remedy = "Pass one of these, or take MultipleNegativesRankingLoss."
            raise invalid("similarity_fct", "be util.cos_sim or util.dot_score", name, remedy)
        return name

    @property
    def softmax(self) -> Softmax:
        """The loss of an anchor among the documents. Raises ValueError for another mode, or a strength without one."""
        if self.hardness_mode is None:
            if self.hardness_strength:
                raise invalid("hardness_mode", "be given with `hardness_strength`", None, '"all_negatives", say.')
            return Softmax()
        return Hardness(hardness_strength=self.hardness_strength, hardness_mode=self.hardness_mode)

    @property
    def both_ways(self) -> bool:
        return len(self.directions) > 1

    @property
    def temperature(self) -> float:
        return 1.0 / self.scale

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of the columns' embeddings, each [N, D]; `labels` are not used."""
        del labels
        embeddings = [widened(x) for x in embeddings]
        if self.similarity in COSINE:
            embeddings = [F.normalize(x, dim=-1) for x in embeddings]
        queries, positives, columns = embeddings[0], embeddings[1], list(embeddings[1:])
        if self.partition_mode == "per_direction" and len(self.directions) == 2:
            if len(columns) == 1 and not self.hardens(columns):
                return self._contrast(queries, positives, loss=Softmax(symmetric=True))
            return (self._to_documents(queries, columns) + self._contrast(positives, queries)) / 2
        if self.directions == ("query_to_doc",):
            return self._to_documents(queries, columns)
        # one sum of exponentials over all directions, of which each has its loss
        loss, ids = self._to_documents(queries, columns, reduction="none"), self._ids(queries)
        if "query_to_query" in self.directions:
            loss = _joined(loss, self._to_others(queries, positives, queries, ids, ids))
        if "doc_to_doc" in self.directions:
            documents, key_ids = torch.cat(columns), ids.repeat(len(columns))
            loss = _joined(loss, self._to_others(positives, queries, documents, ids, key_ids))
        if "doc_to_query" in self.directions:
            # the positive counts once more
            loss = torch.logaddexp(loss, self._contrast(positives, queries, reduction="none"))
        return loss.mean()

    def hardens(self, columns: list[Tensor]) -> bool:
        """Return whether the scores of some document of these columns [N, D] grow with their similarity."""
        own_alone = self.hardness_mode == "hard_negatives"
        return self.hardness_mode is not None and self.hardness_strength > 0 and len(columns) > own_alone

    def _contrast(self, rows: Tensor, keys: Tensor, loss: Softmax = Softmax(), **others: Any) -> Tensor:  # noqa: B008
        return contrast(rows, keys, scale=self.scale, loss=loss, exchange=self.exchange, **others)

    def _to_documents(self, queries: Tensor, columns: list[Tensor], **others: Any) -> Tensor:
        """Loss of the queries among the documents of all columns, the positives' first."""
        documents = torch.cat(columns)
        if not self.hardens(columns):
            return self._contrast(queries, documents, **others)
        if len(columns) > 1 and self.hardness_mode != "all_negatives":
            # a query meets its own negatives apart from those of others, where they have its id
            ids = self._ids(queries)
            others |= {"query_ids": ids, "key_ids": ids.repeat(len(columns)), "negatives": torch.stack(columns[1:], 1)}
        return self._contrast(queries, documents, self.softmax, **others)

    def _to_others(self, rows: Tensor, positives: Tensor, keys: Tensor, ids: Tensor, key_ids: Tensor) -> Tensor:
        """Loss of each row among its positive and the keys of other ids."""
        operation, inputs = prepare(
            rows, keys, self.scale, Softmax(), Options(exchange=self.exchange, reduction="none"),
            negatives=positives[:, None], own_positives=1, query_ids=ids, key_ids=key_ids,
        )  # fmt: skip
        return operation(*inputs)

    def _ids(self, queries: Tensor) -> Tensor:
        """A number of each query that no rank shares."""
        gathers = self.gather_across_devices and dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if gathers else 0
        return torch.arange(len(queries), device=queries.device) + (rank << 32)


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
    # each once, as sentence-transformers counts them
    if not isinstance(directions, Sequence):
        raise invalid("directions", "be a tuple of words", directions, 'Pass ("query_to_doc",).')
    named = (directions,) if isinstance(directions, str) else tuple(dict.fromkeys(directions))
    for each in named:
        one_of("directions", each, DIRECTIONS, "Pass a tuple of these.")
    if "query_to_doc" not in named:
        raise invalid("directions", 'hold "query_to_doc", which has the positives', named, "Add it.")
    if partition_mode == "per_direction" and set(named) - {"query_to_doc", "doc_to_query"}:
        rule = 'be "query_to_doc" and "doc_to_query" with partition_mode="per_direction"'
        raise invalid("directions", rule, named, 'Pass partition_mode="joint".')
    return named


def _joined(a: Tensor, b: Tensor) -> Tensor:
    """log(exp a + exp b - 1): the loss of rows that have the negatives of both losses, and the one positive of each."""
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    return high + torch.log1p(-torch.exp(low - high) * torch.expm1(-low))
