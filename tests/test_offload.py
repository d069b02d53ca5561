"""What waits where: the device by its number, and nothing to copy where nothing is encoded again."""

import torch

from contrastile.offload import numbered, stream


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert numbered("cuda") == torch.device("cuda", 3)
    assert numbered(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert numbered("cpu") == torch.device("cpu")
    assert numbered("meta") == torch.device("meta")


def test_where_every_graph_was_kept_nothing_travels():
    assert list(stream([torch.zeros(4, 2), None], [], torch.device("cuda", 0))) == []
