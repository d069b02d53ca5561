"""Time losses as people call them, beside the plain formula and the same compiled: options, rectangles, lists.

Forward and backward, in interleaved rounds: the median and the least milliseconds of a step, many steps in a row.
"host" is the time until a step's launches are queued, on a device that is idle before. With --peers also packages that
compute the same, where they are installed. Run on an idle GPU:

    python benchmarks/user_calls.py [--only infonce] [--seconds 1] [--peers] [--csv FILE]
    torchrun --standalone --nproc-per-node 2 benchmarks/user_calls.py [--csv FILE]

Under torchrun: ranks of few rows, beside OpenCLIP's class.
"""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import product
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import (
    ClipLoss,
    DistillClipLoss,
    GISTLoss,
    InfoNCELoss,
    NTXentLoss,
    ScoreDistillLoss,
    SigLipLoss,
    SupConLoss,
)
from contrastile.bench.harness import Machine, Step, Table, not_installed, script
from contrastile.bench.peers import FORMULAS, PEERS, Loss

PACKAGES = "cut-cross-entropy", "siglip-kernel"
# steps in a row whose launches are timed, and how often
HOST_STEPS, HOST_ROUNDS = 5, 9
TABLE = Table("call | impl=call, and by 48 | ms >8.3f | least_ms=least >8.3f | host_ms=host >8.3f")


def features(*sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [F.normalize(torch.randn(size, device="cuda"), dim=-1).to(dtype).requires_grad_() for size in sizes]


def step(loss: Loss, leaves: list[Tensor], *, autocast: bool = True, grad: bool = True) -> Step:
    """A forward and backward pass under bf16 autocast, as a training loop runs it; or, as in validation, a forward."""

    def run() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grad):
            value = loss(*leaves)
        if grad:
            torch.autograd.grad(value, leaves)

    return run


def by_name(loss: Loss, *names: str, **others: Tensor) -> Loss:
    """A loss whose leaves have these names."""
    return lambda *leaves: loss(**dict(zip(names, leaves, strict=True)), **others)


