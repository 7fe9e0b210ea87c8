"""Training with any torch optimizer without leaving what a memory protects."""

from curvlab.protection.dense import Protection
from curvlab.protection.layers import LayerProtection
from curvlab.protection.penalty import SpectralPenalty
from curvlab.protection.protect import protect

__all__ = ["LayerProtection", "Protection", "SpectralPenalty", "protect"]
