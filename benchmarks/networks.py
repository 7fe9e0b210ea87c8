"""The three networks every benchmark of curvature uses, with random data of the right shapes.

Speed does not depend on what the images show; weights are the seeded initial ones. Modes are
``eval``: batch statistics couple samples, and no two tools would mean the same Hessian. BatchNorm's
statistics are those of the batch: with the initial ones activations grow from layer to layer until
the softmax saturates, and the Hessian is zero to rounding.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from curvlab.float32 import float32_switch
from curvlab.nets import mlp, slim_resnet18, vit_cifar


@dataclass(frozen=True, slots=True)
class Network:
    """A model in eval mode, its loss (a module: some peers take nothing else) and one batch."""

    name: str
    model: nn.Module
    loss: nn.Module
    inputs: Tensor
    targets: Tensor
    size: str = "full"

    @property
    def shown(self) -> str:
        """The name in rows: what is not at its full size says so."""
        return self.name if self.size == "full" else f"{self.size} {self.name}"

    @property
    def samples(self) -> int:
        return len(self.inputs)

    @property
    def n(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def switch(self) -> str:
        """How curvlab multiplies its float32 matrices; in benchmarks, everybody does."""
        return float32_switch(self.samples, self.model.parameters(), torch.float32)

    def double(self) -> "Network":
        """A float64 copy."""
        model = copy.deepcopy(self.model).double()
        inputs = self.inputs.double()
        return Network(self.name, model, self.loss, inputs, self.targets, self.size)


def _network(
    name: str, model: nn.Module, classes: int, seed: int, *shape: int, size: str = "full"
) -> Network:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(*shape, generator=generator)
    targets = torch.randint(classes, (shape[0],), generator=generator)
    _settle_statistics(model, inputs)
    return Network(name, model.eval(), nn.CrossEntropyLoss(), inputs, targets, size)


_small = partial(_network, size="small")


@torch.no_grad()
def _settle_statistics(model: nn.Module, inputs: Tensor) -> None:
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if layers:
        before = [layer.momentum for layer in layers]
        for layer in layers:
            layer.momentum = 1.0
        model.train()(inputs)
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum


# "full" are the sizes of the targets; "small" runs in seconds, to see that all works.
# The argument is the seed of the data.
FULL: dict[str, Callable[..., Network]] = {
    "mlp": lambda seed=0: _network("mlp", mlp(), 10, seed, 1000, 196),
    "resnet": lambda seed=0: _network("resnet", slim_resnet18(5), 5, seed, 32, 3, 32, 32),
    "vit": lambda seed=0: _network("vit", vit_cifar(2), 2, seed, 16, 3, 32, 32),
}
SMALL: dict[str, Callable[..., Network]] = {
    "mlp": lambda seed=0: _small("mlp", mlp((40, 20, 20, 10)), 10, seed, 200, 40),
    "resnet": lambda seed=0: _small("resnet", slim_resnet18(5, nf=4), 5, seed, 4, 3, 16, 16),
    "vit": lambda seed=0: _small(
        "vit", vit_cifar(2, hidden=32, depth=2, heads=4), 2, seed, 4, 3, 32, 32
    ),
}
SIZES = {"small": SMALL, "full": FULL}
