"""The model of a retriever: one encoder for queries and passages, or one for each.

Built from a recipe's settings, beside `towers.py`. An encoder is one of the small towers of `small.py`, or one of the
library transformers (`pretrained.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._errors import invalid, whole_number
from contrastile.models.base import ProjectedTower, Settings, Tower, TowerBuilder, build_tower, completed
from contrastile.models.small import BagTower
from contrastile.models.text import Tokenizer
from contrastile.models.towers import TEXT_TOWERS, small_tower


class Retriever(nn.Module):
    """Features of queries and of passages, not normalised, and the scale of their comparison.

    `logit_scale` is the logarithm of the scale, shape `[]`. `features`: their number. `build_retriever(settings)`
    rebuilds the same shapes without any folder.
    """

    def __init__(self, encoders: Mapping[str, nn.Module], *, features: int, settings: dict[str, Any]) -> None:
        super().__init__()
        scale = settings["scale"]
        if not scale > 0:
            raise invalid("scale", "be above 0", scale, "Dot products have a scale of 1, cosines one of about 20.")
        # "both", or "query" and "passage"
        self.encoders = nn.ModuleDict(dict(encoders))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)), requires_grad=settings["learn_scale"])
        self.normalise: bool = settings["normalise"]
        self.features, self.settings = features, settings

    def encode_query(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Tokens `[B, L]` to features `[B, D]`."""
        return self._encode("query", input_ids, attention_mask)

    def encode_passage(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Tokens `[B, L]` to features `[B, D]`."""
        return self._encode("passage", input_ids, attention_mask)

    def _encode(self, side: str, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        encoder = self.encoders[side if side in self.encoders else "both"]
        if attention_mask.is_cuda:
            # reading the mask would synchronise with the GPU; `encode` has trimmed the tokens before the transfer
            return encoder(input_ids, attention_mask)
        # trim columns of padding, which cost as much as tokens
        longest = max(int(attention_mask.sum(dim=1).max()), 1)
        return encoder(input_ids[:, :longest], attention_mask[:, :longest])

    def comparable(self, features: Tensor, dimensions: int | None = None) -> Tensor:
        """Features as they are compared: float32, the first `dimensions`, of length 1 where `normalise` is set.

        Raises ValueError for more dimensions than there are features.
        """
        if dimensions is not None:
            most, remedy = features.shape[1], "The first so many are kept."
            rule = f"be between 1 and the {most} features"
            dimensions = whole_number("dimensions", dimensions, 1, remedy, rule=rule, most=most)
        features = features[:, :dimensions].float()
        return F.normalize(features, dim=-1) if self.normalise else features


DEFAULTS: dict[str, Any] = {
    "both": None,
    "query": None,
    "passage": None,
    "features": None,
    "normalise": True,
    "lora": None,
    "scale": 20.0,
    "learn_scale": False,
}


def build_retriever(settings: Settings, *, tokenizer: Tokenizer) -> Retriever:
    """The encoders that `settings` describe, with random weights or those of the local folders that they name.

    `both`, or `query` and `passage`: a table each, its `kind` one of `ENCODERS`, the rest that encoder's own settings.
    `features`: the size to project to, None for the encoder's own. `lora`: rank, alpha, dropout, targets of adapters.

    >>> from contrastile.models.text import train_tokenizer
    >>> tokenizer = train_tokenizer(["bracket the minimum of a function"], kind="bpe", length=8)
    >>> model = build_retriever({"both": {"kind": "words", "width": 16}, "features": 8}, tokenizer=tokenizer)
    >>> model.encode_query(**tokenizer.tokenise(["a minimum", "a function"])).shape
    torch.Size([2, 8])
    """
    complete = completed(settings, DEFAULTS)
    sides = [side for side in ("both", "query", "passage") if complete[side] is not None]
    if sides not in (["both"], ["query", "passage"]):
        remedy = "One encoder for both sides, or one for each."
        raise invalid("settings", "have both, or query and passage", ", ".join(sides) or "none", remedy)
    towers: dict[str, Tower] = {}
    for side in sides:
        towers[side] = build_tower(side, ENCODERS, complete, tokenizer)
        if complete["lora"] is not None:
            add_adapters(towers[side].module, **complete["lora"])
    common = complete["features"]
    sizes = {common or tower.features for tower in towers.values()}
    if len(sizes) > 1:
        raise invalid("features", "be given for encoders of unequal sizes", sorted(sizes), "Set model.features.")
    encoders = {side: tower.module for side, tower in towers.items()}
    if common is not None:
        projections = {side: nn.Linear(tower.features, common, bias=False) for side, tower in towers.items()}
        encoders = {side: ProjectedTower(encoder, projections[side]) for side, encoder in encoders.items()}
    rebuilding = {**complete, **{side: tower.settings for side, tower in towers.items()}}
    return Retriever(encoders, features=sizes.pop(), settings=rebuilding)


ENCODERS: dict[str, TowerBuilder] = {
    "bag": lambda own, _, tokenizer: small_tower(BagTower(vocabulary=tokenizer.vocabulary_size, **own), own),
    "words": TEXT_TOWERS["words"],
    "transformers": TEXT_TOWERS["transformers"],
}


def add_adapters(module: nn.Module, *, rank: int, alpha: float, dropout: float, targets: tuple[str, ...]) -> None:
    """Freeze `module` and add low-rank adapters to its layers whose names end in one of `targets` (Hu et al. 2021).

    A layer W x becomes W x + alpha / rank · B A x; only A and B are trained.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets))
    try:
        inject_adapter_in_model(config, module)
    except ValueError as error:
        layers = (name for name, part in module.named_modules() if isinstance(part, nn.Linear))
        names = sorted({name.rpartition(".")[2] for name in layers})
        remedy = f"This encoder has {', '.join(names)}."
        raise invalid("lora.targets", "be layers of the encoder", ", ".join(targets), remedy) from error
