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
    by_seed,
    caption,
    guard,
    measure,
    rows_of,
)
from experiments.experiment import BySeed, Experiment
from experiments.figures import curve, legend, panels, save
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, ordered

QUOTES = {
    network: (
        Quote("Appendix C", "Similarly to Split CIFAR-100, we observe the average forgetting "
              "increasing overall with t", f"{network}, Split CIFAR-100"),
        Quote("Appendix C", "SGD always outperforms SGD† on the current task", network),
        Quote("Appendix C", "however it achieves the lowest average accuracy", network),
    )
    for network in ("ResNet", "ViT")
}  # fmt: skip


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


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del tables
    return [
        one
        for network in config.networks
        for one in claims_of(network, metrics, QUOTES[network.name])
    ]


def claims_of(network: Network, metrics: BySeed, says: Sequence[Quote | str]) -> list[Claim]:
    """What the paper says of every network on a long stream: stability against plasticity.

    Args:
        network: With its rows.
        metrics: By seed.
        says: Forgetting grows; SGD has the highest a_tt; SGD has the lowest a(T).
    """
    plain, *daggers = network.rows()
    grows, current, final = says

    def lost(t: int) -> dict[int, float]:
        return by_seed(metrics, plain, lambda a: average_forgetting(accuracy_forgetting(a), "t")[t])

    def now(row: str) -> dict[int, float]:
        return by_seed(metrics, row, lambda a: current_accuracy(a).mean())

    def end(row: str) -> dict[int, float]:
        return by_seed(metrics, row, lambda a: average_accuracy(a)[-1])

    return [
        ordered(grows, [(lost(1), lost(-1))], guard=guard(metrics, [plain]),
                reading="SGD, from E(2) to the last"),
        ordered(current, [(now(row), now(plain)) for row in daggers], reading="mean a_tt, every k"),
        ordered(final, [(end(plain), end(row)) for row in daggers],
                guard=guard(metrics, [plain, *daggers]), reading="a(T), every k"),
    ]  # fmt: skip


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
        legend(axis)
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
    quotes=tuple(quote for three in QUOTES.values() for quote in three),
    figure=figure,
    trainings=lambda config: list(rows_of(config.networks).values()),
    cost={
        "scaled": "about 1 h on 2 cores (estimate, not run)",
        "full": "about 18 h on one A100 of 80 GB, 19 GB of them for SGD-dagger's memory, "
        "--device cuda (estimate, not run)",
    },
)
