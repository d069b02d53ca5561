"""The plain formula and the public packages that compute the same losses.

Stands on `harness.py`; `loss.py` runs them. A peer is imported when it runs, called as its documentation says, and left
out by name where it is not installed or cannot take the problem. None is a dependency.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.bench.harness import Machine, not_installed
from contrastile.losses.reference import dense_clip, dense_sigmoid

# (q, k, scale), and the bias where the loss has one
Loss = Callable[..., Tensor]

HALVES = ("bfloat16", "float16")
ALL = (*HALVES, "float32", "float64")
# peak bytes of plain autograd per pair: four or five matrices in float32
DENSE_BYTES = 20
# the same where each direction has logits of its own
TWICE_DENSE_BYTES = 26
ANY_NUMBER = 2**62
# rows of a label
OF_A_LABEL = 4


@dataclass(frozen=True)
class Case:
    """A problem: random unit features [b, d] on both sides, and the settings of contrastile.

    workspaces: contrastile runs once with each; None is its own default. precision: of float32 products, in torch's
    words.
    """

    loss: str
    b: int
    d: int
    dtype: str
    workspaces: tuple[int | None, ...] = (None,)
    precision: str = "highest"

    def __str__(self) -> str:
        precise = f", precision {self.precision}" if self.dtype == "float32" and self.precision != "highest" else ""
        return f"{self.loss}, {self.b} x {self.d}, {self.dtype}{precise}"


@dataclass(frozen=True)
class Contestant:
    """An implementation of losses, by name.

    most_rows: above it a step takes too long to wait for. pair_bytes: memory per pair of rows. only_on: the type of
    device it needs. module: the one it is imported from. package: its name on PyPI where that differs. world: ranks
    that share the batch; 1 is the whole batch on each. frugal: contrastile's loss with the least workspace, by which
    `loss.py` finds `beside_bytes`.
    """

    name: str
    backend: str
    losses: Mapping[str, Loss]
    dtypes: tuple[str, ...] = ALL
    most_rows: int = ANY_NUMBER
    pair_bytes: float = 0
    only_on: str | None = None
    module: str = ""
    package: str = ""
    world: int = 1
    frugal: Loss | None = None

    @property
    def label(self) -> str:
        return f"{self.name} ({self.backend})"

    def absent(self, machine: Machine) -> str | None:
        """Return the reason why it is not there; None if it is."""
        needs = None if self.only_on in (None, machine.device.type) else f"needs a {self.only_on} device"
        return not_installed(self.module) or needs

    def declines(self, case: Case, machine: Machine) -> str | None:
        """Return the reason why it cannot take part; None if it can."""
        if absent := self.absent(machine):
            return absent
        if case.b > self.most_rows:
            return f"left out above {self.most_rows:,} rows, where it is slow"
        need, room = self.pair_bytes * case.b**2, machine.free_bytes()
        if need > room:
            return f"needs about {need / 2**30:,.0f} GiB at {case.b:,} rows, and {room / 2**30:,.0f} GiB are free"
        return None

    def offers(self, case: Case) -> bool:
        return case.loss in self.losses and case.dtype in self.dtypes


def autocast_of(q: Tensor) -> torch.autocast:
    """Autocast to the dtype of features in 16 bits."""
    return torch.autocast(q.device.type, dtype=q.dtype, enabled=q.dtype != torch.float32)


def under_autocast(loss: Loss, q: Tensor, *others: Tensor) -> Tensor:
    """Training under autocast: 16-bit products, the cross-entropy in float32."""
    with autocast_of(q):
        return loss(q, *others)


def both_directions(rows: Tensor, columns: Tensor) -> Tensor:
    """The mean of two cross-entropies of logits, whose targets are the first diagonal."""
    labels = _diagonal(rows)
    return (F.cross_entropy(rows, labels) + F.cross_entropy(columns, labels)) / 2


def _diagonal(q: Tensor) -> Tensor:
    return torch.arange(len(q), device=q.device)


@lru_cache(maxsize=1)
def _of_one_kind(loss: Loss, _kinds: tuple[Any, ...]) -> Loss:
    """The loss compiled for tensors of these kinds: torch compiles one function for few, then runs it as it is."""
    torch.compiler.reset()
    return torch.compile(loss, dynamic=False)


def _compiled(loss: Loss, *leaves: Tensor) -> Tensor:
    return under_autocast(_of_one_kind(loss, tuple([(x.shape, x.dtype) for x in leaves])), *leaves)


def _wide_logits(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """The product in 16 bits, logits and cross-entropy in float32."""
    logits = scale * (q @ k.T).float()
    return both_directions(logits, logits.T)


def _trained(module: str, name: str, **how: Any) -> Loss:
    """The loss of a package's class under autocast, as its users train with it."""
    return lambda *leaves: under_autocast(getattr(import_module(module), name)(**how), *leaves)


def labels_of(x: Tensor, before: int = 0) -> Tensor:
    """Labels [b] of rows, `OF_A_LABEL` of each; before: rows of the batch that are before these."""
    return torch.arange(before, before + len(x), device=x.device) // OF_A_LABEL


