"""Measures of rankings: by judged passages as trec_eval computes them, by answers as DPR does; and their files.

A run holds the scores of the passages retrieved for each query; judgements hold the grade of a passage, 0 or below for
a wrong one. Passages of equal score (in float32, trec_eval's dtype) are ordered by descending id.
"""

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._errors import invalid, logger

Run = Mapping[str, Mapping[str, float]]
Judgements = Mapping[str, Mapping[str, int]]
Texts = Sequence[Sequence[str]]

USUAL = ("hit@1", "hit@5", "hit@20", "hit@100", "nDCG@10", "MRR@10", "MAP", "recall@100")
MATCHES = ("string", "regex")
# seconds of a pattern on one passage: usual ones take microseconds, and some would take longer than the universe
LONGEST = 1.0
# letters of a pattern, whose preparation has no limit of time: those of question sets have a hundred
LONGEST_PATTERN = 10_000
# the patterns of this process that took longer
_slow: set[str] = set()


def ranking(scores: Mapping[str, float]) -> list[str]:
    """Ids, the best first. Raises ValueError for scores that are no numbers, and for NaN, which has no place.

    >>> ranking({"a": 1.0, "b": 2.0, "c": 1.0})
    ['b', 'c', 'a']
    """
    # scores beyond float32 are infinite and equal, as in trec_eval
    try:
        with np.errstate(over="ignore"):
            float32 = np.fromiter(scores.values(), dtype=np.float32, count=len(scores)).tolist()
    except (AttributeError, TypeError, ValueError):
        rule = "have a number for each passage of a query"
        raise invalid("run", rule, f"{scores!r:.60}", 'For example {"query": {"passage": 0.5}}.') from None
    if any(map(math.isnan, float32)):
        raise invalid("run", "have scores that are numbers", "NaN", "Look for what is not finite in the features.")
    return [name for _, name in sorted(zip(float32, scores, strict=True), reverse=True)]


def measure(run: Run, judgements: Judgements, names: Sequence[str] = USUAL) -> dict[str, dict[str, float]]:
    """Each measure of each judged query: `{query: {name: value}}`; 0 for a query that is missing in the run.

    names: "nDCG@10", "MRR@10", "MAP", "recall@100", "precision@5", "hit@20" (a right passage among the first 20), with
    any cutoff or none. Equal to trec_eval's ndcg_cut, recip_rank, map, recall, P and success with its option -c.
    Raises ValueError for other names.

    >>> measure({"q": {"a": 2.0, "b": 1.0}}, {"q": {"b": 1, "c": 1}}, ["MRR@10", "recall@2", "MAP"])
    {'q': {'MRR@10': 0.5, 'recall@2': 0.5, 'MAP': 0.25}}
    """
    formulas = [(name, *_parsed(name)) for name in names]
    measured = {}
    for query, judged in judgements.items():
        grades = [max(judged.get(passage, 0), 0) for passage in ranking(run.get(query, {}))]
        ideal = sorted((grade for grade in judged.values() if grade > 0), reverse=True)
        measured[query] = {
            name: formula(grades[:cutoff], ideal, cutoff) if ideal else 0.0 for name, formula, cutoff in formulas
        }
    return measured


