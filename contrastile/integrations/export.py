"""The way out: a retriever's run as a folder of sentence-transformers or transformers, an index as plain files.

Called by `contrastile export`, as `export_pairs.py` is for images and texts. Nothing of contrastile is needed to load
what it writes.
"""

import json
import shutil
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from contrastile import __version__, load
from contrastile._errors import invalid, written_to
from contrastile.models.base import ProjectedTower
from contrastile.models.pretrained import TextTower
from contrastile.models.text import PAD, Tokenizer
from contrastile.retrieval.index import Index
from contrastile.train.folder import RECIPE
from contrastile.train.retriever.run import RetrieverRun

# the name of each pooling in sentence-transformers
POOLINGS = {"mean": "mean", "cls": "cls", "last": "lasttoken"}
# passages that are copied at once
CHUNK = 65_536

CARD = """---
library_name: {library}
pipeline_tag: {task}
tags: [contrastile, feature-extraction]
---

# {title}

{summary}

{usage}

| | |
|---|---|
{rows}

## Training

Its recipe, with which `contrastile train` repeats the run:

```toml
{recipe}
```
"""

USAGE = {
    "sentence-transformers": """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
scores = model.encode_query(["a question"]) @ model.encode_document(["a passage"]).T
```""",
    "transformers": """```python
from transformers import AutoModel, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModel.from_pretrained("{name}")
states = model(**tokenizer(["a text"], return_tensors="pt")).last_hidden_state  # then the pooling below
```""",
}

# the way to shorter queries, where passages have the same folder
SHORTER = {
    "sentence-transformers": "set `model.max_seq_length = {length}` before `encode_query`",
    "transformers": "call `tokenizer(..., truncation=True, max_length={length})`",
}


def export_run(folder: Path, library: str, target: Path) -> list[Path]:
    """Write each encoder of a retriever's run as a folder of `library`, and return the folders.

    One encoder goes to `target`, two to `target/query` and `target/passage`. Raises ValueError for encoders that the
    library does not have, and for a target that exists.
    """
    run = load(folder, device="cpu")
    if not isinstance(run, RetrieverRun):
        raise invalid("run", "be a retriever's", "one of images and texts", "Load it with contrastile.load.")
    if run.recipe.model.kind != "single":
        remedy = "Load it with contrastile.load, and compare with contrastile.scorers.MaxSim."
        raise invalid("run", "have one vector a text", f'one of model.kind "{run.recipe.model.kind}"', remedy)
    if run.model.settings["lora"] is not None:
        raise invalid("run", "have encoders without adapters", "lora", "Train without model.lora, or merge them.")
    encoders = run.model.encoders.items()
    targets = {side: target if side == "both" else target / side for side, _ in encoders}
    kinds = {side: getattr(run.recipe.model, side).kind for side, _ in encoders}
    for side, kind in kinds.items():
        if kind != "transformers":
            remedy = f'Train with model.{side} of the kind "transformers".'
            raise invalid("run", "have encoders of transformers", f'model.{side} of the kind "{kind}"', remedy)
    parts = {side: _parts(encoder, library) for side, encoder in encoders}
    refuse_existing(target, *(["sentence_transformers"] if library == "sentence-transformers" else []))
    with written_to(target):
        for side, (tower, projection) in parts.items():
            targets[side].mkdir(parents=True)
            tower.model.save_pretrained(targets[side])  # type: ignore[operator]
            tokenizer = copy(run.tokenizer)
            if side == "query":
                tokenizer.length = run.recipe.model.tokenizer.query_length
            save_tokenizer(tokenizer, targets[side])
            if library == "sentence-transformers":
                _save_modules(run, tower, projection, targets[side], tokenizer.length)
            card = _card(run, folder, library, side, tower, targets[side].name)
            (targets[side] / "README.md").write_text(card, encoding="utf-8")
    return list(targets.values())


def _parts(encoder: nn.Module, library: str) -> tuple[TextTower, nn.Linear | None]:
    """The model with its pooling, and the projection behind it."""
    tower: Any = encoder
    projection = None
    if isinstance(encoder, ProjectedTower) and isinstance(encoder.projection, nn.Linear):
        tower, projection = encoder.tower, encoder.projection
    if library == "transformers" and projection is not None:
        remedy = "Export as sentence-transformers, which has a module for it."
        raise invalid("run", "have no projection for transformers", f"{projection.out_features} features", remedy)
    if library == "sentence-transformers" and tower.pooling not in POOLINGS:
        remedy = "Export as transformers."
        raise invalid("run", f"have one of the poolings {', '.join(POOLINGS)}", tower.pooling, remedy)
    return tower, projection


def refuse_existing(target: Path, *needed: str) -> None:
    """Raise ValueError for a target that exists, and ImportError for a package that writing it needs."""
    for name in needed:
        import_module(name)
    if target.exists():
        raise invalid("--out", "be a folder that is not there yet", f'"{target}"', "Choose another one.")


