"""Recipes with compiled towers: few shapes, plain weights, a resumed run bit for bit; and the choices of "auto"."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_train_resume import stopped
from test_train_retriever import swapped
from tiny_runs import compiling, left, same_run, tiny_recipe

from contrastile.train import run as runs
from contrastile.train.folder import RECIPE, RunFolder
from contrastile.train.loop import run_recipe
from contrastile.train.run import WORTH_COMPILING, settled

# torch's own words, on tensors that are no leaves
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
SIZES = "hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, "
VIT = f"{{model_type='vit', {SIZES}patch_size=16, hidden_dropout_prob=0.2}}"
IMAGE = f"model.image={{kind='transformers', config={VIT}}}"
TEXT = f"model.text={{kind='transformers', config={{model_type='bert', {SIZES}hidden_dropout_prob=0.2}}}}"
BERT = f"model.both={{kind='transformers', config={{model_type='bert', {SIZES}hidden_dropout_prob=0.0, "
BERT += "attention_probs_dropout_prob=0.0}}"
SMALL = ("train.examples=80", "train.batch=20", "train.retain=0")


@pytest.fixture
def shapes() -> Iterator[list[tuple[int, ...]]]:
    """The shapes that layers are compiled for."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    seen = list[tuple[int, ...]]()
    with compiling(lambda _, inputs: seen.append(next(tuple(x.shape) for x in inputs if x.ndim == 3))):
        yield seen


def test_compiled_towers_have_plain_weights_and_resume_bit_for_bit(
    tmp_path: Path, shapes: list[tuple[int, ...]]
) -> None:
    words = (IMAGE, TEXT, *SMALL, "train.sub_batch=8", "save.steps=2")
    recipe = tiny_recipe(tmp_path, *words, "train.compile=true")
    plain = run_recipe(tiny_recipe(tmp_path, *words), tmp_path / "plain").folder
    assert shapes == []
    whole = run_recipe(recipe, tmp_path / "whole").folder
    # layers of a tower share a graph; of 20 pairs in eights, the last four run as they are written, and so do probes
    assert sorted(rows for rows, *_ in shapes) == [8, 8]
    assert stopped(recipe, tmp_path / "runs", at=3).stopped_by
    same_run(run_recipe(recipe, tmp_path / "runs", resume=True).folder, whole)
    (one, *_), (other, *_) = left(plain), left(whole)
    assert one.keys() == other.keys()
    for name, weights in one.items():
        torch.testing.assert_close(other[name], weights, rtol=1e-4, atol=1e-5)


def test_a_compiled_retriever_sees_few_shapes(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    folders = [
        run_recipe(
            swapped(tmp_path, BERT, *SMALL, "train.examples=40", f"train.compile={word}"), tmp_path / word
        ).folder
        for word in ("false", "true")
    ]
    # 8 questions or 12 passages, at the longest length there is; transformers leaves out a mask that hides nothing
    assert {(rows, width) for rows, width, _ in shapes} == {(8, 6), (12, 6)}
    assert len(shapes) <= 4
    (one, *_), (other, *_) = map(left, folders)
    for name, weights in one.items():
        torch.testing.assert_close(other[name], weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "compiles"),
    [
        ((IMAGE,), True),
        ((IMAGE, f"train.examples={WORTH_COMPILING - 1}"), False),
        ((IMAGE, "train.parallel=shard"), True),
        ((), False),
    ],
)
def test_auto_compiles_where_it_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], compiles: bool
) -> None:
    recipe = tiny_recipe(tmp_path, f"train.examples={WORTH_COMPILING}", *words)
    assert recipe.train.compile == "auto"
    assert settled(recipe).train.compile is False, "this is a CPU"
    monkeypatch.setattr(runs, "no_compiler", lambda _: None)
    assert settled(recipe).train.compile is compiles


def test_a_resumed_run_keeps_its_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = tiny_recipe(tmp_path, IMAGE), RunFolder(tmp_path)
    monkeypatch.setattr(runs, "no_compiler", lambda _: None)
    own = (tmp_path / "tiny.toml").read_text()
    # the recipe of a run of an earlier version does not say it
    for text, compiles in ((own, False), ("[train]\ncompile = true\nexamples = 9", True)):
        (tmp_path / RECIPE).write_text(text)
        assert settled(recipe, folder).train.compile is compiles
