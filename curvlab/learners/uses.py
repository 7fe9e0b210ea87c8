"""Which parameters each task uses: those whose gradient is not all zero.

With several heads a task does not use the heads of other tasks, whether they are not called or
called and then discarded. A parameter has no gradient, no weight decay, no owner and no rows in a
memory until a task uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlab.learners.described import described
from curvlab.parameters import Layout, Selection


@dataclass(frozen=True, slots=True)
class Uses:
    """The parameters that tasks use.

    Attributes:
        layout: The layout of all parameters.
        by_task: For each task the names of those it uses; empty if every task uses all of them.
    """

    layout: Layout
    by_task: tuple[frozenset[str], ...] = ()

    @property
    def all_alike(self) -> bool:
        """Whether every task uses every parameter."""
        return all(len(names) == len(self.layout.names) for names in self.by_task)

    def of(self, task: int) -> list[str]:
        """Names of the parameters that ``task`` uses, in the layout's order."""
        if self.all_alike:
            return list(self.layout.names)
        return [name for name in self.layout.names if name in self.by_task[task]]

    def unused(self, task: int) -> dict[str, slice]:
        """Where the parameters lie that ``task`` does not use."""
        if self.all_alike:
            return {}
        names = self.by_task[task]
        return {name: where for name, where in self.layout.slices().items() if name not in names}

    def alone(self, name: str) -> bool:
        """Whether one task of several is the only one that uses parameter ``name``: a head."""
        return len(self.by_task) > 1 and sum(name in names for names in self.by_task) == 1

    def mask(self, task: int, device: torch.device) -> Tensor:
        """Shape ``(P,)``: whether ``task`` uses the parameter."""
        found = torch.ones(self.layout.n, dtype=torch.bool, device=device)
        for where in self.unused(task).values():
            found[where] = False
        return found


def told_apart(select: Selection) -> dict[str, Any]:
    """The entry of a learner's ``config`` for ``select=``; empty if everything is selected."""
    if select is None:
        return {}
    if callable(select):
        return {"select": described(select)}
    return {"select": [select] if isinstance(select, str) else list(select)}


def used(
    logits_of: Callable[[Tensor], Tensor], layout: Layout, parameters: Tensor
) -> frozenset[str]:
    """Names of the parameters that the logits depend on.

    Found from the gradient at ``parameters`` and at random ones: a layer may start at zero, and no
    gradient passes through zeros.

    Args:
        logits_of: From parameters ``(P,)`` to logits ``(N, C)``.
        layout: The layout of the parameters.
        parameters: Shape ``(P,)``.
    """
    generator = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)

    moved = parameters + random(parameters) * parameters.square().mean().sqrt().clamp(min=0.01)
    found: set[str] = set()
    for values in (parameters, moved):
        flat = values.detach().clone().requires_grad_()
        with torch.enable_grad():
            logits = logits_of(flat)
            # classes left out by -inf, or another large negative number, have no part in a softmax
            taken = logits > logits.amax(-1, keepdim=True) - 700.0
            (gradient,) = torch.autograd.grad((logits * random(logits))[taken].sum(), flat)
        pieces = layout.slices().items()
        found |= {name for name, where in pieces if bool((gradient[where] != 0.0).any())}
    return frozenset(found)
