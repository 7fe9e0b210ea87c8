"""Plain MLPs, all runs in one program: a hand-derived forward and backward over stacked weights.

At batch 10 the MLP of the paper is almost all overhead in a loop of modules. Here one batched
matrix product serves all runs, every result goes into a buffer made once, and nothing records a
graph. On a CPU each run has the same bits as alone (:mod:`curvlab.learners.rooms`).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvlab.learners.population import Objective, Population
from curvlab.learners.rooms import (
    LARGE,
    Call,
    aligned,
    few_threads,
    product,
    results,
    rooms,
    workers,
)
from curvlab.learners.statistics import BatchNormPolicy
from curvlab.operators.products.mlp_plan import Layer, MLPPlan, recognise

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


def plain_mlp(model: nn.Module) -> MLPPlan | None:
    """The layers of ``model`` if it is a plain MLP that can be trained stacked, else ``None``.

    Plain: recognised by :func:`~curvlab.operators.products.mlp_plan.recognise`, with ``ReLU`` or
    ``Tanh`` after every layer but the last, and no parameter frozen.
    """
    plan = recognise(model, cross_entropy, dict(model.named_parameters()))
    if plan is None or not all(parameter.requires_grad for parameter in model.parameters()):
        return None
    *hidden, last = (type(layer.activation) for layer in plan.layers)
    return plan if last is nn.Identity and set(hidden) <= set(_FORWARD) else None


def forward(layers: Sequence[Layer], parameters: Tensor, inputs: Tensor) -> list[Tensor]:
    """Inputs of every layer and, last, the logits, each ``(N, width)``.

    Args:
        layers: The layers of a :func:`plain_mlp`.
        parameters: The parameters of one run, shape ``(P,)``.
        inputs: Shape ``(N, ...)``.
    """
    values = [inputs.flatten(1)]
    for layer in layers:
        came_in, weight, bias = values[-1], layer.weight_of(parameters), layer.bias_of(parameters)
        values.append(came_in @ weight.T if bias is None else torch.addmm(bias, came_in, weight.T))
        if layer is not layers[-1]:
            _FORWARD[type(layer.activation)](values[-1])
    return values


def backward(
    layers: Sequence[Layer], parameters: Tensor, values: Sequence[Tensor], signal: Tensor
) -> list[Tensor]:
    """Signals ``(N, outputs)`` at every layer's output, given that at the logits."""
    signals = [signal]
    for i in range(len(layers) - 1, 0, -1):
        signal = signal @ layers[i].weight_of(parameters)
        _BACKWARD[type(layers[i - 1].activation)](signal, values[i])
        signals.append(signal)
    return signals[::-1]


class StackedMLP(Population):
    """Runs of a plain MLP, trained by batched matrix products.

    Attributes:
        layers: Where the linear layers lie in a row of ``parameters``.
    """

    def __init__(self, models: Sequence[nn.Module], seeds: Sequence[int]) -> None:
        plans = [plain_mlp(model) for model in models]
        if not plans or plans[0] is None or None in plans:
            raise ValueError(
                "StackedMLP needs nn.Sequential models of Linear layers with ReLU or Tanh between "
                "them; use Population for others"
            )
        self.layers = plans[0].layers
        super().__init__(models, seeds)
        self._programs: dict[int, Program] = {}
        self._last: tuple[int, BatchFactors] | None = None

    def begin_task(self, task: int) -> None:
        # the models are not called in training: a hook added since would be left out silently
        if any(plain_mlp(model) is None for model in self.models):
            raise ValueError(
                "a model has changed since its population was made (a hook, a frozen parameter, "
                "another layer) and is no longer a plain MLP: make the change before the "
                "population, or train it as a Population"
            )
        super().begin_task(task)

    def gradient_(
        self,
        inputs: Tensor,
        targets: Tensor,
        task: int,
        step: int = 0,
        objective: Objective | None = None,
    ) -> None:
        if objective is not None or self.loss is not cross_entropy:
            super().gradient_(inputs, targets, task, step, objective)
            self._last = None
            return
        # a plain MLP has neither modes nor randomness nor anything that depends on the task
        batch = targets.shape[1]
        if batch not in self._programs:
            self._programs[batch] = _program(self, batch)
        with torch.inference_mode():  # cheaper per operation than no_grad; makes no new tensors
            factors = self._programs[batch](inputs.flatten(2), targets, self.seen)
        self._last = self.gradients._version, factors

    def loss_of(self, seen: Tensor) -> Tensor:
        if seen.dim() == 2:
            return super().loss_of(seen)
        # probabilities of the true labels; one that underflows counts as the smallest number
        chances = seen.squeeze(3).double().cpu().clamp_min(torch.finfo(seen.dtype).tiny)
        return -chances.log().mean(2).T

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
            values = aligned(self.parameters if parameters is None else parameters)
            return torch.stack([forward(self.layers, one, inputs)[-1] for one in values])


