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
the cache, in buffers allocated once per product (fresh pages cost more than the arithmetic).
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
from curvlab.operators.products.mlp_primal import Primal, run

__all__ = ["CrossEntropy", "Layer", "MLPPlan", "MLPProduct", "SquaredError", "recognise"]

CPU_ROWS = 4096  # samples x directions per tile: a layer of 50 units is then 0.8 MB
GPU_ROWS = 1 << 17
DIRECTIONS = 32  # at most this many at once; more share nothing further


class MLPProduct:
    """Products with the Hessian of ``weight * loss(model(inputs), targets)`` of a plain MLP.

    The forward and backward pass run once, here; parameters changed later are not seen.

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
        out = torch.zeros_like(block, memory_format=torch.contiguous_format)
        for start in range(0, len(block), DIRECTIONS):
            some = slice(start, start + DIRECTIONS)
            step = _Pass(self.plan, self._primal, block[some], of_loss, of_network)
            step.add_to(out[some])
        return out


@dataclass(frozen=True, slots=True)
class _Direction:
    """One layer's part of the block: the same numbers, laid out for each GEMM that uses them."""

    forward: Tensor | None  # V_l, (d_in, b * d_out)
    backward: Tensor | None  # V_l, (d_out, b * d_in)
    bias: Tensor | None  # v_l, (1, b * d_out)


@dataclass(frozen=True, slots=True)
class _Sums:
    """One weight's product: the two terms come out of their GEMMs in different layouts."""

    by_signal: Tensor  # Rd_l' a_{l-1}, (b * d_out, d_in)
    by_tangent: Tensor  # d_l' Ra_{l-1}, (d_out, b * d_in)


