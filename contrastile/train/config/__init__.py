"""The configuration of a run: a frozen class for each section, with the type, bounds and default of each key.

The first station of a run. `train/recipe.py` reads a TOML file into these classes, and every later station takes its
settings from them. `docs/recipe.md` explains each key. Nothing here loads torch or transformers but `model_probe`.
"""

from contrastile.train.config.image_text import Recipe, TrainSettings
from contrastile.train.config.run import AnyRecipe, SaveSettings, Steps

__all__ = ["AnyRecipe", "Recipe", "SaveSettings", "Steps", "TrainSettings"]
