"""Random numbers that a model draws in training, as a function of seed and position alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd


@runtime_checkable
class Reseeded(Protocol):
    """A module that draws random numbers in ``forward``; told its seed before every step."""

    def reseed(self, seed: int) -> None: ...


class Draws:
    """What the models of a population draw: dropout's numbers, and those of reseeded modules."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._global = any(_may_draw(module) for module in models[0].modules())
        self._reseeded = [[m for m in one.modules() if isinstance(m, Reseeded)] for one in models]

    @property
    def any(self) -> bool:
        """Whether there is anything to draw."""
        return self._global or bool(self._reseeded[0])

    @contextmanager
    def from_seed(self, s: int, seed: int, device: torch.device) -> Iterator[None]:
        """Within it, what model ``s`` draws follows from ``seed``."""
        for module in self._reseeded[s]:
            module.reseed(seed)
        # Dropout knows only the global generator: lend it, and give it back as it was
        if not self._global:
            yield
        elif device.type == "cpu":  # torch.manual_seed takes a millisecond, this a hundredth
            state = torch.default_generator.get_state()
            torch.default_generator.manual_seed(seed)
            try:
                yield
            finally:
                torch.default_generator.set_state(state)
        else:
            with torch.random.fork_rng([device]):
                torch.manual_seed(seed)
                yield


def _may_draw(module: nn.Module) -> bool:
    """Whether its training passes may take numbers from torch's global generator."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return True
    # A forward of the user's own may call functional.dropout, which no attribute tells.
    return not type(module).__module__.startswith(("torch.nn.", "curvlab.nets"))
