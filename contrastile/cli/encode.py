"""`contrastile encode RUN [CORPUS]`: write the features of passages to disk, for `contrastile search`."""

import argparse
import shlex
from contextlib import suppress
from pathlib import Path

from contrastile._errors import invalid, written_to
from contrastile.cli.options import add_device, at_least, check_bad_rows, check_path, check_source, finished_run_on
from contrastile.data.files import own_folder
from contrastile.train.folder import make_folder

SUMMARY = "turn texts or images into features with a run, to be searched"
EXAMPLE = "contrastile encode runs/docstrings"


def add_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    corpus = "a BEIR folder, .jsonl, .tsv, or a folder of code (default: the run's own); a folder of images"
    bad_rows = "unusable rows allowed in the corpus (default: the recipe's)"
    add("run", help="a run folder, such as runs/docstrings")
    add("corpus", nargs="?", help=corpus)
    add("--out", metavar="FOLDER", help="folder of the index, made if missing (default: RUN/index)")
    add("--shard", type=int, default=65_536, metavar="N", help="passages per file (default: 65536)")
    add("--dimensions", type=int, metavar="N", help="keep the first N features only")
    add("--bad-rows", type=float, metavar="SHARE", help=bad_rows)
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check the arguments before anything heavy is imported, then encode; finished shards are kept."""
    folder, recipe = finished_run_on(arguments.run, arguments.device)
    for name in ("shard", "dimensions"):
        at_least(name, getattr(arguments, name))
    check_bad_rows(arguments.bad_rows)
    if arguments.bad_rows is not None and arguments.corpus is None:
        remedy = "The run's own passages were read with data.bad_rows."
        raise invalid("--bad-rows", "come with a corpus", "none", remedy)
    if arguments.bad_rows is not None and recipe.kind == "image-text":
        remedy = "All images must be readable."
        raise invalid("--bad-rows", "be left out for a run of images and texts", arguments.bad_rows, remedy)
    check_source("corpus", arguments.corpus)
    check_path("--out", arguments.out)
    out = Path(arguments.out) if arguments.out else own_folder(folder / "index")
    is_new = not out.exists()
    make_folder("--out", out)

    from contrastile.retrieval.index import encode_source

    names = ("shard", "dimensions", "device", "bad_rows")
    try:
        with written_to(out):
            index = encode_source(folder, arguments.corpus, out, **{name: getattr(arguments, name) for name in names})
    except ValueError:
        if is_new:
            # removes an empty folder only
            with suppress(OSError):
                out.rmdir()
        raise
    each = "" if index.kind == "single" else " for each token"
    print(f"{len(index):,} {'passages' if index[0].text else 'images'} of {index.dimensions} features{each}: {out}")
    words = ["contrastile", "search", arguments.run, *(["--index", str(out)] if arguments.out else [])]
    print(f"to search them: {shlex.join(words)}")
    return 0
