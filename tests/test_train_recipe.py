"""Recipes: every mistake is one line with its origin, key and reason; what is written reads back the same."""

import runpy
import tomllib
from pathlib import Path

import pytest

from contrastile.train.recipe import RecipeError, known_keys, load_any_recipe, load_recipe, to_toml

RECIPE = """
[train]
examples = 1000
batch = [[0.0, 256], [0.5, 4096]]
"""


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(RECIPE)
    return "x.toml"


def complaint(*overrides, path="x.toml"):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("[optim]\nlearning_rte = 1.0", "optim.learning_rte: unknown key (did you mean optim.learning_rate?)"),
        ("[optim]\nlearning_rate = 'fast'", 'optim.learning_rate: must be a number; got "fast"'),
        ("[optim]\nlearning_rate = 0.0", "optim.learning_rate: must be greater than 0; got 0.0"),
        ("[optim]\nlearning_rate = nan", "optim.learning_rate: must be a finite number; got NaN"),
        ("[optim]\nwarmup = 1.0", "optim.warmup: must be less than 1; got 1.0"),
        ("[optim]\nfinal = 1.5", "optim.final: must be at most 1; got 1.5"),
        ("[optim]\nkind = 'sgd'", "optim.kind: must be one of 'adamw', 'adafactor', 'muon'; got \"sgd\""),
        ("[optim]\nkind = 'adafactor'\neps = 1e-8", "optim.eps: unknown key with this kind"),
        ("[optim]\nbetas = [0.9]", "optim.betas.1: missing"),
        ("[optim]\nbetas = 0.9", "optim.betas: must be a list; got 0.9"),
        ("[loss]\nkind = 'siglip'\nlabel_smoothing = 0.1", "loss.label_smoothing: unknown key with this kind"),
        ("[loss]\nbias = -10.0", "loss.bias: unknown key with this kind"),
        ("[loss]\nscale = 101.0", "loss.scale: must be at most 100; got 101.0"),
        ("[data]\nimage_size = 4", "data.image_size: must be at least 8; got 4"),
        ("[data]\nimage_size = 32.0", "data.image_size: must be a whole number; got 32.0"),
        ("[data]\nchannels = 2", "data.channels: must be 1 or 3; got 2"),
        ("[data]\naugment = 1", "data.augment: must be true or false; got 1"),
        ("[data]\nsource = 3", "data.source: must be a text in quotes; got 3"),
        (
            "[data]\nsource = 'mnist'",
            'data.source: must be "glyphs", a .tsv, .csv, .tar or .parquet file, or a folder; got "mnist"',
        ),
        ("[data]\nsource = 'mine.tsv'", 'data.source: no such file "mine.tsv"'),
        ("[model.image]\nkind = 'transformers'", "model.image: must have either folder or config, and not both"),
        (
            "[model.image]\nkind = 'transformers'\nfolder = 'vit'",
            'model.image.folder: must be a folder with a config.json; got "vit"',
        ),
        (
            "[evaluate]\nprompts = ['a glyph']",
            "evaluate.prompts: must be texts with one {} each, the place of the name",
        ),
        ("[trian]\nexamples = 3", "trian: unknown key (did you mean train?)"),
        ("learning_rate = 1.0", "learning_rate: unknown key (did you mean optim.learning_rate?)"),
        ("lr = 1.0", "lr: unknown key (did you mean optim.learning_rate?)"),
        ("batch_size = 8", "batch_size: unknown key (did you mean train.batch?)"),
        ("zzz = 1.0", "zzz: unknown key"),
        ("seed = -1", "seed: must be at least 0; got -1"),
        ("device = 'tpu'", 'device: must be "auto", "cpu", "cuda" or "cuda:1"; got "tpu"'),
        ("name = '../up'", 'name: must be a folder name of letters, digits, ".", "_" and "-"; got "../up"'),
        ("model = 3", "model: must be a table of keys; got 3"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(recipe_file, tmp_path, lines, sentence):
    (tmp_path / "x.toml").write_text(lines + "\n" + RECIPE)
    assert complaint() == f"x.toml: {sentence}"


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ("", "train: must have either examples or epochs, and not both"),
        ("examples = 10\nepochs = 1.0", "train: must have either examples or epochs, and not both"),
        ("examples = 10\nbatch = [[0.5, 4]]", "train.batch: must begin at 0.0, as in [[0.0, 256], [0.5, 4096]]"),
        (
            "examples = 10\nbatch = [[0.0, 4], [0.0, 8]]",
            "train.batch: must have rising starts, as in [[0.0, 256], [0.5, 4096]]",
        ),
        ("examples = 10\nbatch = [[0.0, 4], [1.0, 8]]", "train.batch.1.0: must be less than 1; got 1.0"),
        ("examples = 10\nbatch = []", "train.batch: must begin at 0.0, as in [[0.0, 256], [0.5, 4096]]"),
        ("examples = 10\nbatch = 0", "train.batch: must be at least 1; got 0"),
        ("examples = 10\nsub_batch = 0", "train.sub_batch: must be at least 1; got 0"),
        ("examples = 10\nsub_batch = {audio = 3}", "train.sub_batch.audio: unknown key"),
        (
            "examples = 10\nprecision = 'fp8'",
            "train.precision: must be 'float32', 'float64', 'bf16' or 'fp16'; got \"fp8\"",
        ),
    ],
)
def test_a_mistake_in_the_train_section_is_one_line(recipe_file, tmp_path, train, sentence):
    (tmp_path / "x.toml").write_text(f"[train]\n{train}\n")
    assert complaint() == f"x.toml: {sentence}"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("kind = 'retreiver'", "kind: must be one of 'image-text', 'retriever'; got \"retreiver\""),
        ("kind = 3", "kind: must be one of 'image-text', 'retriever'; got 3"),
        (
            "[data]\nsource = 'docstrings'",
            'data.source: is a set of texts; set kind = "retriever" at the top of the recipe',
        ),
        ("kind = 'retriever'\n[data]\nnegative = 3", "data.negative: unknown key (did you mean data.negatives?)"),
        ("kind = 'retriever'\n[data]\nimage_size = 3", "data.image_size: unknown key"),
        (
            "kind = 'retriever'\n[data]\nsource = 'mine.jsonl'",
            'data.source: must be "docstrings" or a file or folder; there is no "mine.jsonl"',
        ),
        (
            "kind = 'retriever'\n[data]\nsource = 'x.toml'\ncorpus = 'docstrings'",
            'data.corpus: must be a file or folder; there is no "docstrings"',
        ),
        ("kind = 'retriever'\n[data]\npositives = 0", "data.positives: must be at least 1; got 0"),
        ("kind = 'retriever'\n[data]\nbad_rows = 1.0", "data.bad_rows: must be less than 1; got 1.0"),
        (
            "kind = 'retriever'\n[model]\nboth = {}\nquery = {}",
            "model: must have either both or query and passage",
        ),
        ("kind = 'retriever'\n[model]\nquery = {}", "model: must have query and passage; got query alone"),
        (
            "kind = 'retriever'\n[model.both]\nkind = 'conv'",
            "model.both.kind: must be one of 'bag', 'words', 'transformers'; got \"conv\"",
        ),
        ("kind = 'retriever'\n[model.lora]", 'model: must have encoders of kind "transformers" with lora'),
        (
            "kind = 'retriever'\n[model.tokenizer]\nlength = 8",
            "model.tokenizer: must have a query_length of at most length; got 64 and 8",
        ),
        ("kind = 'retriever'\n[loss]\nkind = 'clip'", "loss.kind: unknown key (did you mean kind?)"),
        ("kind = 'retriever'\n[evaluate]\nmatch = 'glob'", "evaluate.match: must be 'string' or 'regex'; got \"glob\""),
    ],
)
def test_a_mistake_in_a_retrievers_recipe_is_one_line(recipe_file, tmp_path, lines, sentence):

    (tmp_path / "x.toml").write_text(lines + "\n" + RECIPE)
    with pytest.raises(RecipeError) as caught:
        load_any_recipe("x.toml")
    assert str(caught.value) == f"x.toml: {sentence}"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.sub_batch=8", "model.dimensions=[8, 16]", "data.query_prefix=' a: '"],
        ["model={query={kind='words'}, passage={kind='transformers', config={model_type='bert'}}, features=3}"],
        ["model={both={kind='transformers', config={model_type='bert'}, pooling='last'}, lora={rank=3}}"],
    ],
)
def test_a_written_retriever_reads_back_the_same(recipe_file, tmp_path, overrides):
    recipe = load_any_recipe(recipe_file, ["kind=retriever", *overrides])
    (tmp_path / "resolved.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_any_recipe(tmp_path / "resolved.toml", files=False) == recipe


def test_a_missing_section_is_named(recipe_file, tmp_path):
    (tmp_path / "x.toml").write_text("seed = 1\n")
    assert complaint() == "x.toml: train: missing"


def test_a_missing_file_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complaint(path="none.toml") == "none.toml: no such file"


def test_a_folder_is_no_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    assert complaint(path="folder.toml") == "folder.toml: cannot be read (Is a directory)"


def test_broken_toml_is_one_line(recipe_file, tmp_path):
    (tmp_path / "x.toml").write_text("[train\n")
    assert complaint().startswith("x.toml: not valid TOML: ")


def test_bytes_that_are_no_text_are_one_line(recipe_file, tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    assert complaint() == "x.toml: not a text in UTF-8"


@pytest.mark.parametrize("bytes_of", [b"filepath\ttitle\n", b"\xff\xd8"])
def test_data_given_as_a_recipe_are_told_where_they_go(tmp_path, monkeypatch, bytes_of):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.tsv").write_bytes(bytes_of)
    how = "a recipe is a TOML file that names its data: contrastile train RECIPE data.source=mine.tsv"
    assert complaint(path="mine.tsv") == f"mine.tsv: not a recipe; {how}"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optim.learning_rte=1e-3", "optim.learning_rte: unknown key (did you mean optim.learning_rate?)"),
        ("optim.learning_rate=abc", 'optim.learning_rate: must be a number; got "abc"'),
        ("train.examples.x=3", "train.examples: has no keys of its own"),
        (
            "train.batch=[[0.0, 8]",
            "not a TOML value; a text that begins like one needs quotes within: '\"...\"'",
        ),
        ("seed", "an override is written key=value, as in optim.learning_rate=1e-3"),
        ("=3", "an override is written key=value, as in optim.learning_rate=1e-3"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(recipe_file, override, sentence):
    assert complaint(override) == f"{override}: {sentence}"


def test_an_override_takes_the_place_of_what_it_excludes(recipe_file):
    train = load_recipe(recipe_file, ["train.epochs=2.0"]).train
    assert (train.examples, train.epochs) == (None, 2.0)
    assert complaint("train.epochs=2.0", "train.examples=9") == (
        "train.epochs=2.0: train: must have either examples or epochs, and not both"
    )


@pytest.mark.parametrize("told", ["warmup_steps = 3", "warmup_epochs = 0.1"])
def test_a_share_takes_the_place_of_steps_that_warm_up(tmp_path, told):
    path = tmp_path / "x.toml"
    path.write_text(f"[train]\nepochs = 1.0\n[optim]\n{told}\n")
    optim = load_recipe(path, ["optim.warmup=0.25"]).optim
    assert (optim.warmup, optim.warmup_steps, optim.warmup_epochs) == (0.25, None, None)


def test_a_model_for_both_takes_the_place_of_two_towers(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("[model.image]\nkind = 'conv'\n[model.text]\nkind = 'words'\n[train]\nepochs = 1.0\n")
    both = "model.both={kind='transformers', config={model_type='clip'}}"
    model = load_recipe(path, [both]).model
    assert (model.image, model.text, model.both.config) == (None, None, {"model_type": "clip"})
    with pytest.raises(RecipeError, match="model: must have either both or image and text"):
        load_recipe(path, [both, "model.text={kind='words'}"])


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
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "bert" / name).write_text('{"model_type": "bert"}')
    encoder = f"{{kind='transformers', folder='{tmp_path}/bert'}}"
    for kind, key in (("image-text", "text"), ("retriever", "both")):
        given = [f"kind={kind}", f"model.{key}={encoder}"]
        with pytest.raises(RecipeError) as caught:
            load_any_recipe(recipe_file, given)
        assert str(caught.value).endswith(
            f'model.tokenizer.folder: must be given with the text encoder in "{tmp_path}/bert": '
            "its weights know its own tokens"
        )
        known = load_any_recipe(recipe_file, [*given, f"model.tokenizer.folder={tmp_path}/bert"])
        assert known.model.tokenizer.folder == f"{tmp_path}/bert"


@pytest.mark.parametrize(("overrides", "key"), [(["data.mined=1"], "data.mined"), ([], "evaluate.bm25")])
def test_what_comes_late_is_missed_at_once(recipe_file, monkeypatch, overrides, key):
    monkeypatch.setattr("contrastile.train.settings.find_spec", lambda _: None)
    with pytest.raises(RecipeError) as caught:
        load_any_recipe(recipe_file, ["kind=retriever", *overrides])
    assert str(caught.value).endswith(
        f'{key}: needs the package bm25s, which is not installed; run: pip install "contrastile[search]"'
    )
    assert load_any_recipe(recipe_file, ["kind=retriever", "evaluate.bm25=false"]).data.mined == 0


def test_a_line_break_in_an_override_stays_one_line(recipe_file):
    assert "\n" not in complaint("name=a\nb")


def test_overrides_are_toml_values(recipe_file):
    recipe = load_recipe(recipe_file, ["train.batch=[[0.0, 8]]", "data.augment=false", "optim.learning_rate=1e-2"])
    assert (recipe.train.batch, recipe.data.augment, recipe.optim.learning_rate) == (((0.0, 8),), False, 0.01)


def test_a_bare_word_in_an_override_is_text(recipe_file):
    assert load_recipe(recipe_file, ["loss.kind=siglip"]).loss.bias == -10.0


def test_the_last_override_of_a_key_wins(recipe_file):
    assert load_recipe(recipe_file, ["seed=1", "seed=2"]).seed == 2


def test_the_name_is_the_files(recipe_file):
    assert load_recipe(recipe_file).name == "x"


def test_one_number_is_a_schedule(recipe_file):
    assert load_recipe(recipe_file, ["train.batch=64"]).train.batch == ((0.0, 64),)


def test_one_number_is_the_sub_batch_of_both_towers(recipe_file):
    sub_batch = load_recipe(recipe_file, ["train.sub_batch=64"]).train.sub_batch
    assert (sub_batch.image, sub_batch.text) == (64, 64)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["loss.kind=siglip", "optim.kind=adafactor", "train.minutes=0.1"],
        [
            # a library's file has keys that nobody knows
            "model.image={kind='transformers', config={model_type='vit', transformers_version='4', "
            "'odd key'=[1, 2.5], t={a=\"\\u007f\"}}}"
        ],
        ["optim.eps=1e-30", "optim.learning_rate=0.1234567890123456789"],
        ['evaluate.prompts=["{}", "ein Zeichen namens \\"{}\\" \U0001f1e6é"]'],
    ],
)
def test_a_written_recipe_reads_back_the_same(recipe_file, tmp_path, overrides):
    recipe = load_recipe(recipe_file, overrides)
    (tmp_path / "resolved.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "resolved.toml", files=False) == recipe


def test_a_written_recipe_holds_every_default(recipe_file):
    tables = tomllib.loads(to_toml(load_recipe(recipe_file)))
    assert tables["optim"]["learning_rate"] == 1e-3
    assert tables["train"]["sub_batch"] == {"image": 256, "text": 256}


def test_a_recipe_reads_back_where_its_files_are_gone(recipe_file, tmp_path):
    (tmp_path / "mine.tsv").write_text("filepath\ttitle\n")
    text = to_toml(load_recipe(recipe_file, ["data.source=mine.tsv"]))
    (tmp_path / "mine.tsv").unlink()
    (tmp_path / "resolved.toml").write_text(text)
    assert load_recipe("resolved.toml", files=False).data.source == "mine.tsv"


def test_one_model_for_both_sides_replaces_the_small_towers(recipe_file):
    model = load_recipe(recipe_file, ["model.both={config = {model_type = 'clip'}}"]).model
    assert (model.image, model.text, model.both.config) == (None, None, {"model_type": "clip"})


def test_known_keys_reach_into_unions():
    from contrastile.train.config import Recipe

    assert {"optim.betas", "optim.beta2_decay", "model.image.width", "train.sub_batch.text"} <= set(known_keys(Recipe))


def test_the_recipe_that_loading_is_measured_with_is_one(tmp_path):
    source = Path(__file__).parent.parent / "benchmarks" / "loading.py"
    recipe = runpy.run_path(str(source))["RECIPE"]
    (tmp_path / "a.tar").touch()
    path = tmp_path / "loading.toml"
    path.write_text(recipe.format(shards=tmp_path / "a.tar", cache=tmp_path, batch=64, minutes=1.0))
    assert load_recipe(path).train.batch == ((0.0, 64),)
