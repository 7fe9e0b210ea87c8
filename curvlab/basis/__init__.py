"""The memory M: orthonormal rows that gradients are projected off, and what they protect."""

from curvlab.basis.basis import Basis as Basis
from curvlab.basis.segments import Segment as Segment
from curvlab.rows import (
    DeviceMemory as DeviceMemory,
    MappedFile as MappedFile,
    Orthogonality as Orthogonality,
    PinnedHost as PinnedHost,
    Tier as Tier,
    basis_bytes as basis_bytes,
    largest_basis as largest_basis,
)
