"""The memory M: orthonormal rows that gradients are projected off, and where they are kept."""

from curvlab.basis.certificate import Orthogonality
from curvlab.basis.memory import Basis
from curvlab.basis.segments import Segment
from curvlab.basis.sizes import basis_bytes, largest_basis
from curvlab.basis.tiers import DeviceMemory, MappedFile, PinnedHost, Tier

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
