"""What a quadratic model of the old losses predicts: Taylor terms, the recursion, the VNC score.

All of it comes from the numbers g_o'D_t and D_s'H_oD_t, where D_t = theta_t - theta_{t-1}: one
Hessian-vector product per pair (o, t), o < t. A dense Hessian is never formed. Products are taken
with the updates D_t and not with theta_t - theta_o, so that the VNC score, which may be tiny beside
the Taylor terms, is not a difference of large numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.metrics.forgetting import Norm, average_forgetting
from curvlab.operators import Operator
from curvlab.probe import LinearOperator


class LowRank(Operator):
    """V' diag(values) V: what r eigenpairs tell of a Hessian (tab:RNC100TAYLOR, tab:RNC100EQ3).

    Args:
        values: ``(r,)``.
        vectors: ``(r, n)``, orthonormal rows.
    """

    def __init__(self, values: Tensor, vectors: Tensor) -> None:
        if vectors.dim() != 2 or values.shape != vectors.shape[:1]:
            raise ValueError(
                "LowRank needs values (r,) and vectors (r, n); "
                f"got {tuple(values.shape)} and {tuple(vectors.shape)}"
            )
        super().__init__(vectors.shape[1], vectors.dtype, vectors.device)
        self.values, self.vectors = values.to(vectors), vectors

    def _product(self, block: Tensor) -> Tensor:
        return ((block @ self.vectors.T) * self.values) @ self.vectors


@dataclass(frozen=True, slots=True)
class Expansion:
    """Gradients and Hessians of T tasks, each at its own solution, seen along the path of learning.

    Attributes:
        slopes: ``(T, T)``; ``[o, t] = g_o'D_t``, zero unless t > o.
        curvatures: ``(T, T, T)``; ``[o, s, t] = D_s'H_oD_t``, zero unless s > o and t > o.
        distances: ``(T, T)``; ``[t, o] = |theta_t - theta_o|``.
        products: Hessian-vector products taken, T(T-1)/2.
    """

    slopes: Tensor
    curvatures: Tensor
    distances: Tensor
    products: int

    @property
    def tasks(self) -> int:
        return self.slopes.shape[0]

    def first_order(self) -> Tensor:
        """``(T, T)``; ``[t, o] = g_o'(theta_t - theta_o)``, the first term of eq. Taylor."""
        return self.slopes.cumsum(1).T

    def second_order(self) -> Tensor:
        """``(T, T)``; ``[t, o] = 1/2 (theta_t - theta_o)'H_o(theta_t - theta_o)``."""
        sums = self.curvatures.cumsum(1).cumsum(2)
        return 0.5 * sums.diagonal(0, 1, 2).T

    def taylor(self) -> Tensor:
        """``(T, T)``; ``[t, o]`` = first plus second order: the prediction of E_o(t) in loss."""
        return self.first_order() + self.second_order()

    def recursion(self, forgetting: Tensor, norm: Norm = "t") -> Tensor:
        """E(t) predicted from the measured E(t-1) and the last update alone, eq. forgetting-rec.

        The sum v is taken over o <= t-2 as in the text; the appendix has o <= t-1, which is the
        same, for the term o = t-1 vanishes. The equation is written for the sum of E_o(t) and
        divided at the end, which makes it right under both norms; with 1/t its first term is the
        paper's (t-1)/t E(t-1).

        Args:
            forgetting: Measured E_o(t) in loss, ``(T, T)``. The published errors suggest that their
                E(t-1) was measured, not predicted; averaging :meth:`second_order` gives the latter.
            norm: ``"t"`` or ``"t-1"``, as for the measured E(t) it is compared with.

        Returns:
            ``(T,)``, the first entry 0.
        """
        if norm == "pairs":
            raise ValueError("the recursion predicts one E(t) at a time: norm must be 't' or 't-1'")
        tasks = self.tasks
        if forgetting.shape != (tasks, tasks):
            raise ValueError(
                f"forgetting must be ({tasks}, {tasks}), as the expansion; "
                f"got {tuple(forgetting.shape)}"
            )
        number = torch.arange(1, tasks + 1, dtype=torch.float64)
        divisor = number if norm == "t" else (number - 1).clamp(min=1)
        sums = average_forgetting(forgetting.cpu(), "t") * number
        predicted = torch.zeros(tasks, dtype=torch.float64)
        forms = self.curvatures.sum(0)  # over o; entries with s <= o or t <= o are zero
        for t in range(1, tasks):
            gained = 0.5 * forms[t, t] + forms[:t, t].sum()
            predicted[t] = (sums[t - 1] + gained) / divisor[t]
        return predicted

    def violation(self, norm: Norm = "t") -> Tensor:
        """VNC(t) = D_t'(1/t sum over o < t of H_o)D_t, tab:VOC; ``(T,)``, first entry 0.

        Signed: assumption 1 (H_o positive semi-definite) fails in practice, so it can be negative.
        There is no factor 1/2, as in the paper's score.

        Args:
            norm: ``"t"`` as the score is defined, ``"t-1"`` as the published numbers are.
        """
        if norm == "pairs":
            raise ValueError("VNC(t) is defined for one t at a time: norm must be 't' or 't-1'")
        number = torch.arange(1, self.tasks + 1, dtype=torch.float64)
        divisor = number if norm == "t" else (number - 1).clamp(min=1)
        return self.curvatures.sum(0).diagonal() / divisor


