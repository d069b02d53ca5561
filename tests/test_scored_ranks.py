"""A learned distance across ranks equals one process: Ω's gradients follow the same convention as all others."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from gradient_table import shard
from problems import distance, joined_options, problems_of
from ranks import Pool
from refusals import refusal, unlike
from scored import KINDS, by_tiles, gradients, leaves, numbers, scorer, sides
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from contrastile import ScoreDistillLoss, contrast, encode
from contrastile.distributed import collectives
from contrastile.engine import plan
from contrastile.exchange import host
from contrastile.losses import Sigmoid
from contrastile.scorers import Bilinear, MaxSim, PairMLP

EXCHANGES = ["replicate", "gather", "ring"]
SHARES = {1: [(13, 13)], 2: [(9, 9), (4, 4)], 3: [(8, 8), (0, 0), (11, 11)], 4: [(6, 9), (7, 7), (2, 5), (6, 6)]}


def _on_a_rank(
    rank: int, group: Any, name: str, kind: str, shares: list[tuple[int, int]], how: dict[str, Any]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The loss, the gradients of this rank's features, and those of what all ranks share."""
    problem = problems_of(name, shares)[rank]
    module, (rows, cols), named = scorer(kind, problem.same), sides(kind, problem, seed=rank), numbers(problem)
    own, shared = leaves(rows, cols), [p for n, p in module.named_parameters() if "unused" not in n]
    on_host = how["exchange"] == "host"
    with (
        mock.patch.object(plan, "waits_on_host", return_value=on_host),
        mock.patch.object(host, "cut", return_value=host.Cut(3, 4)),
    ):
        how |= {"exchange": "ring"} if on_host else {}
        loss = by_tiles(problem, module, rows, cols, named, group=group, **how)
        found = gradients(loss, own, shared, named.values())
    return loss.detach(), found[: len(own)], found[len(own) :]


