"""Orthonormal rows, where they are kept, and where the vectors they belong to live."""

from curvlab.rows.certificate import Orthogonality
from curvlab.rows.orthonormal import Rows
from curvlab.rows.sizes import basis_bytes, largest_basis
from curvlab.rows.space import Space, Whole, space_of
from curvlab.rows.tiers import DeviceMemory, MappedFile, PinnedHost, Tier

__all__ = [
    "DeviceMemory",
    "MappedFile",
    "Orthogonality",
    "PinnedHost",
    "Rows",
    "Space",
    "Tier",
    "Whole",
    "basis_bytes",
    "largest_basis",
    "space_of",
]
