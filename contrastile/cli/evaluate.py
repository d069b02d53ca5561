"""`contrastile evaluate RUN`: measure the saved weights again, print the table, write the report again.

`--zero-shot FOLDER` and `--captions FILE` measure a run on those pictures alone, `--texts FOLDER` a retriever on those
texts; the report keeps the other results. `contrastile evaluate x.trec --judgements x.qrels` prints the measures of
rankings in TREC's form, of any system.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import Any

# options that belong to --zero-shot and to --captions, to all tests on pictures, and to --texts
ZERO_SHOT, CAPTIONS = ("classes", "templates", "mapping", "among"), ("images", "split")
PICTURES, TEXTS = ("zero_shot", "captions", *ZERO_SHOT, "images"), ("corpus", "bad_rows")
OF_RUNS = ("index", "texts", "name", "split", *PICTURES, *TEXTS)
# endings of files that belong to runs, of this or other trainers, and are no rankings
NOT_RANKINGS = (".toml", ".safetensors", ".pt", ".pth", ".bin", ".json", ".jsonl", ".html")


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("evaluate", help="measure the saved weights of a run and write its report again")
    parser.add_argument("run", help="a run folder, such as runs/glyphs, or a file of rankings in TREC's form")
    parser.add_argument("--judgements", metavar="FILE", help="of rankings: judgements, TREC's or BEIR's qrels")
    parser.add_argument("--measures", nargs="+", metavar="NAME", help="of rankings: such as nDCG@10 recall@1000 MAP")
    parser.add_argument("--index", metavar="FOLDER", help="of a retriever: search an index of `contrastile encode`")
    parser.add_argument("--zero-shot", metavar="FOLDER", help="classify pictures: a folder with a sub-folder a class")
    parser.add_argument("--classes", metavar="FILE", help="names of classes: JSON, or lines of folder, tab, names")
    parser.add_argument("--templates", metavar="FILE", help="plain (default), several, or a file, a sentence a line")
    parser.add_argument("--mapping", metavar="FILE", help="JSON from folder to its several classes, as for ObjectNet")
    parser.add_argument("--among", choices=("folders", "all"), help="answers: the folders' classes (default), or all")
    parser.add_argument("--captions", metavar="FILE", help="find captions and pictures: Karpathy's JSON, or a table")
    parser.add_argument("--images", metavar="FOLDER", help="the pictures of --captions (default: beside the file)")
    parser.add_argument("--texts", metavar="SOURCE", help="of a retriever: BEIR's folder, or a file of questions")
    parser.add_argument("--corpus", metavar="FILE", help="further passages beside a file of --texts")
    bad_rows = "unusable rows allowed in --texts (default: the recipe's)"
    parser.add_argument("--bad-rows", type=float, metavar="SHARE", help=bad_rows)
    parser.add_argument("--split", help="of Karpathy's JSON (default: test), or of --texts (default: all but train)")
    parser.add_argument("--name", help="name of the measures (default: the folder's or file's name)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure rankings, or load a run, measure it and write its report again."""
    from contrastile._errors import invalid

    if arguments.judgements is not None:
        for flag, value in _given(arguments, OF_RUNS):
            raise invalid(flag, "be left out with --judgements", value, "Rankings are measured as they are.")
        return _measure(arguments.run, arguments.judgements, arguments.measures)

    from contrastile.train.config.base import known_device
    from contrastile.train.folder import RECIPE, finished_run, make_folder
    from contrastile.train.recipe import load_any_recipe, load_recipe, load_retriever_recipe

    texts, tests = _text_test(arguments), _picture_tests(arguments)
    if tests and arguments.index is not None:
        raise invalid("--index", "be left out with tests on pictures", f'"{arguments.index}"', "It is a retriever's.")
    known_device(arguments.device)
    _refuse_rankings(arguments)
    # the checks of the recipe and of the tests' files come first: nothing heavy is imported for a mistake
    folder = finished_run(arguments.run)
    load = load_retriever_recipe if texts else load_recipe if tests else load_any_recipe
    recipe = load(folder / RECIPE, files=False)
    if arguments.index is not None and recipe.kind != "retriever":
        remedy = "It belongs to a retriever."
        raise invalid("--index", "be left out for pictures and texts", arguments.index, remedy)
    make_folder("run", folder.path)
    for test in tests:
        _check_files(test)

    index = None
    if arguments.index is not None:
        from contrastile.retrieval.index import open_index

        index = open_index(folder, arguments.index)
    if texts:
        from contrastile.train.retriever.job import evaluate_texts

        print(evaluate_texts(folder, device=arguments.device, index=index, **texts))
    elif index is not None:
        from contrastile.train.retriever.job import RetrieverJob

        print(RetrieverJob.of_run(folder, device=arguments.device, index=index).report(folder))
    elif tests:
        from contrastile.train.transfer import evaluate_transfer

        print(evaluate_transfer(folder.path, tests, device=arguments.device))
    else:
        from contrastile.train.loop import evaluate_run

        print(evaluate_run(folder.path, device=arguments.device))
    print(f"report: {folder / 'report.html'}")
    return 0


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The options of these names that have a value."""
    values = ((_flag(name), getattr(arguments, name)) for name in names)
    return ((flag, value) for flag, value in values if value is not None)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_rankings(arguments: argparse.Namespace) -> None:
    """Raise ValueError where `run` is a file, or --measures stands without judgements."""
    from contrastile._errors import invalid

    is_file = os.path.isfile(arguments.run)
    if is_file and arguments.run.endswith(NOT_RANKINGS):
        remedy = "Name the folder, such as runs/glyphs."
        raise invalid("run", "be a run's folder, or a file of rankings", f'"{arguments.run}"', remedy)
    if is_file or arguments.measures is not None:
        remedy = "Name what is right, or a run's folder alone."
        raise invalid("--judgements", "be given with rankings and their measures", f'"{arguments.run}" alone', remedy)


def _text_test(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `evaluate_texts` for --texts; empty without it."""
    from contrastile._errors import invalid

    source, name = arguments.texts, arguments.name
    if source is None:
        for flag, _ in _given(arguments, TEXTS):
            raise invalid(flag, "come with --texts", "no --texts", "Name the folder or the file.")
        return {}
    for flag, value in _given(arguments, PICTURES):
        raise invalid(flag, "be left out with --texts", f'"{value}"', "Measure one after the other.")
    for flag, path in _given(arguments, ("texts", "corpus")):
        if not os.path.exists(path):
            raise invalid(flag, "be a file or folder", f'"{path}"', "Check its path.")
    if name is not None and (not name or os.path.basename(name) != name):
        raise invalid("--name", "be a name that files can have", f'"{name}"', "It begins those of the rankings.")
    check_bad_rows(arguments.bad_rows)
    given = {key: value for key in TEXTS if (value := getattr(arguments, key)) is not None}
    return {"source": source, "name": name, "split": arguments.split, **given}


