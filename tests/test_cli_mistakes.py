"""Ways to write a wrong recipe: each is one line `file: key: reason` and exit code 2, before torch is loaded."""

import subprocess
import sys

import pytest

from contrastile.cli.main import main
from contrastile.train.recipe import RecipeError, load_any_recipe, load_recipe, to_toml

STEPS = "[train]\nexamples = 1000\n"

# what stands in the file, and the line that answers it
MISTAKES = {
    "an unknown key, nearly right": (
        f"{STEPS}[optim]\nlearning_rte = 1e-3",
        "optim.learning_rte: unknown key (did you mean optim.learning_rate?)",
    ),
    "an unknown section": (f"{STEPS}[optimiser]\nkind = 'adamw'", "optimiser: unknown key (did you mean optim?)"),
    "a key in the wrong section": (
        f"{STEPS}[optim]\nsub_batch = 3",
        "optim.sub_batch: unknown key (did you mean train.sub_batch?)",
    ),
    "a text for a number": (
        f"{STEPS}batch = '256'",
        'train.batch: must be a whole number, or a list of [share of the run, size]; got "256"',
    ),
    "a number for a switch": (f"{STEPS}[data]\naugment = 1", "data.augment: must be true or false; got 1"),
    "a fraction for a count": (
        f"{STEPS}accumulate = 1.5",
        "train.accumulate: must be a whole number; got 1.5",
    ),
    "out of range": (f"{STEPS}[data]\nheld_out = 1.5", "data.held_out: must be less than 1; got 1.5"),
    "a negative rate": (
        f"{STEPS}[optim]\nlearning_rate = -1e-3",
        "optim.learning_rate: must be greater than 0; got -0.001",
    ),
    "no number": (f"{STEPS}[optim]\nweight_decay = nan", "optim.weight_decay: must be a finite number; got NaN"),
    "a missing section": ("seed = 3", "train: missing"),
    "a missing table": (f"{STEPS}[data]\nsource = 'no.tsv'", 'data.source: no such file "no.tsv"'),
    "a missing folder": (
        f"{STEPS}[data]\nsource = 'no/pictures'",
        'data.source: must be "glyphs", a .tsv, .csv, .tar or .parquet file, or a folder; got "no/pictures"',
    ),
    "missing shards": (
        f"{STEPS}[data]\nsource = 'no/{{000..009}}.tar'",
        'data.source: no such file "no/000.tar"',
    ),
    "a brace range that counts down": (
        f"{STEPS}[data]\nsource = 'a/{{009..000}}.tar'",
        "data.source: must count upwards, to 1,000,000 files at most; got {009..000}",
    ),
    "braces of far too many files": (
        f"{STEPS}[data]\nsource = 'a/{{0..9999}}/{{0..9999}}.tar'",
        'data.source: must name at most 1,000,000 files; got 100,000,000 in "a/{0..9999}/{0..9999}.tar"',
    ),
    "a pipe": (
        f"{STEPS}[data]\nsource = 'pipe:cat x.tar'",
        'data.source: must name files on this machine; got "pipe:cat x.tar"',
    ),
    "weights that do not match the sources": (
        f"{STEPS}[data]\nsource = '.::.'\nweights = [1, 2, 3]",
        "data.weights: must be one for each of the 2 sources; got 3",
    ),
    "weights of one built-in source": (
        f"{STEPS}[data]\nweights = [2]",
        'data.weights: must be left out: "glyphs" is no collection of several sources',
    ),
    "an unknown kind of tower": (
        f"{STEPS}[model.image]\nkind = 'vit'",
        "model.image.kind: must be one of {kinds}; got \"vit\"",
    ),
    "a tower from nowhere": (
        f"{STEPS}[model.image]\nkind = 'transformers'\nfolder = 'vit'",
        'model.image.folder: must be a folder with a config.json; got "vit"',
    ),
    "two origins of a tower": (
        f"{STEPS}[model.image]\nkind = 'transformers'",
        "model.image: must have either folder or config, and not both",
    ),
    "both and one of two": (
        f"{STEPS}[model]\nboth = {{config = {{model_type = 'clip'}}}}\nimage = {{}}",
        "model: must have either both or image and text",
    ),
    "two lengths": (
        f"{STEPS}epochs = 2.0",
        "train: must have either examples or epochs, and not both",
    ),
    "two warm-ups": (
        f"{STEPS}[optim]\nwarmup_steps = 2\nwarmup_epochs = 0.5",
        "optim: must have one of warmup, warmup_steps and warmup_epochs",
    ),
    "a warm-up told twice": (
        f"{STEPS}[optim]\nwarmup = 0.3\nwarmup_steps = 2",
        "optim: must have one of warmup, warmup_steps and warmup_epochs",
    ),
    "a cooldown that begins before the rate is up": (
        f"{STEPS}[optim]\nschedule = 'cooldown'\nwarmup = 0.5\ncooldown = 0.75",
        "optim.cooldown: must leave the warm-up its share of 0.5; got 0.75",
    ),
    "parts without negatives": (
        f"{STEPS}batch = [[0.0, 6], [0.5, 100]]\naccumulate = 4",
        "train.accumulate: must leave parts of 2 at least; got 4 of a batch of 6",
    ),
    "a type that nobody knows": (
        f"{STEPS}[model]\nboth = {{config = {{model_type = 'clipp'}}}}",
        'model.both.config: must have a model_type that transformers knows; got "clipp" (did you mean clip?)',
    ),
    "a key that no model has": (
        f"{STEPS}[model]\nimage = {{kind = 'transformers', config = {{model_type = 'vit', hiden_size = 32}}}}",
        "model.image.config: must have keys that transformers reads; got hiden_size (did you mean hidden_size?)",
    ),
    "a key that no model has on one side": (
        f"{STEPS}[model]\nboth = {{config = {{model_type = 'clip', text_config = {{max_position_embedings = 9}}}}}}",
        "model.both.config: must have keys that transformers reads; got max_position_embedings "
        "(did you mean max_position_embeddings?)",
    ),
    "a retriever's key that no model has": (
        f"kind = 'retriever'\n{STEPS}[model.both]\nkind = 'transformers'\nconfig = {{model_type = 'bert', zzz = 1}}",
        "model.both.config: must have keys that transformers reads; got zzz",
    ),
    "two means for three channels": (
        f"{STEPS}[model]\nboth = {{config = {{model_type = 'clip'}}, mean = [0.5, 0.5]}}",
        "model.both.mean: must be one number, or three; got 2",
    ),
    "a deviation of nothing": (
        f"{STEPS}[model]\nboth = {{config = {{model_type = 'clip'}}, std = [0.5, 0.0, 0.5]}}",
        "model.both.std.1: must be greater than 0; got 0.0",
    ),
    "a warm-up longer than the run, in epochs": (
        "[train]\nepochs = 2.0\n[optim]\nwarmup_epochs = 3.0",
        "optim.warmup_epochs: must be shorter than the run; got 3 of 2 epochs",
    ),
    "a warm-up longer than the run, in steps": (
        f"{STEPS}batch = [[0.0, 10], [0.5, 100]]\n[optim]\nwarmup_steps = 55",
        "optim.warmup_steps: must be shorter than the run; got 55 steps, 1,000 of 1,000 examples",
    ),
    "a rate scaled by no batch": (
        f"{STEPS}[optim]\nrate_scaling = 'sqrt'",
        'optim.base_batch: must be given with optim.rate_scaling = "sqrt": the batch of that rate',
    ),
    "fewer tokens than one title has": (
        f"{STEPS}sub_batch = {{text_tokens = 8}}",
        "train.sub_batch.text_tokens: must be at least model.tokenizer.length, the tokens of one title; got 8 and 16",
    ),
    "a schedule that goes back": (
        f"{STEPS}batch = [[0.0, 8], [0.5, 16], [0.25, 32]]",
        "train.batch: must have rising starts, as in [[0.0, 256], [0.5, 4096]]",
    ),
    "an unknown exchange": (
        f"{STEPS}[loss]\nexchange = 'rings'",
        "loss.exchange: must be 'auto', 'single', 'replicate', 'gather' or 'ring'; got \"rings\"",
    ),
    "an unknown backend": (
        f"{STEPS}[loss]\nbackend = 'cuda'",
        "loss.backend: must be 'auto', 'dense', 'eager' or 'triton'; got \"cuda\"",
    ),
    "kernels without a GPU": (
        f"device = 'cpu'\n{STEPS}[loss]\nbackend = 'triton'",
        'loss.backend: must be "auto", "eager" or "dense" with device = "cpu"; got "triton"',
    ),
    "an unknown optimizer": (
        f"{STEPS}[optim]\nkind = 'lamb'",
        "optim.kind: must be one of 'adamw', 'adafactor', 'muon'; got \"lamb\"",
    ),
    "another optimizer's key": (
        f"{STEPS}[optim]\nkind = 'adamw'\nmomentum = 0.9",
        "optim.momentum: unknown key with this kind",
    ),
    "an unknown precision": (
        f"{STEPS}precision = 'fp8'",
        "train.precision: must be 'float32', 'float64', 'bf16' or 'fp16'; got \"fp8\"",
    ),
    "an unknown device": (
        f"device = 'tpu'\n{STEPS}",
        'device: must be "auto", "cpu", "cuda" or "cuda:1"; got "tpu"',
    ),
    "an unknown job": (
        f"kind = 'captions'\n{STEPS}",
        "kind: must be one of 'image-text', 'retriever'; got \"captions\"",
    ),
    "a text job's data": (
        f"{STEPS}[data]\nsource = 'docstrings'",
        'data.source: is a set of texts; set kind = "retriever" at the top of the recipe',
    ),
    "a prompt without a place": (
        f"{STEPS}[evaluate]\nprompts = ['a photo']",
        "evaluate.prompts: must be texts with one {} each, the place of the name",
    ),
    "a switch for a count": (f"{STEPS}[data]\nchannels = true", "data.channels: must be 1 or 3; got true"),
    "a range without numbers": (
        f"{STEPS}[data]\nsource = 'a/{{a..}}.tar'",
        "data.source: must count in whole numbers, as in {000..099}; got {a..}",
    ),
    "a tokenizer that is not there": (
        f"{STEPS}[model.tokenizer]\nfolder = 'nowhere'",
        'model.tokenizer.folder: must be a folder with a tokenizer.json; got "nowhere"',
    ),
    "a retriever's tokenizer likewise": (
        f"kind = 'retriever'\n{STEPS}[model.tokenizer]\nfolder = '.'",
        'model.tokenizer.folder: must be a folder with a tokenizer.json; got "."',
    ),
    "features beyond reason": (
        f"{STEPS}[model]\nfeatures = 99999999",
        "model.features: must be at most 1,048,576; got 99999999",
    ),
    "unlocked layers of a tower that learns": (
        f"{STEPS}[model]\nlocked = ['image']\nunlocked = {{text = 1}}",
        'model.unlocked.text: must be layers of a tower in model.locked; add "text" there',
    ),
    "a side that there is not": (
        f"{STEPS}[model]\nlocked = ['image']\nunlocked = {{audio = 1}}",
        "model.unlocked.audio: must be 'image' or 'text'; got \"audio\"",
    ),
    "features of a tower that learns": (
        f"{STEPS}[model]\nprecompute = true",
        'model.precompute: must be false unless model.locked has "image" and none of its layers is unlocked; got true',
    ),
    "features of pictures that are bent": (
        f"{STEPS}[model]\nprecompute = true\nlocked = ['image']",
        "data.augment: must be false with model.precompute: each picture is seen once; got true",
    ),
    "no TOML": (
        "[train\nexamples = 3",
        "not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 7)",
    ),
    "a key twice": (
        f"{STEPS}examples = 4",
        "not valid TOML: Cannot overwrite a value (at line 3, column 13)",
    ),
    "a retriever's adapters without a model": (
        f"kind = 'retriever'\n{STEPS}[model.lora]\nrank = 4",
        'model: must have encoders of kind "transformers" with lora',
    ),
    "a retriever's warm-up longer than its run": (
        "kind = 'retriever'\n[train]\nepochs = 1.0\n[optim]\nwarmup_epochs = 1.0",
        "optim.warmup_epochs: must be shorter than the run; got 1 of 1 epochs",
    ),
}  # fmt: skip
KINDS = "'conv', 'transformers', 'timm', 'open_clip'"


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path / "x.toml"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(recipe_file, monkeypatch, mistake):
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    text, line = MISTAKES[mistake]
    recipe_file.write_text(text + "\n")
    with pytest.raises(RecipeError) as caught:
        load_any_recipe("x.toml")
    assert str(caught.value) == f"x.toml: {line.replace('{kinds}', KINDS)}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", 'must be a folder whose config.json can be read; got "m/config.json" (Expecting value'),
        ("{}", 'must be a folder whose config.json has a model_type; got "m/config.json"'),
        ('{"model_type": "clipp"}', 'must have a model_type that transformers knows; got "clipp" (did you mean clip?)'),
    ],
)
def test_a_folder_that_holds_no_model_is_one_line(recipe_file, monkeypatch, text, reason):
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    (recipe_file.parent / "m").mkdir()
    (recipe_file.parent / "m/config.json").write_text(text)
    recipe_file.write_text(f"{STEPS}[model]\nimage = {{kind = 'transformers', folder = 'm'}}\n")
    with pytest.raises(RecipeError) as caught:
        load_any_recipe("x.toml")
    assert str(caught.value).startswith(f"x.toml: model.image.folder: {reason}")


