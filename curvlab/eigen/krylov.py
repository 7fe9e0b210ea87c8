"""A growing orthonormal basis and everything that products have told about the operator on it.

The basis has ``m`` rows ``V`` whose products are known, and a frontier of ``f`` rows ``R``, at
least as long as the process has not broken down, whose products are not. All rows are orthonormal
and, up to rounding,

    A V = V H + R C + S D        (vectors as columns here)

where ``S`` are frontier rows that have been set aside (:mod:`curvlab.eigen.aside`). So a Ritz pair
``(theta, V y)`` of ``T = (H + H') / 2`` has a true residual of at most
``||(H y - theta y, C y)|| + ||D y||``, and exactly that while nothing is set aside: no product and
no long vector is needed to know it.
With one frontier row and one start vector this is Lanczos; with several it is block Lanczos; a
random row added later starts a second chain. What full orthogonalisation of every product against
every row measures, ``H`` keeps: ``H - H'`` is not assumed to vanish, it is recorded, and shows an
operator that drifts, is noisy or is not symmetric.
"""

import math

import numpy as np
import torch
from curvlab_kernels.algebra import rank_tolerance
from curvlab_kernels.block import length_after, orthonormalise_with_
from torch import Tensor, nn

from curvlab.eigen.aside import Aside
from curvlab.eigen.products import Products
from curvlab.probe import OperatorError
from curvlab.rows import Rows


