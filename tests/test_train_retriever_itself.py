"""Questions that are passages too, as in BEIR's ArguAna and Quora, are neither their own results nor negatives."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_texts import tiny_retriever

import contrastile
from contrastile.cli.main import main
from contrastile.data.registry import open_texts
from contrastile.evaluate.ranking import read_judgements, read_run
from contrastile.experiments.retriever_memory import BM25_LABELS, RetrieverMemory
from contrastile.experiments.sweep import Trial
from contrastile.train.loop import run_recipe
from contrastile.train.ranks import Ranks
from contrastile.train.retriever.evaluation import probe
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import open_text_materials

ANIMALS = ["fox", "cat", "owl", "bee", "eel", "ant", "cow", "dog", "elk", "hen", "jay", "koi"]


def beir(folder, *, more=(), judged_itself=()):
    """A text for each animal, which is asked under its own id; the next one is right. The last ones are tested."""
    (folder / "qrels").mkdir(parents=True)
    texts = [{"_id": f"a{n}", "title": "", "text": f"the {name} says no {n}"} for n, name in enumerate(ANIMALS)]
    corpus = [*texts, *({"_id": f"m{n}", "text": text} for n, text in enumerate(more))]
    asked = [{"_id": one["_id"], "text": one["text"]} for one in texts]
    stranger = {"_id": "q", "text": "what does the fox say"}
    for name, rows in (("corpus", corpus), ("queries", [*asked, stranger])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for part, some in (("train", range(8)), ("test", range(8, 12))):
        rows = [f"a{n}\ta{(n + 1) % 12}\t1\n" for n in some]
        rows += [f"a{n}\ta{n}\t1\n" for n in some if n in judged_itself]
        rows += ["q\ta0\t1\n"] if part == "test" else []
        (folder / "qrels" / f"{part}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    return folder


def recipe_of(tmp_path, folder, *overrides):
    return tiny_retriever(tmp_path, f"data.source={folder}", "train.examples=32", "train.batch=8", *overrides)


def test_the_passage_with_a_questions_id_is_the_question_unless_judged_right(tmp_path, caplog):
    folder = beir(tmp_path / "set", judged_itself={2})
    texts = open_texts(str(folder), cache=tmp_path)
    assert caplog.messages == [
        f"{folder}: 11 of 13 questions have a passage's id, which is taken for the question itself: no result of it"
    ]
    known = {query.id: query.itself for query in texts.queries}
    assert known == {**{f"a{n}": n for n in range(12)}, "a2": None, "q": None}
    (second,) = (query for query in texts.queries if query.id == "a2")
    assert second.positives == (3, 2)


def test_a_probe_leaves_out_the_question_itself(tmp_path):
    """Every question is nearest to its own text, and nearer to the right one than to all others."""
    folder = beir(tmp_path / "set")
    recipe = recipe_of(tmp_path, folder)
    materials = open_text_materials(recipe)
    place = {passage.text: n for n, passage in enumerate(materials.texts.passages)}

    def passages(some):
        return F.one_hot(torch.tensor([place[one.text] for one in some]), 12).float()

    def questions(texts):
        own = torch.tensor([place.get(text, -1) for text in texts])
        following = F.one_hot((own + 1) % 12, 12)
        return (3 * F.one_hot(own.clamp(min=0), 12) * (own >= 0)[:, None] + 2 * following).float()

    run = SimpleNamespace(recipe=recipe, device="cpu", encode_query=questions, encode_passage=passages)
    # of the five questions three have their own text among the right ones of the others
    assert probe(run, materials) == {"test": {"1": 1.0, "5": 1.0}}


def test_a_probe_accepts_every_right_passage(tmp_path):
    folder = beir(tmp_path / "set")
    with (folder / "qrels" / "test.tsv").open("a") as file:
        file.write("a8\ta11\t1\n")
    recipe = recipe_of(tmp_path, folder)
    materials = open_text_materials(recipe)
    place = {passage.text: n for n, passage in enumerate(materials.texts.passages)}
    run = SimpleNamespace(
        recipe=recipe,
        device="cpu",
        encode_query=lambda texts: F.one_hot(torch.full((len(texts),), 11), 12).float(),
        encode_passage=lambda some: F.one_hot(torch.tensor([place[one.text] for one in some]), 12).float(),
    )
    # a8's second one and a10's only one
    assert probe(run, materials)["test"]["1"] == pytest.approx(2 / 5)


def test_ids_of_question_files_do_not_mark_the_question_itself(tmp_path):
    lines = [
        {"query_id": f"{n}", "query": f"question {n}", "positive_passages": [{"docid": f"{n + 1}", "text": f"p{n}"}]}
        for n in range(4)
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert {query.itself for query in open_texts(str(tmp_path / "x.jsonl"), cache=tmp_path).queries} == {None}


def test_a_question_is_not_mined_as_its_own_negative(tmp_path):
    texts = open_texts(str(beir(tmp_path / "set")), cache=tmp_path, mined=3)
    train = [texts.queries[row] for row in texts.splits["train"]]
    assert all(len(query.negatives) == 3 and query.itself not in query.negatives for query in train)
    # others are
    assert any(query.itself in other.negatives for query in train for other in train)


@pytest.mark.parametrize("size", [1, 2])
def test_a_question_is_no_negative_of_itself_in_a_batch(tmp_path, size):
    recipe = recipe_of(tmp_path, beir(tmp_path / "set"), "data.mined=1", "data.negatives=1")
    job = RetrieverJob.open(recipe)
    shares = [job.parts(torch.from_numpy(job.rows), 1, Ranks(rank, size))[0] for rank in range(size)]
    keys = torch.cat([share.key_ids for share in shares])
    asked = torch.cat([share.query_ids for share in shares])
    # each of seven is the right passage of the one before it, so it is in the batch
    assert sorted(set(asked.tolist()) & set(keys.tolist())) == list(range(1, 8))
    if size == 1:
        (batch,) = shares
        run = job.run
        q = F.normalize(run.model.encode_query(**batch.queries), dim=-1).double()
        p = F.normalize(run.model.encode_passage(**batch.passages), dim=-1).double()
        logits = 20.0 * q @ p.T
        itself = batch.query_ids[:, None] == batch.key_ids
        assert itself.sum() == 7
        expected = F.cross_entropy(logits.masked_fill(itself, float("-inf")), batch.positives[:, 0])
        assert job.loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        assert abs(F.cross_entropy(logits, batch.positives[:, 0]).item() - expected.item()) > 0.1


def results(folder, part="test"):
    rows = json.loads((folder / "evaluation.json").read_text())
    return {row["test"].rpartition(", ")[2]: row for row in rows if row["test"].startswith(part)}


def test_a_question_is_not_among_its_results(tmp_path):
    recipe = recipe_of(tmp_path, beir(tmp_path / "set"), "evaluate.depth=5")
    folder = run_recipe(recipe, tmp_path / "runs").folder
    run = contrastile.load(folder, device="cpu")
    texts = open_text_materials(recipe).texts
    asked = [texts.queries[row] for row in texts.splits["test"]]
    scores = run.encode_query([query.text for query in asked]) @ run.encode_passage(texts.passages).T
    found = read_run(folder / "test.retriever.trec")
    # the model would find them first
    assert all(int(scores[place].argmax()) == query.itself for place, query in enumerate(asked) if query.id != "q")
    for place, query in enumerate(asked):
        best = [row for row in scores[place].argsort(descending=True, stable=True).tolist() if row != query.itself]
        assert set(found[query.id]) == {texts.passages[row].id for row in best[:5]}
    for system in ("retriever", "BM25"):
        ranked = read_run(folder / f"test.{system}.trec")
        assert [len(ranking) for ranking in ranked.values()] == [5] * 5
        assert not any(query in ranking for query, ranking in ranked.items())
    assert read_judgements(folder / "test.qrels")["a8"] == {"a9": 1}
    # ten results of each question would be needed for measures of ten
    assert results(folder)["retriever"]["measures"].keys() == {"MAP", "recall@1", "recall@5"}
    # the comparison's row of BM25 is the same
    study = RetrieverMemory(recipe=recipe, memory=0, batches=[])
    compared = study.run(Trial(BM25_LABELS, None, {}), open_text_materials(recipe), Ranks(), tmp_path)
    assert compared.measures["test @1"] == results(folder)["BM25"]["recall"]["1"]


def test_transfer_evaluation_and_index_leave_out_the_question_itself(tmp_path):
    folder = run_recipe(tiny_retriever(tmp_path, "train.examples=64"), tmp_path / "runs").folder
    other = beir(tmp_path / "set", more=["a longer way to say no", "no"])
    words = ["evaluate", str(folder), "--texts", str(other), "--device", "cpu"]
    assert main(words) == 0
    plain = read_run(folder / "set-test.retriever.trec")
    assert main(["encode", str(folder), str(other), "--out", str(tmp_path / "index"), "--device", "cpu"]) == 0
    assert main([*words, "--index", str(tmp_path / "index")]) == 0
    for found in (plain, read_run(folder / "set-test.retriever.trec")):
        assert {query: len(ranking) for query, ranking in found.items()} == {
            **{f"a{n}": 13 for n in range(8, 12)}, "q": 14
        }  # fmt: skip
        assert not any(query in ranking for query, ranking in found.items())
