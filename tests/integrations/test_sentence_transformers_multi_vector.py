"""The loss for MultiVectorEncoder beside its own, with the library itself, and beside the formula in float64."""

from __future__ import annotations

import inspect
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers.multi_vector_encoder")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparison import same
from ranks import Pool
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
    SentenceTransformer,
)
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder import losses, scoring
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentences import WIDTH, N, gradients, step, texts, transformer
from sentences import losses as single_vector
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contrastile.integrations.sentence_transformers import CachedGISTLoss, CachedMultiVectorLoss

# warnings of the library about itself
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]
# their scores are in float32, whatever the model's type
FLOAT32 = 2e-4


class Projection(nn.Module):
    """Unit vectors of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "token_embeddings": F.normalize(self.linear(features["token_embeddings"]), dim=-1)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    first = Transformer(str(transformer(tmp_path_factory.mktemp("model"))))
    # documents leave out a letter
    made = MultiVectorEncoder(modules=[first, Projection(), MultiVectorMask(skiplist_words=["e"])], device="cpu")
    return made.double()


@pytest.fixture
def expanding(model: Any) -> Any:
    """The model whose queries have twelve positions, of which the padding is scored too."""
    made = deepcopy(model)
    made[0].query_expansion = {"strategy": "fixed", "attend": False, "length": 12}
    return made


def columns_of(model: Any, names: str, prompt: str | None = None) -> list[dict[str, Any]]:
    tasks = ["query", *["document"] * (len(names) - 1)]
    # columns are of unequal lengths
    return [
        dict(model.preprocess([text * (1 + place) for text in texts(name)], prompt=prompt, task=task))
        for place, (name, task) in enumerate(zip(names, tasks, strict=True))
    ]


class Formula(nn.Module):
    """The loss of the whole batch at once in the model's type."""

    def __init__(self, model: Any, scale: float = 1.0, mean: bool = False) -> None:
        super().__init__()
        self.model, self.scale, self.mean = model, scale, mean

    def forward(self, columns: list[dict[str, Any]], labels: Any = None) -> Tensor:
        tasks = ["query", *["document"] * (len(columns) - 1)]
        (q, asking), *documents = (
            (out["token_embeddings"], out["attention_mask"].bool())
            for out in (self.model({**column}, task=task) for column, task in zip(columns, tasks, strict=True))
        )
        scores = []
        for k, answering in documents:
            best = torch.einsum("ild,jtd->ijlt", q, k).masked_fill(~answering[None, :, None], -torch.inf).amax(3)
            scores.append((best * asking[:, None]).sum(2) / (asking.sum(1)[:, None] if self.mean else 1))
        return F.cross_entropy(self.scale * torch.cat(scores, 1), torch.arange(len(q)))


def same_as_theirs(found: tuple[Tensor, Any], model: Any, columns: list[dict[str, Any]], **words: Any) -> None:
    theirs = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=4, **words)
    value, of_parameters = step(theirs, columns)
    same(found, (value.double(), of_parameters), FLOAT32)


@pytest.mark.parametrize("names", ["ab", "abcd"], ids=["pairs", "n-tuples"])
@pytest.mark.parametrize(
    "words",
    [{}, {"scale": 3.0}, {"mini_batch_num_tokens": 40}, {"retain": "auto"}, {"score_mini_batch_size": 2}],
    ids=lambda words: next(iter(words), "default"),
)
def test_the_loss_and_gradients_of_the_formula_and_of_their_class(
    model: Any, words: dict[str, Any], names: str
) -> None:
    columns, scale = columns_of(model, names, prompt="a: "), words.get("scale", 1.0)
    assert len({column["input_ids"].shape[1] for column in columns}) > 1
    found = step(CachedMultiVectorLoss(model, **{"mini_batch_size": 3, **words}), columns)
    same(found, step(Formula(model, scale), columns))
    same_as_theirs(found, model, columns, scale=scale)


def test_the_mean_of_a_querys_tokens(model: Any) -> None:
    columns, words = columns_of(model, "abc"), {"similarity_fct": scoring.mean_colbert_scores, "scale": 20.0}
    found = step(CachedMultiVectorLoss(model, mini_batch_size=3, **words), columns)
    same(found, step(Formula(model, 20.0, mean=True), columns))
    same_as_theirs(found, model, columns, **words)


@pytest.mark.parametrize("words", [{}, {"mini_batch_num_tokens": 40}], ids=["texts", "tokens"])
def test_expanded_queries_keep_their_positions(expanding: Any, words: dict[str, Any]) -> None:
    columns = columns_of(expanding, "abc")
    assert (columns[0]["attention_mask"][:3].sum(1) < 12).all()
    found = step(CachedMultiVectorLoss(expanding, mini_batch_size=3, **words), columns)
    same(found, step(Formula(expanding), columns))


def flattened(column: dict[str, Any]) -> dict[str, Any]:
    """The texts of a column one behind the other, as a collator for FlashAttention packs them."""
    mask = column["attention_mask"].bool()
    ends = F.pad(mask.sum(1).cumsum(0), (1, 0))
    return {"input_ids": column["input_ids"][mask][None], "cu_seq_lens_q": ends, "task": column.get("task")}


