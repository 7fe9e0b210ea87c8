"""How cost grows with size: measured curves and the exponents that fit them.

    python -m benchmarks.growth [--size small|full] [--curves BEGINNING ...] [--out FILE.csv]

Each curve changes one thing: samples N, parameters P, protected directions m, eigenpairs k, tasks
learned. All points of a curve are interleaved in one run, each with its best number of threads. The
exponent is the slope of a straight line fitted by least squares to logarithms, with its standard
error; beside it what the byte or operation count says for large sizes. Small sizes have overheads
that do not grow, so a fitted exponent below that is no mistake; one clearly above it would be.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.learner_networks import filled, population, stepping
from benchmarks.measure import SMALL, Row, format_table, row, write_rows
from benchmarks.networks import SIZES, Network
from benchmarks.projection_steps import random_basis
from benchmarks.spectra import outliers
from curvlab.bench.timing import (
    Quantiles,
    best_threads,
    environment,
    interleave,
    pinned_threads,
    quantiles,
)
from curvlab.eigen import lanczos
from curvlab.nets import mlp
from curvlab.operators import Hessian

SUBJECT = "growth"
PER_TASK = 20  # directions that a task adds to the memory


@dataclass(frozen=True, slots=True)
class Curve:
    """Calls by the size that changes, and what the count of bytes or operations says.

    Attributes:
        against: What changes: N, P, m, k or tasks.
        expected: The exponent for large sizes; NaN if counting does not give one.
        counts: Figures that are not times, by size: products of a solver, bytes of a memory.
        counted: What those are.
    """

    name: str
    against: str
    expected: float
    calls: Mapping[int, Callable[[], object]]
    counts: Mapping[int, float] | None = None
    counted: str = ""


def product_against_samples(full: bool) -> Curve:
    sizes = (250, 500, 1000, 2000, 4000) if full else (100, 200, 400)
    calls = {count: _product(mlp(), count, 196) for count in sizes}
    return Curve("Hessian product, MLP", "N", 1.0, calls)


def product_against_parameters(full: bool) -> Curve:
    widths = (100, 200, 400, 800) if full else (50, 100, 200)
    calls = {}
    for width in widths:
        model = mlp(width=width, depth=4)
        calls[sum(p.numel() for p in model.parameters())] = _product(model, 200, 196)
    return Curve("Hessian product, MLP", "P", 1.0, calls)


def _product(model: nn.Module, samples: int, inputs: int) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(samples, inputs, generator=generator)
    targets = torch.randint(10, (samples,), generator=generator)
    operator = Hessian(model, nn.CrossEntropyLoss(), (data, targets), engine="mlp", check=False)
    vector = torch.randn(operator.n, generator=generator)
    return lambda: operator @ vector


def projection_against_parameters(full: bool) -> Curve:
    sizes = (100_000, 400_000, 1_600_000, 6_400_000) if full else (20_000, 80_000, 320_000)
    return Curve("projection, float32, m = 20", "P", 1.0, {n: _projection(n, 20) for n in sizes})


def projection_against_directions(full: bool) -> Curve:
    n, counts = (1_000_000, (10, 20, 40, 80, 160)) if full else (100_000, (5, 10, 20, 40))
    name = f"projection, float32, P = {n:,}"
    return Curve(name, "m", 1.0, {m: _projection(n, m) for m in counts})


def _projection(n: int, m: int) -> Callable[[], object]:
    basis = random_basis(n, m, torch.float32, None)
    vector = torch.randn(n, generator=torch.Generator().manual_seed(2))
    return partial(basis.project_out_, vector)


def lanczos_against_parameters(full: bool) -> Curve:
    sizes = (10_000, 100_000, 1_000_000, 10_000_000) if full else (10_000, 40_000, 160_000)
    counts = {n: float(lanczos(outliers(n), 10, progress=False).matvecs) for n in sizes}
    calls = {n: partial(lanczos, outliers(n), 10, progress=False) for n in sizes}
    return Curve(
        "Lanczos, top 10 at 1e-3, prescribed spectrum", "P", 1.0, calls, counts, "products"
    )


def lanczos_against_pairs(full: bool) -> Curve:
    n, ks = (200_000, (3, 6, 12, 24)) if full else (20_000, (3, 6, 12))
    operator = outliers(n)
    counts = {k: float(lanczos(operator, k, progress=False).matvecs) for k in ks}
    calls = {k: partial(lanczos, operator, k, progress=False) for k in ks}
    name = f"Lanczos at 1e-3, prescribed spectrum, P = {n:,}"
    # between constant and k squared: how many products more pairs take depends on the spectrum
    return Curve(name, "k", float("nan"), calls, counts, "products")


def step_against_tasks(full: bool) -> Curve:
    tasks = (1, 2, 4, 8, 16) if full else (1, 2, 4)
    network: Network = SIZES["full"]["mlp"]()
    calls, counts = {}, {}
    for count in tasks:
        runs, batch = population(network)
        learner = filled(runs, PER_TASK * count, torch.float32)
        calls[count] = stepping(runs, learner, batch, [])
        if learner.memory is None:
            raise AssertionError("before_task makes the memory")
        counts[count] = float(learner.memory.bases[0].bytes)
    name = f"SGD-dagger step, MLP, {PER_TASK} directions a task"
    return Curve(name, "tasks", 1.0, calls, counts, "bytes")


CURVES: dict[str, Callable[[bool], Curve]] = {
    "product-N": product_against_samples,
    "product-P": product_against_parameters,
    "projection-P": projection_against_parameters,
    "projection-m": projection_against_directions,
    "lanczos-P": lanczos_against_parameters,
    "lanczos-k": lanczos_against_pairs,
    "step-tasks": step_against_tasks,
}


def exponent(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Slope of ``log(values)`` over ``log(sizes)`` by least squares, and its standard error."""
    if len(sizes) != len(values) or len(set(sizes)) < 2:
        raise ValueError(f"exponent needs two or more sizes and as many values; got {list(sizes)}")
    x = [math.log(size) for size in sizes]
    y = [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    off = [b - mean_y - slope * (a - mean_x) for a, b in zip(x, y, strict=True)]
    if len(x) == 2:
        return slope, float("inf")
    return slope, math.sqrt(sum(r * r for r in off) / (len(x) - 2) / spread)


def measure(curve: Curve, rounds: int, threads: int) -> Iterator[Row]:
    """The points of a curve and the exponents fitted to them."""
    named = {str(size): call for size, call in curve.calls.items()}
    best = best_threads(named, list(dict.fromkeys((threads, 1))), rounds=1)
    seconds = interleave(named, rounds=rounds, threads=best)
    times = {size: quantiles(seconds[str(size)]) for size in curve.calls}
    kinds: list[tuple[str, str, dict[int, Quantiles | float], float]] = [
        ("time", "seconds", dict(times), curve.expected)
    ]
    if curve.counts is not None:
        kinds.append((curve.counted, curve.counted, dict(curve.counts), float("nan")))
    for what, unit, figures, expected in kinds:
        for size, value in figures.items():
            metric = f"{what} against {curve.against}"
            yield row(SUBJECT, curve.name, metric, unit, size, value, threads=threads)
        middle = [v.p50 if isinstance(v, Quantiles) else v for v in figures.values()]
        slope, error = exponent(list(figures), middle)
        metric = f"exponent of {what} against {curve.against}"
        fit = Quantiles(slope - error, slope, slope + error)
        yield row(SUBJECT, curve.name, metric, "fitted", "all", fit, threads=threads)
        if not math.isnan(expected):
            yield row(SUBJECT, curve.name, metric, "expected", "all", expected, threads=threads)


def table(rows: Sequence[Row]) -> str:
    """One line per curve: sizes, figures at both ends, exponent."""
    lines = []
    for entry in rows:
        if entry.unit != "fitted":
            continue
        what = entry.metric.removeprefix("exponent of ")
        points = [e for e in rows if e.contender == entry.contender and e.metric == what]
        wanted = [e for e in rows if e.metric == entry.metric and e.contender == entry.contender]
        expected = [f"{e.p50:.0f}" for e in wanted if e.unit == "expected"]
        first, last = points[0], points[-1]
        ends = f"{first.p50:.3g} to {last.p50:.3g} {first.unit}"
        sizes = f"{float(first.x):,.0f} to {float(last.x):,.0f}"
        fit = f"{entry.p50:.2f} ({entry.p80 - entry.p50:.2f})"
        lines.append([entry.contender, what, sizes, ends, fit, *(expected or ["-"])])
    header = ["of", "figure", "sizes", "from and to", "exponent (error)", "expected"]
    return format_table(header, lines)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the rows to this .csv or .json")
    options = parser.parse_args(arguments)
    print(environment(options.threads))
    rows: list[Row] = []
    with pinned_threads(options.threads):
        for name in options.curves:
            # one at a time: the largest basis of each is gigabytes at full size
            found = list(measure(CURVES[name](options.size == "full"), options.rounds,
                                 options.threads))  # fmt: skip
            print(table(found), flush=True)
            rows += found
    if options.size == "small":
        rows = [replace(entry, subject=f"{SMALL}{entry.subject}") for entry in rows]
    if options.out:
        print(f"rows: {write_rows(options.out, rows)}")
    return rows


if __name__ == "__main__":
    main()
