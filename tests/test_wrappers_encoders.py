"""encode under DistributedDataParallel and FSDP2 with encoders as others write them: buffers, and no empty batches.

The models are those of transformers, timm and open_clip from tiny configurations, and two of the same kind made here.
"""

from __future__ import annotations

import random
import warnings
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

# FSDP2 loads it, in seconds: once, before the ranks are forked
import torch._dynamo
from gradient_table import SHARES, Pair, batch, loss_of, shard
from problems import distance
from ranks import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from contrastile import encode

transformers = pytest.importorskip("transformers")

LENGTH, WIDTH, WORDS = 8, 16, 50
LAYERS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
ROWS = {1: [5], 2: [5, 3]}


def _bert() -> nn.Module:
    how = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertModel(transformers.BertConfig(vocab_size=WORDS, **LAYERS, **how), add_pooling_layer=False)


class CausalText(nn.Module):
    """A text tower as OpenCLIP's: its causal mask is a buffer, and the largest token is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.register_buffer("attn_mask", torch.full((LENGTH, LENGTH), -torch.inf).triu(1), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        L = input_ids.shape[1]
        x = self.words(input_ids) + self.places[:L]
        x = x + self.attention(x, x, x, attn_mask=self.attn_mask[:L, :L], need_weights=False)[0]
        return x[torch.arange(len(x)), (input_ids * attention_mask).argmax(1)]


class Shifted(nn.Module):
    """A mean that was measured once, as batch normalisation has it in use."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(WIDTH)
        self.norm.running_mean += 0.5

    def train(self, mode: bool = True) -> Shifted:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.norm((self.words(input_ids) * attention_mask[..., None]).mean(1))


