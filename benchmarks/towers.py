"""Texts without their padding: the cost of one, as written and compiled; and the rate of towers beside a product's.

    python benchmarks/towers.py --csv benchmarks/results/h200_towers.csv

Takes a minute on an H200, compilation included. A BERT of 12 layers encodes texts as long as docstrings: padded, sorted
by length, and with a budget of tokens. Without a GPU the models are small. `contrastile bench step` measures the other
rows of the file.
"""

from __future__ import annotations

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from contrastile.bench.harness import COLUMNS, Machine, Report, script
from contrastile.bench.towers import Pairs, Towers
from contrastile.bench.ways import Task, cached
from contrastile.gradcache.encode import encode
from contrastile.models.compiled import compile_tower, uncompile_tower
from contrastile.modules import ClipLoss
from contrastile.train.memory import PeakMemory
from contrastile.train.provenance import provenance

# lengths of this project's docstring passages in subwords: their logarithm's mean and deviation, and the most
MEAN, DEVIATION, LONGEST = 4.6, 1.04, 256


class Reader(nn.Module):
    """Tokens [B, L] and their mask to the mean over tokens [B, D]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)


def texts(machine: Machine, dtype: torch.dtype, report: Report) -> None:
    """Encode texts padded to the longest, sorted by length, and with a budget of tokens; as written and compiled."""
    device, on_gpu = machine.device, machine.device.type == "cuda"
    count, sub_batch, most = (4096, 256, LONGEST) if on_gpu else (96, 16, 64)
    sizes = {} if on_gpu else {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}
    config = hf.BertConfig(**sizes, num_hidden_layers=12 if on_gpu else 3, max_position_embeddings=LONGEST)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    with device:
        reader = Reader(hf.BertModel(config, add_pooling_layer=False)).train()
    lengths = torch.empty(count).normal_(MEAN, DEVIATION).exp().clamp(3, LONGEST) * most / LONGEST
    mask = (torch.arange(most) < lengths.round()[:, None]).long()
    tokens = {"input_ids": torch.randint(1, config.vocab_size, (count, most)) * mask, "attention_mask": mask}
    tokens = {name: rows.to(device) for name, rows in tokens.items()}
    ways = {
        "padded": {"sub_batch": sub_batch},
        "by length": {"sub_batch": sub_batch, "sub_batch_tokens": sub_batch * most},
        "by tokens": {"sub_batch_tokens": sub_batch * most},
    }
    for compiled in (False, True):
        (compile_tower if compiled else uncompile_tower)(reader)
        for way, words in ways.items():

            def step(words: dict[str, int] = words) -> None:
                reader.zero_grad()
                with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                    features = encode(reader, tokens, **words)
                features.backward(torch.full_like(features, 1e-3))

            memory, first = PeakMemory(device), machine.time(step)
            memory.start()
            ms = 1e3 * min(machine.time(step) for _ in range(2))
            row = {
                "impl": "contrastile", "way": f"retain 0, {way}" + (", compiled" if compiled else ""),
                "model": "bert-base" if on_gpu else "tiny bert", "batch": count, "sub_batch": sub_batch, "retain": "0",
                "inputs": "device", "dtype": str(dtype).removeprefix("torch."), "world": 1, "ms": round(ms, 2),
                "us_per_pair": round(ms / count * 1e3, 2), "ratio_to_plain": None, "peak_bytes": memory.bytes(),
                **provenance(device, "transformers"),
            }  # fmt: skip
            report.result(
                f"{row['way']:32} {row['us_per_pair']:8.1f} µs a text; the first step took {first:.1f} s", row
            )


def rate(machine: Machine, dtype: torch.dtype, report: Report) -> None:
    """Say the operations per second of a step's towers, and their share of a product's."""
    name, sub_batch, batch = ("vit-b-16", 512, 1024) if machine.device.type == "cuda" else ("tiny", 16, 64)
    towers = Towers(name, machine.device)
    task = Task(towers, Pairs(towers).sides(batch, "device"), sub_batch, machine.device, dtype, ClipLoss())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for tower, leaf in task.sides:
            tower(leaf[:2])
    forward = counter.get_total_flops() / 2
    product = machine.product_operations / machine.time(machine.product, 20)
    for words, wanted in (("as written", False), ("compiled", True)):
        towers.compiled(wanted)
        cached(task)
        # a forward, its replay, and a backward of twice their operations
        reached = 4 * forward * batch / machine.time(lambda: cached(task))
        report.say(f"{name}, retain 0, {words}: {reached / 1e12:.1f} TFLOP/s, {reached / product:.2f} of a product's")


def main() -> None:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    torch.manual_seed(0)
    with script(__doc__, COLUMNS["steps"], "transformers", seconds=1.0) as (_, machine, report):
        for measure in (rate, texts):
            with report.failures(measure.__name__, judged=True):
                measure(machine, dtype, report)


if __name__ == "__main__":
    main()
