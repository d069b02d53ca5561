"""Learned distances in every problem of the menagerie, with the answer of the plain formula and plain autograd."""

from __future__ import annotations

from typing import Any

import torch
from problems import PROBLEMS, Problem
from torch import Tensor, nn

from contrastile import contrast
from contrastile.losses.reference import dense_sigmoid
from contrastile.losses.sigmoid import Sigmoid
from contrastile.scorers import Bilinear, MaxSim, PairMLP

ROW_TOKENS, COLUMN_TOKENS, D_ROWS, D_COLUMNS = 3, 4, 6, 5


class Projected(nn.Module):
    """MaxSim over projected tokens, of features nested as a dict; one of its parameters is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D_ROWS, 4)
        self.unused = nn.Linear(2, 2)
        self.score = MaxSim()

    def forward(self, rows: dict[str, Any], columns: dict[str, Any]) -> Tensor:
        sides = [(self.project(side["tokens"]), side["mask"]) for side in (rows, columns)]
        return self.score(*sides) + rows["prior"][:, None] + columns["prior"]


def scorer(kind: str, same: bool) -> nn.Module:
    torch.manual_seed(3)
    D = D_ROWS if same else D_COLUMNS
    made = {
        "bilinear": lambda: Bilinear(D_ROWS, D),
        "mlp": lambda: PairMLP(D_ROWS, D, hidden=7),
        "maxsim": MaxSim,
        "projected": Projected,
    }[kind]().double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


KINDS = ["bilinear", "mlp", "maxsim", "projected"]


def side(kind: str, n: int, L: int, D: int, seed: int) -> Any:
    """A side's features, whose floating leaves want gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    if kind in ("bilinear", "mlp"):
        return draw(n, D)
    # some have no token at all
    mask = torch.arange(L) < torch.randint(0, L + 1, (n, 1), generator=generator)
    if kind == "maxsim":
        return (draw(n, L, D_ROWS), mask)
    return {"tokens": draw(n, L, D_ROWS), "mask": mask, "prior": draw(n), "absent": None}


def sides(kind: str, problem: Problem, seed: int = 0) -> tuple[Any, Any]:
    rows = side(kind, problem.N, ROW_TOKENS, D_ROWS, 2 * seed)
    return rows, rows if problem.same else side(kind, problem.M, COLUMN_TOKENS, D_COLUMNS, 2 * seed + 1)


def numbers(problem: Problem) -> dict[str, Tensor]:
    found = {"scale": torch.tensor(1.5, dtype=torch.float64)}
    if problem.formula is dense_sigmoid:
        found["bias"] = torch.tensor(-3.0, dtype=torch.float64)
    return {name: x.requires_grad_() for name, x in found.items()}


def leaves(rows: Any, cols: Any) -> list[Tensor]:
    every = torch.utils._pytree.tree_leaves((rows, cols))
    unique = {id(x): x for x in every if x is not None and x.requires_grad}
    return list(unique.values())


def by_tiles(problem: Problem, module: nn.Module, rows: Any, cols: Any, named: dict[str, Tensor], **how: Any) -> Tensor:
    return contrast(rows, cols, scorer=module, **named, **(problem.tiled | how))


def by_formula(
    problem: Problem, module: nn.Module, rows: Any, cols: Any, named: dict[str, Tensor], **how: Any
) -> Tensor:
    """The plain formula of the whole matrix of scores, which is its own product with the identity."""
    scores = module(rows, cols)
    return problem.formula(scores, torch.eye(scores.shape[1], dtype=scores.dtype), **named, **(problem.dense | how))


def gradients(loss: Tensor, *groups: Any) -> list[Tensor | None]:
    """Of every tensor in the groups, for an upstream gradient that differs from row to row."""
    seeds = torch.linspace(1.0, 1.5, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return list(torch.autograd.grad((loss * seeds).sum(), [x for group in groups for x in group], allow_unused=True))


def uses_bias(problem: Problem) -> bool:
    return isinstance(problem.tiled.get("loss"), Sigmoid)


__all__ = ["KINDS", "PROBLEMS", "by_formula", "by_tiles", "gradients", "leaves", "numbers", "scorer", "sides"]
