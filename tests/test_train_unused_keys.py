"""No key of a recipe is ignored: an unused one is refused, or left out where an override makes it unused."""

import json
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refusal
from tiny_runs import tiny_recipe

from contrastile.train.config import Recipe
from contrastile.train.config.base import known_keys
from contrastile.train.image_text import ImageText
from contrastile.train.ranks import Ranks
from contrastile.train.recipe import RecipeError, load_any_recipe, to_toml
from contrastile.train.retriever.config import RetrieverRecipe

STEPS = "[train]\nexamples = 1000\n"
TEXTS = f"kind = 'retriever'\n{STEPS}"
SHIPPED = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))

# the file, and the line that refuses it
# fmt: off
UNUSED = [
    (STEPS + "[optim]\ncooldown = 0.2",
     'optim.cooldown: has no effect with optim.schedule = "cosine"; leave it out, or set optim.schedule = "cooldown"'),
    (STEPS + "[optim]\nschedule = 'constant'\nfinal = 0.0",
     'optim.final: has no effect with optim.schedule = "constant"; leave it out'),
    (STEPS + "[optim]\nbase_batch = 64",
     'optim.base_batch: has no effect with optim.rate_scaling = "none"; '
     'leave it out, or set optim.rate_scaling = "sqrt" or "linear"'),
    (STEPS + "[optim]\nwarmup = 0.05\nwarmup_steps = 2",
     "optim.warmup: has no effect with optim.warmup_steps = 2; leave either out"),
    (STEPS + "[optim]\nwarmup = 0.05\nwarmup_epochs = 0.25",
     "optim.warmup: has no effect with optim.warmup_epochs = 0.25; leave either out"),
    (STEPS + "[model.tokenizer]\nkind = 'words'\nfolder = 'm'",
     'model.tokenizer.kind: has no effect with model.tokenizer.folder = "m"; leave it out'),
    (TEXTS + "[model.tokenizer]\nsize = 99\nfolder = 'm'",
     'model.tokenizer.size: has no effect with model.tokenizer.folder = "m"; leave it out'),
    (STEPS + "[model]\nfeatures = 256\nboth = {config = {model_type = 'clip'}}",
     "model.features: has no effect with model.both; leave it out: that model has its own"),
    (STEPS + "[model]\ntext = {kind = 'open_clip', name = 'x'}\ntokenizer = {size = 99}",
     'model.tokenizer.size: has no effect with model.tokenizer.kind = "open_clip"; '
     "leave it out: CLIP's words are given"),
    (STEPS + "sub_batch = {text = 256, text_tokens = 512}",
     "train.sub_batch.text: has no effect with train.sub_batch.text_tokens = 512; leave either out"),
    (STEPS + "[data]\nsource = 'x.tsv'\n[evaluate]\ndigits = true",
     'evaluate.digits: has no effect with data.source = "x.tsv"; leave it out: they are a test of glyphs'),
    (TEXTS + "[data]\nsource = 'q.jsonl'\npackages = ['numpy', 'scipy', 'torch']",
     'data.packages: has no effect with data.source = "q.jsonl"; leave it out'),
    (TEXTS + "[data]\ncorpus = 'c.tsv'",
     'data.corpus: has no effect with data.source = "docstrings"; leave it out: that has its own passages'),
    (TEXTS + "[data]\nsource = 'beir'\ntest = 't.tsv'",
     'data.test: has no effect with data.source = "beir"; leave it out: that has its own held-out questions'),
    (TEXTS + "[data]\nsource = 'q.jsonl'\ntest = 't.tsv'\nheld_out = 0.05",
     'data.held_out: has no effect with data.test = "t.tsv"; leave either out'),
    (TEXTS + "[data]\nsource = 'beir'\nheld_out = 0.1",
     'data.held_out: has no effect with data.source = "beir"; leave it out: the folder says what is held out'),
    (TEXTS + "[data]\nmined = 3\nnegatives = 0", "data.mined: has no effect with data.negatives = 0; leave it out"),
    (TEXTS + "[data]\nnegatives = 1",
     "data.negatives: has no effect with data.mined = 0; leave it out, or have some mined: this source has none"),
    (TEXTS + "[loss]\nbackend = 'dense'\nworkspace = 2_000_000",
     'loss.workspace: has no effect with loss.backend = "dense"; leave it out'),
    (TEXTS + "[loss]\nhardness_mode = 'all_negatives'",
     "loss.hardness_mode: has no effect with loss.hardness_strength = 0.0; leave it out"),
    (STEPS + "[loss]\nkind = 'siglip'\nbalanced = true",
     "loss.balanced: has no effect with loss.labels = false; leave it out, or set loss.labels = true"),
    (TEXTS + "sub_batch = {query = 64, query_tokens = 512}",
     "train.sub_batch.query: has no effect with train.sub_batch.query_tokens = 512; leave either out"),
    (TEXTS + "sub_batch = {passage = 64, passage_tokens = 512}",
     "train.sub_batch.passage: has no effect with train.sub_batch.passage_tokens = 512; leave either out"),
    *[(TEXTS + f"[model]\n{key} = {value}",
       f'model.{key}: has no effect with model.kind = "single"; leave it out, or set model.kind = "late"')
      for key, value in (("query_expansion", "false"), ("attend_to_expansion", "true"), ("skip_punctuation", "true"),
                         ("query_marker", "'x'"), ("passage_marker", "'x'"))],
    (TEXTS + "[evaluate]\ncandidates = 100",
     'evaluate.candidates: has no effect with model.kind = "single"; leave it out, or set model.kind = "late"'),
    (TEXTS + "[model]\nkind = 'late'\nquery_expansion = false\nattend_to_expansion = true",
     "model.attend_to_expansion: has no effect with model.query_expansion = false; leave it out"),
    *[(TEXTS + "[model]\nkind = 'late'\n" + "\n".join(
           f"{each} = {{kind = 'transformers', config = {{model_type = 'bert'}}{pooling}}}"
           for each, pooling in ((side, ", pooling = 'cls'"), (other, "")) if each),
       f'model.{side}.pooling: has no effect with model.kind = "late"; leave it out: each token has its vector')
      for side, other in (("both", ""), ("query", "passage"), ("passage", "query"))],
]

