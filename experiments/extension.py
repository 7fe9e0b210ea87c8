"""Every learner of the library on Rotated-MNIST: an extension, not a table of the paper.

PackNet, SpaceNet, progressive networks and powerpropagation are told the task when they predict,
the others are not. They are given the same rate, steps and layers of 50; progressive networks have
a column of them per task.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from curvlab.metrics import average_accuracy
from experiments.experiment import BySeed, Experiment
from experiments.figures import curve, panels, save
from experiments.paper import HIGH
from experiments.rotated import DEMO, FULL, SMALL, Rotated, forgotten, learned, outcome, square
from experiments.shelf import Shelf, Training
from experiments.tables import Claim, Metrics, Table, claim


@dataclass(frozen=True)
class Entry:
    """A row: the learner with its own figure and network, and whether it is told the task."""

    learner: str
    level: float
    network: str = "mlp"
    told: bool = False


ENTRIES = (
    Entry("SGD", 0.0),
    Entry("EWC", 10.0),  # strength; 100 diverges at the scaled rate
    Entry("SGD-dagger-k", 20),
    Entry("OGD", 0.05),
    Entry("GPM", 0.01, "mlp_unbiased"),
    Entry("k-winners", 0.01, "mlp_kwinners"),
    Entry("PackNet", 0.75, told=True),
    Entry("Powerpropagation", 0.75, "mlp_powers", told=True),
    Entry("SpaceNet", 0.0, told=True),
    Entry("Progressive", 0.0, "mlp_columns", told=True),
)


@dataclass(frozen=True)
class Config:
    stream: Rotated = FULL
    entries: tuple[Entry, ...] = ENTRIES


def trainings(config: Config) -> list[Training]:
    return [
        replace(config.stream.training(HIGH, one.learner, one.level), network=one.network)
        for one in config.entries
    ]


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {} for seed in seeds}
    for entry, training in zip(config.entries, trainings(config), strict=True):
        for one in shelf.runs(training, seeds):
            found[one.seed][_name(entry)] = outcome(one) | {"parameters": one.initial.numel()}
    return found


def _name(entry: Entry) -> str:
    return f"{entry.learner}{', told the task' if entry.told else ''}"


def tables(config: Config, metrics: BySeed) -> list[Table]:
    title = f"all learners at the high rate, {config.stream.caption}"
    table = Table("extension", title, ("E(T)", "a(T)", "a_tt", "parameters"))
    for entry in config.entries:
        row = _name(entry)
        group = [one[row] for one in metrics.values() if row in one]
        table.add(row, "E(T)", [float(forgotten(one)[-1]) for one in group])
        accuracy = [average_accuracy(square(one["accuracy"])) for one in group]
        table.add(row, "a(T)", [float(a[-1]) for a in accuracy])
        table.add(row, "a_tt", [learned(one) for one in group])
        table.add(row, "parameters", [one["parameters"] for one in group])
    return [table]


def claims(config: Config, metrics: BySeed) -> list[Claim]:
    [table] = tables(config, metrics)
    sgd = table.mean("SGD", "E(T)")
    told = [table.mean(_name(one), "E(T)") for one in config.entries if one.told]
    others = [
        table.mean(_name(one), "E(T)") for one in config.entries
        if not one.told and one.learner != "SGD"
    ]  # fmt: skip
    return [
        claim("strict parameter isolation forgets nothing at all", told or [float("nan")],
              lambda *e: max(map(abs, e)) == 0.0),
        claim("every method forgets less than SGD (SGD's last)", [*others, sgd],
              lambda *e: max(e[:-1]) < e[-1]),
    ]  # fmt: skip


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    plots, axes = panels(2, width=5.0)
    for axis, told in zip(axes, (False, True), strict=True):
        for style, entry in enumerate(one for one in config.entries if one.told == told):
            curves = [
                average_accuracy(square(one[_name(entry)]["accuracy"])).tolist()
                for one in metrics.values()
            ]
            steps = range(1, len(curves[0]) + 1)
            curve(axis, steps, curves, style, entry.learner)
            axis.set(xlabel="task t", ylabel="average accuracy a(t)", xticks=list(steps))
        axis.set(title="told the task" if told else "not told the task", ylim=(0, 1))
        axis.legend(fontsize=8)
    save(plots, path)


EXPERIMENT = Experiment(
    label="extension",
    what="all learners of the library on Rotated-MNIST (not in the paper)",
    data="mnist",
    sizes={
        "demo": Config(replace(DEMO, train=500)),
        "scaled": Config(SMALL),
        "full": Config(),
    },
    run=run,
    tables=tables,
    claims=claims,
    figure=figure,
    trainings=trainings,
    cost={"demo": "2 min", "scaled": "15 min", "full": "5 h on 2 cores (not run)"},
)
