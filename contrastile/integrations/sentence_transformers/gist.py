"""The guided ranking loss: a second model says which negatives are false."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import GISTLoss
from contrastile._errors import invalid, number, truth_value
from contrastile.integrations.sentence_transformers.base import CachedLoss, check_model, widened

GIST_CITATION = """
@misc{solatorio2024gistembed,
    title={GISTEmbed: Guided In-sample Selection of Training Negatives for Text Embedding Fine-tuning},
    author={Aivin V. Solatorio},
    year={2024},
    eprint={2402.16829},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""


class CachedGISTLoss(CachedLoss):
    """`GISTEmbedLoss` with gradient cache and tiled scores, for batches of any size.

    Naively, with unit rows anchor, positive [N, D], the guide's unit rows a, p [N, G], and t_i = ⟨a_i, p_i⟩,

        x = torch.cat([anchor @ positive.T, anchor @ anchor.T, positive @ positive.T], 1) / temperature
        guide = torch.cat([a @ p.T, a @ a.T, p @ p.T], 1)
        false = (guide > t[:, None] - margin) & ~torch.eye(N, 3 * N, dtype=torch.bool)
        loss = F.cross_entropy(x.masked_fill(false, -torch.inf), torch.arange(N))

    Columns are (anchor, positive), or (anchor, positive, negative_1, ..., negative_n); negatives are compared with the
    anchors, as positives are.

    Arguments (the words of `CachedGISTEmbedLoss`):
        model: the SentenceTransformer; the trainer replaces it by its data-parallel wrapper.
        guide: the SentenceTransformer that judges; it gets no gradient. Where its vocabulary is another one, or its
            texts are shorter, texts are decoded and tokenized again.
        temperature: divisor of the scores.
        mini_batch_size, mini_batch_num_tokens, show_progress_bar, retain: as of `CachedRankingLoss`.
        margin_strategy: "absolute", or "relative", which multiplies the margin by |t_i|.
        margin: as in the formula.
        contrast_anchors, contrast_positives: whether anchors are compared with anchors, and positives with positives.
        gather_across_devices: whether the rows of all ranks are compared, those of anchors too: the loss is that of the
            global batch, the same on all ranks.

    Raises ValueError for words that it does not know how to honour. Works inside `MatryoshkaLoss` and
    `AdaptiveLayerLoss`.
    """

    uncached = "GISTEmbedLoss"
    citation = GIST_CITATION

    def __init__(
        self,
        model: Any,
        guide: Any,
        temperature: float = 0.01,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        margin_strategy: Literal["absolute", "relative"] = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        gather_across_devices: bool = False,
        *,
        retain: int | Literal["auto"] = 0,
    ) -> None:
        number("temperature", temperature, lambda x: x > 0, "be above 0", "Pass 0.01, say.")
        check_model("guide", guide)
        truth_value("contrast_anchors", contrast_anchors)
        truth_value("contrast_positives", contrast_positives)
        super().__init__(
            model, 1 / temperature, mini_batch_size, mini_batch_num_tokens, gather_across_devices, show_progress_bar,
            retain,
        )  # fmt: skip
        self.guide, self.temperature = guide, temperature
        vocabularies = [_vocabulary(name, each) for name, each in (("model", model), ("guide", guide))]
        shorter = guide.max_seq_length < model.max_seq_length
        self.must_retokenize = vocabularies[0] != vocabularies[1] or shorter
        # the trainer replaces the model by a wrapper, which has none
        self.tokenizer = model.tokenizer
        self.margin_strategy, self.margin = margin_strategy, margin
        self.contrast_anchors, self.contrast_positives = contrast_anchors, contrast_positives
        _ = self.of_embeddings
        if temperature > 1.0:
            warnings.warn(
                f"{type(self).__name__} got a temperature of {temperature:.4g}, as if it were a scale; cosines are "
                "divided by it. Pass 1 / scale.",
                stacklevel=2,
            )

    # `loss` would be a loss inside this one, which model cards name
    @property
    def of_embeddings(self) -> GISTLoss:
        """The loss of embeddings. Raises ValueError for another strategy."""
        return GISTLoss(
            margin=self.margin, margin_strategy=self.margin_strategy, contrast_anchors=self.contrast_anchors,
            contrast_positives=self.contrast_positives, exchange=self.exchange,
        )  # fmt: skip

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], others: Any = None) -> Tensor:
        """The loss of the columns' embeddings, each [N, D]; `others`: the guide's, each [N, G]."""
        anchors, positives, *negatives = (F.normalize(widened(x), dim=-1) for x in embeddings)
        guides = (F.normalize(widened(x.to(anchors.device)), dim=-1) for x in others)
        guide_anchors, guide_positives, *guide_negatives = guides
        loss: Tensor = self.of_embeddings(
            anchors, positives, 1 / self.temperature, guide_query=guide_anchors, guide_key=guide_positives,
            negatives=torch.cat(negatives) if negatives else None,
            guide_negatives=torch.cat(guide_negatives) if negatives else None,
        )  # fmt: skip
        return loss

    def _embed_columns(self, columns: Sequence[Mapping[str, Any]], labels: Tensor | None) -> tuple[list[Tensor], Any]:
        # before the model, whose last sub-batch retains its graph
        with torch.no_grad():
            guides = [self._embed(self._for_the_guide(column), self.guide) for column in columns]
        embeddings, _ = super()._embed_columns(columns, labels)
        # inside AdaptiveLayerLoss a guide that is the model itself has embeddings of all layers
        return embeddings, [guide[-1] if isinstance(guide, tuple) else guide for guide in guides]

    def _for_the_guide(self, features: Mapping[str, Any]) -> Mapping[str, Any]:
        """The texts of a column in the tokens of the guide."""
        if not self.must_retokenize:
            return features
        from sentence_transformers.util import batch_to_device

        tokens = features["input_ids"]
        if "cu_seq_lens_q" in features:
            tokens = tokens[0].split(features["cu_seq_lens_q"].diff().tolist())
        texts = self.tokenizer.batch_decode(list(tokens), skip_special_tokens=True)
        # version 5 calls it so
        tokenize = getattr(self.guide, "preprocess", None) or self.guide.tokenize
        return batch_to_device(tokenize(texts), self.guide.device)


def _vocabulary(name: str, model: Any) -> Any:
    """The vocabulary of a model. Raises ValueError for a model without a tokenizer of transformers."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or not hasattr(tokenizer, "batch_decode"):
        remedy = "Take CachedRankingLoss, which needs none."
        raise invalid(name, "have a tokenizer of transformers", type(tokenizer).__name__, remedy)
    return tokenizer.get_vocab()
