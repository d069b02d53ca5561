"""The index of a late retriever, its search, its evaluation among candidates, and the pages that show its matches."""

import html
import json
import re
import shutil

import numpy as np
import pytest
import torch
from refusals import refusal
from tiny_texts import tiny_retriever

import contrastile
from contrastile.cli.main import main
from contrastile.data.texts import Passage
from contrastile.retrieval import index as indexing
from contrastile.retrieval.index import Index, encode_corpus
from contrastile.retrieval.search import Search
from contrastile.scorers import MaxSim
from contrastile.train.loop import run_recipe
from contrastile.train.retriever.evaluation import alignment

LATE = ("model.kind=late", "model.features=8", "model.both={kind='bag', width=16}", "loss.backend=dense")
SHORT = ("train.examples=32", "train.batch=16", "evaluate.every=1.0")
PASSAGES = [Passage(f"p{n}", text, f"title {n}", f"f.py:{n}") for n, text in enumerate(
    ["def red_fox(): return house", "():", "raise river without green", "def blue_owl(x):\n    return forest",
     "white bee", "def red_cat(): return house(river)", "eel"]
)]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    how = ("model.tokenizer.query_length=8", "evaluate.candidates=100", "model.attend_to_expansion=true")
    return run_recipe(tiny_retriever(folder, *LATE, *how, *SHORT), folder / "runs").folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return run_recipe(tiny_retriever(folder, *SHORT, "evaluate.bm25=false"), folder / "runs").folder


@pytest.fixture
def run(trained):
    return contrastile.load(trained, device="cpu")


def encoded(run, folder, passages=PASSAGES, **settings):
    return encode_corpus(run, passages, folder, corpus="c", made_by={"w": "1"}, **{"shard": 3, **settings})


