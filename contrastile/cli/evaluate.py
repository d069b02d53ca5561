"""`contrastile evaluate RUN`: measure the saved weights again, print the table, write the report again.

`--zero-shot FOLDER` and `--captions FILE` measure a run on those images alone, `--texts FOLDER` a retriever on those
texts; the report keeps the other results. Of a run that cannot be written to, the table alone is printed.
`contrastile evaluate x.trec --judgements x.qrels` prints the measures of rankings in TREC's form, of any system.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from contrastile._errors import invalid, renamed
from contrastile.cli import options
from contrastile.cli.options import candidates, check_bad_rows, check_source, finished_run_on, flag, index_of
from contrastile.train.folder import METRICS, RunFolder, one_writer

# options that belong to --zero-shot and to --captions, to all tests on images, and to --texts
ZERO_SHOT, CAPTIONS = ("classes", "templates", "mapping", "among"), ("images", "split")
PICTURES, TEXTS = ("zero_shot", "captions", *ZERO_SHOT, "images"), ("corpus", "bad_rows")
OF_RUNS = ("index", "candidates", "texts", "name", "split", *PICTURES, *TEXTS)
# endings of files that belong to runs, of this or other trainers, and are no rankings
NOT_RANKINGS = (".toml", ".safetensors", ".pt", ".pth", ".bin", ".json", ".jsonl", ".html")

SUMMARY = "measure the saved weights of a run and write its report again"
EXAMPLE = "contrastile evaluate runs/glyphs"


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder, such as runs/glyphs, or a file of rankings in TREC's form")
    titles = "rankings of any system", "tests of a run of images and texts", "texts and index of a retriever"
    rankings, images, texts = (parser.add_argument_group(title).add_argument for title in titles)
    rankings("--judgements", metavar="FILE", help="judgements, TREC's or BEIR's qrels")
    rankings("--measures", nargs="+", metavar="NAME", help="such as nDCG@10 recall@1000 MAP")
    images("--zero-shot", metavar="FOLDER", help="classify images: a folder with a sub-folder for each class")
    images("--classes", metavar="FILE", help="names of classes: JSON, or lines of folder, tab, names")
    images("--templates", metavar="FILE", help="plain (default), several, or a file with one sentence per line")
    images("--mapping", metavar="FILE", help="JSON from folder to its several classes, as for ObjectNet")
    images("--among", choices=("folders", "all"), help="answers: the folders' classes (default), or all")
    images("--captions", metavar="FILE", help="find captions and images: Karpathy's JSON, or a table")
    images("--images", metavar="FOLDER", help="the images of --captions (default: beside the file)")
    texts("--texts", metavar="SOURCE", help="BEIR's folder, or a file of questions")
    texts("--corpus", metavar="FILE", help="further passages beside a file of --texts")
    texts("--bad-rows", type=float, metavar="SHARE", help="unusable rows allowed in --texts (default: the recipe's)")
    texts("--index", metavar="FOLDER", help="search an index of `contrastile encode`")
    add = parser.add_argument
    add("--split", help="part of Karpathy's JSON (default: test), or of --texts (default: all but train)")
    add("--name", help="name of the measures (default: the folder's or file's, and a split's)")
    options.add_candidates(parser)
    options.add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure rankings, or load a run, measure it and write its report again."""
    if arguments.judgements is not None:
        # the default of --device counts as left out
        names = OF_RUNS if arguments.device == "auto" else ("device", *OF_RUNS)
        _refuse(arguments, names, "be left out with --judgements", "Rankings are measured as they are.")
        return _measure(arguments.run, arguments.judgements, arguments.measures)

    texts, tests = _text_test(arguments), _picture_tests(arguments)
    if tests and arguments.index is not None:
        raise invalid("--index", "be left out with tests on images", f'"{arguments.index}"', "It is a retriever's.")
    _refuse_rankings(arguments)
    # recipe and files of tests are checked before anything heavy is imported
    folder, recipe = finished_run_on(arguments.run, arguments.device)
    if recipe.kind == "retriever":
        _refuse(arguments, PICTURES, "be left out for a retriever", "It belongs to a run of images and texts.")
    else:
        _refuse(arguments, ("index", "texts"), "be left out for images and texts", "It belongs to a retriever.")
    picked = candidates(arguments.candidates, recipe)
    index_name = None if arguments.index is None else index_of(arguments, recipe)
    for test in tests:
        _check_files(test)

    from contrastile.retrieval.index import open_index
    from contrastile.retrieval.search import first_stage
    from contrastile.train.evaluation import evaluate_transfer
    from contrastile.train.loop import evaluate_run
    from contrastile.train.retriever.job import RetrieverJob, evaluate_texts

    device = arguments.device
    index = None if index_name is None else open_index(folder, index_name)
    stage: Any = None if picked is None else first_stage(*picked, device)
    with _to_write(folder) as folder:
        if texts:
            print(evaluate_texts(folder, device=device, index=index, first_stage=stage, **texts))
        elif index is not None or stage is not None:
            print(RetrieverJob.of_run(folder, device=device).report(folder, index, stage))
        elif tests:
            with renamed(folder="--zero-shot"):
                print(evaluate_transfer(folder.path, tests, device=device))
        else:
            print(evaluate_run(folder.path, device=device))
    return 0


