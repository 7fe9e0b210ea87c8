"""The kernels as users call them: arguments are checked once, then one ``if`` chooses the back end.

``reference`` describes every function; here are the same names and signatures, and what only makes
sense for callers: functional :func:`project`, :func:`project_list` and :func:`combine`, which
autograd, ``torch.func`` and ``torch.compile(fullgraph=True)`` can go through. The basis is a
constant to them: derivatives are taken with respect to the vectors. The projection is self-adjoint,
so its backward is the projection of the incoming gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from curvlab_kernels import checks, derivatives, registered
from curvlab_kernels.formats import padded
from curvlab_kernels.registered import backend

__all__ = [
    "apply_",
    "coefficients",
    "combine",
    "dequantise",
    "lanczos_step_",
    "norm",
    "orthonormalise_",
    "orthonormalise_block_",
    "padded",
    "project",
    "project_",
    "project_list",
    "project_list_",
    "quantise",
    "sgd_step_",
]


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
    """``c = M g``, float64: ``(m,)`` for ``vectors`` ``(n,)``, ``(b, m)`` for ``(b, n)``."""
    checks.check_basis(rows, None, scales)
    checks.check_vectors(rows, vectors)
    result: Tensor
    if _watched(vectors):
        result = derivatives.coefficients(rows, vectors, scales)
    else:
        result = backend(rows).coefficients(rows, vectors.contiguous(), scales)
    return result


def combine(
    rows: Tensor,
    coefficients: Tensor,
    n: int,
    *,
    dtype: torch.dtype = torch.float32,
    scales: Tensor | None = None,
) -> Tensor:
    """``M' c``: ``(n,)`` or ``(b, n)`` from float64 coefficients ``(m,)`` or ``(b, m)``."""
    checks.check_basis(rows, None, scales)
    checks.check_coefficients(rows, coefficients, coefficients.shape[:-1])
    if not 0 <= n <= rows.shape[1]:
        raise ValueError(f"n must be at most the rows' length {rows.shape[1]}; got {n}")
    if dtype not in checks.WORKING:
        raise TypeError(f"dtype must be float32 or float64; got {dtype}")
    double = dtype == torch.float64
    result: Tensor = derivatives.combine(rows, coefficients, scales, n, double)
    return result


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """``g -= M' c`` in place; ``coefficients`` float64, ``(m,)`` or ``(b, m)``."""
    checks.check_basis(rows, None, scales)
    checks.check_vectors(rows, vectors)
    checks.check_in_place(vectors)
    checks.check_coefficients(rows, coefficients, vectors.shape[:-1])
    backend(rows).apply_(rows, coefficients, vectors, scales)


