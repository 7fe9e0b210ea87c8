"""Results of all runs so far, and their checkpoint file."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.learners import Learner, Population
from curvlab.manifest import COUNT, Shape, require_facts, require_tensors
from curvlab.storage import StorageError, below, load_tensors, save_tensors, tensor_bytes
from curvlab.tasks.samples import Task
from curvlab.training.curve import Curve
from curvlab.training.run import MATRICES, Run


@dataclass(slots=True)
class Record:
    """Results of S runs over T tasks; ``task`` and ``step`` say how far training is."""

    names: tuple[str, ...]
    initial: Tensor
    matrices: dict[str, Tensor]
    curve: Curve
    snapshots: list[Tensor] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)
    task: int = 0
    step: int = 0

    @classmethod
    def start(cls, population: Population, tasks: Sequence[Task]) -> "Record":
        shape = (population.size, len(tasks), len(tasks))
        return cls(
            names=tuple(task.name for task in tasks),
            initial=population.parameters.cpu().clone(),
            matrices={
                name: torch.full(shape, float("nan"), dtype=torch.float64) for name in MATRICES
            },
            curve=Curve(population.size),
        )

    def runs(self, population: Population, learner: Learner, config: dict[str, Any]) -> list[Run]:
        """One :class:`Run` per seed."""
        kept = torch.stack(self.snapshots, 1) if self.snapshots else self.initial[:, None][:, :0]
        notes = [{**own, **time} for own, time in zip(learner.notes, self.timings, strict=True)]
        return [
            Run(
                seed=seed,
                tasks=self.names,
                initial=self.initial[s],
                snapshots=kept[s],
                buffers={
                    name: torch.stack([after[name][s] for after in self.buffers])
                    for name in (self.buffers[0] if self.buffers else {})
                },
                notes=[_of_seed(note, s, population.size) for note in notes],
                losses=[of_task[s] for of_task in self.curve.tasks],
                config={**config, "seed": seed},
                **{name: matrix[s] for name, matrix in self.matrices.items()},
            )
            for s, seed in enumerate(population.seeds)
        ]


_FORM = {
    "config": dict,
    "task": COUNT,
    "step": COUNT,
    "notes": [dict],
    "timings": [dict],
}


@dataclass(slots=True)
class Checkpoint:
    """One file that holds everything needed to go on bit for bit.

    Args:
        path: The path of the file.
        config: Settings; a file written with others is refused.
        answers: Logits of the networks before training, which identify them by what they compute.
    """

    path: Path
    config: dict[str, Any]
    answers: dict[str, Tensor]

    def save(self, record: Record, population: Population, learner: Learner) -> None:
        """Replace the file by the present state."""
        tensors = {f"population/{k}": v for k, v in population.state().items()}
        tensors |= {f"learner/{k}": v for k, v in learner.state().items()}
        tensors |= {f"matrices/{k}": v for k, v in record.matrices.items()}
        tensors |= {f"curve/{k}": v for k, v in record.curve.state().items()}
        tensors |= {"initial": record.initial, **self.answers}
        for t, snapshot in enumerate(record.snapshots):
            tensors[f"snapshots/{t}"] = snapshot
        for t, buffers in enumerate(record.buffers):
            tensors |= {f"buffers/{t}/{name}": value for name, value in buffers.items()}
        manifest = {
            "config": self.config,
            "task": record.task,
            "step": record.step,
            "notes": learner.notes,
            "timings": record.timings,
        }
        save_tensors(self.path, "training", tensors, manifest)

    def restore(self, record: Record, population: Population, learner: Learner) -> None:
        """Load the file's state, if there is a file, into all three."""
        if not self.path.exists():
            return
        tensors, manifest = load_tensors(self.path, "training")
        require_facts(self.path, manifest, _FORM)
        task = manifest["task"]
        done, begun = len(manifest["notes"]), len(manifest["timings"])
        if task > len(record.names) or done != task or begun not in (task, task + 1):
            raise StorageError(f"{self.path} is damaged: its figures contradict each other")
        # the round trip gives both sides JSON's types
        wanted = json.loads(json.dumps(self.config))
        config = {**manifest["config"]}
        config.setdefault("model", wanted["model"])  # a file from before it was kept
        others = _differences(config, wanted)
        before = ((tensors.get(name, one), one) for name, one in self.answers.items())
        if not others and not all(_alike(*both) for both in before):
            others.append(
                "networks with these parameters answered otherwise (a forward, an activation, a "
                "frozen parameter or a buffer is another)"
            )
        if others:
            raise StorageError(
                f"{self.path} belongs to another run: {'; '.join(others)}. Delete it to start "
                "again, or use another file"
            )
        count = sum(name.startswith("snapshots/") for name in tensors)
        kept = [f"snapshots/{t}" for t in range(count)]
        shape: Shape = (record.initial.dtype, *record.initial.shape)
        matrices: dict[str, Shape] = {
            f"matrices/{name}": (torch.float64, *matrix.shape)
            for name, matrix in record.matrices.items()
            # a file from before the other two were measured has four
            if f"matrices/{name}" in tensors or not name.startswith(("task_", "class_"))
        }
        require_tensors(self.path, tensors, matrices, finite=False)  # NaN: not measured yet
        require_tensors(self.path, tensors, dict.fromkeys(["initial", *kept], shape))
        record.task, record.step = task, manifest["step"]
        record.timings = manifest["timings"]
        record.initial = tensors["initial"]
        record.matrices |= below(tensors, "matrices/")
        record.snapshots = [tensors[name] for name in kept]
        done = len([timing for timing in record.timings if "evaluate_seconds" in timing])
        buffers = [below(tensors, f"buffers/{t}/") for t in range(done)]
        record.buffers = [after for after in buffers if after]
        learner.notes = manifest["notes"]
        try:  # only the learner can tell whether what it kept fits
            curve = below(tensors, "curve/")
            if curve:
                record.curve.load_state(curve)
            else:  # a file from before it was kept
                record.curve.unknown(len(record.timings))
            population.load_state(below(tensors, "population/"), record.task)
            learner.load_state(population, below(tensors, "learner/"))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise StorageError(
                f"{self.path} is damaged: it does not hold the state of {type(learner).__name__} "
                f"({type(error).__name__}: {error}). Delete it to start again"
            ) from error


