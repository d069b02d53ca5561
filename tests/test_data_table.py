"""Tables of images: rows that are read, rows that are skipped with their reason, the held-out part."""

import logging
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusals import refusal

from contrastile.data.base import Batches
from contrastile.data.images import squared
from contrastile.data.registry import open_pairs


@pytest.fixture
def album(tmp_path):
    """Twenty pictures of one colour each, and their table."""
    (tmp_path / "pictures").mkdir()
    lines = ["filepath\ttitle"]
    for shade in range(20):
        Image.new("RGB", (40, 30), (shade * 10, 0, 255 - shade * 10)).save(tmp_path / f"pictures/{shade}.png")
        lines.append(f"pictures/{shade}.png\tshade number {shade}")
    return Album(tmp_path, lines)


class Album:
    def __init__(self, folder, lines):
        self.folder, self.lines = folder, lines

    def open(self, **settings):
        table = self.folder / "pairs.tsv"
        table.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in self.lines))
        return open_pairs(str(table), cache=self.folder / "cache", **{"image_size": 8, **settings})

    def add(self, name, title="a title"):
        self.lines.append(f"{name}\t{title}")
        return self.folder / name


def test_every_row_is_a_pair(album):
    pairs = album.open()
    assert pairs.images.shape == (20, 1, 8, 8)
    assert pairs.captions == [f"shade number {shade}" for shade in range(20)]
    assert pairs.skipped == {}


def test_pictures_belong_to_their_captions(album):
    pairs = album.open(channels=3)
    assert pairs.images[:, :, 4, 4].tolist() == [[shade * 10, 0, 255 - shade * 10] for shade in range(20)]


@pytest.mark.parametrize(
    ("lines", "captions"),
    [
        (["title\tlicence\tfilepath", *(f"{row}\tCC0\tpictures/{row}.png" for row in range(3))], ["0", "1", "2"]),
        (["\ufefffilepath\ttitle\r", "pictures/0.png\tone\r", "pictures/1.png\ttwo\r"], ["one", "two"]),
        (["filepath\ttitle", "pictures/0.png\tone", 'pictures/1.png\tso-called "art'], ["one", 'so-called "art']),
    ],
    ids=["other columns", "windows", "quotes"],
)
def test_columns_in_any_order_windows_lines_and_single_quotes_are_read(album, lines, captions):
    album.lines = lines
    assert album.open().captions == captions


def test_a_picture_is_cut_to_its_middle_square():
    picture = Image.new("L", (30, 10))
    picture.paste(255, (10, 0, 20, 10))
    assert (squared(picture, (1, 8, 8)) > 240).all()


def test_a_photo_is_turned_upright():
    picture = Image.new("L", (20, 20))
    picture.paste(255, (0, 0, 20, 10))
    exif = Image.Exif()
    exif[0x0112] = 3
    picture.info["exif"] = exif.tobytes()
    upright = squared(picture, (1, 8, 8))[0]
    assert upright[0].max() < 20
    assert upright[-1].min() > 235


def test_transparent_pictures_lie_on_white():
    assert (squared(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), (3, 8, 8)) == 255).all()


def test_sixteen_bits_become_eight():
    deep = Image.fromarray(np.full((8, 8), 0x8000, dtype=np.uint16))
    assert (squared(deep, (1, 8, 8)) == 128).all()


def cut_short(path):
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:1000])


def huge(side):
    """A picture whose header states a size that its pixels do not have."""

    def write(path):
        Image.new("1", (8, 8)).save(path)
        content = bytearray(path.read_bytes())
        content[16:24] = side.to_bytes(4, "big") * 2
        content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
        path.write_bytes(content)

    return write


@pytest.mark.parametrize(
    ("line", "write", "reason"),
    [
        ("nowhere.png\ta title", None, "missing picture"),
        ("x.png\ta title", lambda path: path.write_text("<html>not found</html>"), "broken picture"),
        ("x.png\ta title", cut_short, "broken picture"),
        ("x.png\ta title", Path.mkdir, "broken picture"),
        *(("x.png\ta title", huge(side), "picture over 64 megapixels") for side in (8001, 12_000, 20_000)),
        ("pictures/0.png\t   ", None, "empty caption"),
        ("pictures/0.png\tone\ttoo many", None, "wrong number of columns"),
        ("pictures/0.png\tcafé".encode("latin-1"), None, "not UTF-8"),
    ],
)
def test_a_bad_row_is_skipped_with_its_reason(album, caplog, line, write, reason):
    album.lines.append(line)
    if write is not None:
        write(album.folder / "x.png")
    with caplog.at_level(logging.WARNING, logger="contrastile"):
        pairs = album.open()
    assert (len(pairs), pairs.skipped) == (20, {reason: 1})
    assert f"1 of 21 rows are skipped ({reason}: 1)" in caplog.text
    unread = line.startswith(b"x" if isinstance(line, bytes) else "x")
    assert (f"the first image that is skipped ({reason}): {album.folder / 'x.png'}" in caplog.text) == unread


def test_too_many_bad_rows_are_an_error_also_from_the_cache(album):
    for name in ("a.png", "b.png"):
        album.add(name)
    album.add("pictures/0.png", "")
    assert album.open(most_bad=0.2).skipped == {"missing picture": 2, "empty caption": 1}
    for _ in range(2):
        assert refusal(album.open, most_bad=0.1) == (
            "`source` must have at most 10% bad pairs; got 3 of 23 (empty caption: 1, missing picture: 2); "
            f'there is no "a.png" in the folder "{album.folder}". '
            "Mend it, or raise data.max_bad_fraction."
        )


def test_copies_leave_out_captions_that_a_shard_cannot_hold(album):
    album.add("pictures/0.png", "nul \0 nul")
    album.add("pictures/1.png", "long " * 20_000)
    pairs = album.open(copies=2)
    assert pairs.skipped == {"not a text": 1, "caption over 64 kB": 1}
    rows = Batches(np.arange(len(pairs.stream)), seed=0).take(len(pairs.stream)).tolist()
    assert pairs.stream.read(rows, range(len(rows)), None)[1] == rows


def test_a_wrong_absolute_path_is_named(album):
    album.lines = [album.lines[0], *(f"/nowhere/{name}.png\t{name}" for name in "abc")]
    assert 'missing picture: 3; there is no "/nowhere/a.png". One is needed' in refusal(album.open)


def test_pairs_of_one_title_or_one_picture_share_an_id(album):
    album.add("pictures/0.png", "another title")
    album.add("pictures/1.png", "another title")
    ids = album.open().ids
    assert ids[0] == ids[1] == ids[20] == ids[21]
    assert len(set(ids.tolist())) == 19


def test_the_split_is_by_id_and_complete(album):
    album.add("pictures/0.png", "another title")
    pairs = album.open(held_out=0.3)
    train, held_out = (set(pairs.splits[side].tolist()) for side in ("train", "held_out"))
    assert train | held_out == set(range(21))
    assert not {pairs.ids[row] for row in train} & {pairs.ids[row] for row in held_out}
    assert 2 <= len(held_out) <= 10


def test_a_pair_keeps_its_side_when_others_come(album):
    def held_out():
        pairs = album.open(held_out=0.3)
        return {pairs.captions[row] for row in pairs.splits["held_out"]}

    before = held_out()
    for row in range(20):
        path = album.add(f"{row}.png", f"more {row}")
        Image.new("L", (8, 8), 3 + 7 * row).save(path)
    assert {title for title in held_out() if title.startswith("shade")} == before


def classes(album, count=3, each=10):
    """A table of few captions with many pictures each."""
    album.lines = album.lines[:1]
    for row in range(count * each):
        Image.new("L", (8, 8), 5 + 7 * row).save(album.add(f"{row}.png", f"class {row % count}"))


def test_with_few_captions_pictures_of_the_others_are_held_out_too(album):
    classes(album)
    splits, ids = (pairs := album.open(held_out=0.2)).splits, pairs.ids
    assert sorted(np.concatenate([*splits.values()]).tolist()) == list(range(30))
    assert {len(splits["held_out"]), len(set(ids[splits["held_out"]].tolist()))} == {10, 1}
    assert 1 <= len(splits["images"]) <= 8
    # every caption of theirs is one of the training
    assert set(ids[splits["images"]].tolist()) <= set(ids[splits["train"]].tolist())
    # at least one, whatever the share
    assert len(album.open(held_out=1e-6).splits["images"]) == 1


def test_equal_pictures_lie_on_one_side(album):
    classes(album, count=2, each=6)
    for row in range(12):
        Image.new("L", (8, 8), 40 + 80 * (row % 2)).save(album.folder / f"{row}.png")
    # all pictures of a caption are the very same
    with pytest.raises(KeyError):
        album.open().splits["images"]


def test_at_least_one_pair_is_on_either_side(album):
    album.lines = album.lines[:3]
    for share in (0.001, 0.999):
        assert sorted(len(rows) for rows in album.open(held_out=share).splits.values()) == [1, 1]


def test_a_changed_picture_is_read_again(album):
    album.open()
    Image.new("L", (8, 8), 77).save(album.folder / "pictures/0.png")
    assert (album.open().images[0] == 77).all()


def test_unchanged_pictures_are_read_once(album, monkeypatch):
    album.open()
    monkeypatch.setattr("contrastile.data.collection.decode", None)
    assert len(album.open()) == 20


def test_a_table_without_its_columns_is_refused(album):
    album.lines[0] = "file\tcaption"
    assert refusal(album.open) == (
        "`source` must have a column filepath or file_name or image and one title or text or caption; "
        "got ['file', 'caption'] in the first line. "
        "Name them there, separated by tabs."
    )


def test_an_empty_table_is_refused(album):
    album.lines = []
    assert refusal(album.open).endswith("; got nothing in the first line. Name them there, separated by tabs.")
    # as a spreadsheet may write it
    album.lines = ["filepath\ttitle".encode("utf-16")]
    assert "; got not UTF-8 in the first line. Save it as UTF-8." in refusal(album.open)


def test_a_table_with_nothing_to_compare_is_refused(album):
    album.lines = album.lines[:2]
    album.add("nowhere.png")
    assert refusal(album.open) == (
        f"`source` must hold at least two pairs that differ and can be read ({album.folder / 'pairs.tsv'}); got 1 "
        f'readable; skipped missing picture: 1; there is no "nowhere.png" in the folder "{album.folder}". '
        "One is needed to train on, one to be held out."
    )
    assert not [entry for entry in os.scandir(album.folder / "cache") if entry.is_dir()]


def test_a_table_of_one_title_is_refused(album):
    header, *rows = album.lines
    album.lines = [header, *(f"{row.partition(chr(9))[0]}\tthe same" for row in rows)]
    assert f"; got {len(rows)} readable, all with one caption or one image. One is" in refusal(album.open)


@pytest.mark.parametrize("name", ["none.tsv", "none.parquet", "none.tar", "none", "pairs.tsv::none"])
def test_a_source_that_is_not_there_is_refused_by_its_path(album, name, monkeypatch):
    album.open()
    monkeypatch.chdir(album.folder)
    assert refusal(open_pairs, name, image_size=8, cache=album.folder) == (
        f'`source` must be a file or folder that exists; got "{name.rpartition(":")[2]}". '
        "Check its path: a relative one begins at the folder in which the command runs."
    )


