"""Curvature operators: symmetric linear maps over the flat parameter vector."""

from curvlab.operators.block_diagonal import BlockDiagonal
from curvlab.operators.curvature import Curvature
from curvlab.operators.dense import Dense
from curvlab.operators.fisher import EmpiricalFisher, Fisher
from curvlab.operators.foreign import FromFunction, from_scipy, to_scipy
from curvlab.operators.gauss_newton import GaussNewton
from curvlab.operators.hessian import FunctionalHessian, Hessian
from curvlab.operators.objective import Objective
from curvlab.operators.operator import Operator
from curvlab.operators.preconditioned import Preconditioned, adaptive_preconditioner
from curvlab.operators.sparse import Sparse
from curvlab.operators.subspace import Projected, Restricted
from curvlab.operators.sums import WeightedSum, average

__all__ = [
    "BlockDiagonal",
    "Curvature",
    "Dense",
    "EmpiricalFisher",
    "Fisher",
    "FromFunction",
    "FunctionalHessian",
    "GaussNewton",
    "Hessian",
    "Objective",
    "Operator",
    "Preconditioned",
    "Projected",
    "Restricted",
    "Sparse",
    "WeightedSum",
    "adaptive_preconditioner",
    "average",
    "from_scipy",
    "to_scipy",
]
