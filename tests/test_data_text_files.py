"""Every format is read, and every kind of damage is counted with its reason and the place where it first happened."""

import gzip
import json
import logging

import numpy as np
import pytest
from refusals import refusal

from contrastile.data.base import SkipCounter
from contrastile.data.entries import read_entries, read_passages
from contrastile.data.registry import open_texts
from contrastile.train.retriever.evaluation import judgements_of


def opened(tmp_path, source, **settings):
    return open_texts(str(tmp_path / source), cache=tmp_path, **settings)


def lines(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def known(texts):
    """Each question with the texts of its positives and negatives."""
    text = [passage.text for passage in texts.passages]
    return {
        query.text: ([text[row] for row in query.positives], [text[row] for row in query.negatives])
        for query in texts.queries
    }


def dpr(number, **more):
    return {
        "question": f"q{number}",
        "answers": [f"a{number}"],
        "positive_ctxs": [{"title": "T", "text": f"p{number}", "passage_id": f"id{number}"}],
        "negative_ctxs": [{"title": "", "text": "easy"}],
        "hard_negative_ctxs": [{"title": "", "text": f"n{number}", "score": 3}],
        **more,
    }


@pytest.mark.parametrize("form", ["list", "indented list", "lines", "lines.gz"])
def test_dpr(tmp_path, form, monkeypatch):
    # blocks that end within entries
    monkeypatch.setattr("contrastile.data.entries.BLOCK", 37)
    entries = [dpr(n) for n in range(3)]
    name = {"lines": "x.jsonl", "lines.gz": "x.jsonl.gz"}.get(form, "x.json")
    if "lines" in form:
        text = "\n".join(map(json.dumps, entries)) + "\n"
    else:
        text = json.dumps(entries, indent=2 if "indented" in form else None)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if "gz" in form else text.encode())
    texts = opened(tmp_path, name)
    assert known(texts) == {f"q{n}": ([f"p{n}"], [f"n{n}"]) for n in range(3)}
    assert texts.queries[1].answers == ("a1",)
    assert (texts.passages[0].id, texts.passages[0].title) == ("id0", "T")


@pytest.mark.parametrize("identity", ["id", "", "index", "doc_id", "question_id", "Unnamed: 0"])
def test_a_column_of_ids_is_no_text(tmp_path, identity):
    lines(tmp_path / "x.jsonl", [{identity: f"7{n}", "question": f"q{n}", "answer": f"p{n}"} for n in range(3)])
    assert known(opened(tmp_path, "x.jsonl")) == {f"q{n}": ([f"p{n}"], []) for n in range(3)}


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("names", ["ID, Question ,Answer,LABEL", "qid,QUERY,pid,Passage,label"])
def test_names_have_any_case(tmp_path, names, ending):
    import pyarrow as pa
    import pyarrow.parquet as pq

    header, source = names.split(","), f"x.{ending}"
    values = {"question": "q{}", "query": "q{}", "answer": "p{}", "passage": "p{}", "label": "{}"}
    texts = [[values.get(name.strip().lower(), "7").format(n) for name in header] for n in range(3)]
    rows = [dict(zip(header, row, strict=True)) for row in texts]
    if ending == "csv":
        (tmp_path / source).write_text("\n".join(",".join(row) for row in (header, *texts)) + "\n")
    elif ending == "jsonl":
        lines(tmp_path / source, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / source)
    texts = opened(tmp_path, source, bad_rows=0.5)
    assert known(texts) == {"q1": (["p1"], []), "q2": (["p2"], [])}
    assert texts.skipped == {"a pair that is no match": 1}


def test_a_csv_file_may_have_semicolons(tmp_path):
    (tmp_path / "x.csv").write_text('question;"passage"\nq,0;p0\nq1;"p;1"\n')
    assert known(opened(tmp_path, "x.csv")) == {"q,0": (["p0"], []), "q1": (["p;1"], [])}
    (tmp_path / "x.csv").write_text("query,positive;1\nq0,p;0\nq1,p1\n")
    assert known(opened(tmp_path, "x.csv")) == {"q0": (["p;0"], []), "q1": (["p1"], [])}


def test_names_that_differ_by_case_alone_are_one(tmp_path):
    (tmp_path / "x.csv").write_text("query,positive,Positive\nq,p,n\n")
    assert f'names; got "positive" twice in {tmp_path}/x.csv' in refusal(opened, tmp_path, "x.csv")
    lines(tmp_path / "x.jsonl", [{"query": "q", "Query": "r", "positive": "p"}])
    assert "1 of 1 (two keys of one name: 1)" in refusal(opened, tmp_path, "x.jsonl")


