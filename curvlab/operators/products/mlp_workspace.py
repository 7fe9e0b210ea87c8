"""Memory and views for MLP products: the samples in tiles, the tangents of ``b`` directions.

A product on a small network is a few dozen GEMMs of some ten microseconds each. Making their
operands (slices, transposes, reshaped views) would take as long again, so they are made once for a
number of directions and used by every product.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from curvlab.operators.products.mlp_plan import MLPPlan
from curvlab.operators.products.mlp_primal import Primal

CPU_ROWS = 4096  # samples x directions per tile: a layer of 50 units is then 0.8 MB
GPU_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class Tangents:
    """One array of ``samples x b x units`` numbers in the three shapes it is used in."""

    flat: Tensor  # (samples, b * units)
    rows: Tensor  # (samples * b, units)
    cube: Tensor  # (samples, b, units)


@dataclass(frozen=True, slots=True)
class TileLayer:
    """One layer on one tile: the primal as GEMMs and products take it, and room for tangents."""

    inputs: Tensor  # a_{l-1}, (samples, d_in)
    signal: Tensor  # d_l, (samples, d_out)
    signal_turned: Tensor  # (d_out, samples)
    slope: Tensor | None  # f_l', (samples, 1, d_out)
    bend: Tensor | None  # (samples, 1, d_out)
    before: Tangents  # Rz_l
    after: Tangents  # Ra_l; the same memory as Rz_l where the activation does not bend
    backward: Tangents  # Rd_l; two memories serve all layers in turn


@dataclass(frozen=True, slots=True)
class Tile:
    """Some samples through all layers; the state of the loss at their outputs."""

    layers: tuple[TileLayer, ...]
    state: Tensor


def make_tiles(plan: MLPPlan, primal: Primal, width: int) -> list[Tile]:
    """Tiles of nearly equal size for products with ``width`` directions; they share memory."""
    like = primal.inputs[0]
    limit = CPU_ROWS if like.device.type == "cpu" else GPU_ROWS
    count = -(-primal.samples // max(1, limit // width))
    edges = [primal.samples * i // count for i in range(count + 1)]
    most = max(stop - start for start, stop in pairwise(edges))

    def memory(units: int) -> Tensor:
        return torch.empty(most * width * units, dtype=like.dtype, device=like.device)

    after = [memory(layer.outputs) for layer in plan.layers]
    before = [
        memory(layer.outputs) if layer.bends else own
        for layer, own in zip(plan.layers, after, strict=True)
    ]
    widest = max(layer.outputs for layer in plan.layers)
    turns = [memory(widest), memory(widest)]
    tiles = []
    for start, stop in pairwise(edges):
        part = primal.rows(start, stop)
        layers = tuple(
            TileLayer(
                part.inputs[i],
                part.signals[i],
                part.signals[i].T,
                _across(part.slopes[i]),
                _across(part.bends[i]),
                _shapes(before[i], stop - start, width, layer.outputs),
                _shapes(after[i], stop - start, width, layer.outputs),
                _shapes(turns[i % 2], stop - start, width, layer.outputs),
            )
            for i, layer in enumerate(plan.layers)
        )
        tiles.append(Tile(layers, part.state))
    return tiles


def _across(tensor: Tensor | None) -> Tensor | None:
    """``(samples, units)`` as ``(samples, 1, units)``: the same for every direction."""
    return None if tensor is None else tensor.unsqueeze(1)


def _shapes(memory: Tensor, samples: int, width: int, units: int) -> Tangents:
    flat = memory[: samples * width * units].view(samples, width * units)
    return Tangents(flat, flat.view(samples * width, units), flat.view(samples, width, units))
