"""Late interaction on a GPU: exactness of the fused kernels, their shapes one by one, and whole losses beside peers.

Needs a CUDA device; about 90 seconds. Processes beside each other compile the kernels first. Rows go to
OUT/maxsim.csv:

    python benchmarks/maxsim.py --out OUT [--parts checks ladder losses]

`late-interaction-kernels` and `flash-maxsim` are timed where they can be imported. TFLOP/s count 2 · pairs · tokens ·
tokens · features operations per sweep, whatever is computed; the product is 8192³ in bf16 in the same minute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import contrast
from contrastile.bench.harness import results_file, sentence_of
from contrastile.losses import Sigmoid, Softmax
from contrastile.scorers import MaxSim
from contrastile.tiles.triton import maxsim
from contrastile.tiles.triton.maxsim import Documents, Entries, Gathering, Tiling
from contrastile.train.provenance import ORIGIN, provenance

COLUMNS = ("what", "impl", "queries", "documents", "query_tokens", "document_tokens", "d", "dtype", "ms", "least_ms",
           "tflops", "product_tflops", "peak_mib", *ORIGIN)  # fmt: skip
PEERS = ("late-interaction-kernels", "flash-maxsim")
# queries, documents, tokens of each, features
USUAL = (1024, 1024, 32, 180, 128)
SWEEPS = {
    "256 x 64, 8 warps": Tiling(),
    "128 x 64, 4 warps, entries in registers": Tiling(entries=128, warps=4, registers=True, most_registers=168),
}
WINNERS = {
    "256 x 64, 8 warps, 128 registers": Tiling(most_registers=128),
    "256 x 64, 8 warps": Tiling(),
    "128 x 64, 4 warps": Tiling(entries=128, warps=4),
}
QUERIES = {
    "128 entries of 64 features, 4 warps": Gathering(),
    "64 entries of 64 features, 2 warps": Gathering(entries=64, warps=2),
    "128 entries of 32 features, 2 warps": Gathering(features=32, warps=2),
    "256 entries of 32 features, 4 warps": Gathering(entries=256, features=32),
}
DOCUMENTS = {
    "groups of 64, 4 warps, chunks of 1024": Gathering(),
    "5 stages": Gathering(document_stages=5),
    "groups of 32, 2 warps": Gathering(group=32, document_warps=2),
    "groups of 32, 1 warp": Gathering(group=32, document_warps=1),
    "chunks of 2048, 96 registers": Gathering(chunk=2048, document_registers=96),
    "groups of 32, 2 warps, 5 stages": Gathering(group=32, document_warps=2, document_stages=5),
}
SIZES = ((1024, 1024, 32, 180, 128), (4096, 4096, 32, 180, 128), (64, 64, 1024, 1024, 128), (128, 128, 32, 180, 128),
         (16384, 16384, 32, 180, 128))  # fmt: skip
# problems by type; the lists of documents are as long as the queries' where the loss is symmetric
CHECKED = {
    torch.bfloat16: (((33, 33, 32, 180, 128), True), ((65, 65, 20, 70, 96), False), ((4, 130, 300, 65, 256), True)),
    torch.float16: (((33, 33, 32, 180, 128), False),),
    torch.float32: (((33, 33, 32, 180, 128), True), ((7, 9, 5, 20, 250), False)),
}  # fmt: skip
# of pairs, up to which peers are timed, and kernels compiled by a process of its own
MOST_PEER, MOST_COMPILED = 4096**2, 1024**2
# and the most seconds that they take
PROCESSES, COMPILING = 14, 35.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["checks", "ladder", "losses"])
    parser.add_argument("--limit", type=float, default=80.0, help="seconds after which nothing more is begun")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the losses' sizes")
    options = parser.parse_args()
    begin = time.perf_counter()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print("compiling")
    compile_all(options.parts, options.out)
    print(f"compiled: {time.perf_counter() - begin:.0f} s", flush=True)
    origin = provenance(torch.device("cuda"), *PEERS)
    print(f"{origin['chip']}; {origin['versions']}")
    with results_file(options.out / "maxsim.csv", COLUMNS) as write:

        def report(what: str, impl: str, size: tuple[int, ...], sweeps: float, call: Callable[[], object]) -> None:
            """Time a call and write its row; sweeps: in units of all products of the tokens."""
            if time.perf_counter() - begin > options.limit:
                return
            try:
                ms, least, product, peak = measured(call)
            except Exception as error:
                print(f"{what:12} {impl:56} {sentence_of(error)[:150]}", flush=True)
                torch.cuda.empty_cache()
                return
            N, J, L, M, D = size
            rate = 2e-9 * N * J * L * M * D * sweeps / ms
            print(f"{what:12} {impl:56} {ms:9.3f} ms {least:9.3f} {rate:7.1f} TFLOP/s ({product:.0f}) {peak:8.1f} MiB",
                  flush=True)  # fmt: skip
            row = {"what": what, "impl": impl, "queries": N, "documents": J, "query_tokens": L, "document_tokens": M}
            row |= {"d": D, "dtype": "bf16", "ms": round(ms, 4), "least_ms": round(least, 4), "tflops": round(rate, 1)}
            write(row | {"product_tflops": round(product, 1), "peak_mib": round(peak, 1)} | origin)

        sizes = SIZES[: options.sizes]
        if "losses" in options.parts:
            losses(report, ours, sizes[:2])
            losses(report, late_interaction_kernels, sizes[:2])
        if "ladder" in options.parts:
            ladder(report)
        if "losses" in options.parts:
            losses(report, ours, sizes[2:])
            losses(report, late_interaction_kernels, sizes[2:])
            losses(report, flash_maxsim, sizes[:2])
    if "checks" in options.parts and time.perf_counter() - begin < options.limit:
        checks()
    print(f"all: {time.perf_counter() - begin:.0f} s", flush=True)


def compile_all(parts: list[str], out: Path) -> None:
    """Fill Triton's cache of compiled kernels from several processes, forked before any of them has a device."""
    out.mkdir(parents=True, exist_ok=True)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=compile_share, args=(share, parts, out)) for share in range(PROCESSES)]
    for process in processes:
        process.start()
    end = time.perf_counter() + COMPILING
    for process in processes:
        process.join(max(0.0, end - time.perf_counter()))
        if process.is_alive():
            process.kill()