def test_a_question_behind_another_column_is_no_positive(tmp_path):
    lines(tmp_path / "x.jsonl", [{"answer": f"p{n}", "question": f"q{n}"} for n in range(3)])
    assert "3 of 3 (question not the first column: 3)" in refusal(opened, tmp_path, "x.jsonl")


@pytest.mark.parametrize("name", ["Positive", "answer", "passage", "negative_1"])
def test_a_passage_is_no_question(tmp_path, name):
    lines(tmp_path / "x.jsonl", [{"id": n, name: f"p{n}", "text": f"q{n}"} for n in range(3)])
    assert f"3 of 3 ({name.lower()} where the question belongs: 3)" in refusal(opened, tmp_path, "x.jsonl")


def test_dpr_falls_back_to_its_easy_negatives(tmp_path):
    lines(tmp_path / "x.jsonl", [dpr(0, hard_negative_ctxs=[]), dpr(1)])
    assert known(opened(tmp_path, "x.jsonl"))["q0"] == (["p0"], ["easy"])


def test_tevatron(tmp_path):
    entries = [
        {
            "query_id": f"7{n}",
            "query": f"q{n}",
            "positive_passages": [{"docid": f"d{n}", "title": "t", "text": f"p{n}"}, {"docid": "e", "text": "also"}],
            "negative_passages": [{"docid": f"x{n}", "title": "", "text": f"n{n}"}],
        }
        for n in range(2)
    ]
    lines(tmp_path / "x.jsonl", entries)
    texts = opened(tmp_path, "x.jsonl")
    assert known(texts) == {f"q{n}": ([f"p{n}", "also"], [f"n{n}"]) for n in range(2)}
    assert [query.id for query in texts.queries] == ["70", "71"]


def test_two_questions_with_one_id_are_two_of_a_ranking(tmp_path, caplog):
    """Judgements and rankings go by ids: of questions with one id only the last would be measured."""
    ids = ["0", "0", None, "q1", "0"]
    entries = [
        {"query_id": name, "query": f"q{n}", "positive_passages": [{"docid": f"d{n}", "text": f"p{n}"}]}
        for n, name in enumerate(ids)
    ]
    lines(tmp_path / "x.jsonl", entries)
    texts = opened(tmp_path, "x.jsonl")
    assert [query.id for query in texts.queries] == ["0", "q1", "q2", "q3", "q4"]
    assert len(judgements_of(np.arange(5), texts)) == 5
    sentence = f"{tmp_path / 'x.jsonl'}: questions whose id another one has: 3; "
    assert caplog.messages == [f"{sentence}they have new ids, by which results are told apart"]


def test_tevatron_with_a_corpus(tmp_path):
    lines(tmp_path / "corpus.jsonl", [{"docid": n, "text": f"p{n}"} for n in range(4)])
    entries = [
        {"query_id": 1, "query_text": "a", "positive_document_ids": ["0"], "negative_document_ids": ["3"]},
        {"query_id": 2, "query_text": "b", "positive_document_ids": ["1"], "negative_document_ids": []},
        {"query_id": 3, "query_text": "c", "positive_document_ids": ["9"], "negative_document_ids": []},
    ]
    lines(tmp_path / "x.jsonl", entries)
    texts = opened(tmp_path, "x.jsonl", corpus=str(tmp_path / "corpus.jsonl"), bad_rows=0.2)
    assert known(texts) == {"a": (["p0"], ["p3"]), "b": (["p1"], [])}
    assert texts.skipped == {"positives not in the corpus": 1}
    assert len(texts.passages) == 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.jsonl", '{"anchor": "a", "positive": "p", "negative_1": "n", "negative_2": "m"}\n["b", "q", "n", "m"]\n'),
        (
            "x.jsonl",
            '{"query": "a", "pos": ["p"], "neg": ["n", "m"]}\n{"query": "b", "pos": ["q"], "neg": ["n", "m"]}\n',
        ),
        # a line that is a list is no list of entries
        ("x.jsonl", '["a", "p", "n", "m"]\n["b", "q", "n", "m"]\n'),
        ("x.csv", 'question,answer,wrong,wronger\na,p,n,m\n"b","q",n,m\n'),
        # by their names, where they have some
        ("x.csv", "id,positive,anchor,negative_1,negative_2\n1,p,a,n,m\n2,q,b,n,m\n"),
        ("x.tsv", "one\ttwo\tthree\tfour\na\tp\tn\tm\nb\tq\tn\tm\n"),
    ],
)
def test_pairs_and_triplets_by_the_order_of_their_columns(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert known(opened(tmp_path, name)) == {"a": (["p"], ["n", "m"]), "b": (["q"], ["n", "m"])}


def test_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"anchor": ["a", "b", "c"], "positive": ["p", "q", None], "label": [1, 1, 1]})
    pq.write_table(table, tmp_path / "x.parquet")
    texts = opened(tmp_path, "x.parquet", bad_rows=0.5)
    assert known(texts) == {"a": (["p"], []), "b": (["q"], [])}
    assert texts.skipped == {"no positives": 1}


