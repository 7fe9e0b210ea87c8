"""The kernels as users call them: arguments are checked once, here, and the back end is chosen.

``reference`` describes every function; here are the same names and signatures. ``TABLE`` is the one
list of them. None has a derivative: a tensor that autograd watches is refused.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from curvlab_kernels import checks
from curvlab_kernels.formats import padded

__all__ = ["padded"]  # beside what TABLE names

# Every operation: the module that has it for CPUs, and the one for GPUs.
TABLE = {
    "apply_": ("_cpu.products", "_triton.apply"),
    "coefficients": ("_cpu.products", "_triton.dots"),
    "dequantise": ("formats", "_triton.quantise"),
    "lanczos_step_": ("_cpu.gram_schmidt", "_triton.lanczos_step"),
    "mix_": ("_cpu.products", "_triton.apply"),
    "norm": ("_cpu.gram_schmidt", "_triton.norms"),
    "orthonormalise_": ("_cpu.gram_schmidt", "_triton.orthonormalise"),
    "orthonormalise_block_": ("_cpu.gram_schmidt", "_triton.block"),
    "project_": ("_cpu.products", "_triton.project"),
    "project_list_": ("_cpu.products", "_triton.project_list"),
    "quantise": ("formats", "_triton.quantise"),
    "sgd_step_": ("_cpu.sgd", "_triton.sgd_step"),
}


def operations(device_type: str) -> dict[str, Callable[..., Any]]:
    """Every operation of the back end for ``"cpu"`` or ``"cuda"``, by name."""
    column = ("cpu", "cuda").index(device_type)
    modules = {name: f"curvlab_kernels.{row[column]}" for name, row in TABLE.items()}
    return {name: getattr(importlib.import_module(m), name) for name, m in modules.items()}


@functools.cache
def backend(device_type: str) -> ModuleType:
    """The package with the operations for a device, imported on first use."""
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"there are kernels for cpu and cuda; the tensors are on {device_type}")
    name = "_triton" if device_type == "cuda" else "_cpu"
    return importlib.import_module(f"curvlab_kernels.{name}")


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
    """``c = M g``, float64: ``(m,)`` for ``vectors`` ``(n,)``, ``(b, m)`` for ``(b, n)``."""
    checks.check_basis(rows, None, scales)
    checks.check_vectors(rows, vectors)
    found: Tensor = _kernels(rows).coefficients(rows, vectors.contiguous(), scales)
    return found


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """``g -= M' c`` in place; ``coefficients`` float64, ``(m,)`` or ``(b, m)``."""
    checks.check_basis(rows, None, scales)
    checks.check_vectors(rows, vectors)
    checks.check_in_place(vectors, rows)
    checks.check_coefficients(rows, coefficients, vectors.shape[:-1])
    _kernels(rows).apply_(rows, coefficients, vectors, scales)


def project_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """``g -= M' G^-1 M g`` in place; returns what was subtracted, ``G^-1 M g``, float64."""
    checks.check_basis(rows, factor, scales)
    checks.check_vectors(rows, vectors)
    checks.check_in_place(vectors, rows)
    removed: Tensor = _kernels(rows).project_(rows, vectors, factor, scales)
    return removed


