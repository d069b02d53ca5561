"""Token vectors across ranks: other numbers of rows and other lengths on each rank equal one process in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from problems import distance
from ranks import Pool
from refusals import refusal, unlike
from torch import Tensor, nn

from contrastile import ScoreDistillLoss, contrast, encode
from contrastile.engine import plan
from contrastile.exchange import host
from contrastile.losses import Softmax
from contrastile.scorers import MaxSim

# rows, keys, tokens of a row, tokens of a key on each rank; one has no rows, and more tokens than any other
SHARES = {1: [(4, 6, 3, 5)], 2: [(3, 4, 2, 7), (2, 3, 5, 3)], 3: [(3, 3, 2, 7), (0, 0, 9, 9), (2, 4, 4, 3)]}
D = 4


class Tower(nn.Module):
    """A vector for each token, behind one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(30, 6)
        self.project = nn.Linear(6, D)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.project(torch.tanh(self.words(input_ids))), attention_mask.bool()


def texts(n: int, length: int, seed: int, masked: bool) -> dict[str, Tensor]:
    """Texts of which some have padding, or none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (n, length), generator=generator)
    lengths = torch.randint(0, length + 1, (n, 1), generator=generator)
    lengths[: 1 if masked else n] = length
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths).long()}


def loss_of(model: Tower, query: dict[str, Tensor], key: dict[str, Tensor], masked: bool, **how: Any) -> Tensor:
    """InfoNCE of token vectors behind the cache, in sub-batches that are trimmed to their own lengths."""
    sides = [encode(model, side, sub_batch_tokens=2 * side["input_ids"].shape[1]) for side in (query, key)]
    # without a mask every token counts
    rows, cols = sides if masked else [vectors for vectors, _ in sides]
    positives = torch.arange(len(query["input_ids"]))
    return contrast(rows, cols, scorer=MaxSim(), loss=Softmax(), positives=positives, scale=1.5, **how)


def on_a_rank(rank: int, group: Any, shares: list[tuple[int, ...]], masked: bool, exchange: str) -> Any:
    N, M, L, J = shares[rank]
    model = Tower().double()
    query, key = texts(N, L, rank, masked), texts(M, J, 10 + rank, masked)
    on_host = exchange == "host"
    with (
        mock.patch.object(plan, "waits_on_host", return_value=on_host),
        mock.patch.object(host, "cut", return_value=host.Cut(2, 3)),
    ):
        loss = loss_of(model, query, key, masked, group=group, exchange="ring" if on_host else exchange)
        loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def joined(sides: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """All ranks' texts in one process, padded by hand."""
    longest = max(side["input_ids"].shape[1] for side in sides)

    def pad(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, longest - x.shape[1]))

    names = ("input_ids", "attention_mask")
    ids, mask = (torch.cat([pad(side[name]) for side in sides]) for name in names)
    return ids, mask.bool()


@pytest.mark.parametrize("W", SHARES)
@pytest.mark.parametrize(
    ("masked", "exchange"), [(True, "gather"), (True, "ring"), (False, "ring"), (False, "auto"), (True, "host")]
)
def test_ranks_with_other_numbers_of_tokens_equal_one_process(pool: Pool, W: int, masked: bool, exchange: str) -> None:
    shares = SHARES[W]
    model, parts = Tower().double(), [
        (texts(N, L, rank, masked), texts(M, J, 10 + rank, masked)) for rank, (N, M, L, J) in enumerate(shares)
    ]  # fmt: skip
    (q_ids, q_mask), (k_ids, k_mask) = (joined(list(sides)) for sides in zip(*parts, strict=True))
    (q, asking), (k, answering) = model(q_ids, q_mask), model(k_ids, k_mask)
    similar = torch.einsum("ild,jmd->ijlm", q, k).masked_fill(~answering[None, :, None], -torch.inf)
    best = similar.amax(3).masked_fill(~answering.any(1)[None, :, None], 0.0)
    x = 1.5 * (best * asking[:, None]).sum(2)
    starts = torch.tensor([0, *(M for _, M, _, _ in shares)]).cumsum(0)
    positives = torch.cat([start + torch.arange(share[0]) for start, share in zip(starts[:-1], shares, strict=True)])
    truth = nn.functional.cross_entropy(x, positives)
    truth.backward()
    answers = pool.run(on_a_rank, W, shares, masked, exchange)
    assert all(distance(loss, truth.detach()) <= 1e-12 for loss, _ in answers)
    for index, parameter in enumerate(model.parameters()):
        mean = torch.stack([gradients[index] for _, gradients in answers]).mean(0)
        assert distance(mean, parameter.grad) <= 1e-12


def other_features(rank: int, group: Any) -> str:
    return refusal(contrast, *torch.zeros(2, 3, 4, 5 + rank), scorer=MaxSim(), group=group)


def test_ranks_with_vectors_of_other_sizes_are_refused(pool: Pool) -> None:
    sentence = unlike("features", ["[5] torch.float32", "[] torch.bool"], ["[6] torch.float32", "[] torch.bool"])
    assert pool.run(other_features, 2) == [sentence] * 2


