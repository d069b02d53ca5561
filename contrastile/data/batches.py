"""The order of training: rows of each step, decided by the seed and the position alone.

Stands between the `PairSet` and the towers. The only state is the position, so a resumed run sees exactly the pairs
that it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Indices


class Batches(Iterator[Tensor]):
    """Rows of a pair set, int64 `[b]` per step: shuffled epoch after epoch, a batch may reach over into the next.

    `rows` are the training rows, `sizes` the batch size of every step. The first `step` steps are passed over at no
    cost. The order of an epoch depends on `seed` and on its number alone.

    >>> first = list(Batches(np.arange(5), sizes=[2, 2, 2], seed=0))
    >>> later = list(Batches(np.arange(5), sizes=[2, 2, 2], seed=0, step=1))
    >>> [torch.equal(a, b) for a, b in zip(first[1:], later)]
    [True, True]
    """

    def __init__(self, rows: Indices, *, sizes: Sequence[int], seed: int, step: int = 0) -> None:
        if len(rows) == 0:
            raise invalid("rows", "not be empty", "no rows", "Give the training split of a pair set.")
        if not 0 <= step <= len(sizes):
            rule = f"be between 0 and the {len(sizes)} steps of the run"
            raise invalid("step", rule, step, "Start again from step 0.")
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
        """The next `count` rows, in whatever batches they come."""
        pieces, position, end = [], self.examples, self.examples + count
        while position < end:
            epoch, start = divmod(position, len(self._rows))
            pieces.append(self._epoch(epoch)[start : start + end - position])
            position += len(pieces[-1])
        return torch.from_numpy(np.concatenate(pieces))

    def _epoch(self, number: int) -> Indices:
        if self._shuffled[0] != number:
            shuffled = np.random.default_rng((self._seed, number)).permutation(self._rows)
            self._shuffled = (number, shuffled)
        return self._shuffled[1]
