"""What the audit looks at: every operation with every storage, as its launchers would launch it.

Launchers run under :func:`recorded` on meta tensors, so that what is compiled, counted and checked
is what they would send to a GPU, at any size and without memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab_kernels import _triton
from curvlab_kernels._triton.apply import mix
from curvlab_kernels._triton.lanczos_step import third_pass, two_passes
from curvlab_kernels._triton.launch import Launch, recorded
from curvlab_kernels._triton.norms import normalise_, scale
from curvlab_kernels.formats import LEVELS, padded

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float64,
)
SHORT = 18_010  # a vector so short that the second pass adds up the partial sums
LONG = 12_400_003  # a ViT; odd, so that nothing divides it
FAR = 2**33 + 3  # columns beyond 32 bits


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes and storage of one case."""

    n: int
    m: int
    dtype: torch.dtype
    vectors: torch.dtype

    def rows(self) -> Tensor:
        return torch.empty(self.m, padded(self.n), dtype=self.dtype, device="meta")

    def scales(self) -> Tensor | None:
        if self.dtype not in LEVELS:
            return None
        return torch.empty(self.m, -(-padded(self.n) // 64), device="meta")

    def vector(self, count: int | None = None, aligned: bool = False) -> Tensor:
        """A vector, or ``count`` of them, each after the other or each on a multiple of 16."""
        shape = (self.n,) if count is None else (count, padded(self.n) if aligned else self.n)
        return torch.empty(shape, dtype=self.vectors, device="meta")[..., : self.n]

    def pieces(self) -> list[Tensor]:
        """The vector as a list of tensors whose borders fall anywhere."""
        sizes = [self.n // 2, 10, self.n - self.n // 2 - 10]
        return [torch.empty(size, dtype=self.vectors, device="meta") for size in sizes]


@dataclass(frozen=True, slots=True)
class Case:
    """An operation at a size, with the larger size at which its addresses are checked."""

    name: str
    problem: Problem
    far: Problem
    run: Callable[[Problem], object]
    reads: int  # of the basis, at the least
    touches: int  # reads and writes of a whole vector, at the least

    def launches(self, far: bool = False) -> list[Launch]:
        with recorded() as launches:
            self.run(self.far if far else self.problem)
        return launches

    def minimum_bytes(self) -> int:
        """What any implementation must move, if no cache holds the basis."""
        p = self.problem
        stored = p.m * p.n * p.dtype.itemsize
        scales = p.m * -(-p.n // 64) * 4 if p.dtype in LEVELS else 0
        return self.reads * (stored + scales) + self.touches * p.n * p.vectors.itemsize


def cases(n: int = LONG, m: int = 20, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Case]:
    """Every operation with every storage dtype of ``dtypes``."""
    found = []
    for dtype in dtypes:
        found += _projection(n, m, dtype)
        if dtype in (torch.float32, torch.float64):
            found += _orthogonalisation(n, m, dtype)
        if dtype in LEVELS:
            found += _storage(n, m, dtype)
    return found


def _projection(n: int, m: int, dtype: torch.dtype) -> list[Case]:
    vectors = torch.float64 if dtype == torch.float64 else torch.float32
    long, far = Problem(n, m, dtype, vectors), Problem(FAR, max(m, 9), dtype, vectors)
    short, tall = Problem(SHORT, m, dtype, vectors), Problem(60_010, 40_000, dtype, vectors)
    wide = Problem(LONG, 400, dtype, vectors)  # a list of FAR columns would need a large index
    few, far_few = Problem(n, 5, dtype, vectors), Problem(FAR, 5, dtype, vectors)
    few_long = Problem(2**29 + 3, 5, dtype, vectors)  # 2.7e9 elements
    double, far_double = (Problem(p.n, p.m, dtype, torch.float64) for p in (long, far))
    small, tall_double = (Problem(p.n, p.m, dtype, torch.float64) for p in (short, tall))
    wide_double = Problem(LONG, 400, dtype, torch.float64)
    return [
        Case("project, float64 vectors", double, far_double, lambda p: _project(p), 2, 3),
        Case("project, float64 short", small, tall_double, lambda p: _project(p), 2, 3),
        Case("project, 16 float64 vectors", double, far_double, lambda p: _project(p, 16), 2, 48),
        Case("project list, float64", double, wide_double, _project_list, 2, 3),
        Case("project list, float64 short", small, tall_double, _project_list, 2, 3),
        Case("SGD step, float64", double, wide_double, lambda p: _sgd(p, 0.1, 0.9), 2, 7),
        Case("project", long, far, lambda p: _project(p), 2, 3),
        Case("project, short", short, tall, lambda p: _project(p), 2, 3),
        Case("project, 16 vectors", long, far, lambda p: _project(p, 16), 2, 48),
        Case("project, 16 aligned", long, far, lambda p: _project(p, 16, True), 2, 48),
        Case("project, 16 short", short, tall, lambda p: _project(p, 16), 2, 48),
        Case("coefficients, 5 rows", few, far_few, _coefficients, 1, 1),
        Case("project list", long, wide, _project_list, 2, 3),
        Case("project list, short", short, tall, _project_list, 2, 3),
        Case("project list, 5 rows", few, few_long, _project_list, 2, 3),
        Case("SGD step, 5 rows", few, few_long, lambda p: _sgd(p, 0.1, 0.9), 2, 7),
        Case("SGD step", long, wide, lambda p: _sgd(p, 0.1, 0.9), 2, 7),
        Case("SGD step, short", short, tall, lambda p: _sgd(p, 0.1, 0.9), 2, 7),
        Case("SGD step, plain", long, wide, lambda p: _sgd(p, 0.0, 0.0), 2, 4),
    ]


def _orthogonalisation(n: int, m: int, dtype: torch.dtype) -> list[Case]:
    def at(rows: int, columns: int = n) -> Problem:
        return Problem(columns, rows, dtype, dtype)

    return [
        Case("orthonormalise", at(m), at(m, FAR), _orthonormalise, 3, 5),
        Case("orthonormalise, 100 rows", at(100), at(100, FAR), _orthonormalise, 3, 5),
        Case("orthonormalise, 200 rows", at(200), at(200, FAR), _orthonormalise, 3, 5),
        Case("Lanczos step", at(m), at(m, FAR), lambda p: _lanczos(p, 1.0), 2, 5),
        Case("Lanczos restart", at(m), at(m, FAR), lambda p: _lanczos(p, None), 3, 5),
        Case("Gram matrix", at(16), at(16, FAR), lambda p: _triton.gram(p.rows()), 1, 0),
        Case("mix rows", at(16), at(16, FAR), _mix, 1, 16),
        Case("scale rows", at(1), at(1, FAR), _scale, 0, 2),
        Case("norm", at(1), at(1, FAR), lambda p: _triton.norm(p.vector()), 0, 1),
    ]


def _storage(n: int, m: int, dtype: torch.dtype) -> list[Case]:
    p, far = Problem(n, m, dtype, torch.float32), Problem(FAR, m, dtype, torch.float32)
    return [
        Case("quantise", p, far, lambda p: _triton.quantise(p.vector(p.m), p.dtype), 1, m),
        Case("dequantise", p, far, _dequantise, 1, m),
    ]


def _project(p: Problem, count: int | None = None, aligned: bool = False) -> object:
    return _triton.project_(p.rows(), p.vector(count, aligned), None, p.scales())


def _coefficients(p: Problem) -> object:
    return _triton.coefficients(p.rows(), p.vector(), p.scales())


def _project_list(p: Problem) -> object:
    return _triton.project_list_(p.rows(), p.pieces(), None, p.scales())


def _sgd(p: Problem, weight_decay: float, momentum: float) -> object:
    buffers = p.pieces() if momentum else []
    arguments = (p.rows(), p.pieces(), p.pieces(), buffers, 0.1, weight_decay, momentum)
    return _triton.sgd_step_(*arguments, None, p.scales())


def _orthonormalise(p: Problem) -> object:
    return _triton.orthonormalise_(p.rows(), p.vector())


def _lanczos(p: Problem, beta: float | None) -> object:
    vector = p.vector()
    rows = p.rows()
    removed, before, passed, after = two_passes(rows, vector, beta)
    third_pass(rows, vector, removed, passed, after)
    return normalise_(vector, before, after, 0.0)


def _mix(p: Problem) -> object:
    return mix(torch.empty(p.m, p.m, dtype=torch.float64, device="meta"), p.rows(), p.n)


def _scale(p: Problem) -> object:
    vectors = p.vector(p.m)
    scale(vectors, torch.empty(p.m, dtype=torch.float64, device="meta"), vectors)
    return vectors


def _dequantise(p: Problem) -> object:
    return _triton.dequantise(p.rows(), p.scales(), p.n)
