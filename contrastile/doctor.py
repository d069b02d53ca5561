"""What a machine has, and what "auto" would choose on it and why: for `contrastile doctor`.

Above the training, whose choices it asks for; nothing here decides anything. `examine` gives plain values, `told` the
lines that people read. Without a recipe it needs torch alone.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contrastile._choose import automatic_exchange, gathering_allowed, offers
from contrastile._sweep import workspace_on
from contrastile.exchange.base import Shards
from contrastile.exchange.gather import Gather
from contrastile.losses.base import PairLoss, Side
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.offload import free_memory, usable_cpus
from contrastile.retention import bytes_per_example, spare_bytes
from contrastile.train.log import size

Found = dict[str, Any]

LOSSES: dict[str, PairLoss] = {"clip": Softmax(symmetric=True), "siglip": Sigmoid()}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# packages that are used where they are there, by what pip calls them
PEERS = ("triton", "timm", "open_clip_torch", "faiss-cpu", "peft")
# bytes of an optimizer's state for a trained parameter, about
STATES = {"adamw": 8, "adafactor": 4, "muon": 4}
# what torch and the machine are tried with
TRIAL = 64


def examine(*, ranks: int = 1, batch: int = 32_768, features: int = 512, recipe: Any = None) -> Found:
    """Everything about this machine, as plain values; of the batch of all `ranks`, and of a `recipe`.

    >>> found = examine()
    >>> found["devices"][0]["name"], broken(found)
    ('cpu', [])
    """
    devices = [_device(device) for device in _all_devices()]
    return {
        "system": _system(),
        "torch": _torch(),
        "packages": _packages(),
        "devices": devices,
        "auto": [_auto(torch.device(one["name"]), ranks, batch, features) for one in devices if one["broken"] is None],
        "recipe": None if recipe is None else _of_recipe(recipe, ranks),
    }


def broken(found: Found) -> list[str]:
    """What does not work, a sentence each."""
    return [f"{device['name']}: {device['broken']}" for device in found["devices"] if device["broken"] is not None]


def _all_devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def _system() -> Found:
    free, total = free_memory(None)
    return {
        "contrastile": importlib.metadata.version("contrastile"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": usable_cpus(),
        "memory": total,
        "free": free,
    }


def _torch() -> Found:
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "threads": torch.get_num_threads(),
    }


def _packages() -> Found:
    """By extra, and those beside: each package's version, None where it is not installed."""
    extras: dict[str, dict[str, str | None]] = {}
    for line in importlib.metadata.requires("contrastile") or ():
        told = re.match(r"([A-Za-z0-9._-]+).*extra == ['\"](\w+)['\"]", line)
        if told is not None and told[2] != "dev":
            extras.setdefault(told[2], {})[told[1]] = _version(told[1])
    return {**extras, "beside": {name: _version(name) for name in PEERS}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: torch.device) -> Found:
    found: Found = {"name": str(device), "broken": tried(device)}
    if found["broken"] is not None:
        return found
    free, total = free_memory(device)
    found |= {"memory": total, "free": free}
    if device.type == "cuda":
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        found |= {"model": torch.cuda.get_device_name(device), "capability": capability}
    return found


def tried(device: torch.device) -> str | None:
    """Whether torch can allocate and compute there: None, or what happened instead."""
    try:
        ones = torch.ones(TRIAL, TRIAL, device=device)
        right = (ones @ ones).sum().item() == TRIAL**3
    except Exception as failure:
        return (str(failure).splitlines() or [type(failure).__name__])[0]
    return None if right else "a product of two matrices comes out wrong"


def _auto(device: torch.device, ranks: int, batch: int, features: int) -> Found:
    """What "auto" takes on a device."""
    backends = [
        {"loss": name, "dtype": str(dtype).removeprefix("torch."), **backend_of(loss, dtype, device)}
        for name, loss in LOSSES.items()
        for dtype in DTYPES
    ]
    return {
        "device": str(device),
        "backends": backends,
        "exchange": exchange_of(ranks, batch, features, torch.float32, device),
        "workspace": workspace_on(device, None),
        "room": spare_bytes(device),
    }


def backend_of(loss: PairLoss, dtype: torch.dtype, device: torch.device) -> Found:
    """What "auto" takes for features of this type, and why the ones before it decline."""
    side = Side(torch.zeros(2, 8, dtype=dtype, device=device), diagonal=0)
    declined: dict[str, str] = {}
    for name, tiles, reason in offers(loss, side, side):
        if tiles is not None:
            return {"takes": name, "declined": declined}
        declined[name] = str(reason)
    return {"takes": None, "declined": declined}


