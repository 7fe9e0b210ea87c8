"""Certified curvature for PyTorch: operators, eigensolvers, memory bases, continual learning."""

from curvlab.basis import Basis
from curvlab.batches import freeze
from curvlab.eigen import (
    Density,
    Eigenpairs,
    Estimate,
    NotConvergedError,
    SpectralEnergy,
    SpectrumTracker,
    block_lanczos,
    diagonal,
    lanczos,
    power_iteration,
    spectral_density,
    spectral_energy,
    trace,
)
from curvlab.operators import (
    BlockDiagonal,
    Dense,
    EmpiricalFisher,
    Fisher,
    FromFunction,
    FunctionalHessian,
    GaussNewton,
    Hessian,
    Objective,
    average,
    from_scipy,
    to_scipy,
)
from curvlab.parameters import load_parameter_vector, parameter_count, parameter_vector
from curvlab.probe import Certificate, LinearOperator, OperatorError, probe
from curvlab.storage import StorageError
from curvlab.training import Run, Schedule, learn

__version__ = "0.1.0"

__all__ = [
    "Basis",
    "BlockDiagonal",
    "Certificate",
    "Dense",
    "Density",
    "Eigenpairs",
    "EmpiricalFisher",
    "Estimate",
    "Fisher",
    "FromFunction",
    "FunctionalHessian",
    "GaussNewton",
    "Hessian",
    "LinearOperator",
    "NotConvergedError",
    "Objective",
    "OperatorError",
    "Run",
    "Schedule",
    "SpectralEnergy",
    "SpectrumTracker",
    "StorageError",
    "__version__",
    "average",
    "block_lanczos",
    "diagonal",
    "freeze",
    "from_scipy",
    "lanczos",
    "learn",
    "load_parameter_vector",
    "parameter_count",
    "parameter_vector",
    "power_iteration",
    "probe",
    "spectral_density",
    "spectral_energy",
    "to_scipy",
    "trace",
]
