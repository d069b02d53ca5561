"""Runs a tutorial and writes it as a page: a script in the percent format becomes text, code, output and pictures.

python docs/site/tutorials.py                  # run all of them, into build/tutorials
python docs/site/tutorials.py docs/tutorials/clip.py

A cell begins with `# %%`, one of text with `# %% [markdown]`; jupytext turns such a script into a notebook. The site
takes the pages of the last run, and runs a tutorial again whose script has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SCRIPTS, PAGES = ROOT / "docs" / "tutorials", ROOT / "build" / "tutorials"
# text and lines of a plot in each scheme of the site
INK = {"light": "#26303a", "dark": "#dde3ea"}


class Cell(NamedTuple):
    """A cell: text or code, and the line at which it begins."""

    markdown: bool
    text: str
    line: int


def cells(script: str) -> list[Cell]:
    """The cells of a script in the percent format."""
    found: list[Cell] = []
    lines = script.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("# %%")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        body = lines[start + 1 : end]
        markdown = "[markdown]" in lines[start]
        if markdown:
            body = [line.removeprefix("#").removeprefix(" ") for line in body]
        found.append(Cell(markdown, "\n".join(body).strip("\n"), start + 2))
    return found


def run(script: Path, folder: Path) -> None:
    """Run the cells in a row in one namespace; write `page.md` and the pictures."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    text = script.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    parts, start = [], time.monotonic()
    for number, cell in enumerate(cells(text)):
        if cell.markdown:
            parts.append(cell.text)
            continue
        parts.append(f"```py\n{cell.text}\n```")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("\n" * (cell.line - 1) + cell.text, str(script), "exec"), names)
        if output.getvalue().strip():
            parts.append(f'```{{.text .output title="output"}}\n{output.getvalue().rstrip()}\n```')
        for k in plt.get_fignums():
            parts.append(_picture(plt.figure(k), f"{script.stem}-{number}-{k}", folder))
        plt.close("all")
    seconds = time.monotonic() - start
    place = script.relative_to(ROOT).as_posix()
    parts.append(
        f"---\n\nThis page is the script `{place}`, run in {seconds:.0f} seconds on "
        f"{os.cpu_count()} CPU cores. `jupytext --to notebook {place}` makes a notebook of it."
    )
    (folder / "page.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (folder / "digest").write_text(_digest(text), encoding="utf-8")
    print(f"{script.stem}: {seconds:.0f} s", file=sys.stderr)


def _picture(figure: Any, name: str, folder: Path) -> str:
    """Save a figure once for each scheme."""
    lines = []
    for scheme, ink in INK.items():
        for axis in figure.axes:
            axis.patch.set_alpha(0)
            axis.tick_params(colors=ink)
            legend = axis.get_legend()
            for item in (axis.xaxis.label, axis.yaxis.label, axis.title, *(legend.get_texts() if legend else ())):
                item.set_color(ink)
            for spine in axis.spines.values():
                spine.set_color("#8a95a1")
        figure.savefig(folder / f"{name}-{scheme}.png", dpi=110, transparent=True, bbox_inches="tight")
        lines.append(f"![A figure that this cell draws]({name}-{scheme}.png#only-{scheme})")
    return "\n".join(lines)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def page(script: Path) -> Path:
    """The folder with a tutorial's page; it is run first where the script has changed since."""
    folder = PAGES / script.stem
    digest = folder / "digest"
    if not digest.exists() or digest.read_text(encoding="utf-8") != _digest(script.read_text(encoding="utf-8")):
        start(script)
    return folder


def start(script: Path) -> None:
    """Run a tutorial in a process and a folder of its own."""
    folder = PAGES / script.stem
    (folder / "work").mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "agg", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--here", str(script), str(folder)]
    subprocess.run(command, cwd=folder / "work", env=environment, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        run(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        for script in [Path(name).resolve() for name in sys.argv[1:]] or sorted(SCRIPTS.glob("*.py")):
            start(script)
