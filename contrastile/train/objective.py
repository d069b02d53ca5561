"""Objectives: the losses of recipes, as the tasks call them on the features of a batch.

Between the section `[loss]` of a recipe (`config/losses.py`) and the tasks. An objective makes the loss module, which
checks the values of its own keys, chooses the module's inputs, and has the state that outlasts a step: queues of
earlier keys. The features of a guide or a teacher come from `teacher.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from contrastile.functional import contrast
from contrastile.losses.base import PairLoss
from contrastile.losses.decoupled import Decoupled, DecoupledWeighted
from contrastile.losses.distilled import Distilled
from contrastile.losses.queue import KeyQueue
from contrastile.modules import (
    ClipLoss,
    DCLLoss,
    DistillClipLoss,
    GISTLoss,
    InfoNCELoss,
    ScoreDistillLoss,
    SigLipLoss,
    SupConLoss,
)
from contrastile.train.checkpoints import Parts
from contrastile.train.config.base import LossSettings


class Objective:
    """A recipe's loss, the `queues` of its sides, and keys that wait for the end of the step to be queued."""

    # the loss module of each kind, and the sides that have a queue
    modules: ClassVar[Mapping[str, Callable[..., Any]]]
    sides: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        settings: Any,
        *,
        features: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """Make the loss, and queues of keys of so many `features`; none without.

        device: of the products, where the features wait in host memory.
        """
        self.settings = settings
        self.loss = _made(settings, self.modules[settings.kind], {} if device is None else {"device": device})
        size, sides = getattr(settings, "queue", 0), self.sides if features else ()
        self.queues = nn.ModuleDict({side: KeyQueue(size, features, dtype=dtype) for side in sides if size})
        self._waiting: list[dict[str, Tensor]] = []

    @property
    def pair_loss(self) -> PairLoss:
        """The loss as tiles compute it."""
        pair_loss: PairLoss = self.loss.keywords["loss"] if isinstance(self.loss, partial) else self.loss.loss
        return pair_loss

    @property
    def state(self) -> Parts:
        """The parts of a checkpoint; none without a queue."""
        return {"queue": self.queues} if len(self.queues) else {}

    def queued(self, side: str) -> tuple[Tensor, Tensor]:
        """The keys of a side's queue, and their ids."""
        queue: Any = self.queues[side]
        return queue.keys, queue.ids

    def keep(self, ids: Tensor, **keys: Tensor) -> None:
        """Hold the keys of each side, and their ids, until the step ends."""
        if len(self.queues):
            self._waiting.append({"ids": ids, **{side: key.detach() for side, key in keys.items()}})

    def end_step(self, taken: bool) -> None:
        """Queue the keys of a step that was taken; drop those of one that was skipped, which may not be finite."""
        if taken and self._waiting:
            joined = {name: torch.cat([part[name] for part in self._waiting]) for name in self._waiting[0]}
            for side, queue in self.queues.items():
                queue.push(joined[side], joined["ids"])  # type: ignore[operator]
        self._waiting.clear()


def _made(settings: LossSettings, module: Callable[..., Any], more: Mapping[str, Any]) -> Any:
    """The loss module, with `more` words than the settings'; an error speaks of the recipe's keys."""
    try:
        return module(**settings.words(), **more)
    except ValueError as error:
        keys = type(settings).model_fields
        error.args = (re.sub(r"`(\w+)`", lambda x: f"`loss.{x[1]}`" if x[1] in keys else x[0], str(error)),)
        raise


class PairObjective(Objective):
    """The loss of pictures and texts.

    Pairs of equal ids, which are those of titles, are left out, or are positives where the recipe has `labels`. A loss
    of one direction is the mean of both.
    """

    modules: ClassVar = {
        "clip": ClipLoss, "siglip": SigLipLoss, "dcl": DCLLoss, "supcon": SupConLoss, "infonce": InfoNCELoss,
        "gist": GISTLoss, "distill": DistillClipLoss,
    }  # fmt: skip
    sides: ClassVar = ("image", "text")

    def __call__(
        self, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None, *, ids: Tensor, guides: Any = None
    ) -> Tensor:
        """The loss of features [b, D] of unit length; guides: the other model's features, and its scale."""
        ways: dict[str, Callable[..., Tensor]] = {
            "supcon": self._views, "infonce": self._queued, "gist": self._guided, "distill": self._distilled,
        }  # fmt: skip
        return ways.get(self.settings.kind, self._paired)(image, text, scale, bias, ids, guides)

    def _paired(self, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None, ids: Tensor, _: None) -> Tensor:
        return self.loss(image, text, scale, bias, **{"labels" if self.settings.labels else "ids": ids})

    def _views(self, image: Tensor, text: Tensor, scale: Tensor, _: Any, ids: Tensor, __: None) -> Tensor:
        return self.loss(torch.stack([image, text], 1), ids, scale)

    def _queued(self, image: Tensor, text: Tensor, scale: Tensor, _: Any, ids: Tensor, __: None) -> Tensor:
        losses = []
        for query, key, side in ((image, text, "text"), (text, image, "image")):
            keys, key_ids = _behind(key, ids, self.queued(side)) if len(self.queues) else (key, ids)
            losses.append(self.loss(query, keys, scale, query_ids=ids, key_ids=key_ids))
        self.keep(ids, image=image, text=text)
        return (losses[0] + losses[1]) / 2

    def _guided(self, image: Tensor, text: Tensor, scale: Tensor, _: Any, ids: Tensor, guides: Any) -> Tensor:
        sides, losses = ((image, guides[0]), (text, guides[1])), []
        for (query, guide_query), (key, guide_key) in (sides, sides[::-1]):
            given = {"guide_query": guide_query, "guide_key": guide_key, "query_ids": ids, "key_ids": ids}
            losses.append(self.loss(query, key, scale, **given))
        return (losses[0] + losses[1]) / 2

    def _distilled(self, image: Tensor, text: Tensor, scale: Tensor, _: Any, ids: Tensor, guides: Any) -> Tensor:
        return self.loss(image, text, scale, *guides, ids=ids)


