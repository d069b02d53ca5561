"""The losses of `bench loss` by name: a plain formula, contrastile's module, and the operations that each needs.

Under `gate.py`, which compares the two. Inputs beside two sides, such as labels or a guide, follow from the features or
from the row among those of all ranks, so that both have the same. A formula is the mean loss of a few rows, those
`some` [n] of b.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import modules
from contrastile.bench.peers import OF_A_LABEL, Loss, labels_of
from contrastile.distributed import collectives, consistency
from contrastile.functional import contrast
from contrastile.losses import reference

# of dclw, of hardness, and of a teacher
SIGMA, HARDNESS, TEACHER_SCALE, TEACHER_WEIGHT = 0.5, 5.0, 50.0, 0.5
# share of a guide's similarity, which takes none of its values to another one
MARGIN = 0.0517
# every so many features of a key's guide are those of its query's
SHARED = 8
# negatives of each query
OWN = 8

Some = Callable[..., Tensor]
Module = Callable[..., Loss]
# inputs of a loss beside its two sides, by name
Further = Callable[[Tensor, Tensor], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A loss: the formula of a few rows and, if symmetric, their columns, contrastile's module, and its operations.

    operations: per b² d. A softmax needs its logits twice, before and after the normaliser is known, and two products
    for the gradients; a sigmoid needs its logits once; lists have no rate. summed: how many times the loss is the sum
    that is rounded. dense: the plain formula of all rows, where another one is usual. rounded: how many times the
    rounding of other losses their gradients in 16 bits may have. of_neighbours: queries have copies of the next rows'
    keys, which across ranks may be those of another one.
    """

    sampled: Some
    module: Module
    operations: int
    bias: float | None = None
    summed: float = 1.0
    dense: Loss | None = None
    rounded: float = 1.0
    of_neighbours: bool = False

    @property
    def reference(self) -> Loss:
        """The plain formula of all rows."""
        return self.dense or (lambda q, *others: self.sampled(torch.arange(len(q), device=q.device), q, *others))


def _own_key(some: Tensor, x: Tensor) -> Tensor:
    return some[:, None] == torch.arange(len(x), device=x.device)


def _two_labels(x: Tensor, before: int = 0) -> Tensor:
    """Labels [b] of rows: 0 and 1 in turns; before: as in `labels_of`."""
    return torch.arange(before, before + len(x), device=x.device) % 2


def _same_label(some: Tensor, x: Tensor, labels: Callable[[Tensor], Tensor] = labels_of) -> Tensor:
    return labels(x)[some][:, None] == labels(x)


def _rows(loss: Loss, positives: Callable[[Tensor, Tensor], Tensor] = _own_key) -> Some:
    """The formula of a few rows, whose positives `positives` marks."""
    return lambda some, q, k, *scalars: loss(q[some], k, *scalars, positive=positives(some, k))


def _both_ways(rows: Some) -> Some:
    """The mean of a few rows and of their columns."""
    return lambda some, q, k, *scalars: (rows(some, q, k, *scalars) + rows(some, k, q, *scalars)) / 2


