"""`contrastile compare RECIPE [key=value ...]`: the same memory in four ways, the same loss in five, or batch sizes."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser(
        "compare", help="train many times: the same memory in four ways, the same loss in five, or several batch sizes"
    )
    parser.add_argument("recipe", help="a TOML file, such as recipes/glyphs.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="as for train")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--losses", action="store_true", help="one loss computed in five ways, on --ranks ranks")
    what.add_argument("--batches", type=int, nargs="+", metavar="SIZE", help="accuracy at these batch sizes")
    parser.add_argument(
        "--data", type=float, nargs="+", default=[1.0], metavar="SHARE", help="of --batches: such as 0.1 1"
    )
    parser.add_argument(
        "--rates", nargs="+", default=["fixed"], metavar="RULE", help="of --batches: fixed, sqrt and linear"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of a run of --losses (default: 2)")
    parser.add_argument("--jobs", type=int, default=1, help="runs of --losses and --batches at a time (default: 1)")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds each way is run with (default: 3)")
    parser.add_argument("--runs", default="runs", metavar="FOLDER", help="where the results go (default: runs)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the recipe before anything heavy is imported, then compare."""
    from contrastile.train.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.jobs > 1 and not arguments.losses and not arguments.batches:
        raise ValueError(
            f"`jobs` must be 1 where time is compared; got {arguments.jobs}. Runs side by side slow each other down."
        )

    from contrastile.train.compare import compare_recipe
    from contrastile.train.compare_batches import compare_batches
    from contrastile.train.compare_losses import compare_losses

    many = {"seeds": arguments.seeds, "jobs": arguments.jobs}
    if arguments.losses:
        comparison = compare_losses(recipe, arguments.runs, ranks=arguments.ranks, **many)
    elif arguments.batches:
        grid = {"batches": arguments.batches, "shares": arguments.data, "rates": arguments.rates}
        comparison = compare_batches(recipe, arguments.runs, **grid, **many)
    else:
        comparison = compare_recipe(recipe, arguments.runs, seeds=arguments.seeds)
    print(comparison.table)
    print(f"results: {comparison.folder}")
    return 0 if comparison.stopped_by is None else 128 + comparison.stopped_by
