"""Weights from a seed: PyTorch's default distributions, drawn from an explicit generator.

A network is first built on the ``meta`` device, where constructors draw nothing, and then filled.
Uniform numbers are taken as multiples of 2^-24 and scaled by separate operations; normal numbers
are drawn in float64 and rounded. Neither passes through PyTorch's vectorised float32 samplers,
whose last bit depends on the processor's instruction set.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

Seed = int | torch.Generator
Network = TypeVar("Network", bound=nn.Module)


@runtime_checkable
class DrawsOwnParameters(Protocol):
    """A module with parameters of its own (not those of its children) that it fills itself."""

    def draw_(self, generator: torch.Generator) -> None: ...


def build(
    make: Callable[[], Network],
    seed: Seed,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Network:
    """Construct ``make()`` without drawing, fill it from ``seed`` and move it where it belongs.

    Args:
        make: Returns the module; called with ``meta`` as the default device.
        seed: An int, or a CPU generator, which is advanced.
        dtype: The dtype of parameters and floating buffers; ``None`` is PyTorch's default.
        device: ``None`` is PyTorch's default.
    """
    generator = _generator(seed)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise TypeError(f"dtype= must be a real floating type; got {dtype}")
    device = torch.get_default_device() if device is None else torch.device(device)
    # Nothing is drawn on meta; the fork covers a module that ignores the default device.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = make()
    if device.type == "meta":
        return network.to(device=device, dtype=dtype)  # shapes and counts without memory
    network = network.to(torch.float32).to_empty(device="cpu")
    with torch.no_grad():
        for module in network.modules():
            _fill(module, generator)
    return network.to(device=device, dtype=dtype)


def _generator(seed: Seed) -> torch.Generator:
    if isinstance(seed, torch.Generator):
        if seed.device.type != "cpu":
            raise ValueError(
                f"seed= must be an int or a CPU generator, so that weights do not depend on the "
                f"device; got a generator on {seed.device}"
            )
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed= must be an int or a torch.Generator; got {type(seed).__name__}")
    return torch.Generator().manual_seed(seed)


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d):
        # kaiming_uniform(a=sqrt(5)) for weights and the bias rule of PyTorch: one bound for both
        bound = module.weight[0].numel() ** -0.5
        _uniform_(module.weight, bound, generator)
        if module.bias is not None:
            _uniform_(module.bias, bound, generator)
    elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm | nn.PReLU):
        module.reset_parameters()  # constants and fresh statistics: nothing is drawn
    elif isinstance(module, DrawsOwnParameters):
        module.draw_(generator)
    elif any(True for _ in module.parameters(recurse=False)):
        raise TypeError(
            f"cannot fill {type(module).__name__} from a seed: its default initialisation draws "
            "from the global generator. Give it a method draw_(generator)"
        )


def normal_(parameter: Tensor, generator: torch.Generator) -> None:
    """Fill with standard normal numbers, in place."""
    shape = parameter.shape
    parameter.copy_(torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu"))


def _uniform_(parameter: Tensor, bound: float, generator: torch.Generator) -> None:
    unit = torch.rand(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
    parameter.copy_(unit.mul_(2.0 * bound).sub_(bound))
