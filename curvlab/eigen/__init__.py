"""Eigensolvers that certify what they return, and estimates with error bars."""

from curvlab.eigen.above import eigenpairs_above as eigenpairs_above
from curvlab.eigen.block import block_lanczos as block_lanczos
from curvlab.eigen.density import Density as Density, spectral_density as spectral_density
from curvlab.eigen.energy import (
    SpectralEnergy as SpectralEnergy,
    spectral_energy as spectral_energy,
)
from curvlab.eigen.estimate import Estimate as Estimate
from curvlab.eigen.lanczos import lanczos as lanczos
from curvlab.eigen.layers import LayerSpectra as LayerSpectra, layer_spectra as layer_spectra
from curvlab.eigen.outcome import Outcome as Outcome
from curvlab.eigen.power import power_iteration as power_iteration
from curvlab.eigen.request import Certify as Certify, Checkpoint as Checkpoint
from curvlab.eigen.result import Eigenpairs as Eigenpairs, NotConvergedError as NotConvergedError
from curvlab.eigen.room import Room as Room
from curvlab.eigen.solve import Solution as Solution, solve as solve
from curvlab.eigen.traces import diagonal as diagonal, trace as trace
from curvlab.eigen.tracker import SpectrumTracker as SpectrumTracker
from curvlab.eigen.work import Interrupted as Interrupted
