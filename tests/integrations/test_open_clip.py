"""The classes and the command line for open_clip beside its own, with the library itself."""

from __future__ import annotations

import inspect
import json
import sys
from argparse import Namespace
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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from contrastile.integrations import open_clip as ours

open_clip = pytest.importorskip("open_clip")
pytest.importorskip("open_clip_train.main")
main_module = ours._their_main()
factory, theirs, their_epoch = open_clip.factory, open_clip.loss, main_module.train_one_epoch
# version 4 names the sides of a batch, and has no --horovod
NAMED = main_module.__name__ == "open_clip_train.legacy_main"

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]
N, K = 4, 3
CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "layers": 1, "width": 16, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
ARGUMENTS = Namespace(
    local_loss=True, gather_with_grad=True, rank=0, world_size=1, horovod=False, distill=False, model="ViT-B-32",
    siglip=False, loss_dist_impl=None, coca_caption_loss_weight=2.0, coca_contrastive_loss_weight=1.0,
)  # fmt: skip


def clip(bias: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {**CONFIG, "text_cfg": {**CONFIG["text_cfg"], "vocab_size": 50}}
    model = open_clip.CLIP(**sizes, output_dict=True, init_logit_bias=-5.0 if bias else None)
    return model.double()


def data(count: int) -> Any:
    sides = torch.randn(count, 3, 16, 16, dtype=torch.float64), torch.randint(1, 50, (count, 8))
    return dict(zip(("image", "text"), sides, strict=True)) if NAMED else sides


def features(count: int = N) -> dict[str, Any]:
    image, text = F.normalize(torch.randn(2, count, 8, dtype=torch.float64), dim=-1)
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    return {"image_features": image.requires_grad_(), "text_features": text.requires_grad_(), "logit_scale": scale}


# --- classes


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss", "CoCaLoss", "DistillClipLoss"])
def test_their_constructors_words(name: str) -> None:
    known = {**inspect.signature(ours.ClipLoss).parameters, **inspect.signature(getattr(ours, name)).parameters}
    for word, parameter in inspect.signature(getattr(theirs, name)).parameters.items():
        assert known[word].default == parameter.default


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_the_losses_and_gradients_of_their_classes(name: str, dictionary: bool) -> None:
    inputs = features()
    if name == "SigLipLoss":
        inputs["logit_bias"] = torch.tensor(-5.0, dtype=torch.float64, requires_grad=True)
    results = []
    for module in (ours, theirs):
        value = getattr(module, name)()(**inputs, output_dict=dictionary)
        total = value["contrastive_loss"] if dictionary else value
        results.append((total.detach(), torch.autograd.grad(total, list(inputs.values()))))
    same(*results)


@pytest.mark.parametrize("negative", [False, True])
def test_the_loss_of_one_block(negative: bool) -> None:
    inputs = {**features(), "logit_bias": torch.tensor(-5.0, dtype=torch.float64, requires_grad=True)}
    results = []
    for module in (ours, theirs):
        value = module.SigLipLoss()._loss(**inputs, negative_only=negative)
        results.append((value.detach(), torch.autograd.grad(value, list(inputs.values()))))
    same(*results)
    plain = list(features().values())
    same(ours.SigLipLoss()._loss(*plain), theirs.SigLipLoss()._loss(*plain))


def test_a_loss_may_be_made_before_the_process_group() -> None:
    loss = ours.ClipLoss(rank=1, world_size=2)
    with pytest.raises(ValueError, match=r"`world_size` must be that of the process group, 1; got 2"):
        loss(**features())


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("weight", [0.0, 1.5])
def test_coca(weight: float, dictionary: bool) -> None:
    inputs = {**features(), "logits": torch.randn(N, 5, 9), "labels": torch.randint(0, 9, (N, 5))}
    results = [
        module.CoCaLoss(2.0, weight, 3, True, True)(**inputs, output_dict=dictionary) for module in (ours, theirs)
    ]
    torch.testing.assert_close(*results, check_dtype=False)


def teacher(count: int = N) -> dict[str, Any]:
    image, text = F.normalize(torch.randn(2, count, 6, dtype=torch.float64), dim=-1)
    return {"dist_image_features": image, "dist_text_features": text, "dist_logit_scale": torch.tensor(20.0).double()}


@pytest.mark.parametrize("dictionary", [False, True])
def test_distillation(dictionary: bool) -> None:
    inputs, told = features(), teacher()
    results = []
    for module in (ours, theirs):
        value = module.DistillClipLoss()(**inputs, **told, output_dict=dictionary)
        hard, soft = (value["contrastive_loss"], value["distill_loss"]) if dictionary else value
        if module is theirs:
            logits = told["dist_logit_scale"] * told["dist_image_features"] @ told["dist_text_features"].T
            # the teacher's entropy, both ways
            soft = soft + sum((x.softmax(1) * x.log_softmax(1)).sum(1).mean() for x in (logits, logits.T)) / 2
        gradients = torch.autograd.grad(hard + soft, list(inputs.values()))
        results.append(((hard.detach(), soft.detach()), gradients))
    same(*results)


@pytest.fixture
def _their_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ClipLoss", "SigLipLoss", "CoCaLoss", "DistillClipLoss"):
        monkeypatch.setattr(factory, name, getattr(theirs, name))


@pytest.mark.usefixtures("_their_factory")
@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ({}, ours.ClipLoss),
        ({"siglip": True, "loss_dist_impl": "reduce"}, ours.SigLipLoss),
        ({"model": "coca_base"}, ours.CoCaLoss),
        ({"distill": True}, ours.DistillClipLoss),
    ],
)
def test_their_factory_makes_them(words: dict[str, Any], kind: type) -> None:
    ours.replace_losses()
    loss = open_clip.create_loss(Namespace(**{**vars(ARGUMENTS), **words}))
    assert type(loss) is kind
    assert loss.world_size == 1


