"""``curvlab demo``: what the package is for, in half a minute on embedded data.

Also the factories that the examples in ``--help`` use: ``curvlab.cli.demo:digits`` (a batch of 200
digits) and ``curvlab.cli.demo:network`` (an MLP after a short training on them).
"""

from argparse import Namespace
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from curvlab.basis import Basis
from curvlab.cli.output import emit, say, table
from curvlab.cli.target import provenance, require_free
from curvlab.eigen import lanczos
from curvlab.learners import SGD, Learner, SGDDagger
from curvlab.metrics import accuracy_forgetting, average_accuracy, average_forgetting
from curvlab.nets import mlp
from curvlab.operators import Hessian
from curvlab.parameters import load_parameter_vector
from curvlab.tasks import Samples, Task, limit, rotated_mnist
from curvlab.training import Run, Schedule, learn

SEEDS = (11, 13, 21)
LEARNERS = ("SGD", "SGD-dagger")


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
    """Two tasks with and without the projection; the spectrum behind it; pictures."""
    from curvlab import plots

    out = Path(options.out)
    kinds = dict.fromkeys((f"{name}-{seed}" for name in LEARNERS for seed in SEEDS), "run")
    for name, kind in {**kinds, "spectrum": "eigenpairs", "memory": "basis"}.items():
        require_free(options, out / f"{name}.safetensors", kind)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # these networks are small: a second thread only waits
    tasks = limit(rotated_mnist(angles=(-45.0, 45.0)), train=1500)
    runs = {name: _train(options, tasks, name, out) for name in LEARNERS}
    model = mlp(seed=SEEDS[0])
    load_parameter_vector(model, runs["SGD"][0].snapshots[0])
    curvature = Hessian(model, cross_entropy, tasks[0].train[:300])
    pairs = lanczos(curvature, 20, tol=1e-3, progress=False if options.quiet else None)
    about = provenance(options, curvature)
    del about["arguments"]  # rerun is for the runs, which the rest follows from
    pairs.save(out / "spectrum.safetensors", about)
    memory = Basis(pairs.n, 20)
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
            ["learner", "forgetting", "accuracy"],
            [[name, f"{f:.3f}", f"{a:.3f}"] for name, (f, a) in rows.items()],
        ),
        "",
        "A toy: its k and rates were picked so that the projection shows (with k = 20 it forgot no",
        "less than SGD). The paper's comparison is python -m experiments, in a checkout.",
        f"files and pictures in {out}",
    ]
    facts = {
        "values": pairs.values.tolist(),
        "forgetting": {name: figures[0] for name, figures in rows.items()},
        "accuracy": {name: figures[1] for name, figures in rows.items()},
        "pictures": [str(path) for path in pictures],
    }
    emit(options, facts, "\n".join(text))
    return 0


def _train(options: Namespace, tasks: list[Task], name: str, out: Path) -> list[Run]:
    say(options, f"training with {name} ...")
    learner: Learner = SGD() if name == "SGD" else SGDDagger(k=40, samples=300)
    runs = learn(
        lambda seed: mlp(seed=seed),
        tasks,
        learner,
        Schedule(lr=0.1, lr_later=1e-3, epochs=10),
        seeds=SEEDS,
        progress=False if options.quiet else None,
    )
    for run in runs:
        run.save(out / f"{name}-{run.seed}.safetensors", provenance(options))
    return runs


def _figures(runs: list[Run]) -> tuple[float, float]:
    accuracy = torch.stack([run.test_accuracy for run in runs])
    forgotten = average_forgetting(accuracy_forgetting(accuracy), "t-1")[:, -1].mean()
    return float(forgotten), float(average_accuracy(accuracy)[:, -1].mean())