def _whole(name: str, kind: str, shares: list[tuple[int, int]]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The same batch in one process."""
    problems = problems_of(name, shares)
    first = problems[0]
    parts = [sides(kind, problem, seed=rank) for rank, problem in enumerate(problems)]
    rows, cols = (pytree.tree_map(_joined, *each) for each in zip(*parts, strict=True))
    if first.same:
        cols = rows
    module, named = scorer(kind, first.same), numbers(first)
    own, shared = leaves(rows, cols), [p for n, p in module.named_parameters() if "unused" not in n]
    loss = contrast(rows, cols, scorer=module, **named, **joined_options(problems))
    found = gradients(loss, own, shared, named.values())
    return loss.detach(), found[: len(own)], found[len(own) :]


def _joined(*parts: Tensor | None) -> Tensor | None:
    if parts[0] is None:
        return None
    whole = torch.cat([part.detach() for part in parts if part is not None])
    return whole.requires_grad_(parts[0].requires_grad)


# every scorer, loss and exchange on three ranks, one of them without rows; a few on other numbers of ranks, each with
# an exchange of its own
FEW = [("clip_ids_weights_smoothing", "projected"), ("info_nce", "mlp"), ("siglip", "mlp")]
MANY = [
    *(("clip_ids_weights_smoothing", kind) for kind in KINDS if kind != "projected"),
    ("info_nce_everything", "projected"),
    ("sup_con", "bilinear"),
    ("nt_xent", "maxsim"),
]


@pytest.mark.parametrize(
    ("name", "kind", "W", "exchange", "gradient"),
    [
        *((*which, 3, exchange, "mean") for which in (*MANY, *FEW) for exchange in EXCHANGES),
        *((*which, W, exchange, "mean") for which, exchange in zip(FEW, EXCHANGES, strict=True) for W in (1, 2, 4)),
        # features in host memory
        *((*which, 3, "host", gradient) for which, gradient in zip(FEW, ("mean", "sum", "mean"), strict=True)),
        *((*which, 3, exchange, "sum") for which, exchange in zip(FEW, EXCHANGES, strict=True)),
    ],
)
def test_as_one_process(pool: Pool, name: str, kind: str, W: int, exchange: str, gradient: str) -> None:
    shares = SHARES[W]
    if name in ("info_nce_everything", "nt_xent"):
        shares = [(N or 2, M or 2) for N, M in shares]
    if not name.startswith("info_nce"):
        shares = [(N, N) for N, _ in shares]
    truth, own, shared = _whole(name, kind, shares)
    answers = pool.run(_on_a_rank, W, name, kind, shares, {"exchange": exchange, "gradient": gradient})
    divisor = W if gradient == "mean" else 1
    assert all(distance(loss, truth) <= 1e-12 for loss, _, _ in answers)
    for index, true in enumerate(own):
        assert _close(torch.cat([features[index] for _, features, _ in answers]) / divisor, true)
    for index, true in enumerate(shared):
        assert _close(torch.stack([others[index] for _, _, others in answers]).sum(0) / divisor, true)


def _close(x: Tensor, truth: Tensor) -> bool:
    """To 1e-12; a bias of the scores cancels in a softmax, and leaves noise."""
    return float((x - truth).norm()) <= 1e-12 * float(truth.norm()) + 1e-14


def _tiles(rank: int, group: Any) -> int:
    """How often the scorer is called for pairs of which the second rank has none."""
    calls, features = [], torch.randn(2, [8, 0, 11][rank], 4)
    module = PairMLP(4, 4, hidden=3)
    module.register_forward_hook(lambda *_: calls.append(1))
    contrast(*features, scorer=module, scale=2.0, exchange="replicate", group=group).backward()
    return len(calls)


def test_a_rank_without_rows_computes_tiles_as_large_as_the_others(pool: Pool) -> None:
    assert len(set(pool.run(_tiles, 3))) == 1


class Model(nn.Module):
    """Towers, a scorer and the loss in one module, as a wrapper wants it."""

    def __init__(self, group: Any, exchange: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.image, self.text = nn.Linear(5, 4), nn.Linear(6, 4)
        self.scorer = PairMLP(4, 4, hidden=3)
        self.how = {"group": group, "exchange": exchange}

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        features = encode(self.image, images, sub_batch=2), encode(self.text, texts, sub_batch=3)
        return contrast(*features, scorer=self.scorer, scale=2.0, **self.how)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return tuple(torch.randn(12, D, generator=generator, dtype=torch.float64) for D in (5, 6))


def _wrapped(rank: int, group: Any, exchange: str, how: str) -> list[Tensor]:
    model: Any = Model(group, exchange).double()
    model = shard(model, group) if how == "FSDP2" else DistributedDataParallel(model, process_group=group)
    images, texts = (x.split([5, 3, 4])[rank] for x in _batch())
    model(images, texts).backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


@pytest.mark.parametrize("how", ["DistributedDataParallel", "FSDP2"])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_under_a_wrapper_every_rank_has_the_gradient_of_one_process(pool: Pool, exchange: str, how: str) -> None:
    whole = Model(None, "single").double()
    whole(*_batch()).backward()
    for answer in pool.run(_wrapped, 3, exchange, how):
        for (name, parameter), gradient in zip(whole.named_parameters(), answer, strict=True):
            assert _close(gradient, parameter.grad), name


def _slopes(rank: int, group: Any, exchange: str, name: str) -> list[tuple[float, float]]:
    """For each parameter, along one direction: the gradient's slope, and that of the loss with the same numbers."""
    model = Model(group, exchange).double()
    model.scorer.dropout.p = 0.4
    images, texts = (x.split([5, 0, 7])[rank] for x in _batch())

    def loss() -> Tensor:
        torch.manual_seed(10 + rank)
        # tiles of two rows and columns: many to be drawn again
        with mock.patch.object(plan, "fitting_side", return_value=2):
            features = encode(model.image, images, sub_batch=2), encode(model.text, texts, sub_batch=3)
            how = {"loss": Sigmoid(), "bias": -1.0} if name == "sigmoid" else {}
            return contrast(*features, scorer=model.scorer, scale=2.0, group=group, exchange=exchange, **how)

    loss().backward()
    slopes, step = [], 1e-6
    for parameter in model.parameters():
        gradient = collectives.total(parameter.grad, group) / 3
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=parameter.dtype)
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        slopes.append((float((gradient * direction).sum()), float(above - below) / (2 * step)))
    return slopes


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_dropout_is_replayed_on_every_rank(pool: Pool, exchange: str, name: str) -> None:
    for slopes in pool.run(_slopes, 3, exchange, name):
        assert all(found == pytest.approx(true, abs=1e-7) for found, true in slopes)
        assert max(abs(true) for _, true in slopes) > 1e-2


