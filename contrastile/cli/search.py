"""`contrastile search RUN ["a question"]`: the best passages for a question, or for one after the other."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("search", help="find the passages that answer a question; without one, ask for some")
    parser.add_argument("run", help="a retriever's run folder, such as runs/docstrings")
    parser.add_argument("question", nargs="?", help='such as "how do I bracket a minimum"')
    parser.add_argument("-k", type=int, default=5, metavar="N", help="number of passages to show (default: 5)")
    parser.add_argument("--index", metavar="FOLDER", help="index that `contrastile encode` wrote (default: RUN/index)")
    parser.add_argument("--engine", default="torch", help="torch, or faiss where it is installed (default: torch)")
    parser.add_argument("--lines", type=int, default=4, metavar="N", help="lines of each passage (default: 4)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer one question, or each line that is typed until an empty one."""
    from pathlib import Path

    from contrastile._errors import invalid
    from contrastile.train.config.base import known_device
    from contrastile.train.folder import INDEX, RECIPE, finished_run
    from contrastile.train.recipe import load_retriever_recipe

    known_device(arguments.device)
    folder = finished_run(arguments.run)
    load_retriever_recipe(folder / RECIPE, files=False)
    index = Path(arguments.index) if arguments.index else folder / "index"
    for name, got, least in (("-k", arguments.k, 1), ("--lines", arguments.lines, 0)):
        if got < least:
            raise invalid(name, f"be at least {least}", got, "Leave it out for the default.")
    if arguments.question is not None and not arguments.question.strip():
        raise invalid("question", "have words", "none", "Leave it out to be asked for some.")
    if not (index / INDEX).is_file():
        made = f"contrastile encode {arguments.run}" + (f" --out {index}" if arguments.index else "")
        raise invalid("index", f"hold an {INDEX}", f'"{index}"', f"Make it first: {made}")

    from contrastile.retrieval.index import open_search

    search = open_search(folder, index, engine=arguments.engine, device=arguments.device)
    if arguments.question is not None:
        print(search.results_text(arguments.question, arguments.k, lines=arguments.lines))
        return 0
    print(f"{len(search.index):,} passages; an empty line ends it")
    while question := _next_question():
        print(search.results_text(question, arguments.k, lines=arguments.lines))
    return 0


def _next_question() -> str:
    """The next line of the terminal; empty at its end."""
    try:
        return input("? ").strip()
    except EOFError:
        return ""
