"""Training with any torch optimizer without leaving what a memory protects."""

from curvlab.protection.dense import Protection as Protection
from curvlab.protection.layers import LayerProtection as LayerProtection
from curvlab.protection.penalty import SpectralPenalty as SpectralPenalty
from curvlab.protection.protect import protect as protect
