"""Results of training: matrices, snapshots, notes; one :class:`Run` per seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.manifest import COUNT, Shape, require_facts, require_tensors
from curvlab.storage import below, load_tensors, save_tensors

MATRICES = (
    "train_loss",
    "train_accuracy",
    "test_loss",
    "test_accuracy",
    "task_accuracy",
    "class_accuracy",
)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One seed's run through a stream of T tasks.

    Entry ``[t, o]`` of a matrix is on task ``o`` after learning task ``t``, float64; NaN where it
    was not evaluated (future tasks, by default).

    Attributes:
        seed: The seed of data order, initialisation and subsets.
        tasks: Their names.
        train_loss: ``(T, T)``, mean cross-entropy on training samples.
        train_accuracy: ``(T, T)``.
        test_loss: ``(T, T)``.
        test_accuracy: ``(T, T)``.
        task_accuracy: ``(T, T)``, among the classes of the sample's own task (task-incremental).
            NaN where tasks share their classes on one head, as does the next one.
        class_accuracy: ``(T, T)``, among the classes of all tasks learned so far, without being
            told the task (class-incremental): with several heads, each answers for its own classes.
        initial: ``(P,)``, parameters before the first task.
        snapshots: ``(T, P)``, parameters after each task (as the learner left them); ``(0, P)``
            if they were not kept.
        buffers: Buffers of the model after each task, ``(T, ...)`` by name; empty without any.
        losses: For each task the loss while training, ``(epochs, points)``: means over at most
            100 stretches of an epoch.
        notes: One dictionary per task: the learner's own (directions kept, bytes), and the loop's
            ``steps``, ``train_seconds``, ``transform_seconds`` (in ``learner.step_``; on a
            GPU the time to launch it), ``after_task_seconds``, ``evaluate_seconds`` and, over all
            of these, ``cpu_seconds`` of the processor; each is of all seeds together.
        config: Every setting of the run, the policy for BatchNorm included.
    """

    seed: int
    tasks: tuple[str, ...]
    train_loss: Tensor
    train_accuracy: Tensor
    test_loss: Tensor
    test_accuracy: Tensor
    task_accuracy: Tensor
    class_accuracy: Tensor
    initial: Tensor
    snapshots: Tensor
    buffers: dict[str, Tensor]
    losses: list[Tensor]
    notes: list[dict[str, Any]]
    config: dict[str, Any]

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> Path:
        """Write the run to one file (safetensors, JSON manifest); ``about`` adds facts to it."""
        tensors = {name: getattr(self, name) for name in (*MATRICES, "initial", "snapshots")}
        tensors |= {f"buffers/{name}": value for name, value in self.buffers.items()}
        tensors |= {f"losses/{t}": value for t, value in enumerate(self.losses)}
        manifest = {
            "seed": self.seed,
            "tasks": list(self.tasks),
            "notes": self.notes,
            "config": self.config,
            "about": dict(about or {}),
        }
        return save_tensors(path, "run", tensors, manifest)

    @classmethod
    def load(cls, path: str | Path) -> "Run":
        """Read a file written by :meth:`save`."""
        tensors, manifest = load_tensors(path, "run")
        form = {"seed": COUNT, "tasks": [str], "notes": [dict], "config": dict}
        tasks = len(require_facts(path, manifest, form)["tasks"])
        shapes: dict[str, Shape] = {"test_accuracy": (torch.float64, tasks, tasks)}
        shapes |= {name: shapes["test_accuracy"] for name in MATRICES if name in tensors}
        require_tensors(path, tensors, shapes, finite=False)  # NaN: not measured
        require_tensors(path, tensors, {"initial": (None, "P"), "snapshots": (None, "kept", "P")})
        # a run kept before these were measured has none of them
        unknown = torch.full_like(tensors["test_accuracy"], float("nan"))
        fields = {name: tensors.get(name, unknown) for name in MATRICES}
        fields |= {name: tensors[name] for name in ("initial", "snapshots")}
        nothing = torch.zeros(0, 0, dtype=torch.float64)
        losses = [tensors.get(f"losses/{t}", nothing) for t in range(tasks)]
        return cls(
            seed=manifest["seed"],
            tasks=tuple(manifest["tasks"]),
            buffers=below(tensors, "buffers/"),
            losses=losses,
            notes=manifest["notes"],
            config=manifest["config"],
            **fields,
        )