def means(measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    if not measured:
        raise invalid("judgements", "not be empty", "no queries", "There is nothing to measure.")
    names = next(iter(measured.values()))
    return {name: math.fsum(values[name] for values in measured.values()) / len(measured) for name in names}


# arguments: the retrieved grades up to the cutoff, best first; all positive grades, highest first; the cutoff
Formula = Callable[[Sequence[int], Sequence[int], int | None], float]


def _gain(grades: Sequence[int]) -> float:
    return math.fsum(grade / math.log2(rank + 2) for rank, grade in enumerate(grades) if grade)


def _average_precision(grades: Sequence[int], ideal: Sequence[int], _: int | None) -> float:
    ranks = [rank for rank, grade in enumerate(grades) if grade]
    return math.fsum((number + 1) / (rank + 1) for number, rank in enumerate(ranks)) / len(ideal)


FORMULAS: dict[str, Formula] = {
    "nDCG": lambda grades, ideal, cutoff: _gain(grades) / _gain(ideal[:cutoff]),
    "MRR": lambda grades, *_: next((1 / (rank + 1) for rank, grade in enumerate(grades) if grade), 0.0),
    "MAP": _average_precision,
    "recall": lambda grades, ideal, _: sum(grade > 0 for grade in grades) / len(ideal),
    "precision": lambda grades, _, cutoff: sum(grade > 0 for grade in grades) / (cutoff or max(len(grades), 1)),
    "hit": lambda grades, *_: float(any(grades)),
}


def _parsed(name: str) -> tuple[Formula, int | None]:
    kind, at, cutoff = name.partition("@")
    if kind not in FORMULAS or (at and not (cutoff.isdecimal() and int(cutoff) > 0)):
        remedy = "With a cut or without: nDCG@10, MAP."
        raise invalid("names", f"be measures among {', '.join(FORMULAS)}", f'"{name}"', remedy)
    return FORMULAS[kind], int(cutoff) if at else None


def answer_recall(
    passages: Texts, answers: Texts, *, match: str = "string", ks: Sequence[int] = (1, 5, 20, 100)
) -> dict[int, float]:
    """The share of questions with an answer in one of their first k passages, for each k (Karpukhin et al. 2020, 5).

    passages: the ranked texts of each question, the best first. answers: those of each question. match: as in
    `has_answer`.
    """
    if len(passages) != len(answers) or not passages:
        got = f"{len(passages)} and {len(answers)}"
        raise invalid("answers", "be as many as the questions, one at least", got, "Give a list for each.")
    for name, lists in (("passages", passages), ("answers", answers)):
        # the letters of a text would be taken for texts
        if single := [texts for texts in lists if isinstance(texts, str)]:
            raise invalid(name, "be a list of texts for each question", f'"{single[0]:.60}"', "Put it into a list.")
    depth = max(ks)
    ranks = [
        next((rank for rank, text in enumerate(texts[:depth]) if has_answer(text, right, match)), depth)
        for texts, right in zip(passages, answers, strict=True)
    ]
    return {k: sum(rank < k for rank in ranks) / len(ranks) for k in ks}


def has_answer(text: str, answers: Sequence[str], match: str = "string") -> bool:
    """True where `text` contains one of `answers`, as a sequence of words ("string") or as a pattern ("regex").

    False for a pattern that is invalid or takes too long, and for an answer without words.

    >>> has_answer("He was born in Ulm, Germany.", ["ulm"]), has_answer("He was born in Ulmenhof.", ["ulm"])
    (True, False)
    """
    if match not in MATCHES:
        raise invalid("match", f"be one of {', '.join(MATCHES)}", f'"{match}"', "DPR's question sets use string.")
    if isinstance(answers, str):
        raise invalid("answers", "be a list of texts", f'"{answers:.60}"', "Put it into a list.")
    if match == "regex":
        normalised = unicodedata.normalize("NFD", text)
        return any(_has_pattern(unicodedata.normalize("NFD", answer), normalised) for answer in answers)
    passage = words(text)
    return any(
        passage[start : start + len(answer)] == answer
        for answer in filter(None, map(words, answers))
        for start in range(len(passage) - len(answer) + 1)
    )


def words(text: str) -> list[str]:
    """Runs of letters, digits and combining marks, and every other visible sign alone; decomposed, in lower case.

    >>> words("Ulm, No. 5")
    ['ulm', ',', 'no', '.', '5']
    """
    return [word.lower() for word in _word_pattern().findall(unicodedata.normalize("NFD", text))]


@lru_cache(maxsize=1)
def _word_pattern() -> Any:
    import regex

    # letters, numbers and marks; else one character that is neither a separator nor a control character
    return regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]", regex.UNICODE | regex.IGNORECASE | regex.MULTILINE)


