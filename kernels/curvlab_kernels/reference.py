"""Every kernel in plain PyTorch: the truth that the fast ones are compared with.

A basis is ``rows`` of shape ``(m, ld)``: one contiguous row per vector, ``ld`` a multiple of 16,
columns ``n..ld`` zero. Its dtype is float64, float32, float16, bfloat16, or one with a float32
scale per block of 64 columns (int8, float8): value = code * scale. ``vectors`` are ``(n,)`` or
rows ``(b, n)``, float32 or float64. ``factor`` is the lower Cholesky factor ``(m, m)``, float64, of
the Gram matrix ``G`` of the stored rows; ``None`` says the rows are orthonormal.

Columns are taken in chunks and every chunk is computed in float64, so that the only rounding is
that of the result; a fast kernel works in float32 within a chunk and sums chunks in float64.
Nothing here checks arguments: ``ops`` does, once.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvlab_kernels.algebra import mostly_removed, passes, solve
from curvlab_kernels.block import gram, norm, normalise_, orthonormalise_with_
from curvlab_kernels.formats import CHUNK, dequantise, expand_scales, padded, quantise
from curvlab_kernels.lists import flat, parts

__all__ = [
    "apply_",
    "coefficients",
    "dequantise",
    "gram",
    "lanczos_step_",
    "mix_",
    "norm",
    "normalise_",
    "orthonormalise_",
    "orthonormalise_block_",
    "padded",
    "project_",
    "project_list_",
    "quantise",
    "sgd_step_",
]


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
    """``c = M g``: inner products of the rows with each vector, float64.

    Returns:
        Shape ``(m,)`` for ``vectors`` ``(n,)``; ``(b, m)`` for ``(b, n)``.
    """
    total = vectors.new_zeros((*vectors.shape[:-1], rows.shape[0]), dtype=torch.float64)
    for columns in _chunks(vectors.shape[-1]):
        total += vectors[..., columns].double() @ _values(rows, scales, columns).T
    return total


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """``g -= M' c`` in place. ``coefficients`` are ``(m,)`` or ``(b, m)``, float64."""
    for columns in _chunks(vectors.shape[-1]):
        piece = vectors[..., columns]
        piece.copy_(piece.double() - coefficients @ _values(rows, scales, columns))


def project_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """``g -= M' G^-1 M g`` in place; returns what was subtracted, ``G^-1 M g``, float64.

    A vector that lies almost inside the span leaves a small rest, and rounding of what was removed
    is a large part of that: where less than a tenth of the norm is left
    (``algebra.mostly_removed``) a second pass follows, and its coefficients are added; after that
    a third where the same is true again.
    """
    return passes(lambda: _project_once(rows, vectors, factor, scales))


