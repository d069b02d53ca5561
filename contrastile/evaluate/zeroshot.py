"""Zero-shot classification: a class is represented by the features of its names in prompts.

Beside `retrieval`, whose rule for ties applies: a wrong class with exactly the score of the best right one ranks
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._errors import invalid
from contrastile.evaluate.retrieval import check_features, ranks


@torch.no_grad()
def class_features(
    names: Sequence[str | Sequence[str]], *, encode: Callable[[list[str]], Tensor], prompts: Sequence[str] = ("{}",)
) -> Tensor:
    """Unit features `[classes, D]` of class names: the normalised mean over prompts and names of unit features.

    `encode(texts)` returns `[len(texts), D]`; each prompt has one `{}` for the name. A class with several names has a
    text for each of them in every prompt. Raises ValueError for a prompt without exactly one `{}`, and for a class
    without names.

    >>> class_features(["ZERO", "ONE"], encode=lambda texts: torch.ones(len(texts), 4), prompts=["{}", "DIGIT {}"])
    tensor([[0.5000, 0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    if not prompts or any(prompt.count("{}") != 1 for prompt in prompts):
        remedy = 'For example "a photo of {}".'
        raise invalid("prompts", "have one {} each, the place of the name", list(prompts), remedy)
    synonyms = [(name,) if isinstance(name, str) else name for name in names]
    if not synonyms or not all(synonyms):
        raise invalid("names", "not be empty", "no names", "Give every class its name.")
    owner = torch.tensor([row for row, several in enumerate(synonyms) for _ in several])
    sums: list[Tensor] = []
    for prompt in prompts:
        texts = [prompt.replace("{}", name) for several in synonyms for name in several]
        unit = F.normalize(encode(texts).float(), dim=-1)
        zeros = unit.new_zeros(len(synonyms), unit.shape[1])
        sums.append(zeros.index_add_(0, owner.to(unit.device), unit))
    return F.normalize(torch.stack(sums).sum(dim=0), dim=-1)


def classified(
    image: Tensor, classes: Tensor, labels: Tensor, right: Tensor, *, ks: Sequence[int] = (1, 5)
) -> dict[str, float]:
    """Accuracies `top1`, `top5` of images, and `mean-per-class-recall`, the mean of top 1 over labels with images.

    image `[n, D]`, classes `[C, D]`; labels `[n]`: the label of each image; right `[L, C]`, booleans: the right classes
    of each label. A k that is not below the number of classes is left out. Raises ValueError for features that do not
    fit and for no images.

    >>> features, labels = torch.eye(3), torch.tensor([0, 1, 1])
    >>> classified(features, features, labels, torch.eye(3, dtype=torch.bool), ks=[1])
    {'top1': 0.6666666666666666, 'mean-per-class-recall': 0.75}
    """
    check_features(image, classes)
    if len(image) == 0:
        raise invalid("image", "not be empty", "no pictures", "There is nothing to measure.")
    rank = ranks(image, classes, lambda rows, columns: right[labels[rows], columns])
    accuracies = {f"top{k}": (rank < k).double().mean().item() for k in ks if k == 1 or k < len(classes)}
    images = torch.bincount(labels, minlength=len(right)).double()
    hits = torch.bincount(labels, weights=(rank < 1).double(), minlength=len(right))
    present = images > 0
    return {**accuracies, "mean-per-class-recall": (hits[present] / images[present]).mean().item()}