# the file, an override, and the warning about the key of the file that it makes unused
TAKEN_BACK = [
    (STEPS + "[optim]\nschedule = 'cooldown'\ncooldown = 0.3", "optim.schedule=linear",
     'optim.cooldown is left out: it has no effect with optim.schedule = "linear"'),
    (STEPS + "[optim]\nfinal = 0.1", "optim.schedule=constant",
     'optim.final is left out: it has no effect with optim.schedule = "constant"'),
    (STEPS + "[optim]\nrate_scaling = 'sqrt'\nbase_batch = 64", "optim.rate_scaling=none",
     'optim.base_batch is left out: it has no effect with optim.rate_scaling = "none"'),
    (STEPS + "[data]\nimage_size = 224\n[model]\nfeatures = 64", "model.both={config={model_type='clip'}}",
     "model.features is left out: it has no effect with model.both"),
    (STEPS + "[loss]\nlabel_smoothing = 0.1", "loss.kind=siglip",
     'loss.label_smoothing is left out: it has no effect with loss.kind = "siglip"'),
    (STEPS + "[optim]\neps = 1e-7", "optim.kind=adafactor",
     'optim.eps is left out: it has no effect with optim.kind = "adafactor"'),
    (TEXTS + "[data]\nnegatives = 2\nmined = 3", "data.mined=0",
     "data.negatives is left out: it has no effect with data.mined = 0"),
    (TEXTS + "[data]\nsource = 'q.jsonl'\nnegatives = 2", "data.source=beir",
     "data.negatives is left out: it has no effect with data.mined = 0"),
]
# fmt: on


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x.tsv", "q.jsonl", "c.tsv", "t.tsv", "m/tokenizer.json", "beir/corpus.jsonl", "beir/queries.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("filepath\ttitle\n")
    (tmp_path / "beir/qrels").mkdir()
    (tmp_path / "beir/qrels/test.tsv").write_text("")
    return tmp_path


