"""Loss and accuracy of all runs on one task's samples, with and without knowing the task."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from curvlab.learners.base import Learner
from curvlab.learners.population import Population
from curvlab.tasks.samples import Samples, Task

# Rows of inputs per forward pass. Fixed, so that layers whose outputs depend on who shares a batch
# (untracked BatchNorm) see the same batches every time.
ROWS = 1000


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is measured after every task.

    Args:
        train: How many training samples per task to evaluate, from the first on; ``None`` is all,
            0 none (the training matrices are then NaN).
        future: Whether tasks not yet learned are evaluated too; else their entries are NaN.
    """

    train: int | None = None
    future: bool = False

    def measure(
        self,
        population: Population,
        learner: Learner,
        tasks: Sequence[Task],
        index: int,
        learned: int,
    ) -> dict[str, Tensor]:
        """Entries ``(S,)`` of the run matrices for task ``index`` after task ``learned``."""
        task, parameters = tasks[index], learner.weights_for(population, index)
        few = len(task.train) if self.train is None else self.train
        parts = {"train": task.train[:few]} if few else {}
        entries: dict[str, Tensor] = {}
        for part, samples in {**parts, "test": task.test}.items():
            loss, accuracy = evaluate(population, parameters, samples, index)
            entries |= {f"{part}_loss": loss.cpu(), f"{part}_accuracy": accuracy.cpu()}
        if index <= learned and (task.labels is not None or not population.uses.all_alike):
            seen = [(o, learner.weights_for(population, o)) for o in range(learned + 1)]
            told, untold = both_kinds(population, seen, tasks, index)
            entries |= {"task_accuracy": told.cpu(), "class_accuracy": untold.cpu()}
        return entries


@torch.no_grad()
def both_kinds(
    population: Population,
    seen: Sequence[tuple[int, Tensor]],
    tasks: Sequence[Task],
    index: int,
) -> tuple[Tensor, Tensor]:
    """Accuracies on a task's test samples with and without knowing the task; float64 ``(S,)``.

    Without the task, every learned task predicts its own classes, with its own parameters, head and
    statistics, and the largest logit of all wins.

    Args:
        population: In any mode; it is put in eval mode.
        seen: Tasks learned and the parameters ``(S, P)`` to predict each with.
        tasks: The stream.
        index: The task whose samples are predicted, one of those seen.
    """
    samples = tasks[index].test
    right = torch.zeros(2, population.size, dtype=torch.float64, device=population.device)
    own = [list(task.labels or range(task.classes)) for task in tasks]
    before = sum(len(own[o]) for o, _ in seen if o < index)
    # where each class of the task stands among its own
    place = torch.full((tasks[index].classes,), -1, device=population.device)
    place[own[index]] = torch.arange(len(own[index]), device=population.device)
    for start in range(0, len(samples), ROWS):
        inputs = samples.inputs[start : start + ROWS]
        wanted = place[samples.targets[start : start + ROWS]]
        every = {o: logits[:, :, own[o]] for o, logits in _answers(population, seen, inputs)}
        right[0] += (every[index].argmax(2) == wanted).sum(1)
        right[1] += (torch.cat(list(every.values()), 2).argmax(2) == before + wanted).sum(1)
    told, untold = right / len(samples)
    return told, untold


def _answers(
    population: Population, seen: Sequence[tuple[int, Tensor]], inputs: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """What each task that was learned predicts, ``(S, N, C)``; once if they predict alike."""
    alike = not population.by_task
    logits, last = torch.empty(0), None
    for o, parameters in seen:
        if last is None or not alike or parameters is not last:
            logits, last = population.logits(inputs, o, parameters), parameters
        yield o, logits


@torch.no_grad()
def evaluate(
    population: Population, parameters: Tensor, samples: Samples, task: int
) -> tuple[Tensor, Tensor]:
    """Mean loss and accuracy of each run, float64 ``(S,)`` each, summed in float64.

    Args:
        population: In any mode; it is put in eval mode.
        parameters: Shape ``(S, P)``: the weights with which to predict.
        samples: The samples of the task.
        task: Its index.
    """
    loss = torch.zeros(population.size, dtype=torch.float64, device=population.device)
    right = torch.zeros_like(loss)
    for start in range(0, len(samples), ROWS):
        inputs = samples.inputs[start : start + ROWS]
        targets = samples.targets[start : start + ROWS]
        logits = population.logits(inputs, task, parameters)
        picked = targets.expand(population.size, -1)
        if population.loss is cross_entropy:
            # by hand in float64: losses near 0 are a difference of nearly equal numbers
            chosen = logits.gather(2, picked.unsqueeze(2)).squeeze(2).double()
            loss += (logits.double().logsumexp(2) - chosen).sum(1)
        else:
            means = [population.loss(one, targets) for one in logits]
            loss += torch.stack(means).double() * len(targets)
        right += (logits.argmax(2) == picked).sum(1)
    return loss / len(samples), right / len(samples)
