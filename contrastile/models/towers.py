"""The models: image and text towers with their projections; encoders of retrievers, a vector for each text or token.

A tower is any module that maps its inputs to `[B, features]`: one of `small.py`, or one of the libraries transformers
(`pretrained.py`), timm and open_clip (`timm_openclip.py`).
"""

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._errors import invalid, whole_number
from contrastile._torch import is_compiled
from contrastile._types import TokenFeatures
from contrastile.models import base
from contrastile.models.pretrained import Library, image_tower, text_tower, whole_model
from contrastile.models.small import BagTower, ConvTower, WordsTower
from contrastile.models.text import MASK, Tokenizer
from contrastile.models.timm_openclip import OpenClip, timm_tower


class DualEncoder(nn.Module):
    """Features of images and of texts, not normalised, and the scale and bias of their comparison.

    `logit_scale` is the logarithm of the scale, shape `[]`; `logit_bias` has shape `[]`, or is None for a loss without.
    """

    def __init__(
        self, image: nn.Module, text: nn.Module, *, scale: float, bias: float | None, settings: dict[str, Any]
    ) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(float(bias)))
        self.settings = settings

    def encode_image(self, pixels: Tensor, *, unit: bool = False) -> Tensor:
        """Pixels `[B, C, S, S]`, in [0, 1] or uint8, to features `[B, D]`; or cached features of the tower `[B, F]`.

        unit: with rows of unit length, in the dtype of the scale.
        """
        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        # the tower's precision may differ from the scale's
        dtype = next((x.dtype for x in self.image.parameters() if x.is_floating_point()), pixels.dtype)
        features: Tensor = self.image(pixels.to(dtype), ahead=pixels.ndim == 2)
        return self.unit_rows(features) if unit else features

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor, *, unit: bool = False) -> Tensor:
        """Tokens `[B, L]` to features `[B, D]`; unit: as of images."""
        features: Tensor = self.text(input_ids, attention_mask)
        return self.unit_rows(features) if unit else features

    def unit_rows(self, features: Tensor) -> Tensor:
        return F.normalize(features.to(self.logit_scale.dtype), dim=-1)


class Projected(base.ProjectedTower):
    """A tower with a projection; frozen parts of the tower stay in eval mode during training."""

    def forward(self, *inputs: Tensor, ahead: bool = False) -> Tensor:
        """The tower's inputs, or with `ahead` its features computed before, to `[B, features]`."""
        return self.projection(*inputs) if ahead else super().forward(*inputs)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        base.eval_frozen(self.tower)
        return self


SCALE = 1 / 0.07
PAIR_DEFAULTS: dict[str, Any] = {
    "features": 256, "image_size": 32, "channels": 1, "image": {"kind": "conv"}, "text": {"kind": "words"},
    "both": None, "scale": None, "bias": None,
}  # fmt: skip


def build_model(settings: base.Settings, *, tokenizer: Tokenizer) -> DualEncoder:
    """The towers that `settings` describe, with random weights or those of the local folders that they name.

    `features`: the size of the common features. `image`, `text`: a table each, its `kind` one of `IMAGE_TOWERS` and
    `TEXT_TOWERS`, the rest that tower's own settings. Or `both` instead of the two: a CLIP or SigLIP, its `kind` one
    of `PAIRS`. `scale`, `bias`: the initial values. `image_size`, `channels`: of the images.

    >>> from contrastile.models.text import train_tokenizer
    >>> tokenizer = train_tokenizer(["LATIN SMALL LETTER A"], length=4)
    >>> model = build_model({"features": 64, "image_size": 32, "channels": 1}, tokenizer=tokenizer)
    >>> model.encode_text(**tokenizer.tokenise(["LETTER A", "LETTER B"])).shape
    torch.Size([2, 64])
    """
    complete = base.completed(settings, PAIR_DEFAULTS)
    pair = (_separate_towers if complete["both"] is None else _whole_model)(complete, tokenizer)
    bias = pair.bias if complete["bias"] is None else complete["bias"]
    scale = next(scale for scale in (complete["scale"], pair.scale, SCALE) if scale is not None)
    image = Projected(pair.image.module, pair.image_projection)
    text = Projected(pair.text.module, pair.text_projection)
    # settings alone rebuild the shapes without the folder, so they must tell that there is a bias
    return DualEncoder(image, text, scale=scale, bias=bias, settings={**complete, **pair.settings, "bias": bias})


def _separate_towers(settings: base.Settings, tokenizer: Tokenizer) -> base.TowerPair:
    image = base.build_tower("image", IMAGE_TOWERS, settings, tokenizer)
    text = base.build_tower("text", TEXT_TOWERS, settings, tokenizer)
    visual, textual = (nn.Linear(tower.features, settings["features"], bias=False) for tower in (image, text))
    return base.TowerPair(image, text, visual, textual, {"image": image.settings, "text": text.settings})


