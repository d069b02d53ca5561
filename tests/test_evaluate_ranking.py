"""Measures against trec_eval itself, on random runs with ties; files in and out; DPR's matching of answers."""

import math
import random
import re

import pytest
from refusals import refusal

from contrastile.evaluate import ranking as rankings
from contrastile.evaluate.ranking import (
    answer_recall,
    has_answer,
    means,
    measure,
    ranking,
    read_judgements,
    read_run,
    words,
    write_run,
)

# our name, and trec_eval's
TWINS = {
    **{f"nDCG@{k}": f"ndcg_cut_{k}" for k in (1, 5, 10, 100)}, **{f"recall@{k}": f"recall_{k}" for k in (5, 10, 100)},
    **{f"precision@{k}": f"P_{k}" for k in (5, 10, 100)}, **{f"hit@{k}": f"success_{k}" for k in (1, 5, 10)},
    "nDCG": "ndcg", "MRR": "recip_rank", "MAP": "map", "MAP@10": "map_cut_10",
}  # fmt: skip


def random_task(seed):
    """A run and its judgements: ties, scores that are equal in float32 only, grades from -1 to 3, unjudged passages."""
    lot = random.Random(seed)
    run, judgements = {}, {}
    for query in map(str, range(lot.randint(1, 4))):
        passages = [f"d{n}" for n in range(lot.randint(1, 150))]
        scores = [lot.choice([0.5, 1.0, -2.0, lot.random(), 1.0 + 1e-12 * lot.random()]) for _ in passages]
        run[query] = dict(zip(passages, scores, strict=True))
        pool = [*passages, "d998", "d999"]
        judged = lot.sample(pool, lot.randint(1, min(len(pool), 30)))
        judgements[query] = {passage: lot.choice([-1, 0, 0, 1, 1, 2, 3]) for passage in judged}
    return run, judgements


def many_tasks(seeds):
    """Random tasks as one, of many queries."""
    run, judgements = {}, {}
    for seed in seeds:
        one = random_task(seed)
        for whole, part in zip((run, judgements), one, strict=True):
            whole.update({f"{seed}-{query}": value for query, value in part.items()})
    return run, judgements


def test_measures_of_a_thousand_random_runs_equal_trec_eval():
    pytrec_eval = pytest.importorskip("pytrec_eval")
    run, judgements = many_tasks(range(1000))
    wanted = {re.sub(r"_(\d+)$", r".\1", twin) for twin in TWINS.values()}
    theirs = pytrec_eval.RelevanceEvaluator(judgements, wanted).evaluate(run)
    ours = measure(run, judgements, list(TWINS))
    assert theirs.keys() == ours.keys()
    for query, values in theirs.items():
        for name, twin in TWINS.items():
            assert math.isclose(ours[query][name], values[twin], rel_tol=1e-12, abs_tol=1e-12), (query, name)


def test_mrr_at_ten_equals_trec_eval_on_the_first_ten():
    pytrec_eval = pytest.importorskip("pytrec_eval")
    run, judgements = many_tasks(range(100))
    tens = {query: {name: scores[name] for name in ranking(scores)[:10]} for query, scores in run.items()}
    theirs = pytrec_eval.RelevanceEvaluator(judgements, {"recip_rank"}).evaluate(tens)
    ours = measure(run, judgements, ["MRR@10"])
    for query, values in theirs.items():
        assert ours[query]["MRR@10"] == pytest.approx(values["recip_rank"], abs=1e-12)


def test_a_query_missing_in_the_run_counts_zero():
    measured = measure({"q": {"a": 1.0}}, {"q": {"a": 1}, "r": {"a": 1}}, ["MAP"])
    assert measured == {"q": {"MAP": 1.0}, "r": {"MAP": 0.0}}
    assert means(measured) == {"MAP": 0.5}


@pytest.mark.parametrize("name", ["ndcg@10", "MAP@", "MAP@0", "MRR@ten", "", "hit@-1"])
def test_an_unknown_measure_is_refused(name):
    assert refusal(measure, {}, {}, [name]) == (
        f'`names` must be measures among nDCG, MRR, MAP, recall, precision, hit; got "{name}". '
        "With a cut or without: nDCG@10, MAP."
    )


