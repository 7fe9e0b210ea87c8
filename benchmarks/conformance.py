"""Eigensolvers on prescribed spectra: which are silently wrong, and how many products they take.

    python -m benchmarks.conformance [--size small|full] [--out FILE.csv]

Spectra that are hard in known ways: slow decay, clusters, copies, both signs, low rank. Each solver
looks for the top k by magnitude in float64 at a residual of 1e-4 relative to each value (PRIMME's
tolerance, which is relative to the norm, is scaled to that). A solve is silently wrong if pairs of
the wanted set are missing and the solver does not say that this may be so. Then an eigenvalue with
four copies on several seeds. Everything here is a count: time does not matter.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import SMALL, Row, as_small, format_table, row, write_rows
from benchmarks.spectra import Diagonal
from curvlab.bench.solvers import Counted, arpack, primme
from curvlab.bench.timing import environment, version_of
from curvlab.eigen import block_lanczos, lanczos

TOL = 1e-4
ALL = "all spectra"
COPIES = "an eigenvalue with 4 copies"
Found = tuple[Tensor, int, bool]  # values (k,), products, whether it vouches for the set


def spectra() -> dict[str, Tensor]:
    """Eigenvalues, float64, by what makes them hard."""
    generator = torch.Generator().manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    def numbers(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def steps(first: float, last: float, count: int) -> Tensor:
        return torch.linspace(first, last, count, dtype=torch.float64)

    bulk = steps(-0.5, 1.0, 700)
    outside = numbers(25, 14, 9, 8, 6, 5, 4, 3.5, 3, 2.5)
    hessian = torch.cat([0.05 * normal(1500) ** 4, -0.02 * normal(300).abs()])
    index = torch.arange(2000, dtype=torch.float64)
    found = {
        "decaying": 0.9 ** index[:1000],
        "slowly decaying": 1 / (1 + index),
        "graded over 12 decades": 10.0 ** (-12 * index[:500] / 499),
        "clusters": torch.cat([10 + 1e-6 * index[:5], 5 + 1e-8 * index[:4], bulk]),
        "both signs": torch.cat([steps(5, 10, 6), -steps(4, 9, 6), 0.5 * bulk]),
        "tiny gaps": torch.cat([1 + 1e-4 * index[:12], steps(0, 0.9, 400)]),
        "low rank": torch.cat([numbers(5, 4, 3, -2, 1), torch.zeros(595, dtype=torch.float64)]),
        "Hessian-shaped": torch.cat([outside, hessian]),
        "Hessian-shaped with copies": torch.cat([outside, outside[1:5], hessian]),
    }
    for copies in (2, 3, 4, 8):
        some = numbers(*([10.0] * copies), 7, 7, 5, 4)
        found[f"multiplicity {copies}"] = torch.cat([some, bulk])
    return found


def solvers() -> dict[str, tuple[str, Callable[[Diagonal, int, int], Found]]]:
    """Name to version and a function of operator, k and seed."""

    def own(solve: Callable[..., object], **more: str) -> Callable[[Diagonal, int, int], Found]:
        def run(operator: Diagonal, k: int, seed: int) -> Found:
            pairs = solve(operator, k, tol=TOL, seed=seed, progress=False, **more)
            return pairs.values, pairs.matvecs, bool(pairs.complete)  # type: ignore[attr-defined]

        return run

    def other(
        solve: Callable[..., tuple[Tensor, Tensor]], relative_to_norm: bool = False
    ) -> Callable[[Diagonal, int, int], Found]:
        def run(operator: Diagonal, k: int, seed: int) -> Found:
            counting = Counted(operator)
            tol = TOL * _share(operator.values, k) if relative_to_norm else TOL
            try:
                values, _ = solve(counting, k, tol, seed=seed)
            except Exception as reason:  # a library may give up in any way of its own: it says so
                print(f"a solve ends with {type(reason).__name__}: {str(reason)[:100]}")
                return torch.zeros(0), counting.count, False
            return values, counting.count, True  # it says nothing against its answer

        return run

    ours = version_of("curvlab")
    table = {
        "lanczos": (ours, own(lanczos, dense=False)),  # type: ignore[arg-type]
        "block lanczos": (ours, own(block_lanczos)),
        "scipy eigsh": (version_of("scipy"), other(arpack)),
    }
    if util.find_spec("primme"):
        table["primme"] = (version_of("primme"), other(primme, relative_to_norm=True))
    return table


def _share(spectrum: Tensor, k: int) -> float:
    """The least wanted value over the norm: PRIMME's tolerance is relative to the norm.

    Wanted values of 0 have no relative residual: then the least that are not 0.
    """
    sizes = spectrum.abs().sort(descending=True).values
    wanted = sizes[:k]
    return float(wanted[wanted > 0][-1] / sizes[0])


def wrong(values: Tensor, spectrum: Tensor, k: int) -> bool:
    """Whether the ``k`` values are not the largest in magnitude, copies counted."""
    wanted = spectrum.abs().sort(descending=True).values[:k]
    got = values.double().abs().sort(descending=True).values
    if len(got) != k:
        return True
    return bool(((got - wanted).abs() > 4 * TOL * wanted + 1e-12 * wanted[0]).any())


def measure(counts: Sequence[int], seeds: Sequence[int]) -> list[Row]:
    """Products and silently wrong solves, spectrum by spectrum and in all."""
    cases = {name: (values, counts, (0,)) for name, values in spectra().items()}
    repeated = torch.tensor([4.0] * 4 + [2.0, 2.0, 6.0, -3.0], dtype=torch.float64)
    bulk = torch.linspace(-0.9, 0.9, 150, dtype=torch.float64)
    rows: list[Row] = []
    for name, (version, solve) in solvers().items():
        total = silent = 0
        for case, (values, ks, starts) in cases.items():
            products, missed, _ = _run(solve, values, ks, starts)
            total, silent = total + products, silent + missed
            rows.append(_row(name, version, "products", "products", case, products))
        rows.append(_row(name, version, "products", "products", ALL, total))
        rows.append(_row(name, version, "silently wrong", "solves", ALL, silent))
        _, missed, unsure = _run(solve, torch.cat([repeated, bulk]), (7,), seeds)
        share = 1.0 / len(seeds)
        rows.append(_row(name, version, "silently wrong", "of solves", COPIES, share * missed))
        rows.append(_row(name, version, "not vouched for", "of solves", COPIES, share * unsure))
    return rows


def _run(
    solve: Callable[[Diagonal, int, int], Found],
    values: Tensor,
    counts: Sequence[int],
    seeds: Sequence[int],
) -> tuple[int, int, int]:
    """Products, silently wrong solves and solves not vouched for, over all k and seeds."""
    products = missed = unsure = 0
    for k in counts:
        for seed in seeds:
            found, used, vouched = solve(Diagonal(values), k, seed)
            products += used
            missed += vouched and wrong(found, values, k)
            unsure += not vouched
    return products, missed, unsure


def _row(name: str, version: str, metric: str, unit: str, x: str, value: float) -> Row:
    return row("conformance", name, metric, unit, x, float(value), threads=1, version=version)


def table(rows: Sequence[Row]) -> str:
    """One line per solver."""
    figures = {
        (entry.contender, entry.metric, str(entry.x).removeprefix(SMALL)): entry for entry in rows
    }
    lines = []
    for name in dict.fromkeys(entry.contender for entry in rows):
        products = figures[name, "products", ALL]
        shares = [
            f"{100 * figures[name, metric, COPIES].p50:.0f} %"
            for metric in ("silently wrong", "not vouched for")
        ]
        silent = f"{figures[name, 'silently wrong', ALL].p50:.0f}"
        lines.append([name, products.version, f"{products.p50:.0f}", silent, *shares])
    header = ["solver", "version", "products", "silently wrong", "with 4 copies", "and not sure"]
    return format_table(header, lines)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--out", type=Path, help="write the rows to this .csv or .json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(environment(1))
    full = options.size == "full"
    rows = measure((4, 10) if full else (4,), range(20 if full else 3))
    if not full:  # another suite than the one of the target
        rows = as_small(rows)
    print(table(rows))
    if options.out:
        print(f"rows: {write_rows(options.out, rows)}")
    return rows


if __name__ == "__main__":
    main()
