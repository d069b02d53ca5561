"""Subclasses on the pages for FlagEmbedding, Tevatron, PyLate and colpali-engine beside what they extend."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparison import same
from ranks import Pool
from safetensors.torch import load_file
from sentences import transformer
from test_coming_from import blocks, gradients, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

# warnings of the libraries about themselves
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]
N, LENGTH = 6, 5


class Encoder(nn.Module):
    """The face of a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.config = SimpleNamespace(hidden_size=8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, return_dict: bool = True) -> Any:
        states = torch.tanh(self.mix(self.words(input_ids)))
        return SimpleNamespace(last_hidden_state=states * attention_mask[..., None])


def tokens(rows: int, length: int = LENGTH) -> dict[str, Tensor]:
    mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1))
    return {"input_ids": torch.randint(1, 20, (rows, length)) * mask, "attention_mask": mask.long()}


def step(model: nn.Module, loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    value = loss()
    value.backward()
    return value.detach(), gradients(model)


@pytest.mark.parametrize("words", [{}, {"use_mrl": True, "mrl_dims": [8, 4]}], ids=["plain", "several sizes"])
@pytest.mark.parametrize("size", [4, -1], ids=["cached", "whole"])
@pytest.mark.parametrize("listed", [False, True], ids=["dictionary", "list"])
def test_flag_embedding(words: dict[str, Any], size: int, listed: bool) -> None:
    modeling = pytest.importorskip("FlagEmbedding.finetune.embedder.encoder_only.base.modeling")
    base = modeling.BiEncoderOnlyEmbedderModel
    ours = run(blocks("FlagEmbedding")[0])["CachedModel"]
    torch.manual_seed(0)
    queries, passages, encoder = tokens(N), tokens(2 * N), Encoder().double()
    sides: list[Any] = [queries, passages]
    if listed:
        sides = [
            [{name: x[start : start + 4] for name, x in side.items()} for start in range(0, len(side["input_ids"]), 4)]
            for side in sides
        ]
    how = {"temperature": 0.5, "sub_batch_size": size, "normalize_embeddings": True, **words}
    results = []
    for kind in (ours, base):
        model = kind(deepcopy(encoder), **how).train()
        results.append(step(model, lambda model=model: model(*sides).loss))
        with torch.no_grad():
            assert model.eval()(queries, None if words else passages).loss is None
    same(*results)


def test_flag_embeddings_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "FlagEmbedding.finetune.embedder.encoder_only.base"
    runner = pytest.importorskip(f"{place}.runner")
    lines = [json.dumps({"query": a, "pos": [b], "neg": [a + b]}) for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    words = {
        "model_name_or_path": transformer(tmp_path / "model"), "train_data": tmp_path / "pairs.jsonl", "use_cpu": True,
        "train_group_size": 2, "per_device_train_batch_size": 4, "sub_batch_size": 3, "num_train_epochs": 1,
        "learning_rate": 1e-3, "optim": "sgd", "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    found = []
    for name, code in (("ours", blocks("FlagEmbedding")), ("theirs", [f"from {place}.__main__ import main", "main()"])):
        how = [f"--{word}={value}" for word, value in {**words, "output_dir": tmp_path / name}.items()]
        monkeypatch.setattr("sys.argv", ["train", *how])
        # restores the class of the library
        monkeypatch.setattr(runner, "BiEncoderOnlyEmbedderModel", runner.BiEncoderOnlyEmbedderModel)
        kind = run("\n".join(code)).get("CachedModel", runner.BiEncoderOnlyEmbedderModel)
        assert runner.BiEncoderOnlyEmbedderModel is kind
        monkeypatch.undo()
        found.append(load_file(tmp_path / name / "model.safetensors"))
    same(*found, 1e-5)


@pytest.mark.parametrize("place", ["tevatron.retriever.modeling", "tevatron.modeling"])
def test_tevatron(place: str) -> None:
    module = pytest.importorskip(place, exc_type=ImportError)
    torch.manual_seed(0)
    queries, passages, encoder = tokens(N), tokens(2 * N), Encoder().double()
    results = []
    for cached in (True, False):
        inner, kind = deepcopy(encoder), module.DenseModel
        if place == "tevatron.modeling":
            # the repository's has the first subclass of the page
            kind = run(blocks("Tevatron")[1])["CachedModel"] if cached else kind
            how = {"train_args": SimpleNamespace(negatives_x_device=False, per_device_train_batch_size=N)}
            model = kind(inner, inner, data_args=SimpleNamespace(train_n_passages=2), **how)
        else:
            kind = run(blocks("Tevatron")[0])["CachedModel"] if cached else kind
            model = kind(inner, pooling="mean", normalize=True, temperature=0.5)
        results.append(step(model.train(), lambda model=model: model(queries, passages).loss))
        with torch.no_grad():
            assert model.eval()(queries, queries).loss is None
    same(*results)


class Colbert(Encoder):
    """The face of PyLate's model."""

    def __init__(self, expanding: bool) -> None:
        super().__init__()
        self.skiplist, self.do_query_expansion = [3, 4], expanding

    def forward(self, features: dict[str, Tensor]) -> Any:  # type: ignore[override]
        # similarities above 0, where PyLate's padding does not answer
        return {"token_embeddings": self.mix(self.words(features["input_ids"])).abs()}


@pytest.mark.parametrize("expanding", [False, True], ids=["masked queries", "expanded queries"])
def test_pylate(expanding: bool) -> None:
    losses, scores = pytest.importorskip("pylate.losses"), pytest.importorskip("pylate.scores")
    torch.manual_seed(0)
    model, columns = Colbert(expanding).double(), [tokens(N), tokens(N, 7), tokens(N, 7)]
    ours = run(blocks("PyLate")[0])["TiledContrastive"](model, mini_batch_size=4, temperature=0.3)
    theirs = losses.Contrastive(model, temperature=0.3)
    truth = step(model, lambda: theirs(columns))
    same(step(model, lambda: ours(columns)), truth)
    # their cache back-propagates the sum, and returns the mean
    cached = losses.CachedContrastive(model, mini_batch_size=4, temperature=0.3)
    same(step(model, lambda: cached(columns)), (truth[0], {name: N * x for name, x in truth[1].items()}))
    # words that the tiles do not know have their code
    for words in ({"size_average": False}, {"score_metric": scores.XTRScores(k=4)}):
        kinds = run(blocks("PyLate")[0])["TiledContrastive"], losses.CachedContrastive
        pair = [kind(model, mini_batch_size=4, temperature=0.3, **words) for kind in kinds]
        same(*(step(model, lambda loss=loss: loss(columns)) for loss in pair))


class Vision(Encoder):
    """The face of colpali-engine's models."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        states = F.normalize(self.mix(self.words(input_ids)), dim=-1)
        return states * attention_mask[..., None]


@pytest.mark.parametrize("normalize", [False, True], ids=["sums", "means"])
def test_colpali_engine(tmp_path: Path, normalize: bool) -> None:
    theirs = pytest.importorskip("colpali_engine.trainer.contrastive_trainer").ContrastiveTrainer
    from colpali_engine.loss.late_interaction_losses import ColbertLoss
    from transformers import TrainingArguments

    torch.manual_seed(0)
    model = Vision().double()
    inputs = {f"query_{name}": x for name, x in tokens(N).items()}
    inputs |= {f"doc_{name}": x for name, x in tokens(N, 9).items()}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    results = []
    for kind in (run(blocks("colpali-engine")[0])["CachedTrainer"], theirs):
        trainer = kind(
            loss_func=ColbertLoss(normalize_scores=normalize), is_vision_model=True, model=model, args=arguments,
            train_dataset=TensorDataset(torch.zeros(1)), eval_dataset=None,
        )  # fmt: skip
        results.append(step(model, lambda trainer=trainer: trainer.compute_loss(model, inputs)))
    same(*results)


# --- ranks


def flag_embedding(encoder: Encoder, wrap: Any, sides: list[Any]) -> None:
    from FlagEmbedding.finetune.embedder.encoder_only.base.modeling import BiEncoderOnlyEmbedderModel as Theirs

    kind = run(blocks("FlagEmbedding")[0])["CachedModel"] if wrap else Theirs
    shared = {"negatives_cross_device": wrap is not None}
    model = kind(encoder, temperature=0.5, sub_batch_size=4, normalize_embeddings=True, **shared).train()
    model = wrap(model) if wrap else model
    model(*sides).loss.backward()


def tevatron(encoder: Encoder, wrap: Any, sides: list[Any]) -> None:
    from tevatron import modeling

    kind = run(blocks("Tevatron")[1])["CachedModel"] if wrap else modeling.DenseModel
    words = {"negatives_x_device": wrap is not None, "per_device_train_batch_size": len(sides[0]["input_ids"])}
    how = {"train_args": SimpleNamespace(**words), "data_args": SimpleNamespace(train_n_passages=2)}
    model = kind(encoder, encoder, **how).train()
    model = wrap(model) if wrap else model
    model(*sides).loss.backward()


def pylate(encoder: Encoder, wrap: Any, sides: list[Any]) -> None:
    from pylate import losses

    loss = losses.Contrastive(encoder, temperature=0.3)
    if wrap:
        how = {"mini_batch_size": 2, "temperature": 0.3, "gather_across_devices": True}
        loss = run(blocks("PyLate")[0])["TiledContrastive"](wrap(encoder), **how)
    loss(sides).backward()


def colpali_engine(encoder: Encoder, wrap: Any, sides: list[Any]) -> None:
    from colpali_engine.loss.late_interaction_losses import ColbertLoss

    query, document = sides
    if wrap is None:
        ColbertLoss()(encoder(**query), encoder(**document)).backward()
        return
    kind = run(blocks("colpali-engine")[0])["CachedTrainer"]
    # attributes that `compute_loss` reads; a whole trainer would make a process group of its own
    trainer, accelerator = kind.__new__(kind), SimpleNamespace(pad_across_processes=lambda x, **_: x)
    vars(trainer).update(loss_func=ColbertLoss(), compute_symetric_loss=False, accelerator=accelerator)
    vars(trainer).update(neg_prefix="neg_", query_prefix="query_", pos_prefix="doc_")
    inputs = {f"query_{name}": x for name, x in query.items()} | {f"doc_{name}": x for name, x in document.items()}
    model = wrap(encoder)
    trainer.compute_loss(model, inputs).backward()


LIBRARIES = {
    "FlagEmbedding": (flag_embedding, Encoder, 2), "tevatron": (tevatron, Encoder, 2), "pylate": (pylate, Colbert, 1),
    "colpali_engine": (colpali_engine, Vision, 1),
}  # fmt: skip


def problem(library: str) -> tuple[Encoder, list[dict[str, Tensor]]]:
    """A model, and queries with their passages."""
    torch.manual_seed(0)
    _, kind, each = LIBRARIES[library]
    model = kind(True) if kind is Colbert else kind()
    return model.double(), [tokens(N), tokens(each * N, 7)]


def on_a_rank(rank: int, group: Any, library: str) -> dict[str, Tensor]:
    encoder, sides = problem(library)
    default, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    try:
        W = dist.get_world_size()
        mine = [{name: x.chunk(W)[rank] for name, x in side.items()} for side in sides]
        LIBRARIES[library][0](encoder, DistributedDataParallel, mine)
    finally:
        dist.GroupMember.WORLD = default
    return gradients(encoder)


@pytest.mark.parametrize("library", LIBRARIES)
def test_two_ranks_have_the_gradient_of_the_whole_batch(pool: Pool, library: str) -> None:
    pytest.importorskip(library)
    encoder, sides = problem(library)
    LIBRARIES[library][0](encoder, None, sides)
    for found in pool.run(on_a_rank, 2, library):
        same(found, gradients(encoder))
