"""hessian-eigenthings: one vector per product, the graph rebuilt each time."""

from collections.abc import Callable
from typing import Any

import torch
from hessian_eigenthings import (
    GGNOperator,
    HessianOperator,
    lanczos,
    supervised_forward,
    supervised_loss,
    supervised_loss_of_output,
)
from torch import nn

from curvlab.bench.problem import Answer, Data, Product

NAME = DISTRIBUTION = "hessian-eigenthings"
BLOCKS = False  # one vector at a time


def hessian(model: nn.Module, loss: nn.Module, batches: Data) -> Product:
    return _rows(HessianOperator(model, batches, supervised_loss(loss)))


def gauss_newton(model: nn.Module, loss: nn.Module, batches: Data) -> Product:
    of_output = supervised_loss_of_output(loss)
    return _rows(GGNOperator(model, batches, supervised_forward, of_output))


def efforts(k: int) -> list[float]:
    """Numbers of steps: 2 k by default, more until it is accurate."""
    return [2 * k, 3 * k, 4 * k, 5 * k]


def eigenpairs(
    model: nn.Module, loss: nn.Module, batches: Data, k: int
) -> Callable[[float], Answer]:
    """Its Lanczos, which takes a number of steps."""
    operator = HessianOperator(model, batches, supervised_loss(loss))

    def solve(steps: float) -> Answer:
        found = lanczos(operator, k=k, max_iter=int(steps), reorthogonalize=True, seed=0)
        return found.eigenvalues.double(), found.eigenvectors, found.iterations

    return solve


def _rows(operator: Any) -> Product:
    return lambda block: torch.stack([operator.matvec(row) for row in block])
