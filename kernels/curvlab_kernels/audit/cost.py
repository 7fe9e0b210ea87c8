"""Is a kernel limited by memory or by issuing instructions? A model, from executed PTX.

A few blocks of every launch are executed, spread over the grid; what they issue, times the number
of blocks, is the launch's warp instructions. Two times are compared:

- bytes: what the launch moves (``model.traffic``) over the memory's bandwidth,
- issue: warp instructions over the schedulers' rate, one per clock and scheduler, four schedulers
  per SM; or, if longer, the float64 instructions, or the conversions between integers and floats
  or from and to float64, over the rates of the units that do these.

Assumptions: blocks cost the same wherever they lie; every SM is busy to the end; PTX stands for
SASS one to one, except that 64-bit integers take two instructions, and moves that make a register
pair of two registers, or the reverse, take none; nothing waits for latency. A
ratio of issue to bytes above one says that memory cannot be the limit, one well below says that
it can. These are no measurements.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvlab_kernels import _triton
from curvlab_kernels._triton.launch import Launch, handed_to
from curvlab_kernels.audit.model import BANDWIDTH, named, traffic
from curvlab_kernels.audit.ptx.launching import execute_launch
from curvlab_kernels.formats import LEVELS, padded

SAMPLED = 12  # blocks of a launch
CONVERSIONS = 16  # per SM and clock; newer ones may have more


@dataclass(frozen=True, slots=True)
class Machine:
    """SMs, clock in GHz, and float64 operations per SM and clock."""

    name: str
    multiprocessors: int
    clock: float
    doubles: int


MACHINES = {
    80: Machine("A100", 108, 1.41, 32),
    90: Machine("H100", 132, 1.755, 64),
    100: Machine("B200", 148, 1.85, 64),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Model times of an operation in microseconds."""

    issue: float
    moved: float


def cost(operation: Callable[[], object], architecture: int) -> Cost:
    """Both times of all launches of ``operation``, which finds its tensors on the CPU."""
    machine, costs = MACHINES[architecture], []

    def run(launch: Launch) -> None:
        given = named(launch)
        if given.get(
            "share"
        ):  # blocks left out have not written what decides: say that all is left
            given["before"].fill_(1.0)
            given["after"].fill_(1.0)
        report = execute_launch(launch, architecture, races=False, order=_sample)
        share = launch.programs / report.programs
        slots = sum(count * _slots(opcode) for opcode, count in report.issued.items()) * share
        doubles = sum(count for opcode, count in report.issued.items() if _double(opcode)) * share
        converted = sum(n for opcode, n in report.issued.items() if _converts(opcode)) * share
        rate = machine.multiprocessors * machine.clock * 1e3  # per microsecond
        units = max(doubles * 32 / machine.doubles, converted * 32 / CONVERSIONS)
        issue = max(slots / 4, units) / rate
        costs.append(Cost(issue, traffic(launch).total() / BANDWIDTH[architecture] / 1e3))

    with handed_to(run):
        operation()
    return Cost(sum(each.issue for each in costs), sum(each.moved for each in costs))


def _sample(blocks: int) -> list[int]:
    return sorted({int(each) for each in np.linspace(0, blocks - 1, min(blocks, SAMPLED))})


_MOVES = ("ld", "st", "mov", "cvt")


def _slots(opcode: str) -> int:
    parts = opcode.split(".")
    if opcode == "mov.b64":
        return 0
    return 2 if parts[-1] in ("s64", "u64", "b64") and parts[0] not in _MOVES else 1


def _double(opcode: str) -> bool:
    parts = opcode.split(".")
    return "f64" in parts and parts[0] not in ("ld", "st", "mov", "selp")


def _converts(opcode: str) -> bool:
    """Between integer and float, or from or to float64; between narrow floats is another unit's."""
    parts = opcode.split(".")
    kinds = {part[0] for part in parts[-2:]}
    return parts[0] == "cvt" and ("f64" in parts or ("f" in kinds and bool(kinds & {"s", "u"})))


def _zeros(m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Memory that is not touched until it is read."""
    return torch.from_numpy(np.zeros((m, n), f"u{dtype.itemsize}")).view(dtype)


def operations(n: int, m: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Projections of a vector and of 150 tensors off ``m`` rows."""
    rows = _zeros(m, padded(n), dtype)
    scales = torch.ones(m, -(-padded(n) // 64)) if dtype in LEVELS else None
    tensors = [piece.clone() for piece in torch.split(torch.zeros(n), -(-n // 150))]
    return {
        "project": lambda: _triton.project_(rows, torch.zeros(n), None, scales),
        "project list": lambda: _triton.project_list_(rows, tensors, None, scales),
    }


def lines(architectures: tuple[int, ...], n: int, m: int = 20) -> Iterator[str]:
    """A table: microseconds of issue and of bytes, and their ratio, on each machine."""
    heads = "  ".join(f"{MACHINES[each].name:>21}" for each in architectures)
    yield f"{'operation':14} {'basis':11} {'n':>10} {'m':>4}  {heads}   issue / bytes = ratio"
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e5m2):
        for name, operation in operations(n, m, dtype).items():
            found = [cost(operation, each) for each in architectures]
            times = "  ".join(
                f"{each.issue:7.1f} /{each.moved:7.1f} ={each.issue / each.moved:4.2f}"
                for each in found
            )
            yield f"{name:14} {str(dtype)[6:]:11} {n:10,} {m:4}  {times}"
