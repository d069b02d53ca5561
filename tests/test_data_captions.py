"""Captioned pictures: Karpathy's JSON with its splits, and tables with a line for each caption."""

import json

import pytest
from refusals import refusal
from tiny_tests import karpathy

from contrastile.data.evaluation_sets import open_captions


def test_karpathy_s_split_has_all_captions(tmp_path):
    path = karpathy(tmp_path)
    told = json.loads(path.read_text())
    told["images"][2]["split"] = "restval"
    told["images"][3]["sentences"] = [{"raw": "letter D left"}, {"raw": "  two\n words "}, {"raw": " "}]
    told["images"][4]["sentences"] = []
    path.write_text(json.dumps(told))
    found = open_captions(path, images=tmp_path)
    assert [name[-9:] for name in found.paths] == ["val/0.png", "val/1.png", "val/3.png", "val/5.png"]
    assert found.owner.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert found.texts[6:8] == ["letter D left", "two words"]
    assert len(open_captions(path, split="test").paths) == 4


def test_pictures_may_lie_flat_as_flickr_s_do(tmp_path):
    path = karpathy(tmp_path, below="", split="val")
    assert open_captions(path, split="val").paths[0] == str(tmp_path / "0.png")
    other = karpathy(tmp_path / "coco", below="val2014")
    assert open_captions(other, images=tmp_path / "coco" / "val2014").paths[0].endswith("val2014/0.png")


def test_a_table_has_a_line_for_each_caption(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("title\tfilepath\none\tb.png\ntwo\ta.png\nthree\tb.png\n")
    found = open_captions(path)
    assert found.paths == [str(tmp_path / "b.png"), str(tmp_path / "a.png")]
    assert (found.texts, found.owner.tolist()) == (["one", "three", "two"], [0, 0, 1])
    assert refusal(open_captions, path, split="val") == (
        '`split` must be left out with a table; got "val". Only Karpathy\'s JSON has splits.'
    )
    (tmp_path / "elsewhere").mkdir()
    assert open_captions(path, images=tmp_path / "elsewhere").paths[0] == str(tmp_path / "elsewhere" / "b.png")


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = karpathy(tmp_path)
    assert refusal(open_captions, path, split="dev") == f'`split` must be one of test; got "dev". These are in {path}.'
    assert refusal(open_captions, path, images=tmp_path / "none") == (
        f"`images` must be the folder of the images; got {tmp_path / 'none'}. There is no such folder."
    )
    assert refusal(open_captions, tmp_path / "none.json") == (
        f"`captions` must be a file that can be read; got {tmp_path / 'none.json'}. No such file or directory."
    )
    assert refusal(open_captions, tmp_path / "none.tsv") == (
        f"`captions` must be a file that can be read; got {tmp_path / 'none.tsv'}. No such file or directory."
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[", "JSONDecodeError('Expecting value: line 1 column 2 (char 1)')"),
        # nested without end
        ("[" * 200_000, "RecursionError"),
        ("{}", "KeyError('images')"),
        ('{"images": [{"split": "test", "filename": "x"}]}', "KeyError('sentences')"),
        ('{"images": [3]}', "TypeError(\"'int' object is not subscriptable\")"),
        ('{"images": [{"split": "test", "filename": "x", "sentences": [{"raw": 3}]}]}',
         "AttributeError(\"'int' object has no attribute 'split'\")"),
    ],
)  # fmt: skip
def test_other_json_is_refused(tmp_path, content, why):
    path = tmp_path / "x.json"
    path.write_text(content)
    said = refusal(open_captions, path)
    assert said.startswith(f"`captions` must be Karpathy's JSON; got {path} ({why}")
    assert said.endswith(" Each of `images` has split, filename and sentences with raw.")


@pytest.mark.parametrize("place", ["../x.png", "/etc/x.png", "link/x.png"])
def test_pictures_outside_the_folder_are_refused(tmp_path, place):
    path = karpathy(tmp_path)
    (tmp_path / "link").symlink_to("/etc")
    told = json.loads(path.read_text())
    told["images"][1]["filename"] = place
    path.write_text(json.dumps(told))
    assert refusal(open_captions, path).startswith("`captions` must name images within the folder; got ")
    assert refusal(open_captions, path).endswith("x.png. Paths go down only.")


@pytest.mark.parametrize("place", ["../x.png", "/etc/x.png", "link/x.png"])
def test_table_paths_outside_the_folder_are_refused(tmp_path, place):
    (tmp_path / "link").symlink_to("/etc")
    path = tmp_path / "x.tsv"
    path.write_text(f"filepath\ttitle\na.png\tone\n{tmp_path}/b.png\ttwo\n")
    assert open_captions(path).paths == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    path.write_text(f"filepath\ttitle\na.png\tone\n{place}\ttwo\n")
    assert refusal(open_captions, path) == (
        f"`captions` must name images within the folder; got {tmp_path / place}. Paths go down only."
    )


def test_one_picture_is_too_few(tmp_path):
    path = karpathy(tmp_path, letters="A")
    assert refusal(open_captions, path) == (
        f"`captions` must hold two images with captions at least; got 1 in {path}. Look at it."
    )


def test_a_table_must_be_whole(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("filepath\ttitle\na.png\tone\nb.png\t \nc.png\n")
    assert refusal(open_captions, path) == (
        "`captions` must have an image and a caption in each line; "
        f"got empty caption: 1, wrong number of columns: 1 in {path}. Mend them."
    )
    path.write_text("file\ttitle\na.png\tone\n")
    assert refusal(open_captions, path) == (
        "`captions` must have a column filepath or file_name or image and one title or text or caption; "
        "got ['file', 'title'] in the first line. "
        "Name them there, separated by tabs."
    )
