"""`contrastile export RUN --as ... --out FOLDER`: a retriever or its index for other libraries."""

from __future__ import annotations

import argparse
from typing import Any

from contrastile._errors import invalid, one_of
from contrastile.cli.options import finished_run_on

LIBRARIES, INDEXES = ("sentence-transformers", "transformers"), ("npy", "faiss")

SUMMARY = "write a retriever, or its index, as other libraries load it"
EXAMPLE = "contrastile export runs/docstrings --as sentence-transformers --out my/model"


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("export", help=SUMMARY)
    add = parser.add_argument
    kinds = ", ".join((*LIBRARIES, *INDEXES))
    add("run", help="a retriever's run folder, such as runs/docstrings")
    add("--as", dest="kind", required=True, metavar="KIND", help=f"one of {kinds}; the last two for its index")
    add("--out", required=True, metavar="FOLDER", help="folder to be made")
    add("--index", metavar="FOLDER", help="index that `contrastile encode` wrote (default: RUN/index)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the arguments before anything heavy is imported, then write."""
    from pathlib import Path

    from contrastile.train.folder import INDEX, RECIPE
    from contrastile.train.recipe import load_retriever_recipe

    one_of("--as", arguments.kind, (*LIBRARIES, *INDEXES), "The last two are for an index.")
    folder, _ = finished_run_on(arguments.run, "auto")
    if arguments.kind in LIBRARIES:
        load_retriever_recipe(folder / RECIPE, files=False)
    index = Path(arguments.index) if arguments.index else folder / "index"
    if arguments.kind in INDEXES and not (index / INDEX).is_file():
        raise invalid("index", f"hold an {INDEX}", f'"{index}"', f"Make it first: contrastile encode {arguments.run}")

    from contrastile.integrations.export import export_index, export_run

    if arguments.kind in INDEXES:
        written = export_index(index, arguments.kind, Path(arguments.out))
    else:
        written = export_run(folder.path, arguments.kind, Path(arguments.out))
    for path in written:
        print(path)
    return 0
