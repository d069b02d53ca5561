"""Folders of `contrastile export`, loaded by the libraries themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("pydantic")

from tiny_texts import write_text_recipe

import contrastile
from contrastile.cli.main import main
from contrastile.models.pretrained import Library

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]
BERT = (
    "{kind='transformers',pooling='POOLING',config={model_type='bert',hidden_size=16,num_hidden_layers=1,"
    "num_attention_heads=2,intermediate_size=32}}"
)
TEXTS = ["where is the red fox house", "def blue_owl(): return river", "white bee"]


def trained(folder: Path, *words: str, pooling: str = "mean") -> Path:
    """A retriever's finished run, one step long."""
    model = BERT.replace("POOLING", pooling)
    own = [] if any(word.startswith(("model.both", "model.query")) for word in words) else [f"model.both={model}"]
    # sentence-transformers has one length for both sides
    own += ["model.tokenizer={kind='words',size=100,length=16,query_length=16}"]
    how = [*own, "train.examples=32", "train.batch=32", "data.query_prefix='query: '", "evaluate.every=1.0", *words]
    assert main(["train", str(write_text_recipe(folder)), *how, "--runs", str(folder / "runs")]) == 0
    return folder / "runs" / "tiny"


def exported(run: Path, kind: str, target: Path) -> Path:
    assert main(["export", str(run), "--as", kind, "--out", str(target)]) == 0
    return target


@pytest.mark.parametrize(
    ("pooling", "words"), [("mean", []), ("cls", ["model.features=8"]), ("last", ["model.normalise=false"])]
)
def test_sentence_transformers(tmp_path: Path, pooling: str, words: list[str]) -> None:
    from sentence_transformers import SentenceTransformer

    run = trained(tmp_path, *words, pooling=pooling)
    ours, target = contrastile.load(run, device="cpu"), exported(run, "sentence-transformers", tmp_path / "out")
    theirs = SentenceTransformer(str(target), device="cpu")
    for text in TEXTS:
        assert torch.equal(theirs.encode_query([text], convert_to_tensor=True), ours.encode_query([text]))
        assert torch.equal(theirs.encode_document([text], convert_to_tensor=True), ours.encode_passage([text]))
    card = (target / "README.md").read_text()
    assert "train.examples" in card or "examples = 32" in card
    assert f"| pooling | {pooling} |" in card


@pytest.mark.parametrize("sides", ["both", "each"])
def test_queries_that_are_shorter_than_passages(tmp_path: Path, sides: str) -> None:
    from sentence_transformers import SentenceTransformer

    model = BERT.replace("POOLING", "mean")
    words = [f"model.query={model}", f"model.passage={model}"] if sides == "each" else [f"model.both={model}"]
    run = trained(tmp_path, *words, "model.tokenizer.query_length=4")
    ours, target = contrastile.load(run, device="cpu"), exported(run, "sentence-transformers", tmp_path / "out")
    folders = [target / "query", target / "passage"] if sides == "each" else [target, target]
    query, passage = (SentenceTransformer(str(folder), device="cpu") for folder in folders)
    assert torch.equal(passage.encode_document(TEXTS[:1], convert_to_tensor=True), ours.encode_passage(TEXTS[:1]))
    if sides == "both":
        assert "set `model.max_seq_length = 4` before `encode_query` |" in (target / "README.md").read_text()
        query.max_seq_length = 4
    assert torch.equal(query.encode_query(TEXTS[:1], convert_to_tensor=True), ours.encode_query(TEXTS[:1]))


def test_a_run_starts_from_an_exported_folder(tmp_path: Path) -> None:
    run = trained(tmp_path)
    target = exported(run, "sentence-transformers", tmp_path / "out")
    model = f"model.both={{kind='transformers',pooling='mean',folder='{target}'}}"
    tokenizer = f"model.tokenizer={{folder='{target}',length=16,query_length=16}}"
    still = ["optim.learning_rate=1e-30", "optim.weight_decay=0.0", "optim.warmup=0.0"]
    (tmp_path / "again").mkdir()
    again = trained(tmp_path / "again", model, tokenizer, *still)
    ours, theirs = contrastile.load(run, device="cpu"), contrastile.load(again, device="cpu")
    assert torch.equal(ours.encode_query(TEXTS), theirs.encode_query(TEXTS))
    assert torch.equal(ours.encode_passage(TEXTS), theirs.encode_passage(TEXTS))


@pytest.mark.parametrize("old", [False, True])
def test_other_modules_of_a_folder_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, old: bool) -> None:
    target = exported(trained(tmp_path, "model.features=8", pooling="cls"), "sentence-transformers", tmp_path / "out")
    if old:
        words = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        (target / "1_Pooling" / "config.json").write_text(json.dumps(words))
    for pooling, sentences in (("cls", ["left out: 2_Dense"]), ("mean", ["set its pooling", "left out: 2_Dense"])):
        caplog.clear()
        Library(folder=str(target), pooling=pooling).build()
        messages = [record.getMessage() for record in caplog.records]
        assert [sentence in text for sentence, text in zip(sentences, messages, strict=True)] == [True] * len(sentences)


def test_transformers(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    run = trained(tmp_path, "model.normalise=false", pooling="cls")
    ours, target = contrastile.load(run, device="cpu"), exported(run, "transformers", tmp_path / "out")
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModel.from_pretrained(target).eval()
    for text in TEXTS:
        tokens = tokenizer([text], return_tensors="pt", truncation=True)
        tokens = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            found = model(**tokens).last_hidden_state[:, 0]
        assert torch.equal(found, ours.encode_passage([text]))


def test_an_index_as_plain_files_and_for_faiss(tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    run = trained(tmp_path, "model.both={kind='bag',width=16}")
    assert main(["encode", str(run), "--shard", "20"]) == 0
    plain, flat = (exported(run, kind, tmp_path / kind) for kind in ("npy", "faiss"))
    features = np.load(plain / "features.npy")
    ids = (plain / "ids.txt").read_text().splitlines()
    passages = [json.loads(line) for line in (flat / "passages.jsonl").read_text().splitlines()]
    assert len(features) == len(ids) == len(passages) > 40
    assert [json.loads(f'"{line}"') for line in ids] == [passage["id"] for passage in passages]
    index = faiss.read_index(str(flat / "index.faiss"))
    query = contrastile.load(run, device="cpu").encode_query(["where is the red fox house"])
    _, rows = index.search(query.numpy(), 3)
    best = (query @ torch.from_numpy(features).float().T).topk(3).indices
    assert rows.tolist() == best.tolist()
    assert json.loads((plain / "index.json").read_text())["passages"] == len(features)


def refused(capsys: Any, *words: str) -> str:
    assert main(["export", *words]) == 2
    return capsys.readouterr().err


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(trained(tmp_path, "model.both={kind='bag',width=16}"))
    out = str(tmp_path / "out")
    capsys.readouterr()
    assert refused(capsys, run, "--as", "onnx", "--out", out).startswith(
        "`--as` must be one of sentence-transformers, transformers, open_clip, npy, faiss; got 'onnx'."
    )
    assert refused(capsys, run, "--as", "npy", "--out", out).startswith("`--index` must hold an index.json; got")
    assert refused(capsys, run, "--as", "transformers", "--out", out) == (
        '`run` must have encoders of transformers; got model.both of the kind "bag". '
        'Train with model.both of the kind "transformers".\n'
    )
    assert main(["encode", run]) == 0
    capsys.readouterr()
    assert refused(capsys, run, "--as", "npy", "--out", str(tmp_path)).startswith(
        "`--out` must be a folder that is not there yet; got"
    )
