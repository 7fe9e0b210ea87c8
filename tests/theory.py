"""The paper's statements in executable form, on quadratic losses, with what had to be corrected.

Quadratic tasks: once task o has ended at theta_o, its loss is L_o(theta) = 1/2 d'H_od with
d = theta - theta_o and H_o positive semi-definite. On them the paper's approximations are exact.

Corrections to the paper, each tested:

* **Theorem 1** (null forgetting) holds, but its induction multiplies a non-zero vector by an update
  and concludes that the product is not zero, which does not follow. The way that works: E_o >= 0
  and their mean is 0, so each E_o = 0, so H_o(theta_tau - theta_o) = 0, so v = 0. Base case 1 lacks
  the factor 1/t: E(2) = 1/4 D'H_1D under 1/t.
* **Theorem 2** (null-forgetting constraint) needs its condition at *every* step: an algorithm that
  violates it at step 2 and obeys it at step T satisfies the equation at T and has forgotten.
* **The non-monotonic theorem** gives the argmin of E(tau+1), not an update with E(tau+1) = 0. The
  minimum is zero only where range(B) and range(H_tau) meet trivially (:func:`retraced_forgetting`).
  In its proof C should be 1/(2 tau) D'BD; the last corollary is about E(t+1), not E(t+2).
* **GPM**: on the stored inputs, with a basis of full rank, every layer's activation is frozen, so
  the outputs are frozen for *any* step size; neither a block-diagonal Hessian nor small steps are
  needed. It does need layers without free biases. The corollary's remainder ``O(|d|)`` should be
  ``O(|d|^3)``.
* **OGD-GTL**: the true label's entry of the softmax curvature is p(1-p), which vanishes with all
  the others as p -> 1; it is not O(1). What the variant leaves out depends on the number of
  classes and stays in the limit (:func:`label_only_residual`).

**Regularisation and isolation.** The paper says that the two families are "more similar than what
initially thought", because both rest on a second-order approximation of the old losses, and states
no theorem. Here is one: a penalty ``strength/2 d'Hd`` (EWC with the whole Hessian H of the old
tasks) is the soft form of the null-forgetting constraint ``d'Hd = 0`` (projection off the range of
H). As the strength grows, the penalised solution tends to the projected one at the rate
1/strength, and what is forgotten falls with its square (:func:`penalised_update`,
:func:`projected_update`). With EWC's diagonal F in place of H the limit is the projection off the
coordinates with F > 0, which is parameter isolation by a mask; the two agree where H is diagonal.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def quadratic_forgetting(parameters: Tensor, hessians: Sequence[Tensor]) -> Tensor:
    """E_o(t) = 1/2 (theta_t - theta_o)'H_o(theta_t - theta_o); ``(T, T)``, entry ``[t, o]``.

    Args:
        parameters: ``(T, n)``: theta_t.
        hessians: T matrices ``(n, n)``.
    """
    tasks = parameters.shape[0]
    forgetting = torch.zeros(tasks, tasks, dtype=parameters.dtype)
    for o, hessian in enumerate(hessians):
        moved = parameters[o:] - parameters[o]
        forgetting[o:, o] = 0.5 * ((moved @ hessian) * moved).sum(1)
    return forgetting


def null_space(matrix: Tensor, tolerance: float = 1e-10) -> Tensor:
    """Orthonormal rows ``(n - rank, n)`` spanning the null space of a symmetric ``(n, n)``.

    Eigenvalues count as zero up to ``tolerance`` times the largest magnitude.
    """
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(matrix)
    return vectors.T[values.abs() <= tolerance * values.abs().max()]


def retracing_update(old: Tensor, last: Tensor, update: Tensor, tolerance: float = 1e-10) -> Tensor:
    """The update after tau that undoes most forgetting, D = -(B + H_tau)^+ B D_tau (thm. nmf).

    Adding any z with (B + H_tau) z = 0 changes nothing. It is the argmin of E(tau+1); the paper
    claims E(tau+1) = 0, which holds only where range(B) and range(H_tau) meet trivially.

    Args:
        old: B, the sum of H_o over o < tau, ``(n, n)``. E(tau) = 1/(2 tau) D_tau'B D_tau.
        last: H_tau, ``(n, n)``.
        update: D_tau ``(n,)``, the update that caused forgetting.
    """
    inverse: Tensor = torch.linalg.pinv(old + last, rtol=tolerance, hermitian=True)
    return -(inverse @ (old @ update))


def retraced_forgetting(
    old: Tensor, last: Tensor, update: Tensor, tasks: int, tolerance: float = 1e-10
) -> Tensor:
    """The least E(tau+1) any next update can reach: D'(B - B(B + H_tau)^+B)D / (2(tau+1)).

    Args:
        old, last, update: As in :func:`retracing_update`.
        tasks: tau, counted from 1.
    """
    inverse: Tensor = torch.linalg.pinv(old + last, rtol=tolerance, hermitian=True)
    image = old @ update
    return (update @ image - image @ (inverse @ image)) / (2 * (tasks + 1))


def penalised_update(gradient: Tensor, hessian: Tensor, old: Tensor, strength: float) -> Tensor:
    """The minimum ``(n,)`` of g'd + 1/2 d'H_t d + strength/2 d'H d: a regularised new task.

    Args:
        gradient: g of the new task at the old solution, ``(n,)``.
        hessian: H_t of the new task, positive definite ``(n, n)``.
        old: H, the sum of the old tasks' Hessians, positive semi-definite ``(n, n)``.
        strength: Of the penalty.
    """
    solution: Tensor = torch.linalg.solve(hessian + strength * old, -gradient)
    return solution


def projected_update(gradient: Tensor, hessian: Tensor, old: Tensor) -> Tensor:
    """The minimum ``(n,)`` of g'd + 1/2 d'H_t d with d in the null space of ``old``.

    Where projected gradient descent ends; arguments as in :func:`penalised_update`.
    """
    rows = null_space(old)
    inside: Tensor = torch.linalg.solve(rows @ hessian @ rows.T, -(rows @ gradient))
    return rows.T @ inside


def softmax_curvature(probabilities: Tensor) -> Tensor:
    """Second derivative of cross-entropy by the logits, diag(p) - pp'; ``(K,)`` to ``(K, K)``."""
    return torch.diag(probabilities) - torch.outer(probabilities, probabilities)


