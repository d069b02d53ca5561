"""The machine and the choices of "auto" on it as plain values.

Stands above train/, whose choices it reports. `contrastile doctor` prints it. It needs torch alone.
"""

import importlib.metadata
import platform
import re
from typing import Any

import torch

from contrastile._dispatch import EXCHANGES, automatic_exchange, gathering_allowed, offers, workspace_on
from contrastile.distributed.neighbours import reach_each_other
from contrastile.exchange.base import Layout
from contrastile.exchange.gather import Gather
from contrastile.gradcache.memory import spare_bytes
from contrastile.losses.base import PairLoss, Shard
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.offload import free_memory, usable_cpus
from contrastile.train.provenance import versions

Values = dict[str, Any]

LOSSES: dict[str, PairLoss] = {"clip": Softmax(symmetric=True), "siglip": Sigmoid()}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# optional packages outside the extras, by their names on PyPI
OPTIONAL = ("triton", "timm", "open_clip_torch", "faiss-cpu", "peft")
# side of the matrices whose product tests a device
TEST_SIDE = 64


def examine(
    *, ranks: int = 1, batch: int = 32_768, features: int = 512, dtype: torch.dtype = torch.float32,
    host: bool = False, rows: int | None = None,
) -> Values:  # fmt: skip
    """Return versions, devices and choices for a global `batch` over `ranks`.

    dtype: of the loss's products. host: its features wait in host memory. rows: those of the loss over all ranks, where
    `batch` columns are more.

    >>> values = examine()
    >>> values["devices"][0]["name"], broken(values)
    ('cpu', [])
    """
    devices = [_device(name) for name in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count())))]
    working = [torch.device(device["name"]) for device in devices if device["broken"] is None]
    (free, total), distributed = free_memory(None), torch.distributed
    nccl = distributed.is_available() and distributed.is_nccl_available()
    system: Values = {name: versions()[name] for name in ("contrastile", "python")}
    system |= {"system": f"{platform.system()} {platform.machine()}", "cpus": usable_cpus()}
    return {
        "system": system | {"memory": total, "free": free},
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
            "gloo": distributed.is_available() and distributed.is_gloo_available(),
            "threads": torch.get_num_threads(),
        },
        "packages": _packages(),
        "devices": devices,
        "auto": [
            {
                "device": str(device),
                "backends": [
                    {"loss": name, "dtype": str(dtype).removeprefix("torch."), **backend_choice(loss, dtype, device)}
                    for name, loss in LOSSES.items()
                    for dtype in DTYPES
                ],
                "exchange": exchange_choice(ranks, batch, features, dtype, device, host=host, rows=rows),
                "workspace": workspace_on(device, None, alone=True),
                "room": spare_bytes(device),
            }
            for device in working
        ],
    }


def broken(values: Values) -> list[str]:
    return [f"{device['name']}: {device['broken']}" for device in values["devices"] if device["broken"] is not None]


def _packages() -> Values:
    """Installed versions by extra and outside the extras; None for a package that is not installed."""
    names: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("contrastile") or ():
        match = re.match(r"([A-Za-z0-9._-]+).*extra == ['\"](\w+)['\"]", line)
        if match is not None and match[2] != "dev":
            names.setdefault(match[2], []).append(match[1])
    names["beside"] = [*OPTIONAL]
    return {extra: {name: versions(name).get(name) for name in several} for extra, several in names.items()}


def _device(name: str) -> Values:
    device = torch.device(name)
    values: Values = {"name": name, "broken": device_fault(device)}
    if values["broken"] is None:
        values["free"], values["memory"] = free_memory(device)
        if device.type == "cuda":
            values["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
            values["model"] = torch.cuda.get_device_name(device)
    return values


def device_fault(device: torch.device) -> str | None:
    """Multiply two matrices on the device; return the failure in one line, None if there is none."""
    try:
        ones = torch.ones(TEST_SIDE, TEST_SIDE, device=device)
        right = (ones @ ones).sum().item() == TEST_SIDE**3
    except Exception as failure:
        return (str(failure).splitlines() or [type(failure).__name__])[0]
    return None if right else "a product of two matrices comes out wrong"


def backend_choice(loss: PairLoss, dtype: torch.dtype, device: torch.device) -> Values:
    """The backend "auto" takes for features of a dtype, and the reasons of those that declined."""
    shard = Shard(torch.zeros(2, 8, dtype=dtype, device=device), diagonal=0)
    declined: dict[str, str] = {}
    for name, tiles, reason in offers(loss, shard, shard):
        if tiles is not None:
            return {"takes": name, "declined": declined}
        declined[name] = str(reason)
    return {"takes": None, "declined": declined}


def exchange_choice(
    ranks: int, batch: int, features: int, dtype: torch.dtype, device: torch.device, *, host: bool = False,
    rows: int | None = None,
) -> Values:  # fmt: skip
    """The exchange "auto" takes between ranks of one node, and the bytes of a gather; rows: as in `examine`."""
    if ranks == 1 or host:
        return {"takes": "single" if ranks == 1 else "ring", "ranks": ranks}
    of_rows, of_cols = (tuple(n // ranks + (rank < n % ranks) for rank in range(ranks)) for n in (rows or batch, batch))
    layout = Layout(None, 0, of_rows, of_cols)
    allowed, reached = gathering_allowed(device), device.type == "cuda" and reach_each_other(device, range(ranks))
    takes = automatic_exchange(layout, features, dtype, allowed, lambda: reached)
    sizes = {"ranks": ranks, "batch": batch, "features": features, "dtype": str(dtype).removeprefix("torch.")}
    # copies need buffers, which a large batch exceeds
    buffers = (each(layout, features, dtype) for each in (EXCHANGES[takes].kept_bytes, EXCHANGES[takes].staged_bytes))
    sizes["copied"] = reached and any(buffers)
    return {"takes": takes, **sizes, "gathered": Gather.extra_bytes(layout, features, dtype), "allowed": allowed}
