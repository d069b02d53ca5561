"""A retriever's encoders: shared or separate, trimmed to their tokens, pooled, and with low-rank adapters."""

import re

import pytest
import torch
from refusals import refusal

from contrastile.models.text import load_tokenizer, train_tokenizer
from contrastile.models.towers import build_retriever

TEXTS = ["bracket the minimum of a function", "def get_max_value(xs): return max(xs)", "sort a list in place"]
BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 2, kind="bpe", size=200, length=12)


def built(tokenizer, **settings):
    model = build_retriever({"both": {"kind": "words", "width": 8}, **settings}, tokenizer=tokenizer)
    return model.eval()


def library(**settings):
    return {"kind": "transformers", "config": BERT, **settings}


def test_subwords_split_names_and_cover_unseen_words(tokenizer):
    ids = tokenizer.tokenise(["get_max", "get max", "getting"])
    assert ids["attention_mask"].sum(dim=1).tolist()[0] == ids["attention_mask"].sum(dim=1).tolist()[1] + 1
    assert (ids["input_ids"] != 1).all()


def test_a_subword_tokenizer_is_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.tokenise(TEXTS)["input_ids"].tolist() == tokenizer.tokenise(TEXTS)["input_ids"].tolist()


def test_one_encoder_serves_both_sides_and_separate_ones_differ(tokenizer):
    side, tokens = {"kind": "words", "width": 8}, tokenizer.tokenise(TEXTS)
    both = built(tokenizer)
    assert torch.equal(both.encode_query(**tokens), both.encode_passage(**tokens))
    assert list(both.encoders) == ["both"]
    separate = build_retriever({"query": side, "passage": side}, tokenizer=tokenizer)
    assert not torch.equal(separate.encode_query(**tokens), separate.encode_passage(**tokens))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_padding_changes_nothing(tokenizer, pooling):
    model = built(tokenizer, both=library(pooling=pooling))
    alone = tokenizer.tokenise(TEXTS[2:])
    together = tokenizer.tokenise(TEXTS)
    torch.testing.assert_close(model.encode_query(**alone)[0], model.encode_query(**together)[2])


def test_a_bag_is_the_weighted_mean_of_its_words(tokenizer):
    model = built(tokenizer, both={"kind": "bag", "width": 8})
    bag = model.encoders["both"]
    torch.nn.init.normal_(bag.weight.weight)
    tokens = tokenizer.tokenise(TEXTS)
    for row, features in enumerate(model.encode_query(**tokens)):
        ids = tokens["input_ids"][row][tokens["attention_mask"][row].bool()]
        expected = bag.weight(ids)[:, 0].softmax(0) @ bag.words(ids)
        torch.testing.assert_close(features, expected)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooling_takes_the_mean_of_a_texts_tokens_or_the_last_one(tokenizer, pooling):
    model = built(tokenizer, both=library(pooling=pooling))
    tokens = tokenizer.tokenise(TEXTS)
    states = model.encoders["both"].model(**tokens).last_hidden_state
    own = [states[row, :count] for row, count in enumerate(tokens["attention_mask"].sum(dim=1))]
    expected = torch.stack([some.mean(dim=0) if pooling == "mean" else some[-1] for some in own])
    torch.testing.assert_close(model.encode_passage(**tokens), expected)


def test_last_pooling_accepts_padding_on_either_side():
    from types import SimpleNamespace

    from contrastile.models.pretrained import POOLINGS

    states = torch.arange(8.0).view(2, 4, 1)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]])
    assert POOLINGS["last"](SimpleNamespace(last_hidden_state=states), mask).tolist() == [[1.0], [7.0]]


def test_a_text_without_words_is_encoded(tokenizer):
    assert built(tokenizer).encode_query(**tokenizer.tokenise(["", "sort"])).isfinite().all()
    assert built(tokenizer).encode_query(**tokenizer.tokenise([""])).isfinite().all()


def test_features_are_compared_by_cosine_or_dot_product(tokenizer):
    features = torch.tensor([[3.0, 4.0, 12.0]])
    assert built(tokenizer).comparable(features, 2).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]
    assert built(tokenizer, normalise=False).comparable(features).tolist() == features.tolist()


def test_the_scale_is_fixed_unless_it_is_learned(tokenizer):
    assert not built(tokenizer).logit_scale.requires_grad
    assert built(tokenizer, learn_scale=True, scale=7.0).logit_scale.exp().item() == pytest.approx(7.0)


@pytest.mark.parametrize(
    "settings", [{}, {"both": {"kind": "bag", "width": 8}}, {"features": 5}, {"both": library(), "features": 5}]
)
def test_settings_rebuild_the_same_shapes(tokenizer, settings):
    model = built(tokenizer, **settings)
    again = build_retriever(model.settings, tokenizer=tokenizer)
    again.load_state_dict(model.state_dict())
    assert again.settings == model.settings


def test_adapters_alone_are_trained(tokenizer):
    pytest.importorskip("peft")
    lora = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ("query", "value")}
    plain = built(tokenizer, both=library())
    model = built(tokenizer, both=library(), lora=lora)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 4
    assert all("lora" in name for name in trained)
    # adapters begin at zero
    tokens = tokenizer.tokenise(TEXTS)
    base = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items() if "lora" not in name}
    plain.load_state_dict(base)
    torch.testing.assert_close(model.encode_query(**tokens), plain.encode_query(**tokens))
    again = build_retriever(model.settings, tokenizer=tokenizer)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval().encode_query(**tokens), model.encode_query(**tokens))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pooling": 1}, "`settings` must have keys among both, query, "),
        ({"both": {"kind": "conv"}}, "`both.kind` must be one of bag, words, transformers; got conv. "),
        ({"both": {"kind": "words", "depth": 3}}, "`both` must have the settings of a tower of the kind words"),
        (
            {"both": None, "query": {"kind": "words", "width": 4}, "passage": {"kind": "words", "width": 8}},
            "`features` must be given for encoders of unequal sizes; got [8, 16]. Set model.features.",
        ),
    ],
)
def test_invalid_settings_are_refused(tokenizer, settings, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        built(tokenizer, **settings)


def test_unknown_adapter_targets_are_refused(tokenizer):
    pytest.importorskip("peft")
    lora = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ("q_proj",)}
    assert refusal(built, tokenizer, both=library(), lora=lora) == (
        "`lora.targets` must be layers of the encoder; got q_proj. This encoder has dense, key, query, value."
    )
