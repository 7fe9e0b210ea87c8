"""Costs are what result lines say: shared trainings counted, interruptions too, no guess hidden."""

from dataclasses import dataclass, replace

import pytest

from experiments import __main__ as command
from experiments.choices import Algorithm
from experiments.costs import Spent, duration, spent
from experiments.experiment import Experiment
from experiments.shelf import LABEL, Training
from experiments.store import Store, make_result

TRAINING = Training("rotated_mnist", "mlp_tiny")
OTHER = replace(TRAINING, learner=Algorithm("GPM", 0.1))


@dataclass(frozen=True)
class Config:
    steps: int = 1


def experiment(label="tab:tiny", trainings=(TRAINING,), **changes):
    facts = {
        "what": "a tiny one", "data": "mnist", "sizes": {"demo": Config(), "full": Config(9)},
        "run": lambda *_: {}, "tables": lambda *_: [], "claims": lambda *_: [],
        "trainings": lambda _config: trainings, "cost": {"demo": "1 s", "full": "9 days (guess)"},
    }  # fmt: skip
    return Experiment(label=label, **(facts | changes))


def measured(seed, seconds, size="demo", label="tab:tiny", version="1"):
    config = Config() if size == "demo" else Config(9)
    return make_result(label, size, seed, config, {}, seconds, version, "typed")


def trained(seed, seconds, training=TRAINING, noted=0.0):
    notes = [{"train_seconds": noted / 2, "after_task_seconds": noted / 2}] if noted else []
    return make_result(
        LABEL, "", seed, training, {"notes": notes}, seconds, training.version, "typed"
    )


def test_what_never_ran_has_no_measured_cost():
    assert spent([trained(1, 5.0)], experiment(), "demo") is None
    assert spent([measured(1, 5.0, version="0")], experiment(), "demo") is None
    assert spent([measured(1, 5.0)], experiment(), "full") is None


def test_measuring_and_training_of_the_same_seeds_are_added():
    lines = [measured(1, 2.0), measured(2, 3.0), trained(1, 10.0), trained(2, 20.0),
             trained(3, 1000.0), trained(1, 7.0, OTHER)]  # fmt: skip
    assert spent(lines, experiment(), "demo") == Spent(2, 5.0, 30.0)
    both = experiment(trainings=(TRAINING, OTHER))
    assert spent(lines, both, "demo") == Spent(2, 5.0, None), "seed 2 of the second is not known"
    assert spent([*lines, trained(2, 8.0, OTHER)], both, "demo") == Spent(2, 5.0, 45.0)


def test_a_seed_that_was_measured_again_counts_once():
    assert spent([measured(1, 2.0), measured(1, 4.0)], experiment(trainings=()), "demo") == Spent(
        1, 4.0, 0
    )


def test_seconds_before_an_interruption_count():
    # two seeds side by side: 60 s together, of which the resumed part took 2 x 10 s
    lines = [measured(1, 0.0), measured(2, 0.0), trained(1, 10.0, noted=60.0),
             trained(2, 10.0, noted=60.0)]  # fmt: skip
    assert spent(lines, experiment(), "demo") == Spent(2, 0.0, 60.0)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (Spent(1, 30.0, 0.0), "30 s (1 seed, measured)"),
        (Spent(5, 30.0, 570.0), "10 min, 10 min of it training (5 seeds, measured)"),
        (Spent(2, 7200.0, None), "2.0 h without training (2 seeds, measured)"),
    ],
)
def test_a_cost_says_what_is_in_it(one, text):
    assert str(one) == text


def test_durations_have_the_unit_that_a_reader_expects():
    assert [duration(s) for s in (0.4, 99, 101, 5999, 9000)] == [
        "0 s", "99 s", "2 min", "100 min", "2.5 h",
    ]  # fmt: skip


def test_list_shows_measured_costs_here_or_committed_and_estimates_elsewhere(
    tmp_path, monkeypatch, capsys
):
    one, two = experiment(), experiment("tab:other")
    monkeypatch.setattr(command, "EXPERIMENTS", (one, two))
    monkeypatch.setattr(command, "COMMITTED", tmp_path / "committed")
    Store(tmp_path / "committed").append([measured(1, 40.0), trained(1, 20.0)])
    Store(tmp_path / "here").append([measured(1, 50.0, label="tab:other"), trained(1, 20.0)])
    assert command.main(["list", "--results", str(tmp_path / "here")]) == 0
    said = capsys.readouterr().out
    assert "demo    60 s, 20 s of it training (1 seed, measured)" in said
    assert "demo    70 s, 20 s of it training (1 seed, measured)" in said
    assert said.count("full    9 days (guess)") == 2
    assert not (tmp_path / "here" / "locks" / "label").exists()
