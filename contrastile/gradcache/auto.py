"""The size of a sub-batch for `sub_batch="auto"`.

Used by `encode.py`. A few examples show the bytes of one, and with the free memory the size; on a GPU this size is then
tried. If memory still runs out, the batch is encoded again with half the size, which is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from contrastile._errors import logger
from contrastile.distributed import consistency
from contrastile.gradcache.forward import Job, OutputForm, detached, differentiable
from contrastile.gradcache.introspect import without_partials
from contrastile.gradcache.memory import bytes_per_example, footprint, graph_bytes, later_bytes, spare_bytes
from contrastile.gradcache.modes import back_propagated, without_hooks
from contrastile.offload import stream

Result = TypeVar("Result")

# a size without limit
UNLIMITED = 2**62
# examples on which the bytes of one are measured
FEW = 8
# bytes of forward and backward together, in multiples of a graph's: if no trial follows, and if one does
BACKWARD, BACKWARD_TRIED = 2.0, 1.25

# sizes by kind of inputs, for each encoder, by one of its modules or parameters
_sizes = WeakIdKeyDictionary()


def agreed_size(
    known: dict[Any, tuple[int, int]], kind: object, batch: int, search: Callable[[], int],
    most: Callable[[int], int] = int,
) -> int:  # fmt: skip
    """The largest sub-batch for inputs of one kind, known or searched for; the smallest over ranks that run together.

    known: by kind, the size and the batch for which it was measured. most: the largest of a number over those ranks.
    """

    def agreed(size: int) -> int:
        # a rank that encodes its whole batch at once accepts any size
        return min(-most(-(size if size < batch else UNLIMITED)), batch)

    size, measured = known.get(kind, (0, 0))
    # a batch that fitted whole is no measure for a larger one
    size = agreed(0 if size == measured < batch else size)
    # all ranks search where one does not know its size, because a sharded encoder runs on all of them
    if size == 0:
        failure = torch.OutOfMemoryError("encode: another rank has no room for a single example")
        try:
            size = search()
            known[kind] = size, batch
        except torch.OutOfMemoryError as error:
            # raised below, after the ranks have compared
            failure = error
        size = agreed(size)
        if size == 0:
            raise failure
        logger.info("encode: sub-batches of %d", size)
    return size


def halving(run: Callable[[int], Result], size: int) -> tuple[int, Result]:
    """The size that succeeded and the result of run(size). Each time memory runs out, take half the size, down to 1."""
    while True:
        try:
            return size, run(size)
        except torch.OutOfMemoryError:
            if size <= 1:
                raise
            logger.warning("encode: out of memory; sub-batches of %d instead of %d", size // 2, size)
            size //= 2


def tries(device: torch.device | None) -> bool:
    """Return whether a size is tried before it is used: on a GPU, which raises an error for too much."""
    return device is not None and device.type == "cuda"


def with_fitting_size(
    job: Job, leaves: Sequence[Tensor], batch: int, wrapper: DistributedDataParallel | None,
    run: Callable[[int], Result],
) -> Result:  # fmt: skip
    """The result of run(size) with the largest sub-batch that fits into memory, halved if it does not after all."""
    key = next(iter((*job.reached.modules, *job.reached.parameters)), None)
    shapes = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
    # by name and code: a bound method is a new object in each call, and a wrapped function has the name of the one
    # inside. A graph, and each trained parameter, leave less room
    function = without_partials(job.encoder)
    identity = getattr(function, "__qualname__", ""), getattr(function, "__code__", None)
    kind = identity, job.differentiates(leaves), len(job.reached.parameters), shapes
    most = job.sharding.most if wrapper is None else partial(consistency.most, group=wrapper.process_group)
    known: dict[Any, tuple[int, int]] = _sizes.setdefault(key, {}) if key is not None else {}
    size = agreed_size(known, kind, max(batch, 1), partial(largest_fitting, job, leaves, batch), most)
    if job.sharding.modules:
        # all ranks would have to run again
        return run(size)
    before = job.reached.random()

    def attempt(size: int) -> Result:
        before.restore()
        return run(size)

    fitting, result = halving(attempt, size)
    if fitting < size:
        known[kind] = fitting, max(batch, 1)
    return result


def largest_fitting(job: Job, leaves: Sequence[Tensor], batch: int) -> int:
    """The largest sub-batch whose forward fits into memory, and its backward, if there is one.

    It follows from the bytes that an example adds; on a CUDA device it is then tried.
    """
    values, wanted = detached(leaves)
    parameters, differentiates = job.reached.parameters, job.differentiates(leaves)

    def encoded(n: int, backward: bool = False) -> object:
        """Encode the first n examples, and back-propagate them with `backward`."""
        (rows,) = stream([job.layout.rows(values, (0, n))], job.device)
        with job.sharding.attempt():
            if not differentiates:
                with torch.no_grad():
                    return job.run(0, rows, OutputForm(), examples=(0, n))
            outputs, inputs = job.run(0, rows, OutputForm(), wanted, (0, n))
            outs = [out for out in outputs if out is not None and out.requires_grad]
            if backward and outs:
                back_propagated(outs, [*parameters, *inputs], [torch.zeros_like(out) for out in outs])
            return outputs

    measure = graph_bytes if differentiates else footprint
    with job.reached.random().restoring(), job.sharding.gathered(), without_hooks(parameters):
        # one example is not measured
        few, each = halving(lambda n: bytes_per_example(encoded, n, measure) if n > 1 else 1, min(batch, FEW))
        most = batch if few == min(batch, FEW) else few
        factor = BACKWARD_TRIED if tries(job.device) else BACKWARD
        later = later_bytes(parameters, sum(leaf.nbytes for leaf in differentiable(leaves)), (), 1)
        size = max(1, min(most, int((spare_bytes(job.device) - later) / (factor * max(1, each)))))
        return halving(lambda n: encoded(n, backward=True), size)[0] if tries(job.device) else size
