"""Others who are told what a run says: TensorBoard and Weights & Biases, where a recipe's `[log]` names them.

Beside `log.py`, whose `Metrics` passes every line on after writing it. All curves are over the examples seen, which
step, probe and resumed run count alike. None of them can end a run, or hold a step that was taken again twice.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from contrastile.train.config import AnyRecipe
from contrastile.train.folder import RunFolder
from contrastile.train.log import Listener

logger = logging.getLogger("contrastile")

# how long wandb may ask who one is, and try to reach its server: other ranks wait meanwhile
LOGIN_SECONDS, REACH_SECONDS = 15.0, 30.0
# the folder of TensorBoard's files, and the file with the name under which wandb goes on with a run
TENSORBOARD, WANDB = "tensorboard", "wandb.json"


class Careful:
    """A listener whose first failure is told, and is its last: the run goes on without it."""

    def __init__(self, listener: Listener, name: str) -> None:
        self._listener: Listener | None = listener
        self._name = name

    def hear(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._listener is not None:
            try:
                self._listener.hear(kind, values)
            except Exception as failure:
                self._leave(failure)

    def close(self) -> None:
        if self._listener is not None:
            try:
                self._listener.close()
            except Exception as failure:
                self._leave(failure)

    def _leave(self, failure: Exception) -> None:
        self._listener = None
        logger.warning("%s failed and is told nothing more; the run goes on: %r", self._name, failure)


class TensorBoard:
    """Scalars in the run's folder; what an interrupted run wrote of steps that are taken again is hidden."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._writer: Any = None

    def hear(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / TENSORBOARD), purge_step=values["examples"])
        for name, value in scalars(kind, values):
            self._writer.add_scalar(name, value, global_step=values["examples"])
        if kind != "step":
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Scalars to a project of wandb; a resumed run goes on under its name, and what is there is not taken twice.

    Where it writes and whether it sends anything is up to wandb's own settings, such as WANDB_MODE=offline.
    """

    def __init__(self, folder: RunFolder, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._folder, self._project, self._name, self._config = folder, project, name, config
        self._run: Any = None

    def hear(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._run is None:
            import wandb

            self._run = wandb.init(
                project=self._project,
                name=self._name,
                id=self._id(),
                resume="allow",
                dir=str(self._folder.path),
                config=dict(self._config),
                settings=wandb.Settings(login_timeout=LOGIN_SECONDS, init_timeout=REACH_SECONDS, console="off"),
            )
        # of two lines about one number of examples wandb makes one
        self._run.log(dict(scalars(kind, values)), step=values["examples"])

    def _id(self) -> str:
        if not (self._folder / WANDB).is_file():
            self._folder.write_json(WANDB, {"id": secrets.token_hex(8)})
        return str(self._folder.read_json(WANDB)["id"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line, by their place in it; those of a test by its name too.

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


def trackers(recipe: AnyRecipe, folder: RunFolder) -> Sequence[Listener]:
    """Those that the recipe names."""
    named: list[Listener] = []
    if recipe.log.tensorboard:
        named.append(Careful(TensorBoard(folder), "TensorBoard"))
    if recipe.log.wandb is not None:
        told = recipe.model_dump(mode="json", exclude_none=True)
        named.append(Careful(WandB(folder, recipe.log.wandb, recipe.name, told), "wandb"))
    return named
