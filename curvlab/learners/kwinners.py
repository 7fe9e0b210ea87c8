"""Sparse activations: k-winners with heterogeneous dropout, on top of another learner.

The activation itself is part of the model (:func:`curvlab.nets.kwinners.kwinners_mlp`). This
learner wraps the one that treats the gradients, GPM as published, lets the boost decay with every
epoch, and at the end of every task counts how often each unit won, so that the next task is steered
to other units. The boost goes on decaying over the tasks, as a network's in nupic.torch does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.checks import inside
from curvlab.learners.base import Learner
from curvlab.learners.population import Population
from curvlab.learners.step import Step
from curvlab.nets.kwinners import KWinners
from curvlab.tasks.samples import Samples, Task

CHUNK = 1000  # samples per forward pass when counting


class HeterogeneousDropout(Learner):
    """After each task, lower the probability of units that won often.

    Args:
        inner: What treats the gradients, e.g. ``GPM(...)``; ``SGD()`` for sparsity alone.
        alpha: A unit with the largest count takes part with probability exp(-alpha).
    """

    def __init__(self, inner: Learner, alpha: float = 1.0) -> None:
        inside("[0, inf)", alpha=alpha)
        self.inner, self.alpha = inner, alpha
        super().__init__()

    @property
    def notes(self) -> list[dict[str, Any]]:
        """The inner learner's, with the mean probability of each layer added."""
        return self.inner.notes

    @notes.setter
    def notes(self, value: list[dict[str, Any]]) -> None:
        self.inner.notes = value

    def expect(self, population: Population, tasks: Sequence[Task]) -> None:
        self.inner.expect(population, tasks)

    def loss(self, population: Population, s: int, logits: Tensor) -> Tensor:
        return self.inner.loss(population, s, logits)

    def if_diverged(self, population: Population, lr: float) -> str:
        return self.inner.if_diverged(population, lr)

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        if task == 0 and not _activations(population.models[0]):
            raise ValueError(
                "HeterogeneousDropout needs a model with KWinners activations "
                "(curvlab.nets.kwinners.kwinners_mlp)"
            )
        self.inner.before_task(population, task, samples)

    def transform_(self, population: Population) -> None:
        self.inner.transform_(population)

    def after_step(self, population: Population, step: Step) -> None:
        self.inner.after_step(population, step)
        if step.ends_epoch:
            for model in population.models:
                for layer in _activations(model):
                    layer.calm()

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        self.inner.after_task(population, task, samples)
        kept: list[list[float]] = []
        for s in range(population.size):
            counts = winning_counts(population, s, task, samples.inputs)
            layers = _activations(population.models[s])
            for layer, wins in zip(layers, counts, strict=True):
                layer.discourage(wins, self.alpha)
            kept.append([float(layer.keep.mean()) for layer in layers])
        self.notes[-1]["keep"] = kept

    def weights_for(self, population: Population, task: int) -> Tensor:
        return self.inner.weights_for(population, task)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "alpha": self.alpha, "inner": self.inner.config()}

    def state(self) -> dict[str, Tensor]:
        return self.inner.state()  # duty, counts and probabilities are the models' buffers

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        self.inner.load_state(population, tensors)


@torch.no_grad()
def winning_counts(population: Population, s: int, task: int, inputs: Tensor) -> list[Tensor]:
    """How often each unit (or channel) of each k-winners layer wins on ``inputs``, in run ``s``."""
    population.train_mode(False)
    layers = _activations(population.models[s])
    counts = [torch.zeros_like(layer.count) for layer in layers]

    def record(number: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
            del module, arguments
            counts[number] += (output > 0).transpose(0, 1).flatten(1).sum(1)

        return hook

    handles = [layer.register_forward_hook(record(i)) for i, layer in enumerate(layers)]
    try:
        for start in range(0, len(inputs), CHUNK):
            chunk = inputs[start : start + CHUNK]
            population.logits_of(s, chunk, task, population.parameters[s])
    finally:
        for handle in handles:
            handle.remove()
    return counts


def _activations(model: nn.Module) -> list[KWinners]:
    return [module for module in model.modules() if isinstance(module, KWinners)]
