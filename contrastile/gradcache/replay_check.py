"""Replay check: a warning where the second pass gives other features than the first (docs/guarantees.md).

Four numbers of every row of features are saved, its products with random signs. Their distances approximate those of
the rows (Achlioptas 2003), so the features need not stay, and may be written over.
A second warning is of an encoder that detaches its features.
"""

import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from contrastile._errors import invalid
from contrastile._torch import multiply_each
from contrastile._types import FEATURES, accumulator
from contrastile.gradcache.memory import as_written
from contrastile.offload import host_room, stream

# random products of a row
PRODUCTS = 4
# precision of float32 on an accelerator, where matrices may be multiplied as TF32
EPS_TF32 = 2.0**-10

# results that a GPU still computes: the number, the event of its arrival, and the warning
_pending: deque[tuple[Tensor, torch.cuda.Event, str]] = deque()
# modules of encoders whose features had no gradient, and that were looked into
_looked_into: WeakSet[nn.Module] = WeakSet()


def tolerance(dtypes: Iterable[torch.dtype], *, accelerated: bool) -> float:
    """The relative distance of features that count as equal: half the root of the coarsest dtype's precision."""
    known = [dtype for dtype in dtypes if dtype in FEATURES]
    eps = [EPS_TF32 if accelerated and dtype == torch.float32 else torch.finfo(dtype).eps for dtype in known]
    return float(0.5 * max(eps) ** 0.5)


# four numbers of every row of each output of a sub-batch; None for an output that is not compared
Sketches = list[Tensor | None]


def sketched(outputs: Sequence[Tensor | None]) -> Sketches:
    """Sketch those outputs of a sub-batch that are rows of floating-point numbers."""
    return [sketch(out) if _is_compared(out) else None for out in outputs]


@torch.no_grad()
def sketch(out: Any) -> Tensor:
    """Products [rows, 4]; a tensor with further axes has one row for each vector of its last axis."""
    rows = out.detach()
    rows = rows[:, None] if rows.ndim == 1 else rows.reshape(-1, rows.shape[-1]) if rows.ndim > 2 else rows
    signs = _signs(rows.shape[1], rows.dtype, rows.device)
    kind = rows.device.type
    # products in the features' own dtype
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        return rows @ signs


@lru_cache(maxsize=64)
def _signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs [width, 4], scaled so that products have the size of the features, which float16 holds."""
    # not of a caller's inference mode, whose tensors are of no use elsewhere
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator("cpu").manual_seed(width)
        coins = torch.randint(2, (PRODUCTS, width), generator=generator, dtype=dtype, device="cpu")
        return coins.mul_(2).sub_(1).mul_(max(1, width) ** -0.5).to(device, non_blocking=True).T


class ReplayCheck:
    """Comparison of the second pass with the first. `dtypes`: those of the encoder, beside those of its outputs."""

    def __init__(self, first: Sequence[Sketches], dtypes: Iterable[torch.dtype]) -> None:
        self.first, self.dtypes = first, list(dtypes)
        # norm of the difference and number of rows of each sub-batch, by output
        self.gaps: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)

    def compare(self, index: int, outputs: Sequence[Any], upstream: Sequence[Tensor | None]) -> None:
        """Compare those outputs of a sub-batch that have a gradient."""
        pairs = zip(outputs, self.first[index], upstream, strict=True)
        for output, (out, before, gradient) in enumerate(pairs):
            if before is None or gradient is None or not out.requires_grad or out.numel() == 0:
                continue
            now = sketch(out)
            if now.shape == before.shape:
                gap = torch.linalg.vector_norm(now - before, dtype=accumulator(out.dtype))
                self.gaps[output].append((gap, len(before)))

    def report(self, name: str) -> None:
        """Warn if the features of a sub-batch differ; on a GPU in a later call, after the result has arrived."""
        excesses = [self._excess(output, gaps) for output, gaps in self.gaps.items()]
        if not excesses:
            return
        device = excesses[0].device
        worst = torch.stack([each.to(device) for each in excesses]).nan_to_num(0.0).max()
        # Python shows a sentence once
        rule = "give the same features in both passes"
        got = f"{name}, which gave others in the second, so that the gradient is not that of the first"
        remedy = (
            "Draw random numbers from torch's, Python's or NumPy's generators, keep nothing from call to call, and "
            "change nothing before the backward."
        )
        sentence = str(invalid("encoder", rule, got, remedy))
        if device.type != "cuda":
            _warn(worst, sentence)
            return
        on_host = host_room((), worst.dtype)
        on_host.copy_(worst, non_blocking=True)
        _pending.append((on_host, torch.cuda.current_stream(device).record_event(), sentence))

    def _excess(self, output: int, gaps: Sequence[tuple[Tensor, int]]) -> Tensor:
        """The largest difference of any sub-batch, divided by the tolerance for features of this size."""
        rows = torch.cat([each for sketches in self.first if (each := sketches[output]) is not None])
        size = torch.linalg.vector_norm(rows, dtype=accumulator(rows.dtype)) / len(rows) ** 0.5
        allowed = tolerance([rows.dtype, *self.dtypes], accelerated=rows.device.type != "cpu")
        scaled = multiply_each([gap for gap, _ in gaps], [n**-0.5 for _, n in gaps])
        return torch.stack(scaled).max() / (allowed * size)


def _is_compared(out: Any) -> bool:
    # sharded tensors are not compared
    plain = type(out) in (Tensor, nn.Parameter) and out.layout == torch.strided and out.device.type != "meta"
    return plain and out.dtype in FEATURES and out.ndim > 0


def poll() -> None:
    """Warn about earlier steps whose results have arrived."""
    while _pending and _pending[0][1].query():
        worst, _, sentence = _pending.popleft()
        _warn(worst, sentence)


def _warn(worst: Tensor, sentence: str) -> None:
    if float(worst) > 1:
        warnings.warn(sentence, stacklevel=2)


def warn_of_detached(
    job: Any, form: Any, values: Sequence[Tensor], wanted: Sequence[bool], upstream: Sequence[Tensor | None]
) -> None:
    """Warn where an encoder, none of whose parameters got a gradient, runs modules that are to be trained.

    Plain autograd would refuse the backward. The last sub-batch runs once more, in the first such backward of these
    modules. Not under FSDP2, whose ranks run a sharded module equally often.
    """
    modules = job.reached.modules
    if job.sharding.modules or all(module in _looked_into for module in modules):
        return
    _looked_into.update(modules)
    untrained: list[str] = []

    def look(module: nn.Module, _inputs: Any) -> None:
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            untrained.append(type(module).__name__)

    last = len(job.bounds) - 1
    with ExitStack() as stack:
        stack.enter_context(as_written())
        for module in modules:
            stack.callback(module.register_forward_pre_hook(look).remove)
        for rows in stream(job.rows(values, [last]), job.device):
            with job.autocast.entered():
                outputs, _ = job.run(last, rows, form, wanted)
    used = [out for out, gradient in zip(outputs, upstream, strict=True) if gradient is not None]
    if untrained and not any(out.requires_grad for out in used):
        rule = "return features with a gradient"
        got = f"{job.name}, which runs {untrained[0]} and detaches it, by no_grad, inference_mode or detach"
        remedy = "Take that out of the encoder; or call encode under torch.no_grad(), if nothing is to be trained."
        warnings.warn(str(invalid("encoder", rule, got, remedy)), stacklevel=2)
