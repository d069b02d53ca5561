"""What is written for readers holds: examples in docstrings run, links lead somewhere, the page of keys is complete."""

import doctest
import importlib
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import torch

import contrastile
from contrastile.train.config.base import Settings
from contrastile.train.recipe import KINDS, load_any_recipe

ROOT = Path(contrastile.__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CHAPTERS = sorted(
    path.relative_to(ROOT).with_suffix("")
    for path in Path(contrastile.__file__).parent.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=str)
def test_the_examples_of_a_chapter_run(chapter):
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(".".join(chapter.parts))).failed == 0


def test_every_public_name_has_an_example():
    for name in contrastile.__all__:
        assert ">>> " in getattr(contrastile, name).__doc__, name


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
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_every_page_is_reached_from_the_first_one():
    # mkdocs.yml lists the pages of the site
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    reached, waiting = set(), [ROOT / "README.md", *(ROOT / "docs" / name for name in listed)]
    while waiting:
        page = waiting.pop().resolve()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        waiting += [page.parent / link.partition("#")[0] for link in LINK.findall(_prose(page)) if "://" not in link]
    assert {page.resolve() for page in DOCUMENTS} <= reached


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


@pytest.mark.parametrize(("kind", "section"), [("image-text", "Pictures and texts"), ("retriever", "Retrievers")])
def test_the_page_of_keys_says_what_the_program_has(kind, section):
    told, keys = _told("Every recipe", section), _keys(KINDS[kind])
    # what one of several optimizers or losses has of its own is told with its name
    assert set(told) == set(keys)
    for key, default in told.items():
        if key != "kind":
            assert default in [_plain(each) for each in keys[key]], key


def test_the_smallest_recipe_of_the_page_is_one(tmp_path):
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    (tmp_path / "small.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    recipe = load_any_recipe(tmp_path / "small.toml")
    assert (recipe.name, recipe.train.examples) == ("small", 100_000)
