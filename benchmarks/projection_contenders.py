"""Ways to project a gradient off m directions: curvlab's, and the styles of public code.

Every contender is built from the same orthonormal float32 rows and changes one vector in place.
They are built one at a time, because at P = 12.4 million each basis is gigabytes.
"""

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from curvlab_kernels import ops, reference
from curvlab_kernels.formats import padded
from torch import Tensor

from curvlab.basis import Basis, MappedFile, PinnedHost, Tier
from curvlab.rows.sizes import row_bytes

BASELINE = "torch float32 at its best"
GROUP = 10  # rows made orthonormal at a time: all of them at once would need several copies
NARROW = (torch.float16, torch.bfloat16, torch.int8)


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to project.

    Attributes:
        run: Changes its vector in place.
        moved: Bytes it must move, by the model ``2 m P s + 12 P``.
        flops: Products and sums.
        leak: Of a projected vector, ``|Q g'| / |g'|``.
        ours: Whether it is curvlab's.
    """

    name: str
    run: Callable[[], object]
    moved: int
    flops: int
    leak: float
    ours: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Orthonormal ``rows`` ``(m, ld)`` and a ``gradient`` ``(n,)`` with half its norm in them."""

    rows: Tensor
    gradient: Tensor

    @property
    def m(self) -> int:
        return self.rows.shape[0]

    @property
    def n(self) -> int:
        return self.gradient.shape[0]

    @property
    def flops(self) -> int:
        return 4 * self.m * self.n

    def leak(self, project: Callable[[Tensor], object]) -> float:
        """``|Q g'| / |g'|`` after ``project`` changed a copy of the gradient."""
        changed = self.gradient.clone()
        project(changed)
        # a span at a time: float64 copies of all rows would be twice as large as they are
        inside = torch.zeros(self.m, dtype=torch.float64)
        for start in range(0, self.n, 1 << 20):
            span = slice(start, min(start + (1 << 20), self.n))
            inside += self.rows[:, span].double() @ changed[span].double()
        return float(inside.norm() / reference.norm(changed))


