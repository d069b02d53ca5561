"""No key of a recipe is ignored: what nothing would read is refused, or goes where an override makes it idle."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import tiny_recipe

from contrastile.train import idle
from contrastile.train.config import Recipe
from contrastile.train.image_text import ImageText
from contrastile.train.ranks import Ranks
from contrastile.train.recipe import RecipeError, known_keys, load_any_recipe, to_toml
from contrastile.train.retriever.config import RetrieverRecipe

STEPS = "[train]\nexamples = 1000\n"
TEXTS = f"kind = 'retriever'\n{STEPS}"
CLIP = "{config = {model_type = 'clip'}}"
SHIPPED = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))

# what stands in the file, and the line that answers it
IDLE = [
    (
        f"{STEPS}[optim]\ncooldown = 0.2",
        'optim.cooldown: has no effect with optim.schedule = "cosine"; '
        'leave it out, or set optim.schedule = "cooldown"',
    ),
    (
        f"{STEPS}[optim]\nschedule = 'constant'\nfinal = 0.0",
        'optim.final: has no effect with optim.schedule = "constant"; leave it out',
    ),
    (
        f"{STEPS}[optim]\nbase_batch = 64",
        'optim.base_batch: has no effect with optim.rate_scaling = "none"; '
        'leave it out, or set optim.rate_scaling = "sqrt" or "linear"',
    ),
    (
        f"{STEPS}[optim]\nwarmup = 0.05\nwarmup_steps = 2",
        "optim.warmup: has no effect with optim.warmup_steps = 2; leave either out",
    ),
    (
        f"{STEPS}[optim]\nwarmup = 0.05\nwarmup_epochs = 0.25",
        "optim.warmup: has no effect with optim.warmup_epochs = 0.25; leave either out",
    ),
    (
        f"{STEPS}[model.tokenizer]\nkind = 'words'\nfolder = 'm'",
        'model.tokenizer.kind: has no effect with model.tokenizer.folder = "m"; leave it out',
    ),
    (
        f"{TEXTS}[model.tokenizer]\nsize = 99\nfolder = 'm'",
        'model.tokenizer.size: has no effect with model.tokenizer.folder = "m"; leave it out',
    ),
    (
        f"{STEPS}[model]\nfeatures = 256\nboth = {CLIP}",
        "model.features: has no effect with model.both; leave it out: that model has its own",
    ),
    (
        f"{STEPS}[model]\ntext = {{kind = 'open_clip', name = 'x'}}\ntokenizer = {{size = 99}}",
        'model.tokenizer.size: has no effect with model.tokenizer.kind = "open_clip"; '
        "leave it out: CLIP's words are given",
    ),
    (
        f"{STEPS}sub_batch = {{text = 256, text_tokens = 512}}",
        "train.sub_batch.text: has no effect with train.sub_batch.text_tokens = 512; leave either out",
    ),
    (
        f"{STEPS}[data]\nsource = 'x.tsv'\n[evaluate]\ndigits = true",
        'evaluate.digits: has no effect with data.source = "x.tsv"; leave it out: they are a test of glyphs',
    ),
    (
        f"{TEXTS}[data]\nsource = 'q.jsonl'\npackages = ['numpy', 'scipy', 'torch']",
        'data.packages: has no effect with data.source = "q.jsonl"; leave it out',
    ),
    (
        f"{TEXTS}[data]\ncorpus = 'c.tsv'",
        'data.corpus: has no effect with data.source = "docstrings"; leave it out: that has its own passages',
    ),
    (
        f"{TEXTS}[data]\nsource = 'beir'\ntest = 't.tsv'",
        'data.test: has no effect with data.source = "beir"; leave it out: that has its own held-out questions',
    ),
    (
        f"{TEXTS}[data]\nsource = 'q.jsonl'\ntest = 't.tsv'\nheld_out = 0.05",
        'data.held_out: has no effect with data.test = "t.tsv"; leave either out',
    ),
    (
        f"{TEXTS}[data]\nsource = 'beir'\nheld_out = 0.1",
        'data.held_out: has no effect with data.source = "beir"; leave it out: the folder says what is held out',
    ),
    (
        f"{TEXTS}[data]\nmined = 3\nnegatives = 0",
        "data.mined: has no effect with data.negatives = 0; leave it out",
    ),
    (
        f"{TEXTS}[data]\nnegatives = 1",
        "data.negatives: has no effect with data.mined = 0; leave it out, or have some mined: this source has none",
    ),
    (
        f"{TEXTS}[loss]\nbackend = 'dense'\nworkspace = 2_000_000",
        'loss.workspace: has no effect with loss.backend = "dense"; leave it out',
    ),
    (
        f"{TEXTS}sub_batch = {{query = 64, query_tokens = 512}}",
        "train.sub_batch.query: has no effect with train.sub_batch.query_tokens = 512; leave either out",
    ),
    (
        f"{TEXTS}sub_batch = {{passage = 64, passage_tokens = 512}}",
        "train.sub_batch.passage: has no effect with train.sub_batch.passage_tokens = 512; leave either out",
    ),
]

# what stands in the file, one word over it, and what goes with that: a warning
TAKEN_BACK = [
    (
        f"{STEPS}[optim]\nschedule = 'cooldown'\ncooldown = 0.3",
        "optim.schedule=linear",
        'x.toml: optim.cooldown is left out: it has no effect with optim.schedule = "linear"',
    ),
    (
        f"{STEPS}[optim]\nfinal = 0.1",
        "optim.schedule=constant",
        'x.toml: optim.final is left out: it has no effect with optim.schedule = "constant"',
    ),
    (
        f"{STEPS}[optim]\nrate_scaling = 'sqrt'\nbase_batch = 64",
        "optim.rate_scaling=none",
        'x.toml: optim.base_batch is left out: it has no effect with optim.rate_scaling = "none"',
    ),
    (
        f"{STEPS}[model]\nfeatures = 64",
        "model.both={config={model_type='clip'}}",
        "x.toml: model.features is left out: it has no effect with model.both",
    ),
    (
        f"{STEPS}[loss]\nlabel_smoothing = 0.1",
        "loss.kind=siglip",
        'x.toml: loss.label_smoothing is left out: it has no effect with loss.kind = "siglip"',
    ),
    (
        f"{STEPS}[optim]\neps = 1e-7",
        "optim.kind=adafactor",
        'x.toml: optim.eps is left out: it has no effect with optim.kind = "adafactor"',
    ),
    (
        f"{TEXTS}[data]\nnegatives = 2\nmined = 3",
        "data.mined=0",
        "x.toml: data.negatives is left out: it has no effect with data.mined = 0",
    ),
    (
        f"{TEXTS}[data]\nsource = 'q.jsonl'\nnegatives = 2",
        "data.source=beir",
        "x.toml: data.negatives is left out: it has no effect with data.mined = 0",
    ),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    for name in ("x.tsv", "q.jsonl", "c.tsv", "t.tsv", "m/tokenizer.json", "beir/corpus.jsonl", "beir/queries.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("filepath\ttitle\n")
    (tmp_path / "beir/qrels").mkdir()
    (tmp_path / "beir/qrels/test.tsv").write_text("")
    return tmp_path


@pytest.mark.parametrize(("text", "line"), IDLE, ids=lambda text: text.partition(":")[0])
def test_a_key_that_nothing_reads_is_refused(here, text, line):
    (here / "x.toml").write_text(text + "\n")
    with pytest.raises(RecipeError) as caught:
        load_any_recipe("x.toml")
    assert str(caught.value) == f"x.toml: {line}"
    # a run's own recipe is read back whatever stands in it
    assert load_any_recipe("x.toml", files=False) is not None


def test_every_rule_has_its_line_above_and_names_keys_that_there_are():
    told = {(line.partition(":")[0], line.split(" with ", 1)[1].split(" =")[0].split(";")[0]) for _, line in IDLE}
    rules = [*idle.EVERY, *(rule for of_kind in idle.OF_KIND.values() for rule in of_kind)]
    assert {(rule.key, rule.by) for rule in rules} == told
    known = {*known_keys(Recipe), *known_keys(RetrieverRecipe)}
    assert {key for rule in rules for key in (rule.key, rule.by, *rule.others)} <= known


@pytest.mark.parametrize(("text", "override", "said"), TAKEN_BACK, ids=lambda text: text.partition("=")[0])
def test_what_an_override_makes_idle_in_the_file_goes_with_a_warning(here, caplog, text, override, said):
    (here / "x.toml").write_text(text + "\n")
    recipe = load_any_recipe("x.toml", [override])
    assert caplog.messages == [said]
    section, key = said.split(" ")[1].rsplit(".", 1)
    changed, default = idle.value_of(recipe, section), type(idle.value_of(recipe, section)).model_fields.get(key)
    assert default is None or getattr(changed, key) == default.default
    # but two overrides have to agree
    words = [override, f"{section}.{key}={json.dumps(_as_told(text, key))}"]
    with pytest.raises(RecipeError, match=f"^{words[1]}: {section}.{key}: ".replace("[", r"\[")):
        load_any_recipe("x.toml", words)


def _as_told(text, key):
    return json.loads(text.split(f"{key} = ")[1].split("\n")[0])


def test_a_number_of_texts_takes_the_place_of_a_number_of_tokens(here):
    (here / "x.toml").write_text(f"{STEPS}sub_batch = {{text_tokens = 512}}\n")
    sub_batch = load_any_recipe("x.toml", ["train.sub_batch.text=32"]).train.sub_batch
    assert (sub_batch.text, sub_batch.text_tokens) == (32, None)
    (here / "x.toml").write_text(f"{TEXTS}sub_batch = {{query = 32, passage_tokens = 512}}\n")
    recipe = load_any_recipe("x.toml", ["train.sub_batch.query_tokens=99", "train.sub_batch.passage=5"])
    sub_batch = recipe.train.sub_batch
    assert (sub_batch.query, sub_batch.query_tokens, sub_batch.passage, sub_batch.passage_tokens) == (64, 99, 5, None)


def test_what_a_recipe_writes_has_no_idle_key_and_is_read_back(here):
    (here / "x.toml").write_text(f"{STEPS}[optim]\nwarmup_steps = 2\n[data]\nsource = 'x.tsv'\n")
    recipe = load_any_recipe("x.toml")
    (here / "x.toml").write_text(to_toml(recipe))
    written = {line.partition(" =")[0] for line in to_toml(recipe).splitlines()}
    assert not {"cooldown", "warmup", "base_batch", "digits"} & written
    assert {"final", "warmup_steps"} <= written
    assert load_any_recipe("x.toml") == recipe


def test_what_an_earlier_version_wrote_into_a_runs_folder_is_taken(here, caplog):
    (here / "recipe.toml").write_text(f"{STEPS}[optim]\ncooldown = 0.2\nfinal = 0.0\n")
    (here / "metrics.jsonl").write_text("")
    assert load_any_recipe("recipe.toml").optim.cooldown == 0.2
    assert caplog.messages == [
        'recipe.toml: optim.cooldown is left out: it has no effect with optim.schedule = "cosine"'
    ]
    with pytest.raises(RecipeError, match=r"^optim\.cooldown=0\.3: optim\.cooldown: has no effect"):
        load_any_recipe("recipe.toml", ["optim.cooldown=0.3"])


WORDS = [
    "loss.exchange=replicate loss.backend=dense",
    "loss.exchange=gather loss.backend=dense",
    "loss.exchange=ring loss.backend=eager",
    "train.precision=float32",
    "train.parallel=shard",
    "train.examples=1000",
    "train.batch=16",
    "train.sub_batch=8",
    "train.retain=0",
    "optim.schedule=constant",
    "optim.schedule=cooldown",
    "optim.kind=adamw",
    "optim.kind=adafactor",
    "optim.kind=muon",
    "optim.warmup_steps=1",
    "optim.rate_scaling=none",
    "model.tokenizer.folder=m",
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_recipes_that_ship_take_one_word(here, path):
    own = load_any_recipe(path)
    texts = ["data.mined=0", "data.source=q.jsonl", "data.source=beir"]
    more = ["loss.kind=siglip"] if isinstance(own, Recipe) else texts
    for words in [*WORDS, *more]:
        recipe = load_any_recipe(path, words.split())
        (here / "again.toml").write_text(to_toml(recipe))
        assert load_any_recipe("again.toml") == recipe, words


def test_titles_cut_by_tokens_are_so_in_evaluation_too(tmp_path, monkeypatch):
    job = ImageText.open(tiny_recipe(tmp_path, "train.sub_batch={image=16, text_tokens=9}"))
    run, seen = job.run, []
    real = run.model.encode_text
    monkeypatch.setattr(run.model, "encode_text", lambda **tokens: seen.append(tokens["input_ids"]) or real(**tokens))
    titles = ["a", "letter b", "the letter c", "d", "small letter e now"]
    found = run.encode_text(titles)
    assert max(ids.numel() for ids in seen) <= 9 < sum(ids.numel() for ids in seen)
    whole = replace(run, recipe=tiny_recipe(tmp_path)).encode_text(titles)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


def test_shards_on_one_process_are_said_to_be_none(tmp_path, caplog):
    job = SimpleNamespace(run=SimpleNamespace(recipe=tiny_recipe(tmp_path, "train.parallel=shard")))
    with Ranks().joined(job):
        pass
    assert caplog.messages == ['train.parallel = "shard" has no effect on one process: it has all of the weights']
