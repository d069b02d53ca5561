"""Evaluation of a retriever: all passages ranked for every held-out query, beside BM25; the measures are trec_eval's.

This file ranks the passages, for all queries or for the sample of a `probe`, and makes the rows of the results, their
files for other tools, and the samples of the report.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from contrastile._errors import invalid, logger
from contrastile.data.base import Indices, held_out
from contrastile.data.texts import BM25, WORD, Passage, Query, TextSet, words
from contrastile.evaluate import late
from contrastile.evaluate.ranking import answer_recall, has_answer, means, measure, write_judgements, write_run
from contrastile.evaluate.retrieval import Right, recall_where, topk
from contrastile.gradcache.inputs import Ragged
from contrastile.train.folder import QUESTIONS, RunFolder
from contrastile.train.log import progress
from contrastile.train.report import page
from contrastile.train.report.page import Row, Samples, percent, result_row, write_report
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.run import RetrieverRun, TextMaterials, TokenStore, passage_tokens, query_tokens

KS = (1, 5, 20, 100)
# the columns of a table beside the hits at KS; rows hold the recalls at the other KS too
CUTOFF = 10
MEASURES = (f"nDCG@{CUTOFF}", f"MRR@{CUTOFF}", "MAP", f"recall@{KS[-1]}")
# the columns of a comparison
COMPARED = (*(f"@{k}" for k in KS), MEASURES[0])
PARTS = {"functions": "held-out functions", "packages": "held-out packages", "held_out": "held-out queries"}
# questions shown of each part, passages shown to each, letters shown of each passage
SHOWN, ANSWERS, LETTERS = 8, 4, 2400
# letters of the shortest word of a question that is marked in a passage, and longer words that are not marked
MARKED = 3
UNMARKED = re.compile(
    "about|after|all|also|and|any|are|been|before|but|can|could|did|does|each|for|from|had|has|have|how|into|its|may|"
    "more|most|not|only|other|our|out|over|should|some|such|than|that|the|their|them|then|there|these|they|this|those|"
    "through|under|use|using|very|was|were|what|when|where|which|who|why|will|with|would|you|your"
)
SENTENCE = (
    "Random questions and the best of all {:,} passages; words of the question are marked. A tick marks a passage that "
    "the data list as right, or one with an answer if none is listed; others may be right as well."
)

# encoded passages that are searched, as `retrieval/index.py` has them: `len`, a passage by its row, and `search`
Searchable = Any
Passages = Sequence[Passage] | Searchable
# from n questions to rows [n, C] of the passages that a late retriever scores for each, −1 for none; None: all passages
Candidates = Callable[[Sequence[str]], Indices | None]
# from the passages of a corpus to their candidates
FirstStage = Callable[[Passages], Candidates]
# from n questions and k to scores and rows of the k best passages of each, both `[n, k]`, as arrays or tensors
Search = Callable[[Sequence[str], int], tuple[Any, Any]]


@dataclass(frozen=True)
class Rankings:
    """The ranked passages of a part's queries by one system: rows of `passages` and scores, both `[n, depth]`.

    `queries` `[n]`: rows of the text set. A row of −1 pads a shorter ranking.
    """

    part: str
    system: str
    passages: Passages
    queries: Indices
    rows: Indices
    scores: Any

    def ranking(self, query: int) -> list[tuple[Passage, float]]:
        """The passages of the n-th query with scores, the best first."""
        ranked = zip(self.rows[query].tolist(), self.scores[query].tolist(), strict=True)
        return [(self.passages[row], score) for row, score in ranked if row >= 0]


def rank_all(
    run: RetrieverRun, texts: TextSet, passages: TokenStore | Searchable, first_stage: FirstStage | None = None
) -> list[Rankings]:
    """Rankings of all held-out queries over the tokens of all passages, or over an index.

    With BM25's rankings where the recipe wants them and there is no index. first_stage: the candidates that a late
    retriever scores, by default those of the recipe.
    """
    settings = run.recipe.evaluate
    corpus: Passages = texts.passages if isinstance(passages, TokenStore) else passages
    if first_stage is None and run.recipe.model.kind == "late" and settings.candidates:
        first_stage = partial(bm25_candidates, count=settings.candidates)
    # without candidates every passage is scored
    candidates: Candidates = first_stage(corpus) if first_stage is not None else lambda _: None
    searches: dict[str, Search] = {}
    if isinstance(passages, TokenStore):
        features: Any = run.encode_tokens("passage", passages, title="encoding passages")
        if isinstance(features, Ragged):
            vectors = [late.TokenVectors.of(features.values, features.lengths)]
            searches["retriever"] = lambda texts, k: late.topk(run.encode_query(texts), vectors, k, candidates(texts))
        else:
            searches["retriever"] = lambda texts, k: topk(run.encode_query(texts), features, k)
        if settings.bm25:
            searches["BM25"] = partial(BM25(texts.passages).search, progress=progress)
    else:
        encode = partial(run.encode_query, dimensions=passages.dimensions)
        searches["retriever"] = lambda texts, k: passages.search(encode(texts), k, candidates(texts))
    rankings = [
        rank_part(texts, part, system, corpus, search, settings.depth)
        for part in held_out(texts.splits)
        for system, search in searches.items()
    ]
    if corpus is not texts.passages:
        _check_ids(rankings, texts, corpus)
    return rankings


def bm25_candidates(passages: Passages, count: int) -> Candidates:
    engine = BM25(passages)
    return lambda questions: engine.search(questions, count)[1]


def rank_part(texts: TextSet, part: str, system: str, passages: Passages, search: Search, depth: int) -> Rankings:
    """Rankings of a part's queries, `depth` passages each; a query's own text is left out of its ranking."""
    queries = [texts.queries[row] for row in texts.splits[part].tolist()]
    # one more passage where a query's own text may be among them
    k = depth + any(query.itself is not None for query in queries)
    results = search([query.text for query in queries], min(k, len(passages)))
    scores, rows = (torch.as_tensor(values).numpy(force=True) for values in results)
    if k > depth:
        # compared by id, because an index has rows of its own
        itself = np.array(
            [
                [query.itself is not None and row >= 0 and passages[row].id == query.id for row in ranked]
                for query, ranked in zip(queries, rows.tolist(), strict=True)
            ]
        )
        order = itself.argsort(axis=1, kind="stable")[:, :depth]
        scores = np.take_along_axis(scores, order, axis=1)
        rows = np.take_along_axis(np.where(itself, -1, rows), order, axis=1)
    return Rankings(part, system, passages, texts.splits[part], rows, scores)


def _check_ids(rankings: Sequence[Rankings], texts: TextSet, index: Passages) -> None:
    """Raise ValueError where no passage of the index has an id that is right for any query."""
    queries = [texts.queries[row] for part in rankings for row in part.queries.tolist()]
    if any(query.answers for query in queries):
        # a passage of any id may contain an answer
        return
    right = {texts.passages[row].id for query in queries for row in query.positives}
    # the whole index is read only where no ranking has such a passage
    ranked = (row for part in rankings for row in part.rows.ravel().tolist() if row >= 0)
    if right and right.isdisjoint(index[row].id for row in chain(ranked, range(len(index)))):
        remedy = "Encode a corpus whose ids are those of the questions' passages."
        raise invalid("--index", "hold passages that are right for a question", f"none of {len(right):,} ids", remedy)


def run_of(rankings: Rankings, texts: TextSet) -> dict[str, dict[str, float]]:
    """Scores by ids of query and passage, as in a run file; an id that an index holds twice has its best score."""
    return {
        texts.queries[row].id: {passage.id: score for passage, score in reversed(rankings.ranking(query))}
        for query, row in enumerate(rankings.queries.tolist())
    }


def judgements_of(rows: Indices, texts: TextSet) -> dict[str, dict[str, int]]:
    """Grades by ids of query and passage, of the queries at `rows` that have positives."""
    judgements = {}
    for query in (texts.queries[row] for row in rows.tolist() if texts.queries[row].positives):
        ids = [texts.passages[passage].id for passage in query.positives]
        judgements[query.id] = dict(zip(ids, query.grades or (1,) * len(ids), strict=True))
    return judgements


def evaluate(recipe: RetrieverRecipe, texts: TextSet, rankings: Sequence[Rankings]) -> list[Row]:
    """The rows of evaluation.json: test, queries, choices, hits at `KS` and measures; a `headline` leads the report.

    A part with answers has a second row: the share of queries with an answer in the text of one of the first k
    passages, not in its title, as in the evaluation of DPR.
    """
    rows = []
    for ranked in rankings:
        # measures beyond the depth of the rankings would be too low
        depth, choices = ranked.rows.shape[1], len(ranked.passages)
        ks, test = [k for k in KS if k <= depth], f"{PARTS.get(ranked.part, ranked.part)}, {ranked.system}"
        row = partial(result_row, choices=choices, chance=1 / choices, headline=ranked.system == "retriever")
        if judgements := judgements_of(ranked.queries, texts):
            deep = depth >= CUTOFF or depth >= choices
            cut = [name for name in MEASURES[:-1] if deep or "@" not in name]
            names = [*(f"hit@{k}" for k in ks), *cut, *(f"recall@{k}" for k in ks)]
            values = means(measure(run_of(ranked, texts), judgements, names))
            hits = {k: values.pop(f"hit@{k}") for k in ks}
            rows.append(row(test, len(judgements), recall=hits, measures=values))
        answers = {query: texts.queries[row].answers for query, row in enumerate(ranked.queries.tolist())}
        if answers := {query: sought for query, sought in answers.items() if sought}:
            passages = [[passage.text for passage, _ in ranked.ranking(query)] for query in answers]
            hits = answer_recall(passages, [*answers.values()], match=recipe.evaluate.match, ks=ks)
            rows.append(row(f"{test}, answers", len(answers), recall=hits, measures={}))
    return rows


def ranking_measures(recipe: RetrieverRecipe, texts: TextSet, rankings: Sequence[Rankings]) -> dict[str, float]:
    """For each part the share of queries with a right passage among the first k, and nDCG@10."""
    measures: dict[str, float] = {}
    for ranked, row in ((x, row) for x in rankings for row in evaluate(recipe, texts, [x])):
        if row["measures"]:
            values = {f"@{k}": share for k, share in row["recall"].items()} | row["measures"]
            part = PARTS.get(ranked.part, ranked.part)
            measures |= {f"{part} {name}": values[name] for name in COMPARED if name in values}
    return measures


def probe(run: RetrieverRun, materials: TextMaterials) -> dict[str, dict[str, float]]:
    """Recall at 1 and 5 of a sample of each held-out part, among the first positives of the sampled queries.

    As in the whole evaluation, any passage that is right for a query counts, and a query's own text is left out.
    """
    texts, recalls = materials.texts, {}
    for name, rows in held_out(texts.splits).items():
        judged = [row for row in rows.tolist() if texts.queries[row].positives]
        sample = np.random.default_rng(0).permutation(judged)[: run.recipe.evaluate.probe]
        if len(sample) == 0:
            continue
        queries = [texts.queries[row] for row in sample.tolist()]
        keys = sorted({int(materials.same[query.positives[0]]) for query in queries})
        right = _mask(run, materials, keys, [query.positives for query in queries])
        itself = _mask(run, materials, keys, [() if query.itself is None else (query.itself,) for query in queries])
        query_features = run.encode_query([query.text for query in queries])
        key_features = run.encode_passage([texts.passages[row] for row in keys])
        if run.recipe.model.kind == "late":
            # a matrix of scores is its own product with the identity
            packed = Ragged.of(*key_features)
            query_features = late.maxsim(query_features, late.TokenVectors.of(packed.values, packed.lengths))
            key_features = torch.eye(len(keys), device=run.device)
        shares = recall_where(query_features, key_features, right, aside=itself, ks=(1, 5))
        recalls[name] = {str(k): share for k, share in shares.items()}
    return recalls


def _mask(run: RetrieverRun, materials: TextMaterials, keys: list[int], passages: Sequence[Sequence[int]]) -> Right:
    """Marks the `keys` that are among each query's `passages`."""
    mask = torch.from_numpy(np.stack([np.isin(keys, materials.same[list(rows)]) for rows in passages])).to(run.device)
    return lambda rows, columns: mask[rows, columns]