def test_a_negative_may_be_missing_or_several(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"q": ["a", "b"], "p": ["p", "q"], "n": [None, "m"]}), tmp_path / "x.parquet")
    assert known(opened(tmp_path, "x.parquet")) == {"a": (["p"], []), "b": (["q"], ["m"])}
    lines(tmp_path / "x.jsonl", [{"query": q, "positive": p, "negatives": ["n", "m"]} for q, p in ("ap", "bq")])
    assert known(opened(tmp_path, "x.jsonl")) == {"a": (["p"], ["n", "m"]), "b": (["q"], ["n", "m"])}


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(ValueError, match=r"`source` must be a whole parquet file; got .*x.parquet \(at row 1: "):
        opened(tmp_path, "x.parquet")


def test_a_label_of_zero_is_no_match(tmp_path):
    (tmp_path / "x.csv").write_text("a,b,label\nq,p,1\nr,p,0\ns,p,1\n")
    texts = opened(tmp_path, "x.csv", bad_rows=0.5)
    assert (list(known(texts)), texts.skipped) == (["q", "s"], {"a pair that is no match": 1})
    (tmp_path / "x.csv").write_text("a,b,label\nq,p,1\nr,p,high\ns,p,1\n")
    texts = opened(tmp_path, "x.csv", bad_rows=0.5)
    assert (list(known(texts)), texts.skipped) == (["q", "s"], {"a label that is no number": 1})


def test_the_same_question_twice_is_one_with_two_answers(tmp_path):
    (tmp_path / "x.csv").write_text("a,b,c\nq,p,n\nq,n,o\nr,p,o\n")
    assert known(opened(tmp_path, "x.csv")) == {"q": (["p", "n"], ["o"]), "r": (["p"], ["o"])}


@pytest.mark.parametrize(
    ("entry", "scores"),
    [
        ({"query": "q", "pos": ["p"], "neg": ["n", "o"], "pos_scores": [2], "neg_scores": [1.5, -1]}, (2, 1.5, -1)),
        ({"query": "q", "pos": ["p"], "neg": ["n", "o"], "neg_scores": [1, 0]}, (None, 1, 0)),
        ({"anchor": "q", "positive": "p", "negative_1": "n", "negative_2": "o", "scores": [3, 2, 1]}, (3, 2, 1)),
        ({"a": "q", "b": "p", "c": "n", "d": "o", "scores": "[3, None, 1]"}, (3, None, 1)),
        (
            {
                "question": "q",
                "positive_ctxs": [{"text": "p", "score": "7.5"}],
                "hard_negative_ctxs": [{"text": "n"}, {"text": "o", "score": 2}],
            },
            (7.5, None, 2),
        ),
        ({"query": "q", "pos": ["p"], "neg": ["n", "o"], "pos_scores": None, "neg_scores": []}, (None, None, None)),
    ],
)
def test_scores_belong_to_passages(tmp_path, entry, scores):
    lines(tmp_path / "x.jsonl", [entry, {"query": "r", "pos": ["s"]}])
    texts = opened(tmp_path, "x.jsonl")
    text = {row: passage.text for row, passage in enumerate(texts.passages)}
    expected = {name: score for name, score in zip("pno", scores, strict=True) if score is not None}
    assert {text[row]: score for row, score in texts.queries[0].scores} == expected
    assert texts.queries[1].scores == ()


def test_scores_leave_the_digest_of_texts_as_it_was(tmp_path):
    entries = [{"query": "q", "pos": ["p"]}, {"query": "r", "pos": ["s"]}]
    lines(tmp_path / "x.jsonl", entries)
    plain = opened(tmp_path, "x.jsonl")
    lines(tmp_path / "x.jsonl", [entry | {"pos_scores": [9]} for entry in entries])
    scored = opened(tmp_path, "x.jsonl")
    assert scored.digest() == plain.digest()
    assert scored.scores_digest() != plain.scores_digest()


