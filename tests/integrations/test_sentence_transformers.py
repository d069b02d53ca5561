"""The losses for sentence-transformers beside its own, with the library itself: values, gradients, its trainer."""

from __future__ import annotations

import inspect
import random
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers")

import torch
import torch.distributed as dist
from comparison import same
from ranks import Pool
from sentences import (
    CACHED,
    WIDTH,
    N,
    SentenceTransformer,
    build,
    columns_of,
    gradients,
    losses,
    models,
    step,
    util,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contrastile.integrations.sentence_transformers import CachedRankingLoss, CachedSymmetricLoss

# warnings of the library about itself
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    return build(tmp_path_factory.mktemp("model")).double()


Q2D, Q2Q, D2Q, D2D = "query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"
DIRECTIONS: list[dict[str, Any]] = [
    {},
    {"directions": (Q2D, Q2Q)},
    {"directions": (Q2D, D2Q)},
    {"directions": (Q2D, D2Q), "partition_mode": "per_direction"},
    {"directions": (Q2D, Q2Q, D2Q, D2D)},
    {"directions": (Q2D, D2D)},
    # counted once
    {"directions": (Q2D, D2Q, D2Q), "partition_mode": "per_direction"},
    {"similarity_fct": util.dot_score, "scale": 1.5},
    {"similarity_fct": util.dot_score, "scale": 1.5, "directions": (Q2D, D2Q), "partition_mode": "per_direction"},
]


@pytest.mark.parametrize("names", ["ab", "abcd"], ids=["pairs", "n-tuples"])
@pytest.mark.parametrize("words", DIRECTIONS, ids=lambda words: "-".join(map(str, words.values())) or "default")
def test_the_loss_and_gradients_of_their_class(model: Any, words: dict[str, Any], names: str) -> None:
    columns = columns_of(model, names)
    truth = step(losses.MultipleNegativesRankingLoss(model, **words), columns)
    same(step(CachedRankingLoss(model, mini_batch_size=3, **words), columns), truth)


@pytest.mark.parametrize("mode", ["in_batch_negatives", "hard_negatives", "all_negatives"])
@pytest.mark.parametrize("words", [DIRECTIONS[0], DIRECTIONS[3], DIRECTIONS[4]], ids=["one", "means", "four"])
def test_every_hardness_of_their_class(model: Any, words: dict[str, Any], mode: str) -> None:
    plain = step(losses.MultipleNegativesRankingLoss(model, **words), columns_of(model, "abcd"))
    for names in ("ab", "abcd"):
        columns, how = columns_of(model, names), {**words, "hardness_mode": mode, "hardness_strength": 9.0}
        found = step(CachedRankingLoss(model, mini_batch_size=3, **how), columns)
        truth = step(losses.MultipleNegativesRankingLoss(model, **how), columns)
        same(found, truth)
        same(found, step(losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=5, **how), columns), CACHED)
    assert not torch.isclose(truth[0], plain[0], rtol=1e-4)


@pytest.mark.parametrize("words", [{}, {"mini_batch_num_tokens": 40}, {"retain": "auto"}, {"retain": 1}])
def test_sub_batches(model: Any, words: dict[str, Any]) -> None:
    columns = columns_of(model, "abc")
    truth = step(losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4), columns)
    same(step(CachedRankingLoss(model, mini_batch_size=3, **words), columns), truth, CACHED)


def test_both_directions(model: Any) -> None:
    columns = columns_of(model, "ab")
    truth = step(losses.CachedMultipleNegativesSymmetricRankingLoss(model, mini_batch_size=4), columns)
    same(step(CachedSymmetricLoss(model, mini_batch_size=3), columns), truth, CACHED)


@pytest.mark.parametrize("more", [{"prompt": "a: "}, {"prompt": None}], ids=["prompt", "none"])
def test_prompts_and_features_that_are_no_tensors(model: Any, more: dict[str, Any]) -> None:
    columns = [{**column, "modality": "text", "flag": True} for column in columns_of(model, "ab", **more)]
    assert ("prompt_length" in columns[0]) == (more["prompt"] is not None)
    truth = step(losses.MultipleNegativesRankingLoss(model), columns)
    same(step(CachedRankingLoss(model, mini_batch_size=3), columns), truth)


