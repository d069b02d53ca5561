"""An index: complete shards, continued after a kill, searched exactly; and the commands encode and search."""

import errno
import io
import json
import re
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal
from tiny_runs import write_recipe
from tiny_texts import ANIMALS, COLOURS, PLACES, tiny_retriever

import contrastile
from contrastile.cli.main import main
from contrastile.data.sources import PICTURES
from contrastile.data.texts import Passage
from contrastile.integrations.export import export_index
from contrastile.retrieval import index as indexing
from contrastile.retrieval.index import Index, encode_corpus, picture_passages
from contrastile.retrieval.search import Search
from contrastile.train.loop import run_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return run_recipe(tiny_retriever(folder, "train.examples=64"), folder / "runs").folder


@pytest.fixture
def run(trained):
    return contrastile.load(trained, device="cpu")


PASSAGES = [
    Passage(f"p{n}", f"def {colour}_{animal}(): return {place}\n    # für \n", f"title {n}", f"f.py:{n}")
    for n, (colour, animal, place) in enumerate(list(product(COLOURS, ANIMALS, PLACES))[:23])
]


def encoded(run, folder, passages=PASSAGES, **settings):
    return encode_corpus(run, passages, folder, corpus="c", made_by={"w": "1"}, **{"shard": 5, **settings})


def test_shards_hold_features_ids_and_passages(run, tmp_path):
    index = encoded(run, tmp_path / "index")
    features = np.concatenate([np.load(tmp_path / "index" / f"{n:05}.npy", allow_pickle=False) for n in range(5)])
    assert (features.dtype, features.shape, len(index), index.dimensions) == (np.float16, (23, 16), 23, 16)
    np.testing.assert_allclose(features, run.encode_passage(PASSAGES).numpy(), atol=1e-3)
    ids = "".join((tmp_path / "index" / f"{n:05}.ids").read_text() for n in range(5)).split("\n")
    assert ids[:-1] == [passage.id for passage in PASSAGES]
    assert [index[row] for row in (0, 4, 5, 22, -1, -23)] == [PASSAGES[row] for row in (0, 4, 5, 22, 22, 0)]
    assert [*index] == [*PASSAGES]
    with pytest.raises(IndexError, match="row -24 of an index of 23 passages"):
        index[-24]
    for row in ("a", slice(0, 2), 1.5):
        assert refusal(index.__getitem__, row) == (
            f"`row` must be a whole number; got {row!r}. Take several one by one: [index[row] for row in rows]."
        )
    assert all(isinstance(shard, np.memmap) for shard in index._features)


@pytest.mark.parametrize("engine", ["torch", "faiss"])
def test_a_search_is_exact_over_shards(run, tmp_path, engine):
    if engine == "faiss":
        pytest.importorskip("faiss")
    encoded(run, tmp_path / "index")
    index = Index(tmp_path / "index", engine=engine)
    queries = torch.randn(7, 16)
    scores, rows = index.search(queries, 9)
    features = torch.from_numpy(np.concatenate([np.array(shard) for shard in index._features])).float()
    expected = (queries @ features.T).sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(scores, expected.values[:, :9], rtol=1e-5, atol=1e-5)
    if engine == "torch":
        assert torch.equal(rows, expected.indices[:, :9])
    assert index.search(queries, 100)[1].shape == (7, 23)
    queries[3] = torch.nan
    scores, rows = index.search(queries.requires_grad_(), 2)
    assert scores[3].isnan().all()
    assert rows[3].tolist() == [0, 1]
    for given, k, sentence in (
        (queries, 0, "`k` must be a whole number of at least 1; got 0. The index has 23 passages."),
        (queries, "3", "`k` must be a whole number of at least 1; got '3'. The index has 23 passages."),
        (queries.detach().numpy(), 3, "`queries` must be a tensor; got ndarray. Pass torch.as_tensor(queries)."),
        (queries[0], 3, "`query` must be floating-point features of shape [rows, D]; got torch.float32 of shape [16]. "
         "Encode the examples first."),
        (queries.long(), 3, "`query` must be floating-point features of shape [rows, D]; got torch.int64 of shape "
         "[7, 16]. Encode the examples first."),
        (queries[:, :9], 3, "`key` must have the same feature size as `query`; got 16 and 9. Project one side first."),
    ):  # fmt: skip
        assert refusal(index.search, given, k) == sentence