def test_one_question_of_two_rows_has_the_scores_of_both(tmp_path):
    entries = [{"query": "q", "pos": ["p"], "pos_scores": [1]}, {"query": "q", "pos": ["p", "s"], "pos_scores": [2, 3]}]
    lines(tmp_path / "x.jsonl", [*entries, {"query": "r", "pos": ["s"]}])
    assert sorted(score for _, score in opened(tmp_path, "x.jsonl").queries[0].scores) == [1, 3]


MORE_SCORES = "scores of another number than passages"


@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("x.jsonl", b'{"a": "q"', "not JSON"),
        ("x.jsonl", b'{"a": "\xe9", "b": "p"}', "not UTF-8"),
        ("x.jsonl", rb'{"question": "\ud800", "positive_ctxs": [{"text": "p"}]}', "not UTF-8"),
        ("x.jsonl", b'"a text"', "not an object"),
        ("x.jsonl", b'{"a": "q"}', "no positives"),
        ("x.jsonl", b'{"question": "q", "positive_ctxs": []}', "no positives"),
        ("x.jsonl", b'{"question": "q", "positive_ctxs": [{"text": " "}]}', "no positives"),
        ("x.jsonl", b'{"question": " ", "positive_ctxs": [{"text": "p"}]}', "empty question"),
        ("x.jsonl", b'{"question": 3, "positive_ctxs": [{"text": "p"}]}', "not a text"),
        ("x.jsonl", b'{"question": "q", "positive_ctxs": ["p"]}', "passages that are no objects"),
        ("x.jsonl", b'{"query": "q", "pos": ["p"], "neg": ["n"], "neg_scores": [1, 2]}', MORE_SCORES),
        ("x.jsonl", b'{"query": "q", "positive": "p", "scores": [1, 2]}', MORE_SCORES),
        ("x.jsonl", b'{"query": "q", "pos": ["p"], "pos_scores": ["high"]}', "a score that is no number"),
        ("x.jsonl", b'{"query": "q", "pos": ["p"], "pos_scores": [NaN]}', "a score that is no number"),
        ("x.csv", b"only one", "wrong number of columns"),
        ("x.csv", b"\xff,b", "not UTF-8"),
        ("x.csv", b'"a' + b"x" * 2_000_000 + b'",b', "broken row"),
    ],
)
def test_a_bad_row_is_counted_and_the_others_are_used(tmp_path, caplog, name, bad, reason):
    good = [b'{"a": "q%d", "b": "p%d"}' % (n, n) if name == "x.jsonl" else b"q%d,p%d" % (n, n) for n in range(4)]
    rows = [*([] if name == "x.jsonl" else [b"question,positive"]), *good[:2], bad, *good[2:]]
    (tmp_path / name).write_bytes(b"\n".join(rows) + b"\n")
    line = 3 if name == "x.jsonl" else 4
    with caplog.at_level(logging.WARNING, logger="contrastile"):
        texts = opened(tmp_path, name, bad_rows=0.2)
    assert texts.skipped == {reason: 1}
    assert list(known(texts)) == ["q0", "q1", "q2", "q3"]
    path = tmp_path / name
    assert caplog.messages == [f"{path}: 1 of 5 rows are skipped ({reason}: 1), the first at {path}:{line}"]


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_stray_quote_of_a_table_is_refused_by_its_line(tmp_path, name, closed):
    mark = "," if name == "x.csv" else "\t"
    rows = [f"q{n}{mark}p{n}" for n in range(100)]
    rows[50] = f'q50{mark}"an open quote'
    if closed:
        rows[80] += '"'
    (tmp_path / name).write_text("\n".join([f"a{mark}b", *rows]) + "\n")
    assert refusal(opened, tmp_path, name) == (
        f"`source` must close every quote within 16 lines; got one open at {tmp_path / name}:52. "
        "Close it, or double it where it is a letter; .parquet holds texts of more lines."
    )


