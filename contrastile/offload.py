"""What waits where: sub-batches come from host memory to the device while the present one computes.

Ground of the house, used by `cache.py`. On a machine without an accelerator everything here is a plain cut of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Bounds = tuple[int, int]


def numbered(device: torch.device | str) -> torch.device:
    """The device with its index: "cuda" is the current one, and tensors on it say "cuda:0"."""
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def stream(
    leaves: Sequence[Tensor | None], bounds: Sequence[Bounds], device: torch.device | None
) -> Iterator[list[Tensor | None]]:
    """The rows start … stop − 1 of all leaves, on the device, for each of the bounds in their order.

    On a CUDA device the rows of the next bounds are copied on a stream of their own meanwhile; the copy runs beside the
    computation if the host memory is pinned.
    """
    here = device is None or device.type != "cuda" or all(leaf is None or leaf.device == device for leaf in leaves)
    # no bounds: every graph was kept, and nothing is encoded again
    if here or not bounds:
        for start, stop in bounds:
            yield [None if leaf is None else _move(leaf[start:stop], device) for leaf in leaves]
        return
    copies = torch.cuda.Stream(device)

    def fetch(start: int, stop: int) -> tuple[list[Tensor | None], torch.cuda.Event]:
        with torch.cuda.stream(copies):
            cut = [None if leaf is None else _move(leaf[start:stop], device) for leaf in leaves]
            return cut, copies.record_event()

    ahead = fetch(*bounds[0])
    for following in [*bounds[1:], None]:
        present, copied = ahead
        if following is not None:
            ahead = fetch(*following)
        computing = torch.cuda.current_stream(device)
        computing.wait_event(copied)
        for tensor in present:
            if tensor is not None:
                # its memory must not be given away while the computation still reads it
                tensor.record_stream(computing)
        yield present


def _move(rows: Tensor, device: torch.device | None) -> Tensor:
    return rows if device is None else rows.to(device, non_blocking=True)
