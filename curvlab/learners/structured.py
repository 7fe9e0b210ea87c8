"""A memory of Jacobian rows of a plain MLP, kept as factors: exact projection, far fewer bytes.

OGD projects a gradient g off the span of rows of a Jacobian J. For an MLP each row is, layer by
layer, an outer product (a Khatri-Rao structure), so that ``J g`` and ``J' c`` are a few matrix
products of what samples sent into a layer, ``(N, in)``, and of the signals that came back,
``(N, out)``. With them goes one matrix ``B`` ``(r, N)`` such that the r rows of ``B J`` are
orthonormal; the projection is ``g - J' B' B J g``. At 1,000 samples of the paper's MLP that is 606
numbers a sample and ``B``, against 18,010 numbers for each of r dense rows.

``B`` is found from the Gram matrix ``J J'`` in float64. In float32 steps the removed part is exact
to about eps times the condition number of the kept part of J (largest over smallest singular value
kept): 1e-5 where dense orthonormal rows give 1e-7. ``leak`` measures it.
"""

from itertools import pairwise

import torch
from torch import Tensor

from curvlab.learners.sample_gradients import Factors
from curvlab.learners.stacked import PlainMLP

# Singular values below this share of the largest are not kept: dividing by them would amplify the
# rounding of a step beyond use. In float32 they hold at most 1e-8 of the energy each.
FLOOR = {torch.float32: 1e-4, torch.float64: 1e-7}
# A kept direction of a new task that lies this much (relative norm) outside the memory adds
# nothing but rounding; it is dropped.
DEPENDENT = 1e-4


