"""Host memory: devices with their index, streaming, free bytes."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contrastile.gradcache.rng import begin_random
from contrastile.offload import free_memory, settle, stream, with_index

GROUP = "/sys/fs/cgroup/memory"


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert with_index("cuda") == torch.device("cuda", 3)
    assert with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert with_index("cpu") == torch.device("cpu")
    assert with_index("meta") == torch.device("meta")


def test_a_device_type_without_index_and_streams_is_supported(monkeypatch):
    """torch.mps is one: it has a generator, and can be synchronised."""
    asked = []
    alone = SimpleNamespace(manual_seed=asked.append, synchronize=lambda: asked.append("waited"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: alone)
    assert with_index("mps") == torch.device("mps", 0)
    settle(torch.device("mps", 0))
    begin_random(torch.device("mps", 0), 7)
    assert asked == ["waited", 7]


def test_without_sub_batches_nothing_is_copied():
    assert list(stream([], torch.device("cuda", 0))) == []


@pytest.mark.parametrize(
    ("files", "free", "share"),
    [
        # 8 GiB available on a machine; half of everything where the system does not say
        ({"/proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 8388608 kB"}, lambda total: 8 * 2**30, 1.0),
        ({}, lambda total: total // 2, 1.0),
        # a container of 64 MiB that has used 40
        ({f"{GROUP}.max": f"{2**26}\n", f"{GROUP}.current": str(40 * 2**20)}, lambda _: 24 * 2**20, 0.0),
        # and one without a limit
        ({f"{GROUP}.max": "max\n", f"{GROUP}.current": "7"}, lambda total: total // 2, 1.0),
    ],
    ids=["a machine", "another system", "a container", "no limit"],
)
def test_free_memory_is_the_machines_or_the_containers(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: Callable[[int], int], share: float
) -> None:
    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found, total = free_memory(None)
    assert found == free(everything)
    assert total == (everything if share else 2**26)
