"""EWC: a quadratic penalty around each task's solution, weighted by the diagonal Fisher.

The regularisation side of the paper's link: keep the change small where curvature is large, by a
penalty instead of a projection. As the strength grows, the penalised solution tends to the
projected one. The penalty of task o is ``strength/2 sum_i F_o,i (w_i - w_o,i)^2``; a sum of
quadratics is a quadratic, so the memory is two vectors however many tasks there are.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from curvlab.checks import inside, whole
from curvlab.learners.base import Learner
from curvlab.learners.population import Population
from curvlab.learners.sample_gradients import mlp_factors, sample_gradients
from curvlab.learners.seeds import derived_generator, drawn
from curvlab.learners.stacked import StackedMLP
from curvlab.operators.products.mlp_plan import Layer
from curvlab.parameters import Selection
from curvlab.tasks.samples import Samples, Task

Labels = Literal["model", "sampled", "true"]


class EWC(Learner):
    """Elastic weight consolidation.

    Args:
        strength: Weight of the penalty. A step is stable while ``lr * strength * max F < 2``.
        samples: Training samples, drawn per seed, for the Fisher of a task.
        labels: ``"model"`` is the Fisher itself, the expectation over the model's own
            predictions; ``"sampled"`` draws one label per sample from them, which is the same on
            average; ``"true"`` uses the data's labels (the "empirical Fisher").
        gamma: The factor by which earlier tasks' importances are multiplied after every task: 1
            keeps the penalties of all tasks, less forgets the oldest (online EWC), 0 keeps one.
        select: Parameters that are penalised, as in operators (``"body.*"``); the others are free.
    """

    serves_later_tasks = True
    settings = ("strength", "samples", "labels", "gamma")

    def __init__(
        self,
        strength: float = 100.0,
        *,
        samples: int = 1000,
        labels: Labels = "model",
        gamma: float = 1.0,
        select: Selection = None,
    ) -> None:
        super().__init__()
        inside("[0, inf)", strength=strength)
        inside("[0, 1]", gamma=gamma)
        whole(samples=samples)
        if labels not in ("model", "sampled", "true"):
            raise ValueError(f"labels= must be 'model', 'sampled' or 'true'; got {labels!r}")
        self.strength, self.samples = strength, samples
        self.labels, self.gamma, self.select = labels, gamma, select
        self._importance: Tensor | None = None  # sum of F_o, (S, P)
        self._pull: Tensor | None = None  # sum of F_o w_o, (S, P)

    def expect(self, population: Population, tasks: Sequence[Task]) -> None:
        super().expect(population, tasks)
        if population.loss is not cross_entropy:
            raise ValueError(
                "EWC's Fisher is that of a distribution over classes: it needs loss=cross_entropy"
            )

    def transform_(self, population: Population) -> None:
        if self._importance is not None and self._pull is not None:
            gradients = population.gradients
            gradients.addcmul_(self._importance, population.parameters, value=self.strength)
            gradients.sub_(self._pull, alpha=self.strength)

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        fishers = []
        for s, seed in enumerate(population.seeds):
            chosen = drawn(samples, self.samples, seed, "fisher", task)
            generator = derived_generator(seed, "labels", task)
            fishers.append(diagonal_fisher(population, s, chosen, task, self.labels, generator))
        fisher = torch.stack(fishers)
        for where in population.left_out(self.select):
            fisher[:, where] = 0.0
        # F/2 (w - w_o)^2 = F/2 w^2 - (F w_o) w + const: two sums over tasks are all it takes
        pull = fisher * population.parameters
        if self._importance is not None and self._pull is not None:
            fisher, pull = self.gamma * self._importance + fisher, self.gamma * self._pull + pull
        self._importance, self._pull = fisher, pull
        size = self._importance.element_size()
        self.notes.append(
            {
                "memory_bytes": 2 * population.n * size,
                "largest_importance": self._importance.amax(1).tolist(),
            }
        )

    def if_diverged(self, population: Population, lr: float) -> str:
        if self._importance is None:
            return super().if_diverged(population, lr)
        bound = lr * self.strength * float(self._importance.max())
        if bound < 2.0:
            return super().if_diverged(population, lr)
        return (
            f"a step of EWC's penalty is stable while lr * strength * max F < 2, and here that is "
            f"{bound:.3g}: lower strength={self.strength:g} or the learning rate"
        )

    def state(self) -> dict[str, Tensor]:
        if self._importance is None or self._pull is None:
            return {}
        return {"importance": self._importance, "pull": self._pull}

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        if tensors:
            self._importance = tensors["importance"].to(population.device)
            self._pull = tensors["pull"].to(population.device)


@torch.no_grad()
def diagonal_fisher(
    population: Population,
    s: int,
    samples: Samples,
    task: int,
    labels: Labels = "model",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Mean over samples of the squared gradients of the log-likelihood, ``(P,)``.

    Args:
        population: Run ``s`` of it, at its present parameters, in eval mode.
        s: Which run.
        samples: The samples to average over.
        task: The index of their task.
        labels: As in :class:`EWC`.
        generator: A generator on the CPU, for ``"sampled"``.
    """
    population.train_mode(False)
    logits = population.logits_of(s, samples.inputs, task, population.parameters[s])
    probabilities = logits.softmax(1)
    classes = logits.shape[1]
    every = torch.eye(classes, dtype=logits.dtype, device=logits.device)
    if labels != "model":
        chosen = samples.targets
        if labels == "sampled":
            picked = torch.multinomial(probabilities.double().cpu(), 1, generator=generator)
            chosen = picked.squeeze(1).to(logits.device)
        signals = one_hot(chosen, classes).to(logits.dtype).unsqueeze(1)
        weights = torch.ones_like(probabilities[:, :1])
    else:
        signals = every.expand(len(samples), -1, -1)
        weights = probabilities
    signals = signals - probabilities.unsqueeze(1)  # d log p_c / d logits = e_c - p
    # float64: squares of small gradients vanish in a float32 sum beside those of large ones
    total = torch.zeros(population.n, dtype=torch.float64, device=population.device)
    if isinstance(population, StackedMLP):
        _add_mlp_squares_(
            total, population.layers, population.parameters[s], samples.inputs, signals, weights
        )
    else:
        for k in range(signals.shape[1]):
            start = 0
            for rows in sample_gradients(population, s, samples.inputs, signals[:, k], task):
                weight = weights[start : start + len(rows), k].double()
                total += weight @ rows.double().square_()
                start += len(rows)
    return (total / len(samples)).to(population.dtype)


def _add_mlp_squares_(
    total: Tensor,
    layers: Sequence[Layer],
    parameters: Tensor,
    inputs: Tensor,
    signals: Tensor,
    weights: Tensor,
) -> None:
    """The square of an outer product is the outer product of squares: no rows are built."""
    factors = mlp_factors(layers, parameters, inputs, signals)
    for layer, came_in, came_back in zip(layers, factors.inputs, factors.signals, strict=True):
        squares = (came_back.double().square() * weights.double().unsqueeze(2)).sum(1)
        layer.weight_of(total).add_(squares.T @ came_in.double().square())
        bias = layer.bias_of(total)
        if bias is not None:
            bias.add_(squares.sum(0))
