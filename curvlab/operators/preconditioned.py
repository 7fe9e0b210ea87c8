"""Curvature as an adaptive optimizer sees it: ``P^-1/2 A P^-1/2`` with a diagonal P.

Adam, RMSprop and Adagrad step along ``P^-1 g``. What limits their learning rate is not the largest
eigenvalue of the Hessian H but that of ``P^-1 H`` (Cohen et al. 2022, "Adaptive gradient methods at
the edge of stability"), which is similar to the symmetric matrix here. An eigenvector u of that is
``P^-1/2 u`` as a direction in parameters.
"""

import torch
from torch import Tensor, nn

from curvlab.operators.operator import Operator
from curvlab.parameters import Selection, layout_of, select_parameters
from curvlab.probe import LinearOperator


class Preconditioned(Operator):
    """``P^-1/2 A P^-1/2`` for ``base`` A and positive numbers ``diagonal`` ``(n,)``."""

    def __init__(self, base: LinearOperator, diagonal: Tensor) -> None:
        if not isinstance(diagonal, Tensor) or diagonal.shape != (base.n,):
            came = (
                tuple(diagonal.shape) if isinstance(diagonal, Tensor) else type(diagonal).__name__
            )
            raise ValueError(f"the preconditioner is a vector ({base.n},) of numbers; got {came}")
        if not bool((torch.isfinite(diagonal) & (diagonal > 0)).all()):
            raise ValueError(
                "the preconditioner must be positive and finite: add the optimizer's eps to it"
            )
        super().__init__(base.n, base.dtype, base.device, getattr(base, "layout", None))
        self.base, self.limit = base, getattr(base, "limit", None)
        # The root on both sides: P^-1 A has the same eigenvalues but is not symmetric.
        self.root = diagonal.detach().double().rsqrt().to(dtype=base.dtype, device=base.device)

    def _product(self, block: Tensor) -> Tensor:
        return (self.base @ (block * self.root)) * self.root


def adaptive_preconditioner(
    optimizer: torch.optim.Optimizer, model: nn.Module, select: Selection = None
) -> Tensor:
    """The diagonal P ``(n,)``, float64, with which ``optimizer`` divides the gradient now.

    The order is that of the operators made with the same ``model`` and ``select``. For Adam and
    AdamW it includes the bias corrections of both moments, so that the step is ``lr * P^-1`` times
    the running mean of the gradients.

    Args:
        optimizer: ``torch.optim.Adam``, ``AdamW``, ``RMSprop`` or ``Adagrad``, after a step.
        model: The model whose parameters it trains.
        select: As for the operators.
    """
    chosen = select_parameters(model, select)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    pieces = []
    for name, parameter in chosen.items():
        if id(parameter) not in groups:
            raise ValueError(
                f"the optimizer does not train parameter {name!r}: leave it out with select="
            )
        state = optimizer.state.get(parameter, {})
        if not state:
            raise ValueError(f"the optimizer has no state for {name!r}: take a step first")
        pieces.append(_divisor(optimizer, groups[id(parameter)], state))
    return layout_of(chosen).flatten(pieces).cpu()


def _divisor(
    optimizer: torch.optim.Optimizer, group: dict[str, object], state: dict[str, Tensor]
) -> Tensor:
    def number(name: str) -> float:
        return float(group[name])  # type: ignore[arg-type]

    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        if group.get("maximize"):
            raise ValueError("the optimizer maximises; its stability is not that of a minimiser")
        first, second = (float(beta) for beta in group["betas"])  # type: ignore[attr-defined]
        steps = float(state["step"])
        square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"].double()
        root = (square / (1.0 - second**steps)).sqrt()
        # torch adds eps after the correction of the second moment, which matters in early steps.
        divisor: Tensor = (1.0 - first**steps) * (root + number("eps"))
        return divisor
    if isinstance(optimizer, torch.optim.RMSprop):
        square = state["square_avg"].double()
        if group.get("centered"):
            square = square - state["grad_avg"].double() ** 2
        # A variance as a difference of means: rounding may take it below 0.
        return square.clamp_min(0.0).sqrt() + number("eps")
    if isinstance(optimizer, torch.optim.Adagrad):
        decay = 1.0 + (float(state["step"]) - 1.0) * number("lr_decay")
        return (state["sum"].double().sqrt() + number("eps")) * decay
    raise TypeError(
        f"{type(optimizer).__name__} is not known to divide by a diagonal: pass one of Adam, "
        "AdamW, RMSprop or Adagrad, or give operator.precondition() a diagonal of your own"
    )
