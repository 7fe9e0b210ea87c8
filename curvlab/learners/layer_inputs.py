"""What flows into every linear and convolutional layer, as rows to which its weights apply.

A convolution is a linear map of patches, so its rows are the unfolded patches. With biases the
rows are ``[x, 1]``: a bias is the weight of a constant input, and treated as such nothing of the
layer is left free.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from curvlab.learners.population import Population

# Samples per forward pass while rows are collected.
SAMPLES = 50


@dataclass(frozen=True, slots=True)
class InputLayer:
    """A layer ``y = W x (+ b)``: its name and where its parameters lie in the flat vector."""

    name: str
    weight: slice
    bias: slice | None
    outputs: int
    inputs: int  # of the weight alone

    @property
    def width(self) -> int:
        """Columns of a row: the inputs, and the constant 1 if there is a bias."""
        return self.inputs + (self.bias is not None)


def input_layers(population: Population) -> list[InputLayer]:
    """The layers whose weights act on rows, in the order of their parameters."""
    model = population.models[0]
    _refuse_unseen_uses(model)
    slices = population.layout.slices()
    layers = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        weight = slices.get(f"{prefix}weight")
        if weight is None or not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        if isinstance(module, nn.Conv2d):
            _check_convolution(name, module)
        outputs = len(module.weight)
        layers.append(
            InputLayer(
                name,
                weight,
                slices.get(f"{prefix}bias"),
                outputs,
                module.weight.numel() // outputs,
            )
        )
    return layers


def _refuse_unseen_uses(model: nn.Module) -> None:
    """Refuse weights that act on rows which the layers' inputs do not show."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    tied = [alike for number, alike in names.items() if number in trained and len(alike) > 1]
    if tied:
        raise ValueError(
            f"parameters {tied[0]} are one tensor: its updates would be kept off the inputs of one "
            "of its layers only, and change the outputs of the other. Give each its own, or freeze "
            "them with requires_grad_(False)"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and any(
            parameter.requires_grad for parameter in module.parameters()
        ):
            raise ValueError(
                f"layer {name!r} is nn.MultiheadAttention (part of nn.TransformerEncoderLayer) and "
                "applies its weights without calling layers: their inputs cannot be seen. Use "
                "attention made of nn.Linear (curvlab.nets.vit_cifar), or freeze it with "
                "requires_grad_(False)"
            )


def _check_convolution(name: str, module: nn.Conv2d) -> None:
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise ValueError(
            f"layer {name!r}: patches are taken of ungrouped convolutions with numeric zero "
            f"padding; this one has groups={module.groups}, padding={module.padding!r}, "
            f"padding_mode={module.padding_mode!r}"
        )


@torch.no_grad()
def triangular_inputs(
    population: Population, s: int, inputs: Tensor, task: int, layers: list[InputLayer]
) -> list[Tensor]:
    """For each layer a small matrix with the singular values and row space of its input rows.

    The rows ``R (N, width)`` themselves can be many (patches); their QR factorisation is updated
    block by block in float64 and only the triangle is kept. Unlike ``R'R`` it does not square the
    condition number, so directions 1e-14 below the largest are still seen.

    Args:
        population: Run ``s`` of it, in eval mode.
        s: Which run.
        inputs: Samples ``(n, ...)``.
        task: Index of their task.
        layers: From :func:`input_layers`.

    Returns:
        One float64 matrix ``(at most width, width)`` per layer.
    """
    population.train_mode(False)
    modules = dict(population.models[s].named_modules())
    triangles: list[Tensor | None] = [None] * len(layers)

    def collect(index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            rows = _rows(module, arguments[0], layers[index].bias is not None)
            so_far = triangles[index]
            stacked = rows if so_far is None else torch.cat([so_far, rows])
            triangles[index] = torch.linalg.qr(stacked, mode="r").R

        return hook

    handles = [
        modules[layer.name].register_forward_pre_hook(collect(i)) for i, layer in enumerate(layers)
    ]
    try:
        for start in range(0, len(inputs), SAMPLES):
            population.call(s, inputs[start : start + SAMPLES], task)
    finally:
        for handle in handles:
            handle.remove()
    unused = [layer.name for layer, found in zip(layers, triangles, strict=True) if found is None]
    if unused:
        raise ValueError(f"layers {unused} are never called in the forward pass; freeze them")
    return [found for found in triangles if found is not None]


def _rows(module: nn.Module, arrived: Tensor, constant: bool) -> Tensor:
    if isinstance(module, nn.Conv2d):
        padding = module.padding
        if isinstance(padding, str):
            raise ValueError(f"padding={padding!r} is not numeric")  # refused by input_layers
        patches = unfold(arrived, module.kernel_size, module.dilation, padding, module.stride)
        arrived = patches.transpose(1, 2)
    rows = arrived.reshape(-1, arrived.shape[-1]).double()
    if constant:
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    return rows
