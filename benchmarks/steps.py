"""Pairs per second of whole training steps: small plain batches beside large ones through the cache.

    python benchmarks/steps.py [recipe] [key=value ...]

A step includes augmentation, towers, loss and optimizer. Each round takes as many pairs in small steps as in one large
step, right before it, because a shared machine drifts; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import median

from contrastile.bench.harness import Machine
from contrastile.data.base import Batches
from contrastile.train.image_text import ImageText
from contrastile.train.loop import step
from contrastile.train.optim import build_optimizer
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_recipe

RECIPE = "recipes/glyphs.toml"
ROUNDS = 9
RETAIN = (0, 8, "auto")


def measure(path: str, words: list[str], retain: int | str) -> tuple[float, float, float]:
    """Return pairs per second at the schedule's first size, plain, and at its last with `retain`; and the ratio."""
    recipe = load_recipe(path, words)
    recipes = [recipe.model_copy(update={"train": recipe.train.model_copy(update={"retain": r})}) for r in (1, retain)]
    plain_job = ImageText.open(recipes[0])
    # one model, two ways to take its steps
    jobs = (plain_job, ImageText(replace(plain_job.run, recipe=recipes[1]), plain_job.bundle))
    optimizer, sizes = build_optimizer(plain_job.run.model, recipe.optim), []
    batches, machine = Batches(plain_job.rows, sizes=sizes, seed=0), Machine(plain_job.run.device)
    (small, large) = (recipe.train.batch[at][1] for at in (0, -1))

    def rate(way: int, size: int) -> float:
        def one() -> None:
            step(jobs[way], optimizer, jobs[way].parts(next(batches), len(sizes), ALONE))

        sizes.append(size)
        return size / machine.time(one)

    for way, size in ((0, small), (0, small), (1, large)):
        rate(way, size)
    rounds = [(median(rate(0, small) for _ in range(large // small)), rate(1, large)) for _ in range(ROUNDS)]
    plain, cached = (median(rates) for rates in zip(*rounds, strict=True))
    return plain, cached, median(cached / plain for plain, cached in rounds)


def main() -> None:
    words = sys.argv[1:]
    path = words.pop(0) if words and "=" not in words[0] else RECIPE
    print("| retain | plain | cached | ratio |\n|---|---|---|---|")
    for retain in RETAIN:
        plain, cached, ratio = measure(path, words, retain)
        print(f"| {retain} | {plain:,.0f} | {cached:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
