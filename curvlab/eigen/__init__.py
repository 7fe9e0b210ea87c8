"""Eigensolvers that certify what they return, and estimates with error bars."""

from curvlab.eigen.above import eigenpairs_above
from curvlab.eigen.block import block_lanczos
from curvlab.eigen.density import Density, spectral_density
from curvlab.eigen.energy import SpectralEnergy, spectral_energy
from curvlab.eigen.estimate import Estimate
from curvlab.eigen.lanczos import lanczos
from curvlab.eigen.layers import LayerSpectra, layer_spectra
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.power import power_iteration
from curvlab.eigen.request import Certify, Checkpoint
from curvlab.eigen.result import Eigenpairs, NotConvergedError
from curvlab.eigen.room import Room
from curvlab.eigen.solve import Solution, solve
from curvlab.eigen.traces import diagonal, trace
from curvlab.eigen.tracker import SpectrumTracker
from curvlab.eigen.work import Interrupted

__all__ = [
    "Certify",
    "Checkpoint",
    "Density",
    "Eigenpairs",
    "Estimate",
    "Interrupted",
    "LayerSpectra",
    "NotConvergedError",
    "Outcome",
    "Room",
    "Solution",
    "SpectralEnergy",
    "SpectrumTracker",
    "block_lanczos",
    "diagonal",
    "eigenpairs_above",
    "lanczos",
    "layer_spectra",
    "power_iteration",
    "solve",
    "spectral_density",
    "spectral_energy",
    "trace",
]