def evaluate_and_report(
    folder: RunFolder, run: RetrieverRun, texts: TextSet, passages: TokenStore | Searchable,
    first_stage: FirstStage | None = None, *, beside: bool = False,
) -> str:  # fmt: skip
    """Evaluate; write evaluation.json, the run files and report.html; the table of results as text.

    passages: the tokens of the texts' own, or an index. first_stage: the candidates that a late retriever scores.
    beside: keep the folder's results on other texts.
    """
    rankings = rank_all(run, texts, passages, first_stage)
    results, match = evaluate(run.recipe, texts, rankings), run.recipe.evaluate.match
    retrieved = [ranked for ranked in rankings if ranked.system == "retriever"]
    # a figure for the first passage of each question alone: it takes an encoding of both
    dimensions = None if isinstance(passages, TokenStore) else passages.dimensions
    figure = partial(alignment, run, dimensions=dimensions) if run.recipe.model.kind == "late" else None
    questions = [question_samples(ranked, texts, match, figure) for ranked in retrieved]
    page.write_results(folder, results, beside=beside)
    write_runs(folder, texts, rankings)
    titles = {sample["title"] for sample in questions}
    stored = page.stored_samples(folder, QUESTIONS) if beside else []
    shown = [sample for sample in stored if sample["title"] not in titles]
    write_report(folder, questions=[*shown, *questions], wording=WORDING)
    return page.table_text(results, WORDING)


