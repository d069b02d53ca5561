"""Inputs of an encoder: the tensors in them, and how a sub-batch is cut out of each.

First station of `encode.py`; every pass cuts by a `Layout`. Rows are cut along their first axis, packed values after
the lengths of their examples (`Ragged`), lists with an entry for each example into entries. All other values are passed
as they are. A batch may also come as ready-made sub-batches (`Parts`), which are not cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile._torch import pytree
from contrastile.offload import Bounds

# rows of a probe
PROBE_ROWS = 2


@dataclass(frozen=True)
class Ragged:
    """The values of all examples of a batch in one tensor, and the number of values of each example.

    Values are, for example, the patches of images of many sizes (`pixel_values` of Qwen-VL, with `image_grid_thw`), or
    the tokens of texts without padding (`cu_seqlens`). `encode` passes the encoder the values of a sub-batch as a plain
    tensor, or None if it has none. The encoder gets lengths from a further input: [B, ...] rows, or ragged too.

    An encoder may also return one, such as a vector for each token: `encode` returns that of the whole batch, packed
    along the first axis. `contrast(..., scorer=MaxSim())` takes it as a side. Lengths on a GPU make the host wait for
    it; a list does not.

    Arguments:
        values: [..., Σ lengths, ...], packed in the order of the examples.
        lengths: [B] whole numbers of at least 0, as a tensor, an array or a list; `cu_seqlens.diff()`.
        axis: the packed axis.

    Raises ValueError if these do not fit together.

    >>> import torch
    >>> images = torch.tensor([1, 0, 2])
    >>> grid = torch.tensor([[1, 2, 2], [1, 4, 2], [1, 2, 2]])
    >>> patches = [int(each.prod(-1).sum()) for each in grid.split(images.tolist())]
    >>> Ragged(torch.randn(16, 8), patches).lengths
    [4, 0, 12]
    """

    values: Tensor
    lengths: Any
    axis: int = 0

    def __post_init__(self) -> None:
        # a tensor, or an array of numpy
        lengths = self.lengths.tolist() if hasattr(self.lengths, "tolist") else self.lengths
        lengths = list(lengths) if isinstance(lengths, Iterable) else lengths
        if not isinstance(lengths, list) or not all(isinstance(length, int) and length >= 0 for length in lengths):
            got, remedy = lengths[:8] if isinstance(lengths, list) else lengths, "Count the values of each example."
            raise invalid("lengths", "be a list of whole numbers of at least 0", got, remedy)
        object.__setattr__(self, "lengths", lengths)
        if not isinstance(self.values, Tensor) or not -self.values.ndim <= self.axis < self.values.ndim:
            got = f"{list(self.values.shape)}" if isinstance(self.values, Tensor) else type(self.values).__name__
            raise invalid("values", f"be a tensor with an axis {self.axis}", got, "Pass what is packed along it.")
        if sum(lengths) != self.values.shape[self.axis]:
            got = f"{sum(lengths)} for {self.values.shape[self.axis]}"
            raise invalid("lengths", "sum to the size of the packed axis", got, "Count the values of each example.")

    @classmethod
    def of(cls, vectors: Tensor, mask: Tensor) -> Ragged:
        """The vectors `[B, L, ...]` where the mask `[B, L]` is true, packed along the first axis.

        `contrastile.scorers.padded(values, lengths)` is the way back.
        """
        if mask.is_floating_point() or mask.shape != vectors.shape[:2]:
            got = f"{mask.dtype} of shape {list(mask.shape)} for vectors {list(vectors.shape)}"
            raise invalid("mask", "be true or false for each vector [B, L]", got, "Pass attention_mask.bool(), say.")
        mask = mask.bool()
        return cls(vectors[mask], mask.sum(dim=1))


@dataclass(frozen=True)
class Place:
    """A slice of an input tensor: what a sub-batch gets of it."""

    # position among all tensors
    tensor: int
    rows: slice
    axis: int = 0

    def of(self, x: Tensor) -> Tensor:
        return x[(*[slice(None)] * self.axis, self.rows)]


@dataclass(frozen=True)
class Layout:
    """The structure of inputs: the tensors and other leaves that they are made of, and how examples cut them.

    `tensors` and `lists`: positions, among all leaves, of tensors and of lists with an entry for each example.
    `others`: the leaves that are no tensors, None in the place of each tensor. `packed`: the axis and the first value
    of each example, by position among the tensors.
    """

    batch: int
    # nesting: a mapping's leaves are keywords of the encoder, a tuple's are arguments
    structure: Any
    others: list[Any]
    tensors: list[int]
    lists: list[int]
    packed: dict[int, tuple[int, list[int]]]

    @property
    def plain(self) -> bool:
        """Return whether rows alone are cut, which can be sorted."""
        return not self.packed and not self.lists

    @property
    def probe(self) -> Bounds:
        """The examples of a trial run."""
        return 0, PROBE_ROWS

    def places(self, bounds: Bounds) -> list[Place]:
        """The parts of all tensors that hold these examples."""
        places = []
        for tensor in range(len(self.tensors)):
            start, stop, axis = *bounds, 0
            if tensor in self.packed:
                axis, offsets = self.packed[tensor]
                start, stop = offsets[start], offsets[min(stop, self.batch)]
            places.append(Place(tensor, slice(start, stop), axis))
        return places

    def rows(self, tensors: Sequence[Tensor], bounds: Bounds) -> list[Tensor | None]:
        """The parts of all tensors that hold these examples; None for packed values of which they have none."""
        rows = ((place, place.of(tensors[place.tensor])) for place in self.places(bounds))
        return [None if place.tensor in self.packed and not row.numel() else row for place, row in rows]

    def arguments(self, rows: Sequence[Tensor | None], bounds: Bounds) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The encoder's arguments and keywords for these examples."""
        leaves = list(self.others)
        for position in self.lists:
            leaves[position] = leaves[position][slice(*bounds)]
        return _arguments(leaves, self.tensors, rows, self.structure)

    def count(self, bounds: Bounds, _outputs: Sequence[Any]) -> int:
        return bounds[1] - bounds[0]


