"""`contrastile evaluate RUN`: measure the saved weights again, print the table, write the report again."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("evaluate", help="measure the saved weights of a run and write its report again")
    parser.add_argument("run", help="a run folder, such as runs/glyphs")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Load, evaluate, report."""
    from contrastile.train.folder import finished_run

    folder = finished_run(arguments.run).path

    from contrastile.train.loop import evaluate_run

    print(evaluate_run(folder, device=arguments.device))
    print(f"report: {folder / 'report.html'}")
    return 0
