"""The loss along directions in parameter space: a line or a plane through where the model is.

    pairs = lanczos(H, k=2)
    slice = landscape(H, pairs.vectors)          # curvlab.plots.landscape draws it

Any model and loss that an operator takes; the data are the operator's own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.checks import inside, whole
from curvlab.operators import Curvature


@dataclass(frozen=True, slots=True, eq=False)
class Landscape:
    """Losses at the parameters moved by multiples of one or two directions.

    Attributes:
        steps: The multiples, float64 ``(p,)``.
        losses: float64 ``(p,)``, or ``(p, p)`` with the first direction along the rows.
        quadratic: What gradient and curvature at the middle predict, of the same shape.
    """

    steps: Tensor
    losses: Tensor
    quadratic: Tensor

    def __repr__(self) -> str:
        low, high = float(self.losses.min()), float(self.losses.max())
        middle = float(self.losses[(len(self.steps) // 2,) * self.losses.dim()])
        return (
            f"Landscape({self.losses.dim()} direction(s), steps to {float(self.steps[-1]):g}, "
            f"loss {middle:.4g} in the middle, {low:.4g} to {high:.4g})"
        )


def landscape(
    operator: Curvature, directions: Tensor, *, radius: float = 1.0, points: int = 21
) -> Landscape:
    """The objective of ``operator`` on a line or a plane through its parameters.

    Args:
        operator: A curvature of a model: a Hessian predicts the loss to second order, a GaussNewton
            without the network's own curvature.
        directions: Rows ``(1, n)`` or ``(2, n)``, such as ``pairs.vectors[:2]``; or one ``(n,)``.
        radius: The largest multiple of a direction, up and down.
        points: How many per direction: an odd number, so that the middle is where the model is.
    """
    if not isinstance(operator, Curvature):
        raise TypeError(
            f"landscape needs a curvature of a model (Hessian, GaussNewton), which knows its loss; "
            f"got {type(operator).__name__}"
        )
    rows = directions[None] if directions.dim() == 1 else directions
    if rows.dim() != 2 or rows.shape[0] not in (1, 2) or rows.shape[1] != operator.n:
        raise ValueError(
            f"directions= are one or two rows of {operator.n} numbers; got "
            f"{tuple(directions.shape)}. Pass pairs.vectors[:2]"
        )
    inside("(0, inf)", radius=radius)
    whole(3, points=points)
    if points % 2 == 0:
        raise ValueError(f"points= is odd, so that the middle is where the model is; got {points}")
    rows = rows.to(operator.device, operator.dtype)
    steps = torch.linspace(-radius, radius, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[steps] * len(rows)).reshape(-1, len(rows))
    here = operator.problem.layout.flatten(operator.problem.parameters).detach()
    losses = [operator.problem.objective(here + (along.to(rows) @ rows)) for along in grid]
    # in float64: near the middle, loss and prediction differ by less than float32 resolves
    slope = (rows.double() @ operator.gradient().double()).cpu()
    bend = (rows.double() @ (operator @ rows).double().T).cpu()
    quadratic = operator.loss + grid @ slope + 0.5 * ((grid @ bend) * grid).sum(1)
    shape = (points,) * len(rows)
    found = torch.tensor(losses, dtype=torch.float64)
    return Landscape(steps, found.reshape(shape), quadratic.reshape(shape))
