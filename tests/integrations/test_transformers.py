"""The Trainer with the gradient cache beside one that computes the whole batch, with the library itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from comparison import same
from trainer_on_ranks import CASES, Model, Pairs, collate, result, scale_of, trainer
from transformers import TrainingArguments

from contrastile import ClipLoss, SigLipLoss
from contrastile.integrations import transformers as adapter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]


@pytest.mark.parametrize("words", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulated"])
@pytest.mark.parametrize("kind", ["ours", "method"])
def test_losses_and_weights_are_those_of_the_whole_batch(tmp_path: Path, kind: str, words: dict[str, Any]) -> None:
    results = []
    for each in (kind, "plain"):
        run = trainer(each, tmp_path, 8, **words)
        run.train()
        results.append(result(run))
        if not words:
            results[-1] = (*results[-1], run.evaluate(run.eval_dataset)["eval_loss"] if each != "plain" else None)
    if not words:
        found = results[0][2]
        plain = trainer("plain", tmp_path, 8)
        plain.model.load_state_dict(run.model.state_dict())
        batches = [collate([Pairs()[i] for i in range(start, start + 8)]) for start in range(0, 32, 8)]
        with torch.no_grad():
            wanted = sum(float(plain.compute_loss(plain.model, batch)) for batch in batches) / 4
        assert found == pytest.approx(wanted, rel=1e-6)
    same(results[0][:2], results[1][:2])


def test_a_bias_follows_the_scale(tmp_path: Path) -> None:
    run = trainer("ours", tmp_path, 8)
    batch, scale = collate([Pairs()[i] for i in range(8)]), scale_of(run.model)
    _, features = run.compute_loss(run.model, batch, return_outputs=True)
    truth = SigLipLoss()(*features.values(), scale, -3.0)
    run.contrastive_loss = SigLipLoss()
    for bias in (-3.0, lambda model: -3.0 * model.logit_scale / model.logit_scale.detach()):
        run.bias = bias
        torch.testing.assert_close(run.compute_loss(run.model, batch), truth)


@pytest.mark.parametrize("kind", ["ours", "method"])
def test_bf16(tmp_path: Path, kind: str) -> None:
    """A method of the model is under autocast too, though the Trainer's autocast is on its forward alone."""
    results = []
    for each in (kind, "plain"):
        run = trainer(each, tmp_path, 8, bf16=True, double=False)
        run.train()
        results.append(result(run))
    for name, p in results[0][1].items():
        torch.testing.assert_close(p, results[1][1][name], rtol=2e-2, atol=2e-4)


def with_scaler(run: Any, first: float) -> Any:
    """The Trainer under fp16 with a GradScaler, which accelerate makes on GPUs only."""
    run.accelerator.state._mixed_precision = "fp16"
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=first)
    return run


@pytest.mark.parametrize("kind", ["ours", "method"])
@pytest.mark.parametrize("first", [2.0**12, 2.0**40], ids=["fits", "overflows"])
def test_fp16(tmp_path: Path, kind: str, first: float) -> None:
    """Gradients are scaled before the cache and unscaled once behind it; a step whose gradients overflow is skipped."""
    results, weights = [], [p.clone() for p in Model().parameters()]
    for each in (kind, "plain"):
        # clipped, which unscales them
        run = with_scaler(trainer(each, tmp_path, 8, bf16=True, double=False, max_grad_norm=1e-2), first)
        run.train()
        assert run.accelerator.scaler.get_scale() == (first if first < 2**20 else first / 2**4)
        moved = max(float((p - q).abs().max()) for p, q in zip(run.model.parameters(), weights, strict=True))
        assert (moved > 1e-6) == (first < 2**20)
        results.append(result(run))
    (losses, ours), (others, plain) = results
    assert losses == pytest.approx(others, rel=2e-3)
    for name, p in ours.items():
        torch.testing.assert_close(p, plain[name], rtol=2e-3, atol=2e-6)


