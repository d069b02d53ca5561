"""Checkpoints: everything that a step changes, on disk, so that a run that was killed resumes bit for bit.

A checkpoint is a folder `step-<number>` that exists whole or not at all: written under another name, every file synced,
a manifest of sizes and SHA-256 last, then renamed. Tensors are safetensors, all else is JSON; nothing is unpickled.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
from torch import Tensor

from contrastile._errors import invalid, logger
from contrastile.data.files import as_open_makes_it, checksum, own_folder, sync, write_text
from contrastile.train.config import SaveSettings
from contrastile.train.folder import RUN_ID, RunFolder, free_name, run_id

FORMAT = 1
MANIFEST, PLAIN = "manifest.json", "state.json"
STEP, PART, SPENT, DAMAGED = "step-", ".part-", ".spent-", "damaged-"
# names that a run gives: of whole and of damaged checkpoints, and of remains of a killed process; all others in the
# folder, such as copies, belong to the user
WHOLE = re.compile(rf"{STEP}(\d{{9,}})")
RENAMED = re.compile(rf"{DAMAGED}{STEP}\d{{9,}}-\d+")
REMAINS = re.compile(rf"{re.escape(PART)}\d+|{re.escape(SPENT)}({WHOLE.pattern}|{RENAMED.pattern})")


class Stateful(Protocol):
    """A module, an optimizer, or anything else with these methods; states are made of tensors and plain values."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


Parts = Mapping[str, Stateful]


class Damage(Exception):  # noqa: N818 - logged, not raised to the user
    """The reason why a checkpoint cannot be read."""


