"""The mixin for Lightning beside a module that computes the whole batch, with the library itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning")

from comparison import same
from lightning import LightningModule
from lightning_on_ranks import Base, Cached, Plain, pairs, quiet, train
from test_coming_from import blocks, run
from torch.utils.data import DataLoader, TensorDataset

from contrastile import ClipLoss, SigLipLoss
from contrastile.integrations.lightning import ContrastileMixin

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]


@pytest.mark.parametrize("words", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulated"])
def test_weights_are_those_of_the_whole_batch(tmp_path: Path, words: dict[str, Any]) -> None:
    same(train(Cached(), tmp_path, 8, **words), train(Plain(), tmp_path, 8, **words))


def test_the_class_on_the_page(tmp_path: Path) -> None:
    # with the methods that it leaves out
    kind = run(blocks("Lightning")[0], LightningModule=Base)["Clip"]
    same(train(kind(), tmp_path, 8), train(Plain(), tmp_path, 8))


def test_texts_share_sub_batches_of_tokens() -> None:
    class Texts(ContrastileMixin, LightningModule):
        sub_batch, sub_batch_tokens, widths = None, 12, list[int]()

        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(9, 4)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            self.widths.append(input_ids.shape[1])
            return F.normalize((self.words(input_ids) * attention_mask[..., None]).sum(1), dim=-1)

    model = Texts()
    masks = (torch.arange(6) < torch.tensor([[2], [6], [3], [2]])).long()
    batch = [{"input_ids": torch.randint(9, (4, 6)), "attention_mask": masks} for _ in range(2)]
    loss = model.contrastive_loss(batch)
    assert set(model.widths) == {6, 2}
    query, key = (model(**side) for side in batch)
    torch.testing.assert_close(loss, F.cross_entropy(20 * query @ key.T, torch.arange(4)))


def test_the_precision_plugin_reaches_the_encoders(tmp_path: Path) -> None:
    seen, weights = set(), []
    for model in (Cached().float(), Plain().float()):
        model.image.register_forward_hook(lambda module, inputs, out: seen.add(out.dtype))
        data = TensorDataset(*(x.float() for x in pairs().tensors))
        quiet(tmp_path, precision="bf16-mixed").fit(model, DataLoader(data, batch_size=8))
        weights.append(model.state_dict())
    assert seen == {torch.bfloat16}
    torch.testing.assert_close(*weights, rtol=2e-2, atol=1e-3)


def test_a_resumed_run_has_the_same_weights_and_validation_is_the_loss(tmp_path: Path) -> None:
    # Lightning resumes at the beginning of an epoch
    truth = train(Cached(), tmp_path, 16, max_steps=-1, max_epochs=2)
    trainer = quiet(tmp_path, max_steps=-1, max_epochs=1)
    trainer.fit(Cached(), DataLoader(pairs(), batch_size=16))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    model = Cached()
    again = quiet(tmp_path, max_steps=-1, max_epochs=2)
    again.fit(model, DataLoader(pairs(), batch_size=16), ckpt_path=tmp_path / "two.ckpt")
    same({name: p.detach() for name, p in model.named_parameters()}, truth)
    (found,) = again.validate(model, DataLoader(pairs(), batch_size=32), verbose=False)
    with torch.no_grad():
        wanted = Plain.training_step(model, next(iter(DataLoader(pairs(), batch_size=32))), 0)
    assert found["val_loss"] == pytest.approx(float(wanted), rel=1e-6)


def test_two_ranks_have_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    script = Path(__file__).with_name("lightning_on_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*command, str(tmp_path), "4"], check=True, timeout=240)

    truth = train(Plain(), tmp_path, 8)
    batches = [tuple(side[at::2] for side in pairs()[start : start + 8]) for start in range(0, 32, 8) for at in (0, 1)]
    alone = sum(Plain().training_step(batch, 0) for batch in batches) / len(batches)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        value, warned = found.pop("Alone")
        assert value == pytest.approx(float(alone), rel=1e-6)
        assert not warned
        # DDP, two ways of `ModelParallelStrategy`, and Fabric's DDP, compiled or not
        assert len(found) == 5
        for weights in found.values():
            same(weights, truth)


def test_a_batch_of_other_sides_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`batch` must have two sides or more, one for each of 2 encoders; got 1."):
        Cached().contrastive_loss([torch.randn(4, 6)])
    with pytest.raises(ValueError, match=r"`batch` must be a list, a tuple or a mapping of sides; got Tensor. Let the"):
        Cached().contrastive_loss(torch.randn(2, 4, 6))


def test_settings_of_init_and_of_classes_behind_the_mixin_count() -> None:
    class Own(ContrastileMixin, Base):
        encoders, sub_batch = ("encode_image", "encode_text"), 3

        def __init__(self) -> None:
            super().__init__()
            self.loss = SigLipLoss()
            self.logit_bias = torch.nn.Parameter(torch.tensor(-3.0, dtype=torch.float64))

    class Scaled(LightningModule):
        encoders, sub_batch, loss = "encode", 2, ClipLoss()

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(7.0, dtype=torch.float64))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return F.normalize(x, dim=-1)

    batch = [side[:4] for side in pairs().tensors]
    model = Own()
    sides = model.encode_image(batch[0]), model.encode_text(batch[1])
    truth = SigLipLoss()(*sides, model.logit_scale.exp(), -3.0)
    torch.testing.assert_close(model.contrastive_loss(batch), truth)
    # a module that `__init__` sets comes before an attribute of the class
    both = type("Both", (Own,), {"loss": ClipLoss()})()
    torch.testing.assert_close(both.contrastive_loss(batch), truth)

    behind = type("Behind", (ContrastileMixin, Scaled), {})()
    found = behind.contrastive_loss(batch)
    torch.testing.assert_close(found, ClipLoss()(*map(behind.encode, batch), 7.0))
    found.backward()
    assert behind.scale.grad is not None


def test_the_error_of_a_property_is_no_default() -> None:
    class Misspelt(Cached):
        @property
        def scale(self) -> torch.Tensor:
            return self.logit_scal.exp()

    with pytest.raises(AttributeError, match="scal"):
        Misspelt().contrastive_loss([side[:4] for side in pairs().tensors])


REFUSED = {
    "`sub_batch` must be a whole number of at least 1; got '64'": {"sub_batch": "64"},
    "`sub_batch` must be given, or sub_batch_tokens; got None": {"sub_batch": None},
    "`retain` must be a whole number of at least 0; got 'all'": {"retain": "all"},
    "`encoders` must be names of methods; got 'encode_txt'. Write": {"encoders": ("encode_image", "encode_txt")},
    "`encoders` must be names of methods; got 'model.encode_text'": {"encoders": ("encode_image", "model.encode_text")},
    "`encoders` must be names of methods; got 'logit_scale'": {"encoders": "logit_scale"},
    "`loss` must be a loss as an object; got ClipLoss. Write loss = ClipLoss().": {"loss": ClipLoss},
    "`loss` must be a loss as an object; got clip. Write loss = InfoNCE": {"loss": "clip"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_mistakes_are_refused_before_a_batch_is_loaded(tmp_path: Path, sentence: str) -> None:
    def unread(rows: Any) -> None:
        raise AssertionError("a batch")

    model = type("Mistaken", (Cached,), REFUSED[sentence])()
    with pytest.raises(ValueError) as raised:
        quiet(tmp_path).fit(model, DataLoader(pairs(), batch_size=8, collate_fn=unread))
    assert str(raised.value).startswith(sentence)


def test_a_bias_follows_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Cached(), [side[:4] for side in pairs().tensors]
    monkeypatch.setattr(Cached, "loss", SigLipLoss())
    monkeypatch.setattr(Cached, "scale", 7.0)
    without = model.contrastive_loss(batch)
    monkeypatch.setattr(Cached, "logit_bias", -3.0, raising=False)
    sides = [getattr(model, name)(side) for name, side in zip(Cached.encoders, batch, strict=True)]
    truth = SigLipLoss()(*sides, 7.0, -3.0)
    torch.testing.assert_close(model.contrastive_loss(batch), truth)
    assert not torch.isclose(without, truth)
    monkeypatch.setattr(Cached, "logit_bias", lambda self: -3.0)
    torch.testing.assert_close(model.contrastive_loss(batch), truth)


def test_a_scale_may_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Cached(), [side[:4] for side in pairs().tensors]
    monkeypatch.setattr(Cached, "scale", lambda self: 7.0)
    truth = model.contrastive_loss(batch)
    monkeypatch.setattr(Cached, "scale", 7.0)
    torch.testing.assert_close(model.contrastive_loss(batch), truth)
