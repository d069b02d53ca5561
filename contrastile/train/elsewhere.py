"""What a model is worth on pictures from elsewhere: classes told by their names, captions and pictures found.

Beside `evaluation.py`, which measures on the held-out part of the run's own pairs. What is opened here is measured in
small at each probe, whole at the end of a run, and by `contrastile evaluate RUN --zero-shot FOLDER`. Ranks share the
pictures out. The arithmetic is `evaluate/`'s.
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

from contrastile import agreement, comm
from contrastile._check import wrong
from contrastile.data.captions import Captioned, open_captions
from contrastile.data.class_folder import ClassFolder, open_class_folder
from contrastile.data.classes import read_templates
from contrastile.data.decoding import stretches
from contrastile.data.pairs import Indices
from contrastile.data.skipped import counted
from contrastile.evaluate.retrieval import both_ways, chance
from contrastile.evaluate.zeroshot import class_features, classified
from contrastile.models.base import evaluating
from contrastile.offload import settle
from contrastile.train.checkpoint import Run, load
from contrastile.train.evaluate_settings import EvaluateSettings, RetrievalSettings, ZeroShotSettings
from contrastile.train.evaluation import KS, Row
from contrastile.train.folder import EVALUATION, FACTS, METRICS, RunFolder, finished_run
from contrastile.train.job import Measure
from contrastile.train.log import Metrics, progress
from contrastile.train.report import table_text, write_report
from contrastile.train.sharded import is_sharded

logger = logging.getLogger("contrastile")

# features, of which pictures they are, and why the others have none
Encoded = tuple[Tensor, Indices, Counter[str]]
AnyTest = ZeroShotSettings | RetrievalSettings
# processes take a moment to start: of fewer pictures threads are through by then
MANY = 4000
# pictures that one rank reads and encodes before the next one's turn, or a sub-batch where that is larger
STRETCH = 256


class Test(Protocol):
    """A test that is opened."""

    @property
    def name(self) -> str:
        """What its measures are called by."""

    def measure(self, run: Run, most: int | None = None) -> list[Row]:
        """Its rows; of at most `most` pictures, the same ones every time."""


@dataclass(frozen=True)
class ZeroShot:
    """Pictures by classes, and the sentences that the classes' names are put into."""

    name: str
    folder: ClassFolder
    templates: Sequence[str]

    def measure(self, run: Run, most: int | None = None) -> list[Row]:
        """Top 1, top 5 and the mean per class."""
        rows = _sample(len(self.folder.paths), most)
        with evaluating(run.model):
            pictures, there, skipped = _encode(run, [self.folder.paths[row] for row in rows], self.name)
            names = class_features(self.folder.names, encode=run.encode_text, prompts=self.templates)
        if (alike := len(names) - len(names.unique(dim=0))) > 0:
            # ties count against the model: none of these can be told
            told = "%s: %d classes have the very features of others: names that are equal, or cut at %d tokens"
            logger.warning(told, self.name, alike, run.tokenizer.length)
        labels = torch.from_numpy(self.folder.labels[rows][there]).to(run.device)
        right = torch.from_numpy(self.folder.right).to(run.device)
        measured = classified(pictures, names, labels, right)
        guessed = right.double().mean(dim=1)[labels].mean().item()
        metrics = {f"{self.name}-zeroshot-val-{name}": value for name, value in measured.items()}
        recall = {name.removeprefix("top"): value for name, value in measured.items() if name.startswith("top")}
        return [_row(f"{self.name}, zero-shot", (len(pictures), len(names)), recall, guessed, metrics, skipped)]


