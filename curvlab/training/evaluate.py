"""Loss and accuracy of all runs on one task's samples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.learners.population import Population
from curvlab.tasks.samples import Samples, Task

# Rows of inputs per forward pass. Fixed, so that layers whose outputs depend on who shares a batch
# (untracked BatchNorm) see the same batches every time.
ROWS = 1000


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is measured after every task.

    Args:
        train: Training samples per task that are looked at, the first so many; ``None`` takes all
            of them and 0 none (the training matrices are then NaN).
        future: Whether tasks not yet learned are evaluated too; else their entries are NaN.
    """

    train: int | None = None
    future: bool = False

    def measure(
        self, population: Population, parameters: Tensor, task: Task, index: int
    ) -> dict[str, Tensor]:
        """Entries ``(S,)`` of the run matrices for one task, by their names."""
        few = len(task.train) if self.train is None else self.train
        parts = {"train": task.train[:few]} if few else {}
        entries: dict[str, Tensor] = {}
        for part, samples in {**parts, "test": task.test}.items():
            loss, accuracy = evaluate(population, parameters, samples, index)
            entries |= {f"{part}_loss": loss.cpu(), f"{part}_accuracy": accuracy.cpu()}
        return entries


@torch.no_grad()
def evaluate(
    population: Population, parameters: Tensor, samples: Samples, task: int
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and accuracy of each run, float64 ``(S,)`` each, summed in float64.

    Args:
        population: In any mode; it is put in eval mode.
        parameters: Shape ``(S, P)``: the weights with which to predict.
        samples: Of the task.
        task: Its index.
    """
    loss = torch.zeros(population.size, dtype=torch.float64, device=population.device)
    right = torch.zeros_like(loss)
    for start in range(0, len(samples), ROWS):
        inputs = samples.inputs[start : start + ROWS]
        targets = samples.targets[start : start + ROWS]
        logits = population.logits(inputs, task, parameters)
        picked = targets.expand(population.size, -1)
        chosen = logits.gather(2, picked.unsqueeze(2)).squeeze(2).double()
        loss += (logits.double().logsumexp(2) - chosen).sum(1)
        right += (logits.argmax(2) == picked).sum(1)
    return loss / len(samples), right / len(samples)
