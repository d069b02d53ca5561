"""Pictures of the concepts, drawn when the site is built: an SVG for the light scheme and one for the dark."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import matplotlib as mpl
import torch
import torch.nn.functional as F
from cells import rows_of
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from contrastile import ClipLoss, ScoreDistillLoss, contrast
from contrastile.losses import (
    BalancedSigmoid,
    Decoupled,
    DecoupledWeighted,
    Distilled,
    Guided,
    Hardness,
    Sigmoid,
    Softmax,
    SoftmaxInside,
)


class Colours(NamedTuple):
    """Colours of one scheme: text and lines, the two sides of a loss, what is computed now, what is left out."""

    ink: str
    faint: str
    row: str
    column: str
    now: str
    ghost: str
    paper: str


LIGHT = Colours("#26303a", "#8a95a1", "#3b73b9", "#d0762d", "#2f9e6e", "#e6eaee", "#ffffff")
DARK = Colours("#dde3ea", "#8c97a5", "#6ea8ec", "#eea160", "#4fc793", "#353b49", "#1e2129")


def draw(name: str, dark: bool) -> str:
    """The SVG of a figure."""
    colours = DARK if dark else LIGHT
    style = {
        "text.color": colours.ink, "axes.edgecolor": colours.faint, "axes.labelcolor": colours.ink,
        "xtick.color": colours.ink, "ytick.color": colours.ink, "font.size": 12.5, "svg.hashsalt": name,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = FIGURES[name](colours)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    return out.getvalue()


def _panels(width: float, height: float, count: int = 1) -> tuple[Figure, list[Any]]:
    """Empty panels whose unit is the same in both directions."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.set_aspect("equal")
        axis.axis("off")
    return figure, list(axes)


def _box(
    axis: Any, x: float, y: float, w: float, h: float, face: str, text: str = "", ink: str = "", **more: Any
) -> None:
    axis.add_patch(Rectangle((x, y), w, h, facecolor=face, **{"linewidth": 0, **more}))
    if text:
        axis.text(x + w / 2, y + h / 2, text, ha="center", va="center", color=ink, fontsize=10.5)


def _arrow(axis: Any, start: tuple[float, float], end: tuple[float, float], colour: str, bend: float = 0.0) -> None:
    style = f"arc3,rad={bend}"
    axis.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour, connectionstyle=style)
    )


def _limits(axis: Any, x0: float, x1: float, y0: float, y1: float) -> None:
    axis.set_xlim(x0, x1)
    axis.set_ylim(y0, y1)


def _matrix(axis: Any, c: Colours, n: int, lit: Callable[[int, int], str]) -> None:
    """A matrix of n × n tiles, the images on the left and the texts above."""
    for i in range(n):
        _box(axis, -0.75, n - 1 - i + 0.06, 0.5, 0.88, c.row)
        _box(axis, i + 0.06, n + 0.25, 0.88, 0.5, c.column)
        for j in range(n):
            _box(axis, j + 0.04, n - 1 - i + 0.04, 0.92, 0.92, lit(i, j))
    axis.text(-1.0, n / 2, "images", rotation=90, ha="right", va="center", color=c.row)
    axis.text(n / 2, n + 0.95, "texts", ha="center", va="bottom", color=c.column)


def _stack(axis: Any, c: Colours, n: int, lit: Callable[[int], str]) -> None:
    """Activations of n sub-batches, layer by layer, from inputs to features."""
    for i in range(n):
        y = n - 1 - i
        _box(axis, -0.75, y + 0.06, 0.5, 0.88, c.faint)
        for j in range(4):
            _box(axis, j + 0.04, y + 0.06, 0.92, 0.88, lit(i))
        _box(axis, 4.25, y + 0.06, 0.5, 0.88, c.row)
    for x, text, colour in ((-0.5, "inputs", c.faint), (2.0, "activations", c.ink), (4.6, "features", c.row)):
        axis.text(x, n + 0.15, text, ha="center", va="bottom", color=colour, fontsize=11)


