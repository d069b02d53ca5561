"""What reading a collection costs: pictures per second of our readers, and how long a step of ViT-B/16 waits for them.

    python benchmarks/loading.py [--pictures 2000] [--workers 1 2 4 8] [--seconds 40] [--batch 1024] [--folder FOLDER]

Tar shards are written first: JPEGs of 256 to 500 pixels a side, smooth shapes under a little noise, 30 to 60 kB each.
Then all of them are read through `data/collection.py`, cropped at random to 224 pixels, by so many processes, and for
comparison by as many threads of one process; a rate is the pictures over the seconds of the clock.

On a GPU a CLIP ViT-B/16 in bf16, with every activation kept, is then trained on the shards for `--seconds` with as many
processes as there are cores. `waiting` is the share of the steps' time, the first few left out, that passes until the
batch is there, the asking for the next one included; `without data` is the time of the same step on a batch that is
there already, while nothing else happens.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import time
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from contrastile.data.collection import Stream
from contrastile.data.crop import Crop
from contrastile.data.decoding import cores
from contrastile.data.pairs import open_pairs
from contrastile.train.facts import Trained
from contrastile.train.feed import Feed
from contrastile.train.image_text import ImageText
from contrastile.train.log import Metrics, read_metrics
from contrastile.train.loop import step, train
from contrastile.train.optim import build_optimizer
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_recipe

SHARD, WORDS = (
    250,
    ("red", "blue", "round", "long", "old", "small", "house", "river", "bird", "stone", "cloud", "field"),
)
# for how long each rate is measured
SECONDS = 2.0
# steps before the clocks of a GPU and its allocator are steady
WARM = 5
RECIPE = """
[data]
source = "{shards}"
image_size = 224
channels = 3
held_out = 0.002
cache = "{cache}"

[model]
tokenizer = {{ size = 1000, length = 77 }}

[model.both]
mean = [0.4815, 0.4578, 0.4082]
std = [0.2686, 0.2613, 0.2758]

[model.both.config]
model_type = "clip"
projection_dim = 512

[model.both.config.vision_config]
patch_size = 16
image_size = 224
hidden_size = 768
intermediate_size = 3072
num_hidden_layers = 12
num_attention_heads = 12

[model.both.config.text_config]
hidden_size = 512
intermediate_size = 2048
num_hidden_layers = 12
num_attention_heads = 8

[train]
examples = 100_000_000
minutes = {minutes}
batch = {batch}
sub_batch = {batch}
precision = "bf16"

[evaluate]
every = 1.0
probe = 1
"""


def write_shards(folder: Path, pictures: int) -> str:
    """The shards; the source that names them."""
    from PIL import Image

    lot = np.random.default_rng(0)
    last = -(-pictures // SHARD) - 1
    for shard in range(last + 1):
        with tarfile.open(folder / f"{shard:05}.tar", "w") as tar:
            for number in range(shard * SHARD, min((shard + 1) * SHARD, pictures)):
                wide, high = lot.integers(256, 501, 2).tolist()
                shapes = Image.fromarray(lot.integers(0, 256, (high // 32, wide // 32, 3), dtype=np.uint8))
                smooth = np.asarray(shapes.resize((wide, high), Image.Resampling.BICUBIC), dtype=np.float32)
                noisy = (smooth + lot.normal(0, 5, (high, wide, 1))).clip(0, 255).astype(np.uint8)
                file = io.BytesIO()
                Image.fromarray(noisy).save(file, "JPEG", quality=90)
                title = f"{' '.join(lot.choice(WORDS, 6))} {number}"
                for suffix, content in (("jpg", file.getvalue()), ("txt", title.encode())):
                    entry = tarfile.TarInfo(f"{number:06}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return f"{folder}/{{00000..{last:05}}}.tar"


def rate(stream: Stream, workers: int, batch: int, *, apart: bool) -> float:
    """Pictures per second of the clock, batches read one ahead as in training."""
    stream.workers, stream.apart, crop = workers, apart, Crop(0)
    stream.read(range(16 * workers), range(16 * workers), crop)
    done, following = 0, range(batch)
    began = time.perf_counter()
    stream.expect(following, following, crop)
    while (seconds := time.perf_counter() - began) < SECONDS:
        part, start = following, (following.stop if following.stop + batch <= len(stream) else 0)
        following = range(start, start + batch)
        stream.expect(following, following, crop)
        stream.read(part, part, crop)
        done += batch
    stream.close()
    return done / seconds


def waiting(path: Path, folder: Path) -> None:
    """Train on the shards; print what share of the steps' time was waiting."""
    waits: list[float] = []
    real_batch, real_expect = Feed.batch, Feed.expect

    def batch(*arguments, **named):
        began = time.perf_counter()
        try:
            return real_batch(*arguments, **named)
        finally:
            waits.append(time.perf_counter() - began)

    def expect(*arguments, **named):
        began = time.perf_counter()
        real_expect(*arguments, **named)
        waits[-1] += time.perf_counter() - began

    recipe = load_recipe(path)
    job = ImageText.open(recipe)
    Feed.batch, Feed.expect = batch, expect
    try:
        with Metrics(folder / "metrics.jsonl") as metrics:
            train(job, metrics, Trained())
    finally:
        Feed.batch, Feed.expect = real_batch, real_expect
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]
    seconds, late, size = [line["seconds"] for line in steps][WARM:], waits[WARM : len(steps)], steps[-1]["batch"]
    share, rate = sum(late) / sum(seconds), size / mean(seconds)
    print(f"{len(seconds)} steps of {size}: {rate:,.0f} pairs/s, waiting {share:.1%} (longest {max(late):.3f} s)")

    optimizer = build_optimizer(job.run.model, recipe.optim)
    there = job.parts(torch.from_numpy(job.rows[:size]), 0, ALONE)
    job.close()
    alone = []
    for _ in range(10):
        began = time.perf_counter()
        step(job, optimizer, there)
        alone.append(time.perf_counter() - began)
    print(f"without data: {size / median(alone):,.0f} pairs/s")


def main() -> None:
    """The rates, and on a GPU the share of waiting."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--pictures", type=int, default=2000)
    words.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16])
    words.add_argument("--batch", type=int, default=1024)
    words.add_argument("--seconds", type=float, default=40.0)
    words.add_argument("--folder", help="where the shards are written and left (default: a temporary folder)")
    chosen = words.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(chosen.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        source, cache = write_shards(folder, chosen.pictures), folder / "cache"
        size = sum(path.stat().st_size for path in folder.glob("*.tar")) / chosen.pictures
        print(f"{chosen.pictures:,} pictures of {size / 1000:.0f} kB, {cores()} cores, torch {torch.__version__}")
        stream = open_pairs(source, image_size=224, channels=3, held_out=0.002, cache=cache).stream
        for workers in (number for number in chosen.workers if number <= cores()):
            for apart, called in ((True, "processes"), (False, "threads")):
                found = rate(stream, workers, 256, apart=apart)
                print(f"{workers:3} {called:9}: {found:8,.0f} pictures/s, {found / workers:6,.0f} each")
        if torch.cuda.is_available():
            path = folder / "loading.toml"
            path.write_text(RECIPE.format(shards=source, cache=cache, batch=chosen.batch, minutes=chosen.seconds / 60))
            waiting(path, folder)


if __name__ == "__main__":
    main()
