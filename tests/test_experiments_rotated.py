"""Every Rotated-MNIST label at a tiny size: it runs, its numbers are what their names say."""

import json
import math
from dataclasses import replace

import pytest
import torch

from curvlab.metrics import loss_forgetting
from experiments import (
    assumptions,
    comparison,
    energy,
    extension,
    perturbation,
    random_matrices,
    ranks,
    recursion,
    taylor,
    violation,
)
from experiments.paper import HIGH, LOW
from experiments.rotated import (
    DEMO,
    FULL,
    RATES,
    SMALL,
    Comparison,
    Only,
    Rotated,
    lower_rows,
    square,
)
from experiments.shelf import Shelf
from experiments.store import Store
from experiments.verdicts import VERDICTS

SEEDS = [11]
TINY = Rotated(
    high="0.1", low="{0.1, 0.01}", epochs_high="2", epochs_low="2", tasks=3, train=60, test=80,
    samples=20, epsilon=0.3, network="mlp_tiny", embedded=True,
)  # fmt: skip
CONFIGS = {
    taylor: taylor.Config(TINY),
    recursion: recursion.Config(TINY),
    comparison: Comparison(TINY),
    violation: Comparison(TINY),
    assumptions: assumptions.Config(TINY, columns=30, probes=5),
    random_matrices: random_matrices.Config(n=20, trials=5),
    energy: energy.Config(TINY, levels=(0.0, 0.3, 1.0)),
    ranks: ranks.Config(TINY, most=40, probes=2, steps=20),
    perturbation: perturbation.Config(TINY.training(HIGH), directions=2, random=2, per_decade=1),
    extension: extension.Config(TINY),
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """One shelf for all labels, as in life: what they share is trained once."""
    return Shelf(Store(tmp_path_factory.mktemp("results")))


@pytest.fixture(scope="module")
def measured(shelf):
    found = {}

    def measure(module):
        if module not in found:
            torch.set_num_threads(1)
            metrics = module.EXPERIMENT.run(CONFIGS[module], SEEDS, shelf)
            # what is stored and read back is what tables see
            found[module] = {
                seed: json.loads(json.dumps(one, sort_keys=True)) for seed, one in metrics.items()
            }
        return found[module]

    return measure


@pytest.mark.parametrize("module", CONFIGS, ids=lambda module: module.__name__)
def test_a_label_gives_tables_claims_and_a_figure_from_its_metrics(module, measured, tmp_path):
    experiment, config, metrics = module.EXPERIMENT, CONFIGS[module], measured(module)
    assert list(metrics) == SEEDS
    for table in experiment.tables(config, metrics):
        assert table.rows
        for row, cells in table.rows.items():
            for column, cell in cells.items():
                assert all(map(math.isfinite, cell.samples)), (row, column)
        if experiment.data != "none":
            assert any(column.startswith("a_tt") for column in table.columns)
    claims = experiment.claims(config, metrics, experiment.tables(config, metrics))
    assert claims
    assert {claim.verdict for claim in claims} <= set(VERDICTS)
    assert all(len(json.dumps(one)) < 40_000 for one in metrics.values())
    if experiment.figure is not None:
        experiment.figure(config, metrics, tmp_path / "figure")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("module", CONFIGS, ids=lambda module: module.__name__)
def test_every_run_that_a_label_announces_is_the_one_it_asks_for(module, measured, shelf):
    measured(module)
    announced = module.EXPERIMENT.trainings
    for training in announced(CONFIGS[module]) if announced else ():
        assert all(shelf.file(training, seed).exists() for seed in SEEDS)


def test_taylor_errors_are_those_of_the_dense_quadratic_model(measured, shelf):
    training = TINY.training(HIGH)
    one = shelf.runs(training, SEEDS)[0]
    operator = shelf.hessian(training, one, 0)
    moved = (one.snapshots[2] - one.snapshots[0]).double()
    dense = operator.dense().double()
    forgotten = loss_forgetting(one.test_loss)[2, 0]
    metrics = measured(taylor)[SEEDS[0]][HIGH]
    first, second = metrics["first"][2][0], metrics["second"][2][0]
    assert first == pytest.approx(float(moved @ operator.gradient().double()), rel=1e-4)
    assert second == pytest.approx(float(0.5 * moved @ dense @ moved), rel=1e-3)
    [table] = taylor.tables(CONFIGS[taylor], {SEEDS[0]: measured(taylor)[SEEDS[0]]})
    cell = table.rows[f"{HIGH}, all o"]["taylor"]
    assert len(cell.samples) == 3  # the pairs of three tasks
    assert cell.samples[1] == pytest.approx(abs(first + second - float(forgotten)), abs=2e-5)


def test_the_two_rates_start_from_the_same_first_task(measured):
    for one in measured(taylor).values():
        assert one[LOW]["accuracy"][0] == one[HIGH]["accuracy"][0]


def test_eps_1_is_plain_sgd_and_eps_0_learns_nothing_more(measured):
    for one in measured(energy).values():
        assert one["1"]["is SGD"]
        assert not one["0.3"]["is SGD"]
        assert one["0"]["still"]
        assert not one["0.3"]["still"]


def test_learners_that_are_told_the_task_forget_exactly_nothing(measured):
    [table] = extension.tables(CONFIGS[extension], measured(extension))
    for row in (row for row in table.rows if "told" in row):
        assert table.mean(row, "E(T)") == 0.0


@pytest.mark.parametrize("size", [DEMO, SMALL, FULL], ids=["demo", "scaled", "full"])
def test_every_size_keeps_rate_times_steps(size):
    for rate, wanted in ((HIGH, 300.0), (LOW, 0.9)):
        training = size.training(rate)
        schedule = training.schedule()
        steps = schedule.epochs_of(1) * (training.train or 60_000) / training.batch_size
        assert schedule.lr_at(1, 0) * steps == pytest.approx(wanted)
        assert schedule.lr_at(0, 0) == size.training(HIGH).schedule().lr_at(0, 0)


def test_matrices_survive_the_results_file():
    matrix = torch.tensor([[0.5, float("nan")], [0.25, 1.0]], dtype=torch.float64)
    assert torch.equal(square(lower_rows(matrix)), torch.tensor([[0.5, 0.0], [0.25, 1.0]]).double())


def test_random_matrices_give_the_published_spread():
    config = random_matrices.Config(trials=60)
    metrics = random_matrices.run(config, [1], None)
    _, claims = random_matrices.EXPERIMENT.judged("demo", metrics)
    assert [claim.verdict for claim in claims] == ["agree", "agree"]


def test_gpm_is_trained_without_biases_and_the_others_with():
    assert {FULL.training(rate, "GPM").network for rate in RATES} == {"mlp_unbiased"}
    assert {FULL.training(rate, name).network for rate in RATES for name in ("SGD", "OGD")} == {
        "mlp"
    }


@pytest.mark.parametrize("module", [comparison, violation, assumptions], ids=lambda m: m.__name__)
def test_what_few_seeds_leave_out_is_not_tested_and_said(module, measured, shelf, tmp_path):
    measured(module)  # so that nothing is trained here
    left_out = [Only(learner, LOW, ()) for learner in ("SGD-dagger", "OGD")]
    config = replace(CONFIGS[module], few=tuple(left_out))
    metrics = module.EXPERIMENT.run(config, SEEDS, shelf)
    [table] = module.tables(config, metrics)
    assert f"OGD at {LOW}: left out" in table.title
    [whole] = module.tables(CONFIGS[module], measured(module))
    for row in (
        row for row in table.rows if not row.endswith(("OGD", "own samples", "SGD-dagger"))
    ):
        of_ogd = ("S", "S, Gauss-Newton", "errors of D, S", "a_tt of OGD")
        shown = [column for column in table.columns if column not in of_ogd]
        assert [table.mean(row, c) for c in shown] == [whole.mean(row, c) for c in shown]
    claims = module.claims(config, metrics, [table])
    assert any("not tested" in (claim.verdict, claim.measured) or "not run" in claim.measured
               or "none" in claim.measured for claim in claims)  # fmt: skip
    if module is comparison:
        module.figure(config, metrics, tmp_path / "figure")
    trained = {(one.learner.name, one.rates) for one in module.EXPERIMENT.trainings(config)}
    stream = config.stream
    assert {learner for learner, rates in trained if rates == stream.low} <= {"SGD", "GPM"}
    assert ("OGD", stream.high) in trained
