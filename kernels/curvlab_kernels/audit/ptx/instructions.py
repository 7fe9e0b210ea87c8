"""The table of instructions. What is not in it is an error, never skipped."""

from curvlab_kernels.audit.ptx import arithmetic, bits, comparisons, matrices, movement, warps
from curvlab_kernels.audit.ptx.arithmetic import Build
from curvlab_kernels.audit.ptx.conversions import convert
from curvlab_kernels.audit.ptx.machine import Step
from curvlab_kernels.audit.ptx.program import Instruction, Program

TABLE: dict[str, Build] = (
    arithmetic.TABLE
    | bits.TABLE
    | comparisons.TABLE
    | {
        "cvt": convert,
        "mov": movement.move,
        "ld": movement.load,
        "st": movement.store,
        "cp": movement.copy,
        "createpolicy": movement.policy,
        "ldmatrix": matrices.matrix,
        "stmatrix": matrices.matrix,
        "mma": matrices.multiply,
        "shfl": warps.shuffle,
        "bar": warps.warp_barrier,  # a block's barrier is the scheduler's
        "redux": warps.reduce,
        "trap": warps.trap,
        "atom": movement.atomic,
        "red": movement.atomic,
    }
)


def step(program: Program, instruction: Instruction) -> Step:
    """What executes ``instruction``."""
    build = TABLE.get(instruction.parts[0])
    if build is None:
        raise instruction.unknown()
    try:
        return build(program, instruction)
    except ValueError as error:
        raise instruction.unknown(f"cannot be read: {error}") from error
