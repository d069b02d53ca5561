"""Source: the built-in texts, functions of the Python that runs this, with their docstrings as queries.

Nothing is downloaded or imported: files are parsed in place. `docs/retrieval.md` has queries, passages and splits.
Equal code and equal paragraphs are taken once: a second copy would be a right answer that counts as wrong.
"""

import ast
import hashlib
import importlib.util
import json
import platform
import re
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from contrastile._errors import invalid
from contrastile.data.base import ProgressFactory, hash_fraction, sorted_rows
from contrastile.data.files import cached_folder, file_state
from contrastile.data.texts import FILES, Passage, Query, TextSet, read_texts, with_mined_negatives, write_texts

# increased whenever the harvest changes
HARVEST = 1
# the least number of words of two letters or more in a first paragraph
LEAST_WORDS = 5
# the length at which a first paragraph is cut; few are longer
MOST_CHARACTERS = 600
# folders of tests, and of packages that are not Python's own
LEFT_OUT = {"test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# a larger file was not written by hand
MOST_BYTES = 4_000_000

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Documented(NamedTuple):
    """A function: full name, package, first paragraph of its docstring, code, and its place as "file:line"."""

    name: str
    package: str
    summary: str
    code: str
    source: str


def open_docstrings(
    *, cache: Path, packages: Sequence[str], held_out: float, mined: int, progress: ProgressFactory
) -> TextSet:
    """Functions of Python's library and of the packages, harvested once into the cache, with mined negatives."""
    roots = [(library_folder(), ""), *((package_folder(name), f"{name}.") for name in packages)]
    # a package that was changed in place keeps its version; a broken link is no file
    states = [file_state(str(path)) for root, _ in roots for path in source_files(root) if path.is_file()]
    settings = {
        "harvest": HARVEST, "python": platform.python_version(), "held_out": held_out, "mined": mined,
        "packages": {name: _version(name) for name in packages},
        "files": hashlib.sha256(json.dumps(states).encode()).hexdigest(),
    }  # fmt: skip

    def make(folder: Path) -> None:
        texts = as_texts(*distinct(harvest(roots, progress)), held_out)
        write_texts(folder, with_mined_negatives(texts, mined, progress=progress))

    return read_texts(cached_folder(cache, "docstrings", settings, files=FILES, make=make))


def library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise invalid("packages", "be installed packages", f'"{name}"', "Install it, or leave it out.")
    return Path(spec.submodule_search_locations[0])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def harvest(roots: Sequence[tuple[Path, str]], progress: ProgressFactory) -> Iterator[Documented]:
    """Every documented function in the Python files under each root, a folder with the prefix of its modules."""
    files = [(root, prefix, path) for root, prefix in roots for path in source_files(root)]
    with progress(len(files), "reading the library's functions", "files") as bar:
        for root, prefix, path in files:
            module = prefix + module_name(path, root)
            yield from documented(path, module.removesuffix("__init__").rstrip("."))
            bar.update(1)


def documented(path: Path, module: str) -> Iterator[Documented]:
    """The functions of a file whose docstring begins with a long enough paragraph."""
    package = ".".join(module.split(".")[:2])
    for name, node, code in parse_functions(path, module):
        paragraph = first_paragraph(ast.get_docstring(node, clean=True) or "")
        if len(re.findall(r"[^\W\d_]{2,}", paragraph)) >= LEAST_WORDS:
            yield Documented(name, package, paragraph, code, f"{path}:{node.lineno}")


def first_paragraph(docstring: str) -> str:
    """The text up to the first empty line, on one line.

    >>> first_paragraph("Bracket the minimum\\n of a function.\\n\\nGiven a function ...")
    'Bracket the minimum of a function.'
    """
    paragraph = re.split(r"\n\s*\n", docstring.strip(), maxsplit=1)[0]
    return " ".join(paragraph.split())[:MOST_CHARACTERS]


def distinct(functions: Iterable[Documented]) -> tuple[list[Documented], dict[str, int]]:
    """The first function with each paragraph and each code, and the number of the others by reason."""
    unique: list[Documented] = []
    skipped: Counter[str] = Counter()
    summaries: set[str] = set()
    codes: set[str] = set()
    for function in functions:
        summary, code = function.summary.casefold(), "".join(function.code.split())
        if summary in summaries:
            skipped["docstring seen before"] += 1
        elif code in codes:
            skipped["code seen before"] += 1
        else:
            summaries.add(summary)
            codes.add(code)
            unique.append(function)
    return unique, dict(skipped)


def as_texts(functions: Sequence[Documented], skipped: dict[str, int], held_out: float) -> TextSet:
    """The text set of the functions, with its splits: query i belongs to passage i."""
    times: Counter[str] = Counter()
    passages: list[Passage] = []
    queries: list[Query] = []
    splits: dict[str, list[int]] = {"train": [], "functions": [], "packages": []}
    for row, function in enumerate(functions):
        times[function.name] += 1
        suffix = f"#{times[function.name]}" if times[function.name] > 1 else ""
        passages.append(Passage(function.name + suffix, function.code, source=function.source))
        queries.append(Query(passages[row].id, function.summary, positives=(row,)))
        if hash_fraction(f"package {function.package}") < held_out:
            splits["packages"].append(row)
        else:
            splits["functions" if hash_fraction(passages[row].id) < held_out else "train"].append(row)
    return TextSet(passages, queries, {name: sorted_rows(rows) for name, rows in splits.items()}, skipped)


def source_files(root: Path) -> list[Path]:
    """The Python files under `root` without tests, in order; `root` itself if it is a file."""
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))


def module_name(path: Path, root: Path) -> str:
    """The name of a file's module below `root`, or of the file `root`."""
    return ".".join(path.relative_to(root if root.is_dir() else root.parent).with_suffix("").parts)


def parse_functions(path: Path, module: str) -> Iterator[tuple[str, Function, str]]:
    """Every function of a file: full name, node, code without docstring; no function of a file that is no Python."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    # split as ast counts lines, which a form feed does not end
    lines = re.split(r"\r\n|\r|\n", text)
    for name, node in _functions(tree, module):
        if code := _code(node, lines):
            yield name, node, code


def _functions(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
    """The functions in a node called `name`, with their full names, also under a class, an `if` or a `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler):
            inner = f"{name}.{child.name}" if isinstance(child, Function | ast.ClassDef) else name
            if isinstance(child, Function):
                yield inner, child
            yield from _functions(child, inner)


def _code(node: Function, lines: Sequence[str]) -> str:
    """The source from `def` on, without the docstring; empty for a function with nothing but a docstring."""
    first, start, end = node.body[0], node.lineno - 1, node.end_lineno or node.lineno
    code = lines[start:end]
    if ast.get_docstring(node, clean=False) is not None:
        after = first.end_lineno or first.lineno
        if len(node.body) == 1 or first.lineno == node.lineno or node.body[1].lineno == after:
            return ""
        code = [*lines[start : first.lineno - 1], *lines[after:end]]
    return textwrap.dedent("\n".join(code)).strip()
