"""W ranks equal one: the loss on every rank, and the gradients after the wrapper's mean or sum."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from problems import PROBLEMS, Problem, distance, joined_options, problems_of
from ranks import Pool
from refusals import refusal, unlike
from torch import Tensor

from contrastile import (
    ClipLoss,
    DistillClipLoss,
    GISTLoss,
    InfoNCELoss,
    NTXentLoss,
    SigLipLoss,
    SupConLoss,
    _dispatch,
    contrast,
)  # fmt: skip
from contrastile.distributed import consistency
from contrastile.distributed.failure import state_of
from contrastile.engine import plan
from contrastile.exchange import gather
from contrastile.exchange.base import Layout
from contrastile.losses.base import PairLoss
from contrastile.losses.guided import Guided
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.tiles.eager import Eager

EXCHANGES = ["replicate", "gather", "ring"]
# "gather apart": the rank's own columns are a block of their own, as ranks of many rows compute them
BLOCKS = [*EXCHANGES, "gather apart"]
# rows and keys of each rank: even, uneven, one rank without any, and more keys than rows
SHARES = {1: [(13, 13)], 2: [(9, 9), (4, 4)], 3: [(8, 8), (0, 0), (11, 11)], 4: [(6, 6), (7, 7), (2, 2), (6, 6)]}
MORE_KEYS = {3: [(8, 12), (3, 3), (5, 20)]}


def _tensors(problem: Problem, rank: int) -> dict[str, Tensor]:
    return problem.tensors(torch.float64, D=7, scale=5.0, seed=rank)


def _whole(name: str, shares: list[tuple[int, int]]) -> tuple[Problem, dict[str, Tensor]]:
    """The same batch in one process."""
    problems = problems_of(name, shares)
    tensors = [_tensors(problem, rank) for rank, problem in enumerate(problems)]
    N, M, first = sum(p.N for p in problems), sum(p.M for p in problems), problems[0]
    whole = Problem(N, M, joined_options(problems), {}, bias=first.bias, same=first.same)
    leaves = {
        key: (torch.cat([t[key].detach() for t in tensors]) if key in ("q", "k") else tensors[0][key].detach())
        for key in tensors[0]
    }
    return whole, {key: x.requires_grad_() for key, x in leaves.items()}


def on_a_rank(
    rank: int, group: Any, name: str, shares: list[tuple[int, int]], how: dict[str, Any],
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    problem = problems_of(name, shares)[rank]
    tensors = {key: x.detach().to(dtype).requires_grad_() for key, x in _tensors(problem, rank).items()}
    exchange, *apart = how.get("exchange", "auto").split()
    with mock.patch.object(gather, "ONE_BLOCK", 0) if apart else nullcontext():
        return problem.by_tiles(tensors, group=group, **how | {"exchange": exchange})


def check(
    pool: Pool, name: str, shares: list[tuple[int, int]], on_rank: Callable[..., Any] | None = None,
    allowed: tuple[float, float] = (1e-12, 1e-12), **how: Any,
) -> None:  # fmt: skip
    """Compare ranks with one process, in loss and gradients; `on_rank` in place of `on_a_rank`."""
    compare(pool.run(on_rank or on_a_rank, len(shares), name, shares, how), name, shares, allowed, **how)


def compare(
    answers: list[tuple[Tensor, dict[str, Tensor]]], name: str, shares: list[tuple[int, int]],
    allowed: tuple[float, float] = (1e-12, 1e-12), reduction: str = "mean", gradient: str = "mean", **_: Any,
) -> None:  # fmt: skip
    """Compare what ranks found; allowed: distances of the loss and of the gradients."""
    whole, leaves = _whole(name, shares)
    truth, true_gradients = whole.by_tiles(leaves, reduction=reduction)
    for loss, _ in answers:
        assert distance(loss, truth) <= allowed[0]
    for key, true_gradient in true_gradients.items():
        parts = [gradients[key] / (len(shares) if gradient == "mean" else 1) for _, gradients in answers]
        combined = torch.cat(parts) if key in ("q", "k") else torch.stack(parts).sum(0)
        assert distance(combined, true_gradient) <= allowed[1], key


@pytest.mark.parametrize("exchange", BLOCKS)
@pytest.mark.parametrize("W", SHARES)
@pytest.mark.parametrize("name", [name for name in PROBLEMS if not name.endswith("positives")])
def test_as_one_process(pool: Pool, name: str, W: int, exchange: str) -> None:
    shares = SHARES[W]
    if name in ("info_nce_everything", "nt_xent") and (0, 0) in shares:
        shares = [(N or 2, M or 2) for N, M in shares]
    check(pool, name, shares, exchange=exchange)


def _sent_without_gradients(rank: int, group: Any, exchange: Any) -> list[int]:
    del rank
    q, k = (torch.eye(3, 4, requires_grad=True) for _ in "qk")
    sent = []
    for loss in (ClipLoss, InfoNCELoss, SigLipLoss):
        before = state_of(group).operations
        with torch.no_grad():
            loss(exchange=exchange, group=group)(q, k, 2.0)
        sent.append(state_of(group).operations - before)
    return sent


@pytest.mark.parametrize(("exchange", "sent"), [("gather", [4, 3, 3]), ("ring", [6, 6, 6]), ("replicate", [5, 5, 5])])
def test_without_grad_mode_ranks_send_columns_and_statistics_alone(pool: Pool, exchange: str, sent: list[int]) -> None:
    """The agreement, columns by gather or hops, statistics of a symmetric loss, and the sum over ranks."""
    # the first call of a group meets the ranks
    pool.run(_sent_without_gradients, 3, exchange)
    assert pool.run(_sent_without_gradients, 3, exchange) == [sent] * 3


def _on_a_node(
    rank: int, group: Any, name: str, shares: list[tuple[int, int]], how: dict[str, Any], size: int
) -> tuple[Tensor, dict[str, Tensor]]:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(size)):
        return on_a_rank(rank, group, name, shares, how)


@pytest.mark.parametrize("size", [2, 1, 4])
@pytest.mark.parametrize("name", ["clip", "siglip", "clip_ids_weights_smoothing", "info_nce_everything"])
def test_a_ring_of_nodes_is_as_one_process(pool: Pool, name: str, size: int) -> None:
    shares = [(3, 3), (5, 5), (2, 2), (4, 4)]
    check(pool, name, shares, partial(_on_a_node, size=size), exchange="hierarchical")


def _uneven_nodes(rank: int, group: Any) -> str:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"), pytest.raises(ValueError) as error:
        contrast(torch.eye(3), torch.eye(3), scale=1.0, exchange="hierarchical", group=group)
    return str(error.value)


def test_nodes_of_unequal_size_are_refused(pool: Pool) -> None:
    sentence = (
        "`exchange` must have nodes of 2 ranks each for hierarchical; got 3 ranks. "
        "Start equally many ranks on every node, or take gather or ring."
    )
    assert pool.run(_uneven_nodes, 3) == [sentence] * 3


# a softmax with every exchange; a sigmoid with both that compute each pair once; a loss whose rows end otherwise
@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        *(("clip_ids_weights_smoothing", exchange) for exchange in BLOCKS),
        *(("siglip", exchange) for exchange in ("gather", "ring")),
        ("dcl", "ring"),
        ("sup_con", "ring"),
        ("clip_labels", "gather"),
    ],
)
def test_fused_kernels_too(pool: Pool, name: str, exchange: str) -> None:
    pytest.importorskip("triton")
    shares, on_rank = [(9, 9), (0, 0), (4, 4)], partial(on_a_rank, dtype=torch.float32)
    check(pool, name, shares, on_rank, (1e-6, 1e-5), exchange=exchange, backend="triton")


@pytest.mark.parametrize("name", ["sup_con", "clip_labels"])
def test_positives_by_label_are_sums_of_features_on_ranks_too(pool: Pool, name: str) -> None:
    """A row's label may have one row in a block and several in others; features are rounded to 16 bits."""
    pytest.importorskip("triton")
    shares, on_rank = [(9, 9), (0, 0), (4, 4)], partial(on_a_rank, dtype=torch.float16)
    check(pool, name, shares, on_rank, (5e-4, 5e-3), exchange="ring", backend="triton")


