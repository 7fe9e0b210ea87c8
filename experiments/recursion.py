"""Average forgetting predicted from one update to the next (tab:Our-approx-full, eq. 3).

E(t) from the measured E(t-1), the last update and the Hessians of past tasks; error against the
measured E(t) in test loss. The published E(t) are means over the t-1 old tasks (their own
arithmetic shows it), so errors are taken there; the other two normalisations stand beside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from curvlab.metrics import average_forgetting, current_accuracy, loss_forgetting
from experiments.curvature import expansion
from experiments.experiment import BySeed, Experiment, rounded
from experiments.paper import HIGH, LOW
from experiments.rotated import DEMO, FULL, RATES, SMALL, Rotated, outcome, square
from experiments.shelf import Shelf
from experiments.tables import Claim, Metrics, Table, claim

COLUMNS = ("error", "E", "E with 1/t", "E over pairs", "a_tt")


@dataclass(frozen=True)
class Config:
    stream: Rotated = FULL


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {} for seed in seeds}
    for rate in RATES:
        training = config.stream.training(rate)
        for one in shelf.runs(training, seeds):
            terms = expansion(shelf, training, one)
            predicted = terms.recursion(loss_forgetting(one.test_loss), "t-1")
            found[one.seed][rate] = outcome(one) | {"predicted": rounded(predicted.tolist())}
    return found


def tables(config: Config, metrics: BySeed) -> list[Table]:
    title = f"error of E(t) predicted by the recursion, {config.stream.caption}"
    table = Table("tab:Our-approx-full", title, COLUMNS)
    for rate in RATES:
        count = min((len(one[rate]["predicted"]) for one in metrics.values()), default=0)
        for t in range(1, count):
            row = f"{rate}, t = {t + 1}"
            forgotten = [loss_forgetting(square(one[rate]["loss"])) for one in metrics.values()]
            old = [float(average_forgetting(one, "t-1")[t]) for one in forgotten]
            predicted = [one[rate]["predicted"][t] for one in metrics.values()]
            table.add(row, "error", [abs(a - b) for a, b in zip(predicted, old, strict=True)])
            table.add(row, "E", old)
            table.add(row, "E with 1/t", [float(average_forgetting(e, "t")[t]) for e in forgotten])
            pairs = [float(average_forgetting(e, "pairs")[t]) for e in forgotten]
            table.add(row, "E over pairs", pairs)
            current = [current_accuracy(square(one[rate]["accuracy"])) for one in metrics.values()]
            table.add(row, "a_tt", [float(one[t]) for one in current])
    return [table]


def claims(config: Config, metrics: BySeed) -> list[Claim]:
    [table] = tables(config, metrics)

    def column(rate: str, name: str) -> list[float]:
        return [table.mean(row, name) for row in table.rows if row.startswith(f"{rate},")]

    low, high = column(LOW, "error"), column(HIGH, "error")
    found = [
        claim(f"{rate}: forgetting grows with every task", column(rate, "E"),
              lambda *e: all(a < b for a, b in pairwise(e)))
        for rate in RATES
    ]  # fmt: skip
    found += [
        claim(f"{rate}: the error does not grow with every task", column(rate, "error"),
              lambda *e: any(a > b for a, b in pairwise(e)))
        for rate in RATES
    ]  # fmt: skip
    mean = [sum(errors) / max(len(errors), 1) for errors in (low, high)]
    return [
        *found,
        claim("errors are far smaller at the low rate", mean, lambda low, high: low < 0.5 * high),
    ]


EXPERIMENT = Experiment(
    label="tab:Our-approx-full",
    what="error of the recursion for average forgetting (eq. 3), SGD, two rates, t = 2..5",
    data="mnist",
    sizes={"demo": Config(DEMO), "scaled": Config(SMALL), "full": Config()},
    run=run,
    tables=tables,
    claims=claims,
    trainings=lambda config: config.stream.trainings(["SGD"]),
    cost={"demo": "15 s", "scaled": "30 s", "full": "6 min"},
)
