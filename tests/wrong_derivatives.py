"""Functions whose derivatives are wrong in a known way, for what has to notice."""

import torch
from torch import nn


class Uneven(torch.autograd.Function):
    """A product of neighbours whose backward holds one of them constant: not symmetric."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.roll(1, 1)

    @staticmethod
    def backward(ctx, seed):
        (x,) = ctx.saved_tensors
        return seed * x.roll(1, 1) + (seed * x.detach()).roll(-1, 1)


class Cube(torch.autograd.Function):
    """A cube whose backward holds a factor constant: symmetric, and wrong."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, seed):
        (x,) = ctx.saved_tensors
        return seed * 3 * (x * x.detach())


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, seed):  # noqa: ARG004
        return seed


class Doubled(torch.autograd.Function):
    """The identity with twice its gradient: consistent in itself, but not of the loss."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx, seed):  # noqa: ARG004
        return 2 * seed


class Using(nn.Module):
    def __init__(self, function, inputs=6):
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(inputs, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.function.apply(self.first(x)))
