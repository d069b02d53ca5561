"""Another model beside the one that learns: a guide or a teacher, which encodes the same batch.

Beside `objective.py`, whose losses compare its features; the tasks open it and give it their inputs. It is a finished
run, or a folder of transformers, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._errors import invalid
from contrastile.gradcache.encode import encode
from contrastile.models.text import Tokenizer, load_tokenizer
from contrastile.train.config import Recipe
from contrastile.train.config.base import LossSettings
from contrastile.train.config.image_text import ModelSettings
from contrastile.train.folder import RECIPE
from contrastile.train.load import load
from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.config import RetrieverSettings
from contrastile.train.retriever.run import build_retriever_run
from contrastile.train.run import build_run

Tokens = dict[str, Tensor]
# prefix of the names of its tokens, beside those of the model that learns
BESIDE = "teacher_"
KINDS = {"image-text": "pictures and texts", "retriever": "questions and passages"}


@dataclass(frozen=True)
class Teacher:
    """A model with fixed weights, and the scale of its similarities; `run` is one of the kind that learns."""

    run: Any
    scale: Tensor | float

    @cached_property
    def digest(self) -> str:
        """A digest of its weights and its scale, which the run that learns from it depends on."""
        digest = sha256(str(float(self.scale)).encode())
        for name, weight in self.run.model.state_dict().items():
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @torch.no_grad()
    def pairs(self, pixels: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | float]:
        """Features [b, G] of pictures and of texts, float32 of unit length, and the scale."""
        model, size = self.run.model, self.run.recipe.train.sub_batch
        with self.run.autocast():
            image = encode(model.encode_image, pixels, sub_batch=size.image)
            text = encode(model.encode_text, tokens, **size.words("text"))
        return F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1), self.scale

    @torch.no_grad()
    def texts(self, side: Literal["query", "passage"], tokens: Tokens) -> Tensor:
        """Features [b, G] of queries or of passages, as the teacher's own recipe compares them."""
        model = self.run.model
        with self.run.autocast():
            features = encode(getattr(model, f"encode_{side}"), tokens, **self.run.sub_batch(side, tokens))
        return model.comparable(features)


def open_teacher(recipe: Any) -> Teacher | None:
    """The model in the folder that the recipe's loss names; None for a loss without one.

    Raises ValueError for a run of the other kind, pictures of another size, and a distillation without a scale.
    """
    settings: LossSettings = recipe.loss
    if not settings.other_model:
        return None
    key, folder, finished = _folder(settings)
    run: Any = load(folder, device=recipe.device) if finished else _of_transformers(recipe, folder)
    if run.recipe.kind != recipe.kind:
        got = f'"{folder}", of {KINDS[run.recipe.kind]}'
        raise invalid(key, f"be a model of {KINDS[recipe.kind]}", got, "It encodes the same batch.")
    if getattr(run.recipe.model, "kind", "single") == "late":
        got = f'"{folder}", with a vector for each token'
        raise invalid(key, "have one vector for each text", got, 'Take a retriever of model.kind = "single".')
    if isinstance(recipe, Recipe):
        own, other = ((data.image_size, data.channels) for data in (recipe.data, run.recipe.data))
        if own != other:
            rule, remedy = "encode pictures of {} pixels and {} channels", "It encodes the same batch."
            raise invalid(key, rule.format(*own), "{} and {}".format(*other), remedy)
    run.model.eval().requires_grad_(False)
    scale = getattr(settings, "teacher_scale", None)
    if scale is None and settings.other_model == "teacher" and not finished and not isinstance(recipe, Recipe):
        remedy = "Its products are multiplied by it; 20 suits features of unit length."
        raise invalid("loss.teacher_scale", "be given for a teacher without a scale of its own", f'"{folder}"', remedy)
    return Teacher(run, run.model.logit_scale.exp().float() if scale is None else scale)


def _folder(settings: LossSettings) -> tuple[str, Path, bool]:
    """The key and the folder of a loss's other model, and whether that is a run; raises ValueError for no model."""
    key, folder = f"loss.{settings.other_model}", Path(getattr(settings, str(settings.other_model)))
    finished = (folder / RECIPE).is_file()
    if not finished and not (folder / "config.json").is_file():
        remedy = "Train one first, or name a folder with a config.json and a tokenizer."
        raise invalid(key, "be the folder of a run, or of a model of transformers", f'"{folder}"', remedy)
    return key, folder, finished


def teacher_recipe(recipe: Any) -> Any:
    """The recipe of the model that the recipe's loss names, whose weights are not read; None for a loss without one."""
    if not recipe.loss.other_model:
        return None
    _, folder, finished = _folder(recipe.loss)
    return load_any_recipe(folder / RECIPE, files=False) if finished else _recipe_of_transformers(recipe, folder)


def _of_transformers(recipe: Any, folder: Path) -> Any:
    """A run with the model of a folder of transformers, for the data and the lengths of `recipe`."""
    build: Any = build_run if isinstance(recipe, Recipe) else build_retriever_run
    length = recipe.model.tokenizer.length
    return build(_recipe_of_transformers(recipe, folder), load_tokenizer(folder, length=length))


def _recipe_of_transformers(recipe: Any, folder: Path) -> Any:
    """The recipe of such a run."""
    lengths = recipe.model.tokenizer.model_dump(include={"length", "query_length"})
    sections = {"both": {"folder": str(folder)}, "tokenizer": {"folder": str(folder), **lengths}}
    settings: Any = ModelSettings if isinstance(recipe, Recipe) else RetrieverSettings
    if settings is RetrieverSettings:
        sections["both"]["kind"] = "transformers"
    # the scale is the folder's own
    loss = {"loss": type(recipe).model_fields["loss"].default}
    return recipe.model_copy(update={"model": settings.model_validate(sections), **loss})


class BothTokenizers:
    """The tokenizer of the model that learns and a teacher's, whose tokens have names of their own."""

    def __init__(self, own: Tokenizer, teacher: Tokenizer) -> None:
        self._own, self._teacher = own, teacher
        self.length, self.pad, self.vocabulary_size, self.save = own.length, own.pad, own.vocabulary_size, own.save
        self.mask, self.token_id, self.tokens = own.mask, own.token_id, own.tokens

    def tokenise(self, texts: Sequence[str], length: int | None = None) -> Tokens:
        """The tokens of both; `length`: of the model that learns."""
        beside = self._teacher.tokenise(texts).items()
        return {**self._own.tokenise(texts, length), **{BESIDE + name: ids for name, ids in beside}}


def apart(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """The tokens of the model that learns, and the teacher's."""
    own = {name: ids for name, ids in tokens.items() if not name.startswith(BESIDE)}
    return own, {name.removeprefix(BESIDE): ids for name, ids in tokens.items() if name not in own}
