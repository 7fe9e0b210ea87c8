"""The projection profiler: ``python -m benchmarks.projection [--size SIZE] [--out DIR]``.

For each number of parameters P and of protected directions m: what one projection moves, how fast,
how near to the memory's own speed (one reading, measured in the same run), and what it leaves
behind. Contenders are curvlab's storage dtypes, tiers and layouts, and the styles found in public
continual-learning code. Then the projection's share of a training step, and a basis of the size of
the ViT's at 20 tasks. Writes ``projection.csv`` and ``projection.png``.

Speed is in units of torch's float32 projection on rows ``(m, P)`` at its best: ``mv`` and
``addmv``, matrix products with one column, or columns divided over threads, whichever is fastest at
that size and number of threads. It is interleaved with every contender. ``--alone`` repeats the
contenders in memory with one thread against torch with one. The leak is ``|Q g'| / |g'|`` against
the basis that was asked for, in float64; ``g`` has half of its norm in the span. A contender that
leaves more than 1e-3 is not faster, it does less: it is named and not timed, torch's ways included.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.measure import Row, format_table, read, row, write_rows
from benchmarks.projection_contenders import (
    BASELINE,
    Contender,
    Problem,
    contenders,
    problem,
    scratch,
    torch_parts,
    torch_products,
    torch_rows,
)
from benchmarks.projection_picture import Point, draw_roofline
from benchmarks.projection_steps import around_the_kernel, step_overheads, vit_projection
from curvlab.basis import basis_bytes, largest_basis
from curvlab.bench.timing import (
    Quantiles,
    environment,
    interleave,
    per_round_ratio,
    pinned_threads,
    quantiles,
)

SUBJECT = "projection"
ALONE = "speed, one thread"
WRONG = 1e-3  # share of a gradient left in the span at which a contender is not timed
GPU_BYTES = {"24 GB": 24_000_000_000, "40 GB": 40_000_000_000, "80 GB": 80_000_000_000}


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured."""

    sizes: tuple[tuple[int, int], ...]  # (P, m)
    rounds: int
    stream_elements: int
    networks: str
    directions: int  # of the step overheads
    vit: tuple[int, int]  # (P, m) of the largest basis
    shortest: float = 0.02  # seconds of a sample
    brief: tuple[tuple[int, int], ...] = ()  # (P, m) without other tiers and public code's styles


