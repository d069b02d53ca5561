"""Evaluation of towers: on held-out parts of a run's pairs, and by tests on other images (transfer).

Held-out parts: recall in both directions, zero-shot by prompts, handwritten digits. Tests: zero-shot classification and
caption retrieval, measured on samples at each probe, and whole at the end of a run and by `contrastile evaluate`.
`evaluate/` has the arithmetic; this file selects queries and keys, and samples of them for the report. Each rank
encodes a part of a test's images.
"""

import base64
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from contrastile._errors import invalid, logger
from contrastile.data.base import Images, Indices, counted, held_out, percent
from contrastile.data.evaluation_sets import Captioned, ClassFolder, open_captions, open_class_folder, read_prompts
from contrastile.data.glyphs import DIGIT_NAMES, handwritten_digits
from contrastile.data.loader import read_chunks
from contrastile.data.pairs import PairSet
from contrastile.data.sources import is_collection
from contrastile.distributed import collectives, consistency
from contrastile.evaluate.retrieval import both_ways, chance, chance_among, class_features, classified, recall, topk
from contrastile.models.base import evaluating
from contrastile.offload import settle
from contrastile.train.config.image_text import RetrievalSettings, ZeroShotSettings
from contrastile.train.folder import METADATA, METRICS, RunFolder, finished_run
from contrastile.train.load import load
from contrastile.train.log import Metrics, progress
from contrastile.train.report.page import IMAGE_TEXT, Row, Samples, result_row, table_text, write_report, write_results
from contrastile.train.run import Run
from contrastile.train.sharded import is_sharded

KS = (1, 5, 10)
# images of a pair set that are read and encoded at once
CHUNK = 2048
PARTS = IMAGE_TEXT.parts
# features of the readable images of a test, the rows of these images, and counts of the unreadable ones by reason
TestImages = tuple[Tensor, Indices, Counter[str]]
AnyTest = ZeroShotSettings | RetrievalSettings
# from a run to the rows of a test, on all of its images or on at most so many
Measurement = Callable[..., list[Row]]
# image files of a test that a rank reads and encodes at once, at least a sub-batch
FILES_AT_ONCE = 256
# queries shown of each held-out part, and answers shown to each query
PICTURES, NAMES, NEAREST = 9, 6, 5
# the largest width of an image in the page, in pixels, so that the file stays small
THUMBNAIL = 96
READS = "The right name in bold; below it the five nearest of all {:,} names, the best first. Right ones are marked."
FINDS = "Each name with the five nearest of {:,} images, the best first. Right ones are marked."
# files of a rank from which on processes decode: threads have finished fewer before processes have started
LEAST_FOR_PROCESSES = 4000


@dataclass(frozen=True)
class Encoded:
    """Images or names of a pair set: their rows, features `[n, D]` and ids `[n]`. Equal names stand once."""

    rows: Indices
    features: Tensor
    ids: Tensor


# images and names of each held-out part, and the prompted names of the whole pair set as classes
HeldOut = tuple[dict[str, tuple[Encoded, Encoded]], Encoded]


def encode_held_out(run: Run, pairs: PairSet) -> HeldOut:
    parts = {}
    with evaluating(run.model):
        for name, rows in held_out(pairs.splits).items():
            features = encode_pictures(run, pairs.images, rows, f"encoding {PARTS.get(name, name)}")
            parts[name] = Encoded(rows, features, ids_of(run, pairs, rows)), encode_names(run, pairs, rows)
        classes = encode_names(run, pairs, np.arange(len(pairs)), prompts=run.recipe.evaluate.prompts)
    return parts, classes


def evaluate(run: Run, encoded: HeldOut) -> list[Row]:
    """Every test as a row: name, queries, choices, recall at `KS`, chance; a `headline` leads the report."""
    rows, (parts, classes) = [], encoded
    labelled = [(PARTS.get(name, name), *sides) for name, sides in parts.items()]
    for label, pictures, names in labelled:
        rows.append(_compare(f"{label}, picture → name", pictures, names, headline=True))
        rows.append(_compare(f"{label}, name → picture", names, pictures))
    # the names to train on of a collection may be millions
    choices = "all held-out names" if is_collection(run.recipe.data.source) else "all names"
    rows += [_compare(f"{label}, zero-shot among {choices}", part, classes) for label, part, _ in labelled]
    glyphs = run.recipe.data.source == "glyphs"
    return [*rows, digits(run)] if glyphs and run.recipe.evaluate.digits else rows


