"""Answer recall: the share of questions with an answer in one of the first k passages, as DPR measures it.

Beside `ranking.py`, for questions without listed passages: any passage that contains an answer is right (Karpukhin et
al. 2020, section 5). Strings are compared word by word, decomposed (NFD) and in lower case.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from contrastile._errors import invalid

MATCHES = ("string", "regex")
KS = (1, 5, 20, 100)


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


def has_answer(text: str, answers: Sequence[str], match: str = "string") -> bool:
    """True where `text` contains one of `answers`, as a sequence of words ("string") or as a pattern ("regex").

    False for an invalid pattern, and for an answer without words, which DPR's own code finds in every text. Raises
    ValueError for another `match`.

    >>> has_answer("He was born in Ulm, Germany.", ["ulm"]), has_answer("He was born in Ulmenhof.", ["ulm"])
    (True, False)
    """
    if match not in MATCHES:
        raise invalid("match", f"be one of {', '.join(MATCHES)}", f'"{match}"', "DPR's question sets use string.")
    if match == "regex":
        normalised = unicodedata.normalize("NFD", text)
        return any(_has_pattern(unicodedata.normalize("NFD", answer), normalised) for answer in answers)
    passage = words(text)
    return any(_has_words(words(answer), passage) for answer in answers)


def _has_words(answer: Sequence[str], passage: Sequence[str]) -> bool:
    last = len(passage) - len(answer)
    return bool(answer) and any(passage[start : start + len(answer)] == answer for start in range(last + 1))


def _has_pattern(pattern: str, text: str) -> bool:
    import regex

    try:
        return regex.search(pattern, text, regex.IGNORECASE | regex.UNICODE | regex.MULTILINE) is not None
    except regex.error:
        return False


def answer_recall(
    passages: Sequence[Sequence[str]],
    answers: Sequence[Sequence[str]],
    *,
    match: str = "string",
    ks: Sequence[int] = KS,
) -> dict[int, float]:
    """The share of questions with an answer in one of their first k passages, for each k.

    passages: the ranked texts of each question, the best first. answers: those of each question. match: as in
    `has_answer`. Raises ValueError for lists of unequal or zero length.

    >>> answer_recall([["no", "yes it is"], ["no", "no"]], [["yes"], ["yes"]], ks=[1, 2])
    {1: 0.0, 2: 0.5}
    """
    if len(passages) != len(answers) or not passages:
        got = f"{len(passages)} and {len(answers)}"
        raise invalid("answers", "be as many as the questions, one at least", got, "Give a list for each.")
    depth = max(ks)
    ranks = [
        next((rank for rank, text in enumerate(texts[:depth]) if has_answer(text, right, match)), depth)
        for texts, right in zip(passages, answers, strict=True)
    ]
    return {k: sum(rank < k for rank in ranks) / len(ranks) for k in ks}
