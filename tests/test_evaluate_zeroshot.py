"""Features of classes from their names in prompts."""

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal

from contrastile.evaluate.retrieval import class_features

TABLE = {"A": [3.0, 0.0], "B": [0.0, 0.5], "letter A": [0.0, 2.0], "letter B": [0.0, 7.0]}


def encode(texts):
    return torch.tensor([TABLE[text] for text in texts])


def test_one_prompt_gives_the_unit_feature_of_its_text():
    assert class_features(["A", "B"], encode=encode).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_a_name_with_braces_is_not_formatted():
    seen = []
    class_features(["{}"], encode=lambda texts: seen.extend(texts) or torch.ones(1, 2), prompts=["a {} here"])
    assert seen == ["a {} here"]


@pytest.mark.parametrize("prompts", [[], ["a letter"], ["{} {}"]])
def test_a_prompt_without_exactly_one_placeholder_is_refused(prompts):
    assert refusal(class_features, ["A"], encode=encode, prompts=prompts) == (
        f'`prompts` must have one {{}} each, the place of the name; got {prompts}. For example "a photo of {{}}".'
    )


def test_no_classes_are_refused():
    assert refusal(class_features, [], encode=encode) == (
        "`names` must not be empty; got no names. Give every class its name."
    )
    assert refusal(class_features, "cat", encode=encode) == (
        "`names` must be a list of names; got 'cat'. Its letters would be classes."
    )


def test_prompts_and_synonyms_are_one_mean():
    torch.manual_seed(0)
    table = {}

    def encode(texts):
        return torch.stack([table.setdefault(text, torch.randn(5, dtype=torch.float64)) for text in texts])

    names, prompts = [("cat", "puss", "kitty"), ("dog",)], ("a {}.", "the {}!")
    found = class_features(names, encode=encode, prompts=prompts)
    for row, synonyms in zip(found, names, strict=True):
        units = [F.normalize(table[p.replace("{}", name)], dim=0) for p in prompts for name in synonyms]
        torch.testing.assert_close(row.double(), F.normalize(torch.stack(units).mean(0), dim=0), atol=1e-6, rtol=0)


def test_a_class_without_a_name_is_refused():
    with pytest.raises(ValueError, match="`names` must not be empty; got no names"):
        class_features([("A",), ()], encode=encode)


@pytest.mark.parametrize("features", [None, torch.ones(2), torch.ones(1, 2)])
def test_features_that_are_not_one_row_for_each_text_are_refused(features):
    got = "NoneType" if features is None else f"torch.float32 of shape {list(features.shape)}"
    assert refusal(class_features, ["A", "B"], encode=lambda _: features) == (
        f"`encode` must return features of shape [2, D], of as many texts; got {got}. Return one row for each text."
    )