def _has_pattern(pattern: str, text: str) -> bool:
    import regex

    if pattern in _slow or len(pattern) > LONGEST_PATTERN:
        return False
    try:
        flags = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE
        return regex.search(pattern, text, flags, timeout=LONGEST) is not None
    except (regex.error, RecursionError):
        return False
    except TimeoutError:
        _slow.add(pattern)
        message = "the pattern %r takes over %g s on a passage of %d letters; from here on it is found in none"
        logger.warning(message, pattern, LONGEST, len(text))
        return False


def write_run(path: Path, run: Run, *, tag: str = "contrastile") -> None:
    """Write lines of `query Q0 passage rank score tag`, the best first; scores read back as the same float64."""
    ranked = ((query, enumerate(ranking(scores), start=1)) for query, scores in run.items())
    _write(path, ((q, "Q0", p, rank, repr(run[q][p]), tag) for q, passages in ranked for rank, p in passages))


def write_judgements(path: Path, judgements: Judgements) -> None:
    """Write lines of `query 0 passage grade`. Raises ValueError for ids with blanks."""
    _write(path, ((query, 0, p, grade) for query, grades in judgements.items() for p, grade in grades.items()))


def _write(path: Path, lines: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for fields in (list(map(str, line)) for line in lines):
            if wrong := [name for name in fields if len(name.split()) != 1]:
                remedy = "The file separates its fields by blanks; rename the id."
                raise invalid("run", "have ids without blanks", f'"{wrong[0]}"', remedy)
            file.write(" ".join(fields) + "\n")


def read_run(path: str | Path) -> dict[str, dict[str, float]]:
    """Read a run file; its ranks are ignored, as trec_eval does."""
    run: dict[str, dict[str, float]] = {}
    for quoted, fields in _fields(Path(path), "run"):
        score = _number(fields[4]) if len(fields) == 6 else math.nan
        if math.isnan(score):
            raise invalid("run", 'have lines of "query Q0 passage rank score tag"', quoted, "Mend the file.")
        scores = run.setdefault(fields[0], {})
        if fields[2] in scores:
            raise invalid("run", "have each passage once per query", quoted, "Leave one of them out.")
        scores[fields[2]] = score
    return run


def read_judgements(path: str | Path) -> dict[str, dict[str, int]]:
    """Read judgements of TREC (`query 0 passage grade`) or BEIR (`query passage grade` after a line of names).

    Columns that are named query-id, corpus-id and score may have any order.
    """
    judgements: dict[str, dict[str, int]] = {}
    names: Sequence[str] = ()
    for number, (quoted, fields) in enumerate(_fields(Path(path), "judgements")):
        if number == 0 and math.isnan(_number(fields[-1])) and len(fields) == 3:
            names = fields if {*fields} == {"query-id", "corpus-id", "score"} else ()
            continue
        named = dict(zip(names, fields, strict=True)) if len(names) == len(fields) else {}
        grade = _number(named.get("score", fields[-1]))
        if len(fields) not in (3, 4) or not grade.is_integer():
            raise invalid("judgements", 'have lines of "query 0 passage grade"', quoted, "Mend the file.")
        grades = judgements.setdefault(named.get("query-id", fields[0]), {})
        if grades.setdefault(named.get("corpus-id", fields[-2]), int(grade)) != grade:
            raise invalid("judgements", "have one grade of each passage per query", quoted, "Leave one of them out.")
    return judgements


def _fields(path: Path, name: str) -> Iterator[tuple[str, list[str]]]:
    """The fields of each line that has some, behind a quotation of the line with its place."""
    try:
        # a mark of the byte order would become part of the first id
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, start=1):
                if fields := text.split():
                    yield f'"{" ".join(fields)[:60]}" at {path}:{number}', fields
    except UnicodeDecodeError:
        raise invalid(name, "be a text in UTF-8", path, "Convert the file.") from None
    except OSError as error:
        raise invalid(name, "be a file that can be read", path, f"{error.strerror}.") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
