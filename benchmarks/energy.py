"""Spectral-energy selection against the dense way: same vectors, how much sooner.

    python -m benchmarks.energy [--size small|full] [--epsilon 0.01] [--out FILE.csv]

The dense way at its best: the whole Hessian (:meth:`Hessian.dense`), its squared Frobenius norm,
which is the sum of all squared eigenvalues, and ``eigsh`` on the matrix for more and more pairs
until they hold ``1 - epsilon`` of it, with one and with two threads of its BLAS: the faster one
counts. ``--whole`` also decomposes the whole matrix. Ours:
:func:`curvlab.spectral_energy`, no matrix. The gate: the same k up to the error bar, and the
largest principal angle between the two spans, leaving out pairs at the cut that lie within 1 % of
each other. One run each: the rows say so.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from benchmarks.measure import Row, row, write_rows
from benchmarks.spectra import Diagonal
from benchmarks.trained import FULL, Recipe, trained
from curvlab.bench.timing import Threads, environment
from curvlab.eigen import spectral_energy
from curvlab.learners import SGD
from curvlab.nets import mlp
from curvlab.operators import Hessian
from curvlab.tasks import rotated_mnist, subset
from curvlab.training import Evaluation, Schedule, learn

Result = TypeVar("Result")
THREADS = 2
PROBES = 256  # random vectors for the tail: in a block they cost little, and k is as good as they


def hessian(size: str) -> Hessian:
    """Of a trained MLP on embedded MNIST: the paper's, or a small one on the same data."""
    if size == "full":
        network = trained(FULL["mlp"])
        return Hessian(network.model, network.loss, (network.inputs, network.targets))
    task = rotated_mnist(angles=[0.0])[0]
    model = mlp((196, 16, 16, 10), seed=0)
    recipe = Recipe("mlp", 5000, 4, 10, 0.05, 500)
    schedule = Schedule(recipe.lr, epochs=recipe.epochs)
    learn(model, [task], SGD(), schedule, seeds=0, evaluation=Evaluation(train=0), snapshots=False)
    return Hessian(model.eval(), nn.CrossEntropyLoss(), subset(task.train, recipe.samples, seed=1))


def energy_of(matrix: Tensor) -> float:
    """The squared Frobenius norm, added up in float64 without a copy of the matrix in it."""
    norms = [torch.linalg.vector_norm(p, dtype=torch.float64) for p in torch.split(matrix, 1000)]
    return float(torch.stack(norms).square().sum())


def fair_dense(matrix: Tensor, wanted: float) -> tuple[Tensor, Tensor]:
    """Values ``(j,)``, largest magnitude first, beyond the cut, and the selected ``(k, n)``."""
    from scipy.sparse.linalg import eigsh

    start = torch.randn(len(matrix), generator=torch.Generator().manual_seed(0)).numpy()
    pairs = 32
    while True:
        found = eigsh(matrix.numpy(), k=pairs, which="LM", tol=1e-3, v0=start)
        values, columns = (torch.from_numpy(one) for one in found)
        order = values.abs().argsort(descending=True)
        held = (values[order].double() ** 2).cumsum(0)
        k = int((held < wanted).sum()) + 1
        if k < pairs:  # one more tells whether the cut goes through a cluster
            return values[order].double(), columns.T[order[:k]].contiguous()
        pairs *= 2


def whole_dense(operator: Hessian, epsilon: float) -> tuple[Tensor, Tensor]:
    """All values ``(n,)``, largest magnitude first, and the selected vectors ``(k, n)``."""
    values, columns = torch.linalg.eigh(operator.dense())
    order = values.abs().argsort(descending=True)
    squares = values[order].double() ** 2
    k = int((squares.cumsum(0) < (1.0 - epsilon) * squares.sum()).sum()) + 1
    return values[order].double(), columns[:, order[:k]].T.contiguous()


def largest_angle(ours: Tensor, dense: Tensor, keep: int) -> float:
    """Largest principal angle between the first ``keep`` of ours and all of the dense span."""
    cosines = torch.linalg.svdvals(ours[:keep].double() @ dense.double().T)
    return float(torch.arccos(cosines.clamp(max=1.0)).max())


