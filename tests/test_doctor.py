"""`contrastile doctor`: what a machine has, what "auto" would choose, and an exit code of 1 where it is broken."""

import json
import subprocess
import sys

import pytest
import torch
from tiny_runs import write_recipe

from contrastile._dispatch import choose_tiles
from contrastile.bench.doctor import backend_choice, broken, device_fault, examine, exchange_choice
from contrastile.cli.doctor import lines
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
    assert main(["doctor", "--json", "--ranks", "3", "--batch", "100", "--features", "7"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["devices"][0]["name"] == "cpu"
    assert values["system"]["memory"] >= values["system"]["free"] > 0
    exchange = values["auto"][0]["exchange"]
    assert (exchange["takes"], exchange["ranks"], exchange["gathered"]) == ("gather", 3, 100 * 7 * 8)
    assert values["packages"]["beside"].keys() == {"triton", "timm", "open_clip_torch", "faiss-cpu", "peft"}
    assert values["recipe"] is None
    # the lines can be made of the parsed JSON
    assert list(lines(values))[-1].startswith("  retain, sub_batch:")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_reported_backend_is_the_one_that_a_loss_takes(dtype):
    side = Shard(torch.zeros(3, 4, dtype=dtype), diagonal=0)
    loss = Softmax(symmetric=True)
    assert backend_choice(loss, dtype, CPU)["takes"] == choose_tiles("auto", loss, side, side).__name__.lower()


def test_a_declined_backend_has_a_reason(monkeypatch):
    monkeypatch.setattr("contrastile._dispatch.AUTOMATIC", {"cpu": ("triton", "eager")})
    choice = backend_choice(Softmax(symmetric=True), torch.float64, CPU)
    assert choice == {"takes": "eager", "declined": {"triton": "no kernel for torch.float64"}}


@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 6), (torch.float32, 8), (torch.float64, 16)])
def test_the_reported_exchange_follows_the_memory(monkeypatch, dtype, each):
    """Gathering takes a feature and its accumulator, which is float64 for float64."""
    needed = 100 * 8 * each
    for memory, name in ((16 * needed, "gather"), (16 * needed - 16, "ring")):
        monkeypatch.setattr("contrastile._dispatch.device_memory", lambda device, memory=memory: memory)
        choice = exchange_choice(3, 100, 8, dtype, CPU)
        assert (choice["takes"], choice["gathered"]) == (name, needed)


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