def test_kernels_that_nothing_here_can_run_are_one_line(recipe_file, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    recipe_file.write_text(f"{STEPS}[loss]\nbackend = 'triton'\n")
    monkeypatch.setattr("contrastile.train.config.for_cpus_alone", lambda: True)
    with pytest.raises(RecipeError) as caught:
        load_any_recipe("x.toml")
    assert str(caught.value) == (
        'x.toml: loss.backend: must be "auto", "eager" or "dense": the torch that is installed is for CPUs alone; got '
        '"triton"'
    )
    monkeypatch.setattr("contrastile.train.config.for_cpus_alone", lambda: False)
    monkeypatch.setattr("contrastile.train.settings.find_spec", lambda name: None)
    with pytest.raises(RecipeError) as caught:
        load_any_recipe("x.toml")
    told = "needs the package triton, which is not installed; run: pip install triton"
    assert str(caught.value) == f"x.toml: loss.backend: {told}"
    # a run that is read back needs none of it
    assert load_any_recipe("x.toml", files=False).loss.backend == "triton"


def test_configurations_that_transformers_wrote_or_another_model_reads_are_taken(recipe_file, monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    pytest.importorskip("transformers")
    for config in (
        "model_type = 'vit', zzz = 1, transformers_version = '4.9'",
        "model_type = 'vit', vocab_size = 9, id2label = {0 = 'zzz'}, attn_implementation = 'eager'",
    ):
        monkeypatch.delitem(sys.modules, "transformers", raising=False)
        recipe_file.write_text(f"{STEPS}[model]\nimage = {{kind = 'transformers', config = {{{config}}}}}\n")
        assert load_recipe("x.toml").model.image.config["model_type"] == "vit"


def test_class_folders_without_pictures_are_one_line(recipe_file):
    recipe_file.write_text(f"{STEPS}[evaluate]\nzero_shot = [{{folder = 'val'}}]\n")
    pictures = "pictures (.jpg, .jpeg, .png, .webp) of each class"
    for folder, missing in (("", "a sub-folder for each class"), ("cat", pictures), ("dog/deep", pictures)):
        (recipe_file.parent / "val/.cache" / folder).mkdir(parents=True)
        (recipe_file.parent / "val" / folder).mkdir(parents=True, exist_ok=True)
        with pytest.raises(RecipeError) as caught:
            load_any_recipe("x.toml")
        line = f'x.toml: evaluate.zero_shot.0: must have a folder with {missing}; "val" has none'
        assert str(caught.value) == line
    (recipe_file.parent / "val/dog/deep/a.JPG").touch()
    assert load_any_recipe("x.toml").evaluate.zero_shot[0].folder == "val"


def test_the_command_says_that_line_and_leaves_with_2(recipe_file, capsys):
    text, line = MISTAKES["a negative rate"]
    recipe_file.write_text(text)
    for verb in ("train", "compare"):
        assert main([verb, "x.toml"]) == 2
        assert capsys.readouterr().err == f"x.toml: {line}\n"
    assert not (recipe_file.parent / "runs").exists()


def test_nothing_heavy_is_loaded_before(recipe_file):
    recipe_file.write_text(MISTAKES["fewer tokens than one title has"][0])
    code = (
        "import sys; from contrastile.cli.main import main; code = main(['train', 'x.toml']); "
        "print(code, sorted({'torch', 'numpy', 'transformers', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 []\n"
    assert done.stderr.count("\n") == 1


def test_a_sub_batch_above_the_largest_batch_is_cut_to_it_aloud(recipe_file, caplog):
    recipe_file.write_text(f"{STEPS}batch = [[0.0, 32], [0.5, 64]]\nsub_batch = {{image = 128, text = 48}}\n")
    sub_batch = load_recipe("x.toml").train.sub_batch
    assert (sub_batch.image, sub_batch.text) == (64, 48)
    assert caplog.messages == ["train.sub_batch.image is 64, the largest batch, instead of 128"]
    caplog.clear()
    # so a smaller batch on the command line needs no second word
    recipe = load_recipe("x.toml", ["train.batch=8"])
    assert (recipe.train.sub_batch.image, recipe.train.sub_batch.text) == (8, 8)
    assert len(caplog.messages) == 2
    # as it is written into the run's folder it fits
    recipe_file.write_text(to_toml(recipe))
    assert load_recipe("x.toml") == recipe
    assert len(caplog.messages) == 2


def test_what_is_left_out_fits_the_batch(recipe_file):
    recipe_file.write_text(f"{STEPS}batch = 32\nsub_batch = {{image = 8}}\n")
    sub_batch = load_recipe("x.toml").train.sub_batch
    assert (sub_batch.image, sub_batch.text) == (8, 32)
    recipe_file.write_text(f"{STEPS}batch = 32\n")
    recipe = load_recipe("x.toml")
    assert (recipe.train.sub_batch.image, recipe.train.sub_batch.text) == (32, 32)
    # and what was written of it is a recipe like any other
    recipe_file.write_text(to_toml(recipe))
    assert load_recipe("x.toml") == recipe
