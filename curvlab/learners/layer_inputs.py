"""Where the layers that GPM acts on lie in a population, and what flows into them."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvlab.layerwise.collect import SAMPLES, Seen, finite, watching
from curvlab.layerwise.layers import Layer, layers_of
from curvlab.layerwise.spans import Triangle
from curvlab.learners.population import Population


@dataclass(frozen=True, slots=True)
class InputLayer:
    """A layer ``y = W x (+ b)``, and where its parameters lie in the flat vector."""

    layer: Layer
    weight: slice
    bias: slice | None

    @property
    def name(self) -> str:
        """Of the module."""
        return self.layer.modules[0]

    @property
    def outputs(self) -> int:
        return self.layer.outputs

    @property
    def inputs(self) -> int:
        """Of the weight alone."""
        return self.layer.inputs

    @property
    def width(self) -> int:
        """Columns of a row: the inputs, and the constant 1 if there is a bias."""
        return self.layer.width


def input_layers(population: Population, names: Collection[str]) -> list[InputLayer]:
    """The layers whose weights act on rows, in the order of their parameters.

    Args:
        population: A population of one network.
        names: The names of the parameters that are to be protected.
    """
    model, slices = population.models[0], population.layout.slices()
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    named = dict(model.named_parameters(remove_duplicate=False))
    layers = layers_of(model)
    # looked up by token, not multiplied with rows; a head that is tied to one is left out with it
    embedded = {id(named[layer.weight]) for layer in layers if layer.tokens}
    found = []
    for layer in layers:
        weight = named[layer.weight]
        if id(weight) in embedded or known[id(weight)] not in names:
            continue
        bias = None if layer.bias is None else slices.get(known[id(named[layer.bias])])
        if bias is None:  # without one, or with one that is not trained
            layer = replace(layer, bias=None)
        found.append(InputLayer(layer, slices[known[id(weight)]], bias))
    return found


@torch.no_grad()
def layer_inputs(
    population: Population, s: int, inputs: Tensor, task: int, layers: list[InputLayer]
) -> list[Seen]:
    """What flows into each layer, as small matrices with the row space of all its rows.

    A layer that a task uses without calling it is marked ``elsewhere``, as one whose weight is also
    used outside of it: its rows do not tell what it does.

    Args:
        population: Run ``s`` of it, in eval mode.
        s: Which run.
        inputs: Samples ``(n, ...)``.
        task: Index of their task.
        layers: From :func:`input_layers`.
    """
    population.train_mode(False)
    seen = [Seen(Triangle(layer.width)) for layer in layers]
    with watching(population.models[s], [layer.layer for layer in layers], seen):
        for start in range(0, len(inputs), SAMPLES):
            population.call(s, inputs[start : start + SAMPLES], task)
    slices = population.layout.slices()
    used = {slices[name].start for name in population.uses.of(task)}
    for layer, one in zip(layers, seen, strict=True):
        called = finite(one.inputs, layer.layer, "inputs") is not None
        one.elsewhere |= not called and layer.weight.start in used
    return seen
