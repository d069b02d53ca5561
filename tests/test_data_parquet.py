"""Parquet shards: the same pairs as tar shards, damage and bombs are refused."""

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from refusals import refusal
from test_data_shards import jpeg, opened, write_shard

from contrastile.data import shards
from contrastile.data.shards import unpack


def test_parquet_gives_the_same_pairs(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pictures = [{"bytes": jpeg(number), "path": "../../etc/passwd"} for number in range(30)]
    titles = [f"picture number {number}" for number in range(30)]
    table = pyarrow.table({"caption": [*titles, "nothing"], "image": [*pictures, None]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    write_shard(tmp_path / "a.tar", range(30))
    one, other = (opened(tmp_path / name, tmp_path, most_bad=0.1) for name in ("a.parquet", "a.tar"))
    assert one.captions == other.captions
    assert np.array_equal(one.images, other.images)
    rows, places = range(len(one.stream) - 1), range(len(one.stream) - 1)
    assert np.array_equal(one.stream.read(rows, places, None)[0], other.stream.read(rows, places, None)[0])
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-50])
    with pytest.raises(ValueError, match="must be whole shards"):
        opened(tmp_path / "b.parquet", tmp_path)


def parquet_of(path, titles, pictures, **how):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"title": titles, "image": pictures}), path, **how)
    return path


def test_rows_of_parquet_without_either_are_counted(tmp_path):
    titles = ["\xe9".encode("latin-1"), None, *(f"title {number}".encode() for number in range(2, 30))]
    pictures = [*(jpeg(number) for number in range(28)), None, b""]
    pairs = opened(parquet_of(tmp_path / "a.parquet", titles, pictures), tmp_path, most_bad=0.2)
    assert pairs.skipped == {"not UTF-8": 1, "empty caption": 1, "missing picture": 2}
    with pytest.raises(ValueError, match=r"must have at most 10% bad pairs; got 4 of 30 \(empty caption: 1, missing"):
        opened(tmp_path / "a.parquet", tmp_path, most_bad=0.1)


def test_parquet_of_any_type_of_bytes_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    titles, pictures = [f"title {number}" for number in range(30)], [jpeg(number) for number in range(30)]
    types = {
        "plain": (pyarrow.string(), pyarrow.binary()),
        "large": (pyarrow.large_string(), pyarrow.large_binary()),
        "words": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), pyarrow.binary(len(pictures[0]))),
    }
    found = []
    for name, (text, content) in types.items():
        same = [pictures[0]] * 30 if name == "words" else pictures
        columns = pyarrow.array(titles, pyarrow.string()).cast(text), pyarrow.array(same, content)
        found.append(opened(parquet_of(tmp_path / f"{name}.parquet", *columns), tmp_path).captions)
    assert found[0]
    assert found == [found[0]] * 3


@pytest.mark.parametrize(
    ("titles", "pictures", "sentence"),
    [
        (range(4), [b"a"] * 4, "`source` must have texts in the column title; got int64. Write it anew as these."),
        ("abcd", [[b"a"]] * 4, "`source` must have bytes, or structs with bytes in the column image; got list"),
    ],
)
def test_parquet_of_other_types_is_refused(tmp_path, titles, pictures, sentence):
    assert refusal(opened, parquet_of(tmp_path / "a.parquet", list(titles), pictures), tmp_path).startswith(sentence)


def test_parquet_with_paths_alone_is_refused(tmp_path):
    pictures = [{"bytes": None, "path": f"{number}.jpg"} for number in range(12)]
    table = parquet_of(tmp_path / "a.parquet", [f"title {number}" for number in range(12)], pictures)
    assert refusal(opened, table, tmp_path) == (
        f"`source` must have the bytes of images ({table}); got paths alone in the column image, which are not "
        "followed. Embed them, or name the files in a .csv."
    )


def test_damaged_parquet_is_noticed(tmp_path):
    titles, pictures = [f"title {number}" for number in range(30)], [jpeg(number) for number in range(30)]
    table = parquet_of(tmp_path / "a.parquet", titles, pictures, write_page_checksum=True)
    whole = table.read_bytes()
    assert len(opened(table, tmp_path)) > 0
    # a page with a checksum: every byte of it is compared
    pages = pytest.importorskip("pyarrow.parquet").ParquetFile(table).metadata.row_group(0).column(1)
    for place in range(pages.dictionary_page_offset + 60, pages.data_page_offset, 97):
        table.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="must be whole shards"):
            opened(table, tmp_path)
    table.write_bytes(whole)
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(b'other').hexdigest()}  a.parquet\n")
    with pytest.raises(ValueError, match="another checksum than SHA256SUMS says"):
        opened(table, tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / "sizes.json").write_text('{"a.parquet": 31}')
    with pytest.raises(ValueError, match=r"\(.*a.parquet\); got 30 pairs where sizes.json says 31"):
        opened(table, tmp_path)


