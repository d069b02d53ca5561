"""The recipes that ship are valid, and one's own pictures need one key."""

from pathlib import Path

import pytest
from tiny_runs import write_pictures

from contrastile.train.recipe import load_recipe

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_ones_own_pictures_need_one_key(path, tmp_path):
    write_pictures(tmp_path)
    recipe = load_recipe(path, [f"data.source={tmp_path}/pictures.tsv"])
    assert recipe.data.source == f"{tmp_path}/pictures.tsv"
