"""What must not get worse unnoticed, at a size that takes seconds: counts and errors, not time.

    python -m benchmarks.guard [--parts products dense solvers memory] [--out FILE.csv]

Run by ``python -m benchmarks compare`` once for each of two revisions. Everything is seeded, on one
thread, and counted: products that a solver asked for, torch operators and their bytes, allocations,
errors against float64, leaks, true residuals. Two runs of one revision give the same figures. Time
is in the rows too, for those who want to look at it. Only public names of curvlab are used, so that
older revisions can be measured with the same file; one that cannot run a case says that it fails.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import Row, format_table, row, write_rows
from benchmarks.networks import SMALL, Network
from benchmarks.plain import PLAIN
from benchmarks.spectra import Diagonal, outliers
from benchmarks.tally import Tally
from curvlab.basis import Basis
from curvlab.bench.timing import environment, quantiles
from curvlab.eigen import SpectralEnergy, lanczos, spectral_energy
from curvlab.operators import GaussNewton, Hessian
from curvlab.probe import LinearOperator

SUBJECT = "guard"
BUDGET = 1e9  # given, so that free memory does not decide how data are cut
TOL = 1e-3
EPSILON = 0.01


@dataclass(slots=True)
class Case:
    """One thing to watch: a call to count and time, and figures that were found beside it."""

    name: str
    call: Callable[[], object]
    figures: dict[tuple[str, str], float] = field(default_factory=dict)  # (metric, unit)


class Watched:
    """An operator that counts the vectors it is given."""

    def __init__(self, values: Tensor) -> None:
        self.inner = Diagonal(values)
        self.n, self.dtype, self.device = self.inner.n, self.inner.dtype, self.inner.device
        self.products = 0

    def __matmul__(self, vectors: Tensor) -> Tensor:
        self.products += 1 if vectors.ndim == 1 else len(vectors)
        return self.inner @ vectors


def relative(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())


def products() -> Iterator[Case]:
    """Every engine that does not choose by the clock, both curvatures, three small networks."""
    for name, make in SMALL.items():
        network: Network = make()
        exact = network.double()
        vector = torch.randn(1, network.n, generator=torch.Generator().manual_seed(1))
        for kind, operator in (("hessian", Hessian), ("gauss_newton", GaussNewton)):
            truth = PLAIN[kind](exact)(vector.double())
            engines = ["retained", "rebuilt"] + (["mlp"] if name == "mlp" else [])
            for engine in engines:

                def build(net: Network, operator: type = operator, engine: str = engine) -> object:
                    data = (net.inputs, net.targets)
                    return operator(
                        net.model, net.loss, data, engine=engine, budget=BUDGET, check=False
                    )

                single, double = build(network), build(exact)
                figures = {
                    ("error float64", "relative"): relative(double @ vector.double(), truth),  # type: ignore[operator]
                    ("error float32", "relative"): relative(single @ vector, truth),  # type: ignore[operator]
                }
                call = lambda a=single, v=vector: a @ v  # noqa: E731
                yield Case(f"{kind} product, {name}, {engine}", call, figures)


def dense() -> Iterator[Case]:
    network = SMALL["mlp"]()
    data = (network.inputs, network.targets)
    operator = Hessian(network.model, network.loss, data, budget=BUDGET, check=False)
    exact = network.double()
    some = torch.arange(0, network.n, network.n // 5)
    unit = torch.zeros(len(some), network.n, dtype=torch.float64)
    unit[torch.arange(len(some)), some] = 1.0
    truth = PLAIN["hessian"](exact)(unit)
    error = relative(operator.dense()[some], truth)
    yield Case("dense Hessian, mlp", operator.dense, {("error float32", "relative"): error})


def solvers() -> Iterator[Case]:
    """Lanczos on prescribed spectra, with and without copies, and the energy rule."""
    copies = torch.cat([torch.tensor([9.0, 9.0, 9.0, 9.0, 6.0, -5.0]), torch.linspace(-1, 1, 800)])
    for name, values, k in (
        ("outliers", outliers(10_000).values, 10),
        ("four copies", copies, 6),
    ):
        operator = Watched(values)
        pairs = lanczos(operator, k, tol=TOL, dense=False, progress=False)
        wanted = values.double().abs().sort(descending=True).values[:k]
        off = (pairs.values.abs() - wanted).abs() > 4 * TOL * wanted
        vectors = pairs.vectors.double()
        residual = vectors * values.double() - pairs.values[:, None] * vectors
        worst = float((residual.norm(dim=1) / pairs.values.abs()).max())
        gram = vectors @ vectors.T - torch.eye(k, dtype=torch.float64)
        figures = {
            ("products", "products"): float(operator.products),
            ("residual", "tolerances"): worst / TOL,
            ("missing", "pairs"): float(off.sum()),
            ("orthogonality", "largest |Q Q' - I|"): float(gram.abs().max()),
        }
        call = partial(lanczos, Diagonal(values), k, tol=TOL, dense=False, progress=False)
        yield Case(f"lanczos, {name}", call, figures)
    operator = Watched(outliers(3_000).values)
    found = _energy(operator)
    squares = operator.inner.values.double().abs().sort(descending=True).values ** 2
    left = float(1 - squares[: found.k].sum() / squares.sum())
    figures = {
        ("products", "products"): float(operator.products),
        ("energy left out", "of epsilon"): left / EPSILON,
    }
    yield Case("spectral energy", partial(_energy, outliers(3_000)), figures)


def _energy(operator: LinearOperator) -> SpectralEnergy:
    return spectral_energy(operator, EPSILON, dense=False, progress=False)


def memory() -> Iterator[Case]:
    """Projection in each storage dtype, a step of SGD-dagger's update, and appending."""
    n, m = 20_011, 16
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(m, n, generator=generator)
    block += 5 * block[:1]  # not orthogonal by chance
    exact = torch.linalg.qr(block.double().T).Q.T
    vector = torch.randn(n, generator=generator) + 20 * exact[0].float()
    for dtype in (torch.float32, torch.float16, torch.int8):
        basis = Basis(n, m, dtype=dtype)
        basis.extend(block)
        left = vector.clone()
        basis.project_out_(left)
        leak = float((exact @ left.double()).norm() / left.double().norm())
        figures = {("leak", "|Qg'|/|g'|"): leak, ("rows", "bytes"): float(basis.bytes)}
        name = str(dtype).removeprefix("torch.")
        call = lambda b=basis: b.project_out_(vector.clone())  # noqa: E731
        yield Case(f"projection, {name}", call, figures)

    def append() -> Basis:
        fresh = Basis(n, m)
        fresh.extend(block[: m // 2])
        fresh.extend(block[m // 2 :])
        return fresh

    rows = append().rows().double()
    off = float((rows @ rows.T - torch.eye(m, dtype=torch.float64)).abs().max())
    lost = float((exact - exact @ rows.T @ rows).norm())
    figures = {
        ("orthogonality", "largest |Q Q' - I|"): off,
        ("lost", "of the span"): lost,
        ("missing", "pairs"): float(m - len(rows)),
    }
    yield Case("append, two blocks", append, figures)


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "products": products,
    "dense": dense,
    "solvers": solvers,
    "memory": memory,
}


def measure(rounds: int, parts: Sequence[str] = tuple(PARTS)) -> list[Row]:
    """Figures, counts and time of every case."""
    rows: list[Row] = []
    for part in parts:
        found = PARTS[part]()
        while True:
            try:
                case = next(found)
                case.call()
            except StopIteration:
                break
            except Exception as reason:  # of an older revision: recorded, and shown as worse
                print(f"{part} fails: {type(reason).__name__}: {reason}")
                rows.append(_row(part, "fails", "times", 1.0))
                break
            with Tally() as tally:
                case.call()
            seconds = []
            for _ in range(rounds):
                began = time.perf_counter()
                case.call()
                seconds.append(time.perf_counter() - began)
            figures = {
                **case.figures,
                ("operators", "calls"): float(tally.calls),
                ("moved", "bytes"): float(tally.moved),
                ("allocated", "bytes"): float(tally.allocated),
                ("peak", "bytes"): float(tally.peak),
                ("given to kernels", "bytes"): float(tally.kernels),
            }
            rows += [_row(case.name, *key, value) for key, value in figures.items()]
            spread = quantiles(seconds)
            rows.append(row(SUBJECT, case.name, "time", "seconds", "small", spread, threads=1))
    return rows


def _row(name: str, metric: str, unit: str, value: float) -> Row:
    return row(SUBJECT, name, metric, unit, "small", value, threads=1)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="of the time, which is only shown")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, help="write the rows to this .csv or .json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = measure(options.rounds, options.parts)
    if options.out:
        write_rows(options.out, rows)
    else:
        print(environment(1))
        lines = [[e.contender, e.metric, f"{e.p50:.6g}", e.unit] for e in rows]
        print(format_table(["case", "figure", "value", "unit"], lines))
    return rows


if __name__ == "__main__":
    main()
