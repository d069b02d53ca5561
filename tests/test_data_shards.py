"""Shards: every pair is found, every cut is noticed, nothing leaves the folder."""

import gzip
import hashlib
import io
import json
import re
import tarfile
from collections import Counter

import pytest
from PIL import Image
from refusals import refusal

from contrastile.data.registry import open_pairs
from contrastile.data.shards import find_in_folder, find_in_tar
from contrastile.data.sources import FORMATS, braces, read_source


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


def test_braces_count_and_choose():
    assert list(braces("a/{098..101}.tar")) == ["a/098.tar", "a/099.tar", "a/100.tar", "a/101.tar"]
    assert list(braces("{a,b}{1..2}")) == ["a1", "a2", "b1", "b2"]
    assert list(braces("plain")) == ["plain"]


def test_every_format_that_is_decoded_is_a_picture_of_a_folder_and_a_shard(tmp_path):
    (tmp_path / "pictures").mkdir()
    endings = [(kind, ending) for kind, endings in FORMATS.items() for ending in endings]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, (kind, ending) in enumerate(endings):
            file = io.BytesIO()
            Image.new("L", (24, 16), number).save(file, kind)
            for suffix, content in ((ending, file.getvalue()), (".txt", f"picture {number}".encode())):
                add(tar, f"{number}{suffix}", content)
                (tmp_path / f"pictures/{number}{suffix}").write_bytes(content)
    for source in ("pictures", "a.tar"):
        pairs = opened(tmp_path / source, tmp_path)
        assert len(pairs) + len(pairs.stream) == len(endings)
        pairs.stream.read(range(len(pairs.stream)), range(len(pairs.stream)), None)
        assert (pairs.skipped, pairs.stream.skipped) == ({}, {})


def test_endings_of_sources_have_any_case():
    kinds = [source.kind for source in read_source("A.CSV::B.TSV::C.Tar::d.PARQUET::e")]
    assert kinds == [".csv", ".tsv", ".tar", ".parquet", "folder"]


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
            'must end in .tar, .parquet, .tsv or .csv, or be a folder of images or "glyphs"; got "a.tar.gz"',
        ),
        ("shards/*.tar", 'must count its files, as in "shards/{000..099}.tar"; got "shards/*.tar"'),
    ],
)
def test_a_source_without_files_is_refused(text, sentence):
    assert refusal(read_source, text) == sentence


def test_every_pair_of_a_shard_is_found(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(5))
    pairs = list(find_in_tar(shard))
    assert [pair.caption for pair in pairs] == [f"picture number {number}" for number in range(5)]
    for number, pair in enumerate(pairs):
        with shard.open("rb") as file:
            file.seek(pair.offset)
            assert file.read(pair.size) == jpeg(number)


def test_entries_without_a_pair_are_counted_by_reason(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "good.jpg", jpeg(1))
        add(tar, "good.txt", b"\xef\xbb\xbf two \n words ")
        add(tar, "picture only.jpg", jpeg(1))
        add(tar, "text only.txt", b"text")
        add(tar, "empty.jpg", jpeg(1))
        add(tar, "empty.txt", b"  ")
        add(tar, "latin.jpg", jpeg(1))
        add(tar, "latin.txt", "é".encode("latin-1"))
        add(tar, "twice.jpg", jpeg(1))
        add(tar, "twice.png", jpeg(1))
        add(tar, "twice.txt", b"twice")
        for number in range(3):
            add(tar, f"thrice.{number}.jpg", jpeg(number))
            add(tar, f"thrice.{number}.txt", b"thrice")
        add(tar, "link.jpg", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "device.jpg", b"", type=tarfile.CHRTYPE)
        add(tar, "notes.json", b"{}")
        add(tar, "long.jpg", jpeg(1))
        add(tar, "long.txt", b"x" * 70_000)
    found = list(find_in_tar(tmp_path / "a.tar"))
    assert [pair.caption for pair in found if not isinstance(pair, str)] == ["two words"]
    assert Counter(pair for pair in found if isinstance(pair, str)) == {
        "missing caption": 1, "missing picture": 1, "empty caption": 1, "not UTF-8": 1, "key used twice": 4,
        "not a plain file": 2, "caption over 64 kB": 1,
    }  # fmt: skip


