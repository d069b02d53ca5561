"""Random damage for every reader of the user's files: seeds that are right, spoilt in a way that a number decides.

A reader may return, skip an example with its reason, or raise ValueError in the house's form. Anything else fails.
"""

import gzip
import io
import json
import logging
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import hostile_images
import hostile_texts
import numpy as np

from contrastile.data.base import Skipped, silent
from contrastile.data.evaluation_sets import open_captions, read_classes, read_mapping, read_prompts
from contrastile.data.images import crop_box, decode
from contrastile.data.registry import open_texts
from contrastile.data.shards import find_in_table, find_in_tar
from contrastile.data.sources import read_source
from contrastile.data.text_files import open_questions
from contrastile.train.recipe import RecipeError, load_any_recipe

# bytes with a meaning to one reader or another
WORDS = (
    b"\0", b"\xff", b"\n", b"\t", b'"', b"[", b"{", b"}", b"]", b",", b"\xff\xda", b"\xff" * 4, b"\x7f" + b"\xff" * 3,
    b"null", b"-1", b"1e999", b"NaN",
)  # fmt: skip

# an error in the house's form
SENTENCE = re.compile(r"`[\w. ]+` must .+; got .*\. .+|must .+; got .+", re.DOTALL)


class Reader(NamedTuple):
    """The files that a reader is given before they are spoilt, and what reads the spoilt file in a folder."""

    seeds: dict[str, Callable[[], bytes]]
    read: Callable[[Path], Any]


def image(path: Path) -> None:
    """Decode a file whole, or a part of it."""
    content = path.read_bytes()
    for crop in (None, partial(crop_box, 0, 1)):
        decode(content, (3, 16, 16), crop)


