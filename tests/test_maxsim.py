"""Late interaction: on a CPU against plain autograd, and in fused kernels, interpreted, against that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counted import Counted
from problems import distance
from ranks import Pool
from refusals import refusal
from scored import PROBLEMS, by_formula, by_tiles, gradients, leaves, numbers, scorer, sides
from torch import Tensor

pytest.importorskip("triton")

from contrastile import Ragged, contrast, scorers
from contrastile._dispatch import LEAST_WORKSPACE
from contrastile.engine import plan
from contrastile.exchange import host
from contrastile.gradcache.memory import footprint
from contrastile.losses import Softmax, SoftmaxInside
from contrastile.scorers import Bilinear, MaxSim
from contrastile.tiles.triton import launch
from contrastile.tiles.triton.kernels import maxsim_lists, maxsim_maxima
from contrastile.tiles.triton.maxsim import block as maxsim
from contrastile.tiles.triton.maxsim import late
from contrastile.tiles.triton.maxsim import plan as maxsim_plan
from contrastile.tiles.triton.maxsim.block import Documents, Entries
from contrastile.tiles.triton.maxsim.late import FusedMaxSim
from contrastile.tiles.triton.maxsim.plan import Tiling

# queries, documents, tokens of each, features
SHAPES = [(5, 6, 6, 20, 16), (3, 4, 33, 33, 24), (2, 3, 40, 3, 9)]
# largest error over the norm of what is computed: float32 sums, and weights of documents rounded to fp16
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


def _naive(q: Tensor, k: Tensor, asking: Tensor | None, answering: Tensor | None) -> Tensor:
    similar = torch.einsum("ild,jmd->iljm", q, k)
    if answering is not None:
        similar = similar.masked_fill(~answering, -torch.inf)
    best = similar.max(-1).values.nan_to_num(neginf=0.0)
    return (best if asking is None else best * asking[:, :, None]).sum(1)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_a_cpu_holds_a_part_of_the_similarities(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    monkeypatch.setattr(scorers, "ROWS", 7)
    monkeypatch.setattr(scorers, "COLUMNS", 50)
    shape = SHAPES[0]
    N, J, L, M, D = shape
    masks = _masks(shape, masked)
    pair = [torch.randn(n, length, D, dtype=torch.float64).requires_grad_() for n, length in ((N, L), (J, M))]
    g = torch.randn(N, J, dtype=torch.float64)
    results = []
    for scores in (_naive(*pair, *masks), MaxSim()((pair[0], masks[0]), (pair[1], masks[1]))):
        results.append([scores.detach(), *torch.autograd.grad(scores, pair, g)])
    assert all(distance(x, true) <= 1e-12 for true, x in zip(*results, strict=True))
    with torch.no_grad():
        assert torch.equal(MaxSim()((pair[0], masks[0]), (pair[1], masks[1])), results[1][0])


def test_without_a_graph_a_cpu_keeps_no_winners() -> None:
    q, k = (torch.randn(3, length, 4, requires_grad=True) for length in (4, 5))
    # the first call measures a tile with its graph
    contrast(q, k, scorer=MaxSim())
    with Counted() as counted:
        contrast(q, k, scorer=MaxSim())
        with torch.no_grad():
            MaxSim()(q, k)
    assert (counted.ran["amax"] > 1, counted.ran["max"]) == (True, 0)


def test_a_tile_is_measured_once_for_all_modules_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_plans", {})
    q, k = (torch.randn(3, length, 11) for length in (7, 13))
    contrast(q, k, scorer=MaxSim())
    with Counted() as counted:
        # another signature, planned anew
        contrast(q, k, scorer=MaxSim(), weights=torch.ones(3))
    # the product of the one tile, and an empty one that shows its dtype
    assert counted.multiplications == 3 * 7 * 11 * 3 * 13


@pytest.mark.parametrize("normalize", [False, True])
def test_padding_may_hold_anything_on_a_cpu(normalize: bool) -> None:
    pair = [torch.randn(3, length, 4, dtype=torch.float64).requires_grad_() for length in (4, 5)]
    masks = [torch.rand(3, length) < 0.5 for length in (4, 5)]
    for mask in masks:
        mask[0] = False
    g, scorer = torch.randn(3, 3, dtype=torch.float64), MaxSim(normalize=normalize)

    def results(padding: float) -> list[Tensor]:
        sides = [x.masked_fill(~mask[..., None], padding) for x, mask in zip(pair, masks, strict=True)]
        scores = scorer(*zip(sides, masks, strict=True))
        loss = contrast(*zip(sides, masks, strict=True), scorer=scorer)
        return [scores, loss, *torch.autograd.grad((scores * g).sum() + loss, pair)]

    for poison in (torch.nan, torch.inf):
        for clean, poisoned in zip(results(0.0), results(poison), strict=True):
            assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("lengths", [(0, 3), (2, 0), (0, 0)])
def test_sides_without_tokens_score_0(lengths: tuple[int, int]) -> None:
    pair = [torch.randn(3, length, 4, requires_grad=True) for length in lengths]
    assert torch.equal(MaxSim()(*pair), torch.zeros(3, 3))
    loss = contrast(*pair, scorer=MaxSim(), loss=Softmax())
    torch.testing.assert_close(loss.detach(), torch.tensor(3.0).log())
    assert all(not of_side.any() for of_side in torch.autograd.grad(loss, pair))


def test_positives_in_the_denominator_alone_by_kernels() -> None:
    pair = [torch.randn(5, 2, 8, requires_grad=True) for _ in range(2)]
    results = [
        gradients(contrast(*pair, scorer=MaxSim(), loss=SoftmaxInside(), backend=name), pair)
        for name in ("eager", "triton")
    ]
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-6)


def test_a_mask_of_floats_packs_nothing() -> None:
    """Of an additive mask 0 says that a token counts."""
    rule, got = "must be true or false for each vector [B, L]", "torch.float32 of shape [2, 3] for vectors [2, 3, 4]"
    sentence = f"`mask` {rule}; got {got}. Pass attention_mask.bool(), say."
    assert refusal(Ragged.of, torch.randn(2, 3, 4), torch.zeros(2, 3)) == sentence


def test_a_cpu_takes_a_tenth_of_the_plain_formulas_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # in proportion to a problem that takes no time
    monkeypatch.setattr(scorers, "ROWS", 256)
    q, k = torch.randn(48, 32, 16, requires_grad=True), torch.randn(48, 64, 16, requires_grad=True)

    def step(loss: Tensor) -> None:
        torch.autograd.grad(loss, (q, k))

    plain = footprint(lambda: step(_naive(q, k, None, None).sum()))
    tiled = footprint(lambda: step(contrast(q, k, scorer=MaxSim())))
    assert tiled <= plain / 10


def test_packed_tokens_as_a_padded_side() -> None:
    values, lengths = torch.randn(9, 4, dtype=torch.float64, requires_grad=True), torch.tensor([2, 0, 4, 3])
    vectors, mask = scorers.padded(values, lengths)
    expected = torch.nn.utils.rnn.pad_sequence(values.split(lengths.tolist()), batch_first=True)
    assert torch.equal(vectors, expected)
    assert mask.sum(1).tolist() == lengths.tolist()
    g = torch.randn_like(expected)
    assert torch.equal(*(torch.autograd.grad(x, values, g, retain_graph=True)[0] for x in (vectors, expected)))
    assert scorers.padded(values, lengths, 6)[0].shape == (4, 6, 4)
    with pytest.raises(ValueError, match=r"`lengths` must add up to the rows of `values`; got 5 and 9\. List one"):
        scorers.padded(values, torch.tensor([2, 3]))
    with pytest.raises(
        ValueError, match=r"`values` must be packed tokens \[T, D\], with integer lengths \[B\]; got sh"
    ):
        scorers.padded(values, torch.ones(4))


def test_vectors_that_are_as_long_are_not_copied_to_be_padded() -> None:
    vectors, mask = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    scorer = MaxSim()
    assert scorer.pad_tokens(vectors)[0] is scorer.pad_tokens((vectors, mask), 3)[0] is vectors
    longer = scorer.pad_tokens((vectors, mask), 5)
    assert [list(x.shape) for x in longer] == [[2, 5, 4], [2, 5]]
    assert not longer[1][:, 3:].any()


def test_a_second_derivative_is_that_of_the_formula() -> None:
    pair = [torch.randn(2, length, 4, dtype=torch.float64, requires_grad=True) for length in (3, 5)]
    assert torch.autograd.gradgradcheck(lambda q, k: MaxSim()(q, k), pair)


WAYS = ["module", "symmetric", "negatives", "packed", "host", "compiled", "hooked", "ranks", "kernels"]


# torch.compile asks tensors of the call for theirs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", WAYS)
def test_vectors_are_normalized_inside(way: str, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a line of F.normalize before the call, in float64; in float32 by kernels."""
    monkeypatch.setattr(plan, "_plans", {})
    if way == "host":
        monkeypatch.setattr(plan, "waits_on_host", lambda features, device: True)
        monkeypatch.setattr(host, "cut", lambda *_: host.Cut(2, 3))
    q, k, mask = _batch()
    mask[2] = False
    leaves = [x.double().requires_grad_() for x in (q, k.masked_fill(~mask[..., None], 0.0), k.flip(0))]
    results = [_normalized_step(leaves, mask, way, inside=False)]
    if way == "ranks":
        found = pool.run(_normalized_on_a_rank, 2, mask, leaves)
        results.append([found[0][0], *[torch.cat(parts) for parts in list(zip(*found, strict=True))[1:]]])
    else:
        given = [x.float().detach().requires_grad_() for x in leaves] if way == "kernels" else leaves
        results.append(_normalized_step(given, mask, way, inside=True))
    for true, x in zip(*results, strict=True):
        assert distance(x, true) <= (1e-5 if way == "kernels" else 1e-12)


