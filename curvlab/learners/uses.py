"""Which parameters each task uses: those that autograd reaches from the task's logits.

With several heads a task leaves the other tasks' heads alone. What it does not use has no gradient,
no weight decay, no owner and no rows in a memory until a task comes that uses it.
"""

from collections.abc import Sequence
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
        layout: Of all parameters.
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

    def unused(self, task: int) -> list[slice]:
        """Where the parameters lie that ``task`` does not use."""
        if self.all_alike:
            return []
        slices, used = self.layout.slices(), set(self.of(task))
        return [where for name, where in slices.items() if name not in used]

    def alone(self, name: str) -> bool:
        """Whether one task of several is the only one that uses parameter ``name``: a head."""
        return len(self.by_task) > 1 and sum(name in names for names in self.by_task) == 1

    def mask(self, task: int, device: torch.device) -> Tensor:
        """Shape ``(P,)``: whether ``task`` uses the parameter."""
        found = torch.ones(self.layout.n, dtype=torch.bool, device=device)
        for where in self.unused(task):
            found[where] = False
        return found


def told_apart(select: Selection) -> dict[str, Any]:
    """The part of a learner's ``config`` for its ``select=``; nothing if it takes everything."""
    if select is None:
        return {}
    if callable(select):
        return {"select": described(select)}
    return {"select": [select] if isinstance(select, str) else list(select)}


def reached(logits: Tensor, named: dict[str, torch.nn.Parameter]) -> frozenset[str]:
    """Names of the parameters that ``logits`` depend on."""
    found: Sequence[Tensor | None] = torch.autograd.grad(
        logits.sum(), list(named.values()), allow_unused=True
    )
    return frozenset(name for name, one in zip(named, found, strict=True) if one is not None)
