"""The three networks after some training on real images: the spectra that solvers meet in practice.

Made once from the embedded data with a fixed seed and kept in ``results/networks`` (a file per
network and recipe, with checksum); ``python -m benchmarks.trained`` makes them all, prints their
losses and digests, and with ``--out rows/networks.json`` records them for the results page.
Modes are ``eval``: see :mod:`benchmarks.networks`.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.networks import Network
from curvlab.learners import SGD
from curvlab.nets import mlp, slim_resnet18, vit_cifar
from curvlab.parameters import parameter_vector
from curvlab.storage import load_tensors, save_tensors
from curvlab.tasks import Task, rotated_mnist, split_cifar10, subset
from curvlab.training import Evaluation, Schedule, learn

FOLDER = Path("results") / "networks"


@dataclass(frozen=True)
class Recipe:
    """How a network was trained, and how many samples its Hessian is of."""

    network: str  # in NETWORKS
    train: int  # samples, drawn with seed 0, class-balanced
    epochs: int
    batch_size: int
    lr: float
    samples: int  # of the benchmark's Hessian


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[], Task]]] = {
    "mlp": (lambda seed: mlp(seed=seed), lambda: rotated_mnist(angles=[0.0])[0]),
    "resnet": (lambda seed: slim_resnet18(2, seed=seed), lambda: split_cifar10()[0]),
    "vit": (lambda seed: vit_cifar(2, seed=seed), lambda: split_cifar10()[0]),
    "small resnet": (lambda seed: slim_resnet18(2, nf=6, seed=seed), lambda: split_cifar10()[0]),
    "small vit": (
        lambda seed: vit_cifar(2, hidden=48, depth=2, heads=4, mlp=96, seed=seed),
        lambda: split_cifar10()[0],
    ),
}
# Few steps: enough for the outliers to stand off the bulk, which is what a solver has to find.
FULL = {
    "mlp": Recipe("mlp", 5000, 4, 10, 0.05, 1000),
    "resnet": Recipe("resnet", 200, 8, 20, 0.05, 32),
    "vit": Recipe("vit", 200, 3, 20, 0.02, 16),
}
SMALL = {
    "mlp": Recipe("mlp", 5000, 4, 10, 0.05, 200),
    "resnet": Recipe("small resnet", 200, 8, 20, 0.05, 16),
    "vit": Recipe("small vit", 200, 8, 20, 0.02, 16),
}
SIZES = {"small": SMALL, "full": FULL}


def trained(recipe: Recipe, folder: Path = FOLDER, samples: int | None = None) -> Network:
    """The network of ``recipe`` in eval mode, with the samples its Hessian is taken on.

    Args:
        samples: Another number of them than the recipe's; the network stays the same.
    """
    make, task_of = NETWORKS[recipe.network]
    task = task_of()
    model = make(0)
    path = folder / f"{recipe.network.replace(' ', '-')}-{_name(recipe)}.safetensors"
    if not path.is_file():
        _train(model, task, recipe)
        save_tensors(path, "network", dict(model.state_dict()), asdict(recipe))
    tensors, _ = load_tensors(path, "network")
    model.load_state_dict(tensors)
    some = subset(task.train, recipe.samples if samples is None else samples, seed=1)
    loss = nn.CrossEntropyLoss()
    return Network(recipe.network, model.eval(), loss, some.inputs, some.targets)


def _train(model: nn.Module, task: Task, recipe: Recipe) -> None:
    few = Task(task.name, subset(task.train, recipe.train, seed=0), task.test, task.classes)
    norms = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    learn(
        model,
        [few],
        SGD(),
        Schedule(recipe.lr, epochs=recipe.epochs),
        seeds=0,
        batch_size=recipe.batch_size,
        batchnorm="running" if norms else None,
        evaluation=Evaluation(train=0),
        snapshots=False,
    )


def _name(recipe: Recipe) -> str:
    text = json.dumps(asdict(recipe), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def describe(size: str, recipe: Recipe, folder: Path = FOLDER) -> dict[str, str | int | float]:
    """What the network is: parameters, samples, loss and the digest of its weights."""
    network = trained(recipe, folder)
    with torch.no_grad():
        loss = float(network.loss(network.model(network.inputs), network.targets))
    digest = hashlib.sha256(parameter_vector(network.model).numpy().tobytes()).hexdigest()
    return {
        "size": size,
        "network": recipe.network,
        "parameters": network.n,
        "samples": network.samples,
        "loss": round(loss, 4),
        "sha256": digest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--out", type=Path, help="write what they are to this .json")
    options = parser.parse_args()
    found = []
    for size in options.sizes:
        for recipe in SIZES[size].values():
            one = describe(size, recipe)
            found.append(one)
            print(
                f"{size:6} {recipe.network:13} n = {one['parameters']:>10,} loss {one['loss']:.3f} "
                f"{str(one['sha256'])[:16]}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
