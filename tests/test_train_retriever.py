"""A small run of a retriever: its batches, exact gradients, results, files, stops and resumes."""

import json
import signal
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import FIGURES
from refusals import refusal
from tiny_runs import interrupted, same_run
from tiny_texts import tiny_retriever

import contrastile
from contrastile.data.texts import Passage, Query, TextSet
from contrastile.models.towers import Retriever
from contrastile.modules import InfoNCELoss
from contrastile.train.log import read_metrics
from contrastile.train.loop import run_recipe, step
from contrastile.train.optim import build_optimizer
from contrastile.train.recipe import load_any_recipe
from contrastile.train.report import page as report_page
from contrastile.train.report.page import table
from contrastile.train.retriever.evaluation import WORDING, Rankings, evaluate, question_samples
from contrastile.train.retriever.job import RetrieverJob, SampledQuery, TextBatchBuilder
from contrastile.train.retriever.run import TokenStore, open_text_materials, training_texts
from contrastile.train.run import settled

BERT = (
    "{kind='transformers', pooling='%s', config={model_type='bert', hidden_size=16, num_hidden_layers=2, "
    "num_attention_heads=2, intermediate_size=32, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3}}"
)


def bert(side, pooling="mean"):
    return f"model.{side}={BERT % pooling}"


# in place of the recipe's own encoder
def swapped(folder, *overrides):
    from tiny_texts import write_text_recipe

    path = write_text_recipe(folder)
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("both")))
    return load_any_recipe(path, overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that several tests look at, with its figures."""
    folder = tmp_path_factory.mktemp("run")
    recipe = tiny_retriever(folder)
    with patch.multiple(report_page, **FIGURES):
        return recipe, run_recipe(recipe, folder / "runs")


def made(recipe):
    job = RetrieverJob.open(recipe)
    return job.materials, job.run, job.builder


def test_a_run_leaves_its_files_and_no_others(finished):
    _, outcome = finished
    assert sorted(path.name for path in outcome.folder.iterdir()) == [
        "evaluation.json", "held_out.BM25.trec", "held_out.qrels", "held_out.retriever.trec", "metrics.jsonl",
        "model.safetensors", "questions.json", "recipe.toml", "report.html", "run.json", "tokenizer.json",
    ]  # fmt: skip


def test_metrics_have_a_line_for_every_step_and_the_loss_falls(finished):
    lines = read_metrics(finished[1].folder / "metrics.jsonl")
    steps, probes = ([line for line in lines if line["kind"] == kind] for kind in ("step", "probe"))
    assert [step["batch"] for step in steps] == [16] * 10 + [32] * 5
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    assert [probe["examples"] for probe in probes] == [0, 160, 320]
    assert set(probes[0]["recall"]["held_out"]) == {"1", "5"}
    assert np.isfinite(probes[0]["recall"]["held_out"]["1"])


def test_the_table_has_answers_and_bm25(finished):
    _, outcome = finished
    rows = json.loads((outcome.folder / "evaluation.json").read_text())
    assert [row["test"] for row in rows] == [
        "held-out queries, retriever",
        "held-out queries, retriever, answers",
        "held-out queries, BM25",
        "held-out queries, BM25, answers",
    ]
    assert set(rows[0]["measures"]) == {"nDCG@10", "MRR@10", "MAP", *(f"recall@{k}" for k in (1, 5, 20, 100))}
    assert 0 <= rows[0]["recall"]["1"] <= rows[0]["recall"]["20"] <= 1
    assert "held-out queries, BM25" in outcome.table


def test_recall_that_repeats_the_hits_is_no_column():
    def row(recall):
        hits = {"1": 0.5, "5": 0.75, "20": 0.8, "100": 0.9}
        counts = {"test": "it", "queries": 40, "choices": 1000}
        return {**counts, "recall": hits, "measures": {"MAP": 0.1, "recall@100": recall}}

    once, twice = (table([row(0.9), row(recall)], WORDING)[0] for recall in (0.9, 0.85))
    assert twice == [*once, "recall@100"] == [*WORDING.heads]


def test_run_files_give_the_measures_of_the_table(finished, capsys):
    from contrastile.cli.main import main

    _, outcome = finished
    rows = json.loads((outcome.folder / "evaluation.json").read_text())
    run, judged = outcome.folder / "held_out.retriever.trec", outcome.folder / "held_out.qrels"
    assert main(["evaluate", str(run), "--judgements", str(judged)]) == 0
    said = capsys.readouterr().out
    assert f"{rows[0]['queries']} judged queries, {rows[0]['queries']} of them answered" in said
    assert f"nDCG@10     {rows[0]['measures']['nDCG@10']:.4f}" in said
    assert main(["evaluate", str(run), "--judgements", str(judged), "--measures", "recall@20", "MAP"]) == 0
    told = capsys.readouterr().out.splitlines()[1:]
    assert told == [f"{name:<12}{rows[0]['measures'][name]:.4f}" for name in ("recall@20", "MAP")]
    assert main(["evaluate", str(run)]) == 2
    assert capsys.readouterr().err == (
        f'`--judgements` must be given with rankings and their measures; got "{run}" alone. '
        "Name what is right, or a run's folder alone.\n"
    )
    assert main(["evaluate", str(run), "--judgements", str(judged), "--measures", "NDCG"]) == 2
    said = capsys.readouterr()
    assert "`--measures` must be measures among nDCG, MRR, MAP, recall, precision, hit; got" in said.err
    assert said.out == ""


def by_hand(recipe, *, passages, queries, found):
    """The rows of evaluation.json where `found` are the passages' rows for each query."""
    texts = TextSet(passages, queries, {"train": np.array([]), "held_out": np.arange(len(queries))})
    scores = -np.arange(len(passages), dtype=np.float32)[None].repeat(len(queries), axis=0)
    answered = Rankings("held_out", "retriever", passages, texts.splits["held_out"], np.array(found), scores)
    return evaluate(recipe, texts, [answered]), question_samples(answered, texts, recipe.evaluate.match)


def test_recalls_are_shares_of_positives_and_hits_are_not(tmp_path):
    passages = [Passage(f"p{n}", f"text {n}") for n in range(25)]
    queries = [Query("q", "?", positives=(0, 1, 7, 22))]
    (row,), _ = by_hand(tiny_retriever(tmp_path), passages=passages, queries=queries, found=[range(25)])
    assert row["recall"] == {"1": 1.0, "5": 1.0, "20": 1.0}
    # a recall at 100 of 25 is not told
    assert {name: value for name, value in row["measures"].items() if "recall" in name} == {
        "recall@1": 1 / 4,
        "recall@5": 2 / 4,
        "recall@20": 3 / 4,
    }


def test_answers_are_matched_in_texts_not_in_titles(tmp_path):
    passages = [Passage("a", "nothing here", title="Ulm"), Passage("b", "born in Ulm, Germany", title="x")]
    queries = [Query("q", "where was he born?", answers=("ulm",))]
    (row,), page = by_hand(tiny_retriever(tmp_path), passages=passages, queries=queries, found=[[0, 1]])
    assert (row["test"], row["recall"]) == ("held-out queries, retriever, answers", {"1": 0.0})
    # where no passage is listed, the page ticks those with an answer
    assert [(ask["place"], [one["right"] for one in ask["found"]]) for ask in page["asks"]] == [(2, [False, True])]


def test_the_report_marks_the_words_of_the_question(finished):
    page = (finished[1].folder / "report.html").read_text()
    assert "What it finds: held-out queries" in page
    assert page.count('class="ask"') == 8
    assert "<mark>" in page
    assert "<mark>the</mark>" not in page
    assert f"contrastile search {finished[1].folder} &#34;a question&#34;" in page
    assert "right at place" in page
    # this run has two batch sizes, and no curve of guessing
    assert "Vertical lines mark changes of the batch size." in page
    assert "dashed line" not in page


def test_a_loaded_run_encodes_queries_and_passages(finished):
    recipe, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    features = run.encode_query(["where is the red fox house", "", "where"])
    assert features.shape == (3, 16)
    assert features[0].norm().item() == pytest.approx(1.0)
    one = run.encode_passage(["def red_fox(): return house"], dimensions=4)
    assert one.shape == (1, 4)
    assert run.encode_query([]).shape == run.encode_passage([]).shape == (0, 16)
    # it would be taken for its letters
    with pytest.raises(ValueError, match=r"`texts` must be a list of texts; got str\. Pass \[text\], where there is"):
        run.encode_query("where is the red fox house")
    with pytest.raises(ValueError, match=r"`passages` must be a list of passages; got str\. Pass \[passage\], where"):
        run.encode_passage("def red_fox(): return house")
    assert run.recipe == settled(recipe)
    assert repr(run).endswith(": encode_query and encode_passage; 0.0 million parameters on cpu>")


def test_stored_tokens_equal_those_of_the_tokenizer(finished):
    _, outcome = finished
    tokenizer = contrastile.load(outcome.folder, device="cpu").tokenizer
    texts = ["red fox", "", "a red cat returns house forest", "blue"]
    store, plain = TokenStore(texts, tokenizer, 5), tokenizer.tokenise(texts, 5)
    rows = torch.tensor([2, 1, 0, 2, 3])
    got = store.rows(rows)
    width = got["input_ids"].shape[1]
    assert torch.equal(got["attention_mask"], plain["attention_mask"][rows][:, :width])
    assert torch.equal(got["input_ids"], plain["input_ids"][rows][:, :width])
    assert store.rows(torch.tensor([1]))["attention_mask"].tolist() == [[0]]
    assert len(TokenStore([], tokenizer, 5)) == 0


def test_a_source_without_held_out_questions_is_a_warning(tmp_path, caplog):
    folder = tmp_path / "set"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text('{"_id": "d", "text": "p"}\n{"_id": "e", "text": "r"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "what"}\n{"_id": "s", "text": "who"}\n')
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\ns\te\t1\n")
    recipe = tiny_retriever(tmp_path, f"data.source={folder}")
    caplog.clear()
    RetrieverJob.open(recipe)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: no questions are held out, so there is nothing to measure the run on; "
        "those of a BEIR folder are in files of qrels other than train.tsv, with grades above 0"
    ]