class StructuredMemory:
    """Orthonormal combinations of Jacobian rows of one run.

    Args:
        form: The MLP.
        n: P, its number of parameters.
        dtype: Of the stored factors and of the projected gradients.
        device: Of both.
    """

    def __init__(self, form: PlainMLP, n: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.form, self.n = form, n
        bounds = [0]
        for layer in form.layers:
            bounds.append(bounds[-1] + layer.outputs)
        self._rows = [slice(a, b) for a, b in pairwise(bounds)]
        biased = [
            (rows, layer.bias)
            for rows, layer in zip(self._rows, form.layers, strict=True)
            if layer.bias is not None
        ]
        self._bias_rows = _positions([rows for rows, _ in biased], device)
        self._bias_places = _positions([places for _, places in biased], device)
        self._inputs = [
            torch.zeros(0, layer.inputs, dtype=dtype, device=device) for layer in form.layers
        ]
        # (sum of outputs, samples, K)
        self._signals = torch.zeros(bounds[-1], 0, 1, dtype=dtype, device=device)
        self._coefficients = torch.zeros(0, 0, dtype=dtype, device=device)  # B

    @property
    def size(self) -> int:
        """Directions held."""
        return len(self._coefficients)

    @property
    def bytes(self) -> int:
        """Of factors and coefficients."""
        tensors = [*self._inputs, self._signals, self._coefficients]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.no_grad()
    def project_out_(self, gradient: Tensor) -> None:
        """Remove the memory's span from ``gradient`` ``(P,)``, in place."""
        if self.size:
            held = self._coefficients @ self._times(gradient)
            self._subtract_(gradient, self._coefficients.T @ held)

    def leak(self, gradient: Tensor) -> float:
        """The share of ``gradient`` ``(P,)`` that lies in the memory's span."""
        held = self._coefficients.double() @ self._times(gradient).double()
        return float(held.norm() / gradient.double().norm())

    def rows(self) -> Tensor:
        """The orthonormal rows ``(r, P)``, dense, float64: for tests and small uses."""
        dense = torch.zeros(self.size, self.n, dtype=torch.float64)
        for row, combination in zip(dense, self._coefficients, strict=True):
            self._subtract_(row, -combination.double())
        return dense

    @torch.no_grad()
    def extend(self, factors: Factors, epsilon: float) -> int:
        """Add the leading directions of new Jacobian rows; returns how many were new.

        Kept are the right singular vectors of the new rows with the largest singular values, as
        few as hold ``1 - epsilon`` of the sum of squares. Their parts outside the memory are
        orthonormalised twice, in float64; dependent ones are dropped.

        Args:
            factors: Of the new rows.
            epsilon: In [0, 1]. 0 keeps all above :data:`FLOOR`; 1 keeps none.
        """
        before, old = self._signals.shape[1] * self._signals.shape[2], self.size
        self._append(factors)
        gram = self._gram()
        new = slice(before, len(gram))
        values, vectors = torch.linalg.eigh(gram[new, new])
        values, vectors = values.flip(0), vectors.flip(1)
        kept = kept_by_energy(values, epsilon, floor=FLOOR[self._signals.dtype] ** 2)
        memory = torch.zeros(old, len(gram), dtype=torch.float64, device=gram.device)
        memory[:, :before] = self._coefficients.double()
        added = torch.zeros(kept, len(gram), dtype=torch.float64, device=gram.device)
        added[:, new] = (vectors[:, :kept] / values[:kept].sqrt()).T
        for _ in range(2):  # twice is enough
            added = added - (added @ gram @ memory.T) @ memory
            squares, mixing = torch.linalg.eigh(added @ gram @ added.T)
            real = squares > DEPENDENT**2
            added = (mixing[:, real] / squares[real].sqrt()).T @ added
        self._coefficients = torch.cat([memory, added]).to(self._signals)
        return len(added)

    def state(self) -> dict[str, Tensor]:
        stored = {f"inputs/{i}": value for i, value in enumerate(self._inputs)}
        return {**stored, "signals": self._signals, "coefficients": self._coefficients}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        like = self._signals
        self._inputs = [tensors[f"inputs/{i}"].to(like) for i in range(len(self._inputs))]
        self._signals = tensors["signals"].to(like)
        self._coefficients = tensors["coefficients"].to(like)

    def _append(self, factors: Factors) -> None:
        signals = torch.cat(factors.signals, 2).permute(2, 0, 1)  # samples last but one: see _times
        if self._signals.shape[1] and signals.shape[2] != self._signals.shape[2]:
            raise ValueError(
                f"the memory holds {self._signals.shape[2]} rows per sample; got {signals.shape[2]}"
            )
        if not self._signals.shape[1]:
            self._signals = self._signals.new_zeros(len(signals), 0, signals.shape[2])
        self._signals = torch.cat([self._signals, signals.to(self._signals)], 1)
        self._inputs = [
            torch.cat([stored, new.to(stored)])
            for stored, new in zip(self._inputs, factors.inputs, strict=True)
        ]

    def _times(self, vector: Tensor) -> Tensor:
        """``J v`` ``(N K,)``."""
        signals = self._signals.to(vector.dtype)
        # samples along the columns: products with few rows and many columns are the faster ones
        sums = torch.zeros(signals.shape[:2], dtype=vector.dtype, device=vector.device)
        for layer, came_in, rows in zip(self.form.layers, self._inputs, self._rows, strict=True):
            torch.mm(layer.weight_of(vector), came_in.to(vector.dtype).T, out=sums[rows])
        products = sums.unsqueeze_(2).mul(signals).sum(0).view(-1)
        if len(self._bias_places):
            products += vector[self._bias_places] @ self._bias_signals(signals)
        return products

    def _subtract_(self, vector: Tensor, combination: Tensor) -> None:
        """``v -= J' c`` in place."""
        signals = self._signals.to(vector.dtype)
        mixed = signals * combination.view(signals.shape[1:])
        mixed = mixed.squeeze_(2) if mixed.shape[2] == 1 else mixed.sum(2)
        for layer, came_in, rows in zip(self.form.layers, self._inputs, self._rows, strict=True):
            layer.weight_of(vector).addmm_(mixed[rows], came_in.to(vector.dtype), alpha=-1.0)
        if len(self._bias_places):
            shift = self._bias_signals(signals) @ combination
            vector.index_add_(0, self._bias_places, shift, alpha=-1.0)

    def _bias_signals(self, signals: Tensor) -> Tensor:
        flat = signals.flatten(1)
        return flat if len(self._bias_rows) == len(flat) else flat[self._bias_rows]

    def _gram(self) -> Tensor:
        """``J J'`` ``(N K, N K)``, float64: per layer a product of two small Gram matrices."""
        _, samples, per_sample = self._signals.shape
        count = samples * per_sample
        total = torch.zeros(count, count, dtype=torch.float64, device=self._signals.device)
        blocks = total.view(samples, per_sample, samples, per_sample)
        for layer, came_in, rows in zip(self.form.layers, self._inputs, self._rows, strict=True):
            inputs, signals = came_in.double(), self._signals[rows].double().flatten(1)
            between = inputs @ inputs.T
            if layer.bias is not None:
                between += 1.0
            blocks += (signals.T @ signals).view_as(blocks) * between[:, None, :, None]
        return total


def kept_by_energy(squares: Tensor, epsilon: float, floor: float | None = None) -> int:
    """How many of the ``squares`` ``(n,)``, largest first, hold ``1 - epsilon`` of their sum.

    Args:
        squares: Squared singular values, in descending order.
        epsilon: 0 keeps all above the floor; 1 keeps none.
        floor: Values at or below this share of the largest are never kept; by default the
            rounding of an eigenvalue solver in float64.
    """
    if not 0.0 <= epsilon <= 1.0:
        raise ValueError(f"epsilon= is a share of energy, between 0 and 1; got {epsilon}")
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


def _positions(slices: list[slice], device: torch.device) -> Tensor:
    places = [torch.arange(where.start, where.stop) for where in slices]
    return torch.cat(places).to(device) if places else torch.zeros(0, dtype=torch.int64)
