"""Sizes that do not fit are told before any library is loaded, wherever recipe and config.json tell them."""

import json
import sys

import pytest
import torch
from tiny_runs import tiny_recipe
from tiny_texts import tiny_retriever

from contrastile.data import sources
from contrastile.models import small
from contrastile.models.text import train_tokenizer
from contrastile.train import image_text, settings, sizes
from contrastile.train.image_text import ImageText
from contrastile.train.recipe import RecipeError, load_any_recipe
from contrastile.train.retriever import job
from contrastile.train.retriever.job import Retrieval
from contrastile.train.retriever.run import build_retriever_run

STEPS = "[train]\nexamples = 1000\n"
TEXTS = f"kind = 'retriever'\n{STEPS}"

MISTAKES = {
    "pictures of another size than the tower's": (
        f"{STEPS}[model.image]\nkind = 'transformers'\nconfig = {{model_type = 'vit', image_size = 224}}",
        "data.image_size: must be the 224 pixels of the image tower; got 32",
    ),
    "of a whole model": (
        f"{STEPS}[model.both]\nconfig = {{model_type = 'clip', vision_config = {{image_size = 48}}}}",
        "data.image_size: must be the 48 pixels of the image tower; got 32",
    ),
    "a patch above the picture": (
        f"{STEPS}[model.image]\nkind = 'transformers'\nconfig = {{model_type = 'vit', patch_size = 64}}",
        "data.image_size: must be at least a patch of the image tower, 64 pixels; got 32",
    ),
    "colours for a tower of grey": (
        f"{STEPS}[data]\nchannels = 3\n[model.image]\nkind = 'transformers'\n"
        "config = {model_type = 'vit', num_channels = 1}",
        "data.channels: must be at most the 1 of the image tower; got 3",
    ),
    "titles longer than the tower reads": (
        f"{STEPS}[model.both]\nconfig = {{model_type = 'clip', text_config = {{max_position_embeddings = 12}}}}",
        "model.tokenizer.length: must be at most the 12 tokens of the text tower; got 16",
    ),
    "passages longer than the folder's encoder reads": (
        f"{TEXTS}[model.both]\nkind = 'transformers'\nfolder = 'm'\n[model.tokenizer]\nfolder = 'm'",
        "model.tokenizer.length: must be at most the 40 tokens of the text tower; got 256",
    ),
    "layers of a tower without any": (
        f"{STEPS}[model]\nlocked = ['text']\nunlocked = {{text = 1}}",
        'model.unlocked.text: must be left out for a tower of kind "words", which has no layers to tell apart',
    ),
    "checkpoints in a tower without any": (
        f"{STEPS}[model]\ncheckpointing = ['image']",
        'model.checkpointing: must name towers that have it; got "image", of kind "conv"',
    ),
    "checkpoints in a tower that does not learn": (
        f"{STEPS}[model]\nlocked = ['image']\ncheckpointing = ['image']\n"
        "image = {kind = 'transformers', config = {model_type = 'vit'}}",
        'model.checkpointing: must name towers that learn; got "image", which model.locked has',
    ),
    "more dimensions than the demo's encoder has": (
        f"{TEXTS}[model]\ndimensions = [64, 512]",
        "model.dimensions: must be at most the 256 features there are; got 512",
    ),
    "than the encoder of words": (
        f"{TEXTS}[model]\ndimensions = [33]\nboth = {{kind = 'words', width = 16}}",
        "model.dimensions: must be at most the 32 features there are; got 33",
    ),
    "than the projection": (
        f"{TEXTS}[model]\ndimensions = [64]\nfeatures = 48",
        "model.dimensions: must be at most the 48 features there are; got 64",
    ),
    "than a configuration": (
        f"{TEXTS}[model]\ndimensions = [64]\n"
        "both = {kind = 'transformers', config = {model_type = 't5', d_model = 8}}",
        "model.dimensions: must be at most the 8 features there are; got 64",
    ),
    "than a folder": (
        f"{TEXTS}[model]\ndimensions = [64]\nboth = {{kind = 'transformers', folder = 'm'}}\n"
        "tokenizer = {folder = 'm', length = 40, query_length = 9}",
        "model.dimensions: must be at most the 24 features there are; got 64",
    ),
    "encoders of unequal sizes": (
        f"{TEXTS}[model]\nquery = {{kind = 'bag', width = 8}}\npassage = {{kind = 'words', width = 8}}",
        "model.features: must be given for encoders of unequal sizes; got 8 and 16",
    ),
    "fewer tokens than one question has": (
        f"{TEXTS}sub_batch = {{query_tokens = 8}}",
        "train.sub_batch.query_tokens: must be at least model.tokenizer.query_length, the tokens of one text; "
        "got 8 and 64",
    ),
    "fewer tokens than one passage has": (
        f"{TEXTS}sub_batch = {{passage_tokens = 8}}",
        "train.sub_batch.passage_tokens: must be at least model.tokenizer.length, the tokens of one text; "
        "got 8 and 256",
    ),
    "one pair": (f"{STEPS}batch = 1", "train.batch: must be at least 2: one pair has no negatives; got 1"),
    "a rate of one pixel's mean for texts": (
        f"{STEPS}[model.text]\nkind = 'transformers'\nconfig = {{model_type = 'bert'}}\nmean = [0.5]",
        "model.text.mean: unknown key (did you mean model.image.mean?)",
    ),
    "a package that is not there": (
        f"{TEXTS}[data]\npackages = ['numpy', 'nonesuch']",
        'data.packages: must be installed packages; got "nonesuch"',
    ),
    "a folder that is none of BEIR's": (
        f"{TEXTS}[data]\nsource = 'm'",
        "data.source: must be a folder in BEIR's format, with corpus.jsonl, queries.jsonl, qrels/*.tsv; "
        '"m" has no corpus.jsonl',
    ),
    "a folder of tests": (
        f"{TEXTS}[data]\nsource = 'x.toml'\ntest = 'm'",
        'data.test: must be a file of questions; got the folder "m"',
    ),
    "classes without folders": (
        f"{STEPS}[[evaluate.zero_shot]]\nfolder = 'm'",
        'evaluate.zero_shot.0: must have a folder with a sub-folder for each class; "m" has none',
    ),
    "a split of a table": (
        f"{STEPS}[[evaluate.retrieval]]\ncaptions = 'x.toml'\nsplit = 'test'",
        'evaluate.retrieval.0.split: must be left out with a table: only Karpathy\'s JSON has splits; got "test"',
    ),
    "a table of other columns": (
        f"{STEPS}[data]\nsource = 'other.tsv'",
        "data.source: must have the columns filepath and title in the first line, between tabs; "
        'got ["file", "caption"]',
    ),
    "among several": (
        f"{STEPS}[data]\nsource = 'm::other.tsv'",
        "data.source: must have the columns filepath and title in the first line, between tabs; "
        'got ["file", "caption"]',
    ),
    "a bound with its commas": (
        f"{TEXTS}[loss]\nworkspace = 10",
        "loss.workspace: must be at least 1,048,576; got 10",
    ),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    (tmp_path / "m").mkdir()
    described = {"model_type": "bert", "hidden_size": 24, "max_position_embeddings": 40}
    (tmp_path / "m/config.json").write_text(json.dumps(described))
    (tmp_path / "m/tokenizer.json").write_text("{}")
    (tmp_path / "other.tsv").write_text("file\tcaption\r\nx\ty\r\n")
    return tmp_path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_size_that_does_not_fit_is_one_line(here, mistake):
    text, line = MISTAKES[mistake]
    (here / "x.toml").write_text(text + "\n")
    with pytest.raises(RecipeError) as caught:
        load_any_recipe("x.toml")
    assert str(caught.value) == f"x.toml: {line}"


def test_sizes_that_fit_are_taken_and_those_untold_are_left_to_the_library(here):
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


def test_a_width_that_nobody_told_is_looked_at_before_the_first_step(tmp_path):
    recipe = tiny_retriever(tmp_path)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dimensions": (17,)})})
    tokenizer = train_tokenizer(["a text"], kind="words", length=4)
    with pytest.raises(ValueError) as caught:
        build_retriever_run(recipe, tokenizer)
    assert str(caught.value) == "`model.dimensions` must be at most the 16 features there are; got 17. Leave it out."


def test_a_device_that_is_not_there_is_told_before_data_is_opened(tmp_path, monkeypatch):
    from tiny_runs import tiny_recipe

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(image_text, "open_materials", None)
    monkeypatch.setattr(job, "open_text_materials", None)
    for opened, recipe in ((ImageText, tiny_recipe(tmp_path)), (Retrieval, tiny_retriever(tmp_path))):
        with pytest.raises(ValueError, match="`device` must be on this machine; got "):
            opened.open(recipe.model_copy(update={"device": "cuda"}))


def test_a_model_of_texts_for_pictures_has_its_sentence(tmp_path):
    pytest.importorskip("transformers")
    from contrastile.models.pretrained import Library, image_tower

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with pytest.raises(ValueError, match=r"^`image` must be a model of pictures; got BertModel \(You must specify"):
        image_tower(Library(config={"model_type": "bert", "vocab_size": 9, **small}), image_size=8, channels=1)


TOO_LARGE = {
    "pictures": (
        f"{STEPS}[model.image]\nwidth = 1000000",
        "model.image.width",
        "1000000, for 1,408,159.7 GiB at",
    ),
    "texts": (f"{STEPS}[model.text]\nwidth = 1000000", "model.text.width", "1000000, for 11,175.9 GiB at least"),
    "features": (f"{STEPS}[model]\nfeatures = 1048576", "model.features", "1048576, for 8.0 GiB at least"),
    "a retriever's": (f"{TEXTS}[model.passage]\nwidth = 600000\n[model.query]", "model.passage.width", "600000, for "),
    "its features": (f"{TEXTS}[model]\nfeatures = 1048576\nboth = {{width = 9000}}", "model.features", "1048576, for "),
}


@pytest.mark.parametrize("mistake", TOO_LARGE)
def test_a_model_that_no_memory_can_hold_is_one_line(tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(sizes, "host_memory", lambda: 8 * 2**30 - 1)
    text, key, got = TOO_LARGE[mistake]
    (tmp_path / "x.toml").write_text(text + "\n")
    with pytest.raises(RecipeError) as caught:
        load_any_recipe(tmp_path / "x.toml")
    told = f"{tmp_path}/x.toml: {key}: must make weights that fit into the 8.0 GiB of this machine; got {got}"
    assert str(caught.value).startswith(told)
    # a run that was made elsewhere can still be read
    assert load_any_recipe(tmp_path / "x.toml", files=False).name == "x"


def test_weights_are_counted_as_the_towers_have_them():
    made = {
        "conv": small.ConvTower(channels=1, width=96),
        "words": small.WordsTower(vocabulary=8, length=2, width=96),
        "bag": small.BagTower(vocabulary=8, width=96),
    }
    assert made.keys() == sizes.GROWTH.keys()
    for kind, (squares, outputs) in sizes.GROWTH.items():
        assert squares * 96**2 <= sum(x.numel() for x in made[kind].parameters()) <= 1.1 * squares * 96**2
        assert made[kind].features == outputs * 96


TRANSFORMERS = {
    "pictures of another size than a model has by default": (
        "model.both={config={model_type='clip'}}",
        "`data.image_size` must be the 224 pixels of the image tower; got 16. Change it, or the model.",
    ),
    "one model for both that has one side": (
        "model.both={config={model_type='bert'}}",
        "`model.both` must be a model of pictures and texts; got bert. "
        "Take a CLIP or a SigLIP, or give the two sides a tower each.",
    ),
    "a key that the model does not read": (
        "model.image={kind='transformers', config={model_type='vit', hiden_size=8}}",
        "`config` must have keys that a vit reads; got hiden_size. Did you mean hidden_size?",
    ),
}


@pytest.mark.parametrize("mistake", TRANSFORMERS)
def test_what_the_library_knows_of_a_model_is_told_before_data_is_opened(tmp_path, monkeypatch, mistake):
    pytest.importorskip("transformers")
    override, line = TRANSFORMERS[mistake]
    monkeypatch.setattr(image_text, "open_materials", None)
    with pytest.raises(ValueError) as caught:
        ImageText.open(tiny_recipe(tmp_path, override))
    assert str(caught.value) == line


def test_a_retrievers_likewise(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(job, "open_text_materials", None)
    model = "model.both={kind='transformers', config={model_type='bert'}}"
    for word, line in {
        "model.dimensions=[769]": "`model.dimensions` must be at most the 768 features there are; got 769.",
        "model.tokenizer.length=513": "`model.tokenizer.length` must be at most the 512 tokens of the text tower; "
        "got 513.",
    }.items():
        with pytest.raises(ValueError) as caught:
            Retrieval.open(tiny_retriever(tmp_path, model, word))
        assert str(caught.value) == f"{line} Change it, or the model."


def test_a_table_that_cannot_be_read_is_one_line(here, monkeypatch):
    (here / "x.toml").write_text(f"{STEPS}[data]\nsource = 'other.tsv'\n")

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources, "open", refused, raising=False)
    with pytest.raises(RecipeError) as caught:
        load_any_recipe("x.toml")
    said = 'data.source: must be a table that can be read; got "other.tsv" (Permission denied)'
    assert str(caught.value) == f"x.toml: {said}"


PACKAGES = {
    "adapters": (
        f"{TEXTS}[model]\nboth = {{kind = 'transformers', config = {{model_type = 'bert'}}}}\nlora = {{rank = 2}}",
        "peft",
        "model.lora: needs the package peft, which is not installed; run: pip install peft",
    ),
    "texts in parquet": (
        f"{TEXTS}[data]\nsource = 'q.parquet'",
        "pyarrow",
        'data.source: needs the package pyarrow, which is not installed; run: pip install "contrastile[data]"',
    ),
    "a collection in parquet": (
        f"{STEPS}[data]\nsource = 'q.parquet'",
        "pyarrow",
        'data.source: needs the package pyarrow, which is not installed; run: pip install "contrastile[data]"',
    ),
}


@pytest.mark.parametrize("asked", PACKAGES)
def test_a_package_that_comes_late_is_missed_at_once(here, monkeypatch, asked):
    text, package, line = PACKAGES[asked]
    (here / "q.parquet").write_bytes(b"")
    (here / "x.toml").write_text(f"{text}\n" + "[evaluate]\nbm25 = false\n" * ("retriever" in text))
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(RecipeError) as caught:
        load_any_recipe("x.toml")
    assert str(caught.value) == f"x.toml: {line}"


def test_answers_need_their_package_before_the_first_step(tmp_path, monkeypatch):
    recipe = tiny_retriever(tmp_path)
    monkeypatch.setattr(job, "find_spec", lambda name: object())
    Retrieval.open(recipe)
    monkeypatch.setattr(job, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as caught:
        Retrieval.open(recipe)
    assert str(caught.value) == (
        "`evaluate.match` must have the package regex to look for answers; got none. "
        'Run: pip install "contrastile[search]"'
    )
