"""Products ``J' A J v`` of one chunk: J the Jacobian of the outputs, A how the loss curves there.

``J'`` is one backward pass through the kept graph of the outputs. ``J v`` is a backward pass
through the graph *of that backward pass*, which is linear in its seed: no forward-mode rules are
needed, so everything that can be trained works. Two layers are rewritten while the graph is built,
because torch's rules for their second derivatives compute more than ``J v`` needs: convolutions
(twice the work) and BatchNorm in eval mode.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from curvlab.operators.products.autograd import Product
from curvlab.operators.products.linearise import linearise
from curvlab.parameters import Layout

OutputCurvature = Callable[[Tensor], Tensor]  # of the outputs' shape, symmetric and linear


def kept(
    output: Tensor, curvature: OutputCurvature, parameters: Sequence[Tensor], layout: Layout
) -> Product:
    """Keep the graph of ``output`` (made under :class:`Transposable`) and of its transpose."""
    seed = torch.zeros_like(output, requires_grad=True)
    gradients = torch.autograd.grad(output, parameters, seed, create_graph=True, allow_unused=True)
    dependent = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]
    used, roots = [i for i, _ in dependent], [g for _, g in dependent]

    def product(block: Tensor) -> Tensor:
        result = torch.zeros_like(block)
        if not roots:
            return result
        for vector, row in zip(block, result, strict=True):
            pieces = layout.unflatten(vector)
            (along,) = torch.autograd.grad(
                roots, seed, [pieces[i] for i in used], retain_graph=True
            )
            images = torch.autograd.grad(
                output, parameters, curvature(along), retain_graph=True, allow_unused=True
            )
            layout.flatten(images, out=row)
        return result

    return product


def linearised(
    output: Callable[[Sequence[Tensor]], Tensor],
    curvature: OutputCurvature,
    parameters: Sequence[Tensor],
    layout: Layout,
) -> Product:
    """``J v`` from a traced forward derivative, ``J'`` from the kept graph."""
    push = linearise(output, parameters)
    outputs = output(parameters)

    def product(block: Tensor) -> Tensor:
        result = torch.empty_like(block)
        for vector, row in zip(block, result, strict=True):
            with torch.no_grad():
                along = push(*layout.unflatten(vector))
            images = torch.autograd.grad(
                outputs, parameters, curvature(along), retain_graph=True, allow_unused=True
            )
            layout.flatten(images, out=row)
        return result

    return product


class Transposable(TorchFunctionMode):
    """Builds graphs for :func:`kept`: right first derivatives, second ones in the seed only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            given = {**_CONVOLUTION, **dict(zip(_CONVOLUTION, args, strict=False)), **kwargs}
            # rare forms keep torch's own rules
            if not isinstance(given["padding"], str):
                return _convolution(_CONVOLUTIONS[func], given)
        elif func is functional.batch_norm:
            given = {**_BATCH_NORM, **dict(zip(_BATCH_NORM, args, strict=False)), **kwargs}
            if not given["training"] and given["running_mean"] is not None:
                return _affine(given)
        return func(*args, **kwargs)


# arguments in torch's order, with their defaults
_CONVOLUTION: dict[str, Any] = {
    "input": None,
    "weight": None,
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
}
_BATCH_NORM: dict[str, Any] = {
    "input": None,
    "running_mean": None,
    "running_var": None,
    "weight": None,
    "bias": None,
    "training": False,
    "momentum": 0.1,
    "eps": 1e-5,
}
_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


def _convolution(dims: int, given: dict[str, Any]) -> Tensor:
    def each(value: Any) -> list[int]:
        numbers = [value] if isinstance(value, int) else list(value)
        return numbers * dims if len(numbers) == 1 else numbers

    values, weight, bias = given["input"], given["weight"], given["bias"]
    lone = values.dim() == dims + 1  # one sample without a batch dimension
    geometry = (
        each(given["stride"]),
        each(given["padding"]),
        each(given["dilation"]),
        False,
        [0] * dims,
        given["groups"],
    )
    result: Tensor = _Convolution.apply(values[None] if lone else values, weight, geometry)  # type: ignore[no-untyped-call]
    result = result if bias is None else result + bias.reshape(-1, *[1] * dims)
    return result[0] if lone else result


def _affine(given: dict[str, Any]) -> Tensor:
    values, weight, bias = given["input"], given["weight"], given["bias"]
    shape = (-1, *[1] * (values.dim() - 2))
    scale = torch.rsqrt(given["running_var"] + given["eps"])
    scale = scale if weight is None else scale * weight
    shift = -given["running_mean"] * scale
    shift = shift if bias is None else shift + bias
    return torch.addcmul(shift.view(shape), values, scale.view(shape))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, geometry: Any) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.geometry = geometry
        result: Tensor = torch.ops.aten.convolution(values, weight, None, *geometry)
        return result

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        values, weight = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[:2])
        # detached: what comes back depends on the seed alone
        pieces = _Transposed.apply(  # type: ignore[no-untyped-call]
            seed, values.detach(), weight.detach(), ctx.geometry, wanted
        )
        return *pieces, None


class _Transposed(torch.autograd.Function):
    """The backward pass of a convolution; its own backward pass is the forward derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        seed: Tensor,
        values: Tensor,
        weight: Tensor,
        geometry: Any,
        wanted: Any,
    ) -> Any:
        ctx.save_for_backward(values, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        pieces = torch.ops.aten.convolution_backward(
            seed, values, weight, None, *geometry, [*wanted, False]
        )
        return pieces[0], pieces[1]

    @staticmethod
    def backward(ctx: Any, along_input: Tensor | None, along_weight: Tensor | None) -> Any:
        values, weight = ctx.saved_tensors
        along = None
        if along_input is not None:
            along = torch.ops.aten.convolution(along_input, weight, None, *ctx.geometry)
        if along_weight is not None:
            other = torch.ops.aten.convolution(values, along_weight, None, *ctx.geometry)
            along = other if along is None else along + other
        return along, None, None, None, None
