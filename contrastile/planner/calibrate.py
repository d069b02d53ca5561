"""A profile of this machine, measured in about twenty seconds by small losses, a layer of a tower, and copies.

Beside `profile.py`, which reads it. The rate of products and the host's time of a kernel are those of a transformer's
layer, forward and backward, whose work `towers.py` counts: bare products are faster, and bare kernels are launched in
a fraction of the time that autograd and modules take. Rates between several GPUs need several processes and are taken
over from the profile of the H200; the profile says so.
"""

import io
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from contrastile.modules import ClipLoss
from contrastile.offload import free_memory, settle, usable_cpus
from contrastile.planner.loss import LossSize
from contrastile.planner.profile import CPU, Profile, calibrated_path, known_profiles
from contrastile.planner.seconds import EXPONENTIAL_BYTES
from contrastile.planner.towers import Work, measure, shapes_only

# seconds for each of the measurements
SECONDS = 1.2
# side of products, numbers of a copy, rows of a loss: on a GPU, and on a CPU
SIDES, NUMBERS, ROWS = {"cuda": 8192, "cpu": 1024}, {"cuda": 2**28, "cpu": 2**22}, {"cuda": 2**15, "cpu": 2**11}
# features of two losses, whose difference is that of their products; a CPU's exponentials take as long as 200 features
FEATURES = {"cuda": (512, 1024), "cpu": (64, 512)}
# rows and features of a loss that takes the host's time alone
SMALL = {"cuda": (1024, 512), "cpu": (64, 64)}
PICTURE_SIDE = 256
# width, heads, and tokens of a layer; examples for products to take most of the time, and one for the host to
LAYER = {"cuda": (1024, 16, 256), "cpu": (256, 4, 64)}
EXAMPLES = {"cuda": 64, "cpu": 8}
# a measurement may be disturbed: rate of products in a layer over that of bare ones, and their share of the time of a
# loss of many features, at least; share of a pair's other work, at least
LEAST_SHARE, LEAST_REST = 0.5, 0.02


def calibrate(path: Path | None = None, seconds: float = SECONDS) -> Path:
    """Measure this machine's first GPU, or its CPUs, and write the profile; `seconds` for each measurement."""
    import tomli_w

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = calibrated_path() if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(asdict(measured(device, seconds))), encoding="utf-8")
    return path


