"""Checkpoints: whole or not there, whenever the process is killed; every damage is noticed, told and got over."""

import errno
import json
import os
import shutil
import signal

import pytest
import safetensors.torch
import torch
from faults import Faults
from ranks import fresh
from refusals import refusal
from torch import nn

from contrastile.train.batch_builder import Batch
from contrastile.train.checkpoints import Checkpoints, join_tensors, split_tensors, step_seed
from contrastile.train.config import SaveSettings
from contrastile.train.state import NonFiniteGuard, Progress


class Numbers:
    """A part with tensors and plain values of every sort."""

    def __init__(self, number):
        self.now = {"tensor": torch.full((3,), float(number)), 7: (number, None, [0.1, "é"]), "flag": True}

    def state_dict(self):
        return self.now

    def load_state_dict(self, state_dict):
        self.now = state_dict


def number_of(part):
    return part.now[7][0]


def checkpoints(folder, keep=2, data="pairs"):
    return Checkpoints(folder / "checkpoints", SaveSettings(keep=keep), data)


def saved(folder, steps, **settings):
    kept = checkpoints(folder, **settings)
    for step in steps:
        kept.save(step, 0.0, {"part": Numbers(step)})
    return kept


def restored(folder, **settings):
    part = Numbers(-1)
    return checkpoints(folder, **settings).restore({"part": part}), number_of(part)


