"""The tables of docs/papers.md that are planned: the papers' memory, batches and speed, and 12 M pairs on 256 GPUs.

    python benchmarks/papers.py

The baselines' losses take the bytes per pair that they took in measured rows: 18.07 for CLIP's formula under autocast
and 20.3 for DisCo-CLIP's decomposition (h200_memory.csv), 16.19 for OpenCLIP's local loss on four GPUs
(h200_4_ranks.csv).
"""

from dataclasses import replace
from math import sqrt

from contrastile.experiments.results import markdown
from contrastile.planner.memory import StepMemory
from contrastile.planner.plan import Plan
from contrastile.train.plan import plan

RECIPE = "clip-vit-l-14"
# of table 1: the optimizer is AdamW, no graph is kept
COMMON = ("optim={kind='adamw'}", "train.retain=0", "train.sub_batch=128")
B_16, B_32 = (
    (f"model.both={{mean=[0.5], std=[0.5], config={{model_type='clip', projection_dim=512, {vision}}}}}",)
    for vision in ("vision_config={patch_size=16}", "vision_config={patch_size=32}")
)
MODELS = {"ViT-B/16": B_16, "ViT-L/14": ()}
# towers of a few thousand weights in the same recipe, for other scripts without a GPU
_TINY_SIDE = "hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2"
TINY_CLIP = (
    "data.image_size=32",
    "model.both={mean=[0.5], std=[0.5], config={model_type='clip', projection_dim=32, vision_config={image_size=32, "
    f"patch_size=8, {_TINY_SIDE}}}, text_config={{{_TINY_SIDE}}}}}}}",
)
CLIP, OPENCLIP, DISCO = 18.07, 16.19, 20.3
K = 1024
# GB of the loss (of the peak) in Inf-CL's table 1, with data offload where both are given for Inf-CL
TABLE_1 = {
    8: {
        "CLIP": {32: "16.67 (46.40)", 64: "66.11 (77.94)"},
        "OpenCLIP": {32: "2.27 (43.97)", 64: "8.63 (46.38)", 128: "33.64 (51.23)"},
        "Inf-CL, without offload": {32: "0.18 (44.20)", 64: "0.36 (46.63)", 128: "0.72 (51.46)", 256: "1.45 (61.13)"},
        "Inf-CL": {32: "0.18 (42.40)", 64: "0.36 (42.49)", 128: "0.72 (42.69)", 256: "1.45 (43.07)",
                   1024: "6.53 (45.40)"},
    },
    32: {
        "CLIP": {32: "16.66 (42.85)", 64: "66.11 (75.52)"},
        "OpenCLIP": {32: "0.71 (42.46)", 64: "2.45 (43.06)", 128: "8.98 (44.26)", 256: "34.35 (46.71)"},
        "Inf-CL": {32: "0.05 (42.48)", 64: "0.09 (43.08)", 128: "0.18 (44.30)", 256: "0.35 (46.71)",
                   1024: "1.44 (61.20)"},
    },
}  # fmt: skip
# thousands of pairs in table 2: CLIP, OpenCLIP and with data offload, Inf-CL and with data offload
TABLE_2 = {
    ("ViT-B/16", 8): (68, 172, "", "800", ""), ("ViT-B/16", 32): (68, 360, "", "3,456", ""),
    ("ViT-L/14", 8): (64, 152, 184, "448", "4,096"), ("ViT-L/14", 32): (64, 352, 368, "2,048", "12,288"),
}  # fmt: skip
# DisCo-CLIP's table 3, ViT-B/32 on A100s of 40 GB: implementation, GPUs, thousands of pairs, GB; None: out of memory
DISCO_3 = (
    ("CLIP", 64, 32, "27.4"), ("CLIP", 64, 64, None), ("DisCo-CLIP", 64, 32, "16.5"), ("DisCo-CLIP", 64, 192, "38.1"),
    ("DisCo-CLIP", 8, 32, "36.9"),
)  # fmt: skip
# Inf-CL's figure 4 on 8 A800s, as its text has it: seconds of a step by thousands of pairs; hours of an epoch
FIGURE_4, EPOCH_HOURS, EPOCH = {64: "49.4", 128: "", 256: "220.3", 1024: ""}, "59", 280e6


def planned(model: str, ranks: int) -> Plan:
    nodes = f"{ranks // 8}x" if ranks > 8 else ""
    return plan(RECIPE, *COMMON, *MODELS[model], gpus=f"{nodes}8xA800-80GB", batch=32 * K)


def dense_bytes(impl: str, step: StepMemory) -> int:
    """The bytes that the loss of a baseline took in measured rows, of one rank."""
    rows, batch = step.loss.rows, step.loss.rows * step.loss.ranks
    return int(CLIP * batch**2 if impl == "CLIP" else {"DisCo-CLIP": DISCO}.get(impl, OPENCLIP) * rows * batch)


def dense_peak(step: StepMemory, loss_bytes: int) -> int:
    """The peak of a step whose loss takes these bytes; everything else of its moments stays."""
    peaks = []
    for moment in step.moments():
        others = moment.bytes - sum(moment.parts.get(name, 0) for name in ("loss", "exchange"))
        peaks.append(others + loss_bytes if moment.name == "loss" else others)
    return max(peaks)


