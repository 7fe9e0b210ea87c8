"""The multilayer perceptron of the paper: 196-50-50-50-50-10, 18,010 parameters.

The paper's text says three hidden layers; its counts, 18,010 with biases and 17,800 without, are
those of four.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from curvlab.nets.heads import MultiHead
from curvlab.nets.initialise import Seed, build


def mlp(
    sizes: Sequence[int] = (196, 50, 50, 50, 50, 10),
    *,
    width: int | None = None,
    depth: int | None = None,
    bias: bool = True,
    activation: Callable[[], nn.Module] = nn.ReLU,
    tasks: int | None = None,
    seed: Seed = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """``Linear``, activation, ``Linear``, ..., ``Linear``: inputs ``(N, sizes[0])`` to logits.

    Args:
        sizes: Units from the inputs to the outputs, at least those two.
        width: Units of every hidden layer, in place of those in ``sizes``.
        depth: Number of hidden layers, in place of those in ``sizes``.
        bias: Whether the linear layers have one.
        activation: Makes the module between linear layers, e.g. ``nn.Tanh``.
        tasks: The last layer once for every task: ``forward(inputs, task)``
            (:class:`~curvlab.nets.heads.MultiHead`). ``None`` shares one.
    """
    units = _units(list(sizes), width, depth)

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(units):
            layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
        if tasks is None:
            return nn.Sequential(*layers[:-1])
        return MultiHead(nn.Sequential(*layers[:-2]), units[-2], units[-1], tasks, bias=bias)

    return build(make, seed, dtype, device)


def _units(sizes: list[int], width: int | None, depth: int | None) -> list[int]:
    if len(sizes) < 2:
        raise ValueError(
            f"sizes= needs at least inputs and outputs, as in (196, 50, 10); got {sizes}"
        )
    hidden = sizes[1:-1]
    if width is not None or depth is not None:
        if width is None:
            if len(set(hidden)) != 1:
                raise ValueError(f"depth= needs width= when sizes= has hidden layers {hidden}")
            width = hidden[0]
        hidden = [width] * (len(hidden) if depth is None else depth)
        if depth is not None and depth < 0:
            raise ValueError(f"depth= is a number of hidden layers; got {depth}")
    units = [sizes[0], *hidden, sizes[-1]]
    if any(unit < 1 for unit in units):
        raise ValueError(f"every layer needs at least one unit; got {units}")
    return units
