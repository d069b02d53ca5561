"""Whether losses across ranks are right, and how fast beside another copy of contrastile, within two minutes.

    python benchmarks/ranks_compared.py [--before FOLDER] [--ranks 4] [--within 115] [--limit 40] [words of the profile]

Parts, each on all ranks, in processes of their own: the imports, once; `tests/on_ranks.py quick`, which is right or
fails; `rank_profile.py` of this copy; and of the one in FOLDER. A part that is not done after `--limit` seconds is
stopped, one in which a rank fails too: its ranks say where they were, and the next part begins. What is not begun after
`--within` seconds is left out. The lines of all parts come last, and at the very end before and after side by side.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
# seconds between two looks; those that the other ranks have when one has failed; and without which no part begins
LOOK, GRACE, LEAST = 0.1, 3.0, 15.0
# gradients in 16 bits are nearer to one another than this
RIGHT = 1e-2
# lines of a rank that failed, or waits
LAST = 4
IMPORTS = "import torch, triton, contrastile.tiles.triton; torch.cuda.is_available() and torch.zeros(1, device='cuda')"
ROW = re.compile(r" *(\d+) x \d+  (.{16}) +([\d.]+) ms, cost ([\d.]+), running +([\d.]+) ms, cost ([\d.]+).* off (\S+)")


@dataclass(frozen=True)
class Part:
    """What all ranks run, and which copy of contrastile they import."""

    name: str
    folder: Path
    words: list[str]


@dataclass(frozen=True)
class Outcome:
    """How it ended, and what the first rank said."""

    ended: str
    lines: list[str]


def carried_out(part: Part, ranks: int, limit: float) -> Outcome:
    """Runs a part, and leaves no process behind."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        began = time.monotonic()
        processes = [_started(part, rank, ranks, port, logs[rank]) for rank in range(ranks)]
        try:
            ended = _waited(processes, began, limit)
            codes = [process.poll() for process in processes]
            _asked_where(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        lines = logs[0].with_suffix(".out").read_text(errors="replace").splitlines()
        for rank, code in enumerate(codes):
            if code != 0:
                said = logs[rank].with_suffix(".err").read_text(errors="replace").splitlines()
                lines += [f"rank {rank}: {line}" for line in _last(said, waiting=code is None)]
    return Outcome(f"{ended} after {time.monotonic() - began:.0f} s", lines)


def _asked_where(processes: list[subprocess.Popen[bytes]]) -> None:
    """Those that still run say where they are, and end."""
    there = [process for process in processes if process.poll() is None]
    for process in there:
        process.send_signal(signal.SIGABRT)
    last = time.monotonic() + GRACE
    while time.monotonic() < last and any(process.poll() is None for process in there):
        time.sleep(LOOK)


def _last(said: list[str], *, waiting: bool) -> list[str]:
    """Where a rank waits, innermost first; or what it said last."""
    if not waiting:
        return said[-LAST:]
    at = next((at for at, line in enumerate(said) if line.startswith("Current thread")), len(said))
    return said[at + 1 : at + 1 + LAST]


def _started(part: Part, rank: int, ranks: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    environment = os.environ | {name: str(number) for name, number in place.items()}
    environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    # what is installed beside the copy stays
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(part.folder), os.environ.get("PYTHONPATH")]))
    environment["PYTHONFAULTHANDLER"] = "1"
    with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as errors:
        words = [sys.executable, "-u", *part.words]
        return subprocess.Popen(words, cwd=part.folder, env=environment, stdout=out, stderr=errors)


def _waited(processes: list[subprocess.Popen[bytes]], began: float, limit: float) -> str:
    """Until all are done, or time is up: for all, or for those that wait for one that failed."""
    last, failed = began + limit, False
    while time.monotonic() < last:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return "done"
        if any(codes) and not failed:
            last, failed = min(last, time.monotonic() + GRACE), True
        if None not in codes:
            break
        time.sleep(LOOK)
    return "failed" if failed else "STOPPED"


def compared(outcomes: dict[str, Outcome]) -> list[str]:
    """What both copies' profiles say of each way, side by side."""
    found = {name: dict(_rows(outcome.lines)) for name, outcome in outcomes.items()}
    before, after = found.get("before", {}), found.get("after", {})
    lines = []
    for key, (single, single_cost, running, cost, off) in after.items():
        was = before.get(key, ("?",) * 5)
        lines.append(
            f"{key[0]:>7} {key[1]:16} in a row {was[2]:>7} -> {running:>7} ms, cost {was[3]} -> {cost}; "
            f"single {was[0]:>7} -> {single:>7} ms, cost {was[1]} -> {single_cost}; "
            f"{'right' if float(off) < RIGHT else 'WRONG'}, {off} off"
        )
    return lines


def _rows(lines: list[str]) -> list[tuple[tuple[str, str], tuple[str, ...]]]:
    rows = (row.groups() for row in map(ROW.match, lines) if row)
    return [((b, way.strip()), tuple(numbers)) for b, way, *numbers in rows]


def parts(before: Path | None, profile: list[str], alone: list[str]) -> list[Part]:
    """alone: words for the profile of this copy only."""
    script = str(HERE / "benchmarks" / "rank_profile.py")
    found = [
        Part("imports", HERE, ["-c", IMPORTS]),
        Part("right", HERE, [str(HERE / "tests" / "on_ranks.py"), "quick"]),
        Part("after", HERE, [script, *profile, *alone]),
    ]
    return found if before is None else [*found, Part("before", before.resolve(), [script, *profile])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--within", type=float, default=115.0)
    parser.add_argument("--limit", type=float, default=40.0)
    parser.add_argument("--alone", default="--ctas 8 --first", help="words for the profile of this copy only")
    asked, profile = parser.parse_known_args()
    # ranks that are asked where they are end by a signal that else leaves files
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    began, outcomes = time.monotonic(), {}
    for part in parts(asked.before, ["--brief", "--seconds", "0.6", *profile], asked.alone.split()):
        left = asked.within - (time.monotonic() - began)
        if left < LEAST:
            outcomes[part.name] = Outcome("left out, for want of time", [])
            continue
        outcomes[part.name] = carried_out(part, asked.ranks, min(asked.limit, left))
        print(f"{part.name}: {outcomes[part.name].ended}", flush=True)
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome.ended}")
        for line in outcome.lines:
            if not line.lstrip().startswith(("host, ms", "USDT")):
                print(f"  {line}")
    print("\n".join(compared(outcomes)))
    return 0 if all(outcome.ended.startswith("done") for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
