"""The bytes of a rank at each moment of a step: what `gradcache/`, the loss and the optimizer declare, added up.

The moments are those of a cached step (Gao et al. 2021): each side's first pass, the loss, each side's second pass in
the opposite order, the optimizer. The largest is the peak (Inf-CL, equation 10: data + max(loss, backbone)).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal, Self

from contrastile.gradcache.memory import AUTO, BESIDE, HEAD, MARGIN, TOKEN_TENSORS, retained_graphs
from contrastile.losses.guided import ROWS_AT_ONCE, Guided
from contrastile.offload import default_workspace
from contrastile.planner.loss import LateSize, LossSize
from contrastile.planner.towers import TowerCost

# bytes that libraries of matrix products keep on a GPU: two workspaces of cuBLAS
LIBRARIES = 2 * 32 * 2**20
# bytes of a GPU outside torch's allocator: the context, kernels, buffers of NCCL
CONTEXT = 2**30
# bytes of a number of a guide's features, which are float32
GUIDE_NUMBER = 4
# bytes of a CPU's random state, which `encode` keeps of each sub-batch until it is replayed
RANDOM_STATE = 5056


@dataclass(frozen=True)
class Side:
    """One side of a rank's batch: the encoder's cost, its examples, and the bytes of its inputs on the device."""

    cost: TowerCost
    examples: int
    inputs: int = 0
    # bytes of an example's features that wait for the loss's backward beside those of the encoder, or in place of them
    copies: int = 0
    # bytes of an example's features that the task holds until the loss is computed, such as normalised ones
    held_by_task: int = 0
    # bytes per example while the gradient of the loss's features becomes that of the encoder's
    normalisation: int = 0
    # features and their gradients wait in host memory
    host: bool = False
    # the cost of a whole sub-batch, where the examples are fewer; None: `cost` is that of a whole one
    whole: TowerCost | None = None

    @property
    def count(self) -> int:
        """Sub-batches."""
        return ceil(self.examples / self.cost.sub_batch)

    def with_examples(self, examples: int) -> Self:
        """The same side for another number of examples; a sub-batch has no more than these."""
        whole = self.whole or self.cost
        size = min(whole.sub_batch, examples)
        cost = self.cost if size == self.cost.sub_batch else whole.of(size)
        inputs = self.inputs // self.cost.sub_batch * size
        return replace(self, examples=examples, cost=cost, inputs=inputs, whole=whole)

    @property
    def features(self) -> int:
        """Bytes of all features until the loss's backward."""
        return 0 if self.host else self.encoded + self.examples * self.copies

    @property
    def encoded(self) -> int:
        """Bytes of all features as the encoder returns them, and of their gradients."""
        return 0 if self.host else self.examples * self.cost.features

    @property
    def keeps_all(self) -> bool:
        """Graphs behind frozen weights are so small that `encode` keeps them whatever `retain` is."""
        small = max(self.cost.inputs, HEAD * self.cost.features) * self.cost.sub_batch
        return self.cost.reads_frozen and self.cost.trained > 0 and self.cost.graph <= small

    def graph_bytes(self, retained: int) -> int:
        """Bytes of the last `retained` graphs; the last sub-batch may be shorter."""
        missing = self.count * self.cost.sub_batch - self.examples
        return retained * self.cost.graph - self.cost.graph * missing // self.cost.sub_batch if retained else 0


@dataclass(frozen=True)
class Held:
    """Bytes that stay during the whole step: of weights, of the optimizer's state, of the weights' average.

    gradients: those there before the first pass, of parts of the batch whose gradients are accumulated. step: temporary
    bytes of the optimizer's step, or of the sum of gradients over ranks. libraries: of matrix products. teacher: a
    guide's or a teacher's weights. queue: keys of earlier steps.
    """

    weights: int = 0
    optimizer: int = 0
    average: int = 0
    gradients: int = 0
    step: int = 0
    libraries: int = LIBRARIES
    teacher: int = 0
    queue: int = 0


