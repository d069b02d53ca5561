"""Compiled towers, and texts without their padding: what a pair costs, and how much of the chip the towers reach.

    python benchmarks/towers.py --out benchmarks/results [--seconds 200] [--parts steps profile texts large whole bits]

On one H200 in 200 seconds, compilation included; a part that would begin too late is left out. The rows are those of
`contrastile bench step`, in OUT/h200_towers.csv; OUT/cpu_towers.csv without a GPU, where the models are small.

    steps    ViT-B/16 with its text tower: plain, retain 0 and auto, as written and compiled
    profile  the kernels of a compiled step, and the share of the rate of a product that the towers reach
    texts    a BERT of 12 layers on texts as long as docstrings: padded, sorted by length, compiled
    large    ViT-L/14, retain 0
    whole    ViT-B/16 compiled as a whole, instead of layer by layer
    bits     gradients of compiled towers in two processes with a cache of compiled code each
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from contrastile.bench.harness import COLUMNS, Machine, Report, Row, read_rows, results_file
from contrastile.bench.step import StepBench
from contrastile.bench.towers import Pairs, Towers
from contrastile.bench.ways import WAYS, Task, cached, with_compiled_towers
from contrastile.gradcache.encode import encode
from contrastile.models.compiled import compile_tower, uncompile_tower
from contrastile.modules import ClipLoss
from contrastile.train.memory import PeakMemory
from contrastile.train.provenance import provenance, signature

ALL = {**WAYS, **with_compiled_towers(WAYS)}
# lengths of this project's docstring passages in subwords: their logarithm's mean and deviation, and the most
MEAN, DEVIATION, LONGEST = 4.6, 1.04, 256
# the parts in their order, with the seconds that each takes on an H200
PARTS = {"steps": 0, "profile": 5, "texts": 40, "large": 30, "whole": 45, "bits": 40}
# kernels by parts of their names, the first that fits
KINDS = {
    "products": ("gemm", "nvjet", "cutlass", "cublas"), "attention": ("flash", "fmha", "attention", "sdpa"),
    "fused by the compiler": ("triton_",), "copies": ("memcpy", "memset", "copy"), "others": ("",),
}  # fmt: skip


@dataclass
class Bench:
    """A device with its sizes; `write` takes rows. model, sub_batch, batches: of the parts named above."""

    machine: Machine
    write: Callable[[Row], None]
    on_gpu: bool
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.machine.device

    def steps(self) -> None:
        """Plain, retain 0 and auto, as written and compiled."""
        plan = {
            512: ["plain", "compiled-plain"],
            1024: ["retain-auto", "compiled-retain-auto"],
            8192: ["retain-0"],
            65536: ["compiled-retain-0"],
        }
        self._ways("vit-b-16", plan, 512)

    def large(self) -> None:
        """The larger model, with a replay of every sub-batch."""
        self._ways("vit-l-14", {768: ["retain-0", "compiled-retain-0"]}, 192)

    def whole(self) -> None:
        """Compile the whole towers, as a comparison with their layers."""
        from contrastile.models import compiled

        layers_of, compiled.layers_of = compiled.layers_of, lambda _: []
        try:
            self._ways("vit-b-16", {512: ["compiled-plain"], 1024: ["compiled-retain-0"]}, 512, note=", whole towers")
        finally:
            compiled.layers_of = layers_of

    def _ways(self, model: str, plan: dict[int, list[str]], sub_batch: int, note: str = "") -> None:
        """Measure the ways of `plan`, by batch; small ones without a GPU."""
        if not self.on_gpu:
            model, plan, sub_batch = "tiny", {64: sorted({name for names in plan.values() for name in names})}, 16

        def write(row: Row) -> None:
            self.write({**row, "way": row["way"] + note})

        bench = StepBench(self.machine, self.dtype, Report(_say, write), ALL)
        bench.measure(model, plan, sub_batch)

    def profile(self) -> None:
        """Print where the time of a compiled step goes, and the rate of the towers beside a product's."""
        name, sub_batch, batch = ("vit-b-16", 512, 1024) if self.on_gpu else ("tiny", 16, 64)
        towers = Towers(name, self.device)
        task = Task(towers, Pairs(towers).sides(batch, "device"), sub_batch, self.device, self.dtype, ClipLoss())
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for tower, leaf in task.sides:
                tower(leaf[:2])
        forward = counter.get_total_flops() / 2
        product = self.machine.product_operations / self.machine.time(self.machine.product, 20)
        for words, wanted in (("as written", False), ("compiled", True)):
            towers.compiled(wanted)
            cached(task)
            seconds = self.machine.time(lambda: cached(task))
            rate = 4 * forward * batch / seconds
            _say(
                f"retain 0, {words}: {seconds / batch * 1e6:.0f} µs a pair, {rate / 1e12:.1f} TFLOP/s, "
                f"{rate / product:.2f} of a product's {product / 1e12:.0f}"
            )
        if not self.on_gpu:
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            cached(task)
            torch.cuda.synchronize()
        kernels = Counter[str]()
        for event in profiler.key_averages():
            kernels[event.key] += event.self_device_time_total
        total = sum(kernels.values())
        kinds = Counter[str]()
        for kernel, spent in kernels.items():
            kinds[next(kind for kind, words in KINDS.items() if any(w in kernel.lower() for w in words))] += spent
        for kind, spent in kinds.most_common():
            _say(f"  {kind:24} {spent / total:6.1%} {spent / batch:8.1f} µs a pair")
        for kernel, spent in kernels.most_common(14):
            _say(f"    {spent / batch:8.1f} {kernel[:100]}")

    def texts(self) -> None:
        """Texts padded to the longest, sorted by length, and with a budget of tokens; as written and compiled."""
        import transformers as hf

        count, sub_batch, most = (4096, 256, LONGEST) if self.on_gpu else (96, 16, 64)
        torch.manual_seed(0)
        sizes = {} if self.on_gpu else {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}
        layers = 12 if self.on_gpu else 3
        config = hf.BertConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=LONGEST)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        with self.device:
            reader = Reader(hf.BertModel(config, add_pooling_layer=False)).train()
        lengths = torch.empty(count).normal_(MEAN, DEVIATION).exp().clamp(3, LONGEST) * most / LONGEST
        mask = (torch.arange(most) < lengths.round()[:, None]).long()
        texts = {"input_ids": torch.randint(1, config.vocab_size, (count, most)) * mask, "attention_mask": mask}
        texts = {name: rows.to(self.device) for name, rows in texts.items()}
        ways = {
            "padded": {"sub_batch": sub_batch},
            "by length": {"sub_batch": sub_batch, "sub_batch_tokens": sub_batch * most},
            "by tokens": {"sub_batch_tokens": sub_batch * most},
        }
        padded = 0.0
        for compiled in (False, True):
            (compile_tower if compiled else uncompile_tower)(reader)
            for way, words in ways.items():
                memory, began = PeakMemory(self.device), time.perf_counter()

                def step(words: dict[str, int] = words) -> None:
                    reader.zero_grad()
                    with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
                        features = encode(reader, texts, **words)
                    features.backward(torch.full_like(features, 1e-3))

                step()
                first = time.perf_counter() - began
                memory.start()
                seconds = min(self.machine.time(step) for _ in range(2))
                padded = padded or seconds
                name = f"retain 0, {way}" + (", compiled" if compiled else "")
                _say(
                    f"texts, {name:28} {seconds / count * 1e6:8.1f} µs a text, {padded / seconds:5.2f} times as fast "
                    f"as padded; the first step took {first:.1f} s"
                )
                self.write({
                    "impl": "contrastile", "way": name, "model": "bert-base" if self.on_gpu else "tiny bert",
                    "batch": count, "sub_batch": sub_batch, "retain": "0", "inputs": "device",
                    "dtype": str(self.dtype).removeprefix("torch."), "world": 1, "ms": round(seconds * 1e3, 2),
                    "us_per_pair": round(seconds / count * 1e6, 2), "ratio_to_plain": None,
                    "peak_bytes": memory.bytes(), **provenance(self.device, "transformers"),
                })  # fmt: skip

    def bits(self) -> None:
        """Compare the gradients of two processes that compile for themselves."""
        digests = []
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                subprocess.Popen(
                    [sys.executable, __file__, "--digest"],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{index}"},
                )
                for index in range(2)
            ]
            digests = [process.communicate()[0].split() for process in processes]
        _say(f"bits of two processes: {'equal' if digests[0] == digests[1] and digests[0] else digests}")