def compile_share(share: int, parts: list[str], out: Path) -> None:
    """Call everything of one process's share once."""
    sys.stdout = (out / f"compile_{share}.log").open("w")
    begin = time.perf_counter()
    count = 0

    def mine() -> bool:
        nonlocal count
        count += 1
        return count % PROCESSES == share

    def once(what: str, impl: str, size: tuple[int, ...], sweeps: float, call: Callable[[], object]) -> None:
        if mine():
            try:
                call()
                torch.cuda.synchronize()
            except Exception as error:
                print(what, impl, size, sweeps, error)
            print(f"{time.perf_counter() - begin:.1f} s: {what}, {impl}", flush=True)

    if "checks" in parts:
        checks(mine)
    if "ladder" in parts:
        ladder(once)
    if "losses" in parts:
        sizes = tuple(size for size in SIZES if size[0] * size[1] <= MOST_COMPILED)
        losses(once, ours, sizes)
        losses(once, late_interaction_kernels, sizes[:1])


def measured(call: Callable[[], object], seconds: float = 0.15) -> tuple[float, float, float, float]:
    """Median and least milliseconds of a call, TFLOP/s of the product beside it, and MiB at the call's peak."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first = timed(call)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    torch.mm(a, b)
    times, products = [], []
    for _ in range(max(1, min(15, int(seconds * 1e3 / max(first, 1.0))))):
        products.append(timed(lambda: torch.mm(a, b)))
        times.append(timed(call))
    return statistics.median(times), min(times), 2e-9 * 8192**3 / statistics.median(products), peak


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call on the device."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def tokens(size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    N, J, L, M, D = size
    q, k = torch.randn(N, L, D, device="cuda"), torch.randn(J, M, D, device="cuda")
    # each query's document has its tokens, with noise
    count = min(N, J)
    k[:count, : min(L, M)] += q[:count, : min(L, M)]
    return F.normalize(q, dim=-1).to(dtype), F.normalize(k, dim=-1).to(dtype)


def ladder(report: Any) -> None:
    """Every form of the kernels."""
    q, k = tokens(USUAL)
    N, J = len(q), len(k)
    entries, documents = Entries.of(q, None), Documents.of(k, None)
    for name, tiling in SWEEPS.items():
        report("sweep", name, USUAL, 1, lambda t=tiling: maxsim.scored(entries, documents, best=False, tiling=t))
    for name, tiling in WINNERS.items():
        report("winners", name, USUAL, 1, lambda t=tiling: maxsim.scored(entries, documents, best=True, tiling=t))
    best = torch.randint(k.shape[1], (J, entries.count), dtype=documents.index, device="cuda")
    g = torch.randn(N, J, device="cuda") / (N * J)
    u, v = (torch.zeros(len(x), x[0].numel(), device="cuda") for x in (q, k))
    share = 1 / k.shape[1]
    for name, gathering in QUERIES.items():
        report("queries", name, USUAL, share,
               lambda h=gathering: maxsim.add_query_gradients(u, g, entries, documents, best, h))  # fmt: skip
    for name, gathering in DOCUMENTS.items():
        report("documents", name, USUAL, share,
               lambda h=gathering: maxsim.add_document_gradients(v, g, entries, documents, best, 2**31, h))  # fmt: skip


def losses(report: Any, implementations: Any, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Whole symmetric losses, forward and with both gradients."""
    for size in sizes:
        q, k = (x.requires_grad_() for x in tokens(size))
        for name, impl in implementations(size):

            def step(impl: Any = impl, q: Tensor = q, k: Tensor = k) -> object:
                return torch.autograd.grad(impl(q, k), (q, k))

            def forward(impl: Any = impl, q: Tensor = q, k: Tensor = k) -> object:
                with torch.no_grad():
                    return impl(q, k)

            where = f"{name}, {size[0]} x {size[1]}, {size[2]} x {size[3]} tokens"
            report("loss + grads", where, size, 1, step)
            report("loss", where, size, 1, forward)


