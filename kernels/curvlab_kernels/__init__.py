"""Projection and Gram-Schmidt kernels for bases stored as one contiguous row per vector."""
