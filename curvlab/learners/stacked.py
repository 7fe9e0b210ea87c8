"""Plain MLPs, all runs in one program: a hand-derived forward and backward over stacked weights.

At batch 10 the MLP of the paper is almost all overhead in a loop of modules. Here one batched
matrix product serves all runs, every result goes into a buffer made once, and nothing records a
graph. Each run's gradient equals that of a run of its own to rounding (products of another batch
count may be summed in another order).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.learners.population import ModulePopulation, Population
from curvlab.learners.statistics import BatchNormPolicy
from curvlab.parameters import layout_of, select_parameters

# From this many inputs on, `W x'` and a turned copy beat `x W'` (by two at 196 inputs, batch 10).
WIDE = 128
# in place on the sums; and the signal's change in place, given the activation's output
_FORWARD: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: torch.relu_,
    nn.Tanh: torch.tanh_,
}
_BACKWARD: dict[type[nn.Module], Callable[[Tensor, Tensor], object]] = {
    nn.ReLU: lambda signal, output: torch.ops.aten.threshold_backward.grad_input(
        signal, output, 0, grad_input=signal
    ),
    nn.Tanh: lambda signal, output: torch.ops.aten.tanh_backward.grad_input(
        signal, output, grad_input=signal
    ),
}


@dataclass(frozen=True, slots=True)
class Linear:
    """Where one linear layer lies in the flat vector."""

    weight: slice
    bias: slice | None
    inputs: int
    outputs: int

    def weight_of(self, vectors: Tensor) -> Tensor:
        """The weight's part of ``(..., P)`` as a view ``(..., outputs, inputs)``."""
        return vectors[..., self.weight].view(*vectors.shape[:-1], self.outputs, self.inputs)

    def bias_of(self, vectors: Tensor) -> Tensor | None:
        """The bias's part of ``(..., P)`` as a view ``(..., outputs)``."""
        return None if self.bias is None else vectors[..., self.bias]


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """Linear layers with one activation between them."""

    layers: tuple[Linear, ...]
    activation: type[nn.Module]

    def forward(self, parameters: Tensor, inputs: Tensor) -> list[Tensor]:
        """Inputs of every layer and, last, the logits.

        Args:
            parameters: Shape ``(S, P)``.
            inputs: Shape ``(N, ...)``, shared by the runs, or ``(S, N, inputs)``.

        Returns:
            Tensors ``(S, N, width)``.
        """
        runs = len(parameters)
        hidden = inputs if inputs.dim() == 3 else inputs.flatten(1).expand(runs, -1, -1)
        values = [hidden]
        for layer in self.layers:
            if len(values) > 1:
                _FORWARD[self.activation](hidden)  # the sums of the layer before
            weight, bias = layer.weight_of(parameters).transpose(1, 2), layer.bias_of(parameters)
            if bias is None:
                hidden = torch.bmm(hidden, weight)
            else:
                hidden = torch.baddbmm(bias.unsqueeze(1), hidden, weight)
            values.append(hidden)
        return values

    def backward(self, parameters: Tensor, values: list[Tensor], signal: Tensor) -> list[Tensor]:
        """Signals ``(S, N, outputs)`` at every layer's output, given that at the logits."""
        signals = [signal]
        for layer, output in zip(self.layers[:0:-1], values[-2:0:-1], strict=True):
            signal = torch.bmm(signal, layer.weight_of(parameters))
            _BACKWARD[self.activation](signal, output)
            signals.append(signal)
        return signals[::-1]


def plain_mlp(model: nn.Module) -> PlainMLP | None:
    """The layers of ``model`` if it is a plain MLP, else ``None``.

    Plain: an ``nn.Sequential`` of an optional ``Flatten``, then ``Linear`` layers with ``ReLU`` or
    ``Tanh`` between them, none frozen, shared, or with hooks.
    """
    if type(model).forward is not nn.Sequential.forward:
        return None
    modules = list(model.children())
    if modules and type(modules[0]) is nn.Flatten and modules[0].start_dim == 1:
        modules = modules[1:]
    linears, between = modules[::2], modules[1::2]
    kinds = {type(module) for module in between}
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if (
        len(linears) != len(between) + 1
        or len(set(map(id, linears))) < len(linears)
        or any(type(linear) is not nn.Linear for linear in linears)
        or len(kinds) > 1
        or not kinds <= set(_FORWARD)
        or hooked
        or not all(parameter.requires_grad for parameter in model.parameters())
    ):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    slices = layout_of(select_parameters(model)).slices()
    layers = [
        Linear(
            slices[f"{names[id(linear)]}.weight"],
            slices.get(f"{names[id(linear)]}.bias"),
            linear.in_features,
            linear.out_features,
        )
        for linear in linears
        if isinstance(linear, nn.Linear)
    ]
    return PlainMLP(tuple(layers), kinds.pop() if kinds else nn.ReLU)


