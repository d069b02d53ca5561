"""`contrastile compare RECIPE [key=value ...]`: many trainings of one recipe, and tables of their results.

Pairs: one memory spent in four ways, one loss in five, or accuracy against batch size. Retrievers: one memory spent in
plain, accumulated and cached batches, beside BM25. Both: ways of one's own, such as several losses.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from contrastile._errors import invalid
from contrastile.cli.options import OVERRIDES, RECIPE, at_least, flag, needs, number

if TYPE_CHECKING:
    from contrastile.experiments.sweep import Study

MEMORY, BATCHES, SEEDS, JOBS = 2**30, [128, 512, 4096, 16384], 3, 1
# options that choose a comparison, its trials and how many run at a time; those of one kind of recipe only
OF_COMPARISON = ("losses", "ways", "batches", "data", "rates", "ranks", "seeds", "jobs", "memory", "updates")
OF_PAIRS, OF_RETRIEVERS = ("losses", "data", "rates", "ranks"), ("memory", "updates")

SUMMARY = "train many times for one table: batch sizes, losses, ways to use one memory"
EXAMPLE = "contrastile compare glyphs train.examples=100_000"


def add_to(parser: argparse.ArgumentParser) -> None:
    sizes = "accuracy at these sizes; a retriever's: 128 512 4096 16k by default"
    add, kind = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("recipe", help=RECIPE)
    add("overrides", **OVERRIDES, help="as for train")
    kind("--losses", action="store_true", default=None, help="one loss computed in five ways, on --ranks")
    kind("--ways", metavar="FILE", help="a TOML table of ways, each with its overrides, for equal time")
    kind("--batches", nargs="+", metavar="SIZE", help=sizes)
    add("--data", type=float, nargs="+", metavar="SHARE", help="with --batches: shares of the data, such as 0.1 1")
    add("--rates", nargs="+", metavar="RULE", help="with --batches: rules of the learning rate, fixed, sqrt or linear")
    add("--ranks", type=int, help="processes of a run of --losses (default: 2)")
    add("--jobs", type=int, default=JOBS, help="runs at a time, except where time is compared (default: 1)")
    add("--seeds", type=int, default=SEEDS, help="seeds of each way (default: 3)")
    add("--runs", default="runs", metavar="FOLDER", help="where the results go, made if missing (default: runs)")
    add("--resume", action="store_true", help="go on with what was interrupted, or with more seeds")
    add("--memory", metavar="BYTES", help="for a retriever: what a plain step may take (default: 1GiB)")
    add("--updates", nargs="+", metavar="SIZE", help="for a retriever: time updates of these sizes")


def run(arguments: argparse.Namespace) -> int:
    """Check the arguments before anything heavy is imported, then compare."""
    from contrastile.train.config import Recipe
    from contrastile.train.folder import make_folder
    from contrastile.train.recipe import load_any_recipe

    texts = {"batches": arguments.batches, "updates": arguments.updates, "memory": [arguments.memory or str(MEMORY)]}
    sizes = {name: [number(name, text) for text in some or []] for name, some in texts.items()}
    recipe = load_any_recipe(arguments.recipe, arguments.overrides)
    pairs = isinstance(recipe, Recipe)
    _check(arguments, pairs=pairs)
    needs("matplotlib")
    make_folder("--runs", arguments.runs)
    study = (_of_ways if arguments.ways else _of_pairs if pairs else _of_retrievers)(recipe, arguments, sizes)

    from contrastile.experiments.sweep import compare

    study = replace(study, options=tuple(_options(arguments)))
    comparison = compare(study, arguments.runs, resume=arguments.resume)
    print(comparison.table)
    print(f"results: {comparison.folder}")
    if comparison.stopped_by is None:
        return 0
    print("to go on with it: the same command with --resume")
    return 128 + comparison.stopped_by


def _check(arguments: argparse.Namespace, *, pairs: bool) -> None:
    """Refuse options of another kind of recipe or comparison, and numbers that are too small."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    refused, owner = (OF_RETRIEVERS, "a retriever") if pairs else (OF_PAIRS, "images and texts")
    for name in refused:
        if name in given:
            got = f"--{name}" if given[name] is True else given[name]
            raise invalid(f"--{name}", "be left out for this recipe", got, f"It belongs to {owner}.")
    for name, needed in (("data", "batches"), ("rates", "batches"), ("ranks", "losses")):
        if name in given and needed not in given:
            raise invalid(f"--{name}", f"come with --{needed}", f"no --{needed}", "It belongs to that comparison.")
    at_least("jobs", arguments.jobs, 1, "So many runs are made at a time.")
    fewest = (2, "An interval needs a spread; five are usual.") if arguments.losses else (1, "Three show a spread.")
    at_least("seeds", arguments.seeds, *fewest)
    at_least("ranks", arguments.ranks, 2, "On one process there is nothing to exchange.")
    if pairs and arguments.jobs > 1 and not given.keys() & {"losses", "batches", "ways"}:
        raise invalid("jobs", "be 1 where time is compared", arguments.jobs, "Runs side by side slow each other down.")