def digits(run: Run) -> Row:
    """Zero-shot recognition of scanned handwritten digits by their names, unlike anything in the training data."""
    data = run.recipe.data
    pictures, labels = handwritten_digits(image_size=data.image_size, channels=data.channels)
    with evaluating(run.model):
        features = encode_pictures(run, pictures, np.arange(len(pictures)), "encoding handwritten digits")
        names = class_features(DIGIT_NAMES, encode=run.encode_text, prompts=run.recipe.evaluate.prompts)
    images = Encoded(np.arange(len(pictures)), features, torch.from_numpy(labels).to(run.device))
    classes = Encoded(np.arange(len(names)), names, torch.arange(len(names), device=run.device))
    return _compare("handwritten digits, zero-shot", images, classes, headline=True)


def picture_samples(pairs: PairSet, encoded: HeldOut) -> Samples:
    """Galleries in both directions for each held-out part. The queries are random, the same every time."""
    generator, (parts, classes), galleries = np.random.default_rng(0), encoded, []
    for name, (pictures, names) in parts.items():
        sides = {
            True: (pictures, classes, PICTURES, "What it reads", READS.format(len(classes.rows))),
            False: (names, pictures, NAMES, "What it finds", FINDS.format(len(pictures.rows))),
        }
        for by_picture, (queries, keys, count, title, sentence) in sides.items():
            chosen = generator.permutation(len(queries.rows))[:count]
            finds = _finds(pairs, queries, keys, chosen, by_picture=by_picture)
            title = f"{title}: {PARTS.get(name, name)}"
            galleries.append({"title": title, "sentence": sentence, "by_picture": by_picture, "finds": finds})
    return galleries


def _finds(pairs: PairSet, queries: Encoded, keys: Encoded, chosen: Indices, *, by_picture: bool) -> Samples:
    """The nearest keys of the `chosen` queries. One side is shown as an image, the other as a name."""

    def shown(row: int, *, as_picture: bool) -> str:
        return picture_address(pairs.images[row]) if as_picture else pairs.captions[row]

    _, best = topk(queries.features[chosen], keys.features, min(NEAREST, len(keys.ids)))
    finds = []
    for index, nearest in zip(chosen.tolist(), best.tolist(), strict=True):
        right = (keys.ids[nearest] == queries.ids[index]).tolist()
        answers = [
            {"shown": shown(row, as_picture=not by_picture), "truth": pairs.captions[row], "right": is_right}
            for row, is_right in zip(keys.rows[nearest], right, strict=True)
        ]
        row = queries.rows[index]
        finds.append({"query": shown(row, as_picture=by_picture), "truth": pairs.captions[row], "answers": answers})
    return finds


def picture_address(picture: Images) -> str:
    """An image `[C, S, S]` uint8 as a data URL of a small PNG."""
    image = Image.fromarray(picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0))
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def probe(run: Run, pairs: PairSet) -> dict[str, dict[str, float]]:
    """Recall at 1 and 5 from image to name, of a sample of each held-out part among all of its names."""
    recalls = {}
    with evaluating(run.model):
        for name, rows in held_out(pairs.splits).items():
            sample = np.random.default_rng(0).permutation(rows)[: run.recipe.evaluate.probe]
            pictures = run.encode_image(torch.from_numpy(pairs.images[sample]))
            names = encode_names(run, pairs, rows)
            shares = recall(pictures, names.features, ids_of(run, pairs, sample), names.ids, ks=(1, 5))
            recalls[name] = {str(k): share for k, share in shares.items()}
    return recalls


def _compare(test: str, queries: Encoded, keys: Encoded, *, headline: bool = False) -> Row:
    shares = recall(queries.features, keys.features, queries.ids, keys.ids, ks=ranks_below(len(keys.ids)))
    guessed = chance(queries.ids, keys.ids)
    return result_row(test, len(queries.ids), len(keys.ids), shares, guessed, headline=headline)


def ranks_below(choices: int) -> tuple[int, ...]:
    """The values of `KS` below `choices`, and always 1: with k = `choices` every recall is 1."""
    return tuple(k for k in KS if k == 1 or k < choices)


def encode_names(run: Run, pairs: PairSet, rows: Indices, prompts: Sequence[str] | None = None) -> Encoded:
    """Encode each distinct caption of `rows`, alone or in `prompts`."""
    _, first = np.unique([pairs.captions[row] for row in rows], return_index=True)
    rows = rows[np.sort(first)]
    captions = [pairs.captions[row] for row in rows]
    encode = run.encode_text
    features = encode(captions) if prompts is None else class_features(captions, encode=encode, prompts=prompts)
    return Encoded(rows, features, ids_of(run, pairs, rows))


def encode_pictures(run: Run, images: Images, rows: Indices, label: str) -> Tensor:
    """Features of `images[rows]`, read in chunks, with a bar."""
    features = []
    with progress(len(rows), label, "images") as bar:
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            features.append(run.encode_image(torch.from_numpy(images[part])))
            bar.update(len(part))
    return torch.cat(features)