def data_digest(tasks: Sequence[Task]) -> str:
    """A short hash over every sample of the stream."""
    total = hashlib.sha256()
    for task in tasks:
        for samples in (task.train, task.test):
            for tensor in (samples.inputs, samples.targets):
                total.update(tensor_bytes(tensor))
    return total.hexdigest()[:16]


def _of_seed(note: dict[str, Any], s: int, size: int) -> dict[str, Any]:
    """A list in a note has one entry per run."""
    return {
        key: value[s] if isinstance(value, list) and len(value) == size else value
        for key, value in note.items()
    }


def _differences(found: dict[str, Any], wanted: dict[str, Any], within: str = "") -> list[str]:
    """What differs, setting by setting; of settings in settings only those."""
    told = []
    for key in sorted({*found, *wanted}):
        one, two = found.get(key), wanted.get(key)
        if one == two:
            continue
        if isinstance(one, dict) and isinstance(two, dict):
            told += _differences(one, two, f"{within}{key}: ")
        else:
            told.append(f"{within}{key} was {one!r}, is {two!r}")
    return told


def answers(population: Population, tasks: Sequence[Task]) -> dict[str, Tensor]:
    """Logits of the networks on a few samples of every task, ``(S, N, C)`` each."""
    return {
        f"answers/{t}": population.logits(task.train.inputs[:4], t).cpu()
        for t, task in enumerate(tasks)
    }


def _alike(one: Tensor, two: Tensor) -> bool:
    """Whether two answers agree up to rounding, which may be that of another machine."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    scale = float(two[two.isfinite()].abs().max()) if bool(two.isfinite().any()) else 1.0
    share = torch.finfo(two.dtype).eps ** 0.5
    return torch.allclose(one, two, rtol=share, atol=share * scale, equal_nan=True)
