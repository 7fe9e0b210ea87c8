"""Subspaces of what flows into and back out of every layer: memories of factors, not of rows."""

from curvlab.layerwise.bases import (
    LayerBases as LayerBases,
    LayerBasis as LayerBasis,
    Side as Side,
    layer_bases as layer_bases,
)
from curvlab.layerwise.layers import Layer as Layer, layers_of as layers_of
