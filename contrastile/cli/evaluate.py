"""`contrastile evaluate RUN`: measure the saved weights again, print the table, write the report again.

With `--zero-shot FOLDER` or `--captions FILE` it measures on those pictures alone, and a retriever with `--texts
FOLDER` on those texts; the results join the others.
Of a ranking in TREC's form, any system's, it prints the measures: `contrastile evaluate x.trec --judgements x.qrels`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

ZERO_SHOT, RETRIEVAL = ("classes", "templates", "mapping", "among"), ("images", "split")
PICTURES, TEXTS = ("zero_shot", "captions", *ZERO_SHOT, "images"), ("corpus", "bad_rows")
# files of runs, and of other trainers' runs, that nobody took for rankings
NOT_RANKINGS = (".toml", ".safetensors", ".pt", ".pth", ".bin", ".json", ".jsonl", ".html")
# what says how a run is measured
OF_RUNS = ("index", "texts", "name", "split", *PICTURES, *TEXTS)


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("evaluate", help="measure the saved weights of a run and write its report again")
    parser.add_argument("run", help="a run folder, such as runs/glyphs, or a file of rankings in TREC's form")
    parser.add_argument("--judgements", metavar="FILE", help="what is right, for rankings: TREC's or BEIR's qrels")
    parser.add_argument("--measures", nargs="+", metavar="NAME", help="of rankings: such as nDCG@10 recall@1000 MAP")
    parser.add_argument("--index", metavar="FOLDER", help="a retriever's: look among what `contrastile encode` wrote")
    parser.add_argument("--zero-shot", metavar="FOLDER", help="classify pictures: a folder with a sub-folder a class")
    parser.add_argument("--classes", metavar="FILE", help="names of classes: JSON, or lines of folder, tab, names")
    parser.add_argument(
        "--templates", metavar="FILE", help="plain (default), several, or a file with a sentence a line"
    )
    parser.add_argument("--mapping", metavar="FILE", help="JSON from folder to its several classes, as for ObjectNet")
    parser.add_argument("--among", choices=("folders", "all"), help="answers: the folders' classes (default), or all")
    parser.add_argument("--captions", metavar="FILE", help="find captions and pictures: Karpathy's JSON, or a table")
    parser.add_argument("--images", metavar="FOLDER", help="the pictures of --captions (default: beside the file)")
    parser.add_argument("--texts", metavar="SOURCE", help="a retriever's: BEIR's folder, or a file of questions")
    parser.add_argument("--corpus", metavar="FILE", help="further passages beside a file of --texts")
    parser.add_argument(
        "--bad-rows", type=float, metavar="SHARE", help="of --texts, that may be unusable (default: the recipe's)"
    )
    parser.add_argument("--split", help="of Karpathy's JSON (default: test), or of --texts (default: all but train)")
    parser.add_argument("--name", help="what the measures are called by (default: the folder's or file's name)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Load, evaluate, report."""
    from pathlib import Path

    from contrastile._wrong import wrong

    if arguments.judgements is not None:
        if idle := next((name for name in OF_RUNS if getattr(arguments, name) is not None), None):
            remedy = "Rankings are measured as they are."
            raise wrong(_flag(idle), "be left out with --judgements", getattr(arguments, idle), remedy)
        return _measure(arguments.run, arguments.judgements, arguments.measures)

    from contrastile.train.folder import RECIPE, finished_run, make_folder
    from contrastile.train.recipe import load_any_recipe, load_recipe, load_retriever_recipe
    from contrastile.train.settings import known_device

    texts, tests = _texts(arguments), _tests(arguments)
    if tests and arguments.index is not None:
        raise wrong("--index", "be left out with tests on pictures", f'"{arguments.index}"', "It is a retriever's.")
    known_device(arguments.device)
    if Path(arguments.run).suffix in NOT_RANKINGS and Path(arguments.run).is_file():
        remedy = "Name the folder, such as runs/glyphs."
        raise wrong("run", "be a run's folder, or a file of rankings", f'"{arguments.run}"', remedy)
    if Path(arguments.run).is_file() or arguments.measures is not None:
        remedy = "Name what is right, or a run's folder alone."
        raise wrong("--judgements", "be given with rankings and their measures", f'"{arguments.run}" alone', remedy)
    # a mistake is told before anything heavy is imported
    folder = finished_run(arguments.run)
    load = load_retriever_recipe if texts else load_recipe if tests else load_any_recipe
    load(folder / RECIPE, files=False)
    make_folder("run", folder.path)
    for test in tests:
        _look(test)

    if texts:
        from contrastile.train.retriever.elsewhere import evaluate_texts

        print(evaluate_texts(folder.path, device=arguments.device, index=arguments.index, **texts))
    elif tests:
        from contrastile.train.elsewhere import evaluate_elsewhere

        print(evaluate_elsewhere(folder.path, tests, device=arguments.device))
    else:
        from contrastile.train.loop import evaluate_run

        print(evaluate_run(folder.path, device=arguments.device, index=arguments.index))
    print(f"report: {folder / 'report.html'}")
    return 0


