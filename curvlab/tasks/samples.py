"""Samples, tasks, and how they are cut: subsets, smaller streams, the joint task.

Everything is a slice of resident tensors; no Python runs per sample. Random choices come from a
seed or a ``torch.Generator``, never from the global one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Seed = int | torch.Generator


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """``inputs`` ``(N, ...)`` float32 (or float64) and ``targets`` ``(N,)`` int64, N > 0."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("inputs", self.inputs), ("targets", self.targets)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"Samples.{name} must be a tensor; got {type(tensor).__name__}")
        if self.inputs.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"Samples.inputs must be float32 or float64; got {self.inputs.dtype} "
                "(for images of bytes: images.float() / 255)"
            )
        if self.targets.dtype != torch.int64:
            raise TypeError(
                f"Samples.targets must be int64 class numbers; got {self.targets.dtype} "
                "(use targets.long())"
            )
        if self.inputs.dim() < 2 or self.targets.dim() != 1:
            raise ValueError(
                "Samples needs inputs (N, ...) and targets (N,); got "
                f"{tuple(self.inputs.shape)} and {tuple(self.targets.shape)}"
            )
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"Samples needs one target per input; got {len(self.inputs)} inputs and "
                f"{len(self.targets)} targets"
            )
        if len(self.inputs) == 0:
            raise ValueError("Samples is empty: inputs has no rows")
        if self.inputs.device != self.targets.device:
            raise ValueError(
                "Samples needs inputs and targets on one device; got "
                f"{self.inputs.device} and {self.targets.device}"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: Tensor | slice) -> "Samples":
        """The samples at an index tensor, a boolean mask or a slice (then views)."""
        return Samples(self.inputs[index], self.targets[index])

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Samples":
        """The samples on ``device``, with inputs of ``dtype``."""
        return Samples(self.inputs.to(device=device, dtype=dtype), self.targets.to(device=device))


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One task of a stream: targets of both parts are 0..classes-1.

    Attributes:
        name: Shown in tables and messages.
        train: What is learned.
        test: What is evaluated.
        classes: That a head needs for this task.
        labels: Which of the ``classes`` are this task's own, where one head has the classes of all
            tasks (``split_classes(..., targets="all")``); ``None`` where all are.
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    labels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            raise ValueError(
                f"task {self.name!r}: train and test inputs differ in shape: "
                f"{tuple(self.train.inputs.shape[1:])} and {tuple(self.test.inputs.shape[1:])}"
            )
        for part, samples in (("train", self.train), ("test", self.test)):
            low, high = int(samples.targets.min()), int(samples.targets.max())
            if low < 0 or high >= self.classes:
                raise ValueError(
                    f"task {self.name!r}: {part} targets run from {low} to {high}, but must lie in "
                    f"0..{self.classes - 1} (classes={self.classes}); remap them"
                )
            foreign = set() if self.labels is None else set(samples.targets.tolist())
            if not foreign <= set(self.labels or ()):
                raise ValueError(
                    f"task {self.name!r}: {part} targets {sorted(foreign)} are not all among its "
                    f"labels={self.labels}"
                )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Task":
        """The task on ``device``, with inputs of ``dtype``."""
        train, test = self.train.to(device, dtype), self.test.to(device, dtype)
        return replace(self, train=train, test=test)


def subset(samples: Samples, size: int, *, seed: Seed, balanced: bool = False) -> Samples:
    """``size`` samples without replacement, e.g. the 1,000 of a Hessian.

    Args:
        samples: What to choose from.
        size: At least 1 and at most ``len(samples)``.
        seed: An int or a generator.
        balanced: The same number of every class that occurs; where ``size`` is not a multiple,
            the lowest classes get one more.
    """
    if not 1 <= size <= len(samples):
        raise ValueError(f"size= must be between 1 and {len(samples)} (all samples); got {size}")
    generator = generator_of(seed)
    order = _permutation(len(samples), generator, samples.inputs.device)
    if not balanced:
        return samples[order[:size]]
    shuffled = samples.targets[order]
    found = torch.unique(shuffled).tolist()
    if size < len(found):
        raise ValueError(f"balanced=True needs size= of at least {len(found)} classes; got {size}")
    chosen = []
    for rank, label in enumerate(found):
        wanted = size // len(found) + (rank < size % len(found))
        members = order[shuffled == label]
        if len(members) < wanted:
            raise ValueError(
                f"balanced=True with size={size} needs {wanted} samples of class {label}, but "
                f"there are {len(members)}; choose a smaller size or balanced=False"
            )
        chosen.append(members[:wanted])
    # mixed again, so that reading in order does not go class by class
    mixed = torch.cat(chosen)
    return samples[mixed[_permutation(size, generator, mixed.device)]]


def limit(
    tasks: Sequence[Task],
    *,
    train: int | None = None,
    test: int | None = None,
    seed: Seed = 0,
    balanced: bool = True,
) -> list[Task]:
    """The same stream with at most ``train`` and ``test`` samples per task.

    Args:
        tasks: A stream.
        train: Training samples per task; ``None`` keeps all.
        test: Test samples per task; ``None`` keeps all.
        seed: The seed of the choice; every task draws its own.
        balanced: As in :func:`subset`.
    """
    generator = generator_of(seed)
    return [
        replace(
            task,
            train=task.train
            if train is None
            else subset(task.train, train, seed=generator, balanced=balanced),
            test=task.test
            if test is None
            else subset(task.test, test, seed=generator, balanced=balanced),
        )
        for task in tasks
    ]


def joined(tasks: Sequence[Task], name: str = "joint") -> Task:
    """All tasks as one on their shared head: what a multitask solution is trained on."""
    if not tasks:
        raise ValueError("joined needs at least one task")
    shapes = {tuple(task.train.inputs.shape[1:]) for task in tasks}
    if len(shapes) > 1:
        raise ValueError(f"joined needs tasks with inputs of one shape; got {sorted(shapes)}")
    return Task(
        name,
        _concatenated([task.train for task in tasks]),
        _concatenated([task.test for task in tasks]),
        max(task.classes for task in tasks),
    )


def _concatenated(parts: list[Samples]) -> Samples:
    return Samples(
        torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts])
    )


def _permutation(count: int, seed: Seed, device: torch.device) -> Tensor:
    generator = generator_of(seed)
    return torch.randperm(count, generator=generator, device=generator.device).to(device)


def generator_of(seed: Seed) -> torch.Generator:
    """``seed`` if it is a generator, else a CPU generator started at it."""
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
