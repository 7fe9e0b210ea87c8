"""``curvlab demo``: what the package is for, in half a minute on embedded data.

Its stream, rates and k are those of ``make demo`` in a checkout, which adds the high rate, OGD, GPM
and the report page: the two rows here are two rows there.

Also the factories that the examples in ``--help`` use: ``curvlab.cli.demo:digits`` (a batch of 200
digits) and ``curvlab.cli.demo:network`` (an MLP after a short training on them).
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab.basis import Basis
from curvlab.cli.output import emit, say, table
from curvlab.cli.target import provenance, require_free
from curvlab.eigen import lanczos
from curvlab.learners import SGD, Learner, SGDDagger
from curvlab.metrics import accuracy_forgetting, average_forgetting, current_accuracy
from curvlab.nets import mlp
from curvlab.operators import Hessian
from curvlab.parameters import load_parameter_vector
from curvlab.tasks import Samples, Task, limit, rotated_mnist, subset
from curvlab.training import Run, Schedule, learn

LEARNERS = ("SGD", "SGD-dagger")


@dataclass(frozen=True)
class Stream:
    """Rotated digits, scaled as the paper's runs scale: learning rate times steps is kept."""

    seeds: tuple[int, ...] = (11, 13, 21)
    angles: tuple[float, ...] = (-45.0, 0.0, 45.0)  # of the paper's five
    train: int = 2000  # images per task: 200 steps an epoch
    test: int | None = None
    epochs: int = 15  # 3,000 steps a task
    high: float = 0.1  # 0.1 x 3,000 = 300, the paper's 0.01 x 30,000
    low: float = 3e-4  # 3e-4 x 3,000 = 0.9, the paper's 1e-5 x 90,000
    k: int = 20  # eigenvectors per task; the paper's rule, 99 % of the energy, takes many more here
    samples: int = 300  # for Hessians and memories; the paper's 1,000 cost a few minutes more

    def tasks(self) -> list[Task]:
        return limit(rotated_mnist(angles=self.angles), train=self.train, test=self.test)

    def schedule(self, later: float) -> Schedule:
        """The first task at the high rate, the others at ``later``."""
        return Schedule(lr=self.high, lr_later=later, epochs=self.epochs)


def digits() -> Samples:
    """200 embedded digits."""
    return rotated_mnist(angles=[0.0])[0].train[:200]


def network() -> nn.Module:
    """An MLP after two epochs on 1,000 embedded digits."""
    tasks = limit(rotated_mnist(angles=[0.0]), train=1000)
    (run,) = learn(
        lambda seed: mlp(seed=seed), tasks, SGD(), Schedule(lr=0.05, epochs=2), seeds=11,
        progress=False,
    )  # fmt: skip
    model = mlp(seed=11)
    load_parameter_vector(model, run.snapshots[-1])
    return model


def demo(options: Namespace) -> int:
    """Three tasks with and without the projection; the spectrum behind it; pictures."""
    from curvlab import plots

    stream, out = Stream(), Path(options.out)
    kinds = dict.fromkeys((f"{name}-{seed}" for name in LEARNERS for seed in stream.seeds), "run")
    for name, kind in {**kinds, "spectrum": "eigenpairs", "memory": "basis"}.items():
        require_free(options, out / f"{name}.safetensors", kind)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # these networks are small: a second thread only waits
    tasks = stream.tasks()
    runs = {name: _train(options, stream, tasks, name, out) for name in LEARNERS}
    model = mlp()
    load_parameter_vector(model, runs["SGD"][0].snapshots[0])
    some = subset(tasks[0].train, stream.samples, seed=0)
    curvature = Hessian(model, cross_entropy, some)
    pairs = lanczos(curvature, stream.k, tol=1e-3, progress=options.progress)
    about = provenance(options, curvature)
    del about["arguments"]  # rerun is for the runs, which the rest follows from
    pairs.save(out / "spectrum.safetensors", about)
    memory = Basis(pairs.n, stream.k)
    memory.extend(pairs.vectors, task=tasks[0].name, values=pairs.values.tolist())
    memory.save(out / "memory.safetensors", about)
    pictures = plots.write(plots.scree(pairs), out / "spectrum.png", out / "spectrum.svg")
    for name, group in runs.items():
        pictures += plots.write(plots.forgetting(group), out / f"{name}.png")
    rows = {name: _figures(group) for name, group in runs.items()}
    text = [
        pairs.table(8),
        "",
        table(
            ["learner", "forgetting", "accuracy just after a task"],
            [[name, f"{f:.3f}", f"{a:.3f}"] for name, (f, a) in rows.items()],
        ),
        "",
        f"Later tasks at the low learning rate, {stream.low:g}, where its assumptions hold.",
        "In a checkout, make demo shows the high rate as well, with OGD and GPM.",
        f"files and pictures in {out}",
    ]
    facts = {
        "values": pairs.values.tolist(),
        "forgetting": {name: figures[0] for name, figures in rows.items()},
        "learned": {name: figures[1] for name, figures in rows.items()},
        "pictures": [str(path) for path in pictures],
    }
    emit(options, facts, "\n".join(text))
    return 0


def _train(
    options: Namespace, stream: Stream, tasks: list[Task], name: str, out: Path
) -> list[Run]:
    say(options, f"training with {name} ...")
    learner: Learner = SGD() if name == "SGD" else SGDDagger(stream.k, samples=stream.samples)
    runs = learn(
        lambda seed: mlp(seed=seed),
        tasks,
        learner,
        stream.schedule(stream.low),
        seeds=stream.seeds,
        progress=options.progress,
    )
    for run in runs:
        run.save(out / f"{name}-{run.seed}.safetensors", provenance(options))
    return runs


def _figures(runs: list[Run]) -> tuple[float, float]:
    accuracy = torch.stack([run.test_accuracy for run in runs])
    forgotten = average_forgetting(accuracy_forgetting(accuracy), "t-1")[:, -1].mean()
    return float(forgotten), float(current_accuracy(accuracy).mean())
