"""A data set and a recipe so small that a whole run takes a second: eight letters in several sizes and places.

And what a run leaves behind, for tests that compare two.
"""

import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from contrastile.train import loop, state
from contrastile.train.config import Recipe
from contrastile.train.log import MEASURED, read_metrics
from contrastile.train.recipe import load_any_recipe

RECIPE = """
[data]
source = "{folder}/pictures.tsv"
image_size = 16
held_out = 0.3
max_bad_fraction = 0.05
cache = "{folder}/cache"

[model]
features = 16
image = {{ kind = "conv", width = 8 }}
text = {{ kind = "words", width = 16 }}
tokenizer = {{ size = 100, length = 4 }}

[optim]
learning_rate = 3e-3

[train]
examples = 480
batch = [[0.0, 16], [0.5, 48]]
sub_batch = {{ image = 16, text = 8 }}

[evaluate]
every = 0.5
"""


@contextmanager
def compiling(look: Callable[[torch.fx.GraphModule, Any], None]) -> Iterator[None]:
    """Compile towers to no code: their graphs run as they are. `look` gets each graph and its inputs."""
    compile_with = nn.Module.compile

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        look(graph, inputs)
        return graph

    def compile_nothing(self: nn.Module, *, dynamic: bool, options: Any) -> None:
        del options
        compile_with(self, backend=backend, dynamic=dynamic)

    torch._dynamo.reset()
    with patch.object(nn.Module, "compile", compile_nothing):
        yield
    torch._dynamo.reset()


def write_pictures(folder: Path) -> None:
    """Letters, drawn at four places each, with a title that says which and where."""
    lines = ["filepath\ttitle"]
    for letter in "ABCDEFGH":
        for place, (x, y) in {"left": (1, 2), "right": (7, 2), "high": (4, 0), "low": (4, 4)}.items():
            picture = Image.new("L", (16, 16))
            ImageDraw.Draw(picture).text((x, y), letter, fill=255)
            picture.save(folder / f"{letter}-{place}.png")
            lines.append(f"{letter}-{place}.png\tletter {letter} {place}")
    lines.append("nowhere.png\tletter Z left")
    (folder / "pictures.tsv").write_text("\n".join(lines) + "\n")


def write_recipe(folder: Path, name: str = "tiny") -> Path:
    """The recipe and its pictures; the recipe's path."""
    write_pictures(folder)
    path = folder / f"{name}.toml"
    path.write_text(RECIPE.format(folder=folder))
    return path


def tiny_recipe(folder: Path, *overrides: str) -> Recipe:
    """The recipe, read."""
    return load_any_recipe(write_recipe(folder), overrides)


def write_shards(folder: Path, shards: int = 3) -> str:
    """The same letters as tar shards, the pictures a little larger; the source that names them."""
    if not (folder / "A-left.png").exists():
        write_pictures(folder)
    pictures = sorted(folder.glob("*-*.png"))
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:02}.tar", "w") as tar:
            for path in pictures[shard::shards]:
                title = folder / f"{path.stem}.txt"
                letter, place = path.stem.split("-")
                title.write_text(f"letter {letter} {place}")
                for member in (path, title):
                    tar.add(member, arcname=member.name)
    return f"{folder}/{{00..{shards - 1:02}}}.tar"


@contextmanager
def timed(seconds: Callable[[int], float]) -> Iterator[None]:
    """A clock for runs, by which a step of so many examples takes `seconds` of it, and nothing else takes any time."""
    now, real = [0.0], loop.step

    def step(job: Any, optimizer: Any, parts: Any, *others: Any) -> Any:
        now[0] += seconds(sum(part.global_size for part in parts))
        return real(job, optimizer, parts, *others)

    with (
        patch.object(state, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)),
        patch.object(loop, "step", step),
    ):
        yield


@contextmanager
def interrupted(at: int, number: int = signal.SIGINT, times: int = 1) -> Iterator[list[int]]:
    """Runs whose step `at` begins with a signal to this process; the numbers of the steps that began."""
    real, steps = loop.step, []

    def step(*arguments: Any) -> Any:
        steps.append(len(steps) + 1)
        for _ in range(times if len(steps) == at else 0):
            signal.raise_signal(number)
        return real(*arguments)

    with patch.object(loop, "step", step):
        yield steps


def weights(folder: Path) -> dict[str, Tensor]:
    """Of a run, by their names."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def left(folder: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]], str]:
    """Weights, metrics and results of a run, without what the clock says."""
    lines = read_metrics(folder / "metrics.jsonl")
    for line in lines:
        for name in MEASURED:
            line.pop(name, None)
    return weights(folder), lines, (folder / "evaluation.json").read_text()


def same_run(one: Path, other: Path) -> None:
    """Two runs left the same behind, bit for bit."""
    tensors, *rest = left(one)
    others, *others_rest = left(other)
    assert rest == others_rest
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
