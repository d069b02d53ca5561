# %% [markdown]
# # How do I train a sentence encoder with a batch of 4,096 on a laptop?
#
# A sentence encoder learns from pairs of texts that belong together. Every other text of the batch is a negative, so large batches are hard to
# beat, and a laptop's memory ends early. This tutorial trains a small BERT with 4,096 pairs in one step.
#
# - **You will see** a step of 4,096 pairs in the memory of a step of 128, and recall rise.
# - **It takes** one to two minutes on two cores.
# - **If it fails**, see the [last section](#if-it-fails).
#
# Nothing is downloaded here: the BERT starts from random weights, and the texts are the functions of Python's own library with their
# docstrings. With a pretrained model replace one line, marked below.

# %%
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertModel

from contrastile import InfoNCELoss, encode
from contrastile.data.registry import open_texts
from contrastile.train.memory import Weighed

STEPS, BATCH, SUB_BATCH, LENGTH = 8, 4096, 128, 16
torch.manual_seed(0)

# %% [markdown]
# ## The data
#
# A query is the first sentence of a docstring. Its passage is the code of the function, without the docstring.

# %%
texts = open_texts("docstrings", cache=Path("~/.cache/contrastile").expanduser())
queries = [query.text for query in texts.queries]
passages = [texts.passages[query.positives[0]].text for query in texts.queries]
train = torch.from_numpy(texts.splits["train"])
held_out = torch.from_numpy(texts.splits["functions"])
print(f"{len(train):,} pairs to train on, {len(held_out):,} held out")
print("query:  ", queries[train[7]][:70])
print("passage:", passages[train[7]].splitlines()[0][:70])

# %% [markdown]
# A tokenizer in four lines: split names into words, and give each word a number by its hash. A pretrained model brings its own.

# %%
WORDS = 4096


def tokens_of(some_texts):
    rows = [
        [1 + sum(map(ord, word)) * 7919 % (WORDS - 1) for word in re.findall("[a-z]{2,}", text.lower())[:LENGTH]]
        for text in some_texts
    ]
    ids = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for row, numbers in zip(ids, rows, strict=True):
        row[: len(numbers)] = torch.tensor(numbers)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


# %% [markdown]
# ## The model
#
# One encoder for both sides, mean pooling, unit length: what sentence-transformers calls `Transformer` + `Pooling` + `Normalize`.

# %%
config = BertConfig(
    vocab_size=WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.08,
)  # fmt: skip
bert = BertModel(config, add_pooling_layer=False)  # or BertModel.from_pretrained("my/folder")


def embed(input_ids, attention_mask):
    states = bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    mask = attention_mask[..., None]
    return F.normalize((states * mask).sum(1) / mask.sum(1).clamp(min=1), dim=-1)


optimizer = torch.optim.AdamW(bert.parameters(), lr=2e-3)

# %% [markdown]
# ## The step
#
# `encode` takes the dictionary of the tokenizer as it is. The loss compares every query with all 4,096 passages.


# %%
def loss_of(rows, sub_batch):
    query = encode(embed, tokens_of([queries[k] for k in rows]), sub_batch=sub_batch)
    passage = encode(embed, tokens_of([passages[k] for k in rows]), sub_batch=sub_batch)
    return InfoNCELoss()(query, passage, 20.0)


def recall():
    with torch.no_grad():
        rows = held_out[:500]
        query = encode(embed, tokens_of([queries[k] for k in rows]), sub_batch=SUB_BATCH)
        passage = encode(embed, tokens_of([passages[k] for k in rows]), sub_batch=SUB_BATCH)
    best = (query @ passage.T).topk(10).indices
    return (best == torch.arange(len(rows))[:, None]).any(1).float().mean().item()


print(f"before: recall@10 {recall():.1%} of {min(len(held_out), 500)} held-out functions")
for k in range(STEPS):
    start = time.monotonic()
    optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (k + 1) / 3) * (1 - k / STEPS)
    loss = loss_of(train[torch.randperm(len(train))[:BATCH]], SUB_BATCH)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {k + 1}: loss {loss.item():.3f}, {time.monotonic() - start:.1f} s")
print(f"after:  recall@10 {recall():.1%}")

# %% [markdown]
# A handful of steps is a beginning: real trainings take thousands. [The retriever of the command](../retrieval.md) trains for longer on the
# same functions and is compared with BM25.
#
# ## The memory
#
# A step of 4,096 pairs beside plain steps of 128 and 512:

# %%
measured = {}
for name, rows, sub_batch in (
    ("plain, 128 pairs", 128, None),
    ("plain, 512 pairs", 512, None),
    ("cached, 4,096 pairs", BATCH, SUB_BATCH),
):
    sample = train[:rows]
    with Weighed(torch.device("cpu")) as weighed:
        if sub_batch is None:
            query, passage = (embed(**tokens_of([side[k] for k in sample])) for side in (queries, passages))
            F.cross_entropy(20.0 * query @ passage.T, torch.arange(len(sample))).backward()
        else:
            loss_of(sample, sub_batch).backward()
    measured[name] = weighed.bytes / 2**20
    print(f"{name:20} {measured[name]:6.0f} MiB")

# %% [markdown]
# The plain step grows with its batch. At 4,096 pairs it would take about eight times what it takes at 512, and the matrix besides.
#
# ## With sentence-transformers' trainer
#
# [Coming from another library](../coming_from/sentence_transformers.md) has a loss class for `SentenceTransformerTrainer`, with prompts, hard
# negatives and Matryoshka sizes.
#
# ## If it fails
#
# | symptom | what to do |
# |---|---|
# | out of memory in the first step | a smaller `SUB_BATCH`; the batch may stay |
# | equal texts in a batch are counted as wrong | pass `query_ids` and `key_ids`: equal ids are not negatives |
# | long texts make every sub-batch slow | `sub_batch_tokens=` sorts texts by length and limits tokens instead |
# | the second pass warns about other features | the encoder has a state; see [the guarantees](../guarantees.md) |
