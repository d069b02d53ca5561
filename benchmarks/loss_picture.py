"""The picture of the README, from a results file: memory and time of a loss against its batch, ours and the formula.

python benchmarks/loss_picture.py
"""

from pathlib import Path

from matplotlib.figure import Figure

from contrastile.bench.harness import read_rows

ROOT = Path(__file__).parent.parent
ROWS = {"loss": "clip", "d": "512", "dtype": "bfloat16"}
# rows of the file as (impl, backend), their name and colour
LINES = {
    ("dense", "autocast"): ("plain formula, under autocast", "tab:gray"),
    ("contrastile", "triton"): ("contrastile", "tab:blue"),
}
# memory of an H200
LIMIT_GIB = 139.8
TICKS = {"4k": 2**12, "16k": 2**14, "64k": 2**16, "256k": 2**18, "1M": 2**20, "4M": 2**22}


def main() -> None:
    figure = Figure(figsize=(8.4, 3.0), layout="constrained")
    rows = [row for row in read_rows(ROOT / "benchmarks/results/h200_loss.csv") if row.items() >= ROWS.items()]
    panels = {"memory beside the features, GiB": ("peak_bytes", 2**30), "forward and backward, milliseconds": ("ms", 1)}
    for axes, (title, (column, unit)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for way, (name, colour) in LINES.items():
            # of several rows of one batch the latest
            latest = {int(r["b"]): float(r[column]) / unit for r in rows if (r["impl"], r["backend"]) == way}
            axes.plot(*zip(*sorted(latest.items()), strict=True), "o-", color=colour, label=name)
        if column == "peak_bytes":
            axes.axhline(LIMIT_GIB, color="tab:red", linestyle="--", linewidth=1, label="memory of the GPU")
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(TICKS.values()), list(TICKS))
        axes.set_xlabel("pairs per batch")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(ROOT / "docs" / "h200_loss.png", dpi=96, metadata={"Software": None})


if __name__ == "__main__":
    main()
