"""The projected SGD step on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlab_kernels._cpu.lists import flat, gathered, groups, scatter
from curvlab_kernels._cpu.path import choose
from curvlab_kernels._cpu.products import project_pieces_
from curvlab_kernels.formats import CHUNK


def sgd_step_(
    rows: Tensor,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """See :func:`curvlab_kernels.reference.sgd_step_`."""
    if len(parameters) == 1 or sum([tensor.numel() for tensor in parameters]) <= CHUNK:
        weight, slope = gathered(parameters, rows), gathered(gradients, rows)
        path = choose(rows, slope)
        if path.team is not None:
            buffer = gathered(momenta, rows) if momenta else None
            update = weight, slope, buffer, lr, weight_decay, momentum
            removed: Tensor = path.team.run(
                path, rows, scales, factor, torch.empty_like(slope), update
            )
            scatter(weight, parameters)
            if buffer is not None:
                scatter(buffer, momenta)
            return removed
    lists = (parameters, gradients, momenta) if momenta else (parameters, gradients)
    plan = groups(*lists)
    weights = [flat(group, parameters) for group in plan]
    steps = [
        torch.add(flat(group, gradients), weight, alpha=weight_decay)
        for group, weight in zip(plan, weights, strict=True)
    ]
    pieces = [(group.first, step) for group, step in zip(plan, steps, strict=True)]
    removed_ = project_pieces_(rows, pieces, factor, scales)
    for group, weight, step in zip(plan, weights, steps, strict=True):
        moved = step
        if momenta:
            moved = flat(group, momenta).mul_(momentum).add_(step)
            scatter(moved, momenta[group.members])
        weight.sub_(moved, alpha=lr)
        scatter(weight, parameters[group.members])
    return removed_