@pytest.mark.parametrize("exchange", BLOCKS)
@pytest.mark.parametrize("name", ["info_nce", "info_nce_positives", "info_nce_everything", "dcl_positives"])
def test_more_keys_than_rows(pool: Pool, name: str, exchange: str) -> None:
    check(pool, name, MORE_KEYS[3], exchange=exchange)


@pytest.mark.parametrize("exchange", BLOCKS)
@pytest.mark.parametrize("how", [{"gradient": "sum"}, {"reduction": "sum"}, {"backend": "dense"}], ids=str)
@pytest.mark.parametrize("name", ["clip_ids_weights_smoothing", "siglip_ids_weights"])
def test_options(pool: Pool, name: str, how: dict[str, Any], exchange: str) -> None:
    check(pool, name, SHARES[3], exchange=exchange, **how)


def _rows(rank: int, group: Any, sizes: list[int], loss: PairLoss, exchange: str) -> tuple[Tensor, Tensor]:
    q = torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(3)).double()
    mine = q.split(sizes)[rank].clone().requires_grad_()
    rows = contrast(mine, mine.detach(), scale=1.0, loss=loss, reduction="none", group=group, exchange=exchange)
    # a user's code: the local mean, which the wrapper then averages
    rows.mean().backward()
    return rows.detach(), mine.grad


