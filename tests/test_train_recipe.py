"""Recipes: overrides over a TOML file, and recipes that are written and read back."""

import runpy
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
import tomli_w
from refusals import refusal

from contrastile.train.recipe import RecipeError, load_any_recipe, to_toml

RECIPE = """
[train]
examples = 1000
batch = [[0.0, 256], [0.5, 4096]]
"""

HINT = "not a recipe; a recipe is a TOML file that names its data: contrastile train RECIPE data.source=mine.tsv"


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(RECIPE)
    return "x.toml"


def complaint(*overrides, path="x.toml"):
    return refusal(load_any_recipe, path, overrides)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.toml", None, "no such file; contrastile --help lists the recipes of the package"),
        ("mine.tsv", "", HINT.replace("not a recipe", "is a folder")),
        ("bytes.toml", b"\xff\xfe", "not a text in UTF-8"),
        ("mine.tsv", b"filepath\ttitle\n", HINT),
        ("mine.tsv", b"\xff\xd8", HINT),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(tmp_path, monkeypatch, name, content, sentence):
    monkeypatch.chdir(tmp_path)
    if content == "":
        Path(name).mkdir()
    elif content is not None:
        Path(name).write_bytes(content)
    assert complaint(path=name) == f"{name}: {sentence}"


def test_a_run_in_place_of_its_recipe_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/recipe.toml").touch()
    assert complaint(path="runs") == "runs: is a folder; the recipe of this run is runs/recipe.toml"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optim.learning_rte=1e-3", "optim.learning_rte: unknown key (did you mean optim.learning_rate?)"),
        ("optim.learning_rate=abc", 'optim.learning_rate: must be a number; got "abc"'),
        ("train.examples.x=3", "train.examples: has no keys of its own"),
        ("train.batch=[[0.0, 8]", "not a TOML value; a text that begins like one needs quotes within: '\"...\"'"),
        ("seed", "an override is written key=value, as in optim.learning_rate=1e-3"),
        ("=3", "an override is written key=value, as in optim.learning_rate=1e-3"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(recipe_file, override, sentence):
    assert complaint(override) == f"{override}: {sentence}"


@pytest.mark.parametrize(
    ("key", "known"),
    [
        *[("train.batch_size", "train.batch"), ("train.micro_batch_size", "train.sub_batch")],
        *[("train.mini_batch_size", "train.sub_batch"), ("train.accum_freq", "train.accumulate")],
        *[("train.gradient_accumulation_steps", "train.accumulate"), ("train.max_epochs", "train.epochs")],
        *[("model.embed_dim", "model.features"), ("data.path", "data.source"), ("data.src", "data.source")],
        # of sections with a kind, none of which has the key
        *[("loss.temperature", "loss.scale"), ("optim.lr", "optim.learning_rate"), ("optim.wd", "optim.weight_decay")],
    ],
)
def test_the_name_of_another_library_in_the_right_section_leads_to_the_key(recipe_file, key, known):
    line = f"{key}: unknown key (did you mean {known}?)"
    section, _, name = key.partition(".")
    for kind in ("image-text", "retriever"):
        assert refusal(load_any_recipe, recipe_file, [f"kind={kind}", f"{key}=3"]) == f"{key}=3: {line}"
        tables = {"kind": kind, **tomllib.loads(RECIPE)}
        tables[section] = {**tables.get(section, {}), name: 3}
        Path("y.toml").write_text(tomli_w.dumps(tables))
        assert refusal(load_any_recipe, "y.toml") == f"y.toml: {line}"


def test_an_override_takes_the_place_of_what_it_excludes(recipe_file):
    train = load_any_recipe(recipe_file, ["train.epochs=2.0"]).train
    assert (train.examples, train.epochs) == (None, 2.0)
    assert complaint("train.epochs=2.0", "train.examples=9") == (
        "train.epochs=2.0: train: must have either examples or epochs, and not both"
    )


@pytest.mark.parametrize("told", ["warmup_steps = 3", "warmup_epochs = 0.1"])
def test_a_share_takes_the_place_of_steps_that_warm_up(tmp_path, told):
    path = tmp_path / "x.toml"
    path.write_text(f"[train]\nepochs = 1.0\n[optim]\n{told}\n")
    optim = load_any_recipe(path, ["optim.warmup=0.25"]).optim
    assert (optim.warmup, optim.warmup_steps, optim.warmup_epochs) == (0.25, None, None)


def test_a_model_for_both_takes_the_place_of_two_towers(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(
        "[data]\nimage_size = 224\n[model.image]\nkind = 'conv'\n[model.text]\nkind = 'words'\n[train]\nepochs = 1.0\n"
    )
    both = "model.both={kind='transformers', config={model_type='clip'}}"
    model = load_any_recipe(path, [both]).model
    assert (model.image, model.text, model.both.config) == (None, None, {"model_type": "clip"})
    with pytest.raises(RecipeError, match="model: must have either both or image and text"):
        load_any_recipe(path, [both, "model.text={kind='words'}"])


def test_two_encoders_take_the_place_of_one(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("kind = 'retriever'\n[model.both]\nwidth = 8\n[train]\nepochs = 1.0\n")
    sides = ["model.query={kind='bag', width=4}", "model.passage={kind='bag', width=4}"]
    model = load_any_recipe(path, sides).model
    assert (model.both, model.query.width, model.passage.width) == (None, 4, 4)
    with pytest.raises(RecipeError, match="model: must have query and passage; got query alone"):
        load_any_recipe(path, sides[:1])
    with pytest.raises(RecipeError, match="model: must have either both or query and passage"):
        load_any_recipe(path, [*sides, "model.both.width=9"])


def test_weights_of_a_folder_need_its_tokenizer(recipe_file, tmp_path):
    (tmp_path / "bert").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "bert" / name).write_text('{"model_type": "bert"}')
    encoder = f"{{kind='transformers', folder='{tmp_path}/bert'}}"
    for kind, key in (("image-text", "text"), ("retriever", "both")):
        given = [f"kind={kind}", f"model.{key}={encoder}"]
        assert refusal(load_any_recipe, recipe_file, given).endswith(
            f'model.tokenizer.folder: must be given with the text encoder in "{tmp_path}/bert": '
            "its weights know its own tokens"
        )
        known = load_any_recipe(recipe_file, [*given, f"model.tokenizer.folder={tmp_path}/bert"])
        assert known.model.tokenizer.folder == f"{tmp_path}/bert"


def test_a_line_break_in_an_override_stays_one_line(recipe_file):
    assert "\n" not in complaint("name=a\nb")


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ([], "name", "x"),
        (["train.batch=[[0.0, 8]]"], "train.batch", ((0.0, 8),)),
        (["train.batch=64"], "train.batch", ((0.0, 64),)),
        (["train.sub_batch=64"], "train.sub_batch.image", 64),
        (["train.sub_batch=64"], "train.sub_batch.text", 64),
        (["data.augment=false"], "data.augment", False),
        (["optim.learning_rate=1e-2"], "optim.learning_rate", 0.01),
        (["loss.kind=siglip"], "loss.bias", -10.0),
        (["loss.kind=dcl", "loss.sigma=0.5"], "loss.sigma", 0.5),
        (["seed=1", "seed=2"], "seed", 2),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_word(recipe_file, overrides, key, value):
    assert attrgetter(key)(load_any_recipe(recipe_file, overrides)) == value


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["loss.kind=siglip", "optim.kind=adafactor", "train.minutes=0.1"],
        [
            # configurations that the library wrote hold keys of other models
            "model.image={kind='transformers', config={model_type='vit', transformers_version='4', "
            "'odd key'=[1, 2.5], t={a=\"\\u007f\"}}}"
        ],
        ["optim.eps=1e-30", "optim.learning_rate=0.1234567890123456789"],
        ['evaluate.prompts=["{}", "ein Zeichen namens \\"{}\\" \U0001f1e6é"]'],
        ["kind=retriever", "train.sub_batch=8", "model.dimensions=[8, 16]", "data.query_prefix=' a: '"],
        [
            "kind=retriever",
            "model={query={kind='words'}, passage={kind='transformers', config={model_type='bert'}}, features=3}",
        ],
        [
            "kind=retriever",
            "model={both={kind='transformers', config={model_type='bert'}, pooling='last'}, lora={rank=3}}",
        ],
    ],
)
def test_a_written_recipe_reads_back_the_same(recipe_file, tmp_path, overrides):
    recipe = load_any_recipe(recipe_file, overrides)
    (tmp_path / "resolved.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_any_recipe(tmp_path / "resolved.toml", files=False) == recipe


def test_a_written_recipe_holds_every_default(recipe_file):
    tables = tomllib.loads(to_toml(load_any_recipe(recipe_file)))
    assert tables["optim"]["learning_rate"] == 1e-3
    assert tables["train"]["sub_batch"] == {"image": 256, "text": 256}


def test_a_recipe_reads_back_where_its_files_are_gone(recipe_file, tmp_path):
    (tmp_path / "mine.tsv").write_text("filepath\ttitle\n")
    text = to_toml(load_any_recipe(recipe_file, ["data.source=mine.tsv"]))
    (tmp_path / "mine.tsv").unlink()
    (tmp_path / "resolved.toml").write_text(text)
    assert load_any_recipe("resolved.toml", files=False).data.source == "mine.tsv"


def test_the_recipe_of_the_loading_benchmark_is_valid(tmp_path):
    loading = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "loading.py"))
    (tmp_path / "a.tar").touch()
    recipe = load_any_recipe(loading["RECIPE"], loading["training_words"](tmp_path / "a.tar", tmp_path))
    assert recipe.train.batch == ((0.0, 1024),)
    assert recipe.model.both.config["vision_config"] == {"patch_size": 16}
