"""``learn``: the one training loop, for every learner, network and number of seeds."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvlab.learners import Learner, Population, Step
from curvlab.learners.rooms import rooms
from curvlab.learners.stacked import population_of
from curvlab.learners.statistics import BatchNormPolicy
from curvlab.tasks.samples import Samples, Task
from curvlab.training.batches import seed_batches, steps_per_epoch
from curvlab.training.branch import check_branch
from curvlab.training.checks import advice_on_memory, check
from curvlab.training.evaluate import Evaluation
from curvlab.training.interrupt import StopRequest, deferred_interrupt
from curvlab.training.progress import Progress
from curvlab.training.record import Checkpoint, Record, data_digest, tensor_bytes
from curvlab.training.run import Run
from curvlab.training.schedule import Schedule
from curvlab.training.step import take_step

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
        seeds: Of the runs; leave out for a population, which has its own.
        batch_size: The last batch of an epoch may be shorter.
        momentum: Of the heavy ball, whose buffer starts at zero with every task.
        weight_decay: L2, added to the gradient before the learner transforms it.
        batchnorm: Policy for running statistics; required for models that have any.
        autocast: ``torch.bfloat16`` computes the gradients of training under ``torch.autocast``;
            parameters, updates, evaluation and the learner's own work keep the models' dtype.
        evaluation: What is measured after every task.
        snapshots: Keep the parameters after every task in the :class:`Run`.
        first: Runs of SGD on the first task alone, one per seed, from the same models, data and
            settings. Training goes on from them, to the same bits as from the start; only for
            learners whose first task is plain SGD (``learner.serves_later_tasks``).
        after_last: ``False`` leaves out ``learner.after_task`` of the last task, such as a Hessian
            that no later task needs; only for the same learners.
        checkpoint: A file, replaced after every task and at Ctrl-C. If it exists, training goes on
            from it; it must come from the same settings, models and data.
        checkpoint_every: Steps of a task after which the file is replaced too.
        progress: One line per task on stderr; ``None`` shows it on a terminal only.

    Returns:
        One :class:`Run` per seed, in their order.
    """
    population = _population(models, seeds, batchnorm, autocast)
    evaluation = Evaluation() if evaluation is None else evaluation
    check(population, tasks, learner, batch_size, momentum, weight_decay, checkpoint_every)
    if (first is not None or not after_last) and not learner.serves_later_tasks:
        raise ValueError(
            f"first= and after_last=False are for learners that train the first task as SGD does "
            f"and consolidate for later tasks only; {type(learner).__name__} does not"
        )
    tasks = [task.to(population.device, population.dtype) for task in tasks]
    config: dict[str, Any] = {
        **learner.config(),
        "schedule": asdict(schedule),
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
    if autocast is not None:  # absent otherwise: runs made before there was a choice stay valid
        config["autocast"] = str(autocast)
    population.velocity = None
    if momentum > 0.0:
        population.velocity = rooms(population.size, population.n, like=population.parameters)
    record = Record.start(population, tasks)
    file = None
    if checkpoint is not None:
        initial = hashlib.sha256(tensor_bytes(population.parameters)).hexdigest()[:16]
        identity = {"seeds": list(population.seeds), "data": data_digest(tasks), "initial": initial}
        file = Checkpoint(Path(checkpoint), config | identity)
        file.restore(record, population, learner)
    loop = _Loop(population, learner, schedule, record, file, batch_size, momentum, weight_decay)
    bar = Progress(len(tasks), progress)
    if first is not None and (record.task, record.step) == (0, 0):
        loop.adopt(first, config, tasks[0])
    for index in range(record.task, len(tasks)):
        final = index == len(tasks) - 1 and not after_last
        with advice_on_memory(population, learner, batch_size):
            loop.train(index, tasks[index], bar, checkpoint_every)
            loop.consolidate(index, tasks, evaluation, snapshots, remember=not final)
        bar.end(_summary(record, index))
    return record.runs(population, learner, config | {"data": data_digest(tasks)})


@dataclass(slots=True)
class _Loop:
    population: Population
    learner: Learner
    schedule: Schedule
    record: Record
    file: Checkpoint | None
    batch_size: int
    momentum: float
    weight_decay: float
    counted: float = field(default_factory=time.process_time)  # up to where timings reach

    def count(self) -> None:
        """Add the processor's time since the last call to the present task's timings."""
        now, timing = time.process_time(), self.record.timings[-1]
        timing["cpu_seconds"] = timing.get("cpu_seconds", 0.0) + now - self.counted
        self.counted = now

    def adopt(self, runs: Sequence[Run], config: dict[str, Any], task: Task) -> None:
        """Take over the first task from ``runs`` in place of training it."""
        population = self.population
        check_branch(runs, population, config | {"data": data_digest([task])})
        population.begin_task(0)
        population.train_mode(False)
        self.learner.before_task(population, 0, task.train)
        population.adopt(
            torch.stack([run.snapshots[0] for run in runs]),
            {name: torch.stack([run.buffers[name][0] for run in runs]) for name in runs[0].buffers},
        )
        # no seconds: they are the first task's own run's
        self.record.timings.append({"train_seconds": 0.0, "transform_seconds": 0.0})
        per_epoch = steps_per_epoch(task.train, self.batch_size)
        self.record.step = per_epoch * self.schedule.epochs_of(0)

    def train(self, index: int, task: Task, bar: Progress, every: int | None) -> None:
        """All steps of a task that are still to do."""
        per_epoch = steps_per_epoch(task.train, self.batch_size)
        epochs = self.schedule.epochs_of(index)
        steps = per_epoch * epochs
        if self.record.step == 0:
            self.population.begin_task(index)
            self.population.train_mode(False)
            self.learner.before_task(self.population, index, task.train)
            self.record.timings.append({"train_seconds": 0.0, "transform_seconds": 0.0})
        bar.begin(index, task.name, steps, self.record.step)
        if self.file is None:
            self._epochs(index, task.train, epochs, per_epoch, bar, every, StopRequest())
            return
        with deferred_interrupt() as stop:
            self._epochs(index, task.train, epochs, per_epoch, bar, every, stop)

    def _epochs(
        self,
        index: int,
        samples: Samples,
        epochs: int,
        per_epoch: int,
        bar: Progress,
        every: int | None,
        stop: StopRequest,
    ) -> None:
        record, timing = self.record, self.record.timings[-1]
        steps = per_epoch * epochs
        begun = time.perf_counter()
        for epoch in range(record.step // per_epoch, epochs):
            lr = self.schedule.lr_at(index, epoch)
            start = record.step - epoch * per_epoch
            for inputs, targets in seed_batches(
                samples, self.population.seeds, self.batch_size,
                task=index, epoch=epoch, start=start,
            ):  # fmt: skip
                step = Step(index, record.step, steps, epoch, epochs, lr)
                timing["transform_seconds"] += take_step(
                    self.population, self.learner, inputs, targets, step,
                    momentum=self.momentum, weight_decay=self.weight_decay,
                )  # fmt: skip
                record.step += 1
                bar.step(record.step)
                due = every is not None and record.step % every == 0
                if self.file is not None and (due or stop.requested or record.step == steps):
                    now = time.perf_counter()
                    timing["train_seconds"] += now - begun
                    begun = now
                    self.count()
                    self.file.save(record, self.population, self.learner)
                    if stop.requested:
                        raise KeyboardInterrupt
            self._check_finite(index, epoch)
        timing["train_seconds"] += time.perf_counter() - begun

    def _check_finite(self, index: int, epoch: int) -> None:
        finite = self.population.parameters.isfinite().all(1).tolist()
        lost = [seed for seed, fine in zip(self.population.seeds, finite, strict=True) if not fine]
        if lost:
            raise FloatingPointError(
                f"training of seed {', '.join(map(str, lost))} diverged (parameters are not "
                f"finite) in task {index}, epoch {epoch}: "
                f"{self.learner.if_diverged(self.population, self.schedule.lr_at(index, epoch))}"
            )

    def consolidate(
        self,
        index: int,
        tasks: Sequence[Task],
        evaluation: Evaluation,
        snapshots: bool,
        *,
        remember: bool,
    ) -> None:
        """After the last step: the learner's own work, evaluation, the record, the checkpoint."""
        population, record, timing = self.population, self.record, self.record.timings[-1]
        population.end_task(index)
        begun = time.perf_counter()
        if remember:
            self.learner.after_task(population, index, tasks[index].train)
        else:
            self.learner.notes.append({})
        if len(self.learner.notes) != index + 1:
            raise TypeError(
                f"{type(self.learner).__name__}.after_task must append one dictionary to notes"
            )
        trained = time.perf_counter()
        for o in range(len(tasks) if evaluation.future else index + 1):
            weights = self.learner.weights_for(population, o)
            row = evaluation.measure(population, weights, tasks[o], o)
            for name, values in row.items():
                record.matrices[name][:, index, o] = values
        timing["after_task_seconds"] = trained - begun
        timing["evaluate_seconds"] = time.perf_counter() - trained
        timing["steps"] = record.step
        self.count()
        if snapshots:
            record.snapshots.append(population.parameters.cpu().clone())
            buffers = {name: value.cpu() for name, value in population.buffers().items()}
            if buffers:
                record.buffers.append(buffers)
        record.task, record.step = index + 1, 0
        if self.file is not None:
            self.file.save(record, population, self.learner)


def _population(
    models: Models,
    seeds: int | Sequence[int] | None,
    batchnorm: BatchNormPolicy | None,
    autocast: torch.dtype | None,
) -> Population:
    if autocast not in (None, torch.bfloat16):
        raise ValueError(
            f"autocast= is None or torch.bfloat16; got {autocast} (float16 needs a loss scale, "
            f"which learn has not; for float64 convert the models)"
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


def _summary(record: Record, index: int) -> str:
    rows = record.matrices["test_accuracy"][:, index]
    timing = record.timings[-1]
    return (
        f"test accuracy {float(rows[:, index].mean()):.3f}, over tasks so far "
        f"{float(rows[:, : index + 1].mean()):.3f}; {timing['steps']:.0f} steps in "
        f"{timing['train_seconds']:.1f} s"
    )
