"""The main job in miniature: a spectrum, and four learners on Rotated-MNIST at two learning rates.

    python -m experiments.demo --out demo

Embedded data, three tasks, three seeds, scaled as the paper's runs scale: learning rate times steps
is kept. It prints the spectrum with its certificate and the table of forgetting with the paper's
claims, and draws both. Forgetting little is no merit in a run that learned little: a_tt stands
beside E(3).
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from curvlab.eigen import Eigenpairs, lanczos
from curvlab.learners import GPM, OGD, SGD, Learner, SGDDagger
from curvlab.metrics import (
    accuracy_forgetting,
    average_accuracy,
    average_forgetting,
    current_accuracy,
)
from curvlab.nets import mlp
from curvlab.operators import Hessian
from curvlab.parameters import load_parameter_vector
from curvlab.tasks import Task, limit, rotated_mnist, subset
from curvlab.training import Run, Schedule, learn
from experiments.tables import Claim, Table, claim


@dataclass(frozen=True)
class Config:
    seeds: tuple[int, ...] = (11, 13, 21)
    angles: tuple[float, ...] = (-45.0, 0.0, 45.0)  # of the paper's five
    train: int = 2000  # images per task: 200 steps an epoch
    epochs: int = 15  # 3,000 steps a task
    high: float = 0.1  # 0.1 x 3,000 = 300, the paper's 0.01 x 30,000
    low: float = 3e-4  # 3e-4 x 3,000 = 0.9, the paper's 1e-5 x 90,000
    k: int = 20  # eigenvectors per task; the paper's rule, 99 % of the energy, takes many more here
    epsilon: float = 0.01  # of the energy that OGD and GPM leave out
    samples: int = 300  # for Hessians and memories; the paper's 1,000 cost a few minutes more


def learners(config: Config) -> dict[str, Learner]:
    """Fresh learners by the name in the table; GPM's network has no biases, as in the paper."""
    return {
        "SGD": SGD(),
        "SGD†-20": SGDDagger(config.k, samples=config.samples),
        "OGD": OGD(config.epsilon, samples=config.samples),
        "GPM": GPM(1.0 - config.epsilon, samples=config.samples),
    }


def train(config: Config, tasks: list[Task], name: str, rate: float) -> list[Run]:
    return learn(
        lambda seed: mlp(seed=seed, bias=name != "GPM"),
        tasks,
        learners(config)[name],
        Schedule(lr=config.high, lr_later=rate, epochs=config.epochs),
        seeds=config.seeds,
    )


def spectrum(config: Config, run: Run, task: Task) -> Eigenpairs:
    """The top of the Hessian after the first task, on which SGD† rests."""
    model = mlp()
    load_parameter_vector(model, run.snapshots[0])
    some = subset(task.train, config.samples, seed=0)
    return lanczos(Hessian(model, cross_entropy, some), 20, tol=1e-3)


def table(runs: dict[tuple[str, str], list[Run]]) -> Table:
    found = Table("fig:comparisonRM", "forgetting and accuracy", ("E(3)", "a(3)", "a_tt", "loss"))
    for (rate, name), group in runs.items():
        accuracy = torch.stack([run.test_accuracy for run in group])
        row = f"{rate} lr, {name}"
        forgetting = average_forgetting(accuracy_forgetting(accuracy), "t-1")
        found.add(row, "E(3)", forgetting[:, -1].tolist())
        found.add(row, "a(3)", average_accuracy(accuracy)[:, -1].tolist())
        found.add(row, "a_tt", current_accuracy(accuracy).mean(1).tolist())
        found.add(row, "loss", [float(run.test_loss[-1].mean()) for run in group])
    return found


def claims(found: Table) -> list[Claim]:
    def forgotten(*rows: str) -> list[float]:
        return [found.mean(row, "E(3)") for row in rows]

    high = forgotten(*(f"high lr, {name}" for name in ("SGD", "SGD†-20", "OGD", "GPM")))
    low = forgotten(*(f"low lr, {name}" for name in ("SGD", "SGD†-20", "OGD", "GPM")))
    return [
        claim("high lr: GPM forgets least", high, lambda s, d, o, g: g < min(s, d, o)),
        claim("high lr: SGD† is like SGD", high[:2], lambda s, d: abs(s - d) < 0.25 * s),
        claim("high lr: OGD is like SGD", [high[0], high[2]], lambda s, o: abs(s - o) < 0.25 * s),
        claim("low lr: SGD†, OGD and GPM forget less than SGD", low,
              lambda s, d, o, g: max(d, o, g) < s),
        claim("all forget less at the low rate", [*high, *low],
              lambda *e: all(a > b for a, b in zip(e[:4], e[4:], strict=True))),
    ]  # fmt: skip


def figure(runs: dict[tuple[str, str], list[Run]], pairs: Eigenpairs, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    axes[0].errorbar(
        range(1, len(pairs) + 1), pairs.values.abs(), yerr=pairs.residuals, fmt="o", ms=4, capsize=2
    )
    axes[0].set(title="|eigenvalues| after task 1", yscale="log", xlabel="i")
    styles = dict(zip(("SGD", "SGD†-20", "OGD", "GPM"), ("o-", "s--", "^-.", "D:"), strict=True))
    for axis, rate in zip(axes[1:], ("high", "low"), strict=True):
        for name, style in styles.items():
            accuracy = torch.stack([run.test_accuracy for run in runs[rate, name]])
            curve = average_forgetting(accuracy_forgetting(accuracy), "t-1")
            steps = range(1, curve.shape[1] + 1)
            axis.errorbar(steps, curve.mean(0), yerr=curve.std(0), fmt=style, capsize=2, label=name)
        axis.set(title=f"{rate} learning rate", xlabel="task t", ylabel="E(t), accuracy")
        axis.set(ylim=(-0.06, 0.66), xticks=list(steps))  # one scale: the rates are to be compared
        axis.axhline(0.0, color="0.7", lw=0.8)
    axes[1].legend()
    plots.savefig(path, dpi=150)
    plt.close(plots)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the picture")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # these networks are small: a second thread only waits
    config, began = Config(), time.perf_counter()
    tasks = limit(rotated_mnist(angles=config.angles), train=config.train)
    runs: dict[tuple[str, str], list[Run]] = {}
    for rate, value in (("high", config.high), ("low", config.low)):
        for name in learners(config):
            runs[rate, name] = train(config, tasks, name, value)
            print(f"[{time.perf_counter() - began:5.0f} s] {rate} learning rate, {name}: trained")
    pairs = spectrum(config, runs["high", "SGD"][0], tasks[0])
    found = table(runs)
    print(f"\n{pairs}\n\n{found}\n")
    print("\n".join(map(str, claims(found))))
    (options.out / "table.csv").write_text(found.to_csv())
    figure(runs, pairs, options.out / "forgetting.png")
    print(f"\npicture: {options.out / 'forgetting.png'}   table: {options.out / 'table.csv'}")


if __name__ == "__main__":
    main()
