"""The retriever with a vector for each token, compared by late interaction (ColBERT, Khattab and Zaharia 2020).

The score of a query and a passage is Σ_l max_m ⟨q_l, k_m⟩ over the query's tokens l and the passage's tokens m.
"""

import string
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._errors import invalid
from contrastile._types import TokenFeatures
from contrastile.models.base import ProjectedTower, Settings, completed, evaluating
from contrastile.models.text import MASK, Tokenizer
from contrastile.models.towers import RETRIEVER_DEFAULTS, Retriever, encoder_towers

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
        rows = super().comparable(vectors.flatten(0, 1), dimensions)
        return rows.unflatten(0, mask.shape), mask


def _punctuation(tokenizer: Tokenizer) -> list[int]:
    """The numbers of the tokens that are punctuation alone, after the sign of a blank before them is removed."""
    tokens = (token.lstrip("Ġ▁") for token in tokenizer.tokens(range(tokenizer.vocabulary_size)))
    return [number for number, token in enumerate(tokens) if token and not set(token).difference(string.punctuation)]


def build_late(settings: Settings, *, tokenizer: Tokenizer) -> LateRetriever:
    """The retriever that `settings` describe: those of `build_retriever`, `query_length` and `LATE_SETTINGS`.

    `features`: the size of a token's vector.

    >>> from contrastile.models.text import train_tokenizer
    >>> tokenizer = train_tokenizer(["bracket the minimum of a function"], kind="bpe", length=8)
    >>> settings = {"both": {"kind": "words", "width": 16}, "features": 8, "query_length": 6}
    >>> model = build_late(settings, tokenizer=tokenizer)
    >>> [x.shape for x in model.encode_query(**tokenizer.tokenise(["a minimum", "a function"], 4))]
    [torch.Size([2, 6, 8]), torch.Size([2, 6])]
    """
    complete = completed(settings, LATE_DEFAULTS)
    towers = encoder_towers(complete, tokenizer)
    encoders = {}
    for side, tower in towers.items():
        states, token = TokenStates(tower.module), torch.full((1, 1), tokenizer.pad)
        with evaluating(states), torch.no_grad():
            width = states(token, torch.ones_like(token)).shape[-1]
        encoders[side] = ProjectedTower(states, nn.Linear(width, complete["features"], bias=False))
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
