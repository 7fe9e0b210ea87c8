"""What the guarantees of GPM and OGD assume (tab:ASSMPT).

D(H_t), near 1 if the Hessian were block-diagonal as GPM's corollary has it, along GPM's runs; and
S(H^O_t, H_t), 1 if the outer-product part were all of the Hessian as OGD's has it, along OGD's. D
comes from exact columns drawn at random, S from Hutchinson probes; both carry standard errors.

H^O is read in two ways: as the paper defines it, the exact Gauss-Newton matrix, and as the mean
outer product of the logit gradients that OGD stores, without the curvature of the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from curvlab.learners.seeds import derived_generator
from curvlab.metrics import Estimate, block_diagonality, layer_labels, spectral_similarity
from curvlab.parameters import layout_of, select_parameters
from curvlab.training import Run
from experiments.curvature import gauss_newton, stored_gradients
from experiments.experiment import BySeed, Experiment, rounded
from experiments.paper import HIGH, LOW
from experiments.rotated import (
    DEMO,
    FEW,
    FEW_RAW,
    FULL,
    RATES,
    RAW,
    SMALL,
    Few,
    Rotated,
    caption,
    learned,
    outcome,
    seeds_of,
)
from experiments.shelf import Shelf, Training
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, depends, holds

NOT_MET = Quote("Appendix C", "Importantly, the results reveal that the assumption is not met in "
                "practice", "D of GPM's Hessians")  # fmt: skip
AROUND = Quote(
    "Appendix C", "For both the high and low learning rate case the score is around 0.7", "S of OGD"
)


@dataclass(frozen=True)
class Config:
    stream: Rotated = FULL
    columns: int = 500  # of 17,800, for D
    probes: int = 200  # for S
    few: Few = None


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    found: dict[int, Metrics] = {seed: {} for seed in seeds}
    for rate in RATES:
        gpm = config.stream.training(rate, "GPM")
        for one in shelf.runs(gpm, seeds):
            found[one.seed][rate] = {"D": _diagonality(config, shelf, gpm, one)}
        ogd = config.stream.training(rate, "OGD")
        for one in shelf.runs(ogd, seeds_of("OGD", rate, seeds, config.few)):
            found[one.seed][rate]["S"] = _similarity(config, shelf, ogd, one)
    return found


def _diagonality(config: Config, shelf: Shelf, training: Training, one: Run) -> Metrics:
    labels = layer_labels(layout_of(select_parameters(shelf.model(training, one.seed))))
    scores = [
        block_diagonality(
            shelf.hessian(training, one, task), labels, columns=config.columns,
            generator=derived_generator(one.seed, "columns", task),
        )
        for task in range(len(one.tasks))
    ]  # fmt: skip
    return outcome(one) | _listed(scores)


def _similarity(config: Config, shelf: Shelf, training: Training, one: Run) -> Metrics:
    exact: list[Estimate] = []
    stored: list[Estimate] = []
    for task in range(len(one.tasks)):
        hessian = shelf.hessian(training, one, task)
        for scores, build in ((exact, gauss_newton), (stored, stored_gradients)):
            scores.append(spectral_similarity(
                build(shelf, training, one, task), hessian, probes=config.probes,
                generator=derived_generator(one.seed, "probes", task),
            ))  # fmt: skip
    return outcome(one) | _listed(exact) | {"stored": _listed(stored)}


def _listed(scores: Sequence[Estimate]) -> Metrics:
    values, errors = [score.value for score in scores], [score.error for score in scores]
    return {"scores": rounded(values), "errors": rounded(errors)}


def tables(config: Config, metrics: BySeed) -> list[Table]:
    columns = ("D", "S", "S, Gauss-Newton", "a_tt of GPM", "a_tt of OGD", "errors of D, S")
    title = f"assumptions of GPM (D) and OGD (S), {caption(config.stream, config.few)}"
    table = Table("tab:ASSMPT", title, columns)
    for rate in RATES:
        gpm = [one[rate]["D"] for one in metrics.values() if "D" in one[rate]]
        ogd = [one[rate]["S"] for one in metrics.values() if "S" in one[rate]]
        stored = [one["stored"] for one in ogd if "stored" in one]
        table.add(rate, "D", [score for one in gpm for score in one["scores"]])
        table.add(rate, "S", [score for one in stored for score in one["scores"]])
        table.add(rate, "S, Gauss-Newton", [score for one in ogd for score in one["scores"]])
        table.add(rate, "a_tt of GPM", [learned(one) for one in gpm])
        table.add(rate, "a_tt of OGD", [learned(one) for one in ogd])
        table.add(rate, "errors of D, S", [e for one in (*gpm, *stored) for e in one["errors"]])
    return [table]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config, metrics
    [table] = tables

    def around(column: str) -> Claim:
        return holds(AROUND, [table.mean(rate, column) for rate in (LOW, HIGH)],
                     lambda low, high: max(abs(low - 0.7), abs(high - 0.7)) < 0.1)  # fmt: skip

    return [
        holds(NOT_MET, [table.mean(rate, "D") for rate in (LOW, HIGH)],
              lambda low, high: max(low, high) < 0.5,
              reading="D, 1 for block-diagonal and 0 for random matrices, is nearer to 0"),
        depends(AROUND, {"stored logit gradients": around("S"),
                         "exact Gauss-Newton": around("S, Gauss-Newton")},
                "0.7 within 0.1; the text defines the Gauss-Newton matrix, OGD stores gradients of "
                "logits; the authors' code would decide"),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    label="tab:ASSMPT",
    what="block-diagonality D of the Hessian under GPM, its similarity S to H^O under OGD",
    data="mnist",
    sizes={
        "demo": Config(DEMO, columns=200, probes=50),
        "scaled": Config(SMALL, columns=300, probes=100),
        "few": Config(few=FEW),
        "raw": Config(RAW, few=FEW_RAW),
        "full": Config(),
    },
    run=run,
    tables=tables,
    claims=claims,
    quotes=(NOT_MET, AROUND),
    trainings=lambda config: config.stream.trainings(["GPM", "OGD"], config.few),
    cost={
        "demo": "about 3 min",
        "scaled": "about 5 min a seed",
        "few": "about 1.5 h on one core",
        "raw": "about 2.5 h on one core",
        "full": "about 4 h on one core",
    },
)
