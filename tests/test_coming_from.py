"""Code of the pages for users of other libraries: it runs, and equals the code that it replaces."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparison import same
from ranks import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastile
from contrastile import ClipLoss, InfoNCELoss, SupConLoss, contrast, encode
from contrastile.gradcache.introspect import of_its_module
from contrastile.integrations.sentence_transformers import CachedRankingLoss
from contrastile.integrations.sides import encode_sides, loss_of_sides
from contrastile.losses import Softmax

FOLDER = Path(contrastile.__file__).parent.parent / "docs" / "coming_from"
PAGES = "".join(page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md")))
N = 6
# features of the texts' encoder
WIDTH = 48


def blocks(heading: str) -> list[str]:
    """The code under a heading of the pages."""
    (section,) = (text for text in re.split(r"^#+ ", PAGES, flags=re.MULTILINE) if text.startswith(f"{heading}\n"))
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def run(code: str, **names: Any) -> dict[str, Any]:
    """The names that a block leaves, begun with these, which it does not import then."""
    for name in names:
        code = re.sub(rf"^from .+ import .*\b{name}\b.*\n", "", code, flags=re.MULTILINE)
    exec(compile(code, "coming_from", "exec"), names)
    return names


def gradients(*modules: nn.Module) -> dict[str, Tensor]:
    return {
        f"{place}.{name}": torch.zeros_like(p) if p.grad is None else p.grad
        for place, module in enumerate(modules)
        for name, p in module.named_parameters()
    }


class Clip(nn.Module):
    """Two towers with the face of open_clip's models."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
        self.words = nn.Embedding(20, 4)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(-5.0)) if bias else None

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        features: Tensor = self.visual(images)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, texts: Tensor, normalize: bool = False) -> Tensor:
        features = self.words(texts).mean(1)
        return F.normalize(features, dim=-1) if normalize else features

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        image, text = self.encode_image(images, normalize=True), self.encode_text(texts, normalize=True)
        found = {"image_features": image, "text_features": text, "logit_scale": self.logit_scale.exp()}
        return found if self.logit_bias is None else {**found, "logit_bias": self.logit_bias}


def clip_formula(image: Tensor, text: Tensor, scale: Tensor | float) -> Tensor:
    logits, diagonal = scale * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, diagonal) + F.cross_entropy(logits.T, diagonal)) / 2


