"""Files of runs and judgements in the formats of TREC and BEIR.

Beside `ranking.py`: the runs of other search engines are measured here, and ours by other tools.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from contrastile._errors import invalid
from contrastile.evaluate.ranking import Judgements, Run, ranking

RUN_LINE = "query Q0 passage rank score tag"


def write_run(path: Path, run: Run, *, tag: str = "contrastile") -> None:
    """Write lines of `query Q0 passage rank score tag`, the best first; scores read back as the same float64.

    Raises ValueError for ids with blanks, because blanks separate the fields.
    """
    with path.open("w", encoding="utf-8") as file:
        for query, scores in run.items():
            for rank, passage in enumerate(ranking(scores), start=1):
                _check_ids(query, passage, tag)
                file.write(f"{query} Q0 {passage} {rank} {scores[passage]!r} {tag}\n")


def write_judgements(path: Path, judgements: Judgements) -> None:
    """Write lines of `query 0 passage grade`. Raises ValueError for ids with blanks."""
    with path.open("w", encoding="utf-8") as file:
        for query, grades in judgements.items():
            for passage, grade in grades.items():
                _check_ids(query, passage)
                file.write(f"{query} 0 {passage} {grade}\n")


def _check_ids(*names: str) -> None:
    for name in names:
        if len(name.split()) != 1:
            remedy = "The file separates its fields by blanks; rename the id."
            raise invalid("run", "have ids without blanks", f'"{name}"', remedy)


def read_run(path: str | Path) -> dict[str, dict[str, float]]:
    """Read a run file; its ranks are ignored, as trec_eval does.

    Raises ValueError with file and line for a malformed line, and for a passage that a query has twice.
    """
    run: dict[str, dict[str, float]] = {}
    for line, fields in _fields(Path(path), "run"):
        score = _number(fields[4]) if len(fields) == 6 else math.nan
        if math.isnan(score):
            raise invalid("run", f'have lines of "{RUN_LINE}"', _quoted(fields, line), "Mend the file.")
        scores = run.setdefault(fields[0], {})
        if fields[2] in scores:
            raise invalid("run", "have each passage once per query", _quoted(fields, line), "Leave one of them out.")
        scores[fields[2]] = score
    return run


def read_judgements(path: str | Path) -> dict[str, dict[str, int]]:
    """Read judgements of TREC (`query 0 passage grade`) or BEIR (`query passage grade` after a line of names).

    Raises ValueError with file and line for a malformed line.
    """
    judgements: dict[str, dict[str, int]] = {}
    for number, (line, fields) in enumerate(_fields(Path(path), "judgements")):
        grade = _number(fields[-1])
        if number == 0 and math.isnan(grade) and len(fields) == 3:
            continue
        if len(fields) not in (3, 4) or not grade.is_integer():
            remedy = "Mend the file."
            raise invalid("judgements", 'have lines of "query 0 passage grade"', _quoted(fields, line), remedy)
        judgements.setdefault(fields[0], {})[fields[-2]] = int(grade)
    return judgements


def _fields(path: Path, name: str) -> Iterator[tuple[str, list[str]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield f"{path}:{number}", text.split()
    except UnicodeDecodeError:
        raise invalid(name, "be a text in UTF-8", path, "Convert the file.") from None
    except OSError as error:
        raise invalid(name, "be a file that can be read", path, f"{error.strerror}.") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _quoted(fields: list[str], line: str) -> str:
    return f'"{" ".join(fields)[:60]}" at {line}'


def judged_of(run: Run, judgements: Judgements) -> int:
    """The number of judged queries that are in the run."""
    return sum(query in run for query in judgements)