def _whole_model(settings: base.Settings, tokenizer: Tokenizer) -> base.TowerPair:
    own = dict(settings["both"])
    kind = own.pop("kind", "transformers")
    origin, build = PAIRS[kind]
    pair = build(origin(**own), **_image_input(settings), tokenizer=tokenizer)
    return replace(pair, settings={"both": {"kind": kind, **pair.settings}})


def _image_input(settings: base.Settings) -> dict[str, Any]:
    return {"image_size": settings["image_size"], "channels": settings["channels"]}


def small_tower(tower: ConvTower | WordsTower | BagTower, own: dict[str, Any]) -> base.Tower:
    return base.Tower(tower, tower.features, own)


IMAGE_TOWERS: dict[str, base.TowerBuilder] = {
    "conv": lambda own, settings, _: small_tower(ConvTower(channels=settings["channels"], **own), own),
    "transformers": lambda own, settings, _: image_tower(Library(**own), **_image_input(settings)),
    "timm": lambda own, settings, _: timm_tower(**own, **_image_input(settings)),
    "open_clip": lambda own, settings, _: OpenClip(**own).image(**_image_input(settings)),
}
TEXT_TOWERS: dict[str, base.TowerBuilder] = {
    "words": lambda own, _, tokenizer: small_tower(
        WordsTower(vocabulary=tokenizer.vocabulary_size, length=tokenizer.length, **own), own
    ),
    "transformers": lambda own, _, tokenizer: text_tower(Library(**own), tokenizer=tokenizer),
    "open_clip": lambda own, _, tokenizer: OpenClip(**own).text(tokenizer=tokenizer),
}
# the settings of a model with both towers, and the function that builds its towers
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., base.TowerPair]]] = {
    "transformers": (Library, whole_model),
    "open_clip": (OpenClip, OpenClip.pair),
}


