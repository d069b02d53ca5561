"""Transfer evaluation: zero-shot classification and caption retrieval on other pictures than the run's own.

Beside `evaluation.py`, which measures the held-out parts of the run's pairs. Tests are measured on samples at each
probe, whole at the end of a run, and by `contrastile evaluate RUN --zero-shot FOLDER`. Ranks share the pictures out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.captions import Captioned, open_captions
from contrastile.data.class_folder import ClassFolder, open_class_folder
from contrastile.data.classes import read_prompts
from contrastile.data.loader import read_chunks
from contrastile.data.pairs import Indices
from contrastile.data.skipped import counted
from contrastile.distributed import collectives, consistency
from contrastile.evaluate.retrieval import both_ways, chance_among
from contrastile.evaluate.zeroshot import class_features, classified
from contrastile.models.base import evaluating
from contrastile.offload import settle
from contrastile.train.config.image_text import EvaluateSettings, RetrievalSettings, ZeroShotSettings
from contrastile.train.evaluation import Row, ranks_below, result_row
from contrastile.train.folder import EVALUATION, METADATA, METRICS, RunFolder, finished_run
from contrastile.train.log import Metrics, progress
from contrastile.train.report.page import table_text, write_report
from contrastile.train.run import Run, load
from contrastile.train.sharded import is_sharded
from contrastile.train.task import Measure

logger = logging.getLogger("contrastile")

# features, the rows of their pictures, and the reasons why the others have none
Encoded = tuple[Tensor, Indices, Counter[str]]
AnyTest = ZeroShotSettings | RetrievalSettings
# with fewer pictures threads have finished before decoding processes have started
MANY = 4000
# consecutive pictures of one rank, at least a sub-batch
CHUNK = 256


class Test(Protocol):
    """An opened test."""

    @property
    def name(self) -> str:
        """The prefix of its measures."""

    def measure(self, run: Run, most: int | None = None) -> list[Row]:
        """Its rows, from all pictures, or from a sample of at most `most`, the same every time."""


@dataclass(frozen=True)
class ZeroShot:
    """Images by class, and the prompts for the classes' names."""

    name: str
    folder: ClassFolder
    templates: Sequence[str]

    def measure(self, run: Run, most: int | None = None) -> list[Row]:
        """Top 1, top 5 and the mean per class."""
        rows = _sample(len(self.folder.paths), most)
        with evaluating(run.model):
            pictures, readable, skipped = _encode(run, [self.folder.paths[row] for row in rows], self.name)
            names = class_features(self.folder.names, encode=run.encode_text, prompts=self.templates)
        if (alike := len(names) - len(names.unique(dim=0))) > 0:
            # ties count as wrong, so these classes cannot be recognised
            message = "%s: %d classes have the very features of others: names that are equal, or cut at %d tokens"
            logger.warning(message, self.name, alike, run.tokenizer.length)
        labels = torch.from_numpy(self.folder.labels[rows][readable]).to(run.device)
        right = torch.from_numpy(self.folder.right).to(run.device)
        measured = classified(pictures, names, labels, right)
        guessed = right.double().mean(dim=1)[labels].mean().item()
        metrics = {f"{self.name}-zeroshot-val-{name}": value for name, value in measured.items()}
        shares = {name.removeprefix("top"): value for name, value in measured.items() if name.startswith("top")}
        return [_row(f"{self.name}, zero-shot", (len(pictures), len(names)), shares, guessed, metrics, skipped)]


