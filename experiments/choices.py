"""The names a configuration may use, and what they stand for: streams, networks, learners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from curvlab.eigen import Eigenpairs
from curvlab.learners import (
    EWC,
    GPM,
    OGD,
    SGD,
    HeterogeneousDropout,
    Learner,
    PackNet,
    Powerpropagation,
    Progressive,
    SGDDagger,
    SpaceNet,
)
from curvlab.nets import (
    kwinners_mlp,
    mlp,
    powerpropagate,
    progressive_mlp,
    slim_resnet18,
    vit_cifar,
)
from curvlab.tasks import (
    MNIST_NORMALISATION,
    Samples,
    Task,
    cifar10,
    cifar100,
    mnist,
    rotated_mnist,
    split_cifar10,
    split_cifar100,
)

Stream = Callable[[bool, Path | None], list[Task]]  # embedded?, folder of the files


def _rotated(embedded: bool, data: Path | None) -> list[Task]:
    return rotated_mnist(None if embedded else mnist(data))


def _normalised(embedded: bool, data: Path | None) -> list[Task]:
    return rotated_mnist(None if embedded else mnist(data), normalise=MNIST_NORMALISATION)


def _rotated_20(embedded: bool, data: Path | None) -> list[Task]:
    """Twenty rotations, 9 degrees apart: not a stream of the paper, but as long as its longest."""
    angles = [-90.0 + 9.0 * index for index in range(20)]
    return rotated_mnist(None if embedded else mnist(data), angles=angles)


def _cifar10(embedded: bool, data: Path | None) -> list[Task]:
    return split_cifar10(None if embedded else cifar10(data))


def _pixels(embedded: bool, data: Path | None) -> list[Task]:
    """Split CIFAR-10 for learners of MLPs: 16 x 16 means of 2 x 2 pixels, colours kept, as 768."""

    def flat(samples: Samples) -> Samples:
        return replace(samples, inputs=avg_pool2d(samples.inputs, 2).flatten(1))

    return [
        replace(task, train=flat(task.train), test=flat(task.test))
        for task in _cifar10(embedded, data)
    ]


def _cifar100(embedded: bool, data: Path | None) -> list[Task]:
    if embedded:
        raise ValueError("no CIFAR-100 images are embedded in the package; use its files")
    return split_cifar100(cifar100(data))


STREAMS: dict[str, Stream] = {
    "rotated_mnist": _rotated,
    "rotated_mnist_normalised": _normalised,
    "rotated_mnist_20": _rotated_20,
    "split_cifar10": _cifar10,
    "split_cifar10_pixels": _pixels,
    "split_cifar100": _cifar100,
}


@dataclass(frozen=True)
class Network:
    """A network of the tables.

    Attributes:
        build: Makes it from ``(seed, classes, tasks)``.
        save_every: Steps between two checkpoints inside a task.
        version: Raised when a change of the library changes what training it gives.
    """

    build: Callable[[int, int, int], nn.Module]
    save_every: int = 20_000
    version: str = "1"


# Of learners whose algorithm changed; the network's version says the rest.
LEARNER_VERSIONS = {
    # importance, initialisation and last layer as in the authors' code
    "SpaceNet": "published",
    "SpaceNet-pixels": "published",
    # duty over what was seen, boost that decays
    # and, as in GPM, rows that are orthonormalised as those of all memories: other roundings
    "k-winners": "published, rows",
    "GPM": "rows",
}

STACKED = "2"  # since seeds of an MLP side by side are the same bits as alone


HIDDEN = (50, 50, 50, 50)  # four layers: the paper's 18,010 parameters, not the three of its text


def _mlps(name: str, inputs: int) -> dict[str, Network]:
    """The MLP for a number of inputs, in the forms that learners need."""

    def sizes(classes: int) -> tuple[int, ...]:
        return (inputs, *HIDDEN, classes)

    builders: dict[str, Callable[[int, int, int], nn.Module]] = {
        name: lambda seed, classes, _: mlp(sizes(classes), seed=seed),
        f"{name}_unbiased": lambda seed, classes, _: mlp(sizes(classes), bias=False, seed=seed),
        f"{name}_powers": lambda seed, classes, _: powerpropagate(mlp(sizes(classes), seed=seed)),
        f"{name}_kwinners": lambda seed, classes, _: kwinners_mlp(sizes(classes), 0.3, seed=seed),
        f"{name}_columns": lambda seed, classes, tasks: progressive_mlp(
            sizes(classes), tasks, seed=seed
        ),
    }
    return {form: Network(build, version=STACKED) for form, build in builders.items()}


def _channels_last(model: nn.Module) -> nn.Module:
    """Images in the layout that convolutions prefer: a third less time for gradients and products.

    A hook and not the network itself: per-sample gradients (EWC) and GroupNorm do not take it.
    """

    def convert(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0].contiguous(memory_format=torch.channels_last),)

    model.register_forward_pre_hook(convert)
    return model


NETWORKS: dict[str, Network] = {
    **_mlps("mlp", 196),
    **_mlps("pixels", 768),
    "mlp_tiny": Network(
        lambda seed, classes, _: mlp((196, 8, 8, classes), seed=seed), version=STACKED
    ),
    "mlp_tiny_unbiased": Network(
        lambda seed, classes, _: mlp((196, 8, 8, classes), bias=False, seed=seed), version=STACKED
    ),
    "resnet": Network(
        lambda seed, classes, _: _channels_last(slim_resnet18(classes, seed=seed)), 500
    ),
    "resnet_small": Network(
        lambda seed, classes, _: slim_resnet18(classes, nf=8, blocks=(1, 1, 1, 1), seed=seed), 500
    ),
    "resnet_tiny": Network(
        lambda seed, classes, _: slim_resnet18(classes, nf=4, blocks=(1, 1, 1), seed=seed), 500
    ),
    "vit": Network(lambda seed, classes, _: vit_cifar(classes, seed=seed), 500),
    "vit_small": Network(
        lambda seed, classes, _: vit_cifar(
            classes, hidden=64, depth=4, heads=4, mlp=128, patch=8, seed=seed
        ),
        500,
    ),
    "vit_tiny": Network(
        lambda seed, classes, _: vit_cifar(
            classes, hidden=16, depth=1, heads=2, mlp=32, patch=8, seed=seed
        ),
        500,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Algorithm:
    """A learner by name, with the settings that it takes."""

    name: str = "SGD"
    epsilon: float | None = None  # share of energy left out: SGD-dagger, OGD, GPM, k-winners
    k: int | None = None  # eigenvectors per task: SGD-dagger
    first_k: int | None = None  # computed after the first task, the same for all k of a table
    strength: float | None = None  # of EWC's penalty
    pruned: float | None = None  # share of the weights: PackNet, Powerpropagation

    def build(self, samples: int, first: Sequence[Eigenpairs] | None = None) -> Learner:
        """A fresh learner.

        Args:
            samples: For a Hessian or a memory.
            first: ``first_k`` eigenpairs per seed of the first task's Hessian.
        """
        if self.name == "SGD-dagger":
            return SGDDagger(self.k, epsilon=self.epsilon, samples=samples, first=first)
        return LEARNERS[self.name](self, samples)

    def __str__(self) -> str:
        """``SGD-dagger, k = 10``."""
        figures = {"eps": self.epsilon, "k": self.k, "strength": self.strength,
                   "pruned": self.pruned}  # fmt: skip
        known = [f"{name} = {value:g}" for name, value in figures.items() if value is not None]
        return ", ".join([self.name, *known])


PLAIN = Algorithm()


def _kept(algorithm: Algorithm) -> float:
    return 1.0 - _given(algorithm.epsilon)


def _given(value: float | None) -> float:
    if value is None:
        raise ValueError("this learner needs its figure: epsilon=, k=, strength= or pruned=")
    return value


LEARNERS: dict[str, Callable[[Algorithm, int], Learner]] = {
    "SGD": lambda _one, _samples: SGD(),
    "OGD": lambda one, samples: OGD(_given(one.epsilon), samples=samples),
    "GPM": lambda one, samples: GPM(_kept(one), samples=samples),
    "EWC": lambda one, samples: EWC(_given(one.strength), samples=samples),
    "PackNet": lambda one, _samples: PackNet(_given(one.pruned)),
    "SpaceNet": lambda _one, _samples: SpaceNet(
        # for five tasks: 4 x 8 of 50 neurons are reserved when the last one picks its 18, and
        # places that earlier tasks took between these are not free
        selected=(18,) * 4, reserved=(8,) * 4, connections=(900, 150, 150, 150, 90),
    ),
    "SpaceNet-pixels": lambda _one, _samples: SpaceNet(
        # of the places between the picked neurons the same shares: half, and two thirds at the end
        selected=(18,) * 4, reserved=(8,) * 4, connections=(6900, 200, 200, 200, 24),
    ),
    "Progressive": lambda _one, _samples: Progressive(),
    "k-winners": lambda one, samples: HeterogeneousDropout(GPM(_kept(one), samples=samples)),
    "Powerpropagation": lambda one, _samples: Powerpropagation(_given(one.pruned)),
}  # fmt: skip
