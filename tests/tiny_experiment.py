"""An experiment of seconds, for what surrounds experiments: commands, stores, processes."""

from dataclasses import dataclass, replace

from experiments.__main__ import main
from experiments.experiment import Experiment
from experiments.shelf import Training
from experiments.tables import Table
from experiments.verdicts import holds

TINY = Training(
    "rotated_mnist", "mlp_tiny", rates="0.1", epochs="2", tasks=2, train=60, test=60, samples=20,
    embedded=True,
)  # fmt: skip
LONG = replace(TINY, train=None, epochs="12")  # 6,000 steps a task: time to stop it


@dataclass(frozen=True)
class Config:
    training: Training = TINY
    power: int = 1


def run(config, seeds, shelf):
    return {
        one.seed: {"accuracy": float(one.test_accuracy[-1, -1]) ** config.power}
        for one in shelf.runs(config.training, seeds)
    }


def tables(_config, metrics):
    table = Table("tab:tiny", "accuracy", ("accuracy",))
    table.add("SGD", "accuracy", [one["accuracy"] for one in metrics.values()])
    return [table]


def claims(_config, metrics, _tables):
    values = [one["accuracy"] for one in metrics.values()]
    return [holds("accuracy is a share", values, lambda *a: all(0 <= value <= 1 for value in a))]


def experiment(label="tab:tiny", training=TINY, power=1, **changes):
    return Experiment(
        label=label, what="a tiny one", data="none", sizes={"demo": Config(training, power)},
        run=run, tables=tables, claims=claims, trainings=lambda config: [config.training],
        cost={"demo": "1 s"}, **changes,
    )  # fmt: skip


def command(*arguments, results):
    return main([*arguments, "--results", str(results)])
