# %% [markdown]
# # How do I train on images alone: SimCLR, then SupCon on a frozen trunk?
#
# SimCLR needs no labels: two random views of an image belong together. SupCon uses labels: all images of a class belong together. This
# tutorial trains a trunk with SimCLR, freezes it, and trains a head with SupCon on 200 labels.
#
# - **You will see** the accuracy of a nearest-neighbour classifier on handwritten digits before and after each stage.
# - **It takes** about half a minute on two cores.
# - **If it fails**, see the [last section](#if-it-fails).

# %%
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from contrastile import NTXentLoss, SupConLoss, encode

STEPS, HEAD_STEPS, SUB_BATCH = 40, 60, 256
torch.manual_seed(0)

# %% [markdown]
# ## The data
#
# 1,797 handwritten digits of scikit-learn. The last 500 are for testing.

# %%
digits = load_digits()
pictures = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - 0.3
labels = torch.tensor(digits.target)
train, test = slice(0, 1297), slice(1297, None)


def view(x):
    """A random shift, turn and size of each image, and some noise."""
    turn, size = (torch.rand(len(x)) - 0.5) * 0.7, 1 + (torch.rand(len(x)) - 0.5) * 0.5
    matrix = torch.stack([size * turn.cos(), -size * turn.sin(), size * turn.sin(), size * turn.cos()], 1).view(
        -1, 2, 2
    )
    shift = (torch.rand(len(x), 2, 1) - 0.5) * 0.5
    grid = F.affine_grid(torch.cat([matrix, shift], 2), list(x.shape), align_corners=False)
    return F.grid_sample(x + 0.3, grid, align_corners=False) - 0.3 + 0.1 * torch.randn_like(x)


# %% [markdown]
# ## The model
#
# GroupNorm, not BatchNorm: `encode` splits the batch, and the statistics of a part are not those of the whole. A head *behind* `encode` may
# use BatchNorm, because it runs over the whole batch.

# %%
trunk = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.ReLU(),
    nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
)  # fmt: skip
head = nn.Sequential(nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))


def accuracy(features_of, known=train):
    """The share of test images whose nearest labelled neighbour has their label."""
    with torch.no_grad():
        features = F.normalize(features_of(pictures), dim=-1)
    nearest = (features[test] @ features[known].T).argmax(1)
    return (labels[known][nearest] == labels[test]).float().mean().item()


FEW = slice(0, 200)
print(f"random trunk, 200 labels: {accuracy(trunk, FEW):.1%}")

# %% [markdown]
# ## SimCLR
#
# The batch is the whole training set: 1,297 images, 2,594 views. The trunk sees 256 at a time.

# %%
optimizer = torch.optim.AdamW([*trunk.parameters(), *head.parameters()], lr=2e-3)
for k in range(STEPS):
    x = pictures[train]
    hidden = encode(trunk, torch.cat([view(x), view(x)]), sub_batch=SUB_BATCH)
    view_a, view_b = F.normalize(head(hidden), dim=-1).chunk(2)
    loss = NTXentLoss()(view_a, view_b, 1 / 0.2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if k % 10 == 0 or k == STEPS - 1:
        print(f"step {k + 1}: loss {loss.item():.3f}")
print(f"SimCLR's trunk, 200 labels: {accuracy(trunk, FEW):.1%}")

# %% [markdown]
# ## SupCon on the frozen trunk
#
# The trunk's parameters need no gradient now. `encode` notices: it runs the trunk once, keeps no graph, and replays nothing. `features` of
# SupCon have the shape `[images, views, D]`.

# %%
trunk.requires_grad_(False)
head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
for k in range(HEAD_STEPS):
    x = pictures[FEW]
    hidden = encode(trunk, torch.cat([view(x), view(x)]), sub_batch=SUB_BATCH)
    views = F.normalize(head(hidden), dim=-1)
    loss = SupConLoss()(torch.stack(views.chunk(2), dim=1), labels[FEW], 1 / 0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if k % 20 == 0 or k == HEAD_STEPS - 1:
        print(f"step {k + 1}: loss {loss.item():.3f}")
print(f"SimCLR's trunk and SupCon's head, 200 labels: {accuracy(nn.Sequential(trunk, head), FEW):.1%}")

# %% [markdown]
# SupCon's loss does not go to 0: even perfect features share their probability among all positives of a class.
#
# ## What is refused
#
# A trunk with BatchNorm in training mode is refused, with a sentence that says what to do:

# %%
try:
    encode(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), pictures[:8], sub_batch=4)
except ValueError as error:
    print(error)

# %% [markdown]
# ## If it fails
#
# | symptom | what to do |
# |---|---|
# | SupCon returns 0, with a warning | no label of the batch occurs twice: take more images of each class, or two views |
# | accuracy falls during SimCLR | the views destroy what matters; make them milder |
# | your trunk has BatchNorm | [the ways out](../coming_from/views.md#batch-normalisation) |