SENTENCES = {
    "`use_horovod` must be False; got True. Launch with torchrun.": lambda: ours.ClipLoss(use_horovod=True),
    "`world_size` must be that of the process group, 1; got 2. Call torch.distributed.init": lambda: ours.SigLipLoss(
        world_size=2
    )(**features()),
    "`dist_impl` must be one of bidir, shift, reduce, gather; got 'ring'.": lambda: ours.SigLipLoss(dist_impl="ring"),
    "`--sub-batch` must be a whole number of at least 1; got 0. Count": lambda: ours.main(["--sub-batch", "0"]),
    "`--model` must be one of two towers alone; got coca_tiny. Run open_clip_train.main": lambda: ours.main(
        ["--model", "coca_tiny"]
    ),
    "`--horovod` must be left out; got True. Launch with torchrun.": lambda: ours.main(["--horovod"]),
}


def test_the_help_names_the_flag_and_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ours.main(["--help"])
    text = capsys.readouterr().out
    assert "--sub-batch" in text
    assert "--accum-freq" in text


def test_a_missing_library_has_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip_train.main", None)
    with pytest.raises(ValueError, match=r"`open_clip` must be of version 2.30 to 4.x; got no module open_clip_train"):
        ours.main([])


@pytest.mark.parametrize("sentence", SENTENCES)
def test_refusals(sentence: str) -> None:
    if NAMED and "horovod" in sentence and "--" in sentence:
        pytest.skip("no such flag")
    with pytest.raises(ValueError) as raised:
        SENTENCES[sentence]()
    assert str(raised.value).startswith(sentence)


# --- the loop of one epoch


class Loader(list[Any]):
    num_samples, num_batches, batch_size = N * K * 2, K * 2, N


class Recorder(torch.optim.SGD):
    """Keeps the gradients of its first step."""

    def step(self, closure: Any = None) -> None:
        if not hasattr(self, "first"):
            self.first = [None if p.grad is None else p.grad.clone() for p in self.param_groups[0]["params"]]
        super().step()