def label_only_residual(classes: int, confidence: float) -> float:
    """What OGD-GTL leaves out: ``|A without the true label's row and column|_F / |A|_F``.

    A = diag(p) - pp' with ``confidence`` on the true label and the rest spread evenly, the paper's
    own model. As confidence -> 1 it tends to 1 / sqrt(K + 2) and not to 0: .5, .378, .289 and .099
    for 2, 5, 10 and 100 classes. A11 = p(1-p) itself vanishes, and the other diagonal entries keep
    the ratio 1 / (K - 1) to it.
    """
    probabilities = torch.full((classes,), (1 - confidence) / (classes - 1), dtype=torch.float64)
    probabilities[0] = confidence
    curvature = softmax_curvature(probabilities)
    return float(curvature[1:, 1:].norm() / curvature.norm())


def plateau_score(eigenvalue: float, trace: float, n: int) -> float:
    """s(r) of an eigenvector at a quadratic loss's minimum, at every radius: lambda n / tr(H)."""
    return eigenvalue * n / trace


def slope_score(gradient: Tensor, direction: Tensor) -> float:
    """The limit of s(r) as r -> 0 where a gradient is left: ``|g'v| / (|g| E|mu_1|)``.

    For a random unit vector in n dimensions ``E|mu_1|`` is about sqrt(2 / (pi n)).

    Args:
        gradient: ``(n,)``.
        direction: ``(n,)``, unit norm.
    """
    typical = math.sqrt(2 / (math.pi * gradient.numel()))
    return float((gradient @ direction).abs() / gradient.norm()) / typical
