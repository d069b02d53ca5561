"""Learned distances for `contrast(..., scorer=module)`: three scorers, and the rules for any other.

A scorer is a module. It is called with a block of rows and a block of columns, each nested as the user passed them, and
returns their scores [I, J]. It must treat pairs one by one, and own every parameter that it uses. `tiles/scored.py`
runs it on blocks whose scores and graph fit into the workspace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._errors import invalid, truth_value
from contrastile._torch import forward_ad_runs, func_transform
from contrastile._types import accumulator, shape_or_type

# token vectors [B, L, D], alone or with a mask [B, L] that is true where there is a token
Tokens = Tensor | tuple[Tensor, Tensor | None]
# tokens of rows and of columns whose similarities a CPU computes at once, so that they stay in its cache
ROWS, COLUMNS = 1024, 512


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
            _rows(name, x, features, self.weight)
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
        _rows("q", rows, self.rows.in_features, self.rows.weight)
        _rows("k", columns, self.columns.in_features, self.columns.weight)
        hidden_IJH = F.gelu(self.rows(rows)[:, None] + self.columns(columns)[None, :])
        return self.output(self.dropout(hidden_IJH)).squeeze(-1)


class MaxSim(nn.Module):
    """Late interaction (ColBERT, Khattab and Zaharia 2020, equation 3): s_ij = Σ_l max_m ⟨q_il, k_jm⟩.

    Called with token vectors [I, L, D] and [J, M, D], each alone or as (vectors, mask [I, L]), the mask true, or not
    0, where there is a token: a tokenizer's `attention_mask` as it is. Padding does not count; a column
    without any token scores 0. Raises ValueError for anything else, such as a mask of floats, whose meaning is not
    plain.

    Arguments:
        normalize: compare vectors of length 1, as ColBERT does: naively `F.normalize(x, dim=-1)` of each side. By
            default vectors are used as given. A vector of zeros stays one, and gets no gradient.

    >>> from contrastile import contrast
    >>> query, document = torch.randn(8, 5, 16, requires_grad=True), torch.randn(8, 9, 16)
    >>> mask = torch.arange(9) < torch.randint(1, 10, (8, 1))
    >>> contrast(query, (document, mask), scorer=MaxSim(normalize=True)).backward()
    >>> query.grad.shape
    torch.Size([8, 5, 16])
    """

    # the caller has normalised both sides
    gets_unit_vectors = False

    def __init__(self, normalize: bool = False) -> None:
        super().__init__()
        truth_value("normalize", normalize)
        self.normalize = normalize

    def forward(self, rows: Tokens, columns: Tokens) -> Tensor:
        (q_ILD, row_mask), (k_JMD, col_mask) = self.checked(rows, columns)
        q_ILD, k_JMD = without_padding(q_ILD, row_mask), without_padding(k_JMD, col_mask)
        if self.normalize:
            q_ILD, k_JMD = unit_vectors(q_ILD), unit_vectors(k_JMD)
        if not k_JMD.shape[1]:
            # no column has a token
            k_JMD, col_mask = self.pad_tokens((k_JMD, col_mask), 1)
        q_ED = q_ILD.flatten(0, 1)
        differentiated = torch.compiler.is_compiling() or func_transform() is not None or forward_ad_runs()
        if q_ED.device.type == "cpu" and not differentiated:
            # without grad mode, autograd still asks for the gradients of inputs that require one
            sides = (q_ED, k_JMD) if torch.is_grad_enabled() else (q_ED.detach(), k_JMD.detach())
            best_EJ = _BestMatches.apply(*sides, col_mask)
        else:
            best_EJ = _similarities(q_ED, k_JMD, col_mask).max(-1).values
        best_ILJ = best_EJ.unflatten(0, q_ILD.shape[:2])
        if col_mask is not None:
            best_ILJ = best_ILJ.masked_fill(~col_mask.any(-1), 0.0)
        if row_mask is not None:
            best_ILJ = best_ILJ.masked_fill(~row_mask[:, :, None], 0.0)
        return best_ILJ.sum(1)

    @staticmethod
    def checked(rows: Tokens, columns: Tokens) -> list[tuple[Tensor, Tensor | None]]:
        """The vectors and the mask of both sides."""
        sides = [tokens("q", rows), tokens("k", columns)]
        (q, _), (k, _) = sides
        _vectors("k", k, q.shape[2])
        for name, x in (("q", q), ("k", k)):
            if not x.is_floating_point():
                raise invalid(name, "be floating point", x.dtype, "Convert it with .float().")
        _alike("k", k, "`q`", q)
        return sides

    @property
    def unmodified(self) -> bool:
        """This class itself, without hooks or another `forward`, and not compiled: calls do what its `forward` says."""
        changed = self._forward_hooks or self._forward_pre_hooks or self._compiled_call_impl or "forward" in vars(self)
        return type(self) is MaxSim and not changed

    @property
    def plain(self) -> bool:
        """`unmodified`, of vectors as given: it draws no random numbers and has no state."""
        return self.unmodified and not self.normalize

    @property
    def stateless(self) -> bool:
        """Calls depend on their arguments alone: any two such modules are the same."""
        return self.plain and not (self._parameters or self._modules or self._buffers)

    def alike(self) -> MaxSim:
        """Another module that scores alike: cached plans keep it, and this one may change."""
        other = MaxSim()
        other.gets_unit_vectors = self.gets_unit_vectors
        return other

    @staticmethod
    def tile_bytes(rows: int, columns: int, L: int, M: int, D: int, size: int) -> int:
        """Bytes of a tile of scores on a CPU, with its gradients, in numbers of `size` bytes."""
        # the best matches with their gradients, the winning tokens, and both once more in another order
        matches, at_once = 2 * (size + 4) * rows * columns * L, min(ROWS, rows * L)
        similar = 2 * size * at_once * min(max(COLUMNS, M), columns * M)
        return matches + max(similar, size * (rows * L + columns * M) * D + 8 * at_once * columns)

    def pad_tokens(self, side: Tokens, length: int | None = None) -> tuple[Tensor, Tensor]:
        """A side as vectors [B, length, D] and a bool mask, with masked padding. length: by default its own.

        A scorer with this method may have sides of other lengths on other ranks. A side without rows is cut to length.
        """
        vectors, mask = tokens("q", side)
        mask = torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device) if mask is None else mask
        length = vectors.shape[1] if length is None else length
        return padded_to(vectors, length), padded_to(mask, length)


def without_padding(vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Vectors [..., D] with zeros where the mask [...] is false: padding may hold anything, and 0 · NaN is NaN."""
    return vectors if mask is None else vectors.masked_fill(~mask.bool()[..., None], 0.0)


