"""The batch of a step is the same wherever the pictures lie."""

from dataclasses import replace

import pytest
import torch
from tiny_runs import tiny_recipe, write_shards

from contrastile.train import batch_builder
from contrastile.train.batch_builder import BatchBuilder, open_data_bundle


@pytest.mark.parametrize("bend", [True, False])
@pytest.mark.parametrize("share", [slice(None), slice(1, None, 3), slice(20, None)])
def test_pictures_on_a_device_are_augmented_like_those_on_the_host(tmp_path, monkeypatch, bend, share):
    # slices of other lengths, of what is drawn and of what is bent
    monkeypatch.setattr(batch_builder, "SLICE", 5)
    monkeypatch.setattr(batch_builder, "SLICE_ON_DEVICE", 7)
    materials = open_data_bundle(tiny_recipe(tmp_path))
    rows = torch.arange(14)
    batches = [
        BatchBuilder(replace(materials, home=home), augment=bend, seed=3).batch(rows, share)
        for home in (None, torch.device("cpu"))
    ]
    for name in ("pixels", "ids"):
        one, same = (getattr(batch, name) for batch in batches)
        assert torch.equal(one, same)
    assert batches[0].tokens.keys() == batches[1].tokens.keys()


def test_only_small_data_sets_stay_on_a_gpu(tmp_path, monkeypatch):
    gpu = torch.device("cuda", 0)
    pairs = open_data_bundle(tiny_recipe(tmp_path)).pairs
    for free, home in ((64 * pairs.images.nbytes, gpu), (63 * pairs.images.nbytes, None)):
        monkeypatch.setattr(batch_builder, "free_memory", lambda device, free=free: (free, 10 * free))
        assert batch_builder._home(pairs, gpu) == home
    assert batch_builder._home(pairs, torch.device("cpu")) is None


def test_a_collection_never_stays_on_a_gpu(tmp_path, monkeypatch):
    pairs = open_data_bundle(tiny_recipe(tmp_path, f"data.source={write_shards(tmp_path)}")).pairs
    monkeypatch.setattr(batch_builder, "free_memory", lambda device: (10**12, 10**12))
    assert batch_builder._home(pairs, torch.device("cuda", 0)) is None
