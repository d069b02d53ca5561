"""Time and memory of a training step by sentence-transformers' losses, and by ours in their place.

Forward and backward of random texts of 8 to 64 tokens by an encoder of MiniLM's size with random weights, in
interleaved rounds, under bf16 autocast on a GPU; no download. Takes 90 seconds on an H200, loading included; begins no
further loss once --budget seconds have passed. Steps that take seconds run twice, of which the second is timed.

    python benchmarks/doors.py --out benchmarks/results
    python benchmarks/doors.py --pairs 256 --sub-batch 32 --layers 2
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizerFast

from contrastile.bench.harness import COLUMNS, Machine, Report, Row, Step, Table, busy, results_file
from contrastile.integrations.sentence_transformers import CachedGISTLoss, CachedMultiVectorLoss, CachedRankingLoss
from contrastile.train.provenance import provenance

with warnings.catch_warnings():
    # version 6 has moved what version 5 has there
    warnings.simplefilter("ignore")
    from sentence_transformers import SentenceTransformer, losses, models

PACKAGES = ("sentence-transformers", "transformers")
LOSSES = ["ranking", "multi-vector", "gist"]
SHORTEST, LONGEST, WORDS = 8, 64, 30522
# late interaction compares every token of every pair: an eighth of the pairs, and vectors of this size
MULTI_VECTOR_SHARE, VECTOR = 8, 128
# a step that takes longer is timed once
LONG_STEP = 2.0
TABLE = Table(
    ("loss", "loss", "14"), ("impl", "by", "22"), ("retain", "retain", "7"), ("batch", "pairs", ">6"),
    ("ms", "ms", ">9.1f"), ("peak_bytes", "MiB", ">9.0f"),
)  # fmt: skip


class Projection(nn.Module):
    """Unit vectors of tokens, for late interaction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, VECTOR, bias=False)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "token_embeddings": F.normalize(self.linear(features["token_embeddings"]), dim=-1)}


@dataclass(frozen=True)
class Bench:
    """The sizes of a measurement, and the folder of a model with random weights."""

    device: torch.device
    pairs: int
    sub_batch: int
    layers: int
    folder: Path

    def save(self) -> None:
        """Write the encoder and a tokenizer."""
        (self.folder / "vocab.txt").write_text(
            "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(WORDS - 5))])
        )
        BertTokenizerFast(str(self.folder / "vocab.txt")).save_pretrained(self.folder)
        sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": WORDS}
        config = BertConfig(
            **sizes, num_hidden_layers=self.layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        BertModel(config).save_pretrained(self.folder)

    def encoder(self) -> Any:
        """The encoder, with the mean of its vectors."""
        return self._ready(SentenceTransformer(modules=[models.Transformer(str(self.folder)), models.Pooling(384)]))

    def multi_vector(self) -> Any:
        """The encoder, with a vector for each token."""
        from sentence_transformers import MultiVectorEncoder
        from sentence_transformers.base.modules import Transformer
        from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

        return self._ready(
            MultiVectorEncoder(modules=[Transformer(str(self.folder)), Projection(384), MultiVectorMask()])
        )

    def _ready(self, model: Any) -> Any:
        model.to(self.device).train()
        if self.device.type == "cuda":
            # as accelerate's prepare does
            model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)
        return model

    def columns(self, pairs: int) -> list[dict[str, Tensor]]:
        """Tokens of anchors and of positives."""
        columns = []
        for _ in range(2):
            lengths = torch.randint(SHORTEST, LONGEST + 1, (pairs, 1))
            mask = (torch.arange(LONGEST) < lengths).long()
            tokens = {"input_ids": torch.randint(5, WORDS, mask.shape) * mask, "attention_mask": mask}
            columns.append({name: x.to(self.device) for name, x in tokens.items()})
        return columns

    def step(self, loss: nn.Module, columns: list[dict[str, Tensor]]) -> Step:
        """A forward and backward pass."""

        def run() -> None:
            loss.zero_grad()
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
                value = loss([dict(column) for column in columns], None)
            value.backward()

        return run

    def problems(self) -> Iterator[tuple[str, int, dict[tuple[str, Any], Callable[[], nn.Module]]]]:
        """Each loss with its number of pairs, and the modules that compute it by implementation and `retain`."""
        theirs, size = "sentence-transformers", self.sub_batch
        model = self.encoder()
        yield (
            "ranking",
            self.pairs,
            {
                (theirs, ""): lambda: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=size),
                ("contrastile", 0): lambda: CachedRankingLoss(model, mini_batch_size=size),
                ("contrastile", "auto"): lambda: CachedRankingLoss(model, mini_batch_size=size, retain="auto"),
            },
        )
        from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss

        vectors = self.multi_vector()
        yield (
            "multi-vector",
            self.pairs // MULTI_VECTOR_SHARE,
            {
                (theirs, ""): lambda: CachedMultiVectorMultipleNegativesRankingLoss(vectors, mini_batch_size=size),
                ("contrastile", 0): lambda: CachedMultiVectorLoss(vectors, mini_batch_size=size),
            },
        )
        guide = self.encoder().eval().requires_grad_(False)
        # apart, because theirs may take a minute
        yield "gist", self.pairs, {("contrastile", 0): lambda: CachedGISTLoss(model, guide, mini_batch_size=size)}
        yield "gist", self.pairs, {(theirs, ""): lambda: losses.CachedGISTEmbedLoss(model, guide, mini_batch_size=size)}


