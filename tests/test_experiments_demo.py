"""The demonstration, tiny: spectra, table, claims, and a page with the committed results below."""

import json
from argparse import Namespace

import pytest
import torch

from curvlab.cli import demo as shell
from experiments import demo
from experiments.store import COMMITTED, Store

TINY = demo.Config(seeds=(11,), train=60, test=60, epochs=1, k=3, samples=20)


@pytest.fixture(scope="module")
def said():
    return []


@pytest.fixture(scope="module")
def metrics(said):
    torch.set_num_threads(1)
    found = demo.measure(TINY, said.append)
    return {seed: json.loads(json.dumps(one, sort_keys=True)) for seed, one in found.items()}


def test_every_learner_is_trained_at_both_rates_and_has_its_row(metrics, said):
    lost, top = demo.tables(TINY, metrics)
    assert list(lost.rows) == [f"{r} rate, {n}" for r in demo.RATES for n in demo.NAMES]
    assert all(0.0 <= lost.mean(row, "a_tt") <= 1.0 for row in lost.rows)
    assert list(top.rows) == ["task 1", "task 2", "task 3"]
    assert sum("trained" in text for text in said) == 8
    assert any("spectra of 1 x 3 solutions" in text for text in said)
    assert len(demo.claims(TINY, metrics, [lost, top])) == 3


def test_the_two_rates_share_their_first_task(metrics):
    for name in demo.NAMES:
        high, low = (metrics[11][rate][name]["accuracy"] for rate in demo.RATES)
        assert high[0] == low[0]


def test_spectra_are_those_of_the_hessian_at_the_solutions(metrics):
    tasks = TINY.tasks()
    run = demo.train(TINY, tasks, "SGD", "high")[0]
    for task, listed in enumerate(metrics[11]["spectra"]):
        model = demo.mlp(dtype=torch.float64)
        demo.load_parameter_vector(model, run.snapshots[task].double())
        some = demo.subset(tasks[task].train, TINY.samples, seed=0).to(dtype=torch.float64)
        operator = demo.Hessian(model, demo.cross_entropy, some)
        true = demo.lanczos(operator, TINY.k, tol=1e-8, progress=False)
        error = (torch.tensor(listed["values"]).double() - true.values).abs()
        assert bool((error <= torch.tensor(listed["residuals"]) + 1e-4 * true.values.abs()).all())


def test_the_page_has_the_demonstration_on_top_and_the_committed_results_below(metrics, tmp_path):
    for _ in range(2):  # a second demonstration replaces the first
        page = demo.report(TINY, metrics, 1.0, tmp_path)
    text = page.read_text()
    assert text.index('id="demo-demo"') < text.index('id="fig-cartoon-forgetting-full"')
    assert "make demo" in text
    assert (tmp_path / "report" / "figures" / "demo-demo.png").stat().st_size > 10_000
    assert "high rate, SGD†-20" in text
    lines = Store(tmp_path / "results").results()
    assert sum(one.label == "demo" for one in lines) == 1
    assert {one.key for one in Store(COMMITTED).results()} < {one.key for one in lines}


def test_the_demonstration_keeps_rate_times_steps():
    one = demo.Config()
    steps = one.epochs * one.train // 10
    assert (one.high * steps, one.low * steps) == (pytest.approx(300.0), pytest.approx(0.9))


def test_what_curvlab_demo_shows_is_what_this_one_shows_at_the_low_rate(metrics, tmp_path):
    options = Namespace(quiet=True, progress=False, verb="demo", arguments=["demo"])
    for here, there in (("SGD", "SGD"), ("SGD-dagger-20", "SGD-dagger")):
        (run,) = shell._train(options, TINY, TINY.tasks(), there, tmp_path)
        assert demo.outcome(run) == metrics[11]["low"][here]
    assert isinstance(demo.Config(), shell.Stream)