def _texts() -> dict[str, Tensor]:
    """Eight texts of different lengths, each with 1 at its end."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 8, 2, 5, 8, 4, 1, 6])
    tokens = torch.randint(2, WORDS, (8, LENGTH), generator=generator)
    tokens[torch.arange(8), lengths - 1] = 1
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def _value(output: Any, inputs: dict[str, Tensor], rows: slice) -> Tensor:
    """A sum over examples, each with a weight of its own; of all vectors of an example, but for padding."""
    if isinstance(output, Tensor):
        features = output
    else:
        features = next(output[name] for name in ("text_embeds", "image_embeds", "last_hidden_state") if name in output)
    if features.ndim == 3:
        mask = inputs.get("attention_mask", torch.ones(features.shape[:2]))
        features = (features.sin() * mask[..., None]).sum(1)
    weights = torch.linspace(1, 2, sum(ROWS[2]), dtype=features.dtype)[rows]
    return (features.sin().sum(1) * weights).sum()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def _compare(model: nn.Module, reference: nn.Module, what: str) -> None:
    truth, found = _gradients(reference), _gradients(model)
    assert found.keys() >= truth.keys(), what
    # as one: that of a key's bias is nothing but rounding
    ours, theirs = (torch.cat([each[name].flatten() for name in truth]) for each in (found, truth))
    assert distance(ours, theirs) <= 1e-12, what


def _with_buffers(rank: int, group: Any) -> None:
    W = group.size()
    rows = slice(sum(ROWS[W][:rank]), sum(ROWS[W][: rank + 1]))
    mine = {name: x[rows] for name, x in _texts().items()}
    everyone = {name: x[: sum(ROWS[W])] for name, x in _texts().items()}
    for make in (_bert, CausalText, Shifted):
        for training, broadcast in ((True, True), (False, True), (True, False), (False, False)):
            torch.manual_seed(0)
            model = make().double().train(training)
            reference = deepcopy(model)
            buffers = {name: x.clone() for name, x in model.named_buffers()}
            _value(reference(**everyone), everyone, slice(0, sum(ROWS[W]))).backward()
            wrapped = DistributedDataParallel(model, process_group=group)
            # torch 2.13 would like another word where it is made
            wrapped.broadcast_buffers = broadcast
            sent: list[int] = []
            wrapped._distributed_broadcast_coalesced = lambda tensors, *how, plain=wrapped, sent=sent: (
                sent.append(len(tensors)),
                DistributedDataParallel._distributed_broadcast_coalesced(plain, tensors, *how),
            )
            if broadcast and rank == 1 and make is Shifted:
                # the first rank's value counts
                model.norm.running_mean += 1
            for step in range(1, 4):
                wrapped.zero_grad()
                (_value(encode(wrapped, mine, sub_batch=2), mine, rows) * W).backward()
                _compare(model, reference, f"{make.__name__}, {training}, {broadcast}")
                # before the first sub-batch, and not before every one
                assert sent == ([len(buffers)] * step if broadcast else [])
            assert all(torch.equal(x, buffers[name]) for name, x in model.named_buffers())


@pytest.mark.parametrize("W", [1, 2])
def test_ddp_broadcasts_buffers_once_a_call(pool: Pool, W: int) -> None:
    pool.check(_with_buffers, W)


PIXELS = {"image_size": 16, "patch_size": 8, **LAYERS}
TEXTS = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "pad_token_id": 0, **LAYERS}
TEXTS |= {"bos_token_id": 1, "eos_token_id": 1}
# a model, and eight examples for it
Models = dict[str, tuple[nn.Module, dict[str, Tensor]]]


def _pictures(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 3, size, size, dtype=torch.float64)}


def _of_transformers() -> Models:
    t = transformers
    causal = {"num_key_value_heads": 1, "use_cache": False}
    relative = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return {
        "BERT": (_bert(), _texts()),
        "ModernBERT": (t.ModernBertModel(t.ModernBertConfig(**TEXTS, cls_token_id=1, sep_token_id=1)), _texts()),
        "Qwen2": (t.Qwen2Model(t.Qwen2Config(**TEXTS, **causal)), _texts()),
        "T5": (t.T5EncoderModel(t.T5Config(vocab_size=WORDS, **relative)), _texts()),
        "CLIP's texts": (t.CLIPTextModelWithProjection(t.CLIPTextConfig(**TEXTS, projection_dim=6)), _texts()),
        "CLIP": (t.CLIPVisionModelWithProjection(t.CLIPVisionConfig(**PIXELS, projection_dim=6)), _pictures(16)),
        "ViT": (t.ViTModel(t.ViTConfig(**PIXELS), add_pooling_layer=False), _pictures(16)),
        "DINOv2": (t.Dinov2Model(t.Dinov2Config(**PIXELS)), _pictures(16)),
    }


class Named(nn.Module):
    """A method of a model, called with an input by name."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, **inputs: Tensor) -> Tensor:
        (rows,) = inputs.values()
        return getattr(self.model, self.method)(rows)


def _of_open_clip() -> Models:
    import open_clip

    vision = {"layers": 2, "width": 64, "head_width": 32, "patch_size": 8, "image_size": 16}
    text = {"context_length": LENGTH, "vocab_size": WORDS, "width": 16, "heads": 2, "layers": 2}
    make = partial(open_clip.CLIP, embed_dim=6, vision_cfg=vision, text_cfg=text, nonscalar_logit_scale=True)
    # it has a place for each of its positions, and takes no fewer
    texts = {"input_ids": _texts()["input_ids"]}
    return {"text": (Named(make(), "encode_text"), texts), "ViT": (Named(make(), "encode_image"), _pictures(16))}


def _of_timm() -> Models:
    import timm

    how = {"img_size": 32, "window_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
    swin = timm.models.swin_transformer.SwinTransformer(num_classes=0, drop_path_rate=0.0, **how)
    return {"Swin": (Named(swin, "forward"), _pictures(32))}


PACKAGES = {"transformers": _of_transformers, "open_clip": _of_open_clip, "timm": _of_timm}
# of two ranks, the examples of each; and how they are cut
UNEQUAL: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 3], {"sub_batch": 2}),
    ([5, 3], {"sub_batch_tokens": 8, "retain": 1}),
    ([8, 0], {"sub_batch": 3, "retain": "auto"}),
]