def _matrix_and_stack(
    c: Colours, tile: Callable[[int, int], str], layer: Callable[[int], str], *texts: tuple[str, str]
) -> Figure:
    """The matrix of a loss beside the activations of an encoder, each with its title and a text below."""
    figure, (left, right) = _panels(9.5, 4.2, 2)
    _matrix(left, c, 6, tile)
    _stack(right, c, 6, layer)
    for axis, x, (title, text) in zip((left, right), (3, 2), texts, strict=True):
        axis.set_title(title, fontsize=13)
        axis.text(x, -0.35, text, ha="center", va="top")
        _limits(axis, -1.7, 2 * x + (0.3 if axis is left else 1.7), -1.6, 7.6)
    return figure


def walls(c: Colours) -> Figure:
    matrix = "Wall 1: the b × b matrix of the loss", "65,536 pairs: 16 GiB in float32\n1,048,576 pairs: 4 TiB"
    towers = f"a ViT-B/16 and its text tower:\n{_steps()[0]:.0f} GiB for 1,024 pairs"
    activations = "Wall 2: the activations of the encoders", towers
    return _matrix_and_stack(c, lambda *_: c.now, lambda *_: c.now, matrix, activations)


def instead(c: Colours) -> Figure:
    text = "the loss needs sums of rows and columns,\nand a tile can be computed again"
    tiles = "Tiles: one block of the matrix at a time", text
    text = "features stay, activations go;\nthe backward computes them again"
    cache = "Gradient cache: one sub-batch at a time", text
    tile, layer = (lambda i, j: c.now if (i, j) == (2, 3) else c.ghost), (lambda i: c.now if i == 2 else c.ghost)
    return _matrix_and_stack(c, tile, layer, tiles, cache)


def _one_tile(
    c: Colours, done: int, arrows: Iterable[tuple[tuple[float, float], tuple[float, float], str]], *texts: str
) -> Figure:
    """A tile in a matrix whose first `done` tiles are dropped, with arrows, and texts of rows, columns and tile."""
    figure, (axis,) = _panels(8.5, 4.6)
    _matrix(axis, c, 5, lambda i, j: c.now if (i, j) == (1, 2) else c.faint if 5 * i + j < done else c.ghost)
    for i in range(5):
        _box(axis, 5.35, 4 - i + 0.06, 0.5, 0.88, c.row if not done or i <= 1 else c.ghost)
        _box(axis, i + 0.06, -0.85, 0.88, 0.5, c.column)
    for start, end, colour in arrows:
        _arrow(axis, start, end, colour)
    for y, text, colour in zip((3.5, -0.6, 2.0), texts, (c.row, c.column, c.ink), strict=True):
        axis.text(6.1, y, text, va="center", color=colour)
    _limits(axis, -1.7, 12.2, -1.1, 6.4)
    return figure


def tiles_forward(c: Colours) -> Figure:
    arrows = (((2.5, 3.5), (5.5, 3.5), c.row), ((2.5, 3.4), (2.5, -0.5), c.column))
    rows = "for each image: the largest logit,\nthe sum of exponentials"
    tile = "green: the tile in memory\ngrey: done and dropped\npale: still to come"
    return _one_tile(c, 7, arrows, rows, "the same for each text", tile)


def tiles_backward(c: Colours) -> Figure:
    inputs = (((-0.5, 3.3), (2.1, 3.3), c.row), ((2.3, 5.5), (2.3, 3.8), c.column))
    gradients = (((2.9, 3.5), (5.5, 3.5), c.row), ((2.5, 3.1), (2.5, -0.5), c.column))
    tile = "the tile is multiplied again;\nthe sums of the forward turn its\nlogits into weights w"
    rows, columns = "+ w · texts: the images' gradient", "+ wᵀ · images: the texts' gradient"
    return _one_tile(c, 0, (*inputs, *gradients), rows, columns, tile)


