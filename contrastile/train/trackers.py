"""Listeners of a run's metrics: the report that is rewritten at each probe, TensorBoard, and Weights & Biases.

The x-axis of all curves is the number of examples seen. No listener can end a run, or see a repeated step twice.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from contrastile.data.files import own_folder
from contrastile.train.config import AnyRecipe
from contrastile.train.folder import RunFolder
from contrastile.train.log import Listener
from contrastile.train.report.page import Wording, write_report

logger = logging.getLogger("contrastile")

# the largest share of a run's time that its reports may take: one takes about half a second
MOST = 0.05
# limits on wandb's login and on reaching its server: other ranks wait meanwhile
LOGIN_SECONDS, REACH_SECONDS = 15.0, 30.0
# the folder of TensorBoard's files, and the file with the run id that wandb resumes
TENSORBOARD, WANDB = "tensorboard", "wandb.json"


class LiveReport(Listener):
    """The report of a run that still trains, written after each probe from the folder and from `metadata()`.

    A probe writes none where reports would take more than the share `MOST` of the time since the run started.
    """

    def __init__(
        self, folder: RunFolder, metadata: Callable[[], Mapping[str, Any]], wording: Wording | None = None
    ) -> None:
        self._folder, self._metadata, self._wording = folder, metadata, wording
        self._began = time.monotonic()
        self._spent = self._last = 0.0

    def log(self, kind: str, values: Mapping[str, Any]) -> None:  # noqa: ARG002
        now = time.monotonic()
        if kind != "probe" or self._spent + self._last > MOST * (now - self._began):
            return
        write_report(self._folder, wording=self._wording, so_far=self._metadata())
        self._last = time.monotonic() - now
        self._spent += self._last


def write_stopped_report(folder: RunFolder, metadata: Mapping[str, Any], wording: Wording) -> None:
    """Write the report of a run that a signal stopped; a failure is logged, because the run can be resumed."""
    try:
        write_report(folder, wording=wording, so_far=metadata)
    except Exception as failure:
        logger.warning("the report failed, the run is kept: %r", failure)


class TensorBoard(Listener):
    """Scalars in the run's folder. A resumed run hides the steps that it repeats."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._writer: Any = None

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(own_folder(self._folder / TENSORBOARD)), purge_step=values["examples"])
        for name, value in scalars(kind, values):
            self._writer.add_scalar(name, value, global_step=values["examples"])
        if kind != "step":
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(Listener):
    """Scalars in a project of wandb. A resumed run continues under its id, and wandb drops the steps that it repeats.

    wandb's own settings, such as WANDB_MODE=offline, say where it writes and if it sends anything.
    """

    def __init__(self, folder: RunFolder, project: str, recipe: AnyRecipe) -> None:
        self._folder, self._project, self._recipe = folder, project, recipe
        self._run: Any = None

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._run is None:
            import wandb

            # the name that the library gives its folder
            own_folder(self._folder / "wandb")
            if not (self._folder / WANDB).is_file():
                self._folder.write_json(WANDB, {"id": secrets.token_hex(8)})
            self._run = wandb.init(
                project=self._project,
                name=self._recipe.name,
                id=str(self._folder.read_json(WANDB)["id"]),
                resume="allow",
                dir=str(self._folder.path),
                config=self._recipe.model_dump(mode="json", exclude_none=True),
                settings=wandb.Settings(login_timeout=LOGIN_SECONDS, init_timeout=REACH_SECONDS, console="off"),
            )
        # wandb merges two lines about the same number of examples
        self._run.log(dict(scalars(kind, values)), step=values["examples"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line by their path in it; a test's lines also by its name.

    >>> list(scalars("probe", {"examples": 64, "recall": {"faces": {"1": 0.5}}, "why": "no"}))
    [('probe/recall/faces/1', 0.5)]
    >>> list(scalars("test", {"examples": 64, "test": "coco", "image_to_text_R@1": 0.5}))
    [('test/coco/image_to_text_R@1', 0.5)]
    """
    kind = f"{kind}/{values['test']}" if "test" in values else kind
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from scalars(f"{kind}/{name}", value)
        elif name != "examples" and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{kind}/{name}", float(value)


def listeners(
    recipe: AnyRecipe, folder: RunFolder, metadata: Callable[[], Mapping[str, Any]], wording: Wording
) -> dict[str, Listener]:
    """The report and the trackers that the recipe names."""
    chosen: dict[str, Listener] = {"the report": LiveReport(folder, metadata, wording)}
    if recipe.log.tensorboard:
        chosen["TensorBoard"] = TensorBoard(folder)
    if recipe.log.wandb is not None:
        chosen["wandb"] = WandB(folder, recipe.log.wandb, recipe)
    return chosen