def test_equal_scores_go_to_the_first_passage(run, tmp_path):
    index = encoded(run, tmp_path / "index", [PASSAGES[0]] * 12)
    assert index.search(torch.ones(1, 16), 7)[1].tolist() == [[0, 1, 2, 3, 4, 5, 6]]


def test_finished_shards_are_not_encoded_again(run, tmp_path, monkeypatch):
    real, written = indexing._write_shard, []

    def killed_at_the_third(run, passages, place, number, dimensions):
        if number == 2 and len(written) == 2:
            raise KeyboardInterrupt
        written.append(number)
        return real(run, passages, place, number, dimensions)

    monkeypatch.setattr(indexing, "_write_shard", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        encoded(run, tmp_path / "index")
    assert refusal(Index, tmp_path / "index") == (
        "`index` must be complete; got 2 shards of more. Go on with the command that began it: contrastile encode RUN"
    )
    written.append("again")
    whole = encoded(run, tmp_path / "other")
    written.clear()
    written.append("again")
    index = encoded(run, tmp_path / "index")
    assert written == ["again", 2, 3, 4]
    assert [shard["sha256"] for shard in index.metadata["shards"]] == [
        shard["sha256"] for shard in whole.metadata["shards"]
    ]


def test_a_finished_index_is_not_written_again(run, tmp_path, monkeypatch):
    """Ten passages fill their last shard."""
    index = encoded(run, tmp_path / "index", PASSAGES[:10])
    monkeypatch.setattr(indexing, "_write_shard", None)
    assert encoded(run, tmp_path / "index", PASSAGES[:10]).metadata == index.metadata
    assert [shard["passages"] for shard in index.metadata["shards"]] == [5, 5]


def test_an_index_may_hold_the_first_dimensions_only(run, tmp_path):
    index = encoded(run, tmp_path / "index", dimensions=4)
    features = torch.from_numpy(np.array(index._features[0])).float()
    assert features.shape == (5, 4)
    assert refusal(encoded, run, tmp_path / "more", dimensions=17) == (
        "`dimensions` must be between 1 and the 16 features; got 17. The first so many are kept."
    )
    torch.testing.assert_close(features.norm(dim=1), torch.ones(5), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"shard": 6}, "`out` must be empty, or hold the same corpus by the same run; got another shard. "),
        ({"dimensions": 2}, "`out` must be empty, or hold the same corpus by the same run; got another dimensions. "),
        ({"shard": 0}, "`shard` must be at least 1 passage; got 0. "),
    ],
)
def test_a_folder_with_other_settings_is_refused(run, tmp_path, settings, sentence):
    encoded(run, tmp_path / "index")
    assert refusal(encoded, run, tmp_path / "index", **settings).startswith(sentence)


def test_a_shortened_or_changed_corpus_is_refused(run, tmp_path):
    encoded(run, tmp_path / "index")
    changed = [*PASSAGES[:7], replace(PASSAGES[7], text="something else"), *PASSAGES[8:]]
    for passages, got in ((PASSAGES[:7], "fewer passages"), (changed, "another passage in shard 00001")):
        assert refusal(encoded, run, tmp_path / "index", passages) == (
            f"`corpus` must be the one that was begun with; got {got}. "
            "Choose another folder with --out, or remove this one."
        )


def test_appended_passages_are_added(run, tmp_path):
    encoded(run, tmp_path / "index", PASSAGES[:12])
    first = Index(tmp_path / "index").metadata["shards"]
    index = encoded(run, tmp_path / "index", PASSAGES)
    assert [shard["passages"] for shard in index.metadata["shards"]] == [5, 5, 2, 5, 5, 1]
    assert index.metadata["shards"][:3] == first
    assert [index[row] for row in range(23)] == PASSAGES


def forget_blocks(folder):
    """Make the index one of earlier versions, whose shards had two checksums each."""
    metadata = json.loads((folder / "index.json").read_text())
    del metadata["sha256"]
    for shard in metadata["shards"]:
        del shard["files"]
    (folder / "index.json").write_text(json.dumps(metadata))


