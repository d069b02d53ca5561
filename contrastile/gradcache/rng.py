"""Random generators: their states before each sub-batch, so that a second pass draws the same numbers.

Used by both passes of `encode` and by `tiles/scored.py`. Four kinds are captured: torch's on the CPU, those of the
devices in use, generators that a module has as an attribute, and the two of the process, Python's `random` and NumPy's.
Threads share the last two, so they are set back only where something was drawn.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class ProcessGenerator(Protocol):
    """A generator of the process. `state` returns `last` itself if nothing was drawn since; None if there is none."""

    def state(self, last: Any = None) -> Any: ...
    def set(self, state: Any) -> None: ...
    def begin(self, seed: int) -> None: ...


class _Python:
    """The functions of the module `random`."""

    def state(self, last: Any = None) -> Any:
        now = random.getstate()
        return last if now == last else now

    def set(self, state: Any) -> None:
        random.setstate(state)

    def begin(self, seed: int) -> None:
        random.seed(seed)


class _NumPy:
    """The functions of the module `numpy.random`, if it was imported."""

    def state(self, last: Any = None) -> Any:
        numpy = sys.modules.get("numpy.random")
        now = None if numpy is None else numpy.get_state(legacy=False)
        return last if last is not None and _equal(now, last) else now

    def set(self, state: Any) -> None:
        sys.modules["numpy.random"].set_state(state)

    def begin(self, seed: int) -> None:
        sys.modules["numpy.random"].seed([seed >> 32, seed % 2**32])


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states of a generator are the same: numbers, words, arrays, and dicts of them."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


PROCESS: tuple[ProcessGenerator, ...] = (_Python(), _NumPy())


class ModuleGenerator(NamedTuple):
    """A generator that belongs to a module: functions that read its state and set it."""

    read: Callable[[], Any]
    set: Callable[[Any], None]


def _kinds() -> dict[type, Callable[[Any], ModuleGenerator]]:
    kinds: dict[type, Callable[[Any], ModuleGenerator]] = {
        torch.Generator: lambda g: ModuleGenerator(g.get_state, g.set_state),
        random.Random: lambda g: ModuleGenerator(g.getstate, g.setstate),
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kinds[numpy.RandomState] = lambda g: ModuleGenerator(lambda: g.get_state(legacy=False), g.set_state)
        kinds[numpy.Generator] = lambda g: ModuleGenerator(
            lambda: g.bit_generator.state, lambda state: setattr(g.bit_generator, "state", state)
        )
    return kinds


def own_generators(modules: Iterable[nn.Module]) -> list[ModuleGenerator]:
    """The generators that are attributes of the modules."""
    kinds = _kinds()
    generators = {id(value): value for module in modules for value in vars(module).values() if type(value) in kinds}
    return [kinds[type(value)](value) for value in generators.values()]


@dataclass(frozen=True)
class RandomState:
    """States of all generators at one moment."""

    cpu: Tensor
    devices: dict[torch.device, Tensor]
    own: Sequence[tuple[ModuleGenerator, Any]] = ()
    process: dict[ProcessGenerator, Any] = field(default_factory=dict)

    @classmethod
    def capture(
        cls,
        *devices: torch.device | None,
        own: Iterable[ModuleGenerator] = (),
        process: Iterable[ProcessGenerator] = PROCESS,
        last: RandomState | None = None,
    ) -> RandomState:
        """The states now; None and the CPU among the devices are skipped. `last`: the capture before."""
        accelerators = [device for device in devices if device is not None and device.type not in ("cpu", "meta")]
        before = {} if last is None else last.process
        states = {generator: generator.state(before.get(generator)) for generator in process}
        return cls(
            torch.get_rng_state(),
            {device: torch.get_device_module(device).get_rng_state(device) for device in accelerators},
            [(generator, generator.read()) for generator in own],
            {generator: state for generator, state in states.items() if state is not None},
        )

    def same(self, other: RandomState) -> bool:
        """Return whether nothing was drawn between this capture and another that was given it as its last."""
        return (
            torch.equal(self.cpu, other.cpu)
            and all(torch.equal(x, other.devices[at]) for at, x in self.devices.items())
            and all(other.process.get(generator) is state for generator, state in self.process.items())
        )

    def drew_own(self, before: RandomState) -> bool:
        """Return whether something was drawn from a module's own generators between two captures of them."""
        return any(not _equal(now, was) for (_, now), (_, was) in zip(self.own, before.own, strict=True))

    def drawn(self, following: RandomState) -> RandomState:
        """This capture without those of the process that nobody drew from until the following one."""
        used = {g: state for g, state in self.process.items() if following.process.get(g) is not state}
        return replace(self, process=used)

    def restore(self) -> None:
        """Set the generators back, so that the same numbers are drawn as after the capture."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
        for generator, state in self.own:
            generator.set(state)
        for shared, state in self.process.items():
            # numbers that another thread drew meanwhile are not drawn twice without need
            if shared.state(state) is not state:
                shared.set(state)


@contextmanager
def restoring(state: RandomState) -> Iterator[None]:
    """Restore a state at the end, so that draws inside leave no trace."""
    try:
        yield
    finally:
        state.restore()


def begin_random(device: torch.device | None, seed: int, process: Iterable[ProcessGenerator] = ()) -> None:
    """Seed the generators of the CPU, of the device in use, and those of the process."""
    for shared in process:
        shared.begin(seed)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        # mps has no context of its own
        with getattr(module, "device", nullcontext)(device):
            module.manual_seed(seed)
