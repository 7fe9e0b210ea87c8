"""What the kernels need of their arguments, said once and in words."""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import isfinite
from numbers import Real
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from curvlab_kernels.formats import BLOCK, LEAST_CAPABILITY, LEVELS, PADDING
from curvlab_kernels.spans import meet, ranges_differ, repeats, span

STORAGE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *LEVELS)
WORKING = (torch.float32, torch.float64)
_READ = ("rows", "gradients")  # what changes in place has other names


class Stored(Protocol):
    """Rows, whatever holds them."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def check_tensors(**given: Tensor) -> None:
    """Tensors in plain memory that autograd does not watch; by their names."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "the kernels have no derivative: call them within torch.no_grad(), or pass "
                f"{name}.detach()"
            )
        if not _plain(tensor):
            raise _not_plain(tensor, name)


def _plain(tensor: Tensor) -> bool:
    """Whether memory holds the tensor's own numbers, each of them, and not their negatives."""
    return tensor.layout is torch.strided and not tensor.is_neg() and not tensor.is_nested


def _not_plain(tensor: Tensor, name: str) -> ValueError:
    if tensor.layout is torch.strided and not tensor.is_nested:
        return ValueError(f"{name} is a view whose signs are turned: pass {name}.resolve_neg()")
    what = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").strip("_")
    return ValueError(f"{name} must be a dense tensor; got one whose layout is {what}")


def number(value: float | Tensor, name: str) -> float:
    """``value`` as a float: a finite real number, or a tensor of one."""
    if (
        isinstance(value, Tensor)
        and _plain(value)
        and value.numel() == 1
        and value.is_floating_point()
    ):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        what = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{name} must be one real number; got {what}")
    if not isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")
    return float(value)


