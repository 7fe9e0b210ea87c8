"""A memory of Jacobian rows of a plain MLP, kept as factors: exact projection, far fewer bytes.

OGD projects a gradient g off the span of rows of a Jacobian J. For an MLP each row is, layer by
layer, an outer product (a Khatri-Rao structure), so that ``J g`` and ``J' c`` are a few matrix
products of what samples sent into a layer, ``(N, in)``, and of the signals that came back,
``(N, out)``. With them goes one matrix ``B`` ``(r, N)`` such that the r rows of ``B J`` are
orthonormal; the projection is ``g - J' B' B J g``. At 1,000 samples of the paper's MLP that is 606
numbers a sample and ``B``, against 18,010 numbers for each of r dense rows.

Where the directions are few beside the samples, their dense rows are the faster ones; they are then
built from the factors and used for steps (:data:`FEW`).

``B`` is found from the Gram matrix ``J J'`` in float64. In float32 steps the removed part is exact
to about eps times the condition number of the kept part of J (largest over smallest singular value
kept): 1e-5, where dense orthonormal rows give 1e-7.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from curvlab.checks import inside
from curvlab.learners.sample_gradients import Factors
from curvlab.operators.products.mlp_plan import Layer
from curvlab.rows import Rows

# Singular values below this share of the largest are not kept: dividing by them would amplify the
# rounding of a step beyond use. In float32 they hold at most 1e-8 of the energy each.
FLOOR = {torch.float32: 1e-4, torch.float64: 1e-7}
# Dense rows are used for steps while this many times their number is below the number of Jacobian
# rows: reading r rows of P numbers once against computing with N of them (equal at about 2).
FEW = 3
# Elements of B that stay in a processor's second-level cache between the two products with them.
PIECE = 1 << 18
# A kept direction of a new task that lies this much (relative norm) outside the memory adds
# nothing but rounding; it is dropped.
DEPENDENT = 1e-4


class Workspace:
    """Room for intermediate results, shared by the memories of several runs.

    Fresh memory of this size costs more than its use, and one room for all stays in the cache.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def room(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of ``shape`` with anything in it; the next call takes it away."""
        found, count = self._tensors.get(name), math.prod(shape)
        if found is None or found.numel() < count or found.dtype != like.dtype:
            found = self._tensors[name] = like.new_zeros(count)
        return found[:count].view(shape)


class StructuredMemory:
    """Orthonormal combinations of Jacobian rows of one run.

    Args:
        layers: The layers of the MLP.
        n: P, its number of parameters.
        dtype: The dtype of the stored factors and of the projected gradients.
        device: The device of both.
        workspace: Shared with the memories of other runs, if given.

    Attributes:
        dense: The orthonormal rows themselves, where steps are faster with them.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        n: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        workspace: Workspace | None = None,
    ) -> None:
        self.layers, self.n = tuple(layers), n
        bounds = [0]
        for layer in layers:
            bounds.append(bounds[-1] + layer.outputs)
        self._rows = [slice(a, b) for a, b in pairwise(bounds)]
        self._inputs = [
            torch.zeros(0, layer.inputs, dtype=dtype, device=device) for layer in layers
        ]
        # (sum of outputs, K, N): samples along the rows, where products and sums are fastest
        self._signals = torch.zeros(bounds[-1], 1, 0, dtype=dtype, device=device)
        self._coefficients = torch.zeros(0, 0, dtype=dtype, device=device)  # B, (r, K N)
        self._pieces: list[Tensor] = []  # the same, a few rows at a time
        self.dense: Rows | None = None
        self._workspace = Workspace() if workspace is None else workspace

    @property
    def size(self) -> int:
        """Directions held."""
        return len(self._coefficients)

    @property
    def bytes(self) -> int:
        """Of all that is kept."""
        tensors = [*self._inputs, self._signals, self._coefficients]
        rows = 0 if self.dense is None else self.dense.bytes
        return rows + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.no_grad()
    def project_out_(
        self, gradient: Tensor, factors: tuple[list[Tensor], list[Tensor]] | None = None
    ) -> None:
        """Remove the memory's span from ``gradient`` ``(P,)``, in place.

        Args:
            gradient: A gradient in the memory's dtype.
            factors: What it is made of, if known: per layer inputs ``(B, in)`` and signals
                ``(B, out)`` of a batch, of which it is the sum. ``J g`` is then a sum of products
                of inner products, which costs less as long as B is small.
        """
        if not self.size:
            return
        if self.dense is not None:
            self.dense.project_out_(gradient)
            return
        if factors is not None and self._cheap(len(factors[0][0])):
            products = self._times_batch(*factors)
        else:
            products = self._times(gradient)
        self._subtract_(gradient, self._normal(products))

    def rows(self, at_once: int = 16) -> Tensor:
        """The orthonormal rows ``(r, P)``, dense, float64."""
        device = self._signals.device
        dense = torch.zeros(self.size, self.n, dtype=torch.float64, device=device)
        weights = self._coefficients.double().view(self.size, 1, *self._signals.shape[1:])
        for layer, came_in, rows in zip(self.layers, self._inputs, self._rows, strict=True):
            inputs, signals = came_in.double(), self._signals[rows].double()
            for start in range(0, self.size, at_once):
                some = slice(start, start + at_once)
                mixed = (signals * weights[some]).sum(2)  # (rows, out, N)
                layer.weight_of(dense[some]).copy_(mixed @ inputs)
                bias = layer.bias_of(dense[some])
                if bias is not None:
                    bias.copy_(mixed.sum(2))
        return dense

    @torch.no_grad()
    def extend(self, factors: Factors, epsilon: float) -> int:
        """Add the leading directions of new Jacobian rows; returns how many were new.

        Kept are the right singular vectors of the new rows with the largest singular values, as
        few as hold ``1 - epsilon`` of the sum of squares. Their parts outside the memory are
        orthonormalised twice, in float64; dependent ones are dropped.

        Args:
            factors: What the new rows are made of.
            epsilon: In [0, 1]. 0 keeps all above :data:`FLOOR`; 1 keeps none.
        """
        before, old = self._signals.shape[2], self.size
        self._append(factors)
        _, per_sample, samples = self._signals.shape
        gram = self._gram()
        zeros = gram.new_zeros
        new = torch.arange(samples, device=gram.device).ge(before).expand(per_sample, -1).flatten()
        values, vectors = torch.linalg.eigh(gram[new][:, new])
        values, vectors = values.flip(0), vectors.flip(1)
        kept = kept_by_energy(values, epsilon, floor=FLOOR[self._signals.dtype] ** 2)
        memory = zeros(old, per_sample, samples)
        memory[:, :, :before] = self._coefficients.double().view(old, per_sample, before)
        memory = memory.flatten(1)
        added = zeros(kept, len(gram))
        added[:, new] = (vectors[:, :kept] / values[:kept].sqrt()).T
        for _ in range(2):  # twice is enough
            added = added - (added @ gram @ memory.T) @ memory
            squares, mixing = torch.linalg.eigh(added @ gram @ added.T)
            real = squares > DEPENDENT**2
            added = (mixing[:, real] / squares[real].sqrt()).T @ added
        self._coefficients = torch.cat([memory, added]).to(self._signals)
        self._choose()
        return len(added)

    def _choose(self) -> None:
        few = 0 < self.size * FEW < self._coefficients.shape[1]
        dtype = self._signals.dtype
        self._pieces = [] if few else _pieces(self._coefficients)
        self.dense = None
        if few:
            self.dense = Rows.exactly(self.rows().to(dtype), self.size)
            self.dense.reserve(self.size)

    def _normal(self, products: Tensor) -> Tensor:
        """``B' B x`` ``(K N,)`` for ``x`` ``(K N,)``; B is read from memory once."""
        found = torch.zeros_like(products)
        for piece in self._pieces:
            width = piece.shape[1]
            found[:width].addmv_(piece.T, piece @ products[:width])
        return found

    def state(self) -> dict[str, Tensor]:
        stored = {f"inputs/{i}": value for i, value in enumerate(self._inputs)}
        return {**stored, "signals": self._signals, "coefficients": self._coefficients}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        like = self._signals
        self._inputs = [tensors[f"inputs/{i}"].to(like) for i in range(len(self._inputs))]
        self._signals = tensors["signals"].to(like).contiguous()
        self._coefficients = tensors["coefficients"].to(like)
        self._choose()

    def _append(self, factors: Factors) -> None:
        signals = torch.cat(factors.signals, 2).permute(2, 1, 0).to(self._signals)
        if not self._signals.shape[2]:
            self._signals = self._signals.new_zeros(*signals.shape[:2], 0)
        if signals.shape[1] != self._signals.shape[1]:
            raise ValueError(
                f"the memory holds {self._signals.shape[1]} rows per sample; got {signals.shape[1]}"
            )
        self._signals = torch.cat([self._signals, signals], 2).contiguous()
        self._inputs = [
            torch.cat([stored, new.to(stored)])
            for stored, new in zip(self._inputs, factors.inputs, strict=True)
        ]

    def _times(self, vector: Tensor) -> Tensor:
        """``J v`` ``(K N,)``."""
        signals = self._signals.to(vector.dtype)
        found = signals.new_zeros(signals.shape[1:])
        for layer, came_in, rows in zip(self.layers, self._inputs, self._rows, strict=True):
            # layer by layer: its part stays in the cache until it is summed
            sums, products = self._rooms(signals[rows])
            torch.mm(layer.weight_of(vector), came_in.to(vector.dtype).T, out=sums)
            bias = layer.bias_of(vector)
            if bias is not None:
                sums.add_(bias.unsqueeze(1))
            found += torch.mul(signals[rows], sums.unsqueeze(1), out=products).sum(0)
        return found.view(-1)

    def _cheap(self, batch: int) -> bool:
        factored = sum(batch * (layer.inputs + layer.outputs) for layer in self.layers)
        return factored < sum(layer.inputs * layer.outputs for layer in self.layers)

    def _times_batch(self, inputs: list[Tensor], signals: list[Tensor]) -> Tensor:
        """``J g`` for ``g`` the sum over a batch of outer products; ``(K N,)``."""
        _, per_sample, samples = self._signals.shape
        batch, layers = len(inputs[0]), len(self.layers)
        between = self._workspace.room("between", (layers, batch, 1, samples), self._signals)
        shape = (layers, batch, per_sample, samples)
        products = self._workspace.room("batch", shape, self._signals)
        stored = self._signals.flatten(1)
        for i, (layer, rows) in enumerate(zip(self.layers, self._rows, strict=True)):
            torch.mm(inputs[i], self._inputs[i].T, out=between[i].view(batch, samples))
            if layer.bias_slice is not None:
                between[i].add_(1.0)
            torch.mm(signals[i], stored[rows], out=products[i].view(batch, -1))
        return products.mul_(between).view(layers * batch, -1).sum(0)

    def _subtract_(self, vector: Tensor, combination: Tensor) -> None:
        """``v -= J' c`` in place."""
        signals = self._signals.to(vector.dtype)
        weights = combination.view(signals.shape[1:])
        for layer, came_in, rows in zip(self.layers, self._inputs, self._rows, strict=True):
            sums, products = self._rooms(signals[rows])
            torch.mul(signals[rows], weights, out=products)
            mixed = products.squeeze(1)
            if mixed.dim() == 3:
                mixed = torch.sum(products, 1, out=sums)
            layer.weight_of(vector).addmm_(mixed, came_in.to(vector.dtype), alpha=-1.0)
            bias = layer.bias_of(vector)
            if bias is not None:
                bias.sub_(mixed.sum(1))

    def _rooms(self, signals: Tensor) -> tuple[Tensor, Tensor]:
        """Room for one layer, ``(out, N)`` and ``(out, K, N)``."""
        outputs, _, samples = signals.shape
        sums = self._workspace.room("sums", (outputs, samples), signals)
        return sums, self._workspace.room("products", signals.shape, signals)

    def _gram(self) -> Tensor:
        """``J J'`` ``(K N, K N)``, float64: per layer a product of two small Gram matrices."""
        _, per_sample, samples = self._signals.shape
        count = samples * per_sample
        total = torch.zeros(count, count, dtype=torch.float64, device=self._signals.device)
        blocks = total.view(per_sample, samples, per_sample, samples)
        for layer, came_in, rows in zip(self.layers, self._inputs, self._rows, strict=True):
            inputs, signals = came_in.double(), self._signals[rows].double().flatten(1)
            between = inputs @ inputs.T
            if layer.bias_slice is not None:
                between += 1.0
            blocks += (signals.T @ signals).view_as(blocks) * between[:, None, :]
        return total


