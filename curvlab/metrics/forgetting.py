"""Forgetting, accuracy and their averages, from the matrices that a run leaves behind.

Everywhere ``matrix[..., t, o]`` is the loss or accuracy on task ``o`` after learning task ``t``.
Entries above the diagonal (tasks not yet learned) are never read and may be NaN. Leading
dimensions (seeds) pass through. Tasks count from 0 in code and from 1 in the paper.

The paper writes one symbol E(t) for three averages; its own tables tell them apart:

* ``"t"``: sum over o <= t divided by t, the zero E_t(t) included. The definition in the text; the
  CIFAR tables.
* ``"t-1"``: the same sum over the t-1 old tasks only. The Rotated-MNIST loss tables.
* ``"pairs"``: the mean of E_o(s) over all pairs o <= s <= t. The CIFAR-10 column of tab:other-arch,
  which is headed E(5).

The text calls E(t) "also known as backward transfer"; it is not. GEM's backward transfer is the
last E(t) of accuracies under ``"t-1"`` with the opposite sign.
"""

from typing import Literal

import torch
from torch import Tensor

Norm = Literal["t", "t-1", "pairs"]
NORMS: tuple[Norm, ...] = ("t", "t-1", "pairs")


def loss_forgetting(losses: Tensor) -> Tensor:
    """E_o(t) = L_o(theta_t) - L_o(theta_o), eq. 1.

    Args:
        losses: Shape ``(..., T, T)``.

    Returns:
        Float64 ``(..., T, T)``, zero on and above the diagonal. Negative where later tasks helped.
    """
    return _lower(_square(losses, "losses"), sign=1.0)


def accuracy_forgetting(accuracies: Tensor) -> Tensor:
    """E_o(t) = a_oo - a_to: what task ``o`` lost in accuracy; shapes as in `loss_forgetting`."""
    return _lower(_square(accuracies, "accuracies"), sign=-1.0)


def average_forgetting(forgetting: Tensor, norm: Norm = "t") -> Tensor:
    """E(t) for every t, under one of the three normalisations above.

    Args:
        forgetting: ``(..., T, T)`` from :func:`loss_forgetting` or :func:`accuracy_forgetting`.
        norm: ``"t"``, ``"t-1"`` or ``"pairs"``.

    Returns:
        ``(..., T)``. The first entry is 0 under every norm: nothing can be forgotten yet.
    """
    matrix = _square(forgetting, "forgetting")
    sums = matrix.tril(-1).sum(-1)
    number = torch.arange(1, sums.shape[-1] + 1, dtype=sums.dtype, device=sums.device)
    if norm == "t":
        return sums / number
    if norm == "t-1":
        return sums / (number - 1).clamp(min=1)
    if norm == "pairs":
        return sums.cumsum(-1) / number.cumsum(-1)
    raise ValueError(f"norm must be one of {', '.join(NORMS)}; got {norm!r}")


def old_pairs(matrix: Tensor) -> Tensor:
    """The entries with ``o < t``, flattened to ``(..., T(T-1)/2)``: what the tables average."""
    full = _square(matrix, "matrix")
    rows, columns = torch.tril_indices(full.shape[-1], full.shape[-1], -1, device=full.device)
    return full[..., rows, columns]


def previous_pairs(matrix: Tensor) -> Tensor:
    """The entries with ``o = t - 1``, ``(..., T-1)``: the effect of a single update."""
    return _square(matrix, "matrix").diagonal(-1, -2, -1)


def average_accuracy(accuracies: Tensor) -> Tensor:
    """a(t) = 1/t sum over o <= t of a_to; ``(..., T, T)`` to ``(..., T)``."""
    matrix = _square(accuracies, "accuracies")
    number = torch.arange(1, matrix.shape[-1] + 1, dtype=matrix.dtype, device=matrix.device)
    return matrix.tril().sum(-1) / number


def current_accuracy(accuracies: Tensor) -> Tensor:
    """a_tt, accuracy on each task just after learning it; ``(..., T)``.

    Print it beside any forgetting: a learner that learns nothing forgets nothing.
    """
    return _square(accuracies, "accuracies").diagonal(0, -2, -1)


def _lower(matrix: Tensor, sign: float) -> Tensor:
    own = matrix.diagonal(0, -2, -1).unsqueeze(-2)
    # tril zeroes by assignment, so a NaN above the diagonal does not survive as NaN * 0
    return (sign * (matrix - own)).tril(-1)


def _square(matrix: Tensor, name: str) -> Tensor:
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(
            f"{name} must be (..., T, T), entry [t, o] = on task o after learning task t; "
            f"got {tuple(matrix.shape)}"
        )
    full = matrix.detach().to(torch.float64)
    missing = full.isnan() & torch.ones_like(full, dtype=torch.bool).tril()
    if missing.any():
        t, o = missing.nonzero()[0, -2:].tolist()
        raise ValueError(f"{name}[{t}, {o}] is NaN: task {o} was not evaluated after task {t}")
    return full
