"""The recipes that ship are valid, and own pictures or texts need one key."""

import re
import shlex
from pathlib import Path

import pytest
from tiny_runs import write_pictures

from contrastile.cli.main import main
from contrastile.train.config import Recipe
from contrastile.train.recipe import RecipeError, load_any_recipe

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))
PICTURES = [path for path in RECIPES if isinstance(load_any_recipe(path, files=False), Recipe)]
TEXTS = sorted(set(RECIPES) - set(PICTURES))
# recipes for one's own data
IMAGES, QUESTIONS = ("clip-vit-l-14", "lit-vit-b-16", "pictures"), ("colbert", "dpr", "dpr-512")
WITHOUT_DATA = (*IMAGES, *QUESTIONS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    assert load_any_recipe(path, files=path.stem not in WITHOUT_DATA).name == path.stem


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_a_recipe_for_own_data_is_refused_without_them(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for verb in ("train", "compare", "doctor"):
        assert main([verb, name]) == 2
        rule = "must be given: data.source=FOLDER of images, or a .tsv, .csv, .tar or .parquet file"
        if name in QUESTIONS:
            rule = "must be given: data.source=FILE of questions and passages, or a BEIR folder"
        assert capsys.readouterr().err == f"{name}: data.source: {rule}\n"
    assert not any(tmp_path.iterdir())
    # no data are opened for a plan
    assert load_any_recipe(name, files=False).data.source == ""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_command_in_a_recipe_can_be_typed(path):
    comment = "".join(line.removeprefix("#") for line in path.read_text().splitlines(True) if line.startswith("#"))
    for command in re.findall(r"contrastile train .+", comment.replace("\\\n", " ")):
        name, *overrides = shlex.split(command)[2:]
        assert name == path.stem
        load_any_recipe(name, overrides, files=False)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_of_the_package_is_known_by_its_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_any_recipe(path.stem, files=False) == load_any_recipe(path, files=False)


def test_a_file_comes_before_the_recipe_of_its_name_and_a_near_name_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glyphs").write_text("[train]\nexamples = 7\n")
    assert load_any_recipe("glyphs").train.examples == 7
    for name in ("glyph", "recipes/glyphs.toml"):
        with pytest.raises(
            RecipeError, match=rf"^{name}: no such file; did you mean glyphs, a recipe of the package\?$"
        ):
            load_any_recipe(name)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_own_texts_need_one_key(path, tmp_path):
    (tmp_path / "pairs.jsonl").write_text("")
    assert load_any_recipe(path, [f"data.source={tmp_path}/pairs.jsonl"]).data.source == f"{tmp_path}/pairs.jsonl"


def test_the_two_dpr_recipes_differ_only_in_their_batch():
    by_name = {path.stem: load_any_recipe(path, files=False) for path in TEXTS}
    small, large = by_name["dpr"], by_name["dpr-512"]
    assert (small.train.batch, large.train.batch) == (((0.0, 128),), ((0.0, 512),))
    assert large.model_copy(update={"name": "dpr", "train": small.train}) == small
    assert large.train.model_copy(update={"batch": small.train.batch}) == small.train


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_own_pictures_need_one_key(path, tmp_path, monkeypatch):
    write_pictures(tmp_path)
    recipe = load_any_recipe(path, [f"data.source={tmp_path}/pictures.tsv"])
    assert recipe.data.source == f"{tmp_path}/pictures.tsv"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_any_recipe(path, ["data.source=~/pictures.tsv"]) == recipe
    joined = load_any_recipe(path, ["data.source=~/x.tsv::~/{a,b}.tar", "data.copies=1"], files=False).data.source
    assert joined == f"{tmp_path}/x.tsv::{tmp_path}/{{a,b}}.tar"