class Reader(nn.Module):
    """Tokens [B, L] and their mask to the mean over tokens [B, D]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)


def digest() -> None:
    """Print a digest of the gradients of compiled towers with dropout."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    # made on the CPU: two processes draw the same weights
    towers = Towers("tiny", torch.device("cpu"), dropout=0.1).to(device)
    towers.compiled(True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cached(Task(towers, Pairs(towers).sides(100, "device"), 16, device, dtype, ClipLoss()))
    whole = hashlib.sha256()
    for parameter in towers.parameters():
        if parameter.grad is not None:
            whole.update(parameter.grad.cpu().numpy().tobytes())
    print(whole.hexdigest()[:16])


def _say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def opened(folder: Path | None, on_gpu: bool) -> Iterator[Callable[[Row], None]]:
    """Open the file of rows; print its newest rows once more at the end."""
    path = None if folder is None else folder / f"{'h200' if on_gpu else 'cpu'}_towers.csv"
    before = len(read_rows(path)) if path is not None and path.is_file() else 0
    with results_file(path, COLUMNS["steps"]) as write:
        yield write
    for row in read_rows(path)[before:] if path is not None else ():
        _say(f"{row['model']:10} {row['batch']:>6} {row['impl']:12} {row['way']:36} {row['us_per_pair']:>9} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write rows there")
    parser.add_argument("--seconds", type=float, default=200.0, help="for all parts (default: 200)")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    if arguments.digest:
        digest()
        return
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    on_gpu, began = torch.cuda.is_available(), time.perf_counter()
    device = torch.device("cuda" if on_gpu else "cpu")
    _say(signature(device, "transformers"))
    with opened(arguments.out, on_gpu) as write:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        bench = Bench(Machine.of(device, 1.0), write, on_gpu, dtype)
        for part, seconds in PARTS.items():
            spent = time.perf_counter() - began
            if part not in arguments.parts:
                continue
            if on_gpu and spent + seconds > arguments.seconds:
                _say(f"{part}: left out after {spent:.0f} s")
                continue
            _say(f"--- {part}")
            try:
                getattr(bench, part)()
            except Exception as error:
                # the other parts still run
                _say(f"{part}: {type(error).__name__}: {error}")
            bench.machine.free_bytes()
            _say(f"--- {part} took {time.perf_counter() - began - spent:.0f} s")


if __name__ == "__main__":
    main()