@dataclass(frozen=True)
class Retrieval:
    """Images with their captions."""

    name: str
    captioned: Captioned

    def measure(self, run: Run, most: int | None = None) -> list[Row]:
        """Recall and ranks of the first right answer, in both directions."""
        paths, owner = self.captioned.paths, self.captioned.owner
        rows = _sample(len(paths), most)
        with evaluating(run.model):
            pictures, readable, skipped = _encode(run, [paths[row] for row in rows], self.name)
            # the position of each picture among the encoded ones, −1 for those without features
            number = np.full(len(paths), -1)
            number[rows[readable]] = np.arange(len(readable))
            chosen = np.flatnonzero(number[owner] >= 0)
            # equal captions are one query and one answer
            distinct: dict[str, int] = {}
            caption = [distinct.setdefault(self.captioned.texts[row], len(distinct)) for row in chosen]
            texts = run.encode_text(list(distinct))
        matches = torch.from_numpy(np.unique([number[owner[chosen]], caption], axis=1)).to(run.device)
        sizes = len(pictures), len(texts)
        measured = both_ways(pictures, texts, *matches)
        directions = {
            "image_to_text": ("picture → caption", sizes),
            "text_to_image": ("caption → picture", sizes[::-1]),
        }
        results = []
        for (direction, (label, counts)), queries in zip(directions.items(), matches, strict=True):
            shares = {str(k): measured[f"{direction}_R@{k}"] for k in ranks_below(counts[1])}
            guessed = chance_among(queries.bincount(minlength=counts[0]), counts[1], ks=(1,))[1]
            metrics = {name: value for name, value in measured.items() if name.startswith(direction)}
            results.append(_row(f"{self.name}, {label}", counts, shares, guessed, metrics, skipped))
        return results


def _row(
    test: str,
    counts: tuple[int, int],
    shares: dict[str, float],
    guessed: float | None,
    metrics: Mapping[str, float],
    skipped: Mapping[str, int],
) -> Row:
    """A row with measures by open_clip's names, and the counts of unreadable pictures; a failed test has no shares."""
    row = result_row(test, counts, shares, guessed, headline=bool(shares))
    return {**row, "metrics": dict(metrics), "skipped": dict(skipped)}


def _sample(count: int, most: int | None) -> Indices:
    """All rows, or a random sample of at most `most`, in ascending order."""
    return np.sort(np.random.default_rng(0).permutation(count)[:most])


def _encode(run: Run, paths: Sequence[str], name: str) -> Encoded:
    """Encode the readable pictures; raises ValueError where more than `data.max_bad_fraction` are not."""
    most_bad = run.recipe.data.max_bad_fraction
    features, readable, skipped = _gather(run, lambda: _encode_own(run, paths, name))
    if skipped.total() > most_bad * len(paths) or not len(readable):
        bad = paths[np.setdiff1d(np.arange(len(paths)), readable)[0]]
        got = f"{skipped.total():,} of {len(paths):,} that cannot ({counted(skipped)}), the first being {bad}"
        remedy = "Mend or remove them, or raise data.max_bad_fraction in the recipe of the run."
        raise invalid(name, f"be pictures that can be read, but for {most_bad:.1%}", got, remedy)
    if skipped:
        logger.warning("%s: %d of %d pictures are left out (%s)", name, skipped.total(), len(paths), counted(skipped))
    return features, readable, skipped


def _gather(run: Run, encode_own: Callable[[], Encoded]) -> Encoded:
    """Gather the features of all ranks in the order of the pictures; if one rank fails, all do."""
    if collectives.size(None) == 1:
        return encode_own()
    try:
        features, readable, skipped = encode_own()
    except Exception as failure:
        # ranks that wait for this one's shards of the towers notice when this rank leaves
        if not is_sharded(run.model):
            consistency.agree(None, {"error": str(failure) or repr(failure)})
        raise
    statements = consistency.agree(None, {"count": len(readable), "skipped": skipped}, free=("count", "skipped"))
    places = torch.from_numpy(readable).to(features.device)
    counts = [statement["count"] for statement in statements]
    features, places = collectives.begin_gather([features, places], counts, None).wait()
    order = places.argsort()
    skipped = sum((Counter(statement["skipped"]) for statement in statements), Counter())
    return features[order], places[order].cpu().numpy(), skipped