def epoch(
    model: Any, loss: nn.Module, batches: list[Any], how: str, accum_freq: int, teacher: Any = None,
    sub_batch: int | None = 3,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the first step, and the weights after the epoch, with their loop or with ours."""
    loader = Loader(batches)
    train = SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)
    optimizer = Recorder(model.parameters(), lr=0.1)
    args = Namespace(
        device="cpu", precision="fp64", distill=teacher is not None, accum_freq=accum_freq, skip_scheduler=True,
        horovod=False,
        grad_clip_norm=None, rank=0, world_size=1, log_local=False, log_every_n_steps=1, wandb=False,
        batch_size=len(tree_leaves(batches[0])[0]),
    )  # fmt: skip
    positional = ({"train": train}, loss, 0, optimizer, None, None, teacher, args)
    if how == "ours":
        ours.train_one_epoch(model, *positional, sub_batch=sub_batch, own=their_epoch)
    else:
        loader.num_batches = len(batches)
        their_epoch(model, *positional)
    return [*optimizer.first, *(p.detach().clone() for p in model.parameters())]


def joined(batches: list[Any]) -> list[Any]:
    return [tree_map(lambda *sides: torch.cat(sides), *batches[i : i + K]) for i in (0, K)]


@pytest.mark.parametrize("bias", [False, True])
def test_accumulated_batches_have_the_gradient_of_one(bias: bool) -> None:
    model, batches = clip(bias), [data(N) for _ in range(2 * K)]
    loss = theirs.SigLipLoss() if bias else theirs.ClipLoss()
    truth = epoch(deepcopy(model), loss, joined(batches), "theirs", 1)
    mine = ours.SigLipLoss() if bias else ours.ClipLoss()
    found = epoch(deepcopy(model), mine, batches, "ours", K)
    same(found, truth, 1e-8)
    # without a cache the scale's gradient is K times too large
    scale = [name for name, _ in model.named_parameters()].index("logit_scale")
    plain = epoch(deepcopy(model), loss, batches, "theirs", K)
    same(plain[scale], K * truth[scale], 1e-8)


def test_a_teachers_batches_are_one_too() -> None:
    model, batches = clip(), [data(N) for _ in range(2 * K)]
    told = clip()
    with torch.no_grad():
        for p in told.parameters():
            p.add_(0.1 * torch.randn_like(p))
    truth = epoch(deepcopy(model), theirs.DistillClipLoss(), joined(batches), "theirs", 1, told)
    same(epoch(deepcopy(model), ours.DistillClipLoss(), batches, "ours", K, told), truth, 1e-8)


def test_a_batch_that_is_encoded_at_once_may_be_normalised() -> None:
    model, batches = clip(), [data(N) for _ in range(2 * K)]
    model.visual = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 16), nn.BatchNorm1d(16)).double()
    truth = epoch(deepcopy(model), theirs.ClipLoss(), batches, "theirs", 1)
    for sub_batch in (None, N):
        same(epoch(deepcopy(model), ours.ClipLoss(), batches, "ours", 1, sub_batch=sub_batch), truth, 1e-8)
    with pytest.raises(ValueError, match=r"`encoder` must treat examples one by one; got BatchNorm1d in training mode"):
        epoch(model, ours.ClipLoss(), batches, "ours", K)


def on_a_rank(rank: int, group: Any, model: Any, batches: list[Any]) -> list[Tensor]:
    W = dist.get_world_size(group)
    default, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    try:
        wrapped = DistributedDataParallel(deepcopy(model))
        mine = [tree_map(lambda x: x.chunk(W)[rank], batch) for batch in batches]
        loss = ours.ClipLoss(rank=rank, world_size=W)
        return epoch(wrapped, loss, mine, "ours", K)
    finally:
        dist.GroupMember.WORLD = default


def test_two_ranks_have_the_gradient_of_the_whole_batch(pool: Pool) -> None:
    model, batches = clip(), [data(N) for _ in range(2 * K)]
    truth = epoch(deepcopy(model), theirs.ClipLoss(), joined(batches), "theirs", 1)
    for found in pool.run(on_a_rank, 2, model, batches):
        same(found, truth, 1e-8)


# --- the command line


def run(main: Any, folder: Path, name: str, *words: str) -> dict[str, Tensor]:
    """Weights after an epoch of a command line."""
    main([
        "--train-data", str(folder / "pairs.csv"), "--csv-separator", ",", "--dataset-type", "csv",
        "--model", "tiny", "--device", "cpu", "--workers", "0", "--precision", "fp32", "--epochs", "1", "--lr", "1e-3",
        "--warmup", "1", "--eps", "1e-3", "--logs", str(folder), "--name", name, "--seed", "3", *words,
    ])  # fmt: skip
    return torch.load(folder / name / "checkpoints" / "epoch_1.pt", weights_only=True)["state_dict"]


@pytest.mark.usefixtures("_their_factory")
def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    # it would write to the streams of this test for ever
    monkeypatch.setattr(main_module, "setup_logging", lambda *how: None)
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(tmp_path / "tiny.json")
    lines = ["filepath,title"]
    for index in range(16):
        pixels = (torch.rand(16, 16, 3) * 255).byte().numpy()
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
        lines.append(f"{tmp_path / f'{index}.png'},picture {index}")
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    truth = run(main_module.main, tmp_path, "theirs", "--batch-size", "8")
    found = run(ours.main, tmp_path, "ours", "--sub-batch", "3", "--batch-size", "4", "--accum-freq", "2")
    assert type(factory.ClipLoss()) is ours.ClipLoss
    assert main_module.train_one_epoch is their_epoch
    assert found.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-4, atol=1e-5)


def test_named_and_nested_batches_are_joined() -> None:
    batches = [{"image": {"patches": torch.full((2, 3), i)}, "text": torch.arange(2) + i} for i in range(2 * K)]
    first, second = ours.Joined(Loader(batches), K)
    assert torch.equal(first["image"]["patches"], torch.arange(K).repeat_interleave(2)[:, None].expand(-1, 3))
    assert torch.equal(second["text"], torch.cat([torch.arange(2) + K + i for i in range(K)]))
