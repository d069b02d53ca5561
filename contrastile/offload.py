"""Host memory: one part of a batch is copied to the device while the part before it is computed.

`encode` streams its inputs, and losses stream features in host memory. Without an accelerator both are plain slices of
a tensor. A low file of the package: it imports `_errors` alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contrastile._errors import invalid

Bounds = tuple[int, int]
# 2 bytes for each of 32,768² pairs, and 0.25 GiB that a block of up to 1,024 features takes beside them, with ids too
MOST_OF_ONE_GPU = 2 * 2**30 + 2**28


def with_index(device: torch.device | str) -> torch.device:
    """The device with its index: "cuda" is the current one, and tensors on it say "cuda:0"."""
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        # a kind of which a machine has one at most, such as mps, has no current one
        current = getattr(torch.get_device_module(device), "current_device", int)
        return torch.device(device.type, current())
    return device


def known_device(name: Any, place: str) -> torch.device:
    """The device of a name. place: where computation happens without one, for the error."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise invalid("device", "be one that torch knows", repr(name), f"Leave it out to compute {place}.") from None


def present_device(name: Any, place: str) -> torch.device:
    """The device of a name, which must be on this machine."""
    device = known_device(name, place)
    try:
        present = device.type in ("cpu", "meta") or torch.get_device_module(device.type).is_available()
    except (AttributeError, RuntimeError):
        # torch knows the name of the kind, and has no module for it
        present = False
    if not present:
        raise invalid("device", "be on this machine", repr(str(name)), f"Leave it out to compute {place}.")
    return device