@pytest.mark.parametrize("words", [{}, {"mini_batch_num_tokens": 40}])
def test_padding_that_a_convolution_reads_is_not_trimmed(model: Any, words: dict[str, Any]) -> None:
    modules = [deepcopy(model[0]), models.CNN(WIDTH, 8, [1, 3]), models.Pooling(WIDTH)]
    convolving = SentenceTransformer(modules=modules, device="cpu").double()
    columns = columns_of(convolving, "ab")
    truth = step(losses.MultipleNegativesRankingLoss(convolving), columns)
    same(step(CachedRankingLoss(convolving, mini_batch_size=3, **words), columns), truth)


def test_a_router_gets_its_task(model: Any) -> None:
    heads = {"query": [models.Dense(WIDTH, WIDTH)], "document": [models.Dense(WIDTH, WIDTH)]}
    routed = SentenceTransformer(modules=[*deepcopy(model), models.Router(heads, "document")], device="cpu").double()
    columns = columns_of(model, "ab")
    columns = [{**column, "task": task} for column, task in zip(columns, ("query", "document"), strict=True)]
    truth = step(losses.MultipleNegativesRankingLoss(routed), columns)
    same(step(CachedRankingLoss(routed, mini_batch_size=3), columns), truth)


class Flat(nn.Module):
    """The face of a model of flattened texts, or of images of many sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.patch = nn.Embedding(16, WIDTH), nn.Linear(3, WIDTH)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        if "cu_seq_lens_q" in features:
            offsets = features["cu_seq_lens_q"][:-1]
            found = nn.functional.embedding_bag(features["input_ids"][0], self.words.weight, offsets)
        else:
            patches = features["num_images_per_sample"].tolist()
            if "image_grid_thw" in features:
                patches = [int(each.prod(-1).sum()) for each in features["image_grid_thw"].split(patches)]
            images = [each.sum(0) for each in self.patch(features["pixel_values"]).split(patches)]
            found = self.words(features["input_ids"]).mean(1) + torch.stack(images)
        return {**features, "sentence_embedding": found * features["factor"]}


def flattened() -> dict[str, Any]:
    lengths = torch.randint(1, 5, (N,))
    total = int(lengths.sum())
    cumulative = nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = torch.randint(0, 16, (1, total))
    return {"input_ids": ids, "cu_seq_lens_q": cumulative, "max_length_q": int(lengths.max()), "factor": 0.5}


def pictured() -> dict[str, Any]:
    counts = torch.tensor([1, 2, 1, 1, 2, 1, 1, 1])
    grid = torch.randint(1, 4, (int(counts.sum()), 3))
    pixels = torch.randn(int(grid.prod(-1).sum()), 3, dtype=torch.float64)
    return {
        "input_ids": torch.randint(0, 16, (N, 4)), "pixel_values": pixels, "image_grid_thw": grid,
        "num_images_per_sample": counts, "factor": 0.5,
    }  # fmt: skip


def illustrated() -> dict[str, Any]:
    """As many images, of one size each, as texts."""
    counts = torch.tensor([2, 2, 0, 0, 1, 1, 1, 1])
    pixels = torch.randn(N, 3, dtype=torch.float64)
    return {
        "input_ids": torch.randint(0, 16, (N, 4)), "pixel_values": pixels, "num_images_per_sample": counts,
        "factor": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("column", [flattened, pictured, illustrated])
@pytest.mark.parametrize("words", [{}, {"mini_batch_num_tokens": 6}], ids=["texts", "tokens"])
def test_packed_inputs(column: Any, words: dict[str, Any]) -> None:
    pytest.importorskip("sentence_transformers.base.losses.gradcache")
    if column is illustrated and CACHED > 1e-6:
        pytest.skip("version 6 counts these images")
    if words and column is not flattened:
        pytest.skip("the library counts tokens in a mask")
    columns, flat = [column(), column()], Flat().double()
    truth = step(losses.MultipleNegativesRankingLoss(flat), columns)
    same(step(CachedRankingLoss(flat, mini_batch_size=3, **words), columns), truth)


@pytest.mark.parametrize("weights", [None, [1.0, 0.3]])
def test_inside_matryoshka(model: Any, weights: list[float] | None) -> None:
    columns = columns_of(model, "abc")
    ours, theirs = (
        losses.MatryoshkaLoss(model, loss, [WIDTH, 8], weights)
        for loss in (
            CachedRankingLoss(model, mini_batch_size=3),
            losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
        )
    )
    found, truth = [], []
    for loss, results in ((ours, found), (theirs, truth)):
        model.zero_grad()
        value = loss(columns, None)
        (2 * value).backward()
        results += [value.detach(), gradients(model)]
    same(found, truth, CACHED)
    with torch.no_grad():
        same(ours(columns, None), theirs(columns, None))


@pytest.mark.parametrize("words", [{"n_layers_per_step": -1}, {"kl_temperature": 0.0}], ids=["all", "one"])
@pytest.mark.parametrize("matryoshka", [False, True], ids=["plain", "matryoshka"])
def test_inside_adaptive_layers(model: Any, words: dict[str, Any], matryoshka: bool) -> None:
    columns, results = columns_of(model, "abc", "a: "), []
    for kind, how in ((CachedRankingLoss, {"mini_batch_size": 3}), (losses.MultipleNegativesRankingLoss, {})):
        random.seed(3)
        inner = losses.MatryoshkaLoss(model, kind(model, **how), [WIDTH, 8]) if matryoshka else kind(model, **how)
        results.append(step(losses.AdaptiveLayerLoss(model, inner, **words), columns))
    same(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_scores_of_16_bit_embeddings_are_in_float32(model: Any, dtype: torch.dtype) -> None:
    columns = [torch.randn(32, WIDTH).to(dtype) for _ in range(3)]
    loss, results = CachedRankingLoss(model, scale=100.0), []
    for each in (dtype, torch.float64):
        leaves = [x.to(each).requires_grad_() for x in columns]
        # times a factor, without which fp16 would lose small numbers
        gradients = torch.autograd.grad(4096 * loss.compute_loss_from_embeddings(leaves), leaves)
        results.append(torch.stack(gradients).double())
    found, truth = results
    # no more than twice what the gradient's own type costs
    assert (found - truth).norm() <= 2 * (truth.to(dtype) - truth).norm()


class Half(nn.Module):
    """The end of a model whose embeddings are fp16."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "sentence_embedding": features["sentence_embedding"].half()}


