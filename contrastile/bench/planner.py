"""The machine and the choices of "auto" on it, and a recipe's memory before its run begins, all as plain values.

Stands above train/, whose choices it reports. `contrastile doctor` prints it. Without a recipe it needs torch alone.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable
from itertools import islice, product
from math import ceil
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor

from contrastile._dispatch import automatic_exchange, gathering_allowed, offers, workspace_on
from contrastile.exchange.base import Layout
from contrastile.exchange.gather import Gather
from contrastile.gradcache.memory import bytes_per_example, spare_bytes
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
# approximate bytes of optimizer state per trained parameter
OPTIMIZER_BYTES = {"adamw": 8, "adafactor": 4, "muon": 4}
# side of the matrices whose product tests a device
TEST_SIDE = 64


def examine(*, ranks: int = 1, batch: int = 32_768, features: int = 512, recipe: Any = None) -> Values:
    """Return versions, devices and choices for a global `batch` over `ranks`, and the plan of a `recipe`.

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
        "auto": [_choices(device, ranks, batch, features) for device in working],
        "recipe": None if recipe is None else _recipe_plan(recipe, ranks),
    }


def broken(values: Values) -> list[str]:
    """Return one sentence per broken device."""
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


def _choices(device: torch.device, ranks: int, batch: int, features: int) -> Values:
    """The choices of "auto" on a device."""
    cases = [(name, loss, dtype) for name, loss in LOSSES.items() for dtype in DTYPES]
    return {
        "device": str(device),
        "backends": [
            {"loss": name, "dtype": str(dtype).removeprefix("torch."), **backend_choice(loss, dtype, device)}
            for name, loss, dtype in cases
        ],
        "exchange": exchange_choice(ranks, batch, features, torch.float32, device),
        "workspace": workspace_on(device, None),
        "room": spare_bytes(device),
    }


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
    ranks: int, batch: int, features: int, dtype: torch.dtype, device: torch.device, *, keys: int = 1
) -> Values:
    """The exchange "auto" takes between ranks, for `keys` keys per query of the batch, and the bytes of a gather."""
    if ranks == 1:
        return {"takes": "single", "ranks": 1}
    rows = tuple(batch // ranks + (rank < batch % ranks) for rank in range(ranks))
    layout = Layout(None, 0, rows, tuple(keys * count for count in rows))
    sizes = {"ranks": ranks, "batch": keys * batch, "features": features}
    needs = {"gathered": Gather.extra_bytes(layout, features, dtype), "allowed": gathering_allowed(device)}
    return {"takes": automatic_exchange(layout, features, dtype, device), **sizes, **needs}


def _recipe_plan(recipe: Any, ranks: int) -> Values:
    """The memory of a recipe's run on its device. Builds the towers on the CPU and encodes two examples with each."""
    from contrastile.train.run import choose_device

    device, batch = choose_device(recipe.device), max(count for _, count in recipe.train.batch)
    model, sides, features = _sides(recipe.model_copy(update={"device": "cpu"}), ceil(batch / ranks))
    keys, graphs = sides[-1]["examples"] // ceil(batch / ranks), sum(side["graphs"] for side in sides)
    needed, room = sum(side["graphs"] * side["graph"] for side in sides), spare_bytes(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    loss = LOSSES.get(getattr(recipe.loss, "kind", "infonce"), Softmax())
    dtype = torch.float64 if recipe.train.precision == "float64" else torch.float32
    backend: Values = {"takes": recipe.loss.backend, "declined": {}}
    exchange: Values = {"takes": recipe.loss.exchange}
    if backend["takes"] == "auto":
        backend = backend_choice(loss, dtype, device)
    if exchange["takes"] == "auto":
        exchange = exchange_choice(ranks, batch, features, dtype, device, keys=keys)
    return {
        "name": recipe.name,
        "device": str(device),
        "parameters": parameters,
        "trained": trained,
        "learned_tokens": _learned_tokens(recipe.model.tokenizer),
        # float32 weights of all parameters, gradients and optimizer state of the trained ones
        "held": 4 * parameters + (4 + OPTIMIZER_BYTES[recipe.optim.kind]) * trained,
        "batch": batch,
        "sides": sides,
        "graphs": graphs,
        "needed": needed,
        "room": room,
        "fitting": graphs if needed <= room else int(graphs * room / needed),
        "retain": recipe.train.retain,
        "matrix": 4 * batch * batch * keys,
        "backend": backend,
        "exchange": exchange,
        "workspace": workspace_on(device, None),
    }


def _sides(recipe: Any, batch: int) -> tuple[torch.nn.Module, list[Values], int]:
    """The model of a recipe, the sub-batches of each side for a rank's `batch` queries, and the feature size."""
    from contrastile.train.config import Recipe
    from contrastile.train.retriever.run import build_retriever_run
    from contrastile.train.run import build_run

    data, cut, settings = recipe.data, recipe.train.sub_batch, recipe.model.tokenizer
    build: Callable[..., Any] = build_run if isinstance(recipe, Recipe) else build_retriever_run
    run = build(recipe, _tokenizer(settings))
    # each side's examples per query, examples per sub-batch, and the size of an example
    if isinstance(recipe, Recipe):
        pixels = (data.channels, data.image_size, data.image_size)
        texts = cut.at_once("text", settings.length)
        sides = {"image": (1, cut.image, pixels), "text": (1, texts, settings.length)}
    else:
        lengths = {"query": (1, settings.query_length), "passage": (data.positives + data.negatives, settings.length)}
        sides = {name: (each, cut.at_once(name, length), length) for name, (each, length) in lengths.items()}
    plans = []
    for name, (each, most, size) in sides.items():
        encoder, features, examples = getattr(run.model, f"encode_{name}"), 0, each * batch

        def forward(n: int, size: Any = size, encoder: Callable[..., Tensor] = encoder) -> Tensor:
            if isinstance(size, tuple):
                return encoder(torch.zeros(n, *size))
            return encoder(**run.tokenizer.tokenise(["a " * size] * n, size))

        with run.autocast():
            activations, features = max(0, bytes_per_example(forward, 2)), forward(1).shape[1]
        sub_batch = min(most, examples)
        plan = {"name": name, "examples": examples, "sub_batch": sub_batch, "activations": activations}
        plans.append({**plan, "graph": activations * sub_batch, "graphs": ceil(examples / sub_batch)})
    return run.model, plans, features


def _tokenizer(settings: Any) -> Any:
    """The recipe's tokenizer; one that the run would train on its texts is trained on as many made-up words."""
    from contrastile.models.text import load_tokenizer, train_tokenizer
    from contrastile.models.timm_openclip import clip_tokenizer

    if (tokens := _learned_tokens(settings)) is not None:
        words = map("".join, islice(product(ascii_lowercase, repeat=5), tokens))
        return train_tokenizer(words, size=tokens, length=settings.length)
    if settings.folder is not None:
        return load_tokenizer(Path(settings.folder), length=settings.length)
    return clip_tokenizer(settings.length)


def _learned_tokens(settings: Any) -> int | None:
    """The most tokens a tokenizer may learn from the run's texts; None for a ready one."""
    return None if settings.folder is not None or settings.kind == "open_clip" else int(settings.size)