def unit_vectors(vectors: Tensor, mask: Tensor | None = None) -> Tensor:
    """Vectors [..., D] divided by their lengths, with zeros where the mask [...] is false.

    Vectors of zeros stay and get no gradient, also in float16, where the smallest length of `F.normalize` is 0.
    """
    vectors = without_padding(vectors, mask)
    lengths = vectors.norm(dim=-1, keepdim=True)
    return vectors / lengths.masked_fill(lengths == 0, torch.inf)


def padded_to(x: Tensor, length: int) -> Tensor:
    """x [B, L, ...] with zeros behind it, or cut, to this length; itself where it is as long: pinned memory stays."""
    more = length - x.shape[1]
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, more)) if more else x


def padded(values: Tensor, lengths: Tensor, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """Packed token vectors as a side of `MaxSim`: vectors [B, L, D], 0 behind the tokens, and their mask [B, L].

    Naively `pad_sequence(values.split(lengths.tolist()), batch_first=True)` of `torch.nn.utils.rnn`, and a mask.

    Arguments:
        values: [T, D], the tokens of the first example first.
        lengths: [B] integers that add up to T.
        longest: L. None: the largest of the lengths, whose read waits for a GPU.

    Raises ValueError for other shapes, and for lengths that do not add up to T where they may be read.

    >>> vectors, mask = padded(torch.randn(7, 16), torch.tensor([3, 0, 4]))
    >>> vectors.shape, mask.sum(1)
    (torch.Size([3, 4, 16]), tensor([3, 0, 4]))
    """
    if values.ndim != 2 or lengths.ndim != 1 or lengths.is_floating_point():
        got = f"shapes {list(values.shape)} and {list(lengths.shape)}, {lengths.dtype}"
        raise invalid("values", "be packed tokens [T, D], with integer lengths [B]", got, "Concatenate the examples.")
    if longest is None:
        total, longest = int(lengths.sum()), int(lengths.max()) if len(lengths) else 0
        if total != len(values):
            got = f"{total} and {len(values)}"
            raise invalid("lengths", "add up to the rows of `values`", got, "List one number for each example.")
    mask = torch.arange(longest, device=values.device) < lengths[:, None]
    vectors = values.new_zeros(len(lengths), longest, values.shape[1])
    return vectors.masked_scatter(mask[..., None], values), mask


class _BestMatches(torch.autograd.Function):
    """max_m ⟨q_e, k_jm⟩ [E, J] on a CPU, with a block of similarities at a time.

    The gradients go to the tokens that attain the maxima, of equal ones to the first: E · J additions of a token, where
    autograd would multiply with a matrix of all similarities that is nearly all zeros.
    """

    @staticmethod
    def forward(ctx: Any, q_ED: Tensor, k_JMD: Tensor, col_mask: Tensor | None) -> Tensor:
        E, (J, M, _), with_graph = len(q_ED), k_JMD.shape, any(ctx.needs_input_grad)
        # autocast decides about the dtype of products
        best = q_ED.new_empty(E, J, dtype=(q_ED[:0] @ k_JMD.flatten(0, 1)[:0].T).dtype)
        winners = q_ED.new_empty(E, J, dtype=torch.int32) if with_graph else None
        documents = max(1, COLUMNS // max(M, 1))
        for rows in _parts(E, ROWS):
            for cols in _parts(J, documents):
                similar = _similarities(q_ED[rows], k_JMD[cols], None if col_mask is None else col_mask[cols])
                if winners is None:
                    best[rows, cols] = similar.amax(-1)
                else:
                    best[rows, cols], winners[rows, cols] = similar.max(-1)
        if winners is not None:
            ctx.save_for_backward(q_ED, k_JMD, winners, col_mask)
        return best

    @staticmethod
    def backward(ctx: Any, g_EJ: Tensor) -> tuple[Tensor | None, ...]:
        q_ED, k_JMD, winners, col_mask = ctx.saved_tensors
        if torch.is_grad_enabled():
            # a second derivative is wanted: autograd's own first has a graph
            best, inputs = _similarities(q_ED, k_JMD, col_mask).max(-1).values, (q_ED, k_JMD)
            wanted = [x for x, want in zip(inputs, ctx.needs_input_grad, strict=False) if want]
            gradients = iter(torch.autograd.grad(best, wanted, g_EJ, create_graph=True))
            return *[next(gradients) if want else None for want in ctx.needs_input_grad[:2]], None
        (J, M, _), wide = k_JMD.shape, accumulator(g_EJ.dtype)
        q, k, g = q_ED.to(wide), k_JMD.flatten(0, 1).to(wide), g_EJ.to(wide)
        of_q, of_k = (
            torch.zeros_like(x) if want else None for x, want in zip((q, k), ctx.needs_input_grad, strict=False)
        )
        if of_q is not None:
            first = torch.arange(J, device=g.device) * M
            for rows in _parts(len(q), ROWS):
                of_q[rows] = F.embedding_bag(winners[rows] + first, k, per_sample_weights=g[rows], mode="sum")
        if of_k is not None:
            for total, winners_E, g_E in zip(of_k.split(M), winners.T.contiguous(), g.T.contiguous(), strict=True):
                for rows in _parts(len(q), ROWS):
                    total.index_add_(0, winners_E[rows], q[rows] * g_E[rows, None])
            of_k = of_k.unflatten(0, (J, M)).to(k_JMD.dtype)
        return None if of_q is None else of_q.to(q_ED.dtype), of_k, None


def _similarities(q_ED: Tensor, k_JMD: Tensor, col_mask: Tensor | None) -> Tensor:
    """⟨q_e, k_jm⟩ [E, J, M]; −∞ for masked tokens."""
    similar = (q_ED @ k_JMD.flatten(0, 1).T).unflatten(1, k_JMD.shape[:2])
    return similar if col_mask is None else similar.masked_fill(~col_mask, -torch.inf)


def _parts(n: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n, size)]


def _alike(name: str, x: Tensor, whose: str, other: Tensor) -> None:
    """Require one dtype, unless autocast casts both; vectors in host memory are compared on another device."""
    if x.dtype != other.dtype and not any(map(torch.is_autocast_enabled, (x.device.type, "cuda"))):
        remedy = "Convert one of them first, or call under autocast."
        raise invalid(name, f"have the dtype of {whose}", f"{x.dtype} and {other.dtype}", remedy)


def _rows(name: str, x: Tensor, features: int, weight: Tensor) -> None:
    """Check a side whose examples are single vectors."""
    if isinstance(x, (tuple, list)) or getattr(x, "ndim", 2) > 2:
        rule, remedy = "have one vector for each example", "MaxSim scores token vectors."
        raise invalid(name, rule, shape_or_type(x), remedy)
    _vectors(name, x, features)
    _alike(name, x, "the scorer's weights", weight)


def _vectors(name: str, x: Tensor, features: int) -> None:
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != features:
        rule = f"have rows of {features} features, as the scorer reads them"
        raise invalid(name, rule, shape_or_type(x), "Project one side first.")


def tokens(name: str, side: Tokens) -> tuple[Tensor, Tensor | None]:
    """The vectors [B, L, D] of a side of `MaxSim`, and its bool mask [B, L]. Raises ValueError for anything else."""
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