def check_bad_rows(fraction: float | None) -> None:
    """Raise ValueError where --bad-rows is no fraction of rows."""
    from contrastile._errors import invalid

    if fraction is not None and not 0 <= fraction < 1:
        raise invalid("--bad-rows", "be a share from 0 to below 1", fraction, "0.01 is one row of a hundred.")


def _picture_tests(arguments: argparse.Namespace) -> list[Any]:
    """The settings of the tests on pictures that the options name."""
    if arguments.texts is not None:
        return []
    from contrastile._errors import invalid
    from contrastile.train.config.image_text import RetrievalSettings, ZeroShotSettings

    tests: list[Any] = []
    kinds = (
        ("zero_shot", "folder", ZERO_SHOT, ZeroShotSettings),
        ("captions", "captions", CAPTIONS, RetrievalSettings),
    )
    for option, key, names, settings in kinds:
        given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        source, flag = getattr(arguments, option), _flag(option)
        if source is not None:
            tests.append(settings(**{key: source}, name=arguments.name, **given))
        elif given:
            raise invalid(f"--{next(iter(given))}", f"come with {flag}", f"no {flag}", "Say what to measure on.")
    if arguments.name is not None and len(tests) != 1:
        raise invalid("--name", "come with one test", len(tests), "Measure them one after the other.")
    return tests


def _check_files(test: Any) -> None:
    """Raise ValueError where files or folders of a test on pictures are missing."""
    from pydantic import ValidationError

    try:
        type(test).model_validate(test.model_dump(), context={"files": True})
    except ValidationError as error:
        mistake = error.errors()[0]
        key = str(next(iter(mistake["loc"]), mistake["ctx"].get("key") or "folder"))
        option = "--zero-shot" if key == "folder" else _flag(key)
        raise ValueError(f"`{option}` {mistake['msg'].removeprefix('Value error, ')}.") from None


def _measure(rankings: str, judgements: str, names: Sequence[str] | None) -> int:
    """Print the measures of a file of rankings."""
    from contrastile.evaluate.ranking import USUAL, means, measure
    from contrastile.evaluate.trec import judged_of, read_judgements, read_run

    ranked, judged = read_run(rankings), read_judgements(judgements)
    try:
        measured = means(measure(ranked, judged, names or USUAL))
    except ValueError as error:
        raise ValueError(str(error).replace("`names`", "`--measures`")) from None
    print(f"{len(judged):,} judged queries, {judged_of(ranked, judged):,} of them answered")
    for name, value in measured.items():
        print(f"{name:<12}{value:.4f}")
    return 0
