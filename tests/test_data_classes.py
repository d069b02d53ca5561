"""Folders of classes in the layouts of ImageNet and its relatives, files of names, of templates and of mappings."""

import json

import numpy as np
import pytest
from refusals import refusal
from tiny_tests import class_folder

from contrastile.data.evaluation_sets import open_class_folder, read_classes, read_mapping, read_prompts
from contrastile.data.sources import PICTURES, PROMPTS

WNIDS = [f"n{number:08}" for number in (1440764, 1443537, 1484850, 2012849)]
NAMES = ["tench", "goldfish", "white shark", "crane"]


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- files of names


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.json", {"a": "one", "b": ["two", "deux"]}),
        ("x.txt", "a\tone\n\nb\t two,  deux\n"),
        ("x.tsv", "\ufeffa\tone\nb\ttwo, deux"),
        ("x.json", '\n {"a": "one", "b": ["two", " deux "]}'),
    ],
)
def test_names_are_read_in_every_form(tmp_path, name, content):
    assert read_classes(written(tmp_path / name, content)) == [("a", ("one",)), ("b", ("two", "deux"))]


def test_a_list_has_no_folders(tmp_path):
    assert read_classes(written(tmp_path / "x.json", ["one", ["two", "deux"]])) == [
        (None, ("one",)),
        (None, ("two", "deux")),
    ]


def test_keras_s_file_is_in_the_order_of_its_numbers(tmp_path):
    told = {str(number): [WNIDS[number], NAMES[number].replace(" ", "_")] for number in (3, 0, 2, 1)}
    found = read_classes(written(tmp_path / "x.json", told))
    assert found == [(folder, (name,)) for folder, name in zip(WNIDS, NAMES, strict=True)]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.json", "[", "`classes` must be a JSON file where its name says so; got {}: Expecting value: "
         "line 1 column 2 (char 1). Mend it."),
        ("x.json", "3", "`classes` must be a JSON list or object; got int in {}. "
         "One name for each class, or an object from folder to name."),
        ("x.json", '{"a": "one", "b": "two", "a": "three"}',
         '`classes` must name each folder once; got "a" twice in {}. Put its names into one entry.'),
        ("x.json", ["one", ""],
         "`classes` must have a name each; got none for 1 in {}. A text, or a list of synonyms."),
        ("x.json", {"a": "one", "b": {"name": "two"}},
         "`classes` must have a name each; got none for b in {}. A text, or a list of synonyms."),
        ("x.json", ["one", ["two", 2]],
         "`classes` must have a name each; got none for 1 in {}. A text, or a list of synonyms."),
        ("x.json", ["one"], "`classes` must be two at least; got 1 in {}. There is nothing to choose from."),
        ("x.txt", "a\tone\nb two\n",
         "`classes` must have a tab between folder and name; got none at {}:2. Or give a JSON file."),
    ],
)  # fmt: skip
def test_names_that_are_none_are_refused(tmp_path, name, content, sentence):
    path = written(tmp_path / name, content)
    assert refusal(read_classes, path) == sentence.format(path)


@pytest.mark.parametrize("read", [read_classes, read_mapping])
def test_files_nested_without_end_are_refused(tmp_path, read):
    path = tmp_path / "x.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="must be a JSON file"):
        read(path)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    for read, what in ((read_classes, "classes"), (read_mapping, "mapping"), (read_prompts, "templates")):
        expected = f"`{what}` must be a file that can be read; got {tmp_path / 'none'}. No such file or directory."
        assert refusal(read, tmp_path / "none") == expected
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xff")
    assert refusal(read_classes, tmp_path / "x.txt") == (
        f"`classes` must be a text in UTF-8; got {tmp_path / 'x.txt'}. Save it again."
    )


# --- templates


def test_templates_are_ours_or_of_a_file(tmp_path):
    assert read_prompts("plain") == ("a photo of a {}.",)
    assert all(template.count("{}") == 1 for kind in PROMPTS.values() for template in kind)
    path = written(tmp_path / "x.txt", "a {} here\n\nthe {c}.\n")
    assert read_prompts(path) == ("a {} here", "the {}.")


