"""The paper's measures: functions over a run's matrices, its snapshots and curvature operators."""

from curvlab.eigen import Estimate as Estimate
from curvlab.metrics.drift import Drift as Drift, subspace_drift as subspace_drift
from curvlab.metrics.forgetting import (
    NORMS as NORMS,
    Norm as Norm,
    accuracy_forgetting as accuracy_forgetting,
    average_accuracy as average_accuracy,
    average_forgetting as average_forgetting,
    current_accuracy as current_accuracy,
    loss_forgetting as loss_forgetting,
    old_pairs as old_pairs,
    previous_pairs as previous_pairs,
)
from curvlab.metrics.perturbation import (
    RADII as RADII,
    Perturbation as Perturbation,
    measures_at as measures_at,
    perturb as perturb,
)
from curvlab.metrics.quadratic import (
    Expansion as Expansion,
    LowRank as LowRank,
    distances as distances,
    expand as expand,
)
from curvlab.metrics.rank import (
    Spectrum as Spectrum,
    counts_above as counts_above,
    effective_rank as effective_rank,
    spectrum_above as spectrum_above,
)
from curvlab.metrics.structure import (
    OuterProducts as OuterProducts,
    block_diagonality as block_diagonality,
    layer_labels as layer_labels,
    spectral_similarity as spectral_similarity,
)
