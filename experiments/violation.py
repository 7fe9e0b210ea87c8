"""How far updates violate the null-forgetting constraint (tab:VOC).

VNC(t) = D_t' (1/t sum of past Hessians) D_t, signed: Hessians are indefinite in practice.
"""

from collections.abc import Sequence

from experiments.curvature import expansion
from experiments.experiment import BySeed, Experiment, rounded
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
)
from experiments.shelf import Shelf
from experiments.tables import Claim, Metrics, Table, claim

LEARNERS = ("GPM", "OGD", "SGD", "SGD-dagger")  # the paper's table has the first three


def run(config: Comparison, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {rate: {} for rate in RATES} for seed in seeds}
    for rate in RATES:
        for learner in LEARNERS:
            training = config.stream.training(rate, learner)
            for one in shelf.runs(training, seeds_of(learner, rate, seeds, config.few)):
                violation = expansion(shelf, training, one).violation()
                found[one.seed][rate][learner] = outcome(one) | {
                    "violation": rounded(violation[1:].tolist())
                }
    return found


def tables(config: Comparison, metrics: BySeed) -> list[Table]:
    title = f"violation of the null-forgetting constraint, {config.caption}"
    table = Table("tab:VOC", title, ("VNC", "E(T)", "a_tt"))
    for rate in RATES:
        for learner in LEARNERS:
            group = [one[rate][learner] for one in metrics.values() if learner in one[rate]]
            row = f"{rate}, {learner}"
            table.add(row, "VNC", [value for one in group for value in one["violation"]])
            table.add(row, "E(T)", [float(forgotten(one)[-1]) for one in group])
            table.add(row, "a_tt", [learned(one) for one in group])
    return [table]


def claims(config: Comparison, metrics: BySeed) -> list[Claim]:
    [table] = tables(config, metrics)
    low, high = (
        [table.mean(f"{rate}, {learner}", "VNC") for learner in LEARNERS[:3]]
        for rate in (LOW, HIGH)
    )
    return [
        claim("low rate: GPM and OGD violate less than SGD", low, _both_below),
        claim("high rate: GPM and OGD violate less than SGD", high, _both_below),
        claim("low rate: OGD violates least", low, lambda gpm, ogd, _: abs(ogd) < abs(gpm)),
        claim("high rate: GPM violates least", high, lambda gpm, ogd, _: abs(gpm) < abs(ogd)),
    ]


def _both_below(gpm: float, ogd: float, sgd: float) -> bool:
    return max(abs(gpm), abs(ogd)) < abs(sgd)


EXPERIMENT = Experiment(
    label="tab:VOC",
    what="violation of the null-forgetting constraint by GPM, OGD and SGD (and SGD-dagger)",
    data="mnist",
    sizes=COMPARISONS,
    run=run,
    tables=tables,
    claims=claims,
    trainings=lambda config: config.stream.trainings(LEARNERS, config.few),
    cost=COMPARISON_COST,
)
