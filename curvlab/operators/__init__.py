"""Curvature operators: symmetric linear maps over the flat parameter vector."""

from curvlab.operators.block_diagonal import BlockDiagonal as BlockDiagonal
from curvlab.operators.curvature import Curvature as Curvature
from curvlab.operators.dense import Dense as Dense
from curvlab.operators.fisher import EmpiricalFisher as EmpiricalFisher, Fisher as Fisher
from curvlab.operators.foreign import (
    FromFunction as FromFunction,
    from_scipy as from_scipy,
    to_scipy as to_scipy,
)
from curvlab.operators.gauss_newton import GaussNewton as GaussNewton
from curvlab.operators.hessian import FunctionalHessian as FunctionalHessian, Hessian as Hessian
from curvlab.operators.objective import Objective as Objective
from curvlab.operators.operator import Operator as Operator
from curvlab.operators.preconditioned import (
    Preconditioned as Preconditioned,
    adaptive_preconditioner as adaptive_preconditioner,
)
from curvlab.operators.sparse import Sparse as Sparse
from curvlab.operators.subspace import Projected as Projected, Restricted as Restricted
from curvlab.operators.sums import WeightedSum as WeightedSum, average as average
