"""A retriever with many vectors: its tokens and markers, its vectors, its loss, and exact scores of packed passages."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refusal
from test_models_retriever import BERT, TEXTS
from tiny_texts import tiny_retriever
from tokenizers import Tokenizer as Engine
from tokenizers import processors

from contrastile import Ragged
from contrastile.evaluate import late
from contrastile.functional import padded_texts
from contrastile.models.text import WordTokenizer, train_tokenizer
from contrastile.models.towers import build_late, marker
from contrastile.scorers import MaxSim
from contrastile.train.recipe import RecipeError
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import TokenStore

LATE = ("model.kind=late", "model.features=8", "model.both={kind='words', width=16}")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 2, kind="bpe", size=200, length=12, special=("[Q]", "[D]", "[MASK]"))


def built(tokenizer, **settings):
    torch.manual_seed(0)
    both = {"kind": "transformers", "config": BERT}
    return build_late({"both": both, "features": 8, "query_length": 9, **settings}, tokenizer=tokenizer).eval()


def by_hand(query, key):
    """Σ_l max_m ⟨q_l, k_m⟩ of lists of token vectors, in float64."""
    return torch.tensor(
        [[float((q.double() @ k.double().T).amax(1).sum()) if len(k) else 0.0 for k in key] for q in query],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("attends", [False, True])
def test_a_query_is_filled_up_with_mask_tokens(tokenizer, attends):
    model = built(tokenizer, attend_to_expansion=attends)
    tokens = tokenizer.tokenise(["a minimum", "sort"], 5)
    vectors, mask = model.encode_query(**tokens)
    assert (vectors.shape, mask.all()) == ((2, 9, 8), True)
    encoder = model.encoders["both"]
    for row, (ids, real) in enumerate(zip(tokens["input_ids"], tokens["attention_mask"], strict=True)):
        own = ids[real.bool()]
        whole = torch.cat([own, torch.full((9 - len(own),), tokenizer.token_id("[MASK]"))])[None]
        attended = torch.ones(1, 9) if attends else (torch.arange(9) < len(own))[None].float()
        states = encoder.tower.tower.model(input_ids=whole, attention_mask=attended).last_hidden_state
        torch.testing.assert_close(vectors[row], encoder.projection(states)[0])
    plain, mask = built(tokenizer, query_expansion=False).encode_query(**tokens)
    assert (plain.shape, mask.sum().item()) == ((2, 5, 8), tokens["attention_mask"].sum().item())


@pytest.mark.parametrize("kind", ["bag", "words"])
def test_mask_tokens_have_a_vector_in_small_encoders_too(tokenizer, kind):
    """Words that do not attend to them have the vectors that they have alone."""
    both, tokens = {"kind": kind, "width": 16}, tokenizer.tokenise(["a minimum", "sort"], 5)
    vectors, _ = built(tokenizer, both=both).encode_query(**tokens)
    alone, mask = built(tokenizer, both=both, query_expansion=False).encode_query(**tokens)
    assert torch.equal(vectors[:, : alone.shape[1]][mask], alone[mask])
    assert (vectors.norm(dim=-1) > 0).all()
    if kind == "bag":
        whole = torch.full((1, 1), tokenizer.mask)
        of_mask = built(tokenizer, both=both).encoders["both"](whole, torch.ones_like(whole))[0, 0]
        assert (vectors[:, 5:] - of_mask).abs().max() < 1e-6


def test_punctuation_is_read_but_not_compared(tokenizer):
    tokens = tokenizer.tokenise(["get_max(xs)"])
    names = tokenizer.tokens(tokens["input_ids"][0].tolist())
    vectors, mask = built(tokenizer).encode_passage(**tokens)
    assert [name for name, real in zip(names, mask[0].tolist(), strict=True) if not real][:3] == ["_", "(", ")"]
    every, mask = built(tokenizer, skip_punctuation=False).encode_passage(**tokens)
    assert torch.equal(mask, tokens["attention_mask"].bool())
    assert torch.equal(every, vectors)


def test_a_marker_stands_first_or_behind_the_first_token_of_all_texts(tokenizer):
    number = tokenizer.token_id("[D]")
    plain, marked = TokenStore(TEXTS, tokenizer, 6), TokenStore(TEXTS, tokenizer, 7, number)
    rows = torch.arange(3)
    assert torch.equal(marked.rows(rows)["input_ids"][:, 1:], plain.rows(rows)["input_ids"])
    assert (marked.rows(rows)["input_ids"][:, 0] == number).all()
    engine = Engine.from_str(tokenizer._engine.to_str())
    first = [("[Q]", tokenizer.token_id("[Q]"))]
    engine.post_processor = processors.TemplateProcessing(single="[Q] $A", special_tokens=first)
    begun = WordTokenizer(engine.to_str(), length=7)
    ids = TokenStore(["sort a list", ""], begun, 7, number).rows(torch.arange(2))["input_ids"]
    assert begun.tokens(ids[0].tolist())[:3] == ["[Q]", "[D]", "sort"]
    assert begun.tokens(ids[1].tolist())[:2] == ["[Q]", "[D]"]


def test_settings_rebuild_the_same_vectors(tokenizer):
    model = built(tokenizer)
    again = build_late(model.settings, tokenizer=tokenizer).eval()
    again.load_state_dict(model.state_dict())
    tokens = tokenizer.tokenise(TEXTS)
    assert all(map(torch.equal, again.encode_passage(**tokens), model.encode_passage(**tokens)))


@pytest.mark.parametrize("kind", ["bag", "words"])
def test_small_towers_have_a_vector_for_each_token(tokenizer, kind):
    model = built(tokenizer, both={"kind": kind, "width": 8}, normalise=False)
    tokens = tokenizer.tokenise(TEXTS)
    short = {name: ids[2:, :7] for name, ids in tokens.items()}
    vectors, mask = model.comparable(model.encode_passage(**tokens))
    few, real = model.comparable(model.encode_passage(**short))
    torch.testing.assert_close(vectors[2:, :7][real], few[real])
    assert vectors.shape == (3, 12, 8)
    assert vectors[mask].norm(dim=1).std() > 0


def test_the_loss_and_its_gradients_are_those_of_the_formula(tmp_path):
    """Behind the cache, in sub-batches of unequal lengths."""
    smoothing = ("loss.label_smoothing=0.1", "model.tokenizer.query_length=8", "model.attend_to_expansion=true")
    job = RetrieverJob.open(tiny_retriever(tmp_path, *LATE, *smoothing))
    (batch,) = job.builder.parts(job.builder.sample(torch.from_numpy(job.rows[:12]), 1), 1)
    model = job.run.model
    assert len({int(length) for length in batch.passages["attention_mask"].sum(1)}) > 1
    value = job.loss(batch)
    value.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    (q, asked), (k, answering) = (
        model.comparable(getattr(model, f"encode_{side}")(**tokens))
        for side, tokens in (("query", batch.queries), ("passage", batch.passages))
    )
    similar = torch.einsum("ild,jmd->ijlm", q, k).masked_fill(~answering[None, :, None], -math.inf)
    x = (similar.amax(3) * asked[:, None]).sum(2) * model.logit_scale.exp()
    taken = torch.zeros_like(x, dtype=torch.bool)
    taken[torch.arange(len(x)), batch.positives[:, 0]] = True
    x = x.masked_fill((batch.query_ids[:, None] == batch.key_ids) & ~taken, -math.inf)
    expected = F.cross_entropy(x, batch.positives[:, 0], reduction="none")
    counted = x != -math.inf
    spread = -(x.log_softmax(1).masked_fill(~counted, 0.0).sum(1) / counted.sum(1))
    expected = (0.9 * expected + 0.1 * spread).mean()
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


def packed(lengths, D=8):
    return torch.randn(sum(lengths), D, generator=torch.Generator().manual_seed(1)), list(lengths)


@pytest.mark.parametrize("memory", ["tensor", "memmap"])
def test_scores_of_packed_passages_are_exact(tmp_path, monkeypatch, memory):
    """In blocks and tiles of a few tokens; of queries with padding, of passages without any token."""
    for name, size in (("BLOCK", 16), ("COLUMN_TOKENS", 8), ("ROW_TOKENS", 6)):
        monkeypatch.setattr(late, name, size)
    values, lengths = packed([3, 0, 7, 1, 20, 2, 2, 0, 5])
    vectors, mask = torch.randn(5, 4, 8), torch.arange(4) < torch.tensor([[4], [1], [3], [0], [2]])
    if memory == "memmap":
        np.save(tmp_path / "x.npy", values.half().numpy())
        values = values.half().float()
        key = late.TokenVectors.of(np.load(tmp_path / "x.npy", mmap_mode="r"), lengths)
    else:
        key = late.TokenVectors.of(values, lengths)
    parts = values.split(lengths)
    expected = by_hand([q[real] for q, real in zip(vectors, mask, strict=True)], parts)
    scores = late.maxsim((vectors, mask), key)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
    order = scores.sort(dim=1, descending=True, stable=True)
    halves = [late.TokenVectors.of(torch.cat(some), list(map(len, some))) for some in (parts[:4], parts[4:])]
    for shards in ([key], halves):
        best, rows = late.topk((vectors, mask), shards, 6)
        torch.testing.assert_close(best, order.values[:, :6], rtol=1e-5, atol=1e-5)
        assert torch.equal(rows[:3], order.indices[:3, :6])
    # candidates alone, in any order; a query with too few of them
    chosen = np.array([[8, 2, 4, -1], [4, 2, 8, 0], [-1, -1, 5, -1], [1, 2, 3, 4], [0, 0, 0, 0]])
    best, rows = late.topk((vectors, mask), halves, 3, chosen)
    assert rows[2].tolist() == [5, -1, -1]
    assert best[2].tolist()[1:] == [-math.inf, -math.inf]
    assert rows[0].tolist() == sorted([2, 4, 8], key=lambda row: -expected[0, row])
    # equal scores, all 0 of a query without tokens
    assert rows[3].tolist() == [1, 2, 3]
    assert rows[4].tolist() == [0, -1, -1]
    with pytest.raises(ValueError, match=r"`k` must be between 1 and the 9 passages; got 10\. Ask for fewer\."):
        late.topk((vectors, mask), [key], 10)
    # a passage whose score is not a number is the last one, wherever it stands
    broken = late.TokenVectors.of(values.clone(), lengths)
    broken.values[0] = math.nan
    for shards in ([broken], [halves[1], broken], [broken, halves[1]]):
        n = sum(map(len, shards))
        last = late.topk((vectors[:1], mask[:1]), shards, n)[1][0, -1]
        assert last == (len(halves[1]) if shards[0] is halves[1] else 0)
    assert late.topk((vectors[:1], mask[:1]), [broken], 2, np.array([[0, 2]]))[1].tolist() == [[2, 0]]
    short = late.TokenVectors.of(values, lengths[:-1])
    for function, given in ((late.maxsim, (short,)), (late.topk, ([short], 1))):
        assert refusal(function, (vectors, mask), *given) == (
            "`lengths` must sum to the number of vectors; got 35 for 40. Count the tokens of each passage."
        )
    sentence = "`candidates` must be rows [N, C] of the 9 passages for {} queries; got shape {}, with rows up to {}. "
    for some, got in ((chosen[:2], ("[2, 4]", 8)), (chosen + 1, ("[5, 4]", 9)), (chosen[0], ("[4]", 8))):
        expected_sentence = sentence.format(len(vectors), *got) + "List those of each query; -1 pads."
        assert refusal(late.topk, (vectors, mask), [key], 1, some) == expected_sentence


def test_texts_are_packed_and_padded():
    values, lengths = packed([2, 0, 3])
    ragged = Ragged(values.requires_grad_(), lengths)
    vectors, mask = padded_texts(ragged)
    assert (vectors.shape, mask.sum(1).tolist()) == ((3, 3, 8), lengths)
    assert torch.equal(Ragged.of(vectors, mask).values, values)
    vectors.sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))
    assert padded_texts(Ragged(values[:0], []))[0].shape == (0, 0, 8)
    chosen = late.joined([ragged, Ragged(values[:1], [1])], torch.tensor([3, 1, 2]))
    assert (chosen.lengths, torch.equal(chosen.values, torch.cat([values[:1], values[2:]]))) == ([1, 0, 3], True)


def test_encoded_texts_are_compared_by_maxsim(tmp_path):
    run = RetrieverJob.open(tiny_retriever(tmp_path, *LATE)).run
    query, passages = run.encode_query(["red fox", "eel"]), run.encode_passage(["red fox", "eel (x)", "blue"])
    scores = MaxSim()(query, passages)
    assert scores.shape == (2, 3)
    assert torch.allclose(query[0][query[1]].norm(dim=1), torch.ones(()))
    assert run.encode_query(["eel"], dimensions=3)[0].shape == (1, 6, 3)
    assert run.encode_passage([])[0].shape == (0, 0, 8)


def test_what_does_not_go_with_a_kind_is_refused(tmp_path, tokenizer):
    with pytest.raises(RecipeError, match=r"candidates: must be 0, or at least evaluate\.depth; got 9 and 10"):
        tiny_retriever(tmp_path, *LATE, "evaluate.candidates=9", "evaluate.depth=10")
    recipe = tiny_retriever(tmp_path, *LATE)
    settings = recipe.model.model_copy(update={"query_marker": "[X]", "passage_marker": ""})
    assert refusal(marker, tokenizer, settings, "query") == (
        '`model.query_marker` must be a token of the tokenizer; got "[X]". Name one of its tokens, or "" for none.'
    )
    assert marker(tokenizer, settings, "passage") is None