@pytest.mark.parametrize("scores", [["a", "b"], {"a": "high"}])
def test_scores_that_are_no_numbers_are_refused(scores):
    assert refusal(measure, {"q": scores}, {"q": {"a": 1}}) == (
        f"`run` must have a number for each passage of a query; got {scores}. "
        'For example {"query": {"passage": 0.5}}.'
    )


def test_no_queries_have_no_mean():
    assert refusal(means, {}) == "`judgements` must not be empty; got no queries. There is nothing to measure."


def test_a_run_is_written_and_read_back_exactly(tmp_path):
    run, _ = random_task(7)
    write_run(tmp_path / "x.trec", run, tag="mine")
    assert read_run(tmp_path / "x.trec") == run
    first = (tmp_path / "x.trec").read_text().splitlines()[0].split()
    assert (first[1], first[3], first[5]) == ("Q0", "1", "mine")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("q Q0 d 1 0.5", '`run` must have lines of "query Q0 passage rank score tag"; got "q Q0 d 1 0.5" at {}:2. '),
        ("q Q0 d 1 high tag", '`run` must have lines of "query Q0 passage rank score tag"; got "q Q0 d 1 high tag"'),
        ("q Q0 a 2 0.4 tag", '`run` must have each passage once per query; got "q Q0 a 2 0.4 tag" at {}:2. Leave one'),
    ],
)
def test_an_error_in_a_run_names_file_and_line(tmp_path, line, sentence):
    path = tmp_path / "x.trec"
    path.write_text(f"q Q0 a 1 0.5 tag\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(sentence.format(path))):
        read_run(path)


def test_ids_with_blanks_are_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape('`run` must have ids without blanks; got "a b".')):
        write_run(tmp_path / "x.trec", {"q": {"a b": 1.0}})


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"`run` must be a file that can be read; got .*none. No such file"):
        read_run(tmp_path / "none")


def test_judgements_of_trec_and_of_beir_are_read(tmp_path):
    (tmp_path / "trec").write_text("q 0 a 1\nq 0 b -1\n")
    (tmp_path / "beir").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\nq\tb\t-1\n")
    assert read_judgements(tmp_path / "trec") == read_judgements(tmp_path / "beir") == {"q": {"a": 1, "b": -1}}
    # columns in another order, and of other names
    (tmp_path / "beir").write_text("corpus-id\tscore\tquery-id\na\t1\tq\nb\t-1\tq\n")
    assert read_judgements(tmp_path / "beir") == {"q": {"a": 1, "b": -1}}
    for names in ("topic\tdocument\tgrade", "topic\tcorpus-id\tquery-id"):
        (tmp_path / "beir").write_text(f"{names}\nq\ta\t1\nq\tb\t-1\n")
        assert read_judgements(tmp_path / "beir") == {"q": {"a": 1, "b": -1}}
    (tmp_path / "beir").write_text("q\ta\t1\nq\tb\tgood\n")
    with pytest.raises(ValueError, match=re.escape(f'got "q b good" at {tmp_path}/beir:2. Mend the file.')):
        read_judgements(tmp_path / "beir")


def test_a_mark_of_the_byte_order_is_no_part_of_an_id(tmp_path):
    for name, read, line in (("x.trec", read_run, "q Q0 a 1 0.5 tag\n"), ("x.qrels", read_judgements, "q 0 a 1\n")):
        (tmp_path / name).write_text(line, encoding="utf-8-sig")
        assert [*read(tmp_path / name)] == ["q"]


