"""Hand-written PTX, run on numpy arrays: the arrays are the kernel's pointer parameters."""

from fractions import Fraction

import numpy as np
import pytest
from curvlab_kernels.audit.ptx.memory import GlobalMemory
from curvlab_kernels.audit.ptx.program import parse
from curvlab_kernels.audit.ptx.scheduler import Executable

LANES = 32
# Of the tests of users' kernels; the others are run by `make test-slow`.
ARCHITECTURES = [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 100))]
STORE = "mad.wide.u32 %w0, %t, 4, %a0; st.global.b32 [%w0], %r1;"


def program(body: str, parameters: int, threads: int = 32, shared: int = 0) -> str:
    """A kernel whose first lines put the parameters in %a0, %a1, ... and the thread in %t."""
    names = ", ".join(f".param .u64 k_param_{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 %a{i}, [k_param_{i}];" for i in range(parameters))
    return f"""
        .version 8.0
        .target sm_80
        .shared .align 16 .b8 buffer[{max(shared, 16)}];
        .visible .entry k({names}) .reqntid {threads}
        {{
        .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>, %t; .reg .b64 %d<16>, %a<8>, %w<8>;
        {loads}
        mov.u32 %t, %tid.x;
        {body}
        ret;
        }}
    """


def run(body, *arrays, threads=32, blocks=1, shared=0, **options):
    """Execute a body and return the report; raises what the interpreter raises."""
    code = Executable(parse(program(body, len(arrays), threads, shared)))
    spans = [(array.ctypes.data, array.nbytes) for array in arrays]
    values = [array.ctypes.data for array in arrays]
    return code.run((blocks, 1, 1), values, GlobalMemory(spans), **options)


def lanewise(instruction: str, kinds: str, *inputs: np.ndarray) -> np.ndarray:
    """Lane ``i`` computes ``instruction`` of element ``i`` of the inputs.

    ``kinds`` names the types of result and inputs, such as ``"s32 s32 s64"``; the instruction has
    ``{0}`` for its result and ``{1}``, ``{2}``, ... for its inputs.
    """
    types = kinds.split()
    stems = {"16": "h", "32": "r", "64": "d"}
    names = [f"%{stems[kind[1:]]}{i}" for i, kind in enumerate(types)]
    result = np.zeros(len(inputs[0]), f"u{int(types[0][1:]) // 8}")
    assert len(result) == 32
    lines = []
    for i, kind in enumerate(types):
        size = int(kind[1:]) // 8
        lines.append(f"mad.wide.u32 %w{i}, %t, {size}, %a{i};")
        if i:
            lines.append(f"ld.global.b{8 * size} {names[i]}, [%w{i}];")
    lines.append(instruction.format(*names))
    lines.append(f"st.global.b{types[0][1:]} [%w0], {names[0]};")
    stored = [each.view(f"u{each.dtype.itemsize}") for each in inputs]
    report = run("\n".join(lines), result, *stored)
    assert not report.findings
    kind = {"s": "i", "u": "u", "b": "u", "f": "f"}[types[0][0]]
    return result.view(f"{kind}{result.dtype.itemsize}")


def integers(kind: str, seed: int) -> np.ndarray:
    """All corners of a type, and random numbers."""
    dtype = np.dtype(("i" if kind[0] == "s" else "u") + str(int(kind[1:]) // 8))
    limits = np.iinfo(dtype)
    corners = [0, 1, 2, 3, 31, limits.max, limits.max - 1, limits.min, limits.min + 1]
    rng = np.random.default_rng(seed)
    rest = rng.integers(limits.min, limits.max, LANES - len(corners), dtype, endpoint=True)
    return rng.permutation(np.concatenate([np.array(corners, dtype), rest]))


def floats(dtype, seed: int) -> np.ndarray:
    """Magnitudes from subnormal to large, signs, zeros."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-12, 12, LANES)
    values = (rng.standard_normal(LANES) * 2.0**exponents).astype(dtype)
    values[:3] = 0.0, -0.0, np.finfo(dtype).smallest_subnormal
    return values


def nearest(exact: Fraction, dtype) -> float:
    """The float nearest to a fraction, ties to even."""
    guess = dtype(float(exact))
    around = [guess, np.nextafter(guess, dtype(np.inf)), np.nextafter(guess, dtype(-np.inf))]
    finite = [each for each in around if np.isfinite(each)]
    bits = f"u{np.dtype(dtype).itemsize}"
    return min(
        finite, key=lambda x: (abs(Fraction(float(x)) - exact), int(np.array(x).view(bits)) & 1)
    )


def numbers(count=32):
    return np.arange(count, dtype=np.uint32)


def finding(report):
    (text,) = report.findings
    return text
