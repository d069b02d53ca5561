"""The configuration of a run: a frozen class for each section, with the type, bounds and default of each key.

The first station of a run. `train/recipe.py` reads a TOML file into these classes, and every later station takes its
settings from them. `docs/recipe.md` explains each key. Torch is not loaded, and transformers only by `sizes`.
"""

from contrastile.train.config.base import AnyRecipe, SaveSettings, Steps
from contrastile.train.config.image_text import Recipe, TrainSettings

__all__ = ["AnyRecipe", "Recipe", "SaveSettings", "Steps", "TrainSettings"]