def shard() -> bytes:
    """A tar shard of two pairs, one of them with a long name."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for key in ("a", "ü" * 120):
            for suffix, content in ((".jpg", b"picture"), (".txt", b"a title")):
                entry = tarfile.TarInfo(key + suffix)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def written(write: Callable[[Path], Any], suffix: str) -> Callable[[], bytes]:
    """The bytes of a file that `write` makes."""

    def content() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / f"a{suffix}")
            return (Path(folder) / f"a{suffix}").read_bytes()

    return content


def constant(content: str | bytes) -> Callable[[], bytes]:
    """Bytes as a seed."""
    return lambda: content.encode() if isinstance(content, str) else content


def questions(path: Path) -> None:
    """Read a file of questions, of which all may be unusable."""
    options: dict[str, Any] = {"corpus": None, "bad_rows": 1.0, "allowed_by": "--bad-rows", "progress": silent}
    open_questions(path, **options)


def beir(path: Path) -> None:
    """Read a BEIR folder of which one file is the spoilt one, in turn."""
    folder = path.parent / "beir"
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    passages = '{"_id": "p", "text": "a"}\n{"_id": "r", "text": "b"}\n'
    files = {
        "corpus.jsonl": passages,
        "queries.jsonl": '{"_id": "q", "text": "c"}\n',
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\tp\t1\n",
    }
    for name in files:
        for other, text in files.items():
            (folder / other).write_text(text)
        (folder / name).write_bytes(path.read_bytes())
        open_texts(str(folder), cache=path.parent, bad_rows=1.0)


def beside_shard(name: str, path: Path) -> None:
    """Read a shard with the spoilt file beside it."""
    (path.parent / name).write_bytes(path.read_bytes())
    (path.parent / "b.tar").write_bytes(shard())
    list(find_in_tar(path.parent / "b.tar"))


KEYS = (
    "query", "question", "pos", "neg", "positive_ctxs", "negative_ctxs", "positive_passages", "positive_document_ids",
)  # fmt: skip
KEYS += (
    "negative_document_ids",
    "answers",
    "label",
    "anchor",
    "positive",
    "negative",
    "query_id",
    "hard_negative_ctxs",
)
KEYS += ("_id", "id", "text", "title", "images", "split", "filename", "sentences", "raw")


def value(random: np.random.Generator, depth: int = 0) -> Any:
    """A JSON value of any kind, with the keys of the usual formats."""
    kind = int(random.integers(0, 9 if depth < 4 else 6))
    if kind < 6:
        return ("a text", "", None, 10**400 if random.random() < 0.5 else -1.5, True, float("nan"))[kind]
    items = [value(random, depth + 1) for _ in range(int(random.integers(0, 4)))]
    return items if kind == 6 else {str(random.choice(KEYS)): item for item in items}


def values() -> bytes:
    """Lines of such values, of which damage makes others."""
    random = np.random.default_rng(7)
    rows = ({str(key): value(random) for key in random.choice(KEYS, 3)} for _ in range(40))
    return "\n".join(json.dumps(row) for row in rows).encode()


def any_json(read: Callable[[Path], Any], path: Path) -> None:
    """Read a JSON value that the spoilt bytes decide."""
    seed = int.from_bytes(path.read_bytes()[-8:], "big")
    random = np.random.default_rng(seed)
    rows = [{str(key): value(random) for key in random.choice(KEYS, 4)} for _ in range(5)]
    content = {"images": rows} if seed % 2 else rows
    path.with_suffix(".json").write_text(json.dumps(content))
    read(path.with_suffix(".json"))


IMAGES = {
    "png": partial(hostile_images.noise, (20, 30), "PNG"),
    "grey png": partial(hostile_images.png, (20, 30), depth=16, colour=0),
    "palette png": partial(hostile_images.png, (20, 30), colour=3, extra=hostile_images.MARKS),
    "jpeg": partial(hostile_images.noise, (40, 30), "JPEG"),
    "progressive jpeg": partial(hostile_images.noise, (40, 30), "JPEG", progressive=True),
    "turned jpeg": partial(
        hostile_images.noise, (40, 30), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"
    ),
    "webp": partial(hostile_images.noise, (20, 30), "WEBP"),
    "lossless webp": partial(hostile_images.noise, (20, 30), "WEBP", channels=4, lossless=True),
    "gif": partial(hostile_images.gif, b"!\xfe\1c\0"),
    "tiff": partial(hostile_images.noise, (20, 30), "TIFF"),
    "packed tiff": partial(hostile_images.tiff, (20, 30), "F"),
    "bmp": partial(hostile_images.noise, (20, 30), "BMP"),
    "bmp of run lengths": partial(hostile_images.run_length_bmp, 20),
    "ppm": constant(b"P6\n4 4\n255\n" + bytes(48)),
    "ppm in words": constant(b"P2\n4 4\n65535\n" + b"7 " * 16),
}
PAIRS = hostile_texts.parquet(["title", "image"], ["a", "b"] * 9, [b"picture", b"other"] * 9)
TEXTS = {
    "a.jsonl": constant(hostile_texts.ENTRIES * 3),
    "b.jsonl": values,
    "a.json": constant(hostile_texts.TWO),
    "a.csv": constant('query,positive,negative\na,"b ""c""",d\ne,f,"g\nh"\n' * 3),
    "a.tsv": constant("who is it\t['a', \"b\"]\nwho else\t['c']\n"),
    "a.parquet": written(hostile_texts.parquet(["query", "positive"], ["a", "b"], ["c", "d"]), ".parquet"),
    "a.jsonl.gz": lambda: gzip.compress(hostile_texts.ENTRIES.encode(), mtime=0),
}
CAPTIONS = {"images": [{"split": "test", "filename": "a.jpg", "sentences": [{"raw": "a"}, {"raw": "b"}]}] * 2}
RECIPE = Path(__file__).parent.parent / "recipes" / "glyphs.toml"

READERS: dict[str, Reader] = {
    "images": Reader(IMAGES, image),
    "tar shards": Reader({"a.tar": shard}, lambda path: list(find_in_tar(path))),
    "parquet shards": Reader(
        {"a.parquet": written(PAIRS, ".parquet")}, lambda path: list(find_in_tar(path, path.parent / "unpacked"))
    ),
    "manifests": Reader({"sizes.json": constant('{"b.tar": 2}')}, partial(beside_shard, "sizes.json")),
    "sums": Reader({"SHA256SUMS": constant("0" * 64 + "  c.tar\n")}, partial(beside_shard, "SHA256SUMS")),
    "tables of images": Reader(
        {"a.tsv": constant("filepath\ttitle\na.png\tb\n"), "a.csv": constant('title,image\n"a ""b""",c.png\n')},
        lambda path: list(find_in_table(path)),
    ),
    "texts": Reader(TEXTS, questions),
    "texts of any JSON": Reader({"a.txt": constant(bytes(64))}, partial(any_json, questions)),
    "BEIR folders": Reader({"a.jsonl": constant('{"_id": "q", "text": "c"}\n'), "a.tsv": constant("q\tp\t1\n")}, beir),
    "classes": Reader(
        {"a.json": constant('{"n01440764": ["tench", "fish"], "b": "c"}'), "a.txt": constant("a\tb, c\nd\te\n")},
        read_classes,
    ),
    "mappings": Reader({"a.json": constant('{"chair": [423, 559], "b": "c"}')}, read_mapping),
    "prompts": Reader({"a.txt": constant("a photo of {}\na {c}\n")}, read_prompts),
    "captions": Reader(
        {"a.json": constant(json.dumps(CAPTIONS)), "a.csv": constant("image,caption\na,b\nc,d\n")}, open_captions
    ),
    "captions of any JSON": Reader({"a.txt": constant(bytes(64))}, partial(any_json, open_captions)),
    "sources": Reader(
        {"a.txt": constant("a/{000..099}.tar::b/{x,y}.parquet::c")},
        lambda path: read_source(path.read_bytes().decode("utf-8", "replace")),
    ),
    "recipes": Reader({"a.toml": RECIPE.read_bytes}, lambda path: load_any_recipe(path, ())),
}


