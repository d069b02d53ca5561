"""The ranking loss of late interaction: a vector for each token, and MaxSim between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import contrast
from contrastile._errors import invalid, one_of, whole_number
from contrastile.integrations.sentence_transformers.base import CachedLoss, Layers, name_of
from contrastile.losses import Softmax
from contrastile.scorers import MaxSim

SCORES = ("colbert_scores", "mean_colbert_scores")


class CachedMultiVectorLoss(CachedLoss):
    """`MultiVectorMultipleNegativesRankingLoss` with gradient cache and tiled scores, for batches of any size.

    Naively, with unit token vectors q [N, L, D] and k [M, T, D], the positives first,

        scores = torch.einsum("ild,jtd->ijlt", q, k).amax(3).sum(2)
        loss = F.cross_entropy(scale * scores, torch.arange(N))

    where tokens that the model's mask leaves out neither ask nor answer. Columns are (anchor, positive), or (anchor,
    positive, negative_1, ..., negative_n).

    Arguments (the words of `CachedMultiVectorMultipleNegativesRankingLoss`, of version 6):
        model: the MultiVectorEncoder; the trainer replaces it by its data-parallel wrapper.
        scale: factor of the scores, 1 / temperature.
        similarity_fct: `colbert_scores` (the default), or `mean_colbert_scores`, which divides a score by the number of
            the query's tokens.
        mini_batch_size, mini_batch_num_tokens, gather_across_devices, show_progress_bar, retain: as of
            `CachedRankingLoss`.
        score_mini_batch_size: without effect: tiles of scores take a share of the device's memory.

    A document without any token scores 0. Raises ValueError for words that it does not know how to honour.
    """

    uncached, of_tokens = "MultiVectorMultipleNegativesRankingLoss", True

    def __init__(
        self,
        model: Any,
        *,
        scale: float = 1.0,
        similarity_fct: Callable[..., Tensor] | None = None,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        score_mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        retain: int | Literal["auto"] = 0,
    ) -> None:
        super().__init__(
            model, scale, mini_batch_size, mini_batch_num_tokens, gather_across_devices, show_progress_bar, retain
        )
        self.similarity_fct = similarity_fct
        if score_mini_batch_size is not None:
            whole_number("score_mini_batch_size", score_mini_batch_size, 1, "Leave it out: it has no effect.")
        self.score_mini_batch_size = score_mini_batch_size or mini_batch_size
        _ = self.similarity

    @property
    def similarity(self) -> str:
        """Name of the similarity. Raises ValueError for another one than the two."""
        name = name_of(self.similarity_fct, SCORES[0])
        one_of("similarity_fct", name, SCORES, f"Pass one of these, or take {self.uncached}.")
        return name

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], others: Any = None) -> Tensor:
        """The loss of the columns' token vectors, each [N, L, D]; `others`: their masks, each [N, L]."""
        query, mask = embeddings[0], others[0]
        if self.similarity == "mean_colbert_scores":
            query = query / mask.sum(1).clamp(min=1)[:, None, None]
        # `contrast` pads further, where other ranks have longer documents
        width = max(x.shape[1] for x in embeddings[1:])
        documents = torch.cat([_padded(x, width) for x in embeddings[1:]])
        masks = torch.cat([_padded(x, width) for x in others[1:]])
        return contrast(
            (query, mask), (documents, masks), scale=self.scale, loss=Softmax(), scorer=MaxSim(), exchange=self.exchange
        )

    def _embed_columns(self, columns: Sequence[Mapping[str, Any]], _labels: Tensor | None) -> tuple[list[Tensor], Any]:
        if Layers.of(self.model) is not None:
            remedy = "Train the layers of a SentenceTransformer."
            raise invalid("loss", "be called by a trainer or MatryoshkaLoss", "AdaptiveLayerLoss", remedy)
        tasks = ["query", *["document"] * (len(columns) - 1)]
        stamped = [{**x, "task": x.get("task", task)} for x, task in zip(columns, tasks, strict=True)]
        embeddings, masks = zip(*self._embed_each(stamped), strict=True)
        return list(embeddings), list(masks)

    @staticmethod
    def _output(model: Any, features: dict[str, Any], width: int) -> tuple[Tensor, Tensor]:
        out = model(features, task=features["task"])
        vectors, mask = out["token_embeddings"], out["attention_mask"].bool()
        # sub-batches of packed texts are as wide as their longest
        return _padded(vectors, width), _padded(mask, width)


def _padded(x: Tensor, width: int) -> Tensor:
    """Token vectors [N, L, D], or their mask [N, L], with at least `width` positions."""
    return F.pad(x, [0, 0] * (x.ndim - 2) + [0, max(0, width - x.shape[1])])
