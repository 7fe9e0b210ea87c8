"""Flows: every learner, on two tasks with two runs side by side."""

import tempfile
from pathlib import Path

import torch

from curvlab import learners
from curvlab.nets import mlp
from curvlab.nets.kwinners import kwinners_mlp
from curvlab.nets.powerprop import powerpropagate
from curvlab.nets.progressive import progressive_mlp
from curvlab.training import Schedule, learn, loop
from tests import pretend_device
from tests.pretend_device.flow import FLOWS, both, flow
from tests.small_problems import make_tasks, small


def training(learner, build=small, checkpoint=False, **options):
    """Two runs side by side on two tasks: parameters, and waits of the host within steps."""
    waits = steps = 0
    take_step = loop.take_step

    def watched(*arguments, **named):
        nonlocal waits, steps
        before = sum(pretend_device.waits().values())
        result = take_step(*arguments, **named)
        waits += sum(pretend_device.waits().values()) - before
        steps += 1
        return result

    def run(device):
        with tempfile.TemporaryDirectory() as folder:
            every = {"checkpoint": Path(folder) / "run", "checkpoint_every": 2}
            runs = learn(
                [build(seed).to(device) for seed in (1, 2)],
                make_tasks(2),
                learner(),
                Schedule(0.1, epochs=1),
                seeds=(1, 2),
                progress=False,
                **(every if checkpoint else {}),
                **options,
            )
        return [run.snapshots for run in runs]

    loop.take_step = watched
    try:
        result = both(run)
    finally:
        loop.take_step = take_step
    return result | {"waits": waits, "steps": steps}


LEARNERS = {
    "SGD": lambda: learners.SGD(),
    "SGDDagger": lambda: learners.SGDDagger(k=2, samples=20, tol=1e-5),
    "SGDDagger in float16": lambda: learners.SGDDagger(
        k=2, samples=20, tol=1e-5, storage=torch.float16
    ),
    "SGDDagger by energy": lambda: learners.SGDDagger(epsilon=0.5, samples=20, tol=1e-5),
    "OGD": lambda: learners.OGD(samples=20),
    "GPM": lambda: learners.GPM(samples=20, bias="augmented"),
    "EWC": lambda: learners.EWC(samples=20),
    "PackNet": lambda: learners.PackNet(),
    "SpaceNet": lambda: learners.SpaceNet((4, 4), (2, 2), (10, 10, 10)),
    "ER": lambda: learners.ER(12, batch=4),
    "DER": lambda: learners.DER(12, beta=0.5, batch=4),
    "AGEM": lambda: learners.AGEM(12, batch=4),
    "LwF": lambda: learners.LwF(),
}
for _name, _learner in LEARNERS.items():
    FLOWS[f"training with {_name}"] = lambda learner=_learner: training(learner)


@flow
def training_with_Powerpropagation():
    build = lambda seed: powerpropagate(small(seed))  # noqa: E731
    return training(learners.Powerpropagation, build)


@flow
def training_with_Progressive():
    build = lambda seed: progressive_mlp((6, 8, 7, 3), tasks=2, seed=seed)  # noqa: E731
    return training(learners.Progressive, build)


@flow
def training_with_HeterogeneousDropout():
    build = lambda seed: kwinners_mlp((6, 8, 7, 3), seed=seed)  # noqa: E731
    return training(lambda: learners.HeterogeneousDropout(learners.SGD()), build)


def several_heads(seed):
    return mlp((6, 8, 7, 3), tasks=2, seed=seed)


for _name in ("SGDDagger", "OGD", "GPM", "EWC", "PackNet", "ER", "AGEM", "LwF"):
    FLOWS[f"training with {_name} and several heads"] = lambda learner=LEARNERS[_name]: training(
        learner, several_heads, weight_decay=0.01
    )


@flow
def training_with_momentum_and_checkpoints():
    options = {"momentum": 0.9, "weight_decay": 0.01, "checkpoint": True}
    return training(LEARNERS["SGDDagger"], **options)
