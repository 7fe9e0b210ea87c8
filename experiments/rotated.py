"""The Rotated-MNIST challenge at its three sizes, and what every label on it records.

At every size learning rate times steps per task is the paper's: 0.01 x 30,000 = 300 at the high
rate and 1e-5 x 90,000 = 0.9 at the low one. With fewer steps at the same rate every learner would
forget nothing, having learned nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvlab.metrics import (
    accuracy_forgetting,
    average_forgetting,
    current_accuracy,
)
from curvlab.training import Run
from experiments.choices import Algorithm
from experiments.experiment import rounded
from experiments.paper import HIGH, LOW
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics

RATES = (LOW, HIGH)


@dataclass(frozen=True)
class Only:
    """A learner that is trained for a few seeds only at a rate where it takes long."""

    learner: str
    rate: str
    seeds: tuple[int, ...]


Few = tuple[Only, ...] | None  # what is left out; None: nothing
# At the size "few". OGD projects out thousands of directions in every step: about 18 minutes for a
# seed at the high rate, and at the low one, which has three times the steps, 50.
FEW: Few = (Only("OGD", HIGH, (11, 13, 21)), Only("OGD", LOW, ()))
FEW_RAW: Few = (Only("OGD", LOW, (11,)),)


@dataclass(frozen=True)
class Rotated:
    """One size of the challenge; the defaults are the paper's."""

    high: str = "0.01"  # the first task is always learned at the high rate
    low: str = "{0.01, 1e-5}"
    epochs_high: str = "5"
    epochs_low: str = "15"
    tasks: int | None = None
    train: int | None = None
    test: int | None = None
    samples: int = 1000  # for Hessians and memories
    epsilon: float = 0.01  # of the spectral energy that SGD-dagger, OGD and GPM leave out
    network: str = "mlp"  # and its twin without biases for GPM
    embedded: bool = False
    normalised: bool | None = None  # inputs less .1307, over .3081; the paper does not say

    def training(self, rate: str, learner: str | Algorithm = "SGD") -> Training:
        """``rate`` is ``LOW`` or ``HIGH``; a learner that is only named has the stream's eps."""
        if isinstance(learner, str):
            learner = Algorithm(learner, None if learner == "SGD" else self.epsilon)
        return Training(
            "rotated_mnist_normalised" if self.normalised else "rotated_mnist",
            f"{self.network}_unbiased" if learner.name == "GPM" else self.network,
            learner,
            rates=self.high if rate == HIGH else self.low,
            epochs=self.epochs_high if rate == HIGH else self.epochs_low,
            tasks=self.tasks,
            train=self.train,
            test=self.test,
            samples=self.samples,
            embedded=self.embedded,
        )

    def trainings(self, learners: Sequence[str], few: Few = None) -> list[Training]:
        """The runs of all seeds at both rates; those of few seeds are left to ``run``."""
        return [
            self.training(rate, learner)
            for rate in reversed(RATES)
            for learner in learners
            if not any((one.learner, one.rate) == (learner, rate) for one in few or ())
        ]

    @property
    def caption(self) -> str:
        """What a table's title says of the size."""
        if replace(self, normalised=None) == Rotated():
            return f"Rotated-MNIST, inputs {'normalised' if self.normalised else 'in 0..1'}"
        images = "embedded images" if self.embedded else "images"
        return (
            f"Rotated-MNIST, {self.tasks or 5} tasks of {self.train} {images}, rate {self.high} "
            f"for the paper's 0.01 and {self.low} for {{0.01, 1e-5}}"
        )


SCALED = {"high": "0.1", "low": "{0.1, 3e-4}", "epochs_high": "15", "epochs_low": "15"}

DEMO = Rotated(**SCALED, tasks=3, train=2000, samples=300, epsilon=0.05, embedded=True)  # type: ignore[arg-type]
SMALL = Rotated(**SCALED, train=2000, samples=500)  # type: ignore[arg-type]
RAW = Rotated()
FULL = Rotated(normalised=True)  # fits the published numbers better


@dataclass(frozen=True)
class Comparison:
    """Configuration of a label that compares learners."""

    stream: Rotated = FULL
    few: Few = None

    @property
    def caption(self) -> str:
        return caption(self.stream, self.few)


COMPARISONS = {
    "demo": Comparison(DEMO),
    "scaled": Comparison(SMALL),
    "few": Comparison(few=FEW),
    "raw": Comparison(RAW, FEW_RAW),
    "full": Comparison(),
}
# five seeds; the labels that compare share their trainings, which are nearly all of it
COMPARISON_COST = {
    "demo": "about 4 min", "scaled": "about 30 min a seed", "few": "about 2 h on one core",
    "raw": "about 3 h on one core",
    "full": "about 7 h on one core: OGD takes 50 min a seed at the low rate",
}  # fmt: skip


def seeds_of(learner: str, rate: str, seeds: Sequence[int], few: Few) -> list[int]:
    """Those of ``seeds`` for which a label trains ``learner`` at ``rate``."""
    limits = [one.seeds for one in few or () if (one.learner, one.rate) == (learner, rate)]
    return [seed for seed in seeds if all(seed in some for some in limits)]


def caption(stream: Rotated, few: Few) -> str:
    """The stream's, with what was left out."""
    notes = [
        f"{one.learner} at {one.rate}: "
        + (f"seed {', '.join(map(str, one.seeds))} only" if one.seeds else "left out")
        for one in few or ()
    ]
    return f"{stream.caption} ({'; '.join(notes)})" if notes else stream.caption


def outcome(run: Run) -> Metrics:
    """Test accuracies and losses, each row ``t`` with its tasks ``o <= t``."""
    return {
        "accuracy": lower_rows(run.test_accuracy),
        "loss": lower_rows(run.test_loss),
    }


def frozen(shelf: Shelf, training: Training, run: Run) -> list[float]:
    """Test accuracy on every task of the network as it was after the first: what it knew anyway."""
    model = shelf.model_after(training, run, 0)
    found = []
    for task in shelf.tasks(training):
        test = task.test.to(shelf.device)
        with torch.no_grad():
            right = [
                int((model(part.inputs).argmax(1) == part.targets).sum())
                for part in (test[start : start + 1000] for start in range(0, len(test), 1000))
            ]
        found.append(sum(right) / len(test))
    return rounded(found)  # type: ignore[no-any-return]


def lower_rows(matrix: Tensor) -> list[list[float]]:
    """Rows of a ``(T, T)`` matrix up to the diagonal, for JSON."""
    rows: list[list[float]] = rounded([row[: t + 1] for t, row in enumerate(matrix.tolist())])
    return rows


def square(rows: Sequence[Sequence[float]]) -> Tensor:
    """What :func:`lower_rows` took apart; zero above the diagonal, which no metric reads."""
    matrix = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for t, row in enumerate(rows):
        matrix[t, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return matrix


def learned(metrics: Metrics) -> float:
    """Mean over tasks of a_tt, the accuracy just after learning: what stands beside forgetting."""
    return float(current_accuracy(square(metrics["accuracy"])).mean())


def forgotten(metrics: Metrics) -> Tensor:
    """E(t) in accuracy over the t-1 old tasks, ``(T,)``."""
    return average_forgetting(accuracy_forgetting(square(metrics["accuracy"])), "t-1")
