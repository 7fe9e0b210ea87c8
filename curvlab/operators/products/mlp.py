"""Exact Hessian and Gauss-Newton products of plain MLPs, many vectors at once.

Pearlmutter's R-operator, written out. ``R`` is the derivative along a direction ``V`` (one ``V_l``
and ``v_l`` per weight and bias) of everything the two passes compute. In the notation of
:mod:`~curvlab.operators.products.mlp_primal`, with ``Ra_0 = 0``::

    Rz_l     = Ra_{l-1} W_l' + a_{l-1} V_l' + v_l         Ra_l = f_l'(z_l) * Rz_l
    Rd_L     = f_L' * (H_out Ra_L) + bend_L * Rz_L         H_out: the loss's Hessian at the outputs
    Rd_{l-1} = f_{l-1}' * (Rd_l W_l + d_l V_l) + bend_{l-1} * Rz_{l-1}

    (Hv)_{W_l} = Rd_l' a_{l-1} + d_l' Ra_{l-1}              (Hv)_{b_l} = sum over samples of Rd_l

The terms with ``d`` and ``bend`` hold the network's own curvature, ``H_out`` the loss's. Without
the former this is the Gauss-Newton product, without the latter the functional part: each is
computed by itself, not as a difference. With the primal passes kept, a Hessian product costs six
matrix products per layer against the gradient's three, a Gauss-Newton product four.

Layout is where the speed is. Tangents of ``b`` directions are stored ``(samples, b, units)``: then
``Ra W'`` is one GEMM with ``samples * b`` rows, and ``a V'`` and ``Rd' a``, in which the directions
share ``a``, are one GEMM with ``b * units`` columns. Samples are taken in tiles whose tangents fit
the cache, in memory that products reuse (fresh pages cost more than the arithmetic).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.operators.products.mlp_plan import (
    CrossEntropy,
    Layer,
    MLPPlan,
    SquaredError,
    recognise,
)
from curvlab.operators.products.mlp_primal import run
from curvlab.operators.products.mlp_workspace import Tangents, Tile, TileLayer, make_tiles

__all__ = ["CrossEntropy", "Layer", "MLPPlan", "MLPProduct", "SquaredError", "recognise"]

DIRECTIONS = 32  # at most this many at once; more share nothing further


class MLPProduct:
    """Products with the Hessian of ``weight * loss(model(inputs), targets)`` of a plain MLP.

    The forward and backward pass run once, here. Parameters and inputs are not copied and must stay
    as they are: pass copies if training goes on.

    Args:
        plan: From :func:`recognise`.
        tensors: The model's parameters by name, those that are not selected too.
        inputs: ``(N, d)``, or ``(N, ...)`` if the model begins with ``Flatten``.
        targets: As the loss takes them.
        weight: Factor on the loss: products of the chunks of one data set add up.
    """

    def __init__(
        self,
        plan: MLPPlan,
        tensors: Mapping[str, Tensor],
        inputs: Tensor,
        targets: Tensor,
        weight: float = 1.0,
    ) -> None:
        self.plan = plan
        self._primal = run(plan, tensors, inputs, targets, weight)
        self._turned = [matrix.T for matrix in self._primal.weights]
        # below the first selected layer nothing depends on the direction
        self._first = next(i for i, layer in enumerate(plan.layers) if layer.selected)
        self._tiles: dict[int, list[Tile]] = {}

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """The gradient ``(n,)``."""
        primal = self._primal
        like = primal.signals[0]
        out = torch.empty(self.plan.n, dtype=like.dtype, device=like.device)
        for i, layer in enumerate(self.plan.layers):
            if layer.weight_slice is not None:
                place = out[layer.weight_slice].view(layer.outputs, layer.inputs)
                torch.mm(primal.signals[i].T, primal.inputs[i], out=place)
            if layer.bias_slice is not None:
                torch.sum(primal.signals[i], 0, out=out[layer.bias_slice])
        return out

    def hessian(self, block: Tensor) -> Tensor:
        """``(b, n) -> (b, n)``: each row times the Hessian."""
        return self._multiply(block, of_loss=True, of_network=True)

    def gauss_newton(self, block: Tensor) -> Tensor:
        """``(b, n) -> (b, n)``: each row times the generalised Gauss-Newton matrix."""
        return self._multiply(block, of_loss=True, of_network=False)

    def functional(self, block: Tensor) -> Tensor:
        """``(b, n) -> (b, n)``: each row times the functional part, Hessian minus Gauss-Newton."""
        return self._multiply(block, of_loss=False, of_network=True)

    @torch.no_grad()
    def _multiply(self, block: Tensor, *, of_loss: bool, of_network: bool) -> Tensor:
        if block.dim() != 2 or block.shape[1] != self.plan.n:
            raise ValueError(
                f"an MLP product takes rows (b, {self.plan.n}); got {tuple(block.shape)}"
            )
        block = block.contiguous()
        out = torch.zeros_like(block)
        groups = -(-len(block) // DIRECTIONS)
        for group in range(groups):
            some = slice(len(block) * group // groups, len(block) * (group + 1) // groups)
            width = some.stop - some.start
            # taken out while in use, so that another thread makes its own
            tiles = self._tiles.pop(width, None) or make_tiles(self.plan, self._primal, width)
            directions = _directions(self.plan, block[some])
            totals = _totals(self.plan, out[some])
            for tile in tiles:
                self._go_forward(tile, directions)
                signal = self._at_outputs(tile, of_loss, of_network)
                self._go_backward(tile, signal, directions, totals, of_network)
            _write(self.plan, totals, out[some])
            self._tiles = {width: tiles}
        return out

    def _go_forward(self, tile: Tile, directions: list["_Direction"]) -> None:
        """``Rz_l`` and ``Ra_l`` for every layer that moves."""
        for i in range(self._first, len(tile.layers)):
            layer, direction = tile.layers[i], directions[i]
            tangent = layer.before.flat
            if direction.forward is None:
                tangent.zero_() if direction.bias is None else tangent.copy_(direction.bias)
            elif direction.bias is None:
                torch.mm(layer.inputs, direction.forward, out=tangent)
            else:
                torch.addmm(direction.bias, layer.inputs, direction.forward, out=tangent)
            if i > self._first:
                layer.before.rows.addmm_(tile.layers[i - 1].after.rows, self._turned[i])
            if layer.slope is not None:
                torch.mul(layer.before.cube, layer.slope, out=layer.after.cube)

    def _at_outputs(self, tile: Tile, of_loss: bool, of_network: bool) -> Tangents:
        """``Rd_L``."""
        last = tile.layers[-1]
        if of_loss:
            curved = self.plan.loss.curve(tile.state, last.after.cube)
            torch.mul(curved, self._primal.scale, out=last.backward.cube)
        else:
            last.backward.flat.zero_()
        _through_activation(last, of_network)
        return last.backward

    def _go_backward(
        self,
        tile: Tile,
        signal: Tangents,
        directions: list["_Direction"],
        totals: list["_Total"],
        of_network: bool,
    ) -> None:
        """Add this tile's share of every layer's product to ``totals``, from ``Rd_L`` down."""
        for i in range(len(tile.layers) - 1, self._first - 1, -1):
            layer, total, backward = tile.layers[i], totals[i], directions[i].backward
            if total.by_signal is not None and total.by_tangent is not None:
                total.by_signal.addmm_(signal.flat.T, layer.inputs)
                if of_network and i > self._first:
                    below = tile.layers[i - 1].after.flat
                    total.by_tangent.addmm_(layer.signal_turned, below)
            if total.bias is not None:
                total.bias.add_(signal.cube.sum(0))
            if i == self._first:
                return
            lower = tile.layers[i - 1].backward
            torch.mm(signal.rows, self._primal.weights[i], out=lower.rows)
            if of_network and backward is not None:
                lower.flat.addmm_(layer.signal, backward)
            _through_activation(tile.layers[i - 1], of_network)
            signal = lower


def _through_activation(layer: TileLayer, of_network: bool) -> None:
    """``Rd = f' * Rd + bend * Rz``, in place."""
    if layer.slope is not None:
        layer.backward.cube.mul_(layer.slope)
    if of_network and layer.bend is not None:
        layer.backward.cube.addcmul_(layer.bend, layer.before.cube)