def ids_of(run: Run, pairs: PairSet, rows: Indices) -> Tensor:
    return torch.from_numpy(pairs.ids[rows]).to(run.device)


def zero_shot(name: str, folder: ClassFolder, templates: Sequence[str], run: Run, most: int | None = None) -> list[Row]:
    """Top 1, top 5 and the mean per class, of all images or of a sample of at most `most`."""
    with evaluating(run.model):
        pictures, rows, skipped = _encode_sample(run, folder.paths, name, most)
        names = class_features(folder.names, encode=run.encode_text, prompts=templates)
    if (alike := len(names) - len(names.unique(dim=0))) > 0:
        # ties count as wrong, so these classes cannot be recognised
        message = "%s: %d classes have the very features of others: names that are equal, or cut at %d tokens"
        logger.warning(message, name, alike, run.tokenizer.length)
    labels = torch.from_numpy(folder.labels[rows]).to(run.device)
    right = torch.from_numpy(folder.right).to(run.device)
    measured = classified(pictures, names, labels, right)
    guessed = right.double().mean(dim=1)[labels].mean().item()
    metrics = {f"{name}-zeroshot-val-{metric}": value for metric, value in measured.items()}
    shares = {metric.removeprefix("top"): value for metric, value in measured.items() if metric.startswith("top")}
    more = {"headline": True, "metrics": metrics, "skipped": skipped}
    return [result_row(f"{name}, zero-shot", len(pictures), len(names), shares, guessed, **more)]


def retrieval(name: str, captioned: Captioned, run: Run, most: int | None = None) -> list[Row]:
    """Recall and ranks of the first right answer, in both directions, of all images or of a sample."""
    paths, owner = captioned.paths, captioned.owner
    with evaluating(run.model):
        pictures, rows, skipped = _encode_sample(run, paths, name, most)
        # the position of each image among the encoded ones, −1 for those without features
        number = np.full(len(paths), -1)
        number[rows] = np.arange(len(rows))
        chosen = np.flatnonzero(number[owner] >= 0)
        # equal captions are one query and one answer
        distinct: dict[str, int] = {}
        caption = [distinct.setdefault(captioned.texts[row], len(distinct)) for row in chosen]
        texts = run.encode_text(list(distinct))
    matches = torch.from_numpy(np.unique([number[owner[chosen]], caption], axis=1)).to(run.device)
    measured = both_ways(pictures, texts, *matches)
    results, sizes = [], (len(pictures), len(texts))
    directions = (("image_to_text", "picture → caption", sizes), ("text_to_image", "caption → picture", sizes[::-1]))
    for (direction, label, counts), queries in zip(directions, matches, strict=True):
        shares = {k: measured[f"{direction}_R@{k}"] for k in ranks_below(counts[1])}
        guessed = chance_among(queries.bincount(minlength=counts[0]), counts[1])
        metrics = {metric: value for metric, value in measured.items() if metric.startswith(direction)}
        more: Row = {"headline": True, "metrics": metrics, "skipped": skipped}
        results.append(result_row(f"{name}, {label}", *counts, shares, guessed, **more))
    return results


def _encode_sample(run: Run, paths: Sequence[str], name: str, most: int | None = None) -> TestImages:
    """Encode all images, or a random sample of at most `most`, the same every time; unreadable ones are left out.

    Raises ValueError where these are more than `data.max_bad_fraction`.
    """
    rows, most_bad = np.sort(np.random.default_rng(0).permutation(len(paths))[:most]), run.recipe.data.max_bad_fraction
    paths = [paths[row] for row in rows]
    features, readable, skipped = _encode_on_all_ranks(run, paths, name)
    if skipped.total() > most_bad * len(paths) or not len(readable):
        bad = paths[np.setdiff1d(np.arange(len(paths)), readable)[0]]
        got = f"{skipped.total():,} of {len(paths):,} that cannot ({counted(skipped)}), the first being {bad}"
        remedy = "Mend or remove them, or raise data.max_bad_fraction in the recipe of the run."
        raise invalid(name, f"be images that can be read, but for {percent(most_bad)}", got, remedy)
    if skipped:
        logger.warning("%s: %d of %d images are left out (%s)", name, skipped.total(), len(paths), counted(skipped))
    return features, rows[readable], skipped


