"""An index: the features of all passages of a corpus on disk, and exact search over them.

Stands after a retriever's training: the bodies of `contrastile encode` and `contrastile search`. An index is a folder
of shards, each written completely or not at all: `00000.npy` holds the features in float16 and is memory-mapped,
`00000.ids` one id per line, `00000.jsonl` the passages, `00000.offsets.npy` the byte at which each of their lines
begins. A late retriever's features are the vectors of all tokens, packed; `00000.lengths.npy` has their number in each
passage. An image of a folder is a passage without words, whose id is its path in the folder. `index.json` lists the
finished shards, so that an interrupted call is continued after the last of them, once features and passages are
verified to be the same. Its checksums protect against damage, not against somebody who writes a whole index.
"""

import hashlib
import json
import operator
import os
import random
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid, whole_number
from contrastile.data.base import Indices, SkipCounter
from contrastile.data.entries import BEIR_CORPUS, read_passages
from contrastile.data.files import checksum, file_state, files_below
from contrastile.data.loader import read_chunks
from contrastile.data.sources import PICTURES
from contrastile.data.texts import Passage
from contrastile.evaluate import late
from contrastile.evaluate.retrieval import best_of, check_features, no_matches, topk
from contrastile.train.folder import INDEX, RECIPE, WEIGHTS, RunFolder, one_writer
from contrastile.train.load import load
from contrastile.train.log import progress
from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.run import RetrieverRun, open_run_texts, passage_tokens
from contrastile.train.run import Run

FORMAT = 2
# images that are read and encoded at once
CHUNK = 256
# the kind of runs and indices with one vector for each text or image
SINGLE = "single"
# bytes of a block, hexadecimal digits of its checksum, blocks compared when an index is opened
BLOCK, DIGITS, SAMPLED = 2**20, 16, 64
OFFSETS, LENGTHS = ".offsets.npy", ".lengths.npy"
# endings of the files of a shard; the last one of token vectors only
ENDINGS = (".npy", ".ids", ".jsonl", OFFSETS, LENGTHS)
NAME = re.compile(r"\d{5,}")
REMEDY = "Restore it, or remove the folder and encode again."

# scores float32 and rows int64 of the k best passages of each query, both [n, k]
SearchEngine = Callable[..., tuple[Tensor, Tensor]]


def run_checksums(run_folder: RunFolder) -> dict[str, str]:
    return {name: run_folder.checksum(name) for name in (WEIGHTS, RECIPE)}


def encode_source(
    folder: RunFolder, corpus: str | None, out: Path, *, shard: int, dimensions: int | None, device: str,
    bad_rows: float | None = None,
) -> "Index":  # fmt: skip
    """The index of `corpus`, by default the run's own passages; for a run of images `corpus` is a folder of images."""
    made_by = run_checksums(folder)
    run: Any = load(folder.path, device=device)
    passages: Iterable[Passage]
    if isinstance(run, Run):
        if dimensions is not None:
            remedy = "Prefixes of features were not trained."
            raise invalid("dimensions", "be left out for a run of images and texts", dimensions, remedy)
        passages, name = picture_passages(corpus)
    elif corpus is None:
        passages, name = open_run_texts(run.recipe).passages, run.recipe.data.source
    else:
        passages = _read_passages(Path(corpus), run.recipe.data.bad_rows if bad_rows is None else bad_rows)
        name = str(Path(corpus).resolve())
    return encode_corpus(run, passages, out, corpus=name, made_by=made_by, shard=shard, dimensions=dimensions)


def _read_passages(source: Path, bad_rows: float) -> Iterator[Passage]:
    tally, seen = SkipCounter(), set[str]()
    # functions of one name are different passages
    by_id = (source / BEIR_CORPUS).is_file() or (source.is_file() and source.suffix != ".py")
    for passage in read_passages(source, tally):
        if by_id and passage.id in seen:
            tally.skip("id seen before", passage.source)
        else:
            yield passage
        if by_id:
            seen.add(passage.id)
    tally.close(source, bad_rows, allowed_by="--bad-rows")