def _misshapen(rank: int, group: Any, name: str) -> str:
    fit, other = torch.zeros(3, 2, 4), (torch.zeros(3, 2, 4), torch.ones(3, 2))
    sides = {"q": fit, "k": fit, "negatives": fit} | {name: other if rank == 1 else fit}
    return refusal(contrast, **sides, loss=Softmax(), scorer=MaxSim(), group=group)


@pytest.mark.parametrize("name", ["q", "k", "negatives"])
def test_an_error_names_the_side_whose_mask_is_wrong(pool: Pool, name: str) -> None:
    first, second = pool.run(_misshapen, 2, name)
    assert first == second
    assert first.startswith(f"rank 1: `{name}` must be token vectors")


class Projected(nn.Module):
    """MaxSim of projected tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.project, self.score = nn.Linear(D, 3), MaxSim()

    def forward(self, rows: Any, columns: Any) -> Tensor:
        return self.score(*[(self.project(vectors), mask) for vectors, mask in (rows, columns)])


def lists_of(rank: int, N: int, M: int) -> tuple[Any, Any, Tensor, Tensor]:
    """Queries and keys of token vectors, a teacher's scores, and lists of which one is shorter than the others."""
    generator = torch.Generator().manual_seed(20 + rank)
    vectors = [torch.randn(n, L, D, generator=generator, dtype=torch.float64) for n, L in ((N, 3), (M, 5))]
    masks = [torch.arange(x.shape[1]) < torch.tensor([[2 + n % 2] for n in range(len(x))]).view(-1, 1) for x in vectors]
    scores = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    lists = torch.randint(0, max(M, 1), (N, 3), generator=generator)
    lists[:1, 2] = -1
    query, key = ((x.requires_grad_(), mask) for x, mask in zip(vectors, masks, strict=True))
    return query, key, scores, lists


def distilled(rank: int, group: Any, sizes: list[tuple[int, int]], kind: Any) -> Any:
    query, key, scores, lists = lists_of(rank, *sizes[rank])
    scorer = Projected().double()
    loss = ScoreDistillLoss(kind=kind, group=group)(query, key, scores, 1.5, lists=lists, scorer=scorer)
    loss.backward()
    return loss.detach(), query[0].grad, key[0].grad, [parameter.grad for parameter in scorer.parameters()]


@pytest.mark.parametrize("sizes", [[(3, 4)], [(3, 4), (2, 5)], [(2, 3), (0, 2), (3, 3)]])
@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_a_teachers_scores_are_distilled_into_a_scorer(pool: Pool, kind: str, sizes: list[tuple[int, int]]) -> None:
    scorer, terms, sides = Projected().double(), [], []
    for rank, (N, M) in enumerate(sizes):
        query, key, scores, lists = lists_of(rank, N, M)
        sides.append((query[0], key[0]))
        x = 1.5 * scorer(query, key)
        for i in range(N):
            some = lists[i][lists[i] >= 0]
            student, teacher = x[i, some], scores[i, : len(some)]
            if kind == "kl":
                log_p, log_t = student.log_softmax(0), teacher.log_softmax(0)
                terms.append((log_t.exp() * (log_t - log_p)).sum())
            else:
                terms.append(((student[0] - student[1:]) - (teacher[0] - teacher[1:])).square().mean())
    truth = torch.stack(terms).mean()
    truth.backward()
    answers, W = pool.run(distilled, len(sizes), sizes, kind), len(sizes)
    for (loss, of_query, of_key, _), (query, key) in zip(answers, sides, strict=True):
        assert distance(loss, truth.detach()) <= 1e-12
        for gradient, x in ((of_query, query), (of_key, key)):
            torch.testing.assert_close(gradient / W, x.grad if x.grad is not None else torch.zeros_like(x))
    for index, parameter in enumerate(scorer.parameters()):
        mean = torch.stack([0 * parameter if own[index] is None else own[index] for *_, own in answers]).mean(0)
        assert torch.allclose(mean, parameter.grad, rtol=1e-12, atol=1e-14)


def test_lists_of_token_vectors_need_no_indices_and_are_checked() -> None:
    query, key, scores, lists = lists_of(0, 3, 4)
    loss, scorer = ScoreDistillLoss(), MaxSim()
    lists = lists.clamp(min=0)
    own = key[0][lists], key[1][lists]
    torch.testing.assert_close(
        loss(query, own, scores, scorer=scorer), loss(query, key, scores, lists=lists, scorer=scorer)
    )
    for words, sentence in (
        ((query, [key[0][:, 0, 0]], scores), "`key` must be made of tensors [N, P, ...], or [M, ...]; got [[4]]. As"),
        ((query, (own[0][:2], own[1][:2]), scores), "`key` must have a list for each `query`; got 2 and 3. Or pass"),
        (([], own, scores), "`query` must be made of tensors [N, ...]; got none. As the scorer reads them."),
        ((query, own, scores[:, :2]), "`scores` must be floating point of shape [3, 3], one for each listed key; got"),
    ):
        assert refusal(loss, *words, scorer=scorer).startswith(sentence)
    with pytest.raises(ValueError, match=r"`lists` must have two dimensions \[N, P\]; got shape \[3\]"):
        loss(query, key, scores, lists=lists[:, 0], scorer=scorer)
