"""Zero-shot and retrieval measures against counts by brute force in float64 and against trec_eval, ties included."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refusal

from contrastile.evaluate.retrieval import both_ways, classified, ranks


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    # so that the shapes below divide nothing
    monkeypatch.setattr("contrastile.evaluate.retrieval.ROWS", 7)
    monkeypatch.setattr("contrastile.evaluate.retrieval.COLUMNS", 5)


def captioned(seed, ties):
    """11 pictures with 1 to 4 captions each; features of whole numbers where there are to be ties, some rows equal."""
    lot = torch.Generator().manual_seed(seed)
    owner = torch.repeat_interleave(torch.arange(11), torch.randint(1, 5, (11,), generator=lot))
    owner = owner[torch.randperm(len(owner), generator=lot)]
    if ties:
        image, text = (torch.randint(-2, 3, (n, 3), generator=lot).float() for n in (11, len(owner)))
    else:
        image, text = (F.normalize(torch.randn(n, 6, generator=lot), dim=-1) for n in (11, len(owner)))
        # captions in the same words
        text[3], text[8] = text[len(owner) - 1], text[len(owner) - 1]
    return image, text, owner


def scores_of(image, text):
    """In float64, and as float32 holds them: trec_eval's type."""
    return (image.double() @ text.double().T).float().double().numpy()


def oracle(scores, right):
    """One query at a time: how many wrong keys score at least as high as its best right one."""
    found = []
    for row, hits in zip(scores, right, strict=True):
        best = max(score for score, hit in zip(row, hits, strict=True) if hit)
        found.append(sum(score >= best for score, hit in zip(row, hits, strict=True) if not hit))
    return np.array(found)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_both_ways_equal_a_brute_force_count(seed, ties):
    image, text, owner = captioned(seed, ties)
    measured = both_ways(image, text, owner, ks=(1, 2, 5, 10))
    scores, right = scores_of(image, text), (torch.arange(11)[:, None] == owner).numpy()
    for way, found in {"image_to_text": oracle(scores, right), "text_to_image": oracle(scores.T, right.T)}.items():
        assert measured.pop(f"{way}_mean_rank") == pytest.approx(found.mean() + 1, abs=1e-12)
        assert measured.pop(f"{way}_median_rank") == math.floor(np.median(found)) + 1
        for k in (1, 2, 5, 10):
            assert measured.pop(f"{way}_R@{k}") == (found < k).mean()
    assert not measured


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_a_caption_of_several_images_is_right_for_each(seed, ties):
    image, text, _ = captioned(seed, ties)
    lot = torch.Generator().manual_seed(seed)
    right = torch.rand(11, len(text), generator=lot) < 0.2
    right[torch.randint(0, 11, (len(text),), generator=lot), torch.arange(len(text))] = True
    right[torch.arange(11), torch.randint(0, len(text), (11,), generator=lot)] = True
    owner, caption = right.nonzero()[torch.randperm(int(right.sum()), generator=lot)].T
    measured, scores = both_ways(image, text, owner, caption), scores_of(image, text)
    ways = {"image_to_text": (scores, right.numpy()), "text_to_image": (scores.T, right.numpy().T)}
    for way, (table, hits) in ways.items():
        found = oracle(table, hits)
        assert measured[f"{way}_mean_rank"] == pytest.approx(found.mean() + 1, abs=1e-12)
        assert [measured[f"{way}_R@{k}"] for k in (1, 5, 10)] == [(found < k).mean() for k in (1, 5, 10)]


@pytest.mark.parametrize(
    ("image", "text", "owner", "sentence"),
    [
        (torch.eye(2), torch.eye(2), torch.zeros(3, dtype=torch.int64),
         "`owner` must be integers, one per caption; got torch.int64 of shape [3] for 2. "
         "Give every caption the row of its image."),
        (torch.eye(2), torch.eye(2), torch.zeros(2),
         "`owner` must be integers, one per caption; got torch.float32 of shape [2] for 2. "
         "Give every caption the row of its image."),
        (torch.eye(2), torch.eye(2), [0, 1],
         "`owner` must be integers, one per caption; got list for 2. Give every caption the row of its image."),
        (torch.eye(2), torch.eye(2), torch.tensor([391895, 522418]),
         "`owner` must be rows of the 2 features; got 391895 to 522418. Pass places, not ids."),
        (torch.eye(2)[:0], torch.eye(2), torch.zeros(2, dtype=torch.int64),
         "`image` must not be empty; got no rows. There is nothing to measure."),
        (torch.eye(2), torch.eye(2)[:0], torch.zeros(0, dtype=torch.int64),
         "`text` must not be empty; got no rows. There is nothing to measure."),
    ],
)  # fmt: skip
def test_images_and_captions_that_do_not_fit_are_refused(image, text, owner, sentence):
    assert refusal(both_ways, image, text, owner) == sentence


