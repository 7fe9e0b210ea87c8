"""One step of all runs: the gradient, what the learner makes of it, the update."""

import time
from functools import partial

from torch import Tensor

from curvlab.learners import Batch, Learner, Population, Step


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
    """One step of all runs: what ``learn`` repeats. Returns the seconds in ``transform_``.

    Args:
        population: Changed in place; its ``velocity`` must be there if ``momentum`` is not 0.
        learner: After its ``before_task``.
        inputs: Shape ``(S, B, ...)``.
        targets: Shape ``(S, B)``.
        step: Where this is.
        momentum: As in :func:`learn`.
        weight_decay: As in :func:`learn`.
    """
    velocity = population.velocity
    population.batch = Batch(inputs, targets, step)
    # a learner without a loss of its own leaves the way to the gradient to the population
    own = type(learner).loss is not Learner.loss
    objective = partial(learner.loss, population) if own else None
    population.gradient_(inputs, targets, step.task, step.step, objective)
    if weight_decay:
        population.gradients.add_(population.parameters, alpha=weight_decay)
        for where in population.uses.unused(step.task):
            population.gradients[:, where] = 0.0  # as in PyTorch: without a gradient, no decay
    begun = time.perf_counter()
    learner.transform_(population)
    seconds = time.perf_counter() - begun
    if velocity is None:
        population.parameters.add_(population.gradients, alpha=-step.lr)
    else:
        velocity.mul_(momentum).add_(population.gradients)
        population.parameters.add_(velocity, alpha=-step.lr)
    learner.after_step(population, step)
    return seconds
