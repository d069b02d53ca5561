"""`contrastile compare RECIPE [key=value ...]`: the same memory in four ways, the same loss in five, or batch sizes.

Of a retriever's recipe: the largest plain batch that fits into a memory, accumulated and cached ones, beside BM25.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contrastile.train.config import Recipe
    from contrastile.train.retriever.config import RetrieverRecipe
    from contrastile.train.trials import Comparison

# what belongs to one kind of recipe alone
OF_PICTURES, OF_RETRIEVERS = ("losses", "data", "rates", "ranks"), ("memory", "updates")
MEMORY, BATCHES = "1GiB", ("128", "512", "4096", "16384")


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser(
        "compare", help="train many times: the same memory in several ways, the same loss in five, or batch sizes"
    )
    parser.add_argument("recipe", help="a TOML file, such as recipes/glyphs.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="as for train")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--losses", action="store_true", default=None, help="one loss computed in five ways, on --ranks")
    what.add_argument(
        "--batches",
        nargs="+",
        metavar="SIZE",
        help="accuracy at these sizes; a retriever's: 128 512 4096 16k by default",
    )
    parser.add_argument("--data", type=float, nargs="+", metavar="SHARE", help="of --batches: such as 0.1 1")
    parser.add_argument("--rates", nargs="+", metavar="RULE", help="of --batches: fixed, sqrt and linear")
    parser.add_argument("--ranks", type=int, help="processes of a run of --losses (default: 2)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, but where time is compared (default: 1)")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds each way is run with (default: 3)")
    parser.add_argument(
        "--runs",
        default="runs",
        metavar="FOLDER",
        help="where the results go, made if missing (default: runs)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with what was interrupted, or with more seeds")
    parser.add_argument("--memory", metavar="BYTES", help="of a retriever: what a plain step may take (default: 1GiB)")
    parser.add_argument("--updates", nargs="+", metavar="SIZE", help="of a retriever: time updates of these sizes")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the recipe before anything heavy is imported, then compare."""
    from contrastile.train.config import Recipe
    from contrastile.train.folder import make_folder
    from contrastile.train.recipe import load_any_recipe

    _words(arguments)
    recipe = load_any_recipe(arguments.recipe, arguments.overrides)
    make_folder("--runs", arguments.runs)
    if isinstance(recipe, Recipe):
        _only(arguments, OF_RETRIEVERS, "a retriever")
        comparison = _pictures(recipe, arguments)
    else:
        _only(arguments, OF_PICTURES, "pictures and texts")
        comparison = _retriever(recipe, arguments)
    print(comparison.table)
    print(f"results: {comparison.folder}")
    if comparison.stopped_by is not None:
        print("to go on with it: the same command with --resume")
    return 0 if comparison.stopped_by is None else 128 + comparison.stopped_by


def _words(arguments: argparse.Namespace) -> None:
    """Raises ValueError where a word is none."""
    from contrastile._wrong import wrong

    spread = (2, "An interval needs a spread; five are usual.") if arguments.losses else (1, "Three show a spread.")
    for name, (least, why) in {
        "jobs": (1, "So many runs are made at a time."),
        "seeds": spread,
        "ranks": (2, "On one process there is nothing to exchange."),
    }.items():
        if (got := getattr(arguments, name)) is not None and got < least:
            raise wrong(f"--{name}", f"be at least {least}", got, why)
    for name in ("batches", "updates"):
        _sizes(name, getattr(arguments, name) or ())
    _sizes("memory", [arguments.memory or MEMORY])


def _only(arguments: argparse.Namespace, names: tuple[str, ...], kind: str) -> None:
    """Refuses what belongs to another kind of recipe."""
    from contrastile._wrong import wrong

    for name in names:
        if (got := getattr(arguments, name)) is not None:
            raise wrong(f"--{name}", "be left out for this recipe", got, f"It belongs to {kind}.")


def _pictures(recipe: Recipe, arguments: argparse.Namespace) -> Comparison:
    from contrastile._wrong import wrong

    for name, needed in (("data", "batches"), ("rates", "batches"), ("ranks", "losses")):
        if getattr(arguments, name) is not None and not getattr(arguments, needed):
            raise wrong(f"--{name}", f"come with --{needed}", f"no --{needed}", "It belongs to that comparison.")
    if arguments.jobs > 1 and not arguments.losses and not arguments.batches:
        remedy = "Runs side by side slow each other down."
        raise wrong("jobs", "be 1 where time is compared", arguments.jobs, remedy)

    from contrastile.train.asked import a_grid, large_and_small, one_set_of_data, set_itself

    # a mistake is told before anything heavy is imported
    one_set_of_data(recipe)
    sizes, shares = _sizes("batches", arguments.batches or ()), arguments.data or [1.0]
    rates = arguments.rates or ["fixed"]
    if arguments.batches:
        a_grid(sizes, shares, rates)
    elif not arguments.losses:
        large_and_small(recipe)
    comparison = "compare --losses" if arguments.losses else "compare --batches" if arguments.batches else "compare"
    set_itself(comparison, recipe, arguments.recipe, arguments.overrides)

    from contrastile.train.compare import compare_recipe
    from contrastile.train.compare_batches import compare_batches
    from contrastile.train.compare_losses import compare_losses

    many = {"seeds": arguments.seeds, "jobs": arguments.jobs, "resume": arguments.resume}
    if arguments.losses:
        ranks = 2 if arguments.ranks is None else arguments.ranks
        return compare_losses(recipe, arguments.runs, ranks=ranks, **many)
    if arguments.batches:
        return compare_batches(recipe, arguments.runs, batches=sizes, shares=shares, rates=rates, **many)
    return compare_recipe(recipe, arguments.runs, seeds=arguments.seeds, resume=arguments.resume)


def _retriever(recipe: RetrieverRecipe, arguments: argparse.Namespace) -> Comparison:
    from contrastile.cli.bench import number
    from contrastile.train.asked import rising_sizes, set_itself

    batches = _sizes("batches", arguments.batches or BATCHES)
    rising_sizes(batches)
    set_itself("compare of retrievers", recipe, arguments.recipe, arguments.overrides)

    from contrastile.train.retriever.compare import compare_retriever

    return compare_retriever(
        recipe,
        arguments.runs,
        memory=number("memory", arguments.memory or MEMORY),
        batches=batches,
        updates=_sizes("updates", arguments.updates or ()),
        seeds=arguments.seeds,
        jobs=arguments.jobs,
        resume=arguments.resume,
    )


def _sizes(name: str, texts: list[str] | tuple[str, ...]) -> list[int]:
    from contrastile.cli.bench import number

    return [number(name, text) for text in texts]