@contextmanager
def _to_write(folder: RunFolder) -> Iterator[RunFolder]:
    """The run's folder, locked; where it cannot be written to a temporary one, which links to the run's files."""
    path = folder.path
    if os.access(path, os.W_OK | os.X_OK):
        busy = invalid("run", "be written by one command at a time", f'"{path}"', "Wait until the other one ends.")
        with one_writer(path, busy):
            yield folder
        print(f"report: {folder / 'report.html'}")
        return
    with TemporaryDirectory() as temporary:
        for file in path.iterdir():
            # lines are appended to metrics; all other files are replaced
            put = shutil.copyfile if file.name == METRICS else os.symlink
            put(file.absolute(), Path(temporary, file.name))
        yield RunFolder(Path(temporary))
    print(f'The results are not saved: "{path}" cannot be written to.', file=sys.stderr)


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _refuse(arguments: argparse.Namespace, names: Sequence[str], rule: str, remedy: str, got: str = "{}") -> None:
    """Raise ValueError for the first of these options that has a value."""
    for name, value in _given(arguments, names).items():
        raise invalid(flag(name), rule, got.format(value), remedy)


def _refuse_rankings(arguments: argparse.Namespace) -> None:
    """Raise ValueError where `run` is a file, or --measures stands without judgements."""
    is_file = os.path.isfile(arguments.run)
    if is_file and arguments.run.endswith(NOT_RANKINGS):
        remedy = "Name the folder, such as runs/glyphs."
        raise invalid("run", "be a run's folder, or a file of rankings", f'"{arguments.run}"', remedy)
    if is_file or arguments.measures is not None:
        remedy = "Name what is right, or a run's folder alone."
        raise invalid("--judgements", "be given with rankings and their measures", f'"{arguments.run}" alone', remedy)


def _text_test(arguments: argparse.Namespace) -> dict[str, Any]:
    source, name = arguments.texts, arguments.name
    if source is None:
        _refuse(arguments, TEXTS, "come with --texts", "Name the folder or the file.", "no --texts")
        return {}
    _refuse(arguments, PICTURES, "be left out with --texts", "Measure one after the other.", '"{}"')
    for option in ("texts", "corpus"):
        check_source(flag(option), getattr(arguments, option))
    if name is not None and (not name or os.path.basename(name) != name):
        raise invalid("--name", "be a name that files can have", f'"{name}"', "Files of rankings begin with it.")
    check_bad_rows(arguments.bad_rows)
    return {"source": source, "name": name, "split": arguments.split, **_given(arguments, TEXTS)}


def _picture_tests(arguments: argparse.Namespace) -> list[Any]:
    if arguments.texts is not None:
        return []
    if arguments.captions is None:
        _refuse(arguments, ("split",), "come with --captions or --texts", "Say what to measure on.", "neither")
    from contrastile.train.config.image_text import RetrievalSettings, ZeroShotSettings

    tests: list[Any] = []
    zero_shot = "zero_shot", "folder", ZERO_SHOT, ZeroShotSettings
    for option, key, names, settings in (zero_shot, ("captions", "captions", CAPTIONS, RetrievalSettings)):
        if (source := getattr(arguments, option)) is None:
            _refuse(arguments, names, f"come with {flag(option)}", "Say what to measure on.", f"no {flag(option)}")
        else:
            tests.append(settings(**{key: source}, name=arguments.name, **_given(arguments, names)))
    if arguments.name is not None and len(tests) != 1:
        remedy = "Measure them one after the other." if tests else "Name it: --zero-shot, --captions or --texts."
        raise invalid("--name", "come with one test", len(tests) or "none", remedy)
    return tests


def _check_files(test: Any) -> None:
    from pydantic import ValidationError

    try:
        type(test).model_validate(test.model_dump(), context={"files": True})
    except ValidationError as error:
        mistake = error.errors()[0]
        key = str(next(iter(mistake["loc"]), mistake["ctx"].get("key") or "folder"))
        option = "--zero-shot" if key == "folder" else flag(key)
        raise ValueError(f"`{option}` {mistake['msg'].removeprefix('Value error, ')}.") from None


def _measure(rankings: str, judgements: str, names: Sequence[str] | None) -> int:
    from contrastile.evaluate.ranking import USUAL, means, measure, read_judgements, read_run
    from contrastile.train.log import quantity

    ranked, judged = read_run(rankings), read_judgements(judgements)
    with renamed(names="--measures"):
        measured = means(measure(ranked, judged, names or USUAL))
    print(f"{quantity(len(judged), 'judged queries')}, {len(judged.keys() & ranked):,} of them answered")
    width = max(11, *map(len, measured))
    for name, value in measured.items():
        print(f"{name:<{width}} {value:.4f}")
    return 0
