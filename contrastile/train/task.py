"""Task: everything that `loop.py` needs to know of the model and data that it trains, as one value.

There are two: towers of images and texts (`image_text.py`), and retrievers (`retriever/job.py`).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from torch import Tensor

from contrastile._errors import logger
from contrastile.data.base import Indices
from contrastile.data.pairs import Stream
from contrastile.gradcache.memory import as_written
from contrastile.models.text import load_tokenizer
from contrastile.train.checkpoints import Parts
from contrastile.train.folder import METADATA, RunFolder
from contrastile.train.load import load
from contrastile.train.memory import dense_need
from contrastile.train.objective import OBJECTIVES, Objective, Teacher, open_teacher
from contrastile.train.planned import planned_memory
from contrastile.train.provenance import chip, versions
from contrastile.train.ranks import Ranks
from contrastile.train.recipe import to_toml
from contrastile.train.report.page import Wording
from contrastile.train.run import choose_device
from contrastile.train.state import Stopwatch, TrainResult

# a named measurement, which gives lines for metrics.jsonl
Measure = tuple[str, Callable[[], Sequence[Mapping[str, Any]]]]


class BatchPart(Protocol):
    """One rank's share of a batch, or of a part of a batch.

    global_size: the examples of all ranks' shares. floats: inputs that may be non-finite, named for error messages.
    """

    @property
    def global_size(self) -> int: ...
    @property
    def floats(self) -> Mapping[str, Tensor]: ...


P = TypeVar("P", bound=BatchPart)


class Task(ABC, Generic[P]):
    """One training: a run, untrained or loaded, with the data that it learns from.

    unit: the name of its examples. wording: the terms of its report. open_data: opens the data of a recipe for a
    tokenizer. rows: the examples to train on. stream: the reader of data that do not fit into memory, with its counts
    of skipped examples. state: its own parts of a checkpoint. teacher: another model that its loss needs.
    """

    unit: str
    wording: Wording
    open_data: ClassVar[Callable[..., Any]]
    # a subclass of LoadedRun
    run: Any
    rows: Indices
    stream: Stream | None = None

    def __init__(self, run: Any, objective: Any, teacher: Teacher | None = None) -> None:
        self.run, self.teacher = run, teacher
        self.objective: Objective = objective
        self._loss: Callable[..., Tensor] = objective
        objective.queues.to(run.device)
        self.state: Parts = objective.state

    @classmethod
    def open(cls, recipe: Any, begun: RunFolder | None = None) -> Self:
        """The untrained task of `recipe`; a tokenizer is trained unless the run `begun` has one."""
        # cheap checks first: a missing device, keys of the loss, a folder that is no model
        choose_device(recipe.device)
        OBJECTIVES[recipe.kind](recipe.loss)
        teacher = open_teacher(recipe)
        tokenizer = None if begun is None else load_tokenizer(begun.path, length=recipe.model.tokenizer.length)
        return cls.untrained(recipe, cls.open_data(recipe, tokenizer), teacher)

    @classmethod
    @abstractmethod
    def untrained(cls, recipe: Any, data: Any, teacher: Teacher | None = None) -> Self:
        """The task of `recipe` on data that are open, with fresh weights."""

    @classmethod
    def of_run(cls, folder: RunFolder, *, device: str = "auto") -> Self:
        """The task of a finished run."""
        run = load(folder.path, device=device)
        return cls(run, cls.open_data(run.recipe, run.tokenizer)).compared(folder)

    @property
    @abstractmethod
    def data_digest(self) -> str:
        """The fingerprint of the training data."""

    @property
    @abstractmethod
    def test_digest(self) -> str:
        """The fingerprint of the data that `report` measures on."""

    def compared(self, folder: RunFolder) -> Self:
        """The task itself, with a warning where a finished run is measured on other data than at its end."""
        # runs of earlier versions have no fingerprint
        if folder.read_json(METADATA).get("data_sha256", self.test_digest) != self.test_digest:
            message = "%s: the data are not those of the training; pairs that are held out now may have been trained on"
            logger.warning(message, folder.path)
        return self

    @property
    def origin(self) -> dict[str, str]:
        """Everything that the training depends on beside recipe and data, such as a teacher."""
        return {} if self.teacher is None else {"teacher": self.teacher.digest[:16]}

    def statement(self) -> dict[str, str | int]:
        """Values that must be equal on all ranks: checksums of data and recipe."""
        recipe = hashlib.sha256(to_toml(self.run.recipe).encode()).hexdigest()
        return {self.unit: len(self.rows), "data": self.data_digest[:16], "recipe": recipe[:16], **self.origin}

    @abstractmethod
    def parts(self, rows: Tensor, step: int, ranks: Ranks) -> Sequence[P]:
        """This rank's share of the batch of `rows`, in parts that are accumulated."""

    def prefetch(self, rows: Tensor, ranks: Ranks) -> None:
        """Begin to read the first rows of the next batch."""

    def close(self) -> None:
        """Release the reader after the last batch."""

    @abstractmethod
    def loss(self, part: P) -> Tensor:
        """The mean loss over this part's examples, of all ranks."""

    def timed(self, stopwatch: Stopwatch) -> None:
        """Mark the ends of the loss on `stopwatch` from now on."""
        self._loss = stopwatch.around(self._loss)

    @abstractmethod
    def probe(self) -> Mapping[str, Any]:
        """Recall on a sample of each held-out part."""

    def tests(self, *, whole: bool = False) -> Sequence[Measure]:  # noqa: ARG002
        """Measurements on other data: on samples, or on all of the data if `whole`; collective over ranks."""
        return ()

    @property
    @abstractmethod
    def skipped(self) -> Mapping[str, int]:
        """Counts of the examples that were left out, by reason."""

    @abstractmethod
    def activations(self) -> tuple[int, int]:
        """The measured bytes that autograd saves for one example, and the examples of a sub-batch."""

    def metadata(self, result: TrainResult) -> dict[str, Any]:
        """The contents of run.json."""
        retain, largest = self.run.recipe.train.retain, max(result.largest_batch, 1)
        # a measurement must not enter the running statistics of batch norm
        buffers = [(buffer, buffer.clone()) for buffer in self.run.model.buffers()]
        with self.run.autocast(), as_written():
            per_example, at_once = self.activations()
        for buffer, value in buffers:
            buffer.copy_(value)
        # "auto" counts as all, so that the report never overstates the saving
        retained = largest if retain == "auto" else at_once * max(retain, 1)
        need, planned = dense_need(per_example, largest, retained), planned_memory(self.run, largest, result.ranks)
        memory = {"memory": need, "planned_memory": planned}
        return {**self.metadata_so_far(result), **memory, "data_sha256": self.test_digest}

    def metadata_so_far(self, result: TrainResult) -> dict[str, Any]:
        """The metadata without values that take the model, or long, to compute."""
        recipe, pairs = self.run.recipe, len(self.rows)
        return {
            "name": recipe.name, "parameters": sum(parameter.numel() for parameter in self.run.model.parameters()),
            "device": chip(self.run.device), **asdict(result), "versions": versions(),
            "ended": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "pairs": pairs, "skipped": dict(self.skipped),
            "loss": recipe.loss.kind, "batch": [size for _, size in recipe.train.fitted(pairs).batch],
            "accumulate": recipe.train.accumulate,
        }  # fmt: skip

    @abstractmethod
    def measures(self) -> dict[str, float]:
        """The measures that a comparison shows of the model, by their columns: shares of 1."""

    @abstractmethod
    def report(self, folder: RunFolder) -> str:
        """Evaluate the model, write results and report into the folder; the table of results as text."""

    def set_model(self, model: Any) -> None:
        self.run = replace(self.run, model=model)
