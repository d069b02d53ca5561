"""A training by `ContrastileTrainer` that torchrun may start: writes the weights, and the losses of each step."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from contrastile import ClipLoss
from contrastile.integrations.transformers import ContrastileTrainer, mean_pooled

COUNT, LENGTH = 32, 5


class Pairs(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, 20, (COUNT, 2, LENGTH), generator=generator)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(("query", "key"), self.tokens[index], strict=True))


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The query's inputs nested, the key's with a prefix."""
    query, key = (torch.stack([row[side] for row in rows]) for side in ("query", "key"))
    return {
        "query": {"input_ids": query, "attention_mask": torch.ones_like(query)},
        "key_input_ids": key,
        "key_attention_mask": torch.ones_like(key),
    }


class Model(nn.Module):
    """A model of transformers, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        undropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.bert = BertModel(BertConfig(**sizes, **undropped, intermediate_size=32), add_pooling_layer=False)
        # FSDP2 and DeepSpeed refuse a parameter without axes
        self.logit_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, **inputs: Tensor) -> Any:
        return self.bert(**inputs)

    def get_features(self, **inputs: Tensor) -> Tensor:
        return mean_pooled(self.bert, **inputs)


def scale_of(model: Model) -> Tensor:
    return model.logit_scale.exp()


class Plain(Trainer):
    """The whole batch at once, and the plain formula."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        key = {name.removeprefix("key_"): x for name, x in inputs.items() if name.startswith("key_")}
        with self.accelerator.autocast():
            query, key = mean_pooled(model, **inputs["query"]), mean_pooled(model, **key)
            loss = ClipLoss(backend="dense")(query, key, scale_of(model))
        return (loss, {}) if return_outputs else loss


def trainer(kind: str, folder: Path, batch: int, **words: Any) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": batch, "max_steps": 4, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2,
        "optim": "sgd", "dataloader_drop_last": True, "seed": 3, "remove_unused_columns": kind != "plain",
        "per_device_eval_batch_size": batch, **words,
    }  # fmt: skip
    if kind == "plain":
        arguments["remove_unused_columns"] = False
    data = {"train_dataset": Pairs(), "eval_dataset": Pairs(), "data_collator": collate}
    model = Model()
    if arguments.pop("double", True):
        model.double()
    made = TrainingArguments(**arguments)
    if kind == "plain":
        return Plain(model=model, args=made, **data)
    more: dict[str, Any] = {"encoders": "get_features"} if kind == "method" else {}
    return ContrastileTrainer(model=model, args=made, sub_batch=3, loss=ClipLoss(), scale=scale_of, **more, **data)


def result(trained: Any) -> tuple[list[float], dict[str, Tensor]]:
    losses = [line["loss"] for line in trained.state.log_history if "loss" in line]
    return losses, {name: p.detach().clone() for name, p in trained.model.named_parameters()}


FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}}


def zero(stage: int) -> dict[str, Any]:
    """Words of a Trainer on DeepSpeed."""
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **dict.fromkeys(auto, "auto"),
    }
    return {"deepspeed": config, "double": False}


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
# wrappers of a Trainer, with the kind of encoder
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ours", {}), "compiled": ("ours", COMPILED), "fsdp2": ("ours", FSDP2), "fsdp2, a method": ("method", FSDP2),
}  # fmt: skip
if find_spec("deepspeed"):
    CASES |= {"zero 1": ("ours", zero(1)), "zero 2": ("method", zero(2))}


@contextmanager
def as_on_gpus(sharded: bool) -> Iterator[None]:
    """Let accelerate take ranks on CPUs for ranks on GPUs, where alone it has FSDP2 and DeepSpeed."""
    environment, init = dict(os.environ), AcceleratorState.__init__

    def taken(state: Any, *positional: Any, cpu: bool = False, **named: Any) -> None:
        # the first of many that share one state
        if not AcceleratorState._shared_state:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        init(state, *positional, cpu=False, **named)

    if sharded:
        AcceleratorState.__init__ = taken
    try:
        yield
    finally:
        AcceleratorState.__init__ = init
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
        # the arguments of a Trainer set variables
        os.environ.clear()
        os.environ.update(environment)


def whole(found: tuple[list[float], dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """A result without shards."""
    losses, weights = found
    return losses, {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in weights.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if find_spec("deepspeed"):
        import deepspeed

        # its own collectives for a CPU would be compiled now, for a minute
        deepspeed.ops.__compatible_ops__.clear()
    target, results, run = Path(sys.argv[1]), {}, None
    for case, (kind, words) in CASES.items():
        with as_on_gpus("fsdp" in words or "deepspeed" in words):
            run = trainer(kind, target, int(sys.argv[2]), ddp_backend="gloo", max_grad_norm=0.0, **words)
            run.train()
            results[case] = (type(run.model_wrapped).__name__, *whole(result(run)))
    torch.save(results, target / f"{run.args.process_index}.pt")
    # trainers keep groups, of which torch's threads may abort an interpreter that ends
    os._exit(0)