@pytest.mark.parametrize(
    ("content", "got"), [("a {}\nnothing", '"nothing"'), ("{} or {c}", '"{} or {}"'), ("", "none")]
)
def test_templates_without_a_place_are_refused(tmp_path, content, got):
    path = written(tmp_path / "x.txt", content)
    assert refusal(read_prompts, path) == (
        f"`templates` must have one {{}} or {{c}} each, the place of the name; got {got} in {path}. "
        "One template a line."
    )


# --- folders


def right_of(found):
    """For each picture the names that are right."""
    return [{found.names[place][0] for place in np.flatnonzero(found.right[label])} for label in found.labels]


def folder_of(path):
    return path.split("/")[-2]


def test_imagenet_s_folders_are_named_by_a_file(tmp_path):
    root = class_folder(tmp_path / "val", dict(zip(WNIDS, "ABCD", strict=True)))
    names = written(tmp_path / "x.json", dict(zip(WNIDS, NAMES, strict=True)))
    found = open_class_folder(root, classes=names)
    assert [name for (name,) in found.names] == NAMES
    assert right_of(found) == [{NAMES[WNIDS.index(folder_of(path))]} for path in found.paths]
    assert len(found.paths) == 12


def test_a_list_names_folders_by_their_place(tmp_path):
    root = class_folder(tmp_path / "val", dict(zip(reversed(WNIDS), "ABCD", strict=True)))
    found = open_class_folder(root, classes=written(tmp_path / "x.json", NAMES))
    assert right_of(found) == [{NAMES[WNIDS.index(folder_of(path))]} for path in found.paths]


def test_imagenet_v2_s_folders_are_numbers(tmp_path):
    """'10' comes behind '9' and not behind '1', and a missing folder moves no other."""
    numbers = [number for number in range(12) if number != 3]
    root = class_folder(tmp_path / "v2", {str(number): "A" for number in numbers}, each=1)
    names = [f"name {number}" for number in range(12)]
    for classes in (names, dict(zip((f"n{number:08}" for number in range(12)), names, strict=True))):
        found = open_class_folder(root, classes=written(tmp_path / "x.json", classes), among="all")
        assert [folder_of(path) for path in found.paths] == [str(number) for number in numbers]
        assert right_of(found) == [{f"name {number}"} for number in numbers]
        assert len(found.names) == 12


def test_numbers_that_a_file_names_are_no_places_in_it(tmp_path):
    root = class_folder(tmp_path / "a", {"0": "A", "1": "B", "2": "C"}, each=1)
    names = written(tmp_path / "x.json", {"1": "one", "2": "two", "3": "three"})
    got = refusal(open_class_folder, root, classes=names)
    assert got == f'`classes` must name every folder; got none for "0" in {names}. Add it, or give a mapping.'


def test_of_a_subset_only_its_classes_are_offered(tmp_path):
    root = class_folder(tmp_path / "a", {WNIDS[3]: "A", WNIDS[1]: "B"})
    names = written(tmp_path / "x.json", dict(zip(WNIDS, NAMES, strict=True)))
    assert open_class_folder(root, classes=names).names == [("goldfish",), ("crane",)]
    assert len(open_class_folder(root, classes=names, among="all").names) == 4


def test_objectnet_s_folders_have_several_classes_or_none(tmp_path):
    root = class_folder(tmp_path / "objectnet", {"fish": "A", "bird": "B", "spoon": "C"}, each=2)
    names = written(tmp_path / "x.json", dict(zip(WNIDS, NAMES, strict=True)))
    mapping = written(tmp_path / "map.json", {"fish": [0, WNIDS[1]], "bird": WNIDS[3], "chair": 2})
    found = open_class_folder(root, classes=names, mapping=mapping)
    assert found.left_out == 1
    assert found.names == [("tench",), ("goldfish",), ("crane",)]
    assert right_of(found) == [{"crane"}] * 2 + [{"tench", "goldfish"}] * 2
    assert len(open_class_folder(root, classes=names, mapping=mapping, among="all").names) == 4


