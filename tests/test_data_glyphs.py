"""The built-in glyphs: their images, their ids, their held-out parts."""

import unicodedata
from collections import defaultdict

import numpy as np
import pytest

from contrastile.data.base import joined_ids
from contrastile.data.glyphs import DIGIT_NAMES, HELD_OUT_FACES, Pen, font_files, named_characters, open_glyphs, split
from contrastile.data.pairs import PairOptions
from contrastile.data.registry import open_pairs


@pytest.fixture(scope="module")
def glyphs(tmp_path_factory):
    # beside the folders of the test processes, so that the pictures are drawn once for all of them
    return open_pairs("glyphs", image_size=32, cache=tmp_path_factory.getbasetemp().parent / "glyphs")


@pytest.fixture(scope="module")
def face():
    return next(path for path in font_files() if path.name == "DejaVuSans.ttf")


def rows_named(glyphs, name):
    return [row for row, title in enumerate(glyphs.captions) if title == name]


def test_eighteen_faces_without_those_of_other_encodings():
    names = [path.name for path in font_files()]
    assert len(names) == 18
    assert all(name.startswith(("DejaVu", "STIXGeneral")) for name in names)
    assert set(HELD_OUT_FACES) <= set(names)


def test_about_54_000_pairs_of_7_300_names(glyphs):
    assert len(glyphs) == pytest.approx(54_000, rel=0.02)
    assert len(set(glyphs.captions)) == pytest.approx(7_300, rel=0.02)


def test_pictures_are_bright_ink_on_dark_with_a_free_edge(glyphs):
    assert glyphs.images.shape[1:] == (1, 32, 32)
    assert (glyphs.images.max(axis=(1, 2, 3)) > 0).all()
    assert glyphs.images.mean() < 64
    edge = np.ones((32, 32), dtype=bool)
    edge[1:-1, 1:-1] = False
    assert not glyphs.images[:, 0, edge].any()


def test_one_name_and_one_picture_have_one_id(glyphs):
    by_name, by_picture = defaultdict(set), defaultdict(set)
    for name, picture, identity in zip(glyphs.captions, glyphs.images, glyphs.ids.tolist(), strict=True):
        by_name[name].add(identity)
        by_picture[picture.tobytes()].add(identity)
    assert len(by_picture) < len(glyphs) - 10_000
    assert all(len(ids) == 1 for ids in (*by_name.values(), *by_picture.values()))


@pytest.mark.parametrize("twin", ["GREEK CAPITAL LETTER ALPHA", "CYRILLIC CAPITAL LETTER A"])
def test_letters_that_look_the_same_are_not_each_others_negatives(glyphs, twin):
    latin = rows_named(glyphs, "LATIN CAPITAL LETTER A")
    assert set(glyphs.ids[latin]) == set(glyphs.ids[rows_named(glyphs, twin)])


def test_letters_that_look_different_are_negatives(glyphs):
    small, capital = (rows_named(glyphs, f"LATIN {size} LETTER A") for size in ("SMALL", "CAPITAL"))
    assert not set(glyphs.ids[small]) & set(glyphs.ids[capital])


def test_ids_do_not_run_together(glyphs):
    names = defaultdict(set)
    for title, identity in zip(glyphs.captions, glyphs.ids.tolist(), strict=True):
        names[identity].add(title)
    sizes = sorted(map(len, names.values()))
    assert sizes[-1] < 25
    assert sizes.count(1) > 0.75 * len(set(glyphs.captions))


def names_of(glyphs, part):
    return {glyphs.captions[row] for row in glyphs.splits[part]}


def test_no_pair_is_in_two_splits(glyphs):
    rows = np.concatenate(list(glyphs.splits.values()))
    assert len(set(rows.tolist())) == len(rows)


def test_held_out_faces_show_known_names_in_new_pictures(glyphs):
    assert len(glyphs.splits["faces"]) > 3000
    assert names_of(glyphs, "faces") <= names_of(glyphs, "train")
    seen = {glyphs.images[row].tobytes() for row in glyphs.splits["train"]}
    assert not any(glyphs.images[row].tobytes() in seen for row in glyphs.splits["faces"])


def test_held_out_names_are_new_and_made_of_known_words(glyphs):
    names, known = names_of(glyphs, "names"), names_of(glyphs, "train")
    assert len(names) == pytest.approx(0.05 * 7_338, rel=0.02)
    assert not set(glyphs.ids[glyphs.splits["names"]]) & set(glyphs.ids[glyphs.splits["train"]])
    words = {word for name in known for word in name.split()}
    assert all(set(name.split()) <= words for name in names)
    assert set(DIGIT_NAMES) <= known


def test_the_splits_are_frozen(glyphs):
    counts = {name: len(rows) for name, rows in glyphs.splits.items()}
    # another FreeType may draw a few pictures alike, or not, and so move a few pairs
    assert counts == pytest.approx({"train": 45_420, "faces": 3_935, "names": 2_831}, rel=0.01)


def test_a_word_of_few_names_keeps_its_names_in_training():
    names = ["RED BOX", "RED BALL", "BLUE BOX", "BLUE BALL", "ODD BOX"]
    ids = joined_ids(names)
    digests = [name.encode() for name in names]
    parts = split(names, digests, ids, style_held_out=np.zeros(5, dtype=bool), share=0.9)
    assert "ODD BOX" in {names[row] for row in parts["train"]}


def test_named_characters_come_with_their_official_names(face):
    named = dict(named_characters(face))
    assert named["é"] == "LATIN SMALL LETTER E WITH ACUTE"
    assert all(unicodedata.name(character) == name for character, name in named.items())


def test_a_space_leaves_no_picture(face):
    assert Pen(face, 32).draw(" ") is None


def test_a_comma_stays_below_an_apostrophe(face):
    pen = Pen(face, 32)
    comma, apostrophe = (np.flatnonzero(pen.draw(mark).any(axis=1)).mean() for mark in ",'")
    assert comma > apostrophe + 8


def test_a_wide_character_is_shrunk_to_the_picture(face):
    columns = np.flatnonzero(Pen(face, 32).draw("\N{ROMAN NUMERAL EIGHT}").any(axis=0))
    assert (columns.min(), columns.max()) == (1, 30)


def test_every_size_has_the_same_proportions(face):
    small, large = (Pen(face, size).draw("H").any(axis=1).mean() for size in (32, 96))
    assert small == pytest.approx(large, abs=0.05)


@pytest.fixture
def few_faces(monkeypatch):
    faces = [path for path in font_files() if "Display" in path.name]
    monkeypatch.setattr("contrastile.data.glyphs.font_files", lambda: faces)


@pytest.mark.usefixtures("few_faces")
def test_colour_pictures_are_the_grey_ones_three_times(tmp_path):
    opened = open_glyphs("glyphs", PairOptions(16, 3, 0.05, tmp_path))
    assert opened.images.shape[1:] == (3, 16, 16)
    assert (opened.images == opened.images[:, :1]).all()


@pytest.mark.usefixtures("few_faces")
def test_the_bar_reaches_its_end(tmp_path):
    class Bar:
        total = done = 0

        def __call__(self, total, what, unit):
            assert (what, unit) == ("drawing the glyphs", "images")
            self.total = total
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def update(self, n):
            self.done += n

    bar = Bar()
    open_glyphs("glyphs", PairOptions(8, 1, 0.05, tmp_path, bar))
    assert 0 < bar.done == bar.total
