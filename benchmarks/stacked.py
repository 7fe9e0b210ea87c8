"""What one writes by hand to train several seeds of an MLP at once: weights in a stack, baddbmm.

Forward, backward and the step are batched matrix products over the seeds, into buffers that are
kept; the projection off each seed's directions is a batched product too. It is the rival of
curvlab's stacked learners, and right to rounding before it is timed.
"""

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from benchmarks.measure import relative_error
from curvlab.tasks import Task
from curvlab.training.batches import seed_batches


class Stack:
    """S plain ReLU MLPs; ``flat`` ``(S, P)`` holds every parameter, layer by layer."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        shapes = [parameter.shape for parameter in models[0].parameters()]
        self.flat = torch.stack(
            [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in models]
        )
        self.gradient = torch.empty_like(self.flat)
        self.weights, self.biases = self._views(self.flat, shapes)
        self.into, self.into_biases = self._views(self.gradient, shapes)

    @staticmethod
    def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> tuple[list[Tensor], list[Tensor]]:
        pieces = torch.split(flat, [shape.numel() for shape in shapes], dim=1)
        views = [p.view(len(flat), *shape) for p, shape in zip(pieces, shapes, strict=True)]
        return views[::2], [bias[:, None] for bias in views[1::2]]

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of every seed's mean cross entropy: inputs ``(S, B, d)``, targets ``(S, B)``."""
        signals = [inputs]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            signals.append(torch.baddbmm(bias, signals[-1], weight.mT).relu_())
        delta = torch.baddbmm(self.biases[-1], signals[-1], self.weights[-1].mT).softmax(-1)
        delta.scatter_add_(2, targets[..., None], -torch.ones_like(delta[..., :1]))
        delta /= inputs.shape[1]
        for layer in reversed(range(len(self.weights))):
            torch.bmm(delta.mT, signals[layer], out=self.into[layer])
            torch.sum(delta, 1, keepdim=True, out=self.into_biases[layer])
            if layer:
                delta = torch.bmm(delta, self.weights[layer]).mul_(signals[layer] > 0)
        return self.gradient


def stacked(
    models: Sequence[nn.Module], task: Task, seeds: Sequence[int], directions: int, batch: int
) -> tuple[Callable[[int], None], float]:
    """A function of a number of steps, and what is wrong with its first gradient.

    Args:
        directions: Orthonormal rows of every seed that steps leave out; 0 is plain SGD.
    """
    stack = Stack(models)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(models), stack.flat.shape[1], max(directions, 1), generator=generator)
    rows = torch.linalg.qr(drawn).Q.mT.contiguous()[:, :directions]

    def step(inputs: Tensor, targets: Tensor) -> None:
        gradient = stack.gradients(inputs, targets)[..., None]
        if directions:
            torch.baddbmm(gradient, rows.mT, rows @ gradient, alpha=-1, out=gradient)
        stack.flat.add_(gradient[..., 0], alpha=-1e-4)

    def steps(count: int) -> None:
        batches = seed_batches(task.train, seeds, batch, task=1, epoch=0)
        for inputs, targets in islice(batches, count):
            step(inputs, targets)

    inputs, targets = next(seed_batches(task.train, seeds, batch, task=1, epoch=0))
    found, errors = stack.gradients(inputs, targets), [0.0]
    for s, model in enumerate(models):
        value = nn.functional.cross_entropy(model(inputs[s]), targets[s])
        exact = torch.autograd.grad(value, list(model.parameters()))
        errors.append(relative_error(found[s], torch.cat([one.reshape(-1) for one in exact])))
    step(inputs, targets)
    if directions:
        left = (rows @ stack.gradient[..., None]).norm() / stack.gradient.norm()
        errors.append(float(left))
    return steps, max(errors)
