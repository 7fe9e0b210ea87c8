"""Forgetting in two dimensions (fig:cartoon_forgetting and fig:cartoon_forgetting2).

One MLP learns three tasks one after the other, then, from the same start, all three together. The
picture shows its decision after each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from curvlab.learners import SGD
from curvlab.nets import mlp
from curvlab.parameters import load_parameter_vector
from curvlab.tasks import joined, toy_challenge
from curvlab.training import Schedule, learn
from experiments.experiment import BySeed, Experiment
from experiments.figures import panels, save
from experiments.shelf import Shelf
from experiments.tables import Metrics, Table
from experiments.verdicts import Claim, Quote, holds

PERFECT = Quote("caption of fig:cartoon_forgetting", "after the first task (left), the network can "
                "perfectly discriminate between the two classes")  # fmt: skip
ENTIRELY = Quote("caption of fig:cartoon_forgetting", "the network forgets the first task entirely")
EXISTS = Quote("caption of fig:cartoon_forgetting2", "This demonstrates that a multitask solution "
               "exists")  # fmt: skip

SPAN = 3.4  # the picture shows -3.4 .. 3.4 in both directions
TOGETHER = "all together"


@dataclass(frozen=True)
class Config:
    sizes: tuple[int, ...] = (2, 50, 50, 2)
    samples: int = 400  # per task
    lr: float = 0.1  # high: the tasks' solutions need not be close for a cartoon
    epochs: int = 15  # 600 steps of 10 samples per task
    epochs_together: int = 45  # 5,400 steps: with 1,500 the third task is not learned yet
    grid: int = 61  # points of the picture along a side


def run(config: Config, seeds: Sequence[int], shelf: Shelf) -> dict[int, Metrics]:
    """Train one network on the stream and one on the joint task: too quick to keep on a shelf."""
    del shelf
    return {seed: _run(config, seed) for seed in seeds}


def _run(config: Config, seed: int) -> Metrics:
    tasks = toy_challenge(config.samples, seed=seed)

    def model(seed: int) -> torch.nn.Module:
        return mlp(config.sizes, seed=seed)

    (stream,) = learn(model, tasks, SGD(), Schedule(config.lr, epochs=config.epochs), seeds=seed)
    together = Schedule(config.lr, epochs=config.epochs_together)
    (joint,) = learn(model, [joined(tasks)], SGD(), together, seeds=seed)
    stages = [*(f"after {task.name}" for task in tasks), TOGETHER]
    x, y = _grid(config)
    points = torch.stack([x.flatten(), y.flatten()], 1)
    # in lists too: a results file does not keep the order of keys
    found: Metrics = {
        "stages": stages, "tasks": [t.name for t in tasks], "accuracy": {}, "decision": {}
    }  # fmt: skip
    for stage, row in zip(stages, torch.cat([stream.snapshots, joint.snapshots]), strict=True):
        network = mlp(config.sizes)
        load_parameter_vector(network, row)
        with torch.no_grad():
            found["accuracy"][stage] = {
                t.name: _accuracy(network(t.test.inputs), t.test.targets) for t in tasks
            }
            share = network(points).softmax(1)[:, 1].reshape(x.shape)
        # a byte per point in hexadecimal: a hundred decimals would say no more
        found["decision"][stage] = [bytes(line).hex() for line in (share * 255).byte().tolist()]
    return found


def _grid(config: Config) -> tuple[Tensor, Tensor]:
    span = torch.linspace(-SPAN, SPAN, config.grid)
    x, y = torch.meshgrid(span, span, indexing="xy")
    return x, y


def _accuracy(logits: Tensor, targets: Tensor) -> float:
    return round(float((logits.argmax(1) == targets).double().mean()), 4)


def tables(config: Config, metrics: BySeed) -> list[Table]:
    del config
    empty: Metrics = {"stages": [], "tasks": []}
    first = next(iter(metrics.values()), empty)
    table = Table("fig:cartoon_forgetting", "test accuracy, toy tasks", tuple(first["tasks"]))
    for stage in first["stages"]:
        for task in first["tasks"]:
            table.add(stage, task, [one["accuracy"][stage][task] for one in metrics.values()])
    return [table]


def claims(config: Config, metrics: BySeed, tables: list[Table]) -> list[Claim]:
    del config, metrics
    [table] = tables
    names = table.columns
    own = [table.mean(f"after {name}", name) for name in names]
    return [
        holds(PERFECT, own[:1], lambda accuracy: accuracy > 0.99, reading="above 0.99"),
        holds(ENTIRELY, [table.mean(f"after {names[-1]}", names[0])],
              lambda accuracy: abs(accuracy - 0.5) < 0.1, reading="chance, 0.5, within 0.1"),
        holds(EXISTS, [table.mean(TOGETHER, name) for name in names], lambda *a: min(a) > 0.9,
              reading="one network above 0.9 on all three"),
        holds("each task is learned (above 0.95)", own, lambda *a: min(a) > 0.95),
    ]  # fmt: skip


def figure(config: Config, metrics: BySeed, path: Path) -> None:
    """Four panels: shade is the probability of class 1, the line is where it is one half."""
    seed, one = next(iter(metrics.items()))
    tasks = toy_challenge(config.samples, seed=seed)
    x, y = _grid(config)
    plots, axes = panels(len(one["stages"]), width=3.5, height=4.15)
    for panel, (axis, stage) in enumerate(zip(axes, one["stages"], strict=True)):
        lines = [list(bytes.fromhex(line)) for line in one["decision"][stage]]
        share = torch.tensor(lines) / 255
        axis.contourf(x, y, share, levels=[i / 10 for i in range(11)], cmap="RdBu", alpha=0.55)
        axis.contour(x, y, share, levels=[0.5], colors="black", linewidths=1.2)
        for number, task in enumerate(tasks):
            known = number <= panel
            for label, colour in ((0, "#b2182b"), (1, "#2166ac")):
                points = task.test.inputs[task.test.targets == label][:80]
                axis.scatter(
                    *points.T, s=11, color=colour, alpha=0.9 if known else 0.15,
                    edgecolors="white" if known else "none", linewidths=0.4,
                )  # fmt: skip
            low = float(task.test.inputs[:, 1].min())
            axis.annotate(
                f"task {number + 1}: {one['accuracy'][stage][task.name]:.1%}",
                (float(task.test.inputs[:, 0].mean()), low - 0.12), ha="center", va="top",
                fontsize=9, color="black" if known else "0.45",
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
        title = "all tasks together" if stage == TOGETHER else f"after task {panel + 1}"
        axis.set(title=title, aspect="equal", xlim=(-SPAN, SPAN), ylim=(-SPAN, SPAN))
        axis.set(xticks=[], yticks=[])
    note = f"beside each task: its test accuracy (faint: not learned yet); seed {seed}"
    plots.supxlabel(note, fontsize=10)
    save(plots, path)


EXPERIMENT = Experiment(
    label="fig:cartoon_forgetting",
    also=("fig:cartoon_forgetting2",),
    what="forgetting in two dimensions: one MLP, three tasks, one after the other and together",
    data="none",
    sizes={"demo": Config(), "scaled": Config(), "full": Config()},
    run=run,
    tables=tables,
    claims=claims,
    quotes=(PERFECT, ENTIRELY, EXISTS),
    figure=figure,
    cost={"demo": "10 s", "scaled": "10 s", "full": "10 s"},
    version="2",
)
