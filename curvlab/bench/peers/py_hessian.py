"""PyHessian: one batch's graph is kept; its solver is power iteration until a value settles."""

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyhessian import hessian as PyHessian
from torch import Tensor, nn

from curvlab.bench.problem import Answer, Data, Product

NAME = DISTRIBUTION = "PyHessian"
BLOCKS = False  # one vector at a time


def hessian(model: nn.Module, loss: nn.Module, batches: Data) -> Product:
    computer = _computer(model, loss, batches)
    multiply = importlib.import_module("pyhessian.hessian").hessian_vector_product
    shapes = [parameter.shape for parameter in computer.params]
    sizes = [shape.numel() for shape in shapes]

    def product(block: Tensor) -> Tensor:
        rows = []
        for vector in block:
            pieces = torch.split(vector, sizes)
            along = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
            if len(batches) == 1:  # whose graph it keeps
                rows.append(_flat(multiply(computer.gradsH, computer.params, along)))
            else:
                with _quiet():
                    rows.append(_flat(computer.dataloader_hv_product(along)[1]))
        return torch.stack(rows)

    return product


def efforts(k: int) -> list[float]:
    """Iterations for each of the k values: its default."""
    del k
    return [100]


def eigenpairs(
    model: nn.Module, loss: nn.Module, batches: Data, k: int
) -> Callable[[float], Answer]:
    """Its ``eigenvalues`` at its tolerance of 1e-3; products are counted from outside."""
    computer = _computer(model, loss, batches)
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
            with _quiet():
                values, vectors = computer.eigenvalues(maxIter=int(iterations), top_n=k)
        finally:
            module.hessian_vector_product = original
        rows = torch.stack([_flat(vector) for vector in vectors])
        return torch.tensor(values, dtype=torch.float64), rows, count

    return solve


def _computer(model: nn.Module, loss: nn.Module, batches: Data) -> Any:
    # it leaves gradients with a graph in the model: give it one of its own
    with _quiet():
        given = {"data": batches[0]} if len(batches) == 1 else {"dataloader": batches}
        return PyHessian(copy.deepcopy(model), loss, cuda=False, **given)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning of the graph that PyHessian's gradients keep."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _flat(pieces: Any) -> Tensor:
    return torch.cat([piece.detach().reshape(-1) for piece in pieces])