def default_workspace(memory: int, *, alone: bool = True) -> int:
    """Bytes that the tiles of a loss may use on a device of `memory` bytes.

    A sixty-fourth; on one GPU (`alone`) a thirty-second, up to what bf16 exponentials of 32,768² pairs need, if
    that is more: they are then kept for the backward, on an H100 as on an H200.
    """
    return max(memory // 64, min(memory // 32, MOST_OF_ONE_GPU) if alone else 0)


def free_memory(device: torch.device | None) -> tuple[int, int]:
    """Bytes that can still be allocated, torch's unused reserve included, and all bytes that this process may have.

    On a CUDA device within `torch.cuda.set_per_process_memory_fraction`; else of the machine, or of the container
    around this process.
    """
    if device is None or device.type != "cuda":
        return _host_memory()
    # the fraction is known only of a device with an index
    device = with_index(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    total = int(min(1.0, torch.cuda.get_per_process_memory_fraction(device)) * total)
    return max(0, min(free + reserved, total) - allocated), total


def allocated(device: torch.device | None) -> int:
    """Bytes of tensors on a CUDA device, in whole blocks; 0 on a CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device is not None and device.type == "cuda" else 0


def _host_memory() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        entries = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(entries["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        # other systems do not report it; half is a guess on the safe side
        free = total // 2
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free, total
    return (free, total) if most == "max" else (max(0, min(free, int(most) - used)), min(total, int(most)))


def usable_cpus(group: Path = Path("/sys/fs/cgroup")) -> float:
    """CPUs that this process may use: those it is bound to, or its container's share of them."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return float(bound)
    return float(bound) if quota == "max" else min(float(bound), int(quota) / int(period))


def stream(batches: Sequence[Sequence[Tensor | None]], device: torch.device | None) -> Iterator[list[Tensor | None]]:
    """The tensors of each sub-batch, on the device, in their order.

    On a CUDA device those of the next sub-batch are copied meanwhile, on a stream of their own; the copy runs beside
    the computation if the host memory is pinned.
    """
    in_place = device is None or device.type != "cuda"
    # no sub-batches: every graph was kept, and nothing is encoded again
    if in_place or all(rows is None or rows.device == device for batch in batches for rows in batch):
        for batch in batches:
            yield [None if rows is None else _move(rows, device) for rows in batch]
        return
    copies = torch.cuda.Stream(device)

    def fetch(batch: Sequence[Tensor | None]) -> tuple[list[Tensor | None], torch.cuda.Event]:
        with torch.cuda.stream(copies):
            rows = [None if rows is None else _move(rows, device) for rows in batch]
            return rows, copies.record_event()

    ahead = fetch(batches[0])
    for following in [*batches[1:], None]:
        present, copied = ahead
        if following is not None:
            ahead = fetch(following)
        computing = torch.cuda.current_stream(device)
        computing.wait_event(copied)
        for tensor in present:
            if tensor is not None:
                # keep its memory until the computation has read it
                tensor.record_stream(computing)
        yield present


def _move(rows: Tensor, device: torch.device | None) -> Tensor:
    return rows if device is None else rows.to(device, non_blocking=True)


def host_room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised host memory; pinned where there is a CUDA device to copy from."""
    # the default device may be another one
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())


def on_accelerator(x: Tensor) -> bool:
    """Return whether the tensor lies in other memory than the host's."""
    return x.device.type not in ("cpu", "meta")


def settle(device: torch.device | None) -> None:
    """Wait until the device has finished its work, copies to the host included."""
    if device is not None and device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        # mps has no streams
        (module.current_stream(device) if hasattr(module, "current_stream") else module).synchronize()


class BlockStream:
    """Blocks of rows in host memory, copied to the device in turn with their accumulators, which may be copied back.

    On a CUDA device there are two slots: while one block is computed with, the next is copied in and the last one's
    accumulators are copied out, each on a stream of its own; the copies run beside the computation where host memory is
    pinned. On other devices every copy is done at once.
    """

    def __init__(
        self, tensors: Sequence[Tensor], rows: int, device: torch.device, *, width: int = 0,
        wide: torch.dtype = torch.float32, totals: Tensor | None = None,
    ) -> None:  # fmt: skip
        """tensors: one at least, [n, ...] each. width: numbers of an accumulator's row. wide: the accumulators' dtype.

        totals: [n, width] in host memory, the accumulators between two sweeps.
        """
        self.tensors, self.device, self.width, self.wide, self.totals = tensors, device, width, wide, totals
        n = len(tensors[0])
        self.bounds = [(start, min(start + rows, n)) for start in range(0, n, rows)]
        # one stream for copies in, one for copies out
        self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None
        self.slots: list[tuple[list[Tensor], Tensor]] = []
        # events after which a slot may be written again, and after which a block's accumulators are on the host
        self.free: dict[int, list[torch.cuda.Event]] = {}
        self.stored: dict[int, torch.cuda.Event] = {}
        for slot in range(2 if self.streams else 0):
            self.slots.append(self._memory(min(rows, n)))
            # earlier kernels may still use this memory
            self.free[slot] = [torch.cuda.current_stream(device).record_event()]

    def sweep(self, *, fresh: bool) -> Iterator[tuple[int, Bounds, list[Tensor], Tensor]]:
        """Visit every block once: index, bounds, its tensors, and accumulators, which are zeros if `fresh`."""
        loaded = [self._load(0, fresh)] if self.bounds else []
        try:
            for index, bounds in enumerate(self.bounds):
                block, totals, arrived = loaded.pop()
                if index + 1 < len(self.bounds):
                    loaded.append(self._load(index + 1, fresh))
                if arrived is not None:
                    torch.cuda.current_stream(self.device).wait_event(arrived)
                yield index, bounds, block, totals
                if self.streams is not None:
                    done = torch.cuda.current_stream(self.device).record_event()
                    self.free[index % 2] = [done, *self._stored(index)]
        finally:
            if loaded and self.streams is not None:
                # after an error the slots' memory may be reused before the copy into it has ended
                torch.cuda.current_stream(self.device).wait_stream(self.streams[0])

    def write_back(self, block: Tensor, to: Tensor, index: int | None = None) -> None:
        """Copy a block to the host. index: that of the block whose accumulators it has, loaded again after the copy."""
        if self.streams is None:
            to.copy_(block)
            return
        _, outgoing = self.streams
        outgoing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(outgoing):
            to.copy_(block, non_blocking=True)
            block.record_stream(outgoing)
            if index is not None:
                self.stored[index] = outgoing.record_event()

    def finish(self) -> None:
        """Wait until all blocks that were written back are on the host."""
        if self.streams is not None:
            self.streams[1].synchronize()

    def _memory(self, rows: int) -> tuple[list[Tensor], Tensor]:
        """Memory on the device for a block and its accumulators."""
        block = [torch.empty(rows, *x.shape[1:], dtype=x.dtype, device=self.device) for x in self.tensors]
        return block, torch.empty(rows, self.width, dtype=self.wide, device=self.device)

    def _load(self, index: int, fresh: bool) -> tuple[list[Tensor], Tensor, torch.cuda.Event | None]:
        """Start copying a block and its accumulators; return them and the event of their arrival."""
        start, stop = self.bounds[index]
        if self.streams is None:
            return *self._fill(self._memory(stop - start), start, stop, fresh), None
        incoming, _ = self.streams
        for event in [*self.free[index % 2], *self._stored(index)]:
            incoming.wait_event(event)
        block, totals = self.slots[index % 2]
        with torch.cuda.stream(incoming):
            memory = [x[: stop - start] for x in block], totals[: stop - start]
            return *self._fill(memory, start, stop, fresh), incoming.record_event()

    def _fill(
        self, memory: tuple[list[Tensor], Tensor], start: int, stop: int, fresh: bool
    ) -> tuple[list[Tensor], Tensor]:
        block, totals = memory
        for rows, x in zip(block, self.tensors, strict=True):
            rows.copy_(x[start:stop], non_blocking=True)
        if fresh or self.totals is None:
            totals.zero_()
        else:
            totals.copy_(self.totals[start:stop], non_blocking=True)
        return block, totals

    def _stored(self, index: int) -> list[torch.cuda.Event]:
        return [self.stored[index]] if index in self.stored else []