def _encode_own(run: Run, paths: Sequence[str], name: str) -> Encoded:
    """Encode this rank's pictures: every W-th chunk, whose content does not depend on the number of ranks W."""
    data, size = run.recipe.data, max(CHUNK, run.recipe.train.sub_batch.image)
    own = np.flatnonzero(np.arange(len(paths)) // size % collectives.size(None) == collectives.rank(None))
    shape, features, readable, skipped = (data.channels, data.image_size, data.image_size), [], [], Counter[str]()
    files, apart = [paths[row] for row in own.tolist()], run.device.type == "cuda" and len(own) >= MANY
    with progress(len(own), f"encoding {name}", "pictures") as bar:
        for part, pictures, reasons in read_chunks(files, shape, chunk=size, apart=apart):
            good = [place for place, reason in enumerate(reasons) if reason is None]
            skipped.update(reason for reason in reasons if reason is not None)
            readable += [part.start + place for place in good]
            features.append(run.encode_image(pictures[good] if len(good) < len(part) else pictures))
            # the next pictures are decoded into the same memory, from which a GPU may still be copying
            settle(run.device)
            bar.update(len(part))
    if len(features) < -(-len(paths) // (size * collectives.size(None))):
        # sharded towers run on all ranks together, as often as the first rank needs them
        features.append(run.encode_image(torch.empty((0, *shape), dtype=torch.uint8)))
    return torch.cat(features), own[np.array(readable, np.int64)], skipped


def settings_of(settings: EvaluateSettings) -> tuple[AnyTest, ...]:
    """The settings of all tests of a recipe."""
    return (*settings.zero_shot, *settings.retrieval)


def open_test(test: AnyTest) -> Test:
    """Open a test: read its lists, no picture yet; raises ValueError where the lists do not fit together."""
    if isinstance(test, RetrievalSettings):
        return Retrieval(test.called, open_captions(test.captions, images=test.images, split=test.split))
    folder = open_class_folder(test.folder, classes=test.classes, mapping=test.mapping, among=test.among)
    if folder.left_out:
        logger.warning("%s: %d folders have no class and are left out", test.called, folder.left_out)
    return ZeroShot(test.called, folder, read_prompts(test.templates))


def measures(run: Run, tests: Sequence[Test], results: dict[int, list[Row]] | None = None) -> list[Measure]:
    """A measurement of each test for metrics.jsonl: on a sample, or on all pictures where `results` takes the rows.

    results: rows of each test by its index.
    """

    def measure(index: int, test: Test) -> list[dict[str, Any]]:
        if results is None:
            return [_line(row) for row in test.measure(run, run.recipe.evaluate.probe)]
        results[index] = test.measure(run)
        return [_line(row, whole=True) for row in results[index]]

    return [(test.name, partial(measure, index, test)) for index, test in enumerate(tests)]


def _line(row: Row, **more: Any) -> dict[str, Any]:
    """A row for metrics.jsonl."""
    return {"test": row["test"], "queries": row["queries"], "choices": row["choices"], **row["metrics"], **more}


def measure_all(run: Run, folder: RunFolder, results: Mapping[int, list[Row]]) -> list[Row]:
    """The rows of every test of the run's recipe on all pictures; failures go into the log and metrics.jsonl.

    results: rows that ranks have measured already, by the index of their test.
    """
    rows: list[Row] = []
    tests = settings_of(run.recipe.evaluate)
    if not tests:
        return rows
    examples = folder.read_json(METADATA)["examples"]
    with Metrics(folder / METRICS) as metrics:
        for index, test in enumerate(tests):
            if index in results:
                rows += results[index]
                continue
            try:
                measured = open_test(test).measure(run)
            except Exception as failure:
                logger.warning("the test %s failed, the others go on: %r", test.called, failure)
                metrics.write("failure", examples=examples, what=test.called, why=repr(failure))
                measured = [_row(f"{test.called}, failed: {failure}", (0, 0), {}, None, {}, {})]
            for row in measured:
                if row["metrics"]:
                    metrics.write("test", examples=examples, **_line(row, whole=True))
            rows += measured
    return rows


def evaluate_transfer(path: str | Path, tests: Sequence[AnyTest], *, device: str = "auto") -> str:
    """Measure a finished run on `tests` alone, add their rows to its results and its report; a table of them."""
    folder = finished_run(path)
    opened = [open_test(test) for test in tests]
    run = load(folder.path, device=device)
    rows = [row for test in opened for row in test.measure(run)]
    tested = {row["test"] for row in rows}
    before = folder.read_json(EVALUATION) if (folder / EVALUATION).is_file() else []
    folder.write_json(EVALUATION, [*(row for row in before if row["test"] not in tested), *rows])
    write_report(folder)
    return table_text(rows)
