"""Examples for readers pass a strict type checker, and public names have the types that a run finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import get_type_hints

import pytest
from refusals import refusal
from torch import Tensor, nn

import contrastile
from contrastile.train.retriever.run import RetrieverRun
from contrastile.train.run import Run

ROOT = Path(contrastile.__file__).parent.parent
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# names that a reader has by then
THERE = "from typing import Any\nimport torch\nmodel: Any\npixels: torch.Tensor\ntokens: torch.Tensor\n"
RETRIEVER = """
import contrastile
run = contrastile.load("runs/docstrings")
scores = run.encode_query(["a question"], dimensions=64) @ run.encode_passage(["a passage"], dimensions=64).T
print(scores, run.tokenizer, run.recipe, run.model, run.device)
"""
MISSPELT = "import contrastile\ncontrastile.load('runs/glyphs').encode_pictures([])\n"


def test_the_readme_is_well_typed_and_a_misspelt_method_is_not(tmp_path: Path) -> None:
    snippets = SNIPPET.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert any("contrastile.load(" in snippet for snippet in snippets)
    files = {f"readme_{place}.py": THERE + snippet for place, snippet in enumerate(snippets)}
    files |= {"retriever.py": RETRIEVER, "misspelt.py": MISSPELT}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    # of what is imported the package alone is read: torch takes half a minute
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = skip\n[mypy-contrastile.*]\nfollow_imports = silent\n")
    command = [
        sys.executable, "-m", "mypy", "--strict", "--config-file", str(config), "--cache-dir", os.devnull, *files,
    ]  # fmt: skip
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        'misspelt.py:2: error: "LoadedRun" has no attribute "encode_pictures"  [attr-defined]',
        f"Found 1 error in 1 file (checked {len(files)} source files)",
    ]


@pytest.mark.parametrize(
    ("kind", "methods", "sentence"),
    [
        (
            RetrieverRun,
            ("transform", "encode_image", "encode_text"),
            "`run` must be of images and texts for {}; got one that is a retriever's. "
            "It has encode_query and encode_passage.",
        ),
        (
            Run,
            ("encode_query", "encode_passage"),
            "`run` must be a retriever's for {}; got one that is of images and texts. "
            "It has encode_image, encode_text and transform.",
        ),
    ],
)
def test_a_method_of_the_other_kind_of_run_is_refused(
    kind: type[Run] | type[RetrieverRun], methods: tuple[str, ...], sentence: str
) -> None:
    run = object.__new__(kind)
    for method in methods:
        assert refusal(getattr(run, method), []) == sentence.format(method)


@pytest.mark.parametrize("name", [name for name in contrastile.__all__ if name.endswith("Loss")])
def test_the_call_of_a_loss_explains_every_argument(name: str) -> None:
    forward = getattr(contrastile, name).forward
    text = forward.__doc__ or ""
    assert forward.__doc__ != nn.Module.forward.__doc__
    arguments = [name for name, x in signature(forward).parameters.items() if x.kind is not x.VAR_KEYWORD]
    assert all(name in text.partition("Arguments:")[2] for name in arguments[1:])
    assert get_type_hints(forward)["return"] in (Tensor, Tensor | dict[str, Tensor])
