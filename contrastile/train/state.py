"""State of a run beside model and optimizer: its progress and result, the average of its weights, its guard.

`loop.py` updates them after every step; progress, average and guard are parts of a checkpoint. Also the stopwatch of a
step, and the request to stop between two.
"""

import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, pairwise
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from contrastile._errors import logger
from contrastile._types import accumulator
from contrastile.train.folder import METADATA, RunFolder
from contrastile.train.sharded import AllRanksError, local

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# skipped steps in a row that end the run
MOST_IN_A_ROW = 3
# the norm of the weights at which a run ends: squares of float32 end at 1e38, and a step at the largest learning rate
# and weight decay of a recipe must not make finite weights non-finite before this norm is noticed
LARGEST_NORM = 1e18


@dataclass
class Progress:
    """Examples and seconds of a run so far. The share that is done is that of examples or of minutes, if larger.

    examples: those of the whole run. sizes: the batch of every step so far. now: the time, in seconds of the run, at
    which the present step was planned; the same on all ranks. pace: seconds per example of the last step, 0 before the
    first. seconds, peak_bytes: at the end of the last step.
    """

    examples: int
    minutes: float | None
    next_probe: float = 1.0
    sizes: list[int] = field(default_factory=list)
    seen: int = 0
    now: float = 0.0
    pace: float = 0.0
    seconds: float = 0.0
    peak_bytes: int = 0
    began: float = field(default_factory=time.monotonic)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers. Sizes are stored as runs of equal ones, of which there are few."""
        sizes = [[size, len(list(same))] for size, same in groupby(self.sizes)]
        numbers = {name: getattr(self, name) for name in ("next_probe", "seconds", "pace", "peak_bytes")}
        return {"sizes": sizes, **numbers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        sizes = [size for size, count in state_dict["sizes"] for _ in range(count)]
        vars(self).update({**state_dict, "sizes": sizes})

    def start(self) -> None:
        """Start the clock at the seconds that a checkpoint restored, or at 0."""
        self.seen, self.now, self.began = sum(self.sizes), self.seconds, time.monotonic() - self.seconds

    def has_time_for(self, count: int) -> bool:
        """True if a step of `count` examples, at the pace of the last step, ends within `minutes`."""
        return self.minutes is None or self.now + count * self.pace <= 60 * self.minutes

    def elapsed(self) -> float:
        """Seconds since the run began, without the time during which it was interrupted."""
        return time.monotonic() - self.began

    def share(self, ahead: float = 0.0) -> float:
        """The share of the run that is done, or will be `ahead` examples later."""
        time_share = self.now / (60 * self.minutes) if self.minutes is not None else 0.0
        return max((self.seen + ahead) / self.examples, time_share)

    def expected(self) -> int:
        """The estimated number of examples at the end of the run."""
        return round(self.seen / min(self.share(), 1.0))


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
        self.examples, self.steps, self.seconds = progress.seen, len(progress.sizes), progress.seconds
        self.largest_batch, self.peak_bytes = max(progress.sizes, default=0), progress.peak_bytes
        self.skipped_steps = skipped_steps


def finished_result(folder: RunFolder) -> TrainResult | None:
    """The result of a run whose training has finished; None for any other run."""
    if not (folder / METADATA).is_file():
        return None
    metadata = folder.read_json(METADATA)
    # earlier versions wrote fewer fields
    fields = {name: metadata[name] for name in asdict(TrainResult()) if name in metadata}
    return TrainResult(**fields) if metadata.get("finished") else None


class Ema:
    """Exponential moving average of a model's trained parameters; without a `decay`, the model itself.

    In float32, of float64 parameters in float64.

    After step t: mean ← d mean + (1 − d) weights, with d = min(decay, (1 + t) / (10 + t)), so that the average forgets
    the first steps early. It often measures better than the weights, so measurements and the saved run use it.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self._decay, self._step = decay, 0
        trained = {} if decay is None else {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._weights: dict[str, nn.Parameter] = trained
        self._means = {name: p.detach().to(accumulator(p.dtype)).clone() for name, p in trained.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "means": self._means}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step = state_dict["step"]
        for name, mean in state_dict["means"].items():
            self._means[name].copy_(mean)

    @torch.no_grad()
    def update(self) -> None:
        """Average in the weights after one more step."""
        if self._decay is None:
            return
        self._step += 1
        decay = min(self._decay, (1 + self._step) / (10 + self._step))
        for name, mean in self._means.items():
            # each rank averages its own part of a sharded model, because DTensor would look up each operation anew
            local(mean).lerp_(local(self._weights[name]).to(mean.dtype), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the means for its weights; restore its weights afterwards."""
        weights = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.settle()
        try:
            yield
        finally:
            self._copy(weights)

    def settle(self) -> None:
        """Give the model the means for good, when its steps have ended or failed."""
        self._copy(self._means)

    @torch.no_grad()
    def _copy(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._weights[name].copy_(value)


class NonFiniteGuard:
    """Counts of steps skipped because loss or gradient were not finite: all, and those in a row up to the last step."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def passes(
        self, step: int, value: float, norm: float, model: nn.Module, inputs: Iterable[Mapping[str, Tensor]], *,
        counted: bool = True,
    ) -> bool:  # fmt: skip
        """True where loss and norm are finite; otherwise log the step, and end the run at the third in a row.

        inputs: named floating-point inputs of each part of the batch. A gradient beyond the range of fp16 is not
        `counted` in the row, because the scaler lowers its factor for the next step. Raises FloatingPointError.
        """
        if math.isfinite(value + norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += counted
        sentence = f"step {step} is skipped: a loss of {value} with a gradient of norm {norm}, first seen in "
        sentence += _first_nonfinite(model, inputs)
        if self.in_a_row >= MOST_IN_A_ROW:
            raise AllRanksError(
                f"the loss must stay a finite number; {sentence}, and the {MOST_IN_A_ROW - 1} steps before it too. "
                "Lower optim.learning_rate or raise optim.warmup; the weights from before these steps are kept."
            )
        if counted:
            logger.warning("%s; its examples are passed over", sentence)
        return False

    def check_weights(self, step: int, norm: float, model: nn.Module) -> None:
        """End the run where the norm of the weights after a step is beyond `LARGEST_NORM`, or not finite.

        Raises FloatingPointError. Weights that are merely too large are still finite, and are saved by the run's end.
        """
        # a skipped step leaves the weights as they are, and has its own end
        if norm <= LARGEST_NORM or self.in_a_row:
            return
        remedy = "Lower optim.learning_rate or optim.weight_decay"
        if all_finite(model):
            where, saved = "", "they are kept as they are now"
        else:
            where = f", first seen in {_first_nonfinite(model, ())}"
            saved = "the newest checkpoint has the last finite ones"
        sentence = f"the weights must stay below a norm of {LARGEST_NORM:g}; step {step} left them at {norm:g}{where}"
        raise AllRanksError(f"{sentence}. {remedy}; {saved}.")


def all_finite(model: nn.Module) -> bool:
    return all(bool(local(tensor).isfinite().all()) for tensor in chain(model.parameters(), model.buffers()))


def _first_nonfinite(model: nn.Module, inputs: Iterable[Mapping[str, Tensor]]) -> str:
    """The name of the first non-finite tensor among inputs, weights and gradients.

    A rank looks at its own shards only, without a collective: ranks may stop at different tensors.
    """
    parameters = list(model.named_parameters())
    named = chain(
        (item for part in inputs for item in part.items()),
        ((f"the weights {name}", parameter) for name, parameter in parameters),
        ((f"the gradient of {name}", p.grad) for name, p in parameters if p.grad is not None),
    )
    nonfinite = (name for name, tensor in named if not local(tensor).isfinite().all())
    return next(nonfinite, "the loss or the norm alone")


class HostEvent:
    """The counterpart of `torch.cuda.Event` for a device that computes synchronously."""

    def record(self) -> None:
        self.moment = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: nothing is queued."""

    def elapsed_time(self, end: Self) -> float:
        """Milliseconds."""
        return 1000 * (end.moment - self.moment)


class Stopwatch:
    """Marks of one step after the other; a mark names the part of the step that begins there.

    event: makes the event of a mark; a GPU's event is the moment at which its queue reaches the mark. A step is logged
    while a device still runs its optimizer, so the optimizer's time is that of the step before. The sum of gradients
    over ranks counts as towers.
    """

    def __init__(self, event: Callable[[], Any] = HostEvent) -> None:
        self._event = event
        # a part of None lies outside of any step
        self._marks: list[tuple[str | None, Any]] = []
        self._began = time.perf_counter()

    def start(self) -> None:
        """Begin a step, which waits for its data first."""
        self._began = time.perf_counter()
        # a step that the guard skipped has no mark at the optimizer's end
        if self._marks and self._marks[-1][0] is not None:
            self._marks.clear()
        self.mark("data")

    def mark(self, part: str | None) -> None:
        """Begin `part` of the step."""
        event = self._event()
        event.record()
        self._marks.append((part, event))

    def follow(self, optimizer: Optimizer) -> None:
        """Mark the begin and the end of each step of the optimizer."""
        optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer"))
        optimizer.register_step_post_hook(lambda *_: self.mark(None))

    def around(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same loss with marks at its ends, forward and backward; its first two inputs are the towers' features."""

        def marked(*inputs: Any, **options: Any) -> Tensor:
            self.mark("loss")
            for side in inputs[:2]:
                # token vectors come with their mask
                features = side[0] if isinstance(side, tuple) else side
                if features.requires_grad:
                    features.register_hook(lambda _: self.mark("towers"))
            value = loss(*inputs, **options)
            if value.requires_grad:
                value.register_hook(lambda _: self.mark("loss"))
            return value

        return marked

    def read(self, examples: int) -> dict[str, Any]:
        """Values of the finished step for `metrics.jsonl`: host seconds, examples per second, shares that sum to 1."""
        spent: dict[str, float] = defaultdict(float)
        # the time of this step's optimizer belongs to the next step
        marks = self._marks[:-1] if self._marks[-1][0] is None else self._marks
        for (part, start), (_, end) in pairwise(marks):
            if part is not None:
                # the device may not have reached the later event
                end.synchronize()
                spent[part] += start.elapsed_time(end)
        self._marks = self._marks[-2:]
        seconds, total = time.perf_counter() - self._began, sum(spent.values())
        shares = {part: round(took / total, 4) for part, took in sorted(spent.items())} if total > 0 else {}
        return {"seconds": seconds, "speed": examples / max(seconds, 1e-9), "shares": shares}


def shares_text(shares: dict[str, float]) -> str:
    """The shares for a log line.

    >>> shares_text({"data": 0.031, "loss": 0.25, "towers": 0.719})
    'towers 72%, loss 25%, data 3%'
    """
    return ", ".join(f"{part} {share:.0%}" for part, share in sorted(shares.items(), key=lambda item: -item[1]))


class StopRequest:
    """`with StopRequest() as stop:` stores the first Ctrl-C or SIGTERM in `stop.signal`, read between two steps.

    A second signal stops at once. A `patient` request ignores it, because a launcher of several ranks passes on a
    Ctrl-C that the terminal has sent to each rank already.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.signal: int | None = None
        self._patient = patient
        self._handlers: dict[int, Any] = {}

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None and not self._patient:
            raise KeyboardInterrupt(number)
        self.signal = self.signal or number

    def __enter__(self) -> Self:
        # Python sets handlers in the main thread only; in another thread the present handlers stay
        with suppress(ValueError):
            self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