def encode_corpus(
    run: Run | RetrieverRun, passages: Iterable[Passage], folder: Path, *, corpus: str, made_by: dict[str, str],
    shard: int = 65_536, dimensions: int | None = None,
) -> "Index":  # fmt: skip
    """Write the features of `passages` into `folder`, `shard` of them per file; continue an earlier call.

    `corpus` and `made_by` identify the contents. Passages appended to the corpus are added; other changes are refused.
    """
    shard = whole_number("shard", shard, 1, "65536 is usual.", rule="be at least 1 passage")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"format": FORMAT, "corpus": corpus, "made_by": made_by, "shard": shard, "dimensions": dimensions}
    if (kind := kind_of(run.recipe)) != SINGLE:
        settings["kind"] = kind
    remedy = "Wait for the other one to end, or choose another folder with --out."
    with one_writer(folder, invalid("out", "be written by one command at a time", f'"{folder}"', remedy)):
        _write_shards(run, passages, RunFolder(folder), settings)
    return Index(folder)


def _write_shards(
    run: Run | RetrieverRun, passages: Iterable[Passage], folder: RunFolder, settings: dict[str, Any]
) -> None:
    """Write the shards that are missing, and index.json after each of them."""
    shard, dimensions = settings["shard"], settings["dimensions"]
    exists = (folder / INDEX).is_file()
    metadata: dict[str, Any] = folder.read_json(INDEX) if exists else {**settings, "complete": False, "shards": []}
    remedy = "Choose another folder with --out, or remove this one."
    if differs := [name for name, value in settings.items() if metadata.get(name) != value]:
        raise invalid("out", "be empty, or hold the same corpus by the same run", f"another {differs[0]}", remedy)
    check_index(folder.path, metadata, whole=True)
    stream = iter(passages)
    for finished in metadata["shards"]:
        begun = list(islice(stream, finished["passages"]))
        if hashlib.sha256(b"".join(_lines(begun))).hexdigest() != finished["passages_sha256"]:
            fewer = len(begun) < finished["passages"]
            got = "fewer passages" if fewer else f"another passage in shard {finished['name']}"
            raise invalid("corpus", "be the one that was begun with", got, remedy)
    while chunk := list(islice(stream, shard)):
        metadata["shards"].append(_write_shard(run, chunk, folder, len(metadata["shards"]), dimensions))
        metadata["complete"] = False
        folder.write_json(INDEX, sealed(metadata))
    if not metadata["shards"]:
        raise invalid("corpus", "hold passages", "none", "Name a corpus that has some.")
    if not metadata["complete"]:
        folder.write_json(INDEX, sealed({**metadata, "complete": True}))


def _write_shard(
    run: Run | RetrieverRun, passages: Sequence[Passage], folder: RunFolder, number: int, dimensions: int | None
) -> dict[str, Any]:
    """Encode and write one shard; return its entry in index.json."""
    name, lengths, title = f"{number:05}", None, f"encoding shard {number + 1}"
    if isinstance(run, Run):
        encoded = picture_features(run, passages, title)
    else:
        tokens = passage_tokens(passages, run.tokenizer, run.recipe)
        by_token = kind_of(run.recipe) != SINGLE
        # the vectors of a shard's tokens may be too many for float32
        dtype = torch.float16 if by_token else torch.float32
        encoded = run.encode_tokens("passage", tokens, dimensions=dimensions, title=title, dtype=dtype)
        if by_token:
            lengths, encoded = np.array(encoded.lengths, dtype=np.int32), encoded.values
    features = encoded.half().cpu()
    if not features.isfinite().all():
        got = f"{encoded.abs().max().item():.3g} in shard {name}"
        remedy = "Train with model.normalise = true, or look at the weights."
        raise invalid("features", "be numbers that float16 has, up to 65504", got, remedy)
    lines = _lines(passages)
    with folder.written_whole(f"{name}.jsonl") as path:
        path.write_bytes(b"".join(lines))
    folder.write_text(f"{name}.ids", "".join(json.dumps(passage.id)[1:-1] + "\n" for passage in passages))
    offsets = np.cumsum([0, *map(len, lines[:-1])], dtype=np.int64)
    arrays = {OFFSETS: offsets, ".npy": features.numpy()} | ({} if lengths is None else {LENGTHS: lengths})
    for ending, array in arrays.items():
        with folder.written_whole(f"{name}{ending}") as path, path.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    return {
        "name": name, "passages": len(passages), "passages_sha256": folder.checksum(f"{name}.jsonl"),
        "sha256": folder.checksum(f"{name}.npy"), "files": file_entries(folder.path, name),
    }  # fmt: skip