def write_runs(folder: RunFolder, texts: TextSet, rankings: Sequence[Rankings]) -> None:
    """Write `<part>.<system>.trec` and `<part>.qrels`, the formats of trec_eval."""
    try:
        for ranked in rankings:
            with folder.written_whole(f"{ranked.part}.qrels") as path:
                write_judgements(path, judgements_of(ranked.queries, texts))
            with folder.written_whole(f"{ranked.part}.{ranked.system}.trec") as path:
                write_run(path, run_of(ranked, texts), tag=ranked.system)
    except ValueError as reason:
        # these formats have no ids with blanks; all other files are complete
        logger.warning("run files are not written: %s", reason)


def _row(row: Mapping[str, Any]) -> list[str]:
    values = (percent(row["measures"].get(name)) for name in MEASURES)
    return [*page.counted(row), *(percent(row["recall"].get(str(k))) for k in KS), *values]


WORDING = page.Wording(
    heads=("", "queries", "passages", *(f"@{k}" for k in KS), *MEASURES),
    row=_row,
    probes="Right passage first or among five (a sample among its own)",
    legend="@k: the share of queries with a right passage among the first k. nDCG, MRR, MAP, recall are trec_eval's.",
    use="""\
contrastile encode {run}
contrastile search {run} "a question\"""",
    unit="queries",
    parts=PARTS,
)


