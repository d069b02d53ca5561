"""Time and memory of a training step by sentence-transformers' losses, and by ours in their place.

    python benchmarks/doors.py [--sub-batch 2048] [--csv FILE]

Forward and backward of random texts of 8 to 64 tokens by an encoder of MiniLM's size with random weights, in
interleaved rounds, under bf16 autocast on a GPU; no download. Takes 90 seconds on an H200, loading included; without a
GPU sizes are small. Steps that take seconds run twice, of which the second is timed.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizerFast

from contrastile.bench.harness import COLUMNS, Machine, Report, Row, Step, Table, script
from contrastile.integrations.sentence_transformers import CachedGISTLoss, CachedMultiVectorLoss, CachedRankingLoss
from contrastile.train.provenance import provenance

with warnings.catch_warnings():
    # version 6 has moved what version 5 has there
    warnings.simplefilter("ignore")
    from sentence_transformers import SentenceTransformer, losses, models

PACKAGES = ("sentence-transformers", "transformers")
SHORTEST, LONGEST, WORDS = 8, 64, 30522
# late interaction compares every token of every pair: an eighth of the pairs, and vectors of this size
MULTI_VECTOR_SHARE, VECTOR = 8, 128
# seconds of each loss; a step that takes longer than the second is timed once
SECONDS, LONG_STEP = 2.0, 2.0
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
    """Sizes of a measurement on a device, and the folder of a model with random weights."""

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
        config = BertConfig(**sizes, num_hidden_layers=self.layers)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
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
        theirs, pairs, size, model = "sentence-transformers", self.pairs, self.sub_batch, self.encoder()
        modules: dict[tuple[str, Any], Callable[[], nn.Module]] = {
            (theirs, ""): lambda: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=size),
            ("contrastile", 0): lambda: CachedRankingLoss(model, mini_batch_size=size),
            ("contrastile", "auto"): lambda: CachedRankingLoss(model, mini_batch_size=size, retain="auto"),
        }
        yield "ranking", pairs, modules
        from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss

        vectors = self.multi_vector()
        modules = {
            (theirs, ""): lambda: CachedMultiVectorMultipleNegativesRankingLoss(vectors, mini_batch_size=size),
            ("contrastile", 0): lambda: CachedMultiVectorLoss(vectors, mini_batch_size=size),
        }
        yield "multi-vector", pairs // MULTI_VECTOR_SHARE, modules
        guide = self.encoder().eval().requires_grad_(False)
        # apart, because theirs may take a minute
        yield "gist", pairs, {("contrastile", 0): lambda: CachedGISTLoss(model, guide, mini_batch_size=size)}
        yield "gist", pairs, {(theirs, ""): lambda: losses.CachedGISTEmbedLoss(model, guide, mini_batch_size=size)}


def measure(bench: Bench, machine: Machine, report: Report) -> None:
    """Report the time and the peak of every loss."""
    origin = provenance(bench.device, *PACKAGES)
    report.say(TABLE.header())
    with report.failures("losses of version 6", judged=False):
        for loss, pairs, modules in bench.problems():
            columns, steps, rows = bench.columns(pairs), dict[str, Step](), dict[str, Row]()
            for (impl, retain), make in modules.items():
                step, name = bench.step(make(), columns), f"{impl} {retain}"
                with report.failures(f"{loss} by {impl}", judged=impl == "contrastile"):
                    # compiles and allocates
                    step()
                    seconds: list[float] = []
                    peak = machine.peak(lambda step=step, seconds=seconds: seconds.append(machine.time(step)))
                    rows[name] = {
                        "impl": impl, "loss": loss, "model": f"bert-384-{bench.layers}", "batch": pairs,
                        "sub_batch": bench.sub_batch, "length": LONGEST, "retain": retain,
                        "dtype": "bfloat16" if bench.device.type == "cuda" else "float32",
                        "peak_bytes": peak, "ms": seconds[0] * 1e3, **origin,
                    }  # fmt: skip
                    if seconds[0] <= LONG_STEP:
                        steps[name] = step
            timings = machine.race(steps)
            for name, row in rows.items():
                row["ms"] = timings[name].ms if name in timings else row["ms"]
                report.result(TABLE.line(row), row)


def main() -> None:
    pairs, sub_batch, layers = (8192, 256, 6) if torch.cuda.is_available() else (256, 32, 2)
    size = {"type": int, "default": sub_batch, "help": f"texts encoded at once (default: {sub_batch})"}
    torch.manual_seed(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        script(__doc__, COLUMNS["doors"], *PACKAGES, seconds=SECONDS, sub_batch=size) as (options, machine, report),
    ):
        bench = Bench(machine.device, pairs, options.sub_batch, layers, Path(folder))
        bench.save()
        measure(bench, machine, report)


if __name__ == "__main__":
    main()
