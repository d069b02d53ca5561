"""The command line: light until a verb runs, one line per mistake, exit codes that scripts can rely on."""

import os
import subprocess
import sys
import time

import pytest
from tiny_runs import write_recipe

from contrastile.cli import main as entry
from contrastile.cli.main import main

HEAVY = ("torch", "transformers", "numpy", "matplotlib", "PIL", "sklearn", "jinja2")


def loaded_by(*arguments):
    """Exit code, both outputs, the heavy packages that were loaded, and the seconds it took."""
    program = (
        "import sys\n"
        "from contrastile.cli.main import main\n"
        "code = 0\n"
        "try:\n"
        f"    code = main({list(arguments)!r})\n"
        "except SystemExit as stop:\n"
        "    code = stop.code\n"
        f"print('LOADED', *(name for name in {HEAVY!r} if name in sys.modules))\n"
        "sys.exit(code)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said, _, loaded = done.stdout.rpartition("LOADED")
    return done.returncode, said, done.stderr, loaded.split(), time.monotonic() - began


def test_help_loads_nothing_heavy():
    code, said, _, loaded, _ = loaded_by("--help")
    assert (code, loaded) == (0, [])
    assert all(verb in said for verb in ("train", "evaluate", "encode", "search", "compare"))


def test_a_bad_recipe_is_answered_before_anything_heavy_is_loaded(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("[train]\nexamples = 10\n[optim]\nlearning_rte = 1.0\n")
    code, said, complaint, loaded, seconds = loaded_by("train", str(path))
    assert (code, said, loaded) == (2, "", [])
    assert complaint == f"{path}: optim.learning_rte: unknown key (did you mean optim.learning_rate?)\n"
    assert seconds < 2


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_missing_recipe_is_the_users_to_mend(verb, capsys):
    assert main([verb, "none.toml"]) == 2
    assert capsys.readouterr().err == "none.toml: no such file\n"


def test_what_is_no_run_is_the_users_to_mend(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "`run` must be the folder of a run" in capsys.readouterr().err


def test_an_unknown_verb_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2


def test_no_verb_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (ValueError("`k` must be there; got nothing. Give it."), 2, "`k` must be there; got nothing. Give it."),
        (FileNotFoundError(2, "No such file", "x"), 2, "[Errno 2] No such file: 'x'"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
        (FloatingPointError("the loss must stay finite"), 1, "the loss must stay finite"),
        (
            ModuleNotFoundError("No module named 'jinja2'", name="jinja2"),
            2,
            '`jinja2` is not installed; run: pip install "contrastile[train]"',
        ),
        (
            ModuleNotFoundError("No module named 'bm25s'", name="bm25s"),
            2,
            '`bm25s` is not installed; run: pip install "contrastile[search]"',
        ),
        (
            ModuleNotFoundError("No module named 'faiss'", name="faiss"),
            2,
            "`faiss` is not installed; run: pip install faiss-cpu",
        ),
    ],
)
def test_an_error_is_one_line_and_a_code(error, code, sentence, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr(entry.evaluate, "run", fail)
    assert main(["evaluate", "runs/x"]) == code
    assert capsys.readouterr().err == f"{sentence}\n"


def test_an_error_can_be_traced(monkeypatch):
    def fail(_):
        raise ValueError("why")

    monkeypatch.setattr(entry.evaluate, "run", fail)
    with pytest.raises(ValueError, match="why"):
        main(["--traceback", "evaluate", "runs/x"])


def test_train_then_evaluate_say_the_table_and_the_report(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    runs = str(tmp_path / "runs")
    assert main(["train", str(recipe), "train.examples=64", "--runs", runs]) == 0
    trained = capsys.readouterr().out
    assert main(["evaluate", os.path.join(runs, "tiny")]) == 0
    evaluated = capsys.readouterr().out
    assert "held-out pairs, picture → name" in trained
    assert trained.endswith(f"report: {runs}/tiny/report.html\n")
    assert evaluated == trained


def test_training_twice_keeps_both_runs(tmp_path):
    recipe = write_recipe(tmp_path)
    for _ in range(2):
        assert main(["train", str(recipe), "train.examples=32", "--runs", str(tmp_path / "runs")]) == 0
    assert (tmp_path / "runs/tiny/report.html").is_file()
    assert (tmp_path / "runs/tiny-1/report.html").is_file()


def test_ctrl_c_keeps_the_run_and_says_how_to_go_on(tmp_path):
    recipe = write_recipe(tmp_path)
    command = [sys.executable, "-m", "contrastile", "train", str(recipe), "train.examples=100000000"]
    command += ["evaluate.every=1.0", "--runs", str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        metrics = tmp_path / "runs/tiny/metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and '"step"' in metrics.read_text()):
            time.sleep(0.1)
        process.send_signal(2)
        said, complaint = process.communicate(timeout=60)
    assert process.returncode == 130, complaint
    assert "Traceback" not in complaint
    assert f"to evaluate it: contrastile evaluate {tmp_path}/runs/tiny" in said
    assert (tmp_path / "runs/tiny/model.safetensors").is_file()
    assert "to go on with it: the same command with --resume" in said


def test_resume_begins_goes_on_and_refuses_what_is_another_run(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    words = ["train", str(recipe), "train.examples=32", "--runs", str(tmp_path / "runs"), "--resume"]
    assert main(words) == 0
    first = capsys.readouterr().out
    # a run that is through is evaluated again, in its place
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    assert main([*words[:2], "seed=1", *words[2:]]) == 2
    assert capsys.readouterr().err.endswith(
        "`seed` must be what the run began with; got 1. "
        "It began with 0: take that again, or train anew, without --resume.\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "the following arguments are required: recipe"),
        (["train", "recipes/glyphs.toml", "--resume", "optim.rate=1"], "optim.rate=1: optim.rate: unknown key"),
        (["train", "recipes/glyphs.toml", "--resume", "seed"], "unrecognized arguments: seed"),
        (["evaluate", "x", "a=1"], "unrecognized arguments: a=1"),
    ],
)
def test_words_may_stand_behind_options(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err