def _normalized_step(leaves: list[Tensor], mask: Tensor, way: str, inside: bool) -> list[Tensor]:
    """The loss, and the gradients of vectors that are normalised by the scorer or before."""
    module, how = MaxSim(normalize=inside), {"loss": Softmax()} if way == "negatives" else {}
    if inside and way == "hooked":
        module.register_forward_hook(lambda *_: None)
    backend = "triton" if inside and way == "kernels" else "auto"

    def step(*vectors: Tensor) -> Tensor:
        query, key, more = vectors if inside else [F.normalize(x, dim=-1) for x in vectors]
        if way == "module":
            return module(query, (key, mask)).square().sum()
        sides: Any = (query, mask[:, :3]), (key, mask)
        if way == "packed":
            sides = Ragged.of(*sides[0]), Ragged(Ragged.of(*sides[1]).values.T, mask.sum(1), axis=1)
        negatives = {"negatives": (more, ~mask)} if way == "negatives" else {}
        return contrast(*sides, **negatives, **how, scorer=module, scale=2.0, backend=backend)

    loss = (torch.compile(step, backend="eager") if inside and way == "compiled" else step)(*leaves)
    used = leaves[: 3 if way == "negatives" else 2]
    return [loss.detach(), *torch.autograd.grad(loss, used)]


