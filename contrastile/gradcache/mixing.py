"""Mixing check: a warning where the features of an example depend on the other examples of its sub-batch.

An encoder that centres its features, normalises by hand or attends across the batch gives other features in sub-batches
than in the whole batch. Once for each encoder and mode, `encode.first_pass` runs the first sub-batch again with every
second example replaced by the batch's last one, and with the same random numbers. The features of the other examples
must stay as they are. Batch normalisation is refused before this, in `introspect.py`.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile._types import accumulator
from contrastile.gradcache.forward import Job, OutputForm
from contrastile.gradcache.inputs import Layout
from contrastile.gradcache.introspect import without_partials
from contrastile.gradcache.modes import in_modes
from contrastile.gradcache.replay_check import Sketches, sketched, tolerance
from contrastile.gradcache.rng import RandomState

# encoders that were checked: names and training modes, by a module of theirs or by their code
_checked: WeakKeyDictionary[Any, set[tuple[str, bool]]] = WeakKeyDictionary()


def to_check(job: Job) -> bool:
    """Return whether sub-batches could differ from the batch, and this encoder was not checked before.

    Sharded modules are left out, because all ranks would have to run again, and inputs that are not all rows.
    """
    (start, stop), *others = job.bounds
    function, modules = without_partials(job.encoder), job.reached.modules
    owner = modules[0] if modules else getattr(function, "__code__", None)
    cut = isinstance(job.layout, Layout) and job.layout.plain and others and stop - start > 1
    if owner is None or not cut or job.sharding.modules:
        return False
    checked, case = _checked.setdefault(owner, set()), (job.name, any(module.training for module in modules))
    if case in checked:
        return False
    checked.add(case)
    return True


def warn_of_mixing(
    job: Job,
    rows: Sequence[Tensor | None],
    values: Sequence[Tensor],
    wanted: Sequence[bool] | None,
    before: Sketches,
    random: RandomState,
) -> None:
    """Warn if features of the first sub-batch, sketched `before`, change with other examples of it.

    rows: its inputs. values: those of the whole batch. wanted: as for `Job.run`. random: the generators before it.
    """
    count = job.bounds[0][1]

    def replaced(row: Tensor, value: Tensor) -> Tensor:
        others = row.clone()
        others[1::2] = value[-1].to(row.device)
        return others

    def sketches(inputs: Sequence[Tensor | None]) -> Sketches:
        random.restore()
        outputs, _ = job.with_room(lambda: job.run(0, inputs, OutputForm(), wanted), random)
        return sketched(outputs)

    def drew() -> bool:
        now = job.reached.random(last=random)
        return not random.same(now) or now.drew_own(random)

    def differ(now: Sketches, before: Sketches) -> bool:
        pairs = zip(now, before, strict=True) if len(now) == len(before) else ()
        # an axis that follows the lengths of the other examples is not compared
        alike = [(x, y) for x, y in pairs if x is not None and y is not None and x.shape == y.shape]
        rows = [(x, *(each.view(count, -1)[::2] for each in (x, y))) for x, y in alike if len(x) % count == 0]
        return any(_distance(now, before) > limit(x) for x, now, before in rows)

    def limit(x: Tensor) -> float:
        return tolerance([x.dtype, *job.reached.dtypes, *job.autocast.dtypes], accelerated=x.device.type != "cpu")

    modules = job.reached.modules
    with job.reached.random().restoring():
        mixed = [row if row is None else replaced(row, value) for row, value in zip(rows, values, strict=True)]
        if not differ(sketches(mixed), before):
            return
        # dropout draws other numbers where shapes follow the lengths of the other examples
        with in_modes(modules, [False] * len(modules)) if drew() else nullcontext():
            again = sketches(rows)
            # an encoder with a state of its own differs in any case; the replay check notices it
            if drew() or differ(sketches(rows), again) or not differ(sketches(mixed), again):
                return
    rule, got = "treat examples one by one", f"{job.name}, whose features of an example depend on the rest of its batch"
    remedy = "Look for means over the batch, or for attention along its axis (batch_first=False)."
    warnings.warn(str(invalid("encoder", rule, got, remedy)), stacklevel=2)


def _distance(now: Tensor, before: Tensor) -> float:
    """The difference in relation to the size; 0 where either is not finite."""
    gap, size = (torch.linalg.vector_norm(x, dtype=accumulator(x.dtype)) for x in (now - before, before))
    return float((gap / size).nan_to_num(0.0, 0.0, 0.0))
