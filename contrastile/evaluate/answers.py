"""Whether a passage holds an answer, as DPR decides it, and how many questions find one among their first passages.

Beside `ranking.py`, for questions whose right passages nobody listed: any passage with an answer in it is right
(Karpukhin et al. 2020, section 5). Strings are compared word by word: decomposed (NFD), without case.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from contrastile._check import wrong

MATCHES = ("string", "regex")
KS = (1, 5, 20, 100)


def words(text: str) -> list[str]:
    """Runs of letters, digits and marks, and every other sign that shows, each alone; decomposed, in small letters.

    >>> words("Ulm, No. 5")
    ['ulm', ',', 'no', '.', '5']
    """
    return [word.lower() for word in _word().findall(unicodedata.normalize("NFD", text))]


@lru_cache(maxsize=1)
def _word() -> Any:
    import regex

    # letters, numbers and marks; else what is neither a separator nor a control character
    return regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]", regex.UNICODE | regex.IGNORECASE | regex.MULTILINE)


def has_answer(text: str, answers: Sequence[str], match: str = "string") -> bool:
    """Whether one of `answers` is in `text`: as a sequence of words ("string"), or as a pattern ("regex").

    What is no pattern is found nowhere, nor is an answer without a word, which DPR's own code finds everywhere. Raises
    ValueError for another `match`.

    >>> has_answer("He was born in Ulm, Germany.", ["ulm"]), has_answer("He was born in Ulmenhof.", ["ulm"])
    (True, False)
    """
    if match not in MATCHES:
        raise wrong("match", f"be one of {', '.join(MATCHES)}", f'"{match}"', "DPR's question sets use string.")
    if match == "regex":
        return any(
            _found(unicodedata.normalize("NFD", answer), unicodedata.normalize("NFD", text)) for answer in answers
        )
    passage = words(text)
    return any(_within(words(answer), passage) for answer in answers)


def _within(answer: Sequence[str], passage: Sequence[str]) -> bool:
    last = len(passage) - len(answer)
    return bool(answer) and any(passage[start : start + len(answer)] == answer for start in range(last + 1))


def _found(pattern: str, text: str) -> bool:
    import regex

    try:
        compiled = regex.compile(pattern, regex.IGNORECASE | regex.UNICODE | regex.MULTILINE)
    except regex.error:
        return False
    return compiled.search(text) is not None


def answer_hits(
    found: Sequence[Sequence[str]], answers: Sequence[Sequence[str]], *, match: str = "string", ks: Sequence[int] = KS
) -> dict[int, float]:
    """The share of questions with an answer in one of their first k passages, for each k.

    found: the texts found for each question, the best first. answers: each question's. match: as in `has_answer`.
    Raises ValueError where these are not as many, or there are none.

    >>> answer_hits([["no", "yes it is"], ["no", "no"]], [["yes"], ["yes"]], ks=[1, 2])
    {1: 0.0, 2: 0.5}
    """
    if len(found) != len(answers) or not found:
        got = f"{len(found)} and {len(answers)}"
        raise wrong("answers", "be as many as the questions, one at least", got, "Give a list for each.")
    deepest = max(ks)
    firsts = [
        next((place for place, text in enumerate(texts[:deepest]) if has_answer(text, right, match)), deepest)
        for texts, right in zip(found, answers, strict=True)
    ]
    return {k: sum(first < k for first in firsts) / len(firsts) for k in ks}