def test_without_a_file_folders_name_themselves(tmp_path):
    root = class_folder(tmp_path / "x", {"red_fox": "A", "owl": "B"})
    (root / ".git").mkdir()
    (root / "notes.txt").write_text("no class")
    assert open_class_folder(root).names == [("owl",), ("red fox",)]


def test_folders_that_are_none_are_refused(tmp_path):
    assert refusal(open_class_folder, tmp_path / "none") == (
        f"`folder` must be a folder that can be read; got {tmp_path / 'none'}. No such file or directory."
    )
    assert refusal(open_class_folder, tmp_path) == (
        f"`folder` must have a sub-folder for each class; got {tmp_path}. Name the folder above them."
    )
    (tmp_path / "a").mkdir()
    assert refusal(open_class_folder, tmp_path) == (
        f'`folder` must hold images ({", ".join(PICTURES)}); got "{tmp_path}". Look at its sub-folders.'
    )
    class_folder(tmp_path, {"a": "A"})
    assert refusal(open_class_folder, tmp_path) == (
        f"`folder` must hold two classes at least; got 1 in {tmp_path}. There is nothing to choose from."
    )


@pytest.mark.parametrize("link", ["a/9.png", "c"])
def test_links_that_lead_out_of_the_folder_are_refused(tmp_path, link):
    root = class_folder(tmp_path / "set", {"a": "A", "b": "B"})
    elsewhere = class_folder(tmp_path / "other", {"c": "C"}) / "c"
    (root / "b" / "8.png").symlink_to(root / "a" / "0.png")
    assert len(open_class_folder(root).paths) == 7
    (root / link).symlink_to(elsewhere if link == "c" else elsewhere / "0.png")
    assert refusal(open_class_folder, root) == (
        f"`folder` must hold no links that lead out of it; got {root / link}. Copy what they show, or name it instead."
    )


def test_folders_without_a_class_are_refused(tmp_path):
    root, names = class_folder(tmp_path / "x", {"a": "A", "b": "B", "c": "C"}), tmp_path / "names.json"
    assert refusal(open_class_folder, root, classes=written(names, ["one", "two"])) == (
        "`classes` must be one for each folder where they are a mere list; "
        f"got 3 folders and 2 names in {names}. Give an object from folder to name."
    )
    assert refusal(open_class_folder, root, classes=written(names, {"a": "one", "b": "two"})) == (
        f'`classes` must name every folder; got none for "c" in {names}. Add it, or give a mapping.'
    )
    numbers = class_folder(tmp_path / "y", {"0": "A", "7": "B"})
    assert refusal(open_class_folder, numbers, classes=written(names, ["one", "two"])) == (
        f'`classes` must name every folder; got none for "7" in {names}. Add it, or give a mapping.'
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "`mapping` must be a JSON file; got {}: Expecting property name enclosed in double quotes: "
         "line 1 column 2 (char 1). Mend it."),
        ([1], '`mapping` must be a JSON object from folder to classes; got {}. For example {{"chair": [423, 559]}}.'),
        ({"a": []}, '`mapping` must give each folder its classes; got [] for "a". '
         "Numbers, or the folders that the classes go by."),
        ({"a": [True]}, '`mapping` must give each folder its classes; got [true] for "a". '
         "Numbers, or the folders that the classes go by."),
        ({"z": [0]}, "`mapping` must name folders of {root}; got 1 others. Its keys are the names of the folders."),
        ({"a": [2]}, '`mapping` must name classes among the 2 there are; got 2 for "a". By number or by folder.'),
        ({"a": ["z"]}, '`mapping` must name classes among the 2 there are; got z for "a". By number or by folder.'),
    ],
)  # fmt: skip
def test_mappings_that_do_not_fit_are_refused(tmp_path, content, sentence):
    root = class_folder(tmp_path / "x", {"a": "A", "b": "B"})
    path = written(tmp_path / "map.json", content)
    assert refusal(open_class_folder, root, mapping=path) == sentence.format(path, root=root)