def _texts(arguments: argparse.Namespace) -> dict[str, Any]:
    """The other texts that the words ask to be measured on; nothing where they ask for none."""
    from pathlib import Path

    from contrastile._wrong import wrong

    given = {name: value for name in TEXTS if (value := getattr(arguments, name)) is not None}
    source, name, bad_rows = arguments.texts, arguments.name, arguments.bad_rows
    if source is None:
        if given:
            raise wrong(_flag(next(iter(given))), "come with --texts", "no --texts", "Name the folder or the file.")
        return {}
    if idle := next((one for one in PICTURES if getattr(arguments, one) is not None), None):
        got = f'"{getattr(arguments, idle)}"'
        raise wrong(_flag(idle), "be left out with --texts", got, "Measure one after the other.")
    for option, path in (("--texts", source), ("--corpus", arguments.corpus)):
        if path is not None and not Path(path).exists():
            raise wrong(option, "be a file or folder", f'"{path}"', "Check its path.")
    if name is not None and (not name or Path(name).name != name):
        raise wrong("--name", "be a name that files can have", f'"{name}"', "It begins those of the rankings.")
    if bad_rows is not None and not 0 <= bad_rows < 1:
        raise wrong("--bad-rows", "be a share from 0 to below 1", bad_rows, "0.01 is one row of a hundred.")
    return {"source": source, "name": name, "split": arguments.split, **given}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _tests(arguments: argparse.Namespace) -> list[Any]:
    """What the words ask to be measured on of pictures."""
    if arguments.texts is not None:
        return []
    from contrastile._wrong import wrong
    from contrastile.train.evaluate_settings import RetrievalSettings, ZeroShotSettings

    tests: list[Any] = []
    for asked, own, settings in (
        ("zero_shot", ZERO_SHOT, ZeroShotSettings), ("captions", RETRIEVAL, RetrievalSettings)
    ):  # fmt: skip
        given = {name: value for name in own if (value := getattr(arguments, name)) is not None}
        what = getattr(arguments, asked)
        if what is None and given:
            option = _flag(asked)
            raise wrong(f"--{next(iter(given))}", f"come with {option}", f"no {option}", "Say what to measure on.")
        if what is not None:
            tests.append(settings(**{asked if asked == "captions" else "folder": what}, name=arguments.name, **given))
    if arguments.name is not None and len(tests) != 1:
        raise wrong("--name", "come with one test", len(tests), "Measure them one after the other.")
    return tests


def _look(test: Any) -> None:
    """Raises ValueError where what a test on pictures names is not there."""
    from pydantic import ValidationError

    try:
        type(test).model_validate(test.model_dump(), context={"files": True})
    except ValidationError as error:
        mistake = error.errors()[0]
        key = str(next(iter(mistake["loc"]), "folder"))
        option = "--zero-shot" if key == "folder" else _flag(key)
        raise ValueError(f"`{option}` {mistake['ctx']['error']}.") from None


def _measure(rankings: str, judgements: str, names: Sequence[str] | None) -> int:
    from contrastile.evaluate.ranking import USUAL, means, measure
    from contrastile.evaluate.trec import judged_of, read_judgements, read_run

    run, judged = read_run(rankings), read_judgements(judgements)
    try:
        measured = means(measure(run, judged, names or USUAL))
    except ValueError as error:
        raise ValueError(str(error).replace("`names`", "`--measures`")) from None
    print(f"{len(judged):,} judged queries, {judged_of(run, judged):,} of them answered")
    for name, value in measured.items():
        print(f"{name:<12}{value:.4f}")
    return 0
