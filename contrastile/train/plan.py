"""`contrastile.plan`: the memory and the time of a run on machines that need not be there.

Optional packages are imported when a plan is made, so that the library without extras has this name too.
"""

from typing import TYPE_CHECKING, Any

from contrastile.train.load import naming_the_extra

if TYPE_CHECKING:
    from contrastile.planner.plan import Plan


def plan(
    recipe: Any, *overrides: str, gpus: str | None = None, batch: int | None = None, pairs: int | None = None
) -> "Plan":
    """Plan a step of a recipe: bytes of every part on each rank, seconds, the largest batch, other choices.

    Runs on any machine; no weights are made or read, no data are opened.

    Arguments:
        recipe: a TOML file, a recipe of the package by its name, or one that was loaded. overrides: other values of its
            keys, such as "train.batch=64".
        gpus: the machines, such as "H200", "8xH100-80GB", or "32x8xH100-80GB" for 32 nodes of 8; by default this one.
        batch: pairs of all ranks in a step; by default the recipe's largest.
        pairs: the size of the training split, which gives the length of a run in epochs, and its batches where
            `train.epoch_steps` makes them smaller.

    Returns a `Plan`: `peak` (its `bytes`, and `parts` by name), `fits`, `host`, `seconds` (None for a chip without a
    profile), `run_seconds`, `largest()`, `choices()`, `at(batch)`, and `values()` with all of it.
    Raises ValueError for a word of `gpus` that names no machine, and ModuleNotFoundError where the extra `train` is not
    installed.

    >>> step = plan("glyphs", gpus="8xH100-80GB", batch=65_536)              # doctest: +SKIP
    >>> step.peak.bytes, step.seconds.total, step.largest()                  # doctest: +SKIP
    """
    with naming_the_extra():
        from contrastile.train.planned import planned
    return planned(recipe, overrides, gpus, batch, pairs)