@pytest.mark.parametrize("loss", [Softmax(), Sigmoid()], ids=str)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_rows_of_a_rank_have_gradients_for_their_local_mean(pool: Pool, loss: PairLoss, exchange: str) -> None:
    sizes = [4, 9, 2]
    q = torch.randn(15, 5, generator=torch.Generator().manual_seed(3)).double().requires_grad_()
    truth = contrast(q, q.detach(), scale=1.0, loss=loss, reduction="none")
    truth.mean().backward()
    answers = pool.run(_rows, 3, sizes, loss, exchange)
    assert distance(torch.cat([rows for rows, _ in answers]), truth.detach()) <= 1e-12
    assert distance(torch.cat([gradient for _, gradient in answers]) / 3, q.grad) <= 1e-12


def _by_ids(rank: int, group: Any, dtype: torch.dtype, exchange: str) -> Tensor:
    q = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank)).double()
    ids = torch.tensor([0, 1, 1, 0, 1]).to(torch.int64 if rank else dtype)
    return contrast(q, q, scale=1.0, query_ids=ids, key_ids=ids, group=group, exchange=exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16], ids=str)
def test_ids_of_types_that_a_backend_does_not_send(pool: Pool, dtype: torch.dtype, exchange: str) -> None:
    truth, _ = pool.run(_by_ids, 2, torch.int64, exchange)
    assert pool.run(_by_ids, 2, dtype, exchange) == [truth] * 2


def _by_least_id(rank: int, group: Any, smallest: int, guided: bool) -> Tensor:
    q, negatives = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(rank)).double()
    ids = torch.tensor([0, smallest, smallest, 0, 1])
    # the second rank has none
    some = negatives[: 2 - 2 * rank]
    if not guided:
        return contrast(q, q, scale=1.0, loss=Softmax(), negatives=some, query_ids=ids, key_ids=ids, group=group)
    # a margin that leaves all negatives to the ids
    loss = GISTLoss(margin=-1e3, contrast_anchors=True, contrast_positives=True, group=group)
    guides = {"guide_query": q, "guide_key": q, "guide_negatives": some}
    return loss(q, q, 1.0, negatives=some, query_ids=ids, key_ids=ids, **guides)


@pytest.mark.parametrize("guided", [False, True])
def test_the_least_of_all_ids_is_no_negatives_of_another_rank(pool: Pool, guided: bool) -> None:
    assert pool.run(_by_least_id, 2, -1, guided) == pool.run(_by_least_id, 2, torch.iinfo(torch.int64).min, guided)


