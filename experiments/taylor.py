"""How well a Taylor expansion predicts forgetting (Table:Taylor-apprx and its full form).

E_o(t) in test loss against g'd, 1/2 d'Hd and their sum, d = theta_t - theta_o, for every pair of an
old and a later task. One Hessian product per pair; no Hessian is formed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.metrics import loss_forgetting, old_pairs, previous_pairs
from experiments.curvature import expansion
from experiments.experiment import BySeed, Experiment
from experiments.paper import HIGH, LOW
from experiments.rotated import (
    DEMO,
    FULL,
    RATES,
    RAW,
    SMALL,
    Rotated,
    learned,
    lower_rows,
    outcome,
    square,
)
from experiments.shelf import Shelf
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, Values, holds, ordered

ACCURATE = Quote("Section 5.1", "In general, the approximation is more accurate for low learning "
                 "rates, which limit the update norm")  # fmt: skip
SECOND = Quote("Section 5.1", "Remarkably, the second-order term achieves the lowest error on "
               "average in the high learning rate case")  # fmt: skip
SAME = Quote("Appendix C", "We observe the same trend in both cases", "o = t-1, high rate")
BOLD = Quote("Table:Taylor-apprx, bold", "0.15, the Taylor column, is the lowest error at 1e-5")

TERMS = ("first", "second", "taylor")
COLUMNS = (*TERMS, "E_o", "distance", "a_tt")
Pairs = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    stream: Rotated = FULL


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {} for seed in seeds}
    for rate in RATES:
        training = config.stream.training(rate)
        for one in shelf.runs(training, seeds):
            terms = expansion(shelf, training, one.seed)
            found[one.seed][rate] = outcome(one) | {
                "first": lower_rows(terms.first_order()),
                "second": lower_rows(terms.second_order()),
                "distance": lower_rows(terms.distances),
            }
    return found


def tables(config: Config, metrics: BySeed) -> list[Table]:
    table = Table(
        "Table:Taylor-apprx-full", f"error of predicted E_o(t), {config.stream.caption}", COLUMNS
    )
    for name, pick in (("all o", old_pairs), ("o = t-1", previous_pairs)):
        for rate in RATES:
            cells: dict[str, list[float]] = {column: [] for column in COLUMNS}
            for one in metrics.values():
                for column, matrix in _measured(one[rate]).items():
                    cells[column] += pick(matrix).tolist()
                cells["a_tt"].append(learned(one[rate]))
            for column, samples in cells.items():
                table.add(f"{rate}, {name}", column, samples)
    return [table]


def _measured(one: Metrics) -> dict[str, Tensor]:
    """Matrices ``(T, T)`` by column: absolute errors of the three predictions, E_o(t), distance."""
    forgotten = loss_forgetting(square(one["loss"]))
    first, second = square(one["first"]), square(one["second"])
    predictions = {"first": first, "second": second, "taylor": first + second}
    errors = {name: (value - forgotten).abs() for name, value in predictions.items()}
    return errors | {"E_o": forgotten, "distance": square(one["distance"])}


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config
    [table] = tables

    def error(rate: str, term: str, pick: Pairs = old_pairs) -> Values:
        """Its mean over pairs, by seed."""
        return {s: float(pick(_measured(one[rate])[term]).mean()) for s, one in metrics.items()}

    def lowest(term: str, rate: str, pick: Pairs = old_pairs) -> list[tuple[Values, Values]]:
        others = [name for name in TERMS if name != term]
        return [(error(rate, term, pick), error(rate, name, pick)) for name in others]

    near = [table.mean(f"{HIGH}, {which}", "second") for which in ("o = t-1", "all o")]
    along = [_correlation(table, f"{rate}, all o") for rate in (LOW, HIGH)]
    return [
        ordered(ACCURATE, [(error(LOW, "taylor"), error(HIGH, "taylor"))],
                reading="Taylor's error, all pairs"),
        ordered(SECOND, lowest("second", HIGH), reading="all pairs, against first and Taylor"),
        ordered(SAME, lowest("second", HIGH, previous_pairs),
                reading="the second-order term has the lowest error"),
        ordered(BOLD, lowest("taylor", LOW), reading="all pairs, against first and second"),
        holds("errors grow with the distance (one update against several)", near,
              lambda one, several: one < several),
        holds("errors grow with the distance (correlation over all pairs, low and high rate)",
              along, lambda low, high: min(low, high) > 0.0),
    ]  # fmt: skip


def _correlation(table: Table, row: str) -> float:
    """Between distance and Taylor's error; the samples of a row's cells are in one order."""
    pairs = [table.rows[row][column].samples for column in ("distance", "taylor")]
    return float(torch.corrcoef(torch.tensor(pairs, dtype=torch.float64))[0, 1])


EXPERIMENT = Experiment(
    label="Table:Taylor-apprx-full",
    also=("Table:Taylor-apprx",),
    what="error of first-, second-order and Taylor predictions of forgetting, SGD, two rates",
    data="mnist",
    sizes={"demo": Config(DEMO), "scaled": Config(SMALL), "raw": Config(RAW), "full": Config()},
    run=run,
    tables=tables,
    claims=claims,
    quotes=(ACCURATE, SECOND, SAME, BOLD),
    trainings=lambda config: config.stream.trainings(["SGD"]),
    cost={"demo": "15 s", "scaled": "30 s", "raw": "6 min", "full": "6 min"},
)
