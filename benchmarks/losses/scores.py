"""The docstrings as files of questions with a teacher's scores of their passages, for `docstrings.toml`.

python benchmarks/losses/scores.py runs/docstrings-teacher

Writes runs/docstrings.jsonl, of the training questions, and runs/docstrings-test.jsonl, of the held-out ones, in
FlagEmbedding's form. A score is the teacher's logit.
"""

import json
import sys
from pathlib import Path

import contrastile
from contrastile.train.retriever.run import RetrieverRun, open_run_texts


def main(folder: Path) -> None:
    run = contrastile.load(folder)
    assert isinstance(run, RetrieverRun)
    texts = open_run_texts(run.recipe)
    passages = run.encode_passage(texts.passages)
    queries = run.encode_query([query.text for query in texts.queries])
    scale = float(run.model.logit_scale.exp())
    files = [(folder.parent / name).open("w") for name in ("docstrings.jsonl", "docstrings-test.jsonl")]
    for split, rows in texts.splits.items():
        for row in rows.tolist():
            query = texts.queries[row]
            entry = {"query": query.text}
            for side, listed in (("pos", query.positives), ("neg", query.negatives)):
                logits = (scale * passages[list(listed)] @ queries[row]).tolist()
                entry[side] = [texts.passages[passage].text for passage in listed]
                entry[f"{side}_scores"] = [round(logit, 4) for logit in logits]
            files[split != "train"].write(json.dumps(entry) + "\n")
    for file in files:
        file.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