def test_all_lines_of_a_broken_row_are_counted(tmp_path, caplog):
    # too many letters within a few lines; a quote that another row closes
    long = [f'q,"{"x" * 2**19}', "y" * 2**19, 'z"']
    rows = ["a,b", 'q0,"p\n0"', *long, "q1,p1", 'q2,"p', 'q3,"p3"', "q4,p4"]
    (tmp_path / "x.csv").write_text("\n".join(rows) + "\n")
    with caplog.at_level(logging.WARNING, logger="contrastile"):
        texts = opened(tmp_path, "x.csv", bad_rows=0.7)
    assert known(texts) == {"q0": (["p\n0"], []), "q1": (["p1"], []), "q4": (["p4"], [])}
    assert texts.skipped == {"broken row": 4, "wrong number of columns": 1}
    assert "5 of 8 rows are skipped" in caplog.text
    assert f"the first at {tmp_path}/x.csv:4" in caplog.text


def test_too_many_bad_rows_are_an_error_with_file_and_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": "q", "b": "p"}\n\n{\n{"a": "q2", "b": "p"}\n{"a": "q3"}\n')
    assert refusal(opened, tmp_path, "x.jsonl", bad_rows=0.25) == (
        "`source` must have at most 25% of rows that cannot be used; got 2 of 4 (no positives: 1, not JSON: 1), "
        f"the first at {tmp_path}/x.jsonl:3. Mend them, or raise data.bad_rows."
    )


def test_a_list_that_breaks_off_is_an_error_with_its_line(tmp_path):
    text = json.dumps([dpr(0), dpr(1)], indent=1)
    (tmp_path / "x.json").write_text(text[:-20])
    line = text.count("\n", 0, text.index('"q1"'))
    assert refusal(opened, tmp_path, "x.json") == (
        f"`source` must be a whole JSON list; got one that breaks off or cannot be read at {tmp_path}/x.json:{line}. "
        "Mend the file, or write one object a line."
    )


def test_a_bad_entry_of_a_list_is_counted_at_its_line(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps([dpr(0), dpr(1), 5, dpr(2)], indent=0))
    counter = SkipCounter()
    assert [entry["question"] for _, entry in read_entries(tmp_path / "x.json", counter)] == ["q0", "q1", "q2"]
    with pytest.raises(ValueError, match=r"first at .*x.json:") as caught:
        counter.close(tmp_path / "x.json", 0.0)
    line = int(str(caught.value).rsplit("x.json:", 1)[1].split(".")[0])
    assert (tmp_path / "x.json").read_text().split("\n")[line - 1] == "5,"


def test_a_number_cut_by_a_block_is_one_bad_entry(tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text('[{"a": "b", "c": "d"}, 123456789012345, {"a": "e", "c": "f"}]')
    for block in range(3, 40):
        monkeypatch.setattr("contrastile.data.entries.BLOCK", block)
        counter = SkipCounter()
        assert [entry["a"] for _, entry in read_entries(tmp_path / "x.json", counter)] == ["b", "e"]
        assert (counter.rows, counter.skipped) == (3, {"not an object": 1})


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "x.txt",
            "`source` must end in .jsonl, .json, .csv, .tsv, .parquet; got {}. Or give a folder in BEIR's format.",
        ),
        ("none.jsonl", '`source` must be a file or folder that exists; got "{}". Check its path: a relative one'),
        ("cut.jsonl.gz", "`source` must be a file that can be read; got {}. "),
        ("empty.csv", "`source` must have a first line; got {}, which is empty. Name the columns there."),
        ("broken.csv", "`source` must have a first line; got {}, where it is broken. Name the columns there."),
        ("utf16.csv", "`source` must have a first line; got {}, where it is not UTF-8. Save it as UTF-8."),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, sentence):
    (tmp_path / "x.txt").write_text("a\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "utf16.csv").write_text("q,p\na,b\n", encoding="utf-16")
    (tmp_path / "broken.csv").write_text('"a"b,c\nq,p\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": "b"}\n' * 1000)[:-20])
    assert refusal(opened, tmp_path, name).startswith(sentence.format(tmp_path / name))