def measure(bench: Bench, machine: Machine, names: list[str], budget: float, report: Report) -> None:
    """Report the time and the peak of every loss that begins within the budget of seconds."""
    end, origin = time.perf_counter() + budget, provenance(bench.device, *PACKAGES)
    report.say(TABLE.header())
    with report.failures("losses of version 6", judged=False):
        for loss, pairs, modules in bench.problems():
            if loss not in names:
                continue
            if time.perf_counter() > end:
                report.note(f"{loss}: not begun within {budget:.0f} seconds")
                continue
            columns, steps, rows = bench.columns(pairs), dict[str, Step](), dict[str, Row]()
            for (impl, retain), make in modules.items():
                step, name = bench.step(make(), columns), f"{impl} {retain}"
                with report.failures(f"{loss} by {impl}", judged=impl == "contrastile"):
                    # compiles and allocates
                    first = machine.time(step)
                    report.say(f"  {loss} by {impl}: first step {first:.1f} s")
                    start = time.perf_counter()
                    peak, seconds = machine.peak(step), time.perf_counter() - start
                    rows[name] = {
                        "impl": impl, "loss": loss, "model": f"bert-384-{bench.layers}", "batch": pairs,
                        "sub_batch": bench.sub_batch, "length": LONGEST, "retain": retain,
                        "dtype": "bfloat16" if bench.device.type == "cuda" else "float32",
                        "peak_bytes": peak, "ms": seconds * 1e3, **origin,
                    }  # fmt: skip
                    if seconds > LONG_STEP:
                        report.result(TABLE.line(rows[name]), rows[name])
                    else:
                        steps[name] = step
            for name, timing in machine.race(steps).items():
                row = {**rows[name], "ms": timing.ms}
                report.result(TABLE.line(row), row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--pairs", type=int, default=8192 if on_gpu else 256, help="of a batch")
    parser.add_argument(
        "--sub-batch", type=int, default=256 if on_gpu else 32, help="texts that the encoder sees at once"
    )
    parser.add_argument("--layers", type=int, default=6, help="of the encoder (default: 6, as MiniLM)")
    parser.add_argument("--losses", nargs="+", default=LOSSES, choices=LOSSES, help="those to measure (default: all)")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each may be measured (default: 2)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no loss begins (default: 60)")
    parser.add_argument("--out", type=Path, help="folder to whose doors.csv rows are appended")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if on_gpu else "cpu")
    machine = Machine.of(device, options.seconds)
    with (
        tempfile.TemporaryDirectory() as folder,
        results_file(options.out and options.out / "doors.csv", COLUMNS["doors"]) as write,
    ):
        bench = Bench(device, options.pairs, options.sub_batch, options.layers, Path(folder))
        bench.save()
        if warning := busy(device):
            print(warning)
        measure(bench, machine, options.losses, options.budget, Report(lambda line: print(line, flush=True), write))


if __name__ == "__main__":
    main()
