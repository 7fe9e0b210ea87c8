"""hessian-eigenthings: one vector per product, the graph rebuilt each time."""

from collections.abc import Callable
from typing import Any

import torch
from hessian_eigenthings import (
    GGNOperator,
    HessianOperator,
    supervised_forward,
    supervised_loss,
    supervised_loss_of_output,
)
from torch import Tensor, nn

DISTRIBUTION = "hessian-eigenthings"
BLOCKS = False  # one vector at a time

Product = Callable[[Tensor], Tensor]


def hessian(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> Product:
    return _rows(HessianOperator(model, [(inputs, targets)], supervised_loss(loss)))


def gauss_newton(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> Product:
    data = [(inputs, targets)]
    return _rows(GGNOperator(model, data, supervised_forward, supervised_loss_of_output(loss)))


def _rows(operator: Any) -> Product:
    return lambda block: torch.stack([operator.matvec(row) for row in block])
