"""Runs of images and texts that `contrastile export` writes, loaded by the libraries themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("pydantic")

from PIL import Image
from tiny_runs import write_recipe

import contrastile
from contrastile.cli.main import main
from contrastile.integrations import export_pairs

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]
TEXTS = ["letter A left", "letter B"]
WIDTHS = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32"
VISION, TEXT = f"{{{WIDTHS},patch_size=8,image_size=16}}", f"{{{WIDTHS},max_position_embeddings=8,vocab_size=100}}"
CONFIGS = {
    "clip": f"{{model_type='clip',projection_dim=12,vision_config={VISION},text_config={TEXT}}}",
    "siglip": f"{{model_type='siglip',vision_config={VISION},text_config={TEXT}}}",
    "vit": f"{{kind='transformers',pooling='POOLING',config={{model_type='vit',patch_size=8,{WIDTHS}}}}}",
    "bert": f"{{kind='transformers',pooling='POOLING',config={{model_type='bert',{WIDTHS}}}}}",
}
OPEN_CLIP = (
    "{embed_dim=12,vision_cfg={image_size=16,layers=1,width=64,patch_size=8},"
    "text_cfg={context_length=9,width=16,heads=2,layers=1}}"
)


def trained(folder: Path, *words: str) -> Path:
    """A finished run of images and texts, one step long."""
    how = ["train.examples=32", "train.batch=32", "evaluate.every=1.0", "evaluate.probe=8", *words]
    assert main(["train", str(write_recipe(folder)), *how, "--runs", str(folder / "runs")]) == 0
    return folder / "runs" / "tiny"


def exported(run: Path, kind: str, target: Path) -> Path:
    assert main(["export", str(run), "--as", kind, "--out", str(target)]) == 0
    return target


def same_run(run: Path, folder: Path, words: list[str], target: Path) -> None:
    """A run that starts from the exported folder, at a learning rate of almost 0, has the features of `run`."""
    again = trained(target, *words, "optim.learning_rate=1e-30", "optim.weight_decay=0.0", "optim.warmup=0.0")
    ours, theirs = contrastile.load(run, device="cpu"), contrastile.load(again, device="cpu")
    assert torch.equal(ours.encode_text(TEXTS), theirs.encode_text(TEXTS))
    assert torch.equal(ours.encode_image(pictures()), theirs.encode_image(pictures()))
    torch.testing.assert_close(ours.model.logit_scale, theirs.model.logit_scale, rtol=1e-5, atol=1e-6)


def pictures(channels: int = 3) -> list[Image.Image]:
    """Square pictures: other shapes are cropped before they are resized here, and after it there."""
    torch.manual_seed(0)
    arrays = (torch.rand(2, 24, 24, 3) * 255).byte().numpy()
    return [Image.fromarray(array).convert("RGB" if channels == 3 else "L") for array in arrays]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A folder with a tokenizer that ends texts as CLIP's does, and the keys that use it."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    from contrastile.models.text import train_tokenizer

    tokenizer = train_tokenizer(["letter A B C D E F G H left right high low [END]"], size=99, length=8)
    engine = tokenizer._engine
    engine.add_special_tokens(["[END]"])
    ends = [("[END]", engine.token_to_id("[END]"))]
    engine.post_processor = TemplateProcessing(single="$A [END]", special_tokens=ends)
    fast = PreTrainedTokenizerFast(tokenizer_object=engine, pad_token="[PAD]", eos_token="[END]")
    fast.save_pretrained(tmp_path / "words")
    return [f"model.tokenizer={{folder='{tmp_path}/words',length=8}}", "data.channels=3"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["clip", "siglip", "towers"])
def test_transformers(tmp_path: Path, words: list[str], kind: str, channels: int) -> None:
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    ends = json.loads((tmp_path / "words" / "tokenizer.json").read_text())["added_tokens"][-1]["id"]
    model = [f"model.both={CONFIGS.get(kind, '')}".replace("text_config={", f"text_config={{eos_token_id={ends},")]
    model[0] = f"model.both={{config={model[0].removeprefix('model.both=')}}}"
    if kind == "towers":
        pair = {"image": "vit", "text": "bert"}
        model = [f"model.{side}={CONFIGS[name].replace('POOLING', 'pooler')}" for side, name in pair.items()]
    loss = ["loss.kind='siglip'"] if kind == "siglip" else []
    run = trained(tmp_path, *words, *model, *loss, f"data.channels={channels}")
    target = exported(run, "transformers", tmp_path / "out")
    ours, theirs = contrastile.load(run, device="cpu"), AutoModel.from_pretrained(target).eval()
    processor, tokenizer = AutoImageProcessor.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    pixels = processor(pictures(channels), return_tensors="pt")["pixel_values"]
    # their processor rounds its pixels otherwise, by up to one of 255
    tower = ours.model.image.tower
    own = (ours.transform(pictures(channels)).float().expand(-1, tower.channels, -1, -1) / 255 - tower.mean) / tower.std
    torch.testing.assert_close(pixels.expand_as(own), own, rtol=0, atol=2 / 255 / float(tower.std.min()))
    tokens = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    tokens = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        image, text = theirs.get_image_features(pixel_values=own), theirs.get_text_features(**tokens)
    assert torch.equal(F.normalize(text.pooler_output, dim=-1), ours.encode_text(TEXTS))
    assert torch.equal(F.normalize(image.pooler_output, dim=-1), ours.encode_image(pictures(channels)))
    assert theirs.logit_scale.item() == ours.model.logit_scale.item()
    card = (target / "README.md").read_text()
    assert "library_name: transformers" in card
    assert 'convert("L")' in card or channels == 3
    assert "get_image_features" in card
    if kind == "siglip":
        assert theirs.logit_bias.item() == ours.model.logit_bias.item()
    again = [f"model.both={{folder='{target}'}}", f"model.tokenizer={{folder='{target}',length=8}}"]
    (tmp_path / "again").mkdir()
    same_run(run, target, [*again, *loss, "data.channels=3"], tmp_path / "again") if channels == 3 else None


@pytest.mark.parametrize("kind", ["clip's words", "a tokenizer", "one number"])
def test_open_clip(tmp_path: Path, words: list[str], kind: str) -> None:
    open_clip = pytest.importorskip("open_clip", minversion="3")
    how = ["model.tokenizer.length=9", "loss.kind='siglip'", "data.channels=3"]
    config = OPEN_CLIP
    if kind == "a tokenizer":
        config, how = OPEN_CLIP.replace("text_cfg={", "text_cfg={vocab_size=100,"), words
    if kind == "one number":
        config = OPEN_CLIP.replace("{embed_dim", "{init_logit_bias=0,nonscalar_logit_scale=true,embed_dim")
        how = ["model.tokenizer.length=5", "data.channels=1", "model.both.mean=[0.5]", "model.both.std=[0.5]"]
    run = trained(tmp_path, f"model.both={{kind='open_clip',config={config}}}", *how)
    target, ours = exported(run, "open_clip", tmp_path / "out"), contrastile.load(run, device="cpu")
    theirs, transform = open_clip.create_model_from_pretrained(f"local-dir:{target}")
    channels = ours.recipe.data.channels
    pixels = torch.stack([transform(picture) for picture in pictures(channels)])
    with torch.no_grad():
        image = theirs.encode_image(pixels, normalize=True)
        text = theirs.encode_text(open_clip.get_tokenizer(f"local-dir:{target}")(TEXTS), normalize=True)
    assert torch.equal(image, ours.encode_image(pictures(channels)))
    assert torch.equal(text, ours.encode_text(TEXTS))
    assert theirs.logit_scale.item() == ours.model.logit_scale.item()
    if kind == "clip's words":
        assert theirs.logit_bias.item() == ours.model.logit_bias.item()
    assert 'create_model_from_pretrained("local-dir:out")' in (target / "README.md").read_text()
    if kind != "one number":
        again = [f"model.both={{kind='open_clip',folder='{target}'}}", *how]
        again += [f"model.tokenizer.folder='{target}'"] if kind == "a tokenizer" else []
        (tmp_path / "again").mkdir()
        same_run(run, target, again, tmp_path / "again")


def refused(capsys: Any, *words: str) -> str:
    capsys.readouterr()
    assert main(["export", *words]) == 2
    return capsys.readouterr().err


def test_open_clip_2_reads_no_local_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = pytest.importorskip("open_clip").__version__
    if int(version.split(".")[0]) > 2:
        pytest.skip("it reads local folders")
    run = trained(tmp_path, f"model.both={{kind='open_clip',config={OPEN_CLIP}}}", "model.tokenizer.length=9")
    error = refused(capsys, str(run), "--as", "open_clip", "--out", str(tmp_path / "out"))
    sentence = f"`open_clip` must be of version 3, which reads local folders; got {version}. Run: pip install"
    assert sentence in error
    assert not (tmp_path / "out").exists()


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, small = str(tmp_path / "out"), str(trained(tmp_path))
    sentences = {
        "open_clip": "`run` must have towers that are a model of open_clip; got conv and words. Train with model.both "
        '= {kind = "open_clip", name = "ViT-B-16"}, or its config.',
        "transformers": "`run` must have towers that are a model of transformers; got conv and words. Train with "
        'model.both, or model.image and model.text, of the kind "transformers".',
        "sentence-transformers": "`--as` must be one of open_clip, transformers for a run of images and texts; got "
        "'sentence-transformers'. Other kinds of runs have the others.",
    }
    for kind, sentence in sentences.items():
        assert refused(capsys, small, "--as", kind, "--out", out).strip() == sentence
        assert not Path(out).exists()
    means = [f"model.{side}={CONFIGS[name].replace('POOLING', 'mean')}" for side, name in
             {"image": "vit", "text": "bert"}.items()]  # fmt: skip
    run = str(trained(tmp_path, *means, "data.channels=3"))
    assert refused(capsys, run, "--as", "transformers", "--out", out).startswith(
        "`run` must have features that are the poolers of their models; got mean and mean. Train with pooling ="
    )
    # a learned tokenizer writes no end token
    run = str(trained(tmp_path, f"model.both={{config={CONFIGS['clip']}}}", "data.channels=3"))
    assert refused(capsys, run, "--as", "transformers", "--out", out).startswith(
        "`run` must have features that are the poolers of their models; got pooler and last. Train with a tokenizer"
    )


def test_other_features_are_refused(tmp_path: Path, words: list[str], capsys: Any, monkeypatch: Any) -> None:
    pair = {"image": "vit", "text": "bert"}
    towers = [f"model.{side}={CONFIGS[name].replace('POOLING', 'pooler')}" for side, name in pair.items()]
    run, out = str(trained(tmp_path, *words, *towers)), str(tmp_path / "out")
    real = export_pairs._pooled
    monkeypatch.setattr(export_pairs, "_pooled", lambda output: real(output) + 1e-6)
    sentence = (
        "`run` must give the same tokens and features in transformers; got other features of images and features of "
        "texts. Use the run with contrastile.load."
    )
    # after bars of progress
    assert sentence in refused(capsys, run, "--as", "transformers", "--out", out)
    assert list(tmp_path.glob("*out*")) == list(tmp_path.glob(".export*")) == []
