"""Subspaces of what flows into and back out of every layer: memories of factors, not of rows."""

from curvlab.layerwise.bases import LayerBases, LayerBasis, Side, layer_bases
from curvlab.layerwise.layers import Layer, layers_of

__all__ = ["Layer", "LayerBases", "LayerBasis", "Side", "layer_bases", "layers_of"]