def _weighted(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """The decoupled loss with weights of the positives, which depend on all rows."""
    weighted = partial(reference.dense_decoupled, of_positives=reference.mises_fisher_weights(q, k, SIGMA)[some])
    return _rows(weighted)(some, q, k, scale)


class _With:
    """A loss with further inputs, which are made of the features at the first call with them."""

    def __init__(self, loss: Module, further: Further, **how: Any) -> None:
        self.loss, self.further = loss(**how), further
        self._of: tuple[Any, Any] = None, None
        self._made: dict[str, Any] = {}

    def __call__(self, q: Tensor, k: Tensor, *numbers: Tensor, **others: Any) -> Tensor:
        if self._of[0] is not q or self._of[1] is not k:
            self._of, self._made = (q, k), self.further(q, k)
        return self.loss(q, k, *numbers, **self._made, **others)


def guides(q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Features of a guide, by which most keys are less similar to a query than its own."""
    shared = torch.arange(k.shape[1], device=k.device) % SHARED == 0
    return {"guide_query": _guide(q), "guide_key": torch.where(shared, _guide(q), _guide(k))}


def _guide(x: Tensor) -> Tensor:
    """Features of −1, 0 and 1, whose similarities are exact in every dtype.

    Zero up to a power of two near half of a feature's size: a product with the size would be rounded across another
    bound in 16 bits, and not in float64.
    """
    bound = 2.0 ** round(math.log2(0.5 / x.shape[1] ** 0.5))
    return x.detach().sign() * (x.detach().abs() > bound)


def _some_gist(margin: float, pairs: bool, some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """The softmax without negatives that the guide finds too close; pairs: of queries and of keys are there too."""

    def products(query: Tensor, key: Tensor) -> Tensor:
        further = [query[some] @ query.T, key[some] @ key.T] if pairs else []
        return torch.cat([query[some] @ key.T, *further], 1)

    guide = products(*(x.float() for x in guides(q, k).values()))
    positive = guide.gather(1, some[:, None])
    false = (guide > positive - margin * positive.abs()).scatter(1, some[:, None], False)
    return F.cross_entropy((scale * products(q, k)).masked_fill(false, -torch.inf), some)


def _teachers(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Features of a teacher, which are exact in every type: those of the student, of one side in another order."""
    teachers = {"dist_image_features": q.detach(), "dist_text_features": k.detach().roll(1, 1)}
    return {**teachers, "dist_logit_scale": TEACHER_SCALE}


def _some_distill(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    image, text, _ = _teachers(q, k).values()
    losses = []
    for a, b, of_a, of_b in ((q, k, image, text), (k, q, text, image)):
        teacher = TEACHER_SCALE * of_a[some] @ of_b.T
        losses.append(reference.dense_distilled(a[some], b, scale, teacher, TEACHER_WEIGHT, positive=_own_key(some, b)))
    return (losses[0] + losses[1]) / 2


def _neighbours(k: Tensor, first: int = 0) -> Tensor:
    """Each query's own key and the H that follow it, its negatives, from `first` on [b, 1 + H − first, d].

    Their copies are made in float32, so that the gradients of a key are added without a rounding of each sum.
    """
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    return torch.stack([wide.roll(-shift, 0) for shift in range(first, 1 + OWN)], 1).to(k.dtype)


def _some_own(hardness: float, some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Keys of the batch, and negatives of each query that weigh exp(hardness · similarity)."""
    similar = _products(_neighbours(k, 1), some, q)
    return F.cross_entropy(torch.cat([scale * q[some] @ k.T, scale * similar + hardness * similar.detach()], 1), some)


def _products(keys: Tensor, some: Tensor, q: Tensor) -> Tensor:
    """Products of a few rows with keys of their own [b, H, d]."""
    return (keys[some] @ q[some][..., None])[..., 0]


def _some_queue(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Keys of the batch, and as many earlier ones, which are constants."""
    return F.cross_entropy(scale * q[some] @ torch.cat([k, k.detach().roll(1, 1)]).T, some)


def _some_balanced(some: Tensor, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The sigmoid loss with positives by label, those of each example of one weight together."""
    positive, count = _same_label(some, q), labels_of(q).bincount()[labels_of(q)]
    weights = torch.where(positive, (1 / count[some][:, None] + 1 / count) / 2, 1.0)
    x = scale * q[some] @ k.T + bias
    return -(weights * F.logsigmoid(torch.where(positive, x, -x))).sum() / len(some)


def _some_alone(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Each query's own key and negatives."""
    return F.cross_entropy(scale * _products(_neighbours(k), some, q), torch.zeros_like(some))


class _Views:
    """A loss of both sides as views of one example, with weights."""

    def __init__(self, loss: Callable[..., Any], **how: Any) -> None:
        self.loss, self.how = loss(**how).loss, how

    def __call__(self, q: Tensor, k: Tensor, scale: Tensor, weights: Tensor | None = None, **further: Any) -> Tensor:
        views, both = torch.cat([q, k]), None if weights is None else weights.repeat(2)
        return contrast(views, views, scale=scale, loss=self.loss, weights=both, **further, **self.how)


def _some_views(form: str, some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """A few examples in both views, among all others.

    form: "other" has the other view as the positive; SupCon's have all of the same label.
    """
    views, labels, rows = torch.cat([q, k]), labels_of(q).repeat(2), torch.cat([some, some + len(q)])
    itself, other = _own_key(rows, views), _own_key((rows + len(q)) % len(views), views)
    positive = other if form == "other" else (labels[rows][:, None] == labels) & ~itself
    if form != "in":
        return reference.dense_softmax(views[rows], views, scale, positive=positive, excluded=itself)
    x = (scale * views[rows] @ views.T).masked_fill(itself, -torch.inf)
    inside = x.masked_fill(~positive, -torch.inf).logsumexp(1) - positive.sum(1).to(x.dtype).log()
    return (x.logsumexp(1) - inside).mean()


def _listed(kind: Any, **how: Any) -> Loss:
    """ScoreDistillLoss of each query's own key and negatives."""
    loss = modules.ScoreDistillLoss(kind=kind, **how)
    return lambda q, k, scale, **weights: loss(q, *_lists(k), scale, **weights)


def _lists(k: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of each query [b, 1 + H, d], and their scores [b, 1 + H], eighths, which every dtype holds."""
    count = torch.arange(len(k) * (1 + OWN), device=k.device)
    scores = ((count * 7 % 64).to(torch.float32) / 8).view(len(k), -1)
    return _neighbours(k), scores


def _some_scores(kind: str, some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """The distance of a few rows' logits from their scores."""
    keys, scores = _lists(k)
    x, s = scale * _products(keys, some, q), scores[some].to(q.dtype)
    if kind == "margin_mse":
        return F.mse_loss(x[:, :1] - x[:, 1:], s[:, :1] - s[:, 1:])
    return F.kl_div(x.log_softmax(1), s.log_softmax(1), log_target=True, reduction="batchmean")


def _with(further: Further, loss: Module, **how: Any) -> Module:
    return partial(_With, partial(loss, **how), further)


def _labelled(
    loss: Module, names: Sequence[str] = ("labels",), views: int = 1, labels: Callable[..., Tensor] = labels_of
) -> Module:
    """A loss with labels by these names, for all views of the examples one after the other."""

    def made(**how: Any) -> Loss:
        group = how.get("group")
        return _With(loss, lambda q, _: dict.fromkeys(names, labels(q, _rows_before(q, group)).repeat(views)), **how)

    return made


def _rows_before(x: Tensor, group: Any) -> int:
    """The rows of the ranks before this one."""
    if collectives.size(group) == 1:
        return 0
    sizes = consistency.numbers_of_ranks(group, "rows of a benchmark", [len(x)])
    return sum(rows for (rows,) in sizes[: collectives.rank(group)])


_two_labelled = partial(_labelled, labels=_two_labels)
_with_own = partial(_with, lambda _, k: {"negatives": _neighbours(k, 1)}, modules.InfoNCELoss)
_with_queue = partial(_with, lambda _, k: {"negatives": k.detach().roll(1, 1)}, modules.InfoNCELoss)
_hard: dict[str, Any] = {"hardness_strength": HARDNESS}
_guided = partial(_with, guides, modules.GISTLoss)
_of_same_views = partial(_labelled, names=("query_labels", "key_labels"), views=2)
_other_view = partial(_with, lambda q, _: {"positives": torch.arange(2 * len(q), device=q.device).roll(len(q))})
_softmax, _sigmoid = reference.dense_softmax, reference.dense_sigmoid
_same_two_labels = partial(_same_label, labels=_two_labels)
_supcon, _supcon_in = partial(_Views, modules.SupConLoss), partial(_Views, partial(modules.SupConLoss, form="in"))
SUBJECTS = {
    "clip": Subject(_both_ways(_rows(_softmax)), modules.ClipLoss, 8, dense=reference.dense_clip),
    "siglip": Subject(_rows(_sigmoid), modules.SigLipLoss, 6, bias=-10.0),
    "infonce": Subject(_rows(_softmax), modules.InfoNCELoss, 8),
    "dcl": Subject(_both_ways(_rows(reference.dense_decoupled)), modules.DCLLoss, 8),
    "dclw": Subject(_both_ways(_weighted), partial(modules.DCLLoss, sigma=SIGMA), 8),
    "gist": Subject(partial(_some_gist, 0.0, False), _guided(), 12),
    "gist_relative": Subject(
        partial(_some_gist, MARGIN, False), _guided(margin=MARGIN, margin_strategy="relative"), 12
    ),
    # three times the columns
    "gist_pairs": Subject(partial(_some_gist, 0.0, True), _guided(contrast_anchors=True, contrast_positives=True), 36),
    "distill": Subject(_some_distill, _with(_teachers, modules.DistillClipLoss, weight=TEACHER_WEIGHT), 12),
    "own": Subject(partial(_some_own, 0.0), _with_own(), 8, of_neighbours=True),
    "hardness_own": Subject(
        partial(_some_own, HARDNESS), _with_own(hardness_mode="hard_negatives", **_hard), 8, of_neighbours=True
    ),
    "own_alone": Subject(_some_alone, _with_own(in_batch=False), 0, of_neighbours=True),
    "queue": Subject(_some_queue, _with_queue(), 16),
    "clip_labels": Subject(_both_ways(_rows(_softmax, _same_label)), _labelled(modules.ClipLoss), 8),
    # no positive's gradient is larger than the others, to which the rounding of exponentials is relative
    "clip_two_labels": Subject(
        _both_ways(_rows(_softmax, _same_two_labels)), _two_labelled(modules.ClipLoss), 8, rounded=1.25
    ),
    "siglip_labels": Subject(_rows(_sigmoid, _same_label), _labelled(modules.SigLipLoss), 6, bias=-10.0),
    # a tile's sum has every positive at full weight, before the share that balance takes is subtracted
    "siglip_balanced": Subject(
        _some_balanced, _labelled(partial(modules.SigLipLoss, balanced=True)), 6, -10.0, OF_A_LABEL
    ),
    # a matrix of twice the rows and columns
    "ntxent": Subject(partial(_some_views, "other"), _other_view(partial(_Views, modules.NTXentLoss)), 32),
    # beside the roundings of "clip_two_labels", the gradients of a view as a row and as a column are added in 16 bits
    "supcon": Subject(partial(_some_views, "out"), _of_same_views(_supcon), 32, rounded=1.25),
    "supcon_in": Subject(partial(_some_views, "in"), _of_same_views(_supcon_in), 32, rounded=1.25),
    "kl": Subject(partial(_some_scores, "kl"), partial(_listed, "kl"), 0, of_neighbours=True),
    "margin_mse": Subject(partial(_some_scores, "margin_mse"), partial(_listed, "margin_mse"), 0, of_neighbours=True),
    "hardness": Subject(
        _rows(partial(_softmax, hardness=HARDNESS)),
        partial(modules.InfoNCELoss, hardness_mode="all_negatives", **_hard),
        8,
    ),
}