def test_captions_that_are_no_rows_are_refused():
    sentence = "`caption` must be integers, one per pair; got {}. Give every pair the row of its caption."
    truth = torch.tensor([False, True])
    for caption, got in (
        ([0, 1], "list"), (torch.zeros(2), "torch.float32 of shape [2]"), (truth, "torch.bool of shape [2]"),
        (truth.to(torch.complex64), "torch.complex64 of shape [2]"),
    ):  # fmt: skip
        assert refusal(both_ways, torch.eye(2), torch.eye(2), torch.arange(2), caption) == sentence.format(got)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_rows_may_be_whole_numbers_of_any_size(dtype):
    image, text, owner = torch.eye(5), torch.eye(5), torch.ones(5, dtype=torch.int64)
    assert both_ways(image, text, owner.to(dtype), ks=[1]) == both_ways(image, text, owner, ks=[1])


@pytest.mark.parametrize(
    ("labels", "right", "sentence"),
    [
        (torch.zeros(2), torch.eye(2, dtype=torch.bool),
         "`labels` must be integers, one per image; got torch.float32 of shape [2] for 2 images. "
         "Give every image the row of its label in `right`."),
        (torch.tensor([0, 2]), torch.eye(2, dtype=torch.bool),
         "`labels` must be rows of `right`, which has 2; got 0 to 2. Pass places, not names."),
        (torch.tensor([0, 1]), torch.eye(2),
         "`right` must be booleans of shape [labels, 2], of the classes; got torch.float32 of shape [2, 2]. "
         "Mark the right classes of each label."),
    ],
)  # fmt: skip
def test_labels_that_do_not_fit_are_refused(labels, right, sentence):
    assert refusal(classified, torch.eye(2), torch.eye(2), labels, right) == sentence


def test_images_without_classes_are_refused():
    words = torch.eye(2), torch.eye(2)[:0], torch.zeros(2, dtype=torch.int64), torch.ones(1, 0, dtype=torch.bool)
    assert refusal(classified, *words) == "`classes` must not be empty; got no rows. There is nothing to measure."


def test_equal_keys_are_tied_in_all_tiles():
    query = F.normalize(torch.randn(40, 37), dim=-1)
    key = F.normalize(torch.randn(1, 37), dim=-1).expand(23, -1)
    first = torch.arange(23).expand(40, -1) == 0
    assert ranks(query, key, lambda rows, columns: first[rows, columns]).tolist() == [22] * 40


@pytest.mark.parametrize("seed", range(5))
def test_accuracies_equal_a_brute_force_count(seed):
    """Several classes may be right for a label, one for several labels, and a label may have no pictures."""
    lot = torch.Generator().manual_seed(seed)
    image, classes = (torch.randint(-2, 3, (n, 3), generator=lot).float() for n in (31, 9))
    labels = torch.randint(0, 6, (31,), generator=lot)
    labels[labels == 4] = 5
    right = torch.rand(6, 9, generator=lot) < 0.3
    right[torch.arange(6), torch.arange(6)] = True
    found = oracle(scores_of(image, classes), right[labels].numpy())
    per_label = [(found[labels == label] < 1).mean() for label in sorted(set(labels.tolist()))]
    measured = classified(image, classes, labels, right)
    assert measured == {
        **{f"top{k}": (found < k).mean() for k in (1, 5)},
        "mean-per-class-recall": pytest.approx(np.mean(per_label)),
    }
    assert "top5" not in classified(image, classes[:5], labels, right[:, :5])


def test_classification_without_images_is_refused():
    none, labels = torch.ones(0, 2), torch.ones(0, dtype=torch.int64)
    sentence = "`image` must not be empty; got no images. There is nothing to measure."
    assert refusal(classified, none, torch.eye(2), labels, torch.eye(2, dtype=torch.bool)) == sentence