class Retriever(nn.Module):
    """Features of queries and of passages, not normalised, their number, and the scale of their comparison."""

    def __init__(self, encoders: Mapping[str, nn.Module], *, features: int, settings: dict[str, Any]) -> None:
        super().__init__()
        # "both", or "query" and "passage"
        self.encoders = nn.ModuleDict(dict(encoders))
        scale = torch.tensor(math.log(settings["scale"]))
        self.logit_scale = nn.Parameter(scale, requires_grad=settings["learn_scale"])
        self.normalise: bool = settings["normalise"]
        self.features, self.settings = features, settings

    def encode_query(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self._encode("query", input_ids, attention_mask)

    def encode_passage(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self._encode("passage", input_ids, attention_mask)

    def encoder(self, side: str) -> nn.Module:
        """The encoder of a side: its own, or the one for both."""
        return self.encoders[side if side in self.encoders else "both"]

    def _encode(self, side: str, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        encoder = self.encoder(side)
        if attention_mask.is_cuda or any(map(is_compiled, encoder.modules())):
            # reading the mask would synchronise with the GPU, and each width would be compiled; `encode` has trimmed
            # the tokens before the transfer
            return encoder(input_ids, attention_mask)
        # trim columns of padding, which cost as much as tokens
        longest = max(int(attention_mask.sum(dim=1).max()), 1)
        return encoder(input_ids[:, :longest], attention_mask[:, :longest])

    def encode_compared(self, side: str, sizes: Sequence[int | None], **tokens: Tensor) -> list[Any]:
        """Features of a side's texts as they are compared: the first so many for each of `sizes`, all for None."""
        features = getattr(self, f"encode_{side}")(**tokens)
        return [self.comparable(features, size) for size in sizes]

    def comparable(self, features: Tensor, dimensions: int | None = None) -> Tensor:
        """Features as they are compared: float32, the first `dimensions`, of length 1 where `normalise` is set."""
        if dimensions is not None:
            most, remedy = features.shape[1], "The first so many are kept."
            rule = f"be between 1 and the {most} features"
            dimensions = whole_number("dimensions", dimensions, 1, remedy, rule=rule, most=most)
        features = features[:, :dimensions].float()
        return F.normalize(features, dim=-1) if self.normalise else features


RETRIEVER_DEFAULTS: dict[str, Any] = {
    "both": None, "query": None, "passage": None, "features": None, "normalise": True, "lora": None, "scale": 20.0,
    "learn_scale": False,
}  # fmt: skip


def build_retriever(settings: base.Settings, *, tokenizer: Tokenizer) -> Retriever:
    """The encoders that `settings` describe, with random weights or those of the local folders that they name.

    `both`, or `query` and `passage`: a table each, its `kind` one of `ENCODERS`, the rest that encoder's own settings.
    `features`: the size to project to, None for the encoder's own. `lora`: rank, alpha, dropout, targets of adapters.

    >>> from contrastile.models.text import train_tokenizer
    >>> tokenizer = train_tokenizer(["bracket the minimum of a function"], kind="bpe", length=8)
    >>> model = build_retriever({"both": {"kind": "words", "width": 16}, "features": 8}, tokenizer=tokenizer)
    >>> model.encode_query(**tokenizer.tokenise(["a minimum", "a function"])).shape
    torch.Size([2, 8])
    """
    complete = base.completed(settings, RETRIEVER_DEFAULTS)
    towers = encoder_towers(complete, tokenizer)
    common = complete["features"]
    sizes = {common or tower.features for tower in towers.values()}
    if len(sizes) > 1:
        raise invalid("features", "be given for encoders of unequal sizes", sorted(sizes), "Set model.features.")
    encoders = {side: tower.module for side, tower in towers.items()}
    if common is not None:
        for side, tower in towers.items():
            encoders[side] = base.ProjectedTower(tower.module, nn.Linear(tower.features, common, bias=False))
    settings = complete | {side: tower.settings for side, tower in towers.items()}
    return Retriever(encoders, features=sizes.pop(), settings=settings)


def encoder_towers(complete: base.Settings, tokenizer: Tokenizer) -> dict[str, base.Tower]:
    """The towers of a retriever's sides with their adapters, "both" or "query" and "passage", by its settings."""
    towers: dict[str, base.Tower] = {}
    for side in (side for side in ("both", "query", "passage") if complete[side] is not None):
        towers[side] = base.build_tower(side, ENCODERS, complete, tokenizer)
        # before the next tower is built, so that a seed gives the weights that it gave in earlier versions
        if complete["lora"] is not None:
            add_adapters(towers[side].module, **complete["lora"])
    return towers


ENCODERS: dict[str, base.TowerBuilder] = {
    "bag": lambda own, _, tokenizer: small_tower(BagTower(vocabulary=tokenizer.vocabulary_size, **own), own),
    "words": TEXT_TOWERS["words"],
    "transformers": TEXT_TOWERS["transformers"],
}


def add_adapters(module: nn.Module, *, rank: int, alpha: float, dropout: float, targets: tuple[str, ...]) -> None:
    """Freeze `module` but for low-rank adapters B A x · alpha / rank of layers named in `targets` (Hu et al. 2021)."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets))
    try:
        inject_adapter_in_model(config, module)
    except ValueError as error:
        layers = (name for name, layer in module.named_modules() if isinstance(layer, nn.Linear))
        names = sorted({name.rpartition(".")[2] for name in layers})
        remedy = f"This encoder has {', '.join(names)}."
        raise invalid("lora.targets", "be layers of the encoder", ", ".join(targets), remedy) from error


# settings that only this kind of retriever has, with their defaults
LATE_SETTINGS: dict[str, Any] = {
    "query_expansion": True, "attend_to_expansion": False, "skip_punctuation": True, "query_marker": "[Q]",
    "passage_marker": "[D]",
}  # fmt: skip
LATE_DEFAULTS = RETRIEVER_DEFAULTS | LATE_SETTINGS | {"kind": "late", "features": 128, "query_length": 32}


class TokenStates(nn.Module):
    """A text tower without its pooling: `[B, L]` twice to a vector for each token, `[B, L, width]`."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.tower.states(input_ids, attention_mask)


class LateRetriever(Retriever):
    """Vectors of the tokens of queries and of passages, not normalised, and the scale of their comparison.

    Late interaction compares them (ColBERT, Khattab and Zaharia 2020): Σ_l max_m ⟨q_l, k_m⟩ over the tokens l of a
    query and m of a passage.

    With `query_expansion`, a query is filled up to `query_length` with mask tokens, which are compared too; its own
    tokens attend to them with `attend_to_expansion`. A passage leaves out punctuation with `skip_punctuation`.
    """

    punctuation: Tensor

    def __init__(
        self, encoders: Mapping[str, nn.Module], *, features: int, settings: dict[str, Any], tokenizer: Tokenizer
    ) -> None:
        super().__init__(encoders, features=features, settings=settings)
        self.mask = tokenizer.mask
        numbers = _punctuation(tokenizer) if settings["skip_punctuation"] else []
        self.register_buffer("punctuation", torch.tensor(numbers, dtype=torch.int64), persistent=False)

    def encode_query(self, input_ids: Tensor, attention_mask: Tensor) -> TokenFeatures:  # type: ignore[override]
        """Tokens `[B, L]` to vectors `[B, query_length, D]`, or `[B, L, D]` without expansion, and their mask."""
        if not self.settings["query_expansion"]:
            return self.encoder("query")(input_ids, attention_mask), attention_mask.bool()
        padding = (0, max(self.settings["query_length"] - input_ids.shape[1], 0))
        attention_mask = F.pad(attention_mask, padding)
        input_ids = F.pad(input_ids, padding).masked_fill(attention_mask == 0, self.mask)
        all_tokens = torch.ones_like(attention_mask)
        attended = all_tokens if self.settings["attend_to_expansion"] else attention_mask
        return self.encoder("query")(input_ids, attended), all_tokens.bool()

    def encode_passage(self, input_ids: Tensor, attention_mask: Tensor) -> TokenFeatures:  # type: ignore[override]
        """Tokens `[B, L]` to vectors `[B, L, D]` and their mask."""
        return self.encoder("passage")(input_ids, attention_mask), self.compared(input_ids, attention_mask)

    def compact(self, features: TokenFeatures, input_ids: Tensor, attention_mask: Tensor) -> TokenFeatures:
        """The vectors of passages that are compared, `[B, most, D]`, and their mask.

        The mask follows from the tokens in host memory, so that nothing waits for a device.
        """
        mask = self.compared(input_ids.cpu(), attention_mask.cpu())
        most = max([1, *mask.sum(1).tolist()])
        order = (~mask).byte().argsort(dim=1, stable=True)[:, :most]
        vectors, device = features[0], features[0].device
        index = order.to(device, non_blocking=True)[..., None].expand(-1, -1, vectors.shape[2])
        return vectors.gather(1, index), mask.gather(1, order).to(device, non_blocking=True)

    def compared(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The mask of a passage's tokens whose vectors are compared, bool `[B, L]`."""
        return attention_mask.bool() & ~torch.isin(input_ids, self.punctuation.to(input_ids.device))

    def comparable(  # type: ignore[override]
        self, features: TokenFeatures, dimensions: int | None = None
    ) -> TokenFeatures:
        """Vectors as they are compared: float32, the first `dimensions`, of length 1 where `normalise` is set."""
        vectors, mask = features
        return super().comparable(vectors.flatten(0, 1), dimensions).unflatten(0, mask.shape), mask


def _punctuation(tokenizer: Tokenizer) -> list[int]:
    """The numbers of the tokens that are punctuation alone, after the sign of a blank before them is removed."""
    tokens = (token.lstrip("Ġ▁") for token in tokenizer.tokens(range(tokenizer.vocabulary_size)))
    return [number for number, token in enumerate(tokens) if token and not set(token).difference(string.punctuation)]


def build_late(settings: base.Settings, *, tokenizer: Tokenizer) -> LateRetriever:
    """The retriever that `settings` describe: those of `build_retriever`, `query_length` and `LATE_SETTINGS`.

    `features`: the size of a token's vector.

    >>> from contrastile.models.text import train_tokenizer
    >>> tokenizer = train_tokenizer(["bracket the minimum of a function"], kind="bpe", length=8)
    >>> settings = {"both": {"kind": "words", "width": 16}, "features": 8, "query_length": 6}
    >>> model = build_late(settings, tokenizer=tokenizer)
    >>> [x.shape for x in model.encode_query(**tokenizer.tokenise(["a minimum", "a function"], 4))]
    [torch.Size([2, 6, 8]), torch.Size([2, 6])]
    """
    complete = base.completed(settings, LATE_DEFAULTS)
    towers = encoder_towers(complete, tokenizer)
    encoders = {}
    for side, tower in towers.items():
        states, token = TokenStates(tower.module), torch.full((1, 1), tokenizer.pad)
        with base.evaluating(states), torch.no_grad():
            width = states(token, torch.ones_like(token)).shape[-1]
        encoders[side] = base.ProjectedTower(states, nn.Linear(width, complete["features"], bias=False))
    settings = complete | {side: tower.settings for side, tower in towers.items()}
    return LateRetriever(encoders, features=complete["features"], settings=settings, tokenizer=tokenizer)


def marker(tokenizer: Tokenizer, settings: Any, side: str) -> int | None:
    """The number of the token that marks a side's texts; None for "". Raises ValueError if the tokenizer lacks it."""
    name = f"{side}_marker"
    token = getattr(settings, name)
    number = tokenizer.token_id(token) if token else None
    if token and number is None:
        unused = next((word for word in ("[unused0]", "[unused1]") if tokenizer.token_id(word) is not None), None)
        remedy = 'Name one of its tokens, or "" for none' + (f"; it has {unused}." if unused else ".")
        raise invalid(f"model.{name}", "be a token of the tokenizer", f'"{token}"', remedy)
    return number


def special_tokens(settings: Any) -> tuple[str, ...]:
    """The tokens that a tokenizer trained for a late retriever has beside its words."""
    return tuple(dict.fromkeys(token for token in (settings.query_marker, settings.passage_marker, MASK) if token))
