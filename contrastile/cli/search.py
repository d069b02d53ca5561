"""`contrastile search RUN ["a question"]`: the best passages for a question, or for one after the other."""

import argparse
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from contrastile._errors import invalid, written_to
from contrastile.cli.options import add_candidates, add_device, at_least, candidates, finished_run_on, index_of
from contrastile.train.folder import make_way

SUMMARY = "find passages by a question, or images by a text; without one, ask for some"
EXAMPLE = 'contrastile search runs/docstrings "bracket a minimum"'


def add_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", help="a run folder, such as runs/docstrings")
    add("question", nargs="?", help='such as "how do I bracket a minimum"')
    add("-k", type=int, default=5, metavar="N", help="number of passages to show (default: 5)")
    add("--index", metavar="FOLDER", help="index that `contrastile encode` wrote (default: RUN/index)")
    add("--engine", default="torch", help="torch, or faiss where it is installed (default: torch)")
    add("--lines", type=int, default=4, metavar="N", help="lines of each passage (default: 4)")
    add("--verify", action="store_true", help="compare every byte of the index with its checksum first")
    add("--page", metavar="FILE", help="for a late retriever: write an HTML page that shows which tokens matched")
    add_candidates(parser)
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer one question, or each line that is typed until an empty one."""
    folder, recipe = finished_run_on(arguments.run, arguments.device)
    at_least("-k", arguments.k)
    at_least("lines", arguments.lines, 0)
    picked = candidates(arguments.candidates, recipe)
    if arguments.page is not None and arguments.question is None:
        raise invalid("--page", "come with a question", "none", "Write the question behind the run.")
    if arguments.page is not None and getattr(recipe.model, "kind", "single") != "late":
        rule, remedy = "be left out unless the run is a late retriever", "One vector a text has no tokens to show."
        raise invalid("--page", rule, f'"{arguments.page}"', remedy)
    if arguments.question is not None and not arguments.question.strip():
        raise invalid("question", "have words", "none", "Leave the question out to type one after the other.")
    index = index_of(arguments, recipe)
    if arguments.page is not None:
        make_way("--page", arguments.page)

    from contrastile.retrieval.search import first_stage, open_search, write_page

    how = {"engine": arguments.engine, "device": arguments.device, "verify": arguments.verify}
    search = open_search(folder, index, **how)
    if picked is not None:
        search = replace(search, candidates=first_stage(*picked, arguments.device)(search.index))
    if arguments.page is not None:
        with written_to(arguments.page):
            write_page(search, arguments.question, arguments.k, Path(arguments.page))
    if arguments.question is not None:
        print(search.results_text(arguments.question, arguments.k, lines=arguments.lines))
        return 0
    if sys.stdin.isatty():
        # with readline, which not every Python has, arrow keys edit the line and recall earlier questions
        with suppress(ImportError):
            import_module("readline")
    print(f"{len(search.index):,} {'passages' if search.index[0].text else 'images'}; an empty line ends it")
    with suppress(EOFError):
        while question := input("? ").strip():
            print(search.results_text(question, arguments.k, lines=arguments.lines))
    return 0