# per layer, the inputs (S, B, in) and signals (S, B, out) of a batch
BatchFactors = tuple[list[Tensor], list[Tensor]]
Program = Callable[[Tensor, Tensor, list[Tensor] | None], BatchFactors]


def _program(population: StackedMLP, batch: int) -> Program:
    """The gradient for batches of one size: all views and buffers made beforehand."""
    parameters, gradients = population.parameters, population.gradients
    layers, runs = population.layers, population.size
    small = max(batch * layer.inputs * layer.outputs for layer in layers) < LARGE

    def room(layer: Layer) -> Tensor:
        return results(runs, batch, layer.outputs, small=small, like=parameters)

    hidden = [rooms(runs, batch, layers[0].inputs, like=parameters), *map(room, layers)]
    signals = [room(layer) for layer in layers]
    calls_forward: list[Call] = []
    calls_backward: list[Call] = []
    products: list[Tensor] = []
    for i, layer in enumerate(layers):
        calls_forward += _forward(layer, parameters, hidden[i], hidden[i + 1], small)
        if i + 1 < len(layers):
            calls_forward.append(partial(_FORWARD[type(layer.activation)], hidden[i + 1]))
        found = results(runs, layer.outputs, layer.inputs, small=small, like=parameters)
        products.append(found)
        back = [product(signals[i].transpose(1, 2), hidden[i], found)]
        back += _gradients(layer, gradients, found, signals[i], small)
        if i:
            back.append(product(signals[i], layer.weight_of(parameters), signals[i - 1]))
            slope = _BACKWARD[type(layers[i - 1].activation)]
            back.append(partial(slope, signals[i - 1], hidden[i]))
        calls_backward = back + calls_backward
    threads = workers([*hidden[1:], *signals, *products], signals) if small else None
    received, logits, at_logits = hidden[0], hidden[-1], signals[-1]
    # softmax wants one block; each of its rows is a sum of its own, the same wherever it stands
    chances = parameters.new_zeros(runs, batch, layers[-1].outputs)
    minus = parameters.new_full((runs, batch, 1), -1.0)
    softmax = torch.ops.aten._softmax.out

    def run(inputs: Tensor, targets: Tensor, seen: list[Tensor] | None) -> BatchFactors:
        with few_threads(threads):
            received.copy_(inputs)
            for call in calls_forward:
                call()
            softmax(logits, 2, False, out=chances)
            labels = targets.unsqueeze(2)
            if seen is not None:
                seen.append(chances.gather(2, labels))
            # the gradient of the mean cross-entropy at the logits: (p - e_y) / B
            chances.scatter_add_(2, labels, minus)
            torch.mul(chances, 1.0 / batch, out=at_logits)
            for call in calls_backward:
                call()
        return hidden[:-1], signals

    return run


def _forward(
    layer: Layer, parameters: Tensor, came_in: Tensor, output: Tensor, small: bool
) -> list[Call]:
    """``output = inputs W' + b``, in the order that is faster."""
    weight, bias = layer.weight_of(parameters), layer.bias_of(parameters)
    shift = None if bias is None else bias.unsqueeze(1)
    if shift is None or layer.inputs < WIDE:
        return [product(came_in, weight.transpose(1, 2), output, shift)]
    runs, batch, outputs = output.shape
    sideways = results(runs, outputs, batch, small=small, like=output)
    first = product(weight, came_in.transpose(1, 2), sideways)
    return [first, partial(torch.add, sideways.transpose(1, 2), shift, out=output)]


def _gradients(
    layer: Layer, gradients: Tensor, found: Tensor, signal: Tensor, small: bool
) -> list[Call]:
    """Put the weight's gradient, ``found``, in its place; and the bias's, given the signal."""
    calls: list[Call] = [partial(layer.weight_of(gradients).copy_, found)]
    bias = layer.bias_of(gradients)
    if bias is not None:
        # run by run: where threads share a sum, how they do depends on all its columns
        pairs = (
            [(signal, bias)] if small else list(zip(signal[:, None], bias[:, None], strict=True))
        )
        calls += [partial(torch.sum, one, 1, out=sums) for one, sums in pairs]
    return calls


def population_of(
    models: Sequence[nn.Module],
    seeds: Sequence[int],
    *,
    batchnorm: BatchNormPolicy | None = None,
    autocast: torch.dtype | None = None,
) -> Population:
    """The fastest population for these models: stacked if they are plain MLPs."""
    if autocast is None and models and all(plain_mlp(model) is not None for model in models):
        return StackedMLP(models, seeds)
    population = Population(models, seeds, batchnorm=batchnorm)
    population.autocast = autocast
    return population
