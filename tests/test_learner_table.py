"""Every learner on every kind of network: what runs agrees with a plain float64 version of it.

The others refuse with their reason. The guide's table is these cells.
"""

import re
from importlib.resources import files

import pytest
import torch

from curvlab.learners import (
    AGEM,
    DER,
    ER,
    EWC,
    GPM,
    OGD,
    SGD,
    HeterogeneousDropout,
    LwF,
    PackNet,
    Powerpropagation,
    Progressive,
    SGDDagger,
    SpaceNet,
)
from curvlab.nets import mlp, powerpropagate, slim_resnet18, vit_cifar
from curvlab.training import Schedule, learn
from tests import plain_learners as plain, plain_replay
from tests.small_problems import make_tasks

# name in the guide: how to build it, the shape of its inputs, whether it is told the task
NETWORKS = {
    "MLP": (lambda seed: mlp((6, 8, 7, 3), seed=seed, dtype=torch.float64), (6,), False),
    "ResNet, BatchNorm": (
        lambda seed: slim_resnet18(
            3, nf=2, blocks=(1, 1), channels=1, seed=seed, dtype=torch.float64
        ),
        (1, 4, 4),
        False,
    ),
    "ViT": (
        lambda seed: vit_cifar(3, hidden=4, heads=2, depth=1, mlp=5, side=4, patch=2, channels=1,
                               seed=seed, dtype=torch.float64),
        (1, 4, 4),
        False,
    ),
    "several heads": (
        lambda seed: mlp((6, 8, 7, 3), tasks=3, seed=seed, dtype=torch.float64), (6,), True,
    ),
}  # fmt: skip

# name in the guide: the learner, its plain version
LEARNERS = {
    "SGD": (SGD, plain.Plain),
    "SGDDagger": (lambda: SGDDagger(3, samples=20, tol=1e-10), plain.Dagger),
    "OGD": (lambda: OGD(0.05, samples=12), plain.Orthogonal),
    "GPM": (lambda: GPM(0.9, samples=12, bias="augmented"), plain.InputsKept),
    "EWC": (lambda: EWC(3.0, samples=12), plain.Penalised),
    "PackNet": (lambda: PackNet(0.5), plain.Packed),
    "Powerpropagation": (lambda: Powerpropagation(0.5), plain.Powers),
    "SpaceNet": (
        lambda: SpaceNet((4, 4), (1, 1), (14, 6, 5), dropped=0.4), plain_replay.Sparse,
    ),
    "ER": (lambda: ER(12, batch=4), plain_replay.Replayed),
    "DER": (lambda: DER(12, alpha=0.4, beta=0.7, batch=4), plain_replay.Dark),
    "AGEM": (lambda: AGEM(12, batch=4), plain_replay.Averaged),
    "LwF": (lambda: LwF(0.8), plain_replay.Taught),
    "Progressive": (Progressive, None),
    "HeterogeneousDropout": (lambda: HeterogeneousDropout(SGD()), None),
}  # fmt: skip

# what does not run, and the words of the refusal
ALL = tuple(NETWORKS)
REFUSED = {
    **{("SpaceNet", network): "neurons of a plain MLP" for network in ALL[1:]},
    **{("Progressive", network): "made of columns" for network in ALL},
    **{("HeterogeneousDropout", network): "KWinners" for network in ALL},
}
CELLS = [(learner, network) for learner in LEARNERS for network in ALL]
IDS = [f"{learner} x {network}" for learner, network in CELLS]


def setting(learner, network):
    build, shape, told = NETWORKS[network]
    if learner == "Powerpropagation":
        plainly = build
        build = lambda seed: powerpropagate(plainly(seed), 2.0)  # noqa: E731
    tasks = make_tasks(3, train=23, test=5, shape=shape, dtype=torch.float64)
    return build, tasks, told


@pytest.mark.parametrize(("learner", "network"), CELLS, ids=IDS)
def test_a_learner_is_its_plain_float64_version_or_says_why_not(learner, network):
    build, tasks, told = setting(learner, network)
    make, truth = LEARNERS[learner]
    options = {"seeds": [plain.SEED], "batch_size": plain.BATCH}
    if network == "ResNet, BatchNorm":
        options["batchnorm"] = "freeze"
    schedule = Schedule(plain.LR, epochs=plain.EPOCHS)
    if (learner, network) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[learner, network]):
            learn(build, tasks, make(), schedule, **options)
        return
    (run,) = learn(build, tasks, make(), schedule, **options)
    expected = truth(build, tasks, told, told).run()
    moved = [float((a - b).norm()) for a, b in zip(expected[1:], expected[:-1], strict=True)]
    assert min(moved) > 1e-3  # later tasks learn: nothing agrees by standing still
    torch.testing.assert_close(run.snapshots, expected, rtol=0.0, atol=TOLERANCE)


TOLERANCE = 1e-9  # of parameters near 1 after 24 steps; eigenvectors are solved to 1e-10


def test_the_table_in_the_guide_is_these_cells():
    text = (files("curvlab") / "guide" / "learning.md").read_text()
    header = next(line for line in text.splitlines() if line.startswith("| learner |"))
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["learner", *ALL]
    for learner in LEARNERS:
        line = next(line for line in text.splitlines() if line.startswith(f"| `{learner}`"))
        cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
        for network, cell in zip(ALL, cells, strict=True):
            assert (cell == "yes") == ((learner, network) not in REFUSED), (learner, network)
            if cell != "yes":
                assert re.match(r"no: ", cell)
