"""What the eigensolvers are given: one operator, and what a user pays around it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.operators import Curvature
from curvlab.operators.policy import drops
from curvlab.probe import LinearOperator

Data = list[tuple[Tensor, Tensor]]  # batches of inputs and targets, the one thing all tools take
Product = Callable[[Tensor], Tensor]  # (b, n) -> (b, n)
Answer = tuple[Tensor, Tensor, int]  # values (k,), vectors (k, n), products
KINDS = {"Hessian": "hessian", "GaussNewton": "gauss_newton"}  # what other tools call theirs
MACHINES_OWN = ("loss", "engine")  # may differ between machines for one and the same problem
MODULES = {  # some tools take modules only
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.mse_loss: nn.MSELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """A model as every tool takes it.

    Attributes:
        kind: ``"hessian"`` or ``"gauss_newton"``.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: Data
    kind: str = "hessian"

    @property
    def arguments(self) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Data]:
        return self.model, self.loss, self.batches


@dataclass(slots=True)
class Problem:
    """An operator, how it is made, and what one gradient costs beside it.

    Attributes:
        name: For tables.
        make: Builds the operator anew, as its user has to.
        operator: One that is there.
        gradient: One gradient on the same data, the unit of time; None counts in seconds.
        plain: The model as other tools take it; None if only curvlab can take it.
        spectrum: All eigenvalues, where they are known.
        about: What identifies it in a leaderboard.
    """

    name: str
    make: Callable[[], LinearOperator]
    operator: LinearOperator
    gradient: Callable[[], object] | None = None
    plain: Plain | None = None
    spectrum: Tensor | None = None
    about: dict[str, Any] | None = None


def of_model(name: str, make: Callable[[], Curvature], loss: Any) -> Problem:
    """The problem of a curvature operator on a model.

    Args:
        make: Builds the operator.
        loss: As the operator takes it.
    """
    operator = make()
    told = {n: fact for n, fact in operator.about().items() if n not in MACHINES_OWN}
    about = {"n": operator.n, **told}
    return Problem(name, make, operator, operator.gradient, _plain(operator, loss), about=about)


def _plain(operator: Curvature, loss: Any) -> Plain | None:
    """What other tools can take; None where the operator means something that they cannot."""
    kind, problem = KINDS.get(type(operator).__name__), operator.problem
    whole = operator.n == sum(parameter.numel() for parameter in problem.model.parameters())
    # in train mode BatchNorm and dropout would do in other tools what nobody asked for here
    trains = any(flag and (drops(m) or _normalises(m)) for m, flag in problem.flags.items())
    batches = list(problem.batches)
    pairs = all(isinstance(b, Sequence) and len(b) == 2 for b in batches)
    if not pairs or not all(isinstance(one, Tensor) for batch in batches for one in batch):
        return None
    if kind is None or not whole or trains or problem.reduction != "mean" or not callable(loss):
        return None
    model = copy.deepcopy(problem.model).to(operator.dtype).train(any(problem.flags.values()))
    module = MODULES.get(loss)
    data = [(_as(x, operator.dtype), _as(y, operator.dtype)) for x, y in batches]
    return Plain(model, module() if module else loss, data, kind)


def _normalises(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
