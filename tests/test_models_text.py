"""Tokenizers: words, digits and marks as tokens, the same after saving; sentences for invalid folders."""

import json

import pytest
import torch
from refusals import refusal

from contrastile.models.text import load_tokenizer, train_tokenizer

TITLES = ["LATIN SMALL LETTER A", "LATIN SMALL LETTER B", "BRAILLE PATTERN DOTS-12"]


@pytest.fixture
def tokenizer():
    return train_tokenizer(TITLES, length=8)


def words(tokenizer, text):
    tokens = tokenizer.tokenise([text])
    return tokens["input_ids"][0, : int(tokens["attention_mask"].sum())].tolist()


def test_short_texts_are_padded_and_masked(tokenizer):
    tokens = tokenizer.tokenise(["LATIN A", "LATIN SMALL LETTER B"])
    assert tokens["input_ids"].shape == (2, 8)
    assert tokens["input_ids"].dtype == tokens["attention_mask"].dtype == torch.int64
    assert tokens["attention_mask"].sum(dim=1).tolist() == [2, 4]
    assert (tokens["input_ids"][0, 2:] == tokenizer.pad).all()


def test_long_texts_are_truncated_and_case_does_not_matter(tokenizer):
    assert words(tokenizer, "LATIN " * 20) == words(tokenizer, "LATIN") * 8
    assert words(tokenizer, "latin Small LETTER a") == words(tokenizer, TITLES[0])
    assert tokenizer.tokenise([])["input_ids"].shape == (0, 8)


def test_digits_are_single_tokens(tokenizer):
    dots_12, dots_21 = (words(tokenizer, f"BRAILLE PATTERN DOTS-{dots}") for dots in (12, 21))
    assert sorted(dots_12) == sorted(dots_21)
    assert dots_12 != dots_21


def test_an_unseen_word_is_unknown(tokenizer):
    (unknown,) = words(tokenizer, "GREEK")
    assert words(tokenizer, "CYRILLIC") == [unknown]
    assert unknown != tokenizer.pad
    assert tokenizer.tokenise([*TITLES, "GREEK"])["input_ids"].max() < tokenizer.vocabulary_size


def test_the_most_frequent_words_are_kept():
    tokenizer = train_tokenizer(TITLES, size=5, length=8)
    assert tokenizer.vocabulary_size == 5
    assert len(set(words(tokenizer, "LATIN SMALL LETTER"))) == 3
    assert words(tokenizer, "A") == words(tokenizer, "B")


def test_a_saved_tokenizer_gives_the_same_tokens(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    again = load_tokenizer(tmp_path)
    texts = [*TITLES, "GREEK " * 20]
    for name, ids in tokenizer.tokenise(texts).items():
        assert torch.equal(again.tokenise(texts)[name], ids)
    assert (again.length, again.pad, again.vocabulary_size) == (8, tokenizer.pad, tokenizer.vocabulary_size)
    assert load_tokenizer(tmp_path, length=3).tokenise(TITLES)["input_ids"].shape == (3, 3)


@pytest.fixture
def library_folder(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "truncation": None, "padding": None}))
    engine = PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token="[PAD]", unk_token="[UNK]")
    folder = tmp_path / "library"
    engine.save_pretrained(folder)
    return folder


def test_a_tokenizer_of_transformers_is_loaded(tokenizer, library_folder):
    loaded = load_tokenizer(library_folder, length=8)
    for name, ids in tokenizer.tokenise(TITLES).items():
        assert torch.equal(loaded.tokenise(TITLES)[name], ids)
    assert loaded.pad == tokenizer.pad
    assert loaded.vocabulary_size == tokenizer.vocabulary_size


def test_a_tokenizer_of_transformers_is_saved_with_its_length(library_folder, tmp_path):
    load_tokenizer(library_folder, length=5).save(tmp_path / "run")
    assert load_tokenizer(tmp_path / "run").tokenise(TITLES)["input_ids"].shape == (3, 5)


def test_a_tokenizer_without_a_mask_gets_a_mask_of_ones(library_folder):
    path = library_folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_input_names": ["input_ids"]}))
    assert load_tokenizer(library_folder, length=8).tokenise(["LATIN"])["attention_mask"].tolist() == [[1] * 8]


def test_a_tokenizer_without_a_length_needs_one(library_folder):
    said = refusal(load_tokenizer, library_folder)
    assert said.startswith(f"`length` must be given for the tokenizer of {library_folder}; got 1000000")
    assert said.endswith(". It tells no limit of its own.")


def test_a_tokenizer_without_padding_is_refused(library_folder):
    path = library_folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": None}))
    sentence = f"`tokenizer` must have a padding token; got {library_folder}. Set one and save the tokenizer again."
    assert refusal(load_tokenizer, library_folder, length=8) == sentence


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    sentence = f"`folder` must hold a tokenizer.json; got {tmp_path}. Point to a run or to a saved tokenizer."
    assert refusal(load_tokenizer, tmp_path) == sentence


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": 2}, "`size` must be at least 3 words; got 2. Two of them are for padding and for what is unknown."),
        ({"length": 0}, "`length` must be at least 1 token; got 0. Captions of a few words need about 16."),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    assert refusal(train_tokenizer, TITLES, **settings) == sentence