def siglip_formula(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    z = 2 * torch.eye(len(image)) - 1
    return -F.logsigmoid(z * (scale * image @ text.T + bias)).sum() / len(image)


def clip_truth(model: Clip, images: Tensor, texts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(images, texts)
    formula = clip_formula if model.logit_bias is None else siglip_formula
    loss = formula(*out.values())
    loss.backward()
    return loss.detach(), gradients(model)


def open_clip_steps(rank: int, group: Any, place: int) -> None:
    W = dist.get_world_size(group)
    torch.manual_seed(1)
    truth = Clip(bias=place == 2).double()
    model = DistributedDataParallel(deepcopy(truth), process_group=group)
    for _ in range(2):
        images, texts = torch.randn(W * N, 5, dtype=torch.float64), torch.randint(0, 20, (W * N, 3))
        mine = slice(rank * N, rank * N + N)
        for each in (truth, model):
            each.zero_grad()
        left = run(blocks("OpenCLIP")[place], model=model, images=images[mine], texts=texts[mine])
        same((left["total_loss"].detach(), gradients(model.module)), clip_truth(truth, images, texts))
        with torch.no_grad():
            for p, q in zip(model.parameters(), truth.parameters(), strict=True):
                p -= 0.01 * p.grad
                q.copy_(p)


@pytest.mark.parametrize("place", range(3))
def test_open_clips_loop(pool: Pool, place: int) -> None:
    # the page's code knows the default group alone
    pool.check(open_clip_steps, 4, place)


def test_accelerates_loop() -> None:
    truth, images, texts = (
        Clip(bias=False).double(),
        torch.randn(N, 5, dtype=torch.float64),
        torch.randint(0, 20, (N, 3)),
    )
    model = deepcopy(truth)
    # its methods do not normalise by themselves
    for side in ("encode_image", "encode_text"):
        setattr(model, side, partial(getattr(model, side), normalize=True))
    accelerator = SimpleNamespace(
        autocast=nullcontext, unwrap_model=lambda x, keep_torch_compile: x, backward=lambda loss: loss.backward()
    )
    left = run(blocks("Accelerate")[0], accelerator=accelerator, model=model, images=images, texts=texts)
    same((left["loss"].detach(), gradients(model)), clip_truth(truth, images, texts))


def accumulated(model: Clip, images: Tensor, texts: Tensor, parts: int) -> None:
    """As open_clip's loop has it with --accum-freq: every part again, beside what the others gave before."""
    with torch.no_grad():
        before = [model(*part) for part in zip(images.chunk(parts), texts.chunk(parts), strict=True)]
    for place, part in enumerate(zip(images.chunk(parts), texts.chunk(parts), strict=True)):
        now = model(*part)
        both = [
            torch.cat([*(out[side] for out in before[:place]), now[side], *(out[side] for out in before[place + 1 :])])
            for side in ("image_features", "text_features")
        ]
        ClipLoss()(*both, now["logit_scale"]).backward()


def test_open_clips_accumulation_counts_the_scale_several_times() -> None:
    truth = Clip(bias=False).double()
    model, images, texts = deepcopy(truth), torch.randn(N, 5, dtype=torch.float64), torch.randint(0, 20, (N, 3))
    loss, wanted = clip_truth(truth, images, texts)
    accumulated(model, images, texts, 3)
    same((loss, gradients(model)), (loss, {**wanted, "0.logit_scale": 3 * wanted["0.logit_scale"]}))


def test_open_clips_own_losses() -> None:
    theirs = pytest.importorskip("open_clip.loss")
    image, text = F.normalize(torch.randn(2, N, 8, dtype=torch.float64), dim=-1)
    out = {"image_features": image, "text_features": text, "logit_scale": torch.tensor(10.0)}
    for kind, more in (("ClipLoss", {}), ("SigLipLoss", {"logit_bias": torch.tensor(-5.0)})):
        for dictionary in (False, True):
            how = {**out, **more, "output_dict": dictionary}
            torch.testing.assert_close(getattr(contrastile, kind)()(**how), getattr(theirs, kind)()(**how))


# --- texts


class Bert(nn.Module):
    """The face of a transformers model; with dropout, to be drawn alike."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = (
            nn.Embedding(20, WIDTH),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)),
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=self.mix(self.words(input_ids)) * attention_mask[..., None])


def batch(rows: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 20, (rows, 5)), "attention_mask": torch.ones(rows, 5, dtype=torch.int64)}


def caching() -> Any:
    return pytest.importorskip("grad_cache").GradCache


@pytest.mark.parametrize("theirs", [None, caching], ids=["formula", "grad_cache"])
def test_grad_caches_step(theirs: Callable[[], Any] | None) -> None:
    models = [Bert(), Bert()]
    queries, passages, positives = batch(N), batch(2 * N), torch.arange(0, 2 * N, 2)
    ours = deepcopy(models)
    if theirs is None:
        for model in (*models, *ours):
            model.eval()
        query, passage = (
            model(**x).last_hidden_state[:, 0] for model, x in zip(models, (queries, passages), strict=True)
        )
        loss = F.cross_entropy(query @ passage.T, positives)
        loss.backward()
    else:

        def formula(query: Tensor, passage: Tensor) -> Tensor:
            return F.cross_entropy(query @ passage.T, positives)

        torch.manual_seed(3)
        cache = theirs()(models, [4, 8], formula, get_rep_fn=lambda out: out.last_hidden_state[:, 0])
        loss = cache(queries, passages)
        torch.manual_seed(3)
    names = {"query_model": ours[0], "passage_model": ours[1], "queries": queries, "passages": passages}
    left = run(blocks("GradCache")[0], **names)
    found = (left["loss"].detach(), gradients(*ours))
    torch.testing.assert_close(found, (loss.detach(), gradients(*models)), rtol=1e-4, atol=1e-6)


def test_grad_caches_inputs() -> None:
    pair = nn.Bilinear(3, 3, 2)
    x, y = torch.randn(2, N, 3)
    torch.testing.assert_close(encode(pair, (x, y), sub_batch=4), pair(x, y))
    torch.testing.assert_close(encode(lambda x1, x2: pair(x1, input2=x2), (x, y), sub_batch=4), pair(x, y))
    # a list is one argument
    with pytest.raises(TypeError, match="input2"):
        encode(pair, [x, y], sub_batch=4)


def test_the_order_of_hard_negatives() -> None:
    query, right, wrong = torch.randn(3, N, 4)
    together = torch.stack([right, wrong], dim=1).flatten(0, 1)
    expected = F.cross_entropy(query @ torch.cat([right, wrong]).T, torch.arange(N))
    torch.testing.assert_close(InfoNCELoss()(query, torch.cat([right, wrong]), 1.0), expected)
    asked = InfoNCELoss()(query, together, 1.0, positives=torch.arange(0, 2 * N, 2))
    torch.testing.assert_close(asked, expected)
    assert not torch.isclose(InfoNCELoss()(query, together, 1.0), expected)


class Sentences(nn.Module):
    """The face of a SentenceTransformer: a dictionary in, with more than tensors, and one out.

    It leaves the tokens of a prompt out of the mean, and has a layer for each task.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bert = Bert().eval()
        self.tasks = nn.ModuleDict({task: nn.Linear(WIDTH, WIDTH) for task in ("query", "document")})

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        tokens = {name: features[name] for name in ("input_ids", "attention_mask")}
        states = self.bert(**tokens).last_hidden_state
        length = features.get("prompt_length", 0)
        pooled = states[:, int(length[0] if isinstance(length, Tensor) else length) :].mean(1)
        task = features.get("task")
        pooled = pooled if task is None else self.tasks[task](pooled)
        return {**features, "token_embeddings": states, "sentence_embedding": pooled}

    def __getitem__(self, place: int) -> nn.Module:
        return [self.bert][place]

    def get_embedding_dimension(self) -> int:
        return WIDTH


def ranking(anchor: Tensor, keys: Tensor) -> Tensor:
    scores = 20.0 * F.normalize(anchor, dim=-1) @ F.normalize(keys, dim=-1).T
    return F.cross_entropy(scores, torch.arange(len(anchor)))


def ranked(model: nn.Module, columns: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole batch at once."""
    anchor, *others = (model({**column})["sentence_embedding"] for column in columns)
    loss = ranking(anchor, torch.cat(others))
    loss.backward()
    return loss.detach(), gradients(model)


def by_the_page(model: nn.Module, columns: list[dict[str, Any]], **how: Any) -> Tensor:
    """The loss of the page's class, back-propagated."""
    run(blocks("sentence-transformers")[0], model=model)
    loss = CachedRankingLoss(model, mini_batch_size=4, **how)(columns, None)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    "more",
    [
        {"modality": "text"},
        {"prompt_length": 2},
        {"prompt_length": torch.tensor([2])},
        {"prompt_length": torch.full((N,), 2)},
        {"task": "document"},
    ],
    ids=["text", "prompt", "prompt, a tensor", "prompt, of rows", "task"],
)
def test_a_loss_for_the_trainer_of_sentence_transformers(more: dict[str, Any]) -> None:
    model = Sentences().double()
    ours = deepcopy(model)
    columns = [{**batch(N), **more} for _ in range(3)]
    same((by_the_page(ours, columns), gradients(ours)), ranked(model, columns))


def rows_of(columns: list[dict[str, Any]], rows: slice) -> list[dict[str, Any]]:
    """A rank's part."""
    return [
        {name: x[rows] if isinstance(x, Tensor) and name != "prompt_length" else x for name, x in column.items()}
        for column in columns
    ]


def wrapped_by_the_page(rank: int, group: Any, folder: Path) -> None:
    model, columns = torch.load(folder / "whole.pt", weights_only=False)
    W = dist.get_world_size(group)
    # the page's code knows the default group alone
    default, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    try:
        wrapped, rows = DistributedDataParallel(model), slice(rank * N // W, (rank + 1) * N // W)
        loss = by_the_page(wrapped, rows_of(columns, rows), gather_across_devices=True)
    finally:
        dist.GroupMember.WORLD = default
    torch.save((loss, gradients(model)), folder / f"{rank}.pt")


@pytest.mark.parametrize("W", [0, 1, 2])
@pytest.mark.parametrize("more", [{"task": "query"}, {"task": "document", "prompt_length": 2}], ids=["task", "prompt"])
def test_that_loss_with_a_data_parallel_wrapper(pool: Pool, tmp_path: Path, more: dict[str, Any], W: int) -> None:
    model = Sentences().double()
    columns = [{**batch(N), **more} for _ in range(3)]
    truth, ours = ranked(model, columns), deepcopy(model)
    ours.zero_grad()
    if W == 0:
        same((by_the_page(ours, columns), gradients(ours)), truth)
        return
    torch.save((ours, columns), tmp_path / "whole.pt")
    pool.check(wrapped_by_the_page, W, tmp_path)
    for rank in range(W):
        same(torch.load(tmp_path / f"{rank}.pt"), truth)


class Flag(nn.Module):
    """The face of FlagEmbedding's model."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.temperature, self.sub_batch_size = Bert().eval().double(), 0.5, 4

    def encode(self, features: Any) -> Tensor:
        assert not isinstance(features, list)
        return F.normalize(self.model(**features).last_hidden_state[:, 0], dim=-1)

    def forward(self, queries: Any, passages: Any, cross: bool) -> Tensor:
        loss = self._compute_cross_device_neg_loss if cross else self._compute_in_batch_neg_loss
        return loss(self.encode(queries), self.encode(passages), teacher_targets=None)[1]


def grouped_formula(model: nn.Module, queries: Any, passages: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of queries that each have two passages, the right one first."""
    query, passage = (F.normalize(model(**x).last_hidden_state[:, 0], dim=-1) for x in (queries, passages))
    loss = F.cross_entropy(query @ passage.T / 0.5, torch.arange(0, len(passage), 2))
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_flag_embeddings_model(listed: bool, cross: bool) -> None:
    model = run(blocks("FlagEmbedding")[0], BiEncoderOnlyEmbedderModel=Flag)["CachedModel"]()
    queries, passages = batch(N), batch(2 * N)
    truth = grouped_formula(deepcopy(model.model), queries, passages)
    if listed:
        queries, passages = (
            [{name: x[start : start + 4] for name, x in each.items()} for start in range(0, len(each["input_ids"]), 4)]
            for each in (queries, passages)
        )
    loss = model(queries, passages, cross)
    loss.backward()
    same((loss.detach(), gradients(model.model)), truth)


class Dense(nn.Module):
    """The face of Tevatron's model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.temperature = Bert().double(), 0.5

    def encode_query(self, query: Any) -> Tensor:
        return F.normalize(self.encoder(**query).last_hidden_state[:, 0], dim=-1)

    encode_passage = encode_query


def test_tevatrons_model() -> None:
    names = {"DenseModel": Dense, "EncoderOutput": SimpleNamespace}
    model = run(blocks("Tevatron")[0], **names)["CachedModel"]()
    model.encoder.eval()
    queries, passages = batch(N), batch(2 * N)
    truth = grouped_formula(deepcopy(model.encoder), queries, passages)
    loss = model(queries, passages).loss
    loss.backward()
    same((loss.detach(), gradients(model.encoder)), truth)


# --- pictures alone


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.trunk(pictures))


def simclr(z: Tensor, temperature: float) -> Tensor:
    scores = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(z) // 2))


def supcon(z: Tensor, labels: Tensor, temperature: float, alone: float | None = None) -> Tensor:
    """The paper's equation 2: the mean over the anchors that have a positive, or with `alone` as the others' loss."""
    itself = torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.T / temperature).masked_fill(itself, -torch.inf).log_softmax(dim=1)
    positive = (labels[:, None] == labels) & ~itself
    rows = logits.masked_fill(~positive, 0).sum(1) / positive.sum(1)
    return -(rows[positive.any(1)] if alone is None else rows.where(positive.any(1), -alone)).mean()


@pytest.fixture
def views() -> dict[str, Tensor]:
    a, b = torch.randn(2, N, 3, 6, 6, dtype=torch.float64)
    return {"view_a": a, "view_b": b, "labels": torch.tensor([0, 0, 1, 1, 1, 2])}


def test_simclr_and_supcon(views: dict[str, Tensor]) -> None:
    model = Simple().double()
    truth = deepcopy(model)
    left = run(blocks("SimCLR and SupCon")[0], model=model, **views)
    z = F.normalize(truth(torch.cat([views["view_a"], views["view_b"]])), dim=-1)
    wanted = simclr(z, 0.5), supcon(z, views["labels"].repeat(2), 0.07)
    for found, each in zip((left["loss"], left["supervised"]), wanted, strict=True):
        model.zero_grad()
        truth.zero_grad()
        found.backward(retain_graph=True)
        each.backward(retain_graph=True)
        same((found.detach(), gradients(model)), (each.detach(), gradients(truth)))


def test_supcons_other_arguments() -> None:
    features, labels = F.normalize(torch.randn(N, 3, 4, dtype=torch.float64), dim=-1), torch.arange(N)
    flat = features.flatten(0, 1)
    # no labels, more than two views
    torch.testing.assert_close(SupConLoss()(features, labels, 10.0), supcon(flat, labels.repeat_interleave(3), 0.1))
    # a label that no other has leaves the mean
    few = torch.tensor([0, 0, 1, 1, 2, 3])
    found = SupConLoss()(features[:, 0], few, 10.0)
    torch.testing.assert_close(found, supcon(features[:, 0], few, 0.1))
    # or counts as 0 in it: four of six anchors have a positive
    torch.testing.assert_close(found * 4 / 6, supcon(features[:, 0], few, 0.1, alone=0.0))


def test_supcons_anchors_of_one_view_and_its_mask() -> None:
    features, labels = F.normalize(torch.randn(N, 3, 4, dtype=torch.float64), dim=-1), torch.arange(N) // 2
    views, alike = torch.cat(features.unbind(1)), labels[:, None] == labels
    itself = torch.eye(3 * N, dtype=torch.bool)
    logits = (10.0 * views @ views.T).masked_fill(itself, -torch.inf).log_softmax(dim=1)
    positive = alike.repeat(3, 3) & ~itself
    rows = -logits.masked_fill(~positive, 0).sum(1) / positive.sum(1)
    loss = Softmax(exclude_self=True)
    one = contrast(features[:, 0], views, scale=10.0, loss=loss, query_labels=labels, key_labels=labels.repeat(3))
    torch.testing.assert_close(one, rows[:N].mean())
    listed = torch.where(alike.float().repeat(3, 3) != 0, torch.arange(3 * N), -1)
    torch.testing.assert_close(contrast(views, views, scale=10.0, loss=loss, positives=listed), rows.mean())


def test_a_queue_of_labelled_keys() -> None:
    """The page's queue is empty; the keys of an earlier step then count as further examples, without gradients."""
    torch.manual_seed(0)
    model, labels = nn.Linear(5, 16), torch.arange(N) // 2
    left = run(blocks("pytorch-metric-learning")[0], model=model, inputs=torch.randn(N, 5), labels=labels)
    x, queue = left["x"], left["queue"]
    torch.testing.assert_close(left["loss"], supcon(x, labels, 0.1))
    torch.testing.assert_close((queue.keys, queue.ids), (x.detach(), labels))


def test_a_trunk_is_cached_before_a_head_with_batch_normalisation(views: dict[str, Tensor]) -> None:
    model = Simple().double()
    truth = deepcopy(model)
    with pytest.raises(ValueError, match="BatchNorm1d in training mode"):
        encode(model, views["view_a"], sub_batch=4)
    left = run(blocks("Batch normalisation")[0], trunk=model.trunk, head=model.head, **views)
    loss = simclr(F.normalize(truth(torch.cat([views["view_a"], views["view_b"]])), dim=-1), 0.5)
    loss.backward()
    same((left["loss"].detach(), gradients(model)), (loss.detach(), gradients(truth)))
    torch.testing.assert_close(dict(model.named_buffers()), dict(truth.named_buffers()), rtol=1e-9, atol=1e-11)


def test_kept_statistics_can_be_cached(views: dict[str, Tensor]) -> None:
    model = Simple().double().train()
    run(blocks("Batch normalisation")[1], model=model)
    encode(model, views["view_a"], sub_batch=4).square().sum().backward()
    found = gradients(model)
    model.zero_grad()
    model(views["view_a"]).square().sum().backward()
    torch.testing.assert_close(found, gradients(model))
    assert model.head[1].weight.grad.abs().sum() > 0


def test_the_last_sub_batch_of_the_last_side_runs_once(caplog: Any) -> None:
    torch.manual_seed(0)
    tower, sides = nn.Linear(5, 4).double(), [torch.randn(N, 5).double() for _ in range(3)]

    @of_its_module
    def unit_rows(module: nn.Module, x: Tensor) -> Tensor:
        return F.normalize(module(x), dim=-1)

    loss_of_sides(InfoNCELoss(), [unit_rows(tower, x) for x in sides], 9.0).backward()
    wanted, runs = gradients(tower), list[int]()
    tower.register_forward_hook(lambda _, inputs, __: runs.append(len(inputs[0])))
    # two passes of three sub-batches of three sides; a size "auto" retains none, and measures first
    cases: list[tuple[Any, Any, int]] = [(2, 0, 18 - 1), (N, 0, 6 - 1), (2, 2, 18 - 6), (2, "auto", 18 - 9)]
    for size, retain, forwards in [*cases, ("auto", 0, 0)]:
        runs.clear()
        tower.zero_grad()
        features = encode_sides([(tower, unit_rows)] * 3, sides, size, None, retain)
        loss_of_sides(InfoNCELoss(), features, 9.0).backward()
        same(gradients(tower), wanted)
        assert len(runs) == forwards or (size == "auto" and runs[-3:] == [N] * 3)
    # where its graph has no room in the backward, it is encoded again
    ends = [True]

    @of_its_module
    def tight_rows(module: nn.Module, x: Tensor) -> Tensor:
        def out_of_memory(gradient: Tensor) -> None:
            if ends and ends.pop():
                raise torch.OutOfMemoryError

        rows = unit_rows(module, x)
        if rows.requires_grad:
            rows.register_hook(out_of_memory)
        return rows

    runs.clear()
    tower.zero_grad()
    loss_of_sides(InfoNCELoss(), encode_sides([(tower, tight_rows)] * 3, sides, 2, None, 0), 9.0).backward()
    same(gradients(tower), wanted)
    assert len(runs) == 18
    assert caplog.messages == ["encode: out of memory; 0 of 3 sub-batches keep their graph"]
    sentence = r"`sub_batch` must be given for a side without an `attention_mask`; got None\. Say how many"
    with pytest.raises(ValueError, match=sentence):
        encode_sides([(tower, unit_rows)], sides[:1], None, 64, 0)
    sentence = r"`sides` must have a key for each query; got 4 and 3 rows\. Let the data have a pair in every row\."
    with pytest.raises(ValueError, match=sentence):
        loss_of_sides(InfoNCELoss(), [torch.ones(4, 2), torch.ones(3, 2)], 1.0)
    sentence = r"`bias` must be left out with InfoNCELoss; got one\. A bias is added to the logits of SigLipLoss\."
    with pytest.raises(ValueError, match=sentence):
        loss_of_sides(InfoNCELoss(), [torch.ones(4, 2), torch.ones(4, 2)], 1.0, -10.0)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (contrastile.GISTLoss(), "GISTLoss, which needs guide_query, guide_key. Call it in a compute_loss of your own"),
        (SupConLoss(), "SupConLoss, which needs labels. Call it in a compute_loss"),
        (contrastile.ScoreDistillLoss(), "ScoreDistillLoss, which needs scores. Call it in a compute_loss"),
        (ClipLoss(reduction="none"), "one of every row, by reduction='none'. Leave it out, for the mean."),
    ],
)
def test_losses_of_other_arguments_than_two_sides_and_a_scale(loss: nn.Module, got: str) -> None:
    with pytest.raises(ValueError, match=f"`loss` must .*; got {got}"):
        loss_of_sides(loss, [torch.ones(4, 2), torch.ones(4, 2)], 1.0)
