"""Every learner of the library on Split CIFAR-10: the second half of the extension.

All have the same MLP, so that they can be compared: SpaceNet, progressive networks and k-winners
are written for MLPs. It sees the images as 16 x 16 colours. What SGD-dagger does to a ResNet and a
ViT on this stream is in tab:other-arch.
"""

from dataclasses import dataclass, replace

from experiments.choices import Algorithm
from experiments.experiment import Experiment
from experiments.extension import (
    DAGGER,
    EWC,
    GPM,
    KWINNERS,
    OGD,
    PACKNET,
    POWERS,
    SGD,
    Entry,
    claims,
    figure,
    run,
    tables,
    trainings,
)
from experiments.shelf import Training

ENTRIES = (
    Entry(SGD, "pixels"),
    Entry(EWC, "pixels"),
    Entry(DAGGER, "pixels"),
    Entry(OGD, "pixels"),
    Entry(GPM, "pixels_unbiased"),
    Entry(KWINNERS, "pixels_kwinners"),
    Entry(PACKNET, "pixels", told=True),
    Entry(POWERS, "pixels_powers", told=True),
    Entry(Algorithm("SpaceNet-pixels"), "pixels", told=True),
    Entry(Algorithm("Progressive"), "pixels_columns", told=True),
)


@dataclass(frozen=True)
class Config:
    stream: Training  # network and learner are those of the entries
    entries: tuple[Entry, ...] = ENTRIES

    @property
    def label(self) -> str:
        return "extension CIFAR-10"

    @property
    def caption(self) -> str:
        one = self.stream
        images = f"{one.train or 'all'} {'embedded ' if one.embedded else ''}images a task"
        return (
            f"on Split CIFAR-10 as 16 x 16 colours, {one.tasks or 5} tasks, {images}, "
            f"rate {one.rates}, {one.epochs} epochs"
        )

    def training(self, entry: Entry) -> Training:
        return replace(self.stream, learner=entry.learner, network=entry.network)


# Rate times steps per task is 100 at every size.
DEMO = Training(
    "split_cifar10_pixels", "pixels", rates="0.1", epochs="40", tasks=3, train=250, samples=100,
    embedded=True,
)  # fmt: skip
SCALED = Training(
    "split_cifar10_pixels", "pixels", rates="0.05", epochs="20", train=1000, test=1000, samples=200
)
FULL = Training("split_cifar10_pixels", "pixels", rates="0.01", epochs="10")

EXPERIMENT = Experiment(
    label="extension CIFAR-10",
    what="all learners of the library on Split CIFAR-10 with an MLP (not in the paper)",
    data="cifar10",
    sizes={"demo": Config(DEMO), "scaled": Config(SCALED), "full": Config(FULL)},
    run=run,
    tables=tables,
    claims=claims,
    figure=figure,
    trainings=trainings,
    version="2",  # SpaceNet and k-winners as published
    cost={"demo": "about 4 min", "scaled": "15 min", "full": "5 h on 2 cores (estimate, not run)"},
)
