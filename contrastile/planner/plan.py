"""A plan: one step's memory and time on a target, the largest batches, and other choices.

Above `memory.py` and `seconds.py`; `train/planned.py` makes the plan of a recipe.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

from contrastile._errors import invalid, whole_number
from contrastile.exchange.host import host_bytes
from contrastile.gradcache.memory import AUTO, MARGIN
from contrastile.planner.memory import CONTEXT, Moment, Side, StepMemory
from contrastile.planner.profile import Target
from contrastile.planner.seconds import StepSeconds, step_seconds
from contrastile.planner.towers import Work

# the largest number of pairs of a rank in the search for a batch
MOST_ROWS = 2**28
# batches in host memory: the present one, and the next that is read meanwhile
BATCHES_ON_HOST = 2
GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """Another way to take the step, for the comparison.

    host: bytes of a node's host memory. largest: the largest batch that fits, 0 for none; largest_host: its `host`.
    """

    name: str
    peak: int
    fits: bool
    host: int
    seconds: float | None
    largest: int
    largest_host: int


@dataclass(frozen=True)
class Plan:
    """The step of a recipe on a target.

    name: of the recipe. batch: pairs of all ranks in a step. keys: keys for each query. parts: parts of a batch
    whose gradients are accumulated. parameters, trained: bytes of the whole model's. host_inputs: bytes of a pair
    in host memory. decoded: images of a pair that are decoded. half: towers compute in 16 bits. on_host: features
    may wait in host memory. update: the optimizer's work in a step, the clipping of the gradient included. stages:
    batch and steps of each stage of the run; none where its length is not known. examples: those of the run, whose
    last step may be shorter; 0 for those of all steps.
    """

    name: str
    target: Target
    batch: int
    step: StepMemory
    keys: int
    parts: int
    parameters: int
    trained: int
    host_inputs: int
    decoded: int
    half: bool
    on_host: bool
    update: Work
    stages: tuple[tuple[int, int], ...] = ()
    examples: int = 0

    @cached_property
    def peak(self) -> Moment:
        """The moment with the most bytes on a rank's device."""
        return self.step.peak()

    @property
    def allowed(self) -> int:
        """Bytes that a step of a rank may take: all but those outside torch, and a margin for gaps.

        On a CPU its share of the node's memory.
        """
        memory = self.target.memory // self.sharing
        return int((1 - MARGIN) * memory) - (CONTEXT if self.target.device == "cuda" else 0)

    @property
    def sharing(self) -> int:
        """The ranks that share the memory of a device: on a CPU those of a node."""
        return self.target.per_node if self.target.device == "cpu" else 1

    @property
    def fits(self) -> bool:
        """The peak fits the device, and the host's bytes a host whose memory is known."""
        return self.peak.bytes <= self.allowed and self.fits_host

    @property
    def fits_host(self) -> bool:
        """The host's bytes fit, on a CPU beside the peaks of its ranks; True if the host's memory is not known."""
        # the model of a CPU is part of the peak
        held = self.sharing * (self.peak.bytes - self.parameters) if self.target.device == "cpu" else 0
        return self.target.host is None or held + self.host <= (1 - MARGIN) * self.target.host

    @property
    def host(self) -> int:
        """Bytes of host memory on a node: the model, which is built there first, batches, and features that wait."""
        pairs, loss = -(-self.batch // self.target.ranks) * self.target.per_node, self.step.loss
        waiting = 0
        for of_row, of_key in (one.sizes for one in self.step.losses if loss.host):
            waiting += host_bytes((of_row, self.keys * of_key), loss.feature_dtype, loss.ranks)
        return self.target.per_node * self.parameters + pairs * (BATCHES_ON_HOST * self.host_inputs + waiting)

    @cached_property
    def seconds(self) -> StepSeconds | None:
        """The seconds of a step; None for a chip without a profile."""
        if self.target.profile is None:
            return None
        part = step_seconds(
            self.step, self.target.profile, per_node=self.target.per_node, trained=self.trained,
            decoded=self.decoded * self.step.loss.rows, half=self.half, update=self.update,
        )  # fmt: skip
        # gradients of all parts are summed over ranks, and the weights moved, once
        return replace(part, towers=self.parts * part.towers, loss=self.parts * part.loss, data=self.parts * part.data)

    @property
    def run_seconds(self) -> float | None:
        """The seconds of all steps of the run."""
        if not self.stages or self.seconds is None:
            return None
        stages = ((self.at(batch).seconds, steps) for batch, steps in self.stages)
        return sum(steps * seconds.total for seconds, steps in stages if seconds is not None)

    def at(self, batch: int) -> Self:
        """The same plan for another batch of all ranks, which a run of known length has throughout."""
        batch = whole_number("batch", batch, 1, "Such as 65536.")
        rows, examples = -(-batch // (self.target.ranks * self.parts)), sum(size * steps for size, steps in self.stages)
        examples = min(examples, self.examples or examples)
        # a run is never shorter than a step of its own pairs
        stages = ((batch, -(-examples // batch)),) if examples >= batch else ()
        return replace(self, batch=batch, step=self.step.with_batch(rows, self.keys * rows), stages=stages)

    @property
    def most(self) -> int:
        """The largest batch of all ranks in the search."""
        return MOST_ROWS * self.target.ranks * self.parts

    def largest(self, *, retain: int | Literal["auto"] = 0, **loss: Any) -> int:
        """The largest batch of all ranks that fits, by default without retained graphs; `loss`: changed sizes of it."""
        step = replace(self.step, retain=retain, loss=replace(self.step.loss, **loss))
        if step.loss.host:
            # strips and shards fill what graphs leave
            step = step.with_features_on_host()
        # batches are whole multiples of this
        plan, unit = replace(self, step=step), self.target.ranks * self.parts
        low, high = 0, 1
        while high <= MOST_ROWS and plan.at(high * unit).fits:
            low, high = high, 2 * high
        if low == MOST_ROWS:
            return self.most
        while high - low > max(1, low // 1000):
            middle = (low + high) // 2
            low, high = (middle, high) if plan.at(middle * unit).fits else (low, middle)
        return low * unit

    def at_largest(self) -> Self:
        """The plan of the largest batch, without retained graphs; raises ValueError where not one pair fits."""
        if not (largest := self.largest()):
            held = sum(count for name, count in self.step.base().items() if name != "inputs") + self.trained
            room = f"room for {max(0, self.allowed) / GIB:.1f} GiB on {self.target.word}"
            rule = "have room for weights, gradients, optimizer and one pair"
            remedy = 'Take GPUs with more memory, or with weights and gradients in parts: train.parallel="shard".'
            raise invalid("gpus", rule, f"{held / GIB:.1f} GiB of them, and {room}", remedy)
        return replace(self, step=replace(self.step, retain=0)).at(largest)

    def choices(self) -> Iterator[Choice]:
        """Other exchanges and blocks, retained graphs and sub-batches, each with all else as in the plan."""
        step = self.step
        blocks = [("replicate", "dense"), ("gather", "dense"), ("gather", "auto"), ("ring", "auto")]
        blocks += [("hierarchical", "auto")] * (self.target.ranks > self.target.per_node)
        if step.loss.host:
            # ranks whose features wait in host memory form a ring
            blocks = [("ring", "dense"), ("ring", "auto")]
        if step.loss.ranks == 1:
            blocks = [("single", "dense"), ("single", "auto")]
        for exchange, backend in blocks:
            words: dict[str, Any] = {"exchange": exchange, "backend": backend}
            name = f"exchange {exchange}, backend {backend}"
            yield self._choice(name, replace(step, loss=replace(step.loss, **words)))
        if self.on_host and not step.loss.host and self.target.device != "cpu":
            yield self._choice("features in host memory", step.with_features_on_host())
        for retain in (0, AUTO):
            if retain != step.retain:
                yield self._choice(f"retain {retain}", replace(step, retain=retain))
        for name, factor in (("half", 0.5), ("twice", 2.0)):
            sides = [_with_sub_batch(side, factor) for side in step.sides]
            wholes = [(side.whole or side.cost).sub_batch for side in sides]
            if wholes != [(side.whole or side.cost).sub_batch for side in step.sides]:
                sizes = " and ".join(map(str, wholes))
                yield self._choice(f"{name} the sub-batch: {sizes}", replace(step, sides=sides), whole=_whole(sides))

    def _choice(self, name: str, step: StepMemory, *, whole: bool = False) -> Choice:
        """The choice of a step; `whole`: its largest batch has whole sub-batches."""
        plan = replace(self, step=step)
        seconds, largest = plan.seconds, plan.largest(retain=step.retain)
        if whole and largest and not _whole(plan.at(largest).step.sides):
            largest = 0
        if plan.fits:
            # the search ends at the first batch that does not fit, where "auto" may keep a graph too many
            largest = max(largest, self.batch)
        total = None if seconds is None else seconds.total
        host = plan.at(largest).host if largest else 0
        return Choice(name, plan.peak.bytes, plan.fits, plan.host, total, largest, host)

    def values(self) -> dict[str, Any]:
        """The plan as values for JSON: bytes and seconds."""
        step, seconds, target = self.step, self.seconds, self.target
        return {
            "name": self.name,
            "target": {"gpus": target.word, "ranks": target.ranks, "memory": target.memory, "allowed": self.allowed},
            "batch": self.batch, "rows": step.loss.rows, "parameters": self.parameters, "trained": self.trained,
            "exchange": step.loss.exchange_name, "backend": step.loss.backend_name,
            "dtype": str(step.loss.dtype).removeprefix("torch."),
            "sides": [
                {
                    "name": side.cost.name, "examples": side.examples, "sub_batch": side.cost.sub_batch,
                    "sub_batches": side.count, "graph": side.cost.graph, "kept": retained,
                }
                for side, retained in zip(step.sides, step.retained_graphs(), strict=True)
            ],
            "moments": [{"name": one.name, "bytes": one.bytes, "parts": one.parts} for one in step.moments()],
            "peak": {"name": self.peak.name, "bytes": self.peak.bytes, "parts": self.peak.parts},
            "fits": self.fits,
            "host": {"bytes": self.host, "memory": target.host, "fits": self.fits_host},
            "largest": self.largest(),
            "seconds": None if seconds is None else {**vars(seconds), "total": seconds.total},
            "bottleneck": None if seconds is None else seconds.bottleneck, "run_seconds": self.run_seconds,
            "choices": [vars(choice) for choice in self.choices()],
            "provenance": [] if target.profile is None else list(target.profile.provenance),
        }  # fmt: skip


def _whole(sides: Sequence[Side]) -> bool:
    """No sub-batch is shorter because its rank has fewer examples."""
    return all(side.whole is None or side.cost.sub_batch == side.whole.sub_batch for side in sides)


def _with_sub_batch(side: Side, factor: float) -> Side:
    whole = side.whole or side.cost
    return replace(side, whole=whole.of(max(1, int(whole.sub_batch * factor)))).with_examples(side.examples)