def _lacking(rank: int, group: Any, exchange: str, lacking: bool) -> Tensor:
    """The second rank has no query; lacking: but for one without a positive."""
    a, b = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(rank)).double()
    positives = torch.tensor([[3, 1], [2, 4]]) if rank != 1 else torch.full((int(lacking), 2), -1)
    loss = GISTLoss(contrast_positives=True, margin=-1e3, exchange=exchange, group=group)  # type: ignore[arg-type]
    a = a[: len(positives)]
    return loss(a, b, 1.0, guide_query=a, guide_key=b, positives=positives)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_query_without_a_positive_adds_no_key_on_another_rank(pool: Pool, exchange: str) -> None:
    torch.testing.assert_close(pool.run(_lacking, 3, exchange, True), pool.run(_lacking, 3, exchange, False))


def _with_ids(rank: int, group: Any, one: int, other: int, guided: bool, lack: bool) -> Tensor:
    """The second rank has no negatives; lack: those of the first have no ids."""
    q, negatives = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(rank)).double()
    ids, some = torch.tensor([0, one, other, 0, 5]), negatives[: 2 - 2 * rank]
    words = {"query_ids": ids, "key_ids": ids if lack else torch.cat([ids, torch.tensor([5, one])[: len(some)]])}
    if not guided:
        return contrast(q, q, scale=1.0, loss=Softmax(), negatives=some, group=group, **words)
    loss = GISTLoss(margin=-1e3, contrast_anchors=True, contrast_positives=True, group=group)
    return loss(q, q, 1.0, negatives=some, guide_query=q, guide_key=q, guide_negatives=some, **words)


@pytest.mark.parametrize("guided", [False, True])
def test_ranks_without_negatives_have_the_ids_of_the_others(pool: Pool, guided: bool) -> None:
    """Ids of both ranks' queries meet, also the least number, and with named negatives it is not the next one."""
    least = torch.iinfo(torch.int64).min
    assert pool.run(_with_ids, 2, least, least + 1, guided, False) == pool.run(_with_ids, 2, 10, 11, guided, False)
    # negatives without an id take the least number, so that both are one id on all ranks
    assert pool.run(_with_ids, 2, least, least + 1, guided, True) == pool.run(_with_ids, 2, 10, 10, guided, True)


def _sentence(rank: int, group: Any, kind: str) -> str:
    q = torch.ones(3, 4 + (kind == "features" and rank == 1))
    options = {"gradient": "sum"} if kind == "gradient" and rank == 1 else {}
    if kind == "own":
        options = {"query_ids": torch.arange(2 if rank == 2 else 3), "key_ids": torch.arange(3)}
    if kind == "ids" and rank == 1:
        options = {"query_ids": torch.arange(3), "key_ids": torch.arange(3)}
    if kind == "weights" and rank == 1:
        options = {"weights": torch.ones(3)}
    if kind == "smoothing" and rank == 1:
        options = {"label_smoothing": 2.0}
    if kind == "guides":
        options = {"loss": Guided(), "guide_q": torch.ones(3, 5 + rank), "guide_k": torch.ones(3, 5 + rank)}
    if kind == "empty":
        q = q[:0]
    return refusal(contrast, q, q, scale=2.0 if kind == "scale" and rank == 1 else 1.0, group=group, **options)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("features", unlike("features", 4, 5)),
        ("gradient", unlike("gradient", "mean", "sum")),
        ("ids", unlike("ids", "left out", "given")),
        ("weights", unlike("weights", None, "a tensor")),
        ("scale", unlike("scale", 1.0, 2.0)),
        ("guides", unlike("guides", ["5 features of torch.float32"], ["6 features of torch.float32"])),
        ("smoothing", "rank 1: `label_smoothing` must be at least 0 and below 1; got 2.0. 0.1 is usual."),
        ("empty", "`q` must have at least one row over all ranks; got 0. Skip the step when the batch is empty."),
    ],
)
def test_ranks_that_disagree_all_say_so(pool: Pool, kind: str, sentence: str) -> None:
    assert pool.run(_sentence, 3, kind) == [sentence] * 3


def test_what_one_rank_finds_wrong_is_raised_on_all(pool: Pool) -> None:
    first, second, third = pool.run(_sentence, 3, "own")
    assert third.startswith("rank 2: `query_ids` must be a tensor of shape [3]")
    assert first == second == third


