"""The table of docs/cost.md: operations, bytes and memory of a symmetric loss on n GPUs, on paper.

python benchmarks/scale.py [--hop 0.5]
"""

from __future__ import annotations

import argparse

# bytes of a feature in bf16, and of an accumulator
FEATURE, WIDE = 2, 4
# operations per second, measured on an H200 at 768 features (benchmarks/results/h200_loss.csv)
RATE, D = 600e12, 768
# bytes per second and direction between two GPUs: NVLink 4 within a node (two thirds of its peak), 400 and 200 Gb/s
LINKS = {"NVLink": 300e9, "400 Gb/s": 50e9, "200 Gb/s": 25e9}
# GPUs, thousands of pairs, and link
ROWS = (
    *((8, 64, "NVLink"), (8, 1024, "NVLink"), (32, 64, "400 Gb/s"), (32, 1024, "400 Gb/s"), (32, 12288, "400 Gb/s")),
    *((256, 1024, "400 Gb/s"), (256, 4096, "400 Gb/s"), (256, 12288, "400 Gb/s"), (256, 12288, "200 Gb/s")),
)
HEADS = ("GPUs", "pairs", "rows per GPU", "link", "arithmetic", "ring: link", "hop", "share", "GiB", "gather: link")


def ring_seconds(b: int, n: int, link: float) -> tuple[float, float]:
    """Return the seconds of the arithmetic, and those that the link adds: what a hop's bytes exceed its arithmetic."""
    N = b // n
    hops = {2 * N * N * D: N * D * FEATURE, 6 * N * N * D: N * D * (FEATURE + WIDE)}
    late = sum(n * max(0.0, moved / link - work / RATE) for work, moved in hops.items())
    # the columns' gradient returns to its rank after the last hop
    return 8 * b * b * D / n / RATE, late + N * D * WIDE / link


def gibibytes(b: int, n: int, columns: int) -> float:
    """Return GiB beside features, returned gradients and workspace: accumulators of both sides, and held columns."""
    return (2 * (b // n) * D * WIDE + columns * D * (FEATURE + WIDE)) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # measured on four H200s with 16k rows each (contrastile bench loss --profile)
    parser.add_argument("--hop", type=float, default=0.5, help="ms that a hop adds in one pass (default: 0.5)")
    hop = parser.parse_args().hop / 1e3
    for name, link in LINKS.items():
        # in both passes alike
        print(f"{name}: hidden from {RATE * FEATURE / (2 * link):,.0f} rows per GPU")
    print(f"| {' | '.join((*HEADS, 'GiB'))} |\n|{'---|' * (len(HEADS) + 1)}")
    for n, thousands, name in ROWS:
        b, link, host = thousands * 2**10, LINKS[name], 2 * n * hop
        arithmetic, late = ring_seconds(b, n, link)
        # gather: columns in both passes, float32 gradients back, nothing overlaps
        gather = b * D * (2 * FEATURE + WIDE) / link
        ring = f"{arithmetic:.3g} | {late:.2g} | {host:.2g} | {arithmetic / (arithmetic + late + host):.2f}"
        memory = [f"{gibibytes(b, n, columns):.2f}" for columns in (2 * b // n, b)]
        print(f"| {n} | {thousands}k | {b // n:,} | {name} | {ring} | {memory[0]} | {gather:.2g} | {memory[1]} |")


if __name__ == "__main__":
    main()
