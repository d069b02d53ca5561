"""Collections: splits and weights, each pair once an epoch, unreadable images are counted and replaced."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal
from test_data_shards import add, jpeg, opened, write_shard, write_shards

from contrastile.data.base import Batches
from contrastile.data.pairs import Stream
from contrastile.data.registry import open_pairs


def test_a_manifest_that_comes_later_is_compared_with_too(tmp_path):
    source = write_shards(tmp_path)
    opened(source, tmp_path)
    (tmp_path / "sizes.json").write_text(json.dumps({"01.tar": 21}))
    with pytest.raises(ValueError, match=r"20 pairs where sizes\.json says 21"):
        opened(source, tmp_path)


def test_tables_are_joined_to_others_and_read_as_they_are_needed(tmp_path, caplog):
    for number in range(12):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    rows = [f"{number}.jpg\tpicture number {number}" for number in range(12)]
    bad = ["nowhere.jpg\tnothing", ".\ta folder", "bytes.jpg\tno bytes", "0.jpg\t "]
    for name, some in (("0", rows[:6]), ("1", [*rows[6:], *bad])):
        (tmp_path / f"{name}.tsv").write_text("\n".join(["filepath\ttitle", *some]))
    (tmp_path / "bytes.jpg").write_bytes(b"")
    write_shard(tmp_path / "a.tar", range(12))
    tables, shard = f"{tmp_path}/{{0..1}}.tsv", f"{tmp_path}/a.tar"
    one, other = (opened(source, tmp_path, held_out=0.2, most_bad=0.3) for source in (tables, shard))
    assert one.skipped == {"missing picture": 2, "broken picture": 1, "empty caption": 1}
    told = "4 of 16 pairs are skipped (broken picture: 1, empty caption: 1, missing picture: 2)"
    assert caplog.messages == [f"{tables}: {told}"]
    assert one.captions == other.captions
    everything = range(len(one.stream))
    assert np.array_equal(*(pairs.stream.read(everything, everything, None)[0] for pairs in (one, other)))
    joined = opened(f"{tmp_path}/0.tsv::{shard}", tmp_path, weights=(2, 1), held_out=0.2)
    assert len(joined.stream) == 2 * 6 + 12 - sum(2 if int(t.split()[-1]) < 6 else 1 for t in set(joined.captions))
    # another picture: another set
    (tmp_path / "3.jpg").write_bytes(jpeg(20))
    assert opened(tables, tmp_path, held_out=0.2, most_bad=0.3).stream.fingerprint != one.stream.fingerprint


def test_every_pair_is_on_one_side_and_captions_stay_together(tmp_path):
    write_shards(tmp_path)
    write_shard(tmp_path / "10.tar", range(60, 100), title="the same title")
    pairs = opened(f"{tmp_path}/{{00..02}}.tar::{tmp_path}/10.tar", tmp_path, held_out=0.2)
    held, trained = pairs.captions, pairs.stream.captions(range(len(pairs.stream)))
    assert len(held) + len(trained) == 100
    assert not set(held) & set(trained)
    assert 0 < len(set(held)) < 30
    assert pairs.splits["train"].tolist() == list(range(len(held), 100))


def test_the_index_is_made_once_and_again_where_it_is_damaged(tmp_path, monkeypatch, caplog):
    source = write_shards(tmp_path)
    first = opened(source, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("contrastile.data.collection.find_pairs", None)
        assert opened(source, tmp_path).captions == first.captions
    damaged = next((tmp_path / "cache").glob("index-*")) / "where.npy"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    assert opened(source, tmp_path).captions == first.captions
    assert "is damaged (the checksum of where.npy does not agree) and is made again" in caplog.text


def test_a_shard_that_changed_is_read_again(tmp_path):
    source = write_shards(tmp_path)
    before = opened(source, tmp_path)
    write_shard(tmp_path / "00.tar", range(100, 110))
    after = opened(source, tmp_path)
    assert before.stream.digest != after.stream.digest
    assert len(after) + len(after.stream) == 50


def test_weights_repeat_a_source(tmp_path):
    write_shards(tmp_path, shards=2)
    pairs = opened(f"{tmp_path}/00.tar::{tmp_path}/01.tar", tmp_path, weights=(1, 3))
    counts = Counter(pairs.stream.captions(range(len(pairs.stream))))
    for title, count in counts.items():
        assert count == (1 if int(title.split()[-1]) < 20 else 3)
    assert refusal(opened, f"{tmp_path}/00.tar", tmp_path, weights=(1, 3)) == (
        "`weights` must be one for each of the 1 sources; got 2. Or leave them out."
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_pair_is_seen_once_an_epoch_in_one_order_on_any_number_of_ranks(tmp_path, ranks):
    pairs = opened(write_shards(tmp_path), tmp_path)
    rows, sizes = pairs.splits["train"], [12] * 40
    length = len(rows)
    # half way with one process, the rest on several, each with every so many rows of a batch
    first, orders = Batches(rows, seed=1), [Batches(rows, seed=1, examples=sum(sizes[:3])) for _ in range(ranks)]
    seen = [row for size in sizes[:3] for row in first.take(size).tolist()]
    parts = [[order.take(size)[rank::ranks].tolist() for size in sizes[3:]] for rank, order in enumerate(orders)]
    for shares in zip(*parts, strict=True):
        batch = torch.empty(12, dtype=torch.int64)
        for rank, share in enumerate(shares):
            batch[rank::ranks] = torch.tensor(share)
        seen += batch.tolist()
    assert seen == Batches(rows, seed=1).take(sum(sizes)).tolist()
    for start in range(0, len(seen) - length, length):
        assert sorted(seen[start : start + length]) == rows.tolist()


def test_rows_ahead_are_the_rows_that_come():
    batches = Batches(np.arange(7), seed=2)
    for _ in range(8):
        batches.take(3)
        ahead = batches.ahead(3)
        assert torch.equal(ahead, batches.ahead(9)[:3])
        assert torch.equal(ahead, Batches(np.arange(7), seed=2, examples=batches.examples).take(3))


def stream_of(tmp_path, contents, **settings):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, content in enumerate(contents):
            add(tar, f"{number:03}.jpg", content)
            add(tar, f"{number:03}.txt", f"title {number}".encode())
    pairs = opened(tmp_path / "a.tar", tmp_path, held_out=1e-9, **settings)
    return pairs.stream


def test_a_bad_picture_is_counted_and_its_neighbour_stands_in(tmp_path, caplog):
    stream = stream_of(tmp_path, [jpeg(number) for number in range(12)], most_bad=0.5)
    titles = stream.captions(range(len(stream)))
    broken = [jpeg(number) for number in range(12)]
    for title in (titles[0], titles[4], titles[5]):
        broken[int(title.split()[-1])] = b"<html>not found</html>"
    (tmp_path / "cache").rename(tmp_path / "old")
    stream = stream_of(tmp_path, broken, most_bad=0.5)
    images, read = stream.read(range(len(stream)), range(len(stream)), None)
    assert stream.captions(read[:7]) == [titles[1], titles[1], titles[2], titles[3], titles[3], titles[3], titles[6]]
    assert np.array_equal(images[5], images[3])
    assert stream.skipped == {"broken picture": 3}
    first = f'an image of the collection is skipped (broken picture: {tmp_path / "a.tar"}, "{titles[0]}")'
    assert [message.split("; ")[0] for message in caplog.messages] == [first]
    # each image is counted once, in the first epoch, each of its readings for the share of bad ones
    stream.read(range(len(stream)), range(len(stream), 2 * len(stream)), None)
    assert (stream.lost, stream.skipped, stream.seen) == ({"broken picture": 3}, {"broken picture": 6}, 2 * len(stream))
    stream.rows = np.repeat(stream.rows, 2)
    stream.set_counts({}, {}, 0)
    stream.read(range(len(stream)), range(len(stream)), None)
    assert (stream.lost, stream.skipped) == ({"broken picture": 3}, {"broken picture": 6})


def test_where_none_can_be_read_the_rows_behind_stand_in(tmp_path):
    contents = [jpeg(number) for number in range(12)]
    titles = stream_of(tmp_path, contents, most_bad=0.5).captions(range(8))
    for title in titles[3:5]:
        contents[int(title.split()[-1])] = b"<html>not found</html>"
    (tmp_path / "cache").rename(tmp_path / "old")
    stream = stream_of(tmp_path, contents, most_bad=1.0)
    assert stream.captions(stream.read([3], [70], None)[1]) == [titles[5]]
    assert stream.skipped == {"broken picture": 1}
    stream = stream_of(tmp_path, [b"<html>"] * 12, most_bad=1.0)
    with pytest.raises(ValueError, match="`source` must have images that can be read; got broken picture: 11"):
        stream.read(range(8), range(8), None)


def test_a_share_may_be_empty_and_an_expected_batch_may_be_given_up(tmp_path):
    stream = stream_of(tmp_path, [jpeg(number) for number in range(12)], most_bad=0.5)
    plain, _ = stream.read([4], [4], None)
    images, rows = stream.read([], [], None)
    assert (images.shape, rows) == ((0, *plain.shape[1:]), [])
    stream.prefetch([1, 2, 3], [1, 3, 5], None)
    assert torch.equal(stream.read([4], [4], None)[0], plain)


def test_a_folder_without_pictures_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert refusal(opened, tmp_path / "empty", tmp_path) == (
        f'`source` must hold at least two pairs that differ in their captions; got 0 pairs in "{tmp_path / "empty"}". '
        "Name a folder with images below it, or shards of pairs, as shards/{000..099}.tar."
    )


def test_one_caption_left_to_train_on_is_a_warning(tmp_path, caplog):
    lines = ["filepath,title"]
    for number in range(6):
        name = f"{'cat' if number % 2 else 'dog'}/{number}.jpg"
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pictures" / name).write_bytes(jpeg(number))
        lines.append(f"{name},{Path(name).parent}")
    (tmp_path / "pictures/pairs.csv").write_text("\n".join(lines))
    sentence = "one caption is left to train on, so that no pair has a negative and the loss is 0; add captions"
    for source in ("pictures", "pictures/pairs.csv"):
        caplog.clear()
        open_pairs(str(tmp_path / source), image_size=8, cache=tmp_path / "cache")
        assert f"{tmp_path / source}: {sentence}" in caplog.messages


@pytest.mark.parametrize(
    ("name", "remedy"), [("metadata.csv", "it"), ("dogs/metadata.jsonl", "a .csv of its file_name and text")]
)
def test_captions_in_metadata_beside_the_pictures_are_not_read_without_a_word(tmp_path, caplog, name, remedy):
    for number in range(6):
        folder = tmp_path / "pictures" / ("dogs" if number % 2 else "cats")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(jpeg(number))
    (tmp_path / "pictures" / name).touch()
    opened(tmp_path / "pictures", tmp_path)
    told = f"{tmp_path}/pictures/{name} is not read: captions of a folder are .txt files or names of folders. "
    assert told + f"To have its captions, name {remedy} as data.source" in caplog.messages


def test_pictures_without_captions_are_refused_with_their_places(tmp_path):
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        (tmp_path / f"pictures/{number}.jpg").write_bytes(jpeg(number))
    assert refusal(opened, tmp_path / "pictures", tmp_path) == (
        "`source` must hold at least two pairs that differ in their captions; "
        f'got 4 pairs in "{tmp_path / "pictures"}". '
        "One is held out. In a folder an image's caption is the .txt beside it, or its folder's name."
    )


def test_too_many_bad_ones_stop_the_run(tmp_path):
    contents = [jpeg(number) for number in range(40)]
    contents[1::2] = [b"<html>"] * 20
    stream = stream_of(tmp_path, contents, most_bad=0.5)
    stream.read(range(len(stream)), range(len(stream)), None)
    stream.check(stream.skipped, stream.seen)
    stream = stream_of(tmp_path, contents, most_bad=0.2)
    stream.read(range(len(stream)), range(len(stream)), None)
    with pytest.raises(ValueError) as caught:
        stream.check(stream.skipped, stream.seen)
    assert str(caught.value).startswith("`source` must have at most 20% bad pairs; got ")
    assert str(caught.value).endswith("Mend it, or raise data.max_bad_fraction.")


def test_too_many_bad_ones_among_those_held_out_are_an_error(tmp_path):
    source = write_shard(tmp_path / "a.tar", range(40))
    with tarfile.open(source, "w") as tar:
        for number in range(40):
            add(tar, f"{number:05}.jpg", b"<html>")
            add(tar, f"{number:05}.txt", f"picture number {number}".encode())
    with pytest.raises(ValueError, match=r"must have at most 1% bad pairs; got \d of 40 \(broken picture: \d\)"):
        opened(source, tmp_path, most_bad=0.01)


def test_reading_ahead_changes_nothing(tmp_path):
    file = io.BytesIO()
    Image.linear_gradient("L").save(file, "JPEG")
    stream = stream_of(tmp_path, [file.getvalue()] * 20)
    crop = 1
    plain = stream.read(range(8), range(100, 108), crop)
    stream.prefetch(range(12), range(100, 112), crop)
    again = stream.read(range(8), range(100, 108), crop)
    assert np.array_equal(plain[0], again[0])
    assert isinstance(stream, Stream)
    assert not np.array_equal(plain[0], stream.read(range(8), range(200, 208), crop)[0])


def test_with_few_class_folders_pictures_of_the_others_are_held_out_too(tmp_path):
    for row in range(36):
        (tmp_path / f"pictures/class {row % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 7 * row).save(tmp_path / f"pictures/class {row % 3}/{row}.png")
    options = {"image_size": 8, "cache": tmp_path / "cache", "held_out": 0.2}
    pairs = open_pairs(str(tmp_path / "pictures"), **options)
    again = open_pairs(str(tmp_path / "pictures"), **options)
    splits = pairs.splits
    assert [len(splits["held_out"]), len(splits["images"]) + len(splits["train"])] == [12, 24]
    assert 1 <= len(splits["images"]) <= 10
    assert all(np.array_equal(splits[name], again.splits[name]) for name in splits)
    held_out = {pairs.captions[row] for row in splits["held_out"]}
    images = {pairs.captions[row] for row in splits["images"]}
    train = set(pairs.stream.captions(range(len(pairs.stream))))
    assert (len(held_out), held_out & train, images - train) == (1, set(), set())
    # no picture of the training is among the held-out ones
    shown, _ = pairs.stream.read([*range(len(pairs.stream))], [*range(len(pairs.stream))], None)
    assert not {*shown.flatten(1)[:, 0].tolist()} & {*pairs.images[:, 0, 0, 0].tolist()}