def _behind(key: Tensor, ids: Tensor, queued: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The keys of a batch and those of a queue, and the ids of both."""
    return torch.cat([key, queued[0]]), torch.cat([ids, queued[1]])


def _one_way(made: Callable[..., PairLoss], *names: str) -> Callable[..., Callable[..., Tensor]]:
    """A maker of `contrast` with a pair loss of its own; `names` are the keywords of that loss."""

    def make(**words: Any) -> Callable[..., Tensor]:
        own = {name: words.pop(name) for name in names}
        return partial(contrast, loss=made(**own), **words)

    return make


def _decoupled(sigma: float | None) -> Decoupled:
    return Decoupled() if sigma is None else DecoupledWeighted(sigma=sigma)


class QueryObjective(Objective):
    """The loss of queries that find passages."""

    modules: ClassVar = {
        "infonce": InfoNCELoss, "gist": GISTLoss, "dcl": _one_way(_decoupled, "sigma"),
        "distill": _one_way(Distilled, "weight"), "kl": ScoreDistillLoss, "margin_mse": ScoreDistillLoss,
    }  # fmt: skip
    sides: ClassVar = ("passage",)

    def __init__(self, settings: Any, *, features: int = 0, scorer: nn.Module | None = None) -> None:
        """`scorer`: of token vectors, in the place of the dot product."""
        super().__init__(settings, features=features)
        by_scores = settings.kind in ("kl", "margin_mse")
        if scorer is not None:
            self.loss = partial(self.loss, scorer=scorer) if by_scores else _scored(self.loss, scorer)
        if by_scores:
            how = {name: getattr(settings, name) for name in ("backend", "exchange", "gradient", "workspace")}
            in_batch = InfoNCELoss(**how)
            self._in_batch: Any = in_batch if scorer is None else _scored(in_batch, scorer)

    def __call__(
        self,
        query: Any,
        passage: Any,
        scale: Tensor,
        *,
        positives: Tensor,
        query_ids: Tensor,
        key_ids: Tensor,
        shared: Tensor | None = None,
        lists: Tensor | None = None,
        scores: Tensor | None = None,
        guides: Any = None,
        queue: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The loss of this rank's queries [b, D] and passages [L, D], which are all or the `shared` [M] of them keys.

        positives, lists [b, P], [b, H]: indices of each query's passages, of the keys and of all, −1 pads. key_ids
        [L]. scores [b, H]: of the listed. guides: the other model's features of both sides, and its scale. queue: keys
        of earlier steps, and their ids. With a scorer of token vectors, query and passage are vectors and their mask.
        """
        key, ids = (passage, key_ids) if shared is None else (_some(passage, shared), key_ids[shared])
        given: dict[str, Any] = {"positives": positives, "query_ids": query_ids, "key_ids": ids}
        if scores is not None:
            weight = self.settings.weight
            soft: Tensor = self.loss(query, passage, scores * self.settings.score_scale, scale, lists=lists)
            return (
                soft if weight == 1 else weight * soft + (1 - weight) * self._in_batch(query, key, scale=scale, **given)
            )
        if queue is not None:
            key, given["key_ids"] = _behind(key, ids, queue)
        if guides is not None:
            a, b, teacher_scale = guides
            b = b if shared is None else b[shared]
            distilled = self.settings.kind == "distill"
            given |= {"guide_q": a * teacher_scale, "guide_k": b} if distilled else {"guide_query": a, "guide_key": b}
        if lists is not None:
            pads = torch.where(lists < 0, query_ids[:, None], key_ids[lists.clamp(min=0)])
            given |= {"negatives": passage[lists.clamp(min=0)], "negative_ids": pads}
            if not self.settings.in_batch:
                key = key[positives[:, 0]]
                del given["positives"], given["key_ids"]
        value: Tensor = self.loss(query, key, scale=scale, **given)
        return value


def _scored(loss: InfoNCELoss, scorer: nn.Module) -> Callable[..., Tensor]:
    """The loss with a scorer in place of the dot product."""
    # it has its smoothing already
    words: dict[str, Any] = vars(loss.options) | {"label_smoothing": 0.0, "scorer": scorer}
    return partial(contrast, loss=loss.loss, **words)


def _some(side: Any, rows: Tensor) -> Any:
    """These rows of features, or of token vectors and their mask."""
    return tuple(x[rows] for x in side) if isinstance(side, tuple) else side[rows]


# the objective of each kind of recipe
OBJECTIVES: dict[str, type[Objective]] = {"image-text": PairObjective, "retriever": QueryObjective}
