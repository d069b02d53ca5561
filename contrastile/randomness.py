"""The random numbers that an encoder draws: where each generator stood, so that a second pass draws them again.

Ground of the house. Four kinds are kept: torch's on the CPU, those of the devices in use, generators that a module has
as an attribute, and the two of the process, Python's `random` and NumPy's. Threads share the last two, and they are
slow to read, so they are set back only where something was drawn.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Shared(Protocol):
    """A generator of the process. `state(last)` is `last` itself if nothing was drawn since; None: it is not there."""

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


# what NumPy's default generator holds: 624 words, and which is next
_WORDS, _PLACE = 624 * 4, 4


class _NumPyState(NamedTuple):
    # as it lies in memory, which is read a hundred times as fast; None where the generator is another one
    raw: bytes | None
    whole: dict[str, Any]


class _NumPy:
    """The functions of the module `numpy.random`, if somebody has loaded it."""

    def state(self, last: Any = None) -> Any:
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return None
        raw = self._raw(numpy)
        # a normal number that waits for its turn is drawn without a change there
        if last is not None and raw is not None and raw == last.raw and not last.whole["has_gauss"]:
            return last
        whole = numpy.get_state(legacy=False)
        known = raw is not None and raw[:_WORDS] == whole["state"]["key"].tobytes()
        now = _NumPyState(raw if known else None, whole)
        return last if last is not None and _equal(now.whole, last.whole) else now

    def set(self, state: Any) -> None:
        sys.modules["numpy.random"].set_state(state.whole)

    def begin(self, seed: int) -> None:
        sys.modules["numpy.random"].seed([seed >> 32, seed % 2**32])

    def _raw(self, numpy: Any) -> bytes | None:
        bits = numpy.get_bit_generator()
        if type(bits).__name__ != "MT19937":
            return None
        return ctypes.string_at(bits.ctypes.state_address, _WORDS + _PLACE)


def _equal(one: Any, other: Any) -> bool:
    """Whether two states of a generator are the same: numbers, words, arrays, and dicts of them."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


PROCESS: tuple[Shared, ...] = (_Python(), _NumPy())


class Own(NamedTuple):
    """A generator that belongs to a module: how it is read, and how it is set."""

    read: Callable[[], Any]
    set: Callable[[Any], None]


def _own_kinds() -> dict[type, Callable[[Any], Own]]:
    kinds: dict[type, Callable[[Any], Own]] = {
        torch.Generator: lambda g: Own(g.get_state, g.set_state),
        random.Random: lambda g: Own(g.getstate, g.setstate),
    }
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kinds[numpy.RandomState] = lambda g: Own(lambda: g.get_state(legacy=False), g.set_state)
        kinds[numpy.Generator] = lambda g: Own(
            lambda: g.bit_generator.state, lambda state: setattr(g.bit_generator, "state", state)
        )
    return kinds


def own_generators(modules: Iterable[nn.Module]) -> list[Own]:
    """The generators that are attributes of the modules."""
    kinds = _own_kinds()
    found = {id(value): value for module in modules for value in vars(module).values() if type(value) in kinds}
    return [kinds[type(value)](value) for value in found.values()]


@dataclass(frozen=True)
class RandomState:
    """Where the generators stood."""

    cpu: Tensor
    devices: dict[torch.device, Tensor]
    own: Sequence[tuple[Own, Any]] = ()
    process: dict[Shared, Any] = field(default_factory=dict)

    @classmethod
    def capture(
        cls,
        *devices: torch.device | None,
        own: Iterable[Own] = (),
        process: Iterable[Shared] = PROCESS,
        last: RandomState | None = None,
    ) -> RandomState:
        """As it is now; a device of None is none, such as the CPU itself. `last`: the capture before this one."""
        elsewhere = [device for device in devices if device is not None and device.type not in ("cpu", "meta")]
        before = {} if last is None else last.process
        states = {generator: generator.state(before.get(generator)) for generator in process}
        return cls(
            torch.get_rng_state(),
            {device: torch.get_device_module(device).get_rng_state(device) for device in elsewhere},
            [(generator, generator.read()) for generator in own],
            {generator: state for generator, state in states.items() if state is not None},
        )

    def same(self, other: RandomState) -> bool:
        """Whether nothing was drawn between two captures, the second of which knows the first as its last."""
        return (
            torch.equal(self.cpu, other.cpu)
            and all(torch.equal(x, other.devices[at]) for at, x in self.devices.items())
            and all(other.process.get(generator) is state for generator, state in self.process.items())
        )

    def drew_own(self, before: RandomState) -> bool:
        """Whether something was drawn from a module's own generators between two captures of them."""
        return any(not _equal(now, was) for (_, now), (_, was) in zip(self.own, before.own, strict=True))

    def drawn(self, following: RandomState) -> RandomState:
        """Without those of the process that nobody drew from until the following capture, which knows this one."""
        kept = {g: state for g, state in self.process.items() if following.process.get(g) is not state}
        return replace(self, process=kept)

    def restore(self) -> None:
        """From here on the same numbers are drawn as after the capture."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
        for generator, state in self.own:
            generator.set(state)
        for shared, state in self.process.items():
            # what another thread draws meanwhile is not drawn twice for nothing
            if shared.state(state) is not state:
                shared.set(state)


def begin_random(device: torch.device | None, seed: int, process: Iterable[Shared] = ()) -> None:
    """Begins new random numbers on the CPU, on the device in use, and in those of the process."""
    for shared in process:
        shared.begin(seed)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        # mps is one, and has no context of its own
        with getattr(module, "device", nullcontext)(device):
            module.manual_seed(seed)
