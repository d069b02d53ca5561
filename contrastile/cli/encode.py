"""`contrastile encode RUN [CORPUS]`: write the features of passages to disk, for `contrastile search`."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("encode", help="turn a corpus into features with a retriever's run, to be searched")
    parser.add_argument("run", help="a retriever's run folder, such as runs/docstrings")
    parser.add_argument(
        "corpus",
        nargs="?",
        help="a BEIR folder, .jsonl, .tsv, or a folder of code (default: the run's own)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="folder of the index, made if missing (default: RUN/index)")
    parser.add_argument("--shard", type=int, default=65_536, metavar="N", help="passages per file (default: 65536)")
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N features only")
    parser.add_argument(
        "--bad-rows", type=float, metavar="SHARE", help="unusable rows allowed in the corpus (default: the recipe's)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the arguments before anything heavy is imported, then encode; finished shards are kept."""
    from pathlib import Path

    from contrastile._errors import invalid, written_to
    from contrastile.cli.evaluate import check_bad_rows
    from contrastile.data.files import own_folder
    from contrastile.train.config.base import known_device
    from contrastile.train.folder import RECIPE, finished_run, make_folder
    from contrastile.train.recipe import load_retriever_recipe

    known_device(arguments.device)
    folder = finished_run(arguments.run)
    load_retriever_recipe(folder / RECIPE, files=False)
    for name in ("shard", "dimensions"):
        if (got := getattr(arguments, name)) is not None and got < 1:
            raise invalid(f"--{name}", "be at least 1", got, "Leave it out for the default.")
    check_bad_rows(arguments.bad_rows)
    if arguments.bad_rows is not None and arguments.corpus is None:
        raise invalid(
            "--bad-rows", "come with a corpus", "none", "The run's own passages were read with data.bad_rows."
        )
    if arguments.corpus is not None and not Path(arguments.corpus).exists():
        raise invalid("corpus", "be a file or folder", f'"{arguments.corpus}"', "Check its path.")

    out = Path(arguments.out) if arguments.out else own_folder(folder / "index")
    make_folder("--out", out)

    from contrastile.retrieval.index import encode_source

    with written_to(out):
        index = encode_source(
            folder,
            arguments.corpus,
            out,
            shard=arguments.shard,
            dimensions=arguments.dimensions,
            device=arguments.device,
            bad_rows=arguments.bad_rows,
        )
    print(f"{len(index):,} passages of {index.dimensions} features: {out}")
    print(f"to search them: contrastile search {arguments.run}" + (f" --index {out}" if arguments.out else ""))
    return 0
