"""Are the rows what they say: orthonormal, as far as their storage allows, and unchanged?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.precision import DRIFT, certified_limit


@dataclass(frozen=True, slots=True)
class Orthogonality:
    """What :meth:`Rows.orthogonality` measured.

    Attributes:
        error: Largest entry of ``|G - I|``, ``G`` the Gram matrix of the stored rows.
        condition: Condition number of ``G``: 1 for orthonormal rows. The projection divides by
            ``G``, so rows rounded for storage cost no accuracy as long as this is small.
        drift: Largest change of ``G`` since the rows were stored; 0 unless it was recomputed.
        limit: What ``error`` may be at most in the rows' dtype.
    """

    error: float
    condition: float
    drift: float
    limit: float

    @property
    def passed(self) -> bool:
        # written so that a NaN fails
        return self.error <= self.limit and self.drift <= DRIFT

    def require(self) -> None:
        """Raise ``ValueError`` naming what is wrong."""
        if self.passed:
            return
        if not self.drift <= DRIFT:
            raise ValueError(
                "the basis changed since it was stored: its Gram matrix moved by "
                f"{self.drift:.1e}. Something wrote to its memory or file; load it again"
            )
        raise ValueError(
            f"the basis is not orthonormal: |G - I| reaches {self.error:.1e}, limit "
            f"{self.limit:.1e}. Build it again with extend"
        )


def certify(gram: Tensor, recorded: Tensor, dtype: torch.dtype) -> Orthogonality:
    """The certificate of a Gram matrix ``(m, m)``, against the one recorded at storing."""
    limit = certified_limit(dtype)
    if gram.shape[0] == 0:
        return Orthogonality(0.0, 1.0, 0.0, limit)
    error = (gram - torch.eye(*gram.shape).to(gram)).abs().max()
    drift = (gram - recorded).abs().max()
    if not bool(gram.isfinite().all()):
        return Orthogonality(float("inf"), float("inf"), float("inf"), limit)
    spectrum = torch.linalg.eigvalsh(gram)
    smallest = float(spectrum[0])
    condition = float(spectrum[-1]) / smallest if smallest > 0 else float("inf")
    return Orthogonality(float(error), condition, float(drift), limit)
