"""Questions and a recipe so small that a whole retriever's run takes a second: colours, animals and where they live."""

import json
from pathlib import Path

from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.config import RetrieverRecipe

COLOURS = ["red", "green", "blue", "white"]
ANIMALS = ["fox", "cat", "owl", "bee", "eel"]
PLACES = ["house", "river", "forest"]

RECIPE = """
kind = "retriever"

[data]
source = "{folder}/texts.jsonl"
held_out = 0.25
negatives = 2
cache = "{folder}/cache"

[model]
both = {{ kind = "bag", width = 16 }}
tokenizer = {{ kind = "words", size = 100, length = 16, query_length = 6 }}

[optim]
learning_rate = 1e-2

[train]
examples = 320
batch = [[0.0, 16], [0.5, 32]]
sub_batch = {{ query = 8, passage = 12 }}
retain = 0

[evaluate]
every = 0.5
"""


def entries():
    """DPR's form; the hard negatives share two of three words with the question."""
    for n, (colour, animal, place) in enumerate((c, a, p) for c in COLOURS for a in ANIMALS for p in PLACES):
        other = PLACES[(PLACES.index(place) + 1) % len(PLACES)]
        passage = {"title": animal, "text": f"def {colour}_{animal}(): return {place}", "passage_id": f"p{n}"}
        wrong = [
            {"title": animal, "text": f"def {colour}_{animal}(): return {other}"},
            {"title": animal, "text": f"raise {place} without {colour}"},
        ]
        question = f"where is the {colour} {animal} {place}"
        yield {"question": question, "answers": [place], "positive_ctxs": [passage], "hard_negative_ctxs": wrong}


def write_text_recipe(folder: Path, name: str = "tiny") -> Path:
    """The recipe and its texts; the recipe's path."""
    (folder / "texts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries()))
    path = folder / f"{name}.toml"
    path.write_text(RECIPE.format(folder=folder))
    return path


def tiny_retriever(folder: Path, *overrides: str) -> RetrieverRecipe:
    """The recipe, read."""
    return load_any_recipe(write_text_recipe(folder), overrides)
