"""Passages as features on the disk, and the best of them for a question: what `encode` writes and `search` reads.

After a retriever's training. An index is a folder of shards, each whole or not at all: `00000.npy` the features in
float16, to be memory-mapped, `00000.ids` one id a line, `00000.jsonl` the passages, `00000.offsets.npy` where their
lines begin. `index.json` lists the shards that are done, with checksums; who begins again goes on behind the last one,
after seeing that features and passages are still those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastile._check import whole_number, wrong
from contrastile.data.texts import Passage
from contrastile.evaluate.top import top
from contrastile.train.folder import INDEX, RECIPE, WEIGHTS, RunFolder
from contrastile.train.retriever.feed import passage_tokens
from contrastile.train.retriever.run import RetrieverRun

FORMAT = 2


def maker(run_folder: RunFolder) -> dict[str, str]:
    """What decides a run's features: its weights, and the recipe that says how a passage is read."""
    return {name: run_folder.checksum(name) for name in (WEIGHTS, RECIPE)}


def encode_corpus(
    run: RetrieverRun,
    passages: Iterable[Passage],
    folder: Path,
    *,
    corpus: str,
    made_by: dict[str, str],
    shard: int = 65_536,
    dimensions: int | None = None,
) -> Index:
    """Write the features of `passages`, `shard` of them a file, into `folder`, going on where an earlier call stopped.

    `corpus` and `made_by` say what the folder holds; a folder that holds something else is refused, and so is a corpus
    whose passages have changed. Passages behind those that it had are added.
    """
    shard = whole_number("shard", shard, 1, "65536 is usual.", rule="be at least 1 passage")
    folder.mkdir(parents=True, exist_ok=True)
    place = RunFolder(folder)
    told: dict[str, Any] = {
        "format": FORMAT,
        "corpus": corpus,
        "made_by": made_by,
        "shard": shard,
        "dimensions": dimensions,
    }
    state = place.read_json(INDEX) if (folder / INDEX).is_file() else {**told, "complete": False, "shards": []}
    differs = [name for name, value in told.items() if state.get(name) != value]
    if differs:
        remedy = "Choose another folder with --out, or remove this one."
        raise wrong("out", "be empty, or hold the same corpus by the same run", f"another {differs[0]}", remedy)
    waiting = iter(passages)
    for done in state["shards"]:
        _read_over(done, list(islice(waiting, done["passages"])), place)
    while some := list(islice(waiting, shard)):
        state["shards"].append(_write_shard(run, some, place, len(state["shards"]), dimensions))
        state["complete"] = False
        place.write_json(INDEX, state)
    if not state["shards"]:
        raise wrong("corpus", "hold passages", "none", "Name one that has some.")
    if not state["complete"]:
        state["complete"] = True
        place.write_json(INDEX, state)
    return Index(folder)


def _read_over(done: dict[str, Any], passages: Sequence[Passage], place: RunFolder) -> None:
    """A shard that is done is not encoded again, if it holds these passages and is what was written."""
    name = done["name"]
    if hashlib.sha256(b"".join(_lines(passages))).hexdigest() != done["passages_sha256"]:
        got = "fewer passages" if len(passages) < done["passages"] else f"another passage in shard {name}"
        remedy = "Choose another folder with --out, or remove this one."
        raise wrong("corpus", "be the one that was begun with", got, remedy)
    if not (place / f"{name}.npy").is_file() or place.checksum(f"{name}.npy") != done["sha256"]:
        remedy = "Remove the folder, and encode again."
        raise wrong("out", "hold what was written there", f"other bytes in {name}.npy", remedy)


def _write_shard(
    run: RetrieverRun, passages: Sequence[Passage], place: RunFolder, number: int, dimensions: int | None
) -> dict[str, Any]:
    name = f"{number:05}"
    tokens = passage_tokens(passages, run.tokenizer, run.recipe)
    encoded = run.encode_tokens("passage", tokens, dimensions=dimensions, what=f"encoding shard {number + 1}")
    features = encoded.half().cpu()
    if not features.isfinite().all():
        got = f"{encoded.abs().max().item():.3g} in shard {name}"
        remedy = "Train with model.normalise = true, or look at the weights."
        raise wrong("features", "be numbers that float16 has, up to 65504", got, remedy)
    lines = _lines(passages)
    with place.written_whole(f"{name}.jsonl") as path:
        path.write_bytes(b"".join(lines))
    place.write_text(f"{name}.ids", "".join(json.dumps(passage.id)[1:-1] + "\n" for passage in passages))
    offsets = np.cumsum([0, *map(len, lines[:-1])], dtype=np.int64)
    for called, array in ((f"{name}.offsets.npy", offsets), (f"{name}.npy", features.numpy())):
        with place.written_whole(called) as path, path.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    return {
        "name": name,
        "passages": len(passages),
        "passages_sha256": place.checksum(f"{name}.jsonl"),
        "sha256": place.checksum(f"{name}.npy"),
    }