def test_a_resumed_run_has_the_same_weights(tmp_path: Path) -> None:
    whole = trainer("ours", tmp_path / "whole", 8)
    whole.train()
    first = trainer("ours", tmp_path / "run", 8, save_strategy="steps", save_steps=2)
    first.train()
    again = trainer("ours", tmp_path / "run", 8)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    same(result(again)[1], result(whole)[1])


def test_predictions_are_the_features_of_each_side(tmp_path: Path) -> None:
    # a last batch that is smaller
    run = trainer("ours", tmp_path, 8, dataloader_drop_last=False)
    data = torch.utils.data.Subset(Pairs(), range(13))
    queries, keys = run.predict(data).predictions
    batch = collate([data[i] for i in range(13)])
    with torch.no_grad():
        _, wanted = run.compute_loss(run.model, batch, return_outputs=True)
    torch.testing.assert_close(torch.from_numpy(queries), wanted["query"])
    torch.testing.assert_close(torch.from_numpy(keys), wanted["key"])
    assert "eval_loss" in run.evaluate(data)


def test_a_model_that_checkpoints_its_layers(tmp_path: Path) -> None:
    results = []
    for kind, reentrant in (("ours", False), ("plain", False), ("ours", True)):
        run = trainer(kind, tmp_path, 8)
        run.model.bert.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            with pytest.raises(ValueError, match=r'Pass .* gradient_checkpointing_kwargs=\{"use_reentrant": False\}'):
                run.train()
        else:
            run.train()
            results.append(result(run))
    same(*results)


def test_two_ranks_have_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    script = Path(__file__).with_name("trainer_on_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*command, str(tmp_path), "4"], check=True, timeout=240)
    truths = {}
    for double in (True, False):
        truth = trainer("plain", tmp_path, 8, double=double, max_grad_norm=0.0)
        truth.train()
        truths[double] = result(truth)
    wrappers = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPModel", "zero": "DeepSpeedEngine"}
    wrappers["compiled"] = "OptimizedModule"
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt")
        assert results.keys() == CASES.keys()
        for case, (wrapper, *found) in results.items():
            assert wrapper == next(name for start, name in wrappers.items() if case.startswith(start))
            double = CASES[case][1].get("double", True)
            same(tuple(found), truths[double], 1e-9 if double else 1e-5)


def test_texts_and_hard_negatives(tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmn"]))
    sides = ("query", "positive", "negative")
    rows = [{"query": "a b", "positive": "c", "negative": "d e f"}, {"query": "g", "positive": "h", "negative": "i"}]
    batch = adapter.TextPairs(BertTokenizerFast(str(tmp_path / "vocab.txt")), sides)(rows)
    assert batch["negative"]["input_ids"].shape == (2, 5)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    run = adapter.ContrastileTrainer(model=Model(), args=arguments, sub_batch=1, sides=sides)
    sentence = "`sides` must name columns of the data; got query, positive, negative, of examples with anchor. Pass the"
    with pytest.raises(ValueError, match=sentence):
        adapter.TextPairs(None, sides)([{"anchor": "a"}])
    loss, features = run.compute_loss(run.model, batch, return_outputs=True)
    keys = torch.cat([features["positive"], features["negative"]])
    wanted = torch.nn.functional.cross_entropy(20.0 * features["query"] @ keys.T, torch.arange(2))
    torch.testing.assert_close(loss, wanted)
    run.sub_batch, run.sub_batch_tokens = None, 6
    torch.testing.assert_close(
        run.compute_loss(run.model, batch, return_outputs=True)[1]["negative"], features["negative"]
    )
    with pytest.raises(ValueError, match=r"`inputs` must hold query or query_...; got \['positive'\]"):
        run.compute_loss(run.model, {"positive": batch["positive"]})
    with pytest.raises(ValueError, match="`sides` must name every side of a batch; got query, positive, negative with"):
        run.compute_loss(run.model, {**batch, "another": batch["negative"]})
    for text, got in ((None, "NoneType"), (["d", "e"], "list")):
        with pytest.raises(ValueError, match=f"`negative` must be a text in every row; got {got}. Give each text a"):
            adapter.TextPairs(None, sides)([rows[0], {**rows[1], "negative": text}])


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"negative_input_ids": torch.ones(2, 3)}, "negative_input_ids"),
        ({"key_2_input_ids": torch.ones(2, 3)}, "key_2_input_ids"),
        ({"query": torch.ones(2, 4), "negative": torch.ones(2, 4)}, "negative"),
        ({"query": {"input_ids": 0}, "query_2_input_ids": torch.ones(2, 3)}, "query_2_input_ids"),
    ],
)
def test_a_side_that_the_trainer_was_not_told(tmp_path: Path, more: dict[str, Any], name: str) -> None:
    run = trainer("ours", tmp_path, 8)
    batch = {"query_input_ids": 0, "key_input_ids": 1, **more}
    with pytest.raises(ValueError, match=f"`sides` must name every side of a batch; got query, key with {name} in the"):
        run.compute_loss(run.model, batch)


