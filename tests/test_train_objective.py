"""The losses of recipes: each is its plain formula in float64, on one process and on ranks, with inputs of its own."""

import json
import re
from functools import cache
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from counted import Counted
from ranks import Pool
from refusals import refusal
from safetensors.torch import save_file
from test_train_resume import stopped
from tiny_runs import same_run, tiny_recipe
from tiny_texts import tiny_retriever
from torch import Tensor, nn

import contrastile
from contrastile import modules
from contrastile._dispatch import Options
from contrastile.data.files import checksum
from contrastile.losses.reference import dense_decoupled, dense_distilled, dense_sigmoid, dense_softmax
from contrastile.scorers import MaxSim
from contrastile.train import objective as teacher_module
from contrastile.train.config.losses import AnyLoss, AnyRetrieverLoss
from contrastile.train.log import read_metrics
from contrastile.train.loop import run_recipe
from contrastile.train.objective import PairObjective, QueryObjective
from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.job import TextBatchBuilder
from contrastile.train.retriever.run import TextMaterials, open_text_materials
from contrastile.train.state import NonFiniteGuard

SCALE, D = 10.0, 6


def unit(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def read(text: str, folder: Path, *overrides: str) -> Any:
    path = folder / "some.toml"
    path.write_text(f"{text}\n[train]\nexamples = 9\nbatch = 4\n")
    return load_any_recipe(path, overrides)


# pictures and texts

IDS = torch.tensor([3, 1, 3, 0, 5, 1, 9])
IMAGE, TEXT, A, B = (unit(len(IDS), D, seed=seed) for seed in range(4))
SAME = IDS[:, None] == IDS
OTHERS = SAME & ~torch.eye(len(IDS), dtype=torch.bool)


def both_ways(one_way: Any) -> Tensor:
    return (one_way(IMAGE, TEXT, A, B) + one_way(TEXT, IMAGE, B, A)) / 2


def queue_formula() -> Tensor:
    """A second step of two, whose first pushed the features of `unit` 11 and 12."""
    losses = []
    for q, k, old in ((IMAGE, TEXT, 12), (TEXT, IMAGE, 11)):
        keys, ids = torch.cat([k, unit(4, D, seed=old)]), torch.cat([IDS, torch.tensor([1, 2, 3, 4])])
        positive = torch.eye(len(q), len(keys), dtype=torch.bool)
        losses.append(dense_softmax(q, keys, SCALE, positive=positive, excluded=(IDS[:, None] == ids) & ~positive))
    return (losses[0] + losses[1]) / 2


def ntxent_formula() -> Tensor:
    views, ids = torch.cat([IMAGE, TEXT]), IDS.repeat(2)
    positive = torch.eye(len(views), dtype=torch.bool).roll(len(IDS), 0)
    x = (SCALE * views @ views.T).masked_fill((ids[:, None] == ids) & ~positive, -torch.inf)
    return F.cross_entropy(x, positive.int().argmax(1))


def gist_pairs_formula(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """With pairs of queries and pairs of keys."""
    x, guide = (torch.cat([one @ other.T, one @ one.T, other @ other.T], 1) for one, other in ((q, k), (a, b)))
    out = ((guide > guide.diagonal()[:, None]) | SAME.repeat(1, 3)) & ~torch.eye(*x.shape, dtype=torch.bool)
    return F.cross_entropy((SCALE * x).masked_fill(out, -torch.inf), torch.arange(len(q)))


def gist_formula(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    guide = a @ b.T
    false = guide > guide.diagonal()[:, None] - 0.1 * guide.diagonal().abs()[:, None]
    excluded = (false | SAME) & ~torch.eye(len(q), dtype=torch.bool)
    return dense_softmax(q, k, SCALE, excluded=excluded)


def distill_formula(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x, t = ((scale * one @ other.T).masked_fill(OTHERS, -1e9) for scale, one, other in ((SCALE, q, k), (30, a, b)))
    soft = F.kl_div(x.log_softmax(1), t.log_softmax(1), log_target=True, reduction="batchmean")
    return 0.75 * F.cross_entropy(x, torch.arange(len(x))) + 0.25 * soft


def supcon_formula() -> Tensor:
    views, labels = torch.cat([IMAGE, TEXT]), IDS.repeat(2)
    itself = torch.eye(len(views), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~itself
    x = (SCALE * views @ views.T).masked_fill(itself, -torch.inf)
    inside = x.masked_fill(~positive, -torch.inf).logsumexp(1) - positive.sum(1).double().log()
    return (x.logsumexp(1) - inside).mean()


PAIRS = {
    "": lambda: dense_clip_of(excluded=OTHERS),
    "labels = true": lambda: dense_clip_of(positive=SAME),
    "kind = 'siglip'\nlabels = true": lambda: dense_sigmoid(IMAGE, TEXT, SCALE, -5.0, positive=SAME),
    "kind = 'dcl'": lambda: dense_decoupled(IMAGE, TEXT, SCALE, symmetric=True, excluded=OTHERS),
    "kind = 'supcon'\nform = 'in'": supcon_formula,
    "kind = 'infonce'\nhardness_strength = 3.0": lambda: both_ways(
        lambda q, k, *_: dense_softmax(q, k, SCALE, excluded=OTHERS, hardness=3.0)
    ),
    "kind = 'infonce'\nqueue = 4": queue_formula,
    "kind = 'gist'\nguide = '.'\nmargin = 0.1\nmargin_strategy = 'relative'": lambda: both_ways(gist_formula),
    "kind = 'gist'\nguide = '.'\ncontrast_anchors = true\ncontrast_positives = true": lambda: both_ways(
        gist_pairs_formula
    ),
    "kind = 'ntxent'": ntxent_formula,
    "kind = 'distill'\nteacher = '.'\nweight = 0.25": lambda: both_ways(distill_formula),
}


def dense_clip_of(**marks: Tensor) -> Tensor:
    return both_ways(lambda q, k, *_: dense_softmax(q, k, SCALE, **marks))


def test_every_loss_is_a_kind_and_every_word_of_it_a_key() -> None:
    kinds = [item for objective in (PairObjective, QueryObjective) for item in objective.makers.items()]
    assert {getattr(modules, name) for name in modules.__all__} <= {loss for _, loss in kinds}
    sections = [get_args(get_args(section)[0]) for section in (AnyLoss, AnyRetrieverLoss)]
    for kind, loss in kinds:
        named = [one for both in sections for one in both if kind in get_args(one.model_fields["kind"].annotation)]
        words = {*signature(loss).parameters} - {*Options.__dataclass_fields__, "unknown", "how"}
        assert not isinstance(loss, type) or words <= {key for section in named for key in section.model_fields}, kind


@pytest.mark.parametrize("keys", PAIRS)
def test_a_loss_of_pairs_is_its_formula(tmp_path: Path, keys: str) -> None:
    settings = read(f"[loss]\n{keys}", tmp_path).loss
    objective = PairObjective(settings, features=D, dtype=torch.float64)
    objective.keep(torch.tensor([1, 2, 3, 4]), image=unit(4, D, seed=11), text=unit(4, D, seed=12))
    objective.end_step(True)
    guides = (A, B, 30.0) if settings.other_model else None
    bias = torch.tensor(-5.0) if settings.kind == "siglip" else None
    got = objective(IMAGE, TEXT, torch.tensor(SCALE), bias, ids=IDS, guides=guides)
    torch.testing.assert_close(got, PAIRS[keys](), rtol=1e-12, atol=0)


def test_only_the_keys_of_a_step_that_was_taken_are_queued(tmp_path: Path) -> None:
    settings = read("[loss]\nkind = 'infonce'\nqueue = 6", tmp_path).loss
    objective = PairObjective(settings, features=D, dtype=torch.float64)
    assert list(objective.state) == ["queue"]
    for seed, taken in ((0, True), (1, False), (2, True)):
        # two parts of a step
        for part in unit(2, 2, D, seed=seed):
            objective.keep(torch.full((2,), seed), image=part, text=-part)
        assert objective.queued("text")[1].tolist() == [0] * min(4, 4 * seed)
        objective.end_step(taken)
    keys, ids = objective.queued("text")
    # a ring of six: the first two of the last step's took the last places
    assert ids.tolist() == [2, 2, 0, 0, 2, 2]
    torch.testing.assert_close(keys[[4, 5, 0, 1]], -unit(2, 2, D, seed=2).flatten(0, 1))


def test_the_keys_of_a_queue_have_no_products_for_gradients(tmp_path: Path) -> None:
    H = 64
    objective = PairObjective(read(f"[loss]\nkind = 'infonce'\nqueue = {H}", tmp_path).loss, features=D)
    for seed in range(2):
        objective.keep(torch.arange(H), image=unit(H, D, seed=seed), text=unit(H, D, seed=seed))
        objective.end_step(True)
    image, text = (x.float().requires_grad_() for x in (IMAGE, TEXT))
    with Counted() as counted:
        objective(image, text, torch.tensor(SCALE), None, ids=IDS).backward()
    N = len(IDS)
    # both ways, for the logits and the queries each, and for the batch's own keys
    assert counted.multiplications == 2 * (2 * N * (N + H) * D + N * N * D)


# queries and passages

TEXTS = """
kind = "retriever"
[data]
source = "{folder}/scored.jsonl"
cache = "{folder}/cache"
held_out = 0.2
negatives = 2
[model]
tokenizer = {{ kind = "words", size = 50, length = 8, query_length = 6 }}
[loss]
kind = "{kind}"
"""


def write_scored(folder: Path) -> None:
    """Questions in FlagEmbedding's form; negatives of one are right for the next, and some have no scores."""
    lines = []
    for n in range(24):
        entry = {"query": f"question {n}", "pos": [f"answer {n}"], "neg": [f"answer {(n + k) % 24}" for k in (1, 2, 5)]}
        if n % 4:
            entry |= {"pos_scores": [3.0 + n / 8], "neg_scores": [1.0, 0.5 * (n % 3), -1.0]}
        lines.append(json.dumps(entry) + "\n")
    (folder / "scored.jsonl").write_text("".join(lines))


def texts_of(folder: Path, kind: str, *overrides: str) -> tuple[RetrieverRecipe, TextMaterials]:
    write_scored(folder)
    recipe = read(TEXTS.format(folder=folder, kind=kind), folder, *overrides)
    return recipe, open_text_materials(recipe)


def test_scores_that_are_not_finite_are_named(tmp_path: Path) -> None:
    recipe, materials = texts_of(tmp_path, "margin_mse")
    builder = TextBatchBuilder(materials, recipe)
    batch = builder.batch(builder.sample(torch.from_numpy(materials.texts.splits["train"][:4]), 1))
    assert batch.scores is not None
    batch.scores[0, 0] = torch.inf
    guard = NonFiniteGuard()
    guard.in_a_row = 2
    with pytest.raises(FloatingPointError, match="first seen in the scores of the batch, and"):
        guard.passes(3, float("nan"), 1.0, nn.Linear(2, 2), [batch.floats])


@cache
def tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features of 24 questions and of their passages, and another model's."""
    query, passage, a, b = (unit(24, D, seed=seed) for seed in range(20, 24))
    return query, passage, a, b


QUEUED = torch.tensor([4, 7, 11, 5])


def computed(
    recipe: RetrieverRecipe, materials: TextMaterials, rank: int, size: int, scorer: nn.Module | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The loss of 16 queries, and the gradients of all features over the number of ranks.

    scorer: of token vectors; a text has one token then.
    """
    builder = TextBatchBuilder(materials, recipe)
    batch = builder.batch(builder.sample(torch.from_numpy(materials.texts.splits["train"][:16]), 1), rank, size)
    query, passage = (table.clone().requires_grad_() for table in tables()[:2])
    objective = QueryObjective(recipe.loss, features=D, scorer=scorer)
    objective.queues.double()
    if getattr(recipe.loss, "queue", 0):
        objective.keep(QUEUED[rank::size], passage=unit(4, D, seed=9)[rank::size])
        objective.end_step(True)
    # a question is its positive's number
    rows = batch.query_ids
    given: dict[str, Any] = batch.inputs(torch.device("cpu"))
    if recipe.loss.other_model:
        given["guides"] = tables()[2][rows], tables()[3][batch.key_ids], 30.0
    if len(objective.queues):
        given["queue"] = objective.queued("passage")
    if "scores" in given:
        given["scores"] = given["scores"].double()
    sides: Any = query[rows], passage[batch.key_ids]
    if scorer is not None:
        sides = [(x[:, None], torch.ones(len(x), 1, dtype=torch.bool)) for x in sides]
    loss = objective(*sides, torch.tensor(SCALE), **given)
    gradients = torch.autograd.grad(loss, (query, passage))
    return loss.detach(), [gradient / size for gradient in gradients]


def formula(recipe: RetrieverRecipe, materials: TextMaterials) -> Tensor:
    """The loss of 16 queries, query by query."""
    settings: Any = recipe.loss
    builder = TextBatchBuilder(materials, recipe)
    sampled = builder.sample(torch.from_numpy(materials.texts.splits["train"][:16]), 1)
    query, passage, a, b = tables()
    rows = torch.tensor([one.positives[0] for one in sampled])
    own = getattr(settings, "own_negatives", False)
    drawn = {row for one in sampled for row in (*one.positives, *(() if own else one.negatives))}
    keys = torch.tensor(sorted(drawn))
    positive = rows[:, None] == keys
    q, k = query[rows], passage[keys]
    in_batch = dense_softmax(q, k, SCALE, positive=positive)
    if settings.kind == "dcl":
        return dense_decoupled(q, k, SCALE, positive=positive)
    if settings.kind == "distill":
        return dense_distilled(q, k, SCALE, 30 * a[rows] @ b[keys].T, settings.weight, positive=positive)
    if settings.kind == "gist":
        guide = a[rows] @ b[keys].T
        false = (guide > guide[positive][:, None]) & ~positive
        if not settings.contrast_anchors:
            return dense_softmax(q, k, SCALE, positive=positive, excluded=false)
        # pairs of queries, and of their first passages
        similar, same = [(q @ k.T).masked_fill(false, -torch.inf)], rows[:, None] == rows
        for one, other in ((q, a[rows]), (passage[rows], b[rows])):
            out = (other @ other.T > guide[positive][:, None]) | same
            similar.append((one @ one.T).masked_fill(out, -torch.inf))
        x = torch.cat(similar, 1)
        return F.cross_entropy(SCALE * x, positive.int().argmax(1))
    if settings.kind in ("kl", "margin_mse"):
        losses = []
        for one, row in zip(sampled, rows.tolist(), strict=True):
            scores = dict(materials.texts.queries[one.query].scores)
            if not scores:
                continue
            listed = [*one.positives, *one.negatives]
            x = SCALE * passage[listed] @ query[row]
            s = settings.score_scale * torch.tensor([scores[passage] for passage in listed], dtype=torch.float64)
            kl = F.kl_div(x.log_softmax(0), s.log_softmax(0), log_target=True, reduction="sum")
            losses.append(kl if settings.kind == "kl" else F.mse_loss(x[0] - x[1:], s[0] - s[1:]))
        return settings.weight * torch.stack(losses).mean() + (1 - settings.weight) * in_batch
    losses = []
    for one, row in zip(sampled, rows.tolist(), strict=True):
        right = [SCALE * query[row] @ passage[row]]
        wrong = [j for j in drawn if j != row] if settings.in_batch else []
        x = [SCALE * query[row] @ passage[j] for j in wrong]
        if settings.queue:
            x += [SCALE * query[row] @ key for key, j in zip(unit(4, D, seed=9), QUEUED, strict=True) if j != row]
        if own:
            x += [(SCALE + settings.hardness_strength) * query[row] @ passage[j] for j in one.negatives]
        losses.append(F.cross_entropy(torch.stack(right + x), torch.tensor(0)))
    return torch.stack(losses).mean()


QUERIES = [
    ("infonce", ("loss.queue=12",)),
    ("infonce", ("loss.own_negatives=true", "loss.hardness_strength=2.0", "loss.hardness_mode=hard_negatives")),
    ("infonce", ("loss.own_negatives=true", "loss.in_batch=false")),
    ("gist", ("loss.guide=.",)),
    ("gist", ("loss.guide=.", "loss.contrast_anchors=true", "loss.contrast_positives=true")),
    ("distill", ("loss.teacher=.", "loss.weight=0.25")),
    ("dcl", ()),
    ("kl", ("loss.weight=0.75", "loss.score_scale=2.0")),
    ("margin_mse", ()),
]


@pytest.mark.parametrize(("kind", "overrides"), [QUERIES[-2], QUERIES[-1], ("infonce", ("loss.label_smoothing=0.1",))])
def test_a_loss_of_single_tokens_is_that_of_one_vector(tmp_path: Path, kind: str, overrides: tuple[str, ...]) -> None:
    recipe, materials = texts_of(tmp_path, kind, *overrides)
    (loss, gradients), (late, of_late) = (computed(recipe, materials, 0, 1, scorer) for scorer in (None, MaxSim()))
    torch.testing.assert_close(late, loss, rtol=1e-12, atol=0)
    for one, other in zip(of_late, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_other_losses_of_a_late_retriever_are_refused(tmp_path: Path) -> None:
    for overrides, line in (
        (["loss.kind=dcl"], 'loss.kind: must be "infonce", "kl" or "margin_mse" with model.kind = "late"; got "dcl"'),
        (["loss.queue=64"], 'loss.queue: must be 0 with model.kind = "late"; got 64'),
        (["loss.own_negatives=true"], 'loss.own_negatives: must be false with model.kind = "late"; got true'),
    ):
        assert refusal(tiny_retriever, tmp_path, "model.kind=late", *overrides).endswith(line)


def _on_a_rank(rank: int, _: Any, recipe: RetrieverRecipe, materials: TextMaterials) -> tuple[Tensor, list[Tensor]]:
    return computed(recipe, materials, rank, 4)


@pytest.mark.parametrize(("kind", "overrides"), QUERIES)
def test_a_loss_of_queries_is_its_formula_on_four_ranks_too(
    tmp_path: Path, pool: Pool, kind: str, overrides: tuple[str, ...]
) -> None:
    recipe, materials = texts_of(tmp_path, kind, *overrides)
    loss, gradients = computed(recipe, materials, 0, 1)
    torch.testing.assert_close(loss, formula(recipe, materials), rtol=1e-12, atol=0)
    answers = pool.run(_on_a_rank, 4, recipe, materials)
    for other, _ in answers:
        torch.testing.assert_close(other, loss, rtol=1e-12, atol=0)
    for one, *shares in zip(gradients, *(shares for _, shares in answers), strict=True):
        torch.testing.assert_close(sum(shares), one, rtol=1e-9, atol=1e-14)


# whole runs


def _steps(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]


def test_a_run_with_a_teacher_resumes_bit_for_bit_and_only_with_that_one(tmp_path: Path) -> None:
    short = ("train.examples=96", "train.batch=16", "evaluate.every=1.0")
    teacher = run_recipe(tiny_recipe(tmp_path, "name=teacher", *short, "model.features=8"), tmp_path / "runs").folder
    recipe = tiny_recipe(tmp_path, "loss.kind=distill", f"loss.teacher={teacher}", *short)
    whole = run_recipe(recipe, tmp_path / "whole").folder
    assert stopped(recipe, tmp_path / "runs", at=4).stopped_by
    settings = (teacher / "run.json").read_text()
    weights = contrastile.load(teacher).model.state_dict()
    weights["logit_scale"] += 1
    (teacher / "model.safetensors").rename(teacher / "kept")
    save_file(weights, teacher / "model.safetensors")
    other = json.loads(settings) | {"weights_sha256": checksum(teacher / "model.safetensors")}
    (teacher / "run.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="`checkpoint` must be this run's own, of teacher "):
        run_recipe(recipe, tmp_path / "runs", resume=True)
    (teacher / "kept").rename(teacher / "model.safetensors")
    (teacher / "run.json").write_text(settings)
    same_run(run_recipe(recipe, tmp_path / "runs", resume=True).folder, whole)
    # a finished run is loaded, and measured again, without its teacher
    (teacher / "run.json").unlink()
    assert contrastile.load(whole).encode_text(["letter A"]).shape == (1, 16)


def test_a_retriever_learns_from_scores_a_guide_and_its_own_negatives(tmp_path: Path) -> None:
    write_scored(tmp_path)
    losses = []
    short = (f"data.source={tmp_path}/scored.jsonl", "train.examples=32", "train.batch=16", "evaluate.every=1.0")
    overrides: list[tuple[str, ...]] = [
        ("name=guide",), ("loss.kind=gist", f"loss.guide={tmp_path}/runs/guide"),
        ("loss.kind=margin_mse", "loss.weight=0.5"), ("loss.own_negatives=true",),
    ]  # fmt: skip
    for more in overrides:
        recipe = tiny_retriever(tmp_path, *short, "evaluate.bm25=false", *more)
        losses.append(_steps(run_recipe(recipe, tmp_path / "runs").folder)[0])
    # the first step has the same weights and the same batch
    assert len(set(losses)) == 4
    assert losses[1] < losses[0]
    assert losses[3] < losses[0]


def test_a_guide_of_another_kind_or_size_has_its_sentence(tmp_path: Path) -> None:
    short = ("train.examples=16", "train.batch=16", "evaluate.every=1.0", "name=guide")
    guide = run_recipe(tiny_recipe(tmp_path, "data.image_size=8", *short), tmp_path / "runs").folder
    recipe = tiny_recipe(tmp_path, "loss.kind=gist", f"loss.guide={guide}")
    with pytest.raises(
        ValueError, match=re.escape("`loss.guide` must encode images of 16 pixels and 1 channels; got 8 and 1.")
    ):
        run_recipe(recipe, tmp_path / "runs")
    retriever = tiny_retriever(tmp_path, "loss.kind=gist", f"loss.guide={guide}")
    with pytest.raises(ValueError, match=re.escape("`loss.guide` must be a model of questions and passages; got ")):
        run_recipe(retriever, tmp_path / "runs")


def test_a_late_retriever_is_no_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").touch()
    late = SimpleNamespace(recipe=SimpleNamespace(kind="retriever", model=SimpleNamespace(kind="late")))
    monkeypatch.setattr(teacher_module, "load", lambda *_, **__: late)
    recipe = tiny_retriever(tmp_path, "loss.kind=gist", f"loss.guide={tmp_path}")
    with pytest.raises(ValueError, match=re.escape("`loss.guide` must have one vector for each text; got ")):
        run_recipe(recipe, tmp_path / "runs")


def test_a_folder_of_transformers_is_a_teacher_once_its_scale_is_given(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_scored(tmp_path)
    short = (f"data.source={tmp_path}/scored.jsonl", "train.examples=16", "train.batch=16", "evaluate.bm25=false")
    folder = tmp_path / "bert"
    tokenizer = open_text_materials(tiny_retriever(tmp_path, *short)).tokenizer
    config = transformers.BertConfig(
        vocab_size=200, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    words = ("loss.kind=distill", f"loss.teacher={folder}", "loss.weight=1.0", "evaluate.every=1.0")
    with pytest.raises(
        ValueError, match=re.escape("`loss.teacher_scale` must be given for a teacher without a scale of its own")
    ):
        run_recipe(tiny_retriever(tmp_path, *short, *words), tmp_path / "runs")
    recipe = tiny_retriever(tmp_path, *short, *words, "loss.teacher_scale=20.0")
    assert len(_steps(run_recipe(recipe, tmp_path / "runs").folder)) == 1


MISTAKES = [
    (tiny_recipe, ["loss.kind=gist", "loss.guide={here}", "loss.margin_strategy=rel"],
     "`loss.margin_strategy` must be one of absolute, relative; got 'rel'."),
    (tiny_recipe, ["loss.kind=distill", "loss.teacher={here}", "loss.weight=1.5"],
     "`loss.weight` must be from 0 to 1; got 1.5."),
    (tiny_recipe, ["loss.kind=supcon", "loss.form=mean"], "`loss.form` must be one of out, in; got 'mean'."),
    (tiny_recipe, ["loss.kind=infonce", "loss.hardness_strength=1.0", "loss.hardness_mode=some"],
     "`loss.hardness_mode` must be one of in_batch_negatives, hard_negatives, all_negatives; got 'some'."),
    (tiny_recipe, ["loss.kind=gist", "loss.guide={here}"],
     "`loss.guide` must be the folder of a run, or of a model of transformers; got "),
    (tiny_recipe, ["loss.kind=gist"], "loss.guide: missing; loss.kind = \"gist\" needs it"),
    (tiny_recipe, ["loss.kind=gist", "loss.guide=nowhere"], 'loss.guide: must be a folder; there is no "nowhere"'),
    (tiny_recipe, ["loss.kind=gist", "loss.guide={here}", "model.precompute=true", "model.locked=['image']",
                   "data.augment=false"],
     "loss.guide: must be left out with model.precompute: that model needs images"),
    (tiny_recipe, ["loss.kind=infonce", "loss.queue=47"],
     "loss.queue: must have room for the keys of a step, 48 at most; got 47"),
    (tiny_recipe, ["loss.kind=infonce", "loss.queue=999999999999"],
     "loss.queue: must make a queue that fits into the "),
    (tiny_retriever, ["loss.queue=95"], "loss.queue: must have room for the keys of a step, 96 at most; got 95"),
    (tiny_retriever, ["loss.queue=999999999999"], "loss.queue: must make a queue that fits into the "),
    (tiny_retriever, ["loss.own_negatives=true", "data.negatives=0"],
     "loss.own_negatives: must be false with data.negatives = 0; got true"),
    (tiny_retriever, ["loss.in_batch=false"], "loss.in_batch: must be true without loss.own_negatives; got false"),
    (tiny_retriever, ["loss.in_batch=false", "loss.own_negatives=true", "loss.queue=500"],
     "loss.queue: must be 0 with loss.in_batch = false; got 500"),
    (tiny_retriever, ["loss.in_batch=false", "loss.own_negatives=true", "data.positives=2"],
     "data.positives: must be 1 with loss.in_batch = false; got 2"),
    (tiny_retriever, ["loss.hardness_strength=5.0", "loss.hardness_mode=hard_negatives"],
     "loss.hardness_mode: must be \"in_batch_negatives\" or \"all_negatives\": no query has negatives of its own; "),
    (tiny_retriever, ["loss.kind=kl", "data.negatives=0"],
     'data.negatives: must be at least 1 with data.positives = 1 and loss.kind = "kl"; got 0'),
    (tiny_retriever, ["loss.kind=kl"], '`data.source` must have scores of its passages for loss.kind = "kl"; got none'),
]  # fmt: skip


@pytest.mark.parametrize(("make", "overrides", "sentence"), MISTAKES)
def test_a_mistake_has_its_sentence_before_anything_is_trained(
    tmp_path: Path, make: Any, overrides: list[str], sentence: str
) -> None:
    (tmp_path / "here").mkdir()
    words = [text.format(here=tmp_path / "here") for text in overrides]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        run_recipe(make(tmp_path, *words), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
