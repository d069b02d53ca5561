"""The package as it is built and cited: what a wheel holds, and one version everywhere."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import contrastile
from contrastile._errors import extra
from contrastile.integrations import open_clip

ROOT = Path(contrastile.__file__).parent.parent


def test_a_wheel_holds_the_modules_the_recipes_the_page_and_the_mark_of_types(monkeypatch):
    pytest.importorskip("setuptools", minversion="77")
    monkeypatch.chdir(ROOT)
    from setuptools import Distribution

    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    # the package has no files but those that pyproject.toml names; looking for others would write a folder here
    distribution.include_package_data = False
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    built = {Path(path).relative_to(build.build_lib).as_posix() for path in build.get_outputs(include_bytecode=0)}
    sources = [path.relative_to(ROOT) for path in (ROOT / "contrastile").rglob("*")]
    wanted = {
        path.as_posix() for path in sources if path.suffix in (".py", ".toml", ".jinja") or path.name == "py.typed"
    }
    assert built == wanted
    assert "contrastile/recipes/glyphs.toml" in built
    assert distribution.metadata.version == contrastile.__version__


def test_the_version_is_the_one_of_the_citation_and_of_the_newest_changes():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest, date = re.search(r"^## (\S+) · (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert citation["version"] == newest == contrastile.__version__
    assert citation["date-released"] == date
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [author["name"] for author in project["authors"]] == [author["name"] for author in citation["authors"]]
    assert set(project["urls"].values()) == {reference["url"] for reference in citation["references"]}


@pytest.mark.parametrize(
    ("absent", "named", "line"),
    [
        (["open_clip", "open_clip_train"], "open_clip_train", "`open_clip` is not installed; run: pip install"),
        (["webdataset"], "webdataset", "`webdataset` is not installed; run: pip install"),
        ([], "open_clip_train", "`open_clip` must be of version 2.30 to 4.x; got no module open_clip_train. Run:"),
    ],
)
def test_the_command_line_of_open_clip_names_what_is_missing(monkeypatch, capsys, absent, named, line):
    def imported(name):
        raise ModuleNotFoundError(f"No module named {named!r}", name=named)

    monkeypatch.setattr(open_clip, "import_module", imported)
    monkeypatch.setattr(open_clip, "find_spec", lambda name: None if name in absent else object())
    monkeypatch.setattr("sys.argv", ["open_clip", "--model", "ViT-B-16"])
    assert open_clip.command() == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"{line} ")
    assert complaint.count("\n") == 1


def test_a_misspelt_name_is_told_the_one_that_was_meant():
    with pytest.raises(AttributeError, match="module 'contrastile' has no attribute 'CLIPLoss'") as caught:
        contrastile.CLIPLoss  # noqa: B018
    # Python suggests a name of this module that is like it
    assert (caught.value.name, caught.value.obj) == ("CLIPLoss", contrastile)


def test_pip_is_given_the_clone_where_the_package_lies_in_one(tmp_path):
    # the tests run in a clone
    assert extra("train") == "'.[train]'"
    assert extra("train", tmp_path) == '"contrastile[train]"'
    for name, source in (("another", '"contrastile[train]"'), ("contrastile", "'.[train]'")):
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
        assert extra("train", tmp_path) == source
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert {"train", "data", "search", "log"} <= tomllib.load(file)["project"]["optional-dependencies"].keys()


def test_issue_forms_are_valid():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= form.keys()
            assert len({field["id"] for field in form["body"]}) == len(form["body"])
