"""Losses with inputs of their own beside queries and keys, each with its plain formula; `test_losses_further.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from problems import with_gradients
from torch import Tensor, nn

from contrastile import (
    ClipLoss,
    DCLLoss,
    DistillClipLoss,
    GISTLoss,
    InfoNCELoss,
    ScoreDistillLoss,
    SigLipLoss,
    SupConLoss,
    contrast,
)
from contrastile.losses import DecoupledWeighted, Distilled, Hardness, Sigmoid

N, H, D = 45, 3, 19
# of a formula, [N]: the losses of its rows, and which of them count
RowLosses = tuple[Tensor, Tensor]


@dataclass
class Case:
    """A module called with these tensors by name, and the plain formula of its rows' losses in each direction."""

    module: Callable[..., nn.Module]
    formula: Callable[..., list[RowLosses]]
    # features and numbers, in float64
    leaves: dict[str, Tensor]
    constants: dict[str, Any] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype, scale: float | None = None) -> dict[str, Tensor]:
        """The leaves, features in this type and numbers in float32 or float64."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        given = {name: torch.tensor(scale).to(x) if scale and not x.ndim else x for name, x in self.leaves.items()}
        return {name: x.to(dtype if x.ndim else wide).requires_grad_() for name, x in given.items()}

    def by_tiles(self, tensors: dict[str, Tensor], **how: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return with_gradients(self.module(**how)(**tensors, **self.constants), tensors)

    def by_formula(self, tensors: dict[str, Tensor], reduction: str = "mean") -> tuple[Tensor, dict[str, Tensor]]:
        """The rows' losses reduced as the library does; of a case with weights by them."""
        constants = dict(self.constants)
        weights = constants.pop("weights", torch.ones(N, dtype=torch.float64))
        values = []
        for losses, counts in self.formula(**tensors, **constants):
            mass = weights.to(losses.dtype) * counts
            total = torch.where(counts, losses, 0.0) * mass
            by_row = total * (len(total) / mass.sum())
            values.append({"mean": by_row.mean(), "sum": total.sum(), "none": by_row}[reduction])
        return with_gradients(torch.stack(values).mean(0), tensors)

    def of_rank(self, rank: int, shares: list[int]) -> Case:
        """The part of a rank that has so many of the rows; every tensor but numbers has rows."""
        return Case(
            self.module, self.formula, *({name: _part(name, x, rank, shares) for name, x in group.items()}
            for group in (self.leaves, self.constants)),
        )  # fmt: skip


def _part(name: str, x: Any, rank: int, shares: list[int]) -> Any:
    if not isinstance(x, Tensor) or not x.ndim:
        return x
    own = x.split(shares)[rank]
    # counted from this rank's first key
    return torch.where(own >= 0, own - sum(shares[:rank]), own) if name in ("positives", "lists") else own


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unit(*shape: int, seed: int, near: Tensor | None = None) -> Tensor:
    x = torch.randn(*shape, generator=_generator(seed), dtype=torch.float64)
    return F.normalize(x if near is None else x + 2 * near, dim=-1)


def _whole(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator(seed))


def _leaves(**more: Tensor) -> dict[str, Tensor]:
    query = unit(N, D, seed=0)
    scale = torch.tensor(20.0, dtype=torch.float64)
    return {"query": query, "key": unit(N, D, seed=1, near=query), "scale": scale, **more}


def _cross_entropy(x: Tensor, target: Tensor) -> list[RowLosses]:
    return [(F.cross_entropy(x, target, reduction="none"), torch.ones(len(x), dtype=torch.bool))]


def _own_products(query: Tensor, negatives: Tensor) -> Tensor:
    return (negatives @ query[..., None])[..., 0]


