"""The public names: what ``curvlab.<name>`` loads when it is first asked for."""

from curvlab.basis import Basis
from curvlab.batches import freeze
from curvlab.eigen import (
    Density,
    Eigenpairs,
    Estimate,
    Interrupted,
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
from curvlab.protection import protect
from curvlab.storage import StorageError
from curvlab.training import Run, Schedule, learn

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
    "Interrupted",
    "LinearOperator",
    "NotConvergedError",
    "Objective",
    "OperatorError",
    "Run",
    "Schedule",
    "SpectralEnergy",
    "SpectrumTracker",
    "StorageError",
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
    "protect",
    "spectral_density",
    "spectral_energy",
    "to_scipy",
    "trace",
]