@dataclass(frozen=True, slots=True)
class _Direction:
    """One layer's part of the block, laid out for each GEMM that uses it; ``None``: no part."""

    forward: Tensor | None  # V_l, (d_in, b * d_out)
    backward: Tensor | None  # V_l, (d_out, b * d_in)
    bias: Tensor | None  # v_l, (1, b * d_out)


@dataclass(frozen=True, slots=True)
class _Total:
    """One layer's part of the product; its two terms leave their GEMMs in different layouts."""

    by_signal: Tensor | None  # Rd_l' a_{l-1}, (b * d_out, d_in)
    by_tangent: Tensor | None  # d_l' Ra_{l-1}, (d_out, b * d_in)
    bias: Tensor | None  # (b, d_out)


def _parts(plan: MLPPlan, block: Tensor) -> list[tuple[Tensor | None, Tensor | None]]:
    """Each layer's weight ``(b, d_out * d_in)`` and bias ``(b, d_out)`` in ``block``, as views."""
    slices = [(layer.weight_slice, layer.bias_slice) for layer in plan.layers]
    sizes = [where.stop - where.start for pair in slices for where in pair if where is not None]
    pieces = iter(block.split_with_sizes(sizes, 1))  # a plan keeps the parameters' order
    return [
        (next(pieces) if weight else None, next(pieces) if bias else None)
        for weight, bias in slices
    ]