@cache
def model_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder with a small BERT and a tokenizer."""
    from transformers import AutoConfig, AutoModel

    from contrastile.models.text import train_tokenizer

    folder = tempfile.TemporaryDirectory()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    AutoModel.from_config(AutoConfig.for_model("bert", vocab_size=20, **sizes)).save_pretrained(folder.name)
    train_tokenizer(["a red fox", "a blue owl"], length=8).save(Path(folder.name))
    return folder


def of_model(name: str) -> bytes:
    """A file of that folder."""
    return (Path(model_folder().name) / name).read_bytes()


def model(path: Path) -> None:
    """Load the model and the tokenizer of a folder of which one file is the spoilt one."""
    from contrastile.models.pretrained import Library
    from contrastile.models.text import load_tokenizer

    folder = path.parent / "model"
    shutil.copytree(model_folder().name, folder)
    (folder / path.name).write_bytes(path.read_bytes())
    load_tokenizer(folder) if path.name.startswith("token") else Library(folder=str(folder)).build()


READERS["model folders"] = Reader(
    {name: partial(of_model, name) for name in ("config.json", "model.safetensors")}, model
)
READERS["tokenizer folders"] = Reader({"tokenizer.json": partial(of_model, "tokenizer.json")}, model)


def spoilt(content: bytes, random: np.random.Generator) -> bytes:
    """The content with one to five changes: other bytes, parts lost, repeated, moved, or cut off."""
    for _ in range(int(random.integers(1, 6))):
        start, end = sorted(int(place) for place in random.integers(0, len(content) + 1, 2))
        short = min(end, start + int(random.integers(1, 17)))
        kind = int(random.integers(0, 8))
        if kind == 0:
            content = content[:start] + random.bytes(short - start) + content[short:]
        elif kind == 1 and start < len(content):
            content = content[:start] + bytes([content[start] ^ (1 << int(random.integers(8)))]) + content[start + 1 :]
        elif kind == 2:
            content = content[:start] + content[short:]
        elif kind == 3:
            content = content[:short] + content[start:short] * int(random.integers(1, 9)) + content[short:]
        elif kind == 4:
            content = content[:start] + WORDS[int(random.integers(len(WORDS)))] + content[start:]
        elif kind == 5:
            word = WORDS[int(random.integers(len(WORDS)))]
            content = content[:start] + word + content[start + len(word) :]
        elif kind == 6:
            content = content[:end] + content[start:]
        elif start > len(content) // 2:
            content = content[:start]
    return content


def tried(name: str, first: int, count: int) -> dict[str, int]:
    """Spoil the seeds of a reader `count` times and read them; how often they were read, skipped and refused."""
    logging.disable(logging.CRITICAL)
    reader, outcomes = READERS[name], {"read": 0, "skipped": 0, "refused": 0}
    seeds = {file: make() for file, make in reader.seeds.items()}
    for number in range(first, first + count):
        file = list(seeds)[number % len(seeds)]
        content = spoilt(seeds[file], np.random.default_rng((number, len(file))))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / (file if "." in file else "a")
            path.write_bytes(content)
            try:
                reader.read(path)
                outcomes["read"] += 1
            except Skipped:
                outcomes["skipped"] += 1
            except RecipeError:
                outcomes["refused"] += 1
            except ValueError as error:
                if not SENTENCE.fullmatch(str(error)):
                    raise AssertionError(f"try {number} of {file}: {type(error).__name__}: {error}") from error
                outcomes["refused"] += 1
            except BaseException as error:
                # a configuration may ask for more memory than there is, which the command says in one line
                if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                    outcomes["refused"] += 1
                    continue
                raise AssertionError(f"try {number} of {file}: {type(error).__name__}: {error}") from error
    return outcomes
