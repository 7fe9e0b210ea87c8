"""PyHessian: one batch's graph is kept; its solver is power iteration until a value settles."""

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from pyhessian import hessian as PyHessian
from torch import Tensor, nn

DISTRIBUTION = "PyHessian"
BLOCKS = False  # one vector at a time
NETWORKS = None  # any

Product = Callable[[Tensor], Tensor]
Answer = tuple[Tensor, Tensor, int]


def hessian(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> Product:
    computer = _computer(model, loss, inputs, targets)
    multiply = importlib.import_module("pyhessian.hessian").hessian_vector_product
    shapes = [parameter.shape for parameter in computer.params]
    sizes = [shape.numel() for shape in shapes]

    def product(block: Tensor) -> Tensor:
        rows = []
        for vector in block:
            pieces = torch.split(vector, sizes)
            along = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
            rows.append(_flat(multiply(computer.gradsH, computer.params, along)))
        return torch.stack(rows)

    return product


def eigenpairs(
    model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor, k: int
) -> tuple[Callable[[float], Answer], list[float]]:
    """Its ``eigenvalues`` at the default 100 iterations and tolerance 1e-3, and what it counted."""
    computer = _computer(model, loss, inputs, targets)
    module: Any = importlib.import_module("pyhessian.hessian")

    def solve(iterations: float) -> Answer:
        count = 0
        original = module.hessian_vector_product

        def counting(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            return original(*arguments)

        module.hessian_vector_product = counting
        try:
            values, vectors = computer.eigenvalues(maxIter=int(iterations), top_n=k)
        finally:
            module.hessian_vector_product = original
        rows = torch.stack([_flat(vector) for vector in vectors])
        return torch.tensor(values, dtype=torch.float64), rows, count

    return solve, [100]


def _computer(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    # it leaves gradients with a graph in the model, of which torch warns: give it one of its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PyHessian(copy.deepcopy(model), loss, data=(inputs, targets), cuda=False)


def _flat(pieces: Any) -> Tensor:
    return torch.cat([piece.detach().reshape(-1) for piece in pieces])
