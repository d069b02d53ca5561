"""Sizes that do not fit are refused before any library is loaded, if the recipe or a config.json has them."""

import json
from types import SimpleNamespace

import pytest
import torch
from refusals import refusal
from tiny_runs import tiny_recipe
from tiny_texts import tiny_retriever

from contrastile.models import small
from contrastile.models.text import train_tokenizer
from contrastile.train import image_text
from contrastile.train.config import base, towers
from contrastile.train.image_text import ImageText
from contrastile.train.recipe import RecipeError, load_any_recipe
from contrastile.train.retriever import job
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import RetrieverRun

STEPS = "[train]\nexamples = 1000\n"
TEXTS = f"kind = 'retriever'\n{STEPS}"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    described = {"model_type": "bert", "hidden_size": 24, "max_position_embeddings": 40}
    (tmp_path / "m/config.json").write_text(json.dumps(described))
    (tmp_path / "m/tokenizer.json").write_text("{}")
    (tmp_path / "m/model.safetensors").write_text("")
    (tmp_path / "other.tsv").write_text("image\tcaption\r\nx\ty\r\n")
    return tmp_path


def test_sizes_that_fit_or_are_unknown_are_accepted(here):
    (here / "x.toml").write_text(
        f"{TEXTS}[model]\ndimensions = [24]\nboth = {{kind = 'transformers', folder = 'm'}}\n"
        "tokenizer = {folder = 'm', length = 40, query_length = 40}\n"
    )
    assert load_any_recipe("x.toml").model.dimensions == (24,)
    (here / "x.toml").write_text(
        f"{TEXTS}[model]\ndimensions = [999]\nboth = {{kind = 'transformers', config = {{model_type = 'opt', "
        "hidden_size = 8, word_embed_proj_dim = 4}}\n"
    )
    assert load_any_recipe("x.toml").model.dimensions == (999,)


def test_dimensions_above_the_width_are_refused_when_the_model_is_built(tmp_path):
    recipe = tiny_retriever(tmp_path)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dimensions": (17,)})})
    tokenizer = train_tokenizer(["a text"], kind="words", length=4)
    assert refusal(RetrieverRun.untrained, recipe, tokenizer) == (
        "`model.dimensions` must be at most the 16 features there are; got 17. Leave it out."
    )


def test_a_missing_device_is_refused_before_data_is_opened(tmp_path, monkeypatch):

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(image_text, "open_data_bundle", None)
    monkeypatch.setattr(job, "open_text_materials", None)
    for opened, recipe in ((ImageText, tiny_recipe(tmp_path)), (RetrieverJob, tiny_retriever(tmp_path))):
        with pytest.raises(ValueError, match="`device` must be on this machine; got "):
            opened.open(recipe.model_copy(update={"device": "cuda"}))


def test_a_text_model_for_pictures_is_refused(tmp_path):
    pytest.importorskip("transformers")
    from contrastile.models.pretrained import Library, image_tower

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with pytest.raises(ValueError, match=r"^`image` must be a model of images; got BertModel \(You must specify"):
        image_tower(Library(config={"model_type": "bert", "vocab_size": 9, **small}), image_size=8, channels=1)


TOO_LARGE = {
    "pictures": (f"{STEPS}[model.image]\nwidth = 1000000", "model.image.width", "1000000, for 1,408,159.7 GiB at"),
    "texts": (f"{STEPS}[model.text]\nwidth = 1000000", "model.text.width", "1000000, for 11,175.9 GiB at least"),
    "features": (f"{STEPS}[model]\nfeatures = 1048576", "model.features", "1048576, for 8.0 GiB at least"),
    "a retriever's": (f"{TEXTS}[model.passage]\nwidth = 600000\n[model.query]", "model.passage.width", "600000, for "),
    "its features": (f"{TEXTS}[model]\nfeatures = 1048576\nboth = {{width = 9000}}", "model.features", "1048576, for "),
}