def expand(
    parameters: Tensor, gradients: Iterable[Tensor], operators: Iterable[LinearOperator]
) -> Expansion:
    """Take the T(T-1)/2 products that the quadratic analysis of a run needs.

    Args:
        parameters: ``(T, n)``: theta_t, the parameters after each task.
        gradients: g_o ``(n,)``, the gradient of loss o at theta_o, for o = 0..T-2 at least.
        operators: H_o, the Hessian of loss o at theta_o (or what stands for it: Gauss-Newton,
            :class:`LowRank`), for o = 0..T-2 at least.
            Both are read one at a time, so a generator may build each operator when it is wanted.
    """
    if parameters.dim() != 2 or parameters.shape[0] < 1:
        raise ValueError(f"parameters must be (T, n), one row per task; got {parameters.shape}")
    tasks, n = parameters.shape
    updates = parameters.detach().double().diff(dim=0)  # row t-1 holds D_t
    slopes = torch.zeros(tasks, tasks, dtype=torch.float64)
    curvatures = torch.zeros(tasks, tasks, tasks, dtype=torch.float64)
    left, right = iter(gradients), iter(operators)
    for o in range(tasks - 1):
        gradient, operator = next(left, None), next(right, None)
        if gradient is None or operator is None:
            raise ValueError(
                f"expand needs a gradient and an operator for each of the first {tasks - 1} tasks; "
                f"they ended at task {o}"
            )
        if operator.n != n or gradient.shape != (n,):
            raise ValueError(
                f"task {o}: parameters have {n} elements, the operator {operator.n}, "
                f"the gradient {tuple(gradient.shape)}"
            )
        later = updates[o:]
        slopes[o, o + 1 :] = later @ gradient.detach().to(later)
        images = (operator @ later.to(operator.dtype).to(operator.device)).to(later)
        # H_o is symmetric, but its products are so only to rounding: take the mean of both orders
        form = later @ images.T
        curvatures[o, o + 1 :, o + 1 :] = 0.5 * (form + form.T)
    return Expansion(slopes, curvatures, distances(parameters), tasks * (tasks - 1) // 2)


def distances(parameters: Tensor) -> Tensor:
    """``|theta_t - theta_o|`` for all pairs; ``(T, n)`` to float64 ``(T, T)``."""
    rows = parameters.detach().double()
    # by differences: the Gram-matrix formula loses half the digits of a small distance
    return torch.stack([(rows - row).norm(dim=1) for row in rows]).cpu()
