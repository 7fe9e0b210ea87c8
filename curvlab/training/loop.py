"""The one training loop, for every learner, network and number of seeds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlab.learners import Learner, Population, Step
from curvlab.learners.seeds import derived_generator
from curvlab.signals import Stop, noted
from curvlab.tasks.samples import Samples, Task
from curvlab.training.augment import Augment
from curvlab.training.batches import seed_batches, steps_per_epoch
from curvlab.training.branch import check_branch
from curvlab.training.evaluate import Evaluation
from curvlab.training.progress import Progress
from curvlab.training.record import Checkpoint, Record, data_digest
from curvlab.training.run import Run
from curvlab.training.schedule import Schedule
from curvlab.training.step import require_still, take_step


@dataclass(slots=True)
class Loop:
    """The steps of all tasks, and what happens between tasks."""

    population: Population
    learner: Learner
    schedule: Schedule
    record: Record
    file: Checkpoint | None
    batch_size: int
    momentum: float
    weight_decay: float
    augment: Augment | None = None
    counted: float = field(default_factory=time.process_time)  # CPU time already in the timings

    def count(self) -> None:
        """Add the processor's time since the last call to the present task's timings."""
        now, timing = time.process_time(), self.record.timings[-1]
        timing["cpu_seconds"] = timing.get("cpu_seconds", 0.0) + now - self.counted
        self.counted = now

    def adopt(self, runs: Sequence[Run], config: dict[str, Any], task: Task) -> None:
        """Continue from ``runs`` of the first task instead of training it."""
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
        self.record.curve.begin_task()
        self.record.curve.tasks[0] = torch.stack([run.losses[0] for run in runs])
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
            self.record.curve.begin_task()
        self.population.seen = []
        bar.begin(index, task.name, steps, self.record.step)
        if self.file is None:
            self._epochs(index, task.train, epochs, per_epoch, bar, every, Stop())
            return
        with noted() as stop:
            self._epochs(index, task.train, epochs, per_epoch, bar, every, stop)

    def _epochs(
        self,
        index: int,
        samples: Samples,
        epochs: int,
        per_epoch: int,
        bar: Progress,
        every: int | None,
        stop: Stop,
    ) -> None:
        record, timing = self.record, self.record.timings[-1]
        steps = per_epoch * epochs
        begun = time.perf_counter()
        record.curve.resume(record.step % per_epoch)
        for epoch in range(record.step // per_epoch, epochs):
            start = record.step - epoch * per_epoch
            for inputs, targets in seed_batches(
                samples, self.population.seeds, self.batch_size,
                task=index, epoch=epoch, start=start,
            ):  # fmt: skip
                lr = self.schedule.lr_at(index, epoch, record.step / steps)
                step = Step(index, record.step, steps, epoch, epochs, lr)
                timing["transform_seconds"] += take_step(
                    self.population, self.learner, self._augmented(inputs, step), targets, step,
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
                    record.curve.add(self.population.losses())
                    if record.step % per_epoch == 0:
                        record.curve.end_epoch(per_epoch)
                    self.file.save(record, self.population, self.learner)
                    if stop.requested:
                        raise KeyboardInterrupt
            record.curve.add(self.population.losses())
            record.curve.end_epoch(per_epoch)
            self._check_finite(index, epoch)
            require_still(self.population, index)
        timing["train_seconds"] += time.perf_counter() - begun

    def _augmented(self, inputs: Tensor, step: Step) -> Tensor:
        if self.augment is None:
            return inputs
        changed = [
            self.augment(one, derived_generator(seed, "augment", step.task, step.step))
            for seed, one in zip(self.population.seeds, inputs, strict=True)
        ]
        if any(one.shape != inputs.shape[1:] for one in changed):
            raise ValueError(
                f"augment= must keep the shape {tuple(inputs.shape[1:])} of a batch; it gave "
                f"{tuple(changed[0].shape)}"
            )
        return torch.stack(changed)

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
            row = evaluation.measure(population, self.learner, tasks, o, index)
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


def summary(record: Record, index: int) -> str:
    """The progress line of a finished task."""
    rows = record.matrices["test_accuracy"][:, index]
    timing = record.timings[-1]
    return (
        f"test accuracy {float(rows[:, index].mean()):.3f}, over tasks so far "
        f"{float(rows[:, : index + 1].mean()):.3f}; {timing['steps']:.0f} steps in "
        f"{timing['train_seconds']:.1f} s"
    )
