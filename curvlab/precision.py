"""What rounding does to orthonormal rows, by dtype: every limit that they are held to.

========  ================  ===========================================  =============
dtype     certified         given                                        rounding
========  ================  ===========================================  =============
float64   1e-13             1e-10                                        none
float32   1e-6              1e-4                                         1e-6
narrower  0.1               3e-2 (as given, before they are put right)   see ROUNDING
========  ================  ===========================================  =============

*Certified* is the largest entry of ``|G - I|`` accepted of rows that were made orthonormal here,
``G`` their Gram matrix. *Given* is the same of rows that a caller says are orthonormal: more, for
they may come from another program, and they are made orthonormal again before they are used.
*Rounding* is what storing does to a vector of norm one (:data:`curvlab_kernels.formats.ROUNDING`),
and therefore the share of a vector below which it is not a new direction.
"""

import torch
from curvlab_kernels.formats import ROUNDING

CERTIFIED = {torch.float64: 1e-13, torch.float32: 1e-6}
CORRECTED = (
    0.1  # rounded rows are divided by their Gram matrix, which need only be well-conditioned
)
GIVEN = {torch.float64: 1e-10, torch.float32: 1e-4}
GIVEN_ROUNDED = 3e-2
DRIFT = 1e-5  # of a Gram matrix, recorded from float32 sums and recomputed from float64 ones


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows stored as ``dtype`` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def certified_limit(dtype: torch.dtype) -> float:
    """Largest ``|G - I|`` accepted of rows that are stored as ``dtype``."""
    return CERTIFIED.get(dtype, CORRECTED)


def given_limit(dtype: torch.dtype) -> float:
    """Largest ``|G - I|`` of rows of ``dtype`` that a caller may call orthonormal."""
    return GIVEN.get(dtype, GIVEN_ROUNDED)


def least_share(dtype: torch.dtype) -> float:
    """What must be left of a vector to be more than the rounding of rows stored as ``dtype``."""
    return {torch.float32: 1e-6, **ROUNDING}.get(dtype, 0.0)