class Checkpoints:
    """The checkpoints of one run in `folder`; without a folder none are saved and none are restored.

    data: the fingerprint of the training data. recipe: the recipe's keys that the training depends on. run: the run's
    folder, which must stay in place, and whose id every checkpoint holds. writes: false on all ranks but the first.
    """

    def __init__(
        self, folder: Path | None, settings: SaveSettings, data: str = "", *, recipe: Mapping[str, Any] | None = None,
        run: RunFolder | None = None, writes: bool = True,
    ) -> None:  # fmt: skip
        self._folder, self._settings, self._data, self._writes, self._run = folder, settings, data, writes, run
        self._origin = {**(recipe or {}), **({} if run is None else {"run": run_id(run)})}
        self._saved = 0.0

    def due(self, step: int, seconds: float) -> bool:
        """True where a checkpoint is due after `step`, `seconds` into the run."""
        by_steps = self._settings.steps is not None and step % self._settings.steps == 0
        return self._folder is not None and (by_steps or seconds - self._saved >= 60 * self._settings.minutes)

    def save(self, step: int, seconds: float, parts: Parts, *, must: bool = False) -> None:
        """Save `parts` as they are after `step`. A full disk is logged; it is an OSError where they `must` be saved."""
        self._saved = seconds
        if self._folder is None:
            return
        try:
            # ranks that do not write call `state_dict` too: all ranks together gather the tensors of sharded parts
            states = {name: part.state_dict() for name, part in parts.items()}
            if self._writes:
                self._write(self._folder, step, states)
        # safetensors raises an error of its own for a full disk
        except (OSError, safetensors.SafetensorError) as failure:
            sentence = f"the state behind step {step} could not be saved into {self._folder} ({failure})"
            if must:
                raise OSError(f"{sentence}; what was saved before is there, free the disk and resume") from failure
            logger.warning("%s; the run goes on, and tries again when the next one is due", sentence)

    def _write(self, folder: Path, step: int, states: Mapping[str, Any]) -> None:
        self._check_run()
        target, temporary = folder / f"{STEP}{step:09}", folder / f"{PART}{step}"
        if target.exists():
            return
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        temporary.mkdir()
        try:
            plain: dict[str, Any] = {"data": self._data, "origin": self._origin, "parts": {}}
            for name, state in states.items():
                tensors: dict[str, Tensor] = {}
                plain["parts"][name] = split_tensors(state, name, tensors)
                if tensors:
                    path = temporary / f"{name}.safetensors"
                    with as_open_makes_it(path):
                        safetensors.torch.save_file(tensors, path)
                    sync(path)
            write_text(temporary / PLAIN, json.dumps(plain))
            files = {path.name: _size_and_checksum(path) for path in sorted(temporary.iterdir())}
            write_text(temporary / MANIFEST, _manifest(files))
            sync(temporary)
            # writing may take minutes, in which the run's folder may be moved
            self._check_run()
            temporary.rename(target)
            sync(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in _checkpoints(folder)[: -self._settings.keep]:
            _remove(old)

    def restore(self, parts: Parts) -> int:
        """Restore `parts` from the newest checkpoint that is whole; its step, 0 where there is none.

        A damaged one is logged and renamed, and the one before is used. Raises ValueError where all are damaged, or the
        newest belongs to another run or other data.
        """
        if self._folder is None or not self._folder.exists():
            return 0
        self._check_run()
        _sweep(self._folder)
        checkpoints = _checkpoints(self._folder)
        for checkpoint in reversed(checkpoints):
            try:
                plain, tensors = _read(checkpoint, parts)
            except Damage as damage:
                logger.warning("the checkpoint %s is damaged (%s); the one before is used", checkpoint, damage)
                checkpoint.rename(free_name(checkpoint.with_name(f"{DAMAGED}{checkpoint.name}")))
                continue
            self._load(checkpoint, parts, plain, tensors)
            return _step(checkpoint)
        if checkpoints:
            got, remedy = f"{len(checkpoints)} damaged ones in {self._folder}", "Restore one of them, or train anew, "
            raise invalid("checkpoints", "hold one that is whole", got, f"{remedy}without --resume.")
        return 0

    def restore_as(self, step: int, parts: Parts) -> None:
        """Restore `parts` from the checkpoint of `step`, which another rank chose."""
        assert self._folder is not None
        checkpoint = self._folder / f"{STEP}{step:09}"
        try:
            self._load(checkpoint, parts, *_read(checkpoint, parts))
        except Damage as damage:
            remedy = "Put the folder of runs on a file system that all ranks share."
            raise invalid("checkpoints", "be the same files on all ranks", f"{damage}", remedy) from damage

    def _load(self, checkpoint: Path, parts: Parts, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        # a checkpoint of another version may lack a key, which is then not compared
        for key, value in self._origin.items():
            if (stored := plain.get("origin", {}).get(key, value)) != value:
                got, remedy = f'"{checkpoint}", of {key} {stored}', "Move it away, or train anew, without --resume."
                raise invalid("checkpoint", f"be this run's own, of {key} {value}", got, remedy)
        if plain["data"] != self._data:
            remedy = "Put them back as they were, or train anew, without --resume."
            raise invalid("data", "be the pairs and the tokens that the run began with", "others", remedy)
        for name, part in parts.items():
            part.load_state_dict(join_tensors(plain["parts"][name], tensors))

    def drop(self) -> None:
        """Remove all checkpoints of a finished run. Files of the user stay."""
        if self._run is not None:
            (self._run / RUN_ID).unlink(missing_ok=True)
        if self._folder is None or not self._folder.exists():
            return
        _sweep(self._folder)
        for spent in _folders(self._folder, WHOLE) + _folders(self._folder, RENAMED):
            _remove(spent)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _check_run(self) -> None:
        if self._run is not None:
            self._run.check_in_place()


def _sweep(folder: Path) -> None:
    """Remove the remains of a killed process. The lock on the run's folder makes sure that nobody writes them."""
    for path in _folders(own_folder(folder), REMAINS):
        shutil.rmtree(path, ignore_errors=True)


def _folders(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]


def _checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, the oldest first."""
    return sorted(_folders(folder, WHOLE), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(STEP))


def _remove(path: Path) -> None:
    """Rename, then delete, so that no reader ever sees half a checkpoint."""
    spent = path.with_name(f"{SPENT}{path.name}")
    shutil.rmtree(spent, ignore_errors=True)
    if path.exists():
        path.rename(spent)
        shutil.rmtree(spent, ignore_errors=True)


def split_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as plain JSON; its tensors go into `tensors` under their paths, such as adam.state.0.average."""
    if isinstance(value, Tensor):
        # a copy, because safetensors refuses tensors that share memory
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"tensor": path}
    if isinstance(value, Mapping):
        # pairs, because the keys of JSON objects are strings
        return {"pairs": [[key, split_tensors(inner, f"{path}.{key}", tensors)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        inner = [split_tensors(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return inner if isinstance(value, list) else {"tuple": inner}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{path} is {type(value).__name__}, which has no place in a checkpoint")


def join_tensors(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `split_tensors`."""
    if isinstance(plain, list):
        return [join_tensors(inner, tensors) for inner in plain]
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        return tensors[plain["tensor"]]
    if "tuple" in plain:
        return tuple(join_tensors(plain["tuple"], tensors))
    return {key: join_tensors(inner, tensors) for key, inner in plain["pairs"]}


def _read(checkpoint: Path, parts: Parts) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain values and tensors, every byte compared with the manifest; raises `Damage`."""
    try:
        text = (checkpoint / MANIFEST).read_text(encoding="utf-8")
        files = json.loads(text)["files"]
        if text != _manifest(files):
            raise Damage(f"{MANIFEST} is not what was written")
        for name, expected in files.items():
            if _size_and_checksum(checkpoint / name) != expected:
                raise Damage(f"the checksum of {name} does not agree")
        plain = json.loads((checkpoint / PLAIN).read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = {}
        for name in sorted(files.keys() - {PLAIN}):
            tensors |= safetensors.torch.load_file(checkpoint / name)
    except OSError as failure:
        raise Damage(f"{Path(failure.filename or checkpoint).name}: {failure.strerror}") from failure
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as failure:
        raise Damage(f"its files cannot be read: {failure}") from failure
    if plain["parts"].keys() != parts.keys():
        remedy = "Another version of contrastile wrote it; resume with that one."
        raise invalid("checkpoint", f"hold {', '.join(parts)}", ", ".join(plain["parts"]), remedy)
    return plain, tensors


def _manifest(files: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True) + "\n"


def _size_and_checksum(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """The seed of dropout in a step. It follows from seed, step and rank alone, so no generator state is saved."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:8], "big") >> 1
