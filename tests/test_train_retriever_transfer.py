"""A finished retriever measured on other texts than its recipe's: folders in BEIR's format and files of questions."""

import json
import shutil

import pytest
from tiny_texts import ANIMALS, COLOURS, PLACES, entries, tiny_retriever

import contrastile
from contrastile.cli.main import main
from contrastile.data.texts import Passage
from contrastile.evaluate.ranking import means, measure, read_judgements, read_run
from contrastile.train.loop import evaluate_run, run_recipe

WORDS = [(colour, animal, place) for place in PLACES for animal in ANIMALS[:3] for colour in COLOURS[1:]]
OWN = ["held-out queries, retriever", "held-out queries, retriever, answers"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    recipe = tiny_retriever(folder, "evaluate.bm25=false", "data.query_prefix='where '", "train.examples=160")
    return run_recipe(recipe, folder / "runs").folder


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of the trained run that a test may write to."""
    return shutil.copytree(trained, tmp_path / "finished")


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def beir(folder, parts=("test", "dev")):
    """Passages that no run has seen, and questions of which the second passage is right in part as well."""
    (folder / "qrels").mkdir(parents=True)
    passages = [
        {"_id": f"d{n}", "title": animal, "text": f"{colour} {animal} {place}"}
        for n, (colour, animal, place) in enumerate(WORDS)
    ]
    lines(folder / "corpus.jsonl", passages)
    lines(folder / "queries.jsonl", [{"_id": f"q{n}", "text": f"the {' '.join(WORDS[n])}"} for n in range(12)])
    for number, part in enumerate(parts):
        asked = range(6 * number, 6 * number + 6)
        judged = [f"q{n}\td{n}\t2\nq{n}\td{n + 1}\t1\n" for n in asked]
        (folder / "qrels" / f"{part}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    return folder


def rows_of(folder):
    return {row["test"]: row for row in json.loads((folder / "evaluation.json").read_text())}


def by_hand(folder, other, queries):
    """nDCG@10 and recall@5 of the named queries, from the features that the loaded run gives."""
    run = contrastile.load(folder, device="cpu")
    read = [
        [json.loads(line) for line in (other / name).read_text().splitlines()]
        for name in ("corpus.jsonl", "queries.jsonl")
    ]
    corpus = [Passage(one["_id"], one["text"], one["title"]) for one in read[0]]
    asked = [one for one in read[1] if one["_id"] in queries]
    scores = run.encode_query([one["text"] for one in asked]) @ run.encode_passage(corpus).T
    found = {
        one["_id"]: {passage.id: float(score) for passage, score in zip(corpus, row, strict=True)}
        for one, row in zip(asked, scores, strict=True)
    }
    judged = {f"q{n}": {f"d{n}": 2, f"d{n + 1}": 1} for n in range(12) if f"q{n}" in queries}
    return means(measure(found, judged, ["nDCG@10", "recall@5", "hit@1"]))


def test_results_on_a_beir_folder_join_those_of_the_run(finished, tmp_path, capsys):
    other = beir(tmp_path / "colours")
    assert main(["evaluate", str(finished), "--texts", str(other), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    rows = rows_of(finished)
    assert list(rows) == [*OWN, "colours-dev, retriever", "colours-test, retriever"]
    for part, queries in (("test", {f"q{n}" for n in range(6)}), ("dev", {f"q{n}" for n in range(6, 12)})):
        row, truth = rows[f"colours-{part}, retriever"], by_hand(finished, other, queries)
        assert (row["queries"], row["choices"]) == (6, len(WORDS))
        assert row["measures"]["nDCG@10"] == pytest.approx(truth["nDCG@10"], abs=1e-9)
        assert row["measures"]["recall@5"] == pytest.approx(truth["recall@5"], abs=1e-9)
        assert row["recall"]["1"] == pytest.approx(truth["hit@1"], abs=1e-9)
        assert f"colours-{part}, retriever" in said
        # the rankings are there for other tools, and hold what the table says
        files = [finished / f"colours-{part}.{end}" for end in ("retriever.trec", "qrels")]
        again = means(measure(read_run(files[0]), read_judgements(files[1]), ["nDCG@10"]))
        assert again["nDCG@10"] == pytest.approx(row["measures"]["nDCG@10"], abs=1e-9)
    assert "held-out" not in said
    page = (finished / "report.html").read_text()
    assert page.index("What it finds: held-out queries") < page.index("What it finds: colours-test")


def test_a_part_measured_again_replaces_its_own_results_only(finished, tmp_path):
    other = beir(tmp_path / "colours", parts=("test", "train"))
    words = ["evaluate", str(finished), "--texts", str(other), "--name", "c.1", "--device", "cpu"]
    assert main(words) == 0
    before = rows_of(finished)
    assert list(before) == [*OWN, "c.1-test, retriever"]
    assert main([*words, "--split", "train"]) == 0
    assert main(words) == 0
    assert list(rows_of(finished)) == [*OWN, "c.1-train, retriever", "c.1-test, retriever"]
    assert rows_of(finished)["c.1-test, retriever"] == before["c.1-test, retriever"]
    assert (finished / "report.html").read_text().count("What it finds: c.1-test") == 1
    # the run's own results again, alone
    evaluate_run(finished, device="cpu")
    assert list(rows_of(finished)) == OWN


def test_an_index_of_the_corpus_gives_the_same_measures(finished, tmp_path, capsys):
    other = beir(tmp_path / "colours", parts=("test",))
    assert main(["encode", str(finished), str(other), "--out", str(tmp_path / "index"), "--device", "cpu"]) == 0
    words = ["evaluate", str(finished), "--texts", str(other), "--device", "cpu"]
    assert main(words) == 0
    plain = rows_of(finished)["colours-test, retriever"]
    assert main([*words, "--index", str(tmp_path / "index")]) == 0
    assert rows_of(finished)["colours-test, retriever"]["measures"] == pytest.approx(plain["measures"], abs=1e-2)
    capsys.readouterr()
    assert main([*words[:3], str(tmp_path / "x.jsonl"), "--index", str(tmp_path / "index")]) == 2
    assert "`--texts` must be a file or folder" in capsys.readouterr().err


def test_all_questions_of_a_file_are_measured(finished, tmp_path):
    """Some with passages of their own, some with ids into a corpus, some with answers alone."""
    some = list(entries())[:5]
    tevatron = {"query_id": "t", "query": "green cat", "positive_document_ids": ["d0"], "negative_document_ids": []}
    lines(tmp_path / "asked.jsonl", [*some, tevatron, {"question": "which owl", "answer": "['owl']"}])
    lines(tmp_path / "more.jsonl", [{"_id": "d0", "text": "green fox house"}, {"_id": "d1", "text": "an owl"}])
    words = ["evaluate", str(finished), "--texts", str(tmp_path / "asked.jsonl"), "--device", "cpu"]
    assert main([*words, "--corpus", str(tmp_path / "more.jsonl")]) == 0
    rows = rows_of(finished)
    listed, answered = rows["asked-questions, retriever"], rows["asked-questions, retriever, answers"]
    assert (listed["queries"], answered["queries"]) == (6, 6)
    # a right and two wrong passages of each of five questions, of which some are the same, and two of the corpus
    assert listed["choices"] == len({(one["title"], one["text"]) for e in some for one in passages_of(e)}) + 2


def passages_of(entry):
    return [*entry["positive_ctxs"], *entry["hard_negative_ctxs"]]


def test_bm25_is_measured_where_the_recipe_has_it(tmp_path):
    folder = run_recipe(tiny_retriever(tmp_path, "train.examples=64"), tmp_path / "runs").folder
    other = beir(tmp_path / "colours", parts=("test",))
    assert main(["evaluate", str(folder), "--texts", str(other), "--device", "cpu"]) == 0
    assert list(rows_of(folder))[-2:] == ["colours-test, retriever", "colours-test, BM25"]


MISTAKES = {
    "--split no": '`--split` must be one of the parts of "{folder}/colours" with questions (train); got "no". ',
    "": '`--split` must be one of the parts of "{folder}/colours" with questions (train); got none. ',
    "--corpus {folder}/more.jsonl": (
        '`--corpus` must be left out with the folder "{folder}/colours"; got "{folder}/more.jsonl". '
    ),
}


def test_texts_that_cannot_be_measured_are_refused(finished, tmp_path, capsys):
    beir(tmp_path / "colours", parts=("train",))
    lines(tmp_path / "more.jsonl", [{"_id": "d0", "text": "green fox house"}])
    before = rows_of(finished)
    words = ["evaluate", str(finished), "--device", "cpu", "--texts"]
    for more, sentence in MISTAKES.items():
        given = more.format(folder=tmp_path).split()
        assert main([*words, str(tmp_path / "colours"), *given]) == 2
        assert sentence.format(folder=tmp_path) in capsys.readouterr().err
    (qrels,) = (tmp_path / "colours/qrels").iterdir()
    qrels.write_text("query-id\tcorpus-id\tscore\n")
    assert main([*words, str(tmp_path / "colours")]) == 2
    assert "`--texts` must have a question with a right passage; got " in capsys.readouterr().err
    lines(tmp_path / "answers.jsonl", [{"question": "which owl", "answer": "['owl']"}])
    assert main([*words, str(tmp_path / "answers.jsonl")]) == 2
    assert "`--texts` must come with passages to look among; got " in capsys.readouterr().err
    lines(tmp_path / "none.jsonl", [{"question": " ", "answer": "['owl']"}])
    assert main([*words, str(tmp_path / "none.jsonl"), "--bad-rows", "0.5"]) == 2
    said = capsys.readouterr().err
    assert "have at most 50% of rows that cannot be used; got 1 of 1" in said
    assert "Mend them, or raise --bad-rows." in said
    (tmp_path / "empty.jsonl").write_text("")
    assert main([*words, str(tmp_path / "empty.jsonl")]) == 2
    assert "`--texts` must hold a question" in capsys.readouterr().err
    assert rows_of(finished) == before