def _normalized_on_a_rank(rank: int, group: Any, mask: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    share = [slice(0, 2), slice(2, 5)][rank]
    q, k = (x[share].detach().requires_grad_() for x in leaves[:2])
    sides = (q, mask[share, :3]), (k, mask[share])
    loss = contrast(*sides, scorer=MaxSim(normalize=True), scale=2.0, group=group, gradient="sum")
    return [loss.detach(), *torch.autograd.grad(loss, (q, k))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_zeros_and_padding_are_normalized_without_nan(dtype: torch.dtype) -> None:
    x, mask = torch.randn(2, 3, 8).to(dtype), torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(scorers.unit_vectors(x), F.normalize(x, dim=-1))
    x[0, 1], x[1, 2], mask[1, 2] = 0.0, torch.nan, False
    unit = scorers.unit_vectors(x.requires_grad_(), mask)
    (gradient,) = torch.autograd.grad(unit, x, torch.randn_like(unit))
    assert all(y.isfinite().all() and not y[0, 1].any() and not y[1, 2].any() for y in (unit.detach(), gradient))
    loss = contrast((x, mask), (x, mask), scorer=MaxSim(normalize=True), loss=Softmax())
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


def test_a_side_that_cannot_be_normalized_has_the_sentence_of_the_scorer() -> None:
    q = torch.ones(5, 2, 4)
    for k in (q[0], (q, torch.ones(5, 2)), (q, torch.ones(5, 2, device="meta").bool()), {"tokens": q}):
        sentences = [refusal(contrast, q, k, scorer=MaxSim(normalize=inside)) for inside in (False, True)]
        assert sentences[0] == sentences[1]


def _masks(shape: tuple[int, ...], masked: bool) -> tuple[Tensor | None, Tensor | None]:
    """Tokens of each side, some in the middle left out; one query and one document have none."""
    if not masked:
        return None, None
    N, J, L, M, _ = shape
    asking, answering = torch.rand(N, L) > 0.3, torch.rand(J, M) > 0.4
    asking[1], answering[2] = False, False
    return asking, answering


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, masked: bool) -> None:
    N, J, L, M, D = shape
    q, k = torch.randn(N, L, D).to(dtype), torch.randn(J, M, D).to(dtype)
    asking, answering = _masks(shape, masked)
    wide = [x.double().requires_grad_() for x in (q, k)]
    truth, g = MaxSim()((wide[0], asking), (wide[1], answering)), torch.randn(N, J)
    expected = torch.autograd.grad(truth, wide, g.double())
    # a token behind a mask may be anything
    q, k = (
        x if mask is None else x.masked_fill(~mask[..., None], torch.nan) for x, mask in ((q, asking), (k, answering))
    )
    entries, documents = (
        Entries.of(maxsim.readable(q, dtype), asking),
        Documents.of(maxsim.readable(k, dtype), answering),
    )
    scores, winners = maxsim.scored(entries, documents, best=True)
    assert winners is not None
    if dtype == torch.float32:
        # the same from torch's products, of which few fit
        same = maxsim.multiplied(entries, documents, 20_000, best=True)
        assert torch.equal(same[1], winners)
        assert distance(same[0], truth.detach()) <= 1e-6
    u, v = torch.zeros(N, L * D), torch.zeros(J, M * D)
    maxsim.add_query_gradients(u, g, entries, documents, winners)
    # lists of three documents at once
    maxsim.add_document_gradients(v, g, entries, documents, winners, 3 * 4 * entries.count)
    assert distance(scores, truth.detach()) <= 1e-6
    assert distance(u.view(N, L, D), expected[0]) <= 1e-6
    assert distance(v.view(J, M, D), expected[1]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
def test_a_tie_goes_to_the_first_token(sign: float) -> None:
    """Tokens of a document that are the same; the first of them wins, over blocks of tokens and within one."""
    q, k = torch.ones(2, 3, 16), sign * torch.ones(2, 40, 16)
    k[:, 0] = -2.0
    _, winners = maxsim.scored(Entries.of(q, None), Documents.of(k, None), best=True)
    assert winners is not None
    assert (winners.unflatten(1, (2, -1))[:, :, :3] == 1).all()


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_loss_as_the_dense_formula(name: str) -> None:
    """In float32, of which products of the least sizes are made."""
    problem = PROBLEMS[name](9, 12)
    module = scorer("maxsim", problem.same)
    rows, cols = sides("maxsim", problem)
    named = numbers(problem)
    truth = by_formula(problem, module, rows, cols, named)
    expected = gradients(truth, leaves(rows, cols), named.values())
    narrow = {name: x.detach().float().requires_grad_() for name, x in named.items()}
    half: Any = [(x.detach().float().requires_grad_(), mask) for x, mask in (rows, cols)]
    if problem.same:
        half[1] = half[0]
    loss = by_tiles(problem, module, *half, narrow, backend="triton", workspace=2**20)
    found = gradients(loss, leaves(*half), narrow.values())
    assert distance(loss.detach(), truth.detach()) <= 1e-5
    for x, true in zip(found, expected, strict=True):
        assert x is not None
        assert true is not None
        assert float((x - true).norm()) <= 2e-5 * float(true.norm()) + 1e-5


@pytest.mark.parametrize(("L", "masked"), [(32, False), (50, True)])
def test_the_tiling_of_a_chip_with_wide_products(L: int, masked: bool) -> None:
    q, k = torch.randn(5, L, 16), torch.randn(2, 70, 16)
    masks = [torch.rand(x.shape[:2]) > 0.3 if masked else None for x in (q, k)]
    sides = Entries.of(q, masks[0]), Documents.of(k, masks[1])
    small, wide = (maxsim.scored(*sides, best=True, tiling=tiling) for tiling in (None, Tiling(documents=3)))
    for x, y in zip(wide, small, strict=True):
        torch.testing.assert_close(x, y)


def test_a_copy_of_a_token_may_win_against_it() -> None:
    """Products of equal vectors may be rounded differently in different columns of a tile."""
    q, k = torch.rand(3, 20, 16), torch.rand(2, 70, 16)
    # only the first token and the last win
    for j, last in enumerate((8, 39)):
        k[j, [0, last]] += 1
    documents = Documents.of(k, torch.arange(70) < torch.tensor([[9], [40]]))
    entries = Entries.of(q, None)
    _, winners = maxsim.scored(entries, documents, best=True)
    documents.vectors[0, 9:] *= 1 + 1e-6
    documents.vectors[1, 40:] *= 1 + 1e-6
    _, with_copies = maxsim.scored(entries, documents, best=True)
    assert winners is not None
    assert with_copies is not None
    assert set(winners[1].tolist()) == {0, 39, documents.none}
    torch.testing.assert_close(with_copies, winners, rtol=0, atol=0)


def test_the_last_programs_of_a_sweep_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of a program: 396 programs run at once, three on each of 132 multiprocessors."""
    monkeypatch.setattr(maxsim_plan, "interpreting", lambda: False)
    monkeypatch.setattr(maxsim_plan, "multiprocessors", lambda _: 132)
    device = torch.device("cpu")
    maxsim_plan.documents_for.cache_clear()
    # 32 tiles of entries and 128 documents: 384 programs of 11 documents
    assert maxsim_plan.documents_for(Tiling(), 32, 128, 180, device) == 11
    assert maxsim_plan.documents_for(Tiling(), 256, 1024, 180, device) == 61
    assert maxsim_plan.documents_for(Tiling(), 8, 32, 180, device) == 1
    maxsim_plan.documents_for.cache_clear()


class _Lanes:
    """32 lanes that run assembly; stored numbers are in `memory`, by address."""

    def __init__(self, code: str, inputs: dict[str, Tensor]) -> None:
        lanes = torch.arange(32)
        self.values = {**inputs, "least": lanes * 0, "%laneid": lanes, "%lanemask_lt": (1 << lanes) - 1}
        self.memory: dict[int, int] = {}
        skipped = False
        for line in filter(
            None, map(str.strip, code.strip("{}\n").replace("${:uid}", "").replace(";", "").split("\n"))
        ):
            if line.startswith((".reg", "DONE")):
                skipped = skipped and not line.startswith("DONE")
            elif line.startswith("@!any"):
                skipped = not bool(self.values["any"].any())
            elif not skipped:
                self._step(line)

    def _step(self, line: str) -> None:
        guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        operation, _, names = rest.partition(" ")
        to, *sources = names.split(", ")
        x, y, z = ([self._read(name) for name in sources] * 3)[:3]
        if operation.startswith("st.global"):
            chosen = self.values[guard[1:]]
            self.memory |= dict(zip(self.values[to.strip("[]")][chosen].tolist(), x[chosen].tolist(), strict=True))
            return
        value = _value(operation, x, y, z)
        # a shuffle's second result: there is such a lane
        to, _, reached = to.partition("|")
        if reached:
            self.values[reached] = torch.arange(32) >= y
        before = self.values.get(to, torch.zeros_like(value))
        self.values[to] = torch.where(self.values[guard[1:]], value, before) if guard else value

    def _read(self, name: str) -> Tensor:
        if name in self.values:
            return self.values[name]
        return torch.full((32,), int(name, 0), dtype=torch.int64)


def _value(operation: str, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """The result of an operation on numbers of 32 lanes."""
    unsigned, lanes = (1 << 32) - 1, torch.arange(32)
    bits = (1 << lanes) * x.bool()
    results: dict[str, Callable[[], Tensor]] = {
        "max": lambda: torch.maximum(x, y), "min": lambda: torch.minimum(x, y), "add": lambda: x + y,
        "min.u32": lambda: torch.minimum(x & unsigned, y), "sub": lambda: x - y, "mov": lambda: x,
        "or": lambda: x | y, "and": lambda: x & y, "xor": lambda: x ^ y, "not": lambda: ~x,
        "bfind": lambda: x.double().log2().floor().long(), "mad": lambda: x * y + z,
        "selp": lambda: x.where(z.bool(), y),
        "setp.lt": lambda: x < y, "setp.ne": lambda: x != y,
        "vote.sync.any": lambda: x.any().expand(32),
        "vote.sync.ballot": lambda: bits.sum().expand(32),
        "popc": lambda: torch.tensor([(each & unsigned).bit_count() for each in x.tolist()]),
        "shfl.sync.idx": lambda: x[y],
        "shfl.sync.up": lambda: x[(lanes - y).clamp(min=0)],
    }  # fmt: skip
    parts = operation.split(".")
    name = next(name for n in (4, 3, 2, 1) if (name := ".".join(parts[:n])) in results)
    return results[name]()


@pytest.mark.parametrize("places", [False, True])
def test_the_assembly_of_maxima(places: bool) -> None:
    """Of numbers of both signs, of negative ones, and of equal ones."""
    rows, columns = maxsim_maxima.ROWS, maxsim_maxima.PLACES.value
    x = torch.randn(6, rows, 32, columns)
    x[1] -= 9.0
    x[2] = x[2].round()
    x[3] = x[3].round() - 9.0
    x[4, 0], x[5] = -x[4, 0].abs(), -3.0e38
    for some in x:
        bits = some.view(torch.int32).long()
        first = rows * (1 + places)
        inputs = {f"${first + c * rows + r}": bits[r, :, c] for r in range(rows) for c in range(columns)}
        values = _Lanes(maxsim_maxima._assembly(places=places), inputs).values
        for row in range(rows):
            top = values[f"${row}"].int().view(torch.float32)
            assert torch.equal(top, some[row].amax(1))
            if places:
                expected = torch.from_numpy((some[row] == top[:, None]).numpy().argmax(1))
                assert torch.equal(values[f"${rows + row}"], expected)


def test_the_assembly_of_lists() -> None:
    """Two steps of 512 entries: counts of each code, begins and ends, and the values of each list in order."""
    pack, codes = maxsim_lists.PACK, torch.randint(16, (2, maxsim_lists.PACK, 32))
    counts = torch.zeros(32, dtype=torch.int64)
    for step in codes:
        inputs = {f"${pack + entry}": step[entry] for entry in range(pack)} | {f"${2 * pack}": counts}
        counts = _Lanes(maxsim_lists._steps(store=False), inputs).values["$0"]
    assert torch.equal(counts[:16], codes.flatten().bincount(minlength=16))
    values = _Lanes(maxsim_lists._bounds(), {f"${3 * pack}": counts}).values
    fields, before = maxsim_lists.FIELDS.value, counts[maxsim_lists.BEFORE.value]
    begin, end = values["$0"][:fields], values[f"${pack}"][:fields]
    assert torch.equal(end, before + counts[:fields].cumsum(0))
    assert torch.equal(begin, end - counts[:fields])
    assert values[f"${2 * pack}"].tolist() == [*range(fields), *[-1] * (32 - fields)]
    found: dict[int, int] = {}
    begins = values["$0"]
    for number, step in enumerate(codes):
        entries = torch.arange(512).view(pack, 32) + 512 * number
        inputs = {f"${kind * pack + entry}": x[entry] for entry in range(pack) for kind, x in ((1, step), (3, entries))}
        lanes = _Lanes(maxsim_lists._steps(store=True), inputs | {f"${2 * pack}": begins, f"${4 * pack}": begins * 0})
        begins, found = lanes.values["$0"], found | lanes.memory
    order = [int(e) for code in range(fields) for e in (codes.flatten() == code).nonzero()]
    assert [found[4 * (int(before) + at)] for at in range(len(order))] == order


def test_several_tiles_and_strips_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(6, 2, 16), torch.randn(6, 3, 16)
    results = []
    for side, height in ((8, 0), (4, 0), (8, 6), (8, 4)):
        monkeypatch.setattr(plan, "_plans", {})
        monkeypatch.setattr(FusedMaxSim, "fitting_side", lambda *_, side=side: side)
        monkeypatch.setattr(FusedMaxSim, "strip", lambda *_, height=height: height)
        results.append(_step(q, k, scale=2.0, loss=Softmax()))
    # vectors in host memory
    monkeypatch.setattr(plan, "waits_on_host", lambda features, device: True)
    monkeypatch.setattr(host, "cut", lambda *_: host.Cut(4, 3))
    results.append(_step(q, k, scale=2.0, loss=Softmax()))
    for result in results[1:]:
        for x, y in zip(result, results[0], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_sums_are_float32_for_a_strip_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(3, 2, 16).half(), torch.randn(3, 2, 16).half()
    made = FusedMaxSim.accumulators
    types: list[torch.dtype] = []

    def accumulators(*given: Any) -> Any:
        u, v = made(*given)
        types.extend([u.dtype, v.dtype])
        return u, v

    monkeypatch.setattr(FusedMaxSim, "accumulators", accumulators)
    monkeypatch.setattr(FusedMaxSim, "strip", lambda *_: 0)
    monkeypatch.setattr(FusedMaxSim, "fitting_side", lambda *_: 2)
    monkeypatch.setattr(plan, "_plans", {})
    results = [_step(x, y, scale=2.0) for x, y in ((q, k), (q.float(), k.float()))]
    assert types == [torch.float16, torch.float16, torch.float32, torch.float32]
    for half, single in zip(*results, strict=True):
        torch.testing.assert_close(half.float(), single, rtol=2e-3, atol=1e-5)


# the interpreter's NumPy computes the statistics of rows without pairs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_queries_without_documents_have_gradients_of_zero() -> None:
    q, k = (torch.randn(n, 2, 16).half().requires_grad_() for n in (3, 0))
    loss = contrast(
        q, k, loss=Softmax(symmetric=False), scorer=MaxSim(), backend="triton", positives=torch.full((3,), -1)
    )
    for x, gradient in zip((q, k), torch.autograd.grad(loss, (q, k)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_a_forward_keeps_the_winners_with_which_the_backward_begins(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tiles as fit, which the first backward takes and a second one computes again: the same bits."""
    sweeps: list[bool] = []
    made = maxsim.scored

    def scored(*given: Any, best: bool) -> Any:
        sweeps.append(best)
        return made(*given, best=best)

    monkeypatch.setattr(maxsim, "scored", scored)
    monkeypatch.setattr(FusedMaxSim, "strip", lambda *_: 0)
    monkeypatch.setattr(FusedMaxSim, "fitting_side", lambda *_: 2)
    q, k = (torch.randn(n, 2, 16).half().requires_grad_() for n in (6, 6))
    sides = [(x, torch.tensor([[True, False], [True, True]]).repeat(3, 1)) if masked else x for x in (q, k)]
    # a tile of four pairs beside those kept takes the least workspace
    monkeypatch.setattr(late, "_pair_bytes", lambda *_: LEAST_WORKSPACE / 4)
    # indices of a tile's winners, and its scores
    of_tile = 2 * 2 * (16 if masked else 8) + 4 * 2 * 2
    results = []
    # masked tiles are kept in the same order, with other bytes
    for kept in (0, 5) if masked else (0, 2, 3, 5):
        monkeypatch.setattr(plan, "_plans", {})
        sweeps.clear()
        workspace = LEAST_WORKSPACE + kept * of_tile + of_tile // 2
        loss = contrast(*sides, scorer=MaxSim(), backend="triton", scale=2.0, workspace=workspace)
        first = torch.autograd.grad(loss, (q, k), retain_graph=True)
        # nine tiles, in three columns of them
        assert (sweeps.count(True), sweeps.count(False)) == (9, 9 - kept)
        results += [first, torch.autograd.grad(loss, (q, k))]
        assert sweeps.count(True) == 18
        sweeps.clear()
        with torch.no_grad():
            contrast(*sides, scorer=MaxSim(), backend="triton", scale=2.0, workspace=workspace)
        assert not any(sweeps)
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0], strict=True))


