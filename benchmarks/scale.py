"""The tables of docs/scale.md: what the ring computes, moves and holds on n GPUs, on paper.

python benchmarks/scale.py [--hop 0.5]
"""

from __future__ import annotations

import argparse

# bytes of a feature in bf16, and of an accumulator
FEATURE, WIDE = 2, 4
# operations per second, measured on an H200 at 768 features (benchmarks/results/h200_loss.csv)
RATE = 600e12
# milliseconds that a hop adds in one pass beside arithmetic and link, unless told: measured on four H200s with 16k
# rows each (benchmarks/rank_profile.py)
HOP_MS = 0.5
# bytes per second and direction between two GPUs: NVLink 4 within a node (two thirds of its peak), 400 and 200 Gb/s
LINKS = {"NVLink": 300e9, "400 Gb/s": 50e9, "200 Gb/s": 25e9}
K = 1024


def hop(N: int, D: int) -> dict[str, tuple[float, float]]:
    """Operations, and bytes that leave a GPU, of one hop of each pass."""
    return {
        "forward": (2 * N * N * D, N * D * FEATURE),
        "backward": (6 * N * N * D, N * D * (FEATURE + WIDE)),
    }


def seconds(b: int, n: int, D: int, link: float) -> tuple[float, float]:
    """Of a symmetric loss, forward and backward: the arithmetic, and what the link adds to it."""
    N = b // n
    arithmetic = 8 * b * b * D / n / RATE
    late = sum(n * max(0.0, moved / link - work / RATE) for work, moved in hop(N, D).values())
    # the columns' gradient comes home when there is nothing left to compute
    late += N * D * WIDE / link
    return arithmetic, late


def gathered(b: int, D: int, link: float) -> float:
    """Seconds that gather waits: columns come in both passes, their float32 gradients go back, nothing overlaps."""
    return b * D * (2 * FEATURE + WIDE) / link


def gibibytes(b: int, n: int, D: int, exchange: str) -> float:
    """Beside features, returned gradients and workspace: both sides' accumulators, and what the exchange holds."""
    N = b // n
    held = {"ring": 2 * N * D * (FEATURE + WIDE), "gather": b * D * (FEATURE + WIDE)}[exchange]
    return (2 * N * D * WIDE + held) / 2**30


def least_rows(link: float) -> float:
    """Rows per GPU from which a hop's bytes hide behind its arithmetic, in both passes alike."""
    return RATE * FEATURE / (2 * link)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hop", type=float, default=HOP_MS, help=f"ms that a hop adds (default: {HOP_MS})")
    hop_seconds = parser.parse_args().hop / 1e3
    for name, link in LINKS.items():
        print(f"{name}: hidden from {least_rows(link):,.0f} rows per GPU")
    D = 768
    heads = ("GPUs", "pairs", "rows per GPU", "link", "arithmetic", "ring: link", "hop", "share", "GiB")
    print("| " + " | ".join((*heads, "gather: link", "GiB")) + " |")
    print("|" + "---|" * (len(heads) + 2))
    for n, b, link in (
        (8, 64 * K, "NVLink"),
        (8, 1024 * K, "NVLink"),
        (32, 64 * K, "400 Gb/s"),
        (32, 1024 * K, "400 Gb/s"),
        (32, 12288 * K, "400 Gb/s"),
        (256, 1024 * K, "400 Gb/s"),
        (256, 4096 * K, "400 Gb/s"),
        (256, 12288 * K, "400 Gb/s"),
        (256, 12288 * K, "200 Gb/s"),
    ):
        arithmetic, late = seconds(b, n, D, LINKS[link])
        host = 2 * n * hop_seconds
        share = arithmetic / (arithmetic + late + host)
        print(
            f"| {n} | {b // K}k | {b // n:,} | {link} | {arithmetic:.3g} | {late:.2g} | {host:.2g} | "
            f"{share:.2f} | {gibibytes(b, n, D, 'ring'):.2f} | {gathered(b, D, LINKS[link]):.2g} | "
            f"{gibibytes(b, n, D, 'gather'):.2f} |"
        )


if __name__ == "__main__":
    main()
