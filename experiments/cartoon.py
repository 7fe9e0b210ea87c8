"""Forgetting in two dimensions (fig:cartoon_forgetting and fig:cartoon_forgetting2).

One MLP learns three tasks one after the other, then, from the same start, all three together. The
picture shows its decision after each. ``python -m experiments.cartoon --out DIR``
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.learners import SGD
from curvlab.nets import mlp
from curvlab.parameters import load_parameter_vector
from curvlab.tasks import Samples, Task, joined, toy_challenge
from curvlab.training import Schedule, learn


@dataclass(frozen=True)
class Config:
    sizes: tuple[int, ...] = (2, 50, 50, 2)
    samples: int = 400  # per task
    lr: float = 0.1  # high: the tasks' solutions need not be close for a cartoon
    epochs: int = 15  # 600 steps of 10 samples per task
    epochs_together: int = 45  # 5,400 steps: with 1,500 the third task is not learned yet


@dataclass(frozen=True)
class Cartoon:
    """``parameters`` ``(4, P)`` after each task and after all together; accuracies ``(4, 3)``."""

    tasks: list[Task]
    parameters: Tensor
    accuracies: Tensor


def run(config: Config, seed: int) -> Cartoon:
    """Train one network on the stream and one on the joint task."""
    tasks = toy_challenge(config.samples, seed=seed)

    def model(seed: int) -> torch.nn.Module:
        return mlp(config.sizes, seed=seed)

    (stream,) = learn(model, tasks, SGD(), Schedule(config.lr, epochs=config.epochs), seeds=seed)
    together = Schedule(config.lr, epochs=config.epochs_together)
    (joint,) = learn(model, [joined(tasks)], SGD(), together, seeds=seed)
    parameters = torch.cat([stream.snapshots, joint.snapshots])
    accuracies = [
        [float((logits(config, row, t.test).argmax(1) == t.test.targets).double().mean())
         for t in tasks]
        for row in parameters
    ]  # fmt: skip
    return Cartoon(tasks, parameters, torch.tensor(accuracies))


def logits(config: Config, parameters: Tensor, samples: Samples) -> Tensor:
    """Outputs ``(N, 2)`` of the network with flat ``parameters`` ``(P,)``."""
    network = mlp(config.sizes)
    load_parameter_vector(network, parameters)
    with torch.no_grad():
        result: Tensor = network(samples.inputs)
    return result


def metrics(found: Cartoon) -> dict[str, Any]:
    """Test accuracy on each task, after each task and after all of them together."""
    stages = [*(f"after {task.name}" for task in found.tasks), "all together"]
    names = [task.name for task in found.tasks]
    return {
        stage: dict(zip(names, (round(a, 4) for a in row), strict=True))
        for stage, row in zip(stages, found.accuracies.tolist(), strict=True)
    }


def figure(config: Config, found: Cartoon, path: Path) -> None:
    """Four panels: shade is the probability of class 1, the line is where it is one half."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    span = torch.linspace(-3.4, 3.4, 241)
    x, y = torch.meshgrid(span, span, indexing="xy")
    grid = Samples(torch.stack([x.flatten(), y.flatten()], 1), torch.zeros(x.numel()).long())
    plots, axes = plt.subplots(1, 4, figsize=(14, 4.15), sharey=True, layout="constrained")
    titles = [f"after task {i + 1}" for i in range(3)] + ["all tasks together"]
    for panel, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        share = logits(config, found.parameters[panel], grid).softmax(1)[:, 1].reshape(x.shape)
        axis.contourf(x, y, share, levels=[i / 10 for i in range(11)], cmap="RdBu", alpha=0.55)
        axis.contour(x, y, share, levels=[0.5], colors="black", linewidths=1.2)
        for number, task in enumerate(found.tasks):
            learned = number <= panel
            for label, colour in ((0, "#b2182b"), (1, "#2166ac")):
                points = task.test.inputs[task.test.targets == label][:80]
                axis.scatter(
                    *points.T, s=11, color=colour, alpha=0.9 if learned else 0.15,
                    edgecolors="white" if learned else "none", linewidths=0.4,
                )  # fmt: skip
            low = float(task.test.inputs[:, 1].min())
            axis.annotate(
                f"task {number + 1}: {float(found.accuracies[panel, number]):.1%}",
                (float(task.test.inputs[:, 0].mean()), low - 0.12), ha="center", va="top",
                fontsize=9, color="black" if learned else "0.45",
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
        axis.set(title=title, aspect="equal", xlim=(-3.4, 3.4), ylim=(-3.4, 3.4))
        axis.set(xticks=[], yticks=[])
    plots.supxlabel("beside each task: its test accuracy (faint: not learned yet)", fontsize=10)
    plots.savefig(path, dpi=150)
    plt.close(plots)


def main(arguments: Sequence[str] | None = None, config: Config = Config()) -> None:  # noqa: B008
    parser = argparse.ArgumentParser(prog="python -m experiments.cartoon", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for cartoon.png and .json")
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    found = run(config, options.seed)
    text = json.dumps(metrics(found), indent=1)
    (options.out / "cartoon.json").write_text(text + "\n")
    figure(config, found, options.out / "cartoon.png")
    print(text)
    print(f"picture: {options.out / 'cartoon.png'}")


if __name__ == "__main__":
    main()
