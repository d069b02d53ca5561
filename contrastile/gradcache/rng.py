"""Random generators: their states before each sub-batch, so that a second pass draws the same numbers.

Used by both passes of `encode` and by `tiles/scored.py`. Four kinds are captured: torch's on the CPU, those of the
devices in use, generators that are attributes of a module, and the two of the process, Python's `random` and NumPy's.
Threads share the last two, so they are restored only if something was drawn from them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Generator(NamedTuple):
    """Functions that read the state of a random generator and set it."""

    read: Callable[[], Any]
    set: Callable[[Any], None]


def _process_generators() -> dict[str, Generator]:
    """The generators that all threads share: Python's, and NumPy's if it was imported."""
    generators = {"random": Generator(random.getstate, random.setstate)}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        generators["numpy"] = Generator(partial(numpy.get_state, legacy=False), numpy.set_state)
    return generators


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states of a generator are equal: numbers, strings, arrays, or dicts of these."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def own_generators(modules: Iterable[nn.Module]) -> list[Generator]:
    """The generators that are attributes of the modules."""
    kinds: dict[type, Callable[[Any], Generator]] = {
        torch.Generator: lambda g: Generator(g.get_state, g.set_state),
        random.Random: lambda g: Generator(g.getstate, g.setstate),
    }
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kinds[numpy.RandomState] = lambda g: Generator(partial(g.get_state, legacy=False), g.set_state)
        kinds[numpy.Generator] = lambda g: Generator(
            lambda: g.bit_generator.state, partial(setattr, g.bit_generator, "state")
        )
    # most modules have none, which one look at their types shows
    own = (vars(m).values() for m in modules if not kinds.keys().isdisjoint(map(type, vars(m).values())))
    generators = {id(value): value for values in own for value in values if type(value) in kinds}
    return [kinds[type(value)](value) for value in generators.values()]


@dataclass(frozen=True)
class RandomState:
    """States of all generators at one moment."""

    cpu: Tensor
    devices: dict[torch.device, Tensor]
    own: Sequence[tuple[Generator, Any]] = ()
    # states of the process's generators, by name
    process: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def capture(
        cls, *devices: torch.device | None, own: Iterable[Generator] = (), process: Iterable[str] | None = None,
        last: RandomState | None = None,
    ) -> RandomState:  # fmt: skip
        """The states now, of all devices but None and the CPU.

        process: names of the process's generators, by default all. last: the capture before; a state of the process's
        generators that equals its own is the same object.
        """
        states = {name: g.read() for name, g in _process_generators().items() if process is None or name in process}
        for name, before in (last.process if last is not None else {}).items():
            if name in states and _equal(states[name], before):
                states[name] = before
        accelerators = [device for device in devices if device is not None and device.type not in ("cpu", "meta")]
        return cls(
            torch.get_rng_state(),
            {device: torch.get_device_module(device).get_rng_state(device) for device in accelerators},
            [(generator, generator.read()) for generator in own],
            states,
        )

    def same(self, other: RandomState) -> bool:
        """Return whether nothing was drawn between this capture and `other`, which had it as `last`."""
        return (
            torch.equal(self.cpu, other.cpu)
            and all(torch.equal(state, other.devices[device]) for device, state in self.devices.items())
            and all(other.process.get(name) is state for name, state in self.process.items())
        )

    def drew_own(self, before: RandomState) -> bool:
        """Return whether something was drawn from the modules' own generators between two captures."""
        return any(not _equal(now, was) for (_, now), (_, was) in zip(self.own, before.own, strict=True))

    def drawn(self, following: RandomState) -> RandomState:
        """This capture without those generators of the process that drew nothing until the following capture."""
        used = {name: state for name, state in self.process.items() if following.process.get(name) is not state}
        return replace(self, process=used)

    def restore(self) -> None:
        """Set the generators back, so that the same numbers are drawn as after the capture."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
        for generator, state in self.own:
            generator.set(state)
        generators = _process_generators() if self.process else {}
        for name, state in self.process.items():
            # leave it alone if possible: another thread may have drawn from it
            if not _equal(generators[name].read(), state):
                generators[name].set(state)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore the state at the end, as if nothing had been drawn inside."""
        try:
            yield
        finally:
            self.restore()


def begin_random(device: torch.device | None, seed: int, process: Iterable[str] = ()) -> None:
    """Seed the generators of the CPU, of the device in use, and those of the process that are named."""
    for name in process:
        if name == "random":
            random.seed(seed)
        else:
            sys.modules["numpy.random"].seed([seed >> 32, seed % 2**32])
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        # mps has no context of its own
        with getattr(module, "device", nullcontext)(device):
            module.manual_seed(seed)
