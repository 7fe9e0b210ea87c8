"""The position in training, and the batch of a step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """The position in training; all counts start at 0 with every task."""

    task: int
    step: int
    steps: int
    epoch: int
    epochs: int
    lr: float

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of its epoch."""
        return (self.step + 1) % (self.steps // self.epochs) == 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What all runs learn from in one step.

    Attributes:
        inputs: Shape ``(S, B, ...)``, each run its own, augmented if there is an augmentation.
        targets: Shape ``(S, B)``.
        step: The position.
    """

    inputs: Tensor
    targets: Tensor
    step: Step
