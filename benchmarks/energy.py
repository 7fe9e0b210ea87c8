"""Spectral-energy selection against the dense way: same vectors, how much sooner.

    python -m benchmarks.energy [--size small|full] [--epsilon 0.01] [--out FILE.csv]

Dense: the whole Hessian (:meth:`Hessian.dense`), its eigendecomposition, the smallest k that holds
``1 - epsilon`` of the squared eigenvalues. Ours: :func:`curvlab.spectral_energy`, no matrix. The
gate: the same k up to the error bar, and the largest principal angle between the two spans, leaving
out pairs at the cut that lie within 1 % of each other. One run each: the dense way takes minutes at
full size (18,010 parameters), and the ratio is far from a tie.
"""

import argparse
import time

import torch
from torch import Tensor, nn

from benchmarks.eigensolver_contenders import Diagonal
from benchmarks.measure import Row, environment, row, write_rows
from benchmarks.trained import FULL, Recipe, trained
from curvlab.eigen import spectral_energy
from curvlab.learners import SGD
from curvlab.nets import mlp
from curvlab.operators import Hessian
from curvlab.tasks import rotated_mnist, subset
from curvlab.training import Evaluation, Schedule, learn

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


def dense_way(operator: Hessian, epsilon: float) -> tuple[Tensor, Tensor]:
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
    parser.add_argument("--out", help="write the rows to this .csv or .json")
    options = parser.parse_args()
    clock = time.process_time  # over all threads, so that a busy machine does not matter
    torch.set_num_threads(THREADS)
    operator = hessian(options.size)
    # What is loaded at first use is nobody's time.
    falling = torch.arange(1.0, 100_001.0) ** -2
    spectral_energy(Diagonal(falling), 0.5, dense=False, progress=False)
    began = clock()
    found = spectral_energy(
        operator, options.epsilon, tol=1e-3, probes=PROBES, dense=False, progress=False
    )
    fast = clock() - began
    began = clock()
    values, vectors = dense_way(operator, options.epsilon)
    slow = clock() - began
    exact = len(vectors)
    # A vector within 1 % of the first that the dense way leaves out may be mixed with it.
    sizes = values.abs()
    keep = min(found.k, int((sizes[:exact] > 1.01 * sizes[min(exact, len(sizes) - 1)]).sum()))
    angle = largest_angle(found.pairs.vectors[:keep], vectors, keep)
    off = beyond_ties(values, exact, found.k)
    print(environment(THREADS))
    print(f"n = {operator.n:,}, epsilon = {options.epsilon:g}")
    print(
        f"dense: k = {exact} in {slow:.1f} s; ours: k = {found.k} (between {found.least} and "
        f"{found.most}), {found.products} products, {fast:.2f} s: {slow / fast:.0f} times faster"
    )
    print(f"largest principal angle of the first {keep} vectors with the dense span: {angle:.1e}")
    rows: list[Row] = [
        row("energy", name, metric, unit, operator.n, value, threads=THREADS)
        for name, metric, unit, value in (
            ("dense", "time", "CPU seconds", slow),
            ("spectral_energy", "time", "CPU seconds", fast),
            ("spectral_energy", "angle", "radians", angle),
            ("dense", "k", "vectors", float(exact)),
            ("spectral_energy", "k", "vectors", float(found.k)),
            ("spectral_energy", "k off by, ties aside", "vectors", float(off)),
            ("spectral_energy", "products", "products", float(found.products)),
        )
    ]
    if options.out:
        print(f"rows: {write_rows(options.out, rows)}")


if __name__ == "__main__":
    main()
