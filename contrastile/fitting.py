"""How many examples an encoder sees at once where the user says "auto".

Beside `cache.py`. What an example takes is measured on a few; on a GPU the size is then tried. If it was too much
after all, the batch is encoded again in halves, and the smaller size is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from contrastile import agreement
from contrastile.first_pass import Job, differentiable
from contrastile.footprint import footprint
from contrastile.offload import stream
from contrastile.reach import back_propagated, silent
from contrastile.retention import bytes_per_example, kept_bytes, later_bytes, spare_bytes

Result = TypeVar("Result")

# more than any batch
ANY = 2**62
# examples that show what one takes
FEW = 8
# what forward and backward of a graph take, in graphs; an accelerator then tries whether that is enough
BACKWARD, BACKWARD_TRIED = 2.0, 1.25

logger = logging.getLogger("contrastile")

# by what stands for an encoder: the sub-batches that were found for inputs of some kinds
_found = WeakIdKeyDictionary()


class Sizes:
    """The largest sub-batch of one encoder for inputs of one kind, found once and kept.

    `key` stands for the encoder, where something does; `kind` says what of it runs on what. `most`: the largest of a
    number over ranks that go together; the smallest size of any is everybody's.
    """

    def __init__(self, key: object, kind: object, batch: int, most: Callable[[int], int] = int) -> None:
        # of each kind the size, and the batch it was found in
        self.known: dict[object, tuple[int, int]] = _found.setdefault(key, {}) if key is not None else {}
        self.kind, self.batch, self.most = kind, max(batch, 1), most

    def largest(self, look: Callable[[], int]) -> int:
        """What is known, or else what look() finds."""
        size, batch = self.known.get(self.kind, (0, 0))
        # a rank that knows looks again with those that do not: a look is an exchange among them. What is known of a
        # batch that went through whole says nothing of a larger one
        size = self._agreed(0 if size == batch < self.batch else size)
        if size == 0:
            error = None
            try:
                size = look()
                self.note(size)
            except torch.OutOfMemoryError as failed:
                # the others wait for an answer
                error = failed
            size = self._agreed(size)
            if size == 0:
                raise error or torch.OutOfMemoryError("encode: another rank has no room for a single example")
            logger.info("encode: sub-batches of %d", size)
        return size

    def _agreed(self, size: int) -> int:
        """The smallest of any rank, of which one that encodes its whole batch at once is content with any."""
        return min(-self.most(-(size if size < self.batch else ANY)), self.batch)

    def note(self, size: int) -> None:
        self.known[self.kind] = size, self.batch


def halving(run: Callable[[int], Result], size: int) -> tuple[int, Result]:
    """run(size), with half the size after each time that memory ends, down to 1; the size that went through too."""
    while True:
        try:
            return size, run(size)
        except torch.OutOfMemoryError:
            if size <= 1:
                raise
            logger.warning("encode: out of memory; sub-batches of %d instead of %d", size // 2, size)
            size //= 2


def look_for_size(
    work: Callable[[int, bool], object],
    batch: int,
    device: torch.device | None,
    *,
    measure: Callable[[Callable[[], object]], int],
    later: int = 0,
) -> int:
    """The largest sub-batch whose forward and backward fit.

    `work(n, backward)` encodes the first n examples, and back-propagates if asked. The size comes from what an
    example adds to the bytes that `measure` finds; on a CUDA device it is then tried. `later`: bytes that the step
    takes beside it.
    """
    few = min(batch, FEW)
    found, each = halving(lambda n: bytes_per_example(lambda m: work(m, False), n, measure) if n > 1 else 1, few)
    tried = tries(device)
    backward = BACKWARD_TRIED if tried else BACKWARD
    most = batch if found == few else found
    size = max(1, min(most, int((spare_bytes(device) - later) / (backward * max(1, each)))))
    return halving(lambda n: work(n, True), size)[0] if tried else size


def tries(device: torch.device | None) -> bool:
    """Whether a size is tried before it is used: where too much is an error, and not a machine that stands still."""
    return device is not None and device.type == "cuda"


def fitted(
    job: Job,
    leaves: Sequence[Tensor | None],
    batch: int,
    wrapper: DistributedDataParallel | None,
    run: Callable[[int], Result],
) -> Result:
    """run(), with the largest sub-batch that fits into memory, or with half of it where it did not after all."""
    key = next(iter((*job.reached.modules, *job.reached.parameters)), None)
    shapes = tuple(None if leaf is None else (leaf.shape[1:], leaf.dtype) for leaf in leaves)
    # two towers may be methods of one module; without a graph more fits, and less of one with more that is trained
    kind = _written(job.encoder), job.differentiates(leaves), len(job.reached.parameters), shapes
    most = job.sharding.most if wrapper is None else partial(agreement.most, group=wrapper.process_group)
    sizes = Sizes(key, kind, batch, most)
    size = sizes.largest(partial(look, job, leaves, batch))
    if job.sharding.modules:
        # what one rank runs again, all would have to
        return run(size)
    before = job.reached.random()

    def again(size: int) -> Result:
        before.restore()
        return run(size)

    fits, found = halving(again, size)
    if fits < size:
        sizes.note(fits)
    return found


def _written(encoder: Callable[..., Any]) -> tuple[str, Any]:
    """Which method or function an encoder is: the same for one that is made anew for each call."""
    while isinstance(encoder, partial):
        encoder = encoder.func
    # what wraps one has its name, and another's code
    return getattr(encoder, "__qualname__", ""), getattr(encoder, "__code__", None)


def look(job: Job, leaves: Sequence[Tensor | None], batch: int) -> int:
    """The largest sub-batch whose forward fits, and whose backward, if there will be one."""
    wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
    values = [None if leaf is None else leaf.detach() for leaf in leaves]
    differentiates = job.differentiates(leaves)

    def work(n: int, backward: bool) -> object:
        (rows,) = stream(values, [(0, n)], job.device)
        with job.sharding.attempt():
            if not differentiates:
                with torch.no_grad():
                    return job.run(0, rows)
            outputs, inputs = job.run_with_graph(0, rows, wanted)
            outs = [out for out in outputs if out is not None and out.requires_grad]
            if backward and outs:
                ends = [torch.zeros_like(out) for out in outs]
                back_propagated(outs, [*job.reached.parameters, *inputs], ends)
            return outputs

    later = later_bytes(job.reached.parameters, sum(leaf.nbytes for leaf in differentiable(leaves)), (), 1)
    measure = kept_bytes if differentiates else footprint
    before = job.reached.random()
    try:
        with job.sharding.gathered(), silent(job.reached.parameters):
            return look_for_size(work, batch, job.device, measure=measure, later=later)
    finally:
        before.restore()