def _of_a_class(rank: int, group: Any, name: str) -> str:
    """One rank has a row less on one side."""
    q, rows = torch.nn.functional.normalize(torch.ones(3, 4), dim=-1), 2 if rank == 1 else 3
    calls = {
        "ClipLoss": lambda: ClipLoss(group=group)(q, q[:rows], 1.0),
        "SupConLoss": lambda: SupConLoss(group=group)(q, torch.arange(rows), 1.0),
        "NTXentLoss": lambda: NTXentLoss(group=group)(q, q[:rows], 1.0),
        "InfoNCELoss": lambda: InfoNCELoss(group=group)(q, q, 1.0, **{"label" if rank == 1 else "weights": q[:, 0]}),
    }
    return refusal(calls[name])


@pytest.mark.parametrize("name", ["ClipLoss", "SupConLoss", "NTXentLoss", "InfoNCELoss"])
def test_what_a_class_finds_wrong_on_one_rank_is_raised_on_all(pool: Pool, name: str) -> None:
    first, second = pool.run(_of_a_class, 2, name)
    assert first == second
    assert first.startswith("rank 1: `")


def _within_a_group(rank: int, group: Any) -> list[str]:
    """Ranks that have other numbers among all processes than in their group, of which the second differs."""
    q = torch.ones(3, 4)
    with mock.patch.object(torch.distributed, "get_process_group_ranks", return_value=[4, 7]):
        return [
            refusal(lambda: ClipLoss(group=group)(q, q, float(rank))),
            refusal(lambda: ClipLoss(group=group)(q, q[: 3 - rank], 1.0)),
        ]


def test_errors_within_a_group_name_ranks_among_all(pool: Pool) -> None:
    first, second = pool.run(_within_a_group, 2)
    assert first == second
    assert first[0] == unlike("logit_scale", 0.0, 1.0, (4, 7))
    assert first[1].startswith("rank 7: `text_features`")


def _of_other_options(rank: int, group: Any, name: str) -> str:
    """Options that show neither in the loss nor in the features of a rank."""
    q, own = torch.nn.functional.normalize(torch.ones(3, 4), dim=-1), torch.ones(3, 2, 4)
    calls = {
        "in_batch": lambda: InfoNCELoss(in_batch=rank > 0, group=group)(q, q, 1.0, negatives=own),
        "contrast_anchors": lambda: GISTLoss(contrast_anchors=rank > 0, group=group)(
            q, q, 1.0, guide_query=q, guide_key=q
        ),
        "contrast_positives": lambda: GISTLoss(contrast_positives=rank > 0, group=group)(
            q, q, 1.0, guide_query=q, guide_key=q
        ),
        "dist_logit_scale": lambda: DistillClipLoss(group=group)(q, q, 1.0, q, q, 2.0 + rank),
    }
    return refusal(calls[name])


@pytest.mark.parametrize(
    "sentence",
    [
        *(unlike(name, False, True) for name in ("in_batch", "contrast_anchors", "contrast_positives")),
        unlike("dist_logit_scale", 2.0, 3.0),
    ],
)
def test_other_options_of_one_rank_are_raised_on_all(pool: Pool, sentence: str) -> None:
    assert pool.run(_of_other_options, 2, sentence.split("`")[1]) == [sentence] * 2


def _taken(rank: int, group: Any, dtype: torch.dtype, *memory: int) -> tuple[str, bool]:
    """The exchange that "auto" takes on devices of this memory, for 2 x 8 pairs of 4 features; True if exact."""
    taken, known = [], _dispatch.automatic_exchange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "device_memory", lambda device: memory[rank])
        patch.setattr(_dispatch, "automatic_exchange", lambda *given: taken.append(known(*given)) or taken[0])
        q = torch.ones(8, 4, dtype=dtype)
        value = contrast(q, q, scale=1.0, group=group, workspace=2**20)
    return taken[0], bool((value - math.log(16)).abs() < 1e-2)


@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 6), (torch.float32, 8), (torch.float64, 16)])
def test_auto_counts_an_accumulator_in_its_own_type(pool: Pool, dtype: torch.dtype, each: int) -> None:
    enough = 16 * (16 * 4 * each)
    assert pool.run(_taken, 2, dtype, enough, enough) == [("gather", True)] * 2
    # ranks take the same where the device of one has less memory
    for memory in ((enough - 16, enough - 16), (enough, enough - 16)):
        assert pool.run(_taken, 2, dtype, *memory) == [("ring", True)] * 2


