"""How far new rows are from orthogonal to old ones, known without reading the old ones.

Partial reorthogonalisation (Simon 1984; Larsen's PROPACK). A Lanczos step that removes the last two
rows only leaves overlaps ``w_i = v_i'v_new`` with the others. They follow from those of the two
rows before: with the coefficients ``H`` of :class:`~curvlab.eigen.krylov.Krylov`, symmetry of the
operator gives, for a step ``A v_j = b v_{j-1} + a v_j + beta v_new``,

    beta w_new = H' w_j - b w_{j-1} - a w_j + noise,

a recurrence of numbers. They grow as Ritz pairs converge. Where they pass what is allowed, this row
and the next are made orthogonal to all rows, and the overlaps are small again.

What overlaps can do, and so what is allowed:

- ``A V = V H + R C`` holds whatever they are, because ``H`` keeps what was really removed. So does
  the residual that follows from it, up to a factor ``(1 + |W|) / (1 - |W|)`` with ``W = V'V - I``:
  the length of a combination of rows is known up to that. ``SPREAD`` bounds ``|W|``, which also
  forbids second copies of a pair: those need rows that are dependent.
- What a late reorthogonalisation removes stands on one side of the diagonal of ``H`` only. Half of
  it is part of the residual of ``(H + H') / 2``, of which the Ritz pairs are: so what all steps
  remove, each ``beta |w_new|``, may be ``budget`` at most, a share of the tolerance.

The noise is measured: by the asymmetry of ``H`` where rows are orthogonal to all others, and by the
overlaps themselves whenever they are removed. An estimate that was too low is corrected then, and
what it missed stands in ``H``.
"""

import math
from dataclasses import dataclass, field

import numpy as np

SPREAD = 1e-2  # most of |V'V - I|: residuals are known to two per cent of themselves
PART = 4.0  # one step may remove this part of what is left of the budget


@dataclass(slots=True)
class Overlaps:
    """Estimated overlaps of the last two rows with all others.

    Attributes:
        budget: Norm that all steps together may remove late, as a root of a sum of squares; 0 where
            every row is made orthogonal to all.
        clean: How many of the last rows are orthogonal to all others.
        last: Overlaps of the last row with those before it, ``(j,)``.
        before: The same of the row before it, with zeros up to that length.
        gain: By how much the noise was underestimated, as reorthogonalisations have shown.
        squares: Sum of the squares of all rows' overlaps.
        late: Sum of the squares of the norms that were removed late.
    """

    budget: float = 0.0
    clean: int = 0
    last: np.ndarray = field(default_factory=lambda: np.zeros(0))
    before: np.ndarray = field(default_factory=lambda: np.zeros(0))
    gain: float = 1.0
    squares: float = 0.0
    late: float = 0.0

    @property
    def partial(self) -> bool:
        """Whether the next row may be made orthogonal to the last two only.

        Not if the last one is orthogonal to all rows and the one before it is not: that one's
        overlaps would come back at once.
        """
        return self.budget > 0.0 and self.clean != 1

    @property
    def spread(self) -> float:
        """A bound of ``|V'V - I|``: its Frobenius norm, both halves."""
        return math.sqrt(2.0 * self.squares)

    @property
    def shift(self) -> float:
        """What overlaps can add to a coefficient, of a product from which they were removed."""
        return math.sqrt(self.late) * self.spread

    def advance(self, coupling: np.ndarray, noise: float) -> float:
        """Take up a row made orthogonal to the last two only.

        Args:
            coupling: ``H`` with this step's column, ``(j + 2, j + 1)``.
            noise: Expected size of the recurrence's noise in a component.

        Returns:
            The norm of the new row's overlaps.
        """
        j, noise = coupling.shape[1] - 1, self.gain * noise
        b, a, beta = coupling[-3:, -1]
        if self.clean:
            self.last = self.before = np.full(j, noise / beta)
        found = self._recur(coupling[:-1, :-1], b, a)
        found = np.append((found + np.copysign(noise, found)) / beta, 0.0)
        found[-2:] = noise / beta  # these two were removed
        self.before, self.last, self.clean = np.append(self.last, 0.0), found, 0
        return math.sqrt(found @ found)

    def excessive(self, coupling: np.ndarray, length: float, rows: int) -> bool:
        """Whether the last row's overlaps, of norm ``length``, have to be removed.

        Removed late they are only small if one more step would not make them too large: they can
        grow a hundredfold. Overlaps that stay count from now on.

        Args:
            rows: How many may have as much.
        """
        a, beta = coupling[-2:, -1]
        next_one = self._recur(coupling, beta, a)[:-1] / beta
        longest = max(length, math.sqrt(next_one @ next_one))
        left = math.sqrt(max(0.0, self.budget**2 - self.late)) / PART
        if longest > min(left / beta, SPREAD / math.sqrt(2.0 * rows)):
            return True
        self.squares += length**2
        return False

    def _recur(self, coupling: np.ndarray, b: float, a: float) -> np.ndarray:
        found: np.ndarray = coupling.T @ np.append(self.last, 1.0) - b * self.before - a * self.last
        return found

    def removed(self, expected: float, found: float, beta: float) -> None:
        """Overlaps of norm ``found`` were removed from the last row, where ``expected`` were."""
        self.late += (beta * found) ** 2
        wrong = max(1.0, found / expected)
        self.gain *= wrong
        self.squares *= wrong**2  # those of the rows before it were estimated likewise
        self.clean = 1
