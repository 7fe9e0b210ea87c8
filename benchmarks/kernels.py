"""GPU kernels by their compiled code: is memory the limit, or issuing instructions?

    python -m benchmarks.kernels [--size small|full] [--machines A100 H100 B200] [--out FILE.csv]

Projections off 20 int8 rows, executed from PTX without a GPU (:mod:`curvlab_kernels.audit.cost`):
the time of issuing the instructions over that of moving the bytes. A model, not a measurement; its
assumptions stand in that module.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from curvlab_kernels.audit.cost import MACHINES, cost, operations

from benchmarks.measure import Row, as_small, format_table, row, write_rows

SIZES = {"small": (100_000,), "full": (500_000, 4_000_000)}
ROWS = 20
NUMBERS = {machine.name: architecture for architecture, machine in MACHINES.items()}


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--machines", nargs="+", choices=NUMBERS, default=list(NUMBERS))
    parser.add_argument("--out", type=Path, help="write the rows to this .csv or .json")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for n in SIZES[options.size]:
        for name, operation in operations(n, ROWS, torch.int8).items():
            for machine in options.machines:
                found = cost(operation, NUMBERS[machine])
                rows.append(
                    row("kernels", f"{name}, int8", "issue over byte time", "model",
                        f"{machine} P={n}", found.issue / found.moved, threads=1)
                )  # fmt: skip
    rows = as_small(rows) if options.size == "small" else rows
    lines = [[entry.contender, str(entry.x), f"{entry.p50:.2f}"] for entry in rows]
    print(format_table(["operation", "of", "issue over byte time"], lines))
    if options.out:
        print(f"rows: {write_rows(options.out, rows)}")
    return rows


if __name__ == "__main__":
    main()
