"""Task of images and texts: its data, its loss, its evaluation; one of the two tasks of `loop.py`."""

from collections import Counter
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, Self

import torch
from torch import Tensor

from contrastile.gradcache.encode import encode
from contrastile.gradcache.memory import bytes_per_example
from contrastile.models.base import evaluating
from contrastile.train import evaluation
from contrastile.train.batch_builder import Batch, BatchBuilder, DataBundle, open_data_bundle, with_cached_features
from contrastile.train.config import Recipe
from contrastile.train.evaluation import Measurement, measure_all, open_test, probe
from contrastile.train.folder import RunFolder
from contrastile.train.objective import PairObjective, Teacher, joint_tokens, split_tokens
from contrastile.train.ranks import Ranks
from contrastile.train.report.page import IMAGE_TEXT, Row, table_text, write_report, write_results
from contrastile.train.run import Run
from contrastile.train.task import Measure, Task


class ImageText(Task[Batch]):
    """The task of a recipe of images and texts. `tests` are measured at every probe."""

    unit = "pairs"
    wording = IMAGE_TEXT
    open_data = staticmethod(open_data_bundle)
    run: Run

    def __init__(self, run: Run, bundle: DataBundle, teacher: Teacher | None = None) -> None:
        recipe, features = run.recipe, 0
        if getattr(recipe.loss, "queue", 0):
            # a queue has the size of the features
            with evaluating(run.model):
                features = run.encode_text([""]).shape[1]
        device = run.device if recipe.train.features == "host" else None
        words: dict[str, Any] = {"features": features, "dtype": run.model.logit_scale.dtype, "device": device}
        super().__init__(run, PairObjective(recipe.loss, **words), teacher)
        self.bundle, self.rows, self.stream = bundle, bundle.rows, bundle.pairs.stream
        self._tests = list[tuple[str, Measurement]]()
        # results of the tests that several ranks measured on all images, by the test's index
        self._results: dict[int, list[Row]] = {}
        tokenise: Any = bundle.tokenizer.tokenise
        if teacher is not None:
            tokenise = partial(joint_tokens, bundle.tokenizer, teacher.run.tokenizer)
            bundle = replace(bundle, tokens=tokenise(bundle.pairs.captions))
        self.builder = BatchBuilder(bundle, augment=recipe.data.augment, seed=recipe.seed, tokenise=tokenise)
        self.state = {"feed": self.builder, **self.state}

    @classmethod
    def open(cls, recipe: Recipe, begun: RunFolder | None = None) -> Self:
        # mistakes in the files of tests are raised before the data are read
        tests = [(test.called, open_test(test)) for test in recipe.evaluate.tests]
        task = super().open(recipe, begun)
        task._tests = tests
        return task

    @classmethod
    def untrained(cls, recipe: Recipe, data: DataBundle, teacher: Teacher | None = None) -> Self:
        run = Run.untrained(recipe, data.tokenizer)
        return cls(run, with_cached_features(run, data), teacher)

    @property
    def data_digest(self) -> str:
        pairs = self.bundle.pairs
        digest = sha256(self.rows.tobytes() + pairs.ids.tobytes())
        digest.update(pairs.stream.digest.encode() if pairs.stream is not None else b"")
        for name, ids in self.bundle.tokens.items():
            digest.update(name.encode() + ids.numpy().tobytes())
        return digest.hexdigest()

    @property
    def origin(self) -> dict[str, str]:
        return {**super().origin, "pictures": self.bundle.pairs.digest[:16]}

    @property
    def test_digest(self) -> str:
        pairs = self.bundle.pairs
        return sha256("\0".join((pairs.digest, *pairs.captions)).encode()).hexdigest()

    def parts(self, rows: Tensor, step: int, ranks: Ranks) -> list[Batch]:  # noqa: ARG002
        """This rank's share of a batch; augmentation draws from the builder's own generator, step after step."""
        return list(self.builder.batch(rows, ranks.share).parts(self.run.recipe.train.accumulate))

    def prefetch(self, rows: Tensor, ranks: Ranks) -> None:
        self.builder.prefetch(rows, ranks.share)

    def close(self) -> None:
        self.builder.close()

    def loss(self, part: Batch) -> Tensor:
        """The recipe's loss of a part of any size; holds the activations of one sub-batch, or of the retained ones."""
        model, settings, size = self.run.model, self.run.recipe.train, self.run.recipe.train.sub_batch
        # features on the way to host memory are normalised on the device
        streamed = settings.features == "host"
        towers = model.encode_image, model.encode_text
        to_image, to_text = (partial(tower, unit=True) for tower in towers) if streamed else towers
        words: dict[str, Any] = {"retain": settings.retain, "features": settings.features}
        tokens, teacher_tokens = split_tokens(part.tokens)
        inputs: dict[str, Any] = {"ids": part.ids if streamed else part.ids.to(self.run.device)}
        if self.teacher is not None:
            # encoded before the graphs of the retained sub-batches take memory
            inputs["guides"] = self.teacher.pairs(part.pixels, teacher_tokens)
        with self.run.autocast():
            # with retain >= 1, a batch of one sub-batch is encoded once, without a replay
            image = encode(to_image, part.pixels, sub_batch=size.image, **words)
            text = encode(to_text, tokens, **size.words("text"), **words)
            if not streamed:
                image, text = map(model.unit_rows, (image, text))
            # the loss makes its products in autocast's dtype
            return self._loss(image, text, model.logit_scale.exp(), model.logit_bias, **inputs)

    def probe(self) -> dict[str, dict[str, float]]:
        return probe(self.run, self.bundle.pairs)

    def tests(self, *, whole: bool = False) -> list[Measure]:
        """Transfer evaluation; the report reuses the rows of `whole` tests."""

        def measure(index: int, test: Measurement) -> list[Row]:
            if not whole:
                return [evaluation.metrics_line(row) for row in test(self.run, self.run.recipe.evaluate.probe)]
            self._results[index] = test(self.run)
            return [evaluation.metrics_line(row, whole=True) for row in self._results[index]]

        return [(name, partial(measure, index, test)) for index, (name, test) in enumerate(self._tests)]

    @property
    def skipped(self) -> Counter[str]:
        pairs = self.bundle.pairs
        return Counter(pairs.skipped) + Counter(pairs.stream.lost if pairs.stream is not None else {})

    def activations(self) -> tuple[int, int]:
        model, recipe, device = self.run.model, self.run.recipe, self.run.device
        data, sub_batch = recipe.data, recipe.train.sub_batch
        shape = data.channels, data.image_size, data.image_size

        def image(count: int) -> object:
            return model.encode_image(torch.zeros(count, *shape, device=device))

        def text(count: int) -> object:
            tokens: Any = self.bundle.tokens
            return model.encode_text(**{name: ids[:1].repeat(count, 1).to(device) for name, ids in tokens.items()})

        texts = sub_batch.at_once("text", recipe.model.tokenizer.length)
        return bytes_per_example(image, sub_batch.image) + bytes_per_example(text, texts), sub_batch.image

    def measures(self) -> dict[str, float]:
        rows = evaluation.evaluate(self.run, evaluation.encode_held_out(self.run, self.bundle.pairs))
        return {row["test"]: row["recall"]["1"] for row in rows if row["headline"]}

    def report(self, folder: RunFolder) -> str:
        encoded = evaluation.encode_held_out(self.run, self.bundle.pairs)
        results = [*evaluation.evaluate(self.run, encoded), *measure_all(self.run, folder, self._results)]
        write_results(folder, results)
        write_report(folder, evaluation.picture_samples(self.bundle.pairs, encoded))
        return table_text(results)
