"""The configuration of a run: a frozen class for each section, with the type, bounds and default of each key.

`train/recipe.py` reads a TOML file into these classes; `docs/recipe.md` explains each key. Torch is not loaded.
"""

from contrastile.train.config.base import AnyRecipe, SaveSettings, Steps
from contrastile.train.config.image_text import Recipe, TrainSettings

__all__ = ["AnyRecipe", "Recipe", "SaveSettings", "Steps", "TrainSettings"]
