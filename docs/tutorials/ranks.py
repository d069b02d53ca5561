# %% [markdown]
# # What changes on several GPUs?
#
# Nothing. This tutorial runs one script as one process and as two, and compares losses and gradients. It uses CPUs, so you can try it anywhere;
# on GPUs the lines are the same, with `"nccl"` in the place of `"gloo"`.
#
# - **You will see** the same loss and the same gradient from one process and from two.
# - **It takes** about half a minute, most of which is starting Python.
# - **If it fails**, see the [last section](#if-it-fails).
#
# ## The script
#
# A step with DistributedDataParallel. Each rank takes its part of the batch. There is no factor, no gather, and no option of the loss.

# %%
import subprocess
import sys

import torch

SCRIPT = """
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contrastile import ClipLoss, encode

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(20, 16), nn.Linear(30, 16)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def encode_image(self, pixels):
        return F.normalize(self.image(pixels), dim=-1)

    def encode_text(self, tokens):
        return F.normalize(self.text(tokens), dim=-1)


torch.manual_seed(0)
model = Clip().double()
wrapped = DistributedDataParallel(model)

# the whole batch, of which each rank takes its part
pixels, tokens = torch.randn(64, 20).double(), torch.randn(64, 30).double()
mine = slice(rank * 64 // world, (rank + 1) * 64 // world)

image = encode((wrapped, "encode_image"), pixels[mine], sub_batch=8)
text = encode((wrapped, "encode_text"), tokens[mine], sub_batch=8)
loss = ClipLoss()(image, text, model.logit_scale.exp())
loss.backward()

print(f"rank {rank} of {world}: loss {loss.item():.12f}")
if rank == 0:
    torch.save({name: p.grad for name, p in model.named_parameters()}, f"gradients-{world}.pt")
dist.destroy_process_group()
"""
with open("step.py", "w") as file:
    file.write(SCRIPT)

# %% [markdown]
# ## Run it once with one process, once with two


# %%
def torchrun(processes):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        "step.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"$ torchrun --standalone --nproc-per-node {processes} step.py")
    print("".join(sorted(line + "\n" for line in done.stdout.splitlines())) or done.stderr[-600:])


torchrun(1)
torchrun(2)

# %% [markdown]
# The loss is that of the global batch, and every rank returns the same number.
#
# ## Compare the gradients
#
# This is the check to run in your own loop: save the gradients of one process with the whole batch, and those of several ranks. The ratio
# must be 1, and the direction the same.

# %%
one, two = torch.load("gradients-1.pt"), torch.load("gradients-2.pt")
for name in one:
    a, b = one[name].flatten(), two[name].flatten()
    print(f"{name:14} ratio {float(a @ b / (a @ a)):.12f}   largest difference {float((a - b).abs().max()):.1e}")

# %% [markdown]
# A ratio of 0.5 here would mean that a factor of the number of ranks is missing, and 2 that there is one too many. [The
# convention](../concepts/convention.md) explains why other code gets this wrong.
#
# ## What you may want to change
#
# | you want | you write |
# |---|---|
# | GPUs | `init_process_group("nccl")`, and model and inputs on `cuda:LOCAL_RANK` |
# | FSDP2 | `fully_shard(model)` instead of the wrapper; `encode((model, "encode_image"), ...)`; a scale of shape `[1]`, `nn.Parameter(torch.ones(1) * 2.66)` |
# | to see which exchange is used | the log says it once; `contrastile doctor --ranks 8` before you start |
# | a loss of each rank for itself | `ClipLoss(exchange="single")` |
# | the training job of the command | `torchrun ... -m contrastile train RECIPE`: the same curve as one process |
#
# ## If it fails
#
# | symptom | what to do |
# |---|---|
# | "`encoder` must ..." and the wrapper is named | you passed `wrapped.module.encode_image`; pass `(wrapped, "encode_image")` |
# | ranks wait for each other | one rank made a call that the others did not; every rank must call the loss, with as many steps |
# | all ranks raise the same `ValueError` | inputs or options differ between ranks; the sentence names the rank and the value |
# | "got no answer from rank 1" | that rank died; its own message comes first in its log. [When a rank fails](../rank_failure.md) |
