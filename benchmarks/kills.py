"""A run on several ranks that is killed at random moments and resumed, beside the same run left alone: same weights?

python benchmarks/kills.py recipes/glyph-shards.toml [key=value ...] [--kills 6] [--ranks 2] [--seed 0]

Each time all ranks get SIGKILL in one moment, as when a machine is lost, or one of them does, which the others notice;
then the same command goes on with --resume. What both runs leave behind is compared byte by byte, but for what clock
and memory say in metrics.jsonl. The exit code is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from contrastile.train.folder import CHECKPOINTS, EVALUATION, METRICS, WEIGHTS
from contrastile.train.log import MEASURED, read_metrics
from contrastile.train.recipe import load_recipe

# about a minute of steps on two cores, and a checkpoint every few seconds
SHORT = ("train.examples=40_000", "save.steps=10", "evaluate.every=0.25", "evaluate.digits=false", "train.timeout=60.0")
# seconds between two looks at the run; a kill comes so many later at most, in the middle of whatever it does then
LOOK, LATER = 0.02, 1.0
# of a start before its first step, from the interpreter's on
START = 8.0
# seconds that ranks have to notice that another one is gone
PATIENCE = 15.0


@dataclass
class Story:
    """What became of a run: its folder, how often it was killed and in which way, steps taken, seconds, shards."""

    folder: Path
    seconds: float = 0.0
    kills: list[str] = field(default_factory=list)
    repeated: int = 0
    most_shards: int = 0

    def step(self) -> int:
        """The steps that its metrics tell of."""
        path = self.folder / METRICS
        return sum(line["kind"] != "probe" for line in read_metrics(path)) if path.is_file() else 0


class Ranks:
    """The processes of one start, with the environment that torchrun gives them."""

    def __init__(self, command: list[str], count: int, log: Path) -> None:
        with closing(socket.socket()) as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        self.processes = []
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            environment = {
                "OMP_NUM_THREADS": "1",
                **os.environ,
                **place,
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            }
            with log.open("ab") as file:
                self.processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))

    def kill(self, victims: list[int]) -> None:
        """SIGKILL to some. The others see it and end; those that wait for it to begin are ended, as by torchrun."""
        for rank in victims:
            self.processes[rank].kill()
        for process in self.processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def over(self) -> bool:
        """Whether all have ended."""
        return all(process.poll() is not None for process in self.processes)

    def through(self) -> bool:
        """Whether all of them ended well."""
        return all(process.returncode == 0 for process in self.processes)


def follow(story: Story, ranks: Ranks, shards: Path, moment: tuple[int, float] | None) -> bool:
    """Watch a start until it is over, or until its `moment`: a step, and seconds behind it. Whether it is over."""
    end = None
    while not ranks.over():
        story.most_shards = max(story.most_shards, len(list(shards.glob("shards-*/*.tar"))))
        if moment is not None and end is None and story.step() >= moment[0]:
            end = time.monotonic() + moment[1]
        if end is not None and time.monotonic() >= end:
            return False
        time.sleep(LOOK)
    return True


def tell(
    story: Story, command: list[str], count: int, shards: Path, kills: int, lot: random.Random, steps: int
) -> None:
    """Start the run, kill and resume it so many times, and see it through."""
    began = time.monotonic()
    # the first while it starts, the others all over the run
    moments = [(0, lot.uniform(0, START)), *((step, lot.uniform(0, LATER)) for step in lot_of(lot, kills - 1, steps))]
    for moment in [*moments[:kills], None]:
        ranks = Ranks([*command, "--resume"], count, story.folder.with_suffix(".log"))
        if follow(story, ranks, shards, moment):
            if not ranks.through():
                raise SystemExit(f"a rank failed:\n{story.folder.with_suffix('.log').read_text()[-3000:]}")
            break
        victims = [*range(count)] if lot.random() < 0.5 else [lot.randrange(count)]
        here = story.step()
        ranks.kill(victims)
        kept = max((int(path.name[5:]) for path in (story.folder / CHECKPOINTS).glob("step-*")), default=0)
        story.repeated += max(0, here - kept)
        story.kills.append(f"step {here}, {'all ranks' if len(victims) == count else f'rank {victims[0]}'}")
        print(f"killed in {story.kills[-1]}; goes on from step {kept}", flush=True)
    story.seconds = time.monotonic() - began


def lot_of(lot: random.Random, count: int, steps: int) -> list[int]:
    """Steps all over the run, in order."""
    return sorted(lot.randrange(1, max(2, steps - 1)) for _ in range(count))


def left(folder: Path) -> dict[str, str]:
    """The SHA-256 of what a run left behind, without what clock and memory say."""
    lines = [
        {key: value for key, value in line.items() if key not in MEASURED} for line in read_metrics(folder / METRICS)
    ]
    contents = {
        "weights": (folder / WEIGHTS).read_bytes(),
        "metrics": json.dumps(lines).encode(),
        "evaluation": (folder / EVALUATION).read_bytes(),
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def main() -> int:
    """Both runs and the table; 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="such as recipes/glyph-shards.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments, not of the run")
    parser.add_argument(
        "--runs", default="runs/kills", metavar="FOLDER", help="its undisturbed and killed are replaced"
    )
    chosen = parser.parse_args()
    overrides = [*SHORT, *chosen.overrides]
    recipe = load_recipe(chosen.recipe, overrides)
    runs = Path(chosen.runs)
    cache = runs / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    stories = {}
    for name, kills in {"undisturbed": 0, "killed": chosen.kills}.items():
        # no shard of the run before helps
        for old in [runs / name, *cache.glob("shards-*")]:
            shutil.rmtree(old, ignore_errors=True)
        words = [*overrides, f"name={name}", f"data.cache={cache}", "--runs", str(runs)]
        command = [sys.executable, "-m", "contrastile", "train", chosen.recipe, *words]
        story = stories[name] = Story(runs / name)
        steps = stories["undisturbed"].step()
        tell(story, command, chosen.ranks, cache, kills, random.Random(chosen.seed), steps)
    pairs = recipe.data.copies
    print(f"\n{recipe.name}: {steps} steps on {chosen.ranks} ranks, {pairs} copies of each pair\n")
    sums = {name: left(story.folder) for name, story in stories.items()}
    print("| run | kills | steps taken again | seconds | shards at once | " + " | ".join(sums["killed"]) + " |")
    print("|---|---|---|---|---|---|---|---|")
    for name, story in stories.items():
        facts = [name, len(story.kills), story.repeated, round(story.seconds), story.most_shards]
        print("| " + " | ".join([*map(str, facts), *(sum_[:16] for sum_ in sums[name].values())]) + " |")
    if sums["undisturbed"] != sums["killed"]:
        print("\nthe runs differ", file=sys.stderr)
        return 1
    if len(stories["killed"].kills) < chosen.kills:
        print("\nit was through before all kills; take more pairs, train.examples=80_000", file=sys.stderr)
        return 1
    print("\nthe same, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
