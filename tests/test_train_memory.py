"""Memory: what autograd keeps is counted exactly, and the high-water mark moves."""

import mmap

import pytest
import torch
from torch import nn

from contrastile.gradcache.memory import bytes_per_example, graph_bytes
from contrastile.train.memory import PeakMemory, Weighed, dense_need


def test_kept_bytes_are_those_that_autograd_saves():
    x = torch.randn(100, 10, requires_grad=True)
    assert graph_bytes(lambda: x.exp()) == 100 * 10 * 4


def test_a_storage_kept_twice_counts_once():
    x = torch.randn(100, 10, requires_grad=True)
    y = x * 1.0
    assert graph_bytes(lambda: (y * y, y * y)) == 100 * 10 * 4


def test_without_a_graph_nothing_is_kept():
    assert graph_bytes(lambda: torch.randn(100).exp()) == 0


def test_bytes_per_example_leave_the_parameters_out():
    layer = nn.Linear(10, 5000)
    # the layer keeps its input, the exponential its output
    assert bytes_per_example(lambda count: layer(torch.randn(count, 10)).exp(), 64) == 4 * (10 + 5000)


def test_one_example_at_a_time_is_enough():
    layer = nn.Linear(10, 50)
    assert bytes_per_example(lambda count: layer(torch.randn(count, 10)).exp(), 1) == 4 * (10 + 50)


def test_plain_autograd_needs_all_other_activations_and_one_matrix():
    need = dense_need(1000, 4096, 256)
    assert (need["beyond"], need["activations"], need["matrix"]) == (3840, 3_840_000, 4 * 4096 * 4096)


def test_a_batch_within_a_sub_batch_needs_only_the_matrix():
    need = dense_need(1000, 100, 256)
    assert (need["activations"], need["matrix"]) == (0, 40_000)


def _touched():
    """64 MiB of memory in use, of the system itself: a tensor may find room in what other tests freed."""
    block = mmap.mmap(-1, 64 << 20)
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    return block


def test_the_peak_counts_freed_memory():
    peak = PeakMemory(torch.device("cpu"))
    before = peak.start()
    _touched().close()
    assert peak.bytes() - before >= 60 << 20


def test_a_new_start_resets_the_peak():
    peak = PeakMemory(torch.device("cpu"))
    peak.start()
    _touched().close()
    now = peak.start()
    assert peak.bytes() - now < 30 << 20


def weighed(work):
    with Weighed(torch.device("cpu")) as balance:
        work()
    return balance.bytes


def test_tensors_are_weighed_to_the_byte_at_their_highest():
    def work():
        first, second = torch.ones(1000), torch.ones(500)
        del first, second
        return torch.ones(1400)

    assert weighed(work) == 6000
    assert weighed(lambda: None) == 0


def test_reused_memory_counts():
    blocks = [torch.ones(1 << 14) for _ in range(512)]
    del blocks
    assert weighed(lambda: [torch.ones(1 << 14) for _ in range(256)]) == 256 * 4 << 14


def test_freed_tensors_do_not_count_below_0():
    held = [torch.ones(1000)]
    assert weighed(held.clear) == 0
    held = [torch.ones(1000)]
    held.append(held)
    del held
    # the ring is let go before: it makes no room
    assert weighed(lambda: torch.ones(300)) == 1200


def test_gradients_are_weighed():
    x = torch.randn(64, 64, requires_grad=True)
    # the square, its exponential, and on the way back the gradients of both; scalars beside
    assert 3 * 4 * 64 * 64 <= weighed(lambda: (x @ x).exp().sum().backward()) <= 4 * 4 * 64 * 64


def test_the_profiler_is_usable_after_an_error():
    def work():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        weighed(work)
    assert weighed(lambda: torch.ones(10)) == 40