def test_the_plan_of_a_recipe_has_its_sub_batches_and_memory(tmp_path, capsys):
    path = write_recipe(tmp_path)
    assert main(["doctor", str(path), "device=cpu", "--ranks", "2", "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["batch"] == 48
    cuts = [("image", 16, 2), ("text", 8, 3)]
    assert [(side["name"], side["sub_batch"], side["graphs"]) for side in recipe["sides"]] == cuts
    for side in recipe["sides"]:
        assert side["examples"] == 24
        assert side["graph"] == side["sub_batch"] * side["activations"] > 0
    assert (recipe["graphs"], recipe["fitting"]) == (5, 5)
    assert recipe["needed"] == sum(side["graphs"] * side["graph"] for side in recipe["sides"]) < recipe["room"]
    assert recipe["held"] == 16 * recipe["parameters"]
    assert recipe["exchange"]["ranks"] == 2
    assert main(["doctor", str(path), "loss.backend=dense", "loss.exchange=ring"]) == 0
    output = capsys.readouterr().out
    assert "loss: backend dense; exchange ring: the recipe says so" in output
    tokens = f"{recipe['learned_tokens']:,}"
    assert f"of them trained, with all {tokens} tokens that its tokenizer may learn\n  weights, gradients and" in output
    assert "batch 48:\n    image: 48 a rank in sub-batches of 16: " in output


def test_a_recipe_in_float64_gathers_twice_the_bytes(tmp_path, capsys):
    path, gathered = write_recipe(tmp_path), []
    for precision in ("float32", "float64"):
        words = ["device=cpu", f"train.precision={precision}", "--ranks", "2", "--json"]
        assert main(["doctor", str(path), *words]) == 0
        gathered.append(json.loads(capsys.readouterr().out)["recipe"]["exchange"]["gathered"])
    assert gathered[1] == 2 * gathered[0] > 0


RETRIEVER = """
kind = "retriever"
data = {positives = 2, negatives = 3, mined = 3}
model = {tokenizer = {length = 64, query_length = 16}}
train = {examples = 100, batch = 63, sub_batch = {query = 8, passage_tokens = 1280}}
"""


def test_queries_and_passages_have_sub_batches_of_their_own(tmp_path, capsys):
    (tmp_path / "r.toml").write_text(RETRIEVER)
    assert main(["doctor", str(tmp_path / "r.toml"), "device=cpu", "--ranks", "2", "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    query, passage = recipe["sides"]
    # 32 queries on the rank that has most, 5 passages of each; 20 whole passages have 1280 tokens
    assert (query["name"], query["examples"], query["sub_batch"], query["graphs"]) == ("query", 32, 8, 4)
    assert (passage["name"], passage["examples"], passage["sub_batch"], passage["graphs"]) == ("passage", 160, 20, 8)
    assert 0 < query["activations"] < passage["activations"]
    assert recipe["needed"] == 4 * query["graph"] + 8 * passage["graph"]
    assert recipe["matrix"] == 4 * 63 * 5 * 63
    # keys are gathered, five to a query
    assert (recipe["exchange"]["batch"], recipe["exchange"]["gathered"]) == (63 * 5, 63 * 5 * 256 * 8)
    assert main(["doctor", str(tmp_path / "r.toml"), "device=cpu"]) == 0
    assert "    passage: 315 a rank in sub-batches of 20: " in capsys.readouterr().out


def test_everything_but_graphs_comes_first(tmp_path, capsys, monkeypatch):
    """Weights, gradients, optimizer, loss and a sub-batch take their room before any graph is kept."""
    path = write_recipe(tmp_path)
    assert main(["doctor", str(path), "device=cpu", "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["without"]["bytes"] == sum(recipe["without"]["parts"].values()) > recipe["held"] / 2
    spare = recipe["without"]["bytes"] + recipe["needed"] // 2
    monkeypatch.setattr("contrastile.bench.doctor.spare_bytes", lambda device: spare)
    assert main(["doctor", str(path), "device=cpu"]) == 0
    assert f"about {recipe['graphs'] // 2} of {recipe['graphs']} graphs fit beside " in capsys.readouterr().out


def test_graphs_that_do_not_fit_are_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("contrastile.bench.doctor.spare_bytes", lambda device: 1)
    assert main(["doctor", str(write_recipe(tmp_path)), "device=cpu"]) == 0
    assert "about 0 of 9 graphs fit beside " in capsys.readouterr().out


def test_a_sub_batch_in_tokens_is_counted_in_texts(tmp_path, capsys):
    path = write_recipe(tmp_path)
    words = ["model.tokenizer.length=4", "train.sub_batch={image=16, text_tokens=33}"]
    assert main(["doctor", str(path), "device=cpu", *words, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["recipe"]["sides"][1]
    assert (text["sub_batch"], text["graphs"]) == (8, 6)


def test_a_wrong_recipe_is_one_line(tmp_path, capsys):
    (tmp_path / "r.toml").write_text("[train]\n")
    assert main(["doctor", str(tmp_path / "r.toml")]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/r.toml: train: must have either examples or epochs, and not both\n"


@pytest.mark.parametrize("name", ["ranks", "batch", "features"])
def test_a_number_below_one_is_refused(capsys, name):
    assert main(["doctor", f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"`--{name}` must be at least 1; got 0. Leave it out for the default.\n"