def project(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """``g - M' G^-1 M g``, a new tensor of ``vectors``' shape; differentiable in ``vectors``."""
    checks.check_basis(rows, factor, scales)
    checks.check_vectors(rows, vectors)
    if _watched(vectors):
        watched: Tensor = derivatives.project(rows, vectors, factor, scales)
        return watched
    result = vectors.clone(memory_format=torch.contiguous_format)
    backend(rows).project_(rows, result, factor, scales)
    return result


def project_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """``g -= M' G^-1 M g`` in place; returns what was subtracted, ``G^-1 M g``, float64."""
    checks.check_basis(rows, factor, scales)
    checks.check_vectors(rows, vectors)
    checks.check_in_place(vectors)
    removed: Tensor
    if _watched(vectors):
        removed = registered.project_(rows, vectors, factor, scales)
    else:
        removed = backend(rows).project_(rows, vectors, factor, scales)
    return removed


def project_list(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> list[Tensor]:
    """:func:`project` of tensors of any shapes, seen as one vector in their order; new tensors."""
    checks.check_basis(rows, factor, scales)
    checks.check_list(rows, tensors, "tensors", in_place=False)
    if not tensors:
        return []
    flat = project(rows, torch.cat([tensor.reshape(-1) for tensor in tensors]), factor, scales)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def project_list_(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """:func:`project_` on tensors of any shapes, seen as one vector in their order, in place."""
    checks.check_basis(rows, factor, scales)
    checks.check_list(rows, tensors, "tensors", in_place=True)
    removed: Tensor
    if _watched(*tensors):
        removed = registered.project_list_(rows, tensors, factor, scales)
    else:
        removed = backend(rows).project_list_(rows, tensors, factor, scales)
    return removed


def sgd_step_(
    rows: Tensor,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """``d = P(g + wd p)``, ``buf = momentum buf + d``, ``p -= lr buf``; returns what P removed."""
    checks.check_basis(rows, factor, scales)
    checks.check_list(rows, parameters, "parameters", in_place=True)
    checks.check_list(rows, gradients, "gradients", in_place=False)
    checks.check_same_shapes(parameters, gradients, "parameters and gradients")
    if momenta:
        checks.check_list(rows, momenta, "momenta", in_place=True)
        checks.check_same_shapes(parameters, momenta, "parameters and momenta")
    elif momentum != 0.0:
        raise ValueError(f"momentum={momentum} needs momenta: one tensor of zeros per parameter")
    hyper = (float(lr), float(weight_decay), float(momentum))
    removed: Tensor
    if _watched(*parameters, *gradients):
        removed = registered.sgd_step_(rows, parameters, gradients, momenta, *hyper, factor, scales)
    else:
        removed = backend(rows).sgd_step_(
            rows, parameters, gradients, momenta, *hyper, factor, scales
        )
    return removed


def orthonormalise_(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """CGS2 of ``vector`` ``(n,)`` against orthonormal rows; see ``reference``."""
    checks.check_orthonormal(rows, vector, 1)
    result: tuple[Tensor, Tensor] = backend(rows).orthonormalise_(rows, vector)
    return result


def orthonormalise_block_(rows: Tensor, block: Tensor) -> Tensor:
    """Gram-Schmidt of ``block`` ``(b, n)`` against rows and itself; returns which were kept."""
    checks.check_orthonormal(rows, block, 2)
    kept: Tensor = backend(rows).orthonormalise_block_(rows, block)
    return kept


def lanczos_step_(
    rows: Tensor, vector: Tensor, previous_beta: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The next Lanczos vector from ``w = A rows[-1]``; alpha, beta, coefficients removed."""
    checks.check_orthonormal(rows, vector, 1)
    needed = 1 if previous_beta is None else 2
    if rows.shape[0] < needed:
        raise ValueError(
            f"lanczos_step_ needs at least {needed} row(s) "
            f"{'' if previous_beta is None else 'with previous_beta '}; got {rows.shape[0]}"
        )
    result: tuple[Tensor, Tensor, Tensor]
    result = backend(rows).lanczos_step_(rows, vector, previous_beta)
    return result


def norm(vector: Tensor) -> Tensor:
    """Euclidean norm of ``(n,)``, or of every row of ``(b, n)``, accumulated in float64."""
    if vector.dim() not in (1, 2) or vector.dtype not in checks.WORKING:
        raise ValueError(
            f"norm needs float32 or float64 of shape (n,) or (b, n); got {vector.dtype}, "
            f"{tuple(vector.shape)}"
        )
    result: Tensor = backend(vector).norm(vector.contiguous())
    return result


def quantise(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Store ``vectors`` ``(m, n)`` as padded rows of ``dtype``, with scales where it has them."""
    if vectors.dim() != 2 or vectors.dtype not in checks.WORKING:
        raise ValueError(
            f"quantise needs float32 or float64 vectors (m, n); got {vectors.dtype}, "
            f"{tuple(vectors.shape)}"
        )
    if dtype not in checks.STORAGE:
        raise TypeError(f"a basis is not stored as {dtype}")
    result: tuple[Tensor, Tensor | None] = backend(vectors).quantise(vectors.contiguous(), dtype)
    return result


def dequantise(rows: Tensor, scales: Tensor | None, n: int) -> Tensor:
    """The values of stored rows: ``(m, n)``, float32 (float64 for float64 rows)."""
    checks.check_basis(rows, None, scales)
    result: Tensor = backend(rows).dequantise(rows, scales, n)
    return result


def _watched(*tensors: Tensor) -> bool:
    """Whether autograd, ``torch.func`` or a tracer must see the call; otherwise go direct."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    grad = torch.is_grad_enabled()
    return any(
        type(tensor) not in (Tensor, nn.Parameter)
        or (grad and tensor.requires_grad)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )
