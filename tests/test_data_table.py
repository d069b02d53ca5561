"""One's own pictures: what is read, what is skipped and why, what is held out."""

import logging
import os
import zlib

import numpy as np
import pytest
from PIL import Image

from contrastile.data.pairs import open_pairs
from contrastile.data.table import squared


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


def refusal(album, **settings):
    with pytest.raises(ValueError) as caught:
        album.open(**settings)
    return str(caught.value)


def test_every_row_is_a_pair(album):
    pairs = album.open()
    assert pairs.images.shape == (20, 1, 8, 8)
    assert pairs.titles == [f"shade number {shade}" for shade in range(20)]
    assert pairs.skipped == {}


def test_pictures_belong_to_their_titles(album):
    pairs = album.open(channels=3)
    assert pairs.images[:, :, 4, 4].tolist() == [[shade * 10, 0, 255 - shade * 10] for shade in range(20)]


def test_columns_may_come_in_any_order_beside_others(album):
    album.lines = ["title\tlicence\tfilepath", *(f"{row}\tCC0\tpictures/{row}.png" for row in range(5))]
    assert album.open().titles == ["0", "1", "2", "3", "4"]


def test_windows_lines_and_a_byte_order_mark_are_read(album):
    album.lines = [b"\xef\xbb\xbf" + album.lines[0].encode() + b"\r", *(line + "\r" for line in album.lines[1:])]
    assert album.open().titles[0] == "shade number 0"


def test_quotes_are_letters(album):
    album.add("pictures/0.png", 'so-called "art')
    assert album.open().titles[-1] == 'so-called "art'


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


def skipped(album, caplog):
    with caplog.at_level(logging.WARNING, logger="contrastile"):
        pairs = album.open()
    assert len(pairs) == 20
    (reason,) = pairs.skipped
    assert pairs.skipped == {reason: 1}
    assert f"1 of 21 rows are skipped ({reason}: 1)" in caplog.text
    return reason


def test_a_missing_picture_is_skipped(album, caplog):
    album.add("nowhere.png")
    assert skipped(album, caplog) == "missing picture"


def test_a_picture_that_is_none_is_skipped(album, caplog):
    album.add("page.jpg").write_text("<html>not found</html>")
    assert skipped(album, caplog) == "broken picture"


def test_a_picture_cut_short_is_skipped(album, caplog):
    path = album.add("half.png")
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:1000])
    assert skipped(album, caplog) == "broken picture"


def test_a_folder_is_no_picture(album, caplog):
    album.add("folder").mkdir()
    assert skipped(album, caplog) == "broken picture"


@pytest.mark.parametrize("side", [8001, 12_000, 20_000])
def test_a_picture_of_too_many_pixels_is_skipped_by_its_header(album, caplog, side):
    path = album.add("huge.png")
    Image.new("1", (8, 8)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = side.to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    path.write_bytes(content)
    assert skipped(album, caplog) == "picture over 64 megapixels"


def test_an_empty_title_is_skipped(album, caplog):
    album.add("pictures/0.png", "   ")
    assert skipped(album, caplog) == "empty title"


def test_a_row_of_other_width_is_skipped(album, caplog):
    album.add("pictures/0.png", "one\ttoo many")
    assert skipped(album, caplog) == "wrong number of columns"


def test_a_title_in_another_encoding_is_skipped(album, caplog):
    album.lines.append("pictures/0.png\tcafé".encode("latin-1"))
    assert skipped(album, caplog) == "not UTF-8"


def test_reasons_are_counted(album):
    for name in ("a.png", "b.png"):
        album.add(name)
    album.add("pictures/0.png", "")
    assert album.open().skipped == {"missing picture": 2, "empty title": 1}


def test_too_many_bad_rows_are_an_error_also_from_the_cache(album):
    for name in ("a.png", "b.png"):
        album.add(name)
    album.add("pictures/0.png", "")
    assert len(album.open(most_bad=0.2)) == 20
    for _ in range(2):
        assert refusal(album, most_bad=0.1) == (
            "`source` must have at most 10.0% bad pairs; got 3 of 23 (empty title: 1, missing picture: 2). "
            "Mend it, or raise data.max_bad_fraction."
        )


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
        return {pairs.titles[row] for row in pairs.splits["held_out"]}

    before = held_out()
    for row in range(20):
        path = album.add(f"{row}.png", f"more {row}")
        Image.new("L", (8, 8), 3 + 7 * row).save(path)
    assert {title for title in held_out() if title.startswith("shade")} == before


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
    monkeypatch.setattr("contrastile.data.table.decode", None)
    assert len(album.open()) == 20


def test_a_table_without_its_columns_is_refused(album):
    album.lines[0] = "file\tcaption"
    assert refusal(album) == (
        "`source` must have a column filepath or file_name or image and one title or text or caption; "
        "got ['file', 'caption']. "
        "Name them in the first line, separated by tabs."
    )


def test_an_empty_table_is_refused(album):
    album.lines = []
    assert refusal(album).endswith("; got []. Name them in the first line, separated by tabs.")


def test_a_table_with_nothing_to_compare_is_refused(album):
    album.lines = album.lines[:2]
    album.add("nowhere.png")
    assert refusal(album) == (
        f"`source` must hold at least two pairs that differ and can be read ({album.folder / 'pairs.tsv'}); "
        "got 1 readable pairs and skipped missing picture: 1. One is needed to train on, one to be held out."
    )
    assert not [entry for entry in os.scandir(album.folder / "cache") if entry.is_dir()]


def test_a_table_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError) as caught:
        open_pairs(str(tmp_path / "none.tsv"), image_size=8, cache=tmp_path)
    assert str(caught.value) == (
        f'`source` must be "glyphs" or a file that can be read; got {tmp_path / "none.tsv"}. No such file or directory.'
    )


@pytest.mark.parametrize(
    ("first", "line"),
    [
        ("filepath,title", 'pictures/{n}.png,"shade, number {n}"'),
        # open_clip's tables are called .csv and have tabs
        ("filepath\ttitle", "pictures/{n}.png\tshade, number {n}"),
        ("\ufefffile_name,text", 'pictures/{n}.png,"shade,\nnumber {n}"'),
        ("caption,image", '"shade, number {n}",pictures/{n}.png'),
    ],
)
def test_a_csv_file_is_a_table_too(album, first, line):
    text = "\n".join([first, *(line.format(n=n) for n in range(20))])
    (album.folder / "pairs.csv").write_text(text, encoding="utf-8")
    pairs = open_pairs(str(album.folder / "pairs.csv"), cache=album.folder / "cache", image_size=8, channels=3)
    assert pairs.titles == [f"shade, number {shade}" for shade in range(20)]
    assert pairs.images[:, 0, 4, 4].tolist() == [shade * 10 for shade in range(20)]


def test_bad_rows_of_a_csv_file_are_counted(album, caplog):
    lines = [b"filepath,title", *(b"pictures/%d.png,shade %d" % (n, n) for n in range(18))]
    lines += [b"pictures/18.png,two,many", b"pictures/19.png,\xff"]
    (album.folder / "pairs.csv").write_bytes(b"\n".join(lines))
    pairs = open_pairs(str(album.folder / "pairs.csv"), cache=album.folder / "cache", image_size=8, most_bad=0.2)
    assert pairs.skipped == {"not UTF-8": 1, "wrong number of columns": 1}
    assert len(pairs) == 18
