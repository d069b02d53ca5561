"""A file of results describes the machine in the same words wherever a number is written down."""

import os
import subprocess
from datetime import date

import pytest
import torch

from contrastile.train import provenance as its
from contrastile.train.provenance import chip, commit, provenance, versions

CPU = torch.device("cpu")


def test_versions_name_what_is_installed_and_nothing_else():
    said = versions("contrastile", "surely-not-installed")
    assert [*said][:3] == ["contrastile", "torch", "python"]
    assert said["torch"] == torch.__version__
    assert "surely-not-installed" not in said


def test_a_cpu_says_how_many_cores_work():
    assert chip(CPU, processes=3).startswith(f"{torch.get_num_threads()} of {os.cpu_count()} CPU cores, ")


@pytest.mark.parametrize(
    ("device", "processes", "said"),
    [("cuda", 1, "A GPU"), ("cuda", 2, "2 x A GPU"), ("cuda", 9, "4 x A GPU"), ("cuda:1", 9, "A GPU")],
)
def test_gpus_that_processes_share_out_are_counted(device, processes, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    assert chip(torch.device(device), processes) == said


def test_provenance_has_four_columns():
    origin = provenance(CPU)
    assert [*origin] == ["chip", "versions", "date", "commit"]
    assert origin["date"] == date.today().isoformat()


def test_without_git_there_is_no_commit(monkeypatch):
    def none(*_, **__):
        raise FileNotFoundError("git")

    commit.cache_clear()
    monkeypatch.setattr(its.subprocess, "run", none)
    assert commit() == ""
    commit.cache_clear()
    monkeypatch.undo()
    assert commit() == "" or set(commit().removesuffix("-dirty")) <= set("0123456789abcdef")
    assert its.subprocess is subprocess


def test_the_commit_is_that_of_the_package_and_of_no_repository_around_it(tmp_path, monkeypatch):
    def git(*words):
        user = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *user, *words], check=True, capture_output=True)

    package = tmp_path / "package"
    (package / "train").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(its, "__file__", str(package / "train" / "provenance.py"))
    git("init")
    git("commit", "--allow-empty", "-m", "around an installed package")
    assert commit.__wrapped__() == ""
    git("add", ".")
    git("commit", "-m", "a package")
    first = commit.__wrapped__()
    assert first
    assert "dirty" not in first
    # results that a bench appends to lie beside the package
    (tmp_path / "results.csv").write_text("ms")
    git("add", ".")
    assert commit.__wrapped__() == first
    (package / "new.py").write_text("")
    assert commit.__wrapped__() == f"{first}-dirty"
