"""Collections: every pair is found, every cut is noticed, nothing leaves the folder, each is seen once an epoch."""

import hashlib
import io
import json
import re
import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from contrastile.data.batches import Batches
from contrastile.data.collection import Stream
from contrastile.data.crop import Crop
from contrastile.data.pairs import open_pairs
from contrastile.data.shards import find_in_folder, find_in_tar
from contrastile.data.sources import braces, read_source
from contrastile.data.table import decode


def jpeg(number, size=(24, 16)):
    """A picture whose grey says its number."""
    file = io.BytesIO()
    Image.new("L", size, 8 * (number % 30)).save(file, "JPEG", quality=95)
    return file.getvalue()


def add(tar, name, content, **entry):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in entry.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(content))


def write_shard(path, numbers, title="picture number {}"):
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            add(tar, f"{number:05}.jpg", jpeg(number))
            add(tar, f"{number:05}.txt", title.format(number).encode())
            add(tar, f"{number:05}.json", b"{}")
    return path


def write_shards(folder, shards=3, each=20):
    for shard in range(shards):
        write_shard(folder / f"{shard:02}.tar", range(shard * each, (shard + 1) * each))
    return f"{folder}/{{00..{shards - 1:02}}}.tar"


def opened(source, folder, **settings):
    return open_pairs(str(source), image_size=8, cache=folder / "cache", **{"held_out": 0.1, **settings})


# --- names


def test_braces_count_and_choose():
    assert list(braces("a/{098..101}.tar")) == ["a/098.tar", "a/099.tar", "a/100.tar", "a/101.tar"]
    assert list(braces("{a,b}{1..2}")) == ["a1", "a2", "b1", "b2"]
    assert list(braces("plain")) == ["plain"]


def test_sources_are_joined():
    kinds = [(source.kind, len(source.paths)) for source in read_source("a/{0..4}.tar::b/pictures::c/x.parquet")]
    assert kinds == [(".tar", 5), ("folder", 1), (".parquet", 1)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pipe:curl x.tar", 'must name files on this machine; got "pipe:curl x.tar"'),
        ("https://x/0.tar", 'must name files on this machine; got "https://x/0.tar"'),
        ("a.tar::", 'must name files on this machine; got ""'),
        ("{a..b}.tar", "must count in whole numbers, as in {000..099}; got {a..b}"),
        ("{9..1}.tar", "must count upwards, to 1,000,000 files at most; got {9..1}"),
        ("{0..9999999}.tar", "must count upwards, to 1,000,000 files at most; got {0..9999999}"),
        ("{0..9999}{0..9999}.tar", 'must name at most 1,000,000 files; got 100,000,000 in "{0..9999}{0..9999}.tar"'),
        (
            "a.tar.gz",
            'must end in .tar, .parquet, .tsv or .csv, or be a folder of pictures or "glyphs"; got "a.tar.gz"',
        ),
        ("shards/*.tar", 'must count its files, as in "shards/{000..099}.tar"; got "shards/*.tar"'),
    ],
)
def test_what_names_no_files_is_refused(text, sentence):
    with pytest.raises(ValueError) as caught:
        read_source(text)
    assert str(caught.value) == sentence


# --- what is found


def test_every_pair_of_a_shard_is_found(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(5))
    pairs = list(find_in_tar(shard))
    assert [pair.title for pair in pairs] == [f"picture number {number}" for number in range(5)]
    for number, pair in enumerate(pairs):
        with shard.open("rb") as file:
            file.seek(pair.offset)
            assert file.read(pair.size) == jpeg(number)


def test_what_gives_no_pair_is_counted_by_reason(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "good.jpg", jpeg(1))
        add(tar, "good.txt", b" two \n words ")
        add(tar, "picture only.jpg", jpeg(1))
        add(tar, "text only.txt", b"text")
        add(tar, "empty.jpg", jpeg(1))
        add(tar, "empty.txt", b"  ")
        add(tar, "latin.jpg", jpeg(1))
        add(tar, "latin.txt", "é".encode("latin-1"))
        add(tar, "twice.jpg", jpeg(1))
        add(tar, "twice.png", jpeg(1))
        add(tar, "twice.txt", b"twice")
        add(tar, "link.jpg", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "device.jpg", b"", type=tarfile.CHRTYPE)
        add(tar, "notes.json", b"{}")
        add(tar, "long.jpg", jpeg(1))
        add(tar, "long.txt", b"x" * 70_000)
    found = list(find_in_tar(tmp_path / "a.tar"))
    assert [pair.title for pair in found if not isinstance(pair, str)] == ["two words"]
    assert Counter(pair for pair in found if isinstance(pair, str)) == {
        "missing title": 1,
        "missing picture": 1,
        "empty title": 1,
        "not UTF-8": 1,
        "key used twice": 1,
        "not a plain file": 2,
        "too large": 1,
    }


