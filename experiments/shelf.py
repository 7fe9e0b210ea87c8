"""Trained runs, computed once and shared by every table and figure that needs them.

A :class:`Training` says all that decides a run but the seed. The shelf trains what is missing (all
missing seeds side by side), keeps one file per seed under ``runs/`` and hands out what is there.
Training stops and resumes at its checkpoint; two processes that want the same runs train them once.

Learners whose first task is plain SGD branch from one run of that task (on Split CIFAR-10 it is
200,000 of 240,000 samples), and those that differ in k alone share the eigenpairs of its Hessian.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab.eigen import Eigenpairs, lanczos
from curvlab.learners.seeds import derived_generator, derived_seed
from curvlab.learners.statistics import BatchNormPolicy
from curvlab.operators import Hessian
from curvlab.parameters import load_parameter_vector
from curvlab.storage import StorageError
from curvlab.tasks import Samples, Task, limit, subset
from curvlab.training import Evaluation, Run, Schedule, learn
from experiments.choices import LEARNER_VERSIONS, NETWORKS, PLAIN, STREAMS, Algorithm
from experiments.store import Store, key_of, make_result

LABEL = "run"  # of the result lines that say how a run went and how long it took


@dataclass(frozen=True)
class Training:
    """Everything but the seed that decides a run. Names are those of :mod:`experiments.choices`."""

    stream: str
    network: str
    learner: Algorithm = PLAIN
    rates: str = "0.01"  # of the first and the later tasks, in the paper's notation: "{0.01, 1e-5}"
    epochs: str = "5"  # "{30/60/70, 10}": the rate decays after 30 and 60, the task ends at 70
    tasks: int | None = None  # how many of the stream, from the first on; None is all
    train: int | None = None  # samples per task; None is all
    test: int | None = None
    samples: int = 1000  # for Hessians and memories
    batch_size: int = 10
    batchnorm: BatchNormPolicy | None = None  # needed where the network has running statistics
    embedded: bool = False  # the package's own data in place of files
    autocast: str | None = None  # "bfloat16": dtype of the matrix products of training

    def schedule(self) -> Schedule:
        return Schedule.parse(self.rates, self.epochs)

    @property
    def key(self) -> str:
        return key_of("training", self, 0, self.version)

    @property
    def version(self) -> str:
        """Of the code that trains it."""
        network = NETWORKS[self.network].version
        learner = LEARNER_VERSIONS.get(self.learner.name)
        return network if learner is None else f"{network}, {learner}"

    def first_task(self) -> "Training":
        """SGD on the first task alone; learners that train it as SGD does branch from it."""
        return replace(self, learner=PLAIN, tasks=1, samples=0)


@dataclass(frozen=True)
class Shelf:
    """Runs below a results folder.

    Args:
        store: The results folder.
        data: Folder of the data files; ``None`` takes ``CURVLAB_DATA``.
        command: Kept with each run: what to type to make it again.
        progress: Whether training says where it is; ``None`` does so on a terminal only.
        device: Where networks are trained and their Hessians taken; runs are kept on the CPU.
    """

    store: Store
    data: Path | None = None
    command: str = ""
    progress: bool | None = None
    device: str = "cpu"

    def runs(self, training: Training, seeds: Sequence[int]) -> list[Run]:
        """The run of each seed, trained now if it is not there."""
        if not seeds:
            return []  # without waiting for a process that trains others
        with ExitStack() as held:
            for seed in sorted(set(seeds)):  # in one order, so that no two processes wait in a ring
                held.enter_context(self.store.locked(f"training-{training.key}-{seed}"))
            missing = [seed for seed in seeds if not self.file(training, seed).exists()]
            if missing:
                self._train(training, missing)
        return [self._load(training, seed) for seed in seeds]

    def file(self, training: Training, seed: int) -> Path:
        return self.store.folder / "runs" / f"{training.key}-{seed}.safetensors"

    def tasks(self, training: Training) -> list[Task]:
        """The stream as this training sees it."""
        return stream_of(
            training.stream, training.embedded, self.data, training.tasks, training.train,
            training.test,
        )  # fmt: skip

    def model(self, training: Training, seed: int) -> nn.Module:
        """The network before training."""
        stream = self.tasks(training)
        classes = max(task.classes for task in stream)
        return NETWORKS[training.network].build(seed, classes, len(stream)).to(self.device)

    def model_after(self, training: Training, run: Run, task: int) -> nn.Module:
        """The network as ``run`` left it after task ``task`` (from 0), in eval mode."""
        model = self.model(training, run.seed)
        load_parameter_vector(model, run.snapshots[task])
        buffers = dict(model.named_buffers())
        for name, values in run.buffers.items():
            buffers[name].copy_(values[task])
        return model.eval()

    def _load(self, training: Training, seed: int) -> Run:
        try:
            return Run.load(self.file(training, seed))
        except StorageError as error:
            raise StorageError(f"{error}. Delete the file, and the run is trained again") from error

    def hessian_samples(
        self, training: Training, seed: int, task: int, drawn_for: str = "hessian"
    ) -> Samples:
        """The random training samples of a task on which its Hessian is taken.

        They are those that SGD-dagger takes for the same seed and task, or with ``"ogd"`` those
        whose gradients OGD stores.
        """
        train = self.tasks(training)[task].train
        generator = derived_generator(seed, drawn_for, task)
        return subset(train, min(training.samples, len(train)), seed=generator).to(self.device)

    def hessian(
        self, training: Training, run: Run, task: int, drawn_for: str = "hessian"
    ) -> Hessian:
        """H_o at theta_o."""
        chosen = self.hessian_samples(training, run.seed, task, drawn_for)
        model = self.model_after(training, run, task)
        return Hessian(model, cross_entropy, (chosen.inputs, chosen.targets))

    def _first_pairs(self, training: Training, seed: int) -> Eigenpairs:
        """Leading eigenpairs after the first task, solved once for every k up to ``first_k``."""
        k, first = training.learner.first_k or 0, training.first_task()
        measured = replace(first, samples=training.samples)  # whose Hessian it is
        name = f"{measured.key}-{seed}-{k}.eigenpairs"
        path = self.store.folder / "runs" / f"{name}.safetensors"
        [run] = self.runs(first, [seed])
        with self.store.locked(name):
            if not path.exists():
                hessian = self.hessian(measured, run, 0)
                solved = derived_seed(seed, "lanczos", 0)
                # of the ViT it takes an hour of one core
                state = path.with_name(f"{name}.checkpoint")
                pairs = lanczos(
                    hessian, k, tol=1e-3, seed=solved, checkpoint=state, progress=self.progress
                )
                pairs.save(path)
                state.unlink(missing_ok=True)  # a short solve leaves none
        return Eigenpairs.load(path, self.device)

    def _train(self, training: Training, seeds: list[int]) -> None:
        began = time.process_time()
        # named after the seeds too: they are trained as one program and stop as one
        group = hashlib.sha256(json.dumps([training.key, seeds]).encode()).hexdigest()[:16]
        checkpoint = self.store.folder / "runs" / f"{group}.checkpoint"
        network = NETWORKS[training.network]
        pairs = None
        if training.learner.first_k is not None:
            pairs = [self._first_pairs(training, seed) for seed in seeds]
        learner = training.learner.build(training.samples, pairs)
        branches = learner.serves_later_tasks and len(self.tasks(training)) > 1
        runs = learn(
            lambda seed: self.model(training, seed),
            self.tasks(training),
            learner,
            training.schedule(),
            seeds=seeds,
            first=self.runs(training.first_task(), seeds) if branches else None,
            after_last=not branches,
            batch_size=training.batch_size,
            batchnorm=training.batchnorm,
            autocast=None if training.autocast is None else getattr(torch, training.autocast),
            evaluation=Evaluation(train=0),
            checkpoint=checkpoint,
            checkpoint_every=network.save_every,
            progress=self.progress,
        )
        spent = time.process_time() - began
        # the lines first: a run whose file is there is never trained again, nor its line written.
        # Whoever was killed between the two has left them.
        known = {result.key for result in self.store.results()}
        lines = [
            make_result(LABEL, "", run.seed, training, _summary(run), spent / len(runs),
                        training.version, self.command)
            for run in runs
        ]  # fmt: skip
        self.store.append([line for line in lines if line.key not in known])
        for run in runs:
            run.save(self.file(training, run.seed))
        checkpoint.unlink()


def _summary(run: Run) -> dict[str, Any]:
    """Test accuracies, what the learner keeps, and the seconds of all seeds together."""
    kept = ("directions", "ranks", "k", "converged", "residual", "complete", "memory_bytes",
            "products", "train_seconds", "transform_seconds", "after_task_seconds",
            "evaluate_seconds", "cpu_seconds", "steps")  # fmt: skip
    return {
        "test_accuracy": [
            [round(a, 4) for a in row[: t + 1]] for t, row in enumerate(run.test_accuracy.tolist())
        ],
        "notes": [
            {name: _short(note[name]) for name in kept if name in note} for note in run.notes
        ],
    }


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value, 1) if value > 10.0 else float(f"{value:.2g}")


@lru_cache(maxsize=8)
def stream_of(
    name: str, embedded: bool, data: Path | None, tasks: int | None, train: int | None,
    test: int | None,
) -> list[Task]:  # fmt: skip
    """A stream, kept for the next label that asks: reading and rotating take seconds."""
    if (tasks, train, test) != (None, None, None):
        whole = stream_of(name, embedded, data, None, None, None)[:tasks]
        return limit(whole, train=train, test=test)
    return STREAMS[name](embedded, data)