class Read(nn.Module):
    """Early interaction of token ids [B, L], of any type of whole numbers or truth values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(7, 3)

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.table(rows.int()).mean(1) @ self.table(columns.int()).mean(1).T


def _read(rank: int, group: Any, exchange: str, dtype: torch.dtype, shares: list[int]) -> tuple[Tensor, Tensor]:
    module = Read().double()
    rows, cols = (x.split(shares)[rank] for x in _tokens(dtype, sum(shares)))
    loss = contrast(rows, cols, scorer=module, group=group, exchange=exchange)
    loss.backward()
    return loss.detach(), module.table.weight.grad


def _tokens(dtype: torch.dtype, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    most = 2 if dtype == torch.bool else 7
    return tuple(torch.randint(most, (n, L), generator=generator).to(dtype) for L in (4, 3))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64], ids=str)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_numbers_of_every_type_travel(pool: Pool, exchange: str, dtype: torch.dtype) -> None:
    """Also those that a backend does not know."""
    shares = [3, 0, 5]
    module = Read().double()
    loss = contrast(*_tokens(dtype, sum(shares)), scorer=module)
    loss.backward()
    answers = pool.run(_read, 3, exchange, dtype, shares)
    assert all(distance(found, loss.detach()) <= 1e-12 for found, _ in answers)
    assert distance(torch.stack([gradient for _, gradient in answers]).mean(0), module.table.weight.grad) <= 1e-12


class Projected(Bilinear):
    """The same parameters, and other scores."""


def _stated(name: str, modules: int, dtype: str = "float32", training: int | None = None) -> str:
    of = modules if training is None else training
    return f"scores of torch.{dtype}, {name}, {of} of {modules} modules in training"


def _sentence(rank: int, group: Any, kind: str) -> str:
    q, module = torch.ones(3, 4), Bilinear(4, 4)
    how: dict[str, Any] = {}
    k = None
    if kind in ("key dtype", "scores"):
        module, q = Read(), torch.ones(3, 4, dtype=torch.int64)
    if kind == "key dtype" and rank == 1:
        k = q.int()
    if kind == "scores" and rank == 1:
        module = module.double()
    if kind == "one":
        # nothing else would tell them apart
        module, how = (module.requires_grad_(False) if rank == 1 else None), {"scale": 1.0}
    if kind == "class" and rank == 1:
        module = Projected(4, 4)
    if kind == "mode":
        module.train(rank == 0)
    if kind == "normalize":
        q, module = torch.ones(3, 2, 4), MaxSim(normalize=rank == 1)
    if kind == "shapes" and rank == 1:
        q, module = torch.ones(3, 5), Bilinear(5, 5)
    if kind == "random":
        module, how = PairMLP(4, 4, hidden=3, dropout=0.5), {"exchange": "replicate"}
    if kind == "wrapped":
        module = DistributedDataParallel(module, process_group=group)
    if kind == "sharded":
        module = nn.Sequential(fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu")))
    return refusal(contrast, q, q if k is None else k, scorer=module, group=group, **how)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("shapes", unlike("features", 4, 5)),
        ("key dtype", unlike("key dtype", "torch.int64", "torch.int32")),
        ("scores", unlike("scorer", _stated("Read", 2), _stated("Read", 2, "float64"))),
        ("one", unlike("scorer", None, _stated("Bilinear", 1))),
        ("class", unlike("scorer", _stated("Bilinear", 1), _stated("Projected", 1))),
        ("mode", unlike("scorer", _stated("Bilinear", 1), _stated("Bilinear", 1, training=0))),
        (
            "normalize",
            unlike("scorer", "scores of torch.float32, MaxSim", "scores of torch.float32, MaxSim, normalize=True"),
        ),
        (
            "random",
            "`exchange` must compute each pair once if the scorer draws random numbers; got replicate. Take gather or "
            "ring, or put the scorer in eval mode.",
        ),
        (
            "wrapped",
            "rank 0: `scorer` must be a module of its own; got DistributedDataParallel. Wrap the model that holds the "
            "scorer and calls `contrast` in its forward.",
        ),
        (
            "sharded",
            "rank 0: `scorer` must be a module of its own; got FSDPBilinear. Wrap the model that holds the scorer and "
            "calls `contrast` in its forward.",
        ),
    ],
)
def test_each_error_has_its_sentence(pool: Pool, kind: str, sentence: str) -> None:
    assert pool.run(_sentence, 2, kind) == [sentence] * 2


class Pairwise(nn.Module):
    """A cross-encoder as one writes it, which cannot tell the shape of no pairs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.read = nn.Linear(8, 3)

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        shape = len(rows), len(columns)
        pairs = torch.cat([rows.repeat_interleave(shape[1], 0), columns.repeat(shape[0], 1)], dim=1)
        return self.read(pairs).view(*shape, -1).amax(-1)


