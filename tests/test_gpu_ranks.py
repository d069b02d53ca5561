"""Ranks that torchrun starts on GPUs, with NCCL (`make test-gpu-multi`); one check runs on CPUs too, to stay alive."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from on_ranks import QUICK, losses
from ranks import RANKS, Pool
from tiny_runs import write_recipe

from contrastile.train.log import read_metrics

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def _on_gpus(*sizes: int) -> list[object]:
    return [
        pytest.param(W, marks=[pytest.mark.gpu_multi, pytest.mark.skipif(W > GPUS, reason=f"needs {W} GPUs")])
        for W in sizes
    ]


def _torchrun(W: int, *words: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(W)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # the kernels themselves, not their interpreter; and products that do not depend on a batch's shape
    environment |= {"TRITON_INTERPRET": "0", "NVIDIA_TF32_OVERRIDE": "0"}
    command = [*launcher, str(HERE / "on_ranks.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=220, env=environment, check=False)


@pytest.mark.parametrize("W", _on_gpus(2, 4))
def test_losses_over_nccl(W: int) -> None:
    done = _torchrun(W, "losses")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": right") == 4


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="needs a CUDA device")
def test_losses_of_ranks_that_share_a_gpu_and_copy() -> None:
    done = _torchrun(3, "shared")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name}: right" for name in QUICK]


def _checked(rank: int, group: object) -> str:
    with redirect_stdout(StringIO()) as output:
        try:
            losses(torch.device("cpu"), quick=True)
        except SystemExit as error:
            return str(error)
    return output.getvalue()


def test_the_check_itself_over_gloo(pool: Pool) -> None:
    first, *others = pool.run(_checked, RANKS)
    assert first.splitlines() == [f"{name}: right" for name in QUICK]
    assert others == [""] * (RANKS - 1)


def _curve(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]


@pytest.mark.parametrize(
    ("parallel", "kind"), [("replicate", "adamw"), ("shard", "adamw"), ("shard", "adafactor"), ("shard", "muon")]
)
@pytest.mark.parametrize("W", _on_gpus(2, 4))
def test_the_main_job(tmp_path: Path, W: int, parallel: str, kind: str) -> None:
    words = ["train.examples=96", "evaluate.every=1.0", f"optim.kind={kind}", f"train.parallel={parallel}"]
    recipe, curves = str(write_recipe(tmp_path)), []
    for ranks in (1, W):
        runs = tmp_path / f"runs-{ranks}"
        done = _torchrun(ranks, "main", "train", recipe, *words, "--runs", str(runs))
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("report: ") == 1
        curves.append(_curve(runs / "tiny"))
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


@pytest.mark.parametrize("W", _on_gpus(2, 4))
def test_a_killed_rank_ends_the_others(tmp_path: Path, W: int) -> None:
    recipe = str(write_recipe(tmp_path))
    # longer than all of it is given
    done = _torchrun(W, "killed", "train", recipe, "train.timeout=600", "--runs", str(tmp_path / "runs"))
    assert done.returncode != 0
    assert re.search(r"no answer from rank 1, on rank 0 in step 3 \(", done.stderr), done.stderr[-2000:]
