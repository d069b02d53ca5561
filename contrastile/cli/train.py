"""`contrastile train RECIPE [key=value ...]`: train, evaluate, write the report."""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from contrastile.cli.options import OVERRIDES, RECIPE, needs

SUMMARY = "train what a recipe describes, evaluate it and write its report"
EXAMPLE = "contrastile train glyphs"


def add_to(parser: argparse.ArgumentParser) -> None:
    add, runs = parser.add_argument, "parent of the run folders, made if missing (default: runs)"
    add("recipe", help=RECIPE)
    add("overrides", **OVERRIDES, help="such as train.minutes=2 or loss.kind=siglip")
    add("--runs", default="runs", metavar="FOLDER", help=runs)
    add("--resume", action="store_true", help="continue the interrupted run of that name; begin it where there is none")


def run(arguments: argparse.Namespace) -> int:
    """Check the recipe before anything heavy is imported, then train."""
    from contrastile.train.folder import METRICS, RECIPE, make_folder
    from contrastile.train.recipe import load_any_recipe

    folder, overrides = Path(arguments.recipe).absolute().parent, arguments.overrides
    if arguments.resume and (folder / METRICS).is_file():
        # the folder may have been renamed since the run began
        overrides = [f"name={folder.name}", *overrides]
    recipe: Any = load_any_recipe(arguments.recipe, overrides)
    digits = recipe.kind == "image-text" and recipe.data.source == "glyphs" and recipe.evaluate.digits
    bar = sys.stderr is not None and sys.stderr.isatty()
    needs("matplotlib", "jinja2", *["sklearn"] * digits, *["tqdm"] * bar)
    if os.environ.get("RANK", "0") == "0":
        make_folder("--runs", arguments.runs)

    from contrastile.train.loop import run_recipe

    outcome = run_recipe(recipe, arguments.runs, resume=arguments.resume)
    if outcome.folder is None:
        # rank 0 reports the end; the launcher would stop it if another rank had a nonzero exit code first
        return 0
    if outcome.stopped_by is not None:
        print(f"stopped after {outcome.examples:,} {outcome.unit}; what was learned is in {outcome.folder}")
        again = ["contrastile", "train", str(outcome.folder / RECIPE), "--runs", arguments.runs, "--resume"]
        print(f"to go on with it: the same command with --resume, or {shlex.join(again)}")
        print(f"to evaluate it: {shlex.join(['contrastile', 'evaluate', str(outcome.folder)])}")
        return 128 + outcome.stopped_by
    print(outcome.table)
    print(f"report: {outcome.folder / 'report.html'}")
    return 0
