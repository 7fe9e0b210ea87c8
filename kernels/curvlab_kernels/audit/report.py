"""What can be known of the GPU kernels without a GPU: ``python -m curvlab_kernels.audit``.

Every kernel variant that the launchers use is compiled for sm_80, sm_90 and sm_100 with the
compiler and assembler in the triton wheel, and the result is read back. The audit fails on

- register spills (local memory in the machine code),
- a load of the basis narrower than 128 bits, in the main loop or the tail, for any length,
- 32-bit arithmetic that could overflow on the way to an address of the basis, by interval
  arithmetic at a size beyond 2^31 elements.

It prints registers, shared memory, loads of the basis, bytes that can be in flight per SM, and for
every operation the bytes it moves against the least possible, with the time they take at a given
bandwidth. Those times are arithmetic, not measurements:
``python -m curvlab_kernels.audit.gpu_check`` takes the measurements.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from curvlab_kernels._triton.launch import Launch
from curvlab_kernels.audit.cases import DTYPES, LONG, Case, cases
from curvlab_kernels.audit.machine_code import (
    BASIS,
    Compiled,
    addresses,
    compile_launch,
    key,
    signature,
)
from curvlab_kernels.audit.model import BANDWIDTH, in_flight, traffic
from curvlab_kernels.formats import LEAST_CAPABILITY

ARCHITECTURES = (80, 90, 100)
QUICK = ("project", "SGD step", "orthonormalise, 100 rows")
QUICK_DTYPES = (torch.float32, torch.int8)
_FAR_ENOUGH = 2**31  # elements of the basis


@dataclass(frozen=True, slots=True)
class Finding:
    """One kernel variant, compiled for one architecture."""

    case: Case
    launch: Launch
    code: Compiled
    errors: list[str]

    def line(self) -> str:
        """A row of the table."""
        code = self.code
        widths = " ".join(f"{count}x{bits}" for bits, count in sorted(code.basis_loads.items()))
        flight = in_flight(self.launch, code.registers, code.shared, code.architecture)
        return (
            f"{self.launch.kernel.__name__:21} {_variant(self.launch):24} "
            f"{_name(self.case.problem.dtype):13} sm_{code.architecture:<4} "
            f"{code.registers:4} {code.local_accesses:6} {code.shared:7} {widths or '-':>8} "
            f"{flight / 1024 if flight else 0:8.0f}  {'FAIL' if self.errors else 'ok'}"
        )


def available(dtype: torch.dtype, architecture: int) -> bool:
    """Whether the architecture can read the dtype."""
    return divmod(architecture, 10) >= LEAST_CAPABILITY.get(dtype, (8, 0))


def audit(chosen: Iterable[Case], architectures: Sequence[int]) -> Iterator[Finding]:
    """Compile every distinct kernel of the cases and check it; yields as it goes."""
    seen: set[tuple[str, int]] = set()
    for case in chosen:
        far = {key(launch): launch for launch in case.launches(far=True)}
        for launch in case.launches():
            for architecture in architectures:
                identity = key(launch), architecture
                if identity in seen or not available(case.problem.dtype, architecture):
                    continue
                seen.add(identity)
                code = compile_launch(launch, architecture)
                errors = code.errors() + _far_errors(far.get(identity[0]), code)
                yield Finding(case, launch, code, errors)


def _far_errors(launch: Launch | None, code: Compiled) -> list[str]:
    if launch is None:
        return ["no launch beyond 2^31 elements runs this variant: its addresses are unchecked"]
    types, _, _ = signature(launch)
    if BASIS in types and launch.arguments[0].numel() < _FAR_ENOUGH:
        return [f"its largest launch has {launch.arguments[0].numel()} elements, fewer than 2^31"]
    return addresses(launch, code.ir)


def operation_line(case: Case, bandwidths: Sequence[float]) -> str:
    """Bytes moved by an operation against the least possible, and their time in microseconds."""
    launches = case.launches()
    moved = sum(traffic(launch).total() for launch in launches)
    least = case.minimum_bytes()
    problem = case.problem
    times = " ".join(f"{moved / bandwidth / 1e3:9.1f}" for bandwidth in bandwidths)
    return (
        f"{case.name:26} {_name(problem.dtype):13} {problem.n:>11,} {problem.m:5} "
        f"{len(launches):8} {moved / 1e6:10.2f} {least / 1e6:10.2f} {moved / least:6.3f} "
        f"{times}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the audit; returns the number of failures."""
    options = _parse(arguments)
    dtypes = QUICK_DTYPES if options.quick else DTYPES
    chosen = [
        case
        for case in cases(options.n, options.m, dtypes)
        if (not options.quick or case.name in QUICK) and options.only in case.name
    ]
    bandwidths = options.bandwidth or [BANDWIDTH[architecture] for architecture in options.arch]
    print("Bytes by the model, and the microseconds they take at a bandwidth (not measured)")
    print(
        f"{'operation':26} {'basis':13} {'n':>11} {'m':>5} {'launches':>8} {'MB':>10} "
        f"{'least MB':>10} {'ratio':>6} "
        + " ".join(f"{bandwidth:>4.0f} GB/s" for bandwidth in bandwidths)
    )
    for case in chosen:
        print(operation_line(case, bandwidths))
    print("\nCompiled kernels")
    print(
        f"{'kernel':21} {'variant':24} {'basis':13} {'target':7} {'regs':>4} {'spills':>6} "
        f"{'shared':>7} {'M loads':>8} {'KB/SM':>8}"
    )
    total, failed = 0, []
    for finding in audit(chosen, options.arch):
        print(finding.line(), flush=True)
        total += 1
        if finding.errors:
            failed.append(finding)
    for finding in failed:
        for error in finding.errors:
            print(f"FAIL {finding.launch.kernel.__name__} sm_{finding.code.architecture}: {error}")
    print(f"\n{total} kernels compiled, {len(failed)} failed")
    return len(failed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="curvlab_kernels.audit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="the most used kernels only")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--n", type=int, default=LONG, help="length of the vectors")
    parser.add_argument("--m", type=int, default=20, help="rows of the basis")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument(
        "--bandwidth",
        type=float,
        nargs="+",
        help="GB/s; by default of an A100 80 GB, an H100 SXM and a B200",
    )
    return parser.parse_args(arguments)


def _variant(launch: Launch) -> str:
    constants = launch.constants
    shape = f"{constants['ROWS']}x{constants['BLOCK']} " if "ROWS" in constants else ""
    flags = [name.lower() for name, value in constants.items() if value is True]
    if constants.get("VECTORS", 1) > 1:
        flags.append(f"{constants['VECTORS']} vectors")
    if constants.get("CHUNKS") and "ROWS" in constants:
        flags.append("sums")
    return (shape + " ".join(flag for flag in flags if flag != "scaled"))[:24]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
