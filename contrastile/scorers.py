"""Learned distances for `contrast(..., scorer=module)`: three that are provided, and the pattern for any other.

Beside `modules/`; what computes with them is `tiles/scored.py`. A scorer is a module that is called with a block
of rows and a block of columns, each nested as the user passed them, and returns their scores [I, J]. It must treat
pairs one by one, and hold every parameter that it uses; its memory is I · J times what one pair takes, of which the
tiles see to it that it fits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._errors import invalid

# token vectors [B, L, D], alone or with a mask [B, L] that is true where there is a token
Tokens = Tensor | tuple[Tensor, Tensor | None]


class Bilinear(nn.Module):
    """s_ij = q_iᵀ W k_j, with W [row_features, column_features]; it begins as the dot product.

    Naively `q @ W @ k.T`. Raises ValueError for rows or columns of other sizes.

    >>> from contrastile import contrast
    >>> scorer = Bilinear(8, 6)
    >>> image, text = torch.randn(32, 8), torch.randn(32, 6)
    >>> contrast(image, text, scorer=scorer, scale=5.0).backward()
    >>> scorer.weight.grad.shape
    torch.Size([8, 6])
    """

    def __init__(self, row_features: int, column_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(row_features, column_features))

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        for name, x, features in zip(("q", "k"), (rows, columns), self.weight.shape, strict=True):
            _vectors(name, x, features)
        return rows @ self.weight @ columns.T


class PairMLP(nn.Module):
    """s_ij = wᵀ gelu(A q_i + B k_j + c) + e: one hidden layer over every pair.

    Naively an MLP on `torch.cat([q_i, k_j])`; here the first layer is applied to rows and columns apart, which is
    the same and takes I + J products instead of I · J.

    Arguments:
        row_features, column_features, hidden: the sizes.
        dropout: the share of the hidden layer that is dropped in training. Both passes draw the same numbers.

    Raises ValueError for rows or columns of other sizes.

    >>> from contrastile import contrast
    >>> scorer = PairMLP(8, 6, hidden=16)
    >>> image, text = torch.randn(32, 8), torch.randn(32, 6)
    >>> contrast(image, text, scorer=scorer).backward()
    >>> scorer.output.weight.grad.shape
    torch.Size([1, 16])
    """

    def __init__(self, row_features: int, column_features: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.rows = nn.Linear(row_features, hidden)
        self.columns = nn.Linear(column_features, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, 1)

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        _vectors("q", rows, self.rows.in_features)
        _vectors("k", columns, self.columns.in_features)
        hidden_IJH = F.gelu(self.rows(rows)[:, None] + self.columns(columns)[None, :])
        scores: Tensor = self.output(self.dropout(hidden_IJH)).squeeze(-1)
        return scores


class MaxSim(nn.Module):
    """Late interaction (ColBERT, Khattab and Zaharia 2020, equation 3): s_ij = Σ_l max_m ⟨q_il, k_jm⟩.

    Called with token vectors [I, L, D] and [J, M, D], each alone or as (vectors, mask [I, L]), the mask true, or not
    0, where there is a token: a tokenizer's `attention_mask` as it is. Padding neither asks nor answers; a column
    without any token scores 0. Vectors are used as given: normalise them first, as ColBERT does. Raises ValueError for
    anything else, such as a mask of floats, whose meaning is not plain.

    >>> from contrastile import contrast
    >>> query = F.normalize(torch.randn(8, 5, 16), dim=-1).requires_grad_()
    >>> document = F.normalize(torch.randn(8, 9, 16), dim=-1)
    >>> mask = torch.arange(9) < torch.randint(1, 10, (8, 1))
    >>> contrast(query, (document, mask), scorer=MaxSim()).backward()
    >>> query.grad.shape
    torch.Size([8, 5, 16])
    """

    def forward(self, rows: Tokens, columns: Tokens) -> Tensor:
        (q_ILD, asking), (k_JMD, answering) = tokens("q", rows), tokens("k", columns)
        _vectors("k", k_JMD, q_ILD.shape[2])
        similar = (q_ILD.flatten(0, 1) @ k_JMD.flatten(0, 1).T).unflatten(1, k_JMD.shape[:2])
        if answering is not None:
            similar = similar.masked_fill(~answering, -torch.inf)
        best_ILJ = similar.max(-1).values.unflatten(0, q_ILD.shape[:2])
        if answering is not None:
            best_ILJ = best_ILJ.masked_fill(~answering.any(-1), 0.0)
        if asking is not None:
            best_ILJ = best_ILJ.masked_fill(~asking[:, :, None], 0.0)
        return best_ILJ.sum(1)

    def pad_tokens(self, side: Tokens, length: int | None = None) -> tuple[Tensor, Tensor]:
        """A side as vectors [B, length, D] with a bool mask, padded with what does not count; its own length if None.

        A scorer with this method may have sides of other lengths on other ranks. A side without rows is cut to length.
        """
        vectors, mask = tokens("q", side)
        mask = torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device) if mask is None else mask
        more = 0 if length is None else length - vectors.shape[1]
        return F.pad(vectors, (0, 0, 0, more)), F.pad(mask, (0, more))


def _vectors(name: str, x: Tensor, features: int) -> None:
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != features:
        got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise invalid(
            name, f"have rows of {features} features, as the scorer reads them", got, "Project one side first."
        )


def tokens(name: str, side: Tokens) -> tuple[Tensor, Tensor | None]:
    both = side if isinstance(side, (tuple, list)) else (side, None)
    vectors, mask = both if len(both) == 2 else (None, None)
    shapes = [list(x.shape) if isinstance(x, Tensor) else None for x in (vectors, mask)]
    floats = isinstance(mask, Tensor) and mask.is_floating_point()
    fits = isinstance(mask, Tensor) and not floats and shapes[1] == (shapes[0] or [])[:2]
    if not isinstance(vectors, Tensor) or vectors.ndim != 3 or not (mask is None or fits):
        got = type(side).__name__ if shapes[0] is None else f"shape {shapes[0]}"
        if mask is not None:
            got += f" and a mask {shapes[1]}, {getattr(mask, 'dtype', type(mask).__name__)}"
        remedy = "Pass attention_mask.bool(), say." if floats else "Check the encoder."
        raise invalid(name, "be token vectors [B, L, D], alone or with a bool mask [B, L]", got, remedy)
    return vectors, None if mask is None else mask.bool()
