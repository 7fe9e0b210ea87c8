"""The ball in which eigenvectors are steep, for three networks (fig:forgettingratio1).

The paper's main figure puts an MLP, a ViT and a ResNet beside each other, and the text says that
the ball grows in proportion to the network. Measures are those of :mod:`experiments.perturbation`,
around the first task's solution.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from experiments import perturbation, perturbation_networks
from experiments.experiment import BySeed, Experiment
from experiments.figures import curve, legend, panels, save
from experiments.perturbation import MEASURES, floats
from experiments.rotated import learned
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, Values, holds, ordered, untested

HIGHER = Quote("Appendix C", "as the network size increases, the perturbation score converges to 1 "
               "for higher values of r")  # fmt: skip
PROPORTION = Quote("Section 5.1", "the size of the ball B appears to be stable, while increasing "
                   "proportionally to the network size")  # fmt: skip

NAMES = ("MLP", "ViT", "ResNet")  # in the order of the figure


@dataclass(frozen=True)
class Config:
    networks: tuple[perturbation.Config, ...]  # as in NAMES


def _sizes(size: str) -> Config:
    three = (perturbation.EXPERIMENT, perturbation_networks.VIT, perturbation_networks.RESNET)
    return Config(tuple(replace(one.sizes[size], tasks=1) for one in three))


def trainings(config: Config) -> list[Training]:
    return [one.training for one in config.networks]


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {} for seed in seeds}
    for name, one in zip(NAMES, config.networks, strict=True):
        for seed, metrics in perturbation.run(one, seeds, shelf).items():
            found[seed][name] = metrics
    return found


def tables(config: Config, metrics: BySeed) -> list[Table]:
    columns = ("parameters", *(f"reach, {name}" for name in MEASURES.values()), "a_tt")
    where = "; ".join(
        f"{name} on {one.training.stream}" for name, one in zip(NAMES, config.networks, strict=True)
    )
    title = f"radius at which the perturbation score is 1, after the first task; {where}"
    table = Table("fig:forgettingratio1", title, columns)
    for name in NAMES:
        group = [one[name] for one in metrics.values()]
        table.add(name, "parameters", [one["parameters"] for one in group])
        for key, words in MEASURES.items():
            measured = [one["tasks"][0][key] for one in group if key in one["tasks"][0]]
            reaches = floats([one["reach"] for one in measured])
            known = [reach for reach in reaches if not math.isnan(reach)]
            table.add(name, f"reach, {words}", known)
        table.add(name, "a_tt", [learned(one) for one in group])
    return [table]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config
    [table] = tables
    rows = sorted(table.rows, key=lambda row: table.mean(row, "parameters"))
    order = ", ".join(f"{row} of {table.mean(row, 'parameters'):,.0f}" for row in rows)

    def reach(name: str) -> Values:
        found = {seed: one[name]["tasks"][0].get("bounded") for seed, one in metrics.items()}
        return {seed: floats([one["reach"]])[0] for seed, one in found.items() if one}

    if not all(reach(row) for row in rows):
        why = "measured without a bound on the loss only"
        return [untested(quote, why) for quote in (HIGHER, PROPORTION)]
    density = [
        statistics.fmean(reach(row).values()) / table.mean(row, "parameters") for row in rows
    ]
    return [
        ordered(HIGHER, [(reach(a), reach(b)) for a, b in pairwise(rows)],
                reading=f"{order} parameters; bounded loss, after the first task"),
        holds(PROPORTION, density, lambda *d: max(d) <= 3.0 * min(d),
              reading="radius / P within a factor 3; bounded loss, after the first task"),
    ]  # fmt: skip


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    plots, axes = panels(len(NAMES))
    for axis, name, one in zip(axes, NAMES, config.networks, strict=True):
        group = [entry[name] for entry in metrics.values()]
        for style, (key, words) in enumerate(MEASURES.items()):
            measured = [entry["tasks"][0][key] for entry in group if key in entry["tasks"][0]]
            if measured:
                curves = [floats(entry["mean"]) for entry in measured]
                curve(axis, one.radii, curves, style, words)
        axis.axhline(1.0, color="#8c510a", ls="--", lw=1)
        axis.set(xscale="log", yscale="log", xlabel="radius r", ylabel="s(r)")
        axis.set(title=f"{name}, {group[0]['parameters']:,} parameters")
    legend(axes[-1], "change of the")
    save(plots, path)


EXPERIMENT = Experiment(
    label="fig:forgettingratio1",
    what="perturbation score of an MLP, a ViT and a ResNet beside each other: does the ball grow?",
    data="cifar100",
    sizes={size: _sizes(size) for size in ("demo", "scaled", "full")},
    run=run,
    tables=tables,
    claims=claims,
    quotes=(HIGHER, PROPORTION),
    figure=figure,
    trainings=trainings,
    cost={
        "demo": "1 min",
        "scaled": "5 min",
        "full": "about 1 h on one A100 after fig:PTBRN and fig:PTBvit (estimate, not run)",
    },
)