def _pairwise(rank: int, group: Any, exchange: str) -> float:
    n = [3, 0, 5][rank]
    x = torch.zeros(n, 4)
    return contrast(x, x, scorer=Pairwise(), group=group, exchange=exchange).item()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_scorer_never_sees_a_block_of_nothing(pool: Pool, exchange: str) -> None:
    """Also on a rank without rows."""
    assert pool.run(_pairwise, 3, exchange) == [pytest.approx(math.log(8))] * 3


class Broken(Bilinear):
    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        raise RuntimeError("no such table")


def _broken(rank: int, group: Any, everywhere: bool) -> tuple[str, float]:
    q, found = torch.zeros(3, 4), "nothing was wrong"
    try:
        contrast(q, q, scorer=Broken(4, 4) if everywhere or rank == 1 else Bilinear(4, 4), group=group)
    except (RuntimeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
    return found, contrast(q, q, scale=1.0, group=group).item()


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_error_of_a_scorer_when_it_is_looked_at_is_told_to_all(pool: Pool, everywhere: bool) -> None:
    """Nobody waits for the rank that has it, and the next step is as good as any."""
    own = "RuntimeError: no such table"
    others = own if everywhere else f"ValueError: rank 1: {own}"
    answers = pool.run(_broken, 3, everywhere)
    assert [found for found, _ in answers] == [others, own, others]
    assert all(value == pytest.approx(math.log(9)) for _, value in answers)


def _of_lists(rank: int, group: Any, dtype: torch.dtype) -> tuple[float, Tensor | None]:
    """The loss, and the gradient of the scorer, where the second rank has no query."""
    torch.manual_seed(0)
    module, n = Bilinear(4, 4).to(dtype), 0 if rank == 1 else 3
    query, key, scores = torch.randn(n, 4, dtype=dtype), torch.randn(n, 2, 4, dtype=dtype), torch.randn(n, 2)
    loss = ScoreDistillLoss(group=group)(query, key, scores, scorer=module)
    loss.backward()
    return float(loss.detach()), module.weight.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_rank_without_lists_has_the_dtype_and_the_parameters_of_the_others(pool: Pool, dtype: torch.dtype) -> None:
    (loss, gradient), (same_loss, zeros) = pool.run(_of_lists, 2, dtype)
    assert loss == same_loss
    assert gradient.any()
    # a wrapper waits for it
    assert torch.equal(zeros, torch.zeros_like(gradient))


def _of_other_lists(rank: int, group: Any, kind: str) -> str:
    module: Any = Bilinear(4, 4).requires_grad_(False)
    if kind == "class" and rank == 1:
        module = Projected(4, 4).requires_grad_(False)
    if kind == "mode":
        module.train(rank == 0)
    if kind == "function" and rank == 1:
        module = module.forward
    query = torch.ones(3, 2, 4) if kind == "normalize" else torch.ones(3, 4)
    if kind == "normalize":
        module = MaxSim(normalize=rank == 1)
    key = query[:, None].expand(3, 2, *query.shape[1:])
    if kind == "one" and rank == 1:
        module, query, key = None, torch.ones(3, 1), torch.ones(3, 2, 1)
    return refusal(ScoreDistillLoss(group=group), query, key, torch.ones(3, 2), scorer=module)


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        ("class", "Bilinear, 1 of 1 modules in training", "Projected, 1 of 1 modules in training"),
        ("mode", "Bilinear, 1 of 1 modules in training", "Bilinear, 0 of 1 modules in training"),
        ("function", "Bilinear, 1 of 1 modules in training", "method"),
        ("normalize", "MaxSim", "MaxSim, normalize=True"),
        ("one", "Bilinear, 1 of 1 modules in training", None),
    ],
)
def test_ranks_compare_the_scorers_of_their_lists(pool: Pool, kind: str, own: str, other: str | None) -> None:
    assert pool.run(_of_other_lists, 2, kind) == [unlike("scorer", own, other)] * 2
