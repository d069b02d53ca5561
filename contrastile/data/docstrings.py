"""The built-in texts: functions of the Python that runs this, each asked for by what its docstring says first.

A source of the flow's first box. Nothing is downloaded and nothing is imported: the files of Python's library and of
installed packages are parsed where they lie. The query is the docstring's first paragraph, of five words or more; the
passage is the function's source without docstring and decorators. What is written twice, code or paragraph, is taken
once: a second copy would be a right answer that counts as wrong.

**Splits.** "packages": every function of some whole packages (`email`, `scipy.optimize`: two names at most), drawn by
lot of their names. "functions": of the others a share drawn by lot of their own names. Both are searched among all
passages. The versions of everything are in the cache's manifest, and the set's `digest` tells whether two machines have
the same. Where a file lies elsewhere or was written since, all are harvested again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import platform
import re
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contrastile._check import wrong
from contrastile.data.bm25 import with_mined_negatives
from contrastile.data.cache import cached_folder
from contrastile.data.pairs import Indices, ProgressFactory, lot
from contrastile.data.texts import FILES, Passage, Query, TextSet, read_texts, sorted_rows, write_texts

# raised whenever what is harvested changes
HARVEST = 1
PACKAGES = ("numpy", "scipy", "torch")
# a first paragraph has so many words of two letters or more
LEAST_WORDS = 5
# a docstring's first paragraph is cut here; few are longer
MOST_LETTERS = 600
# folders that test code, or hold what is not Python's own
LEFT_OUT = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SOURCE_BYTES = 4_000_000

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """One function: its full name, its package, its docstring's first paragraph, its code, and where it stands."""

    name: str
    package: str
    summary: str
    code: str
    source: str


def open_docstrings(
    *, packages: Sequence[str], held_out: float, mined: int, cache: Path, progress: ProgressFactory
) -> TextSet:
    """Functions of Python's library and of `packages`, harvested once into a folder under `cache`."""
    roots = [(library_folder(), ""), *((package_folder(name), f"{name}.") for name in packages)]
    settings = {
        "harvest": HARVEST,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "files": written_files(roots),
        "held_out": held_out,
        "mined": mined,
    }

    def make(folder: Path) -> None:
        found, skipped = distinct(harvest(roots, progress))
        texts = as_texts(found, skipped, held_out)
        write_texts(folder, with_mined_negatives(texts, mined, progress=progress) if mined else texts)

    return read_texts(cached_folder(cache, "docstrings", settings, files=FILES, make=make))


def library_folder() -> Path:
    """Where Python's own library lies."""
    return Path(sysconfig.get_path("stdlib"))


def package_folder(name: str) -> Path:
    """Where an installed package lies; it is not imported."""
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise wrong("packages", "be installed packages", f'"{name}"', "Install it, or leave it out.")
    return Path(found.submodule_search_locations[0])


def written_files(roots: Sequence[tuple[Path, str]]) -> str:
    """A number for the files under the roots: where they lie, how long they are, when they were written.

    A version alone is that of a package in every environment, and of one under work before and after a change.
    """
    known = hashlib.sha256()
    for root, _ in roots:
        for path in source_files(root):
            # a link to nothing is harvested as nothing, too
            if path.is_file():
                told = path.stat()
                known.update(f"{path} {told.st_size} {told.st_mtime_ns}\n".encode())
    return known.hexdigest()


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def harvest(roots: Sequence[tuple[Path, str]], progress: ProgressFactory) -> Iterator[Found]:
    """Every function with a docstring in the Python files under each root, in the order of their paths.

    A root comes with what its modules' names begin with, such as "numpy.".
    """
    files = [(root, prefix, path) for root, prefix in roots for path in source_files(root)]
    with progress(len(files), "reading the library's functions", "files") as bar:
        for root, prefix, path in files:
            within = path.relative_to(root if root.is_dir() else root.parent)
            module = prefix + ".".join(within.with_suffix("").parts)
            yield from documented(path, module.removesuffix("__init__").rstrip("."))
            bar.update(1)


