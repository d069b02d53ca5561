"""Pairs per second of whole training steps: small batches in the plain way beside large ones through the cache.

    python benchmarks/steps.py [recipe] [key=value ...]

Everything that a step does is in: augmentation, towers, loss, optimizer. Each round takes as many pairs in small steps
as in a large one, right before it, because a shared machine is faster now and slower then; the ratio is the median of
the rounds' ratios.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from statistics import median

from contrastile.data.batches import Batches
from contrastile.train.image_text import ImageText
from contrastile.train.loop import step
from contrastile.train.optim import build_optimizer
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_recipe

RECIPE = "recipes/glyphs.toml"
ROUNDS = 9
WAYS = (0, 8, "auto")


def measure(path: str, words: list[str], retain: int | str) -> tuple[float, float, float]:
    """Pairs per second of the schedule's first size, plain, and of its last with `retain` graphs kept; the ratio."""
    recipe = load_recipe(path, words)
    ways = [
        recipe.model_copy(update={"train": recipe.train.model_copy(update={"retain": kept})}) for kept in (1, retain)
    ]
    first = ImageText.open(ways[0])
    # one model, two ways to take its steps
    jobs = (first, ImageText(replace(first.run, recipe=ways[1]), first.materials))
    optimizer, sizes = build_optimizer(first.run.model, recipe.optim), []
    batches = Batches(first.rows, sizes=sizes, seed=0)
    (small, large) = (recipe.train.batch[place][1] for place in (0, -1))

    def one(way: int, size: int) -> float:
        sizes.append(size)
        began = time.perf_counter()
        step(jobs[way], optimizer, jobs[way].parts(next(batches), len(sizes), ALONE))
        return size / (time.perf_counter() - began)

    for way, size in ((0, small), (0, small), (1, large)):
        one(way, size)
    rounds = []
    for _ in range(ROUNDS):
        plain = median(one(0, small) for _ in range(large // small))
        rounds.append((plain, one(1, large)))
    plain, cached = (median(speeds) for speeds in zip(*rounds, strict=True))
    return plain, cached, median(cached / plain for plain, cached in rounds)


def main() -> None:
    """The table."""
    words = sys.argv[1:]
    path = words.pop(0) if words and "=" not in words[0] else RECIPE
    print("| retain | plain | cached | ratio |\n|---|---|---|---|")
    for retain in WAYS:
        plain, cached, ratio = measure(path, words, retain)
        print(f"| {retain} | {plain:,.0f} | {cached:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