def table_1(plans: dict[tuple[str, int], Plan]) -> str:
    """Loss and peak of a rank, GiB: the paper's, and ours with a ring of fused tiles."""
    sizes, rows = (32, 64, 128, 256, 1024), []
    for ranks, several in TABLE_1.items():
        rows += [(ranks, f"{name}, paper", *(cells.get(k, "") for k in sizes)) for name, cells in several.items()]
        one = plans["ViT-L/14", ranks]
        for name in ("CLIP", "OpenCLIP", "ours"):
            cells = []
            for k in sizes:
                step = one.at(k * K).step
                step = replace(step, loss=replace(step.loss, exchange="ring"))
                loss = step.loss.peak if name == "ours" else dense_bytes(name, step)
                peak = step.peak().bytes if name == "ours" else dense_peak(step, loss)
                cells.append(f"{gb(loss)} ({gb(peak) if peak <= one.allowed else 'does not fit'})")
            rows.append((ranks, f"{name}, planned", *cells))
    return markdown(("GPUs", "loss", *(f"{k}k" for k in sizes)), rows)


def table_2(plans: dict[tuple[str, int], Plan]) -> str:
    """Largest batches on cards of 80 GB, thousands of pairs."""
    heads = ["model", "GPUs", "CLIP, paper", "planned", "OpenCLIP, paper", "with offload", "planned", "Inf-CL, paper"]
    rows = []
    for (model, ranks), (clip, open_clip, moved, inf_cl, offload) in TABLE_2.items():
        one = plans[model, ranks]
        # a rank's loss of a dense matrix takes what weights and optimizer leave
        room = one.allowed - sum(one.step.base().values())
        dense = int(sqrt(room / CLIP)) // K, int(sqrt(room * ranks / OPENCLIP)) // K
        ring = f"{one.largest(exchange='ring') // K:,}"
        rows.append((model, ranks, clip, dense[0], open_clip, moved, dense[1], inf_cl, offload, ring))
    return markdown([*heads, "with offload", "ring, planned"], rows)


def disco() -> str:
    """DisCo-CLIP's table 3: a GPU's whole share at once, its layers kept or computed again; a ring with a cache."""
    rows = []
    for impl, ranks, thousands, paper in DISCO_3:
        batch = thousands * K
        gpus = f"{ranks // 8}x8xA100-40GB" if ranks > 8 else f"{ranks}xA100-40GB"
        cells = [paper or "out of memory"]
        for layers in ("[]", "['image', 'text']"):
            words = (f"train.sub_batch={batch // ranks}", "train.retain=1", f"model.checkpointing={layers}")
            whole = plan(RECIPE, *COMMON[:1], *B_32, *words, gpus=gpus, batch=batch)
            # one batch of inputs: no next one is copied meanwhile
            step = replace(whole.step, sides=[replace(side, inputs=side.inputs // 2) for side in whole.step.sides])
            peak = dense_peak(step, dense_bytes(impl, step))
            cells.append(gb(peak) if peak <= whole.allowed else f"{gb(peak)}: does not fit")
        cached = plan(RECIPE, *COMMON, *B_32, gpus=gpus, batch=batch).step
        ours = replace(cached, loss=replace(cached.loss, exchange="ring")).peak().bytes
        rows.append((impl, ranks, f"{batch:,}", *cells, gb(ours)))
    heads = ("loss", "GPUs", "pairs", "paper, GB", "planned, GiB", "layers computed again", "ours, sub-batches of 128")
    return markdown(heads, rows)


def figure_4() -> str:
    """Seconds of a step and hours of an epoch of ViT-L/14 on 8 GPUs."""
    one, rows = plan(RECIPE, *COMMON[1:], gpus="8xH200", batch=64 * K), []
    for thousands, paper in FIGURE_4.items():
        batch = thousands * K
        seconds = one.at(batch).seconds
        hours = seconds.total * EPOCH / batch / 3600
        rows.append((f"{batch:,}", paper, EPOCH_HOURS, f"{seconds.total:.1f}", f"{seconds.loss:.2f}", f"{hours:.0f}"))
    heads = ("pairs", "paper, 8 x A800: s", "hours an epoch", "planned, 8 x H200: s", "of the loss", "hours an epoch")
    return markdown(heads, rows)


def twelve_million(chip: str) -> str:
    """12,582,912 pairs of ViT-L/14 on 32 nodes of 8 GPUs."""
    one = plan(RECIPE, *COMMON, gpus=f"32x8x{chip}", batch=12 * K * K)
    seconds, loss = one.seconds, one.step.loss
    kinds = ("towers", "loss", "communication", "optimizer")
    parts = ", ".join(f"{key} {getattr(seconds, key):.1f} s" for key in kinds)
    memory = f"{gb(one.peak.bytes)} GiB at the peak ({one.peak.name}), {gb(loss.peak)} of the loss"
    head = f"32 x 8 {chip}: {loss.exchange_name}, {loss.rows:,} rows a GPU, {memory}"
    return f"{head}\n    {seconds.total:.0f} s a step ({parts})"


def gb(count: float) -> str:
    return f"{count / 2**30:.2f}"


def main() -> None:
    plans = {(model, ranks): planned(model, ranks) for model in MODELS for ranks in (8, 32)}
    for table in (table_1(plans), table_2(plans), disco(), figure_4()):
        print(table, "\n")
    print("\n".join(map(twelve_million, ("H100-80GB", "H200"))), "\n")


if __name__ == "__main__":
    main()