class Krylov:
    """The decomposition ``A V = V H + R C``; see the file's header.

    Args:
        rows: None in use yet, in one piece of memory that the operator's device computes on: a row
            is filled where it stands.
        products: Whose they are: rows are orthogonal to what it deflates, and no more than its
            room.

    Attributes:
        rows: The first ``m`` are ``V``, then come ``f`` rows ``R``.
        coupling: ``(capacity, capacity)``, float64, CPU: column ``j < m`` holds the coefficients of
            ``A v_j`` on all rows, that is ``H`` above ``C``.
        aside: ``S``, with ``D`` and ``M``.
        norm: Largest ``||A v||`` seen for a unit ``v``: a lower bound of ``||A||``.
    """

    def __init__(self, rows: Rows, products: Products) -> None:
        self.rows = rows
        self.products = products
        capacity = rows.capacity
        self.coupling = torch.zeros(capacity, capacity, dtype=torch.float64)
        self.aside = Aside(rows)
        self.multiplied = 0
        self.restarts = 0
        self.norm = 0.0
        self.chained = False  # whether the last row came from the one before it
        self.asymmetry_squares = 0.0
        self.asymmetry_count = 0
        self.rounding = 0.0  # norm of a product's rounding, where it had to be measured
        self.ragged = 0.0  # root mean square of that along a row
        self.lost = 0.0  # part of A V that compressions could not keep in H and C
        # Of each product, how much may have been dropped as rounding: more than its rounding is.
        # Remainders have unrelated directions: together they are about as long as the longest.
        self.dropped = torch.zeros(capacity, dtype=torch.float64)
        self._host = rows.device.type == "cpu"
        self._pending: list[tuple[int, Tensor, Tensor]] = []

    @property
    def size(self) -> int:
        return self.rows.size

    @property
    def frontier(self) -> int:
        return self.rows.size - self.multiplied

    @property
    def unsettled(self) -> int:
        """Products whose coefficients are still on the device."""
        return len(self._pending)

    def breakdown(self, length: float) -> float:
        """What rounding leaves of a vector of this norm when it is orthogonalised."""
        return self.products.eps * max(8.0, math.sqrt(self.size)) * length

    @property
    def asymmetry(self) -> float:
        """Root mean square of ``H - H'``; 0 where the rounding of coefficients explains it."""
        if self.asymmetry_count == 0:
            return 0.0
        rounding = 8.0 * float(torch.finfo(self.rows.dtype).eps) * self.norm
        excess = self.asymmetry_squares / self.asymmetry_count - rounding**2
        return math.sqrt(max(0.0, excess))

    @property
    def error(self) -> float:
        """Norm of the error of one product, were it without preferred direction.

        Such an error has only ``1 / sqrt(n)`` of its norm along a row.
        """
        return self.asymmetry * math.sqrt(self.rows.n / 2.0)

    @property
    def noise(self) -> float:
        """Norm of the error of one product: as measured, or as the asymmetry suggests."""
        return self.rounding if self.rounding > 0.0 else self.error

    def add(self, vector: Tensor) -> bool:
        """Orthonormalise ``vector`` ``(width,)`` against all rows into a new frontier row.

        Returns:
            Whether there was anything left of it.
        """
        target = self.rows.row(self.size)
        target.copy_(vector)
        if not self._deflate_start_(target):
            return False
        length = float(self.rows.orthonormalise_(target)[1])
        if not math.isfinite(length):
            raise ValueError("a start vector holds NaN or infinity")
        if length == 0.0:
            return False
        self._deflate_new_(target)
        self.coupling[self.size].zero_()
        self.rows.admit()
        self.chained = False
        return True

    def lead(self, weights: Tensor) -> None:
        """Turn the frontier so that its first row, the next to be multiplied, is this mixture.

        Args:
            weights: Of the frontier's rows, ``(f,)``, float64; of any length but 0.
        """
        m, size = self.multiplied, self.size
        turned = reflection(weights)
        self.rows.mix(turned, m)
        self.coupling[m:size] = turned @ self.coupling[m:size]
        self.chained = False

    def drop(self, size: int) -> None:
        """Forget frontier rows after the first ``size`` rows: nothing may couple to them."""
        self.rows.truncate(size)
        self.coupling[size:] = 0.0

    def expand(self, product: Tensor) -> None:
        """Take ``product``, that of row ``m``, as known; it stands in row ``m + f``.

        It becomes a new frontier row. Where reading its coefficients means waiting for a device,
        they stay there until :meth:`settle`.
        """
        j, rows = self.multiplied, self.rows
        alone = rows.size == j + 1
        if self.chained and alone:
            # the last length, where it is: the device is not waited for
            beta = self._pending[-1][-1] if self._pending else self.coupling[j, j - 1].item()
            _, length, coefficients = rows.lanczos_step_(product, beta)
        else:
            coefficients, length = rows.orthonormalise_(product)
        self._deflate_new_(product)
        rows.admit()
        self.multiplied, self.chained = j + 1, alone
        self._pending.append((j, coefficients, length))
        if self._host:
            self.settle()

    def _deflate_start_(self, row: Tensor) -> bool:
        """Remove the deflated rows from a start vector; returns whether more than rounding is left.

        Without any to remove nothing is measured: each number costs a wait for the device.
        """
        if self.products.deflation is None:
            return True
        before = self.rows.space.norm(row)
        self.products.project_out_(row)
        deflated = self.products.n - self.products.room
        return bool(length_after(before, self.rows.space.norm(row), deflated, row.dtype))

    def _deflate_new_(self, row: Tensor) -> None:
        """Remove what rounding left of the deflated rows; a short remainder had much of it."""
        if self.products.deflation is not None:
            self.products.project_out_(row)
            length = self.rows.space.norm(row).to(row.dtype)
            row /= torch.where(length > 0.0, length, torch.ones_like(length))

    def expand_block(self, products: Tensor) -> None:
        """The same for ``products`` ``(b, width)`` of the first ``b`` frontier rows at once."""
        if not bool(torch.isfinite(self.rows.space.norm(products)).all()):
            raise OperatorError(_NOT_FINITE)
        new = products.clone()
        # A direction more than the space has is rounding, whatever its length.
        kept = new[self._orthonormalise_block_(new)][: self.products.room - self.size]
        for vector in kept:
            self.rows.row(self.size).copy_(vector)
            self.rows.admit()
        columns = self.rows.coefficients(products).cpu()
        for j, (column, product) in enumerate(zip(columns, products, strict=True)):
            self._record(self.multiplied + j, column.numpy())
            if len(kept) < len(products):
                held = self.rows.combine(column[:, None], torch.float64)[0]
                self.dropped[self.multiplied + j] = self.rows.space.norm(held.sub_(product))
        self.multiplied += len(products)
        self.chained = False

    def _orthonormalise_block_(self, block: Tensor) -> Tensor:
        rows, products = self.rows, self.products
        if products.deflation is None:
            return rows.orthonormalise_block_(block)

        def remove_both_(vectors: Tensor) -> None:
            products.project_out_(vectors)
            rows.project_out_(vectors)

        total = rows.space.total if rows.space.sharded else None
        return orthonormalise_with_(remove_both_, block, rows.size, 0.0, total)

    def settle(self) -> None:
        """Record the coefficients of the last products, brought to the host in one transfer."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        columns = torch.cat([part.reshape(-1) for _, *both in pending for part in both]).cpu()
        lengths = [len(coefficients) + 1 for _, coefficients, _ in pending]
        for (j, *_), column in zip(pending, torch.split(columns, lengths), strict=True):
            self._record(j, column.numpy())
            # A remainder of this length is rounding, not a direction: rows from it are forgotten.
            if not self.norm or column[-1] <= self.breakdown(self.norm):
                # One that came back as zero was at most the rank rule's share of the product.
                share = rank_tolerance(self.rows.dtype, len(column) - 1)
                self.dropped[j] = float(column[-1]) or share * float(column.norm())
                self.multiplied = j + 1
                self.chained = False
                self.drop(len(column) - 1)
                return

    def _record(self, j: int, column: np.ndarray) -> None:
        """Take down the coefficients of row ``j``'s product."""
        length = math.sqrt(column @ column)
        if not math.isfinite(length):
            raise OperatorError(_NOT_FINITE)
        if len(self.aside) == 0:  # else it is a tilted operator's
            self.norm = max(self.norm, length)
        coupling = self.coupling.numpy()
        coupling[: len(column), j] = column
        coupling[len(column) :, j] = 0.0
        if j == 0:
            return
        difference = column[:j] - coupling[j, :j]
        unknown = len(self.aside)
        if unknown:
            shared = self.aside.shared(difference)
            coupling[j, :j] += shared
            difference = difference - shared
        self.asymmetry_squares += float(difference @ difference)
        self.asymmetry_count += max(0, j - unknown)

    def set_aside(self) -> None:
        """Take the frontier out of the basis: new rows need not be orthogonal to it."""
        m, size = self.multiplied, self.size
        remainder = torch.zeros(self.frontier, self.rows.capacity, dtype=torch.float64)
        remainder[:, :m] = self.coupling[m:size, :m]
        self.aside.take(self.rows.rows(m, size), remainder)
        self.coupling[m:size] = 0.0
        self.rows.truncate(m)
        self.chained = False

    def bring_back(self, first: int) -> None:
        """Make what was set aside when there were ``first`` rows part of the frontier again."""
        if len(self.aside) == 0:
            return
        m, aside = self.multiplied, self.aside
        met = self.rows.coefficients(aside.rows).cpu()
        aside.coupling[:, first:m] = -aside.tilt @ met[:, first:m]  # their products were tilted
        self.coupling[first:, :first] = 0.0
        for held, remainder in zip(aside.rows, aside.coupling, strict=True):
            target = self.rows.row(self.size)
            target.copy_(held)
            overlap, length = self.rows.orthonormalise_(target)
            self._deflate_new_(target)
            column = torch.cat([overlap, length.reshape(1)]).cpu()
            kept = self.size + (1 if float(column[-1]) > 0.0 else 0)
            if kept == self.size:
                self.dropped[:m] += rank_tolerance(self.rows.dtype, kept) * remainder[:m].abs()
            self.coupling[first:kept, :m] += torch.outer(column[first:kept], remainder[:m])
            self.rows.admit(kept - self.size)
        aside.clear()
        self.chained = False

    def grow(self, capacity: int) -> None:
        """Make room for so many rows; nothing else changes."""
        more = capacity - self.rows.capacity
        if more <= 0:
            return
        self.rows.reserve(capacity)
        self.coupling = nn.functional.pad(self.coupling, (0, more, 0, more))
        self.dropped = nn.functional.pad(self.dropped, (0, more))
        self.aside.coupling = nn.functional.pad(self.aside.coupling, (0, more))

    def forget(self, m: int) -> None:
        """Go back to the first ``m`` rows, at which :meth:`set_aside` was called."""
        self.rows.truncate(m)
        self.coupling[m:] = 0.0
        self.coupling[:, m:] = 0.0
        self.dropped[m:] = 0.0
        self.multiplied = m
        self.chained = False

    def slide(self, first: int) -> None:
        """Keep of a chain of rows from ``first`` on only what its recurrence goes on from.

        That is the last row that was multiplied, and the frontier row after it.
        """
        last = self.multiplied - 1
        column = self.coupling[:, last].clone()
        for target, source in ((first, last), (first + 1, last + 1)):
            self.rows.row(target).copy_(self.rows.row(source))
        self.rows.truncate(first + 2)
        self.coupling[first:] = 0.0
        self.coupling[:, first:] = 0.0
        self.coupling[:first, first] = column[:first]
        self.coupling[first : first + 2, first] = column[last : last + 2]
        self.dropped[first] = self.dropped[last]
        self.dropped[first + 1 :] = 0.0
        self.multiplied = first + 1

    @property
    def spare(self) -> Tensor:
        """The last row there is memory for, ``(width,)``; no row of the basis while one is free."""
        return self.rows.row(self.rows.capacity - 1)

    def projected(self) -> Tensor:
        """``T``, shape ``(m, m)``, float64."""
        h = self.coupling[: self.multiplied, : self.multiplied]
        return (h + h.T) / 2

    def remainder(self, mixing: Tensor) -> Tensor:
        """``C Y``, shape ``(f, p)``: what products with ``V Y`` have on the frontier."""
        return self.coupling[self.multiplied : self.size, : self.multiplied] @ mixing

    def residuals(self, mixing: Tensor, values: Tensor) -> Tensor:
        """Residual norms ``(p,)`` of the Ritz pairs with columns ``mixing`` ``(m, p)``."""
        m = self.multiplied
        inside = self._inside(mixing, values).square().sum(0)
        outside = self.remainder(mixing).square().sum(0)
        gone = (self.aside.coupling[:, :m] @ mixing).square().sum(0)
        return (inside + outside).sqrt() + gone.sqrt()

    def missing(self, mixing: Tensor) -> Tensor:
        """How much of products with the columns of ``V mixing`` was dropped at most, ``(p,)``."""
        return self.dropped[: len(mixing)] @ mixing.abs()

    def _inside(self, mixing: Tensor, values: Tensor) -> Tensor:
        """``H Y - Y values``: the asymmetry of ``H``, and the rounding of its eigenpairs."""
        return self.coupling[: len(mixing), : len(mixing)] @ mixing - mixing * values

    def compress(self, mixing: Tensor, values: Tensor) -> None:
        """Thick restart: keep the Ritz vectors ``V y`` with columns ``y`` of ``mixing`` ``(m, p)``.

        Args:
            mixing: Orthonormal columns, float64.
            values: Their Ritz values ``(p,)``.
        """
        m, p, f = self.multiplied, mixing.shape[1], self.frontier
        remainder = self.coupling[m : m + f, :m]
        inside = float(torch.linalg.matrix_norm(self._inside(mixing, values), 2)) if p else 0.0
        self.lost = math.hypot(self.lost, inside, float(self.dropped.max()))
        self.dropped.zero_()
        self.rows.mix(mixing)
        coupling = torch.zeros_like(self.coupling)
        coupling[:p, :p] = torch.diag(values)
        coupling[p : p + f, :p] = remainder @ mixing
        self.coupling = coupling
        aside = torch.zeros_like(self.aside.coupling)
        aside[:, :p] = self.aside.coupling[:, :m] @ mixing
        self.aside.coupling = aside
        self.multiplied = p
        self.restarts += 1
        self.chained = False


def reflection(weights: Tensor) -> Tensor:
    """The orthogonal matrix ``(f, f)``, its own inverse, with a multiple of ``weights`` on top."""
    mirror = weights / weights.norm()
    mirror[0] += 1.0 if float(mirror[0]) >= 0.0 else -1.0
    turned = torch.eye(len(weights), dtype=torch.float64)
    return turned - torch.outer(mirror, mirror) * (2.0 / float(mirror @ mirror))


_NOT_FINITE = (
    "the operator returned NaN or infinity. Usual causes: parameters or data that are not finite, "
    "overflow in half precision, or a function whose second derivative is not finite somewhere"
)