def test_a_scaled_loss_of_fp16_embeddings_inside_matryoshka(model: Any) -> None:
    half = SentenceTransformer(modules=[*deepcopy(model).float(), Half()], device="cpu")
    columns, results = columns_of(half, "ab"), []
    # more than fp16 holds, as GradScaler begins
    for factor in (1.0, 2.0**16):
        loss = losses.MatryoshkaLoss(half, CachedRankingLoss(half, mini_batch_size=3), [WIDTH, 8])
        half.zero_grad()
        (factor * loss(columns, None)).backward()
        results.append({name: gradient / factor for name, gradient in gradients(half).items()})
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-4)


def test_dropout_gives_the_gradient_of_plain_autograd(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build(tmp_path, dropout=0.3).double().train()
    # texts of one length, which stay in their order
    columns = [dict(model.preprocess([f"{one} {name}" for one in "abcdefgh"])) for name in "ijh"]
    torch.manual_seed(5)
    embeddings = [
        torch.cat([model(dict(part))["sentence_embedding"] for part in parts(column, 3)]) for column in columns
    ]
    anchors, *documents = (nn.functional.normalize(x, dim=-1) for x in embeddings)
    value = nn.functional.cross_entropy(20 * anchors @ torch.cat(documents).T, torch.arange(N))
    value.backward()
    truth = value.detach(), gradients(model)
    for retain in (0, 1):
        torch.manual_seed(5)
        same(step(CachedRankingLoss(model, mini_batch_size=3, retain=retain), columns), truth)
    assert not torch.isclose(truth[0], step(losses.MultipleNegativesRankingLoss(model.eval()), columns)[0], rtol=1e-4)


def parts(column: dict[str, Any], size: int) -> list[dict[str, Any]]:
    rows = (slice(start, start + size) for start in range(0, N, size))
    return [{name: x[each] if isinstance(x, Tensor) else x for name, x in column.items()} for each in rows]


# losses around others, and their first argument: all layers, numbers of features
OUTER = {"AdaptiveLayerLoss": -1, "MatryoshkaLoss": [WIDTH, 8]}


def on_a_rank(rank: int, group: Any, folder: Path, words: dict[str, Any]) -> None:
    model, columns = torch.load(folder / "whole.pt", weights_only=False)
    W = dist.get_world_size(group)
    default, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    try:
        rows = slice(rank * N // W, (rank + 1) * N // W)
        mine = [{name: x[rows] if isinstance(x, Tensor) else x for name, x in column.items()} for column in columns]
        wrapped, how = DistributedDataParallel(model), {**words}
        outer = how.pop("outer", None)
        loss: nn.Module = CachedRankingLoss(wrapped, mini_batch_size=3, **how)
        if outer is not None:
            # transformers record hidden states of a loaded model only where one of its class was made
            type(model[0].auto_model)(model[0].auto_model.config)
            loss = getattr(losses, outer)(model, loss, OUTER[outer])
            loss.model = wrapped
        value = loss(mine, None)
        value.backward()
    finally:
        dist.GroupMember.WORLD = default
    torch.save((value.detach(), gradients(model)), folder / f"{rank}.pt")


RANKED = [*DIRECTIONS[:5], {**DIRECTIONS[4], "hardness_mode": "in_batch_negatives", "hardness_strength": 9.0}]


@pytest.mark.parametrize("words", RANKED, ids=lambda words: "-".join(map(str, words.values())) or "default")
def test_two_ranks_have_the_gradient_of_the_whole_batch(
    pool: Pool, tmp_path: Path, model: Any, words: dict[str, Any]
) -> None:
    columns = columns_of(model, "abc")
    value, truth = step(losses.MultipleNegativesRankingLoss(model, **words), columns)
    torch.save((model, columns), tmp_path / "whole.pt")
    pool.check(on_a_rank, 2, tmp_path, {**words, "gather_across_devices": True})
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for _, each in found:
        same(each, truth)
    same((found[0][0] + found[1][0]) / 2, value)


@pytest.mark.parametrize("outer", OUTER)
def test_losses_around_others_on_two_ranks(pool: Pool, tmp_path: Path, model: Any, outer: str) -> None:
    columns = columns_of(model, "abc")
    truth = step(getattr(losses, outer)(model, losses.MultipleNegativesRankingLoss(model), OUTER[outer]), columns)
    torch.save((model, columns), tmp_path / "whole.pt")
    pool.check(on_a_rank, 2, tmp_path, {"outer": outer, "gather_across_devices": True})
    for rank in range(2):
        same(torch.load(tmp_path / f"{rank}.pt")[1], truth[1])


def refused_on_a_rank(rank: int, group: Any, folder: Path) -> str:
    model, columns = torch.load(folder / "whole.pt", weights_only=False)
    default, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    try:
        # the second rank lacks a positive
        mine = [{**x, **parts(x, 4 - rank * at)[0]} for at, x in enumerate(columns)]
        CachedRankingLoss(DistributedDataParallel(model), gather_across_devices=True)(mine, None)
    except ValueError as error:
        return str(error)
    finally:
        dist.GroupMember.WORLD = default
    return ""


def test_a_positive_that_one_rank_lacks_is_an_error_on_all(pool: Pool, tmp_path: Path, model: Any) -> None:
    torch.save((model, columns_of(model, "ab")), tmp_path / "whole.pt")
    sentence = "rank 1: `sentence_features` must have a positive for each anchor; got 3 for 4. Let the dataset"
    assert all(said.startswith(sentence) for said in pool.run(refused_on_a_rank, 2, tmp_path))


def test_without_gathering_each_rank_has_its_own_negatives(pool: Pool, tmp_path: Path, model: Any) -> None:
    columns = columns_of(model, "abc")
    halves = [
        [{name: x[rows] if isinstance(x, Tensor) else x for name, x in column.items()} for column in columns]
        for rows in (slice(0, N // 2), slice(N // 2, N))
    ]
    truths = [step(losses.MultipleNegativesRankingLoss(model), half) for half in halves]
    torch.save((model, columns), tmp_path / "whole.pt")
    pool.check(on_a_rank, 2, tmp_path, {})
    for rank, (value, _) in enumerate(truths):
        found = torch.load(tmp_path / f"{rank}.pt")
        mean = {name: (truths[0][1][name] + truths[1][1][name]) / 2 for name in truths[0][1]}
        same(found, (value, mean))


def test_adapters_of_peft(model: Any) -> None:
    peft = pytest.importorskip("peft")
    adapted = deepcopy(model)
    adapted.add_adapter(peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))
    adapted.double()
    columns = columns_of(model, "ab")
    truth = step(losses.MultipleNegativesRankingLoss(adapted), columns)
    assert any("lora" in name and gradient.abs().sum() > 0 for name, gradient in truth[1].items())
    same(step(CachedRankingLoss(adapted, mini_batch_size=3), columns), truth)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (CachedRankingLoss, losses.CachedMultipleNegativesRankingLoss),
        (CachedRankingLoss, losses.MultipleNegativesRankingLoss),
        (CachedSymmetricLoss, losses.CachedMultipleNegativesSymmetricRankingLoss),
    ],
)
def test_their_constructors_words(model: Any, ours: Any, theirs: Any) -> None:
    words = dict(list(inspect.signature(theirs.__init__).parameters.items())[1:])
    known = inspect.signature(ours).parameters
    assert words.keys() <= known.keys()
    if theirs is not losses.MultipleNegativesRankingLoss:
        assert list(words) == list(known)[: len(words)]
    for name, word in words.items():
        if name not in ("model", "similarity_fct"):
            assert known[name].default == word.default
    loss = ours(model)
    config = theirs(model).get_config_dict()
    assert {**config, **loss.get_config_dict()} == {**loss.get_config_dict(), **config, "mini_batch_size": 32}
    assert loss.temperature == 1 / 20


def test_words_that_change_after_construction(model: Any) -> None:
    columns = columns_of(model, "ab")
    words = {"similarity_fct": util.dot_score, "scale": 1.5, "hardness_mode": "all_negatives", "hardness_strength": 2.0}
    both = CachedRankingLoss(model), losses.MultipleNegativesRankingLoss(model)
    for loss in both:
        vars(loss).update(words)
    same(*(step(loss, columns) for loss in both))
    both[0].similarity_fct = util.euclidean_sim
    with pytest.raises(ValueError, match="`similarity_fct` must be util"):
        both[0](columns)


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Another similarity by the name of theirs."""
    return -torch.cdist(a, b)


def refused(**words: Any) -> Any:
    return lambda model: CachedRankingLoss(model, **words)


class Scorer(torch.nn.Module):
    """The face of a CrossEncoder."""

    def predict(self) -> None:
        """Score pairs."""


SENTENCES = {
    "`model` must be a model of sentence-transformers; got 'all-MiniLM-L6-v2'. Load it: Sentence": lambda model: (
        CachedRankingLoss("all-MiniLM-L6-v2")
    ),
    "`scale` must be above 0; got 0. Pass 1 / temperature, which": refused(scale=0),
    "`scale` must be above 0; got '20'. Pass 1 / temperature, which is not learned.": refused(scale="20"),
    "`scale` must be a number; got Parameter. Pass 1 / temperature, which is not learned.": refused(
        scale=nn.Parameter(torch.tensor(20.0))
    ),
    "`similarity_fct` must be util.cos_sim or util.dot_score; got 'cos_sim'. Pass": refused(similarity_fct="cos_sim"),
    "`hardness_mode` must be given with `hardness_strength`; got None.": refused(hardness_strength=5.0),
    "`gather_across_devices` must be True or False; got 'no'. Pass one of": refused(gather_across_devices="no"),
    "`directions` must be a tuple of words; got None. Pass (": refused(directions=None),
    "`retain` must be a whole number of at least 0; got 'all'.": refused(retain="all"),
    "`model` must embed each text by itself; got a Scorer. Take a loss of sentence_transformers.cross_": lambda _: (
        CachedRankingLoss(Scorer())
    ),
    "`similarity_fct` must be util.cos_sim or util.dot_score; got euclidean_sim. Pass one of": refused(
        similarity_fct=util.euclidean_sim
    ),
    f"`similarity_fct` must be util.cos_sim or util.dot_score; got {__name__}.cos_sim. Pass one of": refused(
        similarity_fct=cos_sim
    ),
    "`model` must be a model of sentence-transformers; got a BertModel. Load it: Sentence": lambda model: (
        CachedRankingLoss(model[0].auto_model)
    ),
    "`sentence_features` must have a positive for each anchor; got 7 for 8. Let the dataset": lambda model: (
        CachedRankingLoss(model)(
            [columns_of(model, "a")[0], *({**x, **parts(x, 7)[0]} for x in columns_of(model, "bc"))]
        )
    ),
    "`sentence_features` must have an anchor for each positive; got 7 for 8. Let the dataset": lambda model: (
        CachedSymmetricLoss(model)([parts(columns_of(model, "a")[0], 7)[0], *columns_of(model, "b")])
    ),
    "`mini_batch_size` must be a whole number of at least 1; got 0. Count the texts": refused(mini_batch_size=0),
    "`mini_batch_num_tokens` must be a whole number of at least 1; got '9'. Count": refused(mini_batch_num_tokens="9"),
    "`show_progress_bar` must be False; got True. Leave it out: the trainer shows its own.": refused(
        show_progress_bar=True
    ),
    "`hardness_mode` must be one of in_batch_negatives, hard_negatives, all_negatives; got 'own'.": refused(
        hardness_mode="own"
    ),
    "`hardness_strength` must be at least 0; got -1.0.": refused(hardness_mode="all_negatives", hardness_strength=-1.0),
    "`partition_mode` must be one of joint, per_direction; got 'both'.": refused(partition_mode="both"),
    "`directions` must be one of query_to_doc, query_to_query, doc_to_query, doc_to_doc; got 'q2d'.": refused(
        directions=("q2d",)
    ),
    '`directions` must hold "query_to_doc", which has the positives; got': refused(directions=(D2Q,)),
    '`directions` must be "query_to_doc" and "doc_to_query" with partition_mode="per_direction"; got': refused(
        directions=(Q2D, Q2Q), partition_mode="per_direction"
    ),
    "`model` must be on one GPU in each process; got a DataParallel. Launch": lambda model: CachedRankingLoss(
        nn.DataParallel(model)
    )(columns_of(model, "ab"), None),
    "`sentence_features` must have two columns or more; got 1. Give the dataset": lambda model: CachedRankingLoss(
        model
    )(columns_of(model, "a"), None),
    "`model` must take texts one by one; got a StaticEmbedding. Take Multiple": lambda model: CachedRankingLoss(model)(
        [{"input_ids": torch.arange(3), "offsets": torch.arange(3)}] * 2, None
    ),
    "`loss` must be called by a trainer, MatryoshkaLoss or AdaptiveLayerLoss; got matryoshka, which": lambda model: (
        losses.MatryoshkaLoss(model, losses.AdaptiveLayerLoss(model, CachedRankingLoss(model)), [WIDTH])(
            columns_of(model, "ab"), None
        )
    ),
}


def test_a_temperature_in_the_place_of_the_scale_gives_a_warning(model: Any) -> None:
    for kind in (CachedRankingLoss, CachedSymmetricLoss):
        with pytest.warns(UserWarning, match=f"{kind.__name__} got a scale of 0.05, as if it were a temperature"):
            kind(model, scale=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # products of rows of any length may have small scales
        CachedRankingLoss(model, scale=0.05, similarity_fct=util.dot_score)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_refusals(model: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        SENTENCES[sentence](model)
    assert str(raised.value).startswith(sentence)
