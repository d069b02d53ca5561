"""`contrastile doctor`: what a machine has, what "auto" would choose, and an exit code of 1 where it is broken."""

import json
import subprocess
import sys

import pytest
import torch
from tiny_runs import write_recipe

from contrastile import cli
from contrastile._dispatch import TILES, choose_tiles
from contrastile.cli.doctor import lines
from contrastile.cli.machine import backend_choice, broken, device_fault, examine, exchange_choice
from contrastile.cli.main import main
from contrastile.losses.base import Shard
from contrastile.losses.softmax import Softmax
from contrastile.offload import usable_cpus

CPU = torch.device("cpu")


def test_the_report_names_versions_cpus_and_choices(capsys):
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert f"torch {torch.__version__}" in output
    assert "CPUs, " in output
    assert '"auto" on cpu:' in output
    assert "backend eager (for clip float32" in output
    assert "exchange single" in output
    assert "workspace " in output


def test_doctor_runs_without_the_extras():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['pydantic', 'transformers', 'tqdm', 'PIL', 'safetensors'])); "
        "from contrastile.cli.main import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"auto" on cpu:' in done.stdout


def test_json_has_all_values_of_the_report(capsys):
    assert main(["doctor", "--json", "--ranks", "3", "--batch", "2k", "--features", "7"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["devices"][0]["name"] == "cpu"
    assert values["system"]["memory"] >= values["system"]["free"] > 0
    exchange = values["auto"][0]["exchange"]
    assert (exchange["takes"], exchange["ranks"], exchange["gathered"]) == ("gather", 3, 3 * 683 * 7 * 8)
    assert values["packages"]["beside"].keys() == {"triton", "timm", "open_clip_torch", "faiss-cpu", "peft"}
    assert values.pop("recipe") is None
    # the lines can be made of the parsed JSON
    assert list(lines(values))[-1].startswith("  retain, sub_batch:")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_reported_backend_is_the_one_that_a_loss_takes(dtype):
    side = Shard(torch.zeros(3, 4, dtype=dtype), diagonal=0)
    loss = Softmax(symmetric=True)
    assert issubclass(choose_tiles("auto", loss, side, side), TILES[backend_choice(loss, dtype, CPU)["takes"]]())


def test_a_declined_backend_has_a_reason(monkeypatch):
    monkeypatch.setattr("contrastile._dispatch.AUTOMATIC", {"cpu": ("triton", "eager")})
    choice = backend_choice(Softmax(symmetric=True), torch.float64, CPU)
    assert choice == {"takes": "eager", "declined": {"triton": "no kernel for torch.float64"}}


@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 6), (torch.float32, 8), (torch.float64, 16)])
def test_the_reported_exchange_follows_the_memory(monkeypatch, dtype, each):
    """Gathering takes a feature and its accumulator, which is float64 for float64."""
    needed = 102 * 8 * each
    for memory, name in ((16 * needed, "gather"), (16 * needed - 16, "ring")):
        monkeypatch.setattr("contrastile._dispatch.device_memory", lambda device, memory=memory: memory)
        choice = exchange_choice(3, 102, 8, dtype, CPU)
        assert (choice["takes"], choice["gathered"]) == (name, needed)


def test_the_reported_exchange_is_the_ring_between_gpus_that_reach_each_other(monkeypatch):
    monkeypatch.setattr("contrastile.cli.machine.gathering_allowed", lambda _: 2**40)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr("contrastile.distributed.neighbours._driver", object)
    cases = (
        (2, "0", 2**15, "ring", True),
        (2, "1", 2**15, "gather", False),
        (3, "0", 2**15, "gather", False),
        # few rows in one block; more than buffers hold
        (2, "0", 2**11, "gather", True),
        (2, "0", 2**20, "gather", False),
    )
    for ranks, disabled, batch, name, copied in cases:
        monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
        choice = exchange_choice(ranks, batch, 768, torch.bfloat16, torch.device("cuda:0"))
        assert (choice["takes"], choice["copied"]) == (name, copied)
        assert (", by copy engines" in cli.doctor._exchange(choice)) is choice["copied"]
    # few rows among many columns, such as a queue's, are one block too
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    how = 2, 2**15, 768, torch.bfloat16, torch.device("cuda:0")
    assert [exchange_choice(*how, rows=rows)["takes"] for rows in (2**10, 2**15)] == ["gather", "ring"]


