"""Small towers for the demos, fast on two cores and sufficient for glyphs with their names and for code search.

Measured at equal training time: one residual block on the coarsest map learns more than two on different maps, and
4 × 4 positions more than 2 × 2 or one, because glyphs differ in where their strokes are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """x + conv(relu(norm(conv(x)))) with GroupNorm, which is independent of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = _norm(width)
        self.conv_out = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv_out(F.relu(self.norm(self.conv_in(x))))


def _norm(width: int) -> nn.GroupNorm:
    groups = next(groups for groups in (8, 4, 2, 1) if width % groups == 0)
    return nn.GroupNorm(groups, width)


class ConvTower(nn.Module):
    """Three convolutions of stride 2, then a residual block, whose map is averaged to `POSITIONS` × `POSITIONS`."""

    POSITIONS = 4

    def __init__(self, *, channels: int, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.ReLU(), ResidualBlock(4 * width),
            _norm(4 * width), nn.ReLU(),
        )  # fmt: skip
        self.features = 4 * width * self.POSITIONS**2

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.body(pixels.contiguous(memory_format=torch.channels_last))
        if features.shape[-2:] != (self.POSITIONS, self.POSITIONS):
            features = F.adaptive_avg_pool2d(features, self.POSITIONS)
        return features.flatten(1)


class WordsTower(nn.Module):
    """Tokens `[B, L]` to features `[B, features]`: words mixed with positions and neighbours; mean and maximum.

    Both are 0 for a text without a token, such as a blank.
    """

    def __init__(self, *, vocabulary: int, length: int, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.empty(length, width))
        # small, so that a few hundred steps move every word away from its initial vector
        for table in (self.words.weight, self.places):
            nn.init.normal_(table, std=0.05)
        self.mix = nn.Linear(3 * width, width)
        self.norm = nn.LayerNorm(width)
        self.features = 2 * width

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask, x = attention_mask[..., None].bool(), self.states(input_ids, attention_mask)
        mean = (x * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        highest = x.masked_fill(~mask, torch.finfo(x.dtype).min).amax(dim=1)
        return torch.cat([mean, highest.masked_fill(~mask.any(dim=1), 0.0)], dim=1)

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`[B, L]` twice to a vector for each token, `[B, L, width]`; masked ones are neighbours of none."""
        x = self.words(input_ids) + self.places[: input_ids.shape[1]]
        padded = F.pad(x * attention_mask[..., None].bool(), (0, 0, 1, 1))
        mixed = F.relu(self.mix(torch.cat([padded[:, :-2], x, padded[:, 2:]], dim=-1)))
        return self.norm(x + mixed)


class BagTower(nn.Module):
    """Tokens `[B, L]` to features `[B, width]`: Σ exp(a_t) · E_t / Σ exp(a_t), a mean, then one residual layer.

    As the encoder of both sides it matches equal words before any training. A token costs one row of the table.
    """

    def __init__(self, *, vocabulary: int, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.weight = nn.Embedding(vocabulary, 1)
        self.layer_in = nn.Linear(width, 2 * width)
        self.layer_out = nn.Linear(2 * width, width)
        nn.init.normal_(self.words.weight, std=width**-0.5)
        # equal weights and the plain mean at the start
        nn.init.zeros_(self.weight.weight)
        nn.init.zeros_(self.layer_out.weight)
        nn.init.zeros_(self.layer_out.bias)
        self.features = width

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weight = self.weight(input_ids).squeeze(-1).exp() * attention_mask
        share = weight / weight.sum(dim=1, keepdim=True).clamp(min=1e-6)
        mean = F.embedding_bag(input_ids, self.words.weight, per_sample_weights=share, mode="sum")
        return mean + self.layer_out(F.relu(self.layer_in(mean)))

    def states(self, input_ids: Tensor, _attention_mask: Tensor) -> Tensor:
        """`[B, L]` twice to exp(a_t) times the vector of each token, `[B, L, width]`; masked ones have theirs too."""
        x = self.words(input_ids)
        return self.weight(input_ids).exp() * (x + self.layer_out(F.relu(self.layer_in(x))))
