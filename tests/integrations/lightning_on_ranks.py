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
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from contrastile import ClipLoss
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
    # the mixin comes first, and has one of its own
    scale = Base.scale


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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, model = int(os.environ["RANK"]), Cached()
    # Lightning's own sampler shuffles
    sampler = DistributedSampler(pairs(), num_replicas=2, rank=rank, shuffle=False)
    trainer = quiet(Path(sys.argv[1]), strategy="ddp", devices=2, use_distributed_sampler=False)
    trainer.fit(model, DataLoader(pairs(), batch_size=int(sys.argv[2]), sampler=sampler))
    torch.save(model.state_dict(), Path(sys.argv[1]) / f"{rank}.pt")
