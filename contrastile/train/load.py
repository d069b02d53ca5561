"""`contrastile.load`: a finished run of either job, ready to encode.

Beside the two checkpoints: it reads what kind of run a folder holds and asks the right one. What a run needs beyond
torch is imported when one is loaded, so that the library alone has this name too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from contrastile.train.folder import RECIPE, finished_run

if TYPE_CHECKING:
    from contrastile.train.checkpoint import Run
    from contrastile.train.retriever.run import RetrieverRun


def load(run: str | Path, *, device: str = "auto") -> Run | RetrieverRun:
    """The encoders and tokenizer of a finished run, ready to encode; nothing of the data is needed.

    Arguments:
        run: the run's folder.
        device: "auto" (the GPU where there is one), "cpu", "cuda" or "cuda:1".

    Returns, of a run of pictures and texts, `encode_image` (of Pillow pictures) and `encode_text`; of a retriever
    `encode_query` and `encode_passage` (all of texts). They give float32 rows [n, D] to be multiplied. Raises
    ValueError where the folder is no run, or its weights are not the bytes that the run wrote, and ModuleNotFoundError
    where the extra `train` is not installed.

    >>> run = load("runs/glyphs")                                                        # doctest: +SKIP
    >>> cosines = run.encode_image([picture]) @ run.encode_text(["digit one", "digit two"]).T    # doctest: +SKIP
    """
    folder = finished_run(run)
    try:
        from contrastile.train import checkpoint
        from contrastile.train.config import Recipe
        from contrastile.train.recipe import load_any_recipe
        from contrastile.train.retriever.run import load_retriever
    except ModuleNotFoundError as missing:
        told = f'`{missing.name}` is not installed; run: pip install "contrastile[train]"'
        raise ModuleNotFoundError(told, name=missing.name) from None
    recipe = load_any_recipe(folder / RECIPE, files=False)
    return (checkpoint.load if isinstance(recipe, Recipe) else load_retriever)(run, device=device)
