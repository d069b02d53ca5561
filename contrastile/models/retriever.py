"""The encoders of a retriever, built from a recipe's settings: one for both sides, or one for each.

The second box of the flow for texts, beside `towers.py`: queries and passages become features of one size. An encoder
is one of the small ones of `small.py`, or whatever `pretrained.py` finds in the library transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._check import whole_number, wrong
from contrastile.models.base import Settings, Tower, completed
from contrastile.models.pretrained import Library, text_tower
from contrastile.models.small import BagTower, WordsTower
from contrastile.models.text import Tokenizer


class Retriever(nn.Module):
    """Features of queries and of passages, as the encoders give them, and the scale of their comparison.

    `logit_scale` is the logarithm of the scale, shape `[]`. `features`: how many there are. `settings` are those with
    which `build_retriever` makes the same shapes again, from no folder.
    """

    def __init__(
        self,
        encoders: Mapping[str, nn.Module],
        *,
        scale: float,
        learn_scale: bool,
        normalise: bool,
        features: int,
        settings: dict[str, Any],
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise wrong("scale", "be above 0", scale, "Dot products have a scale of 1, cosines one of about 20.")
        # "both", or "query" and "passage"
        self.encoders = nn.ModuleDict(dict(encoders))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)), requires_grad=learn_scale)
        self.normalise, self.features = normalise, features
        self.settings = settings

    def encode_query(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Tokens `[B, L]` to features `[B, D]`."""
        return self._encode("query", input_ids, attention_mask)

    def encode_passage(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Tokens `[B, L]` to features `[B, D]`."""
        return self._encode("passage", input_ids, attention_mask)

    def _encode(self, side: str, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        encoder = self.encoders[side if side in self.encoders else "both"]
        if len(input_ids) == 0:
            # a rank without rows; many models cannot do without one, and FSDP2 warns of views
            return encoder(input_ids.new_zeros(1, 1), attention_mask.new_ones(1, 1))[:0].clone()
        if attention_mask.is_cuda:
            # to look would be to wait for the GPU; `encode` has cut it to the longest text before
            return encoder(input_ids, attention_mask)
        # columns that are padding in every row cost as much as words
        longest = max(int(attention_mask.sum(dim=1).max()), 1)
        return encoder(input_ids[:, :longest], attention_mask[:, :longest])

    def comparable(self, features: Tensor, dimensions: int | None = None) -> Tensor:
        """Features as they are compared, in float32: their first `dimensions`, of length 1 where `normalise` is set.

        Raises ValueError for more dimensions than there are features.
        """
        if dimensions is not None:
            most, remedy = features.shape[1], "The first so many are kept."
            rule = f"be between 1 and the {most} features"
            dimensions = whole_number("dimensions", dimensions, 1, remedy, rule=rule, most=most)
        cut = features[:, :dimensions].float()
        return F.normalize(cut, dim=-1) if self.normalise else cut


class Projected(nn.Module):
    """An encoder, and the map to the size that was asked for."""

    def __init__(self, tower: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.tower, self.projection = tower, projection

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Tokens `[B, L]` to features `[B, D]`."""
        return self.projection(self.tower(input_ids, attention_mask))


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
    """The encoders that `settings` describe, with fresh weights, or those of the local folders that they name.

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
        got = ", ".join(sides) or "none"
        raise wrong("settings", "have both, or query and passage", got, "One encoder for both sides, or one for each.")
    towers = {side: _encoder(side, complete, tokenizer) for side in sides}
    widths = {complete["features"] or tower.features for tower in towers.values()}
    if len(widths) > 1:
        raise wrong("features", "be given for encoders of unequal sizes", sorted(widths), "Set model.features.")
    return Retriever(
        {side: _projected(tower, complete["features"]) for side, tower in towers.items()},
        scale=complete["scale"],
        learn_scale=complete["learn_scale"],
        normalise=complete["normalise"],
        features=widths.pop(),
        settings={**complete, **{side: tower.settings for side, tower in towers.items()}},
    )


def _projected(tower: Tower, features: int | None) -> nn.Module:
    if features is None:
        return tower.module
    return Projected(tower.module, nn.Linear(tower.features, features, bias=False))


def _encoder(side: str, settings: Settings, tokenizer: Tokenizer) -> Tower:
    own = dict(settings[side])
    kind = own.pop("kind", None)
    if kind not in ENCODERS:
        raise wrong(f"{side}.kind", f"be one of {', '.join(ENCODERS)}", kind, "See the recipes for examples.")
    try:
        tower = ENCODERS[kind](own, tokenizer)
    except TypeError as failure:
        raise wrong(side, f"have the settings of an encoder of the kind {kind}", own, f"{failure}.") from failure
    if settings["lora"] is not None:
        adapt(tower.module, **settings["lora"])
    return Tower(tower.module, tower.features, {"kind": kind, **tower.settings})


def _words(own: dict[str, Any], tokenizer: Tokenizer) -> Tower:
    tower = WordsTower(vocabulary=tokenizer.vocabulary_size, length=tokenizer.length, **own)
    return Tower(tower, tower.features, own)


def _bag(own: dict[str, Any], tokenizer: Tokenizer) -> Tower:
    tower = BagTower(vocabulary=tokenizer.vocabulary_size, **own)
    return Tower(tower, tower.features, own)


def _library(own: dict[str, Any], tokenizer: Tokenizer) -> Tower:
    return text_tower(Library(**own), tokenizer=tokenizer)


ENCODERS: dict[str, Callable[[dict[str, Any], Tokenizer], Tower]] = {
    "bag": _bag,
    "words": _words,
    "transformers": _library,
}


def adapt(module: nn.Module, *, rank: int, alpha: float, dropout: float, targets: tuple[str, ...]) -> None:
    """Freeze `module` and give its layers whose names end in one of `targets` low-rank adapters (Hu et al. 2021).

    A layer W x becomes W x + alpha / rank · B A x; only A and B are trained.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets))
    try:
        inject_adapter_in_model(config, module)
    except ValueError as failure:
        layers = (name for name, part in module.named_modules() if isinstance(part, nn.Linear))
        names = sorted({name.rpartition(".")[2] for name in layers})
        remedy = f"This encoder has {', '.join(names)}."
        raise wrong("lora.targets", "be layers of the encoder", ", ".join(targets), remedy) from failure
