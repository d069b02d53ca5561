"""The docstrings as files of questions with a teacher's scores of their passages, for `docstrings.toml`.

python benchmarks/losses/scores.py runs/docstrings-teacher

Writes runs/docstrings.jsonl, of the training questions, and runs/docstrings-test.jsonl, of the held-out ones. A score
is the teacher's logit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import contrastile
from contrastile.data.texts import Query, TextSet
from contrastile.train.retriever.run import RetrieverRun, open_run_texts


def main(folder: Path) -> None:
    run = contrastile.load(folder)
    assert isinstance(run, RetrieverRun)
    texts = open_run_texts(run.recipe)
    passages = run.encode_passage(texts.passages)
    queries = run.encode_query([query.text for query in texts.queries])
    scale = float(run.model.logit_scale.exp())

    def write(path: Path, rows: Iterable[int]) -> None:
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                query = texts.queries[row]
                listed = [*query.positives, *query.negatives]
                logits = (scale * passages[listed] @ queries[row]).tolist()
                scores = dict(zip(listed, logits, strict=True))
                file.write(json.dumps(entry(texts, query, scores)) + "\n")

    write(folder.parent / "docstrings.jsonl", texts.splits["train"].tolist())
    held_out = [row for name, rows in texts.splits.items() if name != "train" for row in rows.tolist()]
    write(folder.parent / "docstrings-test.jsonl", held_out)


def entry(texts: TextSet, query: Query, scores: dict[int, float]) -> dict[str, object]:
    """An entry in FlagEmbedding's form."""
    sides = {"pos": query.positives, "neg": query.negatives}
    listed = {side: [texts.passages[row].text for row in rows] for side, rows in sides.items()}
    logits = {f"{side}_scores": [round(scores[row], 4) for row in rows] for side, rows in sides.items()}
    return {"query": query.text, **listed, **logits}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
