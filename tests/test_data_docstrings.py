"""The harvest of docstrings: functions without docstring, each text once, splits that do not leak, the cache."""

import json
import textwrap
from pathlib import Path

import pytest
from refusals import refusal

from contrastile.data import docstrings
from contrastile.data.base import silent
from contrastile.data.docstrings import distinct, documented, first_paragraph, harvest, source_files
from contrastile.data.registry import open_texts
from contrastile.data.texts import Query

SOURCE = '''
import functools

@functools.lru_cache
def decorated(x,
              y):
    """Adds one number to another
    with great care.

    More of it.
    """
    return x + y  # kept

class Thing:
    if True:
        async def inside(self):
            "Waits until something happens at last."
            def deeper():
                """Is a small function within a function."""
                return 1
            return deeper

def short():
    """Too few words."""
    return 2

def only_a_docstring():
    """Has nothing beside what this says."""

def one_line(): "Says five words or more here"; return 3

def undocumented():
    return 4
'''


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "library"
    (root / "pack" / "tests").mkdir(parents=True)
    (root / "pack" / "__init__.py").write_text(SOURCE)
    (root / "pack" / "tests" / "more.py").write_text(SOURCE)
    (root / "broken.py").write_text("def (:\n")
    (root / "latin.py").write_bytes(b'def f():\n    "\xe9 one two three four five"\n    return 1\n')
    return root


def found_in(root, name="pack/__init__.py", module="pack"):
    return list(documented(root / name, module))


def test_functions_methods_and_inner_functions_are_found(library):
    assert [found.name for found in found_in(library)] == [
        "pack.decorated",
        "pack.Thing.inside",
        "pack.Thing.inside.deeper",
    ]


def test_the_passage_has_no_docstring_and_no_decorator(library):
    first, second, third = found_in(library)
    assert first.code == "def decorated(x,\n              y):\n    return x + y  # kept"
    assert second.code.startswith("async def inside(self):\n    def deeper():")
    assert third.code == "def deeper():\n    return 1"


def test_the_query_is_the_first_paragraph_on_one_line(library):
    assert found_in(library)[0].summary == "Adds one number to another with great care."
    assert first_paragraph("  One\ttwo \n  \n three") == "One two"


def test_the_source_is_a_file_and_a_line(library):
    assert found_in(library)[0].source == f"{library}/pack/__init__.py:5"


def test_tests_are_left_out_and_broken_files_have_no_functions(library):
    assert [path.name for path in source_files(library)] == ["broken.py", "latin.py", "__init__.py"]
    assert {found.package for found in harvest([(library, "x.")], silent)} == {"x.pack"}


def test_a_form_feed_is_no_line(tmp_path):
    path = tmp_path / "old.py"
    path.write_text('x = 1\n\x0c\ndef f():\n    """Lives behind a form feed here."""\n    return 1\n')
    assert [found.code for found in documented(path, "old")] == ["def f():\n    return 1"]


def test_equal_code_and_equal_docstrings_are_taken_once(library):
    twice = [*found_in(library), *found_in(library)]
    kept, skipped = distinct(iter(twice))
    assert len(kept) == 3
    assert skipped == {"docstring seen before": 3}
    other = [docstrings.Documented("a", "p", "Another docstring for the same code.", kept[0].code + "\n", "")]
    assert distinct(iter([*kept, *other]))[1] == {"code seen before": 1}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    root = tmp_path / "many"
    for number in range(40):
        (root / f"pack{number}").mkdir(parents=True)
        functions = [
            f'def f_{number}_{n}():\n    """Gives the number {number} and {n} of them."""\n    return {number}, {n}'
            for n in range(5)
        ]
        (root / f"pack{number}" / "__init__.py").write_text("\n\n".join(functions))
    monkeypatch.setattr(docstrings, "library_folder", lambda: root)

    def again(**settings):
        return open_texts("docstrings", cache=tmp_path / "cache", **{"held_out": 0.2, "mined": 3, **settings})

    return again


def test_whole_packages_and_single_functions_are_held_out(opened):
    texts = opened()
    package = [passage.id.split(".")[0] for passage in texts.passages]
    sides = {name: {package[row] for row in rows} for name, rows in texts.splits.items()}
    assert sorted(row for rows in texts.splits.values() for row in rows) == list(range(200))
    assert not sides["packages"] & (sides["train"] | sides["functions"])
    assert all(len(rows) > 10 for rows in texts.splits.values())


def parts(texts):
    return {texts.queries[row].id: name for name, rows in texts.splits.items() for row in rows}


def test_the_split_of_a_function_does_not_depend_on_the_others(opened, tmp_path):
    before = parts(opened())
    (tmp_path / "many" / "aaa.py").write_text('def f():\n    """Is new among all of these."""\n    return 1\n')
    found = parts(opened(mined=2))
    assert len(found) == 201
    assert before.items() <= found.items()


def test_negatives_are_wrong_and_never_held_out(opened):
    texts = opened()
    train = set(texts.splits["train"].tolist())
    for row in train:
        query = texts.queries[row]
        assert len(set(query.negatives)) == 3
        assert set(query.negatives) <= train - {row}


def test_a_second_opening_reads_the_same(opened, monkeypatch):
    first = opened()
    monkeypatch.setattr(docstrings, "harvest", None)
    second = opened()
    assert (second.passages, second.queries, second.skipped) == (first.passages, first.queries, first.skipped)
    assert second.digest() == first.digest()


def test_a_changed_file_is_harvested_again(opened, tmp_path):
    before = opened()
    (tmp_path / "many" / "nothing.py").symlink_to(tmp_path / "nowhere.py")
    file = tmp_path / "many" / "pack7" / "__init__.py"
    file.write_text(file.read_text().replace("return 7, 3", "return 3, 7"))
    after = opened()
    assert len(after.passages) == len(before.passages)
    assert {"return 3, 7" in passage.text for passage in after.passages} == {True, False}
    assert after.digest() != before.digest()


def test_a_moved_library_is_harvested_from_its_new_place(opened, tmp_path, monkeypatch):
    before = opened()
    (tmp_path / "many").rename(tmp_path / "moved")
    monkeypatch.setattr(docstrings, "library_folder", lambda: tmp_path / "moved")
    after = opened()
    assert all(passage.source.startswith(str(tmp_path / "moved")) for passage in after.passages)
    # it is the same task
    assert after.digest() == before.digest()


def test_the_digest_knows_the_negatives_and_not_the_folder(opened):
    texts = opened()
    digest = texts.digest()
    texts.queries[0] = Query(texts.queries[0].id, texts.queries[0].text, (0,), negatives=(1,))
    assert texts.digest() != digest


def test_the_manifest_names_the_versions(opened, tmp_path):
    opened()
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["python"].count(".") == 2
    assert sorted(manifest["sha256"]) == ["passages.jsonl", "queries.jsonl", "splits.json"]


def test_a_package_that_is_not_there_is_refused(tmp_path):
    assert refusal(open_texts, "docstrings", cache=tmp_path, packages=["nowhere_to_be_found"]) == (
        '`packages` must be installed packages; got "nowhere_to_be_found". Install it, or leave it out.'
    )


def test_real_modules_are_harvested():
    found = list(harvest([(Path(textwrap.__file__), "")], silent))
    assert "Wrap a single paragraph of text, returning a list of wrapped lines." in {one.summary for one in found}
