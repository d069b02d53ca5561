"""What docs/kernels.md says of whole losses, measured in one go on one GPU.

    python benchmarks/kernel_report.py [accuracy] [rates] [large] [--csv FILE] [--seconds 1]

Without words all three, about five minutes on an H200: `accuracy` is benchmarks/kernel_accuracy.py, with the scale's
gradient; `rates` are ClipLoss at 64k rows beside the dense formula as people write it, with three workspaces, and
SigLipLoss beside siglip-kernel where that is installed; `large` are single steps of 1M × 1024 and 4.2M × 512, timed and
checked at their own size. As `contrastile bench loss` prints them, and none without its check.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import kernel_accuracy
import torch

from contrastile.bench import loss as bench_loss
from contrastile.bench.loss import SMALL_WORKSPACE, WORKSPACE, Bench
from contrastile.bench.measure import Ledger, Machine
from contrastile.bench.peers import Case
from contrastile.train.provenance import signature

PARTS = ("accuracy", "rates", "large")
WORKSPACES = (WORKSPACE, SMALL_WORKSPACE, 32 * 2**20)
RATES = [
    *(Case("clip", 65536, d, "bfloat16", WORKSPACES) for d in (512, 768, 1024)),
    Case("siglip", 65536, 768, "bfloat16", (WORKSPACE,)),
]
LARGE = [Case("clip", 2**20, 1024, "bfloat16", (WORKSPACE,)), Case("clip", 2**22, 512, "bfloat16", (WORKSPACE,))]
# the peers that others are measured against elsewhere: `contrastile bench loss` has them all
PEERS = ("open_clip", "siglip-kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--csv", type=Path, help="write rows there, behind those that it has")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each may be measured")
    given = parser.parse_args()
    parts = given.parts or list(PARTS)
    bench_loss.PEERS = tuple(peer for peer in bench_loss.PEERS if peer.name in PEERS)
    device = torch.device("cuda")
    with Ledger(given.csv) if given.csv else nullcontext() as ledger:
        _say(signature(device, *PEERS))
        bench = Bench(Machine.of(device, given.seconds), True, _say, ledger)
        for part in parts:
            started = time.perf_counter()
            if part == "accuracy":
                kernel_accuracy.main()
            elif part == "rates":
                bench.measure(RATES)
            else:
                bench.head()
                for case in LARGE:
                    bench.once(case)
            _say(f"{part}: {time.perf_counter() - started:.0f} s")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
