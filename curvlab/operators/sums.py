"""Weighted sums of operators: averages over tasks, differences, multiples."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from curvlab.operators.operator import Operator
from curvlab.parameters import Layout
from curvlab.probe import LinearOperator


class WeightedSum(Operator):
    """``sum_i weights[i] * operators[i]``; sums of sums are one flat sum."""

    def __init__(self, operators: Sequence[LinearOperator], weights: Sequence[float]) -> None:
        terms: list[tuple[LinearOperator, float]] = []
        for operator, weight in zip(operators, weights, strict=True):
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                raise TypeError(f"an operator's weight must be a finite number; got {weight!r}")
            if isinstance(operator, WeightedSum):
                pairs = zip(operator.operators, operator.weights, strict=True)
                terms += [(inner, weight * factor) for inner, factor in pairs]
            elif isinstance(operator, LinearOperator):
                terms.append((operator, float(weight)))
            else:
                raise TypeError(f"only operators can be added; got {type(operator).__name__}")
        if not terms:
            raise ValueError("a sum of operators needs at least one")
        self.operators: tuple[LinearOperator, ...] = tuple(operator for operator, _ in terms)
        self.weights: tuple[float, ...] = tuple(weight for _, weight in terms)
        first = self.operators[0]
        kinds = {(op.n, op.dtype, op.device) for op in self.operators}
        if len(kinds) > 1:
            raise ValueError(f"operators in a sum need one n, dtype and device; got {kinds}")
        layouts = [found for op in self.operators if (found := _layout(op)) is not None]
        names = {layout.names for layout in layouts}
        if len(names) > 1:
            raise ValueError(f"operators in a sum act on different parameters: {names}")
        layout = layouts[0] if layouts else None
        super().__init__(first.n, first.dtype, first.device, layout)
        limits = [op.limit for op in self.operators if isinstance(op, Operator) and op.limit]
        self.limit = max(limits) if limits else None

    def _product(self, block: Tensor) -> Tensor:
        # float64, so that an average over many tasks or a difference loses nothing more
        total = torch.zeros(block.shape, dtype=torch.float64, device=block.device)
        for operator, weight in zip(self.operators, self.weights, strict=True):
            total.add_(operator @ block, alpha=weight)
        return total.to(self.dtype)


def average(
    operators: Sequence[LinearOperator], weights: Sequence[float] | None = None
) -> WeightedSum:
    """The mean of ``operators``, or their mean with ``weights`` (normalised to sum to 1)."""
    operators = list(operators)
    if not operators:
        raise ValueError("average needs at least one operator")
    given = [1.0] * len(operators) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(operators):
        raise ValueError(f"average got {len(operators)} operators and {len(given)} weights")
    total = math.fsum(given)
    if not total > 0 or min(given) < 0:
        raise ValueError(f"average needs weights of at least 0 with a positive sum; got {given}")
    return WeightedSum(operators, [weight / total for weight in given])


def _layout(operator: LinearOperator) -> Layout | None:
    layout: Layout | None = getattr(operator, "layout", None)
    return layout
