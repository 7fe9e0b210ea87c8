"""The memory M: orthonormal rows that gradients are projected off, and what they protect."""

from curvlab.basis.basis import Basis
from curvlab.basis.segments import Segment
from curvlab.rows import (
    DeviceMemory,
    MappedFile,
    Orthogonality,
    PinnedHost,
    Tier,
    basis_bytes,
    largest_basis,
)

__all__ = [
    "Basis",
    "DeviceMemory",
    "MappedFile",
    "Orthogonality",
    "PinnedHost",
    "Segment",
    "Tier",
    "basis_bytes",
    "largest_basis",
]
