"""`contrastile encode RUN [CORPUS]`: passages as features on the disk, to be searched."""

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
    parser.add_argument("--out", metavar="FOLDER", help="where the index goes, made if missing (default: RUN/index)")
    parser.add_argument("--shard", type=int, default=65_536, metavar="N", help="passages a file (default: 65536)")
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N features only")
    parser.add_argument(
        "--bad-rows", type=float, metavar="SHARE", help="of the corpus, that may be unusable (default: the recipe's)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Load, read, encode; what was done before is kept."""
    from pathlib import Path

    from contrastile._wrong import written_to, wrong
    from contrastile.train.folder import RECIPE, finished_run, make_folder
    from contrastile.train.recipe import load_retriever_recipe
    from contrastile.train.settings import known_device

    known_device(arguments.device)
    folder = finished_run(arguments.run)
    load_retriever_recipe(folder / RECIPE, files=False)
    for name in ("shard", "dimensions"):
        if (got := getattr(arguments, name)) is not None and got < 1:
            raise wrong(f"--{name}", "be at least 1", got, "Leave it out for the default.")
    if arguments.bad_rows is not None and not 0 <= arguments.bad_rows < 1:
        raise wrong("--bad-rows", "be a share from 0 to below 1", arguments.bad_rows, "0.01 is one row of a hundred.")
    if arguments.bad_rows is not None and arguments.corpus is None:
        raise wrong("--bad-rows", "come with a corpus", "none", "The run's own passages were read with data.bad_rows.")
    if arguments.corpus is not None and not Path(arguments.corpus).exists():
        raise wrong("corpus", "be a file or folder", f'"{arguments.corpus}"', "Check its path.")

    out = Path(arguments.out) if arguments.out else folder / "index"
    make_folder("--out", out)

    from contrastile.train.retriever.search import encode_source

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
