"""`contrastile compare RECIPE [key=value ...]`: the same memory as small, accumulated, cached and scheduled batches."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("compare", help="spend the same memory in four ways, at equal examples and equal time")
    parser.add_argument("recipe", help="a TOML file, such as recipes/glyphs.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="as for train")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds each way is run with (default: 3)")
    parser.add_argument("--runs", default="runs", metavar="FOLDER", help="where the results go (default: runs)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the recipe before anything heavy is imported, then compare."""
    from contrastile.train.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)

    from contrastile.train.compare import compare_recipe

    comparison = compare_recipe(recipe, arguments.runs, seeds=arguments.seeds)
    print(comparison.table)
    print(f"results: {comparison.folder}")
    return 0 if comparison.stopped_by is None else 128 + comparison.stopped_by
