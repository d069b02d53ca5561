"""`contrastile bench loss`: words into cases, results into a table and a file."""

import pytest
import torch

from contrastile.bench import harness
from contrastile.bench.loss import suite
from contrastile.bench.peers import Case
from contrastile.cli import bench
from contrastile.cli.main import build_parser, main
from contrastile.cli.options import number

CUDA = torch.device("cuda")
SMALL = ["bench", "loss", "--device", "cpu", "--sizes", "64", "--features", "8", "--losses", "clip", "--no-peers"]


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch):
    """A hundred large products take seconds."""
    monkeypatch.setitem(harness.PRODUCTS, "cpu", (64, torch.float32))


def cases(*words, device=CUDA):
    arguments = build_parser().parse_args(["bench", "loss", *words])
    bench._check(arguments)
    return bench._cases(arguments, suite(device, quick=arguments.quick))


def test_a_size_may_have_a_unit():
    assert [number("sizes", text) for text in ("96", "4k", "64K", "1m", "65_536")] == [96, 4096, 2**16, 2**20, 2**16]
    assert [number("workspace", text) for text in ("192MiB", "2GiB")] == [192 * 2**20, 2**31]


@pytest.mark.parametrize("text", ["", "k", "0", "-4k", "1.5k", "64kk", "64q"])
def test_a_wrong_size_is_refused(text):
    with pytest.raises(ValueError, match=r"got '.*'. Such as 4096, 64k, 1M, 192MiB or 2GiB.$"):
        number("sizes", text)


def test_named_settings_are_crossed():
    chosen = cases("--sizes", "4k", "1M", "--features", "512", "768", "--losses", "siglip", "--workspace", "1GiB")
    assert chosen == [Case("siglip", b, d, "bfloat16", (2**30,)) for b in (4096, 2**20) for d in (512, 768)]


def test_other_settings_are_the_devices_defaults():
    chosen = cases("--dtype", "fp32", "--precision", "high")
    assert {case.d for case in chosen} == {512, 768, 1024}
    assert {(case.dtype, case.precision, case.loss) for case in chosen} == {("float32", "high", "clip")}


def test_without_settings_the_whole_list_is_measured():
    assert {case.loss for case in cases(device=torch.device("cpu"))} == {"clip", "siglip", "infonce"}
    assert len(cases("--quick")) < len(cases())


def test_results_are_a_table_and_a_file(tmp_path, capsys):
    path = tmp_path / "made" / "with" / "rows.csv"
    assert main([*SMALL, "--seconds", "0.01", "--csv", str(path)]) == 0
    output = capsys.readouterr().out
    cases = [(row["impl"], row["loss"], row["b"], row["d"]) for row in harness.read_rows(path)]
    assert cases == [("dense", "clip", "64", "8"), ("contrastile", "clip", "64", "8")]
    assert "speed/dense" in output
    assert output.endswith(f"rows: {path}\n")


def test_once_times_one_step_of_contrastile_alone(capsys):
    assert main([*SMALL, "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines if line.startswith("clip ")] == ["contrastile"]


def test_a_wrong_result_gives_exit_code_1(monkeypatch):
    monkeypatch.setattr("contrastile.bench.gate.LOSS_TOLERANCE", -1.0)
    assert main([*SMALL, "--seconds", "0.01"]) == 1


def test_a_profile_needs_several_ranks(capsys):
    assert main([*SMALL, "--profile"]) == 2
    sentence = "`--profile` must come under torchrun; got one process. Start several ranks, or leave it out.\n"
    assert capsys.readouterr().err == sentence