@pytest.mark.parametrize(
    ("first", "line"),
    [
        ("filepath,title", 'pictures/{n}.png,"shade, number {n}"'),
        # open_clip's tables are called .csv and have tabs
        ("filepath\ttitle", "pictures/{n}.png\tshade, number {n}"),
        ("\ufefffile_name,text", 'pictures/{n}.png,"shade,\nnumber {n}"'),
        ("caption,image", '"shade, number {n}",pictures/{n}.png'),
        ("filepath;title", "pictures/{n}.png;shade, number {n}"),
        ("FilePath;Title", "pictures/{n}.png;shade, number {n}"),
        ("filepath; title", "pictures/{n}.png; shade, number {n}"),
    ],
)
@pytest.mark.parametrize("name", ["pairs.csv", "PAIRS.CSV"])
def test_a_csv_file_is_a_table_too(album, first, line, name):
    text = "\n".join([first, *(line.format(n=n) for n in range(20))])
    (album.folder / name).write_text(text, encoding="utf-8")
    pairs = open_pairs(str(album.folder / name), cache=album.folder / "cache", image_size=8, channels=3)
    assert pairs.captions == [f"shade, number {shade}" for shade in range(20)]
    assert pairs.images[:, 0, 4, 4].tolist() == [shade * 10 for shade in range(20)]


def test_bad_rows_of_a_csv_file_are_counted(album, caplog):
    lines = [b"filepath,title", *(b"pictures/%d.png,shade %d" % (n, n) for n in range(18))]
    lines += [b"pictures/18.png,two,many", b"pictures/19.png,\xff"]
    (album.folder / "pairs.csv").write_bytes(b"\n".join(lines))
    pairs = open_pairs(str(album.folder / "pairs.csv"), cache=album.folder / "cache", image_size=8, most_bad=0.2)
    assert pairs.skipped == {"not UTF-8": 1, "wrong number of columns": 1}
    assert len(pairs) == 18


@pytest.mark.parametrize("several", [False, True], ids=["table", "collection"])
def test_quotes_of_a_csv_writer_in_a_tsv_file_are_a_warning(album, caplog, several):
    album.lines[1:3] = ['pictures/0.png\t"a ""red"" one"', 'pictures/1.png\t"so-called" art"']
    assert album.open().captions[0] == '"a ""red"" one"'
    if several:
        caplog.clear()
        open_pairs(f"{album.folder}/pairs.tsv::{album.folder}/pictures", cache=album.folder / "cache", image_size=8)
    assert [record.getMessage() for record in caplog.records] == [
        f"{album.folder}/pairs.tsv: captions in quotes, with quotes doubled inside: 1; a .tsv file has no quoting, so "
        "they are read as letters. Rename it to .csv, which may have tabs too, to have them read as quotes"
    ]


def opened_csv(album, rows, **settings):
    (album.folder / "pairs.csv").write_text("\n".join(["filepath,title", *rows]) + "\n", encoding="utf-8")
    return open_pairs(str(album.folder / "pairs.csv"), cache=album.folder / "cache", image_size=8, **settings)


@pytest.mark.parametrize("closed", [None, 19, 10])
def test_a_stray_quote_of_a_csv_file_is_refused_by_its_line(album, closed):
    rows = [f"pictures/{n}.png,shade {n}" for n in range(20)]
    rows[3] = 'pictures/3.png,"an open quote'
    if closed == 10:
        # to the end of the file, which is near
        rows = rows[:closed]
    elif closed:
        rows += [f"pictures/{n}.png,again {n}" for n in range(20)]
        rows[closed + 1] += '"'
    assert refusal(opened_csv, album, rows) == (
        f"`source` must close every quote within 16 lines; got one open at {album.folder}/pairs.csv:5. "
        "Close it, or double it where it is a letter; .parquet holds texts of more lines."
    )


def test_quotes_that_are_right_are_read(album):
    rows = ['pictures/0.png,"a ""word""\nof\n\nlines, and commas"', 'pictures/1.png,a 5" screen', 'pictures/2.png,""']
    rows += [f'pictures/{n}.png,"' + "\n" * 15 + f'{n}"' for n in (3, 4)]
    pairs = opened_csv(album, rows)
    assert pairs.captions == ['a "word" of lines, and commas', 'a 5" screen', "3", "4"]
    assert pairs.skipped == {"empty caption": 1}