def test_names_in_a_shard_never_become_paths(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    with tarfile.open(inside / "a.tar", "w") as tar:
        for name in ("../evil", "/tmp/evil", "x/../../evil", "long" * 60, "pipe:touch evil"):
            add(tar, f"{name}.jpg", jpeg(1))
            add(tar, f"{name}.txt", name.encode())
        add(tar, "payload.pyd", b"cos\nsystem\n(S'touch evil'\ntR.")
    pairs = opened(inside / "a.tar", tmp_path, held_out=0.3)
    assert len(pairs) + len(pairs.stream) == 5
    assert not list(tmp_path.rglob("*evil*"))


def test_a_shard_cut_anywhere_is_noticed(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(4))
    whole = shard.read_bytes()
    end = whole.rstrip(b"\0")
    # in headers, at headers, in contents, between members, in the zeros at the end
    cuts = [*range(1, len(end), 211), *range(0, len(end), 512), len(end), len(end) // 512 * 512 + 1024]
    for cut in cuts:
        shard.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="must be whole shards"):
            list(find_in_tar(shard))
    # in the zeros behind the end, where nothing is lost but their number
    shard.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="must be whole shards"):
        list(find_in_tar(shard))
    shard.write_bytes(whole)
    assert len(list(find_in_tar(shard))) == 4


def test_a_shard_whose_rest_was_never_written_is_noticed(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(30))
    whole = shard.read_bytes()
    with tarfile.open(shard) as tar:
        headers = [entry.offset for entry in tar][1:60:7]
    for header in headers:
        shard.write_bytes(whole[:header] + bytes(len(whole) - header))
        with pytest.raises(ValueError, match=f"got nothing but zeros from byte {header:,} on"):
            list(find_in_tar(shard))


def test_a_header_that_is_damaged_is_noticed(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(4))
    whole = shard.read_bytes()
    with tarfile.open(shard) as tar:
        headers = [entry.offset for entry in tar]
    for header in headers:
        for place in (0, 124, 150, 300):
            damaged = bytearray(whole)
            damaged[header + place] ^= 4
            shard.write_bytes(damaged)
            with pytest.raises(ValueError, match="must be whole shards"):
                list(find_in_tar(shard))
        # sectors of zeros, which the format takes for its end; in the place of the last file they are its end
        if header == headers[-1]:
            continue
        shard.write_bytes(whole[:header] + bytes(1024) + whole[header + 1024 :])
        with pytest.raises(ValueError, match="must be whole shards"):
            list(find_in_tar(shard))


