"""What a job is: everything that `loop.py` has to know of what it trains, as one value.

There are two: towers of pictures and texts (`image_text.py`), and retrievers (`retriever/job.py`). The loop has the
clock, the optimizer, the checkpoints and the ranks; a job draws batches, computes their loss and measures what came of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from contrastile.data.collection import Stream
from contrastile.data.pairs import Indices
from contrastile.train.checkpoint import Saveable
from contrastile.train.config import Recipe
from contrastile.train.facts import Trained
from contrastile.train.folder import RunFolder
from contrastile.train.ranks import Ranks
from contrastile.train.report import Wording
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.state import Parts
from contrastile.train.stopwatch import Stopwatch

# something measured, by its name: lines for metrics.jsonl
Measure = tuple[str, Callable[[], Sequence[Mapping[str, Any]]]]
AnyTrained = Recipe | RetrieverRecipe


class Share(Protocol):
    """What one rank has of a batch, or of a part of one."""

    @property
    def whole(self) -> int:
        """The examples of all ranks."""

    @property
    def floats(self) -> Mapping[str, Tensor]:
        """Its inputs that may hold what is no number, by what a reader calls them."""


class Trainable(Saveable, Protocol):
    """A run in memory: its recipe, its model, its tokenizer, and where they are."""

    @property
    def recipe(self) -> AnyTrained:
        """What it was told."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""


S = TypeVar("S", bound=Share)


class Job(Protocol[S]):
    """One training, opened: a run and the data that it learns from."""

    # what a step's examples are called
    unit: str
    # what a checkpoint holds of it, beside what every job has
    state: Parts

    @classmethod
    def open(cls, recipe: Any, begun: RunFolder | None) -> Self:
        """The job that `recipe` describes, untrained; with the tokenizer of the run that has `begun`, where one has."""

    @classmethod
    def of_run(cls, folder: RunFolder, *, device: str, index: Path | None) -> Self:
        """That of a finished run; what it finds may be looked for in another `index`, where the job knows any."""

    @property
    def run(self) -> Trainable:
        """What is trained."""

    @property
    def rows(self) -> Indices:
        """The examples to train on."""

    @property
    def stream(self) -> Stream | None:
        """What reads them as they are needed, and counts what it has to skip."""

    @property
    def data(self) -> str:
        """The fingerprint of what it learns from."""

    def parts(self, rows: Tensor, step: int, ranks: Ranks) -> Sequence[S]:
        """This rank's share of the batch of `rows`, in step number `step`, cut into the parts that are accumulated."""

    def expect(self, rows: Tensor, ranks: Ranks) -> None:
        """The next batch will begin with these rows."""

    def close(self) -> None:
        """The last batch was drawn."""

    def loss(self, part: S) -> Tensor:
        """The mean over this part's examples, of all ranks."""

    def timed(self, watch: Stopwatch[Any]) -> None:
        """From here on mark where the loss begins and ends."""

    def probe(self) -> Mapping[str, Any]:
        """Recall in small, on every held-out part."""

    def tests(self, *, whole: bool = False) -> Sequence[Measure]:
        """Measurements in small, or `whole`, on what is not its own; all ranks make them together."""

    def facts(self, trained: Trained) -> dict[str, Any]:
        """All that the report says beside curves and results."""

    def facts_so_far(self, trained: Trained) -> dict[str, Any]:
        """The same but for what takes the towers, or long, to find out."""

    @property
    def wording(self) -> Wording:
        """What its report calls things."""

    def report(self, folder: RunFolder) -> str:
        """Measure everything, write it and the report into the folder; the table of results as text."""

    def take(self, model: Any) -> None:
        """From here on this is the model."""

    def trained_in(self, folder: RunFolder) -> Self:
        """The same with the weights that a folder keeps."""
