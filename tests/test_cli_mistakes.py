"""Ways to write a wrong recipe: each is one line `file: key: reason` and exit code 2, before torch is loaded."""

import json

import pytest
from refusals import refusal

from contrastile.data.sources import PICTURES
from contrastile.train.recipe import load_any_recipe, to_toml

STEPS = "[train]\nexamples = 1000\n"
RETRIEVER = "kind = 'retriever'\n"
TEXTS = RETRIEVER + STEPS

# the file, and the line that answers it
# fmt: off
MISTAKES = [
    ("batch_size = 8\n" + STEPS, "batch_size: unknown key (did you mean train.batch?)"),
    (STEPS + "[model]\nprecompute = true\nlocked = ['image']",
     "data.augment: must be false with model.precompute: each image is seen once; got true"),
    (STEPS + "[data]\naugment = 1", "data.augment: must be true or false; got 1"),
    (STEPS + "[data]\nchannels = 2", "data.channels: must be 1 or 3; got 2"),
    (STEPS + "[data]\nchannels = true", "data.channels: must be 1 or 3; got true"),
    (STEPS + "[data]\nchannels = 3\n[model.image]\nkind = 'transformers'\n"
     "config = {model_type = 'vit', num_channels = 1}",
     "data.channels: must be at most the 1 of the image tower; got 3"),
    (STEPS + "[data]\nheld_out = 1.5", "data.held_out: must be less than 1; got 1.5"),
    (STEPS + "[data]\nmax_bad_fraction = 2.0", "data.max_bad_fraction: must be at most 1; got 2.0"),
    (STEPS + "[data]\nimage_size = 32.0", "data.image_size: must be a whole number; got 32.0"),
    (STEPS + "[data]\nimage_size = 4", "data.image_size: must be at least 8; got 4"),
    (STEPS + "[model.image]\nkind = 'transformers'\nconfig = {model_type = 'vit', patch_size = 64}",
     "data.image_size: must be at least a patch of the image tower, 64 pixels; got 32"),
    (STEPS + "[model.image]\nkind = 'transformers'\nconfig = {model_type = 'vit', image_size = 224}",
     "data.image_size: must be the 224 pixels of the image tower; got 32"),
    (STEPS + "[model.both]\nconfig = {model_type = 'clip', vision_config = {image_size = 48}}",
     "data.image_size: must be the 48 pixels of the image tower; got 32"),
    # the size that the model has by default
    (STEPS + "[model.both]\nconfig = {model_type = 'clip'}",
     "data.image_size: must be the 224 pixels of the image tower; got 32"),
    (STEPS + "[data]\nsource = 'docstrings'",
     'data.source: is a set of texts; set kind = "retriever" at the top of the recipe'),
    (STEPS + "[data]\nsource = 'mnist'",
     'data.source: must be "glyphs", a .tsv, .csv, .tar or .parquet file, or a folder; got "mnist"'),
    (STEPS + "[data]\nsource = 3", "data.source: must be a text in quotes; got 3"),
    (STEPS + "[data]\nsource = 'a/{a..}.tar'", "data.source: must count in whole numbers, as in {000..099}; got {a..}"),
    (STEPS + "[data]\nsource = 'a/{009..000}.tar'",
     "data.source: must count upwards, to 1,000,000 files at most; got {009..000}"),
    (STEPS + "[data]\nsource = 'a/{0..9999}/{0..9999}.tar'",
     'data.source: must name at most 1,000,000 files; got 100,000,000 in "a/{0..9999}/{0..9999}.tar"'),
    (STEPS + "[data]\nsource = 'pipe:cat x.tar'", 'data.source: must name files on this machine; got "pipe:cat x.tar"'),
    (STEPS + "[data]\nsource = 'x.toml'",
     'data.source: must be "glyphs", a .tsv, .csv, .tar or .parquet file, or a folder; got "x.toml"'),
    (STEPS + "[data]\nsource = 'mine.tsv'", 'data.source: no such file "mine.tsv"'),
    (STEPS + "[data]\nsource = 'no/{000..009}.tar'", 'data.source: no such file "no/000.tar"'),
    (STEPS + "[data]\nweights = [2]", 'data.weights: must be left out: "glyphs" is no collection of several sources'),
    (STEPS + "[data]\nsource = '.'\nweights = [0]", "data.weights.0: must be at least 1; got 0"),
    (STEPS + "[data]\nsource = '.::.'\nweights = [1, 2, 3]",
     "data.weights: must be one for each of the 2 sources; got 3"),
    ("device = 'tpu'\n" + STEPS, 'device: must be "auto", "cpu", "cuda" or "cuda:1"; got "tpu"'),
    (STEPS + "[evaluate]\nprompts = ['a photo']",
     "evaluate.prompts: must be texts with one {} each, the place of the name"),
    (STEPS + "[[evaluate.retrieval]]\ncaptions = 'x.toml'\nsplit = 'test'",
     "evaluate.retrieval.0.split: must be left out with a table: only Karpathy's JSON has splits; got \"test\""),
    (STEPS + "[[evaluate.zero_shot]]\nfolder = 'm'",
     'evaluate.zero_shot.0: must have a folder with a sub-folder for each class; "m" has none'),
    ("kind = 'retreiver'\n" + STEPS, "kind: must be one of 'image-text', 'retriever'; got \"retreiver\""),
    ("kind = 3\n" + STEPS, "kind: must be one of 'image-text', 'retriever'; got 3"),
    ("learning_rate = 1.0\n" + STEPS, "learning_rate: unknown key (did you mean optim.learning_rate?)"),
    ("device = 'cpu'\n" + STEPS + "[loss]\nbackend = 'triton'",
     'loss.backend: must be "auto", "eager" or "dense" with device = "cpu"; got "triton"'),
    (STEPS + "[loss]\nbackend = 'cuda'", "loss.backend: must be 'auto', 'dense', 'eager' or 'triton'; got \"cuda\""),
    (STEPS + "[loss]\nbias = -10.0", "loss.bias: unknown key with this kind; it belongs to "
     "loss.kind = \"siglip\""),
    (STEPS + "[loss]\nexchange = 'rings'",
     "loss.exchange: must be 'auto', 'single', 'replicate', 'gather', 'ring' or 'hierarchical'; got \"rings\""),
    (STEPS + "[loss]\nkind = 'siglip'\nlabel_smoothing = 0.1", "loss.label_smoothing: unknown key with this kind; "
     "it belongs to loss.kind = \"clip\" or \"ntxent\" or \"infonce\" or \"gist\""),
    (STEPS + "[loss]\nscale = 101.0", "loss.scale: must be at most 100; got 101.0"),
    ("lr = 1.0\n" + STEPS, "lr: unknown key (did you mean optim.learning_rate?)"),
    (STEPS + "[model]\nboth = {config = {model_type = 'clip', text_config = {max_position_embedings = 9}}}",
     "model.both.config.text_config: must have keys that a clip_text_model reads; got "
     "max_position_embedings. Did you mean max_position_embeddings?"),
    (STEPS + "[model]\nboth = {config = {model_type = 'clipp'}}",
     'model.both.config: must have a model_type that transformers knows; got "clipp" (did you mean clip?)'),
    (STEPS + "[model]\nboth = {config = {model_type = 'clip'}, mean = [0.5, 0.5]}",
     "model.both.mean: must be one number, or three; got 2"),
    (STEPS + "[model]\nboth = {config = {model_type = 'clip'}, std = [0.5, 0.0, 0.5]}",
     "model.both.std.1: must be greater than 0; got 0.0"),
    (STEPS + "[model]\ncheckpointing = ['image']",
     'model.checkpointing: must name towers that have it; got "image", of kind "conv"'),
    (STEPS + "[model]\nlocked = ['image']\ncheckpointing = ['image']\n"
     "image = {kind = 'transformers', config = {model_type = 'vit'}}",
     'model.checkpointing: must name towers that learn; got "image", which model.locked has'),
    (STEPS + "[model]\nfeatures = 99999999", "model.features: must be at most 1,048,576; got 99999999"),
    (STEPS + "[model]\nimage = {kind = 'transformers', config = {model_type = 'vit', hiden_size = 32}}",
     "model.image.config: must have keys that a vit reads; got hiden_size. Did you mean hidden_size?"),
    (STEPS + "[model.image]\nkind = 'transformers'\nfolder = 'vit'",
     'model.image.folder: must be a folder with a config.json; got "vit"'),
    (STEPS + "[model.image]\nkind = 'vit'",
     "model.image.kind: must be one of 'conv', 'transformers', 'timm', 'open_clip'; got \"vit\""),
    (STEPS + "[model.image]\nkind = 'transformers'", "model.image: must have either folder or config, and not both"),
    (STEPS + "[model]\nprecompute = true",
     'model.precompute: must be false unless model.locked has "image" and none of its layers is unlocked; got true'),
    (STEPS + "[model.text]\nkind = 'transformers'\nconfig = {model_type = 'bert'}\nmean = [0.5]",
     "model.text.mean: unknown key (did you mean model.image.mean?)"),
    (STEPS + "[model.tokenizer]\nfolder = 'nowhere'",
     'model.tokenizer.folder: must be a folder with a tokenizer.json; got "nowhere"'),
    (STEPS + "[model.both]\nconfig = {model_type = 'clip', text_config = {max_position_embeddings = 12}}",
     "model.tokenizer.length: must be at most the 12 tokens of the text tower; got 16"),
    (STEPS + "[model]\nlocked = ['image']\nunlocked = {audio = 1}",
     "model.unlocked.audio: must be 'image' or 'text'; got \"audio\""),
    (STEPS + "[model]\nlocked = ['image']\nunlocked = {text = 1}",
     'model.unlocked.text: must be layers of a tower in model.locked; add "text" there'),
    (STEPS + "[model]\nlocked = ['text']\nunlocked = {text = 1}",
     'model.unlocked.text: must be left out for a tower of kind "words", which has no layers to tell apart'),
    ("model = 3\n" + STEPS, "model: must be a table of keys; got 3"),
    (STEPS + "[model]\nboth = {config = {model_type = 'clip'}}\nimage = {}",
     "model: must have either both or image and text"),
    (STEPS + "[model.both]\nconfig = {model_type = 'bert'}",
     "model.both: must be a model of images and texts; got bert. "
     "Take a CLIP or a SigLIP, or give the two sides a tower each."),
    ("name = '../up'\n" + STEPS,
     'name: must be a folder name of letters, digits, ".", "_" and "-", a letter or digit first; got "../up"'),
    ("name = '-up'\n" + STEPS,
     'name: must be a folder name of letters, digits, ".", "_" and "-", a letter or digit first; got "-up"'),
    (STEPS + "examples = 4", "not valid TOML: Cannot overwrite a value (at line 3, column 13)"),
    ("[train\nexamples = 3", "not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 7)"),
    (STEPS + "[optim]\nrate_scaling = 'sqrt'",
     'optim.base_batch: must be given with optim.rate_scaling = "sqrt": the batch of that rate'),
    (STEPS + "[optim]\nbetas = [0.9]", "optim.betas.1: missing"),
    (STEPS + "[optim]\nbetas = 0.9", "optim.betas: must be a list; got 0.9"),
    (STEPS + "[optim]\nschedule = 'cooldown'\nwarmup = 0.5\ncooldown = 0.75",
     "optim.cooldown: must leave the warm-up its share of 0.5; got 0.75"),
    (STEPS + "[optim]\nkind = 'adafactor'\neps = 1e-8", "optim.eps: unknown key with this kind; "
     "it belongs to optim.kind = \"adamw\" or \"muon\""),
    (STEPS + "[optim]\nfinal = 1.5", "optim.final: must be at most 1; got 1.5"),
    (STEPS + "[optim]\nkind = 'lamb'", "optim.kind: must be one of 'adamw', 'adafactor', 'muon'; got \"lamb\""),
    (STEPS + "[optim]\nlearning_rate = nan", "optim.learning_rate: must be a finite number; got NaN"),
    (STEPS + "[optim]\nlearning_rate = 'fast'", 'optim.learning_rate: must be a number; got "fast"'),
    (STEPS + "[optim]\nlearning_rate = -1e-3", "optim.learning_rate: must be greater than 0; got -0.001"),
    (STEPS + "[optim]\nlearning_rte = 1e-3", "optim.learning_rte: unknown key (did you mean optim.learning_rate?)"),
    (STEPS + "[optim]\nkind = 'adamw'\nmomentum = 0.9", "optim.momentum: unknown key with this kind; "
     "it belongs to optim.kind = \"muon\""),
    (STEPS + "[[evaluate.retrieval]]\nimage = 'x'",
     "evaluate.retrieval.0.image: unknown key (did you mean evaluate.retrieval.images?)"),
    (STEPS + "[optim]\nsub_batch = 3", "optim.sub_batch: unknown key (did you mean train.sub_batch?)"),
    # beyond float32, or on the way there
    (STEPS + "[optim]\nlearning_rate = 1e38", "optim.learning_rate: must be at most 1,000; got 1e+38"),
    (STEPS + "[optim]\nweight_decay = 1e300", "optim.weight_decay: must be at most 1,000; got 1e+300"),
    (STEPS + "[optim]\nwarmup_epochs = 1e308", "optim.warmup_epochs: must be at most 1,000,000; got 1e+308"),
    (STEPS + "[optim]\neps = 1e-300", "optim.eps: must be at least 1e-30; got 1e-300"),
    (STEPS + "[loss]\nkind = 'siglip'\nbias = 1e300", "loss.bias: must be at most 10,000; got 1e+300"),
    (STEPS + "[optim]\nwarmup = 1.0", "optim.warmup: must be less than 1; got 1.0"),
    ("[train]\nepochs = 2.0\n[optim]\nwarmup_epochs = 3.0",
     "optim.warmup_epochs: must be shorter than the run; got 3 of 2 epochs"),
    (STEPS + "batch = [[0.0, 10], [0.5, 100]]\n[optim]\nwarmup_steps = 55",
     "optim.warmup_steps: must be shorter than the run; got 55 steps, 1,000 of 1,000 examples"),
    (STEPS + "[optim]\nwarmup_steps = 2\nwarmup_epochs = 0.5",
     "optim: must have one of warmup, warmup_steps and warmup_epochs"),
    (STEPS + "[optimiser]\nkind = 'adamw'", "optimiser: unknown key (did you mean optim?)"),
    ("seed = -1\n" + STEPS, "seed: must be at least 0; got -1"),
    (STEPS + "accumulate = 1.5", "train.accumulate: must be a whole number; got 1.5"),
    (STEPS + "batch = [[0.0, 6], [0.5, 100]]\naccumulate = 4",
     "train.accumulate: must leave parts of 2 at least; got 4 of a batch of 6"),
    ("[train]\nexamples = 10\nbatch = [[0.0, 4], [1.0, 8]]", "train.batch.1.0: must be less than 1; got 1.0"),
    (STEPS + "batch = '256'", 'train.batch: must be a whole number, or a list of [share of the run, size]; got "256"'),
    ("[train]\nexamples = 10\nbatch = 0", "train.batch: must be at least 1; got 0"),
    (STEPS + "batch = 1", "train.batch: must be at least 2: one pair has no negatives; got 1"),
    ("[train]\nexamples = 10\nbatch = [[0.5, 4]]", "train.batch: must begin at 0.0, as in [[0.0, 256], [0.5, 4096]]"),
    (STEPS + "batch = [[0.0, 8], [0.5, 16], [0.25, 32]]",
     "train.batch: must have rising starts, as in [[0.0, 256], [0.5, 4096]]"),
    (STEPS + "parallel = 'fsdp'", "train.parallel: must be 'replicate' or 'shard'; got \"fsdp\""),
    (STEPS + "precision = 'fp8'",
     "train.precision: must be 'auto', 'float32', 'float64', 'bf16' or 'fp16'; got \"fp8\""),
    ("[train]\nexamples = 10\nsub_batch = {audio = 3}", "train.sub_batch.audio: unknown key"),
    (STEPS + "sub_batch = {text_tokens = 8}",
     "train.sub_batch.text_tokens: must be at least model.tokenizer.length, the tokens of one caption; got 8 and 16"),
    ("[train]\nexamples = 10\nsub_batch = 0", "train.sub_batch: must be at least 1; got 0"),
    ("seed = 3", "train: missing"),
    ("kind = 'retriever'", "train: missing"),
    (STEPS + "epochs = 2.0", "train: must have either examples or epochs, and not both"),
    (STEPS + "[trian]\nexamples = 3", "trian: unknown key (did you mean train?)"),
    ("zzz = 1.0\n" + STEPS, "zzz: unknown key"),
    (RETRIEVER + "[data]\nbad_rows = 1.0\n" + STEPS, "data.bad_rows: must be less than 1; got 1.0"),
    (RETRIEVER + "[data]\nsource = 'x.toml'\ncorpus = 'docstrings'\n" + STEPS,
     'data.corpus: must be a file or folder; there is no "docstrings"'),
    (RETRIEVER + "[data]\nimage_size = 3\n" + STEPS, "data.image_size: unknown key"),
    (RETRIEVER + "[data]\nnegative = 3\n" + STEPS, "data.negative: unknown key (did you mean data.negatives?)"),
    (TEXTS + "[data]\npackages = ['numpy', 'nonesuch']", 'data.packages: must be installed packages; got "nonesuch"'),
    (RETRIEVER + "[data]\npositives = 0\n" + STEPS, "data.positives: must be at least 1; got 0"),
    (RETRIEVER + "[data]\nsource = 'mine.jsonl'\n" + STEPS,
     'data.source: must be "docstrings" or a file or folder; there is no "mine.jsonl"'),
    (TEXTS + "[data]\nsource = 'm'",
     "data.source: must be a folder in BEIR's format, with corpus.jsonl, queries.jsonl, qrels/*.tsv; \"m\" "
     "has no corpus.jsonl"),
    (TEXTS + "[data]\nsource = 'x.toml'\ntest = 'm'", 'data.test: must be a file of questions; got the folder "m"'),
    (RETRIEVER + "[evaluate]\nmatch = 'glob'\n" + STEPS,
     "evaluate.match: must be 'string' or 'regex'; got \"glob\""),
    (RETRIEVER + "[loss]\nkind = 'clip'\n" + STEPS,
     "loss.kind: must be one of 'infonce', 'gist', 'distill', 'dcl', 'kl', 'margin_mse'; got \"clip\""),
    (TEXTS + "[loss]\nworkspace = 10", "loss.workspace: must be at least 1,048,576; got 10"),
    (TEXTS + "[model.both]\nkind = 'transformers'\nconfig = {model_type = 'bert', zzz = 1}",
     "model.both.config: must have keys that a bert reads; got zzz. Leave it out."),
    (RETRIEVER + "[model.both]\nkind = 'conv'\n" + STEPS,
     "model.both.kind: must be one of 'bag', 'words', 'transformers'; got \"conv\""),
    (TEXTS + "[model]\ndimensions = [64]\nboth = {kind = 'transformers', folder = 'm'}\n"
     "tokenizer = {folder = 'm', length = 40, query_length = 9}",
     "model.dimensions: must be at most the 24 features there are; got 64"),
    (TEXTS + "[model]\ndimensions = [769]\nboth = {kind = 'transformers', config = {model_type = 'bert'}}",
     "model.dimensions: must be at most the 768 features there are; got 769"),
    (TEXTS + "[model]\ndimensions = [64, 512]",
     "model.dimensions: must be at most the 256 features there are; got 512"),
    (TEXTS + "[model]\ndimensions = [33]\nboth = {kind = 'words', width = 16}",
     "model.dimensions: must be at most the 32 features there are; got 33"),
    (TEXTS + "[model]\ndimensions = [64]\nfeatures = 48",
     "model.dimensions: must be at most the 48 features there are; got 64"),
    (TEXTS + "[model]\ndimensions = [64]\nboth = {kind = 'transformers', config = {model_type = 't5', d_model = 8}}",
     "model.dimensions: must be at most the 8 features there are; got 64"),
    (TEXTS + "[model]\nquery = {kind = 'bag', width = 8}\npassage = {kind = 'words', width = 8}",
     "model.features: must be given for encoders of unequal sizes; got 8 and 16"),
    (TEXTS + "[model.tokenizer]\nfolder = '.'",
     'model.tokenizer.folder: must be a folder with a tokenizer.json; got "."'),
    (TEXTS + "[model.both]\nkind = 'transformers'\nfolder = 'm'\n[model.tokenizer]\nfolder = 'm'",
     "model.tokenizer.length: must be at most the 40 tokens of the text tower; got 256"),
    (TEXTS + "[model]\nboth = {kind = 'transformers', config = {model_type = 'bert'}}\ntokenizer = {length = 513}",
     "model.tokenizer.length: must be at most the 512 tokens of the text tower; got 513"),
    (TEXTS + "[model]\nboth = {kind = 'transformers', config = {model_type = 'roberta'}}\ntokenizer = {length = 512}",
     "model.tokenizer.length: must be at most the 511 tokens of the text tower; got 512"),
    (TEXTS + "[model.both]\nkind = 'transformers'\nconfig = {model_type = 'mpnet', max_position_embeddings = 130, "
     "pad_token_id = 1}\n[model.tokenizer]\nlength = 129",
     "model.tokenizer.length: must be at most the 128 tokens of the text tower; got 129"),
    (RETRIEVER + "[model.tokenizer]\nlength = 8\n" + STEPS,
     "model.tokenizer: must have a query_length of at most length; got 64 and 8"),
    (RETRIEVER + "[model]\nboth = {}\nquery = {}\n" + STEPS,
     "model: must have either both or query and passage"),
    (TEXTS + "[model.lora]\nrank = 4", 'model: must have encoders of kind "transformers" with lora'),
    (RETRIEVER + "[model]\nquery = {}\n" + STEPS, "model: must have query and passage; got query alone"),
    ("kind = 'retriever'\n[train]\nepochs = 1.0\n[optim]\nwarmup_epochs = 1.0",
     "optim.warmup_epochs: must be shorter than the run; got 1 of 1 epochs"),
    (TEXTS + "sub_batch = {passage_tokens = 8}",
     "train.sub_batch.passage_tokens: must be at least model.tokenizer.length, the tokens of one text; got 8 and 256"),
    (TEXTS + "sub_batch = {query_tokens = 8}",
     "train.sub_batch.query_tokens: must be at least model.tokenizer.query_length, the tokens of one "
     "text; got 8 and 64"),
]
# fmt: on


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    """The path of a recipe in the working folder, beside a text model `m` and a table of other columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (tmp_path / "m").mkdir()
    config = {"model_type": "bert", "hidden_size": 24, "max_position_embeddings": 40}
    for name, text in (("config.json", json.dumps(config)), ("tokenizer.json", "{}"), ("model.safetensors", "")):
        (tmp_path / "m" / name).write_text(text)
    return tmp_path / "x.toml"


def refused(*overrides):
    """The line that refuses the recipe x.toml."""
    return refusal(load_any_recipe, "x.toml", overrides)


@pytest.mark.parametrize(("text", "line"), MISTAKES, ids=[line.partition(":")[0] for _, line in MISTAKES])
def test_a_mistake_is_one_line(recipe_file, text, line):
    recipe_file.write_text(text + "\n")
    assert refused() == f"x.toml: {line}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", 'must hold a config.json that can be read; got "m/config.json" (Expecting value'),
        ("{}", 'must be a folder whose config.json has a model_type; got "m"'),
        ('{"model_type": "clipp"}', 'must have a model_type that transformers knows; got "clipp" (did you mean clip?)'),
    ],
)
def test_a_folder_without_a_model_is_one_line(recipe_file, text, reason):
    (recipe_file.parent / "m/config.json").write_text(text)
    recipe_file.write_text(f"{STEPS}[model]\nimage = {{kind = 'transformers', folder = 'm'}}\n")
    assert refused().startswith(f"x.toml: model.image.folder: {reason}")


def test_kernels_that_cannot_run_here_are_one_line(recipe_file, monkeypatch):
    recipe_file.write_text(f"{STEPS}[loss]\nbackend = 'triton'\n")
    monkeypatch.setattr("contrastile.train.config.base.torch_is_cpu_only", lambda: True)
    rule = 'must be "auto", "eager" or "dense": the torch that is installed is for CPUs alone; got "triton"'
    assert refused() == f"x.toml: loss.backend: {rule}"
    monkeypatch.setattr("contrastile.train.config.base.torch_is_cpu_only", lambda: False)
    monkeypatch.setattr("contrastile.train.config.base.find_spec", lambda name: None)
    rule = "needs the package triton, which is not installed; run: pip install triton"
    assert refused() == f"x.toml: loss.backend: {rule}"
    # a run that is read back needs none of it
    assert load_any_recipe("x.toml", files=False).loss.backend == "triton"


@pytest.mark.parametrize(
    "config",
    [
        "model_type = 'vit', zzz = 1, transformers_version = '4.9'",
        "model_type = 'vit', id2label = {0 = 'zzz'}, attn_implementation = 'eager'",
    ],
)
def test_a_configuration_that_transformers_wrote_may_hold_any_key(recipe_file, config):
    pytest.importorskip("transformers")
    recipe_file.write_text(f"{STEPS}[model]\nimage = {{kind = 'transformers', config = {{{config}}}}}\n")
    assert load_any_recipe("x.toml").model.image.config["model_type"] == "vit"


def test_class_folders_without_pictures_are_one_line(recipe_file):
    recipe_file.write_text(f"{STEPS}[evaluate]\nzero_shot = [{{folder = 'val'}}]\n")
    pictures = f"images ({', '.join(PICTURES)}) of each class"
    for folder, missing in (("", "a sub-folder for each class"), ("cat", pictures), ("dog/deep", pictures)):
        (recipe_file.parent / "val/.cache" / folder).mkdir(parents=True)
        (recipe_file.parent / "val" / folder).mkdir(parents=True, exist_ok=True)
        assert refused() == f'x.toml: evaluate.zero_shot.0: must have a folder with {missing}; "val" has none'
    (recipe_file.parent / "val/dog/deep/a.JPG").touch()
    assert load_any_recipe("x.toml").evaluate.zero_shot[0].folder == "val"


def test_a_sub_batch_above_the_largest_batch_is_reduced_with_a_warning(recipe_file, caplog):
    recipe_file.write_text(f"{STEPS}batch = [[0.0, 32], [0.5, 64]]\nsub_batch = {{image = 128, text = 48}}\n")
    sub_batch = load_any_recipe("x.toml").train.sub_batch
    assert (sub_batch.image, sub_batch.text) == (64, 48)
    assert caplog.messages == ["train.sub_batch.image is 64, the largest batch, instead of 128"]
    caplog.clear()
    # a smaller batch on the command line needs no notice
    recipe = load_any_recipe("x.toml", ["train.batch=8"])
    assert (recipe.train.sub_batch.image, recipe.train.sub_batch.text) == (8, 8)
    assert caplog.messages == []
    # as it is written into the run's folder it fits
    recipe_file.write_text(to_toml(recipe))
    assert load_any_recipe("x.toml") == recipe
    assert caplog.messages == []


def test_default_sub_batches_fit_the_batch(recipe_file):
    recipe_file.write_text(f"{STEPS}batch = 32\nsub_batch = {{image = 8}}\n")
    sub_batch = load_any_recipe("x.toml").train.sub_batch
    assert (sub_batch.image, sub_batch.text) == (8, 32)
    recipe_file.write_text(f"{STEPS}batch = 32\n")
    recipe = load_any_recipe("x.toml")
    assert (recipe.train.sub_batch.image, recipe.train.sub_batch.text) == (32, 32)
    # and what was written of it is a recipe like any other
    recipe_file.write_text(to_toml(recipe))
    assert load_any_recipe("x.toml") == recipe
