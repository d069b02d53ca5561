"""`contrastile bench memory`: one rank of a world that is not there, beside the papers' baselines."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contrastile import InfoNCELoss
from contrastile.bench import memory as bench_memory
from contrastile.bench.gate import SCALE
from contrastile.bench.harness import COLUMNS, Machine, Report, read_rows
from contrastile.bench.memory import MemoryBench, clip, one_rank_of, ways
from contrastile.bench.peers import Contestant
from contrastile.cli.main import main
from contrastile.distributed import collectives
from contrastile.losses.reference import dense_clip

MACHINE = Machine(torch.device("cpu"))
N, D = 24, 8


def _features() -> list[Tensor]:
    return [F.normalize(torch.randn(N, D), dim=-1).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_way_computes_the_loss_of_a_batch_that_repeats_this_ranks(world: int) -> None:
    """W copies of each column add log W to every row's log-sum-exp."""
    q, k = _features()
    truth = dense_clip(q.double(), k.double(), torch.tensor(SCALE).double()) + math.log(world)
    computed = []
    with one_rank_of(world):
        assert dist.get_world_size() == world
        for way in ways(MACHINE.device, world):
            if way.absent(MACHINE) is None:
                q.grad = k.grad = None
                loss = way.losses["clip"](q, k, torch.tensor(SCALE))
                assert loss.item() == pytest.approx(truth.item(), abs=1e-5), way.label
                loss.backward()
                assert q.grad is not None
                assert k.grad is not None
                assert bool(q.grad.isfinite().all() and k.grad.isfinite().all()), way.label
                computed.append(way.label)
    assert len(computed) == 7
    assert not dist.is_initialized()


def test_one_way_losses_go_around_the_ring_of_ranks_that_are_not_there() -> None:
    q, k = _features()
    truth = F.cross_entropy(SCALE * q.double() @ k.double().T, torch.arange(N)) + math.log(3)
    with one_rank_of(3):
        loss = InfoNCELoss(exchange="ring", backend="eager")(q, k, torch.tensor(SCALE))
        loss.backward()
    assert loss.item() == pytest.approx(truth.item(), abs=1e-5)
    assert q.grad is not None
    assert k.grad is not None
    assert bool(q.grad.isfinite().all() and k.grad.isfinite().all())


def test_the_collectives_are_as_before_even_after_an_error() -> None:
    before = [collectives.post_together, collectives._reduce_scatter, collectives.exchange_rows]
    with pytest.raises(KeyError), one_rank_of(2):
        raise KeyError
    assert [collectives.post_together, collectives._reduce_scatter, collectives.exchange_rows] == before
    assert not dist.is_initialized()


def _rows(**words: Any) -> dict[str, int | None]:
    rows: list[dict[str, Any]] = []
    bench = MemoryBench(MACHINE, Report(lambda line: None, rows.append), **words)
    bench.measure(8, [1024], 16, torch.float32)
    return {row["implementation"]: row.get("peak_bytes") for row in rows}


def test_peaks_are_those_of_the_papers_formulas() -> None:
    """b² numbers, b²/n for each direction, b²/n², and no matrix at all."""
    peaks, matrix = _rows(), 4 * 1024**2
    assert peaks["CLIP, plain: all rows and columns"] > 4 * matrix
    for name in ("open_clip, local loss, written out", "DisCo-CLIP, decomposed"):
        assert matrix / 4 < (peaks[name] or 0) < 1.2 * matrix
    assert matrix / 64 < (peaks["contrastile, ring, dense"] or 0) < matrix / 8
    assert (peaks["contrastile, ring, eager"] or 0) < matrix / 8


def test_a_matrix_that_does_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "free_bytes", lambda machine: 2**20)
    peaks = _rows()
    assert peaks["CLIP, plain: all rows and columns"] is None
    assert peaks["contrastile, ring, eager"] is not None
    assert {name.partition(",")[0] for name in _rows(peers=False)} == {"contrastile"}
    assert [*_rows(words=["gather, ", "DisCo"])] == ["contrastile, gather, eager", "DisCo-CLIP, decomposed"]


def test_slow_ways_are_left_out_of_larger_batches() -> None:
    lines: list[str] = []
    MemoryBench(MACHINE, Report(lines.append), peers=False, longest=0.0).measure(2, [16, 32], 4, torch.float32)
    assert len([line for line in lines if "left out, it would take about" in line]) == 3


def test_a_long_step_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_memory, "ONCE_SECONDS", 0.0)
    calls: list[int] = []

    def loss(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
        calls.append(len(q))
        return clip(q, k, scale, local=True)

    way = Contestant("contrastile", "ring, eager", {"clip": loss})
    monkeypatch.setattr(bench_memory, "ways", lambda machine, world: [way])
    rows: list[dict[str, Any]] = []
    MemoryBench(MACHINE, Report(lambda line: None, rows.append)).measure(2, [16, 32], 4, torch.float32)
    assert calls == [8, 8, 8, 8, 8, 16]
    assert all(row["ms"] > 0 and row["peak_bytes"] > 0 for row in rows)


def test_the_command_writes_rows_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, figure = tmp_path / "memory.csv", tmp_path / "memory.svg"
    words = ["--ranks", "2", "--sizes", "32", "--features", "8", "--device", "cpu", "--csv", str(path)]
    assert main(["bench", "memory", *words, "--figure", str(figure)]) == 0
    drawn = figure.read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("a rank of 2", "contrastile, ring, eager"))
    rows = read_rows(path)
    assert [*rows[0]] == [*COLUMNS["memory"]]
    assert {(row["world"], row["b"], row["d"]) for row in rows} == {("2", "32", "8")}
    assert int(rows[0]["planned_bytes"]) > 0
    assert rows[-1]["planned_bytes"] == ""
    assert "inf-cl, ring: is not installed" in capsys.readouterr().out


def test_a_word_of_no_way_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "2", "--sizes", "32", "--device", "cpu"]
    assert main(["bench", "memory", *words, "--ways", "ring", "wheel"]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("`--ways` must be words of contrastile, gather, eager; contrastile, ring, eager; ")
    assert error.endswith("; inf-cl, ring; got 'wheel'. Leave it out for all.\n")


def test_ranks_of_torchrun_are_refused(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "memory"]) == 2
    sentence = "`memory` must run in one process, which is a rank of any world; got torchrun. Start it alone.\n"
    assert capsys.readouterr().err == sentence
