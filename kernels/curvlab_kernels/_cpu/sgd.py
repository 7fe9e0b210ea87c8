"""The projected SGD step on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlab_kernels._cpu.path import choose
from curvlab_kernels._cpu.products import project_
from curvlab_kernels.lists import all_contiguous, flat, parts


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
    if not parameters:
        return torch.zeros(rows.shape[0], dtype=torch.float64)
    path = choose(rows, parameters, team=True)
    if path.team is not None and all_contiguous(parameters) and all_contiguous(momenta):
        slopes = [gradient.contiguous() for gradient in gradients]
        update = parameters, momenta, lr, weight_decay, momentum
        team: Tensor = path.team.run(path, rows, scales, factor, slopes, update)
        return team
    step = flat(gradients)
    if weight_decay:
        step.add_(flat(parameters), alpha=weight_decay)
    removed = project_(rows, step, factor, scales)
    moved = parts(step, parameters)
    if momenta:
        torch._foreach_mul_(list(momenta), momentum)
        torch._foreach_add_(list(momenta), moved)
        moved = list(momenta)
    torch._foreach_add_(list(parameters), moved, alpha=-lr)
    return removed
