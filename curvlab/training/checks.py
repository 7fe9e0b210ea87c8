"""Checks before training, and advice on what to reduce if memory runs out during it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from curvlab.checks import inside, whole
from curvlab.learners import Learner, Population
from curvlab.tasks.samples import Task


def check(
    population: Population,
    tasks: Sequence[Task],
    learner: Learner,
    batch_size: int,
    momentum: float,
    weight_decay: float,
    every: int | None,
) -> None:
    """Refuse arguments of :func:`~curvlab.training.learn` that make no sense."""
    if not tasks:
        raise ValueError("learn needs at least one task")
    if learner.notes:
        raise ValueError(
            f"this {type(learner).__name__} already holds the memory of "
            f"{len(learner.notes)} tasks: make a new one for new runs"
        )
    whole(batch_size=batch_size, checkpoint_every=1 if every is None else every)
    inside("[0, 1)", momentum=momentum)
    inside("[0, inf)", weight_decay=weight_decay)
    for task in tasks:
        for part, samples in (("train", task.train), ("test", task.test)):
            flawed = (~samples.inputs.isfinite()).flatten(1).any(1).nonzero().flatten()
            if len(flawed):
                raise ValueError(
                    f"{len(flawed)} {part} samples of task {task.name!r} hold NaN or infinity, the "
                    f"first is number {int(flawed[0])}: clean the data"
                )
    population.meet(tasks)
    learner.expect(population, tasks)
    several = not population.uses.all_alike
    if several and any(task.labels is not None for task in tasks):
        raise ValueError(
            "the network has several heads, and the tasks' targets count over all tasks: make the "
            'stream with targets="task", or the network with one head for all classes'
        )
    for index, task in enumerate(tasks):
        if index and not several:
            break
        # two: BatchNorm without running statistics has none of a single sample
        outputs = population.logits(task.train.inputs[:2], index).shape[-1]
        classes = task.classes if several else max(task.classes for task in tasks)
        if outputs < classes:
            raise ValueError(
                f"the tasks have {classes} classes, but the model only {outputs} outputs"
            )


@contextmanager
def advice_on_memory(population: Population, learner: Learner, batch_size: int) -> Iterator[None]:
    """Add to an out-of-memory error what can be reduced."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # on a CPU, PyTorch has no class of its own for it
        wanting = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if wanting or "can't allocate memory" in str(error):
            error.add_note(
                f"while training {population.size} seeds of {population.n} parameters with "
                f"{type(learner).__name__}: train fewer seeds side by side, lower "
                f"batch_size={batch_size}, or have the learner keep less (its settings: "
                f"{learner.config()})"
            )
        raise
