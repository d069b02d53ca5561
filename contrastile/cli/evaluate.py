"""`contrastile evaluate RUN`: measure the saved weights again, print the table, write the report again.

Of a ranking in TREC's form, any system's, it prints the measures: `contrastile evaluate x.trec --judgements x.qrels`.
"""

from __future__ import annotations

import argparse
from typing import Any


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("evaluate", help="measure the saved weights of a run and write its report again")
    parser.add_argument("run", help="a run folder, such as runs/glyphs, or a file of rankings in TREC's form")
    parser.add_argument("--judgements", metavar="FILE", help="what is right, for rankings: TREC's or BEIR's qrels")
    parser.add_argument("--index", metavar="FOLDER", help="a retriever's: look among what `contrastile encode` wrote")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Load, evaluate, report."""
    if arguments.judgements is not None:
        return _measure(arguments.run, arguments.judgements)

    from contrastile.train.folder import RECIPE, finished_run
    from contrastile.train.recipe import load_any_recipe

    # a mistake is told before anything heavy is imported
    folder = finished_run(arguments.run)
    load_any_recipe(folder / RECIPE, files=False)

    from contrastile.train.loop import evaluate_run

    print(evaluate_run(folder.path, device=arguments.device, index=arguments.index))
    print(f"report: {folder / 'report.html'}")
    return 0


def _measure(rankings: str, judgements: str) -> int:
    from contrastile.evaluate.ranking import means, measure
    from contrastile.evaluate.trec import judged_of, read_judgements, read_run

    run, judged = read_run(rankings), read_judgements(judgements)
    print(f"{len(judged):,} judged queries, {judged_of(run, judged):,} of them answered")
    for name, value in means(measure(run, judged)).items():
        print(f"{name:<12}{value:.4f}")
    return 0
