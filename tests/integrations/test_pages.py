"""The whole scripts on the pages for other trainers, as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("sentence_transformers")

import lightning
from lightning_on_ranks import quiet
from sentences import build

import contrastile

FOLDER = Path(contrastile.__file__).parent.parent / "docs" / "coming_from"
# warnings of the libraries about themselves
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]


def run(page: str) -> None:
    """Run the last block of a page in the present folder."""
    block = re.findall(r"^```python\n(.*?)^```", (FOLDER / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[
        -1
    ]
    exec(compile(block, page, "exec"), {"__name__": "__main__"})


def test_lightnings_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []

    class Quiet:
        """A trainer that writes nothing, and keeps the loss of its one epoch."""

        def __init__(self, max_epochs: int) -> None:
            self.trainer = quiet(tmp_path, max_steps=-1, max_epochs=max_epochs)

        def fit(self, *arguments: object) -> None:
            self.trainer.fit(*arguments)
            losses.extend(float(self.trainer.callback_metrics[name]) for name in ("train_loss", "val_loss"))

    monkeypatch.setattr(lightning, "Trainer", Quiet)
    run("lightning.md")
    # of 256 pairs without a meaning
    assert all(4.0 < loss < 8.0 for loss in losses)
    assert len(losses) == 2


def test_sentence_transformers_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "parts").save_pretrained("my-model")
    run("sentence_transformers.md")
    assert (tmp_path / "runs" / "pairs" / "final" / "modules.json").exists()
