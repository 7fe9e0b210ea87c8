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
from experiments.rotated import DEMO, FULL, RATES, RAW, SMALL, Rotated, outcome, square
from experiments.shelf import Shelf
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, Values, brief, ordered

WAVERS = Quote("Appendix C", "Interestingly, we notice that the error is not monotonic")
INCREASES = Quote("Appendix C", "although forgetting constantly increases")
BOLD = Quote("tab:Our-approx-full, bold", "the error is lower at 1e-5 for every t")

COLUMNS = ("error", "E", "E with 1/t", "E over pairs", "a_tt")


@dataclass(frozen=True)
class Config:
    stream: Rotated = FULL


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {} for seed in seeds}
    for rate in RATES:
        training = config.stream.training(rate)
        for one in shelf.runs(training, seeds):
            terms = expansion(shelf, training, one.seed)
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


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config
    [table] = tables
    steps = range(1, min((len(one[LOW]["predicted"]) for one in metrics.values()), default=1))

    def forgotten(rate: str, t: int) -> Values:
        lost = {seed: loss_forgetting(square(one[rate]["loss"])) for seed, one in metrics.items()}
        return {seed: float(average_forgetting(one, "t-1")[t]) for seed, one in lost.items()}

    def error(rate: str, t: int) -> Values:
        truth = forgotten(rate, t)
        return {seed: abs(one[rate]["predicted"][t] - truth[seed]) for seed, one in metrics.items()}

    falls = [
        ordered("", [(error(rate, after), error(rate, before))])
        for rate in RATES
        for before, after in pairwise(steps)
    ]
    somewhere = "agree" if any(one.verdict == "agree" for one in falls) else (
        "undecided" if any(one.verdict == "undecided" for one in falls) else "disagree"
    )  # fmt: skip
    means = "; ".join(
        f"{rate}: {', '.join(brief(table.mean(f'{rate}, t = {t + 1}', 'error')) for t in steps)}"
        for rate in RATES
    )
    return [
        Claim(WAVERS, somewhere, means, "the error falls from one t to the next at some place"),
        ordered(INCREASES, [(forgotten(rate, before), forgotten(rate, after))
                            for rate in RATES for before, after in pairwise(steps)],
                reading="from each t to the next, at both rates"),
        ordered(BOLD, [(error(LOW, t), error(HIGH, t)) for t in steps]),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    label="tab:Our-approx-full",
    what="error of the recursion for average forgetting (eq. 3), SGD, two rates, t = 2..5",
    data="mnist",
    sizes={"demo": Config(DEMO), "scaled": Config(SMALL), "raw": Config(RAW), "full": Config()},
    run=run,
    tables=tables,
    claims=claims,
    quotes=(WAVERS, INCREASES, BOLD),
    trainings=lambda config: config.stream.trainings(["SGD"]),
    cost={"demo": "15 s", "scaled": "30 s", "raw": "6 min", "full": "6 min"},
)
