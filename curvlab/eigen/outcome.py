"""Why a solve ended, and what to do about it."""

from enum import Enum

import torch


class Outcome(Enum):
    """How a solve ended; ``advice`` says what would have it end better, if anything would."""

    CONVERGED = ""
    NOT_CERTIFIED = "To look for hidden copies, solve with certify=True"
    NOT_EXCLUDED = (
        "Allow certification more: certify=Certify(products=...), room=Room(rows=...), "
        "max_products="
    )
    IMPRECISE = "Loosen tol= or use relative_to='norm'"
    OUT_OF_PRODUCTS = "Allow more products (max_products=), more rows (room=), or loosen tol="
    NOT_SETTLED = "Allow more products (max_products=), or solve with lanczos"
    EXAMINED_ALL = "Ask for fewer pairs: there are no more directions"
    INTERRUPTED = "Run again; with checkpoint= the solve resumes where it stopped"

    @property
    def converged(self) -> bool:
        """Whether the search found all it was asked for, whatever became of the certificate."""
        return self in (Outcome.CONVERGED, Outcome.NOT_CERTIFIED, Outcome.NOT_EXCLUDED)

    def advice(self, dtype: torch.dtype) -> str:
        """What to change, for an operator of this dtype."""
        if self is Outcome.IMPRECISE and dtype != torch.float64:
            return f"{self.value}, or use an operator in float64"
        return self.value
