# %% [markdown]
# # How do I train a CLIP from nothing?
#
# This tutorial trains an image tower and a text tower on images of characters and their Unicode names. The data are built in, and a CPU is
# enough.
#
# - **You will see** the loss fall, recall rise far above chance, and the memory of a plain step beside that of a cached step.
# - **It takes** about a minute on two cores; the first run draws the images, which takes half a minute more.
# - **If it fails**, see the [last section](#if-it-fails).

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from contrastile import ClipLoss, encode
from contrastile.data.registry import open_pairs
from contrastile.train.memory import Weighed

STEPS, BATCH, SUB_BATCH = 100, 512, 128
torch.manual_seed(0)

# %% [markdown]
# ## The data
#
# `open_pairs("glyphs")` draws every character of the fonts that matplotlib ships. Each pair is an image and a name. Pairs with equal `ids` are
# right answers of each other: a Latin A and a Greek Alpha look the same.

# %%
pairs = open_pairs("glyphs", image_size=32, cache=Path("~/.cache/contrastile").expanduser())
train = torch.from_numpy(pairs.splits["train"])
print(f"{len(pairs):,} pairs, {len(train):,} to train on")

figure, axes = plt.subplots(1, 6, figsize=(9, 1.9))
for axis, k in zip(axes, train[:: len(train) // 6], strict=False):
    axis.imshow(pairs.images[k, 0], cmap="gray")
    axis.set_title("\n".join(pairs.captions[k].split()[:3]), fontsize=7)
    axis.set_xticks([])
    axis.set_yticks([])

# %% [markdown]
# A tokenizer of words: a number for each word, and 0 for padding.

# %%
words = {word: k + 1 for k, word in enumerate(sorted({word for name in pairs.captions for word in name.split()}))}
LENGTH = 8


def tokens_of(names):
    rows = [[words[word] for word in name.split()][:LENGTH] for name in names]
    return torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])


def batch_of(rows):
    pixels = torch.from_numpy(pairs.images[rows.numpy()]).float() / 255 - 0.5
    return pixels, tokens_of([pairs.captions[k] for k in rows])


# %% [markdown]
# ## The model
#
# Two small towers. Both treat examples one by one, so `encode` can split a batch. GroupNorm is fine; BatchNorm in training mode is not.


# %%
class Clip(nn.Module):
    def __init__(self, features=64, width=24):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(64 * width, features),
        )  # fmt: skip
        self.words = nn.EmbeddingBag(len(words) + 1, 128, padding_idx=0)
        self.text = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, features))
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def encode_image(self, pixels):
        return self.image(pixels)

    def encode_text(self, tokens):
        return self.text(self.words(tokens))


model = Clip()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# %% [markdown]
# ## The step
#
# This is the whole of contrastile in a training loop: `encode` around each tower, and `ClipLoss`. `ids` tells the loss which pairs are not
# negatives of each other.

# %%
ids = torch.from_numpy(pairs.ids)


def step(rows, sub_batch):
    pixels, tokens = batch_of(rows)
    image = F.normalize(encode((model, "encode_image"), pixels, sub_batch=sub_batch), dim=-1)
    text = F.normalize(encode((model, "encode_text"), tokens, sub_batch=sub_batch), dim=-1)
    loss = ClipLoss()(image, text, model.logit_scale.exp(), ids=ids[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


losses = []
for k in range(STEPS):
    optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (k + 1) / 10) * (1 - k / STEPS)
    losses.append(step(train[torch.randint(len(train), (BATCH,))], SUB_BATCH))

print(f"loss {losses[0]:.2f} at the start, {sum(losses[-5:]) / 5:.2f} at the end")
figure, axis = plt.subplots(figsize=(7, 2.8))
axis.plot(losses)
axis.set_xlabel("step")
axis.set_ylabel("loss")

# %% [markdown]
# ## Did it learn?
#
# The held-out faces are fonts that training never saw. We take 500 of their images and ask: is the right name among the first ten?

# %%
held_out = torch.from_numpy(pairs.splits["faces"])
rows = held_out[torch.randperm(len(held_out))[:500]]
with torch.no_grad():
    pixels, tokens = batch_of(rows)
    image, text = (F.normalize(x, dim=-1) for x in (model.encode_image(pixels), model.encode_text(tokens)))
best = (image @ text.T).topk(10).indices
right = ids[rows][best] == ids[rows][:, None]
print(f"recall@1 {right[:, 0].float().mean():.1%}, recall@10 {right.any(1).float().mean():.1%}")
print("by chance: 0.2% and 2.0%")

# %% [markdown]
# The demo of the command, `make demo`, trains longer with larger towers: recall@1 reaches 80 % among 3,292 names.
#
# ## What was saved?
#
# We measure the peak memory of the forward and the backward of one step: once as PyTorch does it, and once cached. Weights are not counted.


# %%
def plain(pixels, tokens):
    image, text = (F.normalize(x, dim=-1) for x in (model.encode_image(pixels), model.encode_text(tokens)))
    logits, diagonal = model.logit_scale.exp() * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, diagonal) + F.cross_entropy(logits.T, diagonal)) / 2


def cached(pixels, tokens):
    image = F.normalize(encode((model, "encode_image"), pixels, sub_batch=SUB_BATCH), dim=-1)
    text = F.normalize(encode((model, "encode_text"), tokens, sub_batch=SUB_BATCH), dim=-1)
    return ClipLoss()(image, text, model.logit_scale.exp())


sizes, peaks = [256, 512, 1024, 2048, 4096], {plain: [], cached: []}
for size in sizes:
    inputs = batch_of(train[torch.arange(size) % len(train)])
    for way, column in peaks.items():
        model.zero_grad()
        with Weighed(torch.device("cpu")) as weighed:
            way(*inputs).backward()
        column.append(weighed.bytes / 2**20)

figure, axis = plt.subplots(figsize=(7, 3))
for way, column in peaks.items():
    axis.plot(sizes, column, "o-", label=way.__name__)
axis.set_xscale("log", base=2)
axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
axis.set_xlabel("pairs in a batch")
axis.set_ylabel("peak of a step, MiB")
axis.legend(frameon=False)
print(f"{sizes[-1]:,} pairs: plain {peaks[plain][-1]:.0f} MiB, cached {peaks[cached][-1]:.0f} MiB")

# %% [markdown]
# Both give the same gradient:

# %%
inputs = batch_of(train[:512])
gradients = []
for way in (plain, cached):
    model.zero_grad()
    way(*inputs).backward()
    gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
print(f"relative difference of the gradients: {difference:.1e}")

# %% [markdown]
# ## If it fails
#
# | symptom | what to do |
# |---|---|
# | the loss stays at log(batch), 6.2 | lower the learning rate; train longer |
# | `ModuleNotFoundError` | `pip install '.[train]'` in a clone |
# | memory ends | a smaller `BATCH`; the sub-batch alone does not change the features' size |
# | another error | [the index of errors](../reference/errors.md) |
#
# Next: [your own images](pictures.py), or [text](sentences.py).
