"""Twenty tasks from data at hand: twenty rotations of MNIST with the MLP.

Not an experiment of the paper. It asks of a stream as long as Split CIFAR-100, whose images are
not everywhere, what the paper says of that one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from curvlab.metrics import accuracy_forgetting, current_accuracy
from experiments import cifar100
from experiments.cifar import Network, accuracies, caption, measure, rows_of
from experiments.experiment import BySeed, Experiment
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim


@dataclass(frozen=True)
class Config:
    networks: tuple[Network, ...]


# Rate times steps of the later tasks is that of the paper's CIFAR-100 runs, 0.001 x 2,500 = 2.5.
DEMO = Config((Network("MLP", Training(
    "rotated_mnist_20", "mlp", rates="{0.1, 0.025}", epochs="{20, 2}", train=500, test=300,
    samples=100, embedded=True,
), ks=(5, 10)),))  # fmt: skip
SCALED = Config((Network("MLP", Training(
    "rotated_mnist_20", "mlp", rates="{0.1, 0.005}", epochs="{20, 5}", train=1000, test=2000,
    samples=300,
), ks=(10, 20)),))  # fmt: skip
FULL = Config((Network("MLP", Training(
    "rotated_mnist_20", "mlp", rates="{0.01, 0.0001}", epochs="{5, 4}", train=60_000,
), ks=(10, 20, 40)),))  # fmt: skip


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    return measure(config.networks, seeds, shelf)


def tables(config: Config, metrics: BySeed) -> list[Table]:
    what = f"20 rotations, after the last (not in the paper); {caption(config.networks, metrics)}"
    found = Table("20 rotations", what, ("a(T)", "a_tt", "E(T)", "directions"))
    for row in rows_of(config.networks):
        accuracy = accuracies(metrics, row)
        found.add(row, "a(T)", accuracy[:, -1].flatten().tolist())
        found.add(row, "a_tt", current_accuracy(accuracy).flatten().tolist())
        found.add(row, "E(T)", accuracy_forgetting(accuracy)[:, -1].flatten().tolist())
        found.add(row, "directions", [entry[row]["directions"][-1] for entry in metrics.values()])
    return [found]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    """The paper's statements on Split CIFAR-100, for another stream: our own checks."""
    del tables
    says = ("forgetting grows with t", "SGD has the highest a_tt", "SGD has the lowest a(T)")
    return [
        one for network in config.networks for one in cifar100.claims_of(network, metrics, says)
    ]


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    cifar100.figure(cifar100.Config(config.networks), metrics, path)


EXPERIMENT = Experiment(
    label="20 rotations",
    what="Extension, not in the paper: its claims on long streams, on 20 rotations with the MLP",
    data="mnist",
    sizes={"demo": DEMO, "scaled": SCALED, "full": FULL},
    run=run,
    tables=tables,
    claims=claims,
    figure=figure,
    trainings=lambda config: list(rows_of(config.networks).values()),
    cost={
        "demo": "1 min",
        "scaled": "5 min on 2 cores",
        "full": "about 10 h on 2 cores (estimate, not run)",
    },
)
