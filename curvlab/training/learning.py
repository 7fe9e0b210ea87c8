"""``learn``: checks what is trained and with which settings; :mod:`.loop` does the training."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab.checks import shown
from curvlab.learners import Learner, Population
from curvlab.learners.described import described, structure
from curvlab.learners.population import Loss
from curvlab.learners.rooms import one_at_a_time, rooms
from curvlab.learners.stacked import population_of
from curvlab.learners.statistics import BatchNormPolicy
from curvlab.storage import tensor_bytes
from curvlab.tasks.samples import Task
from curvlab.training.augment import Augment
from curvlab.training.checks import advice_on_memory, check
from curvlab.training.evaluate import Evaluation
from curvlab.training.loop import Loop, summary
from curvlab.training.progress import Progress
from curvlab.training.record import Checkpoint, Record, answers, data_digest
from curvlab.training.run import Run
from curvlab.training.schedule import Schedule

Models = Population | nn.Module | Sequence[nn.Module] | Callable[[int], nn.Module]


def learn(
    models: Models,
    tasks: Sequence[Task],
    learner: Learner,
    schedule: Schedule,
    *,
    seeds: int | Sequence[int] | None = None,
    batch_size: int = 10,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    batchnorm: BatchNormPolicy | None = None,
    autocast: torch.dtype | None = None,
    loss: Loss = cross_entropy,
    augment: Augment | None = None,
    evaluation: Evaluation | None = None,
    snapshots: bool = True,
    first: Sequence[Run] | None = None,
    after_last: bool = True,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    progress: bool | None = None,
) -> list[Run]:
    """Train S runs on the tasks, one task after the other.

    The runs differ in their seed: its model, its order of samples, its random subsets. They are
    trained side by side and each gives what it would give alone: on a CPU, the same bits.

    Args:
        models: A function from a seed to a model, such as ``lambda seed: mlp(seed=seed)``; or the
            models themselves, one per seed; or a population. They are trained in place.
        tasks: The stream. Inputs are moved to the models' device and dtype.
        learner: A fresh one: it holds the memory of these runs.
        schedule: Rates and epochs.
        seeds: The seeds of the runs; leave out for a population, which has its own.
        batch_size: The last batch of an epoch may be shorter.
        momentum: The momentum of the heavy ball, whose buffer starts at zero with every task.
        weight_decay: L2, added to the gradient before the learner transforms it.
        batchnorm: Policy for running statistics; required for models that have any.
        autocast: ``torch.bfloat16`` computes the gradients of training under ``torch.autocast``;
            parameters, updates, evaluation and the learner's own work keep the models' dtype.
        loss: The loss of logits ``(B, C)`` and targets ``(B,)``, a mean over the batch.
        augment: Changes a run's inputs ``(B, ...)``, given a generator of their own, in every step
            (:class:`~curvlab.training.CropAndFlip`).
        evaluation: What is measured after every task.
        snapshots: Keep the parameters after every task in the :class:`Run`.
        first: Runs of SGD on the first task alone, one per seed, from the same models, data and
            settings. Training goes on from them, to the same bits as from the start; only for
            learners whose first task is plain SGD (``learner.serves_later_tasks``).
        after_last: ``False`` leaves out ``learner.after_task`` of the last task, such as a Hessian
            that no later task needs; only for the same learners.
        checkpoint: A file, replaced after every task and at Ctrl-C or SIGTERM. If it exists,
            training goes on from it; it must come from the same settings, models and data.
        checkpoint_every: How many steps of a task lie between two more replacements of the file.
        progress: One line per task on stderr; ``None`` shows it on a terminal only.

    Returns:
        One :class:`Run` per seed, in their order.
    """
    shown(progress)
    population = _population(models, seeds, batchnorm, autocast)
    evaluation = Evaluation() if evaluation is None else evaluation
    population.loss = loss
    tasks = [task.to(population.device, population.dtype) for task in tasks]
    check(population, tasks, learner, batch_size, momentum, weight_decay, checkpoint_every)
    if (first is not None or not after_last) and not learner.serves_later_tasks:
        raise ValueError(
            f"first= and after_last=False are for learners that train the first task as SGD does "
            f"and consolidate for later tasks only; {type(learner).__name__} does not"
        )
    config: dict[str, Any] = {
        **learner.config(),
        "schedule": schedule.config(),
        "batch_size": batch_size,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "batchnorm": population.statistics.policy,
        "evaluation": asdict(evaluation),
        "snapshots": snapshots,
        "parameters": population.n,
        "dtype": str(population.dtype),
        "tasks": [task.name for task in tasks],
    }
    # absent unless chosen: runs made before there was a choice stay valid
    if autocast is not None:
        config["autocast"] = str(autocast)
    if loss is not cross_entropy:
        config["loss"] = described(loss)
    if augment is not None:
        config["augment"] = described(augment)
    population.velocity = None
    if momentum > 0.0:
        population.velocity = rooms(population.size, population.n, like=population.parameters)
    record = Record.start(population, tasks)
    file = None
    if checkpoint is not None:
        initial = hashlib.sha256(tensor_bytes(population.parameters)).hexdigest()[:16]
        identity = {
            "seeds": list(population.seeds),
            "data": data_digest(tasks),
            "initial": initial,
            "model": structure(population.models[0]),
        }
        file = Checkpoint(Path(checkpoint), config | identity, answers(population, tasks))
        file.restore(record, population, learner)
    loop = Loop(
        population, learner, schedule, record, file, batch_size, momentum, weight_decay, augment
    )
    bar = Progress(len(tasks), progress)
    with one_at_a_time():
        if first is not None and (record.task, record.step) == (0, 0):
            loop.adopt(first, config, tasks[0])
        for index in range(record.task, len(tasks)):
            final = index == len(tasks) - 1 and not after_last
            with advice_on_memory(population, learner, batch_size):
                loop.train(index, tasks[index], bar, checkpoint_every)
                loop.consolidate(index, tasks, evaluation, snapshots, remember=not final)
            bar.end(summary(record, index))
    return record.runs(population, learner, config | {"data": data_digest(tasks)})


def _population(
    models: Models,
    seeds: int | Sequence[int] | None,
    batchnorm: BatchNormPolicy | None,
    autocast: torch.dtype | None,
) -> Population:
    if autocast not in (None, torch.bfloat16):
        raise ValueError(
            f"autocast= is None or torch.bfloat16; got {autocast} (float16 needs a loss scale, "
            f"which learn does not have; for float64 convert the models)"
        )
    if isinstance(models, Population):
        if seeds is not None or batchnorm is not None or autocast is not None:
            raise ValueError(
                "a population brings its seeds, its batchnorm policy and its autocast: leave them "
                "out"
            )
        return models
    if seeds is None:
        raise ValueError("learn needs seeds=, one per model, such as seeds=(11, 13, 21, 33, 55)")
    chosen = [seeds] if isinstance(seeds, int) else list(seeds)
    if isinstance(models, nn.Module):
        made: list[nn.Module] = [models]
    elif callable(models):
        made = [models(seed) for seed in chosen]
    else:
        made = list(models)
    return population_of(made, chosen, batchnorm=batchnorm, autocast=autocast)
