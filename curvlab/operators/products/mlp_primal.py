"""The forward and backward pass of a plain MLP on one chunk of data, kept for its products.

With ``a_0`` the inputs, layer ``l = 1..L`` computes ``z_l = a_{l-1} W_l' + b_l`` and
``a_l = f_l(z_l)`` (rows are samples). Backwards, with ``s_l`` the loss's gradient with respect to
``a_l``: ``d_l = s_l * f_l'(z_l)`` and ``s_{l-1} = d_l W_l``. Products need ``a_{l-1}``, the signal
``d_l``, the slope ``f_l'(z_l)`` and the bend ``s_l * f_l''(z_l)``: these are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.operators.products.mlp_plan import Layer, MLPPlan


@dataclass(frozen=True, slots=True)
class Primal:
    """What the passes left, one entry per layer; ``N`` samples.

    ``inputs[l]`` ``(N, d_in)``; ``signals[l]``, ``slopes[l]``, ``bends[l]`` ``(N, d_out)``. A slope
    of ``None`` is one everywhere (no activation); a bend of ``None`` is zero (piecewise linear).
    ``state`` ``(N, ...)`` and ``scale`` describe the loss's Hessian at the outputs.
    """

    weights: list[Tensor]
    inputs: list[Tensor]
    signals: list[Tensor]
    slopes: list[Tensor | None]
    bends: list[Tensor | None]
    state: Tensor
    scale: float

    @property
    def samples(self) -> int:
        return len(self.inputs[0])

    def rows(self, start: int, stop: int) -> "Primal":
        """The same for samples ``start:stop``: views."""
        where = slice(start, stop)
        return Primal(
            self.weights,
            [tensor[where] for tensor in self.inputs],
            [tensor[where] for tensor in self.signals],
            [None if tensor is None else tensor[where] for tensor in self.slopes],
            [None if tensor is None else tensor[where] for tensor in self.bends],
            self.state[where],
            self.scale,
        )


@torch.no_grad()
def run(
    plan: MLPPlan,
    tensors: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    weight: float = 1.0,
) -> Primal:
    """Forward and backward pass of ``weight * loss(model(inputs), targets)``.

    Args:
        plan: From :func:`~curvlab.operators.products.mlp_plan.recognise`.
        tensors: The model's parameters by name, those that are not selected too.
        inputs: ``(N, d)``, or ``(N, ...)`` if the model begins with ``Flatten``.
        targets: As the loss takes them.
        weight: Factor on the loss, so that chunks of one data set can be added up.
    """
    dtype = tensors[plan.layers[0].weight].dtype
    if not plan.fits(inputs, targets, dtype):
        raise ValueError(
            "this data is not what the MLP product handles (inputs (N, d) of the parameters' dtype "
            "with class numbers (N,) or targets of the outputs' shape, N >= 1): got inputs "
            f"{_describe(inputs)} and targets {_describe(targets)}; use an autograd engine for it"
        )
    weights = [tensors[layer.weight].detach() for layer in plan.layers]
    values = inputs.flatten(1) if plan.flatten else inputs
    kept, slopes, seconds = [], [], []
    for layer, matrix in zip(plan.layers, weights, strict=True):
        kept.append(values)
        if layer.bias is None:
            before = values @ matrix.T
        else:
            before = torch.addmm(tensors[layer.bias].detach(), values, matrix.T)
        values, slope, second = _activate(layer, before)
        slopes.append(slope)
        seconds.append(second)
    scale = weight * plan.loss.scale(values.shape)
    gradient = plan.loss.gradient(values, targets).mul_(scale)
    signals: list[Tensor] = []
    bends: list[Tensor | None] = []
    for matrix, slope, second in zip(weights[::-1], slopes[::-1], seconds[::-1], strict=True):
        # of a layer's f(z): the loss's gradient at z, and its gradient at f times f'', which is
        # what the bend of f adds to a second derivative (nothing for a ReLU)
        signal = gradient if slope is None else gradient * slope
        signals.append(signal)
        bends.append(None if second is None else gradient * second)
        if len(signals) < len(weights):  # nobody needs the gradient at the inputs
            gradient = signal @ matrix
    state = plan.loss.state(values)
    return Primal(weights, kept, signals[::-1], slopes, bends[::-1], state, scale)


def _activate(layer: Layer, before: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``f(z)``, ``f'(z)``, ``f''(z)`` elementwise, as torch itself differentiates ``f``.

    Autograd decides what the derivative is at a kink: every engine must give the same answer there,
    and ``z = 0`` does happen (zero inputs, zero biases).
    """
    if isinstance(layer.activation, torch.nn.Identity):
        return before, None, None
    with torch.enable_grad():
        leaf = before.detach().requires_grad_()
        values = layer.activation(leaf.clone())  # a clone, for modules that work in place
        (slope,) = torch.autograd.grad(values.sum(), leaf, create_graph=layer.bends)
        second = None
        if layer.bends:
            (second,) = torch.autograd.grad(slope.sum(), leaf)
    return values.detach(), slope.detach(), second


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__
