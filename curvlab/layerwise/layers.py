"""Layers whose weights are matrices acting on rows: what they are called, what flows into them.

A convolution is a linear map of patches, so its rows are the unfolded patches. With biases the
rows are ``[x, 1]``: a bias is the weight of a constant input, and treated as such nothing of the
layer is left free. An embedding acts on rows with a single 1: those of the tokens it has seen.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold

# What adapters (PEFT) put around a layer's name; a basis is of the layer, whatever is around it.
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
AROUND = ("base_model.model.", ".base_layer")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer ``y = W x (+ b)``.

    Attributes:
        modules: Those that apply the weight, usually one; more where it is tied.
        weight: Its parameter's name, as the model has it.
        bias: The same, or ``None``.
        outputs: Elements of ``y``.
        inputs: Elements of ``x``.
        transposed: Whether the weight is stored ``(inputs, outputs)``.
        tokens: Whether it is an embedding: weight ``(tokens, elements)``.
    """

    modules: tuple[str, ...]
    weight: str
    bias: str | None
    outputs: int
    inputs: int
    transposed: bool = False
    tokens: bool = False

    @property
    def width(self) -> int:
        """Columns of a row: the inputs, and the constant 1 if there is a bias."""
        return self.inputs + (self.bias is not None)

    @property
    def name(self) -> str:
        """The weight's name without what adapters put around it: what a basis goes by."""
        return plain_name(self.weight)


def plain_name(name: str) -> str:
    """A parameter's name without what adapters put around it."""
    for part in AROUND:
        name = name.replace(part, "")
    return name


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of ``model``, in the order of its modules; weights used twice appear once."""
    _refuse_hidden(model)
    found: dict[int, Layer] = {}
    embeddings: dict[int, Layer] = {}
    biases: dict[int, str] = {}
    for name, module in model.named_modules():
        layer = _layer(name, module)
        if layer is None:
            continue
        if layer.bias is not None and biases.setdefault(id(module.bias), name) != name:
            raise ValueError(
                f"layers {biases[id(module.bias)]!r} and {name!r} share a bias but not their "
                "weights: their outputs cannot be held together. Give each its own bias"
            )
        known = embeddings if layer.tokens else found
        number = id(module.weight)
        if number not in known:
            known[number] = layer
        elif known[number].bias is None and layer.bias is None:
            known[number] = replace(known[number], modules=(*known[number].modules, name))
        else:
            raise ValueError(
                f"layers {known[number].modules[0]!r} and {name!r} share a weight but not their "
                "biases: their outputs cannot be held together. Give each its own weight, or leave "
                "their biases out"
            )
    return [*found.values(), *embeddings.values()]


def _layer(name: str, module: nn.Module) -> Layer | None:
    """What ``module`` is, if its weight is its own parameter; not of adapters, which come later."""
    prefix = f"{name}." if name else ""
    parts = name.split(".")
    weight = module._parameters.get("weight")
    if weight is None or "lora_A" in parts or "lora_B" in parts:
        return None
    kind = next((k for k in KINDS if isinstance(module, k)), None)
    if kind and not hasattr(module, "lora_A") and _acts_otherwise(module, kind):
        return None
    bias = f"{prefix}bias" if module._parameters.get("bias") is not None else None
    if isinstance(module, nn.Linear):
        sizes = module.out_features, module.in_features
    elif isinstance(module, nn.Conv1d | nn.Conv2d):
        if module.groups != 1:
            return None
        sizes = len(weight), weight[0].numel()
    elif isinstance(module, nn.Embedding):
        rows, elements = weight.shape
        return Layer((name,), f"{prefix}weight", None, elements, rows, tokens=True)
    elif _is_transformers_conv(module):
        return Layer((name,), f"{prefix}weight", bias, weight.shape[1], weight.shape[0], True)
    else:
        return None
    return Layer((name,), f"{prefix}weight", bias, *sizes)


def _acts_otherwise(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a subclass or a replaced method does something else with the weight."""
    return any(
        getattr(getattr(module, name), "__func__", None) is not getattr(kind, name)
        for name in ("forward", "_conv_forward")
        if hasattr(kind, name)
    )


def _is_transformers_conv(module: nn.Module) -> bool:
    """Hugging Face's ``Conv1D`` (GPT-2): a linear layer whose weight is stored ``(in, out)``."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def arrived(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """What a layer was called with."""
    found: Tensor = arguments[0] if arguments else options["input"]
    return found


def input_rows(module: nn.Module, inputs: Tensor, constant: bool) -> Tensor:
    """What the weight acts on, float64 ``(N, width)``; with ``constant`` the last column is 1."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        inputs = _patches(module, inputs)
    rows = inputs.detach().reshape(-1, inputs.shape[-1]).double()
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1) if constant else rows


def output_rows(module: nn.Module, outputs: Tensor) -> Tensor:
    """What came out of a layer, or back to it, float64 ``(N, outputs)``."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        outputs = outputs.movedim(-len(module.kernel_size) - 1, -1)
    return outputs.detach().reshape(-1, outputs.shape[-1]).double()


def _patches(module: nn.Conv1d | nn.Conv2d, images: Tensor) -> Tensor:
    """``(N, places, channels * kernel)``; padding of any kind, "same" included."""
    sides = len(module.kernel_size)
    if images.dim() == sides + 1:  # a single sample without its dimension
        images = images.unsqueeze(0)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    images = pad(images, tuple(module._reversed_padding_repeated_twice), mode=mode)
    kernel, dilation, stride = (
        tuple(value) for value in (module.kernel_size, module.dilation, module.stride)
    )
    if sides == 1:
        images, kernel = images.unsqueeze(2), (1, *kernel)
        dilation, stride = (1, *dilation), (1, *stride)
    return unfold(images, kernel, dilation, 0, stride).transpose(1, 2)


def _refuse_hidden(model: nn.Module) -> None:
    """Raise where what a weight does cannot be told from modules and parameters."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{name or 'the model'!r} is a torch.jit module, whose layers cannot be seen: pass "
                "the module that it was made of"
            )
    refuse_one_memory(model.named_parameters())


def refuse_one_memory(named: Iterable[tuple[object, Tensor]]) -> None:
    """Raise if two parameters share memory without being one: each would be held by itself."""
    taken: dict[int, object] = {}
    for name, parameter in named:
        if type(parameter) is nn.Parameter and parameter.numel() and not parameter.is_meta:
            other = taken.setdefault(parameter.data_ptr(), name)
            if other != name:
                raise ValueError(
                    f"parameters {other!r} and {name!r} share one memory (tied by .data), but an "
                    "optimizer moves each by itself. Tie them by assigning the parameter"
                )