Loss = Callable[[Tensor, Tensor], Tensor]


def ours(size: tuple[int, ...]) -> Iterator[tuple[str, Loss]]:
    module = MaxSim()
    yield "contrastile", lambda q, k: contrast(q, k, scorer=module, scale=20.0)
    if size[0] in (1024, 4096):
        yield "one way", lambda q, k: contrast(q, k, scorer=module, scale=20.0, loss=Softmax())


def late_interaction_kernels(size: tuple[int, ...]) -> Iterator[tuple[str, Loss]]:
    if size[0] * size[1] <= MOST_PEER:
        try:
            from late_interaction_kernels import maxsim as theirs
        except Exception as error:
            print(f"late-interaction-kernels: {sentence_of(error)}")
        else:
            yield "late-interaction-kernels", lambda q, k: clip(theirs(q, k))


def flash_maxsim(size: tuple[int, ...]) -> Iterator[tuple[str, Loss]]:
    del size
    try:
        from flash_maxsim import flash_maxsim_batched_train as theirs
    except Exception as error:
        print(f"flash-maxsim: {sentence_of(error)}")
    else:
        yield "flash-maxsim", lambda q, k: clip(theirs(q, k))


def clip(x: Tensor) -> Tensor:
    x, target = x.float() * 20.0, torch.arange(len(x), device=x.device)
    return (F.cross_entropy(x, target) + F.cross_entropy(x.T, target)) / 2


def checks(wanted: Callable[[], bool] = lambda: True) -> None:
    """The fused loss and its gradients against float64, beside the plain formula in the same type."""
    worst: dict[str, float] = {}
    variants: dict[str, dict[str, Any]] = {"symmetric": {}, "one way": {"loss": Softmax()}}
    variants["sigmoid"] = {"loss": Sigmoid(), "bias": -3.0}
    for dtype, problems in CHECKED.items():
        for size, masked in problems:
            if not wanted():
                continue
            for name, how in variants.items():
                if name == "symmetric" and size[0] != size[1]:
                    continue
                label = f"{str(dtype)[6:]} {size} {'masked ' if masked else ''}{name}"
                try:
                    check(label, size, dtype, masked, how, worst)
                except Exception as error:
                    print(f"FAILED {label}: {sentence_of(error)[:300]}", flush=True)
    for name, ratio in worst.items():
        print(f"largest error over the plain formula's: {name} {ratio:.2f}")


def check(
    label: str, size: tuple[int, ...], dtype: torch.dtype, masked: bool, how: dict[str, Any], worst: dict[str, float]
) -> None:
    """Compare loss and gradients, and the bits of two calls."""
    q, k = tokens(size, dtype)
    masks = [torch.rand(x.shape[:2], device="cuda") > 0.3 for x in (q, k)] if masked else [None, None]
    if masked:
        masks[0][1], masks[1][2] = False, False
    results = []
    for kind, wide in (("eager", torch.float64), ("dense", dtype), ("triton", dtype), ("triton", dtype)):
        torch.use_deterministic_algorithms(kind == "triton", warn_only=True)
        leaves = [x.detach().to(wide).requires_grad_() for x in (q, k)]
        scale = torch.tensor(20.0, dtype=torch.float64 if wide == torch.float64 else torch.float32, device="cuda")
        scale.requires_grad_()
        loss = contrast((leaves[0], masks[0]), (leaves[1], masks[1]), scorer=MaxSim(), scale=scale, backend=kind, **how)
        results.append([loss.detach(), *torch.autograd.grad(loss, [*leaves, scale])])
    truth, plain, fused, again = results
    for part, true, theirs, ours, same in zip(("loss", "q", "k", "scale"), truth, plain, fused, again, strict=True):
        size_of = true.double().norm().item() + 1e-30
        # a result in this type cannot be nearer than its last digit
        least = torch.finfo(true.to(ours.dtype).dtype).eps / 4
        error, other = ((x.double() - true.double()).norm().item() / size_of for x in (ours, theirs))
        ratio = error / max(other, least)
        key = f"{str(dtype)[6:]} {part}"
        worst[key] = max(worst.get(key, 0.0), ratio)
        if not ratio <= 2.0 or not torch.equal(ours, same):
            print(f"WRONG {label} {part}: error {error:.2e}, plain {other:.2e}, same bits {torch.equal(ours, same)}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
