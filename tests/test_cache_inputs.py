"""Inputs of `encode` that are no plain rows: packed values, lists, constants, and ready-made sub-batches."""

from __future__ import annotations

from contextlib import nullcontext
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

from contrastile import ClipLoss, Ragged, encode

N, WIDTH = 7, 8
NO_PARTS = "`parts` must hold a sub-batch; got none. In training pass the wrapper, with a sub-batch on another rank;"
# images of each example, and the height and width of each image in patches
IMAGES = [1, 0, 2, 1, 3, 0, 1]
GRID = [(2, 2), (4, 2), (2, 4), (2, 2), (2, 6), (4, 4), (2, 2), (6, 2)]


class Embedder(nn.Module):
    """A small model with the inputs of Qwen-VL: each 2 × 2 block of patches takes the place of an image token."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch, self.merge = nn.Linear(6, WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.words = nn.Embedding(20, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pooling: str = "mean",
    ) -> Tensor:
        states = self.words(input_ids)
        if pixel_values is not None and image_grid_thw is not None:
            assert len(pixel_values) == int(image_grid_thw.prod(-1).sum())
            merged = self.merge(self.patch(pixel_values).view(-1, 4 * WIDTH))
            assert len(merged) == int((input_ids == 1).sum())
            states = states.masked_scatter((input_ids == 1)[..., None], merged)
        states = self.layers(states, src_key_padding_mask=attention_mask == 0)
        if pooling == "last":
            return states[torch.arange(len(states)), attention_mask.sum(1) - 1]
        return (states * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


def batch() -> dict[str, Any]:
    """As Qwen-VL's processor returns it, of N examples."""
    grid = torch.tensor([(1, *sides) for sides in GRID])
    tokens, image = [], iter(grid.prod(-1) // 4)
    for example, count in enumerate(IMAGES):
        pictures = [1] * sum(int(next(image)) for _ in range(count))
        tokens.append(torch.tensor([2, *pictures, *torch.randint(3, 20, (1 + example % 4,)).tolist()]))
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.randn(int(grid.prod(-1).sum()), 6, dtype=torch.float64),
        "image_grid_thw": grid,
        "pooling": "last",
    }


