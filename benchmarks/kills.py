"""Compare a run on several ranks that is killed at random moments and resumed with the same run left alone.

python benchmarks/kills.py recipes/glyph-shards.toml [key=value ...] [--kills 6] [--ranks 2] [--seed 0]

SIGKILL hits all ranks at once, as when a machine is lost, or one of them, which the others notice; then the same
command continues with --resume. Everything that both runs leave behind is compared by SHA-256, without times and memory
in metrics.jsonl. The exit code is 1 where anything differs.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from torch.distributed.elastic.utils.distributed import get_free_port

from contrastile.experiments.results import markdown
from contrastile.train.folder import CHECKPOINTS, EVALUATION, METRICS, WEIGHTS
from contrastile.train.log import MEASURED, read_metrics
from contrastile.train.recipe import load_any_recipe

# about a minute of steps on two cores, and a checkpoint every few seconds
SHORT = ("train.examples=40_000", "save.steps=10", "evaluate.every=0.25", "evaluate.digits=false", "train.timeout=60.0")
# seconds between two looks at the run, and at most between reaching a step and the kill
POLL, DELAY = 0.02, 1.0
# seconds of a start before its first step, from the interpreter's on; for ranks to notice that another one is gone
START, PATIENCE = 8.0, 15.0

# a step, and seconds after it
Moment = tuple[int, float]


def steps_of(folder: Path) -> int:
    lines = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    return sum(line["kind"] != "probe" for line in lines)


def checksums(folder: Path) -> list[str]:
    """Return the SHA-256 of weights, metrics without times and memory, and evaluation."""
    lines = read_metrics(folder / METRICS)
    same = [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]
    weights, evaluation = ((folder / name).read_bytes() for name in (WEIGHTS, EVALUATION))
    return [hashlib.sha256(content).hexdigest() for content in (weights, json.dumps(same).encode(), evaluation)]


def carry_out(folder: Path, command: list[str], count: int, shards: Path, moments: list[Moment]) -> list[object]:
    """Start the run, kill and resume it at the moments, and wait until it is finished; its cells of the table."""
    began, log, kills, repeated, most = time.monotonic(), folder.with_suffix(".log"), 0, 0, 0
    for moment in [*moments, None]:
        ranks, end = start([*command, "--resume"], count, log), float("inf")
        while any(process.poll() is None for process in ranks) and time.monotonic() < end:
            most = max(most, len(list(shards.glob("shards-*/*.tar"))))
            if moment is not None and end == float("inf") and steps_of(folder) >= moment[0]:
                end = time.monotonic() + moment[1]
            time.sleep(POLL)
        if all(process.poll() is not None for process in ranks):
            if any(process.returncode for process in ranks):
                raise SystemExit(f"a rank failed:\n{log.read_text()[-3000:]}")
            break
        # all ranks in one half of the cases, one rank in the other
        victims = [*range(count)] if random.random() < 0.5 else [random.randrange(count)]
        reached = steps_of(folder)
        kill(ranks, victims)
        saved = max((int(path.name[5:]) for path in (folder / CHECKPOINTS).glob("step-*")), default=0)
        kills, repeated = kills + 1, repeated + max(0, reached - saved)
        whom = "all ranks" if len(victims) == count else f"rank {victims[0]}"
        print(f"killed in step {reached}, {whom}; continues from step {saved}", flush=True)
    return [folder.name, kills, repeated, round(time.monotonic() - began), most]


def start(command: list[str], count: int, log: Path) -> list[subprocess.Popen[bytes]]:
    """Start the ranks with the environment that torchrun gives them."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "WORLD_SIZE": str(count)}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
    own = [environment | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(count)]
    with log.open("ab") as file:
        return [subprocess.Popen(command, env=each, stdout=file, stderr=file) for each in own]


def kill(ranks: list[subprocess.Popen[bytes]], victims: list[int]) -> None:
    """Send SIGKILL to some ranks. The others notice and end; those still waiting for them are killed."""
    for rank in victims:
        ranks[rank].kill()
    for process in ranks:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="such as recipes/glyph-shards.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments, not of the run")
    options = parser.parse_args()
    overrides = [*SHORT, *options.overrides]
    recipe, runs = load_any_recipe(options.recipe, overrides), Path("runs/kills")
    cache, alone, killed = runs / "cache", runs / "undisturbed", runs / "killed"
    cache.mkdir(parents=True, exist_ok=True)
    random.seed(options.seed)
    rows = []
    for folder, kills in ((alone, 0), (killed, options.kills)):
        # each run writes its own shards
        for old in [folder, *cache.glob("shards-*")]:
            shutil.rmtree(old, ignore_errors=True)
        # the first kill hits the start, the others any step
        steps = sorted(random.randrange(1, max(2, steps_of(alone) - 1)) for _ in range(kills - 1))
        moments = [(0, random.uniform(0, START)), *((step, random.uniform(0, DELAY)) for step in steps)][:kills]
        words = [*overrides, f"name={folder.name}", f"data.cache={cache}", "--runs", str(runs)]
        command = [sys.executable, "-m", "contrastile", "train", options.recipe, *words]
        cells = carry_out(folder, command, options.ranks, cache, moments)
        rows.append([*cells, *(checksum[:16] for checksum in checksums(folder))])
    size = f"{steps_of(alone)} steps on {options.ranks} ranks, {recipe.data.copies} copies of each pair"
    heads = "run", "kills", "steps taken again", "seconds", "shards at once", "weights", "metrics", "evaluation"
    print(f"\n{recipe.name}: {size}\n\n{markdown(heads, rows)}")
    if checksums(alone) != checksums(killed):
        sys.exit("\nthe runs differ")
    if rows[1][1] < options.kills:
        sys.exit("\nit was finished before all kills; take more pairs, train.examples=80_000")
    print("\nthe same, bit for bit")


if __name__ == "__main__":
    main()
