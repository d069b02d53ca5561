"""Documents are true: examples in docstrings run, links lead somewhere, the page of keys is complete."""

import ast
import doctest
import importlib
import inspect
import re
import shlex
import sys
import tomllib
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from ranks import Pool
from test_coming_from import Clip, run
from torch import nn
from torch.optim import SGD

import contrastile
from contrastile.cli.main import _parsed, build_parser
from contrastile.losses.reference import dense_decoupled, dense_sigmoid, dense_softmax
from contrastile.train.config.base import Settings
from contrastile.train.recipe import KINDS, load_any_recipe

ROOT = Path(contrastile.__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CHAPTERS = sorted(
    path.relative_to(ROOT).with_suffix("")
    for path in Path(contrastile.__file__).parent.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
LISTED = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# the first has tests of its own; the second loads a run that must exist
OWN_TESTS, WITH_A_RUN = "coming_from", "contrastile.load("
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=str)
def test_the_examples_of_a_chapter_run(chapter):
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(".".join(chapter.parts))).failed == 0


def test_every_public_name_has_an_example():
    for house in (contrastile, contrastile.losses):
        for name in house.__all__:
            assert ">>> " in getattr(house, name).__doc__, name


def test_every_loss_has_its_formula_and_its_source():
    modules = [getattr(contrastile, name) for name in contrastile.__all__ if name.endswith("Loss")]
    for loss in (*modules, *(getattr(contrastile.losses, name) for name in contrastile.losses.__all__)):
        assert "Naively" in loss.__doc__, loss
        assert re.search(r"et al\. 20\d\d|Solatorio 2024|siglip-kernel", loss.__doc__), loss


def _prose(document):
    return FENCED.sub("", document.read_text(encoding="utf-8"))


