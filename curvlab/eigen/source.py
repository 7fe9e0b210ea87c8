"""What a solver accepts as an operator, brought to one form.

A curvlab operator (or anything with ``n``, ``dtype``, ``device`` and ``@``) is used as it is. A
square tensor (dense or sparse) or array, a pair ``(matvec, n)`` and a SciPy ``LinearOperator`` are
wrapped.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlab.checks import integers
from curvlab.operators import Dense, FromFunction, Sparse, from_scipy
from curvlab.probe import LinearOperator

Source = LinearOperator | Tensor | tuple[Callable[[Tensor], Tensor], int] | Any
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def as_operator(source: Source) -> LinearOperator:
    """``source`` as a :class:`~curvlab.probe.LinearOperator`.

    Args:
        source: A curvlab operator, a symmetric tensor, sparse tensor or array ``(n, n)``,
            ``(matvec, n)`` with ``matvec`` of float32 tensors ``(n,)`` on the CPU, or a SciPy
            ``LinearOperator`` or sparse matrix.
    """
    if isinstance(source, tuple):
        return _from_pair(source)
    if isinstance(source, np.ndarray):
        source = torch.from_numpy(source)
    if isinstance(source, Tensor):
        return Dense(source) if source.layout == torch.strided else Sparse(source)
    if hasattr(source, "shape") and not hasattr(source, "n"):
        kind = str(getattr(source, "dtype", None))
        if kind not in ("float32", "float64"):
            raise TypeError(f"the SciPy operator's dtype is {kind}; make it float32 or float64")
        return from_scipy(source)
    if not isinstance(source, LinearOperator):
        raise TypeError(
            "an operator has n, dtype, device and @; a tensor (n, n), (matvec, n) or a SciPy "
            f"LinearOperator will do as well. Got {type(source).__name__}"
        )
    if source.dtype not in FLOATS:
        raise TypeError(f"the operator's dtype is {source.dtype}; eigensolvers need real floats")
    if source.n < 1:
        raise ValueError(f"the operator acts on vectors of {source.n} elements; nothing to solve")
    return source


def _from_pair(source: tuple[Any, ...]) -> FromFunction:
    if len(source) != 2:
        raise ValueError(f"a tuple operator is (matvec, n); got {len(source)} elements")
    matvec, n = source
    [n] = integers(n=n)
    return FromFunction(matvec, n, dtype=torch.float32)
