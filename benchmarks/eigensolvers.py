"""Eigensolvers on the same operators, to the same residual; who misses it is not timed.

    python -m benchmarks.eigensolvers [--size small|full] [--operators outliers mlp resnet vit]
                                      [--k 20] [--tol 1e-3] [--out DIR] [--curve]

For each operator (a prescribed spectrum, and the Hessians of :mod:`benchmarks.trained`) every
solver looks for the top k by magnitude. The gate: every true relative residual, from one explicit
product per pair, is at most ``tol``, and no pair of the reference set is missing. SciPy's tolerance
is tightened until it passes. Then whole solves are timed in interleaved rounds, in units of one
gradient on the same data. ``--curve`` draws products and time against accuracy.

Deflated power iteration needs thousands of products: where it cannot be run to the end its products
are counted on a diagonal operator with the Ritz values of the real one, and said to be simulated.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.measure import (
    Row,
    format_table,
    interleave,
    per_round_ratio,
    quantiles,
    row,
    version_of,
    write_rows,
)
from benchmarks.networks import Network
from benchmarks.trained import SIZES, trained
from curvlab.eigen import Eigenpairs, block_lanczos, lanczos, power_iteration
from curvlab.operators import Hessian
from curvlab.probe import LinearOperator

THREADS = 2
Answer = tuple[Tensor, Tensor, int]  # values (k,), vectors (k, n), products
Solver = Callable[[float], Answer]


class Diagonal:
    """A prescribed spectrum: as cheap as an operator can be."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.n, self.dtype, self.device = len(values), values.dtype, values.device

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return vectors * self.values


@dataclass(slots=True)
class Problem:
    """An operator, what one gradient costs beside it, and its top pairs as a reference."""

    name: str
    operator: LinearOperator
    gradient: Callable[[], object] | None
    network: Network | None
    solvers: dict[str, tuple[str, Solver]] = field(default_factory=dict)  # name -> version, solver


def outliers(n: int = 100_000) -> Diagonal:
    """Hessian-shaped: thirty outliers, a decaying bulk, small negative values."""
    top = torch.logspace(2, 0.3, 30, dtype=torch.float64)
    bulk = torch.logspace(0, -6, n - 1030, dtype=torch.float64)
    negative = -torch.logspace(-1.5, -6, 1000, dtype=torch.float64)
    return Diagonal(torch.cat([top, bulk, negative]).float())


def problem(name: str, size: str) -> Problem:
    """The operator called ``name``, without solvers."""
    if name == "outliers":
        return Problem(name, outliers(100_000 if size == "full" else 10_000), None, None)
    network = trained(SIZES[size][name])
    operator = Hessian(network.model, network.loss, (network.inputs, network.targets))
    parameters = list(network.model.parameters())

    def gradient() -> object:
        value = network.loss(network.model(network.inputs), network.targets)
        return torch.autograd.grad(value, parameters)

    return Problem(name, operator, gradient, network)


def ours(solve: Callable[..., Eigenpairs], operator: LinearOperator, k: int, **more: str) -> Solver:
    def run(tol: float) -> Answer:
        pairs = solve(operator, k, tol=tol, progress=False, **more)
        return pairs.values, pairs.vectors, pairs.matvecs

    return run


def scipy_solver(product: Callable[[Tensor], Tensor], n: int, k: int) -> Solver:
    """ARPACK around a product of one float32 vector."""
    from scipy.sparse.linalg import LinearOperator as Scipy
    from scipy.sparse.linalg import eigsh

    def run(tol: float) -> Answer:
        count = 0

        def matvec(vector: np.ndarray) -> np.ndarray:
            nonlocal count
            count += 1
            image = product(torch.from_numpy(np.ascontiguousarray(vector.reshape(-1))))
            return np.asarray(image.detach().numpy())

        start = torch.randn(n, generator=torch.Generator().manual_seed(0)).numpy()
        wrapped = Scipy((n, n), matvec=matvec, dtype=np.float32)
        values, columns = eigsh(wrapped, k=k, which="LM", tol=tol, v0=start)
        order = np.argsort(-np.abs(values))
        vectors = torch.from_numpy(np.ascontiguousarray(columns.T[order]))
        return torch.from_numpy(values[order].astype(np.float64)), vectors, count

    return run


def contenders(found: Problem, k: int, power: bool) -> dict[str, tuple[str, Solver]]:
    """Every solver for the operator: ours, SciPy on our product, and what peers are installed."""
    operator, own = found.operator, version_of("curvlab")
    table: dict[str, tuple[str, Solver]] = {
        "lanczos": (own, ours(lanczos, operator, k)),
        "lanczos, uncertified": (own, ours(lanczos, operator, k, multiplicity="skip")),
        "block lanczos": (own, ours(block_lanczos, operator, k)),
        "scipy eigsh, our product": (
            version_of("scipy"),
            scipy_solver(lambda v: operator @ v, operator.n, k),
        ),
    }
    if power:

        def power_solver(tol: float) -> Answer:
            pairs = power_iteration(operator, k, tol=tol, stop="residual", max_products=100_000)
            return pairs.values, pairs.vectors, pairs.matvecs

        table["deflated power iteration"] = (own, power_solver)
    if found.network is not None:
        net = found.network
        for peer in peers.installed():
            product = peer.hessian(net.model, net.loss, net.inputs, net.targets)
            solver = scipy_solver(lambda v, p=product: p(v[None])[0], operator.n, k)  # type: ignore[misc]
            table[f"scipy eigsh, {peer.DISTRIBUTION}"] = (version_of(peer.DISTRIBUTION), solver)
    return table


def residuals(operator: LinearOperator, values: Tensor, vectors: Tensor) -> Tensor:
    """True ``||A v - value v|| / |value|`` of unit vectors ``(k, n)``, float64, by products."""
    found = []
    for value, vector in zip(values.tolist(), vectors, strict=True):
        unit = vector.to(operator.dtype)
        image = (operator @ unit).double()
        found.append(float((image - value * unit.double()).norm() / abs(value)))
    return torch.tensor(found, dtype=torch.float64)


def trouble(operator: LinearOperator, answer: Answer, truth: Tensor, tol: float) -> str:
    """What is wrong with an answer; empty if nothing is."""
    values, vectors, _ = answer
    worst = float(residuals(operator, values, vectors).max())
    if not worst <= tol:
        return f"residual {worst:.1e}"
    size = truth.abs()
    missing = (values.abs() - size).abs() > tol * size + 1e-6 * size[0]
    if bool(missing.any()):
        return f"{int(missing.sum())} pairs missing"
    return ""


def settle(
    found: Problem, solver: Solver, truth: Tensor, tol: float
) -> tuple[float, Answer | None, str]:
    """The loosest tolerance of its own at which ``solver`` passes the gate at ``tol``."""
    own = tol
    wrong = ""
    for _ in range(4):
        answer = solver(own)
        wrong = trouble(found.operator, answer, truth, tol)
        if not wrong:
            return own, answer, ""
        own /= 3.0
    return own, None, wrong


def simulated_power(operator: LinearOperator, k: int, tol: float) -> int:
    """Products of deflated power iteration on a diagonal operator with this one's Ritz values."""
    steps = min(operator.n // 2, 6 * k)
    ritz = lanczos(operator, steps, tol=1e-2, multiplicity="skip", progress=False)
    surrogate = Diagonal(ritz.values.float())
    return power_iteration(surrogate, k, tol=tol, stop="residual", max_products=200_000).matvecs


def benchmark(found: Problem, k: int, tol: float, rounds: int, power: bool) -> list[Row]:
    """Gate and time all solvers on one operator; prints a table and returns its rows."""
    truth = lanczos(found.operator, k, tol=tol / 30, progress=False)
    passed: dict[str, tuple[float, Answer]] = {}
    lines: dict[str, list[str]] = {}
    table = contenders(found, k, power)
    for name, (version, solver) in table.items():
        own, answer, wrong = settle(found, solver, truth.values, tol)
        lines[name] = [name, version, "-", "-", wrong or "ok"]
        if answer is not None:
            passed[name] = (own, answer)
            lines[name][2] = str(answer[2])
            if own != tol:
                lines[name][4] = f"ok, its tol {own:.0e}"
    calls = {name: (lambda n=name: table[n][1](passed[n][0])) for name in passed}
    unit = {"gradient": found.gradient} if found.gradient else {}
    seconds = interleave({**unit, **calls}, rounds=rounds, warmup=0, threads=THREADS)
    rows = []
    for name in passed:
        measured = seconds[name]
        if found.gradient:
            measured = per_round_ratio(seconds[name], seconds["gradient"])
        spread = quantiles(measured)
        word = "gradients" if found.gradient else "seconds"
        lines[name][3] = f"{spread.p50:.4g} ({spread.p20:.4g}-{spread.p80:.4g})"
        version = table[name][0]
        for metric, of, value in (
            ("time", word, spread),
            ("products", "products", float(passed[name][1][2])),
        ):
            subject = f"eigensolver k={k} tol={tol:g}"
            rows.append(
                row(subject, name, metric, of, found.name, value, threads=THREADS, version=version)
            )
    if not power:
        count = simulated_power(found.operator, k, tol)
        lines["power"] = ["deflated power iteration", "", f"{count}", "-", "simulated count"]
    word = "gradients" if found.gradient else "seconds"
    print(f"\n{found.name}: n = {found.operator.n:,}, top {k} at relative residual {tol:g}")
    print(
        format_table(["solver", "version", "products", f"time in {word}", "gate"], lines.values())
    )
    return rows


def curve(found: Problem, k: int, path: Path) -> None:
    """Products and time against accuracy, for the solvers that are not hopeless."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tols = [1e-1, 1e-2, 1e-3, 1e-4]
    truth = lanczos(found.operator, k, tol=1e-5, progress=False)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharex=True)
    markers = iter("os^Dv*PX")
    for name, (_, solver) in contenders(found, k, power=False).items():
        points = []
        for tol in tols:
            answer = solver(tol)
            worst = float(residuals(found.operator, answer[0], answer[1]).max())
            if trouble(found.operator, answer, truth.values, max(tol, worst)):
                continue
            time = interleave({"it": lambda t=tol, s=solver: s(t)}, rounds=3, threads=THREADS)  # type: ignore[misc]
            points.append((worst, answer[2], quantiles(time["it"]).p50))
        if points:
            worst_, count, seconds = zip(*points, strict=True)
            marker = next(markers)
            axes[0].plot(worst_, count, marker=marker, label=name)
            axes[1].plot(worst_, seconds, marker=marker, label=name)
    for axis, title in zip(axes, ("products", "seconds"), strict=True):
        axis.set(xscale="log", xlabel="worst true relative residual", ylabel=title)
        axis.grid(alpha=0.3)
    axes[1].set(yscale="log")
    axes[0].invert_xaxis()
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{found.name}, n = {found.operator.n:,}, top {k}")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eigensolvers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    names = ("outliers", "mlp", "resnet", "vit")
    parser.add_argument("--operators", nargs="+", choices=names, default=names)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--tol", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results") / "benchmarks")
    parser.add_argument("--curve", action="store_true", help="draw products and time vs accuracy")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    rows: list[Row] = []
    for name in options.operators:
        found = problem(name, options.size)
        # whole runs of power iteration only where a product takes milliseconds
        power = name in ("outliers", "mlp")
        rows += benchmark(found, options.k, options.tol, options.rounds, power)
        if options.curve:
            options.out.mkdir(parents=True, exist_ok=True)
            picture = options.out / f"eigensolvers-{name}.png"
            curve(found, options.k, picture)
            print(f"picture: {picture}")
    print(f"rows: {write_rows(options.out / 'eigensolvers.csv', rows)}")
    return rows


if __name__ == "__main__":
    main()