def test_a_source_without_training_questions_and_too_many_dimensions_are_refused(tmp_path):
    folder = tmp_path / "set"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text('{"_id": "d", "text": "p"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "what"}\n')
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    assert refusal(RetrieverJob.open, tiny_retriever(tmp_path, f"data.source={folder}")) == (
        f'`data.source` must have questions to train on ("{folder}"); got test alone. '
        "A BEIR folder has them in qrels/train.tsv."
    )
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t0\n")
    assert "; got none with a judgement above 0. " in refusal(
        RetrieverJob.open, tiny_retriever(tmp_path, f"data.source={folder}")
    )
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f'{{"query": "what {n}", "pos": ["p {n}"]}}\n' for n in range(3)))
    assert refusal(RetrieverJob.open, tiny_retriever(tmp_path, f"data.source={pairs}", f"data.test={pairs}")) == (
        f'`data.source` must have questions to train on ("{pairs}"); got held_out alone. '
        "Those of data.test are held out: leave some for training."
    )
    with pytest.raises(ValueError, match=r"model.dimensions: must be at most the 16 features there are; got 17"):
        tiny_retriever(tmp_path, "model.dimensions=[8, 17]")


def test_a_step_has_each_passage_once_and_all_positives(tmp_path):
    materials, _, feed = made(tiny_retriever(tmp_path))
    train = materials.texts.splits["train"]
    drawn = feed.sample(torch.from_numpy(train), step=1)
    assert all(len(one.positives) == 1 and len(one.negatives) == 2 for one in drawn)
    batch = feed.batch(drawn)
    keys = batch.key_ids.tolist()
    texts = [(materials.texts.passages[row].title, materials.texts.passages[row].text) for row in keys]
    assert len(set(texts)) == len(keys) < 3 * len(drawn)
    ordered = sorted(drawn, key=lambda one: -int(materials.queries.lengths[one.query]))
    for one, right in zip(ordered, batch.positives.tolist(), strict=True):
        assert {keys[place] for place in right if place >= 0} == set(one.positives)


