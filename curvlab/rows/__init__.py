"""Orthonormal rows, where they are kept, and where the vectors they belong to live."""

from curvlab.rows.certificate import Orthogonality as Orthogonality
from curvlab.rows.orthonormal import Rows as Rows
from curvlab.rows.sizes import basis_bytes as basis_bytes, largest_basis as largest_basis
from curvlab.rows.space import Space as Space, Whole as Whole, space_of as space_of
from curvlab.rows.tiers import (
    DeviceMemory as DeviceMemory,
    MappedFile as MappedFile,
    PinnedHost as PinnedHost,
    Tier as Tier,
)
