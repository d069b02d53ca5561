"""`contrastile.load` and `contrastile.plan`: a finished run, ready to encode, and the cost of one that is to come.

Optional packages are imported by their calls, so that the library without extras has these names too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastile.train.folder import RECIPE, finished_run

if TYPE_CHECKING:
    from contrastile.planner.plan import Plan
    from contrastile.train.run import LoadedRun


def load(run: str | Path, *, device: str = "auto") -> LoadedRun:
    """The encoders and tokenizer of a finished run, ready to encode; nothing of the data is needed.

    Arguments:
        run: the run's folder.
        device: "auto" (the GPU where there is one), "cpu", "cuda" or "cuda:1".

    A run of images and texts has `encode_image` (of Pillow images) and `encode_text`; a retriever has
    `encode_query` and `encode_passage` (of texts). They return float32 rows [n, D] to be multiplied; a method of the
    other kind raises ValueError. Raises ValueError where the folder is no run, or its weights are not the bytes that
    the run wrote, and ModuleNotFoundError where the extra `train` is not installed.

    >>> run = load("runs/glyphs")                                                        # doctest: +SKIP
    >>> cosines = run.encode_image([picture]) @ run.encode_text(["digit one", "digit two"]).T    # doctest: +SKIP
    """
    folder = finished_run(run)
    with naming_the_extra():
        from contrastile.train.recipe import load_any_recipe
        from contrastile.train.retriever.run import load_retriever
        from contrastile.train.run import choose_device, load_towers
    recipe: Any = load_any_recipe(folder / RECIPE, files=False)
    return (load_towers if recipe.kind == "image-text" else load_retriever)(folder, recipe, choose_device(device))


def plan(
    recipe: Any, *overrides: str, gpus: str | None = None, batch: int | None = None, pairs: int | None = None
) -> Plan:
    """Plan a step of a recipe: bytes of every part on each rank, seconds, the largest batch, other choices.

    Runs on any machine; no weights are made or read, no data are opened.

    Arguments:
        recipe: a TOML file, or a recipe that was loaded. overrides: of its keys, such as "train.batch=64".
        gpus: the machines, such as "H200", "8xH100-80GB", or "32x8xH100-80GB" for 32 nodes of 8; by default this one.
        batch: pairs of all ranks in a step; by default the recipe's largest.
        pairs: of the training split, from which the length of a run in epochs follows.

    Returns a `Plan`: `peak` (its `bytes`, and `parts` by name), `fits`, `host`, `seconds` (None for a chip without a
    profile), `run_seconds`, `largest()`, `choices()`, `at(batch)`, and `values()` with all of it.
    Raises ValueError for a word of `gpus` that names no machine, and ModuleNotFoundError where the extra `train` is not
    installed.

    >>> step = plan("recipes/glyphs.toml", gpus="8xH100-80GB", batch=65_536)              # doctest: +SKIP
    >>> step.peak.bytes, step.seconds.total, step.largest()                                # doctest: +SKIP
    """
    with naming_the_extra():
        from contrastile.train.planned import planned
    return planned(recipe, overrides, gpus, batch, pairs)


@contextmanager
def naming_the_extra() -> Iterator[None]:
    """Import modules that need the extra `train`; an error names the package and the extra."""
    try:
        yield
    except ModuleNotFoundError as missing:
        message = f'`{missing.name}` is not installed; run: pip install "contrastile[train]"'
        raise ModuleNotFoundError(message, name=missing.name) from None