def ring(c: Colours) -> Figure:
    figure, (axis,) = _panels(10, 2.6)
    for hop in range(4):
        left = 6.3 * hop
        for i in range(4):
            held = (i - hop) % 4
            _box(axis, left - 0.75, 3 - i + 0.06, 0.5, 0.88, c.row)
            for j in range(4):
                face = c.now if j == held else c.faint if (i - j) % 4 < hop else c.ghost
                text = f"T{j}" if j == held else ""
                _box(axis, left + j + 0.04, 3 - i + 0.04, 0.92, 0.92, face, text, c.paper)
            if hop == 0:
                axis.text(-1.0, 3.5 - i, f"rank {i}", ha="right", va="center", color=c.row)
            if hop < 3:
                _arrow(axis, (left + 4.15, 3.5 - i), (left + 5.35, 3.5 - i), c.column)
        axis.text(left + 2, 4.3, f"hop {hop}", ha="center", va="bottom")
    _limits(axis, -3.2, 23.2, -0.1, 5.0)
    return figure


def gradcache(c: Colours) -> Figure:
    figure, (axis,) = _panels(10, 3.4)
    for top, (title, retain) in zip((4.0, 0.9), (("retain=0", 0), ("retain=2", 2)), strict=True):
        axis.text(-0.4, top + 0.95, title, ha="right", va="center", fontsize=12, family="monospace")
        for k in range(5):
            _box(axis, k, top + 0.5, 0.9, 0.9, c.row if k < 5 - retain else c.now, f"f{k + 1}", c.paper)
        axis.text(2.45, top + 1.6, "1  forward", ha="center", va="bottom")
        _box(axis, 5.3, top + 0.5, 1.7, 0.9, c.column, "loss", c.paper)
        axis.text(6.15, top + 1.6, "2  loss", ha="center", va="bottom")
        x = start = 7.3
        for k in [4, 3, 0, 1, 2] if retain else range(5):
            if k < 5 - retain:
                _box(axis, x, top + 0.5, 0.9, 0.9, c.row, f"f{k + 1}", c.paper)
                x += 0.9
            _box(axis, x, top + 0.5, 1.4, 0.9, c.faint, f"b{k + 1}", c.paper)
            x += 1.5
        axis.text((start + x) / 2, top + 1.6, "3  replay and backward", ha="center", va="bottom")
    notes = (
        (c.row, "forward without a graph, or its replay"),
        (c.now, "forward that keeps its graph"),
        (c.faint, "backward"),
    )
    for k, (colour, text) in enumerate(notes):
        _box(axis, 8.6 * k, -0.9, 0.5, 0.5, colour)
        axis.text(8.6 * k + 0.7, -0.65, text, va="center")
    axis.set_title("time →", loc="left", fontsize=10, color=c.faint)
    _limits(axis, -2.8, 22.4, -1.3, 6.5)
    return figure


def _steps() -> tuple[float, dict[int, float]]:
    """Peak GiB of a plain step of 1,024 pairs, and by their batch of steps in sub-batches of 512 without graphs."""
    rows = [row for row in rows_of("h200_step.csv", model="vit-b-16") if row["peak_bytes"]]
    peaks: dict[str, dict[int, float]] = {"plain": {}, "contrastile": {}}
    for row in rows:
        ours = [row[name] for name in ("impl", "way", "sub_batch")] == ["contrastile", "retain 0", "512"]
        if ours or (row["impl"], row["way"]) == ("plain", "whole batch"):
            sizes, batch = peaks[row["impl"]], int(row["batch"])
            sizes[batch] = min(float(row["peak_bytes"]) / 2**30, sizes.get(batch, float("inf")))
    return peaks["plain"][1024], peaks["contrastile"]


def memory(c: Colours) -> Figure:
    """Peak memory of a step against its batch, as measured."""
    plain, cached = _steps()
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axis = figure.subplots()
    sizes = sorted(cached)
    axis.plot(sizes, [plain * size / 1024 for size in sizes], color=c.column, ls="--", label="plain, extrapolated")
    axis.plot([1024], [plain], "o", color=c.column, label="plain, measured")
    axis.plot(sizes, [cached[size] for size in sizes], "o-", color=c.now, label="contrastile, retain=0, measured")
    axis.axhline(139, color=c.faint, lw=1)
    axis.text(sizes[-1], 145, "the memory of an H200", ha="right", va="bottom", color=c.faint)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.set_ylim(0, 260)
    axis.set_xlabel("pairs in a batch (ViT-B/16 and its text tower)")
    axis.set_ylabel("peak, GiB")
    axis.legend(frameon=False, loc="upper right", labelcolor=c.ink)
    return figure


