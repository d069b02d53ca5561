"""Ways of one's own to train a recipe, such as its losses, for equal time: `contrastile compare --ways FILE`.

Steps of each way are timed beforehand; the first way sees the recipe's examples, the others as many as take the same
time. Time is the processor's on a CPU, so that other processes of the machine do not count.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contrastile._errors import invalid
from contrastile.experiments.arguments import OF_WAYS
from contrastile.experiments.pairs import difference
from contrastile.experiments.results import Result, by_labels, markdown, mean_cost, measures_of, seeds_of, spread
from contrastile.experiments.retriever_memory import OfRetrievers
from contrastile.experiments.sweep import Study, Trial, timed_steps
from contrastile.train.config import AnyRecipe
from contrastile.train.folder import RunFolder
from contrastile.train.log import progress
from contrastile.train.run import choose_device

PACES = "paces.json"
# steps before those that are timed, which fill a queue, and steps that are timed
WARM, TIMED = 4, 4
# a way's steps are timed so often, in turns with those of all others: caches are shared, and clocks drift
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Ways(Study):
    """Every way with every seed, on pictures and texts. `paces`: seconds of an example, measured by `prepared`."""

    recipes: Mapping[str, AnyRecipe]
    paces: Mapping[str, float] = field(default_factory=dict)
    suffix = "ways"
    title = "several ways for equal time"

    def prepared(self, data: Any, folder: RunFolder) -> Study:
        """Measure the paces of ways that the folder does not have; raise ValueError for ways of other keys."""
        known = folder.read_json(PACES) if (folder / PACES).is_file() else {}
        keys = {way: _keys(recipe) for way, recipe in self.recipes.items()}
        for way, (_, began) in known.items():
            if keys.get(way, began) != began:
                remedy = "Give it another name, or begin anew."
                raise invalid("--ways", f'leave "{way}" as it began', json.dumps(keys[way]), remedy)
        missing = [way for way in self.recipes if way not in known]
        with progress(max(1, ROUNDS * len(missing)), "timing steps", "ways") as bar:
            for way in ROUNDS * missing:
                pace = self._pace(self.recipes[way], data)
                known[way] = min(pace, *known.get(way, [pace])[:1]), keys[way]
                bar.update(1)
        folder.write_json(PACES, known)
        return replace(self, paces={way: pace for way, (pace, _) in known.items()})

    def _pace(self, recipe: Any, data: Any) -> float:
        clock = time.process_time if choose_device(recipe.device).type == "cpu" else time.perf_counter
        job = self.job(recipe, data, 1.0)
        size = min(max(size for _, size in recipe.train.batch), len(job.rows))
        return min(timed_steps(job, recipe, size, WARM + TIMED, clock)[WARM:]) / size

    def trials(self, data: Any) -> list[Trial]:
        """Seed by seed; sections that may differ are overridden as a whole."""
        examples, (first, *_) = self.examples(data), self.recipes
        trials = []
        for seed in self.all_seeds:
            for way, recipe in self.recipes.items():
                count = max(1, round(examples * self.paces[first] / self.paces[way]))
                train = recipe.train.model_copy(update={"examples": count, "epochs": None, "minutes": None})
                evaluate = {"every": 1.0} | ({"bm25": False} if recipe.kind == "retriever" else {})
                overrides = {"loss": recipe.loss, "optim": recipe.optim, "train": train, "evaluate": evaluate}
                trials.append(Trial({"way": way}, seed, overrides, seconds=count * self.paces[way]))
        return trials

    def order(self, result: Result) -> tuple[int, int | None]:
        """Way and seed; raise ValueError for an earlier result of another way."""
        way = result.labels["way"]
        if way not in self.recipes:
            raise invalid("--resume", "find ways of this comparison", way, "Name them all, or begin anew.")
        return [*self.recipes].index(way), result.seed

    def table(self, results: Sequence[Result]) -> str:
        """Measures of every way over the seeds, and differences from the first way in points."""
        tests, (first, *_) = measures_of(results), self.recipes
        columns = (head for test in tests for head in (test, f"from {first}"))
        rows = []
        for (way,), group in by_labels(results).items():
            costs = (mean_cost(group, name) for name in ("steps", "examples", "seconds"))
            cells = (cell for test in tests for cell in (spread(group, test), gap(results, way, test, first)))
            rows.append([way, *costs, *cells])
        return markdown(["way", "steps", "examples", "seconds", *columns], rows)

    def introduction(self, results: Sequence[Result]) -> str:
        first, *_ = self.recipes
        examples = next((int(one.costs["examples"]) for one in results if one.labels["way"] == first), 0)
        ways = "\n".join(f"- {way}: `{json.dumps(_keys(recipe)['loss'])}`" for way, recipe in self.recipes.items())
        return f"""\
Every way learns for the time that {first} takes for {examples:,} examples, by steps that were timed
beforehand; seconds are those of the training itself, beside whatever else the machine did. Mean and standard deviation
over {seeds_of(results)}; differences are taken seed by seed, mean and 95 % interval in points. The losses:

{ways}"""


def gap(results: Sequence[Result], way: str, test: str, first: str) -> str:
    """Write the difference of a way from the first, and half of its 95 % interval; nothing for the first."""
    both = difference(results, way, test, first) if way != first else None
    return f"{round(both[0], 1) + 0.0:+.1f} ± {both[1]:.1f}" if both else ""


def _keys(recipe: Any) -> dict[str, Any]:
    keys = {name: getattr(recipe, name).model_dump(mode="json", exclude_defaults=True) for name in OF_WAYS}
    return keys | {"loss": {"kind": recipe.loss.kind, **keys["loss"]}}


@dataclass(frozen=True, kw_only=True)
class RetrieverWays(OfRetrievers, Ways):
    """The same of retrievers."""