def own_negatives() -> Case:
    """Each query has negatives of its own beside all keys; equal ids do not count."""
    ids = _whole(12, N, seed=3)
    weights = torch.rand(N, generator=_generator(4), dtype=torch.float64) + 0.1

    def formula(
        query: Tensor, key: Tensor, scale: Tensor, negatives: Tensor, query_ids: Tensor, key_ids: Tensor,
        negative_ids: Tensor,
    ) -> list[RowLosses]:  # fmt: skip
        x = scale * torch.cat([query @ key.T, _own_products(query, negatives)], dim=1)
        same = (query_ids[:, None] == key_ids) & ~torch.eye(N, dtype=torch.bool)
        excluded = torch.cat([same, query_ids[:, None] == negative_ids], dim=1)
        return _cross_entropy(x.masked_fill(excluded, -torch.inf), torch.arange(N))

    return Case(
        InfoNCELoss,
        formula,
        _leaves(negatives=unit(N, H, D, seed=2)),
        {"query_ids": ids, "key_ids": ids, "negative_ids": _whole(12, N, H, seed=5), "weights": weights},
    )


def siglip_own() -> Case:
    """Pairs with all keys and with negatives of each query's own, and a bias."""

    def formula(query: Tensor, key: Tensor, scale: Tensor, bias: Tensor, negatives: Tensor) -> list[RowLosses]:
        x = scale * torch.cat([query @ key.T, _own_products(query, negatives)], dim=1) + bias
        z = 2 * torch.eye(*x.shape, dtype=x.dtype) - 1
        return [(-F.logsigmoid(z * x).sum(1), torch.ones(N, dtype=torch.bool))]

    def module(**how: Any) -> nn.Module:
        return _Contrast(loss=Sigmoid(), **how)

    return Case(module, formula, _leaves(negatives=unit(N, H, D, seed=2), bias=torch.tensor(-3.0, dtype=torch.float64)))


def own_negatives_only() -> Case:
    """Each query meets its own key and its own negatives alone."""

    def formula(query: Tensor, key: Tensor, scale: Tensor, negatives: Tensor) -> list[RowLosses]:
        x = torch.cat([(query * key).sum(1, keepdim=True), _own_products(query, negatives)], dim=1)
        return _cross_entropy(scale * x, torch.zeros(N, dtype=torch.int64))

    def module(**how: Any) -> nn.Module:
        return InfoNCELoss(in_batch=False, **how)

    return Case(module, formula, _leaves(negatives=unit(N, H, D, seed=2)))


def _hardness(mode: str, beta: float = 5.0, label_smoothing: float = 0.0) -> Case:
    """Negatives of all keys, or of each query alone, have the weight exp(5 · similarity), a constant."""

    def formula(query: Tensor, key: Tensor, scale: Tensor, negatives: Tensor) -> list[RowLosses]:
        products = torch.cat([query @ key.T, _own_products(query, negatives)], dim=1)
        weighed = torch.ones_like(products)
        weighed[:, :N].fill_diagonal_(0.0)
        if mode == "in_batch_negatives":
            weighed[:, N:] = 0.0
        if mode == "hard_negatives":
            weighed[:, :N] = 0.0
        x = scale * products + beta * products.detach() * weighed
        losses = F.cross_entropy(x, torch.arange(N), reduction="none", label_smoothing=label_smoothing)
        return [(losses, torch.ones(N, dtype=torch.bool))]

    def module(**how: Any) -> nn.Module:
        smoothing = {"label_smoothing": label_smoothing} if label_smoothing else {}
        return InfoNCELoss(hardness_mode=mode, hardness_strength=beta, **smoothing, **how)  # type: ignore[arg-type]

    return Case(module, formula, _leaves(negatives=unit(N, H, D, seed=2)))


def hardness_in_batch() -> Case:
    return _hardness("in_batch_negatives")


def hardness_own() -> Case:
    return _hardness("hard_negatives", label_smoothing=0.1)


def hardness_all() -> Case:
    return _hardness("all_negatives", label_smoothing=0.1)


