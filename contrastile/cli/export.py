"""`contrastile export RUN --as ... --out FOLDER`: a run or its index for other libraries."""

import argparse
from pathlib import Path

from contrastile._errors import invalid, one_of
from contrastile.cli.options import finished_run_on, index_of
from contrastile.train.folder import make_folder

LIBRARIES, INDEXES = ("sentence-transformers", "transformers", "open_clip"), ("npy", "faiss")
# libraries for each kind of run, and its name in sentences
OF_KIND = {
    "image-text": (("open_clip", "transformers"), "a run of images and texts"),
    "retriever": (("sentence-transformers", "transformers"), "a retriever"),
}

SUMMARY = "write a run, or its index, as other libraries load it"
EXAMPLE = "contrastile export runs/docstrings-bert --as sentence-transformers --out my/model"


def add_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kinds = ", ".join((*LIBRARIES, *INDEXES))
    add("run", help="a run's folder, such as runs/docstrings")
    add("--as", dest="kind", required=True, metavar="KIND", help=f"one of {kinds}; the last two for an index")
    add("--out", required=True, metavar="FOLDER", help="folder to be made")
    add("--index", metavar="FOLDER", help="index that `contrastile encode` wrote (default: RUN/index)")


def run(arguments: argparse.Namespace) -> int:
    """Check the arguments before anything heavy is imported, then write."""
    one_of("--as", arguments.kind, (*LIBRARIES, *INDEXES), "The last two are for an index.")
    folder, recipe = finished_run_on(arguments.run, "auto")
    libraries, noun = OF_KIND[recipe.kind]
    if arguments.kind not in (*libraries, *INDEXES):
        rule, remedy = f"be one of {', '.join(libraries)} for {noun}", "Other kinds of runs have the others."
        raise invalid("--as", rule, repr(arguments.kind), remedy)
    index = index_of(arguments, recipe) if arguments.kind in INDEXES else None
    make_folder("--out", Path(arguments.out).absolute().parent)

    from contrastile.integrations.export import export_index, export_run
    from contrastile.integrations.export_pairs import export_pair

    if index is not None:
        written = export_index(index, arguments.kind, Path(arguments.out))
    else:
        export = export_pair if recipe.kind == "image-text" else export_run
        written = export(folder.path, arguments.kind, Path(arguments.out))
    for path in written:
        print(path)
    return 0
