"""Who is measured: the dense formula and the public packages that compute the same losses.

Stands beside `measure.py`; `loss.py` lets them run. A peer is imported when it runs, called the way its documentation
says, and left out by name where it is not installed or cannot take the problem. None is a dependency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.bench.measure import Machine
from contrastile.losses.dense import dense_clip, dense_sigmoid

# (q, k, scale), and the bias where the loss has one
Loss = Callable[..., Tensor]

HALVES = ("bfloat16", "float16")
ALL = (*HALVES, "float32", "float64")
# bytes that plain autograd holds for a pair at its peak: four or five matrices in float32
DENSE_BYTES = 20
# and where each direction has logits of its own
TWICE_DENSE_BYTES = 26
ANY_NUMBER = 2**62


@dataclass(frozen=True)
class Case:
    """A problem: random unit features [b, d] on both sides, and what is asked of contrastile.

    workspaces: contrastile runs once with each; None is its own default. precision: of float32 products, in torch's
    words.
    """

    loss: str
    b: int
    d: int
    dtype: str
    workspaces: tuple[int | None, ...] = (None,)
    precision: str = "highest"


@dataclass(frozen=True)
class Contestant:
    """Somebody's losses, by name.

    most_rows: above it a step takes so long that it is not worth the wait. pair_bytes: memory per pair of rows.
    package: where it is installed under another name.
    """

    name: str
    backend: str
    losses: Mapping[str, Loss]
    dtypes: tuple[str, ...] = ALL
    most_rows: int = ANY_NUMBER
    pair_bytes: int = 0
    only_on: str | None = None
    missing: Callable[[], str | None] = lambda: None
    package: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} ({self.backend})"

    def declines(self, case: Case, machine: Machine) -> str | None:
        """Why it does not take part; None if it does."""
        missing = self.missing()
        if missing:
            return missing
        if self.only_on not in (None, machine.device.type):
            return f"needs a {self.only_on} device"
        if case.b > self.most_rows:
            return f"left out above {self.most_rows:,} rows, where it is slow"
        need, room = self.pair_bytes * case.b**2, machine.room()
        if need > room:
            return f"needs about {need / 2**30:,.0f} GiB at {case.b:,} rows, and {room / 2**30:,.0f} GiB are free"
        return None

    def offers(self, case: Case) -> bool:
        return case.loss in self.losses and case.dtype in self.dtypes


def _autocast(loss: Loss, q: Tensor, *others: Tensor) -> Tensor:
    """As in training under autocast: 16-bit products, the cross-entropy in float32."""
    with torch.autocast(q.device.type, dtype=q.dtype):
        return loss(q, *others)


def _two_products(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """As OpenCLIP's class writes it: each direction's logits from a product of its own, 12 · b² · d operations."""
    labels = _diagonal(q)
    return (F.cross_entropy(scale * q @ k.T, labels) + F.cross_entropy(scale * k @ q.T, labels)) / 2


def _wide_logits(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """As one writes it who keeps the logits' digits: the product in 16 bits, what comes after it in float32."""
    logits, labels = scale * (q @ k.T).float(), _diagonal(q)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def _dense_infonce(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(scale * q @ k.T, _diagonal(q))


def _diagonal(q: Tensor) -> Tensor:
    return torch.arange(len(q), device=q.device)


def _torch_one_way(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(scale * q, k, _diagonal(q), options=options)


def _cut_one_way(q: Tensor, k: Tensor, scale: Tensor, *, exact: bool) -> Tensor:
    loss = import_module("cut_cross_entropy").linear_cross_entropy
    # by default it leaves out gradients that are small each, and not small in their sum
    return loss(scale * q, k, _diagonal(q), **({"filter_eps": None} if exact else {}))


def _inf_one_way(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    # its own `scale` argument needs a process group
    return import_module("inf_cl").cal_inf_loss(scale * q, k)


def _inf_across(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return import_module("inf_cl").cal_inf_loss(q, k, scale=scale)


def _open_clip_alone(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return _autocast(import_module("open_clip").ClipLoss(), q, k, scale)


def _open_clip_siglip_alone(q: Tensor, k: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return _autocast(import_module("open_clip.loss").SigLipLoss(), q, k, scale, bias)


def _open_clip(q: Tensor, k: Tensor, scale: Tensor, *, rank: int, world: int) -> Tensor:
    """The way its own documentation recommends for many ranks."""
    make = import_module("open_clip").ClipLoss
    loss = make(local_loss=True, gather_with_grad=True, rank=rank, world_size=world)
    return _autocast(loss, q, k, scale)


def _open_clip_siglip(q: Tensor, k: Tensor, scale: Tensor, bias: Tensor, *, rank: int, world: int) -> Tensor:
    loss = import_module("open_clip.loss").SigLipLoss(rank=rank, world_size=world)
    return _autocast(loss, q, k, scale, bias)


def _siglip_kernel(q: Tensor, k: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return import_module("siglip_kernel").fused_siglip_loss(q, k, scale.log(), bias)


def _twice(one_way: Loss, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return (one_way(q, k, scale) + one_way(k, q, scale)) / 2


def _both(one_way: Loss) -> dict[str, Loss]:
    """What a one-way loss can be called for."""
    return {"clip": partial(_twice, one_way), "infonce": one_way}


def not_installed(module: str) -> str | None:
    """Why what needs a module does not take part; None where it is there."""
    return None if find_spec(module) else "is not installed"


def _not_in_torch() -> str | None:
    known = hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")
    return None if known else f"is not in torch {torch.__version__}"


FORMULAS: dict[str, Loss] = {"clip": dense_clip, "infonce": _dense_infonce, "siglip": dense_sigmoid}
# the first that runs is the one that others are compared with
DENSE = (
    Contestant(
        "dense",
        "autocast",
        {name: partial(_autocast, loss) for name, loss in FORMULAS.items()},
        dtypes=HALVES,
        pair_bytes=DENSE_BYTES,
    ),
    Contestant("dense", "one dtype", FORMULAS, pair_bytes=DENSE_BYTES),
    Contestant(
        "dense",
        "two products",
        {"clip": partial(_autocast, _two_products)},
        dtypes=HALVES,
        pair_bytes=TWICE_DENSE_BYTES,
    ),
    Contestant("dense", "float32 logits", {"clip": _wide_logits}, dtypes=HALVES, pair_bytes=TWICE_DENSE_BYTES),
)
PEERS = (
    Contestant(
        "open_clip",
        "one process",
        {"clip": _open_clip_alone, "siglip": _open_clip_siglip_alone},
        dtypes=HALVES,
        pair_bytes=TWICE_DENSE_BYTES,
        missing=partial(not_installed, "open_clip"),
    ),
    Contestant(
        "linear_cross_entropy",
        "torch",
        _both(_torch_one_way),
        most_rows=2**16,
        missing=_not_in_torch,
    ),
    Contestant(
        "cut-cross-entropy",
        "default",
        _both(partial(_cut_one_way, exact=False)),
        dtypes=HALVES,
        most_rows=2**16,
        only_on="cuda",
        missing=partial(not_installed, "cut_cross_entropy"),
    ),
    Contestant(
        "cut-cross-entropy",
        "exact",
        _both(partial(_cut_one_way, exact=True)),
        dtypes=HALVES,
        most_rows=2**16,
        only_on="cuda",
        missing=partial(not_installed, "cut_cross_entropy"),
    ),
    Contestant(
        "inf-cl",
        "triton",
        _both(_inf_one_way),
        most_rows=2**15,
        only_on="cuda",
        missing=partial(not_installed, "inf_cl"),
    ),
    Contestant(
        "siglip-kernel",
        "auto",
        {"siglip": _siglip_kernel},
        only_on="cuda",
        missing=partial(not_installed, "siglip_kernel"),
    ),
)


def rank_peers(rank: int, world: int) -> tuple[Contestant, ...]:
    """Those that compute the loss of a batch shared by ranks; each rank gets the mean over its own rows."""
    return (
        Contestant(
            "inf-cl",
            "ring",
            _both(_inf_across),
            only_on="cuda",
            missing=partial(not_installed, "inf_cl"),
        ),
        Contestant(
            "open_clip",
            "local loss, gathered gradients",
            {
                "clip": partial(_open_clip, rank=rank, world=world),
                "siglip": partial(_open_clip_siglip, rank=rank, world=world),
            },
            dtypes=HALVES,
            # two matrices of a rank's rows and all columns, of a logit in 16 bits and its float32 gradient
            pair_bytes=max(1, 17 // world),
            missing=partial(not_installed, "open_clip"),
            package="open_clip_torch",
        ),
    )
