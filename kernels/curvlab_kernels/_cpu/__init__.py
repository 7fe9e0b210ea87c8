"""The kernels on a CPU: torch for float32 and float64, compiled loops for the narrow dtypes."""

from curvlab_kernels._cpu.gram_schmidt import (
    lanczos_step_,
    norm,
    orthonormalise_,
    orthonormalise_block_,
)
from curvlab_kernels._cpu.project import apply_, coefficients, project_, project_list_
from curvlab_kernels._cpu.sgd import sgd_step_
from curvlab_kernels.formats import dequantise, quantise

__all__ = [
    "apply_",
    "coefficients",
    "dequantise",
    "lanczos_step_",
    "norm",
    "orthonormalise_",
    "orthonormalise_block_",
    "project_",
    "project_list_",
    "quantise",
    "sgd_step_",
]
