"""Images per second from tar shards, by processes and by threads; and the share of a training step spent waiting.

    python benchmarks/loading.py

The shards hold JPEGs of 256 to 500 pixels a side, smooth shapes under a little noise, 30 to 60 kB each. They are read
through `data/collection.py` and cropped at random to 224 pixels; a rate is the images over the seconds of the clock.

On a GPU a CLIP ViT-B/16 in bf16, with every activation kept, is then trained on the shards. `waiting` is the share of
the steps' time, without the first few, before the batch is there. `without data` is the rate of the same step on a
resident batch, while nothing else happens.
"""

import io
import tarfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from contrastile.bench.harness import Machine
from contrastile.cli.main import main as main_command
from contrastile.data.loader import cores
from contrastile.data.pairs import Stream
from contrastile.data.registry import open_pairs
from contrastile.data.shards import add_to_tar
from contrastile.train.image_text import ImageText
from contrastile.train.log import read_metrics
from contrastile.train.loop import step
from contrastile.train.optim import build_optimizer
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_any_recipe

# pictures, those of a shard, and numbers of workers
PICTURES, SHARD, WORKERS = 2000, 250, (1, 2, 4, 8, 12, 16)
WORDS = ("red", "blue", "round", "long", "old", "small", "house", "river", "bird", "stone", "cloud", "field")
# seconds per rate
SECONDS = 2.0
# steps before the clocks of a GPU and its allocator are steady
WARMUP = 5
# of the training: pairs of a plain step, and seconds
BATCH, TRAINING = 1024, 40.0
RECIPE = "recipes/clip-vit-l-14.toml"


def training_words(source: str, cache: Path) -> list[str]:
    """The overrides of the recipe that train a CLIP ViT-B/16 in plain steps."""
    sizes = "projection_dim=512, vision_config={patch_size=16}"
    return [
        f"data.source={source}", f"data.cache={cache}", "data.held_out=0.002",
        f"model.both={{mean=[0.5], std=[0.5], config={{model_type='clip', {sizes}}}}}",
        "model.tokenizer={size=1000, length=77}", "optim={kind='adamw'}", "evaluate={every=1.0, probe=1}",
        f"train={{examples=100_000_000, minutes={TRAINING / 60}, batch={BATCH}, sub_batch={BATCH}, precision='bf16'}}",
    ]  # fmt: skip


def write_shards(folder: Path, pictures: int, words: int = 6) -> str:
    """Write the shards, whose titles have so many `words` and a number; return the source that names them."""
    from PIL import Image

    random = np.random.default_rng(0)
    last = -(-pictures // SHARD) - 1
    for shard in range(last + 1):
        with tarfile.open(folder / f"{shard:05}.tar", "w") as tar:
            for number in range(shard * SHARD, min((shard + 1) * SHARD, pictures)):
                wide, high = random.integers(256, 501, 2).tolist()
                shapes = Image.fromarray(random.integers(0, 256, (high // 32, wide // 32, 3), dtype=np.uint8))
                smooth = np.asarray(shapes.resize((wide, high), Image.Resampling.BICUBIC), dtype=np.float32)
                noisy = (smooth + random.normal(0, 5, (high, wide, 1))).clip(0, 255).astype(np.uint8)
                file = io.BytesIO()
                Image.fromarray(noisy).save(file, "JPEG", quality=90)
                title = f"{' '.join(random.choice(WORDS, words))} {number}"
                add_to_tar(tar, f"{number:06}.jpg", file.getvalue())
                add_to_tar(tar, f"{number:06}.txt", title.encode())
    return f"{folder}/{{00000..{last:05}}}.tar"


def rate(stream: Stream, workers: int, batch: int, *, processes: bool) -> float:
    """Return images per second, batches read one ahead as in training."""
    stream.workers, stream.processes, crop_seed = workers, processes, 0
    stream.read(range(16 * workers), range(16 * workers), crop_seed)
    count, ahead = 0, range(batch)
    began = time.perf_counter()
    stream.prefetch(ahead, ahead, crop_seed)
    while (seconds := time.perf_counter() - began) < SECONDS:
        rows, start = ahead, (ahead.stop if ahead.stop + batch <= len(stream) else 0)
        ahead = range(start, start + batch)
        stream.prefetch(ahead, ahead, crop_seed)
        stream.read(rows, rows, crop_seed)
        count += batch
    stream.close()
    return count / seconds


def trained(recipe: str, words: list[str], folder: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """Train a recipe; return the lines of its steps but the first few, and the seconds that each waited for data."""
    main_command(["train", recipe, *words, "--runs", str(folder / "runs")])
    lines = read_metrics(next((folder / "runs").glob("*/metrics.jsonl")))
    steps = [line for line in lines if line["kind"] == "step"][WARMUP:]
    return steps, [line["seconds"] * line["shares"].get("data", 0.0) for line in steps]


def waiting(words: list[str], folder: Path) -> None:
    """Train on the shards; print the share of the steps' time that was waiting, and the rate on a resident batch."""
    steps, waits = trained(RECIPE, words, folder)
    total, size = sum(line["seconds"] for line in steps), steps[-1]["batch"]
    wait = f"waiting {sum(waits) / total:.1%} (longest {max(waits):.3f} s)"
    print(f"{len(steps)} steps of {size}: {size * len(steps) / total:,.0f} pairs/s, {wait}")
    job = ImageText.open(load_any_recipe(RECIPE, words))
    optimizer = build_optimizer(job.run.model, job.run.recipe.optim)
    resident = job.parts(torch.from_numpy(job.rows[:size]), 0, ALONE)
    job.close()
    alone = median(Machine(job.run.device).time(lambda: step(job, optimizer, resident)) for _ in range(10))
    print(f"without data: {size / alone:,.0f} pairs/s")


def main() -> None:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, cache = write_shards(folder, PICTURES), folder / "cache"
        size = sum(path.stat().st_size for path in folder.glob("*.tar")) / PICTURES
        print(f"{PICTURES:,} pictures of {size / 1000:.0f} kB, {cores()} cores, torch {torch.__version__}")
        stream = open_pairs(source, image_size=224, channels=3, held_out=0.002, cache=cache).stream
        workers = [number for number in WORKERS if number <= cores()]
        for number, (processes, kind) in product(workers, ((True, "processes"), (False, "threads"))):
            images = rate(stream, number, 256, processes=processes)
            print(f"{number:3} {kind:9}: {images:8,.0f} pictures/s, {images / number:6,.0f} each")
        if torch.cuda.is_available():
            waiting(training_words(source, cache), folder)


if __name__ == "__main__":
    main()
