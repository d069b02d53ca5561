"""Which keys of a recipe nobody would read, given what its other keys say.

Beside `recipe.py`, which refuses them: what a recipe says is done. An override may make a key of the file idle; that
key is then left out, and a line says so. A recipe that is written out is without them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from contrastile.train.settings import Settings


@dataclass(frozen=True)
class Rule:
    """`key` is read by nobody where it is `idle`, which `by` and the `others` decide; `remedy` says what to do."""

    key: str
    by: str
    idle: Callable[[Any], bool]
    remedy: str = "leave it out"
    # what else decides
    others: tuple[str, ...] = ()

    def reason(self, recipe: Settings) -> str:
        """Why the key is refused."""
        value = value_of(recipe, self.by)
        shown = "" if isinstance(value, Settings) else f" = {json.dumps(value, ensure_ascii=False)}"
        return f"has no effect with {self.by}{shown}; {self.remedy}"


def value_of(recipe: Settings, key: str) -> Any:
    """What a recipe says under a dotted key."""
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def idle_keys(recipe: Any) -> Iterator[Rule]:
    """The rules whose key is idle in this recipe."""
    return (rule for rule in (*EVERY, *OF_KIND[recipe.kind]) if rule.idle(recipe))


def _given(key: str) -> Callable[[Any], bool]:
    return lambda recipe: value_of(recipe, key) is not None


def _instead(key: str, by: str) -> Rule:
    """Two keys of one section of which one counts."""
    return Rule(key, by, _given(by), "leave either out")


def _is_folder(recipe: Any) -> bool:
    return os.path.isdir(os.path.expanduser(recipe.data.source))


def _is_whole(recipe: Any) -> bool:
    """Sources with everything but hard negatives, which they never have."""
    return recipe.data.source == "docstrings" or _is_folder(recipe)


EVERY = (
    Rule(
        "optim.cooldown",
        "optim.schedule",
        lambda recipe: recipe.optim.schedule != "cooldown",
        'leave it out, or set optim.schedule = "cooldown"',
    ),
    Rule("optim.final", "optim.schedule", lambda recipe: recipe.optim.schedule == "constant"),
    Rule(
        "optim.base_batch",
        "optim.rate_scaling",
        lambda recipe: recipe.optim.rate_scaling == "none",
        'leave it out, or set optim.rate_scaling = "sqrt" or "linear"',
    ),
    _instead("optim.warmup", "optim.warmup_steps"),
    _instead("optim.warmup", "optim.warmup_epochs"),
    Rule("model.tokenizer.kind", "model.tokenizer.folder", _given("model.tokenizer.folder")),
    Rule("model.tokenizer.size", "model.tokenizer.folder", _given("model.tokenizer.folder")),
)

OF_KIND = {
    "image-text": (
        Rule("model.features", "model.both", _given("model.both"), "leave it out: that model has its own"),
        Rule(
            "model.tokenizer.size",
            "model.tokenizer.kind",
            lambda recipe: recipe.model.tokenizer.kind == "open_clip",
            "leave it out: CLIP's words are given",
            others=("model.text", "model.both"),
        ),
        _instead("train.sub_batch.text", "train.sub_batch.text_tokens"),
        Rule(
            "evaluate.digits",
            "data.source",
            lambda recipe: recipe.evaluate.digits and recipe.data.source != "glyphs",
            "leave it out: they are a test of glyphs",
        ),
    ),
    "retriever": (
        Rule("data.packages", "data.source", lambda recipe: recipe.data.source != "docstrings"),
        Rule("data.corpus", "data.source", _is_whole, "leave it out: that has its own passages"),
        Rule("data.test", "data.source", _is_whole, "leave it out: that has its own held-out questions"),
        Rule("data.held_out", "data.test", _given("data.test"), "leave either out"),
        Rule("data.held_out", "data.source", _is_folder, "leave it out: the folder says what is held out"),
        Rule("data.mined", "data.negatives", lambda recipe: recipe.data.mined > 0 and recipe.data.negatives == 0),
        Rule(
            "data.negatives",
            "data.mined",
            lambda recipe: recipe.data.negatives > 0 and recipe.data.mined == 0 and _is_whole(recipe),
            "leave it out, or have some mined: this source has none",
            others=("data.source",),
        ),
        Rule("loss.workspace", "loss.backend", lambda recipe: recipe.loss.backend == "dense"),
        _instead("train.sub_batch.query", "train.sub_batch.query_tokens"),
        _instead("train.sub_batch.passage", "train.sub_batch.passage_tokens"),
    ),
}
