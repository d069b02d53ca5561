"""The laws of the house: who may import whom, what an import may load, which names are public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import contrastile

ROOT = Path(contrastile.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))

# the ground's own storeys
OF_RANKS = {
    "comm": {"rollcall"},
    "agreement": {"rollcall", "comm"},
    "in_step": {"rollcall", "comm", "agreement"},
}
GROUND = {"_types", "_wrong", "_check", *OF_RANKS, "rollcall", "offload", "footprint", "randomness"}
BELOW = {
    "losses": GROUND,
    "reach": GROUND,
    "lengths": GROUND,
    "retention": GROUND,
    "wrappers": GROUND,
    "likeness": GROUND,
    "sums": GROUND | {"reach"},
    "first_pass": GROUND | {"reach", "wrappers", "lengths", "likeness", "retention"},
    "fitting": GROUND | {"reach", "retention", "first_pass", "sums"},
    "cache": GROUND | {"reach", "wrappers", "lengths", "likeness", "retention", "sums", "first_pass", "fitting"},
    "models": GROUND,
    "data": GROUND,
}
BELOW["tiles"] = GROUND | {"losses", "reach"}
BELOW["exchange"] = BELOW["tiles"] | {"tiles"}
BELOW["_choose"] = BELOW["exchange"] | {"exchange"}
BELOW["_sweep"] = BELOW["_choose"] | {"_choose"}
BELOW["_task"] = BELOW["_sweep"] | {"_sweep"}
BELOW["_operation"] = BELOW["_task"] | {"_task"}
BELOW["_replay"] = BELOW["_streamed"] = BELOW["_operation"]
BELOW["_scored"] = BELOW["_operation"] | {"reach"}
BELOW["_contrast"] = BELOW["_operation"] | {"_operation", "_replay", "_scored", "_streamed"}
BELOW["scorers"] = GROUND
BELOW["modules"] = BELOW["_contrast"] | {"_contrast"}
BELOW["evaluate"] = BELOW["modules"] | {"modules", "cache", "models", "data"}
BELOW["train"] = BELOW["evaluate"] | {"evaluate", "retention"}
BELOW["bench"] = BELOW["doctor"] = BELOW["train"] | {"train"}
BELOW["cli"] = BELOW["bench"] | {"bench", "doctor"}
DRAWERS = {"losses", "tiles", "exchange"}


def _drawer(module: str) -> str:
    name = [*module.split("."), "__version__"][1]
    # a public name stands for the module it lives in
    return contrastile._HOMES.get(name, name).split(".")[0]


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("contrastile")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("contrastile"):
            assert node.level == 0
            package = ROOT.parent / Path(*node.module.split("."))
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if package.is_dir() else {node.module}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_points_upward_or_sideways(path: Path) -> None:
    inside = path.relative_to(ROOT).with_suffix("").parts
    here = inside[0]
    if here in ("__init__", "__main__"):
        return
    lowest = {"_check", "_types", "_wrong"}
    allowed = lowest | OF_RANKS.get(here, set()) if here in GROUND else BELOW[here]
    for module in _imports(path):
        there = _drawer(module)
        if there == here:
            # within a drawer the base serves all; the others do not know each other, and its front shows them
            name = module.split(".")[2] if len(module.split(".")) > 2 else "base"
            kernels = path.stem.startswith("triton") and name.startswith("triton_")
            front = path.stem == "__init__"
            assert here not in DRAWERS or kernels or front or name in SHARED[here], (
                f"{path} imports its neighbour {module}"
            )
        else:
            assert there == "__version__" or there in allowed, f"{path} may not import {module}"


# what neighbours in a drawer may know: its base, and what others are a special case of; the kernels fill several files
SHARED = {
    "losses": {"base"},
    "tiles": {"base", "eager"},
    "exchange": {"base"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_is_a_chapter(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 450, "is it two chapters?"
    assert ast.get_docstring(ast.parse(text)), "a chapter opens by saying what it is"
    assert path.stem not in {"utils", "helpers", "common", "misc"}


def _fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_importing_the_library_loads_nothing_optional() -> None:
    optional = "'triton', 'transformers', 'tokenizers', 'datasets', 'PIL', 'matplotlib', 'sklearn', 'pydantic', 'tqdm'"
    # torch itself may load some of them where they are installed
    code = (
        "import sys, torch; before = set(sys.modules); import contrastile; contrastile.ClipLoss; "
        f"print(sorted((set(sys.modules) - before) & {{{optional}}}))"
    )
    assert _fresh(code) == "[]"


def test_importing_the_library_takes_no_longer_than_torch_and_a_fifth_of_a_second() -> None:
    code = (
        "import time, torch; start = time.process_time(); from contrastile import ClipLoss, encode; "
        "print(time.process_time() - start)"
    )
    # another try where the machine was busy
    assert any(float(_fresh(code)) < 0.2 for _ in range(3))


def test_a_run_is_not_loaded_without_what_it_needs(tmp_path: Path) -> None:
    for name in ("recipe.toml", "model.safetensors", "run.json"):
        (tmp_path / name).touch()
    # the library alone has every name
    code = (
        "import sys; sys.modules['pydantic'] = None; from contrastile import *; from contrastile import load\n"
        f"try: load({str(tmp_path)!r})\nexcept ModuleNotFoundError as error: print(error)"
    )
    assert _fresh(code) == '`pydantic` is not installed; run: pip install "contrastile[train]"'


def test_public_names() -> None:
    names = ["ClipLoss", "InfoNCELoss", "NTXentLoss", "SigLipLoss", "SupConLoss", "contrast", "encode", "load"]
    assert contrastile.__all__ == names
    assert dir(contrastile) == sorted(names)
    assert all(getattr(contrastile, name).__doc__ for name in names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'InfoNCE'"):
        contrastile.InfoNCE  # noqa: B018


def test_nothing_is_unpickled_or_evaluated() -> None:
    banned = {"pickle", "dill", "marshal", "shelve"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not banned & {alias.name for alias in node.names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, path
            if isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "shell"}:
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
