"""The kernels on a CPU; the same names and signatures as the reference.

``path`` decides how a call runs; ``compiled`` has the loops that numba compiles.
Arguments are trusted: ``ops`` checks them.
"""

from typing import TYPE_CHECKING, Any

from curvlab_kernels.ops import operations

globals().update(operations("cpu"))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
