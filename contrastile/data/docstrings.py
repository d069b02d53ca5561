"""Source: the built-in texts, functions of the Python that runs this, with their docstrings as queries.

Stands below the registry. Nothing is downloaded and nothing is imported: the files of Python's library and of installed
packages are parsed in place. The query is the docstring's first paragraph, of five words or more; the passage is the
function's source without docstring and decorators. Equal code and equal paragraphs are taken once: a second copy would
be a right answer that counts as wrong.

**Splits.** "packages": every function of some whole packages (`email`, `scipy.optimize`: two names at most), chosen by
the hash of their names. "functions": a share of the other functions, chosen by the hash of their own names. Both are
searched among all passages. The cache's manifest lists all versions; the set's `digest` is equal on two machines with
equal texts. A file that was moved or written since makes the harvest run again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from contrastile._errors import invalid
from contrastile.data.base import Indices, ProgressFactory, hash_fraction, sorted_rows
from contrastile.data.files import cached_folder
from contrastile.data.python_code import parse_functions, source_files
from contrastile.data.texts import FILES, Passage, Query, TextOptions, TextSet, read_texts, write_texts

# increased whenever the harvest changes
HARVEST = 1
PACKAGES = ("numpy", "scipy", "torch")
# the least number of words of two letters or more in a first paragraph
LEAST_WORDS = 5
# the length at which a first paragraph is cut; few are longer
MOST_CHARACTERS = 600


@dataclass(frozen=True)
class Documented:
    """A function: full name, package, first paragraph of its docstring, code, and its place as "file:line"."""

    name: str
    package: str
    summary: str
    code: str
    source: str


def open_docstrings(source: str, options: TextOptions) -> TextSet:  # noqa: ARG001
    """Functions of Python's library and of the packages, harvested once into the cache, with mined negatives."""
    packages = options.packages
    roots = [(library_folder(), ""), *((package_folder(name), f"{name}.") for name in packages)]
    settings = {
        "harvest": HARVEST,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "files": files_digest(roots),
        "held_out": options.held_out,
        "mined": options.mined,
    }

    def make(folder: Path) -> None:
        functions, skipped = distinct(harvest(roots, options.progress))
        write_texts(folder, options.with_negatives(as_texts(functions, skipped, options.held_out)))

    return read_texts(cached_folder(options.cache, "docstrings", settings, files=FILES, make=make))


def library_folder() -> Path:
    """The folder of Python's own library."""
    return Path(sysconfig.get_path("stdlib"))


def package_folder(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise invalid("packages", "be installed packages", f'"{name}"', "Install it, or leave it out.")
    return Path(spec.submodule_search_locations[0])


def files_digest(roots: Sequence[tuple[Path, str]]) -> str:
    """A digest of the files under the roots: their paths, sizes and dates.

    The version of a package is not enough: it is the same in every environment, and before and after a local change.
    """
    digest = hashlib.sha256()
    for root, _ in roots:
        for path in source_files(root):
            # a broken link is no file
            if path.is_file():
                stat = path.stat()
                digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def harvest(roots: Sequence[tuple[Path, str]], progress: ProgressFactory) -> Iterator[Documented]:
    """Every function with a docstring in the Python files under each root, in the order of their paths.

    A root comes with the prefix of its modules' names, such as "numpy.".
    """
    files = [(root, prefix, path) for root, prefix in roots for path in source_files(root)]
    with progress(len(files), "reading the library's functions", "files") as bar:
        for root, prefix, path in files:
            within = path.relative_to(root if root.is_dir() else root.parent)
            module = prefix + ".".join(within.with_suffix("").parts)
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


def distinct(functions: Iterator[Documented]) -> tuple[list[Documented], dict[str, int]]:
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
    """The text set of the functions: query i belongs to passage i."""
    times: Counter[str] = Counter()
    passages: list[Passage] = []
    for function in functions:
        times[function.name] += 1
        suffix = f"#{times[function.name]}" if times[function.name] > 1 else ""
        passages.append(Passage(function.name + suffix, function.code, source=function.source))
    queries = [
        Query(passage.id, function.summary, positives=(row,))
        for row, (function, passage) in enumerate(zip(functions, passages, strict=True))
    ]
    return TextSet(passages, queries, split(functions, passages, held_out), skipped)


def split(functions: Sequence[Documented], passages: Sequence[Passage], share: float) -> dict[str, Indices]:
    """Rows of "train", "functions" and "packages"."""
    sides: dict[str, list[int]] = {"train": [], "functions": [], "packages": []}
    for row, (function, passage) in enumerate(zip(functions, passages, strict=True)):
        if hash_fraction(f"package {function.package}") < share:
            sides["packages"].append(row)
        else:
            sides["functions" if hash_fraction(passage.id) < share else "train"].append(row)
    return {name: sorted_rows(rows) for name, rows in sides.items()}