SWEEPS = {
    "small": Sweep(((4_000, 5), (60_000, 20)), 5, 1 << 22, "small", 10, (50_000, 40)),
    "standard": Sweep(
        ((500_000, 20), (500_000, 100), (12_400_000, 20)),
        5,
        1 << 25,
        "small",
        20,
        (1_000_000, 100),
        brief=((500_000, 20), (500_000, 100), (12_400_000, 20)),
    ),
    "full": Sweep(
        ((18_010, 100), (500_000, 20), (500_000, 100), (12_400_000, 20), (12_400_000, 100)),
        9,
        1 << 26,
        "full",
        20,
        (11_700_000, 400),  # 4.7e9 elements
        brief=((12_400_000, 100),),  # 5 GB in float32: minutes for each contender
    ),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the hardware does at best, measured in this run: bytes and flop per second."""

    bandwidth: float
    peak: float


def machine(sweep: Sweep, threads: int) -> Machine:
    """Reading an array, and the peak of a float32 matrix product."""
    array = torch.ones(2 * sweep.stream_elements)
    side = 2048 if sweep.stream_elements > 1 << 24 else 512
    square = torch.ones(side, side)
    seconds = interleave(
        {"stream": lambda: read(array), "gemm": lambda: square @ square},
        rounds=sweep.rounds,
        threads=threads,
        shortest=sweep.shortest,
    )
    return Machine(
        bandwidth=8 * sweep.stream_elements / min(seconds["stream"]),
        peak=2 * side**3 / min(seconds["gemm"]),
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender at one size: seconds per round, and the baseline's in the same rounds.

    Attributes:
        against: The way of torch that is the baseline.
        alone: Whether it is the repetition with one thread.
    """

    contender: Contender
    size: str
    seconds: list[float]
    baseline: list[float]
    against: str
    alone: bool = False


def measure(
    n: int, m: int, sweep: Sweep, threads: int, folder: Path, alone: bool = False
) -> Iterator[Measured]:
    """Every contender at one size, each interleaved with the baseline."""
    size = f"P={n} m={m}"
    given = problem(n, m)
    reference, ways = torch_at_its_best(given, sweep, threads)
    for way, taken, base in ways:
        yield Measured(way, size, taken, base, reference.name, alone)
    for build in contenders(given, folder, whole=(n, m) not in sweep.brief and not alone):
        contender = build()
        if not contender.leak <= WRONG:
            print(f"{contender.name}, {size}: wrong, it leaves {contender.leak:.0e}: not timed")
            continue
        seconds = interleave(
            {"baseline": reference.run, "contender": contender.run},
            rounds=sweep.rounds,
            threads=threads,
            shortest=sweep.shortest,
        )
        # without what it projects with: the next basis needs the room
        figures = replace(contender, run=lambda: None)
        del contender
        yield Measured(
            figures, size, seconds["contender"], seconds["baseline"], reference.name, alone
        )


def torch_at_its_best(
    given: Problem, sweep: Sweep, threads: int
) -> tuple[Contender, list[tuple[Contender, list[float], list[float]]]]:
    """The fastest right way of torch's, and all of them: seconds, and those of the fastest."""
    ways = [torch_rows(given), torch_products(given), torch_parts(given)]
    right = {way.name: way for way in ways if way.leak <= WRONG}
    if not right:
        raise RuntimeError("no way of torch's is right here: there is nothing to compare with")
    seconds = interleave(
        {name: way.run for name, way in right.items()},
        rounds=sweep.rounds,
        threads=threads,
        shortest=sweep.shortest,
    )
    best = min(right, key=lambda name: quantiles(seconds[name]).p50)
    return right[best], [(way, seconds[name], seconds[best]) for name, way in right.items()]


def rows_of(found: Measured, hardware: Machine, threads: int) -> list[Row]:
    """Speed, bandwidth, bytes and leak of one contender, in the shared schema."""
    contender = found.contender
    speed = quantiles(per_round_ratio(found.baseline, found.seconds))
    share = quantiles([contender.moved / s / hardware.bandwidth for s in found.seconds])
    version = None if contender.ours else str(torch.__version__)
    figures: list[tuple[str, str, Quantiles | float]] = [
        (ALONE if found.alone else "speed", f"x {BASELINE}", speed)
    ]
    if not found.alone:
        figures += [
            ("bandwidth", "of one reading", share),
            ("moved", "bytes", float(contender.moved)),
            ("leak", "|Qg'|/|g'|", contender.leak),
        ]
    if contender.name == found.against:
        seconds = quantiles(found.seconds)
        name = f"{ALONE}, torch's best way" if found.alone else "torch's best way"
        figures.append((name, "seconds", seconds))
    return [
        row(
            SUBJECT,
            contender.name,
            metric,
            unit,
            found.size,
            value,
            threads=threads,
            version=version,
        )
        for metric, unit, value in figures
    ]


def line_of(found: Measured, hardware: Machine) -> list[str]:
    """One line of the printed table."""
    contender = found.contender
    seconds = quantiles(found.seconds).p50
    speed = quantiles(per_round_ratio(found.baseline, found.seconds))
    achieved = contender.moved / seconds
    return [
        contender.name,
        found.size,
        f"{contender.moved / 1e6:.1f}",
        f"{1e3 * seconds:.3f}",
        f"{achieved / 1e9:.1f}",
        f"{100 * achieved / hardware.bandwidth:.0f} %",
        f"{speed.p50:.2f} ({speed.p20:.2f}-{speed.p80:.2f})",
        f"{contender.leak:.0e}",
    ]


def print_sizes(n: int, m: int) -> None:
    """What the largest basis takes, and how many directions fit beside nothing else."""
    lines = []
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        needed = basis_bytes(n, m, dtype)
        fits = [
            f"{'yes' if needed <= available else 'no'}, {largest_basis(n, available, dtype)} fit"
            for available in GPU_BYTES.values()
        ]
        lines.append([str(dtype).removeprefix("torch."), f"{needed / 1e9:.1f} GB", *fits])
    print(f"\nA basis of {m} x {n} = {m * n:.2g} elements:")
    print(format_table(["dtype", "takes", *GPU_BYTES], lines))


def run(
    size: str,
    out: Path,
    threads: int,
    sizes: Sequence[tuple[int, int]] | None = None,
    alone: bool = False,
) -> list[Row]:
    """Measure everything, print the tables, write rows and picture to ``out``.

    With ``sizes``, ``(P, m)`` each, only the projections of those. With ``alone`` also with one
    thread.
    """
    sweep, whole = SWEEPS[size], sizes is None
    if sizes is not None:
        sweep = replace(sweep, sizes=tuple(sizes))
    out.mkdir(parents=True, exist_ok=True)
    with pinned_threads(threads):
        hardware = machine(sweep, threads)
        print(environment(threads))
        print(f"reading {hardware.bandwidth / 1e9:.1f} GB/s, ", end="")
        print(f"float32 GEMM {hardware.peak / 1e9:.0f} Gflop/s\n")
        rows, points = list[Row](), list[Point]()
        with scratch(out) as folder:
            turns = [(n, m, False) for n, m in sweep.sizes]
            # last: what stops early has the rows that most targets ask for
            turns += [(n, m, True) for n, m in sweep.sizes] if alone else []
            for n, m, single in turns:
                count = 1 if single else threads
                lines = list[list[str]]()
                torch.set_num_threads(count)  # the outer context restores it
                for found in measure(n, m, sweep, count, folder, single):
                    rows += rows_of(found, hardware, count)
                    write_rows(out / "projection.csv", rows)  # the next one may take long
                    lines.append(line_of(found, hardware))
                    one, each = found.contender, quantiles(found.seconds).p50
                    if not single:
                        points.append(
                            Point(one.name, found.size, one.flops / one.moved, one.flops / each,
                                  one.ours)
                        )  # fmt: skip
                print(f"torch's best way with {count} threads: {found.against}")
                header = ["contender", "size", "MB moved", "ms", "GB/s", "of one reading"]
                print(format_table([*header, "x torch float32", "leak"], lines), flush=True)
                print()
            if not whole:
                return rows
            torch.set_num_threads(threads)
            rows += _around(sweep, threads)
            rows += _overheads(sweep, threads)
            rows += _largest(sweep, threads, folder)
    print_sizes(*sweep.vit)
    write_rows(out / "projection.csv", rows)
    draw_roofline(
        out / "projection.png", points, hardware.bandwidth, hardware.peak, environment(threads)
    )
    return rows


def _around(sweep: Sweep, threads: int) -> list[Row]:
    rows = []
    for size, ratio in around_the_kernel(sweep.rounds, threads, sweep.shortest):
        name, unit = "Basis.project_out_", "x the bare kernel"
        rows.append(row(SUBJECT, name, "around the kernel", unit, size, ratio, threads=threads))
        print(f"{name}, {size}: {ratio.p50:.2f} ({ratio.p20:.2f}-{ratio.p80:.2f}) {unit}")
    return rows


def _overheads(sweep: Sweep, threads: int) -> list[Row]:
    rows, lines = [], []
    found = step_overheads(sweep.networks, sweep.directions, sweep.rounds, threads, sweep.shortest)
    for network, dtype, share in found:
        name = f"curvlab {dtype}, m={sweep.directions}"
        rows.append(
            row(SUBJECT, name, "overhead", "training steps", network, share, threads=threads)
        )
        spread = f"({100 * share.p20:.1f}-{100 * share.p80:.1f})"
        lines.append([network, name, f"{100 * share.p50:.1f} % {spread}"])
    print("\nProjection of a model's gradients, in units of one training step at batch 10:")
    print(format_table(["network", "memory", "share"], lines))
    return rows


def _largest(sweep: Sweep, threads: int, folder: Path) -> list[Row]:
    n, m = sweep.vit
    size, rows = f"P={n} m={m}", []
    for where, moved, seconds, bandwidth in vit_projection(n, m, 3, threads, folder):
        name = f"curvlab int8 {where}"
        share = quantiles([moved / s / b for s, b in zip(seconds, bandwidth, strict=True)])
        rows.append(row(SUBJECT, name, "bandwidth", "of one reading", size, share, threads=threads))
        print(
            f"\n{name}, {size} ({n * m:.2g} elements): {quantiles(seconds).p50:.3f} s per "
            f"projection, {moved / 1e9:.2f} GB moved, {100 * share.p50:.0f} % of a reading's speed"
        )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=list(SWEEPS), default="small")
    parser.add_argument("--out", type=Path, default=Path("results/projection"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", metavar="P:m", help="only these projections")
    parser.add_argument("--alone", action="store_true", help="also with one thread")
    arguments = parser.parse_args()
    sizes = arguments.sizes and [tuple(map(int, one.split(":"))) for one in arguments.sizes]
    run(arguments.size, arguments.out, arguments.threads, sizes, arguments.alone)


if __name__ == "__main__":
    main()
