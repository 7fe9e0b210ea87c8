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
from torch import Tensor, nn

DISTRIBUTION = "hessian-eigenthings"
BLOCKS = False  # one vector at a time
NETWORKS = None  # any

Product = Callable[[Tensor], Tensor]
Answer = tuple[Tensor, Tensor, int]


def hessian(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> Product:
    return _rows(HessianOperator(model, [(inputs, targets)], supervised_loss(loss)))


def gauss_newton(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> Product:
    data = [(inputs, targets)]
    return _rows(GGNOperator(model, data, supervised_forward, supervised_loss_of_output(loss)))


def eigenpairs(
    model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor, k: int
) -> tuple[Callable[[float], Answer], list[float]]:
    """Its Lanczos, which takes a number of steps: 2 k by default, more until it is accurate."""
    operator = HessianOperator(model, [(inputs, targets)], supervised_loss(loss))

    def solve(steps: float) -> Answer:
        found = lanczos(operator, k=k, max_iter=int(steps), reorthogonalize=True, seed=0)
        return found.eigenvalues.double(), found.eigenvectors, found.iterations

    return solve, [2 * k, 3 * k, 4 * k, 5 * k]


def _rows(operator: Any) -> Product:
    return lambda block: torch.stack([operator.matvec(row) for row in block])