def test_a_negative_that_is_listed_as_right_is_a_positive(tmp_path):
    materials, _, feed = made(tiny_retriever(tmp_path))
    first, second = materials.texts.queries[0], materials.texts.queries[1]
    # the first query's positive, drawn as a negative of the second; and a query with two right passages
    both = SampledQuery(0, first.positives, ()), SampledQuery(1, second.positives, first.positives)
    batch = feed.batch(both)
    assert len(batch.key_ids) == 2
    query = type(first)(first.id, first.text, first.positives + second.positives)
    materials.texts.queries[0] = query
    batch = feed.batch(both)
    assert sorted(map(sorted, batch.positives.tolist())) in ([[-1, 0], [0, 1]], [[-1, 1], [0, 1]])


def test_samples_depend_on_seed_and_step_only(tmp_path):
    materials, _, feed = made(tiny_retriever(tmp_path, "data.negatives=1"))
    rows = torch.from_numpy(materials.texts.splits["train"])
    again = TextBatchBuilder(materials, tiny_retriever(tmp_path, "data.negatives=1"))
    assert feed.sample(rows, 3) == again.sample(rows, 3)
    assert feed.sample(rows, 3) != feed.sample(rows, 4)


def test_the_loss_is_the_dense_formula(tmp_path):
    recipe = tiny_retriever(tmp_path, "model.dimensions=[4, 8]")
    materials, run, feed = made(recipe)
    run.model.double()
    batch = feed.batch(feed.sample(torch.from_numpy(materials.texts.splits["train"][:24]), 1))
    got = RetrieverJob(run, materials).loss(batch)
    queries, passages = run.model.encode_query(**batch.queries), run.model.encode_passage(**batch.passages)
    expected = []
    for cut in (16, 4, 8):
        q, p = F.normalize(queries[:, :cut].float(), dim=-1), F.normalize(passages[:, :cut].float(), dim=-1)
        expected.append(F.cross_entropy(20.0 * q.double() @ p.double().T, batch.positives[:, 0]))
    assert batch.positives.shape[1] == 1
    assert got.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-6)


