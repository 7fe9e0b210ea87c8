"""Every learner of the library on Rotated-MNIST: an extension, not a table of the paper.

PackNet, SpaceNet, progressive networks and powerpropagation are told the task when they predict,
the others are not. They are given the same rate, steps and layers of 50; progressive networks have
a column of them per task.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from curvlab.metrics import average_accuracy
from experiments.choices import Algorithm
from experiments.experiment import BySeed, Experiment
from experiments.figures import curve, legend, panels, save
from experiments.paper import HIGH
from experiments.rotated import DEMO, FULL, SMALL, Rotated, forgotten, learned, outcome, square
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, holds


@dataclass(frozen=True)
class Entry:
    """A row: the learner and its network, and whether it is told the task."""

    learner: Algorithm
    network: str = "mlp"
    told: bool = False


# EWC's strength of 100 diverges at the scaled rate
SGD, EWC, DAGGER = Algorithm(), Algorithm("EWC", strength=10.0), Algorithm("SGD-dagger", k=20)
OGD, GPM, KWINNERS = Algorithm("OGD", 0.05), Algorithm("GPM", 0.01), Algorithm("k-winners", 0.01)
PACKNET, POWERS = Algorithm("PackNet", pruned=0.75), Algorithm("Powerpropagation", pruned=0.75)

ENTRIES = (
    Entry(SGD),
    Entry(EWC),
    Entry(DAGGER),
    Entry(OGD),
    Entry(GPM, "mlp_unbiased"),
    Entry(KWINNERS, "mlp_kwinners"),
    Entry(PACKNET, told=True),
    Entry(POWERS, "mlp_powers", told=True),
    Entry(Algorithm("SpaceNet"), told=True),
    Entry(Algorithm("Progressive"), "mlp_columns", told=True),
)


class Listing(Protocol):
    """A configuration: the rows, and the training of each."""

    @property
    def entries(self) -> tuple[Entry, ...]: ...
    @property
    def label(self) -> str: ...
    @property
    def caption(self) -> str: ...
    def training(self, entry: Entry) -> Training: ...


@dataclass(frozen=True)
class Config:
    stream: Rotated = FULL
    entries: tuple[Entry, ...] = ENTRIES

    @property
    def label(self) -> str:
        return "extension"

    @property
    def caption(self) -> str:
        return f"at the high rate, {self.stream.caption}"

    def training(self, entry: Entry) -> Training:
        return replace(self.stream.training(HIGH, entry.learner), network=entry.network)


def trainings(config: Listing) -> list[Training]:
    return [config.training(entry) for entry in config.entries]


def run(config: Listing, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {} for seed in seeds}
    for entry in config.entries:
        for one in shelf.runs(config.training(entry), seeds):
            found[one.seed][_name(entry)] = outcome(one) | {"parameters": one.initial.numel()}
    return found


def _name(entry: Entry) -> str:
    """In the metrics."""
    return f"{entry.learner.name}{', told the task' if entry.told else ''}"


KINDS = {  # of MLP, by the end of a network's name
    "": "MLP", "unbiased": "MLP without biases", "kwinners": "k-winner MLP with GPM",
    "powers": "MLP of powers", "columns": "an MLP per task",
}  # fmt: skip


def shown(entry: Entry) -> str:
    """The learner in words."""
    return entry.learner.name.removesuffix("-pixels")


def row_of(entry: Entry) -> str:
    """In the table: the learner, its figure and its network."""
    figures = str(entry.learner).split(", ")[1:]
    facts = ", ".join([*figures, KINDS[entry.network.partition("_")[2]]])
    return f"{shown(entry)}{', told the task' if entry.told else ''} ({facts})"


def tables(config: Listing, metrics: BySeed) -> list[Table]:
    title = f"all learners {config.caption}"
    table = Table(config.label, title, ("E(T)", "a(T)", "a_tt", "parameters"))
    for entry in config.entries:
        name, row = _name(entry), row_of(entry)
        group = [one[name] for one in metrics.values() if name in one]
        table.add(row, "E(T)", [float(forgotten(one)[-1]) for one in group])
        accuracy = [average_accuracy(square(one["accuracy"])) for one in group]
        table.add(row, "a(T)", [float(a[-1]) for a in accuracy])
        table.add(row, "a_tt", [learned(one) for one in group])
        table.add(row, "parameters", [one["parameters"] for one in group])
    return [table]


def claims(config: Listing, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del metrics
    [table] = tables
    lost = {entry: table.mean(row_of(entry), "E(T)") for entry in config.entries}
    told = [value for entry, value in lost.items() if entry.told]
    sgd = [value for entry, value in lost.items() if entry.learner == SGD]
    others = [v for entry, v in lost.items() if not entry.told and entry.learner != SGD]
    return [
        holds("strict parameter isolation forgets nothing at all", told,
              lambda *e: max(map(abs, e)) == 0.0),
        holds("every method that is not told the task forgets less than SGD (SGD's last)",
              [*others, *sgd], lambda *e: max(e[:-1]) < e[-1]),
    ]  # fmt: skip


def figure(config: Listing, metrics: BySeed, path: Path) -> None:
    plots, axes = panels(2, width=5.0)
    for axis, told in zip(axes, (False, True), strict=True):
        for style, entry in enumerate(one for one in config.entries if one.told == told):
            curves = [
                average_accuracy(square(one[_name(entry)]["accuracy"])).tolist()
                for one in metrics.values()
            ]
            steps = range(1, len(curves[0]) + 1)
            curve(axis, steps, curves, style, shown(entry).replace("-dagger", "†"))
            axis.set(xlabel="task t", ylabel="average accuracy a(t)", xticks=list(steps))
        axis.set(title="told the task" if told else "not told the task", ylim=(0, 1))
        legend(axis)
    save(plots, path)


EXPERIMENT = Experiment(
    label="extension",
    what="all learners of the library on Rotated-MNIST (not in the paper)",
    data="mnist",
    sizes={
        "demo": Config(DEMO),  # with fewer steps powerpropagation and k-winners learn nothing
        "scaled": Config(SMALL),
        "full": Config(),
    },
    run=run,
    tables=tables,
    claims=claims,
    figure=figure,
    trainings=trainings,
    version="2",  # SpaceNet and k-winners as published
    cost={"demo": "about 3 min", "scaled": "15 min", "full": "5 h on 2 cores (estimate, not run)"},
)
