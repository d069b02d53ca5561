"""Zero-shot classification: a class is what its name, put into sentences, is encoded as.

After the towers, beside `retrieval`: once the classes have features, the share of examples that are classified right is
`recall` at 1 of the classes, and `chance` says what guessing would reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._check import wrong


@torch.no_grad()
def class_features(
    names: Sequence[str], *, encode: Callable[[list[str]], Tensor], prompts: Sequence[str] = ("{}",)
) -> Tensor:
    """Unit features `[classes, D]` of class names: the mean over `prompts` of the sentences' unit features.

    `encode(texts)` gives `[len(texts), D]`; each prompt has one `{}`, where the name goes.

    >>> class_features(["ZERO", "ONE"], encode=lambda texts: torch.ones(len(texts), 4), prompts=["{}", "DIGIT {}"])
    tensor([[0.5000, 0.5000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    if not prompts or any(prompt.count("{}") != 1 for prompt in prompts):
        raise wrong("prompts", "have one {} each, the place of the name", list(prompts), 'For example "a photo of {}".')
    if not names:
        raise wrong("names", "not be empty", "no names", "Give every class its name.")
    sentences = ([prompt.replace("{}", name) for name in names] for prompt in prompts)
    views = torch.stack([F.normalize(encode(texts).float(), dim=-1) for texts in sentences])
    return F.normalize(views.sum(dim=0), dim=-1)