def _sharded(model: nn.Module, group: Any) -> nn.Module:
    """The blocks first, as FSDP2 is used, then the rest."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in next((each for each in model.modules() if isinstance(each, nn.ModuleList)), ()):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _unequal(rank: int, group: Any, package: str) -> None:
    torch.manual_seed(0)
    for name, (model, everyone) in PACKAGES[package]().items():
        model.double()
        reference = deepcopy(model)
        _value(reference(**everyone), everyone, slice(0, 8)).backward()
        _sharded(model, group)
        for shares, how in UNEQUAL:
            if "sub_batch_tokens" in how and "attention_mask" not in everyone:
                continue
            rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
            mine = {key: x[rows] for key, x in everyone.items()}
            model.zero_grad()
            with warnings.catch_warnings():
                # T5's blocks return views, which is nobody's mistake here
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
                (_value(encode(model, mine, **how), mine, rows) * 2).backward()
            _compare(model, reference, f"{name}, {shares}, {how}")


@pytest.mark.parametrize("package", PACKAGES)
def test_fsdp2_runs_a_row_where_a_rank_has_fewer_sub_batches(pool: Pool, package: str) -> None:
    pytest.importorskip(package)
    pool.check(_unequal, 2, package)


def _scaled(rank: int, group: Any, sub_batch: int) -> None:
    """The forward of the whole model behind encode: features, and a scale of shape [1]."""
    W = group.size()
    model, reference = Pair(), Pair()
    loss_of("ClipLoss", reference(*batch(1, 0)[:2]), None, exchange="single").backward()
    x, y = (side.split(SHARES[W])[rank] for side in batch(W, 0)[:2])
    shard(model, group)
    for _ in range(2):
        model.zero_grad()
        image, text, scale, bias = encode(model, (x, y), sub_batch=sub_batch)
        assert scale.shape == (1,)
        loss_of("ClipLoss", (image, text, scale, bias), None, group=group).backward()
        _compare(model, reference, f"{W}, {sub_batch}")


@pytest.mark.parametrize("sub_batch", [1, 2])
@pytest.mark.parametrize("W", [3, 4])
def test_fsdp2_gives_the_scale_beside_the_features(pool: Pool, W: int, sub_batch: int) -> None:
    """With a rank without rows, and one that has a single row."""
    pool.check(_scaled, W, sub_batch)


class Reshaping(nn.Module):
    """An encoder that cannot do without rows, draws as it runs, and divides by a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 3, bias=False), list[int]()
        self.double()

    def forward(self, pixels: Tensor, attention_mask: Tensor) -> Tensor:
        self.seen.append(len(pixels))
        if attention_mask.dtype != torch.bool or not attention_mask.all():
            raise ValueError("a row without text")
        x = self.linear(pixels.reshape(len(pixels), 2, -1)).mean(1)
        return x / x.norm(dim=-1, keepdim=True) * (1 + 0 * random.random() + 0 * torch.rand(()))


@pytest.mark.parametrize("trained", ["all", "a part", "inputs too"])
def test_an_empty_batch_runs_on_stand_ins_without_trace(trained: str) -> None:
    model = nn.ModuleDict({"used": Reshaping(), "beside": nn.Linear(2, 2)})
    model["beside"].requires_grad_(trained != "a part")
    model.forward = lambda **inputs: model["used"](**inputs)
    pixels = torch.ones(0, 8, dtype=torch.float64, requires_grad=trained == "inputs too")
    before = torch.get_rng_state(), random.getstate()
    features = encode(model, {"pixels": pixels, "attention_mask": torch.ones(0, 5, dtype=torch.bool)}, sub_batch=2)
    assert features.shape == (0, 3)
    features.sum().backward()
    assert torch.equal(model["used"].linear.weight.grad, torch.zeros(3, 4, dtype=torch.float64))
    assert (pixels.grad is not None) == (trained == "inputs too")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert 0 not in model["used"].seen


def test_a_batch_without_rows_does_not_run_a_frozen_trunk_again() -> None:
    """Ranks agree to keep graphs: one without rows must not refuse."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    model[0].requires_grad_(False)
    runs: list[int] = []
    model[0].register_forward_hook(lambda *_: runs.append(1))
    features = encode(model, torch.ones(0, 2), sub_batch=2)
    before = len(runs)
    features.sum().backward()
    assert len(runs) == before
