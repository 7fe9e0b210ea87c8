"""Projection and Gram-Schmidt kernels for bases stored as one contiguous row per vector.

``curvlab_kernels.ops`` is what to call; ``curvlab_kernels.reference`` says what it computes.
"""

from pathlib import Path


def use_shapes(path: str | Path) -> None:
    """Launch GPU kernels with the shapes that ``python -m curvlab_kernels.audit.tune`` measured.

    They hold for GPUs of the file's architecture until the process ends. Sums are then added in
    another order, so last bits change.
    """
    from curvlab_kernels._triton.shapes import use

    use(path)