@dataclass(frozen=True)
class Parts:
    """Ready-made sub-batches in place of a `Layout`. Each counts as one row, and is passed whole."""

    batch: int
    # for each part its nesting, its leaves that are no tensors, the positions of its tensors, and its first tensor
    parts: list[tuple[Any, list[Any], list[int], int]]
    plain: bool = False

    @property
    def probe(self) -> Bounds:
        """The part of a trial run."""
        return 0, 1

    def places(self, bounds: Bounds) -> list[Place]:
        """All tensors of the part."""
        _, _, positions, first = self.parts[bounds[0]]
        return [Place(first + index, slice(None)) for index in range(len(positions))]

    def rows(self, tensors: Sequence[Tensor], bounds: Bounds) -> list[Tensor | None]:
        return [tensors[place.tensor] for place in self.places(bounds)]

    def arguments(self, rows: Sequence[Tensor | None], bounds: Bounds) -> tuple[tuple[Any, ...], dict[str, Any]]:
        structure, others, positions, _ = self.parts[bounds[0]]
        return _arguments(list(others), positions, rows, structure)

    def count(self, bounds: Bounds, outputs: Sequence[Any]) -> int:
        """The examples of the part: the rows of what the encoder returns for it."""
        shapes = [out.shape for out in outputs if isinstance(out, Tensor) and out.ndim]
        # a number of shape [1] may stand for all examples
        return 0 if bounds[0] == bounds[1] else max((shape[0] for shape in shapes), default=1)


def laid_out(inputs: Any) -> tuple[Layout, list[Tensor]]:
    """The layout of a batch, and its tensors. Raises ValueError for what cannot be cut, with its path."""
    paths, leaves, structure = _flatten(inputs)
    _check(paths, leaves)
    sizes = {
        path: len(leaf.lengths if isinstance(leaf, Ragged) else leaf)
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, (Tensor, Ragged))
    }
    first, batch = next(iter(sizes.items()))
    for path, size in sizes.items():
        if size != batch:
            got = f"{batch} for {first} and {size} for {path}"
            remedy = "Check each tensor's shape; wrap packed values with their lengths in contrastile.Ragged."
            raise invalid("inputs", "have the same first axis, the batch", got, remedy)
    tensors = [position for position, leaf in enumerate(leaves) if isinstance(leaf, (Tensor, Ragged))]
    values = [leaves[position] for position in tensors]
    packed = {
        index: (leaf.axis % leaf.values.ndim, [0, *accumulate(leaf.lengths)])
        for index, leaf in enumerate(values)
        if isinstance(leaf, Ragged)
    }
    if packed and batch == 0:
        raise invalid("inputs", "hold an example where one is Ragged", "none", "Leave the call out.")
    lists = [position for position, leaf in enumerate(leaves) if isinstance(leaf, (list, tuple)) and len(leaf) == batch]
    others = [None if position in tensors else leaf for position, leaf in enumerate(leaves)]
    layout = Layout(batch, structure, others, tensors, lists, packed)
    return layout, [leaf.values if isinstance(leaf, Ragged) else leaf for leaf in values]


def listed(parts: Iterable[Any]) -> list[Any]:
    """Ready-made sub-batches as a list."""
    # a tensor would be cut into its rows, and a mapping into its names
    if isinstance(parts, (Tensor, Mapping, str)) or not isinstance(parts, Iterable):
        remedy = "Pass [part, part, ...], or inputs and sub_batch."
        raise invalid("parts", "be a list of sub-batches", type(parts).__name__, remedy)
    return list(parts)


