"""What the guarantees of GPM and OGD assume (tab:ASSMPT).

D(H_t), near 1 if the Hessian were block-diagonal as GPM's corollary has it, along GPM's runs; and
S(H^O_t, H_t), 1 if the outer-product part were all of the Hessian as OGD's has it, along OGD's. D
comes from exact columns drawn at random, S from Hutchinson probes; both carry standard errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from curvlab.learners.seeds import derived_generator
from curvlab.metrics import Estimate, block_diagonality, layer_labels, spectral_similarity
from curvlab.parameters import layout_of, select_parameters
from curvlab.training import Run
from experiments.curvature import gauss_newton
from experiments.experiment import BySeed, Experiment, rounded
from experiments.paper import HIGH, LOW
from experiments.rotated import (
    DEMO,
    FEW,
    FULL,
    RATES,
    SMALL,
    Few,
    Rotated,
    caption,
    learned,
    outcome,
    seeds_of,
)
from experiments.shelf import Shelf, Training
from experiments.tables import Claim, Metrics, Table, claim


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
    scores = [
        spectral_similarity(
            gauss_newton(shelf, training, one, task), shelf.hessian(training, one, task),
            probes=config.probes, generator=derived_generator(one.seed, "probes", task),
        )
        for task in range(len(one.tasks))
    ]  # fmt: skip
    return outcome(one) | _listed(scores)


def _listed(scores: Sequence[Estimate]) -> Metrics:
    values, errors = [score.value for score in scores], [score.error for score in scores]
    return {"scores": rounded(values), "errors": rounded(errors)}


def tables(config: Config, metrics: BySeed) -> list[Table]:
    columns = ("D", "error of D", "a_tt of GPM", "S", "error of S", "a_tt of OGD")
    title = f"assumptions of GPM (D) and OGD (S), {caption(config.stream, config.few)}"
    table = Table("tab:ASSMPT", title, columns)
    for rate in RATES:
        for side, learner in (("D", "GPM"), ("S", "OGD")):
            group = [one[rate][side] for one in metrics.values() if side in one[rate]]
            table.add(rate, side, [score for one in group for score in one["scores"]])
            table.add(rate, f"error of {side}", [e for one in group for e in one["errors"]])
            table.add(rate, f"a_tt of {learner}", [learned(one) for one in group])
    return [table]


def claims(config: Config, metrics: BySeed) -> list[Claim]:
    [table] = tables(config, metrics)
    return [
        claim("D is about 0: Hessians are not block-diagonal",
              [table.mean(rate, "D") for rate in (LOW, HIGH)],
              lambda low, high: max(abs(low), abs(high)) < 0.25),
        claim("S is about 0.7 at both rates", [table.mean(rate, "S") for rate in (LOW, HIGH)],
              lambda low, high: max(abs(low - 0.7), abs(high - 0.7)) < 0.15),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    label="tab:ASSMPT",
    what="block-diagonality D of the Hessian under GPM, its similarity S to H^O under OGD",
    data="mnist",
    sizes={
        "demo": Config(DEMO, columns=200, probes=50),
        "scaled": Config(SMALL, columns=300, probes=100),
        "few": Config(few=FEW),
        "full": Config(),
    },
    run=run,
    tables=tables,
    claims=claims,
    trainings=lambda config: config.stream.trainings(["GPM", "OGD"], config.few),
    cost={
        "demo": "about 3 min",
        "scaled": "about 5 min a seed",
        "few": "about 1.5 h on one core",
        "full": "about 4 h on one core",
    },
)