def check_basis(rows: Tensor, factor: Tensor | None, scales: Tensor | None) -> None:
    """``rows`` ``(m, ld)``, with the scales their dtype needs and a Gram factor that fits."""
    check_tensors(rows=rows)
    if factor is not None:
        check_tensors(factor=factor)
    if scales is not None:
        check_tensors(scales=scales)
    if rows.dim() != 2 or rows.shape[1] % PADDING or not rows.is_contiguous():
        raise ValueError(
            f"rows must be contiguous, of shape (m, ld) with ld a multiple of {PADDING} (pad with "
            f"zeros: padded(n) gives ld); got {tuple(rows.shape)}, strides {rows.stride()}"
        )
    if rows.dtype not in STORAGE:
        raise TypeError(f"rows must be one of {_names(STORAGE)}; got {rows.dtype}")
    if rows.is_cuda and rows.dtype in LEAST_CAPABILITY:
        check_capability(rows.dtype, torch.cuda.get_device_capability(rows.device))
    m, ld = rows.shape
    if rows.dtype in LEVELS:
        if scales is None:
            raise ValueError(f"{rows.dtype} rows need the scales that quantise returned with them")
        blocks = -(-ld // BLOCK)
        if scales.shape != (m, blocks) or scales.dtype != torch.float32:
            raise ValueError(
                f"scales of {m} rows of {ld} elements are float32 of shape ({m}, {blocks}); got "
                f"{scales.dtype}, {tuple(scales.shape)}"
            )
        if not scales.is_contiguous() or scales.device != rows.device:
            raise ValueError(f"scales must be contiguous and on {rows.device}, as rows are")
    elif scales is not None:
        raise ValueError(f"{rows.dtype} rows have no scales; pass scales=None")
    if factor is not None and (
        factor.shape != (m, m) or factor.dtype != torch.float64 or factor.device != rows.device
    ):
        raise ValueError(
            f"factor must be the float64 Cholesky factor ({m}, {m}) of the rows' Gram matrix on "
            f"{rows.device}; got {factor.dtype}, {tuple(factor.shape)} on {factor.device}"
        )


def check_capability(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """That a GPU of this compute capability can read ``dtype``."""
    least = LEAST_CAPABILITY.get(dtype, (8, 0))
    if capability < least:
        raise TypeError(
            f"{dtype} needs a GPU of compute capability {least[0]}.{least[1]}; this one has "
            f"{capability[0]}.{capability[1]}. Store the basis as int8 or float8_e5m2"
        )


def check_vectors(rows: Tensor, vectors: Tensor) -> None:
    """``vectors`` ``(n,)`` or ``(b, n)`` of a working dtype, on the rows' device, ``n <= ld``."""
    check_tensors(vectors=vectors)
    if vectors.dim() not in (1, 2) or vectors.shape[-1] > rows.shape[1]:
        raise ValueError(
            f"vectors must be (n,) or (b, n) with n at most the rows' length {rows.shape[1]}; got "
            f"{tuple(vectors.shape)}"
        )
    _check_working(rows, vectors, "vectors")


def check_in_place(vectors: Tensor, rows: Tensor | None = None) -> None:
    """Contiguous memory, none of it of the rows."""
    if not vectors.is_contiguous():
        raise ValueError(
            f"a vector that changes in place must be contiguous; got strides {vectors.stride()} "
            f"for shape {tuple(vectors.shape)}"
        )
    if rows is not None:
        check_not_of(rows, vectors)


def check_not_of(rows: Tensor, vectors: Tensor) -> None:
    """:func:`check_in_place` of contiguous vectors, as often as a small model projects."""
    distance = vectors.data_ptr() - rows.data_ptr()
    first = vectors if distance < 0 else rows
    # nbytes costs three times as much as numel
    if abs(distance) < first.numel() * first.itemsize and meet(rows, vectors):
        raise ValueError(
            "rows and the vector that changes in place share memory: pass a clone of the vector"
        )


def check_list(rows: Stored, tensors: Sequence[Tensor], name: str) -> None:
    """Tensors of any shapes, of one working dtype, on the rows' device."""
    if not isinstance(tensors, Sequence):
        raise TypeError(f"{name} must be a list of tensors; got {type(tensors).__name__}")
    for index, tensor in enumerate(tensors):
        if tensor is None:
            raise TypeError(
                f"{name}[{index}] is None, and {name} must be tensors. A parameter without a "
                f"gradient has None: leave it out, or pass zeros in its place"
            )
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}[{index}] must be a tensor; got {type(tensor).__name__}")
    if not tensors:
        return
    _check_working(rows, tensors[0], f"{name}[0]")
    dtype, device, watched = tensors[0].dtype, rows.device, torch.is_grad_enabled()
    for index, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            raise TypeError(
                f"{name} must share one dtype; {name}[0] is {dtype} and {name}[{index}] is "
                f"{tensor.dtype}"
            )
        if tensor.device != device:
            raise ValueError(f"{name}[{index}] is on {tensor.device}, rows on {device}: move one")
        if watched and tensor.requires_grad:
            raise ValueError(f"{name}[{index}] requires a gradient: call within torch.no_grad()")
        if not _plain(tensor):
            raise _not_plain(tensor, f"{name}[{index}]")


def check_length(rows: Tensor, tensors: Sequence[Tensor], name: str) -> tuple[int, ...]:
    """That tensors together have at most the rows' length; the elements of each."""
    sizes = tuple(map(Tensor.numel, tensors))
    if (total := sum(sizes)) > rows.shape[1]:
        raise ValueError(
            f"{name} have {total} elements together, more than the rows' length {rows.shape[1]}"
        )
    return sizes


def check_apart(
    rows: Tensor,
    sizes: tuple[int, ...],
    gradients: Sequence[Tensor] = (),
    **written: Sequence[Tensor],
) -> None:
    """That what changes in place has memory of its own, and meets nothing that is read.

    The lists are of one dtype, and ``sizes`` the elements of each one's tensors. A gradient may be
    the very tensor that changes in its place of the list: it is read before.
    """
    tensors = [*gradients, *chain.from_iterable(written.values())]
    if not (all(map(Tensor.is_contiguous, tensors)) and ranges_differ(rows, tensors, sizes)):
        check_places({"rows": [rows], "gradients": gradients, **written})


def check_places(lists: Mapping[str, Sequence[Tensor]]) -> None:
    """:func:`check_apart` to the byte, with the names of what meets."""
    order = list(lists)
    places: list[tuple[int, int, str, int, Tensor]] = []
    for name, tensors in lists.items():
        for index, tensor in enumerate(tensors):
            places.append((*span(tensor), name, index, tensor))
            if name not in _READ and repeats(tensor):
                raise ValueError(
                    f"{name}[{index}] changes in place and holds one number twice: pass a clone"
                )
    still: list[tuple[int, int, str, int, Tensor]] = []  # those whose range has not ended
    for place in sorted(places, key=itemgetter(0)):
        begin, _, name, index, tensor = place
        still = [each for each in still if each[1] > begin]
        for _, _, other, at, each in still:
            if name in _READ and other in _READ:
                continue
            one = tensor.data_ptr() == each.data_ptr() and tensor.stride() == each.stride()
            allowed = one and at == index and "gradients" in (name, other)
            if not allowed and meet(tensor, each):
                both = sorted(((other, at), (name, index)), key=lambda named: order.index(named[0]))
                names = [what if what == "rows" else f"{what}[{i}]" for what, i in both]
                raise ValueError(
                    f"{names[0]} and {names[1]} share memory, and {names[1]} changes in place: "
                    f"pass a clone, or each number once"
                )
        still.append(place)


def check_alike(first: Sequence[Tensor], second: Sequence[Tensor], names: str) -> None:
    """Two lists of one dtype, tensor by tensor of one shape."""
    if first and second and first[0].dtype != second[0].dtype:
        raise TypeError(
            f"{names} must have one dtype; got {first[0].dtype} and {second[0].dtype}: convert one"
        )
    if [tensor.shape for tensor in first] != [tensor.shape for tensor in second]:
        raise ValueError(
            f"{names} must agree in number and shapes; got {[tuple(t.shape) for t in first]} and "
            f"{[tuple(t.shape) for t in second]}"
        )


def check_orthonormal(rows: Tensor, vectors: Tensor, dimensions: int) -> None:
    """Rows of the vectors' own float dtype: Gram-Schmidt cannot work against rounded ones."""
    check_basis(rows, None, None)
    check_vectors(rows, vectors)
    check_in_place(vectors, rows)
    if rows.dtype != vectors.dtype:
        raise TypeError(
            f"Gram-Schmidt needs rows of the vectors' dtype; got {rows.dtype} and {vectors.dtype}"
        )
    if vectors.dim() != dimensions:
        raise ValueError(f"expected {dimensions} dimension(s); got {tuple(vectors.shape)}")


def check_mixing(rows: Tensor, mixing: Tensor, into: Tensor) -> None:
    """``into`` ``(k, n)`` beside ``rows`` of its own float dtype, ``mixing`` ``(k, m)`` float64."""
    check_basis(rows, None, None)
    check_tensors(mixing=mixing, into=into)
    if rows.dtype not in WORKING or into.dtype != rows.dtype:
        raise TypeError(
            f"mix_ needs rows and into of one dtype, float32 or float64; got {rows.dtype} and "
            f"{into.dtype}"
        )
    k = len(mixing) if mixing.dim() else 0
    if mixing.shape != (k, rows.shape[0]) or mixing.dtype != torch.float64:
        raise ValueError(
            f"mixing must be float64 of shape (k, {rows.shape[0]}); got {mixing.dtype}, "
            f"{tuple(mixing.shape)}"
        )
    fits = into.dim() == 2 and len(into) == k and into.shape[1] <= rows.shape[1]
    apart = fits and into.stride(1) == 1 and (k < 2 or into.stride(0) >= into.shape[1])
    if not apart:
        raise ValueError(
            f"into must be ({k}, n) with contiguous rows and n at most {rows.shape[1]}; got "
            f"{tuple(into.shape)}, strides {into.stride()}"
        )
    if not mixing.device == into.device == rows.device:
        raise ValueError(f"mixing on {mixing.device}, into on {into.device}, rows on {rows.device}")
    # Columns are mixed some at a time: each may overwrite what it is made of and nothing else.
    ld, moved = max(rows.shape[1], 1), into.data_ptr() - rows.data_ptr()
    in_place = moved % (ld * rows.itemsize) == 0 and (k < 2 or into.stride(0) % ld == 0)
    if not in_place and meet(rows, into):
        raise ValueError(
            "rows and into share memory, but not column by column: pass into = rows[:k, :n], or "
            "memory of its own"
        )
    if meet(mixing, into):
        raise ValueError("mixing and into share memory: pass a clone of mixing")


def check_coefficients(rows: Tensor, coefficients: Tensor, lead: torch.Size) -> None:
    """``coefficients`` float64, one per row, for every vector."""
    check_tensors(coefficients=coefficients)
    needed = (*lead, rows.shape[0])
    if coefficients.shape != needed or coefficients.dtype != torch.float64:
        raise ValueError(
            f"coefficients must be float64 of shape {needed}; got {coefficients.dtype}, "
            f"{tuple(coefficients.shape)}"
        )
    if coefficients.device != rows.device:
        raise ValueError(f"coefficients are on {coefficients.device}, rows on {rows.device}")


def _check_working(rows: Stored, tensor: Tensor, name: str) -> None:
    if tensor.dtype not in WORKING:
        raise TypeError(f"{name} must be float32 or float64; got {tensor.dtype}")
    if rows.dtype == torch.float64 and tensor.dtype != torch.float64:
        raise TypeError(f"float64 rows need float64 {name}; got {tensor.dtype}")
    if tensor.device != rows.device:
        raise ValueError(f"{name} on {tensor.device}, rows on {rows.device}: move one")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
