"""`contrastile.load`: a finished run of either kind, ready to encode.

Optional packages are imported when a run is loaded, so that the library without extras has this name too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastile._errors import extra, invalid
from contrastile.train.folder import RECIPE, finished_run

if TYPE_CHECKING:
    from contrastile.train.run import LoadedRun


def load(run: str | Path, *, device: str = "auto") -> "LoadedRun":
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
        from contrastile.train.config.base import DEVICE, DEVICE_RULE
        from contrastile.train.recipe import load_any_recipe
        from contrastile.train.run import choose_device
    if not DEVICE.fullmatch(str(device)):
        raise invalid("device", DEVICE_RULE, repr(device), "Leave it out for the best device of the machine.")
    recipe: Any = load_any_recipe(folder / RECIPE, files=False)
    return class_of(recipe).saved(folder, recipe, choose_device(device))


def class_of(recipe: Any) -> "type[LoadedRun]":
    with naming_the_extra():
        from contrastile.train.retriever.run import RetrieverRun
        from contrastile.train.run import Run
    return Run if recipe.kind == "image-text" else RetrieverRun


@contextmanager
def naming_the_extra() -> Iterator[None]:
    """Import modules that need the extra `train`; an error names the package and the extra."""
    try:
        yield
    except ModuleNotFoundError as missing:
        message = f"`{missing.name}` is not installed; run: pip install {extra('train')}"
        raise ModuleNotFoundError(message, name=missing.name) from None