@dataclass(frozen=True)
class Moment:
    """Bytes by part at one moment of a step."""

    name: str
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepMemory:
    """The step whose memory is planned. `retain`: graphs that each side keeps, or "auto".

    guides: the same batch by a guide or a teacher, whose features in float32 stay until the loss's backward. sharded:
    ranks have parts of the weights, and run each sub-batch equally often. listed: bytes of a row's listed keys, which
    are copied for the loss, and of the copies' gradients. sizes: numbers of features, of which the first so many have a
    further loss of their own.
    """

    sides: Sequence[Side]
    loss: LossSize
    held: Held
    retain: int | Literal["auto"] = 0
    guides: Sequence[Side] = ()
    sharded: bool = False
    listed: int = 0
    sizes: Sequence[int] = ()

    @cached_property
    def losses(self) -> list[LossSize]:
        """The loss of all features, and those of the first so many."""
        return [self.loss, *(replace(self.loss, dimensions=size) for size in self.sizes)]

    def base(self) -> dict[str, int]:
        """Parts that every moment has."""
        held, inputs = self.held, sum(side.inputs for side in self.sides)
        parts = {"weights": held.weights, "optimizer": held.optimizer, "average": held.average, "inputs": inputs}
        parts |= {"accumulated": held.gradients, "libraries": held.libraries, "teacher": held.teacher}
        parts |= {"queue": held.queue, "exchange": self.loss.kept_bytes}
        return {name: count for name, count in parts.items() if count}

    def retained_graphs(self) -> list[int]:
        """Number of graphs that each side keeps; of "auto" as many as `gradcache/` would find room for.

        Where `encode` runs out of memory on a GPU, it releases the oldest ones.
        """
        retained, room = self._begun_graphs(), int((1 - MARGIN) * self.loss.memory) - CONTEXT
        while self.retain in (AUTO, 0) and self.loss.device == "cuda" and not self.sharded and any(retained):
            # moments of `encode` alone have a colon
            missing = max(moment.bytes for moment in self.moments(retained) if ":" in moment.name) - room
            if missing <= 0:
                break
            oldest = next(index for index, count in enumerate(retained) if count)
            retained[oldest] -= min(retained[oldest], max(1, missing // max(1, self.sides[oldest].cost.graph)))
        return retained

    def _begun_graphs(self) -> list[int]:
        """Number of graphs that the first pass of each side finds room for."""
        if self.retain != AUTO:
            counts = [side.count if side.keeps_all else min(self.retain, side.count) for side in self.sides]
            return [count if side.cost.trained else 0 for count, side in zip(counts, self.sides, strict=True)]
        retained: list[int] = []
        total = self.loss.memory
        spare = int(total * (1 - MARGIN)) - default_workspace(total) - CONTEXT - sum(self.base().values())
        for side in self.sides:
            cost, copies = side.cost, side.cost.trained // 2
            # gradients and their sums; features, their gradients and the loss's accumulators
            sums = self.loss.wide * (1 + TOKEN_TENSORS * isinstance(self.loss, LateSize))
            later = 2 * cost.trained + side.examples * (2 * cost.features + sums * cost.dimensions)
            graph = max(1, cost.graph + copies)
            beside = min(graph, int(BESIDE * total))
            # a later side takes graphs back from earlier ones, but not those behind frozen weights
            for index, earlier in enumerate(self.sides[: len(retained)]):
                missing = 0 if earlier.keeps_all or self.sharded else max(0, later + beside - spare)
                released = min(retained[index], ceil(missing / max(1, earlier.cost.graph)))
                retained[index] -= released
                spare += released * earlier.cost.graph
            most = side.count if side.keeps_all else retained_graphs(side.count, spare, later + beside, graph)
            retained.append(most if cost.trained else 0)
            spare -= side.graph_bytes(retained[-1]) + side.encoded + copies
        return retained

    def moments(self, retained: Sequence[int] | None = None) -> list[Moment]:
        """All moments, in the order of the step. retained: graphs of each side; None: `retained_graphs`."""
        base, moments = self.base(), list[Moment]()
        retained = self.retained_graphs() if retained is None else retained

        def add(name: str, **parts: int) -> None:
            moments.append(Moment(name, base | {key: value for key, value in parts.items() if value}))

        # bytes held so far: of retained graphs, of features, and of the guide's or the teacher's features
        graphs = features = guided = 0
        random = sum(RANDOM_STATE * side.count for side in self.sides) if self.loss.device == "cpu" else 0
        for side in self.guides:
            cost, normalised = side.cost, GUIDE_NUMBER * side.examples * side.cost.dimensions
            encoded = side.examples * cost.features
            add(f"teacher, {cost.name}", features=guided + encoded, activations=cost.forward)
            # converted to float32, and normalised
            converted = normalised if cost.features < GUIDE_NUMBER * cost.dimensions else 0
            add(f"teacher, {cost.name}: features", features=guided + encoded + converted + normalised)
            guided += normalised
        for side, count in zip(self.sides, retained, strict=True):
            features, cost = features + side.encoded, side.cost
            built, parts = min(cost.graph, side.graph_bytes(count)), {"features": features + guided + random}
            alive = graphs + side.graph_bytes(count) - built
            add(f"{cost.name}: first pass", graphs=alive, **parts, activations=max(cost.forward, built))
            graphs += side.graph_bytes(count)
        features = random + sum(side.features for side in self.sides)
        of_task = sum(side.held_by_task * side.examples for side in self.sides)
        if self.guides and isinstance(self.loss.loss, Guided) and self.loss.backend_name != "triton":
            # keys of some rows, and their products with the queries
            products = 2 * GUIDE_NUMBER * min(self.loss.rows, ROWS_AT_ONCE) * self.guides[-1].cost.dimensions
            add("thresholds of the guide", graphs=graphs, features=features + guided + of_task, loss=products)
        # the task releases its own before the backward, which makes accumulators; operands are bytes of the loss too
        operands = sum(one.operands for one in self.losses)
        shared = min(of_task, self.loss.operands) if self.loss.feature_dtype == self.loss.dtype else 0
        of_task = max(of_task - self.loss.backward_sums, shared)
        lists = self.listed * self.loss.rows
        add("loss", graphs=graphs, features=features + guided + of_task, lists=lists, **self._loss_parts())
        # gradients of the encoders' features; all else of the features is released on the way back to them
        waiting = sum(side.encoded for side in self.sides)
        if normalisation := max(side.normalisation * side.examples for side in self.sides):
            # and of the first so many features, which come first
            held = features + guided + (2 if self.sizes else 1) * waiting + operands
            add("gradients of features", graphs=graphs, features=held, activations=normalisation)
        gradients = 0
        for side, count in reversed(list(zip(self.sides, retained, strict=True))):
            cost, graphs, features = side.cost, graphs - side.graph_bytes(count), random + operands + waiting
            sums = gradients + (cost.trained if side.count > 1 else 0)
            name, last = f"{cost.name}: second pass", min(cost.graph, side.graph_bytes(count))
            if count:
                # the last sub-batch's graph is the first that is consumed, all others are still there
                others = graphs + side.graph_bytes(count) - last
                activations = max(0, cost.replay - cost.graph) + last
                add(name, graphs=others, features=features, activations=activations, gradients=gradients)
            if cost.trained and count < side.count:
                add(name, graphs=graphs, features=features, activations=cost.replay, gradients=sums)
            if cost.trained:
                # of the first two sub-batches, and their sum, while the other graphs are there
                held = min(3, side.count + 1) * cost.trained
                others = max(0, side.graph_bytes(count) - last - cost.graph)
                name = f"{cost.name}: sum of gradients"
                add(name, graphs=graphs + others, features=features, gradients=gradients + held)
            gradients, waiting = gradients + cost.trained, waiting - side.encoded
        add("optimizer", gradients=gradients, step=self.held.step)
        return moments

    def _loss_parts(self) -> dict[str, int]:
        """Bytes of the loss while it computes blocks, or at its end, where gradients are returned."""
        (throughout, end), blocks, exchange = self.loss.resident, self.loss.workspace_bytes, self.loss.exchange_bytes
        # what other losses hold until the backward. Operands in the features' dtype are the features, or joined copies,
        # which are counted; the keys that a queue hands out are there once
        for one in self.losses[1:] if not self.loss.host else ():
            joined = one.queue > 0 or one.own_columns > 0
            others = one.resident[0] - one.queue * one.dimensions * one.feature_dtype.itemsize
            others += 0 if joined or one.feature_dtype != one.dtype else one.operands
            throughout, end = throughout + others, end + others
        if end + self.loss.kept_bytes > throughout + blocks + exchange:
            return {"loss": end}
        return {"loss": throughout + blocks, "exchange": exchange}

    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments(), key=lambda moment: moment.bytes)

    def with_features_on_host(self) -> Self:
        """The same step whose features wait in host memory: of `encode` and the loss."""
        sides = [replace(side, host=True, copies=0, held_by_task=0, normalisation=0) for side in self.sides]
        graphs = sum(side.graph_bytes(count) for side, count in zip(self.sides, self.retained_graphs(), strict=True))
        held = sum(self.base().values()) + graphs
        return replace(self, sides=sides, loss=replace(self.loss, host=True, held=held))

    def with_batch(self, rows: int, keys: int) -> Self:
        """The same step for another number of examples on a rank."""
        loss = replace(self.loss, rows=rows, keys=self.loss.keys // self.loss.rows * rows)
        sides, guides = (
            [one.with_examples(count) for one, count in zip(sides, (rows, keys), strict=False)]
            for sides in (self.sides, self.guides)
        )
        return replace(self, sides=sides, guides=guides, loss=loss)