def packed(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same for `encode`."""
    grid = inputs["image_grid_thw"]
    patches = [int(each.prod(-1).sum()) for each in grid.split(IMAGES)]
    return {
        **inputs,
        "pixel_values": Ragged(inputs["pixel_values"], patches),
        "image_grid_thw": Ragged(grid, torch.tensor(IMAGES)),
    }


def halves(inputs: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Ready-made sub-batches of it."""
    grid, made = inputs["image_grid_thw"], []
    for start in range(0, N, size):
        images = slice(sum(IMAGES[:start]), sum(IMAGES[: start + size]))
        patches = [int(grid[:index].prod(-1).sum()) for index in (images.start, images.stop)]
        rows = {name: inputs[name][start : start + size] for name in ("input_ids", "attention_mask")}
        made.append({**rows, "pooling": inputs["pooling"]})
        if images.start < images.stop:
            pixels = inputs["pixel_values"][slice(*patches)]
            made[-1].update(pixel_values=pixels, image_grid_thw=grid[images])
    return made


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def back(features: Tensor, towers: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of features against fixed ones, and the gradients."""
    other = torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view(features.shape).sin()
    loss = ClipLoss()(F.normalize(features, dim=-1), F.normalize(other, dim=-1), 10.0)
    loss.backward()
    return loss.detach(), gradients(towers)


@pytest.fixture
def model() -> Embedder:
    return Embedder().double()


@pytest.mark.parametrize("retain", [0, 1, "auto"])
@pytest.mark.parametrize("size", [1, 2, 3, N])
def test_an_embedder_of_images_and_texts(model: Embedder, size: int, retain: Any) -> None:
    inputs, plain = batch(), deepcopy(model)
    truth = back(plain(**inputs), plain)
    assert len(truth[1]) == len(list(model.parameters()))
    found = back(encode(model, packed(inputs), sub_batch=size, retain=retain), model)
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("retain", [0, 1, "auto"])
def test_ready_made_sub_batches(model: Embedder, retain: Any) -> None:
    inputs, plain = batch(), deepcopy(model)
    truth = back(plain(**inputs), plain)
    found = back(encode(model, parts=halves(inputs, 3), retain=retain), model)
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 1, 5), (5, 1, 1), (1, 4, 2)])
def test_a_scale_beside_parts_of_one_row(sizes: tuple[int, ...]) -> None:
    tower, log_scale = nn.Linear(3, 2), nn.Parameter(torch.ones(1))
    x = torch.randn(N, 3)

    def encoder(rows: Tensor) -> tuple[Tensor, Tensor]:
        return tower(rows), log_scale.exp()

    def back(outputs: tuple[Tensor, Tensor]) -> Any:
        loss = (outputs[0].square() * outputs[1]).sum()
        return [each.detach() for each in outputs], torch.autograd.grad(loss, [*tower.parameters(), log_scale])

    torch.testing.assert_close(back(encode(encoder, parts=x.split(sizes))), back(encoder(x)))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    def nested(rows: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor([rows[:1], rows[1:]], layout=layout)

    x = torch.randn(4, 3)
    assert "got a sparse or nested tensor" in refusal(encode, LINEAR, nested(x), sub_batch=2)
    assert "got a sparse or nested one" in refusal(encode, lambda rows: nested(LINEAR(rows)), x, sub_batch=2)


def test_gradients_of_packed_inputs_and_of_parts(model: Embedder) -> None:
    inputs = batch()
    pixels = inputs["pixel_values"].requires_grad_()
    back(model(**inputs), model)
    truth, pixels.grad = pixels.grad, None
    model.zero_grad()
    back(encode(model, packed(inputs), sub_batch=2), model)
    torch.testing.assert_close(pixels.grad, truth, rtol=1e-9, atol=1e-12)
    parts = halves({**inputs, "pixel_values": pixels.detach()}, 3)
    leaves = [part["pixel_values"].requires_grad_() for part in parts if "pixel_values" in part]
    back(encode(model, parts=parts), model)
    torch.testing.assert_close(torch.cat([leaf.grad for leaf in leaves]), truth, rtol=1e-9, atol=1e-12)


def on_a_rank(rank: int, group: Any, model: Embedder, inputs: dict[str, Any], how: str) -> Any:
    sizes = {1: [N], 2: [3, N - 3], 3: [1, 1, 5]}[dist.get_world_size(group)]
    if how.startswith("none"):
        sizes = {2: [N, 0], 3: [0, N - 3, 3]}[dist.get_world_size(group)]
    start = sum(sizes[:rank])
    mine = halves(inputs, 1)[start : start + sizes[rank]]
    if how.endswith("shards"):
        mesh = DeviceMesh.from_group(group, "cpu")
        wrapped: Any = fully_shard(deepcopy(model), mesh=mesh)
    else:
        wrapped = DistributedDataParallel(deepcopy(model), process_group=group, find_unused_parameters=True)
    if how == "ragged":
        images = [len(part.get("image_grid_thw", ())) for part in mine]
        patches = [len(part.get("pixel_values", ())) for part in mine]
        names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
        # of a rank without any image the rows are none
        nothing = {"pixel_values": inputs["pixel_values"][:0], "image_grid_thw": inputs["image_grid_thw"][:0]}
        stacks: dict[str, Any] = {
            name: torch.cat([part[name] for part in (nothing, *mine) if name in part]) for name in names
        }
        stacks.update(pooling="last", pixel_values=Ragged(stacks["pixel_values"], patches))
        stacks.update(image_grid_thw=Ragged(stacks["image_grid_thw"], images))
        features = encode(wrapped, stacks, sub_batch=2)
    else:
        # within no_sync() gradients stay those of the rank, whose mean is that of the whole batch
        with wrapped.no_sync() if how.endswith("unreduced") else nullcontext():
            features = encode(wrapped, parts=mine)
    other = torch.linspace(-1, 1, N * WIDTH, dtype=torch.float64).view(N, WIDTH).sin()[start : start + len(mine)]
    loss = ClipLoss(group=group)(F.normalize(features, dim=-1), F.normalize(other, dim=-1), 10.0)
    loss.backward()
    if how.endswith("unreduced"):
        for parameter in wrapped.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad.div_(dist.get_world_size(group)), group=group)
    found = gradients(getattr(wrapped, "module", wrapped))
    return loss.detach(), {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in found.items()}


WAYS = [(W, how) for W in (1, 2, 3) for how in ("ragged", "parts", "parts of shards")]
# a rank without any sub-batch
WAYS += [(W, how) for W in (2, 3) for how in ("none", "none of shards", "none, unreduced")]


@pytest.mark.parametrize(("W", "how"), WAYS)
def test_ranks_have_the_gradient_of_the_whole_batch(pool: Pool, model: Embedder, W: int, how: str) -> None:
    inputs, plain = batch(), deepcopy(model)
    truth = back(plain(**inputs), plain)
    for found in pool.run(on_a_rank, W, model, inputs, how):
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)


UNSENDABLE = "rank 0: `parts` must hold sub-batches for a rank without any; got one that cannot be sent ("
MIXED = "`parts` must be the same on all ranks; got None on rank 0 and 'given' on rank 1. Build the loss and its inputs"


def refused_on_a_rank(rank: int, group: Any, how: str) -> str:
    model, x = nn.Linear(3, 4), torch.randn(2, 3)
    if how == "inputs of shards":
        wrapped: Any = fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    else:
        wrapped = DistributedDataParallel(model, process_group=group)

    def step() -> None:
        if how.startswith("inputs"):
            how_much: dict[str, Any] = {"parts": [x]} if rank else {"inputs": x, "sub_batch": 1}
        else:
            # a function inside a function cannot be stored
            how_much = {"parts": [(x, lambda: None)] if how == "lent" and rank == 0 else []}
        ClipLoss(group=group)(encode(wrapped, **how_much), torch.randn(2, 4), 1.0)

    with torch.set_grad_enabled(how != "no gradient"):
        if how == "no gradient" and rank:
            # without the other rank
            encode(wrapped, parts=[x])
        with pytest.raises(ValueError) as raised:
            step()
    return str(raised.value)


REFUSED = {
    "lent": UNSENDABLE, "none": NO_PARTS, "no gradient": NO_PARTS, "inputs": MIXED, "inputs of shards": MIXED,
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_ranks_raise_the_same_sentence(pool: Pool, how: str) -> None:
    for sentence in pool.run(refused_on_a_rank, 2, how):
        assert sentence.startswith(REFUSED[how])


class Packed(nn.Module):
    """Tokens without padding, with the lengths of their texts; a scale beside."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scale = nn.Embedding(20, WIDTH), nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: Tensor, lengths: Tensor, names: list[str], factor: float) -> tuple[Tensor, Tensor]:
        assert list(names) == [f"text {length}" for length in lengths.tolist()]
        offsets = lengths.cumsum(0) - lengths
        return F.embedding_bag(tokens[0], self.words.weight, offsets, mode="sum") * factor, self.scale


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("size", [1, 3, "auto"])
def test_cu_seqlens_lists_and_constants(size: Any, kind: Any) -> None:
    """Texts are a list, or a tuple, which a DataLoader makes of them."""
    model = Packed()
    lengths = torch.tensor([2, 1, 4, 3, 1])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    tokens = torch.randint(0, 20, (1, 11))
    names = kind([f"text {length}" for length in lengths.tolist()])
    truth = model(tokens, lengths, names, 0.5)
    (truth[0].square().sum() * truth[1]).backward()
    wanted = gradients(deepcopy_with_gradients(model))
    model.zero_grad()
    inputs = (Ragged(tokens, cu_seqlens.diff().numpy(), axis=1), lengths, names, 0.5)
    found = encode(model, inputs, sub_batch=size)
    torch.testing.assert_close(found, truth)
    (found[0].square().sum() * found[1]).backward()
    torch.testing.assert_close(gradients(model), wanted)
    parts = [(tokens[:, :3], lengths[:2], names[:2], 0.5), (tokens[:, 3:], lengths[2:], names[2:], 0.5)]
    model.zero_grad()
    found = encode(model, parts=parts)
    torch.testing.assert_close(found, truth)
    (found[0].square().sum() * found[1]).backward()
    torch.testing.assert_close(gradients(model), wanted)


def deepcopy_with_gradients(model: nn.Module) -> nn.Module:
    copy = deepcopy(model)
    for p, q in zip(copy.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    return copy


def test_a_list_of_another_length_is_passed_whole() -> None:
    seen = []

    def encoder(x: Tensor, sizes: list[int]) -> Tensor:
        seen.append(sizes)
        return x

    encode(encoder, (torch.randn(4, 2), [1, 2, 3]), sub_batch=2)
    assert seen == [[1, 2, 3]] * len(seen)


def ragged(*lengths: int, **more: Any) -> Ragged:
    return Ragged(torch.randn(sum(lengths), 3), list(lengths), **more)


LINEAR, PARTED = nn.Linear(3, 2), nn.Linear(3, 2)
# as DeepSpeed marks what its ZeRO stage 3 keeps in parts
PARTED.weight.ds_id = 1
SENTENCES: dict[str, Any] = {
    "`lengths` must sum to the size of the packed axis; got 3 for 4. Count the values":
        lambda: Ragged(torch.randn(4, 2), [1, 2]),
    "`lengths` must be a list of whole numbers of at least 0; got [1, -1]. Count":
        lambda: Ragged(torch.randn(0, 2), [1, -1]),
    "`values` must be a tensor with an axis 2; got [3, 3]. Pass what is packed": lambda: ragged(1, 2, axis=2),
    "`inputs` must hold an example where one is Ragged; got none. Leave the call out.":
        lambda: encode(LINEAR, ragged(), sub_batch=2),
    "`inputs` must have the same first axis, the batch; got 2 for inputs['a'] and 3 for inputs['b']['c']. Check each "
    "tensor's shape; wrap packed values with their lengths in contrastile.Ragged.":
        lambda: encode(LINEAR, {"a": ragged(1, 2), "b": {"c": torch.randn(3, 3)}}, sub_batch=2),
    "`inputs['b']` must be tensors whose first axis is the batch; got a tensor without axes. Give each":
        lambda: encode(LINEAR, {"a": torch.randn(2, 3), "b": torch.tensor(1.0)}, sub_batch=2),
    "`inputs` must be tensors whose first axis is the batch; got a sparse or nested tensor. Make it":
        lambda: encode(LINEAR, torch.eye(3).to_sparse(), sub_batch=2),
    "`inputs['b']` must be tensors whose first axis is the batch; got ndarray. Convert":
        lambda: encode(LINEAR, {"a": torch.randn(2, 3), "b": torch.randn(2).numpy()}, sub_batch=2),
    "`sub_batch_tokens` must come with inputs that are all rows; got packed values or lists. Cut by":
        lambda: encode(LINEAR, {"attention_mask": torch.ones(2, 3), "b": ["x", "y"]}, sub_batch_tokens=2),
    "`encoder` must hold its parameters whole; got parameters of DeepSpeed's ZeRO stage 3. Shard with fully_shard":
        lambda: encode(PARTED, torch.randn(2, 3), sub_batch=2),
    NO_PARTS: lambda: encode(LINEAR, parts=[]),
    "`parts` must be a list of sub-batches; got Tensor. Pass [part, part, ...]":
        lambda: encode(LINEAR, parts=torch.randn(2, 3)),
    "`lengths` must be a list of whole numbers of at least 0; got 2. Count": lambda: Ragged(torch.randn(2, 3), 2),
    "`parts` must come without inputs and a size; got both. Leave the others out":
        lambda: encode(LINEAR, parts=[torch.randn(2, 3)], sub_batch=2),
    "`encoder` must return rows of one shape, one for each example; got shape [2, 4]. Pad":
        lambda: encode(nn.Identity(), parts=[torch.randn(2, 3), torch.randn(2, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_error_has_its_sentence(sentence: str) -> None:
    assert refusal(SENTENCES[sentence]).startswith(sentence)