def test_further_entries_of_a_batch_that_are_no_sides(tmp_path: Path) -> None:
    run = trainer("ours", tmp_path, 8)
    batch = collate([Pairs()[i] for i in range(8)])
    more = {"labels": torch.arange(8), "query_index": torch.arange(8), "teacher": torch.ones(8, 5)}
    torch.testing.assert_close(run.compute_loss(run.model, {**batch, **more}), run.compute_loss(run.model, batch))


def test_a_side_that_begins_as_another(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    run = adapter.ContrastileTrainer(model=Model(), args=arguments, sub_batch=1, sides=("query", "key", "key_2"))
    batch = {"query_x": 0, "key_x": 1, "key_2_x": 2}
    assert [run.inputs_of(batch, side) for side in run.sides] == [{"x": 0}, {"x": 1}, {"x": 2}]
    assert run.inputs_of({"key_x": 1, "key_2": {"x": 2}}, "key") == {"x": 1}


def test_methods_of_a_model_that_return_an_output_of_transformers(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = {"vocab_size": 30, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config={**sizes, **words}, vision_config=vision, projection_dim=8)
    torch.manual_seed(0)
    model = CLIPModel(config).eval()
    batch = {"text_input_ids": torch.randint(3, 30, (5, 6)), "image_pixel_values": torch.randn(5, 3, 16, 16)}
    run = adapter.ContrastileTrainer(
        model=model, args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]), sub_batch=2,
        sides=("text", "image"), encoders=("get_text_features", "get_image_features"),
    )  # fmt: skip
    _, features = run.compute_loss(model, batch, return_outputs=True)
    out = model(input_ids=batch["text_input_ids"], pixel_values=batch["image_pixel_values"])
    for side, embeddings in (("text", out.text_embeds), ("image", out.image_embeds)):
        torch.testing.assert_close(torch.nn.functional.normalize(features[side], dim=-1), embeddings)
    run.encoders = ["get_text_features", "get_picture"]
    with pytest.raises(ValueError, match=r"`encoder` must be callable, or a module and the name of its method; got \("):
        run.compute_loss(model, batch)


def test_the_whole_output_of_a_model_is_no_features(tmp_path: Path) -> None:
    run = trainer("ours", tmp_path, 8)
    run.encoders = ["forward"] * 2
    with pytest.raises(
        ValueError, match=r"`encoders` must return features \[B, D\]; got a BaseModelOutput.*. Return one"
    ):
        run.compute_loss(run.model, collate([Pairs()[i] for i in range(8)]))


