"""Everything that a step changes, on disk: what a run that was killed goes on from.

Beside `loop.py`, which names the parts, restores them before its first step and saves them between two. A checkpoint is
a folder `step-<number>` that is there whole or not at all: written beside its place, every file synced, a manifest of
sizes and SHA-256 last, then renamed. Tensors are safetensors, everything else is JSON; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from contrastile._check import wrong
from contrastile.data.cache import sync, write_text
from contrastile.train.config import SaveSettings
from contrastile.train.folder import free_name

logger = logging.getLogger("contrastile")

FORMAT = 1
MANIFEST, PLAIN = "manifest.json", "state.json"
STEP, PART, SPENT, DAMAGED = "step-", ".part-", ".spent-", "damaged-"


class Stateful(Protocol):
    """What can be kept: a module, an optimizer, anything that follows their convention."""

    def state_dict(self) -> Any:
        """Mappings and lists of tensors, numbers, texts and None."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Be as you were."""


Parts = Mapping[str, Stateful]


class Damage(Exception):  # noqa: N818 - found and told, not failed
    """What is wrong with a checkpoint."""


class Course:
    """How far a run has come, in plain numbers: the batch of every step, when it probes next, the seconds it took."""

    def __init__(self, next_probe: float) -> None:
        self.sizes: list[int] = []
        self.next_probe = next_probe
        self.seconds = 0.0
        self.peak_bytes = 0

    def state_dict(self) -> dict[str, Any]:
        """The sizes as runs of equal ones, of which there are few."""
        return {**vars(self), "sizes": [[size, len(list(same))] for size, same in groupby(self.sizes)]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The list of sizes stays the same object: others read it as it grows."""
        for name, value in state_dict.items():
            if name != "sizes":
                setattr(self, name, value)
        self.sizes[:] = [size for size, count in state_dict["sizes"] for _ in range(count)]


class Checkpoints:
    """The checkpoints of one run in `folder`; `data` is the fingerprint of what it learns from.

    Without a folder nothing is kept and nothing is found. Of several ranks one alone `writes`; the others know when.
    """

    def __init__(self, folder: Path | None, settings: SaveSettings, data: str = "", *, writes: bool = True) -> None:
        self._folder, self._settings, self._data, self._writes = folder, settings, data, writes
        self._saved = 0.0

    def due(self, step: int, seconds: float) -> bool:
        """Whether to save behind step number `step`, `seconds` after the run began."""
        by_steps = self._settings.steps is not None and step % self._settings.steps == 0
        return self._folder is not None and (by_steps or seconds - self._saved >= 60 * self._settings.minutes)

    def save(self, step: int, seconds: float, parts: Parts, *, must: bool = False) -> bool:
        """Keep `parts` as they are behind step number `step`; whether that went well.

        A disk that is full or broken is said aloud and does not end the run, unless this `must` be kept: then OSError.
        """
        # it has an error of its own for a full disk
        from safetensors import SafetensorError

        if self._folder is None:
            return False
        self._saved = seconds
        if not self._writes:
            return False
        if (self._folder / f"{STEP}{step:09}").exists():
            return True
        try:
            self._write(step, parts)
        except (OSError, SafetensorError) as failure:
            said = f"the state behind step {step} could not be saved into {self._folder} ({failure})"
            if must:
                raise OSError(f"{said}; what was saved before is there, free the disk and resume") from failure
            logger.warning("%s; the run goes on, and tries again when the next one is due", said)
            return False
        return True

    def _write(self, step: int, parts: Parts) -> None:
        assert self._folder is not None
        self._folder.mkdir(exist_ok=True)
        self._sweep()
        beside = self._folder / f"{PART}{step}"
        beside.mkdir()
        try:
            plain: dict[str, Any] = {"data": self._data, "parts": {}}
            for name, part in parts.items():
                tensors: dict[str, Tensor] = {}
                plain["parts"][name] = taken_apart(part.state_dict(), name, tensors)
                if tensors:
                    _save_tensors(tensors, beside / f"{name}.safetensors")
            write_text(beside / PLAIN, json.dumps(plain))
            files = {path.name: _facts(path) for path in sorted(beside.iterdir())}
            write_text(beside / MANIFEST, _manifest(files))
            sync(beside)
            beside.rename(self._folder / f"{STEP}{step:09}")
            sync(self._folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        for old in self._found()[: -self._settings.keep]:
            _remove(old)

    def restore(self, parts: Parts) -> int:
        """Make `parts` what they were in the newest checkpoint that is whole; its step, 0 where there is none.

        A damaged one is said aloud and put aside, and the one before is taken.

        Raises ValueError where all are damaged, or the run learned from other data.
        """
        if self._folder is None or not self._folder.exists():
            return 0
        self._sweep()
        found = self._found()
        for checkpoint in reversed(found):
            try:
                plain, tensors = _read(checkpoint, parts)
            except Damage as damage:
                logger.warning("the checkpoint %s is damaged (%s); the one before is used", checkpoint, damage)
                checkpoint.rename(free_name(checkpoint.with_name(f"{DAMAGED}{checkpoint.name}")))
                continue
            self._become(parts, plain, tensors)
            return int(checkpoint.name.removeprefix(STEP))
        if found:
            remedy = "Restore one of them, or train anew, without --resume."
            raise wrong("checkpoints", "hold one that is whole", f"{len(found)} damaged ones in {self._folder}", remedy)
        return 0

    def restore_as(self, step: int, parts: Parts) -> None:
        """Make `parts` what they were behind step number `step`, because another rank has found its checkpoint whole.

        Raises ValueError where this rank does not see the same files, or the run learned from other data.
        """
        assert self._folder is not None
        try:
            self._become(parts, *_read(self._folder / f"{STEP}{step:09}", parts))
        except Damage as damage:
            remedy = "Put the folder of runs on a file system that all ranks share."
            raise wrong("checkpoints", "be the same files on all ranks", f"{damage}", remedy) from damage

    def _become(self, parts: Parts, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if plain["data"] != self._data:
            remedy = "Put them back as they were, or train anew, without --resume."
            raise wrong("data", "be the pairs and the tokens that the run began with", "others", remedy)
        for name, part in parts.items():
            part.load_state_dict(put_together(plain["parts"][name], tensors))

    def drop(self) -> None:
        """Remove them all: the run is over, its weights and results are elsewhere."""
        if self._folder is not None:
            _remove(self._folder)

    def _found(self) -> list[Path]:
        assert self._folder is not None
        return sorted(self._folder.glob(f"{STEP}*"))

    def _sweep(self) -> None:
        """What a killed process left behind. It is ours: the run's folder is held by this process alone."""
        assert self._folder is not None
        for left in [*self._folder.glob(f"{PART}*"), *self._folder.glob(f"{SPENT}*")]:
            shutil.rmtree(left)


def taken_apart(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as plain JSON, its tensors put into `tensors` under their paths.

    >>> import torch
    >>> found = {}
    >>> plain = taken_apart({"state": {0: {"average": torch.ones(2)}}, "rates": (0.1, None)}, "adam", found)
    >>> list(found), put_together(plain, found)["rates"]
    (['adam.state.0.average'], (0.1, None))
    """
    if isinstance(value, Tensor):
        # a copy of its own: the format knows no tensors that share their memory
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"tensor": path}
    if isinstance(value, Mapping):
        # pairs, because the keys of JSON's objects are texts
        return {"pairs": [[key, taken_apart(inner, f"{path}.{key}", tensors)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        inner = [taken_apart(one, f"{path}.{place}", tensors) for place, one in enumerate(value)]
        return inner if isinstance(value, list) else {"tuple": inner}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{path} is {type(value).__name__}, which has no place in a checkpoint")


def put_together(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `taken_apart` took apart."""
    if isinstance(plain, list):
        return [put_together(inner, tensors) for inner in plain]
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        return tensors[plain["tensor"]]
    if "tuple" in plain:
        return tuple(put_together(plain["tuple"], tensors))
    return {key: put_together(inner, tensors) for key, inner in plain["pairs"]}


def _read(checkpoint: Path, parts: Parts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain values and tensors, every byte compared with the manifest; raises `Damage`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        text = (checkpoint / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        if text != _manifest(manifest["files"]):
            raise Damage(f"{MANIFEST} is not what was written")
        for name, facts in manifest["files"].items():
            if _facts(checkpoint / name) != facts:
                raise Damage(f"the checksum of {name} does not agree")
        plain = json.loads((checkpoint / PLAIN).read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = {}
        for name in sorted(manifest["files"].keys() - {PLAIN}):
            tensors |= load_file(checkpoint / name)
    except OSError as failure:
        raise Damage(f"{Path(failure.filename or checkpoint).name}: {failure.strerror}") from failure
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as failure:
        raise Damage(f"its files cannot be read: {failure}") from failure
    if plain["parts"].keys() != parts.keys():
        remedy = "Another version of contrastile wrote it; resume with that one."
        raise wrong("checkpoint", f"hold {', '.join(parts)}", ", ".join(plain["parts"]), remedy)
    return plain, tensors


def _manifest(files: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True) + "\n"


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
    # the library makes a file that nobody else may read
    path.chmod(0o644)
    sync(path)


def _remove(path: Path) -> None:
    """Gone in one step, so that no half of it is ever found."""
    spent = path.with_name(f"{SPENT}{path.name}")
    shutil.rmtree(spent, ignore_errors=True)
    if path.exists():
        path.rename(spent)
        shutil.rmtree(spent, ignore_errors=True)


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """What dropout draws from in a step: a lot of seed, step and rank alone, so that nothing of it has to be kept."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8], "big") >> 1
