"""The paper's measures: functions over a run's matrices, its snapshots and curvature operators."""

from curvlab.eigen import Estimate
from curvlab.metrics.drift import Drift, subspace_drift
from curvlab.metrics.forgetting import (
    NORMS,
    Norm,
    accuracy_forgetting,
    average_accuracy,
    average_forgetting,
    backward_transfer,
    current_accuracy,
    loss_forgetting,
    old_pairs,
    previous_pairs,
)
from curvlab.metrics.perturbation import RADII, Perturbation, measures_at, perturb, perturb_all
from curvlab.metrics.quadratic import Expansion, LowRank, distances, expand
from curvlab.metrics.rank import (
    Spectrum,
    counts_above,
    effective_rank,
    spectrum_above,
)
from curvlab.metrics.structure import (
    OuterProducts,
    block_diagonality,
    layer_labels,
    spectral_similarity,
)

__all__ = [
    "NORMS",
    "RADII",
    "Drift",
    "Estimate",
    "Expansion",
    "LowRank",
    "Norm",
    "OuterProducts",
    "Perturbation",
    "Spectrum",
    "accuracy_forgetting",
    "average_accuracy",
    "average_forgetting",
    "backward_transfer",
    "block_diagonality",
    "counts_above",
    "current_accuracy",
    "distances",
    "effective_rank",
    "expand",
    "layer_labels",
    "loss_forgetting",
    "measures_at",
    "old_pairs",
    "perturb",
    "perturb_all",
    "previous_pairs",
    "spectral_similarity",
    "spectrum_above",
    "subspace_drift",
]