def project_list_(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """:func:`project_` on tensors of any shapes, seen as one vector in their order, in place."""
    vector = flat(tensors)
    removed = project_(rows, vector, factor, scales)
    torch._foreach_copy_(list(tensors), parts(vector, tensors))
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
    """One projected SGD step: ``d = P(g + wd p)``, ``buf = momentum buf + d``, ``p -= lr buf``.

    The decay is added before the projection, so that it too leaves the protected directions alone.
    ``parameters`` and ``momenta`` change in place, ``gradients`` do not.

    Args:
        parameters: Tensors of any shapes, together ``n`` elements.
        gradients: One per parameter, of its shape.
        momenta: One per parameter, zeros before the first step; an empty list for none, and then
            ``momentum`` must be 0.

    Returns:
        The coefficients removed from ``g + wd p``: shape ``(m,)``, float64.
    """
    step = flat(gradients).double() + weight_decay * flat(parameters).double()
    removed = project_(rows, step, factor, scales)
    if momenta:
        step += momentum * flat(momenta).double()
        torch._foreach_copy_(list(momenta), parts(step, momenta))
    moved = flat(parameters).double() - lr * step
    torch._foreach_copy_(list(parameters), parts(moved, parameters))
    return removed


def orthonormalise_(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Make ``vector`` ``(n,)`` orthogonal to orthonormal ``rows`` and of unit norm, in place.

    Two passes of classical Gram-Schmidt (twice is enough: Kahan, Parlett). A vector whose norm
    after them is at most ``algebra.rank_tolerance`` times its norm before is dependent: what is
    left is rounding. It is set to zero and its norm is reported as zero.

    The fast kernels sum squares: scale float64 vectors with norms outside 1e-140 to 1e150 first.

    Returns:
        The coefficients removed by both passes ``(m,)``, and the norm after them, before
        normalising ``()``; both float64.
    """
    before = norm(vector)
    removed, _ = _project_once(rows, vector)
    removed += _project_once(rows, vector)[0]
    return removed, normalise_(vector, before, rows.shape[0])


def lanczos_step_(
    rows: Tensor, vector: Tensor, previous_beta: float | Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn ``w = A v`` into the next Lanczos vector, in place, where ``v`` is the last row.

    With ``previous_beta`` the three-term recurrence goes first, ``w -= previous_beta rows[-2]``
    then ``w -= alpha rows[-1]``, and is the first pass of the reorthogonalisation: the other rows
    have only rounding to give. Without it (the first step, and the first after a thick restart,
    where ``w`` meets every row) the first pass is against all rows. A pass against all rows
    follows, and one more if that one took away more than rounding: more than half of the square
    of the norm. So ``rows`` may hold deflated vectors as well.

    Args:
        rows: ``(m, ld)``, orthonormal, float32 or float64, ``m >= 1``; at least 2 with
            ``previous_beta``.
        vector: ``w``, shape ``(n,)``. On return the next vector, or zeros if the space is
            exhausted (the rank rule of :func:`orthonormalise_`).
        previous_beta: The last step's ``beta``, as a number or as it was returned: a GPU then
            need not be waited for.

    Returns:
        ``alpha`` ``()``, ``beta`` ``()`` (0 when exhausted) and every coefficient removed
        ``(m,)``, of which ``alpha`` is the last; float64.
    """
    before = norm(vector)
    if previous_beta is None:
        removed, _ = _project_once(rows, vector)
    else:
        removed = vector.new_zeros(rows.shape[0], dtype=torch.float64)
        removed[-2] = previous_beta
        apply_(rows[-2:-1], removed[-2:-1], vector)
        removed[-1:] = _project_once(rows[-1:], vector)[0]
    passed = norm(vector)
    removed += _project_once(rows, vector)[0]
    if float(norm(vector)) < 0.5**0.5 * float(passed):
        removed += _project_once(rows, vector)[0]
    beta = normalise_(vector, before, rows.shape[0])
    return removed[-1], beta, removed


def orthonormalise_block_(rows: Tensor, block: Tensor) -> Tensor:
    """Make ``block`` ``(b, n)`` orthonormal, and orthogonal to orthonormal ``rows``, in place.

    Gram-Schmidt in the given order, by Cholesky QR: see :mod:`curvlab_kernels.block`. A vector
    whose norm, after removal of ``rows`` and of the kept vectors before it, is at most
    ``rank_tolerance`` times its norm before is dropped and set to zero.

    Returns:
        Which vectors were kept: bool ``(b,)``.
    """
    return orthonormalise_with_(lambda vectors: _project_once(rows, vectors), block, rows.shape[0])


def mix_(rows: Tensor, mixing: Tensor, into: Tensor) -> None:
    """``into = mixing @ rows``, summed in float64 and rounded once; may be in place.

    Args:
        rows: ``(m, ld)``, float32 or float64.
        mixing: ``(k, m)`` float64.
        into: ``(k, n)`` of the rows' dtype; may be the beginning of the first ``k`` rows.
    """
    for columns in _chunks(into.shape[1]):
        into[:, columns] = (mixing @ rows[:, columns].double()).to(into.dtype)


def _project_once(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, bool]:
    """One pass: what was removed, and whether so much that another should follow."""
    squares = norm(vectors).square()
    products = coefficients(rows, vectors, scales)
    removed = solve(factor, products)
    apply_(rows, removed, vectors, scales)
    return removed, mostly_removed(squares, products, removed)


def _chunks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK))


def _values(rows: Tensor, scales: Tensor | None, columns: slice) -> Tensor:
    values = rows[:, columns].double()
    return values if scales is None else values * expand_scales(scales, columns)