def _encode_on_all_ranks(run: Run, paths: Sequence[str], name: str) -> TestImages:
    """Gather the features of all ranks in the order of the images; if one rank fails, all do."""
    if collectives.size(None) == 1:
        return _encode_own(run, paths, name)
    try:
        features, readable, skipped = _encode_own(run, paths, name)
    except Exception as failure:
        # ranks that wait for this one's shards of the towers notice when this rank leaves
        if not is_sharded(run.model):
            consistency.agree(None, {"error": str(failure) or repr(failure)})
        raise
    statements = consistency.agree(None, {"count": len(readable), "skipped": skipped}, free=("count", "skipped"))
    counts = [statement["count"] for statement in statements]
    own_rows = torch.from_numpy(readable).to(features.device)
    features, rows = collectives.begin_gather([features, own_rows], counts, None).wait()
    order = rows.argsort()
    skipped = sum((Counter(statement["skipped"]) for statement in statements), Counter())
    return features[order], rows[order].cpu().numpy(), skipped


def _encode_own(run: Run, paths: Sequence[str], name: str) -> TestImages:
    """Encode this rank's images: every W-th chunk, whose content does not depend on the number of ranks W."""
    data, size = run.recipe.data, max(FILES_AT_ONCE, run.recipe.train.sub_batch.image)
    own_rows = np.flatnonzero(np.arange(len(paths)) // size % collectives.size(None) == collectives.rank(None))
    shape, features, readable, skipped = (data.channels, data.image_size, data.image_size), [], [], Counter[str]()
    timeout, files = run.recipe.train.timeout, [paths[row] for row in own_rows.tolist()]
    processes = run.device.type == "cuda" and len(files) >= LEAST_FOR_PROCESSES
    with progress(len(files), f"encoding {name}", "images") as bar:
        for part, pictures, reasons in read_chunks(files, shape, chunk=size, processes=processes, timeout=timeout):
            good = [index for index, reason in enumerate(reasons) if reason is None]
            skipped.update(filter(None, reasons))
            readable += [part.start + index for index in good]
            features.append(run.encode_image(pictures[good] if len(good) < len(part) else pictures))
            # the next images are decoded into the same memory, from which a GPU may still be copying
            settle(run.device)
            bar.update(len(part))
    if len(features) < -(-len(paths) // (size * collectives.size(None))):
        # sharded towers run on all ranks together, as often as the first rank needs them
        features.append(run.encode_image(torch.empty((0, *shape), dtype=torch.uint8)))
    return torch.cat(features), own_rows[np.array(readable, np.int64)], skipped


def open_test(test: AnyTest) -> Measurement:
    """Open a test: read its lists, no image yet; raises ValueError where the lists do not fit together."""
    if isinstance(test, RetrievalSettings):
        return partial(retrieval, test.called, open_captions(test.captions, images=test.images, split=test.split))
    folder = open_class_folder(test.folder, classes=test.classes, mapping=test.mapping, among=test.among)
    if folder.left_out:
        logger.warning("%s: %d folders have no class and are left out", test.called, folder.left_out)
    return partial(zero_shot, test.called, folder, read_prompts(test.templates))


def metrics_line(row: Row, **more: Any) -> dict[str, Any]:
    return {"test": row["test"], "queries": row["queries"], "choices": row["choices"], **row["metrics"], **more}


def measure_all(run: Run, folder: RunFolder, results: Mapping[int, list[Row]]) -> list[Row]:
    """The rows of every test of the run's recipe on all images; failures are logged.

    metrics.jsonl ends with a line of each, in place of those that an earlier evaluation wrote. results: rows that ranks
    have measured already, by the index of their test.
    """
    rows: list[Row] = []
    lines: list[tuple[str, dict[str, Any]]] = []
    tests, examples = run.recipe.evaluate.tests, folder.read_json(METADATA)["examples"]
    for index, test in enumerate(tests):
        try:
            measured = results.get(index) or open_test(test)(run)
            lines += [("test", metrics_line(row, whole=True)) for row in measured]
        except Exception as failure:
            logger.warning("the test %s failed, the others go on: %r", test.called, failure)
            lines.append(("failure", {"what": test.called, "why": repr(failure), "whole": True}))
            label = f"{test.called}, failed: {failure}"
            measured = [result_row(label, 0, 0, {}, None, headline=False, metrics={}, skipped={})]
        rows += measured
    if tests:
        # written at once at the end: a kill while they are measured leaves the lines from before
        with Metrics(folder / METRICS) as metrics:
            metrics.drop_whole_tests()
            for kind, values in lines:
                metrics.write(kind, examples=examples, **values)
    return rows


def evaluate_transfer(path: str | Path, tests: Sequence[AnyTest], *, device: str = "auto") -> str:
    """Measure a finished run on `tests` alone, add their rows to its results and its report; a table of them."""
    folder = finished_run(path)
    measurements = [open_test(test) for test in tests]
    run: Any = load(folder.path, device=device)
    rows = [row for measure in measurements for row in measure(run)]
    write_results(folder, rows, beside=True)
    write_report(folder)
    return table_text(rows)
