"""The laws of the house: who may import whom, what an import may load, which names are public."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from ranks import fresh

import contrastile

ROOT = Path(contrastile.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))

GROUND = {"_types", "_errors", "_torch", "distributed", "offload"}
BELOW = {"losses": GROUND, "gradcache": GROUND, "models": GROUND, "data": GROUND, "scorers": GROUND}
BELOW["tiles"] = GROUND | {"losses", "gradcache", "scorers"}
BELOW["exchange"] = BELOW["tiles"] | {"tiles"}
BELOW["_dispatch"] = BELOW["exchange"] | {"exchange"}
BELOW["engine"] = BELOW["_dispatch"] | {"_dispatch"}
BELOW["functional"] = BELOW["engine"] | {"engine"}
BELOW["modules"] = BELOW["functional"] | {"functional"}
BELOW["evaluate"] = BELOW["modules"] | {"modules", "models", "data", "scorers"}
BELOW["planner"] = BELOW["modules"] | {"modules"}
BELOW["train"] = BELOW["evaluate"] | {"evaluate", "planner"}
BELOW["retrieval"] = BELOW["train"] | {"train"}
BELOW["experiments"] = BELOW["bench"] = BELOW["retrieval"] | {"retrieval"}
BELOW["integrations"] = BELOW["bench"] | {"bench", "experiments", "scorers"}
# an export writes what another library loads
BELOW["cli"] = BELOW["integrations"] | {"integrations"}
DRAWERS = {"losses", "tiles", "exchange"}


def _drawer(module: str) -> str:
    name = [*module.split("."), "__version__"][1]
    # a public name stands for the module it lives in
    return contrastile._HOMES.get(name, name).split(".")[0]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("contrastile")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("contrastile"):
            assert node.level == 0
            package = ROOT.parent / Path(*node.module.split("."))
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if package.is_dir() else {node.module}
    return found


def test_nothing_points_upward_or_sideways() -> None:
    for path in FILES:
        here = path.relative_to(ROOT).with_suffix("").parts[0]
        if here not in ("__init__", "__main__"):
            _points_down(path, here)


def _points_down(path: Path, here: str) -> None:
    lowest = {"_types", "_errors", "_torch", "offload"}
    allowed = lowest if here in GROUND else BELOW[here]
    for module in _imports(path):
        there = _drawer(module)
        if there == here:
            # within a drawer the base serves all; the others do not know each other, and its front shows them
            name = module.split(".")[2] if len(module.split(".")) > 2 else "base"
            fused = name == "triton" and "triton" in path.parts
            front = path.stem == "__init__"
            assert here not in DRAWERS or fused or front or name in SHARED[here], (
                f"{path} imports its neighbour {module}"
            )
        else:
            assert there == "__version__" or there in allowed, f"{path} may not import {module}"


def test_device_code_knows_nothing_of_the_host() -> None:
    for path in (ROOT / "tiles" / "triton" / "kernels").glob("*.py"):
        tiles = [module for module in _imports(path) if module.startswith("contrastile.tiles")]
        assert all(module.startswith("contrastile.tiles.triton.kernels") for module in tiles), path


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def _edges() -> dict[str, set[str]]:
    """The modules that each module imports, function-local imports included."""
    modules = {_module(path) for path in FILES}
    edges: dict[str, set[str]] = {}
    for path in FILES:
        targets = set()
        for name in _imports(path):
            home = contrastile._HOMES.get(name.removeprefix("contrastile."))
            name = f"contrastile.{home}" if home else name
            targets.add(name if name in modules else name.rpartition(".")[0])
        edges[_module(path)] = targets & modules - {_module(path), "contrastile"}
    return edges


def test_no_import_leads_back_to_where_it_began() -> None:
    edges, done = _edges(), set[str]()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for target in sorted(edges[module]):
                visit(target, (*way, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())


def test_the_root_holds_ten_files_at_most() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 10


# imports allowed between neighbours in a drawer: its base, and the general case of others; kernels fill several files
SHARED = {
    "losses": {"base", "pairs", "softmax", "sigmoid"},
    "tiles": {"base", "eager", "scored"},
    "exchange": {"base", "gather", "ring"},
}


def test_every_file_is_a_chapter() -> None:
    for path in FILES:
        assert path.read_text().count("\n") <= 450, f"{path}: is it two chapters?"
        assert ast.get_docstring(_tree(path)), f"{path}: a chapter opens by saying what it is"
        assert path.stem not in {"utils", "helpers", "common", "misc"}, path


IMPORTED = """
import sys, torch
# torch itself may load some optional packages where they are installed
before, calls = set(sys.modules), []
sys.setprofile(lambda frame, event, _: calls.append(event))
from contrastile import ClipLoss, encode
sys.setprofile(None)
print(calls.count("call"))
print(*sorted(set(sys.modules) - before))
# its random numbers are kept and replayed where a program has them
encode(torch.nn.Linear(3, 2), torch.ones(5, 3), sub_batch=2).sum().backward()
print("numpy.random" in sys.modules)
# a trial of a scorer runs uncompiled
from contrastile import contrast
from contrastile.scorers import MaxSim
contrast(*torch.ones(2, 5, 4, 3), scorer=MaxSim())
print("torch._dynamo" in sys.modules)
sys.modules["pydantic"] = None
# the library alone has every name
from contrastile import *
from contrastile import load
try:
    load(sys.argv[1])
except ModuleNotFoundError as error:
    print(error)
"""
OPTIONAL = {"triton", "transformers", "tokenizers", "datasets", "PIL", "matplotlib", "sklearn", "pydantic", "tqdm"}


def test_importing_the_library_costs_little_and_loads_nothing_optional(tmp_path: Path) -> None:
    """Calls are counted, because seconds depend on what else runs: 20,000 take a fifth of one."""
    for name in ("recipe.toml", "model.safetensors", "run.json"):
        (tmp_path / name).touch()
    command = [sys.executable, "-c", IMPORTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    calls, loaded, random, dynamo, sentence = done.stdout.splitlines()
    assert int(calls) < 24_000
    assert not OPTIONAL & set(loaded.split())
    assert random == dynamo == "False"
    assert sentence == "`pydantic` is not installed; run: pip install '.[train]'"


def _served(_: int) -> None:
    raise SystemExit("loaded" not in sys.modules)


def test_processes_of_tests_find_modules_loaded() -> None:
    """The server passes over in silence what it can not load."""
    with fresh(1, _served) as (process,):
        process.join(60)
        assert process.exitcode == 0


def test_public_names() -> None:
    names = [
        "ClipLoss",
        "DCLLoss",
        "DistillClipLoss",
        "GISTLoss",
        "InfoNCELoss",
        "KeyQueue",
        "NTXentLoss",
        "Ragged",
        "ScoreDistillLoss",
        "SigLipLoss",
        "SupConLoss",
        "contrast",
        "encode",
        "load",
        "plan",
    ]
    assert contrastile.__all__ == names
    assert dir(contrastile) == sorted(names)
    assert all(getattr(contrastile, name).__doc__ for name in names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'InfoNCE'"):
        contrastile.InfoNCE  # noqa: B018


def test_nothing_is_unpickled_or_evaluated() -> None:
    banned = {"pickle", "dill", "marshal", "shelve"}
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Import):
                assert not banned & {alias.name for alias in node.names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, path
            if isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "shell"}:
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
