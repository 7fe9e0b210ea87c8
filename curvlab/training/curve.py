"""The loss while training: each epoch is cut into at most POINTS stretches, each with its mean."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

POINTS = 100  # most stretches of an epoch


@dataclass(slots=True)
class Curve:
    """Losses of S runs.

    Attributes:
        runs: S.
        tasks: For each task begun, ``(S, epochs so far, points)`` float64.
        part: The losses of the steps of the present epoch, ``(S, m)`` float64.
    """

    runs: int
    tasks: list[Tensor] = field(default_factory=list)
    part: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.part = self._nothing()

    def _nothing(self) -> Tensor:
        return torch.zeros(self.runs, 0, dtype=torch.float64)

    def begin_task(self) -> None:
        """Start the curve of a task, with no epoch yet."""
        self.tasks.append(torch.zeros(self.runs, 0, 0, dtype=torch.float64))
        self.part = self._nothing()

    def unknown(self, tasks: int) -> None:
        """Add tasks whose losses are not known."""
        for _ in range(tasks):
            self.begin_task()

    def resume(self, steps: int) -> None:
        """Continue after ``steps`` of the epoch; those whose losses are not known are NaN."""
        missing = torch.full((self.runs, steps - self.part.shape[1]), float("nan")).double()
        self.part = torch.cat([missing, self.part], 1)

    def add(self, losses: Tensor) -> None:
        """Losses ``(S, m)`` of the next steps of the epoch."""
        self.part = torch.cat([self.part, losses], 1)

    def end_epoch(self, steps: int) -> None:
        """Add the means of an epoch of ``steps``; does nothing if they were added before."""
        if not self.part.shape[1]:
            return
        points = min(steps, POINTS)
        stretches = [self.part[:, i * steps // points : (i + 1) * steps // points].mean(1)
                     for i in range(points)]  # fmt: skip
        row = torch.stack(stretches, 1).unsqueeze(1)
        self.tasks[-1] = torch.cat([self.tasks[-1], row], 1) if self.tasks[-1].numel() else row
        self.part = self._nothing()

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {str(t): one for t, one in enumerate(self.tasks)} | {"part": self.part}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take back what :meth:`state` gave."""
        tasks, part = [tensors[str(t)] for t in range(len(tensors) - 1)], tensors["part"]
        for one, dims in (*((task, 3) for task in tasks), (part, 2)):
            if one.dtype != torch.float64 or one.dim() != dims or len(one) != self.runs:
                raise ValueError(f"losses are {one.dtype} {tuple(one.shape)}")
        self.tasks, self.part = tasks, part
