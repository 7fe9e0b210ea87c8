"""Where the layers that GPM acts on lie in a population, and what flows into them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.layerwise.collect import Seen, finite, watching
from curvlab.layerwise.layers import Layer, layers_of, tied
from curvlab.layerwise.spans import Triangle
from curvlab.learners.population import Population

# Samples per forward pass while rows are collected.
SAMPLES = 50


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


def input_layers(population: Population, names: Sequence[str]) -> list[InputLayer]:
    """The layers whose weights act on rows, in the order of their parameters.

    Args:
        population: Of one network.
        names: Of the parameters whose uses matter: those of others may be hidden.
    """
    model = population.models[0]
    _refuse_unseen_uses(model, set(names))
    slices = population.layout.slices()
    return [
        InputLayer(layer, slices[layer.weight], None if layer.bias is None else slices[layer.bias])
        for layer in layers_of(model)
        if layer.weight in names and not layer.tokens
    ]


def _refuse_unseen_uses(model: nn.Module, chosen: set[str]) -> None:
    """Refuse weights that act on rows which the layers' inputs do not show."""
    for names in tied(model):
        if not chosen & set(names):
            continue
        raise ValueError(
            f"parameters {names} are one tensor: its updates would be kept off the inputs of one "
            "of its layers only, and change the outputs of the other. Give each its own, or freeze "
            "them with requires_grad_(False)"
        )
    for name, module in model.named_modules():
        trained = any(f"{name}.{own}".strip(".") in chosen for own, _ in module.named_parameters())
        if isinstance(module, nn.MultiheadAttention) and trained:
            raise ValueError(
                f"layer {name!r} is nn.MultiheadAttention (part of nn.TransformerEncoderLayer) and "
                "applies its weights without calling layers: their inputs cannot be seen. Use "
                "attention made of nn.Linear (curvlab.nets.vit_cifar), or freeze it with "
                "requires_grad_(False)"
            )
        if isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups != 1 and trained:
            raise ValueError(
                f"layer {name!r}: patches are taken of ungrouped convolutions; this one has "
                f"groups={module.groups}"
            )


@torch.no_grad()
def triangular_inputs(
    population: Population, s: int, inputs: Tensor, task: int, layers: list[InputLayer]
) -> list[Tensor | None]:
    """For each layer a small matrix with the singular values and row space of its input rows.

    Args:
        population: Run ``s`` of it, in eval mode.
        s: Which run.
        inputs: Samples ``(n, ...)``.
        task: Index of their task.
        layers: From :func:`input_layers`.

    Returns:
        One float64 matrix ``(at most width, width)`` per layer; ``None`` if the task does not use
        it.
    """
    population.train_mode(False)
    seen = [Seen(Triangle(layer.width)) for layer in layers]
    with watching(population.models[s], [layer.layer for layer in layers], seen):
        for start in range(0, len(inputs), SAMPLES):
            population.call(s, inputs[start : start + SAMPLES], task)
    found = [
        finite(one.inputs, layer.layer, "inputs") for layer, one in zip(layers, seen, strict=True)
    ]
    used = set(population.uses.of(task))
    for layer, one in zip(layers, found, strict=True):
        if one is None and layer.layer.weight in used:
            raise ValueError(
                f"layer {layer.name!r} is never called in the forward pass, so its inputs cannot "
                "be seen: freeze it with requires_grad_(False), or leave it out with select="
            )
    return found
