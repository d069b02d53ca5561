"""Classes by their names."""

import pytest
import torch

from contrastile.evaluate.zeroshot import class_features

TABLE = {"A": [3.0, 0.0], "B": [0.0, 0.5], "letter A": [0.0, 2.0], "letter B": [0.0, 7.0]}


def encode(texts):
    return torch.tensor([TABLE[text] for text in texts])


def test_one_prompt_is_the_unit_feature_of_its_sentence():
    assert class_features(["A", "B"], encode=encode).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_prompts_are_averaged_as_unit_features():
    features = class_features(["A", "B"], encode=encode, prompts=["{}", "letter {}"])
    torch.testing.assert_close(features, torch.tensor([[0.5**0.5, 0.5**0.5], [0.0, 1.0]]))


def test_a_name_with_braces_stays_itself():
    seen = []
    class_features(["{}"], encode=lambda texts: seen.extend(texts) or torch.ones(1, 2), prompts=["a {} here"])
    assert seen == ["a {} here"]


@pytest.mark.parametrize("prompts", [[], ["a letter"], ["{} {}"]])
def test_a_prompt_without_its_place_is_refused(prompts):
    with pytest.raises(ValueError) as caught:
        class_features(["A"], encode=encode, prompts=prompts)
    sentence = (
        f'`prompts` must have one {{}} each, the place of the name; got {prompts}. For example "a photo of {{}}".'
    )
    assert str(caught.value) == sentence


def test_no_classes_are_refused():
    with pytest.raises(ValueError) as caught:
        class_features([], encode=encode)
    assert str(caught.value) == "`names` must not be empty; got no names. Give every class its name."
