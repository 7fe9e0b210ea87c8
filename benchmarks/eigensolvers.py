"""Eigensolvers on the same operators, to the same residual; who misses it is not timed.

    python -m benchmarks.eigensolvers [--size small|full] [--operators outliers mlp resnet vit]
                                      [--samples N] [--k 20] [--tol 1e-3] [--rounds 3] [--cpu-time]
                                      [--threads 2/1 2/2 1/1] [--curve]

For each operator (a prescribed spectrum, and the Hessians of :mod:`benchmarks.trained`) every
solver looks for the top k by magnitude. The gate: every true relative residual, from one explicit
product per pair, is at most ``tol``, and no pair of the reference set (``wanted``) is missing.
One that misses may try again with more effort; what it gave at its defaults stays in the table.

Gate, threads, rounds and contenders are those of ``curvlab bench eig`` (:mod:`curvlab.bench`). A
sample makes the operator anew and solves: "time" is both, "time, operator reused" the solve alone;
"speed" is certified lanczos' time over the solver's, inside the rounds. ``--curve`` adds products
and time against accuracy.

Deflated power iteration needs thousands of products: where it cannot be run to the end its products
are counted on a diagonal operator with the Ritz values of the real one, and one product is timed.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure import Row, format_table, row, write_rows
from benchmarks.spectra import Diagonal, outliers
from benchmarks.trained import SIZES, trained
from curvlab.bench.contest import REFERENCE, SHORT, Contest, Outcome, Timing, contest, sample
from curvlab.bench.gate import judged, wanted
from curvlab.bench.problem import Plain, Problem
from curvlab.bench.solvers import contenders
from curvlab.bench.timing import Quantiles, Threads, environment, interleave, quantiles
from curvlab.eigen import lanczos, power_iteration
from curvlab.operators import Hessian
from curvlab.probe import LinearOperator

COUNTED = "deflated power iteration, counted"
WARM = (0.999, 0.97)  # overlaps of earlier eigenvectors with those of now
CURVE = (1e-1, 1e-2, 1e-3, 1e-4)  # tolerances of the curve
SETTINGS = (Threads(2, 1), Threads(2, 2), Threads(1, 1))
ELAPSED = Timing(2)


def problem(name: str, size: str, samples: int | None = None) -> Problem:
    """The operator called ``name``; what is not at its full size says so in its name.

    Args:
        samples: Of the Hessian, in place of the usual number; that too is said in its name.
    """
    shown = name if size == "full" else f"small {name}"
    shown = shown if samples is None else f"{shown} N={samples}"
    if name == "outliers":
        spectrum = outliers(100_000 if size == "full" else 10_000)
        return Problem(shown, lambda: spectrum, spectrum, spectrum=spectrum.values)
    network = trained(SIZES[size][name], samples=samples)
    parameters = list(network.model.parameters())

    def gradient() -> object:
        value = network.loss(network.model(network.inputs), network.targets)
        return torch.autograd.grad(value, parameters)

    def make() -> Hessian:
        return Hessian(network.model, network.loss, (network.inputs, network.targets))

    plain = Plain(network.model, network.loss, [(network.inputs, network.targets)])
    return Problem(shown, make, make(), gradient, plain)


def simulated_power(operator: LinearOperator, k: int, tol: float) -> int:
    """Products of deflated power iteration on a diagonal operator with this one's Ritz values."""
    steps = min(operator.n // 2, 6 * k)
    ritz = lanczos(operator, steps, tol=1e-2, certify=False, progress=False)
    surrogate = Diagonal(ritz.values.float())
    return power_iteration(surrogate, k, tol=tol, stop="residual", max_products=200_000).matvecs


def benchmark(
    found: Problem,
    k: int,
    tol: float,
    rounds: int,
    *,
    whole: bool,
    only: Sequence[str] = (),
    timing: Timing = ELAPSED,
    settings: Sequence[Threads] = SETTINGS,
) -> list[Row]:
    """Gate and time all solvers on one operator; prints a table and returns its rows."""
    result = contest(
        found, k, tol, rounds, whole=whole, only=only, timing=timing, settings=settings
    )
    rows = rows_of(result)
    if not whole and (not only or COUNTED.startswith(tuple(only))):
        rows += _counted_power(found, k, tol, timing)
    for name, why in result.absent.items():
        print(f"left out: {name} ({why})")
    print(f"\n{found.name}: n = {found.operator.n:,}, top {k} at relative residual {tol:g}")
    print(render(rows), flush=True)
    if found.name.endswith("mlp") and (not only or "lanczos" in only):  # whose targets they are
        for entry in warm_starts(found, k, tol, timing.threads):
            print(f"{entry.contender}: {entry.p50:.2f} of a cold start's products", flush=True)
            rows.append(entry)
    return rows


def rows_of(result: Contest) -> list[Row]:
    """Products and time of every solver that passed; of all of them what they got wrong."""
    return [
        entry for name, one in result.outcomes.items() for entry in _rows_of_one(result, name, one)
    ]


def warm_starts(found: Problem, k: int, tol: float, threads: int) -> list[Row]:
    """Products of a start from earlier eigenvectors that have turned, over those of a cold one.

    The overlap is the cosine between each earlier vector and its eigenvector now.
    """
    cold = lanczos(found.operator, k, tol=tol, progress=False)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(k, found.operator.n, generator=generator, dtype=found.operator.dtype)
    noise -= (noise @ cold.vectors.T) @ cold.vectors
    noise /= noise.norm(dim=1, keepdim=True)
    rows = []
    for overlap in WARM:
        turned = overlap * cold.vectors + (1 - overlap**2) ** 0.5 * noise
        warm = lanczos(found.operator, k, tol=tol, v0=turned, progress=False)
        rows.append(
            row(f"eigensolver k={k} tol={tol:g}", f"lanczos, started at overlap {overlap:g}",
                "products, warm over cold", "ratio", found.name, warm.matvecs / cold.matvecs,
                threads=threads)
        )  # fmt: skip
    return rows


def _rows_of_one(result: Contest, name: str, outcome: Outcome) -> list[Row]:
    figures: list[tuple[str, str, Quantiles | float]] = [
        ("residual", "relative", outcome.residual),
        ("missing", "pairs", float(outcome.missing)),
        ("residual at defaults", "relative", outcome.first_residual),
    ]
    if outcome.passes(result.tol):
        unit = "gradients" if result.found.gradient else "seconds"
        figures += [
            ("time", unit, quantiles([one.whole for one in outcome.samples])),
            ("time, operator reused", unit, quantiles([one.solve for one in outcome.samples])),
            ("products", "products", float(outcome.answer[2])),
            ("torch threads", "threads", float(outcome.threads.torch)),
            ("BLAS threads", "threads", float(outcome.threads.blas)),
            ("samples", "solves", float(len(outcome.samples))),
        ]
        for other in (REFERENCE, f"{REFERENCE}, uncertified"):
            reference = result.outcomes.get(other)
            if reference is not None and reference.passes(result.tol):
                for reused, word in ((False, ""), (True, ", operator reused")):
                    ratios = quantiles(outcome.against(reference, reused))
                    figures.append((f"time over that of {other}{word}", "ratio", _inverse(ratios)))
        figures += _own_figures(result, name, outcome)
    return [
        row(
            f"eigensolver k={result.k} tol={result.tol:g}",
            name,
            metric,
            unit,
            result.found.name,
            value,
            threads=outcome.threads.torch,
            version=outcome.contender.version,
        )
        for metric, unit, value in figures
    ]


def _own_figures(
    result: Contest, name: str, outcome: Outcome
) -> list[tuple[str, str, Quantiles | float]]:
    """Of certified lanczos: what making the operator costs, and what the certificate does."""
    plain = result.outcomes.get(f"{REFERENCE}, uncertified")
    if name != REFERENCE or result.found.gradient is None:
        return []
    found: list[tuple[str, str, Quantiles | float]] = [
        ("set-up", "gradients", quantiles([one.set_up for one in outcome.samples]))
    ]
    if plain is not None and plain.passes(result.tol):
        more = float(outcome.answer[2] - plain.answer[2])
        found.append(("products of the certificate", "products", more))
    return found


def _inverse(of: Quantiles) -> Quantiles:
    return Quantiles(1 / of.p80, 1 / of.p50, 1 / of.p20, of.samples)


def _counted_power(found: Problem, k: int, tol: float, timing: Timing) -> list[Row]:
    """Deflated power iteration where it takes too long: its products, times one product's time."""
    count = simulated_power(found.operator, k, tol)
    vector = torch.ones(found.operator.n, dtype=found.operator.dtype)
    calls = {"product": lambda: found.operator @ vector}
    if found.gradient is not None:
        calls["gradient"] = found.gradient  # type: ignore[assignment]
    threads = timing.threads
    seconds = interleave(calls, rounds=3, threads=threads, clock=timing.clock)
    unit = "gradients" if found.gradient is not None else "seconds"
    per = [1.0] * 3 if found.gradient is None else seconds["gradient"]
    times = quantiles([count * a / b for a, b in zip(seconds["product"], per, strict=True)])
    subject = f"eigensolver k={k} tol={tol:g}"
    return [
        row(subject, COUNTED, "time", unit, found.name, times, threads=threads),
        row(subject, COUNTED, "products", "products", found.name, float(count), threads=threads),
    ]


def render(rows: Sequence[Row]) -> str:
    """One line per solver of one operator."""
    cells: dict[str, dict[str, Row]] = {}
    for entry in rows:
        cells.setdefault(entry.contender, {})[entry.metric] = entry
    lines = []
    for name, of in cells.items():
        version = next(iter(of.values())).version
        line = [name, version, "-", "-", "WRONG", "-", "-", "", "-"]
        if "products" in of:
            line[3] = f"{of['products'].p50:.0f}"
            line[4] = _spread(of["time"])
        if "torch threads" in of:
            line[2] = f"{of['torch threads'].p50:.0f}/{of['BLAS threads'].p50:.0f}"
            line[5] = _spread(of["time, operator reused"])
            line[6] = f"{of['samples'].p50:.0f}"
        if "residual" in of:
            line[7] = f"{of['residual'].p50:.1e}"
            line[7] += f", {of['missing'].p50:.0f} missing" if of["missing"].p50 else ""
            line[8] = f"{of['residual at defaults'].p50:.1e}"
        lines.append(line)
    header = ["solver", "version", "torch/BLAS threads", "products", "time", "operator reused"]
    return format_table([*header, "samples", "residual", "at its defaults"], lines)


def _spread(of: Row) -> str:
    return f"{of.p50:.4g} ({of.p20:.4g}-{of.p80:.4g}) {of.unit}"


def curve(found: Problem, k: int, timing: Timing = ELAPSED) -> list[Row]:
    """Products and time against the accuracy reached, for solvers that get there."""
    truth = wanted(found, k, min(CURVE))[0]
    rows = []
    for tol in CURVE:
        table = contenders(found, k, tol, truth, whole=False)[0]
        for name, contender in table.items():
            turn = (found, contender, contender.efforts[0], timing, SETTINGS[0])
            samples = [sample(*turn)]
            if samples[0][1].seconds < SHORT:
                # loading at first use does not count, and short runs are easily disturbed
                samples += [sample(*turn) for _ in "ab"]
            answer, taken = samples[0][0], min(taken.whole for _, taken in samples)
            worst, missing = judged(found.operator, answer, truth, max(tol, 1e-3))
            if missing or not worst < 1.0:
                continue
            unit = "gradients" if found.gradient else "seconds"
            for metric, of, value in (
                ("products", "products", float(answer[2])),
                ("time", unit, taken),
            ):
                subject = f"eigensolver curve k={k}, {found.name}"
                version, threads = contender.version, timing.threads
                rows.append(
                    row(subject, name, metric, of, worst, value, threads=threads, version=version)
                )
    return rows


def _threads(text: str) -> Threads:
    torch_threads, _, blas = text.partition("/")
    return Threads(int(torch_threads), int(blas))


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eigensolvers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    names = ("outliers", "mlp", "resnet", "vit")
    parser.add_argument("--operators", nargs="+", choices=names, default=names)
    parser.add_argument("--samples", type=int, help="of the Hessians, in place of the usual ones")
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--tol", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=3, help="samples of a solver, at least")
    parser.add_argument(
        "--threads",
        nargs="+",
        type=_threads,
        default=SETTINGS,
        metavar="TORCH/BLAS",
        help="numbers of threads that every solver is tried with; the fastest counts",
    )
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of solvers' names")
    parser.add_argument("--out", type=Path, default=Path("results") / "benchmarks")
    parser.add_argument("--curve", action="store_true", help="products and time vs accuracy")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine; 1 thread")
    options = parser.parse_args(arguments)
    timing = Timing(1, time.process_time) if options.cpu_time else ELAPSED
    settings = (Threads(1, 1),) if options.cpu_time else tuple(options.threads)
    torch.set_num_threads(timing.threads)
    print(environment(timing.threads))
    rows: list[Row] = []
    for name in options.operators:
        found = problem(name, options.size, options.samples)
        # whole runs of power iteration only where a product takes milliseconds
        whole = name in ("outliers", "mlp")
        rows += benchmark(
            found,
            options.k,
            options.tol,
            options.rounds,
            whole=whole,
            only=options.only,
            timing=timing,
            settings=settings,
        )
        if options.curve:
            rows += curve(found, options.k, timing)
        # after each operator: the next may take long, and what is measured should be kept
        print(f"rows: {write_rows(options.out / 'eigensolvers.csv', rows)}", flush=True)
    return rows


if __name__ == "__main__":
    main()