def _step(q: Tensor, k: Tensor, **how: Any) -> list[Tensor]:
    pair = [x.detach().requires_grad_() for x in (q, k)]
    loss = contrast(*pair, scorer=MaxSim(), backend="triton", **how)
    return [loss.detach(), *torch.autograd.grad(loss, pair)]


@pytest.mark.parametrize(("masked", "most"), [(False, (24, 5, 66, 11)), (True, (42, 10, 84, 16))])
def test_few_operations_lie_around_the_kernels(
    masked: bool, most: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations and launches of a loss, then of a step, on a device whose host would wait for each."""
    q, k = (torch.randn(4, n, 16).half().requires_grad_() for n in (3, 5))
    sides = [(x, torch.ones(x.shape[:2], dtype=torch.bool)) if masked else x for x in (q, k)]
    launches: list[None] = []
    for module in (maxsim, launch, late):
        monkeypatch.setattr(module, "run", lambda *_, **__: launches.append(None))
    counts = []
    # the first call of a kind is planned
    for grad in (False, False, True, True):
        launches.clear()
        with Counted() as counted, torch.set_grad_enabled(grad):
            loss = contrast(*sides, scorer=MaxSim(), scale=2.0, backend="triton")
            if grad:
                loss.backward()
        counts += [counted.ran.total(), len(launches)]
    # torch's operations on scores alone made 230 (loss) and 320 (step), with masks 290 and 390
    assert all(count <= bound for count, bound in zip(counts[2:4] + counts[6:], most, strict=True)), counts


def test_the_same_bits_every_time() -> None:
    q, k = torch.randn(5, 4, 16), torch.randn(5, 20, 16)
    first, second = _step(q, k), _step(q, k)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def _on_a_rank(rank: int, group: Any, exchange: str) -> list[Tensor]:
    q, k, mask = _batch()
    share = [slice(0, 2), slice(2, 2), slice(2, 5)][rank]
    pair = [x[share].requires_grad_() for x in (q, k)]
    how = {"exchange": exchange, "group": group, "backend": "triton", "gradient": "sum"}
    loss = contrast(pair[0], (pair[1], mask[share]), scorer=MaxSim(), scale=2.0, **how)
    return [loss.detach(), *torch.autograd.grad(loss, pair)]


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(5, length, 16, generator=generator) for length in (3, 6))
    return q, k, torch.rand(5, 6, generator=generator) > 0.3


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_three_ranks_as_one(pool: Pool, exchange: str) -> None:
    """One of them without rows."""
    q, k, mask = _batch()
    pair = [q.double().requires_grad_(), k.double().requires_grad_()]
    loss = contrast(pair[0], (pair[1], mask), scorer=MaxSim(), scale=2.0)
    expected = torch.autograd.grad(loss, pair)
    answers = pool.run(_on_a_rank, 3, exchange)
    assert all(distance(answer[0], loss.detach()) <= 1e-6 for answer in answers)
    for index, true in enumerate(expected):
        assert distance(torch.cat([answer[1 + index] for answer in answers]), true) <= 1e-5


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(("value", "on_host"), [(torch.nan, False), (-torch.inf, False), (-torch.inf, True)])
def test_tokens_that_are_not_finite_make_no_finite_loss(
    value: float, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "waits_on_host", lambda features, device: on_host)
    # a similarity of −∞ is no maximum
    q, k = torch.rand(4, 3, 16), torch.randn(4, 5, 16)
    k[2, 1, 3] = value
    assert contrast(q, k, scorer=MaxSim(), backend="triton").isnan()
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2, 1] = False
    assert contrast(q, (k, mask), scorer=MaxSim(), backend="triton").isfinite()


def test_the_sentence_of_what_has_no_kernel() -> None:
    q, k = torch.randn(4, 3, 300), torch.randn(4, 5, 300)
    with pytest.raises(
        ValueError, match=r"`backend` must be able to compute this scorer; got 'triton'\. It declines: no k"
    ):
        contrast(q, k, scorer=MaxSim(), backend="triton")
    with pytest.raises(ValueError, match="A scorer brings its own kernels"):
        contrast(q[:, 0], k[:, 0], scorer=Bilinear(300, 300), backend="triton")
