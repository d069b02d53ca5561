"""`contrastile doctor [RECIPE]`: what this machine has, what "auto" would choose here, and why."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_to(verbs: Any) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("doctor", help='what this machine has, and what "auto" would choose and why')
    parser.add_argument("recipe", nargs="?", help="a TOML file: also what it would use")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="as for train")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="for so many processes (default: 1)")
    parser.add_argument(
        "--batch", type=int, default=32_768, help="pairs of all ranks, without a recipe (default: 32768)"
    )
    parser.add_argument("--features", type=int, default=512, help="features, without a recipe (default: 512)")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Look, and say it; 1 where something is broken."""
    from contrastile._wrong import wrong

    for name in ("ranks", "batch", "features"):
        if getattr(arguments, name) < 1:
            raise wrong(f"--{name}", "be at least 1", getattr(arguments, name), "Leave it out for the default.")
    recipe = None
    if arguments.recipe is not None:
        from contrastile.train.recipe import load_any_recipe

        recipe = load_any_recipe(arguments.recipe, arguments.overrides)

    from contrastile.doctor import broken, examine, told

    found = examine(ranks=arguments.ranks, batch=arguments.batch, features=arguments.features, recipe=recipe)
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(told(found)))
    return 1 if broken(found) else 0
