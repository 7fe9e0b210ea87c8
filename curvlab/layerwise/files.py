"""Layer bases in one safetensors file: what it claims is checked against its own tensors."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from curvlab_kernels.checks import WORKING
from torch import Tensor

from curvlab.basis import Basis
from curvlab.basis.segments import to_json
from curvlab.storage import StorageError, load_tensors, save_tensors

if TYPE_CHECKING:
    from curvlab.layerwise.bases import LayerBases

NUMBERS = ("outputs", "inputs")


def save(bases: "LayerBases", path: str | Path) -> Path:
    """See :meth:`LayerBases.save`."""
    tensors, layers = dict[str, Tensor](), list[dict[str, Any]]()
    for number, (name, layer) in enumerate(bases.layers.items()):
        facts: dict[str, Any] = {
            "name": name,
            "outputs": layer.outputs,
            "inputs": layer.inputs,
            "bias": layer.bias,
        }
        for part, one in (("into", layer.into), ("back", layer.back)):
            if one is not None:
                tensors[f"{number}/{part}"] = one.rows()
                facts[part] = to_json(one.segments)
        if layer.tokens is not None:
            tensors[f"{number}/tokens"] = layer.tokens
        layers.append(facts)
    return save_tensors(path, bases.kind, tensors, {"side": bases.side, "layers": layers})


def load(
    path: str | Path, kind: str, sides: tuple[str, ...]
) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """The side, and each layer's name with what its basis is made of."""
    tensors, facts = load_tensors(path, kind)
    try:
        side, layers = facts["side"], facts["layers"]
        if side not in sides or not isinstance(layers, list):
            raise ValueError(f"its side is {side!r}")
        found = [_layer(tensors, number, entry, side) for number, entry in enumerate(layers)]
        if tensors or len({name for name, _ in found}) < len(found):
            raise ValueError("its tensors are not those of its layers")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StorageError(f"{path} does not describe {kind}: {error}") from error
    return side, found


def _layer(
    tensors: dict[str, Tensor], number: int, facts: Any, side: str
) -> tuple[str, dict[str, Any]]:
    """One layer; its tensors are taken out of ``tensors``."""
    name, bias = facts["name"], facts["bias"]
    outputs, inputs = (facts[key] for key in NUMBERS)
    if not isinstance(name, str) or type(bias) is not bool:
        raise ValueError("a layer has no name")
    if any(type(size) is not int or size < 1 for size in (outputs, inputs)):
        raise ValueError(f"layer {name!r} has sizes {outputs!r} and {inputs!r}")
    parts: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "bias": bias}
    tokens = tensors.pop(f"{number}/tokens", None)
    if tokens is not None:
        if tokens.shape != (inputs,) or tokens.dtype != torch.bool:
            raise ValueError(f"layer {name!r} has {tuple(tokens.shape)} tokens of {tokens.dtype}")
        return name, {**parts, "tokens": tokens}
    kept = {"inputs": ("into",), "outputs": ("back",), "both": ("into", "back")}[side]
    for part in kept:
        width = inputs + bias if part == "into" else outputs
        parts[part] = _basis(tensors.pop(f"{number}/{part}"), width, facts[part])
    return name, parts


def _basis(rows: Tensor, width: int, segments: Any) -> Basis:
    """What a file says; raises ``ValueError`` unless it is orthonormal rows of ``width``."""
    if rows.dim() != 2 or rows.shape[1] != width or len(rows) > width or rows.dtype not in WORKING:
        raise ValueError(f"rows {tuple(rows.shape)} of {rows.dtype} do not fit a width of {width}")
    basis = Basis.exactly(rows, width)
    basis.orthogonality().require()
    basis._recall({"segments": segments})
    if len(basis.values) != len(rows):
        raise ValueError("a segment has no energies")
    return basis
