"""The projected SGD step on a CPU: the basis is read twice, everything else stays in the cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlab_kernels._cpu.products import accumulate, subtract
from curvlab_kernels._cpu.project import flat, groups, scatter
from curvlab_kernels.algebra import solve

PIECE = 1 << 20  # elements: four megabytes of float32 stay in the last cache


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
    plan = groups(parameters, gradients, momenta) if momenta else groups(parameters, gradients)
    pieces = [(group, flat(group, parameters), flat(group, gradients)) for group in plan]
    total = rows.new_zeros(rows.shape[0], dtype=torch.float64)
    for group, weight, slope in pieces:
        for start in range(0, weight.shape[0], PIECE):
            where = slice(start, start + PIECE)
            step = torch.add(slope[where], weight[where], alpha=weight_decay)
            accumulate(rows, scales, [(group.first + start, step)], total)
    removed = solve(factor, total)
    for group, weight, slope in pieces:
        buffer = flat(group, momenta) if momenta else None
        for start in range(0, weight.shape[0], PIECE):
            where = slice(start, start + PIECE)
            step = torch.add(slope[where], weight[where], alpha=weight_decay)
            subtract(rows, scales, removed, [(group.first + start, step)])
            if buffer is not None:
                step = buffer[where].mul_(momentum).add_(step)
            weight[where].sub_(step, alpha=lr)
        scatter(group, weight, parameters)
        if buffer is not None:
            scatter(group, buffer, momenta)
    return removed