def save_tokenizer(tokenizer: Tokenizer, target: Path) -> None:
    """Write a tokenizer as transformers does."""
    tokenizer.save(target)
    if not (target / "tokenizer_config.json").is_file():
        from transformers import PreTrainedTokenizerFast

        file = str(target / "tokenizer.json")
        words = {"model_max_length": tokenizer.length, "pad_token": PAD, "padding_side": "right"}
        PreTrainedTokenizerFast(tokenizer_file=file, **words).save_pretrained(target)


def _save_modules(run: RetrieverRun, tower: TextTower, projection: nn.Linear | None, target: Path, length: int) -> None:
    """Replace a folder of transformers by one of sentence-transformers."""
    from sentence_transformers import SentenceTransformer, models

    modules: list[Any] = [models.Transformer(str(target), max_seq_length=length)]
    modules.append(models.Pooling(tower.model.config.hidden_size, pooling_mode=POOLINGS[tower.pooling]))  # type: ignore[union-attr]
    if projection is not None:
        dense = models.Dense(projection.in_features, projection.out_features, False, nn.Identity())
        with torch.no_grad():
            dense.linear.weight.copy_(projection.weight)
        modules.append(dense)
    if run.model.normalise:
        modules.append(models.Normalize())
    data = run.recipe.data
    prompts = {"query": data.query_prefix, "document": data.passage_prefix}
    similarity = "cosine" if run.model.normalise else "dot"
    model = SentenceTransformer(modules=modules, prompts=prompts, similarity_fn_name=similarity, device="cpu")
    shutil.rmtree(target)
    model.save(str(target))


def _card(run: RetrieverRun, folder: Path, library: str, side: str, tower: TextTower, name: str) -> str:
    """The model card of an encoder: use, form and training."""
    data, tokenizer = run.recipe.data, run.recipe.model.tokenizer
    comparison = "cosine" if run.model.normalise else "dot product"
    lengths = {"query": tokenizer.query_length, "passage": run.tokenizer.length}
    longest = f"{lengths.get(side, run.tokenizer.length)} tokens"
    if side == "both" and tokenizer.query_length < run.tokenizer.length:
        longest += f", a query {tokenizer.query_length}: {SHORTER[library].format(length=tokenizer.query_length)}"
    side = "queries and passages" if side == "both" else side
    separator = data.title_separator.replace("\n", "\\n")
    return filled_card(
        folder,
        library,
        task="sentence-similarity",
        title=f"{Path(folder).name}: {side}",
        summary=f"A text encoder of {run.model.features} features, trained with contrastile {__version__} and exported "
        f"for {library}.\nTexts are compared by {comparison}.",
        usage=USAGE[library].format(name=name),
        rows={
            "side": side,
            "pooling": tower.pooling,
            "longest text": longest,
            "before a query": f"`{data.query_prefix}`",
            "before a passage": f"`{data.passage_prefix}`, then its title, `{separator}` and its text",
        },
    )


def filled_card(
    folder: Path, library: str, *, task: str, title: str, summary: str, usage: str, rows: dict[str, object]
) -> str:
    """A model card that ends with the recipe of the run in `folder`. `rows`: of its table."""
    return CARD.format(
        library=library, task=task, title=title, summary=summary, usage=usage,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        recipe=(folder / RECIPE).read_text(encoding="utf-8").strip(),
    )  # fmt: skip


def export_index(folder: Path, kind: str, target: Path) -> list[Path]:
    """Write an index's features as `features.npy` (float16, [n, D]) or `index.faiss`, its ids and its passages.

    `ids.txt` has an id a line, escaped as in JSON; `passages.jsonl` the passages in the same order.
    """
    index = Index(folder)
    if index.kind != "single":
        remedy = "Read its .npy and .lengths.npy: the vectors of all tokens, and their number in each passage."
        raise invalid("index", "have one vector a passage", f'one of kind "{index.kind}"', remedy)
    refuse_existing(target, *(["faiss"] if kind == "faiss" else []))
    shards = [Path(folder) / shard["name"] for shard in index.metadata["shards"]]
    features = [np.load(f"{shard}.npy", mmap_mode="r", allow_pickle=False) for shard in shards]
    with written_to(target):
        target.mkdir(parents=True)
        for name, suffix in (("ids.txt", "ids"), ("passages.jsonl", "jsonl")):
            with (target / name).open("wb") as file:
                for shard in shards:
                    file.write(Path(f"{shard}.{suffix}").read_bytes())
        if kind == "faiss":
            import faiss

            flat = faiss.IndexFlatIP(index.dimensions)
            for shard in features:
                for start in range(0, len(shard), CHUNK):
                    flat.add(np.ascontiguousarray(shard[start : start + CHUNK], dtype=np.float32))
            faiss.write_index(flat, str(target / "index.faiss"))
        else:
            shape = (len(index), index.dimensions)
            whole = np.lib.format.open_memmap(target / "features.npy", "w+", features[0].dtype, shape)
            start = 0
            for shard in features:
                whole[start : start + len(shard)] = shard
                start += len(shard)
            whole.flush()
        described = {name: index.metadata[name] for name in ("dimensions", "run") if name in index.metadata}
        described |= {"passages": len(index), "similarity": "dot product"}
        (target / "index.json").write_text(json.dumps(described, indent=1, default=str) + "\n", encoding="utf-8")
    return sorted(target.iterdir())
