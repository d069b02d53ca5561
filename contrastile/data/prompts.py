"""Prompts: sentences that the name of a class is put into, by the names that a recipe gives them. The words are ours.

Read with the recipe, so it imports nothing.
"""

from __future__ import annotations

PROMPTS: dict[str, tuple[str, ...]] = {
    # the most common prompt of the field
    "plain": ("a photo of a {}.",),
    "several": (
        "a photo of a {}.",
        "a close photo of a {}.",
        "a photo of a {}, seen from afar.",
        "a poor and blurred photo of a {}.",
        "a {} among other things.",
        "a drawing of a {}.",
        "something that looks like a {}.",
    ),
}
