"""What is written for readers holds: the examples in docstrings run, and every link of a document leads somewhere."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import contrastile

ROOT = Path(contrastile.__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
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
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        waiting += [page.parent / link.partition("#")[0] for link in LINK.findall(_prose(page)) if "://" not in link]
    assert {page.resolve() for page in DOCUMENTS} <= reached