@pytest.mark.parametrize(("text", "line"), UNUSED, ids=lambda text: text.partition(":")[0])
def test_a_key_that_nothing_reads_is_refused(here, text, line):
    (here / "x.toml").write_text(text + "\n")
    assert refusal(load_any_recipe, "x.toml") == f"x.toml: {line}"
    # a run's own recipe is read back whatever stands in it
    assert load_any_recipe("x.toml", files=False) is not None


def rules(recipe):
    """Every rule about an unused key, as the key and the keys that decide; the key is None where they all may."""
    for section, owner in {(key.rpartition(".")[0], owner) for key, owner in known_keys(recipe)}:
        prefix = f"{section}.".lstrip(".")
        for rule in owner.model_construct().unused():
            yield prefix + rule.key, prefix + rule.by[0]
            yield from ((None, prefix + other) for other in rule.by[1:])
        yield from ((None, prefix + other) for others in owner.instead.values() for other in others)


@pytest.mark.parametrize("recipe", [Recipe, RetrieverRecipe])
def test_rules_name_known_keys_and_each_has_its_sentence_above(recipe):
    by = re.compile(r"([\w.]+): has no effect with ([\w.]+)")
    sentences = {by.match(line).groups() for _, line in UNUSED}
    known = {key for key, _ in known_keys(recipe)}
    assert {by for _, by in rules(recipe)} <= known
    assert {(key, by) for key, by in rules(recipe) if key is not None} <= sentences


@pytest.mark.parametrize(("text", "override", "said"), TAKEN_BACK, ids=lambda text: text.partition("=")[0])
def test_a_key_of_the_file_that_an_override_makes_unused_is_left_out_with_a_warning(here, caplog, text, override, said):
    (here / "x.toml").write_text(text + "\n")
    recipe = load_any_recipe("x.toml", [override])
    assert caplog.messages == [f"x.toml: {said}"]
    section, key = said.split(" ")[0].rsplit(".", 1)
    changed, default = attrgetter(section)(recipe), type(attrgetter(section)(recipe)).model_fields.get(key)
    assert default is None or getattr(changed, key) == default.default
    # but two overrides have to agree
    words = [override, f"{section}.{key}={json.dumps(_as_told(text, key))}"]
    with pytest.raises(RecipeError, match=f"^{words[1]}: {section}.{key}: ".replace("[", r"\[")):
        load_any_recipe("x.toml", words)


def _as_told(text, key):
    return json.loads(text.split(f"{key} = ")[1].split("\n")[0])


def test_an_override_of_one_side_leaves_the_number_of_both_to_the_other(here):
    for name, kind, sides in (("x", STEPS, ("image", "text")), ("y", TEXTS, ("query", "passage"))):
        (here / f"{name}.toml").write_text(f"{kind}sub_batch = 16\n")
        sub_batch = load_any_recipe(f"{name}.toml", [f"train.sub_batch.{sides[0]}=8"]).train.sub_batch
        assert [getattr(sub_batch, side) for side in sides] == [8, 16]


def test_a_number_of_texts_takes_the_place_of_a_number_of_tokens(here):
    (here / "x.toml").write_text(f"{STEPS}sub_batch = {{text_tokens = 512}}\n")
    sub_batch = load_any_recipe("x.toml", ["train.sub_batch.text=32"]).train.sub_batch
    assert (sub_batch.text, sub_batch.text_tokens) == (32, None)
    (here / "x.toml").write_text(f"{TEXTS}sub_batch = {{query = 32, passage_tokens = 512}}\n")
    recipe = load_any_recipe("x.toml", ["train.sub_batch.query_tokens=99", "train.sub_batch.passage=5"])
    sub_batch = recipe.train.sub_batch
    assert (sub_batch.query, sub_batch.query_tokens, sub_batch.passage, sub_batch.passage_tokens) == (64, 99, 5, None)


