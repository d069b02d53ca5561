"""Models of transformers, as the library itself describes them, compared with the rest of a recipe.

Part of the configuration, and its only file that loads transformers: `train/recipe.py` calls it last, for a recipe
that is right in every other way. The library's configuration class fills in defaults and shows which keys it read; no
weights are made, and no data are opened.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from contrastile.models.pretrained import Library
from contrastile.models.remote_code import read_table
from contrastile.train.config.base import ClashError
from contrastile.train.config.image_text import Recipe
from contrastile.train.config.sizes import check_image_text, check_retriever
from contrastile.train.config.towers import TransformersModel
from contrastile.train.retriever.config import RetrieverRecipe


def probe_models(recipe: Recipe | RetrieverRecipe) -> None:
    """Raise `ClashError` where a model of transformers cannot be what its configuration says, or does not fit."""
    complete = {side: _complete(recipe, side) for side, tower in recipe.model if isinstance(tower, TransformersModel)}
    model = recipe.model.model_copy(update=complete)
    if isinstance(recipe, Recipe):
        check_image_text(recipe.data, model)
    else:
        check_retriever(model)


def _complete(recipe: Recipe | RetrieverRecipe, side: str) -> TransformersModel:
    """A model with all that its configuration says, defaults included."""
    tower: TransformersModel = getattr(recipe.model, side)
    _check_type(tower, side)
    # the pictures' size and channels complete a configuration that does not name them
    defaults: dict[str, Any] = {}
    if isinstance(recipe, Recipe) and side == "image":
        defaults = {"image_size": recipe.data.image_size, "num_channels": recipe.data.channels}
    try:
        config = Library(folder=tower.folder, config=tower.config).described(**defaults)
    except ValueError as failure:
        key, _, reason = str(failure).removeprefix("`").partition("` ")
        raise ClashError(f"model.{side}.{key}", reason) from failure
    if isinstance(recipe, Recipe) and side == "both" and not {"vision_config", "text_config"} <= {*config.sub_configs}:
        remedy = "Take a CLIP or a SigLIP, or give the two sides a tower each."
        raise ClashError("model.both", f"must be a model of pictures and texts; got {config.model_type}. {remedy}")
    return tower.model_copy(update={"folder": None, "config": config.to_dict()})


def _check_type(tower: TransformersModel, side: str) -> None:
    from transformers import CONFIG_MAPPING

    key = "config" if tower.folder is None else "folder"
    config: Any = tower.config if tower.folder is None else read_table(Path(tower.folder) / "config.json")
    if (kind := str(config["model_type"])) not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, CONFIG_MAPPING.keys(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        rule = "must have a model_type that transformers knows"
        raise ClashError(f"model.{side}.{key}", f'{rule}; got "{kind}"{hint}')
