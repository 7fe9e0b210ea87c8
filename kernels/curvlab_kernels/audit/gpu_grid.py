"""Times of every operation on a GPU, over storage, length and rows, against two measures.

One is the time of a copy of the same bytes, the other torch's own way (``mv``, ``addmv``, ``mm``)
on rows of the vectors' dtype. A number that disagrees with torch's is not timed. The limits below
were set without a GPU: whoever first runs this may find reasons to move them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from curvlab_kernels.audit.agreement import STORAGE
from curvlab_kernels.audit.gpu_checks import Timer, seconds
from curvlab_kernels.formats import dequantise, padded, quantise

LENGTHS = (18_010, 500_003, 12_400_003)
ROWS = (5, 20, 100, 400)
BLOCK = 8  # vectors of a block
PIECES = 150  # tensors of a list
FLOATS = (torch.float32, torch.float64)
LEAST_OF_COPY = 0.6  # of a copy's bandwidth, where an operation moves enough for launches to vanish
MOST_OF_TORCH = 1.1  # of torch's time, anywhere
ENOUGH = 1 << 25  # bytes
AGREES = {torch.float32: 1e-4, torch.float64: 1e-11}  # of the vector's norm, for both together


@dataclass(frozen=True, slots=True)
class Bench:
    """One operation: ours, torch's, and what any implementation has to move."""

    ours: Callable[[], object]
    torchs: Callable[[], object]
    bytes: int
    same: Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Data:
    """Rows as stored, their values in the vectors' dtype for torch, and a vector."""

    rows: Tensor
    scales: Tensor | None
    plain: Tensor
    vector: Tensor

    @property
    def stored(self) -> int:
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.rows.nbytes + scales

    def list(self) -> list[Tensor]:
        size = -(-self.vector.numel() // PIECES)
        return [piece.clone() for piece in torch.split(self.vector, size)]

    def block(self) -> Tensor:
        return self.vector.expand(BLOCK, -1).contiguous()


def data(n: int, m: int, dtype: torch.dtype, device: torch.device) -> Data:
    """Random rows of norm one: time does not ask for orthogonal ones, which would need room."""
    place = device if device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(place).manual_seed(0)
    work = torch.float64 if dtype == torch.float64 else torch.float32

    def random() -> Tensor:
        return torch.randn(n, generator=generator, device=place, dtype=work).to(device)

    plain = torch.stack([random() / math.sqrt(n) for _ in range(m)])
    if dtype == work:
        rows, scales = torch.zeros(m, padded(n), dtype=dtype, device=device), None
        rows[:, :n] = plain
    else:
        rows, scales = quantise(plain, dtype)
        plain = dequantise(rows, scales, n)
    return Data(rows, scales, plain, random())


def _project(d: Data) -> Bench:
    from curvlab_kernels import _triton

    def ours(vector: Tensor) -> Tensor:
        removed: Tensor = _triton.project_(d.rows, vector, None, d.scales)
        return removed

    def torchs() -> Tensor:
        found = torch.mv(d.plain, d.vector)
        d.vector.addmv(d.plain.T, found, alpha=-1)
        return found

    moved = 2 * d.stored + 3 * d.vector.nbytes
    work = d.vector.clone()
    return Bench(lambda: ours(work), torchs, moved, lambda: (ours(d.vector.clone()), torchs()))


def _coefficients(d: Data) -> Bench:
    from curvlab_kernels import _triton

    def ours() -> Tensor:
        found: Tensor = _triton.coefficients(d.rows, d.vector, d.scales)
        return found

    def torchs() -> Tensor:
        return torch.mv(d.plain, d.vector)

    return Bench(ours, torchs, d.stored + d.vector.nbytes, lambda: (ours(), torchs()))


def _apply(d: Data) -> Bench:
    from curvlab_kernels import _triton

    weights = torch.linspace(-1, 1, len(d.rows), dtype=torch.float64).to(d.vector.device)

    def ours(vector: Tensor) -> Tensor:
        _triton.apply_(d.rows, weights, vector, d.scales)
        return vector

    def torchs() -> Tensor:
        return d.vector.addmv(d.plain.T, weights.to(d.plain.dtype), alpha=-1)

    moved, work = d.stored + 2 * d.vector.nbytes, d.vector.clone()
    return Bench(lambda: ours(work), torchs, moved, lambda: (ours(d.vector.clone()), torchs()))


def _block(d: Data) -> Bench:
    from curvlab_kernels import _triton

    block = d.block()

    def ours(vectors: Tensor) -> Tensor:
        removed: Tensor = _triton.project_(d.rows, vectors, None, d.scales)
        return removed

    def torchs() -> Tensor:
        found = torch.mm(block, d.plain.T)
        block.addmm(found, d.plain, alpha=-1)
        return found

    moved, work = 2 * d.stored + 3 * block.nbytes, block.clone()
    return Bench(lambda: ours(work), torchs, moved, lambda: (ours(block.clone()), torchs()))


def _list(d: Data) -> Bench:
    from curvlab_kernels import _triton

    work = d.list()

    def ours(tensors: list[Tensor]) -> Tensor:
        removed: Tensor = _triton.project_list_(d.rows, tensors, None, d.scales)
        return removed

    def torchs() -> Tensor:
        flat = torch.cat(work)
        found = torch.mv(d.plain, flat)
        flat.addmv_(d.plain.T, found, alpha=-1)
        torch._foreach_copy_(work, list(torch.split(flat, [each.numel() for each in work])))
        return found

    moved = 2 * d.stored + 3 * d.vector.nbytes
    return Bench(
        lambda: ours(work),
        torchs,
        moved,
        lambda: (ours(d.list()), torch.mv(d.plain, d.vector)),
    )


def _sgd(d: Data) -> Bench:
    from curvlab_kernels import _triton

    parameters, gradients, momenta = d.list(), d.list(), d.list()

    def ours() -> Tensor:
        lists = (parameters, gradients, momenta)
        removed: Tensor = _triton.sgd_step_(d.rows, *lists, 0.0, 0.0, 0.0, None, d.scales)
        return removed

    def torchs() -> Tensor:
        flat = torch.cat(gradients)
        found = torch.mv(d.plain, flat)
        flat.addmv_(d.plain.T, found, alpha=-1)
        steps = list(torch.split(flat, [each.numel() for each in gradients]))
        torch._foreach_mul_(momenta, 0.0)
        torch._foreach_add_(momenta, steps)
        torch._foreach_add_(parameters, momenta, alpha=0.0)
        return found

    moved = 2 * d.stored + 7 * d.vector.nbytes
    return Bench(ours, torchs, moved, lambda: (ours(), torchs()))


def _orthonormalise(d: Data) -> Bench:
    from curvlab_kernels import _triton

    work = d.vector.clone()

    def ours() -> Tensor:
        work.copy_(d.vector)
        removed: Tensor = _triton.orthonormalise_(d.rows, work)[0]
        return removed

    def torchs() -> Tensor:
        rest, total = d.vector, torch.zeros_like(d.plain[:, 0])
        for _ in range(2):
            found = torch.mv(d.plain, rest)
            rest = rest.addmv(d.plain.T, found, alpha=-1)
            total += found
        rest.div_(torch.linalg.vector_norm(rest))
        return total

    moved = 3 * d.stored + 5 * d.vector.nbytes
    return Bench(ours, torchs, moved, lambda: (ours(), torchs()))


def _lanczos(d: Data) -> Bench:
    from curvlab_kernels import _triton

    work = d.vector.clone()
    beta = torch.ones((), dtype=torch.float64, device=work.device)

    def ours() -> Tensor:
        work.copy_(d.vector)
        removed: Tensor = _triton.lanczos_step_(d.rows, work, beta)[2]
        return removed

    def torchs() -> Tensor:
        alpha = torch.dot(d.plain[-1], d.vector)
        rest = d.vector - d.plain[-2] - alpha * d.plain[-1]
        found = torch.mv(d.plain, rest)
        rest = rest.addmv(d.plain.T, found, alpha=-1)
        rest = rest / torch.linalg.vector_norm(rest)
        found[-2] += 1.0
        found[-1] += alpha
        return found

    moved = 2 * d.stored + 5 * d.vector.nbytes
    return Bench(ours, torchs, moved, lambda: (ours(), torchs()))


def _mix(d: Data) -> Bench:
    from curvlab_kernels import _triton

    few = min(len(d.rows), 5)
    mixing = torch.eye(few, len(d.rows), dtype=torch.float64).to(d.rows.device) * 0.5
    into = torch.empty_like(d.plain[:few])

    def ours() -> Tensor:
        _triton.mix_(d.rows, mixing, into)
        return into[:, :1000]

    def torchs() -> Tensor:
        return torch.mm(mixing.to(d.plain.dtype), d.plain)[:, :1000]

    return Bench(ours, torchs, d.stored + into.nbytes, lambda: (ours(), torchs()))


OPERATIONS: dict[str, tuple[tuple[torch.dtype, ...], Callable[[Data], Bench]]] = {
    "project": (STORAGE, _project),
    "coefficients": (STORAGE, _coefficients),
    "apply": (STORAGE, _apply),
    "project a block": (STORAGE, _block),
    "project a list": (STORAGE, _list),
    "SGD step": (STORAGE, _sgd),
    "orthonormalise": (FLOATS, _orthonormalise),
    "Lanczos step": (FLOATS, _lanczos),
    "mix rows": (FLOATS, _mix),
}


def grid() -> Iterator[tuple[str, Callable[[torch.device], str]]]:
    """A check for each operation, dtype and length, which runs over the numbers of rows."""
    for operation, (dtypes, _) in OPERATIONS.items():
        for dtype in dtypes:
            for n in LENGTHS:
                name = f"speed of {operation}, {str(dtype).removeprefix('torch.')}, {n} columns"
                yield name, partial(speed, operation, n, dtype)


def speed(
    operation: str,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: tuple[int, ...] = ROWS,
    time: Timer = seconds,
) -> str:
    """A line for each number of rows; raises with all of them if one is outside the limits."""
    lines, outside = [], False
    for m in rows:
        case = data(n, m, dtype, device)
        line, good = judged(OPERATIONS[operation][1](case), case, device, time)
        lines.append(f"{m} rows: {line}")
        outside |= not good
    assert not outside, "; ".join(lines)
    return "; ".join(lines)


def judged(bench: Bench, d: Data, device: torch.device, time: Timer) -> tuple[str, bool]:
    """What one case took, in words, and whether that is within the limits."""
    mine, theirs = (each.double().flatten() for each in bench.same())
    error = float((mine - theirs).abs().max() / torch.linalg.vector_norm(d.vector.double()))
    if not error <= AGREES[d.vector.dtype]:
        return f"WRONG: differs from torch by {error:.1e}, not timed", False
    took, rival = time(bench.ours, device), time(bench.torchs, device)
    half = torch.empty(max(bench.bytes // 2, 1), dtype=torch.int8, device=device)
    copied = time(half.clone, device)
    share, ratio = copied / took, took / rival
    line = f"{took * 1e6:.0f} us, {share:.2f} of a copy, {ratio:.2f} of torch"
    slow = bench.bytes >= ENOUGH and share < LEAST_OF_COPY
    slower = ratio > MOST_OF_TORCH
    if slow:
        line += f" (less than {LEAST_OF_COPY} of a copy)"
    if slower:
        line += f" (more than {MOST_OF_TORCH} of torch)"
    return line, not slow and not slower
