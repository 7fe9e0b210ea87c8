"""One step of all runs: the gradient, what the learner makes of it, the update."""

import time
from functools import partial

import torch
from torch import Tensor

from curvlab.learners import Batch, Learner, Population, Step

CHECKED = 100  # steps between checks that a task does not move parameters it does not use


def take_step(
    population: Population,
    learner: Learner,
    inputs: Tensor,
    targets: Tensor,
    step: Step,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> float:
    """One step of all runs: what ``learn`` repeats. Returns the seconds in ``learner.step_``.

    Args:
        population: Changed in place; its ``velocity`` must be there if ``momentum`` is not 0.
        learner: After its ``before_task``.
        inputs: Shape ``(S, B, ...)``.
        targets: Shape ``(S, B)``.
        step: Where this is.
        momentum: As in :func:`learn`.
        weight_decay: As in :func:`learn`.
    """
    population.batch = Batch(inputs, targets, step)
    # a learner without a loss of its own leaves the way to the gradient to the population
    own = type(learner).loss is not Learner.loss
    objective = partial(learner.loss, population) if own else None
    population.gradient_(inputs, targets, step.task, step.step, objective)
    unused = population.uses.unused(step.task)
    if not own and step.step % CHECKED == 0:
        _watch(population, unused)
    if weight_decay and unused:  # as in PyTorch: without a gradient, no decay
        slices = population.layout.slices()
        for where in (slices[name] for name in population.uses.of(step.task)):
            population.gradients[:, where].add_(population.parameters[:, where], alpha=weight_decay)
        weight_decay = 0.0
    begun = time.perf_counter()
    learner.step_(population, step.lr, weight_decay, momentum)
    seconds = time.perf_counter() - begun
    learner.after_step(population, step)
    return seconds


def _watch(population: Population, unused: dict[str, slice]) -> None:
    """Record on the device, without a host wait, whether parameters the task does not use move."""
    if unused:
        found = torch.stack([population.gradients[:, w].abs().amax() for w in unused.values()])
        before = population.strayed
        population.strayed = found if before is None else torch.maximum(before, found)


def require_still(population: Population, task: int) -> None:
    """Raise if a step of ``task`` moved parameters that were found unused by it."""
    strayed, population.strayed = population.strayed, None
    if strayed is None:
        return
    for name, largest in zip(population.uses.unused(task), strayed.tolist(), strict=True):
        if largest > 0.0:
            raise RuntimeError(
                f"task {task} moves parameter {name!r}, though a few of its samples had no "
                "gradient there, so that learners took it for another task's: let a task use the "
                "same parts of the network for every sample"
            )