def test_a_passage_with_two_grades_is_refused(tmp_path):
    path = tmp_path / "x.qrels"
    path.write_text("q 0 a 1\nq 0 a 1\n")
    assert read_judgements(path) == {"q": {"a": 1}}
    path.write_text("q 0 a 1\nq 0 a 0\n")
    sentence = f'`judgements` must have one grade of each passage per query; got "q 0 a 0" at {path}:2. Leave one of'
    assert refusal(read_judgements, path).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "answers", "found"),
    [
        ("The Eiffel Tower (Paris).", ["paris"], True),
        ("The Eiffel Tower (Paris).", ["eiffel tower"], True),
        ("The Eiffel, Tower", ["eiffel tower"], False),
        ("Parisian", ["Paris"], False),
        ("caf\u00e9", ["cafe\u0301"], True),
        ("cafe", ["café"], False),
        ("in 1,234 days", ["1,234"], True),
        ("the U.S. Army", ["u.s."], True),
        ("\u65e5\u672c", ["\u65e5\u672c"], True),
        ("anything", [""], False),
        ("anything", [], False),
        ("a_b", ["a"], True),
        ("tab\tand\u00a0blank", ["and blank"], True),
    ],
)
def test_answers_are_matched_word_by_word(text, answers, found):
    assert has_answer(text, answers) is found


def test_words_are_decomposed_in_lower_case_without_blanks():
    assert words("\u00c5 x_y\n\u200b!") == ["a\u030a", "x", "_", "y", "!"]


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [("born in 1879", r"18\d\d", True), ("BORN", "born", True), ("a\nb", "^b$", True), ("a (", "(", False)],
)
def test_answers_may_be_patterns(text, answer, found):
    assert has_answer(text, [answer], "regex") is found


def test_answer_recall_counts_the_first_k_passages_only():
    found = [["x", "y", "right"], ["right", "x", "y"], ["x", "x", "x"]]
    assert answer_recall(found, [["right"]] * 3, ks=[1, 2, 3, 9]) == {1: 1 / 3, 2: 1 / 3, 3: 2 / 3, 9: 2 / 3}


def test_answers_without_questions_and_unknown_matches_are_refused():
    with pytest.raises(ValueError, match=re.escape("`answers` must be as many as the questions, one at least; got 1")):
        answer_recall([["x"]], [])
    with pytest.raises(ValueError, match=re.escape('`match` must be one of string, regex; got "glob".')):
        has_answer("x", ["x"], "glob")


def test_a_text_in_place_of_a_list_is_refused():
    sentence = '`{}` must be a list of texts{}; got "{}". Put it into a list.'
    assert refusal(has_answer, "a cat", "a dog") == sentence.format("answers", "", "a dog")
    for name, texts in (("passages", (["a cat"], [["cat"]])), ("answers", ([["a cat"]], ["cat"]))):
        got = "a cat" if name == "passages" else "cat"
        assert refusal(answer_recall, *texts) == sentence.format(name, " for each question", got)


def test_a_score_that_is_no_number_is_refused():
    run = {"q": {"a": 1.0, "b": math.nan, "c": 3.0}}
    sentence = "`run` must have scores that are numbers; got NaN. Look for what is not finite in the features."
    assert refusal(measure, run, {"q": {"c": 1}}) == sentence


def test_scores_beyond_float32_are_equal():
    """Without a warning, which the tests turn into an error."""
    assert ranking({"a": 1e300, "b": 1e39, "c": -1e300, "d": 0.0}) == ["b", "a", "d", "c"]


def test_a_pattern_without_end_is_found_in_none(monkeypatch, caplog):
    pytest.importorskip("regex")
    monkeypatch.setattr(rankings, "LONGEST", 0.05)
    monkeypatch.setattr(rankings, "_slow", set())
    endless, text = "(a|aa)+$", "a" * 99 + "b"
    assert not has_answer(text, [endless], "regex")
    assert caplog.messages == [
        f"the pattern '{endless}' takes over 0.05 s on a passage of 100 letters; from here on it is found in none"
    ]
    assert not any(has_answer("a", [pattern], "regex") for pattern in ("(" * 3000 + "a" + ")" * 3000, "a|" * 9999))
    # it is not tried again, and other patterns are
    assert has_answer(text, [endless, "a+b"], "regex")
    assert len(caplog.messages) == 1