def lendable(parts: Sequence[Any]) -> Any:
    """The smallest of the sub-batches, with copies of its tensors in host memory."""

    def stored(part: Any) -> tuple[int, list[Any], Any]:
        _, leaves, structure = _flatten(part)
        leaves = [leaf.values if isinstance(leaf, Ragged) else leaf for leaf in leaves]
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)), leaves, structure

    _, leaves, structure = min(map(stored, parts), key=lambda each: each[0])
    # a view would be stored with its whole batch
    leaves = [leaf.detach().clone().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(leaves, structure)


def laid_out_parts(parts: Sequence[Any], borrowed: Any = None) -> tuple[Parts, list[Tensor]]:
    """The layout of ready-made sub-batches, and the tensors of all of them.

    borrowed: a sub-batch on which a rank without any runs, and of which it returns no rows.
    """
    made: list[tuple[Any, list[Any], list[int], int]] = []
    tensors: list[Tensor] = []
    for part in parts or ([] if borrowed is None else [borrowed]):
        _, leaves, structure = _flatten(part)
        leaves = [leaf.values if isinstance(leaf, Ragged) else leaf for leaf in leaves]
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        made.append((structure, others, positions, len(tensors)))
        tensors += [leaves[position] for position in positions]
    if not made:
        remedy = "In training pass the wrapper, with a sub-batch on another rank; elsewhere the features are "
        remedy += "torch.zeros(0, D, requires_grad=True)."
        raise invalid("parts", "hold a sub-batch", "none", remedy)
    return Parts(len(parts), made), tensors


def flatten_outputs(tree: Any) -> tuple[list[Any], Any, list[int]]:
    """Leaves of what an encoder returned, its nesting, and the positions of packed values among the leaves.

    Packed values are two leaves: the values, and behind them the lengths [B] of their examples, in host memory.
    """
    leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda x: isinstance(x, Ragged))
    outputs, packed = list[Any](), list[int]()
    for leaf in leaves:
        if not isinstance(leaf, Ragged):
            outputs.append(leaf)
            continue
        if leaf.axis % leaf.values.ndim:
            rule, remedy = "return values packed along their first axis", "Transpose them."
            raise invalid("encoder", rule, f"axis {leaf.axis}", remedy)
        packed.append(len(outputs))
        outputs += [leaf.values, torch.tensor(leaf.lengths, dtype=torch.int64, device="cpu")]
    return outputs, structure, packed


def _flatten(inputs: Any) -> tuple[list[str], list[Any], Any]:
    """Paths and leaves of the inputs, and their nesting."""
    tree = dict(inputs) if isinstance(inputs, Mapping) else inputs
    pairs, structure = pytree.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    return [f"inputs{pytree.keystr(path)}" for path, _ in pairs], [leaf for _, leaf in pairs], structure


def _check(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise ValueError for a leaf that could not be cut."""
    cut = any(isinstance(leaf, (Tensor, Ragged)) for leaf in leaves)
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tensor):
            refused = leaf.ndim == 0 or leaf.layout is not torch.strided or leaf.is_nested
        else:
            # an array, or a mapping that pytree does not know, would not be cut
            array = hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0) > 0
            refused = array or isinstance(leaf, Mapping) or not (cut or leaf is None)
        if refused:
            got = type(leaf).__name__
            if isinstance(leaf, Tensor):
                got = "a tensor without axes" if leaf.ndim == 0 else "a sparse or nested tensor"
            remedy = f"{_in_place_of(leaf)}; bind other arguments with functools.partial."
            raise invalid(path, "be tensors whose first axis is the batch", got, remedy)
    if not cut:
        raise invalid("inputs", "contain a tensor", "none", "Pass what the encoder takes.")


def _in_place_of(leaf: Any) -> str:
    """The remedy for a leaf that could not be cut."""
    if isinstance(leaf, Mapping):
        return "Make it a dict"
    if isinstance(leaf, Tensor):
        return "Make it dense" if leaf.ndim else "Give each example its own"
    first = leaf[0] if isinstance(leaf, (list, tuple)) and leaf else leaf
    if isinstance(first, (str, bytes)):
        return "Tokenise texts first"
    if isinstance(first, Mapping):
        return "Pass sub-batches of your own as parts=[...]"
    if isinstance(leaf, (list, tuple)):
        return 'Make tensors of lists, as a tokenizer does with return_tensors="pt"'
    return "Convert arrays with torch.as_tensor"


def _is_leaf(x: Any) -> bool:
    """Return whether x is packed values, or may have an entry for each example: a list without tensors, or a tuple of
    texts, which a DataLoader makes of them.
    """
    if isinstance(x, list):
        return not any(isinstance(leaf, (Tensor, Ragged)) for leaf in pytree.tree_leaves(x))
    return isinstance(x, Ragged) or (type(x) is tuple and len(x) > 0 and all(isinstance(y, (str, bytes)) for y in x))


def _arguments(
    leaves: list[Any], positions: Sequence[int], rows: Sequence[Tensor | None], structure: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of an encoder, from their leaves."""
    for position, row in zip(positions, rows, strict=True):
        leaves[position] = row
    tree = pytree.tree_unflatten(leaves, structure)
    if isinstance(tree, dict):
        return (), tree
    return (tree if isinstance(tree, tuple) else (tree,)), {}