@pytest.mark.parametrize("names", ["question,answer,source", "query,text,hard_negative", "query,positive,source"])
def test_columns_that_are_negatives_by_their_place_are_a_warning(tmp_path, caplog, names):
    (tmp_path / "x.csv").write_text(f"{names}\na,b,c\nd,e,f\n")
    texts = opened(tmp_path, "x.csv")
    assert known(texts) == {
        "a": (["b"], [] if "positive" in names else ["c"]),
        "d": (["e"], [] if "positive" in names else ["f"]),
    }
    sentence = "columns read as negatives by their place: source; beside columns called question and positive, "
    sentence = f"{tmp_path}/x.csv: {sentence}only those called negative are read"
    assert [record.getMessage() for record in caplog.records] == [sentence] * ("answer" in names)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("a b c\tanswer one", "a b c, answer one"), ("Question\tReply", ""), ("qid\ttext", ""),
        ("why\t" + 99 * "x", f"why, {75 * 'x'}"),
    ],
)  # fmt: skip
def test_a_first_line_that_names_no_known_column_is_a_warning(tmp_path, caplog, names, shown):
    (tmp_path / "x.tsv").write_text(f"{names}\nd e f\tanswer two\ng h i\tanswer three\nj\tk\n")
    assert len([*read_entries(tmp_path / "x.tsv", SkipCounter())]) == 3
    sentence = f"{tmp_path}/x.tsv: the first line is taken as names of columns: {shown}; if it is a pair, "
    assert caplog.messages == [f"{sentence}put names above it, such as question and positive"] * bool(shown)


def test_one_question_is_not_enough(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\nq,p\n")
    assert refusal(opened, tmp_path, "x.csv") == (
        f"`source` must hold at least two questions ({tmp_path}/x.csv); got 1 that can be used. "
        "One to train on, one to be held out."
    )


@pytest.mark.parametrize("name", ["test.tsv", "nq-test.qa.csv", "test.tsv.gz"])
def test_dprs_questions_have_no_line_of_names(tmp_path, name):
    (tmp_path / "x.csv").write_text("a,b\nq1,p1\nq2,p2\n")
    rows = b"who was it, then\t['me, you', \"you's\"]\nwhen\t\"['in 1999']\"\nbroken\n"
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith("gz") else rows)
    given = opened(tmp_path, "x.csv", test=str(tmp_path / name), bad_rows=0.5)
    asked = [given.queries[row] for row in given.splits["held_out"]]
    assert [(query.text, query.answers) for query in asked] == [
        ("who was it, then", ("me, you", "you's")),
        ("when", ("in 1999",)),
    ]
    assert given.skipped == {"wrong number of columns": 1}