def _lines(passages: Sequence[Passage]) -> list[bytes]:
    return [json.dumps(asdict(passage), ensure_ascii=False).encode() + b"\n" for passage in passages]


def kind_of(recipe: Any) -> str:
    """The kind of a recipe's features: "single", a row for each text or image, or "late", one for each token."""
    return str(getattr(recipe.model, "kind", SINGLE))


class Index:
    """A finished index with memory-mapped features, of one vector a passage or of one for each of its tokens.

    `engine`: "torch" multiplies tile by tile on the queries' device; "faiss" holds all features in a flat faiss index,
    equally exact, on a CPU several times as fast. verify: compare every byte with its checksum, not only a sample.
    """

    def __init__(self, folder: str | Path, *, engine: str = "torch", verify: bool = False) -> None:
        self.folder = Path(folder)
        if not (self.folder / INDEX).is_file():
            raise invalid("index", f"hold an {INDEX}", f'"{folder}"', "Make it first: contrastile encode RUN")
        if engine not in ENGINES:
            raise invalid("engine", f"be one of {', '.join(ENGINES)}", f'"{engine}"', "torch needs no package.")
        self.metadata = RunFolder(self.folder).read_json(INDEX)
        check_index(self.folder, self.metadata, whole=verify)
        shards = self.metadata["shards"]
        if not self.metadata["complete"]:
            remedy = "Go on with the command that began it: contrastile encode RUN"
            raise invalid("index", "be complete", f"{len(shards)} shards of more", remedy)
        paths = [self.folder / shard["name"] for shard in shards]
        self._features = [np.load(f"{path}.npy", mmap_mode="r", allow_pickle=False) for path in paths]
        self._offsets = [np.load(f"{path}{OFFSETS}", allow_pickle=False) for path in paths]
        self._passages = [Path(f"{path}.jsonl") for path in paths]
        parts: Sequence[Any] = self._features
        if self.kind != SINGLE:
            if engine != "torch":
                remedy = "Leave it out: token vectors are searched exactly, or among candidates."
                raise invalid("engine", f'be torch for an index of kind "{self.kind}"', f'"{engine}"', remedy)
            lengths = [np.load(f"{path}{LENGTHS}", allow_pickle=False) for path in paths]
            parts = list(map(late.TokenVectors.of, self._features, lengths))
        # the row of each shard's first passage, then the number of passages
        self._starts = np.cumsum([0, *map(len, parts)])
        for shard, part, features in zip(shards, parts, self._features, strict=True):
            tokens_differ = isinstance(part, late.TokenVectors) and part.starts[-1] != len(features)
            if len(part) != shard["passages"] or tokens_differ:
                got = f"another number of passages or vectors in shard {shard['name']}"
                raise invalid("index", f"hold what {INDEX} lists", got, "Encode the corpus again.")
        self._search = ENGINES[engine](parts) if self.kind == SINGLE else partial(late.topk, shards=parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def dimensions(self) -> int:
        return int(self._features[0].shape[1])

    @property
    def kind(self) -> str:
        return str(self.metadata.get("kind", SINGLE))

    def search(self, queries: Any, k: int, candidates: Indices | None = None) -> tuple[Tensor, Tensor]:
        """The `k` best passages of each query: scores float32 and rows int64, both `[n, k]`.

        queries: float `[n, D]`; for an index of kind "late", vectors `[n, L, D]` with their mask. candidates: `[n, C]`,
        the rows that such an index scores, −1 for none.
        """
        k = whole_number("k", k, 1, f"The index has {len(self)} passages.")
        if isinstance(queries, (np.ndarray, list)):
            raise invalid("queries", "be a tensor", type(queries).__name__, "Pass torch.as_tensor(queries).")
        if isinstance(queries, Tensor) != (self.kind == SINGLE):
            rule = f'be encoded by a run of the index\'s kind, "{self.kind}"'
            got = "one vector each" if isinstance(queries, Tensor) else "vectors of tokens"
            raise invalid("queries", rule, got, "Encode the corpus by the same run.")
        if candidates is not None and self.kind == SINGLE:
            remedy = "All of its passages are compared at once anyway."
            raise invalid("candidates", f'be left out for an index of kind "{SINGLE}"', "some", remedy)
        if self.kind == SINGLE:
            check_features(queries, queries.new_empty(0, self.dimensions))
        how = {} if self.kind == SINGLE else {"candidates": candidates}
        return self._search(queries, k=min(k, len(self)), **how)

    def ids(self) -> list[str]:
        files = [path.with_suffix(".ids") for path in self._passages]
        return [json.loads(f'"{line}"') for file in files for line in file.read_text(encoding="utf-8").split("\n")[:-1]]

    def __getitem__(self, row: int) -> Passage:
        """The passage of a row of `search`; negative ones count from the end."""
        try:
            number = operator.index(row)
        except TypeError:
            remedy = "Take several one by one: [index[row] for row in rows]."
            raise invalid("row", "be a whole number", repr(row), remedy) from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of an index of {len(self)} passages")
        row = number % len(self)
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        with self._passages[shard].open("rb") as file:
            file.seek(int(self._offsets[shard][row - self._starts[shard]]))
            return Passage(**json.loads(file.readline()))


def _torch_search(queries: Tensor, k: int, shards: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Search shard by shard in tiles; among equal scores the passage of the lower row comes first."""
    best, start = no_matches(queries), 0
    for shard in shards:
        # a copy, because torch warns about tensors over read-only memory; a shard has 65,536 rows by default
        features = torch.from_numpy(np.array(shard)).to(queries.device)
        scores, rows = topk(queries, features, min(k, len(shard)))
        best, start = best_of(best, (scores, rows + start), k), start + len(shard)
    return best


def _faiss_search(shards: Sequence[Any]) -> SearchEngine:
    import faiss

    width = int(shards[0].shape[1])
    index = faiss.IndexScalarQuantizer(width, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
    for shard in shards:
        index.add(np.asarray(shard, dtype=np.float32))

    def search(queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores, rows = map(torch.from_numpy, index.search(queries.detach().float().cpu().numpy(), k))
        # of a query with NaN, for which faiss has rows of −1, as of the other engine
        unknown = rows < 0
        scores[unknown], rows[unknown] = torch.nan, torch.arange(k).expand_as(rows)[unknown]
        return scores.to(queries.device), rows.to(queries.device)

    return search


ENGINES: dict[str, Callable[[Sequence[Any]], SearchEngine]] = {
    "torch": lambda shards: partial(_torch_search, shards=shards), "faiss": _faiss_search,
}  # fmt: skip


def open_index(folder: RunFolder, index: str | Path, *, engine: str = "torch", verify: bool = False) -> Index:
    """The index of a run; raises ValueError where another run, or other weights, made it."""
    opened = Index(index, engine=engine, verify=verify)
    recipe = load_any_recipe(folder / RECIPE, files=False)
    kind, corpus = kind_of(recipe), ["FOLDER_OF_PICTURES"] if recipe.kind == "image-text" else []
    remedy = f"Encode the corpus again: {shlex.join(['contrastile', 'encode', str(folder.path), *corpus])}"
    if opened.kind != kind:
        raise invalid("index", f'be of the run\'s kind, "{kind}"', f'"{index}", of kind "{opened.kind}"', remedy)
    if opened.metadata["made_by"] != run_checksums(folder):
        raise invalid("index", "be made by this run", f'"{index}", made by another', remedy)
    return opened


def picture_passages(folder: str | None) -> tuple[list[Passage], str]:
    """The images below `folder`, in the order of their paths, and a name that changes with any of the files."""
    if folder is None or not os.path.isdir(folder):
        got = "none" if folder is None else f'"{folder}"'
        remedy = "Name it after the run: contrastile encode RUN FOLDER."
        raise invalid("corpus", "be a folder of images, for this run", got, remedy)
    root = Path(folder).resolve()
    paths = files_below(root, PICTURES)
    if not paths:
        raise invalid("corpus", f"have images ({', '.join(PICTURES)})", f'"{folder}", without any', "Check its path.")
    digest = hashlib.sha256(json.dumps([file_state(str(path)) for path in paths]).encode()).hexdigest()[:16]
    return [Passage(str(path.relative_to(root)), "", "", str(path)) for path in paths], f"{root} {digest}"


def picture_features(run: Run, passages: Sequence[Passage], title: str) -> Tensor:
    """Features `[n, D]` of the images; raises ValueError for one that cannot be read."""
    data, features = run.recipe.data, []
    shape, paths = (data.channels, data.image_size, data.image_size), [passage.source for passage in passages]
    with progress(len(paths), title, "images") as bar:
        for rows, images, reasons in read_chunks(paths, shape, chunk=CHUNK, processes=False):
            for row, reason in zip(rows, reasons, strict=True):
                if reason is not None:
                    raise invalid("corpus", "have images that can be read", f"{reason}: {paths[row]}", "Remove it.")
            # the next images are decoded into the same memory
            features.append(run.encode_image(images.clone()))
            bar.update(len(rows))
    return torch.cat(features)


def file_entries(folder: Path, shard: str) -> dict[str, dict[str, Any]]:
    """The entries of a shard's files: bytes, and the checksums of all blocks, joined to one text."""
    files = {}
    for path in (path for ending in ENDINGS if (path := folder / f"{shard}{ending}").is_file()):
        with path.open("rb") as file:
            blocks = "".join(_digest(block) for block in iter(partial(file.read, BLOCK), b""))
        files[path.name] = {"bytes": path.stat().st_size, "blocks": blocks}
    return files


def sealed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of index.json with its checksum under "sha256"."""
    content = {key: value for key, value in metadata.items() if key != "sha256"}
    return {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def check_index(folder: Path, metadata: Any, *, whole: bool = False) -> None:
    """Raise ValueError where files of an index differ from index.json, `metadata`; `whole`: compare every byte.

    An index of version 0.1.0 has checksums of two of the four files of a shard, which are compared if `whole`.
    """
    if not _well_formed(metadata):
        raise invalid(INDEX, "list the shards that were written", f'others in "{folder}"', REMEDY)
    if metadata.get("format", 1) not in range(1, FORMAT + 1):
        remedy = "Encode the corpus again, or update contrastile."
        raise invalid("index", f"be of a format up to {FORMAT}", metadata["format"], remedy)
    if metadata.get("sha256") not in (None, sealed(metadata)["sha256"]):
        raise _damaged(folder / INDEX, "other bytes")
    sampled: list[tuple[Path, int, str]] = []
    for shard in metadata["shards"]:
        for name, expected in shard.get("files", {}).items():
            path, blocks = folder / name, expected["blocks"]
            if not path.is_file() or path.stat().st_size != expected["bytes"]:
                raise _damaged(path, "another size" if path.is_file() else "none")
            numbered = [(path, at, blocks[at * DIGITS :][:DIGITS]) for at in range(len(blocks) // DIGITS)]
            if whole or name.endswith((OFFSETS, LENGTHS)):
                _compare(numbered)
            else:
                sampled += numbered
        if whole and "files" not in shard:
            for ending, key in ((".npy", "sha256"), (".jsonl", "passages_sha256")):
                path = folder / f"{shard['name']}{ending}"
                if not path.is_file() or checksum(path) != shard[key]:
                    raise _damaged(path, "other bytes")
    # a generator of its own, because a program may have seeded Python's
    _compare(random.Random().sample(sampled, min(SAMPLED, len(sampled))))


def _well_formed(metadata: Any) -> bool:
    """True where index.json has all keys that are read, and no name of a shard leads to another folder."""
    try:
        return {"complete", "made_by"} <= metadata.keys() and all(
            NAME.fullmatch(shard["name"])
            and isinstance(shard["passages"], int)
            and {"sha256", "passages_sha256"} <= shard.keys()
            and shard.get("files", {}).keys() <= {f"{shard['name']}{ending}" for ending in ENDINGS}
            and all(isinstance(file["bytes"], int) and file["blocks"] + "" for file in shard.get("files", {}).values())
            for shard in metadata["shards"]
        )
    except (TypeError, KeyError, AttributeError):
        return False


def _compare(blocks: Sequence[tuple[Path, int, str]]) -> None:
    """Raise ValueError for the first block whose bytes have another checksum."""
    for path, number, expected in blocks:
        with path.open("rb") as file:
            file.seek(number * BLOCK)
            if _digest(file.read(BLOCK)) != expected:
                raise _damaged(path, f"other bytes from {number * BLOCK:,} on")


def _digest(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()[:DIGITS]


def _damaged(path: Path, got: str) -> ValueError:
    return invalid("index", f"hold {path.name} as it was written", f'{got} in "{path.parent}"', REMEDY)
