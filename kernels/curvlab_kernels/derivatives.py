"""The functional kernels under autograd and every ``torch.func`` transform.

All three are linear in the vectors, so the forward derivative is the map itself and the backward
one its adjoint: ``M'`` for ``M``, and the projection for the projection. The basis is a constant.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from curvlab_kernels import registered

Context = Any  # what autograd hands from forward to backward


class Coefficients(Function):
    """``M g``; arguments as :func:`registered.coefficients`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, vectors: Tensor, scales: Tensor | None) -> Any:
        return registered.coefficients(rows, vectors, scales)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        rows, vectors, scales = inputs
        ctx.save_for_backward(rows, scales)
        ctx.save_for_forward(rows, scales)
        ctx.n, ctx.double = vectors.shape[-1], vectors.dtype.itemsize == 8

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Any:
        rows, scales = ctx.saved_tensors
        return None, combine(rows, gradients[0], scales, ctx.n, ctx.double), None

    @staticmethod
    def jvp(ctx: Context, *tangents: Any) -> Any:
        rows, scales = ctx.saved_tensors
        return coefficients(rows, tangents[1], scales)


class Combine(Function):
    """``M' c``; arguments as :func:`registered.combine`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rows: Tensor, coefficients: Tensor, scales: Tensor | None, n: int, double: bool
    ) -> Any:
        return registered.combine(rows, coefficients, scales, n, double)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        rows, _, scales, ctx.n, ctx.double = inputs
        ctx.save_for_backward(rows, scales)
        ctx.save_for_forward(rows, scales)

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Any:
        rows, scales = ctx.saved_tensors
        return None, coefficients(rows, gradients[0], scales), None, None, None

    @staticmethod
    def jvp(ctx: Context, *tangents: Any) -> Any:
        rows, scales = ctx.saved_tensors
        return combine(rows, tangents[1], scales, ctx.n, ctx.double)


class Project(Function):
    """``g - M' G^-1 M g``; arguments as :func:`registered.project`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, vectors: Tensor, factor: Tensor | None, scales: Tensor | None) -> Any:
        return registered.project(rows, vectors, factor, scales)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        rows, _, factor, scales = inputs
        ctx.save_for_backward(rows, factor, scales)
        ctx.save_for_forward(rows, factor, scales)

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Any:
        rows, factor, scales = ctx.saved_tensors
        return None, project(rows, gradients[0], factor, scales), None, None

    @staticmethod
    def jvp(ctx: Context, *tangents: Any) -> Any:
        rows, factor, scales = ctx.saved_tensors
        return project(rows, tangents[1], factor, scales)


# ``apply`` has no type annotations, and torch.compile traces an operator of the dispatcher but not
# a Function with a vmap rule.


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None) -> Any:
    """``M g`` for whoever is watching."""
    way: Any = registered.coefficients if torch.compiler.is_compiling() else Coefficients.apply
    return way(rows, vectors, scales)


def combine(rows: Tensor, coefficients: Tensor, scales: Tensor | None, n: int, double: bool) -> Any:
    """``M' c`` for whoever is watching."""
    way: Any = registered.combine if torch.compiler.is_compiling() else Combine.apply
    return way(rows, coefficients, scales, n, double)


def project(rows: Tensor, vectors: Tensor, factor: Tensor | None, scales: Tensor | None) -> Any:
    """``g - M' G^-1 M g`` for whoever is watching."""
    way: Any = registered.project if torch.compiler.is_compiling() else Project.apply
    return way(rows, vectors, factor, scales)
