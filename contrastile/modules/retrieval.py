"""Losses of queries that find keys: one direction."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any, ClassVar, Literal, Never, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._errors import invalid, one_of, truth_value
from contrastile._types import shape_or_type
from contrastile.engine import arguments as checks
from contrastile.engine.problem import Arguments, autocast_type
from contrastile.gradcache.modes import joined
from contrastile.losses.guided import FAR, MARKS, Guided
from contrastile.losses.hardness import IN_BATCH, Hardness
from contrastile.losses.queue import NOBODY
from contrastile.losses.scores import ScoreDivergence, ScoreMargins
from contrastile.losses.softmax import Softmax
from contrastile.modules.base import How, Loss
from contrastile.modules.listed import check_lists, listed_rows, listed_scores
from contrastile.tiles.scored import in_words

_gpu_reads = checks.GpuReads()
# fewest queries whose keys may look like groups, and standard deviations of the mean by which they must
LEAST, DEVIATIONS = 32, 5.0


class InfoNCELoss(Loss):
    """One direction: each query finds its positives among the keys (van den Oord et al. 2018; Karpukhin et al. 2020).

    Naively

        loss = F.cross_entropy(scale * query @ torch.cat([key, negatives]).T, positives)

    Made as `InfoNCELoss(**how)`, with the options of `contrast`; returns and raises what `ClipLoss` does.

    With `InfoNCELoss(in_batch=False)` a query meets its own key and its own negatives [N, H, D] alone: N·(1 + H)
    products instead of N·M. `InfoNCELoss(hardness_mode=..., hardness_strength=5.0)` weighs negatives by exp(5 ·
    similarity), see `contrastile.losses.Hardness`.

    >>> import torch, torch.nn.functional as F
    >>> query, key, positives = torch.randn(4, 16), torch.randn(12, 16), torch.tensor([0, 3, 6, 9])
    >>> loss = InfoNCELoss()(query, key, 1.0, positives=positives)
    >>> torch.testing.assert_close(loss, F.cross_entropy(query @ key.T, positives))
    >>> own = torch.randn(4, 5, 16)
    >>> loss = InfoNCELoss()(query, key[:4], 1.0, negatives=own)
    >>> x = torch.cat([query @ key[:4].T, (own @ query[..., None])[..., 0]], dim=1)
    >>> torch.testing.assert_close(loss, F.cross_entropy(x, torch.arange(4)))
    """

    names: ClassVar[dict[str, str]] = {"q": "query", "k": "key"}
    pair_loss = Softmax()
    unit_rows = False

    def __init__(
        self,
        *,
        in_batch: bool = True,
        hardness_mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None = None,
        hardness_strength: float = 0.0,
        **how: Unpack[How],
    ) -> None:
        super().__init__(**how)
        truth_value("in_batch", in_batch)
        self.in_batch = in_batch
        self.own_options = {
            "in_batch": in_batch, "hardness_mode": hardness_mode, "hardness_strength": hardness_strength,
        }  # fmt: skip
        if hardness_mode == IN_BATCH and not in_batch:
            remedy = "A query meets no other query's keys."
            raise invalid("hardness_mode", "be another one with in_batch=False", repr(hardness_mode), remedy)
        if hardness_mode is not None:
            smoothing = self.options.label_smoothing
            self.loss = Hardness(
                label_smoothing=smoothing, hardness_strength=hardness_strength, hardness_mode=hardness_mode
            )
        elif hardness_strength:
            raise invalid("hardness_mode", "be given with `hardness_strength`", None, '"all_negatives", say.')

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        scale: Tensor | float | None = None,
        *,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
        query_ids: Tensor | None = None,
        key_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
        weights: Tensor | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Return the loss of N queries among the keys of all ranks.

        Arguments:
            query, key: [N, D] and [M, D], of one dtype; all keys of all ranks are compared with every query.
            scale: a number, or a tensor of shape [] or [1]: 1 / temperature.
            positives: [N] or [N, P] indices into this rank's keys, −1 pads: the loss of a row is the mean of their
                −log p. Without it key i belongs to query i, and the keys behind the first N are hard negatives.
            negatives: [H, D] further keys, negatives of every query; or [N, H, D], H of each query alone.
            query_ids, key_ids: [N], [M] integers; pairs of equal ids that are not positive do not count.
            negative_ids: [N, H] integers for negatives [N, H, D]; one with the id of its query does not count.
            weights: [N]; the loss is Σ w·loss / Σ w.
        """
        if unknown or scale is None:
            self._refuse(unknown, "scale")
        optional: dict[str, Any] = {
            "positives": positives, "negatives": negatives, "query_ids": query_ids, "key_ids": key_ids,
            "negative_ids": negative_ids, "weights": weights,
        }  # fmt: skip
        passed_key = key
        with self._shared_errors():
            if isinstance(key, Tensor) and isinstance(query, Tensor) and (query.ndim, key.ndim) == (2, 3):
                # flattened, the second key of the first query would be that of the second query
                remedy = "Where each query has a list of keys, the right one first, pass key[:, 0], "
                remedy += "negatives=key[:, 1:]; or compare token vectors by contrast(..., scorer=MaxSim())."
                raise invalid("key", "have two dimensions [rows, features]", f"shape {list(key.shape)}", remedy)
            if not self.in_batch:
                key, optional = _own_keys(query, key, optional)
        operation, inputs = self._prepared(query, key, scale, **optional)
        loss: Tensor = operation(*inputs)
        if self._may_warn:
            if positives is None and negatives is None:
                _warn_of_order(query, key)
            self._warn_of_inputs(scale, query, passed_key)
        return loss


