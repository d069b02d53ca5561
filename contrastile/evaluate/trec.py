"""Runs and judgements as files, in the forms of TREC and BEIR.

Beside `ranking.py`: what any search found can be measured here, and what was found here, by any other tool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from contrastile._check import wrong
from contrastile.evaluate.ranking import Judgements, Run, ranking

RUN_LINE = "query Q0 passage rank score tag"


def write_run(path: Path, run: Run, *, tag: str = "contrastile") -> None:
    """Lines of `query Q0 passage rank score tag`, the best first; scores read back as the same float64.

    Raises ValueError for ids with blanks, which no reader of this form could tell apart.
    """
    with path.open("w", encoding="utf-8") as file:
        for query, scores in run.items():
            for rank, passage in enumerate(ranking(scores), start=1):
                _without_blanks(query, passage, tag)
                file.write(f"{query} Q0 {passage} {rank} {scores[passage]!r} {tag}\n")


def write_judgements(path: Path, judgements: Judgements) -> None:
    """Lines of `query 0 passage grade`. Raises ValueError for ids with blanks."""
    with path.open("w", encoding="utf-8") as file:
        for query, grades in judgements.items():
            for passage, grade in grades.items():
                _without_blanks(query, passage)
                file.write(f"{query} 0 {passage} {grade}\n")


def _without_blanks(*names: str) -> None:
    for name in names:
        if len(name.split()) != 1:
            remedy = "The file separates its fields by blanks; rename the id."
            raise wrong("run", "have ids without blanks", f'"{name}"', remedy)


def read_run(path: str | Path) -> dict[str, dict[str, float]]:
    """What a run file holds; the ranks that it states are ignored, as trec_eval does.

    Raises ValueError with file and line for what is no such line, and for a passage that a query has twice.
    """
    run: dict[str, dict[str, float]] = {}
    for place, fields in _fields(Path(path), "run"):
        score = _number(fields[4]) if len(fields) == 6 else math.nan
        if math.isnan(score):
            raise wrong("run", f'have lines of "{RUN_LINE}"', _shown(fields, place), "Mend the file.")
        scores = run.setdefault(fields[0], {})
        if fields[2] in scores:
            raise wrong("run", "have each passage once per query", _shown(fields, place), "Leave one of them out.")
        scores[fields[2]] = score
    return run


def read_judgements(path: str | Path) -> dict[str, dict[str, int]]:
    """Judgements as TREC has them (`query 0 passage grade`), or BEIR (`query passage grade`, its first line names).

    Raises ValueError with file and line for what is no such line.
    """
    judgements: dict[str, dict[str, int]] = {}
    for number, (place, fields) in enumerate(_fields(Path(path), "judgements")):
        grade = _number(fields[-1])
        if number == 0 and math.isnan(grade) and len(fields) == 3:
            continue
        if len(fields) not in (3, 4) or not grade.is_integer():
            remedy = "Mend the file."
            raise wrong("judgements", 'have lines of "query 0 passage grade"', _shown(fields, place), remedy)
        judgements.setdefault(fields[0], {})[fields[-2]] = int(grade)
    return judgements


def _fields(path: Path, name: str) -> Iterator[tuple[str, list[str]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line.split()
    except UnicodeDecodeError:
        raise wrong(name, "be a text in UTF-8", path, "Convert the file.") from None
    except OSError as failure:
        raise wrong(name, "be a file that can be read", path, f"{failure.strerror}.") from failure


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _shown(fields: list[str], place: str) -> str:
    return f'"{" ".join(fields)[:60]}" at {place}'


def judged_of(run: Run, judgements: Judgements) -> int:
    """How many judged queries the run has an answer for."""
    return sum(query in run for query in judgements)