def test_a_checkpoint_restores_model_and_optimizer(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    checkpoints(tmp_path).save(3, 0.0, {"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    another = torch.optim.AdamW(other.parameters(), lr=0.7)
    assert checkpoints(tmp_path).restore({"model": other, "optimizer": another}) == 3
    for one, same in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, same)
    before, after = optimizer.state_dict(), another.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for place, kept in before["state"].items():
        assert all(torch.equal(value, after["state"][place][name]) for name, value in kept.items())


def test_tensors_that_share_memory_are_saved(tmp_path):
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    model["second"].weight = model["first"].weight
    checkpoints(tmp_path).save(1, 0.0, {"model": model})
    assert checkpoints(tmp_path).restore({"model": model}) == 1


def test_values_other_than_tensors_and_json_are_refused():
    with pytest.raises(TypeError, match=r"part\.x is set, which has no place in a checkpoint"):
        split_tensors({"x": {1}}, "part", {})


def test_numbers_are_restored_exactly():
    numbers = {"third": 1 / 3, "least": 5e-324, "none": None, "pair": (1, 2.0), 3: float("inf")}
    assert join_tensors(json.loads(json.dumps(split_tensors(numbers, "", {}))), {}) == numbers


def test_old_checkpoints_are_removed(tmp_path):
    saved(tmp_path, [1, 2, 30], keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000000002", "step-000000030"]
    assert restored(tmp_path) == (30, 30)


def test_saving_the_same_step_twice_changes_nothing(tmp_path):
    kept = saved(tmp_path, [4])
    kept.save(4, 0.0, {"part": Numbers(99)})
    assert restored(tmp_path) == (4, 4)


def test_without_a_checkpoint_nothing_is_restored(tmp_path):
    assert restored(tmp_path) == (0, -1)
    assert Checkpoints(None, SaveSettings()).restore({}) == 0
    assert not Checkpoints(None, SaveSettings()).save(1, 0.0, {})


def test_checkpoints_are_due_by_steps_or_minutes(tmp_path):
    by_steps = Checkpoints(tmp_path, SaveSettings(steps=3, minutes=1e6))
    assert [step for step in range(1, 10) if by_steps.due(step, 1.0)] == [3, 6, 9]
    by_time = Checkpoints(tmp_path, SaveSettings(minutes=1.0))
    assert [by_time.due(1, 59.9), by_time.due(1, 60.0)] == [False, True]
    by_time.save(1, 60.0, {})
    assert [by_time.due(2, 119.0), by_time.due(2, 120.0)] == [False, True]
    assert not Checkpoints(None, SaveSettings(steps=1)).due(1, 1e9)


# --- damage


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << (place % 8)
    path.write_bytes(content)


def damages(folder):
    """Every way to damage each file of a checkpoint: bits flipped all over it, cut, emptied, deleted."""
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 12)):
            yield path, lambda path=path, place=place: flip(path, place)
        yield path, lambda path=path, whole=whole: path.write_bytes(whole[: len(whole) // 2])
        yield path, lambda path=path, whole=whole: path.write_bytes(whole + b" ")
        yield path, lambda path=path: path.write_bytes(b"")
        yield path, lambda path=path: path.unlink()


def test_a_damaged_checkpoint_is_logged_and_the_one_before_is_used(tmp_path, caplog):
    saved(tmp_path, [1, 2])
    count = 0
    for path, damage in damages(tmp_path / "checkpoints" / "step-000000002"):
        whole = path.read_bytes()
        damage()
        caplog.clear()
        assert restored(tmp_path) == (1, 1), path
        assert "step-000000002 is damaged" in caplog.text
        aside = tmp_path / "checkpoints" / "damaged-step-000000002-1"
        (aside / path.name).write_bytes(whole)
        aside.rename(path.parent)
        count += 1
    assert count > 40
    assert restored(tmp_path) == (2, 2)


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(tmp_path):
    saved(tmp_path, [1, 2])
    (tmp_path / "checkpoints" / "step-000000002" / "state.json").unlink()
    assert restored(tmp_path) == (1, 1)
    saved(tmp_path, [2])
    assert restored(tmp_path) == (2, 2)


def test_damage_of_all_checkpoints_is_an_error(tmp_path):
    saved(tmp_path, [1, 2])
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-00000000{step}" / "manifest.json").unlink()
    assert refusal(restored, tmp_path) == (
        f"`checkpoints` must hold one that is whole; got 2 damaged ones in {tmp_path / 'checkpoints'}. "
        "Restore one of them, or train anew, without --resume."
    )


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    saved(tmp_path, [1])
    assert refusal(restored, tmp_path, data="others") == (
        "`data` must be the pairs and the tokens that the run began with; got others. "
        "Put them back as they were, or train anew, without --resume."
    )


def test_a_checkpoint_of_another_recipe_is_refused_on_every_rank(tmp_path):
    settings, part = SaveSettings(), {"part": Numbers(1)}
    Checkpoints(tmp_path, settings, recipe={"seed": 1, "old": True}).save(3, 0.0, part)
    # a key that one of both versions does not know decides nothing
    assert Checkpoints(tmp_path, settings, recipe={"new": 1, "seed": 1}).restore(part) == 3
    other = Checkpoints(tmp_path, settings, recipe={"seed": 2}, writes=False)
    for act in (lambda: other.restore(part), lambda: other.restore_as(3, part)):
        assert refusal(act) == (
            f'`checkpoint` must be this run\'s own, of seed 2; got "{tmp_path}/step-000000003", of seed 1. '
            "Move it away, or train anew, without --resume."
        )


def test_copies_of_checkpoints_are_neither_read_nor_removed(tmp_path):
    kept = saved(tmp_path, [1, 2])
    folder = tmp_path / "checkpoints"
    copies = ["step-000000002-keep", "step-000000009.bak", "step-9"]
    for copy in copies:
        shutil.copytree(folder / "step-000000002", folder / copy)
    assert restored(tmp_path) == (2, 2)
    saved(tmp_path, [3], keep=1)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*copies, "step-000000003"])
    kept.drop()
    assert sorted(path.name for path in folder.iterdir()) == sorted(copies)


def test_drop_removes_damaged_checkpoints_too(tmp_path):
    saved(tmp_path, [1, 2])
    (tmp_path / "checkpoints" / "step-000000002" / "state.json").unlink()
    assert restored(tmp_path) == (1, 1)
    checkpoints(tmp_path).drop()
    assert list(tmp_path.iterdir()) == []
    checkpoints(tmp_path).drop()


def test_a_checkpoint_of_other_parts_is_refused(tmp_path):
    saved(tmp_path, [1])
    assert refusal(checkpoints(tmp_path).restore, {"another": Numbers(0)}) == (
        "`checkpoint` must hold another; got part. Another version of contrastile wrote it; resume with that one."
    )


# --- killed in the middle of a save


def save_and_die(_, folder, fatal):
    """In a process of its own: save, and be gone at the event number `fatal`, with half of what was not synced."""
    Faults(folder, fatal, "tear").install()
    saved(folder, [3], keep=2)
    os._exit(0)


def test_a_kill_at_any_event_of_a_save_loses_nothing(tmp_path):
    deaths = 0
    saved(tmp_path, [1, 2])
    for fatal in range(1, 200):
        folder = tmp_path / str(fatal)
        shutil.copytree(tmp_path / "checkpoints", folder / "checkpoints")
        with fresh(1, save_and_die, folder, fatal) as (process,):
            process.join()
        if (code := process.exitcode) == 0:
            break
        assert code == -signal.SIGKILL
        deaths += 1
        step, number = restored(folder)
        # the one before, or the whole new one: nothing else is ever found
        assert step == number
        assert step in (2, 3)
        # and what was left behind hinders nobody
        saved(folder, [4])
        assert restored(folder) == (4, 4)
        assert not [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    assert code == 0
    assert deaths >= 20


# --- a disk that fails


@pytest.mark.parametrize("failing", ["fsync", "mkdir", "rename", "safetensors"])
def test_a_full_disk_is_logged_and_does_not_end_the_run(tmp_path, monkeypatch, caplog, failing):
    saved(tmp_path, [1])

    def full(*arguments, **_):
        raise (
            safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
            if failing == "safetensors"
            else OSError(errno.ENOSPC, "No space left on device")
        )

    with monkeypatch.context() as broken:
        broken.setattr(*((safetensors.torch, "save_file") if failing == "safetensors" else (os, failing)), full)
        kept = checkpoints(tmp_path)
        assert not kept.save(2, 0.0, {"part": Numbers(2)})
        assert "the state behind step 2 could not be saved" in caplog.text
        assert "No space left on device" in caplog.text
        with pytest.raises(OSError, match="what was saved before is there"):
            kept.save(2, 0.0, {"part": Numbers(2)}, must=True)
    assert restored(tmp_path) == (1, 1)
    kept.save(2, 0.0, {"part": Numbers(2)})
    assert restored(tmp_path) == (2, 2)


# --- the plain parts


def test_progress_is_restored():
    progress, other = Progress(100, None, 0.1), Progress(100, None, 0.1)
    progress.sizes.extend([16] * 5 + [32] * 2)
    progress.seconds, progress.next_probe = 12.5, 0.3
    other.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert other.sizes == progress.sizes
    assert (other.seconds, other.next_probe) == (12.5, 0.3)


def test_every_step_and_rank_has_its_own_seed():
    seeds = {step_seed(seed, step, rank) for seed in range(3) for step in range(50) for rank in range(4)}
    assert len(seeds) == 600
    assert all(0 <= seed < 2**63 for seed in seeds)


def parts_of(pixel):
    """A batch in two parts, the second of one pixel."""
    tokens = {"input_ids": torch.zeros(1, 2, dtype=torch.int64)}
    ids = torch.zeros(1, dtype=torch.int64)
    return [Batch(torch.full((1,), value), tokens, ids, range(1)).floats for value in (0.0, pixel)]


def test_three_skipped_steps_in_a_row_stop_the_run(caplog):
    model = nn.Linear(2, 2)
    model.weight.grad = torch.tensor([[1.0, float("nan")], [0.0, 0.0]])
    guard, pixels = NonFiniteGuard(), parts_of(0.0)
    nan = float("nan")
    assert not guard.passes(1, nan, nan, model, pixels)
    assert "step 1 is skipped: a loss of nan with a gradient of norm nan, first seen in the gradient of weight" in (
        caplog.text
    )
    assert not guard.passes(2, 1.0, float("inf"), model, pixels)
    assert guard.passes(3, 1.0, 1.0, model, pixels)
    assert not guard.passes(4, nan, nan, model, pixels)
    assert not guard.passes(5, nan, nan, model, pixels)
    with pytest.raises(FloatingPointError) as caught:
        guard.passes(6, nan, nan, model, pixels)
    assert str(caught.value) == (
        "the loss must stay a finite number; step 6 is skipped: a loss of nan with a gradient of norm nan, "
        "first seen in the gradient of weight, and the 2 steps before it too. "
        "Lower optim.learning_rate or raise optim.warmup; the weights from before these steps are kept."
    )
    assert guard.skipped == 5


def test_weights_that_grow_without_end_stop_the_run_while_they_are_finite():
    guard, model = NonFiniteGuard(), nn.Linear(2, 2)
    guard.check_weights(1, 1e18, model)
    sentence = (
        "the weights must stay below a norm of 1e+18; step {}. Lower optim.learning_rate or optim.weight_decay; {}."
    )
    with pytest.raises(FloatingPointError) as caught:
        guard.check_weights(2, 3e20, model)
    assert str(caught.value) == sentence.format("2 left them at 3e+20", "they are kept as they are now")
    with torch.no_grad():
        model.bias[0] = float("inf")
    with pytest.raises(FloatingPointError) as caught:
        guard.check_weights(3, float("inf"), model)
    assert str(caught.value) == sentence.format(
        "3 left them at inf, first seen in the weights bias", "the newest checkpoint has the last finite ones"
    )
    # such a step has its own sentence
    guard.in_a_row = 1
    guard.check_weights(4, float("nan"), model)


def test_the_first_non_finite_tensor_is_named():
    guard, model = NonFiniteGuard(), nn.Linear(2, 2)
    guard.in_a_row = 2
    with pytest.raises(FloatingPointError, match="the pixels of the batch"):
        guard.passes(3, float("nan"), 1.0, model, parts_of(float("inf")))
    with torch.no_grad():
        model.bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match="the weights bias"):
        guard.passes(4, float("nan"), 1.0, model, parts_of(0.0))