def _anchors(document):
    """Headings as GitHub names them."""
    return {
        re.sub(r"[^\w\- ]", "", found).strip().lower().replace(" ", "-") for found in HEADING.findall(_prose(document))
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for link in LINK.findall(_prose(document)):
        if link.startswith("http"):
            continue
        place, _, anchor = link.partition("#")
        target = document.parent / place if place else document
        # pages of the reference are written when the site is built
        if target.resolve().parent == ROOT / "docs" / "reference":
            assert f"reference/{target.name}" in LISTED, link
            continue
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_every_page_is_reached_from_the_first_one():
    # mkdocs.yml lists the pages of the site
    reached, waiting = set(), [ROOT / "README.md", *(ROOT / "docs" / name for name in LISTED)]
    while waiting:
        page = waiting.pop().resolve()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        waiting += [page.parent / link.partition("#")[0] for link in LINK.findall(_prose(page)) if "://" not in link]
    assert {page.resolve() for page in DOCUMENTS} <= reached


def _written_by(name):
    """A module of the site's own code."""
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_measured_files(document):
    text = document.read_text(encoding="utf-8")
    assert _written_by("tables").current(text) == text, "run docs/site/tables.py"


def test_the_picture_of_the_losses_shows_their_gradients():
    figures = _written_by("figures")
    image, text, ids = figures._small_batch()
    weights = figures.loss_weights()
    same = ids[:, None] == ids
    copies = same & ~torch.eye(6, dtype=torch.bool)
    for title, formula in {
        "ClipLoss()": partial(dense_softmax, symmetric=True),
        "ClipLoss(), ids=ids": partial(dense_softmax, symmetric=True, excluded=copies),
        "ClipLoss(), labels=ids": partial(dense_softmax, symmetric=True, positive=same),
        "DCLLoss()": partial(dense_decoupled, symmetric=True),
        "SigLipLoss()": partial(dense_sigmoid, bias=-5.0),
    }.items():
        logits = (10.0 * image @ text.T).requires_grad_()
        formula(logits, torch.eye(6, dtype=torch.float64), 1.0).backward()
        torch.testing.assert_close(weights[title], 6 * logits.grad, rtol=0, atol=1e-12)
    for title, of_pairs in weights.items():
        left_out = title in ("ClipLoss(), ids=ids", "GISTLoss(margin=0.05)")
        assert torch.equal(of_pairs == 0, copies & left_out), title


def test_every_table_is_on_a_page():
    tables = _written_by("tables")
    pages = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    assert {mark[1] for mark in tables.MARKS.findall(pages)} == set(tables.TABLES)


def test_the_calls_of_the_losses_are_their_signatures():
    section = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8").split("## How is each loss called?")[1]
    rows = re.findall(r"^\| (`\w+Loss`.*?) \| `\((.*?)\)` \| (.*?) ?\|$", section.split("\n## ")[0], re.MULTILINE)
    calls = {name: (call, keywords) for names, call, keywords in rows for name in re.findall(r"\w+", names)}
    assert set(calls) == {name for name in contrastile.__all__ if name.endswith("Loss")}
    for name, (call, keywords) in calls.items():
        arguments = list(inspect.signature(getattr(contrastile, name).forward).parameters.values())[1:]
        shown = [x.replace(annotation=x.empty) for x in arguments if x.kind is not x.VAR_KEYWORD]
        # a missing scale is refused in a sentence, and so are labels where they come before it
        needed = [x.default is None and x.name.endswith(("scale", "labels")) for x in shown]
        shown = [x.replace(default=x.empty) if need else x for x, need in zip(shown, needed, strict=True)]
        assert call == ", ".join(str(x) for x in shown if x.kind is not x.KEYWORD_ONLY)
        assert re.findall(r"\w+", keywords) == [x.name for x in shown if x.kind is x.KEYWORD_ONLY]


def test_the_index_of_errors_has_those_of_functions_that_check():
    calls = (
        'number("sigma", x, holds, "be positive", "0.5, say.")',
        'one_of("form", x, ("out", "in"), "Take one.")',
        'whole_number("size", x, 1, "Count.")',
        'whole_number("k", x, 1, "Count.", rule="be a rank")',
    )
    tree = ast.parse("def check(x):\n    " + "\n    ".join(calls))
    found = defaultdict(set)
    _written_by("reference")._collect(tree.body[0], ROOT / "contrastile" / "losses" / "x.py", {}, found)
    assert sorted(row[:3] for row in found["Losses"]) == [
        ("form", "be one of out, in", "Take one."),
        ("k", "be a rank", "Count."),
        ("sigma", "be positive", "0.5, say."),
        ("size", "be a whole number of at least 1", "Count."),
    ]


def test_the_index_of_errors_follows_the_branches_of_a_function():
    tree = ast.parse("""
def check(x):
    if x < 0:
        remedy = "Take its size."
        raise invalid("x", "be positive", x, remedy)
    remedy = "Round it."
    if x > 9:
        remedy = "Halve it."
    elif x > 8:
        remedy = "Leave it out."
        return remedy
    raise invalid("x", "be whole", x, remedy)
""")
    found = defaultdict(set)
    _written_by("reference")._collect(tree.body[0], ROOT / "contrastile" / "losses" / "x.py", {}, found)
    assert {row[1:3] for row in found["Losses"]} == {
        ("be positive", "Take its size."),
        ("be whole", "Halve it. / Round it."),
    }


class Tokens(nn.Module):
    """Vectors of tokens, or a score of each text."""

    def __init__(self, features):
        super().__init__()
        self.words = nn.Embedding(20, features)

    def forward(self, texts):
        return self.words(texts)


def _stand_ins():
    """Names that a reader has by then: a model, a batch, an optimizer."""
    torch.manual_seed(0)
    model, N = Clip(bias=False), 6
    pixels, tokens, mask = torch.randn(N, 5), torch.randint(0, 20, (N, 3)), torch.ones(N, 3, dtype=torch.bool)
    return {
        "model": model, "pixels": pixels, "tokens": tokens, "loader": [(pixels, tokens)],
        "optimizer": SGD(model.parameters(), 0.1), "image_tower": model.visual, "scale": model.logit_scale.exp(),
        "text_tower": nn.Sequential(nn.EmbeddingBag(20, 4)), "tower": Tokens(4), "queries": tokens,
        "documents": tokens.flip(1), "query_mask": mask, "document_mask": mask, "query_ids": tokens,
        "document_ids": tokens, "read": nn.Sequential(nn.EmbeddingBag(20, 4), nn.Linear(4, 1)),
    }  # fmt: skip


def _run_blocks(document):
    names = _stand_ins()
    for block in PYTHON.findall(document.read_text(encoding="utf-8")):
        if WITH_A_RUN not in block:
            names = run(block.replace('"cuda"', '"cpu"'), **names)


COMMAND = re.compile(r"^    (?:torchrun .*? -m )?contrastile (\w.*)", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_of_a_page_are_known_to_the_parser(document):
    # the log has commands of earlier versions
    if document.name in ("log.md", "CHANGELOG.md"):
        return
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    for command in COMMAND.findall(text):
        _parsed(build_parser(), shlex.split(command, comments=True))


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
# constants of a tutorial, small enough for a test
SMALL = {"STEPS": 1, "HEAD_STEPS": 1}


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_a_notebook_with_a_title(script):
    first, *others = _written_by("tutorials").cells(script.read_text(encoding="utf-8"))
    assert first.markdown
    assert first.text.startswith("# ")
    assert f"tutorials/{script.stem}.md" in LISTED
    for cell in others:
        if not cell.markdown:
            compile(cell.text, script.name, "exec")
        for link in LINK.findall(cell.text) if cell.markdown else ():
            target = (script.parent / link.partition("#")[0]).resolve()
            assert link[0] == "#" or target.exists() or f"reference/{target.name}" in LISTED, link


def test_a_tutorial_runs():
    names = {}
    for cell in _written_by("tutorials").cells((ROOT / "docs" / "tutorials" / "views.py").read_text(encoding="utf-8")):
        if not cell.markdown:
            exec(compile(cell.text, "views.py", "exec"), names)
            names |= {name: value for name, value in SMALL.items() if name in names}
    assert names["accuracy"](names["trunk"]) > 0.8


def _run_on_rank(rank, group, document):
    _run_blocks(document)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore:.*got rows of length other than 1")
def test_the_code_of_a_page_runs(document, pool: Pool):
    text = document.read_text(encoding="utf-8")
    if OWN_TESTS in document.as_posix() or "```python" not in text:
        return
    if "DistributedDataParallel" in "".join(PYTHON.findall(text)):
        # the page's code knows the default group alone
        pool.check(_run_on_rank, 4, document)
    else:
        _run_blocks(document)


def _models(kind):
    """The models of settings that an annotation is made of."""
    if isinstance(kind, type):
        return [kind] if issubclass(kind, Settings) else []
    return [model for part in get_args(kind) for model in _models(part)]


def _keys(model, prefix=""):
    """Every key of a recipe with what it may be by default; towers, tests and adapters are told with their section."""
    found = {}
    for name, field in model.model_fields.items():
        key, inner = prefix + name, _models(field.annotation)
        plain = field.get_default(call_default_factory=True, validated_data={}) if not field.is_required() else None
        if isinstance(plain, Settings):
            plain = plain.model_dump(exclude_none=True)
        whole = key.startswith(
            ("model.image", "model.text", "model.both", "model.query", "model.passage", "model.lora")
        )
        if inner and not whole and not key.startswith("evaluate."):
            for each in inner:
                for deeper, defaults in _keys(each, f"{key}.").items():
                    found.setdefault(deeper, []).extend(defaults)
            if key != "train.sub_batch":
                continue
            plain = None
        found.setdefault(key, []).append(plain)
    return found


def _told(*sections):
    """The keys of the page's sections with the default that each row says."""
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    told = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        if section.splitlines()[0] in sections:
            for key, default in re.findall(r"^\| `([\w.]+)` \| (?:`(.*?)`|\u2013) \|", section, re.MULTILINE):
                told[key] = tomllib.loads(f"x = {default}")["x"] if default else None
    return told


def _plain(value):
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(("kind", "section"), [("image-text", "Images and texts"), ("retriever", "Retrievers")])
def test_the_page_of_keys_says_what_the_program_has(kind, section):
    told, keys = _told("Every recipe", section), _keys(KINDS[kind])
    # a property of one of several optimizers or losses is told with its name
    assert set(told) == set(keys)
    for key, default in told.items():
        if key != "kind":
            assert default in [_plain(each) for each in keys[key]], key


def test_the_smallest_recipe_of_the_page_is_one(tmp_path):
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    (tmp_path / "small.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    recipe = load_any_recipe(tmp_path / "small.toml")
    assert (recipe.name, recipe.train.examples) == ("small", 100_000)