def _warn_of_order(query: Tensor, key: Tensor) -> None:
    """Warn about keys in groups, one for each query with its positive first, where the first N keys are taken."""
    group = len(key) // max(len(query), 1)
    if len(query) < LEAST or group < 2 or len(key) != len(query) * group or checks.captured(query, key):
        return
    if not _gpu_reads.allowed(query, key):
        return
    # of the first rows, but for the first one, whose key is the same in both orders
    q, taken, grouped = (x.detach()[1:64].float() for x in (query, key[: len(query)], key[::group]))
    gap = torch.linalg.vecdot(q, grouped) - torch.linalg.vecdot(q, taken)
    if bool(gap.mean() > DEVIATIONS * gap.std() / len(gap) ** 0.5):
        warnings.warn(
            f"InfoNCELoss takes key i for that of query i, and got keys that look like groups of {group}, one for each "
            f"query with its positive first. If they are, pass positives=torch.arange(0, {len(key)}, {group}).",
            stacklevel=5,
        )


def _own_keys(query: Tensor, key: Tensor, optional: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Keys without rows [0, D], and the optional arguments where each query's key is the first of its negatives."""
    negatives, ids, query_ids = (optional[name] for name in ("negatives", "negative_ids", "query_ids"))
    checks.has_own(negatives, "in_batch=False")
    checks.features("query", query)
    for name in ("positives", "key_ids"):
        if optional[name] is not None:
            raise invalid(name, "be left out with in_batch=False", "both", "Key i belongs to query i.")
    checks.features("key", key)
    checks.alike("negatives", negatives, "key", key, autocast_type(key.device))
    checks.same_length("key", key, "query", query)
    checks.same_length("negatives", negatives, "query", query)
    checks.own_negatives(negatives, ids, query_ids, query, None)
    if ids is None and query_ids is not None:
        raise invalid("query_ids", "come with `negative_ids` where in_batch=False", "one alone", "Leave them out.")
    if ids is not None:
        # the key always counts: its id is another one than the query's
        ids = torch.cat([query_ids.long()[:, None] + 1, ids.long()], dim=1)
    key_first = joined([key[:, None], negatives], dim=1)
    return key[:0], {**optional, "negatives": key_first, "negative_ids": ids, "own_positives": 1}


class GISTLoss(Loss):
    """InfoNCE without the negatives that a guide takes for false ones (Solatorio 2024).

    Naively, where key i belongs to query i,

        guide = guide_query @ guide_key.T
        false = guide > guide.diagonal()[:, None] - margin
        x = (scale * query @ key.T).masked_fill(false & ~torch.eye(N, M, dtype=torch.bool), -torch.inf)
        loss = F.cross_entropy(x, torch.arange(N))

    Made as `GISTLoss(margin=0.0, margin_strategy="absolute", **how)`, with the options of `contrast`; with
    margin_strategy="relative" the margin is multiplied by the size of the positive's similarity. Of several positives
    the least similar one counts. Returns and raises what `ClipLoss` does.

    `GISTLoss(contrast_anchors=True, contrast_positives=True)` is the loss of sentence-transformers' class: queries are
    compared with queries, and their keys with each other, in the same denominator,

        x = torch.cat([query @ key.T, query @ query.T, key[:N] @ key[:N].T], 1) * scale

    with the guide's similarities likewise, each compared with that of the row's own pair. With `positives` the first
    one of a query is its key in the last product, to which a query without one adds no key.

    >>> import torch, torch.nn.functional as F
    >>> query, key, guide_query, guide_key = F.normalize(torch.randn(4, 8, 16), dim=-1)
    >>> loss = GISTLoss()(query, key, 10.0, guide_query=guide_query, guide_key=guide_key)
    >>> guide, eye = guide_query @ guide_key.T, torch.eye(8, dtype=torch.bool)
    >>> x = (10.0 * query @ key.T).masked_fill((guide > guide.diagonal()[:, None]) & ~eye, -torch.inf)
    >>> torch.testing.assert_close(loss, F.cross_entropy(x, torch.arange(8)))
    """

    names: ClassVar[dict[str, str]] = {"q": "query", "k": "key", "guide_q": "guide_query", "guide_k": "guide_key"}
    pair_loss = Guided()
    unit_rows = False

    def __init__(
        self,
        *,
        margin: float = 0.0,
        margin_strategy: Literal["absolute", "relative"] = "absolute",
        contrast_anchors: bool = False,
        contrast_positives: bool = False,
        **how: Unpack[How],
    ) -> None:
        super().__init__(**how)
        self.loss = Guided(label_smoothing=self.options.label_smoothing, margin=margin, margin_strategy=margin_strategy)
        truth_value("contrast_anchors", contrast_anchors)
        truth_value("contrast_positives", contrast_positives)
        self.contrast_anchors, self.contrast_positives = contrast_anchors, contrast_positives
        self.own_options = {
            "margin": margin, "margin_strategy": margin_strategy, "contrast_anchors": contrast_anchors,
            "contrast_positives": contrast_positives,
        }  # fmt: skip

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        scale: Tensor | float,
        *,
        guide_query: Tensor,
        guide_key: Tensor,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
        guide_negatives: Tensor | None = None,
        query_ids: Tensor | None = None,
        key_ids: Tensor | None = None,
        weights: Tensor | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Return the loss of N queries among the keys of all ranks, without those that the guide takes for positives.

        Arguments:
            query, key: [N, D] and [M, D]; without `positives` key i belongs to query i.
            scale: a number, or a tensor of shape [] or [1]: 1 / temperature.
            guide_query, guide_key: [N, G] and [M, G], the guide's features, rows of unit length; constants.
            positives: [N] or [N, P] indices into this rank's keys, −1 pads.
            negatives, guide_negatives: [H, D] and [H, G], further keys of every query; both, or neither.
            query_ids, key_ids: [N], [M] integers; pairs of equal ids that are not positive do not count.
            weights: [N]; the loss is Σ w·loss / Σ w.
        """
        if unknown:
            self._refuse(unknown)
        with self._shared_errors():
            if (negatives is None) != (guide_negatives is None):
                got = None if guide_negatives is None else "some"
                raise invalid("guide_negatives", "be given just where `negatives` is", got, "Pass both, or neither.")
            if negatives is not None and guide_negatives is not None:
                checks.features("guide_key", guide_key)
                checks.features("guide_negatives", guide_negatives)
                checks.alike("guide_negatives", guide_negatives, "guide_key", guide_key)
                checks.constant("guide_negatives", guide_negatives)
                checks.features("negatives", negatives, own=True)
                # a later check refuses those of each query alone
                if negatives.ndim == 2:
                    checks.same_length("guide_negatives", guide_negatives, "negatives", negatives)
                guide_key = joined([guide_key, guide_negatives])
            guides, unnamed = ((guide_query, guide_key),), False
            if self.contrast_anchors or self.contrast_positives:
                Arguments(query, key, scale, self.loss, self.options, negatives=negatives, guides=guides).check()
                M, (pair, positives, lacking) = len(key), _pair_positions(query, key, positives)
                if query_ids is not None and key_ids is not None:
                    query_ids, key_ids, unnamed = self._ids(query, key, pair, negatives, query_ids, key_ids)
                guides = (self._sides(guide_query, guide_key, M, pair, lacking),)
                query, key = self._sides(query, key if negatives is None else joined([key, negatives]), M, pair)
                negatives = None
        operation, inputs = self._prepared(
            query, key, scale, positives=positives, negatives=negatives, query_ids=query_ids, key_ids=key_ids,
            weights=weights, guides=guides, among=(self.contrast_anchors, self.contrast_positives), unnamed=unnamed,
        )  # fmt: skip
        loss: Tensor = operation(*inputs)
        if self._may_warn:
            self._warn_of_inputs(scale, query[:, : key.shape[1]], key)
        return loss

    def _sides(self, rows: Tensor, keys: Tensor, M: int, pair: Any, lacking: Any = None) -> tuple[Tensor, Tensor]:
        """Rows [N, D], and their columns: M keys, the rows (contrast_anchors), and the keys behind the first M, which
        are negatives. With contrast_positives rows are [N, 2 · D], each with its pair's key behind it, and pairs' keys
        are the last columns (`tiles/halves.py`); a guide's further features exclude those that are `lacking`.
        """
        if isinstance(pair, slice) and pair.stop == len(keys):
            # the gradients of three views are summed at once, and rounded once
            keys, half, last = keys.expand(3, *keys.shape).unbind()
        else:
            half = last = keys[pair]
        keys, *negatives = keys.split([M, len(keys) - M]) if len(keys) > M else [keys]
        pieces = [keys, *[rows] * self.contrast_anchors, *negatives, *[last] * self.contrast_positives]
        if lacking is None or not self.contrast_positives:
            return joined([rows, half], 1) if self.contrast_positives else rows, joined(pieces)
        (N, G), lengths = rows.shape, [len(x) for x in pieces]
        cols = rows.new_zeros(sum(lengths), G + MARKS)
        for x, place in zip(pieces, cols.split(lengths), strict=True):
            place[:, :G] = x
        cols[len(cols) - N :, G:] = FAR * lacking[:, None]
        return joined([rows, rows.new_zeros(N, MARKS), half, rows.new_full((N, MARKS), FAR)], 1), cols

    def _ids(
        self, query: Tensor, key: Tensor, pair: Any, negatives: Tensor | None, of_rows: Tensor, of_keys: Tensor
    ) -> tuple[Tensor, Tensor, bool]:
        """The ids of rows, and of all columns of `_sides`, and whether there are negatives without an id.

        of_keys: the ids of the keys, or of keys and negatives.
        """
        checks.vector("query_ids", of_rows, "q", query, integer=True)
        H = 0 if negatives is None else len(negatives)
        unnamed = H > 0 and not (isinstance(of_keys, Tensor) and of_keys.shape == (len(key) + H,))
        if H > 0 and not unnamed:
            of_keys, of_negatives = of_keys.split([len(key), H])
        else:
            of_negatives = torch.full((H,), NOBODY, device=key.device)
        checks.vector("key_ids", of_keys, "k", key, integer=True)
        if unnamed:
            # a negative without an id shares none, also where a query has the least number
            of_rows, of_keys = checks.above_least(of_rows), checks.above_least(of_keys)
        anchors, of_pairs = [of_rows] * self.contrast_anchors, [of_keys[pair]] * self.contrast_positives
        return of_rows, torch.cat([x.long() for x in (of_keys, *anchors, of_negatives, *of_pairs)]), unnamed


def _pair_positions(query: Tensor, key: Tensor, positives: Tensor | None) -> tuple[Any, Tensor | None, Tensor | None]:
    """The position of each query's key, its first positive; the positives among all columns; marks of queries without.

    A position beyond the keys, which no check may read on a GPU, stays beyond all columns.
    """
    if positives is not None:
        checks.positives(positives, query)
        if len(query) and not len(key):
            raise invalid("key", "have a row or more for `positives`", "none", "Pass the keys of this rank's queries.")
        if not torch.compiler.is_compiling():
            checks.in_range(positives, len(key))
        positives = positives.long()
        listed = positives[:, None] if positives.ndim == 1 else F.pad(positives, (0, 1), value=-1)
        # pads may come first; of equal numbers argmax returns the first
        first = listed.gather(1, (listed >= 0).byte().argmax(1, keepdim=True))[:, 0]
        beyond = positives.masked_fill(positives >= len(key), torch.iinfo(torch.int64).max)
        return first.clamp(0, max(len(key) - 1, 0)), beyond, first < 0
    if len(key) < len(query):
        got = f"{len(key)} and {len(query)}"
        raise invalid("key", "have at least as many rows as `query`", got, "Key i belongs to query i.")
    return slice(len(query)), None, None


class ScoreDistillLoss(Loss):
    """Learn the scores that a teacher, such as a reranker, gives each query's keys (Hofstätter et al. 2020, ColBERTv2).

    Naively, with x = scale * ⟨query_i, key_ip⟩ [N, P],

        kind="kl"            F.kl_div(x.log_softmax(1), scores.log_softmax(1), log_target=True, reduction="batchmean")
        kind="margin_mse"    F.mse_loss(x[:, :1] - x[:, 1:], scores[:, :1] - scores[:, 1:])

    No other keys are compared; add `InfoNCELoss` for those of the batch. Made as `ScoreDistillLoss(kind="kl", **how)`,
    with the options of `contrast` except `label_smoothing`; returns and raises what `ClipLoss` does.

    >>> import torch, torch.nn.functional as F
    >>> query, key, scores = torch.randn(4, 16), torch.randn(4, 5, 16), torch.randn(4, 5)
    >>> loss = ScoreDistillLoss(kind="margin_mse")(query, key, scores)
    >>> x = (key @ query[..., None])[..., 0]
    >>> torch.testing.assert_close(loss, F.mse_loss(x[:, :1] - x[:, 1:], scores[:, :1] - scores[:, 1:]))
    """

    names: ClassVar[dict[str, str]] = {"q": "query", "k": "key", "negatives": "key", "positives": "lists"}
    pair_loss = ScoreDivergence()
    unit_rows = False

    def __init__(self, *, kind: Literal["kl", "margin_mse"] = "kl", **how: Unpack[How]) -> None:
        super().__init__(**how)
        one_of("kind", kind, ("kl", "margin_mse"), "Leave it out for the divergence.")
        self.own_options = {"kind": kind}
        self.loss = ScoreDivergence() if kind == "kl" else ScoreMargins()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        scores: Tensor,
        scale: Tensor | float = 1.0,
        *,
        lists: Tensor | None = None,
        weights: Tensor | None = None,
        scorer: nn.Module | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Return the distance of N queries' scores from a teacher's, over the batch of all ranks.

        Arguments:
            query: [N, D].
            key: [N, P, D], the keys of each query; or [M, D], with `lists`.
            scores: [N, P], constants; for "kl" the teacher's logits, divided by its temperature.
            scale: a number, or a tensor of shape [] or [1]; 1 where both are scores of the same kind.
            lists: [N, P] indices into this rank's keys [M, D], −1 pads; a row of pads alone leaves the mean.
                "margin_mse" compares the first of a list with the others.
            weights: [N]; the loss is Σ w·loss / Σ w.
            scorer: a learned distance in place of the dot product, such as `contrastile.scorers.MaxSim`, with query and
                key as `contrast` takes them: nested tensors [N, ...] and [N, P, ...], or [M, ...] with `lists`. It
                scores one query's list at a time, and again in the backward.
        """
        if unknown:
            self._refuse(unknown)
        with self._shared_errors():
            if scorer is not None:
                # a score is its own product with 1
                key = listed_scores(scorer, query, key, lists)[..., None]
                query = key.new_ones(len(key), 1)
            own = self._listed(query, key, scores, None if scorer is not None else lists)
        # a pad has the id of every query
        ids: dict[str, Any] = {}
        if lists is not None:
            ids = {"negative_ids": lists.long(), "query_ids": torch.full_like(lists[:, 0], -1, dtype=torch.int64)}
        # autocast would round the scores of a scorer
        with nullcontext() if scorer is None else torch.autocast(own.device.type, enabled=False):
            operation, inputs = self._prepared(
                query, own[:0, 0], scale, negatives=own, own_positives=1, targets=scores, weights=weights,
                scored_by=None if scorer is None else in_words(scorer), **ids,
            )  # fmt: skip
            return operation(*inputs)

    def _listed(self, query: Tensor, key: Tensor, scores: Tensor, lists: Tensor | None) -> Tensor:
        """The keys [N, P, D] of each query, once scores and lists are checked."""
        if lists is None:
            if not isinstance(key, Tensor) or key.ndim != 3:
                rule = "be [N, P, D], or [M, D] with `lists`"
                raise invalid("key", rule, shape_or_type(key), "List each query's keys.")
        else:
            checks.features("query", query)
            checks.features("key", key)
            check_lists(lists, query, len(key))
        listed = key if lists is None else lists
        if not isinstance(scores, Tensor) or scores.shape != listed.shape[:2] or not scores.is_floating_point():
            got = f"shape {list(scores.shape)}, {scores.dtype}" if isinstance(scores, Tensor) else type(scores).__name__
            rule = f"be floating point of shape {list(listed.shape[:2])}, one for each listed key"
            raise invalid("scores", rule, got, "Score the keys that are listed, with anything for pads.")
        if not scores.shape[1]:
            raise invalid("scores", "have a column or more", f"shape {list(scores.shape)}", "List the keys to score.")
        if lists is not None and len(lists) and not len(key):
            raise invalid("key", "have a row or more for `lists`", f"shape {list(key.shape)}", "Pass the listed keys.")
        checks.constant("scores", scores)
        checks.same_device("scores", scores, "key", listed)
        # 8-bit indices would be a mask
        return key if lists is None else listed_rows(key, lists.long().clamp(0, len(key) - 1))
