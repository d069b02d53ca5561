"""Alignment: which tokens of a passage the tokens of a question matched, for the pages of a late retriever.

Under `questions.py` and `search.py`. Plain JSON: `query` and `passage` are tokens, `shares` the similarity of
each pair as a part of the largest one, `best` the column of each row's match, `values` its similarity.
"""

from __future__ import annotations

from typing import Any

import torch

from contrastile.data.texts import Passage
from contrastile.train.retriever.run import RetrieverRun, passage_tokens, query_tokens

FIRST = torch.zeros(1, dtype=torch.int64)


@torch.no_grad()
def alignment(run: RetrieverRun, question: str, passage: Passage) -> dict[str, Any] | None:
    """The matches of a question's own tokens, in the order of the passage; None where the passage has no vector.

    Mask tokens, which the score counts too, are left out.
    """
    model: Any = run.model
    asked = query_tokens([question], run.tokenizer, run.recipe).rows(FIRST)
    read = passage_tokens([passage], run.tokenizer, run.recipe).rows(FIRST)
    compared = read["input_ids"][model.compared(**read)].tolist()
    (query, _), (key, mask) = run.encode_query([question]), run.encode_passage([passage])
    words = asked["input_ids"][0].tolist()
    if not words or not compared:
        return None
    similar = query[0, : len(words)] @ key[0][mask[0]].T
    best = similar.max(dim=1)
    columns = best.indices.unique()
    shares = (similar[:, columns] / similar.abs().max().clamp(min=1e-9)).clamp(min=0)
    return {
        "query": run.tokenizer.tokens(words),
        "passage": run.tokenizer.tokens([compared[column] for column in columns.tolist()]),
        "shares": [[round(share, 3) for share in row] for row in shares.tolist()],
        "best": torch.searchsorted(columns, best.indices).tolist(),
        "values": [round(value, 3) for value in best.values.tolist()],
    }
