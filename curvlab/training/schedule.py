"""Learning rates and epochs in the paper's notation: {r1, r2:T}, {e1, e2:T}, "a/b"."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from curvlab.checks import inside, whole
from curvlab.learners.described import described


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rate and length for the first task, another for all later ones.

    Args:
        lr: Learning rate of the first task (r1).
        lr_later: Learning rate of the later tasks (r2:T); ``None`` keeps ``lr``.
        epochs: How many epochs the first task has (e1).
        epochs_later: How many each later task has (e2:T); ``None`` keeps ``epochs``.
        decay_at: Epochs of the first task after which the rate is multiplied by ``decay``.
        decay_at_later: The same in the later tasks; ``None`` keeps ``decay_at`` if the later tasks
            are not given a length of their own; otherwise they have no decay.
        decay: The factor. The paper does not state it.
        scale: Any other course: a function of the task and of the part of its steps that is done,
            in [0, 1), whose value multiplies the rate of every step. Half a cosine is
            ``lambda task, done: 0.5 * (1 + math.cos(math.pi * done))``.
    """

    lr: float
    lr_later: float | None = None
    epochs: int = 1
    epochs_later: int | None = None
    decay_at: tuple[int, ...] = ()
    decay_at_later: tuple[int, ...] | None = None
    decay: float = 0.1
    scale: Callable[[int, float], float] | None = None

    def __post_init__(self) -> None:
        later = self.lr if self.lr_later is None else self.lr_later
        inside("(0, inf)", lr=self.lr, lr_later=later, decay=self.decay)
        for task in (0, 1):
            epochs, points = self.epochs_of(task), self.decay_points_of(task)
            whole(epochs=epochs)
            if list(points) != sorted(set(points)) or any(not 0 < p < epochs for p in points):
                raise ValueError(
                    f"decay points must increase and lie inside the {epochs} epochs; got {points}"
                )

    @classmethod
    def parse(cls, rates: str, epochs: str) -> "Schedule":
        """From the notation of the paper's table: ``parse("{0.1, 0.001}", "{30/60/70, 10}")``.

        One number stands for all tasks; in ``a/b`` the rate decays after epoch ``a`` and the task
        ends at ``b``.
        """
        lr = [float(text) for text in _members(rates, "rates")]
        lengths = [[int(e) for e in text.split("/")] for text in _members(epochs, "epochs")]
        return cls(
            lr=lr[0],
            lr_later=lr[1] if len(lr) > 1 else None,
            epochs=lengths[0][-1],
            epochs_later=lengths[1][-1] if len(lengths) > 1 else None,
            decay_at=tuple(lengths[0][:-1]),
            decay_at_later=tuple(lengths[1][:-1]) if len(lengths) > 1 else None,
        )

    def epochs_of(self, task: int) -> int:
        """Epochs of task ``task`` (from 0)."""
        later = self.epochs if self.epochs_later is None else self.epochs_later
        return self.epochs if task == 0 else later

    def decay_points_of(self, task: int) -> tuple[int, ...]:
        """Epochs of task ``task`` after which the rate decays."""
        if task == 0:
            return self.decay_at
        if self.decay_at_later is not None:
            return self.decay_at_later
        return self.decay_at if self.epochs_later is None else ()

    def lr_at(self, task: int, epoch: int, done: float = 0.0) -> float:
        """The rate in epoch ``epoch`` of task ``task``, both from 0.

        Args:
            task: Its index.
            epoch: Its number in the task.
            done: Fraction of the task's steps already made, for ``scale``.
        """
        rate = self.lr if task == 0 or self.lr_later is None else self.lr_later
        passed = sum(epoch >= point for point in self.decay_points_of(task))
        rate = float(rate * self.decay**passed)
        if self.scale is None:
            return rate
        factor = float(self.scale(task, done))
        if not 0.0 <= factor < float("inf"):
            raise ValueError(
                f"Schedule(scale=) must give a factor of at least 0; for task {task} at {done:g} "
                f"of its steps it gave {factor}"
            )
        return rate * factor

    def config(self) -> dict[str, Any]:
        """JSON-able, to be kept and compared."""
        settings = asdict(replace(self, scale=None))
        del settings["scale"]
        return settings if self.scale is None else settings | {"scale": described(self.scale)}


def _members(text: str, name: str) -> list[str]:
    members = [member.strip() for member in text.strip().strip("{}").split(",")]
    if len(members) > 2 or not all(re.fullmatch(r"[\d.eE/+-]+", member) for member in members):
        raise ValueError(
            f"{name}= must read like '0.01', '{{0.1, 0.001}}' or '{{30/60/70, 10}}'; got {text!r}"
        )
    return members
