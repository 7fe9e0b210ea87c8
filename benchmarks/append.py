"""Adding vectors to the memory: how orthonormal it stays, and what that costs.

    python -m benchmarks.append [--size small|full] [--out FILE.csv]

Blocks of growing condition number and degenerate ones go into a :class:`curvlab.Basis`; what counts
is the largest entry of ``|Q Q' - I|`` in float64. Then a block is added to a basis that holds rows
already, interleaved with the ways of public code: one pass of modified Gram-Schmidt, ``torch``'s QR
of old and new rows together, and the textbook's best, block Gram-Schmidt twice around Cholesky QR
twice. One that is not orthonormal to 1e-5 is shown as wrong and not timed. The unit of time is one
reading of the rows; each way has the number of threads that suits it best. Norms are timed in
readings of the vector, and every spelling of torch's that is as accurate is a rival.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from curvlab_kernels import ops
from torch import Tensor

from benchmarks.measure import TRIED, Row, as_small, format_table, read, row, threads_of, write_rows
from curvlab.basis import Basis
from curvlab.bench.timing import (
    best_threads,
    environment,
    interleave,
    per_round_ratio,
    pinned_threads,
    quantiles,
    version_of,
)

SUBJECT = "append"
TEXTBOOK = "BCGS2 + CholeskyQR2 in torch"
WRONG = 1e-5  # orthogonality at which a way to append counts as wrong


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured: a vector's length for norms, blocks ``(b, n)``, rows held before."""

    norm: int
    block: tuple[int, int]
    long: tuple[int, int, int]  # n, rows held, rows added
    rounds: int


SIZES = {
    "small": Size(400_000, (12, 3_000), (20_000, 20, 5), 3),
    "full": Size(12_400_000, (30, 20_000), (1_100_000, 40, 20), 7),
}


def orthogonality(rows: Tensor) -> float:
    """Largest entry of ``|Q Q' - I|`` of ``rows`` ``(m, n)``, in float64; infinite for NaN."""
    exact = rows.double()
    off = (exact @ exact.T - torch.eye(len(exact), dtype=torch.float64)).abs().max()
    return float(off) if bool(torch.isfinite(off)) else float("inf")


def conditioned(b: int, n: int, condition: float, generator: torch.Generator) -> Tensor:
    """A block ``(b, n)``, float32, with singular values from 1 to ``1 / condition``."""
    left = torch.linalg.qr(torch.randn(b, b, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, b, generator=generator, dtype=torch.float64)).Q.T
    values = condition ** -torch.linspace(0, 1, b, dtype=torch.float64)
    block: Tensor = (left * values) @ right
    return block.float()


def degenerate(b: int, n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Blocks on which Gram-Schmidt without care makes NaN, ghosts or copies."""
    index = torch.arange(1, n + 1)
    laeuchli = torch.zeros(b, n)
    laeuchli[:, 0] = 1.0
    laeuchli[torch.arange(b), torch.arange(b) + 1] = 1e-6
    one = torch.randn(1, n, generator=generator)
    return {
        "Hilbert-like": 1.0 / (index[:b, None] + index[None, :]),
        "Laeuchli": laeuchli,
        "duplicates": one.repeat(b, 1),
        "zeros": torch.zeros(b, n),
    }


def norms(vector: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ours and every spelling of torch's."""
    return {
        "curvlab": lambda: ops.norm(vector),
        "torch, norm": vector.norm,
        "torch, linalg.vector_norm": lambda: torch.linalg.vector_norm(vector),
        "torch, root of dot": lambda: vector.dot(vector).sqrt(),
        "torch, vector_norm in float64": lambda: torch.linalg.vector_norm(
            vector, dtype=torch.float64
        ),
    }


def norm_times(size: Size, tried: Sequence[int]) -> list[Row]:
    """In readings of the vector."""
    vector = torch.randn(size.norm, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], object]] = {"read": lambda: read(vector), **norms(vector)}
    threads = best_threads(calls, tried)
    seconds = interleave(calls, rounds=size.rounds, threads=threads)
    return [
        row(SUBJECT, name, "norm time", "readings", f"n={size.norm}",
            quantiles(per_round_ratio(seconds[name], seconds["read"])), threads=threads[name],
            version=None if name == "curvlab" else str(torch.__version__))
        for name in calls if name != "read"
    ]  # fmt: skip