def test_a_parquet_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("contrastile.data.shards.MOST_MORE", 1 << 20)
    table = parquet_of(tmp_path / "a.parquet", ["a", "b"], [bytes(1 << 22), b"b"], compression="zstd")
    assert table.stat().st_size < 10_000
    with pytest.raises(ValueError, match="got more than 100 times its size in it"):
        opened(table, tmp_path)
    assert not list((tmp_path / "cache" / "unpacked").glob("*.tar"))
    assert not list((tmp_path / "cache" / "unpacked").glob("*/"))


def flip(shard):
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("spoil", [Path.unlink, flip])
def test_an_unpacked_shard_that_is_removed_or_damaged_is_unpacked_again(tmp_path, spoil, caplog):
    titles, pictures = [f"title {number}" for number in range(30)], [jpeg(number) for number in range(30)]
    table = parquet_of(tmp_path / "a.parquet", titles, pictures)
    before = opened(table, tmp_path).stream
    rows = range(len(before))
    images, _ = before.read(rows, rows, None)
    (shard,) = (tmp_path / "cache" / "unpacked").glob("*/pairs.tar")
    whole = shard.read_bytes()
    spoil(shard)
    # of a process that was killed, and of an earlier version
    for leftover in ("0123456789abcdef.tar", "0123456789abcdef.part-12"):
        (shard.parent.parent / leftover).touch()
    assert np.array_equal(opened(table, tmp_path).stream.read(rows, rows, None)[0], images)
    assert shard.read_bytes() == whole
    assert "is damaged" in caplog.text
    names = {path.name for path in shard.parent.parent.iterdir()}
    assert names == {shard.parent.name, f".{shard.parent.name}.lock"}


def test_an_index_names_the_unpacked_shards_that_are_there(tmp_path, monkeypatch):
    """After a table has moved behind its link, whose old shard was removed; and from another working folder."""
    titles, pictures = [f"title {number}" for number in range(30)], [jpeg(number) for number in range(30)]
    for name in ("a", "b", "cache"):
        (tmp_path / name).mkdir()
    table = parquet_of(tmp_path / "a" / "a.parquet", titles, pictures)
    link = tmp_path / "a.parquet"
    link.symlink_to(table)
    monkeypatch.chdir(tmp_path)
    before = opened(link, Path()).stream
    rows = range(len(before))
    images, _ = before.read(rows, rows, None)
    monkeypatch.chdir(tmp_path / "b")
    assert np.array_equal(opened(link, Path("..")).stream.read(rows, rows, None)[0], images)
    shutil.rmtree(tmp_path / "cache" / "unpacked")
    link.unlink()
    link.symlink_to(table.rename(tmp_path / "b" / "a.parquet"))
    assert np.array_equal(opened(link, Path("..")).stream.read(rows, rows, None)[0], images)


def test_readers_of_one_parquet_file_unpack_it_once(tmp_path, monkeypatch):
    titles, pictures = [f"title {number}" for number in range(30)], [jpeg(number) for number in range(30)]
    table, made = parquet_of(tmp_path / "a.parquet", titles, pictures), []
    original = shards._unpack
    monkeypatch.setattr(shards, "_unpack", lambda *arguments: made.append("made") or original(*arguments))
    # the lock is of an open file: threads wait for each other as processes do
    with ThreadPoolExecutor(4) as readers:
        found = list(readers.map(lambda _: unpack(table, tmp_path / "unpacked"), range(4)))
    assert made == ["made"]
    assert len(set(found)) == 1


def test_a_column_that_comes_twice_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    columns = [pyarrow.array(["a"]), pyarrow.array([b"b"]), pyarrow.array([b"c"])]
    table = pyarrow.Table.from_arrays(columns, names=["title", "image", "image"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match='must have columns of different names; got "image" twice in'):
        opened(tmp_path / "a.parquet", tmp_path)


def test_parquet_without_the_columns_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"words": ["a"]}), tmp_path / "a.parquet")
    assert refusal(opened, tmp_path / "a.parquet", tmp_path) == (
        "`source` must have a column among title, text, caption, TEXT; got words. Rename the one that is."
    )
