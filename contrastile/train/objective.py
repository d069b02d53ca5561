"""Objectives: the losses of recipes, as the tasks call them on the features of a batch; and the teachers of some.

An objective makes the loss module of the section `[loss]`, which checks the values of its own keys, chooses the
module's inputs, and has the state that outlasts a step: queues of earlier keys. A guide or a teacher is a finished run,
or a folder of transformers, that encodes the same batch and stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import modules
from contrastile._errors import invalid, renamed
from contrastile._torch import pytree
from contrastile.functional import contrast
from contrastile.gradcache.encode import encode
from contrastile.losses.base import PairLoss
from contrastile.losses.decoupled import Decoupled, DecoupledWeighted
from contrastile.losses.distilled import Distilled
from contrastile.losses.queue import KeyQueue
from contrastile.models.text import Tokenizer, load_tokenizer
from contrastile.train.checkpoints import Parts
from contrastile.train.config import Recipe
from contrastile.train.config.base import LossSettings
from contrastile.train.config.image_text import ModelSettings
from contrastile.train.folder import RECIPE
from contrastile.train.load import class_of, load
from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.config import RetrieverSettings

Tokens = dict[str, Tensor]
# prefix of the names of a teacher's tokens, beside those of the model that learns
TEACHER_PREFIX = "teacher_"
KINDS = {"image-text": "images and texts", "retriever": "questions and passages"}


class Objective:
    """A recipe's loss, the `queues` of its sides, and keys that wait for the end of the step to be queued."""

    # the maker of each kind's loss, and the sides that have a queue
    makers: ClassVar[Mapping[str, Callable[..., Any]]]
    sides: ClassVar[tuple[str, ...]]

    def __init__(
        self, settings: Any, *, features: int = 0, dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """Make the loss, and with `features`, the size of a key, its queues.

        device: computes the products of features that wait in host memory.
        """
        self.settings = settings
        place = {} if device is None else {"device": device}
        # errors speak of the recipe's keys
        with renamed(**{key: f"loss.{key}" for key in type(settings).model_fields}):
            self.loss: Any = self.makers[settings.kind](**settings.words(), **place)
        size, sides = getattr(settings, "queue", 0), self.sides if features else ()
        self.queues = nn.ModuleDict({side: KeyQueue(size, features, dtype=dtype) for side in sides if size})
        self._waiting: list[dict[str, Tensor]] = []

    @property
    def pair_loss(self) -> PairLoss:
        """The loss as tiles compute it."""
        return self.loss.keywords["loss"] if isinstance(self.loss, partial) else self.loss.loss

    @property
    def state(self) -> Parts:
        """The parts of a checkpoint; none without a queue."""
        return {"queue": self.queues} if len(self.queues) else {}

    def queued(self, side: str) -> tuple[Tensor, Tensor]:
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


class PairObjective(Objective):
    """The loss of images and texts.

    Ids are those of captions. Pairs of equal ids are left out, or are positives where the recipe has `labels`. A loss
    of one direction is computed both ways and averaged.
    """

    makers: ClassVar = {
        "clip": modules.ClipLoss, "siglip": modules.SigLipLoss, "dcl": modules.DCLLoss, "supcon": modules.SupConLoss,
        "ntxent": modules.NTXentLoss,
        "infonce": modules.InfoNCELoss, "gist": modules.GISTLoss, "distill": modules.DistillClipLoss,
    }  # fmt: skip
    sides: ClassVar = ("image", "text")

    def __call__(
        self, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None, *, ids: Tensor, guides: Any = None
    ) -> Tensor:
        """The loss of features [b, D] of unit length; guides: the other model's features, and its scale."""
        kind, loss, losses = self.settings.kind, self.loss, []
        if kind == "supcon":
            return loss(torch.stack([image, text], 1), ids, scale)
        if kind == "distill":
            return loss(image, text, scale, *guides, ids=ids)
        if kind == "ntxent":
            return loss(image, text, scale, ids=ids)
        if kind == "gist":
            sides = ((image, guides[0]), (text, guides[1]))
            for (query, guide_query), (key, guide_key) in (sides, sides[::-1]):
                ids_of = {"query_ids": ids, "key_ids": ids}
                losses.append(loss(query, key, scale, guide_query=guide_query, guide_key=guide_key, **ids_of))
        elif kind == "infonce":
            for query, key, side in ((image, text, "text"), (text, image, "image")):
                keys = _with_queue(ids, self.queued(side)) if len(self.queues) else {"key_ids": ids}
                losses.append(loss(query, key, scale, query_ids=ids, **keys))
            self.keep(ids, image=image, text=text)
        else:
            return loss(image, text, scale, bias, **{"labels" if self.settings.labels else "ids": ids})
        return (losses[0] + losses[1]) / 2


def _with_queue(ids: Tensor, queued: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The keys of a queue as negatives, which get no gradient, and the ids of a batch's keys and of these."""
    return {"negatives": queued[0], "key_ids": torch.cat([ids, queued[1]])}


def _contrast_maker(pair_loss: Callable[..., PairLoss], *keys: str) -> Callable[..., Callable[..., Tensor]]:
    """A maker of `contrast` with a pair loss that has no module; `keys`: its keywords among those of the recipe."""

    def make(**words: Any) -> Callable[..., Tensor]:
        loss = pair_loss(**{key: words.pop(key) for key in keys})
        return partial(contrast, loss=loss, **words)

    return make


def _decoupled(sigma: float | None) -> Decoupled:
    return Decoupled() if sigma is None else DecoupledWeighted(sigma=sigma)


class QueryObjective(Objective):
    makers: ClassVar = {
        "infonce": modules.InfoNCELoss, "gist": modules.GISTLoss, "dcl": _contrast_maker(_decoupled, "sigma"),
        "distill": _contrast_maker(Distilled, "weight"),
        "kl": modules.ScoreDistillLoss, "margin_mse": modules.ScoreDistillLoss,
    }  # fmt: skip
    sides: ClassVar = ("passage",)

    def __init__(self, settings: Any, *, scorer: nn.Module | None = None, **words: Any) -> None:
        """scorer: compares token vectors in place of the dot product. words: the arguments of `Objective`."""
        super().__init__(settings, **words)
        by_scores = settings.kind in ("kl", "margin_mse")
        if scorer is not None:
            self.loss = partial(self.loss, scorer=scorer) if by_scores else _scored(self.loss, scorer)
        if by_scores:
            how = {name: getattr(settings, name) for name in ("backend", "exchange", "gradient", "workspace")}
            in_batch = modules.InfoNCELoss(**how)
            self._in_batch: Any = in_batch if scorer is None else _scored(in_batch, scorer)

    def __call__(
        self, query: Any, passage: Any, scale: Tensor, *, positives: Tensor, query_ids: Tensor, key_ids: Tensor,
        shared: Tensor | None = None, lists: Tensor | None = None, scores: Tensor | None = None, guides: Any = None,
        queue: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """The loss of this rank's queries [b, D] and passages [L, D].

        shared [M]: indices of the passages that are keys of all queries; None: all are. positives [b, P]: indices of
        each query's positives among the keys. lists [b, H]: indices of its listed passages among all passages; scores
        [b, H]: their scores. −1 pads both. key_ids [L]: of all passages. guides: the other model's features of both
        sides, and its scale. queue: keys of earlier steps, and their ids. With a scorer of token vectors, query and
        passage are vectors and their mask.
        """
        key, ids = passage, key_ids
        if shared is not None:
            # features, or token vectors and their mask
            key, ids = pytree.tree_map(lambda x: x[shared], (passage, key_ids))
        inputs: dict[str, Any] = {"positives": positives, "query_ids": query_ids, "key_ids": ids}
        if scores is not None:
            weight = self.settings.weight
            soft: Tensor = self.loss(query, passage, scores * self.settings.score_scale, scale, lists=lists)
            if weight == 1:
                return soft
            return weight * soft + (1 - weight) * self._in_batch(query, key, scale=scale, **inputs)
        if queue is not None:
            inputs |= _with_queue(ids, queue)
        if guides is not None:
            guide_query, guide_key, guide_scale = guides
            guide_key = guide_key if shared is None else guide_key[shared]
            if self.settings.kind == "distill":
                inputs |= {"guide_q": guide_query * guide_scale, "guide_k": guide_key}
            else:
                inputs |= {"guide_query": guide_query, "guide_key": guide_key}
        if lists is not None:
            if queue is not None:
                # negatives of each query take the place of those of all
                key = torch.cat([key, inputs["negatives"]])
            pads = torch.where(lists < 0, query_ids[:, None], key_ids[lists.clamp(min=0)])
            inputs |= {"negatives": passage[lists.clamp(min=0)], "negative_ids": pads}
            if not self.settings.in_batch:
                key = key[positives[:, 0]]
                del inputs["positives"], inputs["key_ids"]
        return self.loss(query, key, scale=scale, **inputs)


def _scored(loss: modules.InfoNCELoss, scorer: nn.Module) -> Callable[..., Tensor]:
    """The loss with a scorer in place of the dot product."""
    # `loss.loss` includes the label smoothing already
    words: dict[str, Any] = vars(loss.options) | {"label_smoothing": 0.0, "scorer": scorer}
    return partial(contrast, loss=loss.loss, **words)


# the objective of each kind of recipe
OBJECTIVES: dict[str, type[Objective]] = {"image-text": PairObjective, "retriever": QueryObjective}


@dataclass(frozen=True)
class Teacher:
    """A model with fixed weights, and the scale of its similarities; `run` is of the same kind as the student's."""

    run: Any
    scale: Tensor | float

    @cached_property
    def digest(self) -> str:
        """A digest of the weights and the scale, on which the run that learns from this model depends."""
        digest = sha256(str(float(self.scale)).encode())
        for name, weight in self.run.model.state_dict().items():
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @torch.no_grad()
    def pairs(self, pixels: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | float]:
        """Features [b, G] of images and of texts, float32 of unit length, and the scale."""
        model, size = self.run.model, self.run.recipe.train.sub_batch
        with self.run.autocast():
            # the features of one side as encoded are freed before the other side is encoded
            image = F.normalize(encode(model.encode_image, pixels, sub_batch=size.image).float(), dim=-1)
            text = F.normalize(encode(model.encode_text, tokens, **size.words("text")).float(), dim=-1)
        return image, text, self.scale

    @torch.no_grad()
    def texts(self, queries: Tokens, passages: Tokens) -> tuple[Tensor, Tensor, Tensor | float]:
        """Features [b, G] of queries and of passages, as the teacher's own recipe compares them, and the scale."""
        run = self.run
        with run.autocast():
            query = run.model.comparable(run.encoded("query", queries))
            passage = run.model.comparable(run.encoded("passage", passages))
        return query, passage, self.scale


def open_teacher(recipe: Any) -> Teacher | None:
    """The model in the folder that the recipe's loss names; None if the loss names no folder."""
    settings: LossSettings = recipe.loss
    if not settings.other_model:
        return None
    key, folder, finished = _other_folder(settings)
    if finished:
        run: Any = load(folder, device=recipe.device)
    else:
        tokenizer = load_tokenizer(folder, length=recipe.model.tokenizer.length)
        run = class_of(recipe).untrained(_recipe_of_transformers(recipe, folder), tokenizer)
    _check_batch(recipe, run.recipe, key, folder)
    run.model.eval().requires_grad_(False)
    scale = getattr(settings, "teacher_scale", None)
    if scale is None and settings.other_model == "teacher" and not finished and not isinstance(recipe, Recipe):
        remedy = "Its products are multiplied by it; 20 suits features of unit length."
        raise invalid("loss.teacher_scale", "be given for a teacher without a scale of its own", f'"{folder}"', remedy)
    return Teacher(run, run.model.logit_scale.exp().float() if scale is None else scale)


def _check_batch(recipe: Any, other: Any, key: str, folder: Path) -> None:
    """Raise ValueError where the model of the recipe `other`, in `folder`, cannot encode the batches of `recipe`."""
    if other.kind != recipe.kind:
        got = f'"{folder}", of {KINDS[other.kind]}'
        raise invalid(key, f"be a model of {KINDS[recipe.kind]}", got, "Both models encode the same batch.")
    if getattr(other.model, "kind", "single") == "late":
        got = f'"{folder}", with a vector for each token'
        raise invalid(key, "have one vector for each text", got, 'Take a retriever of model.kind = "single".')
    if isinstance(recipe, Recipe):
        shape, theirs = ((data.image_size, data.channels) for data in (recipe.data, other.data))
        if shape != theirs:
            rule, remedy = "encode images of {} pixels and {} channels", "Both models encode the same batch."
            raise invalid(key, rule.format(*shape), "{} and {}".format(*theirs), remedy)


def _other_folder(settings: LossSettings) -> tuple[str, Path, bool]:
    """The key and the folder of a loss's other model, and True for a finished run; raises ValueError for no model."""
    key, folder = f"loss.{settings.other_model}", Path(getattr(settings, str(settings.other_model)))
    finished = (folder / RECIPE).is_file()
    if not finished and not (folder / "config.json").is_file():
        remedy = "Train one first, or name a folder with a config.json and a tokenizer."
        raise invalid(key, "be the folder of a run, or of a model of transformers", f'"{folder}"', remedy)
    return key, folder, finished


def teacher_recipe(recipe: Any) -> Any:
    """The recipe of the model that the loss of `recipe` names, None if it names none; no weights are read."""
    if not recipe.loss.other_model:
        return None
    _, folder, finished = _other_folder(recipe.loss)
    return load_any_recipe(folder / RECIPE, files=False) if finished else _recipe_of_transformers(recipe, folder)


def _recipe_of_transformers(recipe: Any, folder: Path) -> Any:
    """The recipe of a run with the model of a folder of transformers, for the data and the lengths of `recipe`."""
    lengths = recipe.model.tokenizer.model_dump(include={"length", "query_length"})
    sections = {"both": {"folder": str(folder)}, "tokenizer": {"folder": str(folder), **lengths}}
    settings: Any = ModelSettings if isinstance(recipe, Recipe) else RetrieverSettings
    if settings is RetrieverSettings:
        sections["both"]["kind"] = "transformers"
    # the scale is the folder's own
    loss = {"loss": type(recipe).model_fields["loss"].default}
    return recipe.model_copy(update={"model": settings.model_validate(sections), **loss})


def joint_tokens(own: Tokenizer, teacher: Tokenizer, texts: Sequence[str]) -> Tokens:
    """The tokens of the model that learns, and a teacher's by names of their own."""
    return own.tokenise(texts) | {TEACHER_PREFIX + name: ids for name, ids in teacher.tokenise(texts).items()}


def split_tokens(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """The tokens of the model that learns, and the teacher's."""
    own = {name: ids for name, ids in tokens.items() if not name.startswith(TEACHER_PREFIX)}
    return own, {name.removeprefix(TEACHER_PREFIX): ids for name, ids in tokens.items() if name not in own}