ENCODERS = {
    "shared": (bert("both"),),
    "separate": (bert("query", "cls"), bert("passage", "last")),
    "projected": (bert("both"), "model.features=8", "model.normalise=false", "loss.scale=1.0"),
    "several positives and dimensions": (bert("both"), "model.dimensions=[4, 8]", "data.positives=2"),
    "adapted": (bert("both"), "model.lora={rank=2, dropout=0.2}"),
    "learned scale": (bert("both"), "loss.learn_scale=true"),
}


@pytest.mark.parametrize("encoders", ENCODERS.values(), ids=ENCODERS.keys())
def test_the_cached_gradients_are_the_plain_ones_with_dropout_on(tmp_path, encoders):
    """The plain run keeps the graph of every sub-batch and calls autograd once; it sees the same dropout."""
    if "lora" in str(encoders):
        pytest.importorskip("peft")
    recipe = swapped(tmp_path, *encoders)
    materials, run, feed = made(recipe)
    batch = feed.batch(feed.sample(torch.from_numpy(materials.texts.splits["train"][:30]), 1))
    model, sub_batch = run.model.train(), recipe.train.sub_batch
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # adapters begin at zero, where half of their gradients are
            if "lora_B" in name:
                parameter.normal_(std=0.1)

    def plain(encoder, tokens, size):
        cuts = [ids.split(size) for ids in tokens.values()]
        return torch.cat([encoder(*some) for some in zip(*cuts, strict=True)])

    torch.manual_seed(5)
    q = plain(model.encode_query, batch.queries, sub_batch.query)
    p = plain(model.encode_passage, batch.passages, sub_batch.passage)
    ids = {"positives": batch.positives, "query_ids": batch.query_ids, "key_ids": batch.key_ids}
    scale = model.logit_scale.exp()
    losses = [
        InfoNCELoss(backend="dense")(model.comparable(q, cut), model.comparable(p, cut), scale, **ids)
        for cut in (None, *recipe.model.dimensions)
    ]
    torch.stack(losses).mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    torch.manual_seed(5)
    value = RetrieverJob(run, materials).loss(batch)
    value.backward()
    assert len(batch.queries["input_ids"]) > 2 * sub_batch.query
    assert value.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    seen = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and expected[name] is not None:
            torch.testing.assert_close(
                parameter.grad, expected[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
            seen += int(parameter.grad.abs().max() > 1e-4)
    assert seen >= 4
    # the dropout was real: another seed gives another loss
    torch.manual_seed(6)
    assert RetrieverJob(run, materials).loss(batch).item() != value.item()


def test_accumulated_parts_have_their_own_negatives(tmp_path):
    recipe = tiny_retriever(tmp_path, "train.accumulate=3", "optim.clip_norm=0")
    materials, run, feed = made(recipe)
    drawn = feed.sample(torch.from_numpy(materials.texts.splits["train"][:12]), 1)
    parts = feed.parts(drawn, 3)
    expected = sum(RetrieverJob(run, materials).loss(part).item() for part in parts) / 3
    together = RetrieverJob(run, materials).loss(feed.batch(drawn)).item()
    said, _ = step(RetrieverJob(run, materials), build_optimizer(run.model, recipe.optim), parts)
    assert [len(part) for part in parts] == [4, 4, 4]
    assert said == pytest.approx(expected, rel=1e-5)
    assert together > said + 0.3


@pytest.mark.parametrize("side", ["query", "passage"])
def test_sub_batches_may_be_limited_by_tokens(tmp_path, monkeypatch, side):
    """The gradients are those of texts cut by number; no sub-batch has more tokens than were allowed."""
    real, seen = Retriever._encode, []

    def encode(model, which, input_ids, attention_mask):
        seen.extend([input_ids.numel()] if which == side else [])
        return real(model, which, input_ids, attention_mask)

    monkeypatch.setattr(Retriever, "_encode", encode)
    gradients = []
    counted = {"query": "passage=12, ", "passage": "query=8, "}[side]
    for budget in ((), (f"train.sub_batch={{{counted}{side}_tokens=40}}",)):
        job = RetrieverJob.open(tiny_retriever(tmp_path, *budget))
        (batch,) = job.builder.parts(job.builder.sample(torch.from_numpy(job.rows), 1), 1)
        assert (max(seen, default=0) > 40) == bool(budget)
        seen.clear()
        job.loss(batch).backward()
        gradients.append([parameter.grad for parameter in job.run.model.parameters() if parameter.requires_grad])
    assert 30 < max(seen) <= 40
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_prefixes_and_titles_are_read_by_the_encoders(tmp_path):
    said = {"query_prefix": "ask ", "passage_prefix": "doc ", "title_separator": " ~ "}
    recipe = tiny_retriever(tmp_path, *(f'data.{name}="{value}"' for name, value in said.items()))
    materials, _, _ = made(recipe)
    words = {number: word for word, number in materials.tokenizer._engine.get_vocab().items()}
    ids = materials.passages.rows(torch.tensor([0]))["input_ids"][0].tolist()
    assert [words[number] for number in ids[:4]] == ["doc", "fox", "~", "def"]
    assert words[materials.queries.rows(torch.tensor([0]))["input_ids"][0, 0].item()] == "ask"


def test_a_tokenizer_is_trained_without_held_out_queries(tmp_path):
    recipe = tiny_retriever(tmp_path)
    materials = open_text_materials(recipe)
    held = [materials.texts.queries[row] for row in materials.texts.splits["held_out"]]
    assert held
    texts = set(training_texts(materials.texts, recipe.data))
    assert not texts & {query.text for query in held}


@pytest.mark.parametrize("overrides", [(), ("train.precision=fp16", "optim.ema=0.9", "train.accumulate=2")])
def test_a_resumed_run_is_bit_identical(tmp_path, overrides):
    recipe = swapped(tmp_path, bert("both"), "save.steps=4", "train.examples=96", *overrides)
    whole = run_recipe(recipe, tmp_path / "whole").folder
    with interrupted(at=3, number=signal.SIGTERM) as steps:
        assert run_recipe(recipe, tmp_path / "runs").stopped_by == signal.SIGTERM
        again = run_recipe(recipe, tmp_path / "runs", resume=True).folder
    assert len(steps) == 5
    same_run(whole, again)
    assert not (again / "checkpoints").exists()
