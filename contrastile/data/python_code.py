"""Functions of Python files, parsed and never imported.

Stands below `docstrings.py`, which makes queries of their docstrings, and `passages.py`, which makes a corpus of them.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

# folders of tests, and of packages that are not Python's own
LEFT_OUT = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# a larger file was not written by hand
MOST_BYTES = 4_000_000

Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_files(root: Path) -> list[Path]:
    """The Python files under `root` without tests, in order; a file stands for itself."""
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))


def parse_functions(path: Path, module: str) -> Iterator[tuple[str, Function, str]]:
    """Every function of a file with a body: its full name, its node, its code without docstring.

    A file that is no Python, or larger than `MOST_BYTES`, has none.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            return
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    # ast counts lines like this: a form feed ends none
    lines = re.split(r"\r\n|\r|\n", text)
    waiting: list[tuple[str, ast.AST]] = [(module, tree)]
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, Function) and (code := _code(node, lines)):
            yield name, node, code
        waiting.extend((f"{name}.{child.name}", child) for child in reversed(_inside(node)))


def _inside(node: ast.AST) -> list[Function | ast.ClassDef]:
    """The functions and classes of a node's body, also under an `if` or a `try`."""
    inside: list[Function | ast.ClassDef] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            inside.append(child)
        elif isinstance(child, ast.stmt | ast.excepthandler):
            inside.extend(_inside(child))
    return inside


def _code(node: Function, lines: Sequence[str]) -> str:
    """The source from `def` on, without the docstring; empty for a function with nothing but a docstring."""
    first = node.body[0]
    start, end = node.lineno - 1, node.end_lineno or node.lineno
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return textwrap.dedent("\n".join(lines[start:end])).strip()
    after = first.end_lineno or first.lineno
    if len(node.body) == 1 or first.lineno == node.lineno or node.body[1].lineno == after:
        return ""
    return textwrap.dedent("\n".join([*lines[start : first.lineno - 1], *lines[after:end]])).strip()