class Packed(nn.Module):
    """The face of a MultiVectorEncoder of flattened texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)

    def forward(self, features: dict[str, Any], task: str | None = None) -> dict[str, Any]:
        lengths, tokens = features["cu_seq_lens_q"].diff(), self.words(features["input_ids"][0])
        rows = nn.utils.rnn.pad_sequence(list(tokens.split(lengths.tolist())), batch_first=True)
        mask = torch.arange(rows.shape[1]) < lengths[:, None]
        return {"token_embeddings": rows * (2.0 if task == "query" else 1.0), "attention_mask": mask}


def test_flattened_texts(model: Any) -> None:
    pytest.importorskip("sentence_transformers.base.losses.gradcache")
    columns, packed = [flattened(column) for column in columns_of(model, "abc")], Packed().double()
    for column, task in zip(columns, ("query", "document", "document"), strict=True):
        column["task"] = task
    same(step(CachedMultiVectorLoss(packed, mini_batch_size=3), columns), step(Formula(packed), columns))


def on_a_rank(rank: int, group: Any, folder: Path) -> None:
    model, columns = torch.load(folder / "whole.pt", weights_only=False)
    default, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    try:
        # the texts of the first three rows are shorter
        rows = slice(0, 3) if rank == 0 else slice(3, N)
        mine = [{name: x[rows] if isinstance(x, Tensor) else x for name, x in column.items()} for column in columns]
        for column in mine[1:]:
            # a rank's texts are as long as its own longest
            width = int(column["attention_mask"].sum(1).max())
            column.update({name: x[:, :width] for name, x in column.items() if isinstance(x, Tensor) and x.ndim == 2})
        widths = mine[1]["input_ids"].shape[1], columns[1]["input_ids"].shape[1]
        loss = CachedMultiVectorLoss(DistributedDataParallel(model), mini_batch_size=3, gather_across_devices=True)
        value = loss(mine, None)
        value.backward()
    finally:
        dist.GroupMember.WORLD = default
    torch.save((value.detach(), gradients(model), widths), folder / f"{rank}.pt")


def test_two_ranks_have_the_gradient_of_the_whole_batch(pool: Pool, tmp_path: Path, model: Any) -> None:
    columns = columns_of(model, "abc")
    truth = step(Formula(model), columns)
    torch.save((model, columns), tmp_path / "whole.pt")
    pool.check(on_a_rank, 2, tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0][2] != found[1][2]
    for value, of_parameters, _ in found:
        same((value, of_parameters), truth)


def test_dropout_gives_the_gradient_of_the_whole_batch(model: Any) -> None:
    model = deepcopy(model).train()
    model[0].auto_model.config.hidden_dropout_prob = 0.3
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    columns, steps = columns_of(model, "ab"), []
    for words in ({"retain": 0}, {"retain": N}):
        torch.manual_seed(5)
        steps.append(step(CachedMultiVectorLoss(model, mini_batch_size=3, **words), columns))
    same(*steps)


def test_their_trainer(model: Any, tmp_path: Path) -> None:
    from datasets import Dataset

    dataset = Dataset.from_dict({"anchor": texts("a"), "positive": texts("b"), "negative": texts("c")})
    results = []
    for kind in (CachedMultiVectorLoss, losses.CachedMultiVectorMultipleNegativesRankingLoss):
        trained = deepcopy(model)
        arguments = MultiVectorEncoderTrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=1e-3, optim="sgd",
            prompts={"anchor": "a: "},
        )  # fmt: skip
        loss = kind(trained, mini_batch_size=3)
        trainer = MultiVectorEncoderTrainer(model=trained, args=arguments, train_dataset=dataset, loss=loss)
        trainer.train()
        curve = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        results.append((torch.tensor(curve), dict(trained.named_parameters())))
    assert len(results[0][0]) == 4
    same(*results, FLOAT32)


def test_their_constructors_words(model: Any) -> None:
    theirs = losses.CachedMultiVectorMultipleNegativesRankingLoss
    words, known = inspect.signature(theirs).parameters, inspect.signature(CachedMultiVectorLoss).parameters
    assert {name: word.default for name, word in words.items()} == {name: known[name].default for name in words}
    assert CachedMultiVectorLoss(model).get_config_dict() == theirs(model).get_config_dict()


SENTENCES = {
    "`scale` must be above 0; got 0. Pass 1 / temperature, which": {"scale": 0},
    "`score_mini_batch_size` must be a whole number of at least 1; got 0. Leave it out": {"score_mini_batch_size": 0},
    "`similarity_fct` must be one of colbert_scores, mean_colbert_scores; got 'xtr_scores'. Pass one of": {
        "similarity_fct": scoring.xtr_scores
    },
    "`similarity_fct` must be one of colbert_scores, mean_colbert_scores; got 'XTRScores'. Pass one of": {
        "similarity_fct": scoring.XTRScores()
    },
    "`similarity_fct` must be one of colbert_scores, mean_colbert_scores; got 'functools.partial'. Pass one of": {
        "similarity_fct": partial(scoring.colbert_scores, length_normalize=True)
    },
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_refusals(model: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        CachedMultiVectorLoss(model, **SENTENCES[sentence])
    assert str(raised.value).startswith(sentence)


def test_models_of_other_vectors_are_refused(model: Any) -> None:
    single = SentenceTransformer(modules=[model[0]], device="cpu")
    sentence = r"`model` must give a vector for each token; got a SentenceTransformer. Take CachedRankingLoss, or a Mul"
    with pytest.raises(ValueError, match=sentence):
        CachedMultiVectorLoss(single)
    sentence = r" must give one vector for a text; got a MultiVectorEncoder. Take CachedMultiVectorLoss, or a Sentence"
    for name, models in (("model", [model, single]), ("guide", [single, model])):
        with pytest.raises(ValueError, match=f"`{name}`{sentence}"):
            CachedGISTLoss(*models)


def test_adaptive_layers_are_refused(model: Any) -> None:
    loss = single_vector.AdaptiveLayerLoss(model, CachedMultiVectorLoss(model))
    with pytest.raises(ValueError, match="`loss` must be called by a trainer or MatryoshkaLoss; got AdaptiveLayerLoss"):
        loss(columns_of(model, "ab"), None)