def _lines(passages: Sequence[Passage]) -> list[bytes]:
    return [json.dumps(asdict(passage), ensure_ascii=False).encode() + b"\n" for passage in passages]


class Index:
    """A finished index, its features mapped into memory.

    `engine`: "torch" multiplies tile by tile, on the queries' device; "faiss" keeps all features in a flat faiss index,
    which is as exact and, on a CPU, several times as fast once it is filled.
    """

    def __init__(self, folder: str | Path, *, engine: str = "torch") -> None:
        self.folder = Path(folder)
        if not (self.folder / INDEX).is_file():
            raise wrong("index", f"hold an {INDEX}", f'"{folder}"', "Make it first: contrastile encode RUN")
        if engine not in ENGINES:
            raise wrong("engine", f"be one of {', '.join(ENGINES)}", f'"{engine}"', "torch needs nothing else.")
        self.told = RunFolder(self.folder).read_json(INDEX)
        if not self.told["complete"]:
            remedy = "Go on with the command that began it: contrastile encode RUN"
            raise wrong("index", "be complete", f"{len(self.told['shards'])} shards of more", remedy)
        self._names = [shard["name"] for shard in self.told["shards"]]
        self._features = [
            np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in self._names
        ]
        self._offsets = [np.load(self.folder / f"{name}.offsets.npy", allow_pickle=False) for name in self._names]
        self._starts = np.cumsum([0, *map(len, self._features)])
        for shard, features in zip(self.told["shards"], self._features, strict=True):
            if len(features) != shard["passages"]:
                raise wrong("index", "hold what it says", f"another shard {shard['name']}", "Encode the corpus again.")
        self._search = ENGINES[engine](self._features)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def dimensions(self) -> int:
        """How many features a passage has."""
        return int(self._features[0].shape[1])

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The `k` best passages of each query, float `[n, D]`: scores float32 and rows int64, both `[n, k]`."""
        return self._search(queries, min(k, len(self)))

    def __getitem__(self, row: int) -> Passage:
        """The passage at a row."""
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        with (self.folder / f"{self._names[shard]}.jsonl").open("rb") as file:
            file.seek(int(self._offsets[shard][row - self._starts[shard]]))
            return Passage(**json.loads(file.readline()))


class _Tiles:
    """Shard by shard, tile by tile; among equal scores the passage that comes first."""

    def __init__(self, shards: Sequence[Any]) -> None:
        self._shards = shards

    def __call__(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores = queries.new_empty((len(queries), 0), dtype=torch.float32)
        rows = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
        for start, features in self._on(queries.device):
            found, places = top(queries, features, min(k, len(features)))
            scores, rows = torch.cat([scores, found], dim=1), torch.cat([rows, places + start], dim=1)
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
            scores, rows = scores.gather(1, best), rows.gather(1, best)
        return scores, rows

    def _on(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        start = 0
        for shard in self._shards:
            # a copy: the map is read-only, and one shard is never much
            yield start, torch.from_numpy(np.array(shard)).to(device)
            start += len(shard)


class _Faiss:
    """All shards in one flat index of float16, on the CPU."""

    def __init__(self, shards: Sequence[Any]) -> None:
        import faiss

        width = int(shards[0].shape[1])
        self._index = faiss.IndexScalarQuantizer(width, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
        for shard in shards:
            self._index.add(np.asarray(shard, dtype=np.float32))

    def __call__(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores, rows = self._index.search(queries.float().cpu().numpy(), k)
        return torch.from_numpy(scores).to(queries.device), torch.from_numpy(rows).to(queries.device)


ENGINES: dict[str, Any] = {"torch": _Tiles, "faiss": _Faiss}
