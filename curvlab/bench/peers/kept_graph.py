"""Plain autograd, without a tool: double backward through a graph that is made once and kept."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from curvlab.bench.problem import Data, Product
from curvlab.parameters import layout_of, select_parameters

NAME, DISTRIBUTION = "kept graph", "torch"
BLOCKS = False  # one vector at a time


def hessian(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batches: Data) -> Product:
    layout = layout_of(select_parameters(model))
    leaves = list(model.parameters())
    samples = sum(len(inputs) for inputs, _ in batches)
    firsts = []
    for inputs, targets in batches:
        value = loss(model(inputs), targets) * (len(inputs) / samples)
        firsts.append(torch.autograd.grad(value, leaves, create_graph=True))

    def one(vector: Tensor) -> Tensor:
        along = layout.unflatten(vector)
        return sum(  # type: ignore[return-value]
            layout.flatten(torch.autograd.grad(first, leaves, along, retain_graph=True))
            for first in firsts
        )

    return lambda block: torch.stack([one(vector) for vector in block])
