"""A training by Lightning that torchrun may start: writes the weights and the validation loss."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from lightning.fabric import Fabric
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from contrastile import ClipLoss, encode
from contrastile.integrations.lightning import ContrastileMixin

COUNT = 32


def pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(COUNT, 6, dtype=torch.float64, generator=generator) for _ in range(2)))


class Base(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.double()

    def scale(self) -> Tensor:
        return self.logit_scale.exp()

    def encode_image(self, x: Tensor) -> Tensor:
        return F.normalize(self.image(x), dim=-1)

    def encode_text(self, x: Tensor) -> Tensor:
        return F.normalize(self.text(x), dim=-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Cached(ContrastileMixin, Base):
    encoders, sub_batch, loss = ("encode_image", "encode_text"), 3, ClipLoss()


class Sharded(Cached):
    """The towers and the LightningModule itself are sharded."""

    def __init__(self) -> None:
        super().__init__()
        # FSDP2 refuses a parameter without axes
        self.logit_scale = nn.Parameter(self.logit_scale.detach()[None])

    def configure_model(self) -> None:
        for module in (self.image, self.text, self):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class Inner(nn.Module):
    """All parameters, and the methods of the encoders."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.image, self.text, self.logit_scale = base.image, base.text, nn.Parameter(base.logit_scale.detach()[None])

    encode_image, encode_text = Base.encode_image, Base.encode_text


class ShardedInside(Cached):
    """A module inside is sharded."""

    encoders = ("model.encode_image", "model.encode_text")

    def __init__(self) -> None:
        super().__init__()
        inner = Inner(self)
        del self.image, self.text, self.logit_scale
        self.model = inner

    def scale(self) -> Tensor:
        return self.model.logit_scale.exp()

    def configure_model(self) -> None:
        for module in (self.model.image, self.model.text, self.model):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class Alone(Cached):
    """Each rank has its own negatives."""

    loss = ClipLoss(exchange="single")


class Plain(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, text = batch
        loss = ClipLoss(backend="dense")
        return loss(self.encode_image(image), self.encode_text(text), self.scale())


def quiet(folder: Path, **words: Any) -> Trainer:
    how = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(accelerator="cpu", default_root_dir=folder, **{"max_steps": 4, **how, **words})


def train(model: LightningModule, folder: Path, batch: int, **words: Any) -> dict[str, Tensor]:
    quiet(folder, **words).fit(model, DataLoader(pairs(), batch_size=batch))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def weights(model: LightningModule) -> dict[str, Tensor]:
    """All parameters, whole, in the shapes and by the names of `Base`."""
    named = {name.removeprefix("model."): p.detach() for name, p in model.named_parameters()}
    found = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in named.items()}
    return {**found, "logit_scale": found["logit_scale"].reshape(())}


class Bare(nn.Module):
    """The methods of the encoders, in no LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        base = Base()
        self.image, self.text, self.logit_scale = base.image, base.text, base.logit_scale

    encode_image, encode_text = Base.encode_image, Base.encode_text


def fabric_trained(compiled: dict[str, Any], batch: int) -> dict[str, Tensor]:
    """The weights after the steps of a loop of Fabric, under its DistributedDataParallel."""
    fabric, bare = Fabric(accelerator="cpu", devices=2, strategy="ddp"), Bare()
    fabric.launch()
    module = torch.compile(bare, **compiled) if compiled else bare
    model, optimizer = fabric.setup(module, torch.optim.SGD(bare.parameters(), lr=0.1))
    for start in range(0, COUNT, 2 * batch):
        # as `DistributedSampler` deals them out
        image, text = (side[fabric.global_rank :: 2] for side in pairs()[start : start + 2 * batch])
        with fabric.autocast():
            image = encode((model, "encode_image"), image, sub_batch=3)
            text = encode((model, "encode_text"), text, sub_batch=3)
            loss = ClipLoss()(image, text, model.logit_scale.exp())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in bare.named_parameters()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, found = int(os.environ["RANK"]), {}
    for kind in (Cached, Sharded, ShardedInside):
        model: Any = kind()
        strategy: Any = "ddp"
        if kind is not Cached:
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        # Lightning's own sampler shuffles
        sampler = DistributedSampler(pairs(), num_replicas=2, rank=rank, shuffle=False)
        trainer = quiet(Path(sys.argv[1]), strategy=strategy, devices=2, use_distributed_sampler=False)
        loader = DataLoader(pairs(), batch_size=int(sys.argv[2]), sampler=sampler)
        if kind is Cached:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                (values,) = trainer.validate(Alone(), loader, verbose=False)
            found["Alone"] = values["val_loss"], [text for text in map(str, said) if "sync_dist" in text]
        trainer.fit(model, loader)
        found[kind.__name__] = weights(model)
    for case, words in (("Fabric", {}), ("Fabric, compiled", {"backend": "eager"})):
        found[case] = fabric_trained(words, int(sys.argv[2]))
    torch.save(found, Path(sys.argv[1]) / f"{rank}.pt")
    # trainers keep groups, of which torch's threads may abort an interpreter that ends
    os._exit(0)
