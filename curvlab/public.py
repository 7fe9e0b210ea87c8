"""The public names: what ``curvlab.<name>`` loads on first use."""

from curvlab.basis import Basis as Basis
from curvlab.batches import freeze as freeze
from curvlab.doctor import doctor as doctor
from curvlab.eigen import (
    Certify as Certify,
    Checkpoint as Checkpoint,
    Density as Density,
    Eigenpairs as Eigenpairs,
    Estimate as Estimate,
    Interrupted as Interrupted,
    LayerSpectra as LayerSpectra,
    NotConvergedError as NotConvergedError,
    Outcome as Outcome,
    Room as Room,
    Solution as Solution,
    SpectralEnergy as SpectralEnergy,
    SpectrumTracker as SpectrumTracker,
    block_lanczos as block_lanczos,
    diagonal as diagonal,
    eigenpairs_above as eigenpairs_above,
    lanczos as lanczos,
    layer_spectra as layer_spectra,
    power_iteration as power_iteration,
    solve as solve,
    spectral_density as spectral_density,
    spectral_energy as spectral_energy,
    trace as trace,
)
from curvlab.layerwise import LayerBases as LayerBases, layer_bases as layer_bases
from curvlab.operators import (
    BlockDiagonal as BlockDiagonal,
    Dense as Dense,
    EmpiricalFisher as EmpiricalFisher,
    Fisher as Fisher,
    FromFunction as FromFunction,
    FunctionalHessian as FunctionalHessian,
    GaussNewton as GaussNewton,
    Hessian as Hessian,
    Objective as Objective,
    Sparse as Sparse,
    adaptive_preconditioner as adaptive_preconditioner,
    average as average,
    from_scipy as from_scipy,
    to_scipy as to_scipy,
)
from curvlab.parameters import (
    load_parameter_vector as load_parameter_vector,
    parameter_count as parameter_count,
    parameter_vector as parameter_vector,
)
from curvlab.plan import plan as plan
from curvlab.probe import (
    Certificate as Certificate,
    LinearOperator as LinearOperator,
    OperatorError as OperatorError,
    probe as probe,
)
from curvlab.protection import SpectralPenalty as SpectralPenalty, protect as protect
from curvlab.storage import StorageError as StorageError
from curvlab.surface import Landscape as Landscape, landscape as landscape
from curvlab.training import Run as Run, Schedule as Schedule, learn as learn
