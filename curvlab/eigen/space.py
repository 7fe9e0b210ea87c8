"""What a solver asks of long vectors beside :class:`curvlab.rows.Space`: kernels on padded rows."""

from typing import Any, Protocol

from curvlab_kernels import ops
from torch import Tensor

from curvlab.eigen.result import Eigenpairs
from curvlab.probe import LinearOperator
from curvlab.rows import space
from curvlab.rows.space import SpacedOperator, Whole, previous

__all__ = ["Local", "Space", "previous", "space_of"]


class Space(space.Space, Protocol):
    """The kernels are those of ``curvlab_kernels.ops``, summed over ranks."""

    def coefficients(self, rows: Tensor, vectors: Tensor, /) -> Tensor: ...
    def project_(self, rows: Tensor, vectors: Tensor, /) -> Tensor: ...
    def orthonormalise_(self, rows: Tensor, vector: Tensor, /) -> tuple[Tensor, Tensor]: ...
    def orthonormalise_block_(self, rows: Tensor, block: Tensor, /) -> Tensor: ...
    def lanczos_step_(
        self, rows: Tensor, vector: Tensor, previous_beta: float, /
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def result(self, **fields: Any) -> Eigenpairs:
        """The result of a solve."""
        ...


def space_of(operator: LinearOperator) -> Space:
    """The space of an operator's vectors."""
    if isinstance(operator, SpacedOperator):
        found: Space = operator.vector_space  # type: ignore[assignment]
        return found
    return Local(operator.n)


class Local(Whole):
    """Whole vectors, in this process."""

    coefficients = staticmethod(ops.coefficients)
    project_ = staticmethod(ops.project_)
    orthonormalise_ = staticmethod(ops.orthonormalise_)
    orthonormalise_block_ = staticmethod(ops.orthonormalise_block_)
    lanczos_step_ = staticmethod(ops.lanczos_step_)

    def result(self, **fields: Any) -> Eigenpairs:
        return Eigenpairs(**fields)
