"""The kernels for NVIDIA GPUs, in Triton; the same names and signatures as the reference.

Importing this imports triton; nothing else in the package does. One file per kernel, and five for
what they share: ``tiles`` (loads and shapes), ``combination`` (a tile of ``M' c``), ``segments``
(lists of tensors), ``sums`` (stage two of every reduction) and ``launch``.

Arguments are trusted: ``ops`` checks them.
"""

from curvlab_kernels._triton.apply import apply_
from curvlab_kernels._triton.block import gram, orthonormalise_block_
from curvlab_kernels._triton.coefficients import coefficients
from curvlab_kernels._triton.lanczos_step import lanczos_step_
from curvlab_kernels._triton.norm import norm
from curvlab_kernels._triton.orthonormalise import orthonormalise_
from curvlab_kernels._triton.project import project_
from curvlab_kernels._triton.project_list import project_list_
from curvlab_kernels._triton.quantise import dequantise, quantise
from curvlab_kernels._triton.sgd_step import sgd_step_
from curvlab_kernels._triton.tiles import storage_dtypes

__all__ = [
    "apply_",
    "coefficients",
    "dequantise",
    "gram",
    "lanczos_step_",
    "norm",
    "orthonormalise_",
    "orthonormalise_block_",
    "project_",
    "project_list_",
    "quantise",
    "sgd_step_",
    "storage_dtypes",
]