@pytest.mark.parametrize(
    ("rows", "allowed", "copied", "taken"),
    [
        (4096, 2**40, True, "ring"),
        (4096, 2**40, False, "gather"),
        (4096, 0, False, "ring"),
        # one block a rank; more than the buffers of copies hold
        (2048, 2**40, True, "gather"),
        (2**17, 2**40, True, "gather"),
        (2**17, 0, True, "ring"),
    ],
)
def test_auto_takes_the_ring_for_many_columns_that_copy_engines_carry(
    rows: int, allowed: int, copied: bool, taken: str
) -> None:
    layout = Layout(None, 0, (rows,) * 4, (rows,) * 4)
    assert _dispatch.automatic_exchange(layout, 768, torch.bfloat16, allowed, lambda: copied) == taken


def test_auto_counts_the_padding_of_uneven_ranks() -> None:
    """A gather by a backend has room for as many columns of each rank as the largest has."""
    uneven, allowed = Layout(None, 0, (8, 2, 2), (8, 2, 2)), 3 * 8 * 4 * (2 + 4)
    for bytes_allowed, taken in ((allowed, "gather"), (allowed - 1, "ring")):
        assert _dispatch.automatic_exchange(uneven, 4, torch.bfloat16, bytes_allowed, lambda: False) == taken


def test_auto_asks_for_copies_on_all_ranks_or_on_none(pool: Pool) -> None:
    """Ranks of few columns ask too, where another has many."""
    assert pool.run(_asked, 2, 4, 4) == [0, 0]
    assert pool.run(_asked, 2, 4, 12) == [1, 1]


def _asked(rank: int, group: Any, *rows: int) -> int:
    """The number of times that a rank asks whether copy engines carry transfers, with blocks of 4 x 4 x 8 as one."""
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "copies_carry", lambda *given: asked.append(given))
        patch.setattr(gather, "ONE_BLOCK", 4 * 4 * 8)
        q = torch.ones(rows[rank], 8)
        contrast(q, q, scale=1.0, group=group)
    return len(asked)


def _planned_for(_rank: int, group: Any) -> list[str]:
    """The exchanges for which calls of one signature are planned where "auto" takes two in turns."""
    names, planned, known = iter(["ring", "gather"] * 2), list[str](), plan._planned

    def noted(problem: Any, exchange: Any) -> Any:
        planned.append(type(exchange).__name__)
        return known(problem, exchange)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "automatic_exchange", lambda *_: next(names))
        patch.setattr(plan, "_planned", noted)
        patch.setattr(plan, "_plans", {})
        for _ in range(4):
            q = torch.ones(8, 4)
            contrast(q, q, scale=1.0, group=group)
    return planned


def test_a_plan_is_that_of_the_exchange_which_auto_takes(pool: Pool) -> None:
    """Copies carry nothing in a graph of the user's own, where "auto" may take another exchange than before."""
    assert pool.run(_planned_for, 2) == [["Ring", "Gather"]] * 2


def _shouted(rank: int, group: Any) -> str:
    return refusal(consistency.agree, group, {"error": 400 * "\N{SLIGHTLY SMILING FACE}"} if rank == 1 else {"step": 1})


def test_a_sentence_of_long_letters_is_raised_on_all(pool: Pool) -> None:
    assert pool.run(_shouted, 2) == ["rank 1: " + consistency.SENTENCE * "\N{SLIGHTLY SMILING FACE}"] * 2


def _tiles_computed(rank: int, group: Any, exchange: str) -> tuple[int, int]:
    """Tiles of logits that a rank computes forward and backward."""
    real, seen = Eager._tile, []

    def counted(*given: Any) -> Any:
        seen.append(1)
        return real(*given)

    Eager._tile = counted
    try:
        q, k = (torch.eye(5, 7).double().requires_grad_() for _ in range(2))
        value = SigLipLoss(exchange=exchange, group=group)(q, k, 5.0, -2.0)
        forward = len(seen)
        value.backward()
        return forward, len(seen) - forward
    finally:
        Eager._tile = real


