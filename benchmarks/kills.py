"""Compare a run on several ranks that is killed at random moments and resumed with the same run left alone.

python benchmarks/kills.py recipes/glyph-shards.toml [key=value ...] [--kills 6] [--ranks 2] [--seed 0]

SIGKILL hits all ranks at once, as when a machine is lost, or one of them, which the others notice; then the same
command continues with --resume. Everything that both runs leave behind is compared by SHA-256, without times and memory
in metrics.jsonl. The exit code is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.utils.distributed import get_free_port

from contrastile.train.folder import CHECKPOINTS, EVALUATION, METRICS, WEIGHTS
from contrastile.train.log import MEASURED, read_metrics
from contrastile.train.recipe import load_recipe

# about a minute of steps on two cores, and a checkpoint every few seconds
SHORT = ("train.examples=40_000", "save.steps=10", "evaluate.every=0.25", "evaluate.digits=false", "train.timeout=60.0")
# seconds between two looks at the run, and at most between reaching a step and the kill
POLL, DELAY = 0.02, 1.0
# seconds of a start before its first step, from the interpreter's on
START = 8.0
# seconds for ranks to notice that another one is gone
PATIENCE = 15.0

Ranks = list[subprocess.Popen[bytes]]


@dataclass
class WatchedRun:
    """A run with its kills: moments and victims, steps taken again, seconds, and the most shards at once."""

    folder: Path
    seconds: float = 0.0
    kills: list[str] = field(default_factory=list)
    repeated: int = 0
    most_shards: int = 0

    def step(self) -> int:
        """Return the number of steps in the metrics."""
        path = self.folder / METRICS
        return sum(line["kind"] != "probe" for line in read_metrics(path)) if path.is_file() else 0

    def checksums(self) -> list[str]:
        """Return the SHA-256 of weights, metrics without times and memory, and evaluation."""
        lines = read_metrics(self.folder / METRICS)
        same = [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]
        weights, evaluation = ((self.folder / name).read_bytes() for name in (WEIGHTS, EVALUATION))
        return [hashlib.sha256(content).hexdigest() for content in (weights, json.dumps(same).encode(), evaluation)]

    def carry_out(self, command: list[str], count: int, shards: Path, moments: list[tuple[int, float]]) -> None:
        """Start the run, kill and resume it at the moments, and wait until it is finished."""
        began, log = time.monotonic(), self.folder.with_suffix(".log")
        for moment in [*moments, None]:
            ranks = start([*command, "--resume"], count, log)
            if self.follow(ranks, shards, moment):
                if any(process.returncode for process in ranks):
                    raise SystemExit(f"a rank failed:\n{log.read_text()[-3000:]}")
                break
            # all ranks in one half of the cases, one rank in the other
            victims = [*range(count)] if random.random() < 0.5 else [random.randrange(count)]
            reached = self.step()
            kill(ranks, victims)
            saved = max((int(path.name[5:]) for path in (self.folder / CHECKPOINTS).glob("step-*")), default=0)
            self.repeated += max(0, reached - saved)
            self.kills.append(f"step {reached}, {'all ranks' if len(victims) == count else f'rank {victims[0]}'}")
            print(f"killed in {self.kills[-1]}; continues from step {saved}", flush=True)
        self.seconds = time.monotonic() - began

    def follow(self, ranks: Ranks, shards: Path, moment: tuple[int, float] | None) -> bool:
        """Watch a start until it ends, or until its moment: a step, and seconds after it. Return if it has ended."""
        end = None
        while any(process.poll() is None for process in ranks):
            self.most_shards = max(self.most_shards, len(list(shards.glob("shards-*/*.tar"))))
            if moment is not None and end is None and self.step() >= moment[0]:
                end = time.monotonic() + moment[1]
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(POLL)
        return True


def start(command: list[str], count: int, log: Path) -> Ranks:
    """Start the ranks with the environment that torchrun gives them."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "WORLD_SIZE": str(count)}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
    with log.open("ab") as file:
        return [
            subprocess.Popen(
                command, env=environment | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), stdout=file, stderr=file
            )
            for rank in range(count)
        ]


def kill(ranks: Ranks, victims: list[int]) -> None:
    """Send SIGKILL to some ranks. The others notice and end; those still waiting for them are killed."""
    for rank in victims:
        ranks[rank].kill()
    for process in ranks:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="such as recipes/glyph-shards.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments, not of the run")
    parser.add_argument("--runs", default="runs/kills", metavar="FOLDER", help="its two runs are replaced")
    options = parser.parse_args()
    overrides = [*SHORT, *options.overrides]
    recipe, runs = load_recipe(options.recipe, overrides), Path(options.runs)
    cache = runs / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    alone, killed = WatchedRun(runs / "undisturbed"), WatchedRun(runs / "killed")
    random.seed(options.seed)
    for run, kills in ((alone, 0), (killed, options.kills)):
        # each run writes its own shards
        for old in [run.folder, *cache.glob("shards-*")]:
            shutil.rmtree(old, ignore_errors=True)
        # the first kill hits the start, the others any step
        steps = sorted(random.randrange(1, max(2, alone.step() - 1)) for _ in range(kills - 1))
        moments = [(0, random.uniform(0, START)), *((step, random.uniform(0, DELAY)) for step in steps)][:kills]
        words = [*overrides, f"name={run.folder.name}", f"data.cache={cache}", "--runs", str(runs)]
        command = [sys.executable, "-m", "contrastile", "train", options.recipe, *words]
        run.carry_out(command, options.ranks, cache, moments)
    print(f"\n{recipe.name}: {alone.step()} steps on {options.ranks} ranks, {recipe.data.copies} copies of each pair\n")
    print("| run | kills | steps taken again | seconds | shards at once | weights | metrics | evaluation |")
    print("|---|---|---|---|---|---|---|---|")
    for run in (alone, killed):
        cells = [run.folder.name, len(run.kills), run.repeated, round(run.seconds), run.most_shards]
        print(f"| {' | '.join(map(str, [*cells, *(checksum[:16] for checksum in run.checksums())]))} |")
    if alone.checksums() != killed.checksums():
        print("\nthe runs differ", file=sys.stderr)
        return 1
    if len(killed.kills) < options.kills:
        print("\nit was finished before all kills; take more pairs, train.examples=80_000", file=sys.stderr)
        return 1
    print("\nthe same, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