# features of a CPU are in host memory already
@pytest.mark.parametrize("features", ["device", "host"])
def test_the_exchange_of_a_recipe_is_that_of_its_plan(tmp_path, capsys, features):
    path = str(write_recipe(tmp_path))
    assert main(["doctor", path, "train.accumulate=2", f"train.features={features}", "--ranks", "3", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    exchange = values["auto"][0]["exchange"]
    assert exchange["takes"] == values["recipe"]["exchange"] == "gather"
    # 48 pairs in two parts
    assert [exchange[name] for name in ("batch", "features", "dtype")] == [24, 16, "float32"]


def test_the_exchange_of_features_that_wait_on_the_host():
    choice = exchange_choice(3, 24, 16, torch.float32, torch.device("cpu"), host=True)
    assert choice["takes"] == "ring"
    assert "host memory" in cli.doctor._exchange(choice)


def test_a_containers_limit_lowers_the_cpus(tmp_path):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cpus(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(tmp_path) == usable_cpus(tmp_path / "nowhere") >= 1


def test_a_broken_device_is_reported_and_the_exit_code_is_1(monkeypatch, capsys):
    real = torch.ones

    def ones(*shape, device=None, **words):
        if torch.device(device or "cpu").type == "cuda":
            raise RuntimeError("CUDA error: out of memory\nand more")
        return real(*shape, device=device, **words)

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_fault(CPU) is None
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "cuda:0: BROKEN: CUDA error: out of memory\n" in output
    # the working device is reported all the same
    assert '"auto" on cpu:' in output


def test_a_wrong_product_is_broken(monkeypatch):
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **words: 2 * real(*shape, **words))
    assert device_fault(CPU) == "a product of two matrices comes out wrong"
    assert broken(examine()) == ["cpu: a product of two matrices comes out wrong"]


def test_a_recipe_is_planned_on_this_machine(tmp_path, capsys):
    path = write_recipe(tmp_path)
    words = [str(path), "device=cpu", "loss.backend=dense", "loss.exchange=ring", "--ranks", "2"]
    assert main(["doctor", *words, "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert (recipe["batch"], recipe["rows"], recipe["exchange"], recipe["backend"]) == (48, 24, "ring", "dense")
    sides = [(side["name"], side["examples"], side["sub_batch"], side["sub_batches"]) for side in recipe["sides"]]
    assert sides == [("image", 24, 16, 2), ("text", 24, 8, 3)]
    assert main(["doctor", *words]) == 0
    output = capsys.readouterr().out
    assert '"auto" on cpu:' in output
    assert "tiny on cpu: 48 pairs a step, 24 on each of 2 ranks" in output


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_plan_is_the_planners(tmp_path, capsys, monkeypatch, device):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [str(write_recipe(tmp_path)), f"device={device}"]
    assert main(["plan", *words]) == 0
    planned = capsys.readouterr().out
    assert main(["doctor", *words]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{planned}")
    assert main(["plan", *words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert main(["doctor", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == values


def test_ranks_share_the_memory_of_a_cpu(tmp_path, capsys):
    words = ["doctor", str(write_recipe(tmp_path)), "device=cpu", "--ranks", "4"]
    assert main([*words, "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    memory = recipe["target"]["memory"]
    assert memory == recipe["host"]["memory"] > 0
    assert recipe["target"]["allowed"] == pytest.approx(0.94 * memory / 4, abs=4)
    assert main(words) == 0
    output = capsys.readouterr().out
    assert ", which 4 ranks share\n" in output
    assert "  host memory: fits: " in output
    assert " beside the peaks, of " in output


def test_a_wrong_recipe_is_one_line(tmp_path, capsys):
    (tmp_path / "r.toml").write_text("[train]\n")
    assert main(["doctor", str(tmp_path / "r.toml")]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/r.toml: train: must have either examples or epochs, and not both\n"


@pytest.mark.parametrize(("option", "got"), [(["--batch", "4k"], 4096), (["--features", "8"], 8)])
def test_sizes_beside_a_recipe_are_refused(tmp_path, capsys, option, got):
    assert main(["doctor", str(write_recipe(tmp_path)), *option]) == 2
    remedy = "Change its keys, such as train.batch=4096."
    assert capsys.readouterr().err == f"`{option[0]}` must be left out with a recipe; got {got}. {remedy}\n"


@pytest.mark.parametrize("name", ["ranks", "features"])
def test_a_number_below_one_is_refused(capsys, name):
    assert main(["doctor", f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"`--{name}` must be at least 1; got 0. Leave it out for the default.\n"