class _Contrast(nn.Module):
    """`contrast` as a module."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, query: Tensor, key: Tensor, scale: Tensor, **others: Any) -> Tensor:
        return contrast(query, key, scale=scale, **self.how, **others)


def hardness_symmetric_positives() -> Case:
    """Both directions, with positives by label."""

    def formula(query: Tensor, key: Tensor, scale: Tensor, query_labels: Tensor, key_labels: Tensor) -> list[RowLosses]:
        products, positive = query @ key.T, query_labels[:, None] == key_labels
        x = scale * products + 3.0 * products.detach() * ~positive
        return [
            (-(log_p * mask).sum(1) / mask.sum(1), mask.any(1))
            for log_p, mask in ((x.log_softmax(1), positive), (x.T.log_softmax(1), positive.T))
        ]

    def module(**how: Any) -> nn.Module:
        return _Contrast(loss=Hardness(symmetric=True, hardness_strength=3.0), **how)

    labels = torch.arange(N) // 2
    return Case(module, formula, _leaves(), {"query_labels": labels, "key_labels": labels})


def _decoupled(products: Tensor, scale: Tensor, positive: Tensor, sigma: float) -> RowLosses:
    """Rows without a positive or a negative have no loss."""
    x, counts = scale * products, positive.any(1) & ~positive.all(1)
    mean = (products * positive).sum(1) / positive.sum(1).clamp(min=1)
    kernel = (mean.detach() / sigma).exp() * counts
    weights = 2 - kernel * counts.sum() / kernel.sum()
    negatives = x.masked_fill(positive, -torch.inf).where(counts[:, None], torch.zeros(()).to(x)).logsumexp(1)
    return negatives - weights * scale * mean, counts


def dclw() -> Case:
    def formula(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> list[RowLosses]:
        products, positive = image_features @ text_features.T, torch.eye(N, dtype=torch.bool)
        return [_decoupled(x, logit_scale, positive, 0.4) for x in (products, products.T)]

    def module(**how: Any) -> nn.Module:
        return DCLLoss(sigma=0.4, **how)

    query, key, scale = _leaves().values()
    weights = torch.rand(N, generator=_generator(4), dtype=torch.float64) + 0.1
    leaves = {"image_features": query, "text_features": key, "logit_scale": scale}
    return Case(module, formula, leaves, {"weights": weights})


def dclw_labels() -> Case:
    """One direction, several positives or none, further negatives."""

    def formula(
        query: Tensor, key: Tensor, scale: Tensor, query_labels: Tensor, key_labels: Tensor, negatives: Tensor
    ) -> list[RowLosses]:
        products = torch.cat([query @ key.T, _own_products(query, negatives)], dim=1)
        positive = torch.cat([query_labels[:, None] == key_labels, torch.zeros(N, H, dtype=torch.bool)], dim=1)
        return [_decoupled(products, scale, positive, 0.5)]

    def module(**how: Any) -> nn.Module:
        return _Contrast(loss=DecoupledWeighted(), **how)

    labels = {"query_labels": _whole(20, N, seed=6), "key_labels": _whole(20, N, seed=7)}
    return Case(module, formula, _leaves(negatives=unit(N, H, D, seed=2)), labels)


def _gist(strategy: str, margin: float, *, pairs: bool = False) -> Case:
    """A guide's similarities exclude negatives; some queries have several positives, and there are hard negatives.

    pairs: queries among queries too, and the first positives among each other.
    """

    def formula(
        query: Tensor, key: Tensor, scale: Tensor, negatives: Tensor, positives: Tensor, guide_query: Tensor,
        guide_key: Tensor, guide_negatives: Tensor, query_ids: Tensor, key_ids: Tensor,
    ) -> list[RowLosses]:  # fmt: skip
        first, rows = positives[:, 0], query_ids[:, None]

        def products(q: Tensor, k: Tensor, further: Tensor) -> Tensor:
            return torch.cat([q @ k.T, q @ further.T, *[q @ q.T, k[first] @ k[first].T] * pairs], 1)

        guide = products(guide_query, guide_key, guide_negatives)
        # a last column takes the pads
        marks = torch.zeros(N, guide.shape[1] + 1, dtype=torch.bool)
        marks = marks.scatter(1, positives.where(positives >= 0, torch.tensor(guide.shape[1])), True)[:, :-1]
        least = guide.masked_fill(~marks, torch.inf).amin(1, keepdim=True)
        false = guide > least - margin * (least.abs() if strategy == "relative" else 1)
        apart = torch.zeros(N, N, dtype=torch.bool)
        same = torch.cat([rows == key_ids, apart, *[rows == query_ids, rows == key_ids[first]] * pairs], 1)
        x = scale * products(query, key, negatives)
        log_p = x.masked_fill((false | same) & ~marks, -torch.inf).log_softmax(1)
        return [(-log_p.where(marks, 0.0).sum(1) / marks.sum(1), torch.ones(N, dtype=torch.bool))]

    def module(**how: Any) -> nn.Module:
        words = {"margin": margin, "margin_strategy": strategy, "contrast_anchors": pairs, "contrast_positives": pairs}
        return GISTLoss(**words, **how)  # type: ignore[arg-type]

    # of each row its own key, and of every fifth its neighbour's, which is on the same rank
    second = (torch.arange(N) ^ 1).where((torch.arange(N) % 5 == 0) & (torch.arange(N) < N - 1), torch.tensor(-1))
    guide, listed = unit(N, 7, seed=8), torch.stack([torch.arange(N), second], 1)
    constants = {
        # a row's own key is not the first one then
        "positives": torch.where((second >= 0)[:, None] & pairs, listed.flip(1), listed),
        "guide_query": guide,
        "guide_key": unit(N, 7, seed=9, near=guide),
        "guide_negatives": unit(N, 7, seed=10),
        "query_ids": _whole(12, N, seed=3),
        "key_ids": _whole(12, N, seed=4),
    }
    return Case(module, formula, _leaves(negatives=unit(N, D, seed=2)), constants)


def gist_absolute() -> Case:
    return _gist("absolute", 0.1)


def gist_relative() -> Case:
    return _gist("relative", 0.05)


def gist_listed_pairs() -> Case:
    return _gist("relative", 0.05, pairs=True)


def gist_all_pairs() -> Case:
    """Queries among queries and keys among keys too, with ids, weights and hard negatives."""
    margin = 0.05

    def formula(
        query: Tensor, key: Tensor, scale: Tensor, negatives: Tensor, guide_query: Tensor, guide_key: Tensor,
        guide_negatives: Tensor, query_ids: Tensor, key_ids: Tensor,
    ) -> list[RowLosses]:  # fmt: skip
        def products(q: Tensor, k: Tensor, further: Tensor) -> Tensor:
            return torch.cat([q @ k.T, q @ q.T, q @ further.T, k @ k.T], 1)

        rows, apart = query_ids[:, None], torch.zeros(N, N, dtype=torch.bool)
        same = torch.cat([rows == key_ids, rows == query_ids, apart, rows == key_ids], 1)
        guide = products(guide_query, guide_key, guide_negatives)
        out = (guide > guide.diagonal()[:, None] - margin) | same
        x = scale * products(query, key, negatives)
        return _cross_entropy(x.masked_fill(out & ~torch.eye(*x.shape, dtype=torch.bool), -torch.inf), torch.arange(N))

    def module(**how: Any) -> nn.Module:
        return GISTLoss(margin=margin, contrast_anchors=True, contrast_positives=True, **how)

    constants = _gist("absolute", margin).constants
    del constants["positives"]
    weights = torch.rand(N, generator=_generator(4), dtype=torch.float64) + 0.1
    return Case(module, formula, _leaves(negatives=unit(N, D, seed=2)), {**constants, "weights": weights})


def _kl(x: Tensor, teacher: Tensor) -> Tensor:
    """Σ q log(q / p) of each row; pairs that do not count are −∞ in both."""
    log_p, log_q = x.log_softmax(1), teacher.log_softmax(1)
    return (log_q.exp() * (log_q - log_p).masked_fill(x == -torch.inf, 0.0)).sum(1)


def _teacher() -> tuple[Tensor, Tensor]:
    image = unit(N, 7, seed=8)
    return image, unit(N, 7, seed=9, near=image)


def distill_clip() -> Case:
    """Both directions, with ids that exclude pairs, and weights of rows."""

    def formula(
        image_features: Tensor, text_features: Tensor, logit_scale: Tensor, dist_image_features: Tensor,
        dist_text_features: Tensor, dist_logit_scale: Tensor, ids: Tensor,
    ) -> list[RowLosses]:  # fmt: skip
        excluded = (ids[:, None] == ids) & ~torch.eye(N, dtype=torch.bool)
        x = (logit_scale * image_features @ text_features.T).masked_fill(excluded, -torch.inf)
        t = dist_logit_scale * dist_image_features @ dist_text_features.T
        t = t.to(x.dtype).masked_fill(excluded, -torch.inf)
        return [
            (0.7 * F.cross_entropy(a, torch.arange(N), reduction="none") + 0.3 * _kl(a, b), torch.ones(N).bool())
            for a, b in ((x, t), (x.T, t.T))
        ]

    def module(**how: Any) -> nn.Module:
        return DistillClipLoss(weight=0.3, **how)

    query, key, scale = _leaves().values()
    image, text = _teacher()
    constants = {
        "dist_image_features": image,
        "dist_text_features": text,
        "dist_logit_scale": torch.tensor(15.0, dtype=torch.float64),
        "ids": _whole(12, N, seed=3),
        "weights": torch.rand(N, generator=_generator(4), dtype=torch.float64) + 0.1,
    }
    leaves = {"image_features": query, "text_features": key, "logit_scale": scale}
    return Case(module, formula, leaves, constants)


def distill_clip_labels() -> Case:
    """Both directions, with positives by label, of which some are excluded as negatives of others by ids."""
    case = distill_clip()
    labels = _whole(15, N, seed=6)

    def formula(
        image_features: Tensor, text_features: Tensor, logit_scale: Tensor, dist_image_features: Tensor,
        dist_text_features: Tensor, dist_logit_scale: Tensor, ids: Tensor, labels: Tensor,
    ) -> list[RowLosses]:  # fmt: skip
        positive = labels[:, None] == labels
        excluded = (ids[:, None] == ids) & ~positive
        x = (logit_scale * image_features @ text_features.T).masked_fill(excluded, -torch.inf)
        t = dist_logit_scale * dist_image_features @ dist_text_features.T
        t = t.to(x.dtype).masked_fill(excluded, -torch.inf)
        return [
            (0.7 * hard + 0.3 * _kl(a, b), torch.ones(N).bool())
            for a, b in ((x, t), (x.T, t.T))
            for hard in [-(a.log_softmax(1).masked_fill(~positive, 0.0)).sum(1) / positive.sum(1)]
        ]

    return Case(case.module, formula, case.leaves, {**case.constants, "labels": labels})


def distill_labels() -> Case:
    """One direction, several positives, the teacher alone."""

    def formula(
        query: Tensor, key: Tensor, scale: Tensor, query_labels: Tensor, key_labels: Tensor, guide_q: Tensor,
        guide_k: Tensor,
    ) -> list[RowLosses]:  # fmt: skip
        x, positive = scale * query @ key.T, query_labels[:, None] == key_labels
        hard = -(x.log_softmax(1) * positive).sum(1) / positive.sum(1)
        return [(0.5 * hard + 0.5 * _kl(x, (guide_q @ guide_k.T).to(x.dtype)), positive.any(1))]

    def module(**how: Any) -> nn.Module:
        return _Contrast(loss=Distilled(), **how)

    labels, (image, text) = torch.arange(N) // 2, _teacher()
    constants = {"query_labels": labels, "key_labels": labels, "guide_q": 15 * image, "guide_k": text}
    return Case(module, formula, _leaves(), constants)


def _scores(kind: str) -> tuple[Callable[..., list[RowLosses]], Callable[..., nn.Module]]:
    def formula(
        query: Tensor, key: Tensor, scale: Tensor, scores: Tensor, lists: Tensor | None = None
    ) -> list[RowLosses]:
        counted = torch.ones_like(scores, dtype=torch.bool) if lists is None else lists >= 0
        listed = key if lists is None else key[lists.clamp(min=0)]
        x, scores = scale * _own_products(query, listed), scores.to(query.dtype)
        if kind == "kl":
            both = [
                each.masked_fill(~counted, -torch.inf).where(counted.any(1, keepdim=True), 0.0) for each in (x, scores)
            ]
            return [(_kl(*both), counted.any(1))]
        error = (x[:, :1] - x[:, 1:]) - (scores[:, :1] - scores[:, 1:])
        counted = counted[:, 1:] & counted[:, :1]
        return [((error.square() * counted).sum(1) / counted.sum(1).clamp(min=1), counted.any(1))]

    def module(**how: Any) -> nn.Module:
        return ScoreDistillLoss(kind=kind, **how)  # type: ignore[arg-type]

    return formula, module


def scores_kl() -> Case:
    """Lists of keys of the batch with pads, one of pads alone."""
    formula, module = _scores("kl")
    # within two neighbours, which are on the same rank
    first, second = torch.arange(N), (torch.arange(N) ^ 1).clamp(max=N - 1)
    lists = torch.stack([first, second.where(first % 3 > 0, torch.tensor(-1))], 1)
    lists[7] = -1
    scores = torch.randn(N, 2, generator=_generator(5), dtype=torch.float64)
    return Case(module, formula, _leaves(), {"scores": scores, "lists": lists})


def scores_margin() -> Case:
    """Keys of each query alone."""
    formula, module = _scores("margin_mse")
    scores = torch.randn(N, H, generator=_generator(5), dtype=torch.float64)
    weights = torch.rand(N, generator=_generator(4), dtype=torch.float64) + 0.1
    return Case(module, formula, _leaves(key=unit(N, H, D, seed=2)), {"scores": scores, "weights": weights})


def _paired(**more: Tensor) -> dict[str, Tensor]:
    query, key, scale = _leaves().values()
    return {"image_features": query, "text_features": key, "logit_scale": scale, **more}


def _classes() -> dict[str, Tensor]:
    """Labels that meet across ranks, and weights."""
    weights = torch.rand(N, generator=_generator(4), dtype=torch.float64) + 0.1
    return {"labels": _whole(15, N, seed=6), "weights": weights}


def unicl() -> Case:
    def formula(image_features: Tensor, text_features: Tensor, logit_scale: Tensor, labels: Tensor) -> list[RowLosses]:
        x, target = logit_scale * image_features @ text_features.T, (labels[:, None] == labels).to(logit_scale.dtype)
        # soft targets, as the authors' code has them
        return [
            (-(target / target.sum(1, keepdim=True) * each.log_softmax(1)).sum(1), torch.ones(N, dtype=torch.bool))
            for each in (x, x.T)
        ]

    return Case(ClipLoss, formula, _paired(), _classes())


def _siglip(balanced: bool) -> Case:
    def formula(
        image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor, labels: Tensor
    ) -> list[RowLosses]:
        x, positive = logit_scale * image_features @ text_features.T + logit_bias, labels[:, None] == labels
        number = positive.double()
        v = (1 / number.sum(1, keepdim=True) + 1 / number.sum(0)) / 2 if balanced else torch.ones_like(x)
        losses = -F.logsigmoid(torch.where(positive, x, -x)) * torch.where(positive, v, torch.ones_like(v)).to(x.dtype)
        return [(losses.sum(1), torch.ones(N, dtype=torch.bool))]

    def module(**how: Any) -> nn.Module:
        return SigLipLoss(balanced=balanced, **how)

    return Case(module, formula, _paired(logit_bias=torch.tensor(-3.0, dtype=torch.float64)), _classes())


def siglip_labels() -> Case:
    return _siglip(balanced=False)


def siglip_balanced() -> Case:
    return _siglip(balanced=True)


def sup_con_in() -> Case:
    def formula(features: Tensor, scale: Tensor, labels: Tensor) -> list[RowLosses]:
        itself = torch.eye(N, dtype=torch.bool)
        x, positive = (scale * features @ features.T).masked_fill(itself, -torch.inf), labels[:, None] == labels
        positive = positive & ~itself
        counts = positive.any(1)
        among = x.masked_fill(~positive, -torch.inf).where(counts[:, None], 0.0).logsumexp(1)
        return [(x.logsumexp(1) - among + positive.sum(1).clamp(min=1).to(x.dtype).log(), counts)]

    def module(**how: Any) -> nn.Module:
        return SupConLoss(form="in", **how)

    features, _, scale = _leaves().values()
    return Case(module, formula, {"features": features, "scale": scale}, _classes())


CASES = {
    make.__name__: make
    for make in (
        own_negatives,
        siglip_own,
        own_negatives_only,
        hardness_in_batch,
        hardness_own,
        hardness_all,
        hardness_symmetric_positives,
        dclw,
        dclw_labels,
        gist_absolute,
        gist_relative,
        gist_listed_pairs,
        gist_all_pairs,
        distill_clip,
        distill_clip_labels,
        distill_labels,
        scores_kl,
        scores_margin,
        unicl,
        siglip_labels,
        siglip_balanced,
        sup_con_in,
    )
}