def question_samples(
    answered: Rankings, texts: TextSet, match: str, figure: Callable[[str, Passage], Any] | None = None
) -> dict[str, Any]:
    """Samples of one part: random questions, the same every time, with their best passages, drawn by `figure`."""
    chosen = np.random.default_rng(0).permutation(len(answered.queries))[:SHOWN]
    samples: Samples = []
    for index in chosen.tolist():
        query = texts.queries[answered.queries[index]]
        ranking = answered.ranking(index)
        right = [is_right(passage, query, texts, match) for passage, _ in ranking]
        passages: Samples = []
        for (passage, score), one_right in zip(ranking[:ANSWERS], right, strict=False):
            pieces, name = marked(passage.text[:LETTERS], query.text), passage.title or passage.id
            shown = {"name": name, "source": passage.source, "score": score, "pieces": pieces, "right": one_right}
            if figure is not None and not passages:
                shown["alignment"] = figure(query.text, passage)
            passages.append(shown)
        rank = right.index(True) + 1 if any(right) else 0
        samples.append({"question": query.text, "found": passages, "place": rank})
    title = f"What it finds: {PARTS.get(answered.part, answered.part)}"
    return {"title": title, "sentence": SENTENCE.format(len(answered.passages)), "asks": samples}


def is_right(passage: Passage, query: Query, texts: TextSet, match: str) -> bool:
    """True if a passage is listed as right for a query, or contains an answer if none is listed."""
    if not query.positives:
        return has_answer(passage.text, query.answers, match)
    # by ids, because the rows of an index differ
    return any(texts.passages[row].id == passage.id for row in query.positives)


def marked(text: str, question: str) -> list[tuple[str, bool]]:
    """`text` in pieces, with a mark on words of the question.

    >>> marked("the minimum_value", "find the minimum")
    [('the ', False), ('minimum', True), ('_value', False)]
    """
    question_words = {word for word in words(question) if len(word) >= MARKED and not UNMARKED.fullmatch(word)}
    pieces: list[tuple[str, bool]] = []
    end = 0
    for match in WORD.finditer(text):
        if match.group().lower() in question_words:
            pieces += [(text[end : match.start()], False), (match.group(), True)]
            end = match.end()
    return [(piece, mark) for piece, mark in [*pieces, (text[end:], False)] if piece]


@torch.no_grad()
def alignment(run: RetrieverRun, question: str, passage: Passage, *, dimensions: int | None) -> dict[str, Any] | None:
    """The matches of a question's own tokens, in the order of the passage; None where the passage has no vector.

    Mask tokens, which the score counts too, are left out. dimensions: the features that are compared; None: all.
    """
    model: Any = run.model
    first = torch.zeros(1, dtype=torch.int64)
    question_tokens = query_tokens([question], run.tokenizer, run.recipe).rows(first)
    passage_inputs = passage_tokens([passage], run.tokenizer, run.recipe).rows(first)
    compared = passage_inputs["input_ids"][model.compared(**passage_inputs)].tolist()
    query, _ = run.encode_query([question], dimensions=dimensions)
    key, mask = run.encode_passage([passage], dimensions=dimensions)
    question_ids = question_tokens["input_ids"][0].tolist()
    if not question_ids or not compared:
        return None
    similar = query[0, : len(question_ids)] @ key[0][mask[0]].T
    best = similar.max(dim=1)
    columns = best.indices.unique()
    shares = (similar[:, columns] / similar.abs().max().clamp(min=1e-9)).clamp(min=0)
    return {
        "query": run.tokenizer.tokens(question_ids),
        "passage": run.tokenizer.tokens([compared[column] for column in columns.tolist()]),
        "shares": [[round(share, 3) for share in row] for row in shares.tolist()],
        "best": torch.searchsorted(columns, best.indices).tolist(),
        "values": [round(value, 3) for value in best.values.tolist()],
    }