def test_a_member_that_claims_a_tebibyte_is_noticed(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.size = 1 << 40
        tar.addfile(info)
    with pytest.raises(ValueError, match="must be whole shards"):
        list(find_in_tar(tmp_path / "a.tar"))


def told_anew(content, header, **fields):
    """The shard with other fields in the header at `header`, under a checksum that is right."""
    places = {"size": 124, "type": 156}
    block = bytearray(content[header : header + 512])
    for name, value in fields.items():
        block[places[name] : places[name] + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return content[:header] + bytes(block) + content[header + 512 :]


def long_name(times):
    block = tarfile.TarInfo("long")
    block.type, block.size = tarfile.GNUTYPE_LONGNAME, 4
    return (block.tobuf(tarfile.USTAR_FORMAT) + b"name".ljust(512, b"\0")) * times


def pax(record):
    block = tarfile.TarInfo("pax")
    block.type, block.size = tarfile.XHDTYPE, len(record)
    return block.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0")


@pytest.mark.parametrize(
    ("spoil", "got"),
    [
        # the library would go back and forth between two headers for ever
        (lambda whole: told_anew(whole, 1024, size=(2**96 - 512).to_bytes(12, "big")), "a size below 0 at byte 1,024"),
        (lambda whole: told_anew(whole, 2048, size=(2**96 - 1536).to_bytes(12, "big")), "a size below 0 at byte 2,048"),
        (lambda whole: told_anew(whole, 1024, size=b"\x80" + (2**80).to_bytes(11, "big")), "cannot fit"),
        # some builds of Python refuse these two headers themselves
        (lambda whole: pax(b"13 size=-2048\n") + whole, "a size below 0 at byte 0|invalid header"),
        (lambda whole: pax(b"99999999999999999999999 size=3\n") + whole, "too large|invalid header"),
        (lambda whole: pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n") + whole, "invalid literal"),
        (lambda whole: long_name(5000) + whole, "recursion"),
    ],
    ids=["back", "far back", "beyond any file", "back by pax", "a number too large", "sparse", "names of names"],
)
def test_a_header_that_was_made_to_mislead_is_noticed(tmp_path, spoil, got):
    shard = write_shard(tmp_path / "a.tar", range(4))
    shard.write_bytes(spoil(shard.read_bytes()))
    with pytest.raises(ValueError) as caught:
        list(find_in_tar(shard))
    assert str(caught.value).startswith(f"`source` must be whole shards ({shard}); got ")
    assert re.search(got, str(caught.value))


def test_what_is_empty_or_zeros_gives_no_pair(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for key, picture, title in (("a", b"", b"a"), ("b", jpeg(1), bytes(9)), ("c", jpeg(2), b"x" * 70_000)):
            add(tar, f"{key}.jpg", picture)
            add(tar, f"{key}.txt", title)
    assert list(find_in_tar(tmp_path / "a.tar")) == ["missing picture", "not a text", "too large"]


def test_sums_name_their_files_in_any_folder(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(4))
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    other = hashlib.sha256(b"other").hexdigest()
    for line in (f"{digest.upper()}  ./a.tar", f"{other}  val/a.tar\n{digest}  train/a.tar", f"{other}  b.tar"):
        (tmp_path / "SHA256SUMS").write_text(line + "\n\n")
        assert len(list(find_in_tar(shard))) == 4
    (tmp_path / "SHA256SUMS").write_text(f"{other}  ./a.tar\n")
    with pytest.raises(ValueError, match="another checksum than SHA256SUMS says"):
        list(find_in_tar(shard))
    (tmp_path / "SHA256SUMS").write_text("nothing\n")
    with pytest.raises(ValueError, match="`SHA256SUMS` must be lines of a checksum and a file; got"):
        list(find_in_tar(shard))
    (tmp_path / "SHA256SUMS").unlink()
    for sizes in ('{"a.tar": "four"}', '{"a.tar": [4]}'):
        (tmp_path / "sizes.json").write_text(sizes)
        with pytest.raises(ValueError, match=r"`sizes.json` must be an object of shards and their numbers of pairs"):
            list(find_in_tar(shard))


def test_a_manifest_that_comes_later_is_compared_with_too(tmp_path):
    source = write_shards(tmp_path)
    opened(source, tmp_path)
    (tmp_path / "sizes.json").write_text(json.dumps({"01.tar": 21}))
    with pytest.raises(ValueError, match=r"20 pairs where sizes\.json says 21"):
        opened(source, tmp_path)


def test_sizes_and_sums_are_compared_where_they_are_given(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(4))
    (tmp_path / "sizes.json").write_text(json.dumps({"a.tar": 4, "b.tar": 7}))
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{digest} *a.tar\n")
    assert len(list(find_in_tar(shard))) == 4
    (tmp_path / "sizes.json").write_text(json.dumps({"a.tar": 5}))
    with pytest.raises(ValueError) as caught:
        list(find_in_tar(shard))
    assert str(caught.value) == (
        f"`source` must be whole shards ({shard}); got 4 pairs where sizes.json says 5. "
        "Copy that shard again; it is cut or damaged."
    )
    (tmp_path / "sizes.json").write_text("[")
    with pytest.raises(ValueError, match=r"`sizes.json` must be an object of shards and their numbers of pairs"):
        list(find_in_tar(shard))
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="another checksum than SHA256SUMS says"):
        list(find_in_tar(shard))


def test_folders_of_pictures(tmp_path):
    for name, number in (("red_fox", 1), ("red_fox", 2), ("owl", 3)):
        (tmp_path / "set" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name / f"{number}.jpg").write_bytes(jpeg(number))
    (tmp_path / "set" / "owl" / "3.txt").write_text("an owl at night")
    (tmp_path / "secret.jpg").write_bytes(jpeg(4))
    (tmp_path / "set" / "owl" / "4.jpg").symlink_to(tmp_path / "secret.jpg")
    found = list(find_in_folder(tmp_path / "set"))
    assert [pair if isinstance(pair, str) else pair.title for pair in found] == [
        "an owl at night",
        "outside the folder",
        "red fox",
        "red fox",
    ]


def test_parquet_gives_the_same_pairs(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pictures = [{"bytes": jpeg(number), "path": "../../etc/passwd"} for number in range(30)]
    titles = [f"picture number {number}" for number in range(30)]
    table = pyarrow.table({"caption": [*titles, "nothing"], "image": [*pictures, None]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    write_shard(tmp_path / "a.tar", range(30))
    one, other = (opened(tmp_path / name, tmp_path, most_bad=0.1) for name in ("a.parquet", "a.tar"))
    assert one.titles == other.titles
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
    assert pairs.skipped == {"not UTF-8": 1, "empty title": 1, "missing picture": 2}
    with pytest.raises(ValueError, match=r"must have at most 10.0% bad pairs; got 4 of 30 \(empty title: 1, missing"):
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
        found.append(opened(parquet_of(tmp_path / f"{name}.parquet", *columns), tmp_path).titles)
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
    with pytest.raises(ValueError) as caught:
        opened(parquet_of(tmp_path / "a.parquet", list(titles), pictures), tmp_path)
    assert str(caught.value).startswith(sentence)


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
    monkeypatch.setattr("contrastile.data.parquet.MOST_MORE", 1 << 20)
    table = parquet_of(tmp_path / "a.parquet", ["a", "b"], [bytes(1 << 22), b"b"], compression="zstd")
    assert table.stat().st_size < 10_000
    with pytest.raises(ValueError, match="got more than 100 times its size in it"):
        opened(table, tmp_path)
    assert not list((tmp_path / "cache" / "unpacked").iterdir())


def test_what_was_unpacked_and_removed_is_unpacked_again(tmp_path):
    titles, pictures = [f"title {number}" for number in range(30)], [jpeg(number) for number in range(30)]
    table = parquet_of(tmp_path / "a.parquet", titles, pictures)
    before = opened(table, tmp_path).stream
    rows = range(len(before))
    images, _ = before.read(rows, rows, None)
    for shard in (tmp_path / "cache" / "unpacked").iterdir():
        shard.unlink()
    assert np.array_equal(opened(table, tmp_path).stream.read(rows, rows, None)[0], images)


def test_tables_are_joined_to_others_and_read_as_they_are_needed(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    rows = [f"{number}.jpg\tpicture number {number}" for number in range(12)]
    for name, some in (("0", rows[:6]), ("1", [*rows[6:], "nowhere.jpg\tnothing", ".\ta folder", "0.jpg\t "])):
        (tmp_path / f"{name}.tsv").write_text("\n".join(["filepath\ttitle", *some]))
    write_shard(tmp_path / "a.tar", range(12))
    tables, shard = f"{tmp_path}/{{0..1}}.tsv", f"{tmp_path}/a.tar"
    one, other = (opened(source, tmp_path, held_out=0.2, most_bad=0.3) for source in (tables, shard))
    assert one.skipped == {"missing picture": 2, "empty title": 1}
    assert one.titles == other.titles
    everything = range(len(one.stream))
    assert np.array_equal(*(pairs.stream.read(everything, everything, None)[0] for pairs in (one, other)))
    joined = opened(f"{tmp_path}/0.tsv::{shard}", tmp_path, weights=(2, 1), held_out=0.2)
    assert len(joined.stream) == 2 * 6 + 12 - sum(2 if int(t.split()[-1]) < 6 else 1 for t in set(joined.titles))
    # another picture: another set
    (tmp_path / "3.jpg").write_bytes(jpeg(20))
    assert opened(tables, tmp_path, held_out=0.2, most_bad=0.3).stream.fingerprint != one.stream.fingerprint


def test_parquet_without_the_columns_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"words": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError) as caught:
        opened(tmp_path / "a.parquet", tmp_path)
    assert str(caught.value) == (
        "`source` must have a column among title, text, caption, TEXT; got words. Rename the one that is."
    )


# --- the set


def test_every_pair_is_on_one_side_and_titles_stay_together(tmp_path):
    write_shards(tmp_path)
    write_shard(tmp_path / "10.tar", range(60, 100), title="the same title")
    pairs = opened(f"{tmp_path}/{{00..02}}.tar::{tmp_path}/10.tar", tmp_path, held_out=0.2)
    held, trained = pairs.titles, pairs.stream.titles(range(len(pairs.stream)))
    assert len(held) + len(trained) == 100
    assert not set(held) & set(trained)
    assert 0 < len(set(held)) < 30
    assert pairs.splits["train"].tolist() == list(range(len(held), 100))


def test_the_index_is_made_once_and_again_where_it_is_damaged(tmp_path, monkeypatch, caplog):
    source = write_shards(tmp_path)
    first = opened(source, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("contrastile.data.collection.find_pairs", None)
        assert opened(source, tmp_path).titles == first.titles
    damaged = next((tmp_path / "cache").glob("index-*")) / "where.npy"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    assert opened(source, tmp_path).titles == first.titles
    assert "is damaged and is made again" in caplog.text


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
    counts = Counter(pairs.stream.titles(range(len(pairs.stream))))
    for title, count in counts.items():
        assert count == (1 if int(title.split()[-1]) < 20 else 3)
    with pytest.raises(ValueError) as caught:
        opened(f"{tmp_path}/00.tar", tmp_path, weights=(1, 3))
    assert str(caught.value) == "`weights` must be one for each of the 1 sources; got 2. Or leave them out."


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_pair_is_seen_once_an_epoch_in_one_order_on_any_number_of_ranks(tmp_path, ranks):
    pairs = opened(write_shards(tmp_path), tmp_path)
    rows, sizes = pairs.splits["train"], [12] * 40
    length = len(rows)
    # half way with one process, the rest on several, each with every so many rows of a batch
    seen = [row for batch in list(Batches(rows, sizes=sizes[:3], seed=1)) for row in batch.tolist()]
    parts = [
        [batch[rank::ranks].tolist() for batch in Batches(rows, sizes=sizes, seed=1, step=3)] for rank in range(ranks)
    ]
    for shares in zip(*parts, strict=True):
        batch = torch.empty(12, dtype=torch.int64)
        for rank, share in enumerate(shares):
            batch[rank::ranks] = torch.tensor(share)
        seen += batch.tolist()
    whole = [row for batch in Batches(rows, sizes=sizes, seed=1) for row in batch.tolist()]
    assert seen == whole
    for start in range(0, len(seen) - length, length):
        assert sorted(seen[start : start + length]) == rows.tolist()


def test_what_comes_ahead_is_what_comes():
    batches = Batches(np.arange(7), sizes=[3] * 9, seed=2)
    for _ in range(8):
        next(batches)
        ahead = batches.ahead(3)
        assert torch.equal(ahead, batches.ahead(9)[:3])
        assert torch.equal(ahead, next(Batches(np.arange(7), sizes=[3] * 99, seed=2, step=batches.step)))


# --- what is read


def stream_of(tmp_path, contents, **settings):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, content in enumerate(contents):
            add(tar, f"{number:03}.jpg", content)
            add(tar, f"{number:03}.txt", f"title {number}".encode())
    pairs = opened(tmp_path / "a.tar", tmp_path, held_out=1e-9, **settings)
    return pairs.stream


def test_a_bad_picture_is_counted_and_its_neighbour_stands_in(tmp_path, caplog):
    stream = stream_of(tmp_path, [jpeg(number) for number in range(12)], most_bad=0.5)
    titles = stream.titles(range(len(stream)))
    broken = [jpeg(number) for number in range(12)]
    for title in (titles[0], titles[4], titles[5]):
        broken[int(title.split()[-1])] = b"<html>not found</html>"
    (tmp_path / "cache").rename(tmp_path / "old")
    stream = stream_of(tmp_path, broken, most_bad=0.5)
    images, read = stream.read(range(len(stream)), range(len(stream)), None)
    assert stream.titles(read[:7]) == [titles[1], titles[1], titles[2], titles[3], titles[3], titles[3], titles[6]]
    assert np.array_equal(images[5], images[3])
    assert stream.skipped == {"broken picture": 3}
    first = f'a picture of the collection is skipped (broken picture: {tmp_path / "a.tar"}, "{titles[0]}")'
    assert [message.split("; ")[0] for message in caplog.messages] == [first]


def test_where_none_can_be_read_the_rows_behind_stand_in(tmp_path):
    contents = [jpeg(number) for number in range(12)]
    titles = stream_of(tmp_path, contents, most_bad=0.5).titles(range(8))
    for title in titles[3:5]:
        contents[int(title.split()[-1])] = b"<html>not found</html>"
    (tmp_path / "cache").rename(tmp_path / "old")
    stream = stream_of(tmp_path, contents, most_bad=1.0)
    assert stream.titles(stream.read([3], [70], None)[1]) == [titles[5]]
    assert stream.skipped == {"broken picture": 2}
    with pytest.raises(ValueError, match="`source` must have pictures that can be read; got broken picture: 3"):
        stream.read([4], [71], None, tries=0)


def test_a_share_may_be_empty_and_what_nobody_asks_for_is_forgotten(tmp_path):
    stream = stream_of(tmp_path, [jpeg(number) for number in range(12)], most_bad=0.5)
    images, rows = stream.read([], [], None)
    assert (images.shape, rows) == ((0, *stream.read([0], [0], None)[0].shape[1:]), [])
    stream.expect([1, 2, 3], [1, 3, 5], None)
    stream.read([1], [1], None)
    stream.read([4], [4], None)
    assert list(stream._ahead) == [(3, 5)]


def test_a_folder_without_pictures_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as caught:
        opened(tmp_path / "empty", tmp_path)
    assert str(caught.value) == (
        f'`source` must hold at least two pairs that differ in their titles; got 0 pairs in "{tmp_path / "empty"}". '
        "Name a folder with pictures below it, or shards of pairs, as shards/{000..099}.tar."
    )


def test_pictures_without_titles_are_told_where_these_come_from(tmp_path):
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        (tmp_path / f"pictures/{number}.jpg").write_bytes(jpeg(number))
    with pytest.raises(ValueError) as caught:
        opened(tmp_path / "pictures", tmp_path)
    assert str(caught.value) == (
        f'`source` must hold at least two pairs that differ in their titles; got 4 pairs in "{tmp_path / "pictures"}". '
        "One is to be held out. In a folder a picture's title is the .txt beside it, or its folder's name."
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
    assert str(caught.value).startswith("`source` must have at most 20.0% bad pairs; got ")
    assert str(caught.value).endswith("Mend it, or raise data.max_bad_fraction.")


def test_too_many_bad_ones_among_those_held_out_are_an_error(tmp_path):
    source = write_shard(tmp_path / "a.tar", range(40))
    with tarfile.open(source, "w") as tar:
        for number in range(40):
            add(tar, f"{number:05}.jpg", b"<html>")
            add(tar, f"{number:05}.txt", f"picture number {number}".encode())
    with pytest.raises(ValueError, match=r"must have at most 1.0% bad pairs; got \d of 40 \(broken picture: \d\)"):
        opened(source, tmp_path, most_bad=0.01)


def test_a_bomb_is_refused_by_its_header(tmp_path):
    huge = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(huge, "PNG")
    assert len(huge.getvalue()) < 100_000
    stream = stream_of(tmp_path, [jpeg(number) for number in range(5)] + [huge.getvalue()], most_bad=1.0)
    stream.read(range(len(stream)), range(len(stream)), None)
    assert set(stream.skipped) <= {"picture over 64 megapixels"}
    assert decodes(huge.getvalue()) == "picture over 64 megapixels"


def test_formats_that_may_call_programs_are_refused():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    assert decodes(postscript) == "broken picture"


def decodes(content):
    from contrastile.data.skipped import Skipped

    try:
        decode(io.BytesIO(content), (1, 8, 8))
    except Skipped as reason:
        return str(reason)
    return None


# --- the crop


def test_boxes_have_the_paper_s_areas_and_ratios():
    crop = Crop(0)
    boxes = [crop.box(place)(400, 300) for place in range(2000)]
    wide = np.array([right - left for left, _, right, _ in boxes])
    high = np.array([bottom - top for _, top, _, bottom in boxes])
    shares, ratios = wide * high / (400 * 300), wide / high
    assert all(left >= 0 and top >= 0 and right <= 400 and bottom <= 300 for left, top, right, bottom in boxes)
    assert 0.078 < shares.min() < 0.1
    assert 0.9 < shares.max() <= 1.0
    assert 0.74 < ratios.min() < 0.77
    assert 1.30 < ratios.max() < 1.35
    # uniform areas, but for the largest, which seldom fit
    assert 0.4 < shares.mean() < 0.54


def test_a_box_depends_on_seed_and_place_alone():
    assert Crop(3).box(5)(99, 77) == Crop(3).box(5)(99, 77)
    assert Crop(3).box(5)(99, 77) != Crop(3).box(6)(99, 77)
    assert Crop(3).box(5)(99, 77) != Crop(4).box(5)(99, 77)


def test_a_picture_too_long_for_any_box_gives_its_middle():
    left, top, right, bottom = Crop(0, scale=(0.9, 1.0)).box(0)(1000, 10)
    assert (top, bottom) == (0, 10)
    assert right - left == 13
    assert left == (1000 - 13) // 2


def test_the_part_within_the_box_is_decoded(tmp_path):
    left = Image.new("RGB", (400, 200), "black")
    left.paste("white", (0, 0, 200, 200))
    file = io.BytesIO()
    left.save(file, "JPEG", quality=95)

    def part(*box):
        return decode(io.BytesIO(file.getvalue()), (3, 16, 16), lambda width, height: box)

    assert part(0, 0, 150, 150).min() > 240
    assert part(250, 0, 400, 150).max() < 15
    half = part(100, 0, 300, 200)
    assert half[:, :, :7].min() > 230
    assert half[:, :, 9:].max() < 25


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGB", 1), ("L", 3)])
def test_the_part_is_resampled_as_pillow_does(mode, channels):
    picture = Image.effect_noise((300, 200), 60).resize((90, 70)).resize((300, 200)).convert(mode)
    file = io.BytesIO()
    picture.save(file, "PNG")
    found = decode(io.BytesIO(file.getvalue()), (channels, 33, 33), lambda width, height: (31, 17, 251, 190))
    plain = picture.convert("L" if channels == 1 else "RGB")
    wanted = plain.crop((31, 17, 251, 190)).resize((33, 33), Image.Resampling.BICUBIC)
    differences = found.astype(int) - np.asarray(wanted).reshape(33, 33, channels).transpose(2, 0, 1)
    assert np.abs(differences).max() <= 1


def test_a_turned_picture_is_cut_upright():
    """Orientation 6: the top of the scene is the left edge of the file."""
    scene = Image.new("L", (64, 32), 0)
    scene.paste(255, (0, 0, 32, 32))
    exif = scene.getexif()
    exif[0x0112] = 6
    file = io.BytesIO()
    scene.save(file, "PNG", exif=exif)
    upright = decode(io.BytesIO(file.getvalue()), (1, 16, 16), lambda width, height: (16, 0, 48, 32))[0]
    assert upright[:7].min() > 240
    assert upright[9:].max() < 15


def test_reading_ahead_changes_nothing(tmp_path):
    file = io.BytesIO()
    Image.linear_gradient("L").save(file, "JPEG")
    stream = stream_of(tmp_path, [file.getvalue()] * 20)
    crop = Crop(1)
    plain = stream.read(range(8), range(100, 108), crop)
    stream.expect(range(12), range(100, 112), crop)
    again = stream.read(range(8), range(100, 108), crop)
    assert np.array_equal(plain[0], again[0])
    assert isinstance(stream, Stream)
    assert not np.array_equal(plain[0], stream.read(range(8), range(200, 208), crop)[0])
