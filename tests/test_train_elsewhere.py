"""Tests on pictures from elsewhere: during a run, at its end and by the command, told in all three files."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import tiny_recipe, write_pictures, write_recipe
from tiny_tests import class_folder, karpathy

from contrastile.cli.main import main
from contrastile.data.images import decode
from contrastile.data.loader import read_chunks
from contrastile.train import evaluation, image_text
from contrastile.train.config.image_text import RetrievalSettings, ZeroShotSettings
from contrastile.train.evaluation import open_test
from contrastile.train.image_text import ImageText
from contrastile.train.load import load
from contrastile.train.log import read_metrics
from contrastile.train.loop import run_recipe
from contrastile.train.recipe import RecipeError, load_any_recipe

LETTERS = {f"n{number:08}": letter for number, letter in enumerate("ABCDEFGH")}
NAMES = {folder: f"letter {letter}" for folder, letter in LETTERS.items()}


def overrides(folder):
    """A folder of classes and a captioned set, as words of a recipe."""
    class_folder(folder / "val", LETTERS)
    (folder / "names.json").write_text(json.dumps(NAMES))
    (folder / "templates.txt").write_text("{}\n{c} left\n")
    captions = karpathy(folder / "coco")
    zero_shot = f"folder='{folder}/val', name='imagenet', classes='{folder}/names.json'"
    return (
        f"evaluate.zero_shot=[{{{zero_shot}, templates='{folder}/templates.txt'}}]",
        f"evaluate.retrieval=[{{captions='{captions}', name='coco'}}]",
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    recipe = tiny_recipe(folder, *overrides(folder), "evaluate.probe=5")
    return recipe, run_recipe(recipe, folder / "runs")


def rows_of(folder):
    return {row["test"]: row for row in json.loads((folder / "evaluation.json").read_text())}


def test_results_are_in_all_three_files(finished):
    _, outcome = finished
    rows, lines = rows_of(outcome.folder), read_metrics(outcome.folder / "metrics.jsonl")
    tests = ["imagenet, zero-shot", "coco, picture → caption", "coco, caption → picture"]
    assert list(rows)[-3:] == tests
    row, report = rows[tests[0]], (outcome.folder / "report.html").read_text()
    names = [f"imagenet-zeroshot-val-{what}" for what in ("top1", "top5", "mean-per-class-recall")]
    assert list(row["metrics"]) == names
    assert (row["queries"], row["choices"], row["skipped"], row["chance"]) == (24, 8, {}, 1 / 8)
    assert row["recall"] == {"1": row["metrics"][names[0]], "5": row["metrics"][names[1]]}
    whole = [line for line in lines if line["kind"] == "test" and line.get("whole")]
    assert [line["test"] for line in whole] == tests
    assert all(whole[0][name] == row["metrics"][name] for name in names)
    for test in tests:
        for name, value in rows[test]["metrics"].items():
            assert f"<td>{name}</td><td>{test}</td><td>{value:.4f}</td>" in report
            assert f"{name}  {value:.4f}" in outcome.table
    assert "Tests on other images (a sample)" in report


def test_each_probe_measures_a_sample(finished):
    _, outcome = finished
    lines = [line for line in read_metrics(outcome.folder / "metrics.jsonl") if line["kind"] == "test"]
    small = [line for line in lines if not line.get("whole")]
    assert [line["examples"] for line in small] == [0] * 3 + [240] * 3 + [480] * 3
    assert {line["test"]: (line["queries"], line["choices"]) for line in small} == {
        "imagenet, zero-shot": (5, 8),
        "coco, picture → caption": (5, 15),
        "coco, caption → picture": (15, 5),
    }


def test_tests_do_not_change_the_training(finished, tmp_path):
    recipe, outcome = finished
    write_pictures(tmp_path)
    plain = recipe.model_copy(
        update={"evaluate": recipe.evaluate.model_copy(update={"zero_shot": (), "retrieval": ()})}
    )
    other = run_recipe(plain, tmp_path / "runs")
    one, two = (load(folder, device="cpu").model.state_dict() for folder in (outcome.folder, other.folder))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_measures_are_those_of_the_features(finished):
    """Class by class and picture by picture, in float64, with the templates put in by hand."""
    recipe, outcome = finished
    run = load(outcome.folder, device="cpu")
    test = recipe.evaluate.zero_shot[0]
    paths = evaluation.open_class_folder(test.folder, classes=test.classes, mapping=test.mapping).paths
    pictures = torch.from_numpy(np.stack([decode(Path(path).read_bytes(), (1, 16, 16)) for path in paths]))
    image = run.encode_image(pictures).double()
    texts = [run.encode_text([name, f"{name} left"]).double().mean(dim=0) for name in NAMES.values()]
    scores = (image @ torch.nn.functional.normalize(torch.stack(texts), dim=-1).T).float()
    labels = torch.arange(8).repeat_interleave(3)
    own = scores[torch.arange(24), labels]
    ahead = ((scores >= own[:, None]).sum(dim=1) - 1).view(8, 3)
    metrics = rows_of(outcome.folder)["imagenet, zero-shot"]["metrics"]
    assert metrics["imagenet-zeroshot-val-top1"] == pytest.approx((ahead < 1).double().mean().item())
    assert metrics["imagenet-zeroshot-val-top5"] == pytest.approx((ahead < 5).double().mean().item())


@pytest.mark.parametrize("killed_in", ["measure_all", "write_report"])
def test_metrics_of_a_run_that_is_killed_in_its_evaluation_are_those_of_the_undisturbed(
    finished, tmp_path, monkeypatch, killed_in
):
    recipe, outcome = finished
    whole = read_metrics(outcome.folder / "metrics.jsonl")[-3:]
    folder = tmp_path / "runs" / recipe.name
    shutil.copytree(outcome.folder, folder)
    # half a line, and two of the three
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-30])
    with monkeypatch.context() as patched:
        patched.setattr(image_text, killed_in, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe, tmp_path / "runs", resume=True)
    for _ in range(2):
        run_recipe(recipe, tmp_path / "runs", resume=True)
        assert (folder / "metrics.jsonl").read_text() == text
    assert main(["evaluate", str(folder)]) == 0
    assert (folder / "metrics.jsonl").read_text() == text
    assert [line["whole"] for line in whole] == [True] * 3


def test_the_command_measures_the_named_tests_alone(finished, tmp_path, capsys):
    recipe, outcome = finished
    folder, files = outcome.folder, recipe.data.source.rpartition("/")[0]
    before, galleries = rows_of(folder), (folder / "report.html").read_text().count('class="find')
    words = ["--zero-shot", f"{files}/val", "--classes", f"{files}/names.json", "--templates", "several", "--name", "x"]
    assert main(["evaluate", str(folder), *words]) == 0
    said = capsys.readouterr().out
    after = rows_of(folder)
    assert "x-zeroshot-val-top1" in said
    assert "held-out" not in said
    assert [*before, "x, zero-shot"] == list(after)
    assert all(after[test] == row for test, row in before.items())
    report = (folder / "report.html").read_text()
    assert "x-zeroshot-val-top1" in report
    assert report.count('class="find') == galleries > 0
    captions = f"{files}/coco/dataset.json"
    assert main(["evaluate", str(folder), "--captions", captions, "--name", "coco", "--split", "test"]) == 0
    assert rows_of(folder) == after
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "0.png").write_bytes(min(Path(files).glob("val/*/0.png")).read_bytes())
    assert main(["evaluate", str(folder), "--zero-shot", str(tmp_path)]) == 2
    sentence = f"`--zero-shot` must hold two classes at least; got 1 in {tmp_path}. There is nothing to choose from."
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("evaluate.zero_shot=[{folder='{}/none'}]",
         'evaluate.zero_shot.0.folder: must be a folder; there is no "{}/none"'),
        ("evaluate.zero_shot=[{folder='{}', classes='{}/none'}]",
         'evaluate.zero_shot.0.classes: must be a file; there is no "{}/none"'),
        ("evaluate.zero_shot=[{folder='{}', mapping='{}/none'}]",
         'evaluate.zero_shot.0.mapping: must be a file; there is no "{}/none"'),
        ("evaluate.zero_shot=[{folder='{}', templates='{}/none'}]",
         'evaluate.zero_shot.0.templates: must be "plain", "several" or a file; there is no "{}/none"'),
        ("evaluate.zero_shot=[{folder='{}', among='some'}]",
         "evaluate.zero_shot.0.among: must be 'folders' or 'all'; got \"some\""),
        ("evaluate.zero_shot=[{fodler='{}'}]",
         "evaluate.zero_shot.0.fodler: unknown key (did you mean evaluate.zero_shot.folder?)"),
        ("evaluate.zero_shot=[{classes='{}'}]", "evaluate.zero_shot.0.folder: missing"),
        ("evaluate.retrieval=[{captions='{}/none'}]",
         'evaluate.retrieval.0.captions: must be a file; there is no "{}/none"'),
        ("evaluate.retrieval=[{captions='{}/tiny.toml', images='{}/none'}]",
         'evaluate.retrieval.0.images: must be a folder; there is no "{}/none"'),
        ("evaluate.zero_shot=[{folder='{}'}, {folder='{}/'}]",
         'evaluate: must have tests of different names; got "{name}" twice'),
    ],
)  # fmt: skip
def test_mistakes_in_a_recipe_are_one_line(tmp_path, override, sentence):
    override = override.replace("{}", str(tmp_path))
    with pytest.raises(RecipeError) as caught:
        load_any_recipe(write_recipe(tmp_path), [override])
    reason = sentence.replace("{}", str(tmp_path)).replace("{name}", tmp_path.name)
    assert str(caught.value).endswith(f": {reason}")


def test_lists_that_do_not_fit_are_an_error_before_the_first_step(tmp_path):
    recipe = tiny_recipe(tmp_path, *overrides(tmp_path))
    (tmp_path / "names.json").write_text(json.dumps({"n00000000": "one", "other": "two"}))
    with pytest.raises(ValueError, match='`classes` must name every folder; got none for "n00000001"'):
        run_recipe(recipe, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_failing_test_does_not_end_the_run(tmp_path, caplog):
    recipe = tiny_recipe(tmp_path, *overrides(tmp_path), "train.examples=64", "data.max_bad_fraction=0.1")
    for path in list((tmp_path / "val").glob("*/0.png")):
        path.write_bytes(b"<html>")
    with caplog.at_level(logging.WARNING, logger="contrastile"):
        outcome = run_recipe(recipe, tmp_path / "runs")
    why = (
        "`imagenet` must be images that can be read, but for 10%; got 8 of 24 that cannot (broken picture: 8), "
        f"the first being {min((tmp_path / 'val').glob('*/0.png'))}. "
        "Mend or remove them, or raise data.max_bad_fraction in the recipe of the run."
    )
    rows = rows_of(outcome.folder)
    failed = rows[f"imagenet, failed: {why}"]
    assert (failed["queries"], failed["recall"], failed["chance"]) == (0, {}, None)
    assert rows["coco, caption → picture"]["queries"] == 18
    lines = [line for line in read_metrics(outcome.folder / "metrics.jsonl") if line["kind"] == "failure"]
    assert [line["what"] for line in lines] == ["imagenet"] * len(lines)
    assert len(lines) >= 3
    assert why in lines[-1]["why"]
    text = (outcome.folder / "metrics.jsonl").read_text()
    run_recipe(recipe, tmp_path / "runs", resume=True)
    assert (outcome.folder / "metrics.jsonl").read_text() == text
    assert "failed: `imagenet` must be images" in (outcome.folder / "report.html").read_text()
    assert any("the test imagenet failed, the others go on" in record.message for record in caplog.records)


def test_a_few_bad_pictures_are_left_out_and_counted(finished, tmp_path, caplog):
    recipe, outcome = finished
    run = load(outcome.folder, device="cpu")
    run = type(run)(
        recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_bad_fraction": 0.2})}),
        run.model, run.tokenizer, run.device,
    )  # fmt: skip
    root = class_folder(tmp_path / "val", LETTERS)
    (root / "n00000002" / "1.png").write_bytes(b"<html>")
    (row,) = open_test(ZeroShotSettings(folder=str(root)))(run)
    assert (row["queries"], row["skipped"]) == (23, {"broken picture": 1})
    path = karpathy(tmp_path / "coco")
    (tmp_path / "coco" / "val" / "3.png").unlink()
    there, back = open_test(RetrievalSettings(captions=str(path)))(run)
    assert (there["queries"], there["choices"], back["queries"]) == (5, 15, 15)
    assert there["skipped"] == {"unreadable file (No such file or directory)": 1}
    assert "1 of 24 images are left out (broken picture: 1)" in caplog.text


def test_equal_captions_are_one_answer_and_one_query(tmp_path):
    """A model that knows every class of its pictures finds all of them, though they share their captions."""
    names = {"A": [1.0, 0.0, 0.0], "B": [0.0, 1.0, 0.0], "C": [0.0, 0.0, 1.0], "ring": [0.6, 0.8, 0.0]}
    lines = ["filepath\ttitle"]
    for number, letter in enumerate("AABBBC"):
        Image.new("L", (16, 16), "ABC".index(letter)).save(tmp_path / f"{number}.png")
        lines += [f"{number}.png\t{letter}"] * (number % 2 + 1)
    lines += ["0.png\tring", "2.png\tring"]
    (tmp_path / "captions.tsv").write_text("\n".join(lines) + "\n")
    encoded = []

    def encode_text(texts):
        encoded.extend(texts)
        return torch.tensor([names[text] for text in texts])

    run = SimpleNamespace(
        recipe=tiny_recipe(tmp_path), device=torch.device("cpu"), model=torch.nn.Identity(), encode_text=encode_text,
        encode_image=lambda pictures: torch.eye(3)[pictures[:, 0, 0, 0].long()],
    )  # fmt: skip
    there, back = open_test(RetrievalSettings(captions=str(tmp_path / "captions.tsv")))(run)
    assert sorted(encoded) == sorted(names)
    assert (there["queries"], there["choices"], there["recall"]) == (6, 4, {"1": 1.0})
    assert (back["queries"], back["choices"], back["recall"]) == (4, 6, {"1": 0.75, "5": 1.0})
    # the right answers of each picture among 4, and of each caption among 6
    assert there["chance"] == pytest.approx((2 + 1 + 2 + 1 + 1 + 1) / 6 / 4)
    assert back["chance"] == pytest.approx((2 + 3 + 1 + 2) / 4 / 6)


def test_classes_with_equal_features_are_logged(finished, tmp_path, caplog):
    run = load(finished[1].folder, device="cpu")
    (tmp_path / "names.json").write_text(json.dumps({**NAMES, "n00000001": "letter A", "n00000004": "letter A"}))
    folder = finished[0].evaluate.zero_shot[0].folder
    folder = evaluation.open_class_folder(folder, classes=str(tmp_path / "names.json"))
    (row,) = evaluation.zero_shot("x", folder, ["{}"], run)
    assert "x: 2 classes have the very features of others: names that are equal, or cut at 4 tokens" in caplog.text
    # ties count against the model
    assert row["metrics"]["x-zeroshot-val-mean-per-class-recall"] <= 5 / 8


def test_a_zero_shot_test_and_a_captioned_one_may_have_one_name(tmp_path):
    words = [word.replace("name='coco'", "name='imagenet'") for word in overrides(tmp_path)]
    job = ImageText.open(tiny_recipe(tmp_path, *words))
    assert [len(measure()) for _, measure in job.tests()] == [1, 2]


def test_tests_may_change_on_resume(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.examples=96")
    run_recipe(recipe, tmp_path / "runs")
    again = tiny_recipe(tmp_path, "train.examples=96", *overrides(tmp_path))
    outcome = run_recipe(again, tmp_path / "runs", resume=True)
    assert outcome.examples == 96
    assert "imagenet, zero-shot" in outcome.table
    assert "held-out pairs, picture → name" in outcome.table


@pytest.mark.parametrize("processes", [False, True])
def test_pictures_are_encoded_in_chunks(tmp_path, processes):
    root = class_folder(tmp_path, {"a": "A", "b": "B"}, each=10)
    paths = [str(path) for path in sorted(root.glob("*/*.png"))]
    (root / "b" / "3.png").write_bytes(b"")
    found = list(read_chunks(paths, (1, 16, 16), chunk=7, processes=processes))
    assert [part for part, _, _ in found] == [range(7), range(7, 14), range(14, 20)]
    pictures, reasons = torch.cat([one for _, one, _ in found]), [why for _, _, some in found for why in some]
    bad = paths.index(str(root / "b" / "3.png"))
    assert [place for place, why in enumerate(reasons) if why] == [bad]
    for place, path in enumerate(paths):
        assert place == bad or np.array_equal(pictures[place].numpy(), decode(Path(path).read_bytes(), (1, 16, 16)))
    assert not list(read_chunks([], (1, 16, 16), chunk=7, processes=processes))


def test_pictures_are_held_until_the_device_has_copied_them(tmp_path, monkeypatch):
    """Whose memory the next but one stretch is decoded into."""
    told, real = [], evaluation.read_chunks

    def chunks_told(*arguments, **words):
        for one in real(*arguments, **{**words, "chunk": 3}):
            told.append("decoded")
            yield one

    def encode_image(pictures):
        told.append("encoded")
        return torch.zeros(len(pictures), 2)

    monkeypatch.setattr(evaluation, "read_chunks", chunks_told)
    monkeypatch.setattr(evaluation, "settle", lambda device: told.append(f"there, {device}"))
    root = class_folder(tmp_path, {"a": "A", "b": "B"}, each=3)
    run = SimpleNamespace(recipe=tiny_recipe(tmp_path), device=torch.device("cpu"), encode_image=encode_image)
    evaluation._encode_sample(run, sorted(map(str, root.glob("[ab]/*.png"))), "x")
    assert told == ["decoded", "encoded", "there, cpu"] * 2


@pytest.mark.parametrize(
    ("given", "called"), [({}, "coco"), ({"split": "test"}, "coco"), ({"split": "val"}, "coco-val")]
)
def test_a_split_has_a_row_of_its_own(given, called):
    assert RetrievalSettings(captions="a/coco.json", **given).called == called
    assert RetrievalSettings(captions="a/coco.json", name="x", **given).called == "x"
