"""Split CIFAR-100 (Table:acc-C100, fig:C100FRN, fig:C100VITF): twenty tasks of five classes.

The images are not embedded in the package; `python -m experiments list` says what files to give.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from curvlab.metrics import (
    accuracy_forgetting,
    average_accuracy,
    average_forgetting,
    current_accuracy,
)
from experiments.cifar import (
    RESNET_100,
    VIT_100,
    Network,
    accuracies,
    caption,
    measure,
    ordered,
    rows_of,
)
from experiments.experiment import BySeed, Experiment
from experiments.figures import curve, panels, save
from experiments.shelf import Shelf, Training
from experiments.tables import Claim, Metrics, Table


@dataclass(frozen=True)
class Config:
    networks: tuple[Network, ...]


# Fewer images, with rate times steps of the later tasks kept: 0.001 x 2,500 = 0.01 x 250 = 2.5.
SCALED = Config((
    Network("ResNet", Training(
        "split_cifar100", "resnet_small", rates="{0.1, 0.01}", epochs="{15/25, 5}", train=500,
        test=250, samples=100, batchnorm="freeze",
    ), ks=(10, 20, 40)),
    Network("ViT", Training(
        "split_cifar100", "vit_small", rates="{0.1, 0.01}", epochs="{20/30, 5}", train=500,
        test=250, samples=100,
    )),
))  # fmt: skip
FULL = Config((RESNET_100, VIT_100))


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    return measure(config.networks, seeds, shelf)


def tables(config: Config, metrics: BySeed) -> list[Table]:
    what = f"Split CIFAR-100 after its last task; {caption(config.networks, metrics)}"
    found = Table("Table:acc-C100", what, ("a(T)", "a_tt", "E(T)"))
    for row in rows_of(config.networks):
        accuracy = accuracies(metrics, row)
        found.add(row, "a(T)", accuracy[:, -1].flatten().tolist())
        found.add(row, "a_tt", current_accuracy(accuracy).flatten().tolist())
        found.add(row, "E(T)", accuracy_forgetting(accuracy)[:, -1].flatten().tolist())
    return [found]


def forgetting_curves(metrics: BySeed, rows: Sequence[str]) -> dict[str, Tensor]:
    """E(t) divided by t, ``(S, T)`` by row."""
    return {
        row: average_forgetting(accuracy_forgetting(accuracies(metrics, row)), "t") for row in rows
    }


def claims(config: Config, metrics: BySeed) -> list[Claim]:
    return [one for network in config.networks for one in claims_of(network, metrics)]


def claims_of(network: Network, metrics: BySeed) -> list[Claim]:
    """What the paper says of every network on a long stream: stability against plasticity."""
    rows = list(network.rows())
    lost = {row: curve[:, -1] for row, curve in forgetting_curves(metrics, rows).items()}
    matrices = {row: accuracies(metrics, row) for row in rows}
    reached = {row: average_accuracy(matrix)[:, -1] for row, matrix in matrices.items()}
    learned = {row: current_accuracy(matrix).mean(1) for row, matrix in matrices.items()}
    name, ks = network.name, ", ".join(f"k = {k}" for k in network.ks)
    return [
        ordered(f"{name}: forgetting falls from SGD on with {ks}", lost, rows),
        ordered(f"{name}: a(T) rises from SGD on with {ks}", reached, rows, rising=True),
        ordered(f"{name}: a_tt falls from SGD on with {ks}", learned, rows),
    ]


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    """E(t) against t, one panel per network, one curve per k."""
    picture, axes = panels(len(config.networks), width=5.0)
    for axis, network in zip(axes, config.networks, strict=True):
        for style, (row, values) in enumerate(
            forgetting_curves(metrics, list(network.rows())).items()
        ):
            label = row.removeprefix(f"{network.name}, ").replace("-dagger", "†")
            curve(axis, range(1, values.shape[1] + 1), values.tolist(), style, label)
        axis.set(title=network.name, xlabel="task t", ylabel="E(t), accuracy")
        axis.axhline(0.0, color="0.7", lw=0.8)
        axis.legend()
    save(picture, path)


EXPERIMENT = Experiment(
    label="Table:acc-C100",
    also=("fig:C100FRN", "fig:C100VITF"),
    what="Accuracy and forgetting of SGD and SGD-dagger-k over the 20 tasks of Split CIFAR-100",
    data="cifar100",
    sizes={"scaled": SCALED, "full": FULL},
    run=run,
    tables=tables,
    claims=claims,
    figure=figure,
    trainings=lambda config: list(rows_of(config.networks).values()),
    cost={
        "scaled": "about 1 h on 2 cores (estimate, not run)",
        "full": "about 18 h on one A100 of 80 GB, 19 GB of them for SGD-dagger's memory, "
        "--device cuda (estimate, not run)",
    },
)