def _siglip_plus(q: Tensor, k: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Its mean over all pairs times the rows. With the number of labels it waits for no device."""
    plus, labels = import_module("siglip_kernel").fused_siglip_plus_loss, labels_of(q)
    return len(q) * plus(q, k, scale.log(), bias, labels, labels, num_groups=-(-len(q) // OF_A_LABEL))


def _twice(one_way: Loss, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return (one_way(q, k, scale) + one_way(k, q, scale)) / 2


def _both(one_way: Loss) -> dict[str, Loss]:
    """The two losses that a one-way loss computes."""
    return {"clip": partial(_twice, one_way), "infonce": one_way}


def _cut(q: Tensor, k: Tensor, scale: Tensor, **options: None) -> Tensor:
    return import_module("cut_cross_entropy").linear_cross_entropy(scale * q, k, _diagonal(q), **options)


def _of_torch(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return F.linear_cross_entropy(scale * q, k, _diagonal(q), options=torch.nn.LinearCrossEntropyOptions())


FORMULAS: dict[str, Loss] = {
    "clip": dense_clip,
    "infonce": lambda q, k, scale: F.cross_entropy(scale * q @ k.T, _diagonal(q)),
    "siglip": dense_sigmoid,
}
TWO_PRODUCTS = partial(_twice, FORMULAS["infonce"])
_dense = partial(Contestant, "dense", pair_bytes=DENSE_BYTES)
_dense_twice = partial(Contestant, "dense", dtypes=HALVES, pair_bytes=TWICE_DENSE_BYTES)
# others are compared with the first that runs
DENSE = (
    _dense("autocast", {name: partial(under_autocast, loss) for name, loss in FORMULAS.items()}, HALVES),
    _dense("one dtype", FORMULAS),
    _dense("compiled", {name: partial(_compiled, loss) for name, loss in FORMULAS.items()}, HALVES, only_on="cuda"),
    # OpenCLIP's formula: each direction's logits from a product of its own, 12 · b² · d operations
    _dense_twice("two products", {"clip": partial(under_autocast, TWO_PRODUCTS)}),
    _dense_twice("float32 logits", {"clip": _wide_logits}),
)
# new versions of torch have one
_linear = partial(Contestant, "linear_cross_entropy", "torch", most_rows=2**16)
OF_TORCH = [_linear(_both(_of_torch))] if hasattr(torch.nn, "LinearCrossEntropyOptions") else []
_open_clip = partial(Contestant, "open_clip", dtypes=HALVES, module="open_clip")
_cut_on_gpu = partial(
    Contestant, "cut-cross-entropy", dtypes=HALVES, most_rows=2**16, only_on="cuda", module="cut_cross_entropy"
)
_inf_cl = partial(Contestant, "inf-cl", only_on="cuda", module="inf_cl")
_siglip_kernel = partial(Contestant, "siglip-kernel", only_on="cuda", module="siglip_kernel")
PEERS = (
    _open_clip(
        "one process", {"clip": _trained("open_clip", "ClipLoss"), "siglip": _trained("open_clip.loss", "SigLipLoss")},
        pair_bytes=TWICE_DENSE_BYTES,
    ),
    *OF_TORCH,
    _cut_on_gpu("default", _both(_cut)),
    # the default drops gradients that are each small, but not small in their sum
    _cut_on_gpu("exact", _both(partial(_cut, filter_eps=None))),
    # the `scale` argument of Inf-CL's function needs a process group
    _inf_cl("triton", _both(lambda q, k, scale: import_module("inf_cl").cal_inf_loss(scale * q, k)), most_rows=2**15),
    _siglip_kernel("auto", {
        "siglip": lambda q, k, scale, bias: import_module("siglip_kernel").fused_siglip_loss(q, k, scale.log(), bias),
        "siglip_balanced": _siglip_plus,
    }),
)  # fmt: skip


def rank_peers(rank: int, world: int) -> tuple[Contestant, ...]:
    """Return the peers for a batch shared by ranks, which give each rank the mean over its own rows."""
    ranks: dict[str, Any] = {"rank": rank, "world_size": world}

    def siglip(way: str, *leaves: Tensor) -> Tensor:
        return import_module("siglip_kernel").DistributedSigLIPLoss(strategy=way, **ranks)(*leaves)

    # as its documentation recommends for many ranks
    clip = _trained("open_clip", "ClipLoss", local_loss=True, gather_with_grad=True, **ranks)
    return (
        _inf_cl(
            "ring", _both(lambda q, k, scale: import_module("inf_cl").cal_inf_loss(q, k, scale=scale)), most_rows=2**18
        ),
        *(_siglip_kernel(way, {"siglip": partial(siglip, way)}) for way in ("gather", "ring")),
        # two matrices of a rank's rows and all columns, each a logit in 16 bits with its float32 gradient
        _open_clip(
            "local loss, gathered gradients",
            {"clip": clip, "siglip": _trained("open_clip.loss", "SigLipLoss", **ranks)},
            pair_bytes=max(1, 17 // world), package="open_clip_torch",
        ),
    )  # fmt: skip