def convention(c: Colours) -> Figure:
    figure, (axis,) = _panels(10, 3.0)
    for rank in range(3):
        y = 4.2 - 2.0 * rank
        _box(axis, 0, y, 3.2, 1.3, c.row, f"rank {rank}\nits share of L", c.paper)
        _box(axis, 4.6, y, 4.2, 1.3, c.column, "features' gradient\n3 · ∂L/∂features", c.paper)
        _arrow(axis, (3.2, y + 0.65), (4.6, y + 0.65), c.ink)
        _arrow(axis, (8.8, y + 0.65), (11.0, 2.85 + 0.3 * (1 - rank)), c.ink)
    _box(axis, 11.0, 2.0, 3.6, 1.7, c.faint, "DDP:\nmean of the ranks", c.paper)
    _box(axis, 16.0, 2.0, 5.2, 1.7, c.now, "the gradient of one process\nwith the whole batch", c.paper)
    _arrow(axis, (14.6, 2.85), (16.0, 2.85), c.ink)
    _limits(axis, -0.2, 21.4, -0.2, 5.8)
    return figure


def numerics(c: Colours) -> Figure:
    """Relative error of a small loss in float32 at scale 100, computed here against float64."""
    torch.manual_seed(0)
    base = F.normalize(torch.randn(64, 32, dtype=torch.float64), dim=-1)
    true, plain, ours = [], [], []
    for noise in torch.linspace(0.0, 1.3, 60):
        image, text = F.normalize(base + noise * torch.randn_like(base) / 6, dim=-1), base
        logits = 100.0 * image @ text.T
        # both directions apart: log(1 + the sum of the others), exact in float64
        both = [
            x.masked_fill(torch.eye(64, dtype=torch.bool), -torch.inf).logsumexp(1) - x.diagonal()
            for x in (logits, logits.T)
        ]
        truth = float(sum(torch.log1p(x.exp()).mean() for x in both) / 2)
        i32, t32 = image.float(), text.float()
        x32 = 100.0 * i32 @ t32.T
        dense = float(sum((x.logsumexp(1) - x.diagonal()).mean() for x in (x32, x32.T)) / 2)
        true.append(truth)
        plain.append(max(abs(dense - truth) / truth, 1e-8))
        ours.append(max(abs(float(ClipLoss()(i32, t32, 100.0)) - truth) / truth, 1e-8))
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.loglog(true, plain, "o", ms=4, color=c.column, label="log-sum-exp minus positive")
    axis.loglog(true, ours, "o", ms=4, color=c.now, label="contrastile")
    axis.axhline(1.0, color=c.faint, lw=1, ls="--")
    axis.set_xlabel("the loss")
    axis.set_ylabel("relative error, float32")
    axis.legend(frameon=False, labelcolor=c.ink)
    return figure


