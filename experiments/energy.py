"""SGD-dagger between learning nothing new and plain SGD: the share eps left out (fig:HEM)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from curvlab.metrics import average_accuracy
from experiments.choices import Algorithm
from experiments.experiment import BySeed, Experiment
from experiments.figures import curve, panels, save
from experiments.paper import HIGH, LOW
from experiments.rotated import DEMO, FULL, RAW, SMALL, Rotated, forgotten, learned, outcome, square
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, Values, holds, ordered

EXTREMES = Quote("Appendix C", "Importantly, the extremes achieve lower average accuracy")
COMPROMISE = Quote("Appendix C", "This compromise between forgetting and intransigence [...] is "
                   "better portrayed in Figure [fig:HEM]")  # fmt: skip


SOME = (0.0, 0.01, 0.1, 0.5, 1.0)  # the least eps, 0.001, costs most by far


@dataclass(frozen=True)
class Config:
    stream: Rotated = FULL
    rate: str = LOW  # where the constraint works; the paper does not say
    levels: tuple[float, ...] = (0.0, 0.001, 0.01, 0.1, 0.5, 1.0)  # eps


def trainings(config: Config) -> list[Training]:
    dagger = [
        config.stream.training(config.rate, Algorithm("SGD-dagger", eps)) for eps in config.levels
    ]
    return [config.stream.training(config.rate), *dagger]


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    plain = {one.seed: one for one in shelf.runs(config.stream.training(config.rate), seeds)}
    found: dict[int, Metrics] = {seed: {} for seed in seeds}
    for eps, training in zip(config.levels, trainings(config)[1:], strict=True):
        for one in shelf.runs(training, seeds):
            moved = one.snapshots[1:] - one.snapshots[:-1]
            found[one.seed][f"{eps:g}"] = outcome(one) | {
                "kept": one.notes[-2]["directions"],  # before the last task
                "is SGD": torch.equal(one.snapshots, plain[one.seed].snapshots),
                "still": bool((moved == 0).all()),
            }
    return found


def tables(config: Config, metrics: BySeed) -> list[Table]:
    what = f"SGD-dagger with 1 - eps of the energy in memory, {config.rate}"
    title = f"{what}, {config.stream.caption}"
    table = Table("fig:HEM", title, ("E(T)", "a(T)", "a_tt", "kept"))
    for eps in config.levels:
        group = [one[f"{eps:g}"] for one in metrics.values() if f"{eps:g}" in one]
        row = f"eps = {eps:g}"
        table.add(row, "E(T)", [float(forgotten(one)[-1]) for one in group])
        table.add(row, "a(T)", [_accuracy(one) for one in group])
        table.add(row, "a_tt", [learned(one) for one in group])
        table.add(row, "kept", [one["kept"] for one in group])
    return [table]


def _accuracy(one: Metrics) -> float:
    return float(average_accuracy(square(one["accuracy"]))[-1])


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    [table] = tables
    names = [f"{eps:g}" for eps in config.levels]
    inner = names[1:-1]  # the extremes are set by hand: k = P and k = 0
    best = max(inner, key=lambda name: table.mean(f"eps = {name}", "a(T)"))

    def each(name: str, value: Callable[[Metrics], float]) -> Values:
        return {seed: value(one[name]) for seed, one in metrics.items() if name in one}

    def rises(value: Callable[[Metrics], float]) -> list[tuple[Values, Values]]:
        return [(each(a, value), each(b, value)) for a, b in pairwise(inner)]

    plain = [float(one["1"]["is SGD"]) for one in metrics.values() if "1" in one]
    still = [float(one["0"]["still"]) for one in metrics.values() if "0" in one]
    return [
        ordered(EXTREMES, [(each(end, _accuracy), each(best, _accuracy))
                           for end in (names[0], names[-1])],
                reading=f"a(T) at both ends against the best between them, eps = {best}"),
        ordered(COMPROMISE, [*rises(lambda one: float(forgotten(one)[-1])), *rises(learned)],
                reading=f"with eps ({', '.join(inner)}) both E(T) and a_tt rise"),
        holds("by construction: eps = 1 is SGD, bit for bit", plain or [float("nan")],
              lambda *v: all(v)),
        holds("by construction: eps = 0 changes nothing after the first task",
              still or [float("nan")], lambda *v: all(v)),
    ]  # fmt: skip


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    plots, axes = panels(2)
    places, names = range(len(config.levels)), [f"{eps:g}" for eps in config.levels]
    for style, (axis, name, value) in enumerate((
        (axes[0], "average accuracy a(T)", _accuracy),
        (axes[1], "average forgetting E(T)", lambda one: float(forgotten(one)[-1])),
    )):  # fmt: skip
        curves = [[value(one[level]) for level in names] for one in metrics.values()]
        curve(axis, places, curves, style, name)
        axis.set(title=name, xlabel="eps, the share of energy left out", xticks=list(places))
        axis.set_xticklabels(names)
    save(plots, path)


EXPERIMENT = Experiment(
    label="fig:HEM",
    what="final accuracy and forgetting of SGD-dagger against the share of energy left out",
    data="mnist",
    sizes={
        # after three tasks at the low rate SGD has forgotten nothing yet
        "demo": Config(DEMO, HIGH, levels=(0.0, 0.05, 0.2, 0.5, 1.0)),
        "scaled": Config(SMALL, levels=(0.0, 0.01, 0.05, 0.2, 0.5, 1.0)),
        "few": Config(levels=SOME),
        "raw": Config(RAW, levels=SOME),
        "full": Config(),
    },
    run=run,
    tables=tables,
    claims=claims,
    quotes=(EXTREMES, COMPROMISE),
    figure=figure,
    trainings=trainings,
    cost={
        "demo": "about 2 min",
        "scaled": "15 min",
        "few": "about 1 h on one core",
        "raw": "about 1 h on one core",
        "full": "several hours (eps = 0.001 was not run)",
    },
)