def test_a_share_is_held_out_or_a_file_of_its_own(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n" + "".join(f"q{n},p{n}\n" for n in range(50)))
    (tmp_path / "test.tsv").write_text("question\tanswers\nwho?\t['me', \"you\"]\nq3\t['p']\n")
    by_lot = opened(tmp_path, "x.csv", held_out=0.3)
    assert 5 < len(by_lot.splits["held_out"]) < 25
    assert sorted([*by_lot.splits["train"], *by_lot.splits["held_out"]]) == list(range(50))
    given = opened(tmp_path, "x.csv", test=str(tmp_path / "test.tsv"))
    assert [given.queries[row].answers for row in given.splits["held_out"]] == [("p",), ("me", "you")]
    # a question of the test is not trained on
    assert 3 not in given.splits["train"]


def test_the_same_id_is_one_passage_with_its_first_text(tmp_path, caplog):
    """A passage with one id in a corpus, a positive and a hard negative is no negative of itself."""
    lines(tmp_path / "more.jsonl", [{"_id": "7", "text": "born in Ulm"}, {"_id": "8", "text": "something else"}])
    entries = [
        {"question": "where?", "positive_ctxs": [{"passage_id": 7, "text": "born in  Ulm."}], "hard_negative_ctxs": []},
        {
            "question": "who?",
            "positive_ctxs": [{"passage_id": "9", "text": "me"}],
            "hard_negative_ctxs": [{"passage_id": "7", "text": "Born in Ulm"}, {"text": "without an id"}],
        },
        # the text of 8 under another id, and that id again
        {
            "question": "what?",
            "positive_ctxs": [{"passage_id": "10", "text": "something else"}, {"passage_id": "10", "text": "more"}],
            "hard_negative_ctxs": [],
        },
    ]
    lines(tmp_path / "x.jsonl", entries)
    texts = opened(tmp_path, "x.jsonl", corpus=str(tmp_path / "more.jsonl"))
    assert [passage.text for passage in texts.passages] == ["born in Ulm", "something else", "me", "without an id"]
    assert [(query.positives, query.negatives) for query in texts.queries] == [((0,), ()), ((2,), (0, 3)), ((1,), ())]
    said = "{0}: texts whose id another one has: 3, the first at {0}:1; they are one passage, with the first text"
    assert caplog.messages == [said.format(tmp_path / "x.jsonl")]


def test_ids_that_count_within_a_question_are_refused(tmp_path):
    entries = [
        {
            "question": f"q{n}",
            "positive_ctxs": [{"id": 0, "text": f"p{n}"}],
            "hard_negative_ctxs": [{"id": 1, "text": f"n{n}"}],
        }
        for n in range(3)
    ]
    lines(tmp_path / "x.jsonl", entries)
    with pytest.raises(ValueError) as caught:
        opened(tmp_path, "x.jsonl")
    said = (
        "`source` must have ids that are one passage each ({0}); got 2 ids for 6 texts, another text the first time at "
        "{0}:2. Leave out ids that count within a question."
    )
    assert str(caught.value) == said.format(tmp_path / "x.jsonl")


def test_an_id_may_be_0_and_none_is_no_id(tmp_path):
    entries = [
        {"query_id": None, "query": f"q{n}", "positive_passages": [{"docid": n, "text": f"p{n}"}]} for n in range(2)
    ]
    lines(tmp_path / "x.jsonl", entries)
    texts = opened(tmp_path, "x.jsonl")
    assert [passage.id for passage in texts.passages] == ["0", "1"]
    assert [query.id for query in texts.queries] == ["q0", "q1"]


def beir(folder, judgements):
    (folder / "qrels").mkdir(parents=True)
    lines(folder / "corpus.jsonl", [{"_id": f"d{n}", "title": f"t{n}", "text": f"p{n}"} for n in range(3)])
    lines(folder / "queries.jsonl", [{"_id": f"q{n}", "text": f"question {n}"} for n in range(3)])
    for name, rows in judgements.items():
        (folder / "qrels" / f"{name}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))


def test_beir(tmp_path):
    beir(tmp_path / "set", {"train": ["q0\td0\t1\n"], "test": ["q1\td1\t2\n", "q1\td0\t1\n", "q2\td2\t0\n"]})
    texts = opened(tmp_path, "set")
    ids = {name: [texts.queries[row].id for row in rows] for name, rows in texts.splits.items()}
    assert ids == {"train": ["q0"], "test": ["q1"]}
    (tested,) = texts.splits["test"]
    assert (texts.queries[tested].positives, texts.queries[tested].grades) == ((1, 0), (2, 1))
    assert (texts.passages[2].id, texts.passages[2].title) == ("d2", "t2")


def test_a_file_of_judgements_without_right_passages_is_named(tmp_path, caplog):
    beir(tmp_path / "set", {"dev": ["q1\td1\t0\n"], "test": ["q0\td0\t1\n"]})
    assert len(opened(tmp_path, "set").splits["test"]) == 1
    (said,) = caplog.messages
    assert said == f"{tmp_path}/set/qrels/dev.tsv: no question has a right passage by this file, and dev is left out"


def test_beir_ids_that_are_nowhere_are_counted(tmp_path):
    bad = ["q0\td9\t1\n", "q8\td0\t1\n", "q0\td0\n", "q0\td1\tx\n", "q0\td1\t0.5\n"]
    beir(tmp_path / "set", {"test": [*bad, "q0\td0\t1\n"]})
    assert opened(tmp_path, "set", bad_rows=0.6).skipped == {
        "passage id not in corpus.jsonl": 1,
        "query id not in queries.jsonl": 1,
        "wrong number of columns": 1,
        "no judgement": 2,
    }


def test_beir_passages_have_one_grade_of_a_query(tmp_path):
    beir(tmp_path / "set", {"test": ["q0\td0\t1\n", "q1\td0\t2\n", "q0\td0\t1\n", "q0\td0\t0\n"]})
    assert refusal(opened, tmp_path, "set") == (
        '`source` must have one grade of each passage per query; got "q0 d0 0" at '
        f"{tmp_path}/set/qrels/test.tsv:5. Leave one of them out."
    )


@pytest.mark.parametrize(
    ("names", "form"),
    [
        ("", "{}\t{}\t1\n"),
        ("", "{}\t0\t{}\t1\n"),
        ("", "{} {}  1\n"),
        ("", "{} 0 {} 1\n"),
        ("query-id corpus-id score\n", "{} {} 1\n"),
    ],
)
def test_judgements_without_a_line_of_names_or_between_blanks_are_all_read(tmp_path, names, form):
    beir(tmp_path / "set", {"test": ["q2\td2\t1\n"]})
    rows = "".join(form.format(f"q{n}", f"d{n}") for n in range(2))
    (tmp_path / "set" / "qrels" / "train.tsv").write_text(names + rows)
    texts = opened(tmp_path, "set")
    asked = [texts.queries[row] for row in texts.splits["train"]]
    assert [(query.id, query.positives) for query in asked] == [("q0", (0,)), ("q1", (1,))]
    assert texts.skipped == {}


def test_judgements_are_read_by_the_names_of_their_columns(tmp_path):
    folder = tmp_path / "set"
    beir(folder, {"train": []})
    # ids that both sides share, so that nothing is missing where they are exchanged
    lines(folder / "queries.jsonl", [{"_id": f"d{n}", "text": f"question {n}"} for n in range(3)])
    (folder / "qrels" / "train.tsv").write_text("corpus-id\tscore\tquery-id\nd1\t2\td0\nd2\t1\td0\n")
    (query,) = opened(tmp_path, "set").queries
    assert (query.id, query.positives, query.grades) == ("d0", (1, 2), (2, 1))


def test_an_id_is_taken_once(tmp_path):
    beir(tmp_path / "set", {"train": ["q0\td0\t1\n", "q0\td1\tinf\n"]})
    with (tmp_path / "set" / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d0", "text": "another"}\n')
    texts = opened(tmp_path, "set", bad_rows=0.5)
    assert [passage.text for passage in texts.passages] == ["p0", "p1", "p2"]
    assert texts.skipped == {"id seen before": 1, "no judgement": 1}


def test_options_that_a_source_has_no_use_for_are_refused(tmp_path):
    beir(tmp_path / "set", {"train": ["q0\td0\t1\n"]})
    (tmp_path / "x.csv").write_text("a,b\nq1,p1\nq2,p2\n")
    (tmp_path / "no.jsonl").touch()
    for source, more, sentence in (
        ("set", {"test": "x.csv"}, '`test` must be left out with the source ".*set"; got ".*x.csv". These come with'),
        ("set", {"corpus": "x.csv"}, '`corpus` must be left out with the source ".*set"; got ".*x.csv"'),
        ("x.csv", {"test": "set"}, '`test` must be a file of questions; got the folder ".*set". Name a BEIR folder'),
        ("x.csv", {"test": "no.jsonl"}, r"`test` must hold a question \(.*no.jsonl\); got none that can be used"),
    ):
        with pytest.raises(ValueError, match=sentence):
            opened(tmp_path, source, **{name: str(tmp_path / path) for name, path in more.items()})
    with pytest.raises(ValueError, match='`test` must be left out with the source "docstrings"'):
        open_texts("docstrings", cache=tmp_path, test="x.csv")


def test_a_folder_not_in_beirs_format_is_refused_with_the_missing_files(tmp_path):
    (tmp_path / "set").mkdir()
    assert refusal(opened, tmp_path, "set") == (
        f"`source` must be a folder in BEIR's format; got {tmp_path}/set without corpus.jsonl, queries.jsonl. "
        "It needs corpus.jsonl, queries.jsonl, qrels."
    )


def test_wikipedias_passages(tmp_path):
    path = tmp_path / "psgs_w100.tsv"
    path.write_text('id\ttext\ttitle\n1\t"He said ""so""\tand left."\tHis title\n2\tplain\t\n3\t\t\n')
    counter = SkipCounter()
    passages = list(read_passages(path, counter))
    assert [(one.id, one.text, one.title) for one in passages] == [
        ("1", 'He said "so"\tand left.', "His title"),
        ("2", "plain", ""),
    ]
    assert counter.skipped == {"empty text": 1}
    assert passages[1].source == f"{path}:3"


def test_ones_own_code_is_a_corpus(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "mod.py").write_text(
        "def f(x):\n    return x\n\nclass A:\n    def g(self):\n        '''Says.'''\n"
    )
    found = list(read_passages(tmp_path, SkipCounter()))
    assert [(one.id, one.source) for one in found] == [("pack.mod.f", f"{tmp_path}/pack/mod.py:1")]
    (tmp_path / "pack" / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"must hold corpus.jsonl or Python files"):
        list(read_passages(tmp_path / "pack" / "nothing", SkipCounter()))


def test_mining_fills_in_negatives(tmp_path):
    rows = [{"a": f"apple {n}", "b": f"apple number {n}"} for n in range(20)]
    lines(tmp_path / "x.jsonl", rows)
    texts = opened(tmp_path, "x.jsonl", mined=4, held_out=0.2)
    assert all(len(texts.queries[row].negatives) == 4 for row in texts.splits["train"])
    assert not any(texts.queries[row].negatives for row in texts.splits["held_out"])
