# %% [markdown]
# # How do I train on my own images, and search them by text?
#
# You have images with captions. This tutorial packs them into shards, trains a model with the command, classifies images of classes that
# have only a name, and finds images by a text.
#
# - **You will see** the four commands with their output, and the images that the model finds.
# - **It takes** about one minute on two cores.
# - **If it fails**, see the [last section](#if-it-fails).
#
# Your own images are not here, so we draw some: shapes of several colours, with captions.

# %%
import io
import json
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image, ImageDraw

import contrastile

PICTURES, EPOCHS = 2000, 12.0
COLOURS = {
    "red": "#d03030",
    "green": "#30a050",
    "blue": "#3060d0",
    "yellow": "#e0c030",
    "purple": "#9040b0",
    "white": "#e8e8e8",
}
SHAPES = ("circle", "square", "triangle", "ring", "cross")
random.seed(0)


def picture(colour, shape):
    """A shape at a random place on a grey ground."""
    image = Image.new("RGB", (64, 64), (random.randint(40, 90),) * 3)
    draw, size = ImageDraw.Draw(image), random.randint(12, 22)
    x, y = random.randint(size, 64 - size), random.randint(size, 64 - size)
    box, ink = (x - size, y - size, x + size, y + size), COLOURS[colour]
    if shape == "circle":
        draw.ellipse(box, fill=ink)
    elif shape == "square":
        draw.rectangle(box, fill=ink)
    elif shape == "triangle":
        draw.polygon([(x, y - size), (x - size, y + size), (x + size, y + size)], fill=ink)
    elif shape == "ring":
        draw.ellipse(box, outline=ink, width=max(3, size // 4))
    else:
        draw.line((x - size, y, x + size, y), fill=ink, width=size // 2)
        draw.line((x, y - size, x, y + size), fill=ink, width=size // 2)
    return image


# %% [markdown]
# ## 1. Pack the images into shards
#
# A shard is a tar file with `key.jpg` and `key.txt` side by side. A table (`filepath`, `title`), a folder or a parquet file works too: [all
# sources](../collections.md). `sizes.json` lets contrastile notice a shard that was cut off.


# %%
def write_shard(path, count):
    with tarfile.open(path, "w") as tar:
        for k in range(count):
            colour, shape = random.choice([*COLOURS]), random.choice(SHAPES)
            caption = f"a {colour} {shape}"
            pixels = io.BytesIO()
            picture(colour, shape).save(pixels, "PNG")
            for suffix, content in ((".png", pixels.getvalue()), (".txt", caption.encode())):
                member = tarfile.TarInfo(f"{k:05}{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


Path("shards").mkdir(exist_ok=True)
for k in range(2):
    write_shard(f"shards/{k:05}.tar", PICTURES // 2)
Path("shards/sizes.json").write_text(json.dumps({f"{k:05}.tar": PICTURES // 2 for k in range(2)}))
print(*sorted(path.name for path in Path("shards").iterdir()))

# %% [markdown]
# ## 2. Train
#
# A recipe is a TOML file. This one fits a few thousand small images. The same keys can be given on the command line.

# %%
RECIPE = f"""
[data]
source = "shards/{{00000..00001}}.tar"
image_size = 32
channels = 3
augment = false
held_out = 0.1
cache = "cache"

[model]
features = 64
image = {{ kind = "conv", width = 16 }}
text = {{ kind = "words", width = 64 }}
tokenizer = {{ size = 100, length = 8 }}

[optim]
learning_rate = 3e-3

[train]
epochs = {EPOCHS}
batch = 128
sub_batch = 64
precision = "float32"

[evaluate]
every = 1.0
"""
with open("shapes.toml", "w") as file:
    file.write(RECIPE)


def command(*words, tail=12):
    """Run a command and print the end of its output."""
    done = subprocess.run([sys.executable, "-m", "contrastile", *words], capture_output=True, text=True, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).splitlines()
    print("$ contrastile", *words)
    print("\n".join(lines[-tail:]))


command("train", "shapes.toml")

# %% [markdown]
# *Held-out pairs* are a tenth of the captions: combinations of colour and shape that training never saw. *Held-out images* are new
# images of known captions. The folder `runs/shapes` has the
# weights, `metrics.jsonl` and `report.html`, a page with the curves.
#
# ## 3. Classify without training for it
#
# A folder with one sub-folder for each class is a test. The names of the folders are the texts.

# %%
for colour in COLOURS:
    folder = Path("classes") / f"{colour}_circle"
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(8):
        picture(colour, "circle").save(folder / f"{k}.png")

command("evaluate", "runs/shapes", "--zero-shot", "classes", "--name", "circles", tail=4)

# %% [markdown]
# ## 4. Search by text
#
# `contrastile.load` returns the towers. A search is one product of matrices.

# %%
run = contrastile.load("runs/shapes")
gallery = [picture(random.choice([*COLOURS]), random.choice(SHAPES)) for _ in range(200)]
features = run.encode_image(gallery)
questions = ["a yellow triangle", "a blue ring", "a red cross"]
scores = run.encode_text(questions) @ features.T

figure, axes = plt.subplots(3, 6, figsize=(8, 4.2))
for row, question, best in zip(axes, questions, scores.topk(6).indices, strict=True):
    for axis, k in zip(row, best, strict=True):
        axis.imshow(gallery[k])
        axis.set_xticks([])
        axis.set_yticks([])
    row[0].set_title(question, fontsize=9, loc="left")

# %% [markdown]
# ## If it fails
#
# | symptom | what to do |
# |---|---|
# | "bad pairs" | some images or captions cannot be used; the log counts them by reason |
# | a shard "was cut" | copy it again; the sentence names the file |
# | recall stays at chance | more images, or a smaller `train.batch`: few hundred images need batches of 32 or 64 |
# | the first step takes minutes | the images are large: the cache is being filled; or bf16 on a CPU without bf16 |
# | another error | [the index of errors](../reference/errors.md) |
#
# Next: [more sources and larger models](../collections.md), [tests on other images](../evaluation.md).
