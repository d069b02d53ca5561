"""The recipes that ship are valid, and own pictures or texts need one key."""

from pathlib import Path

import pytest
from tiny_runs import write_pictures

from contrastile.train.config import Recipe
from contrastile.train.recipe import load_any_recipe, load_recipe

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))
PICTURES = [path for path in RECIPES if isinstance(load_any_recipe(path), Recipe)]
TEXTS = sorted(set(RECIPES) - set(PICTURES))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    assert load_any_recipe(path).name == path.stem


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_own_texts_need_one_key(path, tmp_path):
    (tmp_path / "pairs.jsonl").write_text("")
    assert load_any_recipe(path, [f"data.source={tmp_path}/pairs.jsonl"]).data.source == f"{tmp_path}/pairs.jsonl"


def test_the_two_dpr_recipes_differ_only_in_their_batch():
    by_name = {path.stem: load_any_recipe(path) for path in TEXTS}
    small, large = by_name["dpr"], by_name["dpr-512"]
    assert (small.train.batch, large.train.batch) == (((0.0, 128),), ((0.0, 512),))
    assert large.model_copy(update={"name": "dpr", "train": small.train}) == small
    assert large.train.model_copy(update={"batch": small.train.batch}) == small.train


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_own_pictures_need_one_key(path, tmp_path):
    write_pictures(tmp_path)
    recipe = load_recipe(path, [f"data.source={tmp_path}/pictures.tsv"])
    assert recipe.data.source == f"{tmp_path}/pictures.tsv"