def beyond_ties(values: Tensor, exact: int, k: int) -> int:
    """By how many vectors ``k`` misses ``exact``, not counting any that tie with the last of those.

    Args:
        values: All, largest magnitude first. Those within 1 % of the last selected tie with it.
    """
    sizes = values.abs()
    between = sizes[min(k, exact) : max(k, exact)]
    return int(((between - sizes[exact - 1]).abs() > 0.01 * sizes[exact - 1]).sum())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.energy")
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--epsilon", type=float, default=0.01)
    parser.add_argument("--whole", action="store_true", help="the whole eigendecomposition too")
    parser.add_argument("--out", help="write the rows to this .csv or .json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    operator = hessian(options.size)
    # Loading at first use does not count.
    falling = torch.arange(1.0, 100_001.0) ** -2
    spectral_energy(Diagonal(falling), 0.5, dense=False, progress=False)
    found, cpu, wall = timed(
        partial(
            spectral_energy, operator, options.epsilon, tol=1e-3, probes=PROBES, dense=False,
            progress=False,
        )
    )  # fmt: skip
    print(environment(THREADS))
    print(f"n = {operator.n:,}, epsilon = {options.epsilon:g}")
    print(
        f"ours: k = {found.k} (between {found.least} and {found.most}), {found.products} products, "
        f"{cpu:.2f} CPU s, {wall:.2f} s"
    )
    ours = "spectral_energy"
    figures = [
        (ours, "time", "CPU seconds", cpu),
        (ours, "time", "seconds", wall),
        (ours, "k", "vectors", float(found.k)),
        (ours, "products", "products", float(found.products)),
    ]
    for name, (values, vectors), slow_cpu, slow, threads in dense_ways(operator, options):
        exact = len(vectors)
        # A vector within 1 % of the first that the dense way leaves out may be mixed with it.
        sizes = values.abs()
        keep = min(found.k, int((sizes[:exact] > 1.01 * sizes[min(exact, len(sizes) - 1)]).sum()))
        angle = largest_angle(found.pairs.vectors[:keep], vectors, keep)
        off = beyond_ties(values, exact, found.k)
        print(
            f"{name}, {threads}: k = {exact} in {slow_cpu:.1f} CPU s, {slow:.1f} s; "
            f"ours {slow / wall:.1f} times faster, CPU {slow_cpu / cpu:.1f}; "
            f"largest angle of {keep}: {angle:.1e}"
        )
        figures += [
            (name, "time", "CPU seconds", slow_cpu),
            (name, "time", "seconds", slow),
            (name, "k", "vectors", float(exact)),
            (ours, "speed", f"x {name}", slow / wall),
            (ours, "angle", "radians", angle),
            (ours, "k off by, ties aside", "vectors", float(off)),
        ]
    rows: list[Row] = [
        row("energy", name, metric, unit, operator.n, value, threads=THREADS)
        for name, metric, unit, value in figures
    ]
    if options.out:
        print(f"rows: {write_rows(options.out, rows)}")


def dense_ways(
    operator: Hessian, options: argparse.Namespace
) -> Iterator[tuple[str, tuple[Tensor, Tensor], float, float, str]]:
    """Each dense way: its name, what it found, CPU seconds, seconds, threads."""

    def prepare() -> tuple[Tensor, float]:
        matrix = operator.dense()
        return matrix, (1.0 - options.epsilon) * energy_of(matrix)

    (matrix, wanted), cpu, wall = timed(prepare)
    best: tuple[float, float, tuple[Tensor, Tensor], str] | None = None
    for blas in (1, THREADS):
        threads = Threads(THREADS, blas)
        with threads.pinned():
            found, more_cpu, more = timed(partial(fair_dense, matrix, wanted))
        if best is None or more < best[0]:
            best = more, more_cpu, found, f"torch/BLAS threads {threads}"
    assert best is not None
    yield "dense, |H|_F and eigsh", best[2], cpu + best[1], wall + best[0], best[3]
    del matrix
    if options.whole:
        found, cpu, wall = timed(partial(whole_dense, operator, options.epsilon))
        yield "dense, whole eigendecomposition", found, cpu, wall, f"torch threads {THREADS}"


def timed(call: Callable[[], Result]) -> tuple[Result, float, float]:
    """What a call returns, its CPU seconds over all threads and its elapsed seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
