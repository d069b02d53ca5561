"""Late interaction on a GPU: whole losses beside peers, from host memory, and across ranks.

The script behind the tables of late interaction in docs/kernels.md and docs/host_features.md. Needs a CUDA device:

    python benchmarks/maxsim.py [--csv FILE] [--parts losses shapes host]
    torchrun --standalone --nproc-per-node 4 benchmarks/maxsim.py --parts ranks [--csv FILE]

Peers are timed where they can be imported. TFLOP/s count 2 · pairs · tokens · tokens · features operations, whatever
is computed; the product is 8192³ in bf16 in the same minute. `make test-gpu` compares results with float64.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import contrast
from contrastile.bench.gate import step
from contrastile.bench.harness import Machine, Report, Step, Table, not_installed, script
from contrastile.bench.peers import both_directions
from contrastile.losses import Softmax
from contrastile.scorers import MaxSim

SIZES_OF = ("queries", "documents", "query_tokens", "document_tokens", "d")
TABLE = Table(
    f"what 12 | impl=implementation 56 | {' | '.join(SIZES_OF)} | dtype | ms >9.3f | least_ms=least >9.3f"
    " | tflops=TFLOP/s >8.1f | product_tflops=product >8.1f | peak_mib=MiB >9,.1f"
)
# queries, documents, tokens of each, features
Size = tuple[int, int, int, int, int]
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", HALF: "fp16", FULL: "fp32"}
SCALE = 20.0
# pairs up to which peers are timed
MOST_PEER = 4096**2
# module and function of a peer, from tokens to scores
PEERS = {
    "late-interaction-kernels": ("late_interaction_kernels", "maxsim"),
    "flash-maxsim": ("flash_maxsim", "flash_maxsim_batched_train"),
}
# seconds of each call
SECONDS = 0.15
Loss = Callable[[Tensor, Tensor], Tensor]


def pages(n: int, D: int = 128) -> Size:
    """As many queries of 32 tokens as documents of 180."""
    return n, n, 32, 180, D


LARGE = pages(4096), pages(16384)
# by part: what rows say, and the problems; the peers take longest at the last one
PROBLEMS: dict[str, tuple[str, list[tuple[Size, torch.dtype]]]] = {
    "losses": ("loss", [(x, BF16) for x in (pages(128), pages(1024), (64, 64, 1024, 1024, 128), LARGE[1], LARGE[0])]),
    # other sizes, features and types
    "shapes": ("shape", [
        *((pages(n), BF16) for n in (32, 64, 256)), *((pages(1024, D), BF16) for D in (64, 96, 256)),
        (pages(1024), HALF), (pages(128), FULL), (pages(512), FULL),
        ((16, 16, 1024, 1024, 128), BF16), ((256, 256, 1024, 1024, 128), BF16),
    ]),
}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    machine: Machine
    report: Report

    def measure(self, what: str, impl: str, size: Size, call: Step, dtype: torch.dtype = BF16) -> None:
        with self.report.failures(f"{what}, {impl}", judged=True):
            timing = self.machine.race({impl: call})[impl]
            self.report.result({
                "what": what, "impl": impl, **dict(zip(SIZES_OF, size, strict=True)), "dtype": NAMES[dtype],
                "ms": round(timing.ms, 4), "least_ms": round(timing.least_ms, 4),
                "tflops": round(2e-9 * math.prod(size) / timing.ms, 1),
                "product_tflops": round(timing.product_rate / 1e12, 1),
                "peak_mib": round(self.machine.peak(call) / 2**20, 1),
            })  # fmt: skip

    def alone(self, part: str) -> None:
        """Whole symmetric losses, forward and with both gradients, ours and the peers'."""
        what, problems = PROBLEMS[part]
        for size, dtype in problems:
            q, k = (x.to(dtype).requires_grad_() for x in tokens(size))
            N, J, L, M, D = size
            label = f"{N} x {J}, {L} x {M} tokens"
            if (D, dtype) != (128, BF16):
                label += f", d = {D}, {NAMES[dtype]}"
            for name, loss in self.implementations(size):
                self.measure(f"{what} + grads", f"{name}, {label}", size, partial(step, loss, [q, k]), dtype)
                forward = torch.no_grad()(partial(loss, q, k))
                self.measure(what, f"{name}, {label}", size, forward, dtype)

    def host(self) -> None:
        """Losses of vectors in pinned host memory, with their gradients, beside those of resident ones."""
        ways = (("symmetric", Softmax(symmetric=True)), ("one way", Softmax()))
        for size, (way, kind), place in product(LARGE, ways, ("resident", "host")):
            pair = (x if place == "resident" else x.cpu().pin_memory() for x in tokens(size))
            call = partial(step, partial(ours, loss=kind, device="cuda"), [x.requires_grad_() for x in pair])
            self.measure("loss + grads", f"{place}, {way}, {size[0]} x {size[1]}", size, call)

    def ranks(self) -> None:
        """Symmetric losses of a batch that the ranks share, with their gradients, by each exchange."""
        rank, W = self.machine.world.rank, self.machine.world.size
        for size in LARGE[::-1]:
            N, J, *others = size
            pair = [x.requires_grad_() for x in tokens((N // W, J // W, *others), seed=rank)]
            for exchange in ("gather", "ring") if W > 1 else ("single",):
                call = partial(step, partial(ours, exchange=exchange), pair)
                self.measure("loss + grads", f"{W} ranks, {exchange}, {N} x {J}", size, call)

    def implementations(self, size: Size) -> Iterator[tuple[str, Loss]]:
        yield "contrastile", ours
        yield "one way", partial(ours, loss=Softmax())
        for name, (module, function) in PEERS.items() if size[0] * size[1] <= MOST_PEER else ():
            if reason := not_installed(module):
                self.report.note(f"{name}: {reason}")
            else:
                with self.report.failures(name, judged=False):
                    scores = getattr(import_module(module), function)
                    yield name, lambda q, k, scores=scores: clip(scores(q, k))


def ours(q: Tensor, k: Tensor, **how: object) -> Tensor:
    return contrast(q, k, scorer=MaxSim(), scale=SCALE, **how)


def clip(scores: Tensor) -> Tensor:
    x = scores.float() * SCALE
    return both_directions(x, x.T)


def tokens(size: Size, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit vectors of queries and documents; each query's document has its tokens, with noise."""
    N, J, L, M, D = size
    torch.manual_seed(seed)
    q, k = torch.randn(N, L, D, device="cuda"), torch.randn(J, M, D, device="cuda")
    count = min(N, J)
    k[:count, : min(L, M)] += q[:count, : min(L, M)]
    return F.normalize(q, dim=-1).bfloat16(), F.normalize(k, dim=-1).bfloat16()


def main() -> None:
    parts = {"nargs": "+", "choices": (*PROBLEMS, "host", "ranks"), "default": ["losses"]}
    with script(__doc__, TABLE, *PEERS, seconds=SECONDS, options={"--parts": parts}) as (options, machine, report):
        bench = Bench(machine, report)
        for part in options.parts:
            bench.alone(part) if part in PROBLEMS else getattr(bench, part)()


if __name__ == "__main__":
    main()
