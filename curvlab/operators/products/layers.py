"""Convolution and eval-mode BatchNorm whose second derivatives cost no more than they must.

While a graph is built, the two layers are replaced by equivalents with hand-written derivatives.
torch's own double backward of a convolution computes all its terms even when one is wanted, and
some of them by slow transposed copies; that of BatchNorm is a long composite. What is not
recognised here (string padding, complex, autocast) keeps torch's own rules: slower, never other.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

log = logging.getLogger("curvlab")

Graph = TypeVar("Graph")


def rewriting(build: Callable[[], Graph], *, second: bool) -> Graph:
    """``build()`` with its layers rewritten; in full or only in the seed, see :class:`Rewritten`.

    A checkpointed part runs again outside the context. Where its layers would then differ from
    those of the first run torch raises, and the graph is built with torch's own rules.
    """
    try:
        with Rewritten(second=second):
            return build()
    except CheckpointError:
        log.info("activation checkpointing: layers keep torch's own derivative rules")
        return build()


class Rewritten(TorchFunctionMode):
    """Replaces the layers in calls made inside the context.

    Args:
        second: Whether second derivatives are wanted in full, as for a Hessian. If not, first
            derivatives can be differentiated with respect to their seed only, as for ``J v``.
    """

    def __init__(self, *, second: bool) -> None:
        super().__init__()
        self.second = second

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DIMENSIONS:
            given = {**_CONVOLUTION, **dict(zip(_CONVOLUTION, args, strict=False)), **kwargs}
            if _plain(given) and not isinstance(given["padding"], str):
                return _convolution(_DIMENSIONS[func], given, self.second)
        elif func is functional.batch_norm:
            given = {**_BATCH_NORM, **dict(zip(_BATCH_NORM, args, strict=False)), **kwargs}
            if _plain(given) and not given["training"] and given["running_mean"] is not None:
                return _batch_norm(given, self.second)
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
_DIMENSIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


def _plain(given: dict[str, Any]) -> bool:
    values = given["input"]
    if not values.is_floating_point():
        return False
    # a tensor without memory, as the planner uses, is on no device that autocast knows
    return bool(values.is_meta) or not torch.is_autocast_enabled(values.device.type)


def _convolution(dims: int, given: dict[str, Any], second: bool) -> Tensor:
    def each(value: Any) -> list[int]:
        numbers = [value] if isinstance(value, int) else list(value)
        return numbers * dims if len(numbers) == 1 else numbers

    values, weight, bias = given["input"], given["weight"], given["bias"]
    lone = values.dim() == dims + 1  # one sample without a batch dimension
    sizes = [each(given[name]) for name in ("stride", "padding", "dilation")]
    geometry = (*sizes, False, [0] * dims, given["groups"])
    result: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        values[None] if lone else values, weight, geometry, second
    )
    result = result if bias is None else result + bias.reshape(-1, *[1] * dims)
    return result[0] if lone else result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, geometry: Any, second: bool) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.geometry, ctx.second = geometry, second
        result: Tensor = torch.ops.aten.convolution(values, weight, None, *geometry)
        return result

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        values, weight = ctx.saved_tensors
        if not ctx.second:
            values, weight = values.detach(), weight.detach()
        wanted = tuple(ctx.needs_input_grad[:2])
        pieces = _ConvolutionBackward.apply(seed, values, weight, ctx.geometry, wanted)  # type: ignore[no-untyped-call]
        return *pieces, None, None


class _ConvolutionBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, seed: Tensor, values: Tensor, weight: Tensor, geometry: Any, wanted: Any
    ) -> Any:
        ctx.save_for_backward(seed, values, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        return _transposed(seed, values, weight, geometry, wanted)

    @staticmethod
    def backward(ctx: Any, along_values: Tensor | None, along_weight: Tensor | None) -> Any:
        seed, values, weight = ctx.saved_tensors
        to_seed = to_values = to_weight = None
        if along_values is not None:
            to_seed = torch.ops.aten.convolution(along_values, weight, None, *ctx.geometry)
            if ctx.needs_input_grad[2]:
                to_weight = _transposed(seed, along_values, weight, ctx.geometry, (False, True))[1]
        if along_weight is not None:
            other = torch.ops.aten.convolution(values, along_weight, None, *ctx.geometry)
            to_seed = other if to_seed is None else to_seed.add_(other)
            if ctx.needs_input_grad[1]:
                to_values = _transposed(seed, values, along_weight, ctx.geometry, (True, False))[0]
        return to_seed, to_values, to_weight, None, None


def _transposed(
    seed: Tensor, values: Tensor, weight: Tensor, geometry: Any, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    to_values, to_weight, _ = torch.ops.aten.convolution_backward(
        seed, values, weight, None, *geometry, [*wanted, False]
    )
    return to_values, to_weight


def _batch_norm(given: dict[str, Any], second: bool) -> Tensor:
    values, weight, bias = given["input"], given["weight"], given["bias"]
    scale = torch.rsqrt(given["running_var"] + given["eps"])
    scale = scale if weight is None else scale * weight
    shift = -given["running_mean"] * scale
    shift = shift if bias is None else shift + bias
    shape = (-1, *[1] * (values.dim() - 2))
    result: Tensor = _Affine.apply(values, scale.view(shape), shift.view(shape), second)  # type: ignore[no-untyped-call]
    return result


class _Affine(torch.autograd.Function):
    """``values * scale + shift``, the last two per channel."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, shift: Tensor, second: bool) -> Tensor:
        ctx.save_for_backward(values, scale)
        ctx.second = second
        return torch.addcmul(shift, values, scale)

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        values, scale = ctx.saved_tensors
        if not ctx.second:
            values, scale = values.detach(), scale.detach()
        wanted = tuple(ctx.needs_input_grad[:3])
        return *_AffineBackward.apply(seed, values, scale, wanted), None  # type: ignore[no-untyped-call]


class _AffineBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seed: Tensor, values: Tensor, scale: Tensor, wanted: Any) -> Any:
        ctx.save_for_backward(seed, values, scale)
        ctx.set_materialize_grads(False)
        return (
            seed * scale if wanted[0] else None,
            _per_channel(seed * values, scale) if wanted[1] else None,
            _per_channel(seed, scale) if wanted[2] else None,
        )

    @staticmethod
    def backward(
        ctx: Any,
        along_values: Tensor | None,
        along_scale: Tensor | None,
        along_shift: Tensor | None,
    ) -> Any:
        seed, values, scale = ctx.saved_tensors
        to_seed = to_values = to_scale = None
        if along_values is not None:
            to_seed = along_values * scale
            if ctx.needs_input_grad[2]:
                to_scale = _per_channel(along_values * seed, scale)
        if along_scale is not None:
            to_seed = (
                values * along_scale if to_seed is None else to_seed.addcmul_(values, along_scale)
            )
            if ctx.needs_input_grad[1]:
                to_values = seed * along_scale
        if along_shift is not None:
            to_seed = along_shift.expand_as(seed) if to_seed is None else to_seed.add_(along_shift)
        return to_seed, to_values, to_scale, None


def _per_channel(terms: Tensor, like: Tensor) -> Tensor:
    dims = [0, *range(2, terms.dim())]
    return terms.sum(dims).view_as(like)
