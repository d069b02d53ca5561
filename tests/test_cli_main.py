"""The command line: light until a verb runs, one line per mistake, exit codes that scripts can rely on."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import write_recipe

import contrastile
from contrastile.cli import export
from contrastile.cli import main as entry
from contrastile.cli.main import VERBS, build_parser, main
from contrastile.data.sources import PICTURES
from contrastile.train.config import base
from contrastile.train.folder import one_writer
from contrastile.train.recipe import load_any_recipe

TEXTS = """
kind = "retriever"
data = { source = "docstrings" }
model = { both = { kind = "bag", width = 8 } }
train = { epochs = 1.0 }
"""
HEAVY = ("torch", "transformers", "numpy", "matplotlib", "PIL", "sklearn", "jinja2")


def loaded_by(*arguments):
    """Exit code, both outputs, and the heavy packages that were loaded."""
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    output, _, loaded = done.stdout.rpartition("LOADED")
    return done.returncode, output, done.stderr, loaded.split()


def test_help_loads_nothing_heavy():
    code, output, _, loaded = loaded_by("--help")
    assert (code, loaded) == (0, [])
    for verbs in VERBS.values():
        for verb in verbs:
            assert f"  {verb.__name__.rpartition('.')[2]} " in output
            # the example is a command line that the parser takes
            name, *words = shlex.split(verb.EXAMPLE)
            assert (name, verb.EXAMPLE in output) == ("contrastile", True)
            assert callable(build_parser().parse_args(words).verb)
    assert "clip-vit-l-14, colbert, " in output
    assert max(map(len, output.splitlines())) <= 100


def test_the_example_of_export_is_a_run_that_can_be_exported():
    _, _, run, _, library, *_ = shlex.split(export.EXAMPLE)
    recipe = load_any_recipe(Path(run).name, files=False)
    assert (library, recipe.model.both.kind) == ("sentence-transformers", "transformers")


def test_no_arguments_print_the_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert (stop.value.code, "doctor" in capsys.readouterr().err) == (2, True)


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"contrastile {contrastile.__version__}\n")


RUN = "`run` must be the folder of a run, with recipe.toml, model.safetensors, run.json; got"
SIZES = "must be whole numbers above 0, perhaps with a unit; got"
# words that need no torch to be refused; {folder} has two runs, the file `file` and a recipe
WORDS = {
    "evaluate {folder}/no": f"{RUN} ",
    "evaluate {folder}/pictures/model.safetensors": (
        '`run` must be a run\'s folder, or a file of rankings; got "{folder}/pictures/model.safetensors". Name the '
    ),
    "evaluate {folder}/pictures --device tpu": '`--device` must be "auto", "cpu", "cuda" or "cuda:1"; got "tpu". ',
    "evaluate {folder}/pictures --classes x": "`--classes` must come with --zero-shot; got no --zero-shot. Say what",
    "evaluate {folder}/pictures --split x": "`--split` must come with --captions or --texts; got neither. ",
    "evaluate {folder}/pictures --name x": "`--name` must come with one test; got none. Name it: --zero-shot, ",
    "evaluate {folder}/pictures --zero-shot x --captions y --name z": "`--name` must come with one test; got 2. ",
    "evaluate {folder}/pictures --zero-shot {folder}/no": (
        '`--zero-shot` must be a folder; there is no "{folder}/no".\n'
    ),
    "evaluate {folder}/pictures --zero-shot {folder}/texts": (
        '`--zero-shot` must have a folder with a sub-folder for each class; "{folder}/texts" has none.\n'
    ),
    "evaluate {folder}/pictures --zero-shot {folder}": (
        f'`--zero-shot` must have a folder with images ({", ".join(PICTURES)}) of each class; "{{folder}}" has none'
    ),
    "evaluate {folder}/pictures --captions {folder}/no": '`--captions` must be a file; there is no "{folder}/no".\n',
    "evaluate {folder}/pictures --captions {folder}/x.toml --images {folder}/no": (
        '`--images` must be a folder; there is no "{folder}/no".\n'
    ),
    "evaluate {folder}/texts --zero-shot {folder}": (
        "`--zero-shot` must be left out for a retriever; got {folder}. It belongs to a run of images and texts.\n"
    ),
    "evaluate {folder}/pictures --captions {folder}/file --index {folder}": (
        '`--index` must be left out with tests on images; got "{folder}". '
    ),
    "evaluate x.trec --judgements x.qrels --zero-shot x": "`--zero-shot` must be left out with --judgements; got x. ",
    "evaluate x.trec --judgements x.qrels --index x": "`--index` must be left out with --judgements; got x. ",
    "evaluate x.trec --judgements x.qrels --device cpu": "`--device` must be left out with --judgements; got cpu. ",
    "evaluate x.trec --judgements x.qrels --bad-rows 0.1": "`--bad-rows` must be left out with --judgements; got 0.1. ",
    "evaluate {folder}/pictures --texts {folder}": "`--texts` must be left out for images and texts; got {folder}. ",
    "evaluate {folder}/texts --texts {folder}/no": '`--texts` must be a file or folder; got "{folder}/no". ',
    "evaluate {folder}/texts --texts {folder} --corpus {folder}/no": "`--corpus` must be a file or folder; got ",
    "evaluate {folder}/texts --texts {folder} --captions x": '`--captions` must be left out with --texts; got "x". ',
    "evaluate {folder}/texts --texts {folder} --name a/b": '`--name` must be a name that files can have; got "a/b". ',
    "evaluate {folder}/texts --texts {folder} --bad-rows 1": (
        "`--bad-rows` must be a share from 0 to below 1; got 1.0. "
    ),
    "evaluate {folder}/texts --corpus {folder}": "`--corpus` must come with --texts; got no --texts. ",
    "search {folder}/no hello": f"{RUN} ",
    "search {folder}/pictures hello": (
        '`--index` must hold an index.json; got "{folder}/pictures/index". '
        "Make it first: contrastile encode {folder}/pictures FOLDER_OF_PICTURES\n"
    ),
    "export {folder}/pictures --as npy --out x": "contrastile encode {folder}/pictures FOLDER_OF_PICTURES\n",
    "export {folder}/texts --as transformers --out {folder}/x.toml/x": (
        '`--out` must be a folder, or where one can be made; got "{folder}/x.toml". '
    ),
    "search {folder}/texts hello": (
        '`--index` must hold an index.json; got "{folder}/texts/index". '
        "Make it first: contrastile encode {folder}/texts\n"
    ),
    "evaluate {folder}/texts --index {folder}/x": "contrastile encode {folder}/texts --out {folder}/x\n",
    "search {folder}/texts hello --index {folder}/x": "contrastile encode {folder}/texts --out {folder}/x\n",
    "search {folder}/texts _": "`question` must have words; got none. ",
    "search {folder}/texts red -k 0": "`-k` must be at least 1; got 0. Leave it out for the default.\n",
    "search {folder}/texts red --lines -1": "`--lines` must be at least 0; got -1. Leave it out for the default.\n",
    "encode {folder}/pictures {folder}/no": '`corpus` must be a file or folder; got "{folder}/no". ',
    "encode {folder}/texts {folder}/no.jsonl": '`corpus` must be a file or folder; got "{folder}/no.jsonl". ',
    "encode {folder}/texts --shard 0": "`--shard` must be at least 1; got 0. ",
    "encode {folder}/texts --dimensions 0": "`--dimensions` must be at least 1; got 0. ",
    "encode {folder}/texts --bad-rows 0.5": "`--bad-rows` must come with a corpus; got none. ",
    "compare {folder}/x.toml --seeds 0": "`--seeds` must be at least 1; got 0. Three show a spread.\n",
    "compare {folder}/x.toml --batches 16 --seeds 0": "`--seeds` must be at least 1; got 0. Three show a spread.\n",
    "compare {folder}/x.toml --jobs 0": "`--jobs` must be at least 1; got 0. So many runs are made at a time.\n",
    "compare {folder}/x.toml --jobs 2": (
        "`--jobs` must be 1 where time is compared; got 2. Runs side by side slow each other down.\n"
    ),
    "compare {folder}/x.toml --losses --jobs 0": (
        "`--jobs` must be at least 1; got 0. So many runs are made at a time.\n"
    ),
    "compare {folder}/x.toml --losses --seeds 1": (
        "`--seeds` must be at least 2; got 1. An interval needs a spread; five are usual.\n"
    ),
    "compare {folder}/x.toml --losses --ranks 1": (
        "`--ranks` must be at least 2; got 1. On one process there is nothing to exchange.\n"
    ),
    "compare {folder}/x.toml --data 0.1": (
        "`--data` must come with --batches; got no --batches. It belongs to that comparison.\n"
    ),
    "compare {folder}/x.toml --memory 1GiB": (
        "`--memory` must be left out for this recipe; got 1GiB. It belongs to a retriever.\n"
    ),
    "compare {folder}/texts/recipe.toml --losses": (
        "`--losses` must be left out for this recipe; got --losses. It belongs to images and texts.\n"
    ),
    "compare {folder}/texts/recipe.toml --ranks 2": (
        "`--ranks` must be left out for this recipe; got 2. It belongs to images and texts.\n"
    ),
    "compare {folder}/texts/recipe.toml --seeds 0": "`--seeds` must be at least 1; got 0. Three show a spread.\n",
    "compare {folder}/x.toml --rates sqrt": "`--rates` must come with --batches; got no --batches. ",
    "compare {folder}/x.toml --ranks 3": "`--ranks` must come with --losses; got no --losses. ",
    "compare {folder}/x.toml --batches 0": f"`--batches` {SIZES} '0'. Such as 4096, 64k, 1M, 192MiB or 2GiB.\n",
    "compare {folder}/x.toml --batches 64 train.examples=1": (
        f"`--batches` {SIZES} 'train.examples=1'. Write key=value before the options.\n"
    ),
    "compare {folder}/x.toml --memory 1XB": f"`--memory` {SIZES} '1XB'. ",
    "compare {folder}/x.toml --updates 64": "`--updates` must be left out for this recipe; got ['64']. ",
    "bench loss --sizes abc": f"`--sizes` {SIZES} 'abc'. ",
    "bench loss --workspace 1zz": f"`--workspace` {SIZES} '1zz'. ",
    "bench loss --dtype int8": "`--dtype` must be one of bf16, ",
    "bench loss --device tpu": "`--device` must be one of auto, cpu, cuda; got 'tpu'. ",
    "bench loss --features 0": "`--features` must be at least 1; got 0. ",
    "bench loss --seconds 0": "`--seconds` must be above 0; got 0.0. ",
    "bench loss --seconds nan": "`--seconds` must be above 0; got nan. Leave it out for the default.\n",
    "bench loss --limit 1GiB": "`--limit` must come with host, which it limits; got no --host. ",
    "bench loss --host --limit x": f"`--limit` {SIZES} 'x'. ",
    "bench loss --host --once": "`--host` must come without once; got --once. ",
    "bench step --sizes abc": f"`--sizes` {SIZES} 'abc'. ",
    "bench step --sub-batch 0": "`--sub-batch` must be a whole number of at least 1; got 0. Leave it out for the",
    "bench step --figure x.svg": "`--figure` must come with csv, whose rows it draws; got none. Add --csv FILE.\n",
    "bench step --figure x.foo --csv x.csv": '`--figure` must end in .svg, .png, .pdf; got "x.foo". ',
    "bench loss --csv {folder}/x.toml/x.csv": "`--csv` must be a file, or where one can be made; got ",
    "bench step --csv {folder}/x.toml/x.csv": "`--csv` must be a file, or where one can be made; got ",
    "bench step --csv {folder}": '`--csv` must be a file that can be written to; got "{folder}". ',
    "bench step --csv {folder}/x.csv --figure {folder}/x.toml/x.svg": "`--figure` must be a file, or where one can be ",
    "bench memory --ranks 1": "`--ranks` must be at least 2; got 1. Leave it out for the default.\n",
    "bench memory --ranks 3 --sizes 32": (
        "`--sizes` must be multiples of the 3 ranks; got 32. Each rank has as many pairs.\n"
    ),
    "bench memory --features 0": "`--features` must be at least 1; got 0. ",
    "bench memory --longest -1": "`--longest` must be at least 0; got -1.0. ",
    "encode {folder}/texts --out {folder}/x.toml/x": "`--out` must be a folder, or where one can be made; got ",
    "compare {folder}/x.toml --runs {folder}/x.toml/x": "`--runs` must be a folder, or where one can be made; got ",
    "train x=1": "x=1: no such file; a recipe comes before key=value, ",
    "train nothing": "nothing: no such file; contrastile --help lists the recipes of the package\n",
    "plan nothing": "nothing: no such file; contrastile --help lists the recipes of the package\n",
    "plan {folder}/x.toml --gpus lots": "`--gpus` must name a chip with a profile (H100, H200), or its memory too; ",
    "compare {folder}/none.toml": "{folder}/none.toml: no such file\n",
    "train {folder}/x.toml --runs {folder}/x.toml": "`--runs` must be a folder, or where one can be made; got ",
}


# a process that has read no more than the command line and what a recipe may say; each command is a fork of it
SERVE = f"""
import json, os, sys
from contrastile.cli.main import main
from contrastile.train import recipe
for line in sys.stdin:
    arguments, out, err = json.loads(line)
    child = os.fork()
    if not child:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
        print("LOADED", *(name for name in {HEAVY!r} if name in sys.modules), flush=True)
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
"""


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """As `loaded_by`, of many commands, without the start of a process for each."""
    folder = tmp_path_factory.mktemp("commands")
    served = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(*arguments):
        out, err = (folder / name for name in ("out", "err"))
        for path in (out, err):
            path.unlink(missing_ok=True)
        print(json.dumps([arguments, str(out), str(err)]), file=served.stdin, flush=True)
        code = int(served.stdout.readline())
        output, _, loaded = out.read_text().rpartition("LOADED")
        return code, output, err.read_text(), loaded.split()

    with served:
        yield answer


@pytest.mark.parametrize("words", WORDS)
def test_a_wrong_argument_is_one_line_before_torch_is_loaded(words, tmp_path, answered):
    (tmp_path / "x.toml").write_text("[train]\nexamples = 10\n")
    for name, recipe in (("pictures", "[train]\nexamples = 10\n"), ("texts", TEXTS)):
        (tmp_path / name).mkdir()
        for file, content in (("recipe.toml", recipe), ("model.safetensors", ""), ("run.json", "{}")):
            (tmp_path / name / file).write_text(content)
    arguments = words.format(folder=tmp_path).split()
    code, output, complaint, loaded = answered(*(" " if word == "_" else word for word in arguments))
    assert (code, output, [name for name in loaded if name == "torch"]) == (2, "", [])
    assert WORDS[words].format(folder=tmp_path) in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_mistake_between_sections_is_one_line_before_anything_heavy_is_loaded(verb, tmp_path, answered):
    """Only the last of the checks finds it."""
    sections = "[train]\nexamples = 10\nsub_batch = {text_tokens = 8}\n[model]\nboth = {config = {model_type = 'clip'}}"
    (tmp_path / "x.toml").write_text(sections)
    rule = "must be at least model.tokenizer.length, the tokens of one caption; got 8 and 16"
    line = f"{tmp_path}/x.toml: train.sub_batch.text_tokens: {rule}\n"
    assert answered(verb, str(tmp_path / "x.toml"), "--runs", str(tmp_path / "runs")) == (2, "", line, [])
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch knows GPUs")
@pytest.mark.parametrize(
    "words",
    [
        "train {folder}/x.toml device=cuda", "compare {folder}/x.toml device=cuda:1",
        "evaluate {folder} --device cuda", "encode {folder} --device cuda", "search {folder} --device cuda",
        "bench loss --device cuda", "bench step --device cuda",
    ],
)  # fmt: skip
def test_a_gpu_without_a_torch_for_it_is_one_line_before_torch_is_loaded(words, tmp_path, answered):
    (tmp_path / "x.toml").write_text("[train]\nexamples = 10\n")
    code, output, complaint, loaded = answered(*words.format(folder=tmp_path).split())
    assert (code, output, [name for name in loaded if name == "torch"]) == (2, "", [])
    alone = 'device: must be "auto" or "cpu": the torch that is installed is for CPUs alone; got'
    sentences = (
        f'device=cuda: {alone} "cuda"\n',
        f'device=cuda:1: {alone} "cuda:1"\n',
        '`--device` must be "auto" or "cpu" with a torch for CPUs alone; got "cuda". Install one for CUDA.\n',
        "`--device` must be one that torch sees; got cuda. Install torch for CUDA, or take cpu.\n",
    )
    assert complaint in sentences


@pytest.mark.parametrize(("version", "alone"), [("2.13.0+cpu", True), ("2.13.0", False), ("2.13.0+cu130", False)])
def test_the_version_of_torch_says_if_it_supports_gpus(version, alone, monkeypatch):
    monkeypatch.setattr(base, "version", lambda name: version)
    # which is asked itself
    assert not base.torch_is_cpu_only()
    monkeypatch.setattr(base, "sys", SimpleNamespace(modules={}))
    assert base.torch_is_cpu_only() is alone


def test_a_closed_pipe_ends_the_command_quietly(tmp_path):
    program = (
        "import sys\n"
        "from contrastile.cli import main as entry\n"
        "entry.evaluate.run = lambda _: print('x' * 1_000_000) or 0\n"
        "sys.exit(entry.main(['evaluate', 'x']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        command.stdout.read(1)
        command.stdout.close()
        assert (command.stderr.read(), command.wait()) == (b"", 141)


FULL = "the output could not be written (No space left on device); free the disk and begin again\n"


@pytest.mark.parametrize(
    ("output", "environment", "code", "sentence"),
    [
        (">&-", {}, 0, ""),
        (">/dev/full", {}, 1, FULL),
        ("", {"PYTHONIOENCODING": "ascii"}, 0, ""),
    ],
)
def test_an_output_that_is_closed_or_full_or_without_bars(tmp_path, output, environment, code, sentence):
    program = "from contrastile.cli import evaluate; from contrastile.__main__ import command\n"
    program += "evaluate._measure = lambda *names: print(*names) or 0; raise SystemExit(command())"
    words = f'"{sys.executable}" -c "{program}" evaluate \u2588.trec --judgements x.qrels {output}'
    environment = {**os.environ, "PYTHONUNBUFFERED": "", **environment}
    done = subprocess.run(words, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, sentence)
    assert done.stdout == ("" if output else "?.trec x.qrels None\n")


def test_values_of_measures_are_aligned_behind_a_long_name(tmp_path, capsys):
    (tmp_path / "x.trec").write_text("q Q0 d 1 1 x\n")
    (tmp_path / "x.qrels").write_text("q 0 d 1\n")
    files = [str(tmp_path / "x.trec"), "--judgements", str(tmp_path / "x.qrels")]
    assert main(["evaluate", *files, "--measures", "recall@10000", "MAP"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["1 judged query, 1 of them answered", "recall@10000 1.0000", "MAP          1.0000"]


def test_an_empty_batch_of_a_plan_is_refused(capsys):
    assert main(["plan", "glyphs", "--batch", ""]) == 2
    assert capsys.readouterr().err.startswith("`--batch` must be whole numbers above 0, perhaps with a unit; got ''. ")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (KeyboardInterrupt(15), 143, "stopped"),
        (ValueError("`k` must be there; got nothing. Give it."), 2, "`k` must be there; got nothing. Give it."),
        (FileNotFoundError(2, "No such file", "x"), 2, "[Errno 2] No such file: 'x'"),
        (BrokenPipeError(32, "Broken pipe"), 1, "[Errno 32] Broken pipe"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
        (FloatingPointError("the loss must stay finite"), 1, "the loss must stay finite"),
        (MemoryError("Unable to allocate 12.0 TiB"), 1, "memory ran out: Unable to allocate 12.0 TiB"),
        (torch.OutOfMemoryError("CUDA out of\nmemory."), 1, "memory ran out: CUDA out of memory."),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            1,
            "memory ran out: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
        ),
        (
            ModuleNotFoundError("No module named 'jinja2'", name="jinja2"),
            2,
            "`jinja2` is not installed; run: pip install '.[train]'",
        ),
        (
            ModuleNotFoundError("No module named 'bm25s'", name="bm25s"),
            2,
            "`bm25s` is not installed; run: pip install '.[search]'",
        ),
        (
            ModuleNotFoundError("No module named 'faiss'", name="faiss"),
            2,
            "`faiss` is not installed; run: pip install faiss-cpu",
        ),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error, code, sentence, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr(entry.evaluate, "run", fail)
    assert main(["evaluate", "runs/x"]) == code
    assert capsys.readouterr().err == f"{sentence}\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["evaluate", "x"], RuntimeError("mat1 and mat2 shapes cannot be multiplied")),
        (["--traceback", "evaluate", "x"], ValueError("why")),
    ],
)
def test_a_bug_and_an_error_under_traceback_keep_their_trace(words, error, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(entry.evaluate, "run", fail)
    with pytest.raises(type(error), match=str(error)):
        main(words)


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_package_of_the_report_that_is_missing_is_named_before_anything_starts(verb, tmp_path, capsys, monkeypatch):
    recipe = write_recipe(tmp_path)
    monkeypatch.setattr("contrastile.cli.options.find_spec", lambda name: None if name == "matplotlib" else name)
    assert main([verb, str(recipe), "--runs", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == "`matplotlib` is not installed; run: pip install '.[train]'\n"
    assert not (tmp_path / "runs").exists()


def test_train_and_evaluate_print_the_table_and_the_report(tmp_path, capsys, monkeypatch):
    recipe = write_recipe(tmp_path)
    runs = str(tmp_path / "runs")
    assert main(["train", str(recipe), "train.examples=64", "--runs", runs]) == 0
    trained = capsys.readouterr().out
    assert main(["evaluate", os.path.join(runs, "tiny")]) == 0
    evaluated = capsys.readouterr().out
    assert "held-out pairs, picture → name" in trained
    assert trained.endswith(f"report: {runs}/tiny/report.html\n")
    assert evaluated == trained
    run = Path(runs, "tiny")
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda path, _: Path(path) != run)
        before = {path: path.stat().st_mtime_ns for path in (run, *run.iterdir())}
        assert main(["evaluate", str(run)]) == 0
        assert before == {path: path.stat().st_mtime_ns for path in (run, *run.iterdir())}
    said = capsys.readouterr()
    assert said.out == trained.partition("report: ")[0]
    assert said.err.endswith(f'The results are not saved: "{run}" cannot be written to.\n')
    with one_writer(run, ValueError()):
        assert main(["evaluate", str(run)]) == 2
    sentence = f'`run` must be written by one command at a time; got "{run}". Wait until the other one ends.\n'
    assert capsys.readouterr().err.endswith(sentence)


def test_ctrl_c_keeps_the_run_and_prints_how_to_resume(tmp_path):
    recipe = write_recipe(tmp_path)
    command = [sys.executable, "-m", "contrastile", "train", str(recipe), "train.examples=100000000"]
    command += ["evaluate.every=1.0", "--runs", str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        metrics = tmp_path / "runs/tiny/metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and '"step"' in metrics.read_text()):
            time.sleep(0.1)
        process.send_signal(2)
        output, complaint = process.communicate(timeout=60)
    assert process.returncode == 130, complaint
    assert "Traceback" not in complaint
    assert f"to evaluate it: contrastile evaluate {tmp_path}/runs/tiny" in output
    assert (tmp_path / "runs/tiny/model.safetensors").is_file()
    again = f"contrastile train {tmp_path}/runs/tiny/recipe.toml --runs {tmp_path}/runs --resume"
    assert f"to go on with it: the same command with --resume, or {again}\n" in output


def test_resume_starts_or_continues_a_run_and_refuses_another_recipe(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    words = ["train", str(recipe), "train.examples=32", "--runs", str(tmp_path / "runs"), "--resume"]
    assert main(words) == 0
    first = capsys.readouterr().out
    # a run that is through is evaluated again, in its place
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
    # the folder's own recipe has all that the command said
    assert main(["train", str(tmp_path / "runs/tiny/recipe.toml"), *words[3:]]) == 0
    assert capsys.readouterr().out == first
    # under another name too
    (tmp_path / "runs/tiny").rename(tmp_path / "runs/other")
    assert main(["train", str(tmp_path / "runs/other/recipe.toml"), *words[3:]]) == 0
    assert capsys.readouterr().out == first.replace("runs/tiny", "runs/other")
    (tmp_path / "runs/other").rename(tmp_path / "runs/tiny")
    assert main([*words[:2], "seed=1", *words[2:]]) == 2
    assert capsys.readouterr().err.endswith(
        "`seed` must be what the run began with; got 1. "
        f"It began with 0: go on with contrastile train {tmp_path}/runs/tiny/recipe.toml --runs {tmp_path}/runs "
        "--resume, or train anew, without --resume.\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "recipes/glyphs.toml", "--resume", "optim.rate=1"], "optim.rate=1: optim.rate: unknown key"),
        (["train", "recipes/glyphs.toml", "--resume", "seed"], "unrecognized arguments: seed"),
        (["evaluate", "x", "a=1"], "unrecognized arguments: a=1"),
        (["train", "recipes/glyphs.toml", "--resum"], "unrecognized arguments: --resum"),
    ],
)
def test_overrides_may_follow_options(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trian"], "contrastile: argument VERB: invalid choice: 'trian' (choose from "),
        (["train"], "contrastile train: the following arguments are required: recipe"),
        (["bench", "loss", "--losses", "clop"], "contrastile bench loss: argument --losses: invalid choice: 'clop' ("),
        (["bench", "step", "--foo"], "contrastile bench step: unrecognized arguments: --foo"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_the_help(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    line = capsys.readouterr().err
    assert end.value.code == 2
    assert line.startswith(sentence)
    assert line.endswith(f". See: {sentence.split(':')[0]} --help\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("trian glyphs", "(did you mean train?)"),
        ("train glyphs --resum", "--resum (did you mean --resume?)"),
        ("train glyphs --batch 3", "(keys of the recipe are written without dashes, such as train.batch=64)"),
    ],
)
def test_a_wrong_word_is_told_the_one_that_was_meant(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert f"{hint}. See: contrastile " in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["pass", "raise ImportError('cannot load module more than once per process')"])
def test_ctrl_c_while_a_library_loads_ends_quietly_whatever_the_library_makes_of_it(tmp_path, answer):
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    sum(range(100))\n"
        f"except KeyboardInterrupt:\n    {answer}\n"
    )
    root = os.path.dirname(os.path.dirname(contrastile.__file__))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    words = [sys.executable, "-m", "contrastile", "doctor"]
    # a process behind a script ignores Ctrl-C, and so would its children
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, preexec_fn=heard)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_ctrl_c_is_left_alone_where_somebody_ignores_it_and_within_a_verb_it_is_pythons(monkeypatch):
    from contrastile import __main__ as process

    monkeypatch.setattr(entry, "main", lambda: signal.getsignal(signal.SIGINT) is process._stop)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert not process.command()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert process.command()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_outside_of_a_verb_is_one_word(monkeypatch, capsys):
    from contrastile import __main__ as process

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "main", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert process.command() == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--batches 64 --rates cube", "`--rates` must be among fixed, sqrt, linear; got ['cube']. Such as fixed sqrt."),
        ("--batches 64 --data 2", "`--data` must be shares above 0, up to 1; got [2.0]. Such as 0.1 0.3 1.0."),
        ("--batches 1 64", "`--batches` must be sizes of at least 2; got [1, 64]. Such as 256 1024 4096."),
        (
            "train.batch=16",
            "`train.batch` must have a size above train.sub_batch.image; got 16 and 16. There is nothing to compare.",
        ),
        (
            "--losses data.copies=3",
            "`data.copies` must be 1 for a comparison, whose seeds share their data; got 3. "
            "Images are bent anew in every run without it.",
        ),
    ],
)
def test_an_impossible_comparison_is_one_line_before_anything_heavy_is_loaded(tmp_path, answered, words, sentence):
    runs = ["--runs", str(tmp_path / "runs")]
    code, output, complaint, loaded = answered("compare", str(write_recipe(tmp_path)), *runs, *words.split())
    assert (code, output, complaint, loaded) == (2, "", f"{sentence}\n", [])


def test_falling_sizes_of_a_retrievers_comparison_are_one_line(tmp_path, answered):
    (tmp_path / "r.toml").write_text(TEXTS)
    words = ["compare", str(tmp_path / "r.toml"), "evaluate.bm25=false", "--runs", str(tmp_path / "runs")]
    code, _, complaint, loaded = answered(*words, "--batches", "512", "128")
    assert (code, loaded) == (2, [])
    assert complaint == "`--batches` must be rising sizes of at least 2; got [512, 128]. Such as 128 512 4096.\n"


@pytest.mark.parametrize("name", ["seconds", "longest", "within"])
def test_a_negative_time_is_refused(capsys, name):
    assert main(["bench", "step", f"--{name}", "-1"]) == 2
    assert capsys.readouterr().err == f"`--{name}` must be at least 0; got -1.0. Leave it out for the default.\n"
