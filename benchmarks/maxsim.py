"""Late interaction on a GPU: the fused kernels' shapes one by one, and whole losses beside peers.

The script behind the tables of late interaction in docs/kernels.md and docs/host_features.md. Needs a CUDA device:

    python benchmarks/maxsim.py [--csv FILE] [--parts ladder losses shapes host] [--queries 128 1024]
    torchrun --standalone --nproc-per-node 4 benchmarks/maxsim.py --parts ranks [--csv FILE] [--queries 16384]

Peers are timed where they can be imported. TFLOP/s count 2 · pairs · tokens · tokens · features operations per sweep,
whatever is computed; the product is 8192³ in bf16 in the same minute. `make test-gpu` compares results with float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import contrast
from contrastile.bench.harness import Machine, Report, Step, Table, not_installed, script
from contrastile.bench.peers import both_directions
from contrastile.losses import Softmax
from contrastile.scorers import MaxSim
from contrastile.tiles.triton import maxsim
from contrastile.tiles.triton.maxsim import Documents, Entries
from contrastile.tiles.triton.maxsim_plan import Gathering, Tiling

COLUMNS = ("what", "impl", "queries", "documents", "query_tokens", "document_tokens", "d", "dtype", "ms", "least_ms",
           "tflops", "product_tflops", "peak_mib")  # fmt: skip
TABLE = Table(
    "what 12 | impl=implementation 56 | ms >9.3f | least_ms=least >9.3f | tflops=TFLOP/s >8.1f"
    " | product_tflops=product >8.1f | peak_mib=MiB >9,.1f"
)
# queries, documents, tokens of each, features
Size = tuple[int, int, int, int, int]
USUAL: Size = (1024, 1024, 32, 180, 128)
LARGE: tuple[Size, ...] = ((4096, 4096, 32, 180, 128), (16384, 16384, 32, 180, 128))
# the peers take longest at the last one
SIZES: tuple[Size, ...] = ((128, 128, 32, 180, 128), USUAL, (64, 64, 1024, 1024, 128), LARGE[1], LARGE[0])
# other sizes, features and types, at which peers are timed too
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", HALF: "fp16", FULL: "fp32"}
SHAPES: tuple[tuple[Size, torch.dtype], ...] = (
    *(((n, n, 32, 180, 128), BF16) for n in (32, 64, 256)),
    *(((1024, 1024, 32, 180, D), BF16) for D in (64, 96, 256)),
    (USUAL, HALF), ((128, 128, 32, 180, 128), FULL), ((512, 512, 32, 180, 128), FULL),
    ((16, 16, 1024, 1024, 128), BF16), ((256, 256, 1024, 1024, 128), BF16),
)  # fmt: skip
# pairs up to which peers are timed
MOST_PEER = 4096**2
# module and function of a peer, from tokens to scores
PEERS = {
    "late-interaction-kernels": ("late_interaction_kernels", "maxsim"),
    "flash-maxsim": ("flash_maxsim", "flash_maxsim_batched_train"),
}
SHARED = Tiling(entries=256, warps=8, registers=False, most_registers=128)
SWEEPS = {
    "128 x 64 in registers, 4 warps": Tiling(),
    "4 stages": Tiling(stages=4),
    "32 documents": Tiling(documents=32),
    "a loop for documents, one for blocks": Tiling(flatten=False),
    "256 x 64 in shared memory, 8 warps": SHARED,
    "128 x 64 in shared memory, 2 stages": Tiling(registers=False, stages=2),
}
QUERIES = {
    "128 entries of 64 features, 4 warps": Gathering(),
    "64 entries of 64 features, 2 warps": Gathering(entries=64, warps=2),
    "256 entries of 32 features, 4 warps": Gathering(entries=256, features=32),
}
DOCUMENTS = {
    "groups of 32 entries": Gathering(),
    "groups of 64": Gathering(group=64),
    "64 features": Gathering(document_features=64),
    "4 stages": Gathering(document_stages=4),
}
# seconds of each call
SECONDS = 0.15
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Bench:
    machine: Machine
    report: Report
    # numbers of queries to measure; all where empty
    queries: Sequence[int] = ()

    def measure(
        self, what: str, impl: str, size: Size, call: Step, dtype: torch.dtype = BF16, sweeps: float = 1.0
    ) -> None:
        """Report the row of a call; sweeps: its operations, in units of all products of the tokens."""
        with self.report.failures(f"{what}, {impl}", judged=True):
            timing = self.machine.race({impl: call})[impl]
            N, J, L, M, D = size
            self.report.result({
                "what": what, "impl": impl, "queries": N, "documents": J, "query_tokens": L, "document_tokens": M,
                "d": D, "dtype": NAMES[dtype], "ms": round(timing.ms, 4), "least_ms": round(timing.least_ms, 4),
                "tflops": round(2e-9 * N * J * L * M * D * sweeps / timing.ms, 1),
                "product_tflops": round(timing.product_rate / 1e12, 1),
                "peak_mib": round(self.machine.peak(call) / 2**20, 1),
            })  # fmt: skip

    def ladder(self) -> None:
        q, k = tokens(USUAL)
        N, J = len(q), len(k)
        entries, documents = Entries.of(q, None), Documents.of(k, None)
        for what in ("sweep", "winners"):
            for name, tiling in SWEEPS.items():
                sweep = partial(maxsim.scored, entries, documents, best=what == "winners", tiling=tiling)
                self.measure(what, name, USUAL, sweep)
        best = torch.randint(k.shape[1], (J, entries.count), dtype=documents.index, device="cuda")
        g = torch.randn(N, J, device="cuda") / (N * J)
        u, v = (torch.zeros(len(x), x[0].numel(), device="cuda") for x in (q, k))
        for name, gathering in QUERIES.items():
            add = partial(maxsim.add_query_gradients, u, g, entries, documents, best, gathering)
            self.measure("queries", name, USUAL, add, sweeps=1 / k.shape[1])
        for name, gathering in DOCUMENTS.items():
            add = partial(maxsim.add_document_gradients, v, g, entries, documents, best, 2**31, gathering)
            self.measure("documents", name, USUAL, add, sweeps=1 / k.shape[1])

    def losses(self) -> None:
        """Whole symmetric losses, forward and with both gradients."""
        for size in self.chosen(SIZES):
            self.loss(size, BF16, "loss")

    def shapes(self) -> None:
        """The same at other sizes, features and types."""
        for size, dtype in SHAPES:
            if self.chosen([size]):
                self.loss(size, dtype, "shape")

    def loss(self, size: Size, dtype: torch.dtype, what: str) -> None:
        """Losses of one size, ours and the peers'. what: the first word of their rows."""
        q, k = (x.to(dtype).requires_grad_() for x in tokens(size))
        N, J, L, M, D = size
        label = f"{N} x {J}, {L} x {M} tokens"
        if (D, dtype) != (USUAL[-1], BF16):
            label += f", d = {D}, {NAMES[dtype]}"
        for name, loss in self.implementations(size):

            def step(loss: Loss = loss) -> object:
                return torch.autograd.grad(loss(q, k), (q, k))

            def forward(loss: Loss = loss) -> object:
                with torch.no_grad():
                    return loss(q, k)

            self.measure(f"{what} + grads", f"{name}, {label}", size, step, dtype)
            self.measure(what, f"{name}, {label}", size, forward, dtype)

    def chosen(self, sizes: Sequence[Size]) -> list[Size]:
        return [size for size in sizes if not self.queries or size[0] in self.queries]

    def host(self) -> None:
        """Losses of vectors in pinned host memory, with their gradients, beside those of resident ones."""
        for size in self.chosen(LARGE):
            for way, loss in (("symmetric", Softmax(symmetric=True)), ("one way", Softmax())):
                for place in ("resident", "host"):
                    q, k = (x if place == "resident" else x.cpu().pin_memory() for x in tokens(size))
                    pair = q.requires_grad_(), k.requires_grad_()

                    def step(pair: tuple[Tensor, Tensor] = pair, loss: Softmax = loss) -> object:
                        value = contrast(*pair, scorer=MaxSim(), scale=20.0, loss=loss, device="cuda")
                        return torch.autograd.grad(value, pair)

                    self.measure("loss + grads", f"{place}, {way}, {size[0]} x {size[1]}", size, step)

    def ranks(self) -> None:
        """Symmetric losses of a batch that the ranks share, with their gradients, by each exchange."""
        rank, W = self.machine.world.rank, self.machine.world.size
        for size in self.chosen((LARGE[1], LARGE[0])):
            N, J, *others = size
            pair = tuple(x.requires_grad_() for x in tokens((N // W, J // W, *others), seed=rank))
            for exchange in ("gather", "ring") if W > 1 else ("single",):

                def step(exchange: str = exchange, pair: tuple[Tensor, ...] = pair) -> object:
                    return torch.autograd.grad(contrast(*pair, scorer=MaxSim(), scale=20.0, exchange=exchange), pair)

                self.measure("loss + grads", f"{W} ranks, {exchange}, {N} x {J}", size, step)

    def implementations(self, size: Size) -> Iterator[tuple[str, Loss]]:
        scorer = MaxSim()
        yield "contrastile", lambda q, k: contrast(q, k, scorer=scorer, scale=20.0)
        yield "one way", lambda q, k: contrast(q, k, scorer=scorer, scale=20.0, loss=Softmax())
        for name, (module, function) in PEERS.items() if size[0] * size[1] <= MOST_PEER else ():
            if reason := not_installed(module):
                self.report.note(f"{name}: {reason}")
            else:
                with self.report.failures(name, judged=False):
                    scores = getattr(import_module(module), function)
                    yield name, lambda q, k, scores=scores: clip(scores(q, k))


def tokens(size: Size, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit vectors of queries and documents; each query's document has its tokens, with noise."""
    N, J, L, M, D = size
    torch.manual_seed(seed)
    q, k = torch.randn(N, L, D, device="cuda"), torch.randn(J, M, D, device="cuda")
    count = min(N, J)
    k[:count, : min(L, M)] += q[:count, : min(L, M)]
    return F.normalize(q, dim=-1).bfloat16(), F.normalize(k, dim=-1).bfloat16()


def clip(x: Tensor) -> Tensor:
    x = x.float() * 20.0
    return both_directions(x, x.T)


def main() -> None:
    parts = ("ladder", "losses", "shapes", "host", "ranks")
    words = {
        "--parts": {"nargs": "+", "choices": parts, "default": ["ladder", "losses"]},
        "--queries": {"nargs": "+", "type": int, "default": []},
    }
    with script(__doc__, COLUMNS, TABLE, *PEERS, seconds=SECONDS, options=words) as (options, machine, report):
        bench = Bench(machine, report, options.queries)
        for part in options.parts:
            getattr(bench, part)()


if __name__ == "__main__":
    main()