class StackedMLP(Population):
    """Runs of a plain MLP, trained by batched matrix products."""

    def __init__(self, models: Sequence[nn.Module], seeds: Sequence[int]) -> None:
        form = plain_mlp(models[0]) if models else None
        if form is None:
            raise ValueError(
                "StackedMLP needs nn.Sequential models of Linear layers with ReLU or Tanh between "
                "them; use ModulePopulation for others"
            )
        self.form = form
        super().__init__(models, seeds)
        self._programs: dict[int, Program] = {}
        self._last: tuple[int, BatchFactors] | None = None

    def _rows(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)  # one block: batched products sum in another order anyway

    # a plain MLP has neither modes nor randomness nor anything that depends on the task
    def gradient_(self, inputs: Tensor, targets: Tensor, task: int, step: int = 0) -> None:  # noqa: ARG002
        batch = targets.shape[1]
        if batch not in self._programs:
            self._programs[batch] = _program(self, batch)
        with torch.inference_mode():  # cheaper per operation than no_grad; makes no new tensors
            factors = self._programs[batch](inputs.flatten(2), targets)
        self._last = self.gradients._version, factors

    def gradient_factors(self) -> "BatchFactors | None":
        """What the gradients are made of, if they are still as :meth:`gradient_` left them.

        Each layer's weight gradient is a sum over the batch of outer products of a signal and an
        input. ``None`` once anything has been added to the gradients or projected off them.
        """
        if self._last is None or self._last[0] != self.gradients._version:
            return None
        return self._last[1]

    def logits(
        self,
        inputs: Tensor,
        task: int,  # noqa: ARG002
        parameters: Tensor | None = None,
    ) -> Tensor:
        with torch.no_grad():
            values = self.parameters if parameters is None else parameters
            return self.form.forward(values, inputs)[-1]


# per layer, the inputs (S, B, in) and signals (S, B, out) of a batch
BatchFactors = tuple[list[Tensor], list[Tensor]]
Program = Callable[[Tensor, Tensor], BatchFactors]


def _program(population: StackedMLP, batch: int) -> Program:
    """The gradient for batches of one size: all views and buffers made beforehand."""
    form, parameters, gradients = population.form, population.parameters, population.gradients
    layers, runs = form.layers, population.size

    def buffer(*shape: int) -> Tensor:
        return torch.zeros(runs, *shape, dtype=parameters.dtype, device=parameters.device)

    weights = [layer.weight_of(parameters) for layer in layers]
    outputs = [buffer(batch, layer.outputs) for layer in layers]
    products = [
        _product(weight, layer.bias_of(parameters), output)
        for layer, weight, output in zip(layers, weights, outputs, strict=True)
    ]
    signals = [buffer(batch, layer.outputs) for layer in layers]
    turned = [signal.transpose(1, 2) for signal in signals]
    weight_gradients = [buffer(layer.outputs, layer.inputs) for layer in layers]
    bias_gradients = [None if layer.bias is None else buffer(layer.outputs) for layer in layers]
    pieces = _in_order(layers, weight_gradients, bias_gradients)
    activate, deactivate = _FORWARD[form.activation], _BACKWARD[form.activation]
    minus = buffer(batch, 1).fill_(-1.0)
    last = len(layers) - 1
    softmax = torch.ops.aten._softmax.out

    def run(inputs: Tensor, targets: Tensor) -> BatchFactors:
        hidden = [inputs, *outputs]
        for i, product in enumerate(products):
            product(hidden[i])
            if i < last:
                activate(outputs[i])
        signal = signals[last]
        softmax(outputs[last], 2, False, out=signal)
        # the gradient of the mean cross-entropy at the logits: (p - e_y) / B
        signal.scatter_add_(2, targets.unsqueeze(2), minus).mul_(1.0 / batch)
        for i in range(last, -1, -1):
            torch.bmm(turned[i], hidden[i], out=weight_gradients[i])
            bias = bias_gradients[i]
            if bias is not None:
                torch.sum(signals[i], 1, out=bias)
            if i:
                torch.bmm(signals[i], weights[i], out=signals[i - 1])
                deactivate(signals[i - 1], hidden[i])
        # batched products want a contiguous result, so the flat rows are filled in one copy
        torch.cat(pieces, 1, out=gradients)
        return hidden[:-1], signals

    return run


def _product(weight: Tensor, bias: Tensor | None, output: Tensor) -> Callable[[Tensor], object]:
    """``output = inputs W' + b`` for ``weight`` ``(S, out, in)``, in the order that is faster."""
    turned = weight.transpose(1, 2)
    if bias is None:
        return lambda inputs: torch.bmm(inputs, turned, out=output)
    shift = bias.unsqueeze(1)
    if weight.shape[2] < WIDE:
        return lambda inputs: torch.baddbmm(shift, inputs, turned, out=output)
    sideways = torch.zeros_like(output.transpose(1, 2)).contiguous()
    upright = sideways.transpose(1, 2)

    def wide(inputs: Tensor) -> None:
        torch.bmm(weight, inputs.transpose(1, 2), out=sideways)
        torch.add(upright, shift, out=output)

    return wide


def _in_order(
    layers: Sequence[Linear], weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    placed = [
        (layer.weight.start, weight.flatten(1))
        for layer, weight in zip(layers, weights, strict=True)
    ]
    for layer, bias in zip(layers, biases, strict=True):
        if layer.bias is not None and bias is not None:
            placed.append((layer.bias.start, bias))
    return [piece for _, piece in sorted(placed, key=lambda entry: int(entry[0]))]


def population_of(
    models: Sequence[nn.Module],
    seeds: Sequence[int],
    *,
    batchnorm: BatchNormPolicy | None = None,
) -> Population:
    """The fastest population for these models: stacked if they are plain MLPs."""
    if models and all(plain_mlp(model) is not None for model in models):
        return StackedMLP(models, seeds)
    return ModulePopulation(models, seeds, batchnorm=batchnorm)
