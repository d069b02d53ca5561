"""Run metadata: the contents of run.json, which the report reads. A task adds the values of its own kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from contrastile.train.folder import METADATA, RunFolder
from contrastile.train.loaded import LoadedRun
from contrastile.train.provenance import chip, versions
from contrastile.train.state import Progress


@dataclass
class TrainResult:
    """Outcome of the training so far; memory is that of one rank.

    planned: the examples of the whole run. finished: all steps are done, or all that `train.minutes` had time for.
    stopped_by: the signal that ended the training early.
    """

    examples: int = 0
    planned: int = 0
    steps: int = 0
    seconds: float = 0.0
    largest_batch: int = 0
    base_bytes: int = 0
    peak_bytes: int = 0
    ranks: int = 1
    skipped_steps: int = 0
    finished: bool = False
    stopped_by: int | None = None

    def update(self, progress: Progress, skipped_steps: int) -> None:
        """Record the progress after a step."""
        self.examples, self.steps, self.seconds = progress.seen, len(progress.sizes), progress.seconds
        self.largest_batch, self.peak_bytes = max(progress.sizes, default=0), progress.peak_bytes
        self.skipped_steps = skipped_steps


def finished_result(folder: RunFolder) -> TrainResult | None:
    """The result of a run whose training has finished; None of any other."""
    if not (folder / METADATA).is_file():
        return None
    metadata = folder.read_json(METADATA)
    # earlier versions wrote fewer fields
    fields = {name: metadata[name] for name in asdict(TrainResult()) if name in metadata}
    return TrainResult(**fields) if metadata.get("finished") else None


def base_metadata(run: LoadedRun, result: TrainResult) -> dict[str, Any]:
    """The metadata of every kind of run."""
    return {
        "name": run.recipe.name,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "device": chip(run.device),
        **asdict(result),
        "versions": versions(),
        "ended": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
