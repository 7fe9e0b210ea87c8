"""Eigensolvers on the same operators, to the same residual; who misses it is not timed.

    python -m benchmarks.eigensolvers [--size small|full] [--operators outliers mlp resnet vit]
                                      [--samples N] [--k 20] [--tol 1e-3] [--rounds 3] [--cpu-time]
                                      [--threads 2/1 2/2 1/1] [--curve]

For each operator (a prescribed spectrum, and the Hessians of :mod:`benchmarks.trained`) every
solver looks for the top k by magnitude. The gate: every true relative residual, from one explicit
product per pair, is at most ``tol``, and no pair of the reference set (``wanted``) is missing.
One that misses may try again with more effort; what it gave at its defaults stays in the table.

Every solver that passed is then run once with each of ``--threads`` (torch's / those of SciPy's
BLAS); its best is used for the ``--rounds`` interleaved runs and stands in its row. A sample makes
the operator anew and solves, between two gradients on the same data: "time" is both, "time,
operator reused" the solve alone. ``--curve`` adds products and time against accuracy.

Deflated power iteration needs thousands of products: where it cannot be run to the end its products
are counted on a diagonal operator with the Ritz values of the real one, and one product is timed.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.eigensolver_contenders import (
    Answer,
    Contender,
    Diagonal,
    Problem,
    Threads,
    contenders,
    problem,
)
from benchmarks.eigensolver_gate import judged, wanted
from benchmarks.measure import (
    Quantiles,
    Row,
    environment,
    format_table,
    interleave,
    quantiles,
    row,
    write_rows,
)
from benchmarks.trained import SIZES
from curvlab.eigen import lanczos, power_iteration
from curvlab.probe import LinearOperator

COUNTED = "deflated power iteration, counted"
CURVE = (1e-1, 1e-2, 1e-3, 1e-4)  # tolerances of the curve
SHORT = 3.0  # seconds of samples that a fast solver gets at least, whatever --rounds says
SETTINGS = (Threads(2, 1), Threads(2, 2), Threads(1, 1))


@dataclass(frozen=True, slots=True)
class Timing:
    """How time is taken: elapsed on two threads, or CPU time on one where other work runs."""

    threads: int = 2
    clock: Callable[[], float] = time.perf_counter

    def gradient(self, found: Problem, rounds: int = 2) -> float:
        """Seconds of one gradient; 1 where there is none, so that the unit stays seconds."""
        if found.gradient is None:
            return 1.0
        calls = {"one": found.gradient}
        return min(interleave(calls, rounds=rounds, threads=self.threads, clock=self.clock)["one"])


ELAPSED = Timing()


@dataclass(frozen=True, slots=True)
class Sample:
    """Time of one run, in gradients (or in seconds where there are none)."""

    set_up: float
    solve: float

    @property
    def whole(self) -> float:
        return self.set_up + self.solve


@dataclass(slots=True)
class Outcome:
    """What the gate found, the best threads, and the samples with them so far."""

    contender: Contender
    answer: Answer
    effort: float
    residual: float
    missing: int
    first_residual: float  # at its own defaults
    threads: Threads
    samples: list[Sample] = field(default_factory=list)

    def passes(self, tol: float) -> bool:
        return self.residual <= tol and self.missing == 0


def sample(
    found: Problem,
    contender: Contender,
    effort: float,
    timing: Timing = ELAPSED,
    threads: Threads = SETTINGS[0],
) -> tuple[Answer, Sample]:
    """One run, and its time in gradients measured right before and after it (or in seconds)."""
    before = timing.gradient(found)
    with threads.pinned():
        began = timing.clock()
        solve = contender.prepare()
        prepared = timing.clock()
        answer = solve(effort)
        done = timing.clock()
    unit = 0.5 * (before + timing.gradient(found))
    return answer, Sample((prepared - began) / unit, (done - prepared) / unit)


def enter(
    found: Problem,
    contender: Contender,
    truth: Tensor,
    tol: float,
    timing: Timing = ELAPSED,
    settings: Sequence[Threads] = SETTINGS[:1],
) -> Outcome:
    """Run at the contender's default, then with more effort until the gate lets it pass.

    One that passed tries the other ``settings`` of threads and keeps to the fastest.
    """
    first = None
    for effort in contender.efforts:
        try:
            answer, taken = sample(found, contender, effort, timing, settings[0])
            worst, missing = judged(found.operator, answer, truth, tol)
        except Exception as reason:  # a library may fail in any way of its own: say how
            print(f"fails: {type(reason).__name__}: {str(reason)[:200]}")
            answer, taken = (truth, torch.zeros(0), 0), Sample(0.0, 0.0)
            worst, missing = float("inf"), len(truth)
        first = worst if first is None else first
        outcome = Outcome(contender, answer, effort, worst, missing, first, settings[0], [taken])
        if outcome.passes(tol):
            for threads in settings[1:]:
                other = sample(found, contender, effort, timing, threads)[1]
                if other.whole < outcome.samples[0].whole:
                    outcome.threads, outcome.samples = threads, [other]
            break
    return outcome


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
    truth = wanted(found, k, tol)
    table = contenders(found, k, tol, truth, whole=whole)
    outcomes = {
        name: enter(found, contender, truth, tol, timing, settings)
        for name, contender in table.items()
        if not only or name.startswith(tuple(only))
    }
    passed = {name: one for name, one in outcomes.items() if one.passes(tol)}
    names = list(passed)
    turns = {name: _turns(passed[name], rounds, found, timing) for name in names}
    for turn in range(1, max(turns.values(), default=0)):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn < turns[name]:
                one = passed[name]
                again = sample(found, one.contender, one.effort, timing, one.threads)
                one.samples.append(again[1])
    rows = [
        entry
        for name, one in outcomes.items()
        for entry in rows_of(found, name, one, k, tol, timing.threads)
    ]
    if not whole and (not only or COUNTED.startswith(tuple(only))):
        rows += _counted_power(found, k, tol, timing)
    print(f"\n{found.name}: n = {found.operator.n:,}, top {k} at relative residual {tol:g}")
    print(render(rows), flush=True)
    return rows


def _turns(outcome: Outcome, rounds: int, found: Problem, timing: Timing) -> int:
    """Samples of a solver: more where a solve is short."""
    seconds = outcome.samples[0].whole * timing.gradient(found, rounds=1)
    return max(rounds, min(9, int(SHORT / max(seconds, 1e-3))))


def rows_of(
    found: Problem, name: str, outcome: Outcome, k: int, tol: float, threads: int = 2
) -> list[Row]:
    """Products and time of a solver that passed; of every solver what it got wrong."""
    figures: list[tuple[str, str, Quantiles | float]] = [
        ("residual", "relative", outcome.residual),
        ("missing", "pairs", float(outcome.missing)),
        ("residual at defaults", "relative", outcome.first_residual),
    ]
    if outcome.passes(tol):
        unit = "gradients" if found.gradient else "seconds"
        figures += [
            ("time", unit, quantiles([one.whole for one in outcome.samples])),
            ("time, operator reused", unit, quantiles([one.solve for one in outcome.samples])),
            ("products", "products", float(outcome.answer[2])),
            ("torch threads", "threads", float(outcome.threads.torch)),
            ("BLAS threads", "threads", float(outcome.threads.blas)),
            ("samples", "solves", float(len(outcome.samples))),
        ]
    return [
        row(
            f"eigensolver k={k} tol={tol:g}",
            name,
            metric,
            unit,
            found.name,
            value,
            threads=threads,
            version=outcome.contender.version,
        )
        for metric, unit, value in figures
    ]


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
    """Products and time against the accuracy reached, for the solvers that are not hopeless."""
    truth = wanted(found, k, min(CURVE))
    rows = []
    for tol in CURVE:
        table = contenders(found, k, tol, truth, whole=False)
        for name, contender in table.items():
            samples = [sample(found, contender, contender.efforts[0], timing)]
            if samples[0][1].whole * timing.gradient(found, rounds=1) < SHORT:
                # what is loaded at first use is nobody's time, and short ones are easily disturbed
                samples += [sample(found, contender, contender.efforts[0], timing) for _ in "ab"]
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
