"""Tests so small that they take a blink: folders of glyphs by class, and captioned glyphs."""

import json
from pathlib import Path

from PIL import Image, ImageDraw

PLACES = ((1, 2), (7, 2), (4, 0), (4, 4))


def glyph(letter: str, x: int, y: int) -> Image.Image:
    """A letter at a place."""
    picture = Image.new("L", (16, 16))
    ImageDraw.Draw(picture).text((x, y), letter, fill=255)
    return picture


def class_folder(root: Path, folders: dict[str, str], each: int = 3) -> Path:
    """For each folder `each` pictures of its letter, the first ones at the places of `tiny_runs`."""
    for name, letter in folders.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            glyph(letter, *PLACES[number % 4]).save(root / name / f"{number}.png")
    return root


def karpathy(root: Path, letters: str = "ABCDEF", captions: int = 3, split: str = "test", below: str = "val") -> Path:
    """Karpathy's JSON of one picture a letter, with several captions each; the pictures lie in `root`/`below`."""
    (root / below).mkdir(parents=True, exist_ok=True)
    images = []
    for number, letter in enumerate(letters):
        glyph(letter, 3, 3).save(root / below / f"{number}.png")
        sentences = [{"raw": f"letter {letter} {place}"} for place in ("left", "right", "high", "low")[:captions]]
        entry = {"filename": f"{number}.png", "split": split, "sentences": sentences, "imgid": number}
        images.append({**entry, "filepath": below} if below else entry)
    path = root / "dataset.json"
    path.write_text(json.dumps({"images": images, "dataset": "tiny"}))
    return path
