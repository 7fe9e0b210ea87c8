"""Rows that a decomposition has set aside: known to couple to it, but no part of its basis.

New rows need not be orthogonal to them; instead the products of new rows are those of the tilted
operator ``A + S M S'`` (:mod:`curvlab.eigen.hidden`).
"""

import numpy as np
import torch
from torch import Tensor

from curvlab.rows import Rows


class Aside:
    """``S``, ``D`` and ``M`` of :mod:`curvlab.eigen.krylov`; empty at first.

    Args:
        rows: The basis's; theirs are the device, dtype and space.

    Attributes:
        rows: ``S``, shape ``(d, width)``.
        coupling: ``D``, shape ``(d, capacity)``, float64, CPU.
        tilt: ``M``, shape ``(d, d)``, float64, CPU.
    """

    def __init__(self, rows: Rows) -> None:
        self._space = rows.space
        self.rows = rows.rows(0, 0)
        self.coupling = torch.zeros(0, rows.capacity, dtype=torch.float64)
        self.lean(torch.zeros(0, 0, dtype=torch.float64))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Tensor, coupling: Tensor) -> None:
        """Set ``rows`` ``(f, width)`` aside too, coupled by ``(f, capacity)``."""
        self.rows = torch.cat([self.rows, rows])
        self.coupling = torch.cat([self.coupling, coupling])

    def clear(self) -> None:
        self.rows, self.coupling = self.rows[:0], self.coupling[:0]

    def lean(self, tilt: Tensor) -> None:
        """Take ``tilt`` as ``M`` from now on."""
        self.tilt = tilt
        self._tilt = tilt.to(self.rows.device, self.rows.dtype)  # once: products wait for nothing

    def tilt_(self, row: Tensor, product: Tensor) -> None:
        """Add ``S M S' row`` to the ``product`` of a row."""
        if len(self):
            met = self._space.total(self.rows @ row)
            product.addmv_(self.rows.T, self._tilt @ met.to(self._tilt.dtype))

    def shared(self, difference: np.ndarray) -> np.ndarray:
        """What of ``difference`` ``(j,)`` the overlap of a row with these rows explains.

        How far the row overlaps them is not measured, but every earlier row sees the same overlap:
        as many unknowns as rows aside, j equations.
        """
        columns = self.coupling.numpy()[:, : len(difference)].T
        if columns.shape[1] == 1:  # as it mostly is: one product in place of a call of LAPACK
            column = columns[:, 0]
            square = column @ column
            return column * (column @ difference / square if square > 0.0 else 0.0)
        found: np.ndarray = columns @ np.linalg.lstsq(columns, difference, rcond=None)[0]
        return found
