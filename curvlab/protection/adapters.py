"""Low-rank adapters: ``y = W x + s B A x`` with W frozen (LoRA), of PEFT or hand-written.

A module with ``lora_A`` and ``lora_B`` is one: parameters, layers, or dictionaries of layers (PEFT
has one entry per adapter). The layer it adapts is the module itself (loralib) or the layer inside
it; bases may have been made before or after it was put around.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from curvlab.layerwise.layers import plain_name


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter of one layer.

    Attributes:
        owner: The module that has it.
        layers: Names that the layer's basis may go by.
        into: A, ``(rank, in)``.
        back: B, ``(out, rank)``.
    """

    owner: str
    layers: tuple[str, ...]
    into: nn.Parameter
    back: nn.Parameter


def adapters_of(model: nn.Module) -> Iterator[Adapter]:
    """Every adapter of ``model``."""
    for name, module in model.named_modules():
        first, second = (getattr(module, part, None) for part in ("lora_A", "lora_B"))
        if first is None or second is None:
            continue
        prefix = f"{name}." if name else ""
        inside = [
            f"{prefix}{child}.weight"
            for child, one in module.named_children()
            if not child.startswith("lora_") and "weight" in one._parameters
        ]
        names = tuple(plain_name(one) for one in (f"{prefix}weight", *inside))
        _refuse_scaled(name, module)
        for into, back in _pairs(name, first, second):
            yield Adapter(name, names, into, back)


def _pairs(name: str, first: Any, second: Any) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    if isinstance(first, nn.ModuleDict | Mapping):
        for key in first:
            yield from _pairs(name, first[key], second[key])
        return
    if getattr(first, "bias", None) is not None:
        raise ValueError(
            f"lora_A of {name!r} has a bias, with which the adapter acts on every input: make it "
            "without (bias=False)"
        )
    found = [getattr(one, "weight", one) for one in (first, second)]
    if not all(isinstance(one, nn.Parameter) and one.dim() == 2 for one in found):
        raise TypeError(
            f"{name!r} has lora_A and lora_B that are not matrices or linear layers: adapters of "
            "convolutions and embeddings are not protected. Leave it out of the adapted modules"
        )
    if found[0].shape[0] != found[1].shape[1]:
        raise ValueError(
            f"{name!r} has lora_A {tuple(found[0].shape)} and lora_B {tuple(found[1].shape)}, "
            "which are not (rank, in) and (out, rank)"
        )
    yield found[0], found[1]


def _refuse_scaled(name: str, module: nn.Module) -> None:
    """DoRA divides by the norm of W + BA: what it adds is no longer a product with A x."""
    magnitudes = getattr(module, "lora_magnitude_vector", None)
    if magnitudes is not None and len(magnitudes):
        raise ValueError(
            f"{name!r} is adapted by DoRA, which rescales the frozen weight by the norm of the "
            "sum: its outputs move on every input. Use plain LoRA (use_dora=False)"
        )
