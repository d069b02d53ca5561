"""Copies in shards: the run's order, each pair equally often, few files at once, always the same bytes."""

import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
from tiny_runs import tiny_recipe

from contrastile.data import copies
from contrastile.data.base import Batches
from contrastile.data.pairs import PairSet, Stream
from contrastile.data.registry import open_pairs
from contrastile.data.shards import find_in_tar
from contrastile.train.batch_builder import BatchBuilder, open_data_bundle

PLACES = range(90)


def some_pairs(channels=1):
    """Twelve pictures of seven titles, two of which share an id; two pairs are held out."""
    lot = np.random.default_rng(0)
    titles = [f"letter {'ABCDEFG'[row % 7]}" for row in range(12)]
    ids = np.array([0 if title[-1] in "AB" else ord(title[-1]) for title in titles], dtype=np.int64)
    # a brightness of its own, and noise
    images = (
        lot.integers(0, 9, (12, channels, 16, 16), dtype=np.uint8)
        + 20 * np.arange(12, dtype=np.uint8)[:, None, None, None]
    )
    return PairSet(images, titles, ids, {"train": np.arange(2, 12), "faces": np.arange(2)}, {})


@pytest.fixture(autouse=True)
def few_pairs_a_shard(monkeypatch):
    monkeypatch.setattr(copies, "PAIRS", 16)
    monkeypatch.setattr(copies, "ON_DISK", 2)


def copied(folder, pairs=None):
    return copies.with_copies(pairs or some_pairs(), 9, seed=3, cache=folder)


def read(pairs, places=PLACES, seed=3):
    """Pictures and titles of the run's examples, and the pairs that the run's order asks for."""
    rows = Batches(pairs.splits["train"], seed=seed).take(places.stop)[places.start :]
    asked = (rows - len(pairs)).tolist()
    pictures, chosen = pairs.stream.read(asked, places, None)
    return pictures.numpy().copy(), pairs.stream.captions(chosen), asked


def shards(folder):
    return sorted(folder.glob("shards-*/*.tar"))


def test_an_epoch_has_each_pair_so_many_times(tmp_path):
    pairs = copied(tmp_path)
    assert len(pairs.splits["train"]) == len(pairs.stream) == 90
    _, titles, asked = read(pairs)
    assert sorted(asked) == list(range(90))
    expected = Counter(pairs.captions[row] for row in some_pairs().splits["train"])
    assert Counter(titles) == {title: 9 * count for title, count in expected.items()}


def test_each_copy_is_its_pair_augmented_anew(tmp_path):
    whole = some_pairs()
    pictures, titles, asked = read(copied(tmp_path))
    assert pictures.shape == (90, 1, 16, 16)
    assert len({picture.tobytes() for picture in pictures}) == 90
    for picture, title, row in zip(pictures, titles, asked, strict=True):
        assert title == whole.captions[2 + row % 10]
        assert np.abs(whole.images.mean(axis=(1, 2, 3)) - picture.mean()).argmin() == 2 + row % 10


def test_colours_are_kept(tmp_path):
    pictures, _, _ = read(copied(tmp_path, pairs=some_pairs(channels=3)))
    assert pictures.shape == (90, 3, 16, 16)
    assert (pictures[:, 0] != pictures[:, 1]).any()


def test_a_shard_is_a_shard(tmp_path):
    read(copied(tmp_path), range(16))
    (path,) = shards(tmp_path)
    found = list(find_in_tar(path))
    assert len(found) == 16
    with tarfile.open(path) as tar:
        assert tar.getnames()[:3] == ["000000000000.png", "000000000000.txt", "000000000001.png"]


def test_the_disk_holds_no_more_shards_than_the_limit(tmp_path):
    pairs, most = copied(tmp_path), 0
    for start in range(0, 90, 8):
        read(pairs, range(start, min(start + 8, 90)))
        most = max(most, len(shards(tmp_path)))
    assert most == 2
    assert [path.name[:8] for path in shards(tmp_path)] == ["00000004", "00000005"]


def test_a_run_that_begins_anywhere_reads_the_same(tmp_path):
    pictures, titles, _ = read(copied(tmp_path / "one"))
    for places in (range(37, 61), range(90), range(89, 90)):
        later, same, _ = read(copied(tmp_path / "other"), places)
        assert np.array_equal(later, pictures[places.start : places.stop])
        assert same == titles[places.start : places.stop]


def test_another_epoch_is_augmented_otherwise(tmp_path):
    pairs = copied(tmp_path)
    pictures, _, _ = read(pairs)
    again, _, asked = read(pairs, range(90, 180))
    assert sorted(asked) == list(range(90))
    assert len({picture.tobytes() for picture in (*pictures, *again)}) == 180


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-600], lambda content: content[:700] + b"?" + content[701:]]
)
def test_a_damaged_shard_is_written_again(tmp_path, caplog, damage):
    pictures, _, _ = read(copied(tmp_path), range(16))
    (path,) = shards(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    again, _, _ = read(copied(tmp_path), range(16))
    assert np.array_equal(again, pictures)
    assert f"{path} is damaged and is written again" in caplog.text


def test_files_of_a_killed_process_are_removed(tmp_path):
    pairs = copied(tmp_path)
    read(pairs, range(16))
    part = shards(tmp_path)[0].with_name(".part-00000001")
    part.write_bytes(b"hal")
    read(pairs, range(16, 32))
    assert not part.exists()


def test_another_order_than_was_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`seed` must be that in whose order the shards are written; got letter ."):
        read(copied(tmp_path), seed=4)


def test_a_disk_without_room_is_an_error(tmp_path):
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(
        ValueError, match=r"`cache` must be a folder with room for the shards; got .* Free it and resume."
    ):
        read(copied(tmp_path / "cache"))


def test_ids_are_those_of_the_set(tmp_path):
    pairs = copied(tmp_path)
    assert [pairs.stream.library.identity(f"letter {name}") for name in "ABC"] == [0, 0, ord("C")]


def test_a_tokenizer_reads_one_copy(tmp_path):
    titles = copied(tmp_path).stream.sample_captions(1000)
    assert titles == some_pairs().captions[2:]
    assert copied(tmp_path).stream.sample_captions(3) == titles[::4]


def test_copies_of_a_recipe_are_not_cropped(tmp_path, monkeypatch):
    def few(*_, **__):
        return some_pairs()

    monkeypatch.setattr("contrastile.data.registry.open_glyphs", few)
    recipe = tiny_recipe(tmp_path, "data.source=glyphs", "data.copies=4", "seed=5")
    materials = open_data_bundle(recipe)
    rows = Batches(materials.pairs.splits["train"], seed=5).take(40)
    batch = BatchBuilder(materials, augment=True, seed=5).batch(rows)
    pictures, _ = materials.pairs.stream.read((rows - 12).tolist(), range(40), None)
    assert torch.equal(batch.pixels, pictures)
    assert isinstance(materials.pairs.stream, Stream)
    assert open_pairs("glyphs", image_size=16, cache=tmp_path).stream is None


@pytest.mark.parametrize("word", ["data.source={}/pictures", "data.augment=false"])
def test_copies_are_augmented_and_of_decoded_sources_only(tmp_path, word):
    (tmp_path / "pictures").mkdir()
    with pytest.raises(ValueError, match=r"data\.copies: must be 1 but for glyphs or a table, with "):
        tiny_recipe(tmp_path, "data.copies=2", word.format(tmp_path))