def project_list_(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """:func:`project_` on tensors of any shapes, seen as one vector in their order, in place."""
    checks.check_basis(rows, factor, scales)
    checks.check_list(rows, tensors, "tensors")
    sizes = checks.check_length(rows, tensors, "tensors")
    checks.check_apart(rows, sizes, tensors=tensors)
    removed: Tensor = _kernels(rows).project_list_(rows, tensors, factor, scales)
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
    checks.check_list(rows, parameters, "parameters")
    checks.check_list(rows, gradients, "gradients")
    checks.check_alike(parameters, gradients, "parameters and gradients")
    checks.check_list(rows, momenta, "momenta")
    numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    hyper = [checks.number(value, name) for name, value in numbers.items()]
    if momenta:
        checks.check_alike(parameters, momenta, "parameters and momenta")
    elif hyper[2] != 0.0:
        raise ValueError(f"momentum={momentum} needs momenta: one tensor of zeros per parameter")
    sizes = checks.check_length(rows, parameters, "parameters")
    checks.check_apart(rows, sizes, gradients, parameters=parameters, momenta=momenta)
    removed: Tensor = _kernels(rows).sgd_step_(
        rows, parameters, gradients, momenta, *hyper, factor, scales
    )
    return removed


def orthonormalise_(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """CGS2 of ``vector`` ``(n,)`` against orthonormal rows; see ``reference``."""
    checks.check_orthonormal(rows, vector, 1)
    result: tuple[Tensor, Tensor] = _kernels(rows).orthonormalise_(rows, vector)
    return result


def orthonormalise_block_(rows: Tensor, block: Tensor) -> Tensor:
    """Gram-Schmidt of ``block`` ``(b, n)`` against rows and itself; returns which were kept."""
    checks.check_orthonormal(rows, block, 2)
    kept: Tensor = _kernels(rows).orthonormalise_block_(rows, block)
    return kept


def lanczos_step_(
    rows: Tensor, vector: Tensor, previous_beta: float | Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The next Lanczos vector from ``w = A rows[-1]``; alpha, beta, coefficients removed."""
    checks.check_orthonormal(rows, vector, 1)
    if isinstance(previous_beta, Tensor):  # it stays on its device: to read it, the host would wait
        checks.check_tensors(previous_beta=previous_beta)
        if previous_beta.numel() != 1:
            raise ValueError(f"previous_beta is one number; got {tuple(previous_beta.shape)}")
    elif previous_beta is not None:
        previous_beta = checks.number(previous_beta, "previous_beta")
    needed = 1 if previous_beta is None else 2
    if rows.shape[0] < needed:
        raise ValueError(
            f"lanczos_step_ needs at least {needed} row(s) "
            f"{'' if previous_beta is None else 'with previous_beta '}; got {rows.shape[0]}"
        )
    result: tuple[Tensor, Tensor, Tensor]
    result = _kernels(rows).lanczos_step_(rows, vector, previous_beta)
    return result


def mix_(rows: Tensor, mixing: Tensor, into: Tensor) -> None:
    """``into = mixing @ rows``, summed in float64; may be in place, for a thick restart."""
    checks.check_mixing(rows, mixing, into)
    _kernels(rows).mix_(rows, mixing, into)


def norm(vector: Tensor) -> Tensor:
    """Euclidean norm of ``(n,)``, or of every row of ``(b, n)``, accumulated in float64.

    On a CPU that of a float64 vector may be any number; on a GPU it is infinite above 1e154, and 0
    or short of digits below 1e-146, where squares are: the host would have to wait to see it.
    """
    checks.check_tensors(vector=vector)
    if vector.dim() not in (1, 2) or vector.dtype not in checks.WORKING:
        raise ValueError(
            f"norm needs float32 or float64 of shape (n,) or (b, n); got {vector.dtype}, "
            f"{tuple(vector.shape)}"
        )
    result: Tensor = _kernels(vector).norm(vector.contiguous())
    return result


def quantise(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Store ``vectors`` ``(m, n)`` as padded rows of ``dtype``, with scales where it has them."""
    checks.check_tensors(vectors=vectors)
    if vectors.dim() != 2 or vectors.dtype not in checks.WORKING:
        raise ValueError(
            f"quantise needs float32 or float64 vectors (m, n); got {vectors.dtype}, "
            f"{tuple(vectors.shape)}"
        )
    if dtype not in checks.STORAGE:
        raise TypeError(f"a basis is not stored as {dtype}")
    result: tuple[Tensor, Tensor | None] = _kernels(vectors).quantise(vectors.contiguous(), dtype)
    return result


def dequantise(rows: Tensor, scales: Tensor | None, n: int) -> Tensor:
    """The values of stored rows: ``(m, n)``, float32 (float64 for float64 rows)."""
    checks.check_basis(rows, None, scales)
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= rows.shape[1]:
        raise ValueError(
            f"n must be a whole number up to the rows' length {rows.shape[1]}; got {n}"
        )
    result: Tensor = _kernels(rows).dequantise(rows, scales, n)
    return result


def _kernels(tensor: Tensor) -> ModuleType:
    return backend(tensor.device.type)