def _pieces(matrix: Tensor) -> list[Tensor]:
    """Views of a few rows each, without the columns at their end that hold zeros only.

    Rows of an early task combine its samples and those before it, which stand first.
    """
    at_once = len(matrix)
    if matrix.device.type == "cpu":
        at_once = max(8, PIECE // max(1, matrix.shape[1]))
    found = []
    for start in range(0, len(matrix), at_once):
        rows = matrix[start : start + at_once]
        used = rows.any(0).nonzero()
        found.append(rows[:, : int(used[-1]) + 1 if len(used) else 0])
    return found


def kept_by_energy(squares: Tensor, epsilon: float, floor: float | None = None) -> int:
    """How many of the ``squares`` ``(n,)``, largest first, hold ``1 - epsilon`` of their sum.

    Args:
        squares: Squared singular values, in descending order.
        epsilon: 0 keeps all above the floor; 1 keeps none.
        floor: Values at or below this share of the largest are never kept; by default the
            rounding of an eigenvalue solver in float64.
    """
    inside("[0, 1]", epsilon=epsilon)
    if floor is None:
        floor = torch.finfo(torch.float64).eps * len(squares)
    positive = squares.double().clamp(min=0.0)
    real = int((positive > floor * float(positive.max())).sum())
    if epsilon == 0.0:
        return real
    if epsilon == 1.0:
        return 0
    short = positive.cumsum(0) < (1.0 - epsilon) * positive.sum()
    return min(int(short.sum()) + 1, real)
