"""Exact late interaction over packed token vectors: scores, the best passages of each query, and what matched what.

Beside `retrieval.py`, which does the same for one vector a text. Passages are packed without padding, in memory or
memory-mapped; blocks of them are padded length by length, and compared tile by tile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._errors import invalid, whole_number
from contrastile._types import TokenFeatures
from contrastile.evaluate.retrieval import Matches, best_of, no_matches
from contrastile.functional import padded_texts
from contrastile.gradcache.inputs import Ragged
from contrastile.scorers import MaxSim

Positions = npt.NDArray[np.int64]

# tokens of passages that are read at once; of a tile's passages, with padding; of its queries
BLOCK, COLUMN_TOKENS, ROW_TOKENS = 2**18, 2**14, 2**9


@dataclass(frozen=True)
class TokenVectors:
    """Vectors of passages' tokens `[T, D]`, a tensor or an array; starts `[n + 1]`: each one's first token, and T."""

    values: Any
    starts: Positions

    @classmethod
    def of(cls, values: Any, lengths: Sequence[int] | Positions) -> Self:
        return cls(values, np.cumsum([0, *lengths], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def rows(self, rows: Positions) -> tuple[Any, list[int]]:
        """Values of the passages at `rows`, packed, and their lengths."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        tokens = np.repeat(self.starts[rows] - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())
        values = self.values[torch.from_numpy(tokens)] if isinstance(self.values, Tensor) else self.values[tokens]
        return values, lengths.tolist()

    def ragged(self, rows: Positions, device: torch.device) -> Ragged:
        """The passages at `rows`, in float32 on the device."""
        values, lengths = self.rows(rows)
        return Ragged(torch.as_tensor(values).to(device).float(), lengths)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """The first passage of each block, and the one behind its last. Raises ValueError for vectors of none."""
        if self.starts[-1] != len(self.values):
            got = f"{self.starts[-1]} for {len(self.values)}"
            raise invalid("lengths", "sum to the number of vectors", got, "Count the tokens of each passage.")
        start = 0
        while start < len(self):
            within = np.searchsorted(self.starts, self.starts[start] + BLOCK, side="right") - 1
            stop = min(max(start + 1, int(within)), len(self))
            yield start, stop
            start = stop


def joined(parts: Sequence[Ragged], rows: Tensor) -> Ragged:
    """The texts at `rows` of all parts, one part after the other."""
    values = torch.cat([part.values for part in parts])
    lengths = [length for part in parts for length in part.lengths]
    return Ragged(*TokenVectors.of(values, lengths).rows(rows.numpy()))


@torch.no_grad()
def maxsim(query: TokenFeatures, key: TokenVectors) -> Tensor:
    """Σ_l max_m ⟨q_il, k_jm⟩ in float32 `[N, M]`, for the tokens that count; a passage without any has 0.

    query: vectors `[N, L, D]` and mask `[N, L]`. Naively `MaxSim()(query, padded passages)`.

    >>> query = torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool)
    >>> maxsim(query, TokenVectors.of(torch.eye(2)[[0, 0, 1]], [1, 0, 2]))
    tensor([[1., 0., 2.]])
    """
    parts = [_block_scores(query, key, start, stop) for start, stop in key.blocks()]
    return torch.cat(parts, 1) if parts else query[0].new_empty(len(query[0]), 0)


def _block_scores(query: TokenFeatures, key: TokenVectors, start: int, stop: int) -> Tensor:
    """The scores `[N, stop − start]` of consecutive passages."""
    vectors, mask = query
    values, lengths = key.values[key.starts[start] : key.starts[stop]], np.diff(key.starts[start : stop + 1])
    # a copy of what is memory-mapped, because torch warns about tensors over read-only memory
    values = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    block = TokenVectors.of(values.to(vectors.device).float(), lengths)
    scores = vectors.new_empty((len(vectors), stop - start), dtype=torch.float32)
    height, scorer = max(1, ROW_TOKENS // max(1, vectors.shape[1])), MaxSim()
    for columns in _tiles_by_length(lengths):
        passages = padded_texts(block.ragged(columns, vectors.device))
        along = torch.from_numpy(columns).to(scores.device)
        for first in range(0, len(vectors), height):
            rows = slice(first, first + height)
            tile = vectors[rows].float(), mask[rows]
            scores[rows, along] = scorer(tile, passages) if passages[0].shape[1] else 0.0
    return scores


def _tiles_by_length(lengths: Positions) -> Iterator[Positions]:
    """Passages of a block in tiles, the shortest first, so that little of a tile is padding."""
    order, start = lengths.argsort(kind="stable"), 0
    while start < len(order):
        # as many as the length of the last of them allows
        sizes = np.arange(1, len(order) - start + 1) * lengths[order[start:]]
        count = max(1, int(np.searchsorted(sizes, COLUMN_TOKENS, side="right")))
        yield order[start : start + count]
        start += count


@torch.no_grad()
def topk(query: TokenFeatures, shards: Sequence[TokenVectors], k: int, candidates: Positions | None = None) -> Matches:
    """The `k` best passages of each query: scores float32 and rows int64, both `[N, k]`, best first.

    Rows count the passages of all shards; of equal scores the lower row comes first. candidates `[N, C]`: the rows that
    are scored, −1 pads. A query with fewer candidates than k gets rows of −1, scores of −∞.
    """
    total = sum(map(len, shards))
    k = whole_number("k", k, 1, "Ask for fewer.", rule=f"be between 1 and the {total} passages", most=total)
    vectors, _ = query
    if candidates is not None:
        candidates = np.asarray(candidates)
        highest = int(candidates.max(initial=-1))
        if candidates.ndim != 2 or len(candidates) != len(vectors) or highest >= total:
            rule, got = f"be rows [N, C] of the {total} passages for {len(vectors)} queries", list(candidates.shape)
            remedy = "List those of each query; -1 pads."
            raise invalid("candidates", rule, f"shape {got}, with rows up to {highest}", remedy)
        scores, rows = no_matches(vectors, k)
        for row, chosen in enumerate(candidates):
            at = slice(row, row + 1)
            scores[at], rows[at] = _best_candidates((vectors[at], query[1][at]), shards, k, chosen)
        return scores, rows
    best, first = no_matches(vectors), 0
    for shard in shards:
        for start, stop in shard.blocks():
            rows = torch.arange(first + start, first + stop, device=vectors.device).expand(len(vectors), -1)
            best = best_of(best, (_block_scores(query, shard, start, stop), rows), k)
        first += len(shard)
    return best


def _best_candidates(query: TokenFeatures, shards: Sequence[TokenVectors], k: int, candidates: Positions) -> Matches:
    """The `k` best of the candidates of one query, scores and rows `[1, k]`."""
    # in the order of rows, which decides among equal scores
    chosen, best, first = np.unique(candidates[candidates >= 0]), no_matches(query[0]), 0
    for shard in shards:
        rows = chosen[(chosen >= first) & (chosen < first + len(shard))]
        if len(rows):
            passages = shard.ragged(rows - first, query[0].device)
            scores = maxsim(query, TokenVectors.of(passages.values, passages.lengths))
            best = best_of(best, (scores, torch.from_numpy(rows).to(scores.device)[None]), k)
        first += len(shard)
    missing = (0, k - best[0].shape[1])
    return F.pad(best[0], missing, value=-torch.inf), F.pad(best[1], missing, value=-1)
