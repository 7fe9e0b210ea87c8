"""The kernels for NVIDIA GPUs, in Triton; the same names and signatures as the reference.

Importing this imports triton; nothing else in the package does. One file per kernel, and five for
what they share: ``tiles`` (loads and shapes), ``combination`` (a tile of ``M' c``), ``segments``
(lists of tensors), ``sums`` (stage two of every reduction) and ``launch``.

Arguments are trusted: ``ops`` checks them.
"""

from typing import TYPE_CHECKING, Any

from curvlab_kernels._triton.block import gram
from curvlab_kernels._triton.tiles import storage_dtypes
from curvlab_kernels.ops import operations

globals().update(operations("cuda"))

__all__ = ["gram", "storage_dtypes"]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
