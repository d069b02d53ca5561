"""Packed values as the output of an encoder: `encode` joins, cuts and replays them, and MaxSim compares them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Pool
from refusals import refusal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from contrastile import Ragged, contrast, encode
from contrastile.losses import Softmax
from contrastile.scorers import MaxSim

LENGTHS, WIDTH = [3, 1, 5, 2, 2, 4, 1], 4
N = len(LENGTHS)


class TokenModel(nn.Module):
    """A vector for each token of a text that is no padding; a number of the text, and a scale beside."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.mix, self.dropout = nn.Embedding(20, 6), nn.Linear(6, WIDTH), nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor([3.0]))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        states = self.words(input_ids)
        # neighbours matter, so that a text cannot be cut
        states = states + states.cumsum(1).tanh()
        vectors = F.normalize(self.mix(self.dropout(states)), dim=-1)
        return {"tokens": Ragged.of(vectors, attention_mask), "size": attention_mask.sum(1), "scale": self.scale.sum()}


def texts(lengths: list[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]
    padded = nn.utils.rnn.pad_sequence([*ids, torch.zeros(6, dtype=torch.int64)], batch_first=True)[:-1]
    return {"input_ids": padded, "attention_mask": (padded != 0).long()}


QUERIES, DOCUMENTS = texts(LENGTHS, 1), texts(LENGTHS[::-1], 2)


def plain(model: TokenModel) -> Any:
    """Loss and gradients of the whole batch, every pair for itself."""
    query, document = model(**QUERIES), model(**DOCUMENTS)
    sides = [side["tokens"].values.split(side["tokens"].lengths) for side in (query, document)]
    scores = torch.stack([torch.stack([(q @ k.T).amax(1).sum() for k in sides[1]]) for q in sides[0]])
    logits, labels = query["scale"] * scores, torch.arange(N)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def cached(model: Any, inner: nn.Module, encoded: Callable[[dict[str, Tensor]], Any], **how: Any) -> Any:
    """The same with `encoded`."""
    query, document = encoded(QUERIES), encoded(DOCUMENTS)
    loss = contrast(query["tokens"], document["tokens"], scorer=MaxSim(), scale=query["scale"], **how)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in inner.named_parameters()}


def parted(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: x[at : at + 2] for name, x in inputs.items()} for at in range(0, N, 2)]


WAYS: dict[str, Callable[[TokenModel, dict[str, Tensor]], Any]] = {
    "one": lambda model, inputs: encode(model, inputs, sub_batch=1),
    "three": lambda model, inputs: encode(model, inputs, sub_batch=3, features="host"),
    "one graph": lambda model, inputs: encode(model, inputs, sub_batch=2, retain=1),
    "auto": lambda model, inputs: encode(model, inputs, sub_batch="auto", retain="auto"),
    "tokens": lambda model, inputs: encode(model, inputs, sub_batch_tokens=7),
    "a function": lambda model, inputs: encode(lambda **x: model(**x), inputs, sub_batch=2),
    "parts": lambda model, inputs: encode(model, parts=parted(inputs)),
    "parts of one": lambda model, inputs: encode(
        model, parts=[{name: x[[at]] for name, x in inputs.items()} for at in range(N)]
    ),
}


@pytest.fixture
def model() -> TokenModel:
    return TokenModel().double()


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_the_whole_batch(model: TokenModel, way: str) -> None:
    whole = deepcopy(model)
    truth, found = plain(whole), cached(model, model, lambda inputs: WAYS[way](model, inputs))
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-14)
    with torch.no_grad():
        expected, got = whole(**QUERIES), WAYS[way](model, QUERIES)
    assert (got["tokens"].lengths, got["tokens"].axis) == (LENGTHS, 0)
    torch.testing.assert_close(got["tokens"].values, expected["tokens"].values)
    torch.testing.assert_close((got["size"], got["scale"]), (expected["size"], expected["scale"]))