def _options(arguments: argparse.Namespace) -> Iterator[str]:
    """The options that choose a comparison, its trials and how many run at a time, as they were written."""
    for name in OF_COMPARISON:
        value = getattr(arguments, name)
        if value is not None and (name, value) not in [("seeds", SEEDS), ("jobs", JOBS)]:
            yield flag(name)
            yield from () if value is True else map(str, value if isinstance(value, list) else [value])


def _of_ways(recipe: Any, arguments: argparse.Namespace, _: dict[str, list[int]]) -> "Study":
    from contrastile.experiments.arguments import read_ways, report_overrides

    report_overrides("compare --ways", recipe, arguments.recipe, arguments.overrides)
    recipes = read_ways(arguments.ways, arguments.recipe, arguments.overrides)

    from contrastile.experiments.studies import Ways

    return Ways(recipe=recipe, seeds=arguments.seeds, jobs=arguments.jobs, recipes=recipes)


def _of_pairs(recipe: Any, arguments: argparse.Namespace, sizes: dict[str, list[int]]) -> "Study":
    from contrastile.experiments.arguments import RATES, large_and_small, report_overrides

    kind = "--losses" if arguments.losses else "--batches" if arguments.batches else ""
    if recipe.data.copies > 1:
        rule = "be 1 for a comparison, whose seeds share their data"
        raise invalid("data.copies", rule, recipe.data.copies, "Images are bent anew in every run without it.")
    shares, rates = arguments.data or [1.0], arguments.rates or ["fixed"]
    if not kind:
        large_and_small(recipe)
    if kind == "--batches" and min(sizes["batches"]) < 2:
        raise invalid("batches", "be sizes of at least 2", sizes["batches"], "Such as 256 1024 4096.")
    if not all(0 < share <= 1 for share in shares):
        raise invalid("data", "be shares above 0, up to 1", shares, "Such as 0.1 0.3 1.0.")
    if not RATES.keys() >= set(rates):
        raise invalid("rates", f"be among {', '.join(RATES)}", rates, "Such as fixed sqrt.")
    report_overrides(f"compare {kind}".strip(), recipe, arguments.recipe, arguments.overrides)

    from contrastile.experiments.studies import BatchSizes, FourWays, Losses

    common: dict[str, Any] = {"recipe": recipe, "seeds": arguments.seeds, "jobs": arguments.jobs}
    if kind == "--losses":
        return Losses(**common, ranks=arguments.ranks or 2)
    return BatchSizes(**common, batches=sizes["batches"], shares=shares, rates=rates) if kind else FourWays(**common)


def _of_retrievers(recipe: Any, arguments: argparse.Namespace, sizes: dict[str, list[int]]) -> "Study":
    from contrastile.experiments.arguments import report_overrides

    batches, memory = sizes["batches"] or BATCHES, sizes["memory"][0]
    if min(batches) < 2 or batches != sorted(set(batches)):
        raise invalid("batches", "be rising sizes of at least 2", batches, "Such as 128 512 4096.")
    report_overrides("compare of retrievers", recipe, arguments.recipe, arguments.overrides)

    from contrastile.experiments.retriever_memory import RetrieverMemory, limit_loss

    common: dict[str, Any] = {"recipe": limit_loss(recipe, memory), "seeds": arguments.seeds, "jobs": arguments.jobs}
    return RetrieverMemory(**common, memory=memory, batches=batches, sizes=sizes["updates"])