def test_a_written_recipe_has_no_unused_key_and_is_read_back(here):
    (here / "x.toml").write_text(f"{STEPS}[optim]\nwarmup_steps = 2\n[data]\nsource = 'x.tsv'\n")
    recipe = load_any_recipe("x.toml")
    (here / "x.toml").write_text(to_toml(recipe))
    written = {line.partition(" =")[0] for line in to_toml(recipe).splitlines()}
    assert not {"cooldown", "warmup", "base_batch", "digits"} & written
    assert {"final", "warmup_steps"} <= written
    assert load_any_recipe("x.toml") == recipe


def test_unused_keys_that_an_earlier_version_wrote_into_a_run_folder_are_left_out(here, caplog):
    (here / "recipe.toml").write_text(f"{STEPS}[optim]\ncooldown = 0.2\nfinal = 0.0\n")
    (here / "metrics.jsonl").write_text("")
    assert load_any_recipe("recipe.toml").optim.cooldown == 0.2
    assert caplog.messages == [
        'recipe.toml: optim.cooldown is left out: it has no effect with optim.schedule = "cosine"'
    ]
    with pytest.raises(RecipeError, match=r"^optim\.cooldown=0\.3: optim\.cooldown: has no effect"):
        load_any_recipe("recipe.toml", ["optim.cooldown=0.3"])


WORDS = [
    "loss.exchange=replicate loss.backend=dense", "loss.exchange=gather loss.backend=dense",
    "loss.exchange=ring loss.backend=eager", "train.precision=float32", "train.parallel=shard", "train.examples=1000",
    "train.batch=16", "train.sub_batch=8", "train.retain=0", "optim.schedule=constant", "optim.schedule=cooldown",
    "optim.kind=adamw", "optim.kind=adafactor", "optim.kind=muon", "optim.warmup_steps=1", "optim.rate_scaling=none",
    "model.tokenizer.folder=m",
]  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_takes_one_override_and_is_read_back(here, path):
    own = load_any_recipe(path, files=False)
    # recipes for one's own data have none
    built_in = "glyphs" if isinstance(own, Recipe) else "docstrings"
    data = [] if own.data.source else [f"data.source={built_in}"]
    texts = ["data.mined=0", "data.source=q.jsonl", "data.source=beir"]
    more = ["loss.kind=siglip"] if isinstance(own, Recipe) else texts
    for words in [*WORDS, *more]:
        recipe = load_any_recipe(path, [*data, *words.split()])
        (here / "again.toml").write_text(to_toml(recipe))
        assert load_any_recipe("again.toml") == recipe, words


def test_sub_batches_by_tokens_hold_in_evaluation_too(tmp_path, monkeypatch):
    job = ImageText.open(tiny_recipe(tmp_path, "train.sub_batch={image=16, text_tokens=9}"))
    run, seen = job.run, []
    real = run.model.encode_text
    monkeypatch.setattr(run.model, "encode_text", lambda **tokens: seen.append(tokens["input_ids"]) or real(**tokens))
    titles = ["a", "letter b", "the letter c", "d", "small letter e now"]
    found = run.encode_text(titles)
    assert max(ids.numel() for ids in seen) <= 9 < sum(ids.numel() for ids in seen)
    whole = replace(run, recipe=tiny_recipe(tmp_path)).encode_text(titles)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


def test_shards_on_one_process_are_warned_about(tmp_path, caplog):
    run = SimpleNamespace(recipe=tiny_recipe(tmp_path, "train.parallel=shard"))
    with Ranks().joined(SimpleNamespace(run=run)):
        pass
    assert caplog.messages == ['train.parallel = "shard" has no effect on one process: it has all of the weights']