@dataclass(frozen=True)
class Retrieval:
    """Pictures with their captions."""

    name: str
    captioned: Captioned

    def measure(self, run: Run, most: int | None = None) -> list[Row]:
        """Recall both ways, and where the first right answer stands."""
        paths, owner = self.captioned.paths, self.captioned.owner
        rows = _sample(len(paths), most)
        with evaluating(run.model):
            pictures, there, skipped = _encode(run, [paths[row] for row in rows], self.name)
            # a caption goes with its picture
            number = np.full(len(paths), -1)
            number[rows[there]] = np.arange(len(there))
            kept = np.flatnonzero(number[owner] >= 0)
            texts = run.encode_text([self.captioned.texts[row] for row in kept])
        owners = torch.from_numpy(number[owner[kept]]).to(run.device)
        sizes = len(pictures), len(texts)
        measured = both_ways(pictures, texts, owners)
        ids = torch.arange(sizes[0], device=run.device)
        ways = {"image_to_text": ("picture → caption", sizes), "text_to_image": ("caption → picture", sizes[::-1])}
        made = []
        for way, (called, counts) in ways.items():
            recall = {str(k): measured[f"{way}_R@{k}"] for k in KS if k == 1 or k < counts[1]}
            guessed = chance(*((ids, owners) if way == "image_to_text" else (owners, ids)), ks=(1,))[1]
            own = {name: value for name, value in measured.items() if name.startswith(way)}
            made.append(_row(f"{self.name}, {called}", counts, recall, guessed, own, skipped))
        return made


def _row(
    test: str,
    counts: tuple[int, int],
    recall: Mapping[str, float],
    guessed: float | None,
    metrics: Mapping[str, float],
    skipped: Mapping[str, int],
) -> Row:
    """As `evaluation.py`'s, with the measures by the names that open_clip gives them, and what could not be read."""
    queries, choices = counts
    return {
        "test": test,
        "queries": queries,
        "choices": choices,
        "recall": dict(recall),
        "chance": guessed,
        # one that failed has nothing to show
        "headline": bool(recall),
        "metrics": dict(metrics),
        "skipped": dict(skipped),
    }


def _sample(count: int, most: int | None) -> Indices:
    """All, or `most` of them by lot, in their order."""
    return np.sort(np.random.default_rng(0).permutation(count)[:most])


def _encode(run: Run, paths: Sequence[str], name: str) -> Encoded:
    """Features of the pictures that can be read, which ones these are, and why the others cannot."""
    most_bad = run.recipe.data.max_bad_fraction
    features, there, skipped = _shared(run, lambda: _encode_own(run, paths, name))
    if skipped.total() > most_bad * len(paths) or not len(there):
        bad = paths[np.setdiff1d(np.arange(len(paths)), there)[0]]
        got = f"{skipped.total():,} of {len(paths):,} that cannot ({counted(skipped)}), the first being {bad}"
        remedy = "Mend or remove them, or raise data.max_bad_fraction in the recipe of the run."
        raise wrong(name, f"be pictures that can be read, but for {most_bad:.1%}", got, remedy)
    if skipped:
        logger.warning("%s: %d of %d pictures are left out (%s)", name, skipped.total(), len(paths), counted(skipped))
    return features, there, skipped


def _shared(run: Run, encode_own: Callable[[], Encoded]) -> Encoded:
    """What all ranks encode, in the order of the pictures, the same on each of them; where one fails all do."""
    if comm.size(None) == 1:
        return encode_own()
    try:
        features, there, skipped = encode_own()
    except Exception as failure:
        # with towers in shards the others may be gathering them, and hear of it where this rank leaves
        if not is_sharded(run.model):
            agreement.agree(None, {"error": str(failure) or repr(failure)})
        raise
    stated = agreement.agree(None, {"count": len(there), "skipped": skipped}, free=("count", "skipped"))
    places = torch.from_numpy(there).to(features.device)
    features, places = comm.begin_gather([features, places], [one["count"] for one in stated], None).wait()
    order = places.argsort()
    return features[order], places[order].cpu().numpy(), sum((Counter(one["skipped"]) for one in stated), Counter())