def _plain_rows(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    x, own = scale * q @ k.T, torch.arange(len(q), device=q.device)
    return (F.cross_entropy(x, own, reduction="none") + F.cross_entropy(x.T, own, reduction="none")).sum() / 2


def _plain_own(q: Tensor, k: Tensor, scale: Tensor, negatives: Tensor, *, in_batch: bool = True) -> Tensor:
    logits = torch.cat([q @ k.T if in_batch else (q * k).sum(-1, keepdim=True), _of_lists(negatives, q)], 1)
    return F.cross_entropy(scale * logits, torch.arange(len(q), device=q.device) * in_batch)


def _of_lists(keys: Tensor, q: Tensor) -> Tensor:
    return (keys @ q[..., None])[..., 0]


def _plain_pairs(q: Tensor, k: Tensor, scale: Tensor, guide_query: Tensor, guide_key: Tensor) -> Tensor:
    logits, guide = (torch.cat([a @ b.T, a @ a.T, b @ b.T], 1) for a, b in ((q, k), (guide_query, guide_key)))
    own = torch.arange(len(q), device=q.device)
    false = guide > guide[own, own][:, None]
    false[own, own] = False
    return F.cross_entropy((scale * logits).masked_fill(false, -torch.inf), own)


def _plain_views(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    views, n = torch.cat([a, b]), len(a)
    others = (scale * views @ views.T).masked_fill(torch.eye(2 * n, dtype=torch.bool, device=a.device), -torch.inf)
    return F.cross_entropy(others, torch.arange(2 * n, device=a.device).roll(n))


def _plain_labels(x: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    itself = torch.eye(len(x), dtype=torch.bool, device=x.device)
    positive = (labels[:, None] == labels) & ~itself
    log_p = (scale * x @ x.T).masked_fill(itself, -torch.inf).log_softmax(1)
    return -(log_p.masked_fill(~positive, 0.0).sum(1) / positive.sum(1)).mean()


def _plain_queue(q: Tensor, k: Tensor, scale: Tensor, negatives: Tensor) -> Tensor:
    return FORMULAS["infonce"](q, torch.cat([k, negatives]), scale)


def _plain_scores(q: Tensor, k: Tensor, scale: Tensor, scores: Tensor) -> Tensor:
    x = scale * _of_lists(k, q)
    return F.kl_div(x.log_softmax(1), scores.log_softmax(1), log_target=True, reduction="batchmean")


def calls(machine: Machine, *, with_peers: bool) -> Iterator[tuple[str, dict[str, Step]]]:
    """Each problem's name, and the steps that are timed together."""
    clip, one_way = FORMULAS["clip"], FORMULAS["infonce"]
    scale = torch.tensor(100.0, device="cuda", requires_grad=True)

    def beside(
        ours: Loss, plain: Loss, leaves: list[Tensor], *, autocast: bool = True, **more: Step
    ) -> dict[str, Step]:
        ways = {"plain": plain, "compiled": torch.compile(plain, dynamic=False)}
        steps = {name: step(loss, leaves, autocast=autocast) for name, loss in ways.items()}
        return {"contrastile": step(ours, leaves, autocast=autocast), **more, **steps}

    def peers(name: str, leaves: list[Tensor]) -> dict[str, Step]:
        """Packages that take these features as they are."""
        there = [one for one in with_peers * PEERS if name in one.losses and one.absent(machine) is None]
        return {one.label: step(one.losses[name], leaves, autocast=False) for one in there}

    for b, d in ((1024, 512), (4096, 512), (8192, 256), (32768, 256), (8192, 768), (16384, 768), (32768, 768)):
        wide, narrow = features((b, d), (b, d), dtype=torch.float32), features((b, d), (b, d))
        more = {"contrastile, bf16 features": step(ClipLoss(), [*narrow, scale], autocast=False)}
        # as part of a compiled function
        more["compiled contrastile"] = step(torch.compile(ClipLoss(), dynamic=False), [*wide, scale])
        yield f"clip {b} x {d}, float32 features under autocast", beside(ClipLoss(), clip, [*wide, scale], **more)
    for n, m, d in ((1024, 1024, 512), (4096, 4096, 512), (256, 16384, 768), (1024, 8192, 512), (4096, 32768, 256)):
        leaves = [*features((n, d), (m, d), dtype=torch.float32), scale]
        name, ours, plain = ("clip", ClipLoss(), clip) if n == m else ("infonce", InfoNCELoss(), one_way)
        yield f"{name} {n} x {m} x {d}, float32 without autocast", beside(ours, plain, leaves, autocast=False)
    for b in (1024, 4096, 32768):
        leaves = [*features((b, 512), (b, 512)), scale]
        ids, weights = torch.randint(b // 3, (b,), device="cuda"), torch.rand(b, device="cuda")
        options = {"none": {}, "weights": {"weights": weights}, "ids": {"ids": ids}}
        steps = {f"contrastile, {name}": step(partial(ClipLoss(), **given), leaves) for name, given in options.items()}
        steps["contrastile, smoothing"] = step(ClipLoss(label_smoothing=0.1), leaves)
        yield f"clip {b} x 512, options", {**steps, "plain": step(clip, leaves)}
        if b > 4096:
            continue
        of_rows, losses = ClipLoss(reduction="none"), {"clip": (ClipLoss(), clip), "infonce": (InfoNCELoss(), one_way)}
        yield f"rows {b} x 512", beside(lambda *given, loss=of_rows: loss(*given).sum(), _plain_rows, leaves)
        for name, (ours, plain) in losses.items():
            ways = {"contrastile": ours, "plain": plain, "compiled": torch.compile(plain, dynamic=False)}
            steps = {way: step(loss, leaves, grad=False) for way, loss in ways.items()}
            yield f"validation of {name} {b} x 512", steps
    for n, m, d in ((1024, 65536, 768), (4096, 32768, 768), (2048, 131072, 512), (1024, 4096, 512)):
        for kind, dtype in (("", torch.bfloat16), (", float32 features", torch.float32)):
            leaves = [*features((n, d), (m, d), dtype=dtype), scale]
            steps = beside(InfoNCELoss(), one_way, leaves) | ({} if kind else peers("infonce", leaves))
            at = torch.randperm(m, device="cuda")[:n]
            steps["contrastile, positives"] = step(partial(InfoNCELoss(), positives=at), leaves)
            yield f"infonce {n} x {m} x {d}{kind}", steps
    for b, length in product((8192, 16384), (15, 30)):
        # as of dense retrieval by dot product
        q, k = (x.detach().mul(length).requires_grad_() for x in features((b, 768), (b, 768)))
        one = torch.ones((), device="cuda", requires_grad=True)
        yield f"infonce {b} x {b} x 768, rows of length {length}", beside(InfoNCELoss(), one_way, [q, k, one])
    for b in (2048, 8192, 16384):
        leaves, guides = features((b, 512), (b, 512)), [x.detach() for x in features((b, 512), (b, 512))]
        given = dict(zip(("guide_query", "guide_key"), guides, strict=True))
        pairs = partial(GISTLoss(contrast_anchors=True, contrast_positives=True), **given)
        yield f"gist {b} x 512, pairs", beside(pairs, partial(_plain_pairs, **given), [*leaves, scale])
    for b, d in product((1024, 4096, 16384), (128, 512)):
        # two views of half of them, and labels of four examples each
        yield f"ntxent {b} x {d}", beside(NTXentLoss(), _plain_views, [*features((b // 2, d), (b // 2, d)), scale])
        labels = torch.randperm(b, device="cuda") // 4
        ours, plain = by_name(SupConLoss(), "features", "scale", labels=labels), partial(_plain_labels, labels=labels)
        yield f"supcon {b} x {d}", beside(ours, plain, [*features((b, d)), scale])
    for b, m, d in ((256, 65536, 128), (1024, 8192, 512), (4096, 32768, 512)):
        q, k, keys = features((b, d), (b, d), (m, d))
        given = {"negatives": keys.detach()}
        steps = beside(partial(InfoNCELoss(), **given), partial(_plain_queue, **given), [q, k, scale])
        yield f"queue {b} x {m} x {d}", steps
    for b in (8192, 32768):
        leaves = [*features((b, 512), (b, 512)), scale]
        labels = {str(n): torch.randint(n, (b,), device="cuda") for n in (2, 10, 100, 1000)}
        labels["b / 4"] = torch.randperm(b, device="cuda") // 4
        steps = {"contrastile": step(ClipLoss(), leaves, autocast=False)}
        for n, given in labels.items():
            steps[f"contrastile, {n} labels"] = step(partial(ClipLoss(), labels=given), leaves, autocast=False)
        yield f"labels {b} x 512", steps
    names = "dist_image_features", "dist_text_features"
    for b in (8192, 32768):
        leaves, constants = [*features((b, 512), (b, 512)), scale], features((b, 512), (b, 512))
        ids, labels = torch.randint(2000, (2, b), device="cuda")
        teacher = dict(zip(names, [x.detach() for x in constants], strict=True))
        losses = {"clip": ClipLoss(), "teacher": partial(DistillClipLoss(), **teacher, dist_logit_scale=30.0)}
        options = {"none": {}, "ids": {"ids": ids}, "labels": {"labels": labels}}
        options["both"] = options["ids"] | options["labels"]
        yield (
            f"teacher {b} x 512",
            {
                f"contrastile, {name}, {option}": step(partial(losses[name], **options[option]), leaves)
                for name, option in product(losses, options)
            },
        )
    for b in (2048, 8192, 32768):
        q, k, listed = features((b, 512), (b, 512), (b, 8, 512))
        leaves, names = [q, k, scale, listed], ("query", "key", "scale", "negatives")
        with_own = beside(by_name(InfoNCELoss(), *names), _plain_own, leaves)
        yield f"negatives {b} x 8 x 512", with_own | {"contrastile, without": step(InfoNCELoss(), leaves[:3])}
        alone = by_name(InfoNCELoss(in_batch=False), *names)
        yield f"alone {b} x 8 x 512", beside(alone, partial(_plain_own, in_batch=False), leaves)
        scores = torch.randn(b, 8, device="cuda")
        ours, plain = partial(ScoreDistillLoss(), scores=scores), partial(_plain_scores, scores=scores)
        yield f"scores {b} x 8 x 512", beside(by_name(ours, "query", "key", "scale"), plain, [q, listed, scale])
    sigmoids = ((SigLipLoss(), {"logit_bias": -10.0}), (FORMULAS["siglip"], {"bias": -10.0}))
    for b in (1024, 2048, 4096, 8192, 16384, 32768):
        leaves = [*features((b, 768), (b, 768)), scale]
        steps = beside(*(partial(loss, **bias) for loss, bias in sigmoids), leaves)
        with_bias = [*leaves, torch.tensor(-10.0, device="cuda", requires_grad=True)]
        yield f"siglip {b} x 768", steps | peers("siglip", with_bias)


def calls_of_ranks(machine: Machine) -> Iterator[tuple[str, dict[str, Step]]]:
    """The same of a batch that ranks share, with few rows on each."""
    scale = torch.tensor(50.0, device="cuda", requires_grad=True)
    given = {"gather_with_grad": True, "rank": machine.world.rank, "world_size": machine.world.size}
    for n, d in (*((n, 512) for n in (256, 512, 1024, 2048, 4096)), (1024, 768), (2048, 768)):
        leaves = [*features((n, d), (n, d)), scale]
        ways = {"contrastile": ClipLoss(), "contrastile, ring": ClipLoss(exchange="ring")}
        if not not_installed("open_clip"):
            peer = import_module("open_clip").ClipLoss
            ways |= {f"open_clip, local_loss={local}": peer(local_loss=local, **given) for local in (True, False)}
        yield f"clip {n} x {d} on each rank", {name: step(loss, leaves, autocast=False) for name, loss in ways.items()}


def main() -> None:
    words = {
        "--seconds": {"type": float, "default": 1.0, "help": "how long each may be measured (default: 1)"},
        "--only": {"default": "", "help": "the calls whose names hold this word"},
        "--peers": {"action": "store_true", "help": "public packages too"},
    }
    with script(__doc__, TABLE, *PACKAGES, options=words) as (options, machine, report):
        machine.load()
        alone = machine.world.size == 1
        for name, steps in calls(machine, with_peers=options.peers) if alone else calls_of_ranks(machine):
            if options.only in name:
                report.say(name)
                for impl, timing in machine.race(steps).items():
                    host = 1e3 * median(machine.time(steps[impl], HOST_STEPS, queued=True) for _ in range(HOST_ROUNDS))
                    times = {"ms": timing.ms, "least_ms": timing.least_ms, "host_ms": host}
                    report.result({"call": name, "impl": impl} | {key: round(ms, 3) for key, ms in times.items()})
                # a formula of many shapes would be computed without compilation
                torch.compiler.reset()


if __name__ == "__main__":
    main()
