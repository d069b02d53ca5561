"""What the library transformers says of a recipe's models, asked before any data is opened.

Between `config.py`, which knows what the recipe and a folder tell, and the models, which are built when there is a
tokenizer. A configuration has defaults, and keys that it does not read; no weights are made here.
"""

from __future__ import annotations

from typing import Any

from contrastile._check import wrong
from contrastile.models.pretrained import Library
from contrastile.train.config import Recipe
from contrastile.train.model_settings import TransformersModel
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.settings import ClashError
from contrastile.train.sizes import fit_pictures, fit_texts


def describe_models(recipe: Recipe | RetrieverRecipe) -> None:
    """Raises ValueError where a model of transformers cannot be what its configuration says, or does not fit."""
    sides = ("both", "image", "text") if isinstance(recipe, Recipe) else ("both", "query", "passage")
    complete = {side: _complete(recipe, side) for side in sides}
    model = recipe.model.model_copy(update={side: one for side, one in complete.items() if one is not None})
    try:
        if isinstance(recipe, Recipe):
            fit_pictures(recipe.data, model)
        else:
            fit_texts(model)
    except ClashError as error:
        raise ValueError(f"`{error.key}` {error}. Change it, or the model.") from None


def _complete(recipe: Recipe | RetrieverRecipe, side: str) -> Any:
    """A model of transformers with all that its configuration says; None for other models."""
    model = getattr(recipe.model, side)
    if not isinstance(model, TransformersModel):
        return None
    data: Any = recipe.data
    # what a model of pictures is built for where nothing is told
    told = {"image_size": data.image_size, "num_channels": data.channels} if side == "image" else {}
    config = Library(folder=model.folder, config=model.config).described(**told)
    known = getattr(config, "sub_configs", {})
    if isinstance(recipe, Recipe) and side == "both" and not {"vision_config", "text_config"} <= set(known):
        remedy = "Take a CLIP or a SigLIP, or give the two sides a tower each."
        raise wrong("model.both", "be a model of pictures and texts", config.model_type, remedy)
    return model.model_copy(update={"folder": None, "config": config.to_dict()})
