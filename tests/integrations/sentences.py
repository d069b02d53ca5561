"""Small models, columns of texts and comparisons for the tests of the losses for sentence-transformers."""

from __future__ import annotations

import os
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizerFast

from contrastile.integrations.sentence_transformers import CachedRankingLoss

with warnings.catch_warnings():
    # version 6 has moved what version 5 has there
    warnings.simplefilter("ignore")
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        __version__,
        losses,
        models,
        util,
    )

__all__ = ["SentenceTransformer", "losses", "models", "util"]
# features of a model
WIDTH = 16
N = 8
# relative difference to their cached losses, which rounded gradients to float32 before version 6.2
CACHED = 1e-9 if tuple(map(int, __version__.split(".")[:2])) >= (6, 2) else 1e-3
LETTERS = "abcdefghij"


def transformer(folder: Path, dropout: float = 0.0, letters: str = LETTERS, width: int = WIDTH) -> Path:
    """The folder of a small model of transformers, whose words are letters."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":", *letters]))
    sizes = {"vocab_size": 6 + len(letters), "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    BertModel(BertConfig(**sizes, **rates, intermediate_size=32)).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def build(folder: Path, dropout: float = 0.0, **words: Any) -> Any:
    """A small model that leaves prompts out of its mean."""
    first = models.Transformer(str(transformer(folder, dropout, **words)))
    modules = [first, models.Pooling(words.get("width", WIDTH), include_prompt=False)]
    return SentenceTransformer(modules=modules, device="cpu")


def texts(column: str, count: int = N) -> list[str]:
    words = ("ab", "cde", "f g", "a b c", "h", "ij ij", "b d f", "a e")
    return [f"{word} {column}" * (1 + len(word) % 3) for word in words[:count]]


def columns_of(model: Any, names: str, prompt: str | None = None) -> list[dict[str, Any]]:
    return [dict(model.preprocess(texts(name), prompt=prompt)) for name in names]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def step(loss: nn.Module, columns: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Value and gradients of a loss, on a copy of its model."""
    loss = deepcopy(loss)
    loss.zero_grad()
    value = loss([dict(column) for column in columns], None)
    value.backward()
    return value.detach(), gradients(loss.model)


def trained(model: Any, loss: Any, folder: Path, batch: int = 4, **words: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a training by the library's trainer."""
    from datasets import Dataset

    dataset = Dataset.from_dict({"anchor": texts("a"), "positive": texts("b"), "negative": texts("c")})
    data: Any = {"first": dataset, "second": dataset} if isinstance(loss, dict) else dataset
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=batch, num_train_epochs=2, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=0.1, optim="sgd",
        prompts={"anchor": "a: "}, **words,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
    trainer.train()
    curve = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return curve, {name: p.detach() for name, p in model.named_parameters()}


if __name__ == "__main__":
    # a training that torchrun starts
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    target, found = Path(sys.argv[1]), {}
    sys.path.append(str(Path(__file__).parents[1]))
    from trainer_on_ranks import CASES, as_on_gpus, whole

    if "zero 2" in CASES:
        import deepspeed

        # its own collectives for a CPU would be compiled now, for a minute
        deepspeed.ops.__compatible_ops__.clear()
    for case in ("ddp", "fsdp2", "zero 2"):
        if case not in CASES:
            continue
        loaded = torch.load(target / "model.pt", weights_only=False)
        words = {**CASES[case][1]}
        if not words.pop("double", True):
            loaded.float()
        with as_on_gpus(bool(words)):
            gathering = CachedRankingLoss(loaded, mini_batch_size=3, gather_across_devices=True)
            found[case] = whole(trained(loaded, gathering, target, ddp_backend="gloo", **words))
    torch.save(found, target / f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()
    # threads that libraries leave to the end of the process may abort it, rarely and after the group has ended too
    sys.stdout.flush()
    os._exit(0)
