"""The figures of docs/architecture.md: sizes of the source by drawer, and the Python cost of one small call.

python benchmarks/house_figures.py              # prints the table
python benchmarks/house_figures.py --write      # and puts it into docs/architecture.md, whose column "before" stays
"""

import argparse
import ast
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

import contrastile
from contrastile import ClipLoss

SOURCE = Path(contrastile.__file__).parent
PAGE = SOURCE.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- house_figures -->\n", "<!-- end -->"
# rows of several drawers, and of one that was part of another; all other files count for the loss
DRAWERS = {
    "train (with experiments)": ("train", "experiments"),
    "retrieval (train/retriever)": ("retrieval", "train/retriever"),
    **{name: (name,) for name in ("gradcache", "distributed", "data", "bench", "planner", "integrations")},
    "models, evaluate, cli, doctor": ("models", "evaluate", "cli"),
}
THE_LOSS = "the loss: root files, engine, losses, tiles, exchange"


def drawer(path: Path) -> str:
    """Return the row of the table that a source file counts for: that of the innermost folder that is named."""
    rows = {folder: row for row, several in DRAWERS.items() for folder in several}
    folders = (folder.as_posix() for folder in path.relative_to(SOURCE).parents)
    return next((rows[folder] for folder in folders if folder in rows), THE_LOSS)


def sizes() -> dict[str, str]:
    """Count files, lines, classes and functions; the lines of a function include its signature and docstring."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    lines = {path: text.count("\n") for path, text in texts.items()}
    tests = sum(path.read_text(encoding="utf-8").count("\n") for path in (SOURCE.parent / "tests").glob("*.py"))
    nodes = [(node, path) for path, text in texts.items() for node in ast.walk(ast.parse(text))]
    functions = sorted(
        (node.end_lineno - node.lineno + 1, f"`{node.name}` of `{path.relative_to(SOURCE).as_posix()}`")
        for node, path in nodes
        if isinstance(node, ast.FunctionDef)
    )
    longest, middle = max(lines, key=lines.__getitem__), functions[len(functions) // 2][0]
    rows: dict[str, list[int]] = {}
    for path, count in lines.items():
        rows.setdefault(drawer(path), []).append(count)
    return {
        **{name: f"{len(counts)} / {sum(counts):,}" for name, counts in rows.items()},
        "source, files / lines": f"{len(lines)} / {sum(lines.values()):,}",
        "tests, lines": f"{tests:,}",
        "classes / functions": f"{sum(isinstance(node, ast.ClassDef) for node, _ in nodes)} / {len(functions):,}",
        "lines of a file, median / longest": (
            f"{statistics.median(lines.values()):.0f} / {lines[longest]} (`{longest.relative_to(SOURCE).as_posix()}`)"
        ),
        "lines of a function, median / 90th percentile / longest": (
            f"{middle} / {functions[len(functions) * 9 // 10][0]} / {functions[-1][0]} ({functions[-1][1]})"
        ),
    }


def inputs(n: int = 8, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    q, k = F.normalize(torch.randn(2, n, 16, dtype=dtype), dim=-1)
    return [q.requires_grad_(), k.requires_grad_(), torch.tensor(10.0, dtype=dtype, requires_grad=True)]


def calls(run: Callable[[], object]) -> list[str]:
    """Return the files of this package's Python calls while `run` runs, one entry for each call."""
    files: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files


def frames_to_the_product() -> int:
    product, frames = torch.mm, [0]

    def mm(*arguments: Any, **named: Any) -> torch.Tensor:
        frames.append(sum(frame.filename.startswith(str(SOURCE)) for frame in traceback.extract_stack()))
        return product(*arguments, **named)

    with patch.object(torch, "mm", mm):
        ClipLoss()(*inputs())
    return max(frames)


def costs() -> dict[str, str]:
    """Count the Python calls of the second of two equal steps: the first one plans."""
    loss, tensors = ClipLoss(), inputs()
    loss(*tensors).backward()
    values: list[torch.Tensor] = []
    forward = calls(lambda: values.append(loss(*tensors)))
    backward = calls(lambda: values[0].backward())
    return {
        "frames from `ClipLoss()(...)` to `torch.mm`": str(frames_to_the_product()),
        "Python calls of a forward of 8 rows, and files": f"{len(forward)} in {len(set(forward))}",
        "Python calls of forward and backward": str(len(forward) + len(backward)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table of docs/architecture.md")
    write = parser.parse_args().write
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, tail = rest.partition(END)
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in old.splitlines()[2:]]
    before, after = {name: value for name, value, _ in cells}, {**sizes(), **costs()}
    rows = [f"| {name} | {before.get(name, '')} | {after.get(name, '')} |" for name in {**before, **after}]
    table = "\n".join(["| | before | after |", "|---|---|---|", *rows, ""])
    print(table, end="")
    if write:
        PAGE.write_text(f"{head}{BEGIN}{table}{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
