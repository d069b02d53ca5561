"""The figures of docs/architecture.md: sizes of the source by drawer, and the Python cost of one small call.

python benchmarks/house_figures.py              # prints the table
python benchmarks/house_figures.py --write      # and puts it into docs/architecture.md
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import contrastile
from contrastile import ClipLoss

SOURCE = Path(contrastile.__file__).parent
REPOSITORY = SOURCE.parent
PAGE = REPOSITORY / "docs" / "architecture.md"
BEGIN, END = "<!-- house_figures -->\n", "<!-- end -->"
# the house review of 2026-11-22: 16df0e6, before modules moved into drawers
BEFORE = {
    "the loss: root files, engine, losses, tiles, exchange": "44 / 7,230",
    "gradcache": "12 / 2,472",
    "distributed": "4 / 742",
    "train (with experiments)": "49 / 7,682",
    "retrieval (train/retriever)": "13 / 2,317",
    "data": "27 / 4,162",
    "bench": "13 / 2,522",
    "models, evaluate, cli, doctor": "32 / 3,768",
    "source, files / lines": "193 / 30,852",
    "tests, lines": "25,953",
    "classes / functions": "322 / 2,094",
    "lines of a file, median / longest": "148 / 419",
    "lines of a function, median / 90th percentile / longest": "6 / 19 / 92",
    "frames from `ClipLoss()(...)` to `torch.mm`": "11",
    "Python calls of a forward of 8 rows, and files": "194 in 18",
    "Python calls of forward and backward": "284",
}
DRAWERS = {
    "train": "train (with experiments)",
    "experiments": "train (with experiments)",
    "retrieval": "retrieval (train/retriever)",
    "gradcache": "gradcache",
    "distributed": "distributed",
    "data": "data",
    "bench": "bench",
    "models": "models, evaluate, cli, doctor",
    "evaluate": "models, evaluate, cli, doctor",
    "cli": "models, evaluate, cli, doctor",
    "doctor": "models, evaluate, cli, doctor",
    "planner": "models, evaluate, cli, doctor",
    "integrations": "integrations",
}
THE_LOSS = "the loss: root files, engine, losses, tiles, exchange"


def drawer(path: Path) -> str:
    """The row of the table that a source file counts for."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return DRAWERS["retrieval"] if parts[:2] == ("train", "retriever") else DRAWERS.get(parts[0], THE_LOSS)


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def function_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and name of each function of a file, its signature and docstring included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node.end_lineno - node.lineno + 1, node.name


def sizes() -> dict[str, str]:
    files = sorted(SOURCE.rglob("*.py"))
    table: dict[str, tuple[int, int]] = {}
    for path in files:
        count, total = table.get(drawer(path), (0, 0))
        table[drawer(path)] = count + 1, total + lines(path)
    functions = sorted((*found, path) for path in files for found in function_lines(path))
    trees = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    longest_file = max(files, key=lines)
    length, name, path = functions[-1]
    return {
        **{name: f"{count} / {total:,}" for name, (count, total) in table.items()},
        "source, files / lines": f"{len(files)} / {sum(map(lines, files)):,}",
        "tests, lines": f"{sum(map(lines, (REPOSITORY / 'tests').glob('*.py'))):,}",
        "classes / functions": f"{sum(isinstance(node, ast.ClassDef) for node in trees)} / {len(functions):,}",
        "lines of a file, median / longest": (
            f"{statistics.median(map(lines, files)):.0f} / {lines(longest_file)} "
            f"(`{longest_file.relative_to(SOURCE).as_posix()}`)"
        ),
        "lines of a function, median / 90th percentile / longest": (
            f"{functions[len(functions) // 2][0]} / {functions[len(functions) * 9 // 10][0]} / {length} "
            f"(`{name}` of `{path.relative_to(SOURCE).as_posix()}`)"
        ),
    }


def inputs() -> list[torch.Tensor]:
    q, k = F.normalize(torch.randn(2, 8, 16), dim=-1)
    return [q.requires_grad_(), k.requires_grad_(), torch.tensor(10.0, requires_grad=True)]


def calls(run: Callable[[], object]) -> list[str]:
    """The files of this package's Python calls while `run` runs, one entry for each call."""
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

    torch.mm = mm
    try:
        ClipLoss()(*inputs())
    finally:
        torch.mm = product
    return max(frames)


def costs() -> dict[str, str]:
    """The Python calls of the second of two equal steps: the first one plans."""
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


def table() -> str:
    after = {**sizes(), **costs()}
    rows = [f"| {name} | {BEFORE.get(name, '')} | {after.get(name, '')} |" for name in {**BEFORE, **after}]
    return "\n".join(["| | before | after |", "|---|---|---|", *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table of docs/architecture.md")
    printed, wanted = table(), parser.parse_args()
    print(printed, end="")
    if wanted.write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}{printed}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
