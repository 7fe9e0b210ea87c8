"""The paper's measures: functions over a run's matrices, its snapshots and curvature operators."""

from curvlab.eigen import Estimate
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
from curvlab.metrics.perturbation import RADII, Perturbation, error_at, loss_at, perturb
from curvlab.metrics.quadratic import Expansion, LowRank, distances, expand
from curvlab.metrics.rank import (
    Spectrum,
    counts_above,
    effective_rank,
    numerical_rank,
    spectrum_above,
)
from curvlab.metrics.structure import (
    block_diagonality,
    layer_labels,
    spectral_similarity,
)

__all__ = [
    "NORMS",
    "RADII",
    "Estimate",
    "Expansion",
    "LowRank",
    "Norm",
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
    "error_at",
    "expand",
    "layer_labels",
    "loss_at",
    "loss_forgetting",
    "numerical_rank",
    "old_pairs",
    "perturb",
    "previous_pairs",
    "spectral_similarity",
    "spectrum_above",
]
