"""SGD, SGD-dagger, OGD and GPM at two learning rates (fig:comparisonRM)."""

from collections.abc import Sequence
from pathlib import Path

from curvlab.metrics import NORMS, accuracy_forgetting, average_accuracy, average_forgetting
from experiments.experiment import BySeed, Experiment
from experiments.figures import curve, panels, save
from experiments.paper import HIGH, LOW
from experiments.rotated import (
    COMPARISON_COST,
    COMPARISONS,
    RATES,
    Comparison,
    forgotten,
    learned,
    outcome,
    seeds_of,
    square,
)
from experiments.shelf import Shelf
from experiments.tables import Claim, Metrics, Table, claim

LEARNERS = ("SGD", "SGD-dagger", "OGD", "GPM")
LIKE = 0.25  # two figures are "similar" when they differ by less than this share of the larger


def run(config: Comparison, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {rate: {} for rate in RATES} for seed in seeds}
    for rate in reversed(RATES):
        for learner in LEARNERS:
            training = config.stream.training(rate, learner)
            for one in shelf.runs(training, seeds_of(learner, rate, seeds, config.few)):
                before = one.notes[-2]  # nothing is added after the last task
                kept = before.get("directions") or before.get("ranks") or 0
                found[one.seed][rate][learner] = outcome(one) | {"kept": kept}
    return found


def tables(config: Comparison, metrics: BySeed) -> list[Table]:
    columns = ("E(T)", "E(T) with 1/t", "E over pairs", "a(T)", "a_tt", "kept")
    title = f"forgetting in accuracy, {config.caption}"
    table = Table("fig:comparisonRM", title, columns)
    for rate in RATES:
        for learner in LEARNERS:
            group = [one[rate][learner] for one in metrics.values() if learner in one[rate]]
            accuracy = [square(one["accuracy"]) for one in group]
            row = f"{rate}, {learner}"
            for column, norm in zip(("E(T) with 1/t", "E(T)", "E over pairs"), NORMS, strict=True):
                averages = [average_forgetting(accuracy_forgetting(a), norm) for a in accuracy]
                table.add(row, column, [float(average[-1]) for average in averages])
            table.add(row, "a(T)", [float(average_accuracy(a)[-1]) for a in accuracy])
            table.add(row, "a_tt", [learned(one) for one in group])
            table.add(row, "kept", [_total(one["kept"]) for one in group])
    return [table]


def _total(kept: int | list[int]) -> float:
    """Directions in memory; for GPM the ranks of its layers together."""
    return float(sum(kept) if isinstance(kept, list) else kept)


def claims(config: Comparison, metrics: BySeed) -> list[Claim]:
    [table] = tables(config, metrics)

    def forgotten_by(rate: str, *learners: str) -> list[float]:
        return [table.mean(f"{rate}, {learner}", "E(T)") for learner in learners]

    high, low = forgotten_by(HIGH, *LEARNERS), forgotten_by(LOW, *LEARNERS)
    chance = [table.mean(f"{LOW}, {learner}", "a_tt") for learner in LEARNERS[1:]]
    return [
        claim("high rate: SGD-dagger is like SGD (within a quarter)", high[:2], _alike),
        claim("high rate: OGD is like SGD (within a quarter)", [high[0], high[2]], _alike),
        claim("high rate: GPM forgets least", high, lambda s, d, o, g: g < min(s, d, o)),
        claim("low rate: SGD-dagger, OGD and GPM all forget less than SGD", low,
              lambda s, d, o, g: max(d, o, g) < s),
        claim("low rate: the three are equivalent (within 0.05)", low[1:],
              lambda d, o, g: max(d, o, g) - min(d, o, g) < 0.05),
        claim("every learner forgets less at the low rate", [*high, *low],
              lambda *e: all(a > b for a, b in zip(e[:4], e[4:], strict=True))),
        claim("not vacuous: at the low rate the three still learn, a_tt above one half", chance,
              lambda *a: min(a) > 0.5, ours=True),
    ]  # fmt: skip


def _alike(a: float, b: float) -> bool:
    return abs(a - b) < LIKE * max(abs(a), abs(b))


def figure(config: Comparison, metrics: BySeed, path: Path) -> None:
    del config
    plots, axes = panels(2)
    for axis, rate in zip(axes, reversed(RATES), strict=True):
        for style, learner in enumerate(LEARNERS):
            group = [one[rate][learner] for one in metrics.values() if learner in one[rate]]
            curves = [forgotten(one).tolist() for one in group]
            if curves:
                steps = range(1, len(curves[0]) + 1)
                curve(axis, steps, curves, style, learner.replace("-dagger", "†"))
        axis.axhline(0.0, color="0.7", lw=0.8)
        axis.set(title=f"{'high' if rate == HIGH else 'low'} learning rate", xlabel="task t")
        axis.set(xticks=list(steps), ylabel="average forgetting E(t), accuracy")
    axes[1].sharey(axes[0])  # one scale: the rates are to be compared
    axes[0].legend()
    save(plots, path)


EXPERIMENT = Experiment(
    label="fig:comparisonRM",
    what="average forgetting of SGD, SGD-dagger, OGD and GPM at two learning rates",
    data="mnist",
    sizes=COMPARISONS,
    run=run,
    tables=tables,
    claims=claims,
    figure=figure,
    trainings=lambda config: config.stream.trainings(LEARNERS, config.few),
    cost=COMPARISON_COST,
)