def test_a_frozen_trunk(model: TokenModel) -> None:
    model.words.requires_grad_(False)
    whole = deepcopy(model)
    found = cached(model, model, lambda inputs: encode(model, inputs, sub_batch=2))
    torch.testing.assert_close(found, plain(whole), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("how", [{"sub_batch": 2}, {"sub_batch_tokens": 6}])
def test_dropout_is_replayed(how: dict[str, Any]) -> None:
    model, results = TokenModel(dropout=0.4).double(), []
    for retain in (0, N):
        model.zero_grad()
        torch.manual_seed(5)
        result = cached(model, model, lambda inputs, retain=retain: encode(model, inputs, retain=retain, **how))
        results.append(deepcopy(result))
    torch.testing.assert_close(*results)


def on_a_rank(rank: int, group: Any, model: TokenModel, how: str) -> Any:
    W = dist.get_world_size(group)
    # the last of three ranks has no rows, or no sub-batch
    sizes = {1: [N], 2: [2, N - 2], 3: [4, N - 4, 0]}[W]
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    model = deepcopy(model)
    if how.endswith("shards"):
        wrapped: Any = fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    else:
        wrapped = DistributedDataParallel(model, process_group=group)

    def encoded(inputs: dict[str, Tensor]) -> Any:
        mine = {name: x[rows] for name, x in inputs.items()}
        if how.startswith("rows"):
            return encode(wrapped, mine, sub_batch=2)
        return encode(wrapped, parts=[{name: x[[at]] for name, x in mine.items()} for at in range(sizes[rank])])

    loss, gradients = cached(wrapped, model, encoded, group=group)
    return loss, {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in gradients.items()}


@pytest.mark.parametrize("how", ["rows", "parts", "rows of shards", "parts of shards"])
@pytest.mark.parametrize("W", [1, 2, 3])
def test_ranks_have_the_gradient_of_the_whole_batch(pool: Pool, model: TokenModel, W: int, how: str) -> None:
    truth = plain(deepcopy(model))
    for found in pool.run(on_a_rank, W, model, how):
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-14)


def changing(x: Tensor, lengths: list[int]) -> Any:
    """An encoder that returns fewer vectors each time."""
    lengths[0] -= 1
    return Ragged((x @ WEIGHT).repeat(9, 1)[: lengths[0]], [lengths[0], *[0] * (len(x) - 1)])


WEIGHT = nn.Parameter(torch.randn(3, 2))
ROWS = torch.randn(4, 3)
SENTENCES: dict[str, Callable[[], Any]] = {
    "`encoder` must return values packed along their first axis; got axis 1. Transpose": lambda: encode(
        lambda x: Ragged(x @ WEIGHT, [1, 1], axis=1), ROWS, sub_batch=2
    ),
    "`encoder` must return tensors whose first axis is the sub-batch of 2; got shape [1]. Return": lambda: encode(
        lambda x: Ragged(x @ WEIGHT, [2]), ROWS, sub_batch=2
    ),
    "`encoder` must return the same structure each time; got": lambda: encode(
        lambda x: x @ WEIGHT if len(x) == 1 else Ragged(x @ WEIGHT, [1] * len(x)), ROWS[:3], sub_batch=2
    ),
    "`encoder` must return features of one shape in both passes; got [7, 2] and [6, 2]. Change": lambda: (
        encode(changing, (ROWS, [9]), sub_batch=4).values.sum().backward()
    ),
    "`q` must be a tensor; got Ragged. Call contrast(..., scorer=MaxSim()).": lambda: contrast(
        Ragged(ROWS, [4]), ROWS, scale=1.0
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_error_has_its_sentence(sentence: str) -> None:
    assert refusal(SENTENCES[sentence]).startswith(sentence)


def test_texts_without_any_token_score_nothing() -> None:
    query, document = Ragged(torch.ones(2, 3), [1, 0, 1]), Ragged(torch.ones(0, 3), [0, 0, 0])
    loss = contrast(query, document, scorer=MaxSim())
    torch.testing.assert_close(loss, torch.tensor(3.0).log())


# lengths of the texts of queries, keys and negatives
SIDES = [2, 3], [4, 1], [7, 2, 1]


def test_keys_and_negatives_are_padded_alike_and_any_axis_is_packed() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, negative = (torch.randn(sum(n), 3, generator=draw) for n in SIDES)
    packed = [Ragged(x, n) for x, n in zip((query, key, negative), SIDES, strict=True)]
    one_way: Any = {"loss": Softmax(), "scorer": MaxSim()}
    loss = contrast(packed[0], packed[1], negatives=packed[2], **one_way)
    both = Ragged(torch.cat([key, negative]), [*SIDES[1], *SIDES[2]])
    torch.testing.assert_close(loss, contrast(packed[0], both, positives=torch.arange(2), **one_way))
    across = [Ragged(x.T.contiguous(), n, axis=1) for x, n in zip((query, key), SIDES, strict=False)]
    torch.testing.assert_close(contrast(*across, scorer=MaxSim()), contrast(*packed[:2], scorer=MaxSim()))


def test_an_error_of_packed_values_is_raised_on_all_ranks(pool: Pool) -> None:
    said = pool.run(_packed_wrongly, 2)
    assert said[0] == said[1]
    assert said[0].startswith(
        "rank 1: `values` must be packed tokens [T, D], with integer lengths [B]; got shapes [4, 3, 1]"
    )


def _packed_wrongly(rank: int, group: Any) -> str:
    values = ROWS.detach()[..., None] if rank else ROWS.detach()
    return refusal(contrast, Ragged(values, [2, 2]), Ragged(ROWS.detach(), [1, 3]), scorer=MaxSim(), group=group)