def _directions(plan: MLPPlan, block: Tensor) -> list[_Direction]:
    b = len(block)
    found = []
    for layer, (weight, bias) in zip(plan.layers, _parts(plan, block), strict=True):
        forward = backward = None
        if weight is not None and b == 1:
            backward = weight.view(layer.outputs, layer.inputs)
            forward = backward.T
        elif weight is not None:
            matrices = weight.view(b, layer.outputs, layer.inputs)
            forward = matrices.reshape(b * layer.outputs, layer.inputs).T
            backward = matrices.transpose(0, 1).reshape(layer.outputs, b * layer.inputs)
        found.append(_Direction(forward, backward, None if bias is None else bias.reshape(1, -1)))
    return found


def _totals(plan: MLPPlan, out: Tensor) -> list[_Total]:
    b = len(out)
    found = []
    for layer, (weight, bias) in zip(plan.layers, _parts(plan, out), strict=True):
        if weight is None:
            found.append(_Total(None, None, bias))
        elif b == 1:  # one direction: both layouts are the answer's own
            place = weight.view(layer.outputs, layer.inputs)
            found.append(_Total(place, place, bias))
        else:
            by_signal = out.new_zeros(b * layer.outputs, layer.inputs)
            by_tangent = out.new_zeros(layer.outputs, b * layer.inputs)
            found.append(_Total(by_signal, by_tangent, bias))
    return found


def _write(plan: MLPPlan, totals: list[_Total], out: Tensor) -> None:
    """Put the sums of several directions into ``out``; one direction's are there already."""
    b = len(out)
    if b == 1:
        return
    for layer, total, (weight, _) in zip(plan.layers, totals, _parts(plan, out), strict=True):
        if weight is not None and total.by_signal is not None and total.by_tangent is not None:
            shape = (b, layer.outputs, layer.inputs)
            turned = total.by_tangent.view(layer.outputs, b, layer.inputs).transpose(0, 1)
            torch.add(total.by_signal.view(shape), turned, out=weight.view(shape))
