"""The kernels as operators of torch's dispatcher: shapes for tracing, derivatives, vmap.

A call through the dispatcher costs tens of microseconds; ``ops`` takes it only when something is
watching (autograd, ``torch.func``, ``torch.compile``), and otherwise calls the kernel directly.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Context = Any  # what autograd hands from forward to backward


def backend(tensor: Tensor) -> ModuleType:
    """The module with the kernels for ``tensor``'s device."""
    if tensor.is_cuda:
        from curvlab_kernels import _triton

        return _triton
    from curvlab_kernels import _cpu

    return _cpu


def _coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None) -> Tensor:
    result: Tensor = backend(rows).coefficients(rows, vectors.contiguous(), scales)
    return result


def _combine(
    rows: Tensor, coefficients: Tensor, scales: Tensor | None, n: int, double: bool
) -> Tensor:
    dtype = torch.float64 if double else torch.float32
    vectors = rows.new_zeros((*coefficients.shape[:-1], n), dtype=dtype)
    backend(rows).apply_(rows, -coefficients, vectors, scales)
    return vectors


def _project(rows: Tensor, vectors: Tensor, factor: Tensor | None, scales: Tensor | None) -> Tensor:
    result = vectors.clone(memory_format=torch.contiguous_format)
    backend(rows).project_(rows, result, factor, scales)
    return result


def _project_in_place(
    rows: Tensor, vectors: Tensor, factor: Tensor | None, scales: Tensor | None
) -> Tensor:
    removed: Tensor = backend(rows).project_(rows, vectors, factor, scales)
    return removed


def _project_list_in_place(
    rows: Tensor, tensors: Sequence[Tensor], factor: Tensor | None, scales: Tensor | None
) -> Tensor:
    removed: Tensor = backend(rows).project_list_(rows, tensors, factor, scales)
    return removed


def _sgd_step(
    rows: Tensor,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: float,
    weight_decay: float,
    momentum: float,
    factor: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    removed: Tensor = backend(rows).sgd_step_(
        rows, parameters, gradients, momenta, lr, weight_decay, momentum, factor, scales
    )
    return removed


def _register(name: str, function: Any, changes: Sequence[str] = ()) -> Any:
    return torch.library.custom_op(
        f"curvlab_kernels::{name}", function, mutates_args=tuple(changes)
    )


coefficients = _register("coefficients", _coefficients)
combine = _register("combine", _combine)
project = _register("project", _project)
project_ = _register("project_", _project_in_place, ["vectors"])
project_list_ = _register("project_list_", _project_list_in_place, ["tensors"])
sgd_step_ = _register("sgd_step_", _sgd_step, ["parameters", "momenta"])


# Shapes, for tracing without data.


def _one_per_row(rows: Tensor, vectors: Tensor, *_: Any) -> Tensor:
    return vectors.new_empty((*vectors.shape[:-1], rows.shape[0]), dtype=torch.float64)


def _one_list_per_row(rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float64)


def _same_shape(_rows: Tensor, vectors: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(vectors, memory_format=torch.contiguous_format)


def _combined(
    rows: Tensor, coefficients: Tensor, _scales: Tensor | None, n: int, double: bool
) -> Tensor:
    dtype = torch.float64 if double else torch.float32
    return rows.new_empty((*coefficients.shape[:-1], n), dtype=dtype)


coefficients.register_fake(_one_per_row)
combine.register_fake(_combined)
project.register_fake(_same_shape)
project_.register_fake(_one_per_row)
project_list_.register_fake(_one_list_per_row)
sgd_step_.register_fake(_one_list_per_row)


# Derivatives with respect to the vectors. M' is the adjoint of M, and the projection is its own.


def _keep_for_coefficients(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    rows, vectors, scales = inputs
    ctx.save_for_backward(rows, scales)
    ctx.n, ctx.double = vectors.shape[-1], vectors.dtype == torch.float64


def _coefficients_backward(context: Context, gradient: Tensor) -> tuple[Any, ...]:
    rows, scales = context.saved_tensors
    return None, combine(rows, gradient, scales, context.n, context.double), None


def _keep_for_combine(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    rows, _, scales, _, _ = inputs
    ctx.save_for_backward(rows, scales)


def _combine_backward(context: Context, gradient: Tensor) -> tuple[Any, ...]:
    rows, scales = context.saved_tensors
    return None, coefficients(rows, gradient, scales), None, None, None


def _keep_for_project(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    rows, _, factor, scales = inputs
    ctx.save_for_backward(rows, factor, scales)


def _project_backward(context: Context, gradient: Tensor) -> tuple[Any, ...]:
    rows, factor, scales = context.saved_tensors
    return None, project(rows, gradient, factor, scales), None, None


coefficients.register_autograd(_coefficients_backward, setup_context=_keep_for_coefficients)
combine.register_autograd(_combine_backward, setup_context=_keep_for_combine)
project.register_autograd(_project_backward, setup_context=_keep_for_project)


# vmap over vectors is a block of vectors, which the kernels take as it is.


def _vmap_over_vectors(operator: Any) -> Any:
    def rule(info: Any, in_dims: tuple[Any, ...], rows: Tensor, vectors: Tensor, *rest: Any) -> Any:
        moved = [dim for index, dim in enumerate(in_dims) if index != 1]
        if any(dim is not None for dim in moved):
            raise ValueError(
                "vmap over the basis is not possible, only over the vectors: the rows of several "
                "bases are separate calls"
            )
        if in_dims[1] is None:
            return operator(rows, vectors, *rest), None
        blocks = vectors.movedim(in_dims[1], 0)
        flat = blocks.reshape(-1, blocks.shape[-1])
        result = operator(rows, flat, *rest)
        return result.reshape(info.batch_size, *blocks.shape[1:-1], result.shape[-1]), 0

    return rule


for _operator in (coefficients, combine, project):
    _operator.register_vmap(_vmap_over_vectors(_operator))
