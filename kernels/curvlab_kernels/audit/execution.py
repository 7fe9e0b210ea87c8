"""Every agreement check from compiled PTX: ``python -m curvlab_kernels.audit.execution``.

For sm_80, sm_90 and sm_100. It fails on wrong numbers, accesses out of bounds or not aligned,
shared memory read before it is written, races in shared or global memory, divergent barriers and
partial shuffles; then it prints the model of issue and byte times (``cost``).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from curvlab_kernels.audit.agreement import Check, checks
from curvlab_kernels.audit.cost import lines
from curvlab_kernels.audit.ptx import Fault, UnknownInstruction, executed
from curvlab_kernels.audit.report import ARCHITECTURES, available
from curvlab_kernels.formats import LEVELS

SIZES = (500_003, 4_000_003)


def chosen(architecture: int, only: str = "") -> Iterator[Check]:
    """The checks whose dtypes the architecture has."""
    missing = [str(d)[6:] for d in LEVELS if not available(d, architecture)]
    for check in checks():
        if only in check.name and not any(name in check.name for name in missing):
            yield check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; returns the number of failures."""
    parser = argparse.ArgumentParser(
        prog="curvlab_kernels.audit.execution",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--n", type=int, nargs="*", default=SIZES, help="columns of the cost model")
    options = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(True)  # which also fills torch.empty with NaN
    failed = 0
    for architecture in options.arch:
        ran = launches = instructions = barriers = 0
        for check in chosen(architecture, options.only):
            ran += 1
            with executed(architecture) as reports:
                try:
                    check.run(torch.device("cpu"))
                except (Fault, AssertionError, UnknownInstruction) as error:
                    failed += 1
                    print(f"FAIL sm_{architecture} {check.name}: {error}", flush=True)
            launches += len(reports)
            instructions += sum(sum(report.issued.values()) for report in reports)
            barriers += sum(report.barriers for report in reports)
        print(
            f"sm_{architecture}: {ran} checks, {launches} launches, {instructions:,} warp "
            f"instructions, {barriers:,} barriers executed",
            flush=True,
        )
    print(f"{failed} failed")
    for n in options.n:
        print("\nMicroseconds by the model of audit/cost.py (not measured)")
        for line in lines(tuple(options.arch), n):
            print(line, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