def source_files(root: Path) -> list[Path]:
    """The Python files under `root` but for tests, in order; a file stands for itself."""
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))


def documented(path: Path, module: str) -> Iterator[Found]:
    """The functions of a file whose docstring begins with a sentence."""
    package = ".".join(module.split(".")[:2])
    for name, node, code in functions(path, module):
        paragraph = first_paragraph(ast.get_docstring(node, clean=True) or "")
        if len(re.findall(r"[^\W\d_]{2,}", paragraph)) >= LEAST_WORDS:
            yield Found(name, package, paragraph, code, f"{path}:{node.lineno}")


def functions(path: Path, module: str) -> Iterator[tuple[str, Function, str]]:
    """Every function of a file that does something: its full name, its node, its code without docstring.

    A file that is no Python, or too large to have been written by hand, has none.
    """
    try:
        if path.stat().st_size > SOURCE_BYTES:
            return
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    # as ast counts lines, which leaves form feeds alone
    lines = re.split(r"\r\n|\r|\n", text)
    waiting: list[tuple[str, ast.AST]] = [(module, tree)]
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, Function) and (code := _code(node, lines)):
            yield name, node, code
        waiting.extend((f"{name}.{child.name}", child) for child in reversed(_inside(node)))


def _inside(node: ast.AST) -> list[Function | ast.ClassDef]:
    """The functions and classes that stand in a node's body, under an `if` or a `try` too."""
    found: list[Function | ast.ClassDef] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            found.append(child)
        elif isinstance(child, ast.stmt | ast.excepthandler):
            found.extend(_inside(child))
    return found


def _code(node: Function, lines: Sequence[str]) -> str:
    """The source from `def` on, without the docstring; nothing where there is no body beside it."""
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


def first_paragraph(docstring: str) -> str:
    """The text up to the first empty line, on one line.

    >>> first_paragraph("Bracket the minimum\\n of a function.\\n\\nGiven a function ...")
    'Bracket the minimum of a function.'
    """
    paragraph = re.split(r"\n\s*\n", docstring.strip(), maxsplit=1)[0]
    return " ".join(paragraph.split())[:MOST_LETTERS]


def distinct(found: Iterator[Found]) -> tuple[list[Found], dict[str, int]]:
    """Each paragraph and each code once, the first of them; what was left out, by reason."""
    kept: list[Found] = []
    skipped: Counter[str] = Counter()
    summaries: set[str] = set()
    codes: set[str] = set()
    for function in found:
        summary, code = function.summary.casefold(), "".join(function.code.split())
        if summary in summaries:
            skipped["docstring seen before"] += 1
        elif code in codes:
            skipped["code seen before"] += 1
        else:
            summaries.add(summary)
            codes.add(code)
            kept.append(function)
    return kept, dict(skipped)


def as_texts(found: Sequence[Found], skipped: dict[str, int], held_out: float) -> TextSet:
    """Queries and passages, row by row, with the splits."""
    times: Counter[str] = Counter()
    passages: list[Passage] = []
    for function in found:
        times[function.name] += 1
        again = f"#{times[function.name]}" if times[function.name] > 1 else ""
        passages.append(Passage(function.name + again, function.code, source=function.source))
    queries = [
        Query(passage.id, function.summary, positives=(row,))
        for row, (function, passage) in enumerate(zip(found, passages, strict=True))
    ]
    return TextSet(passages, queries, split(found, passages, held_out), skipped)


def split(found: Sequence[Found], passages: Sequence[Passage], share: float) -> dict[str, Indices]:
    """Rows of "train", "functions" and "packages"."""
    sides: dict[str, list[int]] = {"train": [], "functions": [], "packages": []}
    for row, (function, passage) in enumerate(zip(found, passages, strict=True)):
        if lot(f"package {function.package}") < share:
            sides["packages"].append(row)
        else:
            sides["functions" if lot(passage.id) < share else "train"].append(row)
    return {name: sorted_rows(rows) for name, rows in sides.items()}
