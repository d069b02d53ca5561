"""Which pairs each step takes: an order that the seed and the position alone decide.

Between the `PairSet` and the towers. Nothing is kept but how far the run has come, so a run that is taken up again
sees exactly the pairs that it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from contrastile._check import wrong
from contrastile.data.pairs import Indices


class Batches(Iterator[Tensor]):
    """Rows of a pair set, int64 `[b]` per step: shuffled epoch after epoch, a batch may reach over into the next.

    `rows` are those to train on, `sizes` the batch size of every step. `step` steps are passed over at the start, at no
    cost. The order of an epoch depends on `seed` and on its number alone.

    >>> first = list(Batches(np.arange(5), sizes=[2, 2, 2], seed=0))
    >>> later = list(Batches(np.arange(5), sizes=[2, 2, 2], seed=0, step=1))
    >>> [torch.equal(a, b) for a, b in zip(first[1:], later)]
    [True, True]
    """

    def __init__(self, rows: Indices, *, sizes: Sequence[int], seed: int, step: int = 0) -> None:
        if len(rows) == 0:
            raise wrong("rows", "not be empty", "no rows", "Give the training split of a pair set.")
        if not 0 <= step <= len(sizes):
            raise wrong("step", f"be between 0 and the {len(sizes)} steps of the run", step, "Start again from step 0.")
        self._rows, self._sizes, self._seed = rows, sizes, seed
        self.step = step
        self.examples = sum(sizes[:step])
        self._shuffled = (-1, rows)

    def __next__(self) -> Tensor:
        if self.step == len(self._sizes):
            raise StopIteration
        rows = self.ahead(self._sizes[self.step])
        self.examples += len(rows)
        self.step += 1
        return rows

    def ahead(self, count: int) -> Tensor:
        """The `count` rows that come next, whatever the batches that they come in."""
        parts, here = [], self.examples
        while here < self.examples + count:
            epoch, start = divmod(here, len(self._rows))
            part = self._epoch(epoch)[start : start + self.examples + count - here]
            here += len(part)
            parts.append(part)
        return torch.from_numpy(np.concatenate(parts))

    def _epoch(self, number: int) -> Indices:
        if self._shuffled[0] != number:
            shuffled = np.random.default_rng((self._seed, number)).permutation(self._rows)
            self._shuffled = (number, shuffled)
        return self._shuffled[1]