def _encode_own(run: Run, paths: Sequence[str], name: str) -> Encoded:
    """This rank's part: of as many stretches as there are ranks one. What is in one does not depend on their number."""
    data, stretch = run.recipe.data, max(STRETCH, run.recipe.train.sub_batch.image)
    own = np.flatnonzero(np.arange(len(paths)) // stretch % comm.size(None) == comm.rank(None))
    shape, features, there, skipped = (data.channels, data.image_size, data.image_size), [], [], Counter[str]()
    files, apart = [paths[row] for row in own.tolist()], run.device.type == "cuda" and len(own) >= MANY
    with progress(len(own), f"encoding {name}", "pictures") as bar:
        for part, pictures, reasons in stretches(files, shape, stretch=stretch, apart=apart):
            good = [place for place, reason in enumerate(reasons) if reason is None]
            skipped.update(reason for reason in reasons if reason is not None)
            there += [part.start + place for place in good]
            features.append(run.encode_image(pictures[good] if len(good) < len(part) else pictures))
            # others are decoded into the memory of these as soon as nobody here holds them; a GPU may still fetch them
            settle(run.device)
            bar.update(len(part))
    if len(features) < -(-len(paths) // (stretch * comm.size(None))):
        # towers in shards are run by all ranks together, as often as the first one needs them
        features.append(run.encode_image(torch.empty((0, *shape), dtype=torch.uint8)))
    return torch.cat(features), own[np.array(there, np.int64)], skipped


def named(settings: EvaluateSettings) -> tuple[AnyTest, ...]:
    """All tests that a recipe names."""
    return (*settings.zero_shot, *settings.retrieval)


def open_test(test: AnyTest) -> Test:
    """A test with its lists read and no picture; raises ValueError where they do not fit together."""
    if isinstance(test, RetrievalSettings):
        return Retrieval(test.called, open_captions(test.captions, images=test.images, split=test.split))
    folder = open_class_folder(test.folder, classes=test.classes, mapping=test.mapping, among=test.among)
    if folder.left_out:
        logger.warning("%s: %d folders have no class and are left out", test.called, folder.left_out)
    return ZeroShot(test.called, folder, read_templates(test.templates))


def measures(run: Run, tests: Sequence[Test], found: dict[int, list[Row]] | None = None) -> list[Measure]:
    """What measures each test in small, with its name: lines for metrics.jsonl.

    Whole, where there is room for what is `found`: the rows of each test, by its place.
    """

    def probe(test: Test) -> list[dict[str, Any]]:
        return [_line(row) for row in test.measure(run, run.recipe.evaluate.probe)]

    def whole(test: Test, place: int, found: dict[int, list[Row]]) -> list[dict[str, Any]]:
        found[place] = test.measure(run)
        return [_line(row, whole=True) for row in found[place]]

    if found is None:
        return [(test.name, partial(probe, test)) for test in tests]
    return [(test.name, partial(whole, test, place, found)) for place, test in enumerate(tests)]


def _line(row: Row, **more: Any) -> dict[str, Any]:
    """A row for metrics.jsonl."""
    return {"test": row["test"], "queries": row["queries"], "choices": row["choices"], **row["metrics"], **more}


def measure_all(run: Run, folder: RunFolder, found: Mapping[int, list[Row]]) -> list[Row]:
    """Every test of the run's recipe on all of its pictures, told in metrics.jsonl; one that fails is told too.

    Those `found` already, by their place, are taken as they are.
    """
    rows: list[Row] = []
    tests = named(run.recipe.evaluate)
    if not tests:
        return rows
    examples = folder.read_json(FACTS)["examples"]
    with Metrics(folder / METRICS) as metrics:
        for place, test in enumerate(tests):
            if place in found:
                rows += found[place]
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


def evaluate_elsewhere(path: str | Path, tests: Sequence[AnyTest], *, device: str = "auto") -> str:
    """Measure a finished run on `tests` alone, put their rows into its results and its report; a table of them."""
    folder = finished_run(path)
    opened = [open_test(test) for test in tests]
    run = load(folder.path, device=device)
    rows = [row for test in opened for row in test.measure(run)]
    tested = {row["test"] for row in rows}
    before = folder.read_json(EVALUATION) if (folder / EVALUATION).is_file() else []
    folder.write_json(EVALUATION, [*(row for row in before if row["test"] not in tested), *rows])
    write_report(folder)
    return table_text(rows)