def problem(n: int, m: int, seed: int = 0) -> Problem:
    """Random orthonormal rows, and a gradient of which half of the norm lies in them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(m, padded(n))
    for target in rows:
        target[:n] = torch.randn(n, generator=generator)
    for start in range(0, m, GROUP):
        block = rows[start : start + GROUP, :n].contiguous()  # itself, if nothing is padded
        ops.orthonormalise_block_(rows[:start], block)
        rows[start : start + GROUP, :n] = block
    gradient = torch.randn(n, generator=generator)
    inside = torch.randn(m, generator=generator, dtype=torch.float64)
    inside *= float(ops.norm(gradient)) / float(inside.norm())
    ops.apply_(rows, -inside, gradient)
    return Problem(rows, gradient)


def torch_rows(given: Problem) -> Contender:
    """One matrix-vector product each way."""
    rows = given.rows[:, : given.n]

    def project(vector: Tensor) -> None:
        vector.addmv_(rows.T, torch.mv(rows, vector), alpha=-1)

    return _contender("torch float32, rows, mv", given, project, torch.float32, ours=False)


def curvlab(
    given: Problem, dtype: torch.dtype, tier: Tier | None = None, where: str = ""
) -> Contender:
    """A :class:`Basis` of ``dtype`` in ``tier``."""
    basis = stored(given, dtype, tier)
    name = f"curvlab {str(dtype).removeprefix('torch.')}{where}"
    return _contender(name, given, basis.project_out_, dtype, ours=True)


def curvlab_list(given: Problem) -> Contender:
    """The same on a list of tensors, as a model's gradients come: some large, many small."""
    basis = stored(given, torch.float32, None)

    def parts(vector: Tensor) -> list[Tensor]:
        sizes, left = list[int](), given.n
        while left:
            sizes.append(min(left, max(64, left // 6)))  # weight and bias, again and again
            left -= sizes[-1]
            if left:
                sizes.append(min(left, 64))
                left -= sizes[-1]
        return list(torch.split_with_sizes(vector, sizes))

    def project(vector: Tensor) -> None:
        basis.project_out_(parts(vector))

    return _contender("curvlab float32, list of tensors", given, project, torch.float32, ours=True)


def torch_products(given: Problem) -> Contender:
    """The same as matrix products with one column, which may use other threads than ``mv``."""
    rows = given.rows[:, : given.n]

    def project(vector: Tensor) -> None:
        column = vector[:, None]
        torch.addmm(column, rows.T, rows @ column, alpha=-1, out=column)

    return _contender("torch float32, rows, mm", given, project, torch.float32, ours=False)


def torch_parts(given: Problem) -> Contender:
    """The same with every thread on columns of its own: ``mv`` uses one."""
    count = torch.get_num_threads()
    cuts = [given.n * i // count for i in range(count + 1)]
    spans = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    pool = ThreadPoolExecutor(count)

    def project(vector: Tensor) -> None:
        parts = [(given.rows[:, span], vector[span]) for span in spans]
        inside = sum(pool.map(lambda part: torch.mv(*part), parts))
        list(pool.map(lambda part: part[1].addmv_(part[0].T, inside, alpha=-1), parts))

    return _contender("torch float32, rows, in threads", given, project, torch.float32, ours=False)


def torch_columns(given: Problem) -> Contender:
    """The basis as a matrix ``(P, m)``, as most public code has it."""
    columns = given.rows[:, : given.n].T.contiguous()

    def project(vector: Tensor) -> None:
        vector.sub_(columns @ (columns.T @ vector))

    return _contender("torch float32, columns (P, m)", given, project, torch.float32, ours=False)


def python_loop(given: Problem) -> Contender:
    """One protected direction after the other, as OGD's published code does it."""
    rows = list(given.rows[:, : given.n])

    def project(vector: Tensor) -> None:
        for row in rows:
            vector.sub_(torch.dot(vector, row) * row)

    return _contender("python loop over directions", given, project, torch.float32, ours=False)


def gpm_matrices(given: Problem) -> Contender:
    """GPM's dense matrix per layer: other subspaces (of inputs), the same number of parameters.

    Layers are square, ``width`` by ``width``; the leak is that against its own subspaces.
    """
    width = max(8, min(512, math.isqrt(given.n)))
    layers = given.n // width**2
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(width, min(given.m, width // 2), generator=generator)
    subspace = torch.linalg.qr(inputs.double()).Q
    matrix = (subspace @ subspace.T).float()
    weights = torch.randn(layers, width, width, generator=generator)

    def project() -> None:
        weights.sub_(weights @ matrix)

    changed = weights - weights @ matrix
    leak = float((changed.double() @ subspace).norm() / changed.double().norm())
    moved = 4 * (layers * width**2 + 3 * weights.numel())
    flops = 2 * weights.numel() * width
    return Contender("GPM's dense matrices", project, moved, flops, leak, ours=False)


def contenders(
    given: Problem, folder: Path, *, whole: bool = True
) -> Iterator[Callable[[], Contender]]:
    """What builds each, torch's on rows aside; if not ``whole``, curvlab's in memory only.

    Builders, so that one basis can be gone before the next is made: they are gigabytes.
    """
    yield lambda: curvlab(given, torch.float32)
    yield lambda: curvlab_list(given)
    for dtype in NARROW:
        yield partial(curvlab, given, dtype)
    if not whole:
        return
    yield lambda: curvlab(given, torch.float32, PinnedHost(), " in host memory, in pieces")
    yield lambda: curvlab(given, torch.float32, MappedFile(folder), " in a file")
    yield lambda: curvlab(given, torch.int8, MappedFile(folder), " in a file")
    yield lambda: torch_columns(given)
    yield lambda: python_loop(given)
    yield lambda: gpm_matrices(given)


def stored(given: Problem, dtype: torch.dtype, tier: Tier | None) -> Basis:
    """The problem's rows as a basis, rounded to ``dtype`` and not orthonormalised again."""
    basis = Basis(given.n, given.m, dtype=dtype, tier=tier)
    gram = torch.eye(given.m, dtype=torch.float64)
    for start in range(0, given.m, 8):
        part = given.rows[start : start + 8]
        if dtype == torch.float32:
            basis.store.write_rows(start, part)
            continue
        rows, scales = ops.quantise(part[:, : given.n].contiguous(), dtype)
        basis.store.write_rows(start, rows)
        if scales is not None:
            basis.store.write_scales(start, scales)
    basis.restore(gram)
    if dtype != torch.float32:
        basis.restore(_gram(basis))
    return basis


def _gram(basis: Basis) -> Tensor:
    parts = [
        basis.coefficients(basis.rows(i, min(i + 8, len(basis)))) for i in range(0, len(basis), 8)
    ]
    gram = torch.cat(parts)
    return (gram + gram.T) / 2


def _contender(
    name: str, given: Problem, project: Callable[[Tensor], object], dtype: torch.dtype, ours: bool
) -> Contender:
    target = given.gradient.clone()
    moved = 2 * given.m * row_bytes(given.n, dtype) + 12 * given.n
    return Contender(name, lambda: project(target), moved, given.flops, given.leak(project), ours)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder for mapped files, removed afterwards."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)
