"""The report of a run that is not through: `report.html` again at every probe, and when it is asked to stop.

Beside `report.py`, which writes it once more with all results when the run is over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contrastile.train.config import AnyRecipe
from contrastile.train.folder import RunFolder
from contrastile.train.log import Listener
from contrastile.train.report import Wording, write_report
from contrastile.train.trackers import Careful, trackers

logger = logging.getLogger("contrastile")

# of a run's time, at most what its report may take: a page is drawn in about half a second
MOST = 0.05


class LiveReport:
    """Hears the probes, and writes the page from the folder and from what `facts` say at that moment.

    A probe is passed over where pages would take more than the share `MOST` of the time since the run went on.
    """

    def __init__(
        self, folder: RunFolder, facts: Callable[[], Mapping[str, Any]], wording: Wording | None = None
    ) -> None:
        self._folder, self._facts, self._wording = folder, facts, wording
        self._began = time.monotonic()
        self._spent = self._last = 0.0

    def hear(self, kind: str, values: Mapping[str, Any]) -> None:
        """After a probe the page is there, whole, or the one before still is."""
        del values
        now = time.monotonic()
        if kind != "probe" or self._spent + self._last > MOST * (now - self._began):
            return
        write_report(self._folder, wording=self._wording, so_far=self._facts())
        self._last = time.monotonic() - now
        self._spent += self._last

    def close(self) -> None:
        """The last page is another's."""


def page_of_stopped(folder: RunFolder, facts: Mapping[str, Any], wording: Wording | None = None) -> None:
    """The page of a run that was asked to stop, with its curves up to there; a failure is told, and is no other's."""
    try:
        write_report(folder, wording=wording, so_far=facts)
    except Exception as failure:
        logger.warning("the report failed, the run is kept: %r", failure)


def listeners(
    recipe: AnyRecipe, folder: RunFolder, facts: Callable[[], Mapping[str, Any]], wording: Wording | None = None
) -> Sequence[Listener]:
    """All who hear what this run says: its report, and the trackers that its recipe names."""
    return [Careful(LiveReport(folder, facts, wording), "the report"), *trackers(recipe, folder)]