@pytest.mark.parametrize(("exchange", "blocks"), [("replicate", 1), ("gather", 1), ("ring", 3)])
def test_a_pairwise_loss_computes_each_pair_once(pool: Pool, exchange: str, blocks: int) -> None:
    answers = pool.run(_tiles_computed, 3, exchange)
    assert answers == [(blocks, 0)] * 3


def _spoiled(
    rank: int, group: Any, loss: PairLoss, spoiled: int | None, number: float, how: dict[str, Any]
) -> list[Tensor]:
    """The loss and all gradients on a rank, where one of the ranks has one number that is not finite."""
    generator = torch.Generator().manual_seed(rank)
    # the last rank has no rows, unless it is the one
    rows = [5, 4, 3 if spoiled == 2 else 0][rank]
    q, k = (torch.randn(rows, 7, generator=generator) for _ in range(2))
    if rank == spoiled:
        (q, k)[rank % 2][-1, 3] = number
    leaves = [x.requires_grad_() for x in (q, k, torch.tensor(5.0), torch.tensor(-2.0))]
    # Triton's interpreter computes with NumPy, which warns
    with np.errstate(all="ignore"):
        value = contrast(q, k, scale=leaves[2], bias=leaves[3], loss=loss, group=group, **how)
        gradients = torch.autograd.grad(value.sum(), leaves)
    # the softmax does not depend on a bias; a rank without rows adds nothing to what the wrapper sums of the scalars
    scalars = (2 if loss.uses_bias else 1) if rows else 0
    return [value.detach(), *gradients[: 2 + scalars]]


# an exchange passes on what a backend made, whichever it is
@pytest.mark.parametrize(
    ("backend", "exchange"), [*(("eager", exchange) for exchange in EXCHANGES), ("triton", "ring")]
)
@pytest.mark.parametrize("loss", [Softmax(symmetric=True), Sigmoid()], ids=["softmax", "sigmoid"])
def test_what_is_not_finite_on_one_rank_makes_all_nan(pool: Pool, loss: PairLoss, backend: str, exchange: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    how = {"exchange": exchange, "backend": backend}
    # kernels in the interpreter take their time, and what they make of finite numbers is seen above
    if backend == "eager":
        for found in pool.run(_spoiled, 3, loss, None, 0.0, how):
            assert all(bool(x.isfinite().all()) for x in found)
    for spoiled, number in ((1, torch.inf), (0, torch.nan), (2, torch.nan))[: 1 if backend == "triton" else 3]:
        for found in pool.run(_spoiled, 3, loss, spoiled, number, how):
            assert all(bool(x.isnan().all()) for x in found)


def test_agreements_wait_for_no_work_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that they launch, and read, is on a stream of its own."""
    depth, depths = [0], []

    @contextmanager
    def own_stream(device: torch.device) -> Iterator[None]:
        depth[0] += 1
        yield
        depth[0] -= 1

    def gather(everyone: Tensor, mine: Tensor, group: Any) -> None:
        depths.append(depth[0])
        everyone.copy_(mine.repeat(2))

    monkeypatch.setattr(consistency, "size", lambda group: 2)
    monkeypatch.setattr(consistency, "_own_stream", own_stream)
    monkeypatch.setattr(consistency, "Collective", lambda *_: nullcontext())
    monkeypatch.setattr(consistency, "_carrier", lambda group: (group, torch.device("cpu")))
    # of ranks on several hosts
    monkeypatch.setattr(consistency, "_page", lambda *_: None)
    monkeypatch.setattr(consistency, "all_gather", gather)
    assert consistency.most(3, None) == 3
    assert consistency.tally(None, {"loss": "clip"}, (4, 5)) == [[4, 5], [4, 5]]
    assert depths == [1, 1]


@pytest.mark.parametrize("loss", [Softmax(symmetric=True), Sigmoid()], ids=["softmax", "sigmoid"])
def test_nor_are_single_rows_spared(pool: Pool, loss: PairLoss) -> None:
    for found in pool.run(_spoiled, 3, loss, 1, torch.nan, {"exchange": "ring", "reduction": "none"}):
        assert all(bool(x.isnan().all()) for x in found)
