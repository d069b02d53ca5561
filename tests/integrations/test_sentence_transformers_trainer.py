"""The losses for sentence-transformers in its trainer, beside its own, with the library itself."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers")

import torch
from comparison import same
from sentences import build, losses, trained

from contrastile.integrations.sentence_transformers import CachedRankingLoss, CachedSymmetricLoss

# warnings of the library about itself
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    return build(tmp_path_factory.mktemp("model")).double()


BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


@pytest.mark.parametrize("words", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulated"])
def test_their_trainer(model: Any, tmp_path: Path, words: dict[str, Any]) -> None:
    ours, theirs = deepcopy(model), deepcopy(model)
    found = trained(ours, CachedRankingLoss(ours, mini_batch_size=3), tmp_path / "ours", **words)
    truth = trained(theirs, losses.MultipleNegativesRankingLoss(theirs), tmp_path / "theirs", **words)
    same(found, truth, 1e-7)


def test_their_trainer_with_several_datasets(model: Any, tmp_path: Path) -> None:
    ours, theirs = deepcopy(model), deepcopy(model)
    found = {"first": CachedRankingLoss(ours, mini_batch_size=3), "second": CachedSymmetricLoss(ours)}
    truth = {
        "first": losses.MultipleNegativesRankingLoss(theirs),
        "second": losses.MultipleNegativesRankingLoss(theirs, **BOTH),
    }
    same(trained(ours, found, tmp_path), trained(theirs, truth, tmp_path), 1e-7)


def test_their_trainer_on_two_ranks(model: Any, tmp_path: Path) -> None:
    ours, theirs = deepcopy(model), deepcopy(model)
    torch.save(ours, tmp_path / "model.pt")
    script = Path(__file__).with_name("sentences.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=240)
    truth = trained(theirs, losses.MultipleNegativesRankingLoss(theirs), tmp_path, batch=8)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert {"ddp", "fsdp2"} <= found.keys()
        for case, (curve, weights) in found.items():
            # DeepSpeed's weights are float32
            tolerance = 1e-3 if case == "zero 2" else 1e-7
            same((curve, {name: p.double() for name, p in weights.items()}), truth, tolerance)


def test_their_trainer_with_several_datasets_bf16_and_a_model_card(model: Any, tmp_path: Path) -> None:
    ours = deepcopy(model).float()
    loss = {"first": CachedRankingLoss(ours, mini_batch_size=3), "second": CachedSymmetricLoss(ours, mini_batch_size=3)}
    curve, weights = trained(ours, loss, tmp_path, bf16=True)
    assert len(curve) == 8
    assert all(torch.isfinite(p).all() for p in weights.values())
    ours.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "CachedRankingLoss" in card
    assert '"mini_batch_size": 3' in card
    assert "gao2021scaling" in card
