"""Runs a tutorial and writes it as a page: a script in the percent format becomes text, code, output and pictures.

python docs/site/tutorials.py                  # run all of them, into build/tutorials
python docs/site/tutorials.py docs/tutorials/clip.py

A cell begins with `# %%`, one of text with `# %% [markdown]`; jupytext turns such a script into a notebook. The site
takes the outputs of the last run, and runs a tutorial again whose code has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SCRIPTS, PAGES = ROOT / "docs" / "tutorials", ROOT / "build" / "tutorials"
OUTPUTS = "outputs.json"
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
    """Run the cells in a row in one namespace; write what each one prints and draws."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    outputs, start = [], time.monotonic()
    code = [cell for cell in cells(script.read_text(encoding="utf-8")) if not cell.markdown]
    for number, cell in enumerate(code):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (cell.line - 1) + cell.text, str(script), "exec"), names)
        pictures = [_picture(plt.figure(k), f"{script.stem}-{number}-{k}", folder) for k in plt.get_fignums()]
        plt.close("all")
        outputs.append({"printed": printed.getvalue().rstrip(), "pictures": pictures})
    seconds, cpu = round(time.monotonic() - start), round(sum(os.times()[:4]))
    result = {"digest": _digest(script), "seconds": seconds, "cpu_seconds": cpu, "outputs": outputs}
    (folder / OUTPUTS).write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"{script.stem}: {seconds} s, {cpu} s of one CPU core", file=sys.stderr)


def page(script: Path) -> str:
    """A tutorial as Markdown, with the outputs of its last run; it is run first where its code has changed since."""
    file = PAGES / script.stem / OUTPUTS
    if not file.exists() or json.loads(file.read_text(encoding="utf-8"))["digest"] != _digest(script):
        start(script)
    result = json.loads(file.read_text(encoding="utf-8"))
    parts, outputs = [], iter(result["outputs"])
    for cell in cells(script.read_text(encoding="utf-8")):
        if cell.markdown:
            parts.append(cell.text)
            continue
        output = next(outputs)
        parts.append(f"```py\n{cell.text}\n```")
        if output["printed"].strip():
            parts.append(f'```{{.text title="output"}}\n{output["printed"]}\n```')
        for name in output["pictures"]:
            schemes = (f"![A figure that this cell draws]({name}-{scheme}.png#only-{scheme})" for scheme in INK)
            parts.append("\n".join(schemes))
    place = script.relative_to(ROOT).as_posix()
    parts.append(
        f"---\n\nThis page is the script `{place}`, run in {result['seconds']} seconds ("
        f"{result['cpu_seconds']} of one CPU core). "
        f"`jupytext --to notebook {place}` makes a notebook of it."
    )
    return "\n\n".join(parts) + "\n"


def _picture(figure: Any, name: str, folder: Path) -> str:
    """Save a figure once for each scheme."""
    from matplotlib.text import Text

    for scheme, ink in INK.items():
        for text in figure.findobj(Text):
            text.set_color(ink)
        for axis in figure.axes:
            axis.patch.set_alpha(0)
            axis.tick_params(colors=ink)
            for spine in axis.spines.values():
                spine.set_color("#8a95a1")
        figure.savefig(folder / f"{name}-{scheme}.png", dpi=110, transparent=True, bbox_inches="tight")
    return name


def _digest(script: Path) -> str:
    """A checksum of the code; the text may change without another run."""
    code = "\0".join(cell.text for cell in cells(script.read_text(encoding="utf-8")) if not cell.markdown)
    return hashlib.sha256(code.encode()).hexdigest()


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