@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 1], [1, 1, 0]])])
def test_the_mean_of_16_bit_states_is_float32(mask: Any) -> None:
    states = torch.randn(2, 3, 8).bfloat16()

    class Model16(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            return SimpleNamespace(last_hidden_state=states)

    inputs = {} if mask is None else {"attention_mask": mask}
    counted = [row[: 3 if mask is None else int(n)].double().mean(0) for row, n in zip(states, (3, 2), strict=True)]
    wanted = torch.nn.functional.normalize(torch.stack(counted), dim=-1)
    torch.testing.assert_close(adapter.mean_pooled(Model16(), **inputs), wanted.float(), rtol=1e-6, atol=1e-7)


def test_forward_by_name_is_a_call_of_the_model() -> None:
    """With its hooks, which FSDP2 gathers parameters by; a compiled method stays one that `encode` recognises."""
    model = torch.nn.Linear(3, 2)
    assert adapter.method_encoder(model, "forward") == (model, "forward")
    model.features = torch.compile(model.forward)
    assert adapter.method_encoder(model, "features") == (model, "features")


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    for words, sentence in (
        ({"sides": ("query",)}, r"`sides` must name two columns or more; got \('query',\). Pass"),
        ({"sides": "query"}, "`sides` must name two columns or more; got query. Pass"),
        ({"loss": "infonce"}, r"`loss` must be a loss as an object; got infonce. Pass InfoNCELoss\(\)."),
        ({"loss": ClipLoss}, r"`loss` must be a loss as an object; got ClipLoss. Pass ClipLoss\(\)."),
        (
            {"scale": torch.nn.Parameter(torch.tensor(20.0))},
            "`scale` must be a number, or a function of the model; got a Parameter. Make it the model's",
        ),
        ({"encoders": ["a"]}, "`encoders` must be one, or one for each of 2 sides; got 1. Add some."),
        ({"encoders": "get_picture"}, "`encoders` must be functions, or names of the model's methods; got 'get_pict"),
        (
            {"encoders": None},
            "`encoders` must be functions, or names of the model's methods; got None. Check the name.",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            adapter.ContrastileTrainer(model=Model(), args=args, sub_batch=3, **words)
    for words, sentence in (
        ({"sub_batch": 0}, "`sub_batch` must be a whole number of at least 1; got 0"),
        ({"sub_batch": None}, "`sub_batch` must be given, or sub_batch_tokens; got None"),
        ({"sub_batch": 2, "sub_batch_tokens": 0}, "`sub_batch_tokens` must be a whole number of at least 1; got 0"),
        ({"sub_batch": 2, "retain": "all"}, "`retain` must be a whole number of at least 0; got 'all'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            adapter.ContrastileTrainer(model=Model(), **words)
    model = Model()
    model.config = model.bert.config
    for words, arguments, sentence in (
        ({"compute_loss_func": scale_of}, {}, "`compute_loss_func` must be None; got scale_of. Pass loss=..., called"),
        ({"compute_metrics": scale_of}, {}, "`compute_metrics` must be None; got scale_of. Evaluate features with"),
        ({}, {"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be 0; got 0.1. Pass loss=InfoNCELoss"),
    ):
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **arguments)
        with pytest.raises(ValueError, match=sentence):
            adapter.ContrastileTrainer(model=model, args=args, sub_batch=3, **words)
    with pytest.warns(UserWarning, match="gradient_accumulation_steps adds no negatives"):
        made = trainer("ours", tmp_path, 8, gradient_accumulation_steps=2)
    with pytest.raises(
        ValueError, match="`data_collator` must return the inputs of each side; got nothing, as the def"
    ):
        made._prepare_inputs({})
    monkeypatch.setattr(type(made.args), "n_gpu", 2)
    with pytest.raises(ValueError, match=r"`n_gpu` must be 1; got 2. Launch one process for each GPU"):
        adapter.ContrastileTrainer(model=Model(), args=made.args, sub_batch=3)
    sentence = r"`deepspeed` must be of ZeRO stage 0, 1 or 2; got stage 3. Shard with FSDP2 \(fsdp_version 2\)."
    with pytest.raises(ValueError, match=sentence):
        adapter.refuse_zero_3(SimpleNamespace(zero_stage=3))
    adapter.refuse_zero_3(SimpleNamespace(zero_stage=2))
