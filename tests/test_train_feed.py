"""What a step eats is the same wherever the pictures lie."""

from dataclasses import replace

import pytest
import torch
from tiny_runs import tiny_recipe, write_shards

from contrastile.train import feed
from contrastile.train.feed import Feed, open_materials


@pytest.mark.parametrize("bend", [True, False])
@pytest.mark.parametrize("share", [slice(None), slice(1, None, 3), slice(20, None)])
def test_pictures_that_lie_on_a_device_are_bent_as_those_that_do_not(tmp_path, monkeypatch, bend, share):
    # slices of other lengths, of what is drawn and of what is bent
    monkeypatch.setattr(feed, "SLICE", 5)
    monkeypatch.setattr(feed, "SLICE_ON_DEVICE", 7)
    materials = open_materials(tiny_recipe(tmp_path))
    rows = torch.arange(14)
    batches = [
        Feed(replace(materials, home=home), bend=bend, seed=3).batch(rows, share)
        for home in (None, torch.device("cpu"))
    ]
    for name in ("pixels", "ids"):
        one, same = (getattr(batch, name) for batch in batches)
        assert torch.equal(one, same)
    assert batches[0].tokens.keys() == batches[1].tokens.keys()


def test_only_few_pictures_lie_on_a_gpu(tmp_path, monkeypatch):
    gpu = torch.device("cuda", 0)
    pairs = open_materials(tiny_recipe(tmp_path)).pairs
    for free, home in ((64 * pairs.images.nbytes, gpu), (63 * pairs.images.nbytes, None)):
        monkeypatch.setattr(feed, "free_memory", lambda device, free=free: (free, 10 * free))
        assert feed._home(pairs, gpu) == home
    assert feed._home(pairs, torch.device("cpu")) is None


def test_a_collection_stays_where_it_is(tmp_path, monkeypatch):
    pairs = open_materials(tiny_recipe(tmp_path, f"data.source={write_shards(tmp_path)}")).pairs
    monkeypatch.setattr(feed, "free_memory", lambda device: (10**12, 10**12))
    assert feed._home(pairs, torch.device("cuda", 0)) is None