class _Pass:
    """One block of at most ``DIRECTIONS`` rows through all tiles of samples."""

    def __init__(
        self, plan: MLPPlan, primal: Primal, block: Tensor, of_loss: bool, of_network: bool
    ) -> None:
        self.plan, self.primal = plan, primal
        self.of_loss, self.of_network = of_loss, of_network
        self.width = len(block)
        # below the first selected layer nothing depends on the direction
        self.first = next(i for i, layer in enumerate(plan.layers) if layer.selected)
        self.directions = [self._direction(layer, block) for layer in plan.layers]
        rows = CPU_ROWS if block.device.type == "cpu" else GPU_ROWS
        self.tile = min(primal.samples, max(1, rows // self.width))

        def buffer(units: int) -> Tensor:
            size = (self.tile, self.width * units)
            return torch.empty(size, dtype=block.dtype, device=block.device)

        moving = list(enumerate(plan.layers))[self.first :]
        self.after = {i: buffer(layer.outputs) for i, layer in moving}  # Ra_l
        self.before = {  # Rz_l: its own memory only where the bend will ask for it
            i: buffer(layer.outputs) if of_network and layer.bends else self.after[i]
            for i, layer in moving
        }
        widest = max((layer.inputs for _, layer in moving[1:]), default=0)
        self.turns = (buffer(widest).view(-1), buffer(widest).view(-1))  # Rd_l, in turn

    def _direction(self, layer: Layer, block: Tensor) -> _Direction:
        b = self.width
        forward = backward = bias = None
        if layer.weight_slice is not None:
            matrices = block[:, layer.weight_slice].reshape(b, layer.outputs, layer.inputs)
            forward = matrices.reshape(b * layer.outputs, layer.inputs).T
            backward = matrices.transpose(0, 1).reshape(layer.outputs, b * layer.inputs)
        if layer.bias_slice is not None:
            bias = block[:, layer.bias_slice].reshape(1, b * layer.outputs)
        return _Direction(forward, backward, bias)

    def add_to(self, out: Tensor) -> None:
        """Add the products to ``out`` ``(b, n)``, which must be zero."""
        sums = [self._sums(layer, out) for layer in self.plan.layers]
        for start in range(0, self.primal.samples, self.tile):
            tile = self.primal.rows(start, start + self.tile)
            self._go_backward(tile, self._go_forward(tile), sums, out)
        if self.width == 1:
            return
        for layer, total in zip(self.plan.layers, sums, strict=True):
            if layer.weight_slice is not None and total is not None:
                shape = (self.width, layer.outputs, layer.inputs)
                turned = total.by_tangent.view(layer.outputs, self.width, -1).transpose(0, 1)
                place = out[:, layer.weight_slice].view(shape)
                torch.add(total.by_signal.view(shape), turned, out=place)

    def _sums(self, layer: Layer, out: Tensor) -> _Sums | None:
        if layer.weight_slice is None:
            return None
        if self.width == 1:  # one direction: both layouts are the answer's own
            place = out[0, layer.weight_slice].view(layer.outputs, layer.inputs)
            return _Sums(place, place)
        return _Sums(
            out.new_zeros(self.width * layer.outputs, layer.inputs),
            out.new_zeros(layer.outputs, self.width * layer.inputs),
        )

    def _go_forward(self, tile: Primal) -> Tensor:
        """Fill ``before`` and ``after`` for this tile; returns ``Rd_L`` ``(samples, b * d_L)``."""
        samples, b = tile.samples, self.width
        for i in range(self.first, len(self.plan.layers)):
            units = self.plan.layers[i].outputs
            direction = self.directions[i]
            tangent = self.before[i][:samples]
            if direction.forward is None:
                tangent.zero_() if direction.bias is None else tangent.copy_(direction.bias)
            elif direction.bias is None:
                torch.mm(tile.inputs[i], direction.forward, out=tangent)
            else:
                torch.addmm(direction.bias, tile.inputs[i], direction.forward, out=tangent)
            if i > self.first:
                below = self.after[i - 1][:samples].view(samples * b, -1)
                tangent.view(samples * b, units).addmm_(below, tile.weights[i].T)
            self._scale(tangent, tile.slopes[i], self.after[i][:samples])
        last = len(self.plan.layers) - 1
        outputs = self.after[last][:samples].view(samples, b, -1)
        if self.of_loss:
            signal = self.plan.loss.curve(tile.state, outputs).mul_(tile.scale).view(samples, -1)
        else:
            signal = torch.zeros_like(outputs).view(samples, -1)
        return self._through_activation(tile, last, signal)

    def _go_backward(
        self, tile: Primal, signal: Tensor, sums: list[_Sums | None], out: Tensor
    ) -> None:
        """Add this tile's share to ``sums`` and to the biases in ``out``."""
        samples, b = tile.samples, self.width
        for i in range(len(self.plan.layers) - 1, self.first - 1, -1):
            layer, total, backward = self.plan.layers[i], sums[i], self.directions[i].backward
            if total is not None:
                total.by_signal.addmm_(signal.T, tile.inputs[i])
                if self.of_network and i > self.first:
                    below = self.after[i - 1][:samples]
                    total.by_tangent.addmm_(tile.signals[i].T, below)
            if layer.bias_slice is not None:
                out[:, layer.bias_slice] += signal.sum(0).view(b, layer.outputs)
            if i == self.first:
                return
            above = signal.view(samples * b, layer.outputs)
            signal = self.turns[i % 2][: samples * b * layer.inputs].view(samples, -1)
            torch.mm(above, tile.weights[i], out=signal.view(samples * b, layer.inputs))
            if self.of_network and backward is not None:
                signal.addmm_(tile.signals[i], backward)
            signal = self._through_activation(tile, i - 1, signal)

    def _through_activation(self, tile: Primal, i: int, signal: Tensor) -> Tensor:
        """``f_i' * signal + bend_i * Rz_i``, in place."""
        self._scale(signal, tile.slopes[i], signal)
        bend = tile.bends[i]
        if self.of_network and bend is not None:
            tangent = self.before[i][: tile.samples].view(tile.samples, self.width, -1)
            signal.view(tangent.shape).addcmul_(bend.unsqueeze(1), tangent)
        return signal

    def _scale(self, tangent: Tensor, slope: Tensor | None, out: Tensor) -> None:
        """``out = slope * tangent``, where ``tangent`` ``(samples, b * units)`` may be ``out``."""
        if slope is not None:
            shape = (len(slope), self.width, slope.shape[1])
            torch.mul(tangent.view(shape), slope.unsqueeze(1), out=out.view(shape))