def exchange_of(
    ranks: int, batch: int, features: int, dtype: torch.dtype, device: torch.device, *, each: int = 1
) -> Found:
    """What "auto" takes between so many ranks, `each` example of the batch with so many keys; what gathering costs."""
    if ranks == 1:
        return {"takes": "single", "ranks": 1}
    rows = tuple(batch // ranks + (rank < batch % ranks) for rank in range(ranks))
    shards = Shards(None, 0, rows, tuple(each * count for count in rows))
    return {
        "takes": automatic_exchange(shards, features, dtype, device),
        "ranks": ranks,
        "batch": each * batch,
        "features": features,
        "gathered": Gather.extra_bytes(shards, features, dtype),
        "allowed": gathering_allowed(device),
    }


class StandIn:
    """In the place of a tokenizer that is only trained when a run begins: as many words, none of them known."""

    pad = 0

    def __init__(self, size: int, length: int) -> None:
        self.vocabulary_size, self.length = size, length

    def tokenise(self, texts: Any, length: int | None = None) -> dict[str, Tensor]:
        """Words of the right shape."""
        ids = torch.ones(len(texts), length or self.length, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def save(self, folder: Path) -> None:
        """Nothing is kept of it."""


@dataclass(frozen=True)
class Tower:
    """One side of a step: so many of its examples for each of the batch, encoded `at_once`, each of so many bytes."""

    name: str
    each: int
    at_once: int
    bytes: int

    def cut(self, batch: int) -> Found:
        """How a rank's share of a batch goes through it."""
        examples = self.each * batch
        sub_batch = min(self.at_once, examples)
        return {
            "name": self.name,
            "examples": examples,
            "sub_batch": sub_batch,
            "activations": self.bytes,
            "graph": self.bytes * sub_batch,
            "graphs": ceil(examples / sub_batch),
        }


def _of_recipe(recipe: Any, ranks: int) -> Found:
    """What a recipe's run would use on its device; its towers are built, and shown two examples, on the CPU."""
    from contrastile.train.checkpoint import choose_device
    from contrastile.train.config import Recipe

    device = choose_device(recipe.device)
    on_cpu = recipe.model_copy(update={"device": "cpu"})
    model, towers, features = (_pictures if isinstance(recipe, Recipe) else _texts)(on_cpu)
    largest = max(count for _, count in recipe.train.batch)
    sides = [tower.cut(ceil(largest / ranks)) for tower in towers]
    graphs, keys = sum(side["graphs"] for side in sides), towers[-1].each
    needed, room = sum(side["graphs"] * side["graph"] for side in sides), spare_bytes(device)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    kind = getattr(recipe.loss, "kind", "infonce")
    loss = LOSSES.get(kind, Softmax())
    backend, exchange = recipe.loss.backend, recipe.loss.exchange
    dtype = torch.float64 if recipe.train.precision == "float64" else torch.float32
    return {
        "name": recipe.name,
        "device": str(device),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": trained,
        "learned_tokens": _learned_tokens(recipe.model.tokenizer),
        # weights, their gradients, and what the optimizer keeps
        "held": (8 + STATES[recipe.optim.kind]) * trained + 4 * (sum(p.numel() for p in model.parameters()) - trained),
        "batch": largest,
        "sides": sides,
        "graphs": graphs,
        "needed": needed,
        "room": room,
        "fitting": graphs if needed <= room else int(graphs * room / needed),
        "retain": recipe.train.retain,
        "matrix": 4 * largest * largest * keys,
        "backend": backend_of(loss, dtype, device) if backend == "auto" else {"takes": backend, "declined": {}},
        "exchange": {"takes": exchange}
        if exchange != "auto"
        else exchange_of(ranks, largest, features, dtype, device, each=keys),
        "workspace": workspace_on(device, None),
    }


def _tokenizer(settings: Any) -> Any:
    from contrastile.models.openclip import clip_tokenizer
    from contrastile.models.text import load_tokenizer

    if (tokens := _learned_tokens(settings)) is not None:
        return StandIn(tokens, settings.length)
    if settings.folder is not None:
        return load_tokenizer(Path(settings.folder), length=settings.length)
    return clip_tokenizer(settings.length)


def _learned_tokens(settings: Any) -> int | None:
    """How many tokens a tokenizer may learn from the run's texts, which may have fewer; None of a ready one."""
    return None if settings.folder is not None or settings.kind == "open_clip" else int(settings.size)


def _pictures(recipe: Any) -> tuple[torch.nn.Module, list[Tower], int]:
    """The model, its two towers, and the size of their features."""
    from contrastile.train.checkpoint import build_run

    run, data, cut = build_run(recipe, _tokenizer(recipe.model.tokenizer)), recipe.data, recipe.train.sub_batch

    def image(count: int) -> Tensor:
        return run.model.encode_image(torch.zeros(count, data.channels, data.image_size, data.image_size))

    def text(count: int) -> Tensor:
        return run.model.encode_text(**run.tokenizer.tokenise([""] * count))

    texts = cut.texts_at_once(recipe.model.tokenizer.length)
    with run.autocast():
        towers = [Tower("image", 1, cut.image, _weighed(image)), Tower("text", 1, texts, _weighed(text))]
        return run.model, towers, text(1).shape[1]


def _texts(recipe: Any) -> tuple[torch.nn.Module, list[Tower], int]:
    """The same of a retriever: a query, and its passages, of full length."""
    from contrastile.train.retriever.run import build_retriever_run

    settings, cut = recipe.model.tokenizer, recipe.train.sub_batch
    run, shown = build_retriever_run(recipe, _tokenizer(settings)), recipe.data.positives + recipe.data.negatives
    towers = []
    with run.autocast():
        for side, each, length in (("query", 1, settings.query_length), ("passage", shown, settings.length)):
            encoder = getattr(run.model, f"encode_{side}")

            def forward(count: int, encoder: Any = encoder, length: int = length) -> Tensor:
                return encoder(**run.tokenizer.tokenise([""] * count, length))

            towers.append(Tower(side, each, cut.at_once(side, length), _weighed(forward)))
        return run.model, towers, forward(1).shape[1]


def _weighed(forward: Any) -> int:
    return max(0, bytes_per_example(forward, 2))


def told(found: Found) -> Iterator[str]:
    """The same in lines."""
    system, torch_ = found["system"], found["torch"]
    yield f"contrastile {system['contrastile']}, Python {system['python']}, {system['system']}"
    nccl = f", NCCL {torch_['nccl']}" if torch_["nccl"] else ", no NCCL"
    yield f"torch {torch_['version']}, CUDA {torch_['cuda'] or 'none'}{nccl}, {torch_['threads']} threads"
    yield f"{system['cpus']:g} CPUs, {size(system['free'])} of {size(system['memory'])} memory free"
    for device in found["devices"]:
        if device["broken"] is not None:
            yield f"{device['name']}: BROKEN: {device['broken']}"
        elif "model" in device:
            memory = f"{size(device['free'])} of {size(device['memory'])} free"
            yield f"{device['name']}: {device['model']}, compute capability {device['capability']}, {memory}"
    for extra, packages in found["packages"].items():
        there = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        absent = [name for name, version in packages.items() if not version]
        remedy = ", ".join(absent) if extra == "beside" else f'{", ".join(absent)}: pip install "contrastile[{extra}]"'
        yield f"[{extra}] {there or 'nothing'}" + (f"; not installed: {remedy}" if absent else "")
    for auto in found["auto"]:
        yield ""
        yield from _auto_told(auto)
    if found["recipe"] is not None:
        yield ""
        yield from _recipe_told(found["recipe"])


def _auto_told(auto: Found) -> Iterator[str]:
    yield f'"auto" on {auto["device"]}:'
    by_choice: dict[str, list[str]] = {}
    for one in auto["backends"]:
        by_choice.setdefault(_choice_told(one), []).append(f"{one['loss']} {one['dtype']}")
    for choice, cases in by_choice.items():
        yield f"  backend {choice} (for {', '.join(cases)})"
    if not auto["device"].startswith("cuda"):
        yield "  not asked here: triton, for NVIDIA devices; dense, by its name alone, because it holds the matrix"
    yield f"  exchange {_exchange_told(auto['exchange'])}"
    yield f"  workspace {size(auto['workspace'])}: 1/64 of the device's memory"
    yield f"  retain, sub_batch: {size(auto['room'])} to share among graphs"


def _choice_told(choice: Found) -> str:
    return choice["takes"] + "".join(f"; {name} declined: {reason}" for name, reason in choice["declined"].items())


def _exchange_told(exchange: Found) -> str:
    if "gathered" not in exchange:
        alone = exchange.get("ranks") == 1
        return exchange["takes"] + (": one process; --ranks N asks for more" if alone else ": the recipe says so")
    needs = f"gathering {exchange['batch']:,} rows of {exchange['features']} takes {size(exchange['gathered'])} a rank"
    return f"{exchange['takes']} between {exchange['ranks']} ranks: {needs}, allowed is {size(exchange['allowed'])}"


def _recipe_told(recipe: Found) -> Iterator[str]:
    yield f"{recipe['name']} on {recipe['device']}:"
    millions = [f"{recipe[key] / 1e6:.1f}" for key in ("parameters", "trained")]
    held = f"weights, gradients and optimizer take about {size(recipe['held'])}"
    tokens = recipe["learned_tokens"]
    limit = "" if tokens is None else f", with all {tokens:,} tokens that its tokenizer may learn"
    yield f"  {millions[0]} million parameters, {millions[1]} of them trained{limit}"
    yield f"  {held}"
    yield f"  batch {recipe['batch']:,}:"
    for side in recipe["sides"]:
        graph = f"{size(side['activations'])} of activations an example, {size(side['graph'])} a sub-batch"
        yield f"    {side['name']}: {side['examples']:,} a rank in sub-batches of {side['sub_batch']:,}: {graph}"
    fits = f"about {recipe['fitting']:,} of {recipe['graphs']:,} graphs fit"
    yield f"  retain = {recipe['retain']}: {fits}" + ("" if recipe["fitting"] else "; not even one: lower sub_batch")
    yield f"  loss: backend {_choice_told(recipe['backend'])}; exchange {_exchange_told(recipe['exchange'])}"
    yield f"  workspace {size(recipe['workspace'])}, where the whole matrix would take {size(recipe['matrix'])}"
