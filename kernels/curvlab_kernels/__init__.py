"""Projection and Gram-Schmidt kernels for bases stored as one contiguous row per vector.

``curvlab_kernels.ops`` is what to call; ``curvlab_kernels.reference`` says what it computes.
"""