@pytest.mark.parametrize("mistake", TOO_LARGE)
def test_a_model_larger_than_memory_is_one_line(tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(towers, "host_memory", lambda: 8 * 2**30 - 1)
    text, key, got = TOO_LARGE[mistake]
    (tmp_path / "x.toml").write_text(text + "\n")
    with pytest.raises(RecipeError) as caught:
        load_any_recipe(tmp_path / "x.toml")
    told = f"{tmp_path}/x.toml: {key}: must make weights that fit into the 8.0 GiB of this machine; got {got}"
    assert str(caught.value).startswith(told)
    # a run that was made elsewhere can still be read
    assert load_any_recipe(tmp_path / "x.toml", files=False).name == "x"


def test_the_estimate_of_weights_matches_the_towers():
    made = {
        "conv": small.ConvTower(channels=1, width=96),
        "words": small.WordsTower(vocabulary=8, length=2, width=96),
        "bag": small.BagTower(vocabulary=8, width=96),
    }
    assert made.keys() == towers.GROWTH.keys()
    for kind, (squares, outputs) in towers.GROWTH.items():
        assert squares * 96**2 <= sum(x.numel() for x in made[kind].parameters()) <= 1.1 * squares * 96**2
        assert made[kind].features == outputs * 96


def test_columns_of_a_table_may_have_any_of_their_names(here):
    (here / "x.toml").write_text(f"{STEPS}[data]\nsource = 'other.tsv'\n")
    assert load_any_recipe("x.toml").data.source == "other.tsv"


PACKAGES = {
    "adapters": (
        f"{TEXTS}[model]\nboth = {{kind = 'transformers', config = {{model_type = 'bert'}}}}\nlora = {{rank = 2}}",
        "peft",
        "model.lora: needs the package peft, which is not installed; run: pip install peft",
    ),
    "texts in parquet": (
        f"{TEXTS}[data]\nsource = 'q.parquet'",
        "pyarrow",
        "data.source: needs the package pyarrow, which is not installed; run: pip install '.[data]'",
    ),
    "negatives by BM25": (
        f"{TEXTS}[data]\nmined = 1",
        "bm25s",
        "data.mined: needs the package bm25s, which is not installed; run: pip install '.[search]'",
    ),
    "results of BM25": (
        TEXTS,
        "bm25s",
        "evaluate.bm25: needs the package bm25s, which is not installed; run: pip install '.[search]'",
    ),
    "a collection in parquet": (
        f"{STEPS}[data]\nsource = 'q.parquet'",
        "pyarrow",
        "data.source: needs the package pyarrow, which is not installed; run: pip install '.[data]'",
    ),
}


@pytest.mark.parametrize("asked", PACKAGES)
def test_a_package_that_is_used_late_is_missed_at_once(here, monkeypatch, asked):
    text, package, line = PACKAGES[asked]
    (here / "q.parquet").write_bytes(b"")
    without = "retriever" in text and package != "bm25s"
    (here / "x.toml").write_text(f"{text}\n" + "[evaluate]\nbm25 = false\n" * without)
    monkeypatch.setattr(base, "find_spec", lambda name: None if name == package else SimpleNamespace(origin=None))
    assert refusal(load_any_recipe, "x.toml") == f"x.toml: {line}"
    if package == "bm25s":
        assert load_any_recipe("x.toml", ["data.mined=0", "evaluate.bm25=false"]).data.mined == 0


def test_answers_need_their_package_before_the_first_step(tmp_path, monkeypatch):
    recipe = tiny_retriever(tmp_path)
    monkeypatch.setattr(job, "find_spec", lambda name: object())
    RetrieverJob.open(recipe)
    monkeypatch.setattr(job, "find_spec", lambda name: None)
    assert refusal(RetrieverJob.open, recipe) == (
        "`evaluate.match` must have the package regex to look for answers; got none. Run: pip install '.[search]'"
    )