def test_folders_and_files_beside_the_pairs_are_no_bad_pairs(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in (".", "./set", "./set/one.jpg.d", "./set/odd.jpg"):
            add(tar, name, b"", type=tarfile.DIRTYPE)
        add(tar, "./set/LICENSE", b"free")
        add(tar, "./set/latest", b"", type=tarfile.SYMTYPE, linkname="LICENSE")
        add(tar, "./set/one.jpg", jpeg(1))
        add(tar, "./set/one", b"", type=tarfile.DIRTYPE)
        add(tar, "./set/one.txt", b"one")
        add(tar, "./set/link.txt", b"", type=tarfile.SYMTYPE, linkname="one.txt")
    (tmp_path / "sizes.json").write_text('{"a.tar": 2}')
    (pair, reason) = find_in_tar(tmp_path / "a.tar")
    assert (pair.caption, reason) == ("one", "not a plain file")


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
    return block.tobuf(tarfile.USTAR_FORMAT) + record.ljust(-(-len(record) // 512) * 512, b"\0")


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
        (lambda whole: long_name(5000) + whole, "a header of over 65,536 bytes"),
        (lambda whole: pax(b"9" * 80_000) + whole, "a header of over 65,536 bytes"),
        (lambda whole: pax(b"9" * 60_000) + whole, "a number of over 256 digits in a header"),
    ],
    ids=[
        "back", "far back", "beyond any file", "back by pax", "a number too large", "sparse", "names of names",
        "long", "digits",
    ],
)  # fmt: skip
def test_a_header_that_was_made_to_mislead_is_noticed(tmp_path, spoil, got):
    shard = write_shard(tmp_path / "a.tar", range(4))
    shard.write_bytes(spoil(shard.read_bytes()))
    with pytest.raises(ValueError) as caught:
        list(find_in_tar(shard))
    assert str(caught.value).startswith(f"`source` must be whole shards ({shard}); got ")
    assert re.search(got, str(caught.value))


def test_empty_entries_and_zeros_give_no_pair(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for key, picture, title in (("a", b"", b"a"), ("b", jpeg(1), bytes(9)), ("c", jpeg(2), b"x" * 70_000)):
            add(tar, f"{key}.jpg", picture)
            add(tar, f"{key}.txt", title)
    assert list(find_in_tar(tmp_path / "a.tar")) == ["missing picture", "not a text", "caption over 64 kB"]


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
    for sizes in ('{"a.tar": "four"}', '{"a.tar": [4]}', "["):
        (tmp_path / "sizes.json").write_text(sizes)
        with pytest.raises(ValueError, match=r"`sizes.json` must be an object of shards and their numbers of pairs"):
            list(find_in_tar(shard))


def test_a_compressed_shard_is_called_that(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(4))
    shard.write_bytes(gzip.compress(shard.read_bytes()))
    assert refusal(list, find_in_tar(shard)).endswith("Unpack that shard with gunzip.")


def test_sizes_and_sums_are_compared_where_they_are_given(tmp_path):
    shard = write_shard(tmp_path / "a.tar", range(4))
    (tmp_path / "sizes.json").write_text(json.dumps({"a.tar": 4, "b.tar": 7}))
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{digest} *a.tar\n")
    assert len(list(find_in_tar(shard))) == 4
    (tmp_path / "sizes.json").write_text(json.dumps({"a.tar": 5}))
    assert refusal(list, find_in_tar(shard)) == (
        f"`source` must be whole shards ({shard}); got 4 pairs where sizes.json says 5. "
        "Copy that shard again; it is cut or damaged."
    )


def test_folders_of_pictures(tmp_path):
    for name, number in (("red_fox", 1), ("red_fox", 2), ("owl", 3)):
        (tmp_path / "set" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name / f"{number}.jpg").write_bytes(jpeg(number))
    (tmp_path / "set" / "owl" / "3.txt").write_text("an owl at night")
    (tmp_path / "set" / "owl" / "5.JPG").write_bytes(jpeg(5))
    (tmp_path / "set" / "owl" / "5.TXT").write_text("an owl by day")
    (tmp_path / "set" / "owl" / "6.jpg").write_bytes(jpeg(6))
    (tmp_path / "set" / "red_fox" / "7.jpg").write_bytes(b"")
    (tmp_path / "secret.jpg").write_bytes(jpeg(4))
    (tmp_path / "set" / "owl" / "4.jpg").symlink_to(tmp_path / "secret.jpg")
    found = list(find_in_folder(tmp_path / "set"))
    assert [pair if isinstance(pair, str) else pair.caption for pair in found] == [
        "an owl at night",
        "outside the folder",
        "an owl by day",
        "missing caption",
        "red fox",
        "red fox",
        "broken picture",
    ]