def _small_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Features of 6 images and of their 6 captions, and an id of each caption: captions 2 and 5 are the same."""
    torch.manual_seed(73)
    text = F.normalize(torch.randn(6, 8, dtype=torch.float64), dim=-1)
    text[4] = text[1]
    image = F.normalize(text + 0.35 * torch.randn_like(text), dim=-1)
    return image, text, torch.tensor([0, 1, 2, 3, 1, 5])


def loss_weights() -> dict[str, Tensor]:
    """The weight of every pair of the small batch in twelve losses: 6 · ∂loss/∂logits, [6, 6], by autograd."""
    image, text, ids = _small_batch()
    scale, unit = 10.0, torch.eye(6, dtype=torch.float64)

    def listed() -> Tensor:
        """All captions are in the list of each image."""
        similarities, lists = (image @ text.T).requires_grad_(), torch.arange(6).repeat(6, 1)
        value = ScoreDistillLoss()(similarities, unit, scale * text @ text.T, scale, lists=lists)
        return 6 / scale * torch.autograd.grad(value, similarities)[0]

    def weights(loss: Any, *, teacher: float = 1.0, **how: Any) -> Tensor:
        # similarities against the unit matrix: the gradient of the features is that of the logits times the scale
        similarities = (image @ text.T).requires_grad_()
        if loss.guides:
            how |= {"guide_q": teacher * text @ text.T, "guide_k": unit}
        value = contrast(similarities, unit, scale=scale, loss=loss, backend="eager", **how)
        return 6 / scale * torch.autograd.grad(value, similarities)[0]

    same_id = {"query_ids": ids, "key_ids": ids}
    same_label = {"query_labels": ids, "key_labels": ids}
    both = Softmax(symmetric=True)
    return {
        "ClipLoss()": weights(both),
        "ClipLoss(), ids=ids": weights(both, **same_id),
        "ClipLoss(), labels=ids": weights(both, **same_label),
        "DistillClipLoss()": weights(Distilled(symmetric=True, weight=0.5), teacher=scale),
        "DCLLoss()": weights(Decoupled(symmetric=True)),
        "SigLipLoss()": weights(Sigmoid(), bias=-5.0),
        "SigLipLoss(balanced=True),\nlabels=ids": weights(BalancedSigmoid(), bias=-5.0, **same_label),
        'InfoNCELoss(hardness_strength=5.0,\nhardness_mode="all_negatives")': weights(Hardness(hardness_strength=5.0)),
        "GISTLoss(margin=0.05)": weights(Guided(margin=0.05)),
        "DCLLoss(sigma=0.5)": weights(DecoupledWeighted(symmetric=True, sigma=0.5)),
        "contrast(loss=SoftmaxInside(...)),\nlabels": weights(SoftmaxInside(symmetric=True), **same_label),
        "ScoreDistillLoss(),\nlists of all captions": listed(),
    }


def losses(c: Colours) -> Figure:
    """Pairs of one batch that each loss pulls together, pushes apart or leaves out."""
    figure = Figure(figsize=(9, 13.8), layout="constrained")
    grid = figure.subplots(4, 3)
    for axis, (title, weights) in zip(grid.flat, loss_weights().items(), strict=True):
        axis.set_aspect("equal")
        axis.axis("off")
        for i, row in enumerate(weights.tolist()):
            _box(axis, -0.62, 5.14 - i, 0.42, 0.72, c.row)
            # the caption that comes twice
            _box(axis, i + 0.14, 6.2, 0.72, 0.42, c.column, "=" if i in (1, 4) else "", c.paper)
            for j, weight in enumerate(row):
                x, y = j + 0.04, 5.04 - i
                if weight:
                    shade = 0.1 + 0.8 * min(abs(weight), 1.0)
                    _box(axis, x, y, 0.92, 0.92, c.now if weight < 0 else c.column, alpha=shade)
                else:
                    _box(axis, x + 0.03, y + 0.03, 0.86, 0.86, "none", edgecolor=c.faint, linewidth=0.8, linestyle=":")
                text = f"{weight:+.2f}".replace("0.", ".").replace("-", "−") if weight else "out"
                axis.text(j + 0.5, 5.5 - i, text, ha="center", va="center", fontsize=8, color=c.ink)
        axis.set_title(title, fontsize=9.5, family="monospace")
        _limits(axis, -0.8, 6.1, -0.1, 6.7)
    for x, colour, text in ((0.1, c.now, "− pulled together"), (0.55, c.column, "+ pushed apart")):
        figure.patches.append(Rectangle((x, -0.035), 0.025, 0.02, facecolor=colour, transform=figure.transFigure))
        figure.text(x + 0.035, -0.025, text, va="center")
    return figure


FIGURES: dict[str, Callable[[Colours], Figure]] = {
    each.__name__: each
    for each in (walls, instead, tiles_forward, tiles_backward, ring, gradcache, memory, convention, numerics, losses)
}