def accuracy(size: Size) -> list[Row]:
    """Norms, orthogonality after an append, and numbers that are not finite."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(size.norm, generator=generator)
    exact = float(vector.double().norm())
    figures: list[tuple[str, str, str, str, float]] = []
    for name, call in norms(vector).items():
        error = abs(float(call()) - exact) / exact
        figures.append((name, "norm error", "relative", f"n={size.norm}", error))
    b, n = size.block
    for condition in ("1e2", "1e4", "1e6"):
        basis = Basis(n, b)
        basis.extend(conditioned(b, n, float(condition), generator))
        value = orthogonality(basis.rows())
        unit = "largest |Q Q' - I|"
        figures.append(("curvlab", "orthogonality", unit, f"condition {condition}", value))
    for name, block in degenerate(b, n, generator).items():
        basis = Basis(n, b)
        basis.extend(block)
        bad = int((~torch.isfinite(basis.rows())).sum()) if len(basis) else 0
        figures.append(("curvlab", "not finite", "numbers", name, float(bad)))
        figures.append(("curvlab", "kept", "rows", name, float(len(basis))))
    return [_row(*figure) for figure in figures]


def cost(size: Size, tried: Sequence[int]) -> list[Row]:
    """A block added to rows that are there, in units of reading those once."""
    n, held, added = size.long
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros(held + added, ops.padded(n))
    rows[:held, :n] = torch.randn(held, n, generator=generator)
    start = rows[:held, :n].contiguous()
    ops.orthonormalise_block_(rows[:0], start)
    rows[:held, :n] = start
    block = torch.randn(added, n, generator=generator) + 3 * start[:added].sum(dim=0)

    def ours() -> Tensor:
        new = block.clone()
        ops.orthonormalise_block_(rows[:held], new)
        return new

    def one_by_one() -> Tensor:
        new = block.clone()
        for i in range(added):
            ops.orthonormalise_(rows[: held + i], new[i])
            rows[held + i, :n] = new[i]
        return new

    def modified() -> Tensor:
        new = block.clone()
        for i in range(added):
            for other in (*start, *new[:i]):
                new[i] -= torch.dot(new[i], other) * other
            new[i] /= new[i].norm()
        return new

    def qr() -> Tensor:
        columns: Tensor = torch.linalg.qr(torch.cat([start, block]).T).Q
        return columns.T[held:]

    def textbook() -> Tensor:
        new = block.clone()
        for _ in range(2):  # BCGS2 around CholeskyQR2
            new.addmm_(new @ start.T, start, alpha=-1)
            for _ in range(2):
                factor = torch.linalg.cholesky(new @ new.T)
                new = torch.linalg.solve_triangular(factor, new, upper=False)
        return new

    calls: dict[str, Callable[[], Tensor]] = {
        TEXTBOOK: textbook,
        "curvlab, block": ours,
        "curvlab, one by one": one_by_one,
        "one pass of modified Gram-Schmidt": modified,
        "torch QR of all rows": qr,
    }
    found, x = [], f"n={n} held={held} added={added}"
    right: dict[str, Callable[[], object]] = {}
    for name, call in calls.items():
        off = orthogonality(torch.cat([start, call()]))
        version = version_of("curvlab") if name.startswith("curvlab") else str(torch.__version__)
        found.append(_row(name, "orthogonality", "largest |Q Q' - I|", x, off, version))
        if off <= WRONG:
            right[name] = call
    right = {"read": lambda: read(start), **right}
    threads = best_threads(right, tried)
    seconds = interleave(right, rounds=size.rounds, threads=threads)
    for name in list(right)[1:]:
        spread = quantiles(per_round_ratio(seconds[name], seconds["read"]))
        version = version_of("curvlab") if name.startswith("curvlab") else str(torch.__version__)
        entry = row(
            SUBJECT, name, "time", "reads of the rows", x, spread, threads=threads[name],
            version=version,
        )  # fmt: skip
        found.append(entry)
    if TEXTBOOK in right and "curvlab, block" in right:
        ratio = quantiles(per_round_ratio(seconds[TEXTBOOK], seconds["curvlab, block"]))
        found.append(
            row(SUBJECT, "curvlab, block", "speed", f"x {TEXTBOOK}", x, ratio,
                threads=threads["curvlab, block"])
        )  # fmt: skip
    return found


def _row(
    name: str, metric: str, unit: str, x: str, value: float, version: str | None = None
) -> Row:
    threads = torch.get_num_threads()
    return row(SUBJECT, name, metric, unit, x, value, threads=threads, version=version)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1], help=TRIED)
    parser.add_argument("--out", type=Path, help="write the rows to this .csv or .json")
    options = parser.parse_args(arguments)
    most = max(options.threads)
    print(environment(most))
    size = SIZES[options.size]
    with pinned_threads(most):
        rows = accuracy(size) + cost(size, options.threads) + norm_times(size, options.threads)
    if options.size == "small":  # shorter blocks than the target's
        rows = as_small(rows)
    lines = [
        [entry.contender, str(entry.x), threads_of(entry), entry.metric,
         f"{entry.p50:.2g} {entry.unit}"]
        for entry in rows
    ]  # fmt: skip
    print(format_table(["way", "of", "threads", "figure", "median"], lines))
    if options.out:
        print(f"rows: {write_rows(options.out, rows)}")
    return rows


if __name__ == "__main__":
    main()
