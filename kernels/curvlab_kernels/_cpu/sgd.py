"""The projected SGD step on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlab_kernels._cpu.lists import gathered, parts
from curvlab_kernels._cpu.path import choose
from curvlab_kernels._cpu.products import project_


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
    if len(parameters) == 1 and parameters[0].is_contiguous():
        slope = gathered(gradients, rows)
        path = choose(rows, slope)
        if path.team is not None and (not momenta or momenta[0].is_contiguous()):
            update = parameters[0], momenta[0] if momenta else None, lr, weight_decay, momentum
            removed: Tensor = path.team.run(path, rows, scales, factor, slope, update)
            return removed
    if not parameters:
        return torch.zeros(rows.shape[0], dtype=torch.float64)
    changed, moved = list(parameters), list(gradients)
    if weight_decay:
        moved = list(torch._foreach_add(moved, changed, alpha=weight_decay))
    step = gathered(moved, rows)
    if not weight_decay and len(moved) == 1:  # a view of the gradient
        step = step.clone()
    removed = project_(rows, step, factor, scales)
    moved = parts(step, changed)
    if momenta:
        torch._foreach_mul_(list(momenta), momentum)
        torch._foreach_add_(list(momenta), moved)
        moved = list(momenta)
    torch._foreach_add_(changed, moved, alpha=-lr)
    return removed