def measured(device: torch.device, seconds: float) -> Profile:
    """The profile of a device."""
    kind, base = device.type, known_profiles()["h200"]
    name, memory = torch.cuda.get_device_name(device) if kind == "cuda" else CPU, free_memory(device)[1]

    def timed(step: Callable[[], object]) -> float:
        """Seconds of a step, the least of several."""
        step()
        settle(device)
        least, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end or least == float("inf"):
            start = time.perf_counter()
            step()
            settle(device)
            least = min(least, time.perf_counter() - start)
        return least

    side = SIDES[kind]
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        rates[dtype] = 2 * side**3 / timed(lambda a=a, b=b: torch.mm(a, b))  # type: ignore[misc]
    q, k, v = (torch.randn(8, 8, side // 8, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    attention = 4 * q.numel() * k.shape[2] / timed(lambda: F.scaled_dot_product_attention(q, k, v))
    x, y, z = (torch.ones(NUMBERS[kind], device=device) for _ in range(3))
    bandwidth = 3 * x.nbytes / timed(lambda: torch.add(x, y, out=z))
    # a CPU without instructions for bf16 takes ten times as long for its products as for the kernels' launches
    work_of_one, one = _layer(kind, device, 1, half=kind != "cpu")
    work, many = _layer(kind, device, EXAMPLES[kind])
    launch = timed(one) / work_of_one.kernels
    bare = rates[torch.bfloat16]
    busy = timed(many) - work.moved / bandwidth - work.attention / attention
    products = min(bare, max(LEAST_SHARE * bare, work.products / max(busy, 1e-9)))
    rows, (few_features, more_features) = ROWS[kind], FEATURES[kind]
    cases = ((few_features, "auto"), (more_features, "auto"), (few_features, "dense"))
    tiled, wider, as_matrix = (timed(_loss(rows, features, backend, device)) for features, backend in cases)
    call = timed(_loss(*SMALL[kind], "auto", device))
    slope = feature_seconds(tiled / rows**2, wider / rows**2, FEATURES[kind])
    size = LossSize(rows, rows, 1, few_features, memory, device=kind, dtype=_dtype(kind))
    # operations of a pair and feature; seconds of a pair's kept exponential, and of all else beside its products
    operations = size.operations / rows**2 / few_features
    exponential = EXPONENTIAL_BYTES / bandwidth if size.exponentials else 0.0
    pair = max(LEAST_REST * tiled / rows**2, (tiled - call) / rows**2 - slope * few_features - exponential)
    of_matrix = as_matrix / rows**2
    dense = max(LEAST_REST * of_matrix, of_matrix - slope * few_features) / size.matrices
    threads = torch.get_num_threads()
    device_text = f"{threads} thread{'s' * (threads != 1)}" if kind == "cpu" else name
    return replace(
        base, name=name, device=kind, memory=memory, products=products, attention=attention,
        float32=rates[torch.float32] / bare, bandwidth=bandwidth, launch=launch,
        loss=operations / slope, pair=pair, dense_pair=dense, call=call, decode=_decoded(seconds), cpus=usable_cpus(),
        provenance=(
            f"contrastile plan --calibrate, {device_text}, torch {torch.__version__}, {datetime.now(UTC).date()}",
            "link, network, hop and block are those of the H200: one process cannot measure them",
        ),
    )  # fmt: skip


def feature_seconds(few: float, more: float, features: tuple[int, int]) -> float:
    """Seconds of a pair and feature, from those of a pair of few features and of more: a straight line.

    At least half, and at most all, of the time of more features, whatever disturbed one of the two.
    """
    whole = more / features[1]
    return min(whole, max(LEAST_SHARE * whole, (more - few) / (features[1] - features[0])))


def _layer(kind: str, device: torch.device, examples: int, *, half: bool = True) -> tuple[Work, Callable[[], object]]:
    """A layer of a transformer for so many examples, forward and backward, and its work; half: under autocast."""
    width, heads, tokens = LAYER[kind]

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    context = partial(torch.autocast, device_type=kind, dtype=torch.bfloat16, enabled=half)
    with shapes_only():
        counted = layer()
        on_cpu = partial(torch.autocast, device_type="cpu", dtype=torch.bfloat16, enabled=half)
        cost = measure("layer", counted, lambda n: [torch.empty(n, tokens, width)], counted, examples, on_cpu)
    real, x = layer().to(device), torch.randn(examples, tokens, width, device=device)

    def step() -> None:
        with context():
            out = real(x)
        torch.autograd.grad(out, [*real.parameters()], torch.ones_like(out))

    return cost.replay_work, step


def _loss(rows: int, features: int, backend: str, device: torch.device) -> Callable[[], object]:
    """A loss, forward and backward: in 16 bits on a GPU, in float32 on a CPU."""
    q, k = (
        F.normalize(torch.randn(rows, features, device=device), dim=-1).to(_dtype(device.type)).requires_grad_()
        for _ in range(2)
    )
    loss = ClipLoss(backend=backend)  # type: ignore[arg-type]
    return lambda: loss(q, k, 20.0).backward()


def _dtype(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == "cuda" else torch.float32


def _decoded(seconds: float) -> float:
    """JPEGs of 256 pixels that a CPU decodes in a second."""
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((PICTURE_SIDE, PICTURE_SIDE), 64).convert("RGB").save(file, "JPEG")
    count, end = 0, (start := time.perf_counter()) + seconds
    while count == 0 or time.perf_counter() < end:
        Image.open(io.BytesIO(file.getvalue())).load()
        count += 1
    return count / (time.perf_counter() - start)