def flipped(path, at):
    """Turn one bit around, such as a sign."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x80
    path.write_bytes(content)


def test_an_index_of_earlier_versions_is_searched_and_verified(run, tmp_path):
    encoded(run, tmp_path)
    forget_blocks(tmp_path)
    assert len(Index(tmp_path, verify=True)) == len(encoded(run, tmp_path)) == 23
    flipped(tmp_path / "00001.jsonl", 20)
    Index(tmp_path)
    with pytest.raises(ValueError, match=r"`index` must hold 00001\.jsonl as it was written; got other bytes in "):
        Index(tmp_path, verify=True)
    flipped(tmp_path / "00000.npy", -3)
    with pytest.raises(ValueError, match=r"`index` must hold 00000\.npy as it was written; got other bytes"):
        encoded(run, tmp_path)


@pytest.mark.parametrize("ending", [".npy", ".ids", ".jsonl", ".offsets.npy"])
def test_a_damaged_file_of_an_index_is_refused(run, tmp_path, ending):
    encoded(run, tmp_path)
    path = tmp_path / f"00003{ending}"
    content = path.read_bytes()
    flipped(path, -1)
    remedy = "Restore it, or remove the folder and encode again."
    sentence = f'`index` must hold {path.name} as it was written; got {{}} in "{tmp_path}". {remedy}'
    for damage, got in ((content[:-1], "another size"), (None, "none"), (path.read_bytes(), "other bytes from 0 on")):
        path.unlink(missing_ok=True)
        if damage is not None:
            path.write_bytes(damage)
        for act in (Index, lambda folder: encoded(run, folder)):
            assert refusal(act, tmp_path) == sentence.format(got)


def test_a_damaged_index_json_is_refused(run, tmp_path):
    encoded(run, tmp_path)
    path = tmp_path / "index.json"
    path.write_text(path.read_text().replace('"complete": true', '"complete": false'))
    for act in (Index, lambda folder: encoded(run, folder)):
        with pytest.raises(ValueError, match=r"`index` must hold index\.json as it was written; got other bytes in "):
            act(tmp_path)


def test_of_a_large_index_a_sample_is_compared_and_all_with_verify(run, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "BLOCK", 16)
    encoded(run, tmp_path)
    read, real = [], indexing._digest
    monkeypatch.setattr(indexing, "_digest", lambda block: read.append(block) or real(block))
    Index(tmp_path)
    offsets = sum(-(-path.stat().st_size // 16) for path in tmp_path.glob("*.offsets.npy"))
    assert len(read) == indexing.SAMPLED + offsets
    flipped(tmp_path / "00004.jsonl", 40)
    with pytest.raises(ValueError, match=r"00004\.jsonl as it was written; got other bytes from 32 on"):
        Index(tmp_path, verify=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda metadata: metadata["shards"],
        lambda metadata: {**metadata, "shards": 7},
        lambda metadata: {**metadata, "shards": [{**metadata["shards"][0], "name": "../../00000"}]},
        lambda metadata: {**metadata, "shards": [{**metadata["shards"][0], "files": {"/etc/passwd": {}}}]},
        lambda metadata: {key: value for key, value in metadata.items() if key != "made_by"},
    ],
)
def test_a_list_of_shards_that_encode_did_not_write_is_refused(run, tmp_path, damage):
    metadata = encoded(run, tmp_path).metadata
    (tmp_path / "index.json").write_text(json.dumps(damage(metadata)))
    assert refusal(Index, tmp_path) == (
        f'`index.json` must list the shards that were written; got others in "{tmp_path}". '
        "Restore it, or remove the folder and encode again."
    )


def test_a_second_writer_of_an_index_is_refused(run, tmp_path):
    def passages():
        yield from PASSAGES[:7]
        assert refusal(encoded, run, tmp_path) == (
            f'`out` must be written by one command at a time; got "{tmp_path}". '
            "Wait for the other one to end, or choose another folder with --out."
        )
        yield from PASSAGES[7:]

    assert len(encoded(run, tmp_path, passages())) == len(encoded(run, tmp_path)) == 23


def test_passages_do_not_direct_the_terminal(trained, tmp_path, capsys):
    corpus = [
        {"_id": f"a\x1b]0;b\x07{n}", "title": "c\n 0.999  d", "text": f"e\x9b2Jf\r{n}\tg\u202eh"} for n in range(3)
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    words = [str(trained), str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "index")]
    assert main(["encode", *words]) == 0
    capsys.readouterr()
    assert main(["search", str(trained), "e", "-k", "1", "--index", str(tmp_path / "index"), "--verify"]) == 0
    first, _, *body = capsys.readouterr().out.splitlines()
    assert re.search(r"c\\n 0\.999  d \(a\\x1b\]0;b\\x07\d\)$", first)
    assert re.fullmatch(r" {10}e\\x9b2Jf\n {10}\d\tg\\u202eh", "\n".join(body))


def test_an_empty_corpus_a_missing_index_and_an_unknown_engine_are_refused(run, tmp_path):
    for _ in range(2):
        with pytest.raises(ValueError, match="`corpus` must hold passages; got none"):
            encoded(run, tmp_path / "index", [])
    with pytest.raises(ValueError, match=r'`index` must hold an index.json; got ".*none". Make it first'):
        Index(tmp_path / "none")
    encoded(run, tmp_path / "full")
    with pytest.raises(ValueError, match='`engine` must be one of torch, faiss; got "annoy"'):
        Index(tmp_path / "full", engine="annoy")


def test_an_array_of_objects_is_never_unpickled(run, tmp_path):
    encoded(run, tmp_path / "index")
    forget_blocks(tmp_path / "index")
    np.save(tmp_path / "index" / "00000.npy", np.array([{}] * 5, dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"Python objects in dtype|Object arrays cannot be loaded"):
        Index(tmp_path / "index")


@pytest.mark.parametrize(("value", "told"), [(1e5, "1e+05"), (float("nan"), "nan")])
def test_features_outside_float16_are_refused(run, tmp_path, monkeypatch, value, told):
    monkeypatch.setattr(type(run), "encode_tokens", lambda *_, **__: torch.full((5, 16), value))
    assert refusal(encoded, run, tmp_path / "index") == (
        f"`features` must be numbers that float16 has, up to 65504; got {told} in shard 00000. Train with "
        "model.normalise = true, or look at the weights."
    )
    assert not list((tmp_path / "index").glob("*.npy"))


def test_search_finds_passages_of_an_encoded_corpus(trained, tmp_path, capsys):
    assert main(["encode", str(trained), "--shard", "50", "--out", str(tmp_path / "index")]) == 0
    said = capsys.readouterr().out
    assert "passages of 16 features" in said
    assert f"contrastile search {trained} --index {tmp_path}/index" in said
    asked = ["search", str(trained), "where is the red fox house", "-k", "3", "--index", str(tmp_path / "index")]
    assert main(asked) == 0
    found = capsys.readouterr().out
    assert found.count("texts.jsonl:") == 3
    best = float(found.split()[0])
    assert 0.2 < best <= 1.001
    run = contrastile.load(trained, device="cpu")
    assert found.split("\n")[2].strip() in {p["text"] for p in passages_of(tmp_path / "index")}
    assert run.encode_query(["x"]).shape == (1, 16)


def passages_of(folder):
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("line", "shown"), [
    ("word " * 32, ("word " * 32).rstrip()), ("word " * 33, "word " * 31 + "[...]"),
    ("字" * 161, "字" * 154 + " [...]"), ("a " + "字" * 161, "a " + "字" * 152 + " [...]"),
])  # fmt: skip
def test_long_lines_of_a_passage_are_cut(trained, tmp_path, capsys, line, shown):
    index = tmp_path / "a b"
    (tmp_path / "c.jsonl").write_text(json.dumps({"_id": "p", "text": line.strip()}), encoding="utf-8")
    assert main(["encode", str(trained), str(tmp_path / "c.jsonl"), "--out", str(index)]) == 0
    assert capsys.readouterr().out.endswith(f"to search them: contrastile search {trained} --index '{index}'\n")
    assert main(["search", str(trained), "red_cat", "--index", str(index)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip() == shown


@pytest.mark.parametrize("words", [["encode", "--out"], ["search", "red_cat", "--index"]])
def test_a_path_of_no_characters_is_refused(trained, capsys, words):
    verb, *others = words
    assert main([verb, str(trained), *others, ""]) == 2
    sentence = f'`{others[-1]}` must name a file or folder; got "". Leave it out for the run\'s own.\n'
    assert capsys.readouterr().err == sentence


def test_a_passage_of_an_id_that_was_seen_is_left_out_and_counted(trained, tmp_path, caplog):
    rows = [{"_id": name, "text": text} for name, text in (("a", "red fox"), ("b", "blue owl"), ("a", "green house"))]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "index"
    assert main(["encode", str(trained), str(tmp_path / "corpus.jsonl"), "--out", str(out), "--bad-rows", "0.5"]) == 0
    assert [passage["text"] for passage in passages_of(out)] == ["red fox", "blue owl"]
    assert any("id seen before: 1" in message for message in caplog.messages)


def test_a_folder_of_code_is_encoded_and_searched(trained, tmp_path, capsys):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mod.py").write_text("def red_fox():\n    return 'house'\n\n\ndef blue_owl():\n    return 1\n")
    out = str(tmp_path / "index")
    assert main(["encode", str(trained), str(tmp_path / "code"), "--out", out]) == 0
    assert main(["search", str(trained), "red fox", "--index", out, "-k", "2", "--lines", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"mod.red_fox\n        {tmp_path}/code/mod.py:1\n          def red_fox():\n          …" in shown


def test_the_prompt_answers_until_an_empty_line(trained, tmp_path, capsys, monkeypatch):
    assert main(["encode", str(trained), "--out", str(tmp_path / "index")]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("red fox\nblue owl\n\n"))
    assert main(["search", str(trained), "--index", str(tmp_path / "index"), "-k", "2"]) == 0
    assert capsys.readouterr().out.count("texts.jsonl:") == 4
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["search", str(trained), "--index", str(tmp_path / "index")]) == 0


def test_a_terminal_has_line_editing(trained, tmp_path, monkeypatch):
    assert main(["encode", str(trained), "--out", str(tmp_path / "index")]) == 0
    loaded = []
    for terminal in (False, True):
        stdin = io.StringIO("\n")
        stdin.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("contrastile.cli.search.import_module", loaded.append)
        assert main(["search", str(trained), "--index", str(tmp_path / "index")]) == 0
        assert loaded == ["readline"] * terminal


class Near:
    """Features of a question: how near the best passage is, which its number says; of random words 0.3."""

    def encode_query(self, questions, dimensions):
        assert dimensions == 2
        scores = [float(question) if question[0] == "0" else 0.3 for question in questions]
        return torch.tensor([[score, 0.0] for score in scores])


@pytest.mark.parametrize(("count", "best", "close"), [(300, "0.2", False), (300, "0.4", True), (20, "0.2", True)])
def test_a_question_that_random_words_surpass_is_told_that_nothing_is_close(tmp_path, count, best, close):
    passages = [Passage(f"p{n}", f"def name_{n}(): return house", "", "") for n in range(count)]
    text = Search(Near(), fake_index(passages)).results_text(best, 2, lines=1)
    sentence = f"nothing close: {best}00, and random words of the corpus come as near as 0.300; the nearest are\n\n"
    assert text.startswith(f" {best}00  p0" if close else f"{sentence} {best}00  p0")


def fake_index(passages):
    """An index whose passages all have the feature [1, 0]."""

    class Fake(list):
        dimensions = 2

        def search(self, features, k):
            return features[:, :1].expand(-1, k), torch.arange(k).expand(len(features), -1)

    return Fake(passages)


NO_ROOM = {
    "No space left on device": OSError(errno.ENOSPC, "No space left on device"),
    # as numpy tells it
    "300000 requested and 131056 written": OSError("300000 requested and 131056 written"),
}


@pytest.mark.parametrize("why", NO_ROOM)
def test_a_full_disk_names_the_folder(trained, tmp_path, capsys, monkeypatch, why):
    def full(*_, **__):
        raise NO_ROOM[why]

    monkeypatch.setattr(np, "save", full)
    assert main(["encode", str(trained), "--out", str(tmp_path / "index")]) == 1
    told = f"{tmp_path / 'index'} could not be written ({why}); free the disk and begin again\n"
    assert capsys.readouterr().err.endswith(told)


def test_nothing_is_written_for_a_library_that_is_not_installed(run, tmp_path, monkeypatch):
    encoded(run, tmp_path / "index")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ModuleNotFoundError, match="faiss"):
        export_index(tmp_path / "index", "faiss", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_index_of_other_weights_is_refused(trained, run, tmp_path, capsys):
    encoded(run, tmp_path / "index")
    assert main(["search", str(trained), "red", "--index", str(tmp_path / "index")]) == 2
    assert "`--index` must be made by this run; got" in capsys.readouterr().err


def test_a_run_is_evaluated_on_its_index(trained, tmp_path, capsys):
    assert main(["encode", str(trained), "--shard", "40", "--out", str(tmp_path / "index")]) == 0
    assert main(["evaluate", str(trained)]) == 0
    own = {row["test"]: row for row in json.loads((trained / "evaluation.json").read_text())}
    assert main(["evaluate", str(trained), "--index", str(tmp_path / "index")]) == 0
    rows = json.loads((trained / "evaluation.json").read_text())
    assert [row["test"] for row in rows] == ["held-out queries, retriever", "held-out queries, retriever, answers"]
    for row in rows:
        # the same passages, in float16
        assert row["recall"] == pytest.approx(own[row["test"]]["recall"], abs=0.1)
        assert row["choices"] == own[row["test"]]["choices"]
    assert "BM25" not in capsys.readouterr().out.split("report:")[1]


def test_an_index_without_right_passages_is_refused(tmp_path, capsys):
    recipe = tiny_retriever(tmp_path, "train.examples=64")
    for file in tmp_path.glob("*.jsonl"):
        file.write_text(re.sub(r'"answers": \[[^]]*\], ', "", file.read_text()))
    trained = run_recipe(recipe, tmp_path / "runs").folder
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": f"other{n}", "text": f"a fox {n}"}) + "\n" for n in range(6)))
    assert main(["encode", str(trained), str(corpus), "--out", str(tmp_path / "index")]) == 0
    before = (trained / "evaluation.json").read_text()
    assert main(["evaluate", str(trained), "--index", str(tmp_path / "index")]) == 2
    said = capsys.readouterr().err
    assert "`--index` must hold passages that are right for a question; got none of " in said
    assert said.endswith(" ids. Encode a corpus whose ids are those of the questions' passages.\n")
    assert (trained / "evaluation.json").read_text() == before


def test_a_report_shows_the_passages_of_the_index(trained, tmp_path, capsys):
    other = [{"_id": f"x{n}", "text": f"here is passage {n}"} for n in range(300)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    out = str(tmp_path / "index")
    assert main(["encode", str(trained), str(tmp_path / "corpus.jsonl"), "--out", out]) == 0
    assert main(["evaluate", str(trained), "--index", out]) == 0
    page = (trained / "report.html").read_text()
    assert "here is passage" in page
    assert "def red_" not in page
    assert main(["evaluate", str(trained)]) == 0


def test_a_picture_whose_whole_name_is_an_ending_is_a_passage(tmp_path):
    for name in (".jpg", "a.JPG", "b.txt"):
        (tmp_path / name).touch()
    assert [passage.id for passage in picture_passages(str(tmp_path))[0]] == [".jpg", "a.JPG"]


def test_pictures_of_a_folder_are_found_by_a_text(tmp_path, capsys):
    recipe, run = str(write_recipe(tmp_path)), str(tmp_path / "tiny")
    assert main(["train", recipe, "train.examples=32", "--runs", str(tmp_path)]) == 0
    assert main(["evaluate", run, "--index", "x"]) == 2
    refused = ([run], [run, recipe], [run, str(tmp_path / "cache")], [run, str(tmp_path), "--dimensions", "3"])
    refused += ([run, str(tmp_path), "--bad-rows", "0.1"],)
    for words in refused:
        assert main(["encode", *words, "--out", str(tmp_path / "refused")]) == 2
    assert not (tmp_path / "refused").exists()
    assert capsys.readouterr().err.splitlines()[-6:] == [
        "`--index` must be left out for images and texts; got x. It belongs to a retriever.",
        "`corpus` must be a folder of images, for this run; got none. Name it after the run: "
        "contrastile encode RUN FOLDER.",
        f'`corpus` must be a folder of images, for this run; got "{recipe}". Name it after the run: '
        "contrastile encode RUN FOLDER.",
        f'`corpus` must have images ({", ".join(PICTURES)}); got "{tmp_path}/cache", without any. Check its path.',
        "`--dimensions` must be left out for a run of images and texts; got 3. Prefixes of features were not trained.",
        "`--bad-rows` must be left out for a run of images and texts; got 0.1. All images must be readable.",
    ]
    assert main(["encode", run, str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("32 images of 16 features: ")
    assert main(["search", run, "letter A left", "-k", "3"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    loaded = contrastile.load(run, device="cpu")
    names = sorted(path.name for path in tmp_path.glob("*-*.png"))
    scores = (
        loaded.encode_image([Image.open(tmp_path / name) for name in names]) @ loaded.encode_text(["letter A left"]).T
    )
    best = [names[row] for row in scores[:, 0].argsort(descending=True)[:3].tolist()]
    assert len(blocks) == 3
    assert blocks[0].split()[1:] == [best[0], str(tmp_path / best[0])]
    # a changed picture is another corpus, and one that cannot be read is named
    (tmp_path / "A-left.png").write_bytes(b"<html>")
    assert main(["encode", run, str(tmp_path)]) == 2
    assert main(["encode", run, str(tmp_path), "--out", str(tmp_path / "new")]) == 2
    complaints = capsys.readouterr().err.splitlines()
    assert any(line.startswith("`--out` must be empty, or hold the same corpus by the same run") for line in complaints)
    assert f"broken picture: {tmp_path}/A-left.png. Remove it." in complaints[-1]


def test_bad_rows_of_a_corpus_are_counted(trained, tmp_path, capsys, caplog):
    rows = [json.dumps({"_id": n, "text": f"red fox {n}"}) for n in range(3)]
    (tmp_path / "corpus.jsonl").write_text("\n".join([*rows, "{", '{"_id": 9, "text": ""}']) + "\n")
    asked = ["encode", str(trained), str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "index")]
    told = f"2 of 5 rows are skipped (empty text: 1, not JSON: 1), the first at {tmp_path}/corpus.jsonl:4"
    with caplog.at_level("WARNING", logger="contrastile"):
        assert main([*asked, "--bad-rows", "0.5"]) == 0
    assert caplog.messages == [f"{tmp_path}/corpus.jsonl: {told}"]
    assert "3 passages of 16 features" in capsys.readouterr().out
    # the recipe allows one of a hundred; finished or not, the corpus is looked at
    assert main(asked) == 2
    assert capsys.readouterr().err.endswith(
        "`corpus` must have at most 1% of rows that cannot be used; got 2 of 5 (empty text: 1, not JSON: 1), "
        f"the first at {tmp_path}/corpus.jsonl:4. Mend them, or raise --bad-rows.\n"
    )
    assert main([*asked, "--bad-rows", "1"]) == 2
    assert "`--bad-rows` must be a share from 0 to below 1; got 1.0. " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("encode {run} {folder}", "`corpus` must hold corpus.jsonl or Python files; got {folder}. "),
        ("evaluate {run} --texts {folder}", "`--texts` must be a folder in BEIR's format; got {folder} without "),
        ("evaluate {run} --texts {folder}/q.jsonl --corpus {folder}/x.md", "`--corpus` must end in .jsonl, "),
        ("encode {run} --dimensions 1000 --out {folder}/out", "`--dimensions` must be between 1 and the "),
    ],
)
def test_a_fault_of_texts_has_the_name_that_the_user_typed(words, sentence, trained, tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    (tmp_path / "x.md").write_text("text")
    names = {"run": trained, "folder": tmp_path}
    assert main(words.format(**names).split()) == 2
    assert sentence.format(**names) in capsys.readouterr().err


def test_an_argument_that_may_be_left_out_may_follow_options(trained, tmp_path, capsys):
    words = ["--index", str(tmp_path), "red"]
    assert main(["search", str(trained), *words]) == 2
    assert capsys.readouterr().err.startswith("`--index` must hold an index.json; got ")
    assert main(["encode", str(trained), "--out", str(tmp_path / "out"), str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("`corpus` must be a file or folder; got ")
    with pytest.raises(SystemExit):
        main(["search", str(trained), "red", "fox"])
    assert "unrecognized arguments: fox (put a question of several words into quotes)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "`data.source` must hold at least two questions ("),
        ("data.corpus={folder}/x.md", "`data.corpus` must end in .jsonl, "),
        ("data.test={folder}/x.md", "`data.test` must end in .jsonl, "),
    ],
)
def test_a_fault_of_a_recipes_texts_has_the_name_of_its_key(words, sentence, tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    (tmp_path / "x.md").write_text("text")
    given = ["--runs", str(tmp_path), f"data.source={tmp_path}/q.jsonl", *words.format(folder=tmp_path).split()]
    assert main(["train", "docstrings", *given]) == 2
    assert sentence in capsys.readouterr().err


def test_a_cache_that_cannot_be_made_has_the_name_of_its_key(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    given = ["--runs", str(tmp_path), f"data.cache={tmp_path}/file"]
    assert main(["train", "glyphs", *given]) == 2
    assert "`data.cache` must be a folder that can be written; got " in capsys.readouterr().err