def refused(capsys, *words):
    assert main([*map(str, words)]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_shards_hold_the_vectors_of_all_tokens_that_are_compared(run, tmp_path):
    index = encoded(run, tmp_path)
    vectors, mask = run.encode_passage(PASSAGES)
    lengths = np.concatenate([np.load(tmp_path / f"{n:05}.lengths.npy", allow_pickle=False) for n in range(3)])
    features = np.concatenate([np.load(tmp_path / f"{n:05}.npy", allow_pickle=False) for n in range(3)])
    assert (lengths.dtype, lengths.tolist()) == (np.int32, mask.sum(1).tolist())
    # a title and the marker are left of a passage of brackets
    assert lengths[1] == 3
    assert features.dtype == np.float16
    np.testing.assert_allclose(features, vectors[mask].numpy(), atol=1e-3)
    assert (len(index), index.dimensions, index.kind) == (7, 8, "late")
    assert index.ids() == [passage.id for passage in PASSAGES]
    assert [index[row] for row in range(7)] == PASSAGES
    assert all(isinstance(shard, np.memmap) for shard in index._features)


def test_a_search_is_exact_over_shards_and_among_candidates(run, tmp_path):
    index = encoded(run, tmp_path)
    queries = run.encode_query(["red fox house", "where is the eel", "bee"])
    vectors, mask = run.encode_passage(PASSAGES)
    # rows of nearly equal scores may change places
    every = MaxSim()(queries, (vectors.half().float(), mask))
    expected = every.sort(dim=1, descending=True, stable=True)
    scores, rows = index.search(queries, 5)
    torch.testing.assert_close(scores, expected.values[:, :5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(every.gather(1, rows), scores, rtol=1e-5, atol=1e-5)
    among = np.array([[6, 2, -1], [3, 1, 0], [5, 5, 5]])
    scores, rows = index.search(queries, 2, among)
    assert rows[2].tolist() == [5, -1]
    for query in (0, 1):
        chosen = among[query][among[query] >= 0]
        assert set(rows[query].tolist()) <= set(chosen.tolist())
        best = every[query, chosen].sort(descending=True).values[:2]
        torch.testing.assert_close(scores[query], best, rtol=1e-5, atol=1e-5)
    assert index.search(queries, 100)[1].shape == (3, 7)


def test_candidates_of_an_index_of_one_vector_each_are_refused(single, tmp_path):
    run = contrastile.load(single, device="cpu")
    index = encoded(run, tmp_path)
    assert refusal(index.search, run.encode_query(["fox"]), 1, np.zeros((1, 1), dtype=np.int64)) == (
        '`candidates` must be left out for an index of kind "single"; got some. '
        "All of its passages are compared at once anyway."
    )


def test_an_index_of_a_later_format_is_refused(run, tmp_path):
    encoded(run, tmp_path)
    path = tmp_path / "index.json"
    path.write_text(json.dumps(indexing.sealed({**json.loads(path.read_text()), "format": 3})))
    assert refusal(Index, tmp_path) == (
        "`index` must be of a format up to 2; got 3. Encode the corpus again, or update contrastile."
    )


def test_candidates_that_the_index_lacks_are_no_results(run, tmp_path):
    index = encoded(run, tmp_path)
    search = Search(run, index, lambda questions: np.full((len(questions), 2), -1))
    assert search.results_text("red fox", 3, lines=1) == "no passage: the index has none of the candidates"


def test_a_question_that_is_no_utf_8_is_refused(run):
    rule, remedy = "be texts of characters that UTF-8 has", "Decode them as what they are."
    sentence = f'`texts` must {rule}; got "red \\udcff fox". {remedy}'
    assert refusal(run.encode_query, ["red \udcff fox"]) == sentence


def test_an_index_goes_on_and_with_damaged_lengths_is_refused(run, tmp_path):
    first = encoded(run, tmp_path / "index", PASSAGES[:3]).metadata["shards"]
    assert encoded(run, tmp_path / "index").metadata["shards"][:1] == first
    path = tmp_path / "index" / "00001.lengths.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for act in (Index, lambda folder: encoded(run, folder)):
        with pytest.raises(ValueError, match=r"`index` must hold 00001\.lengths\.npy as it was written; got other b"):
            act(tmp_path / "index")


def test_the_first_dimensions_of_each_token_may_be_kept(run, tmp_path):
    index = encoded(run, tmp_path, dimensions=4)
    assert index.dimensions == 4
    scores, _ = index.search(run.encode_query(["eel"], dimensions=4), 7)
    assert float(scores.max()) <= 8.01
    whole, cut = (alignment(run, "red fox", index[0], dimensions=size) for size in (None, 4))
    query, _ = run.encode_query(["red fox"], dimensions=4)
    key, mask = run.encode_passage([index[0]], dimensions=4)
    similar = query[0, : len(cut["query"])] @ key[mask].T
    assert cut["values"] == pytest.approx(similar.amax(1).tolist(), abs=1e-3)
    assert cut["values"] != whole["values"]


@pytest.mark.parametrize("kind", ["trained", "single"])
def test_an_index_of_the_first_dimensions_is_measured(request, kind, tmp_path, capsys):
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / kind)
    measured = {}
    for size in (4, 8):
        index = str(tmp_path / str(size))
        assert main(["encode", str(folder), "--out", index, "--dimensions", str(size)]) == 0
        assert main(["evaluate", str(folder), "--index", index]) == 0
        measured[size] = (folder / "held_out.retriever.trec").read_text()
    assert measured[4] != measured[8]
    capsys.readouterr()


def test_an_index_and_a_run_of_other_kinds_are_refused(trained, single, run, tmp_path, capsys):
    assert main(["encode", str(single), "--out", str(tmp_path / "single")]) == 0
    capsys.readouterr()
    for words in (["search", trained, "fox"], ["evaluate", trained]):
        assert refused(capsys, *words, "--index", tmp_path / "single") == (
            f'`--index` must be of the run\'s kind, "late"; got "{tmp_path}/single", of kind "single". '
            f"Encode the corpus again: contrastile encode {trained}"
        )
    index = encoded(run, tmp_path / "late")
    assert refusal(index.search, torch.ones(1, 8), 1) == (
        '`queries` must be encoded by a run of the index\'s kind, "late"; got one vector each. '
        "Encode the corpus by the same run."
    )
    with pytest.raises(ValueError, match=r'"single"; got vectors of tokens\. Encode the corpus'):
        Index(tmp_path / "single").search(run.encode_query(["eel"]), 1)
    assert refusal(Index, tmp_path / "late", engine="faiss") == (
        '`engine` must be torch for an index of kind "late"; got "faiss". '
        "Leave it out: token vectors are searched exactly, or among candidates."
    )
    assert refused(capsys, "export", trained, "--as", "sentence-transformers", "--out", tmp_path / "out") == (
        '`run` must have one vector a text; got one of model.kind "late". '
        "Load it with contrastile.load, and compare with contrastile.scorers.MaxSim."
    )
    words = ("export", trained, "--as", "npy", "--index", tmp_path / "late", "--out", tmp_path / "out")
    assert refused(capsys, *words) == (
        '`--index` must have one vector a passage; got one of kind "late". '
        "Read its .npy and .lengths.npy: the vectors of all tokens, and their number in each passage."
    )


@pytest.fixture(scope="module")
def indices(trained, single):
    """Both runs with an index of the run's own passages in their folders."""
    for folder in (trained, single):
        assert main(["encode", str(folder), "--shard", "50"]) == 0
    return trained, single


def shown_scores(capsys):
    return [float(block.split()[0]) for block in capsys.readouterr().out.strip().split("\n\n")]


def test_the_command_searches_all_passages_or_candidates(indices, capsys, tmp_path):
    trained, single = indices
    question = ["search", str(trained), "where is the red fox house", "-k", "3"]
    assert main(question) == 0
    found = shown_scores(capsys)
    assert len(found) == 3
    # a mean over the tokens of a question
    assert 0.2 < found[0] <= 1.001
    for source in ("bm25:120", f"{single}:120", "bm25"):
        assert main([*question, "--candidates", source]) == 0
        assert shown_scores(capsys) == pytest.approx(found, abs=0.002)
    assert main([*question, "--candidates", "bm25:2"]) == 0
    assert len(shown_scores(capsys)) == 2
    assert refused(capsys, "search", single, "fox", "--candidates", "bm25") == (
        '`--candidates` must be left out unless the run is a late retriever; got a run of kind "single". '
        "It compares all passages at once anyway."
    )
    assert refused(capsys, *question, "--candidates", "bm25:0") == (
        "`--candidates` must be at least 1; got 0. Such as bm25:1000."
    )
    assert refused(capsys, *question, "--candidates", trained) == (
        '`--candidates` must have one vector a passage; got an index of kind "late". '
        "Name a run of kind single, or bm25."
    )
    assert main(["encode", str(trained), write_corpus(tmp_path), "--out", str(tmp_path / "other")]) == 0
    assert refused(capsys, *question, "--index", tmp_path / "other", "--candidates", single) == (
        f'`--candidates` must hold passages of the index; got none of their ids in "{single}". '
        "Encode the same corpus with both runs."
    )
    (single / "index").rename(single / "aside")
    sentence = refused(capsys, *question, "--candidates", single)
    (single / "aside").rename(single / "index")
    assert sentence == (
        f'`--candidates` must be all, bm25, or a run with an index; got "{single}". '
        f"Make it first: contrastile encode {single}"
    )


def write_corpus(folder):
    rows = [json.dumps({"_id": f"x{n}", "title": "", "text": f"<b>fox</b> {n}"}) for n in range(3)]
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    return str(folder / "corpus.jsonl")


def test_the_command_measures_all_passages_or_candidates(indices, capsys):
    trained, single = indices
    # of the training's end, among 100 passages of BM25
    among = json.loads((trained / "evaluation.json").read_text())
    assert [row["test"] for row in among][:2] == ["held-out queries, retriever", "held-out queries, retriever, answers"]
    results = {}
    for name, words in {
        "every": ["--candidates", "all"],
        "index": ["--index", str(trained / "index"), "--candidates", f"{single}:120"],
        "few": ["--candidates", "bm25:5"],
    }.items():
        assert main(["evaluate", str(trained), *words]) == 0
        results[name] = json.loads((trained / "evaluation.json").read_text())[0]
    assert results["every"]["measures"] == pytest.approx(results["index"]["measures"], abs=0.1)
    # BM25 has all right passages among its first five here, and nothing is behind them
    assert results["few"]["recall"]["5"] == 1.0
    assert {line.split()[1] for line in (trained / "held_out.retriever.trec").read_text().splitlines()} == {"Q0"}
    ranked = [line.split()[0] for line in (trained / "held_out.retriever.trec").read_text().splitlines()]
    assert max(map(ranked.count, ranked)) == 5
    assert refused(capsys, "evaluate", single, "--candidates", "bm25").startswith("`--candidates` must be left out")


def test_pages_show_which_tokens_matched(indices, tmp_path, capsys):
    trained, single = indices
    report = (trained / "report.html").read_text()
    assert report.count('<div class="align">') == 8
    (first, *_), *_ = [sample["asks"][0]["found"] for sample in json.loads((trained / "questions.json").read_text())]
    picture = first["alignment"]
    assert picture["query"][0] == "[Q]"
    assert "(" not in picture["passage"]
    for row, best, value in zip(picture["shares"], picture["best"], picture["values"], strict=True):
        assert row[best] == max(row)
        assert value <= 1.001
    words = ["search", str(trained), "where is the <red> fox", "-k", "2"]
    assert main([*words, "--page", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert (page.count("<article>"), page.count('<div class="align">')) == (2, 2)
    assert "<h1>where is the &lt;red&gt; fox</h1>" in page
    tokens = [html.unescape(token) for token in re.findall(r"<tr><th>([^<]+)</th>", page)]
    assert tokens[:8] == ["[Q]", "where", "is", "the", "[UNK]", "red", "[UNK]", "fox"]
    assert refused(capsys, "search", trained, "--page", "x.html").startswith("`--page` must come with a question;")
    assert refused(capsys, "search", single, "fox", "--page", "x.html") == (
        '`--page` must be left out unless the run is a late retriever; got "x.html". '
        "One vector a text has no tokens to show."
    )
    assert refused(capsys, "search", trained, "fox", "--page", tmp_path) == (
        f'`--page` must be a file that can be written to; got "{tmp_path}". Name another one.'
    )
    assert refused(capsys, "search", trained, "fox", "--candidates", "bm24:9") == (
        '`--candidates` must be all, bm25, or a run with an index; got "bm24". Check its spelling.'
    )
