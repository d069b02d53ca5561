"""Zero-shot classification: a class is what its names, put into sentences, are encoded as.

After the towers, beside `retrieval`, whose rule for ties holds here too: a wrong class that scores exactly as high as
the best right one stands before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._check import wrong
from contrastile.evaluate.retrieval import ranks_where
from contrastile.evaluate.scores import check_features


@torch.no_grad()
def class_features(
    names: Sequence[str | Sequence[str]], *, encode: Callable[[list[str]], Tensor], prompts: Sequence[str] = ("{}",)
) -> Tensor:
    """Unit features `[classes, D]` of class names: the mean over `prompts` of the sentences' unit features.

    `encode(texts)` gives `[len(texts), D]`; each prompt has one `{}`, where the name goes. A class with several names
    has a sentence for each of them in every prompt. Raises ValueError for a prompt with no place, or two, for the name,
    and for a class without one.

    >>> class_features(["ZERO", "ONE"], encode=lambda texts: torch.ones(len(texts), 4), prompts=["{}", "DIGIT {}"])
    tensor([[0.5000, 0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    if not prompts or any(prompt.count("{}") != 1 for prompt in prompts):
        raise wrong("prompts", "have one {} each, the place of the name", list(prompts), 'For example "a photo of {}".')
    synonyms = [(name,) if isinstance(name, str) else name for name in names]
    if not synonyms or not all(synonyms):
        raise wrong("names", "not be empty", "no names", "Give every class its name.")
    owner = torch.tensor([place for place, one in enumerate(synonyms) for _ in one])
    flat = [name for one in synonyms for name in one]
    sums: list[Tensor] = []
    for prompt in prompts:
        unit = F.normalize(encode([prompt.replace("{}", name) for name in flat]).float(), dim=-1)
        room = unit.new_zeros(len(synonyms), unit.shape[1])
        sums.append(room.index_add_(0, owner.to(unit.device), unit))
    return F.normalize(torch.stack(sums).sum(dim=0), dim=-1)


def classified(
    image: Tensor, classes: Tensor, labels: Tensor, right: Tensor, *, ks: Sequence[int] = (1, 5)
) -> dict[str, float]:
    """How often pictures are given a right class: `top1`, `top5`, and `mean-per-class-recall`, the mean of the labels'.

    image `[n, D]`, classes `[C, D]`; labels `[n]`: what each picture is; right `[L, C]`, booleans: the classes that are
    right for each label. A k that is not below the number of classes is left out; the mean per class is of top 1 over
    the labels that have pictures. Raises ValueError for features that do not fit and for no pictures.

    >>> features, labels = torch.eye(3), torch.tensor([0, 1, 1])
    >>> classified(features, features, labels, torch.eye(3, dtype=torch.bool), ks=[1])
    {'top1': 0.6666666666666666, 'mean-per-class-recall': 0.75}
    """
    check_features(image, classes)
    if len(image) == 0:
        raise wrong("image", "not be empty", "no pictures", "There is nothing to measure.")
    found = ranks_where(image, classes, lambda rows, columns: right[labels[rows], columns])
    measured = {f"top{k}": (found < k).double().mean().item() for k in ks if k == 1 or k < len(classes)}
    times = torch.bincount(labels, minlength=len(right)).double()
    hits = torch.bincount(labels, weights=(found < 1).double(), minlength=len(right))
    there = times > 0
    return {**measured, "mean-per-class-recall": (hits[there] / times[there]).mean().item()}
