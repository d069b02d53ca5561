"""Hostile files of texts are read, or refused in one sentence with a line, within limits of memory and time."""

import json
import os

import hostile_texts
import pytest
from hostile import sampled
from hostile_texts import ATTACKS, QUICK

from contrastile.data.evaluation_sets import open_captions, read_classes, read_prompts
from contrastile.data.shards import find_in_tar
from contrastile.data.tables import read_table

# of the interpreter's objects for a line of 16 million characters, which takes at most 4 bytes each, several times
LIMIT = 400 << 20


@pytest.mark.parametrize("name", sampled(ATTACKS, QUICK))
def test_a_file_is_read_or_refused_within_limits(attacked, tmp_path, name):
    attack = ATTACKS[name]
    path = f"{tmp_path}/{attack.name}"
    attack.write(tmp_path / attack.name)
    outcome = attacked.run(hostile_texts.opened, path)
    assert outcome.error.startswith(f"ValueError: {attack.error.format(path=path)}" if attack.error else "")
    assert bool(outcome.error) == bool(attack.error)
    assert outcome.memory <= LIMIT


def test_a_path_with_a_nul_costs_its_row(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"filepath\ttitle\na\0.png\ta title\n")
    assert read_table(tmp_path / "a.tsv") == ["NUL in a path"]
    content = {"images": [{"split": "test", "filename": "a\0.jpg", "sentences": [{"raw": "words"}]}]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"`captions` must be Karpathy's JSON; got .*NUL in a name"):
        open_captions(tmp_path / "a.json")


@pytest.mark.parametrize("read", [read_table, read_classes, read_prompts, lambda path: list(find_in_tar(path))])
def test_a_pipe_is_no_file_of_data(tmp_path, read):
    os.mkfifo(tmp_path / "a.tsv")
    with pytest.raises(ValueError, match=r"that can be read; got .*Not a plain file"):
        read(tmp_path / "a.tsv")
